"""What `bench comm` makes of the steps that it times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.bench_steps import ALONE, MODEL, SEQ, START, fitted_stack, small_run, together
from shardwright.core.cluster import Chip, Cluster, LinkLevel
from shardwright.plan.stack import software_of, stack_for
from shardwright.plan.step_time import Pricer
from shardwright.train.supported import check_supported

CORE = Chip("cpu-core", None, None, None, None, 1.2e11, 8 << 30, 1e10, 1e10, None, 2, "a test")
TWO = Cluster(CORE, 1, 2, (LinkLevel("host", 2, 1e10, 1e-5),))


def test_the_constants_of_a_machine_are_found_again() -> None:
    """Steps as a stack makes them are predicted by what is fitted to them, and so are layouts that were not timed."""
    truth = replace(START, gemm_bf16=0.6, memory=0.4, launch=4e-5, message=1.5e-3, step_seconds=5e-3)
    model = small_run("", MODEL, SEQ).model
    real = Pricer(model, TWO, SEQ, truth)
    texts = (*ALONE, *together(2))
    found = fitted_stack(TWO, {text: real.seconds(small_run(text, MODEL, SEQ).layout) for text in texts})
    assert found.message == pytest.approx(truth.message, rel=0.3)
    fitted = Pricer(model, TWO, SEQ, found)
    for text in (*texts, "tp=2,microbatches=8", "dp=2,zero=1,micro_batch=2", "pp=2,schedule=gpipe,microbatches=2"):
        layout = small_run(text, MODEL, SEQ).layout
        assert fitted.seconds(layout) == pytest.approx(real.seconds(layout), rel=0.12), text
    assert stack_for(replace(TWO, software=software_of(found))) == found


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 16])
def test_the_layouts_that_are_timed_use_all_ranks(ranks: int) -> None:
    for text in together(ranks):
        run = small_run(text, MODEL, SEQ)
        assert run.layout.world_size == ranks
        check_supported(run)
