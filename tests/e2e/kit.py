"""The command line as a user meets it: in this process where that is enough, else as a program of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from shardwright import cli

PROJECT = Path(__file__).resolve().parents[2]
TINY = str(PROJECT / "examples" / "tiny.toml")


@dataclass(frozen=True)
class Outcome:
    """Exit code, standard output and standard error of one command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Standard output, which must be one JSON value of a command that succeeded."""
        assert self.code == 0, self
        return json.loads(self.out)


def shardwright(*arguments: str) -> Outcome:
    """``shardwright ARGUMENTS`` in this process (its ranks are real ones)."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["shardwright", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = cli.main()
        except SystemExit as end:  # a shell's completion ends the program by itself
            code = int(end.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def sets(**values: Any) -> list[str]:
    """``--set`` arguments: ``sets(train__steps=3)`` is ``--set train.steps=3``."""
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


@contextlib.contextmanager
def program(arguments: Sequence[str], cwd: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """``python ARGUMENTS`` as a process of its own, which is killed if it still runs at the end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # an ignored Ctrl-C would be inherited
    try:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, "COLUMNS": "120", "PYTHONPATH": str(Path(cli.__file__).parents[1]), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str], timeout: float = 60.0) -> Outcome:
    """Wait for the end of a program."""
    out, err = process.communicate(timeout=timeout)
    return Outcome(process.returncode, out, err)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of ``metrics.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
