"""A checkpoint saved at one layout and loaded at another: the same bits, and training that goes on the same.

Of each case, the first layout trains, saves in the background and trains on. The second begins with NaN everywhere, loads,
saves again at once and trains as many steps. Then: the first checkpoint holds what the ranks held, put together by their
slices; both checkpoints hold the same bits; the losses agree. Samples are numbers of the whole run, so the losses agree
only where both have read the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.io import CheckpointState, load_checkpoint
from shardwright.comm.mesh import Mesh
from shardwright.core.layout import CHOICES, RECOMPUTE, SCHEDULES, Layout
from shardwright.core.run_config import RunConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import LayoutError
from shardwright.launch import RankEnv
from shardwright.schedule.make import make_schedule
from shardwright.train.checkpoints import RunCheckpoints
from shardwright.train.prepare import PreparedData
from shardwright.train.step import Trainer
from shardwright.train.supported import check_supported
from shardwright.verify.parity import assemble, train_sampler

SAVE_AFTER = 2


@dataclass(frozen=True)
class ReshardCase:
    """Two runs that differ in layout and run folder; ``go_on``: steps of each after the checkpoint."""

    first: RunConfig
    second: RunConfig
    go_on: int = 5

    @property
    def saved(self) -> Path:
        return Path(self.first.train.run_dir) / "checkpoints" / f"step-{SAVE_AFTER}"

    @property
    def saved_again(self) -> Path:
        return Path(self.second.train.run_dir) / "checkpoints" / f"step-{SAVE_AFTER}"

    def __str__(self) -> str:
        return f"{self.first.layout} -> {self.second.layout}"


@dataclass
class FirstRun:
    """What a rank held when it saved, and the losses afterwards."""

    parameters: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    losses: list[float]


def random_layout(rng: random.Random, config: RunConfig, world: int, global_batch: int) -> Layout:
    """A layout of ``world`` ranks that can train the model of ``config`` with ``global_batch`` sequences a step.

    Of what makes training another one, a capacity of experts and delayed updates, it has nothing.
    """
    while True:
        tp, pp, cp = rng.choice((1, 2, 4)), rng.choice((1, 2, 4)), rng.choice((1, 1, 2))
        dp, rest = divmod(world, tp * pp * cp)
        if rest or not dp or global_batch % dp:
            continue
        share = global_batch // dp
        microbatches = rng.choice([count for count in range(1, share + 1) if share % count == 0])
        zero = rng.randrange(4)
        values: dict[str, Any] = {
            "tp": tp, "pp": pp, "cp": cp, "dp": dp, "microbatches": microbatches, "micro_batch": share // microbatches,
            "zero": zero, "schedule": rng.choice(SCHEDULES), "virtual": rng.choice((1, 2)),
            "dp_replicate": rng.choice((1, 2)), "bucket_mb": rng.choice((0.01, 25.0)),
            "sp": rng.choice(("auto", "off")), "precision": config.layout.precision,
            "offload": rng.choice(("none", "none", "optimizer", "params" if zero == 3 else "optimizer")),
            "offload_fraction": rng.choice((0.5, 1.0)),
        }  # fmt: skip
        values |= {name: rng.choice(CHOICES[name]) for name in ("zero1_reduce", "accumulate", "reshard", "order")}
        values["recompute"] = "-".join(rng.choice(RECOMPUTE) for _ in range(rng.choice((1, pp))))
        if cp > 1:
            values["cp_kind"] = rng.choice(CHOICES["cp_kind"])
        if config.model.moe is not None:
            values["ep"] = rng.choice([ep for ep in (1, 2, 4) if tp * cp * dp % ep == 0])
        if values.get("ep", 1) > 1:
            values |= {name: rng.choice((False, True)) for name in ("ep_overlap", "ep_deduplicate")}
        try:
            layout = Layout.of(values).without_idle()
            layout.check_model(config.model)
            check_supported(config.model_copy(update={"layout": layout}))
            make_schedule(layout)
        except LayoutError:
            continue
        return layout


def first_runs(env: RankEnv, data: PreparedData, cases: Sequence[ReshardCase]) -> list[FirstRun]:
    """Train, save in the background and train on, on this rank, case by case."""
    found = []
    for case in cases:
        config = case.first
        trainer = Trainer(config, _mesh(config, env))
        with RunCheckpoints(config, trainer, None, env.note) as checkpoints:
            _losses(trainer, config, data, range(SAVE_AFTER))
            with trainer.mesh.recorder.aside():
                parameters = {name: tensor.clone() for name, tensor in trainer.named_parameters().items()}
                optimizer = {
                    kind: {name: tensor.clone() for name, tensor in named.items()}
                    for kind, named in trainer.optimizer.named_state().items()
                }
            checkpoints.save(SAVE_AFTER, SAVE_AFTER * config.layout.global_batch, last=False)
            losses = _losses(trainer, config, data, range(SAVE_AFTER, SAVE_AFTER + case.go_on))
            checkpoints.finish()
        found.append(FirstRun(parameters, optimizer, losses))
    return found


def second_runs(env: RankEnv, data: PreparedData, cases: Sequence[ReshardCase]) -> list[list[float]]:
    """Load what the first layout has saved, save it again and train on; the losses of each case."""
    found = []
    for case in cases:
        config = case.second
        trainer = Trainer(config, _mesh(config, env))
        trainer.fill_parameters(_spoil)
        for flats in trainer.optimizer.state.values():
            for flat in flats:
                flat.fill_(torch.nan)
        with RunCheckpoints(config, trainer, None, env.note) as checkpoints:
            restored = checkpoints.restore(str(case.saved))
            assert restored is not None
            checkpoints.save(restored.step, restored.samples, last=True)
            steps = range(restored.step, restored.step + case.go_on)
            found.append(_losses(trainer, config, data, steps, restored.samples))
    return found


def _spoil(name: str, view: Tensor) -> None:
    view.fill_(torch.nan)


def _mesh(config: RunConfig, env: RankEnv) -> Mesh:
    if env.world_size > 1:
        return Mesh.distributed(config.layout, env.rank, env.timeout_s)
    mesh = Mesh.solo()
    mesh.layout = config.layout
    return mesh


def _losses(trainer: Trainer, config: RunConfig, data: PreparedData, steps: range, samples: int = 0) -> list[float]:
    sampler = train_sampler(config, data, trainer.mesh.coordinates["dp"])
    start = samples // sampler.global_batch
    sampler = replace(sampler, start_step=start, start_sample=samples)
    return [trainer.step(sampler.batches(step), step).loss for step in steps]


def problems(case: ReshardCase, first: Sequence[FirstRun], second: Sequence[float], rel: float = 1e-5) -> list[str]:
    """What is not as it should be, from the results of all ranks of the first run and of one rank of the second."""
    specs = parameter_specs(case.first.model)
    saved, again = (load_checkpoint(path, specs) for path in (case.saved, case.saved_again))
    held = CheckpointState(
        saved.step,
        saved.samples,
        assemble(case.first, [rank.parameters for rank in first])[0],
        {kind: assemble(case.first, [rank.optimizer[kind] for rank in first])[0] for kind in saved.optimizer},
    )
    wrong = [f"the file and the ranks differ in {name}" for name in _different(held, saved)]
    wrong += [f"saved again, {name} is another" for name in _different(saved, again)]
    for step, (before, after) in enumerate(zip(first[0].losses, second, strict=True)):
        if not abs(after - before) <= rel * abs(before):
            wrong.append(f"{step + 1} steps on the loss is {after:.8g} instead of {before:.8g}")
    return wrong


def _different(one: CheckpointState, other: CheckpointState) -> list[str]:
    """Names of what is not equal bit for bit."""
    pairs: list[tuple[str, Mapping[str, Tensor], Mapping[str, Tensor]]] = [("", one.weights, other.weights)]
    pairs += [(f"{kind} ", tensors, other.optimizer.get(kind, {})) for kind, tensors in one.optimizer.items()]
    found = [] if (one.step, one.samples) == (other.step, other.samples) else ["the step or the samples"]
    for kind, mine, theirs in pairs:
        found += [f"{kind}{name}" for name in mine.keys() ^ theirs.keys()]
        both = mine.keys() & theirs.keys()
        found += [f"{kind}{name}" for name in sorted(both) if not torch.equal(mine[name], theirs[name])]
    return found
