"""What a run shows while it trains: a live bar in a terminal, readable lines in a log, nothing when quiet. No torch.

The process that started the ranks draws; ``update`` takes the record of each step as it arrives.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

from shardwright.train.metrics import Throughput
from shardwright.train.units import format_bytes, format_count, format_duration, format_seconds, sparkline

CURVE_WIDTH = 24
CURVE_STEPS = 160  # the small curve is that of the last steps
LOG_EVERY_SECONDS = 10.0


class TrainDisplay:
    """A context manager: ``update(record)`` for each step, ``message(text)`` for everything else worth a line.

    In a terminal a bar with the numbers below it is redrawn in place; messages scroll by above. Elsewhere (a file, a
    pipe) a plain line is printed for the first step, the last, each evaluation, and at most every ``log_every_seconds``
    otherwise. ``quiet`` prints nothing at all. ``start_step``: the last step that is done already (resume).
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        console: Console | None = None,
        *,
        quiet: bool = False,
        log_every_seconds: float = LOG_EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self.state = _State(total_steps, start_step, clock)
        self.quiet, self.log_every_seconds, self._clock = quiet, log_every_seconds, clock
        live = self.console.is_interactive and not quiet
        self._bar = _TrainProgress(self.state, self.console) if live else None
        self._logged_at = -math.inf
        self._logged_step = -1

    def __enter__(self) -> Self:
        self.state.begin()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self.state.record and self._logged_step != self.state.step:
            self._log()

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a step's `StepRecord`; keys may be missing."""
        self.state.add(record)
        if self._bar is not None:
            self._bar.advance_to(self.state.step)
            return
        due = self._clock() - self._logged_at >= self.log_every_seconds
        if due or record.get("valid_loss") is not None or self.state.step == self.state.total_steps:
            self._log()

    def message(self, text: str) -> None:
        """A line of its own, above the bar."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _log(self) -> None:
        self._logged_at, self._logged_step = self._clock(), self.state.step
        if not self.quiet:
            self.console.print(self.state.log_line(), markup=False, highlight=False, soft_wrap=True)


class _State:
    """The last record, what is remembered of earlier ones, and the pace."""

    def __init__(self, total_steps: int, start_step: int, clock: Callable[[], float]) -> None:
        self.total_steps, self.start_step, self.step = total_steps, start_step, start_step
        self.record: Mapping[str, Any] = {}
        self.valid_loss: float | None = None
        self.skipped = 0
        self.losses: deque[float | None] = deque(maxlen=CURVE_STEPS)
        self.pace = Throughput()
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self._started = self._last = self._clock()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._started

    @property
    def eta(self) -> float | None:
        """Wall-clock seconds left, with evaluations and checkpoints at the rate seen so far."""
        return self.pace.eta_seconds(max(0, self.total_steps - self.step))

    def add(self, record: Mapping[str, Any]) -> None:
        now, seconds, done = self._clock(), record.get("step_seconds"), record["step"] - self.step
        if not self.record and seconds:  # the time since the start has the start of the ranks in it
            self.pace.add(0, seconds)
        elif done > 0:
            self.pace.add(0, (now - self._last) / done)
        self._last = now
        self.step, self.record = record["step"], record
        if record.get("valid_loss") is not None:
            self.valid_loss = record["valid_loss"]
        self.skipped += bool(record.get("skipped"))
        if "loss" in record:
            self.losses.append(record["loss"])

    def items(self) -> Iterator[tuple[str, str, str]]:
        """(name, value, style) of what there is to show, most important first."""
        record = self.record
        if "loss" in record:
            yield "loss", _number(record["loss"], 3), "bold" if _is_finite(record["loss"]) else "bold red"
        if self.valid_loss is not None:
            yield "valid", _number(self.valid_loss, 3), "bold"
        if record.get("tokens_per_second"):
            yield "", f"{format_count(record['tokens_per_second'])} tokens/s", ""
        if record.get("step_seconds"):
            yield "", f"{format_seconds(record['step_seconds'])}/step", ""
        if record.get("mfu") is not None:
            yield "MFU", f"{record['mfu']:.1%}", ""
        if record.get("attention_balance") is not None:
            yield "cp balance", f"{record['attention_balance']:.2f}", ""
        if self.skipped:
            yield "skipped", f"{self.skipped:,}", "yellow"

    def log_line(self) -> str:
        """One line for a log: ``step 20/300  loss 7.124  valid 7.201  ...``, columns aligned."""
        width = len(str(self.total_steps))
        parts = [f"step {self.step:>{width}}/{self.total_steps}"]
        parts += [f"{name} {value}".strip() for name, value, _ in self.items()]
        if self.record.get("grad_norm") is not None:
            parts.append(f"grad norm {_number(self.record['grad_norm'], 2)}")
        if self.record.get("lr") is not None:
            parts.append(f"lr {self.record['lr']:.2e}")
        if self.eta is not None and self.step < self.total_steps:
            parts.append(f"ETA {format_duration(self.eta)}")
        return "  ".join(parts)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(value: float | None, digits: int) -> str:
    return "not finite" if value is None or not _is_finite(value) else f"{value:.{digits}f}"


class _TrainProgress(Progress):
    """The bar (steps, share, time) and, below it, the numbers of the last step with a small curve of the loss."""

    def __init__(self, state: _State, console: Console) -> None:
        self._state = state
        super().__init__(
            TextColumn("[bold]step[/bold]"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            _TimeColumn(state),
            console=console,
            expand=True,
            refresh_per_second=5,
        )
        self._task = self.add_task("", total=state.total_steps, completed=state.start_step)

    def advance_to(self, step: int) -> None:
        self.update(self._task, completed=step)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield self._numbers()

    def _numbers(self) -> Text:
        state, line = self._state, Text(no_wrap=True, overflow="ellipsis")
        if not state.record:
            return line.append("waiting for the first step", style="dim")
        for index, (name, value, style) in enumerate(state.items()):
            if index:
                line.append(" · ", style="dim")
            if name:
                line.append(f"{name} ", style="dim")
            line.append(value, style=style)
        room = min(CURVE_WIDTH, self.console.width - line.cell_len - 3)
        if room > 3 and state.losses:
            line.append(" · ", style="dim").append(sparkline(tuple(state.losses), room), style="cyan")
        return line


class _TimeColumn(ProgressColumn):
    """Time gone and time left."""

    max_refresh = 0.5

    def __init__(self, state: _State) -> None:
        self._state = state
        super().__init__()

    def render(self, task: Task) -> Text:
        gone, left = self._state.elapsed, self._state.eta
        text = Text(format_duration(gone), style="dim")
        if not task.finished:
            text.append("  ETA ", style="dim")
            text.append("-:--" if left is None else format_duration(left), style="bold")
        return text


# ------------------------------------------------------------------------------------------------- datasets


@contextmanager
def tokenise_progress(
    console: Console, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, int, str], None]]:
    """A callback ``(bytes done, bytes in all, what)`` that draws a bar, or in a log prints a line now and then.

    Nothing is drawn before the first call, so a dataset that is reused leaves no trace. A total of at most 1 byte means
    that it is not known yet; then only ``what`` is shown.
    """
    if quiet:
        yield lambda done, total, what: None
    elif console.is_interactive:
        bar = Progress(
            TextColumn("[bold]tokenising[/bold]"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            _SizeColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", style="dim", markup=False, table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
        )
        task = bar.add_task("", total=None)

        def draw(done: int, total: int, what: str) -> None:
            bar.start()  # does nothing if it runs
            bar.update(task, completed=done, total=total if total > 1 else None, description=what)

        try:
            yield draw
        finally:
            bar.stop()
    else:
        yield _plain_progress(console, clock)


class _SizeColumn(ProgressColumn):
    """Bytes done of all bytes, and bytes per second or, at the end, the time it took."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        size = Text(f"{format_bytes(task.completed)} of {format_bytes(task.total)}", no_wrap=True)
        if task.finished:
            return size.append(f", {format_duration(task.finished_time or 0)}")
        return size if task.speed is None else size.append(f", {format_bytes(task.speed)}/s")


def _plain_progress(console: Console, clock: Callable[[], float]) -> Callable[[int, int, str], None]:
    started = clock()
    printed_at = -math.inf
    finished = False

    def report(done: int, total: int, what: str) -> None:
        nonlocal printed_at, finished
        now = clock()
        last = done >= total and not finished
        if last or now - printed_at >= LOG_EVERY_SECONDS:
            printed_at, finished = now, finished or last
            size = f"{format_bytes(done)} of {format_bytes(total)}, " if total > 1 else ""
            line = f"tokenising: {size}{what}, {format_duration(now - started)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return report
