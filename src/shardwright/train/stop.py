"""What a run that is asked to stop says when it cannot stop by itself. No torch: it may not be there yet."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.launch import raising_sigterm


@contextmanager
def last_words(run_dir: Path, *, quiet: bool = False) -> Iterator[None]:
    """Around a run: when Ctrl-C or SIGTERM ends it without a result, a line on stderr says what has been saved."""
    with raising_sigterm():
        try:
            yield
        except (SystemExit, KeyboardInterrupt) as end:
            by = "Ctrl-C" if isinstance(end, KeyboardInterrupt) else "SIGTERM"
            if not quiet and (by == "Ctrl-C" or end.args == (128 + signal.SIGTERM,)):
                late = [f"{note}; raise train.stop_grace_s to let them" for note in getattr(end, "__notes__", ())]
                print("; ".join([f"stopped by {by}", *late, saved_so_far(run_dir)]), file=sys.stderr)
            raise


def saved_so_far(run_dir: Path) -> str:
    """The last checkpoint of a run folder, and how to go on."""
    found = (re.fullmatch(r"step-(\d+)", path.parent.name) for path in (run_dir / "checkpoints").glob("step-*/manifest.json"))
    steps = [int(match[1]) for match in found if match is not None]
    if not steps:
        return "no checkpoint was saved"
    last = run_dir / "checkpoints" / f"step-{max(steps)}"
    return f"the last checkpoint is {last}, continue with shardwright train {run_dir}/config.toml --resume auto"
