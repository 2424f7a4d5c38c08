"""Programs of ``examples/`` for modules of a user's own: the same losses on two ranks as in one process."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys

import pytest

from ranks.kit import TESTS
from shardwright.launch import RankEnv


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss [a-z ]*(\d+\.\d+)", printed)]


@pytest.mark.parametrize(
    ("program", "shown", "first_above", "last_below"),
    [("tensor_parallel_mlp", 7, 1.0, 0.2), ("pipeline_mlp", 5, 0.5, 0.05), ("expert_parallel", 6, 0.3, 0.3)],
)
def test_an_example_learns_the_same_on_two_ranks_as_on_one(
    program: str, shown: int, first_above: float, last_below: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = TESTS.parent / "examples" / f"{program}.py"
    runpy.run_path(str(path), run_name="example")["train"](RankEnv(0, 1, 0, 1, "", "", 30.0))
    alone = losses_in(capsys.readouterr().out)
    assert len(alone) == shown and alone[0] > first_above and alone[-1] < last_below
    env = os.environ | {"PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert losses_in(done.stdout) == pytest.approx(alone, abs=2e-5)
