"""Of a module of the user's own: which ranks hold a copy of each tensor, over which axes its gradient is summed.

Most tensors are copied to every rank of cp and dp, and their gradients are summed over both. A module may say otherwise for
parts of it with an attribute ``gradient_axes``, names of its submodules, parameters or buffers -> axes: ``("edp",)`` for
what differs between the ranks of ep (`ExpertParallel`), ``("tp", "cp", "dp")`` for what sees a part of the tokens on each
rank of tp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwright.comm.base import Comm
from shardwright.comm.mesh import Mesh
from shardwright.core.buckets import BucketPlan, Member
from shardwright.errors import ConfigError
from shardwright.parallel.tensor_layers import TensorParallelLayer

Axes = tuple[str, ...]

DENSE: Axes = ("cp", "dp")
EXPERT: Axes = ("edp",)
KNOWN: tuple[Axes, ...] = (DENSE, ("tp", "cp", "dp"), EXPERT)


class Copies:
    """The axes and the copies of every parameter and buffer of ``module``; raises `ConfigError` for what cannot be."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._module, self._mesh = module, mesh
        self._axes, self._split = _gradient_axes(module, mesh), _split_parameters(module, mesh)

    def member(self, name: str, shape: Sequence[int]) -> Member:
        """A parameter as buckets see it."""
        axes = self._axes[name]
        if axes == EXPERT:
            return Member(name, tuple(shape), (name,), True, axes, ("ep",), shard_over="edp_shard")
        return Member(name, tuple(shape), (name,), True, axes, ("tp",) if name in self._split else ())

    def holders(self, plan: BucketPlan) -> Comm:
        """The ranks that have a copy of a bucket."""
        return self._mesh.edp if plan.reduce_axes == EXPERT else self._mesh.dp_cp

    def check(self) -> None:
        """Refuse modules that differ between ranks: their buckets would not match."""
        tensors = [*self._module.named_parameters(), *self._module.named_buffers()]
        for comm, chosen in self._by_holders(dict(tensors)):
            every = comm.gather_objects(
                [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in chosen.items()]
            )
            for rank, other in enumerate(every):
                if other != every[0]:
                    pairs = zip(every[0], other, strict=False)
                    sizes = f"{len(every[0])} against {len(other)} tensors"
                    first = next((f"{a} against {b}" for a, b in pairs if a != b), sizes)
                    raise ConfigError(
                        f"the module of rank {comm.ranks[rank]} is not that of rank {comm.ranks[0]} ({first}); "
                        "build the same module on every rank"
                    )

    def broadcast(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Set tensors, by name, to those of the first rank that has a copy."""
        for comm, chosen in self._by_holders(tensors):
            broadcast(list(chosen.values()), comm, what)

    def _by_holders(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Comm, dict[str, Tensor]]]:
        for comm, expert in ((self._mesh.dp_cp, False), (self._mesh.edp, True)):
            yield comm, {name: tensor for name, tensor in tensors.items() if (self._axes[name] == EXPERT) == expert}


def _gradient_axes(module: nn.Module, mesh: Mesh) -> dict[str, Axes]:
    """The axes of each parameter and buffer, by every name that it has."""
    marked: dict[str, Axes] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        own: Mapping[str, Axes] = getattr(child, "gradient_axes", {})
        for part, axes in own.items():
            name = f"{path}.{part}" if path else part
            if axes not in KNOWN:
                raise ConfigError(f"gradient_axes of {name} is {axes}; it must be one of {', '.join(map(str, KNOWN))}")
            marked[name] = axes
        of_child = getattr(child, "mesh", None)
        if own and isinstance(of_child, Mesh) and of_child.grid != mesh.grid:
            raise ConfigError(
                f"{path or 'the module'} was made for the layout {of_child.layout}, not for {mesh.layout}; give both one mesh"
            )
    found: dict[str, Axes] = {}
    first: dict[int, tuple[str, Axes]] = {}
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    for name, tensor in (*parameters, *buffers):
        above = (part for part in marked if name == part or name.startswith(f"{part}."))
        axes = marked.get(max(above, key=len, default=""), DENSE)
        known_as, before = first.setdefault(id(tensor), (name, axes))
        if axes != before:
            raise ConfigError(
                f"{known_as} and {name} are one tensor, but gradients of the first are summed over {', '.join(before)} and of "
                f"the second over {', '.join(axes)}; give each its own"
            )
        found[name] = axes
    return found


def _split_parameters(module: nn.Module, mesh: Mesh) -> frozenset[str]:
    """Names of the parameters of which each rank of tp has another part."""
    layers = module.named_modules(remove_duplicate=False) if mesh.tp.size > 1 else ()
    return frozenset(
        f"{path}.{part}" if path else part
        for path, layer in layers
        if isinstance(layer, TensorParallelLayer)
        for part in layer.split
    )


def broadcast(tensors: Sequence[Tensor], comm: Comm, name: str) -> None:
    """Set tensors of any dtypes and strides to rank 0's, as bytes: one message for each dtype and device."""
    if comm.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.data)  # autograd sees no new version
    for members in kinds.values():
        flat = members[0].view(-1) if len(members) == 1 and members[0].is_contiguous() else _joined(members)
        comm.broadcast(flat.view(torch.uint8), name=name)
        for member, piece in zip(members, flat.split([m.numel() for m in members]), strict=True):
            if member.data_ptr() != piece.data_ptr():
                member.copy_(piece.view(member.shape))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
