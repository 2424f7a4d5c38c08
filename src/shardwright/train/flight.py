"""The flight record of a run, and what is said of it when a rank was lost or late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.comm.flight import REPORT, FlightRecorder, hang_report, report_file, reports
from shardwright.comm.mesh import Mesh
from shardwright.errors import ConfigError, RankError
from shardwright.launch import torchrun_env

CLOCK_S = 0.05
"""Times of files are coarser than the clock by so much at most."""
MOST_LINES = 200
"""Lines of a report in the error of a run; the file has all."""


@contextmanager
def flight_report(folder: Path, num_ranks: int) -> Iterator[None]:
    """Around a run: when a rank was lost, what the records of all ranks say is added to the error and written to
    ``report.txt``. Ranks that called different things come first: the rank that died of it may have been right."""
    env, since = torchrun_env(), time.time() - CLOCK_S
    try:
        yield
    except RankError as error:
        if num_ranks == 1 or (env is not None and not reports(env.rank, num_ranks)):
            raise
        report = hang_report(folder, num_ranks, since=since)
        if not report.states:  # no rank came so far
            raise
        # What the first rank that waited too long saw: since then others may have come, and all were ended.
        every = [report_file(folder, env.rank)] if env is not None else folder.glob("report-*.txt")
        written = sorted((path for path in every if path.is_file() and _written_at(path) >= since), key=_written_at)
        try:
            told = next((REPORT + path.read_text("utf-8").rpartition(REPORT)[2].rstrip() for path in written), str(report))
        except OSError:
            told = str(report)
        lead, lines = report.differ[:1], told.splitlines()
        if env is None:
            with suppress(OSError):
                (folder / "report.txt").write_text("\n".join([*lead, str(error), told, ""]), encoding="utf-8")
        if len(lines) > MOST_LINES:
            lines[MOST_LINES:] = [f"{len(lines) - MOST_LINES} lines more in the reports of {folder}"]
        raise RankError("\n".join([*lead, str(error), *lines]), rank=-1 if lead else error.rank) from error


@contextmanager
def flight_record(folder: Path, mesh: Mesh) -> Iterator[None]:
    """Write every verb of ``mesh`` to ``folder`` inside. When a rank is lost or late, what the records of all ranks say then
    is written to ``report-RANK.txt``."""
    try:
        flight = FlightRecorder(folder, mesh.rank, mesh.grid)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; give another train.run_dir") from error
    mesh.recorder.flight = flight
    try:
        yield
    except RankError as error:
        if reports(mesh.rank, mesh.world.size):
            report = hang_report(folder, mesh.world.size)
            with suppress(OSError):  # the error is raised in any case
                report_file(folder, mesh.rank).write_text(f"{error}\n{report}\n", encoding="utf-8")
        raise
    finally:
        mesh.recorder.flight = None
        flight.close()


def _written_at(path: Path) -> float:
    return path.stat().st_mtime
