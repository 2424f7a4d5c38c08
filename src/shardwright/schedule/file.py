"""A schedule as a text or CSV file: one line for each pipeline rank, in order, its actions separated by blanks or commas.

::

    # 1F1B on two ranks, two micro-batches
    rank 0: F0.0 F0.1 BW0.0 BW0.1
    rank 1: F1.0 BW1.0 F1.1 BW1.1

An action is ``KIND stage.microbatch``, written without a blank, with one of the kinds of `Kind`: F, B (input gradient),
W (weight gradient), BW (both) and, for who wants to place them too, SEND_F, RECV_F, SEND_B, RECV_B. ``0F1``, ``0I1``,
``0W1`` and ``0B1`` are read as well, the cells of PyTorch's schedule files: stage, kind, micro-batch, with I the input
gradient and B the whole backward. ``rank N:`` may be left out. Empty cells, empty lines and what follows a # are
skipped. Which rank holds a stage follows from where its actions are. ``str(schedule)`` is such a text.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardwright.errors import ConfigError
from shardwright.schedule.action import Action, Kind, Schedule
from shardwright.schedule.passes import check

_OURS = re.compile(rf"({'|'.join(sorted(Kind, key=len, reverse=True))})(\d+)\.(\d+)")
_TORCH = re.compile(r"(\d+)([FIBW])(\d+)")
_LABEL = re.compile(r"\s*rank\s+(\d+)\s*[:,]")


def load_schedule(path: str | Path) -> Schedule:
    """Read a schedule and check it. Raises :class:`ConfigError` that names the line of what is wrong first."""
    schedule, lines = read_schedule(path)
    if problems := check(schedule):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{locate(problems[0], path, schedule, lines)}{more}")
    return schedule


def read_schedule(path: str | Path) -> tuple[Schedule, tuple[int, ...]]:
    """Read a schedule that may be wrong, with the line (from 1) of each rank. Raises `ConfigError` on what is no row."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"schedule file {path} cannot be read: {error}") from error
    rows: list[tuple[Action, ...]] = []
    lines: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0]
        if label := _LABEL.match(content):
            content = content[label.end() :]
            if int(label[1]) != len(rows):
                raise ConfigError(f"{path}:{number}: rank {label[1]} stands where rank {len(rows)} is due")
        elif not content.strip():
            continue
        rows.append(tuple(_action(word, f"{path}:{number}") for word in content.replace(",", " ").split()))
        lines.append(number)
    actions = [action for row in rows for action in row]
    if not actions:
        raise ConfigError(f"{path}: holds no actions; write a line for each rank, for instance F0.0 BW0.0")
    named = {action.microbatch for action in actions}
    if len(named) <= max(named):
        missing = next(m for m in range(len(named) + 1) if m not in named)
        raise ConfigError(f"{path}: no rank has micro-batch {missing}, though micro-batch {max(named)} is there")
    placement = _placement(rows, lines, path)
    return Schedule(Path(path).stem, len(placement), len(named), placement, tuple(rows)), tuple(lines)


def locate(problem: str, path: str | Path, schedule: Schedule, lines: tuple[int, ...]) -> str:
    """A problem that `check` found, with the file and line of the rank that it is about."""
    about = re.match(r"(rank|stage) (\d+)", problem)
    if about is None:
        return f"{path}: {problem}"
    rank = int(about[2]) if about[1] == "rank" else schedule.placement[int(about[2])]
    return f"{path}:{lines[rank]}: {problem}"


def _action(word: str, where: str) -> Action:
    if match := _OURS.fullmatch(word):
        return Action(Kind(match[1]), int(match[2]), int(match[3]))
    if match := _TORCH.fullmatch(word):
        kind = {"F": Kind.F, "I": Kind.B, "W": Kind.W, "B": Kind.BW}[match[2]]
        return Action(kind, int(match[1]), int(match[3]))
    raise ConfigError(f"{where}: {word!r} is no action; write for instance F0.3 (kind, stage, micro-batch)")


def _placement(rows: list[tuple[Action, ...]], lines: list[int], path: str | Path) -> tuple[int, ...]:
    holder: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            first = holder.setdefault(action.stage, rank)
            if first != rank:
                raise ConfigError(
                    f"{path}:{lines[rank]}: {action} is on rank {rank}, but line {lines[first]} has stage "
                    f"{action.stage} on rank {first}; keep a stage on one rank"
                )
    missing = next((stage for stage in range(len(holder)) if stage not in holder), None)
    if missing is not None:
        raise ConfigError(f"{path}: no rank has stage {missing}, though stage {max(holder)} is there")
    return tuple(holder[stage] for stage in range(len(holder)))
