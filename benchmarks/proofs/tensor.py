"""Tensor and sequence parallelism (the tensor half of issue 4; context parallelism has a file of its own)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from proofs.base import Check, Outcome, bench_train, ratio_of, tests
from proofs.pipeline import SMALL, verified

from shardwright.core.run_config import RunConfig

SIX = SMALL | {"dim": 36, "num_layers": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 6, "vocab_size": 321}
FOUR = SMALL | {"num_layers": 2, "num_kv_heads": 4}
RANKS = "tests/ranks/test_tensor.py"


def grid(folder: Path) -> Iterator[RunConfig]:
    """tp x sp x dp x recomputation x tied head x dropout, in fp64, windows full of short documents."""
    for tp, sp, dp in product((2, 3, 4), ("on", "off"), (1, 2)):
        for recompute, tied, dropout in product(("none", "selective", "full"), (False, True), (0.0, 0.1)):
            model = (SIX if tp == 3 else FOUR) | {"tied_head": tied, "dropout": dropout}
            text = f"tp={tp},sp={sp},dp={dp},microbatches=2,recompute={recompute},precision=fp64"
            table = {
                "model": model,
                "data": {"sources": "synthetic:sentences", "seq_len": 47, "cache": str(folder / "datasets")},
                "optim": {"name": "sgd", "lr": 0.1, "clip": 1.0},
                "train": {"steps": 10, "threads": 1, "run_dir": str(folder / "run")},
            }
            yield RunConfig.of(table, (), text)


def against_torch() -> Outcome:
    return ratio_of(bench_train("tensor-torch", "tp=2,micro_batch=4", "parallelize_module"), 0.72)


CHECKS = [
    Check(
        "1",
        "vectors: SwiGLU trace, traffic of 80 layers; gather_output; one reduction more for row-then-column",
        "equal",
        lambda: tests("tests/unit/test_tensor.py", "tests/unit/test_vectors.py", "tests/ranks/test_tensor_layers.py"),
    ),
    Check("2", "verify over tp x sp x dp x recompute x tied x dropout", "all within 1e-9", lambda: verified(grid)),
    Check("3", "ledger equals the closed form to the byte; mutations", "equal; red", lambda: tests(RANKS)),
    Check(
        "4",
        "saved tensors of a GPT block with materialised scores, tp=4, a s / h = 16",
        "formulas within 3 %, at least 4 times less",
        lambda: tests("tests/ranks/test_activations.py"),
    ),
    Check("5", "training step against parallelize_module with loss_parallel, comm=auto", "ratio at most 0.72", against_torch),
]
