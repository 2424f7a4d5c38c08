"""``verify --matrix``: many layouts of one model, made small, each against one process; kept, resumed, reported.

Layouts that need as many ranks share a launch: the ranks run one after another and send what they saw, this process
compares it meanwhile. Each answer is a line of ``results.jsonl`` as soon as it is known. A later run takes over what
passed with the same code and the same configuration.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger
from shardwright.core.run_config import RunConfig
from shardwright.errors import ShardwrightError
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.verify.layouts import SEQUENCE, Plan, plan_layouts, small_model
from shardwright.verify.parity import (
    Verification,
    comparable,
    compare,
    dry_step,
    first_of_each_stage,
    trace_steps,
    train_sampler,
    whole_batches,
)
from shardwright.verify.reference import Trace, reference_run
from shardwright.verify.routing import rounds_choices

LAYOUTS_AT_ONCE = 16
"""Layouts of one launch: each has groups of its own, which gloo keeps until the ranks end."""
SECONDS_FOR_A_LAYOUT = 180.0
CHECKS = ("loss", "gradients", "parameters", "moments", "norm", "replicas")


@dataclass(frozen=True)
class Row:
    """The answer for one layout. ``error``: what ended the ranks; then there is nothing to compare.

    ``bytes``: axis -> predicted, dry run, measured, of rank 0 in one step. ``kept``: taken over from an earlier run.
    """

    key: str
    layout: str
    ranks: int
    passed: bool
    seconds: float
    result: dict[str, Any] = field(default_factory=dict)
    bytes: dict[str, list[int]] = field(default_factory=dict)
    error: str = ""
    kept: bool = False


@dataclass(frozen=True)
class Matrix:
    """All rows, in the order of the plan."""

    model: str
    rows: list[Row]
    plan: Plan
    seconds: float

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The keys of one verification, each the worst of all layouts (bytes: the sum), and every layout's own."""
        answers = [row.result for row in self.rows if row.result]
        worst = max(answers, key=_badness, default=None)
        shown: dict[str, Any] = {name: _worst(answers, name) for name in CHECKS}
        totals = {
            name: sum(answer["ledger"][name] for answer in answers)
            for name in ("predicted_bytes", "dryrun_bytes", "measured_bytes")
        }
        return {
            "passed": self.passed,
            "model": self.model,
            **shown,
            "ledger": totals | {"equal": bool(answers) and all(answer["ledger"]["equal"] for answer in answers)},
            "worst": "" if worst is None else f"{worst['layout']}: {worst['worst']}",
            "layouts": [asdict(row) for row in self.rows],
            "pairs": self.plan.num_pairs,
            "refused_pairs": [
                {"pair": [f"{name}={value}" for name, value in pair], "reason": reason}
                for pair, reason in self.plan.refused.items()
            ],
            "seconds": self.seconds,
        }


def _badness(answer: dict[str, Any], checks: Sequence[str] = CHECKS) -> float:
    """How much of its tolerance the worst of ``checks`` takes; above 1 it fails."""
    shares: list[float] = [answer[name]["max_rel_diff"] / max(answer[name]["tolerance"], 1e-300) for name in checks]
    return max(shares)


def _worst(answers: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The comparison that takes most of its tolerance, with its layout."""
    one = max(answers, key=lambda answer: _badness(answer, (name,)), default=None)
    return None if one is None else {**one[name], "layout": one["layout"]}


# -- what is run -------------------------------------------------------------------------------------------


def small_config(config: RunConfig, folder: Path, layers: int = 8) -> RunConfig:
    """The run with its model made small, on documents of 1 to 60 words that are made in ``folder``."""
    _write_documents(folder / "documents.jsonl")
    data = {"sources": str(folder / "documents.jsonl"), "seq_len": SEQUENCE, "cache": str(folder / "datasets")}
    table = config.to_table()
    table["model"] = small_model(config.model, layers).model_dump(exclude_none=True)
    table["data"] = {**data, "cross_documents": config.data.cross_documents}
    table["optim"] = {**table["optim"], "warmup_steps": min(config.optim.warmup_steps, 2), "delay_after": 1}
    table["train"] = {"steps": 10, "threads": 1, "seed": config.train.seed, "run_dir": str(folder / "run")}
    return RunConfig.of({**table, "layout": "dp=1"})


def _write_documents(path: Path) -> None:
    if path.is_file():
        return
    rng = random.Random(3)
    words = [rng.choice("bdfgklmnprst") + rng.choice("aeiou") + rng.choice("lmnrst") for _ in range(80)]
    texts = (" ".join(rng.choices(words, k=rng.choice((1, 5, 12, 60)))) for _ in range(600))
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".partial")
    aside.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    aside.replace(path)


def code_hash() -> str:
    """Of every source file of the package."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()


def _key(code: str, config: RunConfig, steps: int) -> str:
    table = config.to_table()
    table["data"] = {name: value for name, value in table["data"].items() if name not in ("sources", "cache")}
    del table["train"]["run_dir"]
    return hashlib.sha256(json.dumps([code, table, steps], sort_keys=True).encode()).hexdigest()[:24]


def reference_key(config: RunConfig) -> str:
    """Equal for configurations that one reference run serves: the same run and samples of a step, in the same precision.

    Routers may balance over a micro-batch of all replicas, and experts may have a capacity: then these count too.
    """
    layout, table = config.layout, config.to_table()
    del table["layout"]
    experts = (layout.dp * layout.micro_batch, layout.moe) if config.model.moe is not None else ()
    precision = "bf16" if layout.precision == "bf16" else "fp64"
    return str((table, layout.global_batch, precision, layout.delayed_update, experts))


# -- one launch --------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """What one rank saw of one layout."""

    index: int
    trace: Trace
    dry: Ledger | None
    seconds: float


def run_layouts(
    env: RankEnv, data: PreparedData, configs: Sequence[RunConfig], steps: int, mutations: Sequence[str | None]
) -> None:
    """Trace each configuration in turn, and its dry run on the first rank of each stage; sends what was seen."""
    if env.world_size > 1:
        init_process_group(env)
    for index, (config, mutation) in enumerate(zip(configs, mutations, strict=True)):
        start = time.perf_counter()
        env.note(f"layout {config.layout}")
        mesh = Mesh.distributed(config.layout, env.rank, env.timeout_s) if env.world_size > 1 else Mesh.solo()
        trace = trace_steps(mesh, config, data, steps, mutation)
        first = env.rank in first_of_each_stage(config.layout)
        dry = dry_step(config, env.rank, trace.ledgers[-1].dispatches) if first else None
        env.send(_Seen(index, trace, dry, time.perf_counter() - start))


class Runner:
    """Runs configurations on real ranks and compares each with one process; what several share is computed once."""

    def __init__(self, data: PreparedData, steps: int, timeout_s: float = 120.0) -> None:
        self._data, self._steps, self._timeout_s = data, steps, timeout_s
        self._references: dict[str, Trace] = {}

    def run(
        self,
        configs: Sequence[RunConfig],
        mutations: Sequence[str | None],
        done: Callable[[int, Verification | str, float], None],
    ) -> None:
        """``done(index, answer, seconds)`` for each; the answer is a text where the ranks ended with an error.

        All need the same number of ranks. After an error the rest is run on new ranks.
        """
        next_one = 0
        while next_one < len(configs):
            part = slice(next_one, next_one + LAYOUTS_AT_ONCE)
            answered = self._launch(configs[part], mutations[part], next_one, done)
            next_one += answered

    def _launch(
        self,
        configs: Sequence[RunConfig],
        mutations: Sequence[str | None],
        first: int,
        done: Callable[[int, Verification | str, float], None],
    ) -> int:
        """One launch; how many of its configurations have their answer then."""
        seen: dict[int, dict[int, _Seen]] = {}
        answered = 0
        world = configs[0].layout.world_size

        def on_message(rank: int, message: _Seen) -> None:
            nonlocal answered
            ranks = seen.setdefault(message.index, {})
            ranks[rank] = message
            if len(ranks) == world:
                every = [ranks[each] for each in range(world)]
                del seen[message.index]
                done(first + message.index, self._compare(configs[message.index], every), every[0].seconds)
                answered += 1

        try:
            run_local_ranks(
                run_layouts,
                world,
                (self._data, configs, self._steps, mutations),
                threads_per_rank=1,
                timeout_s=self._timeout_s,
                time_limit_s=SECONDS_FOR_A_LAYOUT * len(configs),
                on_message=on_message,
            )
        except ShardwrightError as error:
            done(first + answered, str(error), 0.0)
            answered += 1
        return answered

    def _compare(self, config: RunConfig, seen: Sequence[_Seen]) -> Verification:
        key, traces = reference_key(config), [one.trace for one in seen]
        batches = whole_batches(train_sampler(config, self._data, 0))
        if rounds_choices(config):  # it follows these ranks' choices
            reference = reference_run(config, batches, self._steps, traces)
        else:
            if key not in self._references:
                self._references[key] = reference_run(config, batches, self._steps)
            reference = self._references[key]
        return compare(config, traces, reference, [one.dry for one in seen if one.dry is not None])


# -- the matrix --------------------------------------------------------------------------------------------


def verify_matrix(
    config: RunConfig,
    folder: Path,
    steps: int = 3,
    *,
    most_ranks: int = 8,
    least: int = 60,
    on_row: Callable[[int, int, Row | str], None] = lambda done, total, what: None,
) -> Matrix:
    """Verify a covering set of layouts; answers are kept in ``folder``. ``on_row(done, total, row or what is next)``."""
    start = time.perf_counter()
    small = small_config(config, folder)
    on_row(0, 0, "choosing layouts")
    plan = plan_layouts(small, most_ranks, least)
    code, known = code_hash(), _kept(folder / "results.jsonl")
    configs = [comparable(small.model_copy(update={"layout": layout})) for layout in plan.layouts]
    keys = [_key(code, one, steps) for one in configs]
    rows: dict[str, Row] = {key: known[key] for key in keys if key in known}
    for row in rows.values():
        on_row(len(rows), len(keys), row)
    runner = Runner(prepare_data(small), steps, config.train.timeout_s)
    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n" if file.tell() else "")  # the last line may be torn
        for chosen in _by_world([(key, one) for key, one in zip(keys, configs, strict=True) if key not in rows]):

            def keep(index: int, answer: Verification | str, seconds: float, chosen: Any = chosen) -> None:
                key, one = chosen[index]
                rows[key] = row = make_row(key, one.layout, answer, seconds)
                file.write(json.dumps(asdict(row)) + "\n")
                file.flush()
                on_row(len(rows), len(keys), row)

            runner.run([one for _, one in chosen], [None] * len(chosen), keep)
    return Matrix(small.model.name, [rows[key] for key in keys], plan, time.perf_counter() - start)


def make_row(key: str, layout: Layout, answer: Verification | str, seconds: float) -> Row:
    """A row from the answer of a `Runner`."""
    if isinstance(answer, str):
        return Row(key, str(layout), layout.world_size, False, seconds, error=answer)
    bytes_ = bytes_by_axis(answer.predicted, answer.dryrun, answer.measured)
    return Row(key, str(layout), layout.world_size, answer.passed, seconds, answer.to_json(), bytes_)


def bytes_by_axis(*ledgers: Ledger) -> dict[str, list[int]]:
    """Axis -> bytes in each ledger, without axes over which nothing is sent."""
    totals = [Counter[str]() for _ in ledgers]
    for total, ledger in zip(totals, ledgers, strict=True):
        for entry in ledger.entries.values():
            total[entry.axis] += entry.bytes
    return {axis: [total[axis] for total in totals] for axis in sorted({axis for total in totals for axis in total})}


def _by_world(items: Iterable[tuple[str, RunConfig]]) -> Iterator[list[tuple[str, RunConfig]]]:
    def ranks(item: tuple[str, RunConfig]) -> int:
        return item[1].layout.world_size

    for _, group in groupby(sorted(items, key=ranks), ranks):
        yield list(group)


def _kept(path: Path) -> dict[str, Row]:
    """The rows of an earlier run that passed; a torn last line is left out."""
    found: dict[str, Row] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = Row(**{**json.loads(line), "kept": True})
            except (ValueError, TypeError):
                continue
            if row.passed:
                found[row.key] = row
    return found
