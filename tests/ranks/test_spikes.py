"""Gradients that are not finite, or far above what was usual: stop, leave the step out, or go back; and who is to blame."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.kit import preload
from ranks.runs import write_documents
from ranks.test_resume import Plan, make_config, planned_rank
from shardwright.core.run_config import RunConfig
from shardwright.errors import NonFiniteError
from shardwright.launch import RankEnv, run_local_ranks
from shardwright.train.metrics import read_metrics
from shardwright.train.optim import NormWatch
from shardwright.train.start import RunOptions, prepare_run
from shardwright.train.step import Trainer

STEPS = 12


def spoil(env: RankEnv, rank: int, sample: int, factor: float) -> None:
    """On ``rank``, whenever ``sample`` is in the micro-batch, the head gives ``factor`` times its loss; where that is not
    finite, the MLP of block 1 does so with its output."""
    original, context = Trainer.__init__, Trainer.context
    current: list[bool] = [False]

    def made(self: Trainer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        units = self.model.units()
        place = units["head"] if math.isfinite(factor) else units["blocks.1"].mlp

        def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output * factor if current[0] and env.rank == rank else output

        place.register_forward_hook(hook)

    def told(self: Trainer, batch: Any, *args: Any, **kwargs: Any) -> Any:
        current[0] = sample in batch.samples
        return context(self, batch, *args, **kwargs)

    Trainer.__init__, Trainer.context = made, told  # type: ignore[method-assign]


def run(config: RunConfig, factor: float, sample: int = 18, on_text: list[str] | None = None) -> list[dict[str, Any]]:
    """Two ranks with two samples each in a step; sample 18 is rank 1's in the fifth one."""
    options = RunOptions()
    texts = on_text if on_text is not None else []
    return run_local_ranks(
        planned_rank,
        2,
        (config, prepare_run(config, options), options, Plan(prepare=spoil, arguments=(1, sample, factor))),
        threads_per_rank=1,
        timeout_s=60.0,
        time_limit_s=100.0,
        preload=preload(),
        on_message=lambda rank, message: texts.append(message["text"]) if "text" in message else None,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_documents(tmp_path)
    return tmp_path


def config_of(folder: Path, **changes: Any) -> RunConfig:
    return make_config(folder, "run", "dp=2,micro_batch=2", steps=STEPS, **changes)


BLAME = r"the output of blocks\.1 is not finite in micro-batch 0 \(samples 18, 19\) of rank 1 \(dp 1\); the gradient of \S+"


def test_all_ranks_stop_and_the_rank_the_layer_and_the_batch_are_named(folder: Path) -> None:
    config = config_of(folder)
    with pytest.raises(NonFiniteError, match=rf"^step 4: the gradient norm is nan .*{BLAME}"):
        run(config, math.nan)
    assert len(read_metrics(config.train.run_dir)) == 4


def test_the_step_is_left_out(folder: Path) -> None:
    config, texts = config_of(folder, on_nonfinite="skip"), list[str]()
    first, second = run(config, math.inf, on_text=texts)
    assert (first["steps"], second["steps"]) == (STEPS, STEPS)
    assert [record["skipped"] for record in read_metrics(config.train.run_dir)] == [step == 4 for step in range(STEPS)]
    assert any(text.startswith("step 4 is left out, gradient norm nan") and "of rank 1 (dp 1)" in text for text in texts)


def test_the_run_goes_back_and_passes_over_the_samples(folder: Path) -> None:
    config, texts = config_of(folder, on_nonfinite="back", save_every=3), list[str]()
    run(config, math.nan, on_text=texts)
    assert any("back to step 3, samples 12 to 19 are passed over" in text for text in texts)
    records = read_metrics(config.train.run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(math.isfinite(record["loss"]) for record in records)


def test_a_spike_is_left_out_and_the_largest_loss_is_named(folder: Path) -> None:
    config, texts = config_of(folder, on_nonfinite="skip", spike_factor=4.0), list[str]()
    run(config, 100.0, sample=42, on_text=texts)  # in step 10, after enough steps to compare with
    assert [record["skipped"] for record in read_metrics(config.train.run_dir)] == [step == 10 for step in range(STEPS)]
    (text,) = [text for text in texts if "left out" in text]
    assert "that of micro-batch 0 (samples 42, 43) of rank 1 (dp 1)" in text and "the largest gradient is that of" in text


def test_a_norm_is_judged_by_the_median_of_applied_steps() -> None:
    watch = NormWatch(3.0)
    assert all(watch.judge(norm) is None for norm in (1.0, 50.0, *[1.0] * 6))  # too early to tell
    reason = watch.judge(3.1)
    assert reason is not None and "more than 3 times the median 1 before it" in reason
    assert watch.judge(2.9) is None and watch.judge(math.nan) == "the gradient norm is nan"
    assert len(watch.norms) == 9
    assert all(NormWatch(0.0).judge(norm) is None for norm in (1.0, 1e30))
