"""``make proof``: run every "Must show" of an issue and print a line for each: number, what, value, bar, pass.

Each module of ``benchmarks/proofs`` has ``CHECKS``, a list of :class:`Check`. Long on purpose; not part of ``make test``.

    python benchmarks/proof.py --issue foundation [--only 3,4] [--json FILE] [--rounds 2]

``--rounds`` tries the measurements with a few rounds; what they find is not kept in benchmarks/results.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from proofs.base import TRIAL, Check, Outcome  # noqa: E402 (the path comes first)


@dataclass
class Line:
    issue: str
    number: str
    what: str
    value: str
    bar: str
    passed: bool | None
    seconds: float


def run_check(issue: str, check: Check) -> Line:
    start = time.perf_counter()
    try:
        outcome = check.run()
    except (OSError, ValueError, KeyError, AssertionError, RuntimeError) as error:
        traceback.print_exc()
        outcome = Outcome(f"{type(error).__name__}: {error}", passed=False)
    return Line(issue, check.number, check.what, outcome.value, check.bar, outcome.passed, time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--issue", help="name of one issue; all without it")
    parser.add_argument("--only", help="numbers, separated by commas")
    parser.add_argument("--json", type=Path, help="keep the lines here")
    parser.add_argument("--rounds", type=int, help="rounds of each measurement, for a trial")
    arguments = parser.parse_args()
    if arguments.rounds:
        os.environ[TRIAL] = str(arguments.rounds)
    known = sorted(path.stem for path in (ROOT / "benchmarks" / "proofs").glob("*.py") if path.stem != "base")
    if arguments.issue and arguments.issue not in known:
        parser.error(f"issue {arguments.issue!r} is not known; known: {', '.join(known)}")
    wanted = set(arguments.only.split(",")) if arguments.only else None
    lines = []
    for issue in [arguments.issue] if arguments.issue else known:
        for check in importlib.import_module(f"proofs.{issue}").CHECKS:
            if wanted is None or check.number in wanted:
                line = run_check(issue, check)
                lines.append(line)
                mark = {True: "pass", False: "FAIL", None: "skip"}[line.passed]
                print(
                    f"{issue} {line.number:>3}  {mark}  {line.what}: {line.value}  (bar: {line.bar})  {line.seconds:.0f} s",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n", encoding="utf-8")
    return 0 if all(line.passed is not False for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
