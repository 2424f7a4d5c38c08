"""What a run writes about itself: ``metrics.jsonl`` (one JSON object a step) and TensorBoard scalars. No torch.

Rank 0 owns the writer. A number that is not finite (a loss of NaN, say) is ``null`` in the file, because JSON has no
word for it; TensorBoard gets the NaN. All seconds are wall-clock seconds, all bytes are bytes of one rank.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NotRequired, Self, TypedDict

from shardwright.errors import ConfigError, DataError

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
TENSORBOARD_FLUSH_SECONDS = 10

TENSORBOARD_TAGS: Mapping[str, str] = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "skipped": "train/skipped",
    "valid_loss": "valid/loss",
    "bits_per_byte": "valid/bits_per_byte",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "step_seconds": "speed/step_seconds",
    "data_seconds": "speed/data_seconds",
    "exposed_communication_seconds": "speed/exposed_communication_seconds",
    "exposed_tail_seconds": "speed/exposed_tail_seconds",
    "rank_skew_seconds": "speed/rank_skew_seconds",
    "attention_balance": "speed/attention_balance",
    "peak_memory_bytes": "memory/peak_bytes",
    "aux_loss": "experts/aux_loss",
    "expert_max_over_mean": "experts/max_over_mean",
    "expert_entropy": "experts/entropy",
    "dead_experts": "experts/without_tokens",
    "expert_rank_max_over_mean": "experts/rank_max_over_mean",
    "expert_bytes": "experts/bytes_sent",
    "busiest_rank_seconds": "experts/busiest_rank_seconds",
    "dropped_share": "experts/dropped_share",
    "rerouted_share": "experts/rerouted_share",
}


class StepRecord(TypedDict):
    """One line of ``metrics.jsonl``. Keys that are not required are left out of steps that have no value for them."""

    step: int
    """1 for the first update."""
    loss: float
    """Nats per token over the whole global batch, before the update."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    tokens: int
    """Valid tokens of this step's global batch (not a running total)."""
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilisation, 0 to 1; None when the chip's peak is not known."""
    step_seconds: float
    data_seconds: float
    """The part of the step that waited for input."""
    exposed_communication_seconds: float
    """The part of the step that waited for other ranks' bytes."""
    peak_memory_bytes: int
    valid_loss: NotRequired[float]
    """Nats per token on held-out text after this step's update."""
    bits_per_byte: NotRequired[float | None]
    """The same in bits per byte of held-out text."""
    rank_skew_seconds: NotRequired[float]
    """Slowest minus fastest rank, in seconds of own work."""
    slowest_rank: NotRequired[int]
    exposed_tail_seconds: NotRequired[float]
    """Waited for gradient buckets after the last backward."""
    attention_balance: NotRequired[float]
    """With context parallelism: attention work of the busiest rank over the mean, 1 is even."""
    token_splits: NotRequired[list[str]]
    """With context parallelism: how each micro-batch's tokens were split (contiguous, zigzag, by work, heads)."""
    skipped: NotRequired[bool]
    """The update was not applied (gradients were not finite)."""
    aux_loss: NotRequired[float]
    """What routers add to the loss (it is not in ``loss``): balance and z-loss, with their weights."""
    expert_max_over_mean: NotRequired[float]
    """Tokens of the busiest expert over the mean of its layer, in the worst layer."""
    expert_entropy: NotRequired[float]
    """Entropy of the choices of experts over that of even choices, in the worst layer: 1 is even."""
    dead_experts: NotRequired[int]
    """Experts without a token in this step, over all layers."""
    expert_rank_max_over_mean: NotRequired[float]
    """The same of the rank of ``ep`` whose experts have the most tokens: it sets the pace."""
    expert_bytes: NotRequired[int]
    """What rank 0 sent over the links of ``ep`` in this step, forward and backward."""
    busiest_rank_seconds: NotRequired[float]
    """Seconds of own work of the rank that worked the longest."""
    dropped_share: NotRequired[float]
    """Choices that found no room in their expert, over all choices; they were left out."""
    rerouted_share: NotRequired[float]
    """Choices that went to another expert, which had room, over all choices."""


# ------------------------------------------------------------------------------------------------- numbers


def bits_per_byte(nats_per_token: float, num_tokens: int, num_bytes: int) -> float | None:
    """A loss that does not depend on the tokenizer. None when the size of the text is not known (0 bytes)."""
    if num_bytes <= 0:
        return None
    return nats_per_token * num_tokens / (math.log(2) * num_bytes)


def peak_memory_bytes(cuda_peak_bytes: int | None = None) -> int:
    """The most memory this process has held: ``cuda_peak_bytes`` where the model is on a GPU, else resident memory."""
    if cuda_peak_bytes is not None:
        return cuda_peak_bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


@dataclass
class Throughput:
    """Tokens per second, model FLOPs utilisation and the time that is left.

    ``flops_per_token``: forward and backward of the model, recomputation not counted. ``peak_flops``: FLOP/s of all
    chips of the run together; None (a CPU, an unknown chip) makes ``mfu`` None. ``window``: how many of the last steps
    the time that is left is judged by.
    """

    flops_per_token: float = 0.0
    peak_flops: float | None = None
    window: int = 50
    tokens_per_second: float = 0.0
    mfu: float | None = None
    _seconds: deque[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._seconds = deque(maxlen=self.window)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count one step of the whole run."""
        self._seconds.append(seconds)
        self.tokens_per_second = num_tokens / seconds if seconds > 0 else 0.0
        self.mfu = self.flops_per_token * self.tokens_per_second / self.peak_flops if self.peak_flops else None

    def eta_seconds(self, num_steps_left: int) -> float | None:
        """Seconds until the end at the mean pace of the window; None before the first step."""
        if not self._seconds:
            return None
        return num_steps_left * sum(self._seconds) / len(self._seconds)


# ------------------------------------------------------------------------------------------------- the file


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, or of the one in a run folder; a torn last line is left out.

    Raises DataError if there is no such file, or if a line before the last is not a step's record.
    """
    path = Path(path)
    if path.is_dir():
        path = path / METRICS_FILE
    if not path.is_file():
        raise DataError(f"no metrics at {path}; give the folder of a training run")
    return [record for record, _ in _records(path)]


def series(records: Iterable[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the records that have a finite number under ``key``."""
    found = [(r["step"], r[key]) for r in records if isinstance(r.get(key), int | float) and math.isfinite(r[key])]
    return [step for step, _ in found], [float(value) for _, value in found]


def _records(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """(record, its line) for each whole line. A killed writer leaves at most one torn line, the last."""
    torn: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if torn is not None:
                raise DataError(
                    f"{path}, line {torn}, is not a step's record; remove the line, or start a new run folder"
                )
            record = _parse(line)
            if record is None:
                torn = number
            else:
                yield record, line


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _keep_until(path: Path, step: int) -> int:
    """Rewrite ``path`` without later steps and without a torn line, in one replacement; returns the last step kept."""
    last = -1
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as out:
        for record, line in _records(path):
            if record["step"] <= step:
                last = max(last, record["step"])
                out.write(line)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(path)
    return last


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsWriter:
    """Appends records to ``run_dir/metrics.jsonl``, each flushed at once, and scalars to ``run_dir/tensorboard``.

    ``resume_step``: the last step of the checkpoint that the run goes on from (0: none, from the start). Lines of later
    steps, which a run wrote after its last checkpoint, are dropped first, so each step is there once. None: a new run;
    ConfigError if the folder has records already. ``say`` is told once if TensorBoard is wanted but not installed.
    """

    def __init__(
        self,
        run_dir: Path | str,
        resume_step: int | None = None,
        *,
        tensorboard: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step = -1
        if self.path.exists():
            if resume_step is None:
                self._refuse_overwriting()
            self._last_step = _keep_until(self.path, resume_step or -1)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        self._board = None
        if tensorboard:
            folder = Path(run_dir) / TENSORBOARD_FOLDER
            self._board = _open_tensorboard(folder, resume_step, say or _to_stderr)

    def _refuse_overwriting(self) -> None:
        if next(_records(self.path), None) is not None:
            raise ConfigError(
                f"{self.path.parent} holds the metrics of another run; resume that run, or give another run folder"
            )

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the `StepRecord` of one step (or the part of it that there is). Steps must grow."""
        step = int(record["step"])
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()
        self._last_step = step
        if self._board is not None:
            values = {tag: record.get(key) for key, tag in TENSORBOARD_TAGS.items()}
            self._board.write(step, {tag: float(value) for tag, value in values.items() if value is not None})

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ------------------------------------------------------------------------------------------------- TensorBoard


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _TensorBoard:
    """Scalars into an event file, with tensorboard's own writer: no torch, no TensorFlow."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=TENSORBOARD_FLUSH_SECONDS)
        if resume_step is not None:  # hides what an earlier event file has from here on
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


def _open_tensorboard(folder: Path, resume_step: int | None, say: Callable[[str], None]) -> _TensorBoard | None:
    try:
        return _TensorBoard(folder, resume_step)
    except ImportError as error:
        say(f"no TensorBoard files ({error}); `pip install tensorboard` to have them")
        return None
