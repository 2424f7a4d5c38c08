"""Expert parallelism for a router and experts of the user's own: `ExpertParallel`.

    layer = ExpertParallel(router, [Expert() for _ in range(8)], mesh)  # the rank keeps 8 / ep of them
    model = DataParallel(Model(layer), mesh)
    criterion(model(x), y).backward()
    model.clip_grad_norm_(1.0)

Each rank gives its own tokens; they travel as `parallel.expert` says (Lepikhin et al. 2021, section 3.2). A step computes what
one process computes that has all experts and the tokens of all ranks.

Notation: N tokens of this rank, D model dim, k choices of each token, E experts, M rows for this rank's experts, M_i for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.comm.base import Comm
from shardwright.comm.mesh import Mesh
from shardwright.comm.regions import gather_from_region, scatter_to_region
from shardwright.errors import ConfigError
from shardwright.ops.gradients import first_order
from shardwright.ops.routing import Routing, RowGroups, count_experts
from shardwright.parallel.expert import make_exchange


class ExpertParallel(nn.Module):
    """x (..., D) of this rank -> (..., D), each token's weighed sum of what its experts make of it, in x's dtype.

    ``router``: x (N, D) -> ``(expert_ids, weights)``, both (N, k): int64 numbers of experts, E for a choice that goes nowhere,
    and weights with gradient. Or, with ``top_k=k``, x -> logits (N, E): the k largest probabilities of a softmax over all
    experts, divided by their sum where k > 1 (Mixtral's; with k = 1 Switch's).

    ``experts``: a sequence of modules, rows (M_i, D) -> (M_i, D). Or one module, called as ``experts(rows, groups)``: rows (M, D)
    sorted by expert and ``groups.sizes`` (on the device ``groups.counts``) rows of each -> (M, D). The first dim of all of its
    parameters and buffers is the expert (`ops.grouped.grouped_linear` multiplies by such weights), and M may be 0. Given are
    all E experts, of which the rank keeps the E/ep that `local_experts` names; or, with ``num_experts=E``, these only. Of
    a sequence, an expert without rows is not called. It has gradients of zero all the same, not None.

    Ranks with the same place on ``ep`` have copies of the same experts, all ranks have copies of the router. `DataParallel` over
    the same mesh keeps copies alike: it reduces gradients of experts over ``edp`` only; other wrappers do not know of that.
    Every rank must call the layer and go back through it equally often, with N = 0 where it has no tokens. With tensor
    parallelism x, and the loss, are the same on all ranks of tp, and each routes its part of the tokens: what a router makes of
    its scores, for a loss of its own, is then a part of a sum over tp.

    ``counts`` (E,) int64 says after a call how often this rank's tokens have chosen each expert, and `total_counts` those of all
    ranks: what a balancing loss of the router's own needs. The state dict numbers experts among all E, so that those of all
    ranks together are that of one process; `full_state_dict` puts them together. ``name`` is the layer's in the ledger.
    With ``ep_overlap`` in the mesh's layout ``experts`` are called twice, with half of the tokens each.

    Raises `ConfigError` for experts that cannot be shared evenly or have a tensor in common, and for wrong shapes.
    """

    def __init__(
        self,
        router: nn.Module,
        experts: Sequence[nn.Module] | nn.Module,
        mesh: Mesh,
        *,
        num_experts: int | None = None,
        top_k: int | None = None,
        name: str = "experts",
    ) -> None:
        super().__init__()
        listed: list[nn.Module] = []
        stacked: nn.Module | None = None
        if isinstance(experts, Sequence | nn.ModuleList):
            listed = list(experts)
        else:
            stacked = experts
        given = len(listed) if stacked is None else _first_dim(stacked, name)
        self.num_experts = given if num_experts is None else num_experts
        if top_k is not None and not 1 <= top_k <= self.num_experts:
            raise ConfigError(f"{name}: top_k={top_k} must be from 1 to the number of experts, {self.num_experts}")
        own = self.local_experts(self.num_experts, mesh)
        if given not in (self.num_experts, len(own)):
            raise ConfigError(
                f"{name}: {given} experts are given; give all {self.num_experts}, or the {len(own)} of this rank "
                f"({own.start} to {own.stop - 1})"
            )
        part = own if given == self.num_experts else range(given)
        self.mesh, self.top_k, self.name, self.router = mesh, top_k, name, router
        self.experts = _Listed(listed, part, own, name) if stacked is None else _cut(stacked, part)
        self.gradient_axes = {"router": ("tp", "cp", "dp") if mesh.tp.size > 1 else ("cp", "dp"), "experts": ("edp",)}
        self._exchange = make_exchange(mesh, self.num_experts)
        self.counts = torch.zeros(self.num_experts, dtype=torch.int64)

    @staticmethod
    def local_experts(num_experts: int, mesh: Mesh) -> range:
        """The numbers of the experts, of ``num_experts``, that this rank keeps."""
        ep = mesh.ep.size
        if num_experts < 1 or num_experts % ep:
            raise ConfigError(f"{num_experts} experts cannot be shared evenly by ep={ep} ranks; use a multiple of {ep}")
        each = num_experts // ep
        return range(mesh.ep.rank * each, (mesh.ep.rank + 1) * each)

    def forward(self, x: Tensor) -> Tensor:
        rows = _differentiable(x.reshape(-1, x.shape[-1]))
        own = _own_tokens(rows, self.mesh.tp, f"{self.name} tokens")
        expert_ids, weights = self._route(own)
        self.counts = count_experts(expert_ids, self.num_experts)
        routing = Routing(expert_ids, _differentiable(weights), self.num_experts, may_drop=True)
        y = self._exchange.run(own, routing, self._run, self.name)
        return _all_tokens(y, rows.shape[0], self.mesh.tp, f"{self.name} output").view(x.shape)

    def total_counts(self) -> Tensor:
        """``counts`` (E,) of the last call summed over all ranks of the pipeline stage; all of them must call."""
        return self.mesh.stage.all_reduce(self.counts.clone(), name=f"{self.name} counts")

    @torch.no_grad()
    def full_parameters(self) -> dict[str, Tensor]:
        """Parameters and buffers of the experts of all ranks, named as in one process; every rank of ep must call."""
        comm, own = self.mesh.ep, self.experts.state_dict(prefix="experts.")
        shapes = comm.gather_objects([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()])
        device = next((tensor.device for tensor in own.values()), None)
        pieces: dict[str, list[Tensor]] = {}
        for rank, of_rank in enumerate(shapes):
            for name, shape, dtype in of_rank:
                value = torch.empty(shape, dtype=dtype, device=device)
                if rank == comm.rank:
                    value.copy_(own[name])
                if value.numel():
                    comm.broadcast(value.view(-1).view(torch.uint8), rank, name=f"{self.name} {name}")
                pieces.setdefault(name, []).append(value)
        return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in pieces.items()}

    # -- inside a call -------------------------------------------------------------------------------------

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The router's choices (N, k) and their weights (N, k), in fp32 at least."""
        found = self.router(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.top_k is None:
            expert_ids, weights = self._checked(found, x.shape[0])
            return expert_ids, weights.to(torch.promote_types(weights.dtype, wide))
        if not isinstance(found, Tensor) or found.shape != (x.shape[0], self.num_experts):
            raise ConfigError(
                f"{self.name}: with top_k={self.top_k} the router must return logits {(x.shape[0], self.num_experts)}, not "
                f"{_shown(found)}; leave top_k out for a router that returns expert ids and weights"
            )
        weights, expert_ids = found.to(torch.promote_types(found.dtype, wide)).softmax(-1).topk(self.top_k, dim=-1)
        return expert_ids, weights / weights.sum(-1, keepdim=True) if self.top_k > 1 else weights

    def _checked(self, found: Any, tokens: int) -> tuple[Tensor, Tensor]:
        both = isinstance(found, tuple) and len(found) == 2 and all(isinstance(value, Tensor) for value in found)
        if not both or found[0].dim() != 2 or found[0].shape[0] != tokens or found[0].shape != found[1].shape:
            raise ConfigError(
                f"{self.name}: the router must return expert ids and weights, both ({tokens}, k), not {_shown(found)}; give "
                "top_k for a router that returns logits"
            )
        expert_ids, weights = found
        if expert_ids.dtype != torch.int64 or not weights.is_floating_point():
            raise ConfigError(
                f"{self.name}: expert ids must be int64 and weights floating point, not {expert_ids.dtype} and {weights.dtype}"
            )
        inside = ((expert_ids >= 0) & (expert_ids <= self.num_experts)).all()
        torch._assert_async(
            inside, f"{self.name}: an expert id is not from 0 to {self.num_experts} (which drops the choice)"
        )
        return expert_ids, weights

    def _run(self, rows: Tensor, groups: RowGroups) -> Tensor:
        """The exchange calls this: rows (M, D) sorted by expert -> (M, D) in the same dtype, whatever experts return."""
        y = self.experts(rows, groups)
        if not isinstance(y, Tensor) or y.shape != rows.shape:
            raise ConfigError(
                f"{self.name}: experts must return {tuple(rows.shape)}, as they are given, not {_shown(y)}"
            )
        unused = [] if groups.num_rows else [p for p in self.experts.parameters() if p.requires_grad]
        return _tied(y.to(rows.dtype), rows, unused)


class _Listed(nn.Module):
    """Experts that are modules of their own, named by their numbers ``own`` among all; ``part`` of those given."""

    def __init__(self, experts: Sequence[nn.Module], part: range, own: range, name: str) -> None:
        super().__init__()
        self._layer = name
        holder: dict[int, int] = {}
        for index, expert in enumerate(experts):
            for tensor in (*expert.parameters(), *expert.buffers()):
                if holder.setdefault(id(tensor), index) != index:
                    raise ConfigError(
                        f"{name}: experts {holder[id(tensor)]} and {index} share a tensor of shape {tuple(tensor.shape)}, but "
                        "may live on different ranks; give each its own, or keep what is shared outside of the layer"
                    )
        for number, index in zip(own, part, strict=True):
            self.add_module(str(number), experts[index])

    def forward(self, rows: Tensor, groups: RowGroups) -> Tensor:
        outputs: list[Tensor] = []
        unused: list[Tensor] = []
        for (number, expert), block in zip(self._modules.items(), rows.split(groups.sizes), strict=True):
            assert expert is not None
            if block.shape[0] == 0:
                unused += [parameter for parameter in expert.parameters() if parameter.requires_grad]
                continue
            outputs.append(expert(block))
            if not isinstance(outputs[-1], Tensor) or outputs[-1].shape != block.shape:
                raise ConfigError(
                    f"{self._layer}: expert {number} must return {tuple(block.shape)}, as it is given, not {_shown(outputs[-1])}"
                )
        return _tied(torch.cat(outputs) if outputs else rows, rows, unused)


def _first_dim(experts: nn.Module, name: str) -> int:
    """The number of experts of a module whose tensors are stacked."""
    sizes = {key: tuple(tensor.shape) for key, tensor in (*experts.named_parameters(), *experts.named_buffers())}
    counts = {shape[:1] for shape in sizes.values()}
    if len(counts) != 1 or counts == {()}:
        raise ConfigError(
            f"{name}: the first dim of all parameters and buffers of {type(experts).__name__} must be the expert, but their "
            f"shapes are {sizes}; give a list of modules, one for each expert, instead"
        )
    return counts.pop()[0]


def _cut(experts: nn.Module, part: range) -> nn.Module:
    """Keep ``part`` of what is stacked along the first dim."""
    for tensor in (*experts.parameters(), *experts.buffers()):
        if tensor.shape[0] != len(part):
            tensor.data = tensor.data[part.start : part.stop].clone()
    return experts


def _differentiable(x: Tensor) -> Tensor:
    """x with a gradient, so that backward sends the same messages on all ranks, whatever is trained on each of them."""
    return x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()


class _Tie(torch.autograd.Function):
    """y, with gradients of zero for ``unused`` parameters and a way back to ``rows`` even if nothing was made of them."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Tensor, *unused: Tensor) -> Tensor:
        ctx.kinds = [(parameter.shape, parameter.dtype, parameter.device) for parameter in unused]
        return y.view_as(y)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds]
        return dy, None, *zeros


def _tied(y: Tensor, rows: Tensor, unused: Sequence[Tensor]) -> Tensor:
    return _Tie.apply(y, rows, *unused)  # type: ignore[no-any-return]


def _own_tokens(rows: Tensor, comm: Comm, name: str) -> Tensor:
    """rows (N, D), the same on all ranks of tp -> this rank's part of them; backward gathers the gradient."""
    if comm.size == 1:
        return rows
    each = -(-rows.shape[0] // comm.size)
    padded = F.pad(rows, (0, 0, 0, each * comm.size - rows.shape[0]))
    return scatter_to_region(padded, comm, name)[: max(0, min(each, rows.shape[0] - comm.rank * each))]


def _all_tokens(own: Tensor, tokens: int, comm: Comm, name: str) -> Tensor:
    """The reverse of `_own_tokens`: (N, D) on all ranks of tp."""
    if comm.size == 1:
        return own
    each = -(-tokens // comm.size)
    return gather_from_region(F.pad(own, (0, 0, 0, each - own.shape[0])), comm, name)[:tokens]


def _shown(value: Any) -> str:
    """Shapes of what a module has returned, or its type."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    return f"({', '.join(_shown(part) for part in value)})" if isinstance(value, tuple | list) else type(value).__name__
