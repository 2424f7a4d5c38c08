"""The run that a layout is compared with: one process, plain autograd, PyTorch's own optimizers, the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.ledger import Ledger
from shardwright.core.run_config import RunConfig
from shardwright.model.context import Context
from shardwright.model.transformer import Transformer, freeze
from shardwright.train.data import MicroBatch
from shardwright.train.optim import learning_rate
from shardwright.train.step import document_attention
from shardwright.verify.routing import Choices, FollowedChoices, ReferenceRouters, reference_routing


@dataclass
class Trace:
    """What a run of a few steps shows: per step loss, gradients (reduced, unclipped) and norm; parameters at the end.

    ``losses`` and, of models with experts, ``router_losses`` apart; ``choices``: by layer, how often each expert was chosen.
    """

    losses: list[float] = field(default_factory=list)
    router_losses: list[float] = field(default_factory=list)
    choices: list[list[list[int]]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    noted: list[Choices] = field(default_factory=list)
    """Of a layout that rounds: the experts of this rank's tokens, by step and layer. One process follows them."""
    scores: list[dict[str, tuple[Tensor, Tensor]]] = field(default_factory=list)
    """Of one process that has followed: by step, the scores of what was followed and of what it would have chosen."""
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Kind (``momentum``, ``exp_avg``, ``exp_avg_sq``) -> parameter -> the optimizer's state at the end."""
    ledgers: list[Ledger] = field(default_factory=list)


def reference_run(
    config: RunConfig, batches: Callable[[int], MicroBatch], steps: int, traces: Sequence[Trace] = ()
) -> Trace:
    """Train ``steps`` steps in one process with plain autograd; ``batches(step)`` is the whole global batch as one.

    An fp32 layout is compared with fp64, from the same initial values: what differs is then the layout's own rounding.
    For bf16 the reference is bf16 too, and its optimizer works on fp32 copies of the parameters, as it must. ``traces`` of
    the layout's ranks: where it rounds, their choices of experts are followed.
    """
    dtype = torch.bfloat16 if config.layout.precision == "bf16" else torch.float64
    model = Transformer(config.model, Mesh.solo(), dtype).initialise(config.train.seed)
    freeze(model, config.train.freeze)
    trained = {name: p for name, p in model.spec_parameters().items() if p.requires_grad}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    masters = {name: p.detach().to(wide, copy=True) for name, p in trained.items()}
    optimizer = _reference_optimizer(config, list(masters.values()))
    trace = Trace()
    follow = FollowedChoices(model, list(zip(*(of_rank.noted for of_rank in traces), strict=True)))
    outstanding: tuple[float, dict[str, Tensor]] | None = None
    for step in range(steps):
        batch = batches(step)
        model.zero_grad(set_to_none=True)
        context = _reference_context(config, model, batch, step)
        follow.begin(step)
        loss = model.run(context) / max(batch.num_valid, 1)
        trace.scores.append(follow.take())
        routers = ReferenceRouters(config, context, len(batch.tokens))
        (loss + routers.loss).backward()
        gradients = {
            name: torch.zeros_like(masters[name]) if p.grad is None else p.grad.to(wide, copy=True)
            for name, p in trained.items()
        }
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
        factor = config.optim.clip / (norm + 1e-6) if config.optim.clip and norm > config.optim.clip else 1.0
        update = (learning_rate(config.optim, step, config.train.steps), {k: g * factor for k, g in gradients.items()})
        delayed = config.layout.delayed_update and step >= config.optim.delay_after
        now, outstanding = (outstanding, update) if delayed else (update, None)
        if now is not None:
            _reference_update(config, model, optimizer, masters, *now)
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(masters[name])
            routers.move_biases(model)
        trace.losses.append(loss.item())
        trace.router_losses.append(routers.loss.item())
        trace.choices.append([counts.tolist() for counts in routers.choices.values()])
        trace.norms.append(norm)
        trace.gradients.append(gradients)
    trace.parameters = {name: p.detach().clone() for name, p in model.spec_parameters().items()} | masters
    trace.moments = _reference_moments(config, optimizer, masters)
    return trace


def _reference_update(
    config: RunConfig,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    masters: Mapping[str, Tensor],
    lr: float,
    gradients: Mapping[str, Tensor],
) -> None:
    with torch.no_grad():
        for name, master in masters.items():
            master.grad = gradients[name]
            if model.specs[name].decay:  # decoupled, by the spec table's rule, before the plain update
                master.mul_(1 - lr * config.optim.weight_decay)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def _reference_moments(
    config: RunConfig, optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """PyTorch's optimizer state by our names; zero where nothing was updated."""
    kinds = {"momentum": "momentum_buffer"}
    if config.optim.name == "adamw":
        kinds = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    return {
        ours: {
            name: torch.zeros_like(master) if (value := optimizer.state[master].get(theirs)) is None else value
            for name, master in masters.items()
        }
        for ours, theirs in kinds.items()
    }


def _reference_context(config: RunConfig, model: Transformer, batch: MicroBatch, step: int) -> Context:
    return model.context(
        batch.tokens,
        batch.positions,
        document_attention(config, batch, step),
        targets=batch.targets,
        token_index=batch.token_index,
        seed=config.train.seed,
        step=step,
        **reference_routing(config, batch),
    )


def _reference_optimizer(config: RunConfig, parameters: list[Tensor]) -> torch.optim.Optimizer:
    optim = config.optim
    if optim.name == "adamw":
        return torch.optim.Adam(parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False)
    return torch.optim.SGD(parameters, lr=optim.lr, momentum=optim.momentum, foreach=False)
