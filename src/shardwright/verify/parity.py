"""A layout against one process: loss, every gradient, every updated parameter, every byte.

The reference shares the model's code and nothing of the machinery: the whole global batch packed as one micro-batch,
one ``loss.backward()`` of plain autograd, and ``torch.optim`` on the parameters themselves. Tolerances are those of the
contract: gradients 1e-5 in fp32, loss 1e-6, parameters after the steps 1e-5 with SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger
from shardwright.core.run_config import RunConfig
from shardwright.core.specs import parameter_specs
from shardwright.launch import RankEnv, init_process_group, launch, torchrun_env
from shardwright.plan.collectives import predict_step
from shardwright.plan.dispatch import Dispatches
from shardwright.train.data import MicroBatch, TrainSampler, collate, open_blend
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.train.step import Trainer
from shardwright.verify.gradient_files import LAYOUT, REFERENCE, GradientWriter, read_gradients, write_reference
from shardwright.verify.mutate import UNBROKEN, find_mutation
from shardwright.verify.reference import Trace, reference_run
from shardwright.verify.routing import NotedChoices, Replayed, check_comparable, rounds_choices

TOLERANCES = {
    "fp32": {"loss": 1e-6, "gradients": 1e-5, "parameters": 1e-5},
    "fp64": {"loss": 1e-12, "gradients": 1e-9, "parameters": 1e-9},
    "bf16": {"loss": 2e-2, "gradients": 1e-1, "parameters": 1e-2},
}
"""By precision; "bf16" also where gradients are reduced in half precision."""


@dataclass
class Comparison:
    """The worst difference of one quantity. ``passed`` when it is within the tolerance."""

    max_rel_diff: float
    tolerance: float
    worst: str

    @property
    def passed(self) -> bool:
        return self.max_rel_diff <= self.tolerance  # false for nan


def max_rel_diff(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> tuple[float, str]:
    """The worst tensor's max|a-b| / max(max|ref|, 1e-3 x RMS of all of ``want``), and its name.

    The floor is there because some gradients (a key bias's) are zero in exact arithmetic. A missing tensor is infinite.
    """
    if got.keys() != want.keys():
        return float("inf"), f"names differ: {sorted(got.keys() ^ want.keys())[:3]}"
    count = sum(tensor.numel() for tensor in want.values())
    square = sum(tensor.double().square().sum().item() for tensor in want.values())
    floor = 1e-3 * (square / max(count, 1)) ** 0.5
    worst, where = 0.0, ""
    for name, reference in want.items():
        if got[name].shape != reference.shape:
            return float("inf"), f"{name}: shape {tuple(got[name].shape)} against {tuple(reference.shape)}"
        if reference.numel() == 0:
            continue
        difference = (got[name].double() - reference.double()).abs().max().item()
        relative = difference / max(reference.double().abs().max().item(), floor, 1e-300)
        if not relative <= worst:  # also true for nan
            worst, where = relative, name
    return worst, where


# -- a layout ----------------------------------------------------------------------------------------------


def trace_rank(
    env: RankEnv,
    config: RunConfig,
    data: PreparedData,
    steps: int,
    mutation: str | None,
    together: bool,
    folder: Path | None,
) -> list[Trace]:
    """Join the other ranks of ``config.layout`` and trace ``steps`` steps: this rank's trace, or all ranks' ``together``."""
    if env.world_size > 1:
        init_process_group(env)
        mesh = Mesh.distributed(config.layout, env.rank, config.train.timeout_s)
    else:
        mesh = Mesh.solo()
    trace = trace_steps(mesh, config, data, steps, mutation, folder)
    return mesh.world.gather_objects(trace) if together else [trace]


def trace_steps(
    mesh: Mesh,
    config: RunConfig,
    data: PreparedData,
    steps: int,
    mutation: str | None = None,
    folder: Path | None = None,
) -> Trace:
    """Run ``steps`` real training steps on this rank and keep what they show; ``mutation`` breaks one thing, ``folder`` takes
    the gradients as files."""
    broken = find_mutation(mutation) if mutation is not None else UNBROKEN
    trainer = Trainer(config, mesh.wrap(broken.comm))
    broken.trainer(trainer)
    noted = NotedChoices(trainer) if rounds_choices(config) else None
    sampler = train_sampler(config, data, mesh.coordinates["dp"])
    mesh.recorder.take()
    trace = Trace()
    writer = None if folder is None else GradientWriter(folder, trainer)

    def keep_gradients(trainer: Trainer) -> None:
        if writer is not None:
            writer.write(len(trace.gradients))
        with mesh.recorder.aside():
            trace.gradients.append({name: view.clone() for name, view in trainer.buckets.named("gradients").items()})

    trainer.on_gradients = keep_gradients
    for step in range(steps):
        result = trainer.step([broken.batch(batch) for batch in sampler.batches(step)], step)
        trace.losses.append(result.loss)
        if result.balance is not None:
            trace.router_losses.append(result.balance.aux_loss)
            trace.choices.append(result.balance.counts)
        trace.norms.append(result.grad_norm)
        trace.ledgers.append(result.ledger)
        if noted is not None:
            trace.noted.append(noted.take())
    if writer is not None:
        writer.close()
    with mesh.recorder.aside():
        trace.parameters = {name: view.clone() for name, view in trainer.named_parameters("master").items()}
        state = trainer.optimizer.named_state()
        trace.moments = {
            kind: {name: view.clone() for name, view in state[kind].items()} for kind in trainer.optimizer.kinds
        }
    return trace


def train_sampler(config: RunConfig, data: PreparedData, rank: int) -> TrainSampler:
    """The samples of one data-parallel rank, from the start of the data."""
    blend = open_blend(
        data.train,
        "train",
        config.data.seq_len,
        config.train.seed,
        cross_documents=config.data.cross_documents,
        vocab_size=config.model.vocab_size,
    )
    layout = config.layout
    return TrainSampler(blend, layout.micro_batch, layout.microbatches, layout.dp, rank)


def whole_batches(sampler: TrainSampler) -> Callable[[int], MicroBatch]:
    """The whole global batch of a step as one micro-batch."""

    def whole(step: int) -> MicroBatch:
        first = sampler.first_sample(step)
        ids = range(first, first + sampler.global_batch)
        return collate([sampler.blend.window(sample) for sample in ids], ids, sampler.blend.seq_len)

    return whole


def dry_step(config: RunConfig, rank: int = 0, dispatches: Dispatches | None = None) -> Ledger:
    """One real training step with shapes only, at any world size: its ledger.

    Experts get what ``dispatches`` (layer -> plans) of a real step says, by default an even share each.
    """
    trainer = Trainer(config, Mesh.dry(config.layout, rank), "meta")
    if dispatches is not None:
        trainer.mesh.assume_dispatch = Replayed(dispatches, trainer.mesh)
    trainer.mesh.recorder.take()
    tokens = config.data.seq_len * config.layout.micro_batch
    shape = torch.empty(tokens, dtype=torch.int64, device="meta")
    lengths = (config.data.seq_len,) * config.layout.micro_batch
    batch = MicroBatch(shape, shape, shape, shape, lengths, tokens, tuple(range(config.layout.micro_batch)))
    return trainer.step([batch] * config.layout.microbatches, 0).ledger


# -- the comparison ----------------------------------------------------------------------------------------


@dataclass
class Verification:
    """The whole answer of ``shardwright verify`` for one layout."""

    layout: Layout
    loss: Comparison
    gradients: Comparison
    parameters: Comparison
    moments: Comparison
    norm: Comparison
    replicas: Comparison
    predicted: Ledger
    dryrun: Ledger
    measured: Ledger
    differences: list[str]
    gradient_files: Comparison | None = None
    """The gradients once more, from files, where they were written."""

    @property
    def comparisons(self) -> dict[str, Comparison]:
        names = ("loss", "gradients", "gradient_files", "parameters", "moments", "norm", "replicas")
        return {name: found for name in names if (found := getattr(self, name)) is not None}

    @property
    def passed(self) -> bool:
        return all(comparison.passed for comparison in self.comparisons.values()) and not self.differences

    def to_json(self) -> dict[str, Any]:
        """The keys of the contract."""
        worst = max(self.comparisons.items(), key=lambda item: item[1].max_rel_diff / max(item[1].tolerance, 1e-300))
        shown: dict[str, Any] = {
            name: {"max_rel_diff": c.max_rel_diff, "tolerance": c.tolerance, "worst": c.worst}
            for name, c in self.comparisons.items()
        }
        return {
            "passed": self.passed,
            "layout": str(self.layout),
            **shown,
            "ledger": {
                "predicted_bytes": self.predicted.total_bytes,
                "dryrun_bytes": self.dryrun.total_bytes,
                "measured_bytes": self.measured.total_bytes,
                "equal": not self.differences,
                "differences": self.differences,
            },
            "worst": f"{worst[0]}: {worst[1].worst}",
        }


def verify(
    config: RunConfig,
    steps: int = 3,
    *,
    mutation: str | None = None,
    folder: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Verification:
    """Run ``config.layout`` on real ranks and compare it with one process; parameters are compared under SGD in fp32.

    Into ``folder`` go the gradients of both as files (`gradient_files`), which are then compared too.
    """
    config = comparable(config)
    data = prepare_data(config, progress)
    layout, env = config.layout, torchrun_env()
    started = env is not None
    found: list[list[Trace]] = launch(
        trace_rank,
        layout.world_size,
        (config, data, steps, mutation, started, folder),
        layout=str(layout),
        threads_per_rank=config.train.threads,
        timeout_s=config.train.timeout_s,
    )
    traces = found[0] if started else [trace for (trace,) in found]
    reference = reference_run(config, whole_batches(train_sampler(config, data, 0)), steps, traces)
    result = compare(config, traces, reference, dry_steps(config, traces))
    if folder is not None and (env is None or env.rank == 0):
        write_reference(folder, config, reference.gradients)
        result.gradient_files = compare_files(config, folder, steps, result.gradients.tolerance)
    return result


def compare_files(config: RunConfig, folder: Path, steps: int, tolerance: float) -> Comparison:
    """The gradients of ``folder`` (`gradient_files`): of the layout against those of one process, over all steps."""
    worst = Comparison(0.0, tolerance, "")
    for step in range(steps):
        got, want = (read_gradients(folder / name, config, step) for name in (LAYOUT, REFERENCE))
        difference, where = max_rel_diff(got, want)
        if not difference <= worst.max_rel_diff:  # also true for nan
            worst = Comparison(difference, tolerance, f"step {step} {where}")
    return worst


def dry_steps(config: RunConfig, traces: list[Trace]) -> list[Ledger]:
    """The dry run of the first rank of each stage, with the routing of its last step."""
    ranks = first_of_each_stage(config.layout)
    return [dry_step(config, rank, traces[rank].ledgers[-1].dispatches) for rank in ranks]


def assemble(config: RunConfig, locals_: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], Comparison]:
    """Full tensors from every rank's slices, and whether ranks that hold the same slice hold the same bits."""
    specs, grid = parameter_specs(config.model), config.layout.grid
    full: dict[str, Tensor] = {}
    seen: dict[tuple[str, str], Tensor] = {}
    worst, where = 0.0, ""
    for rank, tensors in enumerate(locals_):
        for name, local in tensors.items():
            part = specs[name].slices(config.layout, grid.coordinates(rank))
            if name not in full:
                full[name] = torch.full(specs[name].shape, torch.nan, dtype=local.dtype)
            first = seen.setdefault((name, str(part)), local)
            if not torch.equal(first, local):
                difference = (first - local).abs().max().item()
                worst, where = max(worst, difference or float("inf")), f"rank {rank} {name}"
            full[name][part] = first
    return full, Comparison(worst, 0.0, where)


def first_of_each_stage(layout: Layout) -> list[int]:
    """One rank for each pipeline rank: tp, cp and dp coordinates 0."""
    return [layout.grid.rank({"pp": pp}) for pp in range(layout.pp)]


def compare(config: RunConfig, traces: list[Trace], reference: Trace, dryruns: list[Ledger]) -> Verification:
    """The ranks' slices put together against the reference; copies of a slice against each other, bit for bit.

    Every ledger is compared with the closed form for the routing of experts that it shows.
    """
    layout = config.layout
    exact = config.layout.reduce_dtype == "fp32"
    tolerance = TOLERANCES[config.layout.precision if exact else "bf16"]
    first = traces[0]
    losses, got = _loss_terms(reference, config), _loss_terms(first, config)
    for step, scores in enumerate(reference.scores):
        got |= {f"step {step} {name}": followed for name, (followed, _) in scores.items()}
        losses |= {f"step {step} {name}": best for name, (_, best) in scores.items()}
    norms = {f"step {i}": torch.tensor(value, dtype=torch.float64) for i, value in enumerate(reference.norms)}
    got_norms = {f"step {i}": torch.tensor(value, dtype=torch.float64) for i, value in enumerate(first.norms)}
    steps = range(len(first.losses))
    gradients = [
        max_rel_diff(assemble(config, [trace.gradients[step] for trace in traces])[0], reference.gradients[step])
        for step in steps
    ]
    parameters, replicas = assemble(config, [trace.parameters for trace in traces])
    worst_step = max(range(len(gradients)), key=lambda step: gradients[step][0])
    predict = _Predictor(config)
    differences: list[str] = []
    for rank, dry in zip(first_of_each_stage(layout), dryruns, strict=True):
        differences += [f"predicted, dry run of rank {rank}: {line}" for line in predict(rank, dry).differences(dry)]
    for rank, trace in enumerate(traces):
        for step, ledger in enumerate(trace.ledgers):
            where = f"predicted, rank {rank} step {step}"
            differences += [f"{where}: {line}" for line in predict(rank, ledger).differences(ledger)]
    return Verification(
        config.layout,
        Comparison(*_swap(max_rel_diff(got, losses), tolerance["loss"])),
        Comparison(
            *_swap((gradients[worst_step][0], f"step {worst_step} {gradients[worst_step][1]}"), tolerance["gradients"])
        ),
        Comparison(*_swap(max_rel_diff(parameters, reference.parameters), tolerance["parameters"])),
        _compare_moments(config, traces, reference, tolerance["gradients"]),
        Comparison(*_swap(max_rel_diff(got_norms, norms), tolerance["gradients"])),
        _same_reports(traces, replicas),
        predict(0, first.ledgers[-1]),
        dryruns[0],
        first.ledgers[-1],
        differences,
    )


class _Predictor:
    """What a rank's ledger of one step should show; computed once per rank where no routing has a say."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._known = config, dict[int, Ledger]()

    def __call__(self, rank: int, ledger: Ledger) -> Ledger:
        config = self._config
        if ledger.dispatches or rank not in self._known:
            self._known[rank] = predict_step(
                config.model, config.layout, config.data.seq_len, config.train.freeze, rank, config.router,
                ledger.dispatches or None,
            )  # fmt: skip
        return self._known[rank]


def _loss_terms(trace: Trace, config: RunConfig) -> dict[str, Tensor]:
    """The losses by step, and what routers added; how often experts were chosen, which is not a matter of rounding."""
    terms = {f"step {i}": torch.tensor(value, dtype=torch.float64) for i, value in enumerate(trace.losses)}
    if config.model.moe is not None:
        for i, (value, counts) in enumerate(zip(trace.router_losses, trace.choices, strict=True)):
            terms[f"step {i} routers"] = torch.tensor(value, dtype=torch.float64)
            terms[f"step {i} choices"] = torch.tensor(counts, dtype=torch.float64)
    return terms


def _compare_moments(config: RunConfig, traces: list[Trace], reference: Trace, tolerance: float) -> Comparison:
    """The optimizer's state, kind by kind; it is made of gradients, so their tolerance is its own."""
    worst = Comparison(0.0, tolerance, "")
    for kind, want in reference.moments.items():
        got, copies = assemble(config, [trace.moments[kind] for trace in traces])
        difference, where = max_rel_diff(got, want)
        if not copies.passed:
            difference, where = float("inf"), f"copies differ: {copies.worst}"
        if not difference <= worst.max_rel_diff:  # also true for nan
            worst = Comparison(difference, tolerance, f"{kind} of {where}")
    return worst


def _same_reports(traces: list[Trace], replicas: Comparison) -> Comparison:
    """``replicas``, or the first rank that reports another loss or norm than rank 0."""
    for rank, trace in enumerate(traces):
        if trace.losses != traces[0].losses:
            return Comparison(float("inf"), 0.0, f"rank {rank} reports other losses")
        if trace.norms != traces[0].norms:
            return Comparison(float("inf"), 0.0, f"rank {rank} reports another gradient norm")
    return replicas


def _swap(found: tuple[float, str], tolerance: float) -> tuple[float, float, str]:
    return found[0], tolerance, found[1]


def comparable(config: RunConfig) -> RunConfig:
    """SGD where Adam would magnify rounding: in fp64 the run's own optimizer is kept. Raises `ConfigError` for what cannot be
    compared."""
    check_comparable(config)
    if config.layout.precision == "fp64" or config.optim.name == "sgd":
        return config
    optim = config.optim.model_copy(update={"name": "sgd", "lr": 0.1})
    return config.model_copy(update={"optim": optim})
