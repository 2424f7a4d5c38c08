"""A rank's slices and the full logical tensors of a checkpoint: put together to save, cut apart to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.specs import Spec


def full_tensor(spec: Spec, local: Tensor, mesh: Mesh) -> Tensor:
    """The whole tensor of ``spec`` from the slices of the tp ranks, or of experts from those of the ep ranks; all of them
    must call. Uneven slices are padded.
    """
    sharded = {axis: dim for axis, dim in spec.shard_axes().items() if mesh.axis(axis).size > 1}
    if not sharded:
        return local
    ((axis, dim),) = sharded.items()
    comm = mesh.axis(axis)
    parts = [spec.slices(mesh.layout, mesh.grid.coordinates(rank)) for rank in comm.ranks]
    rows = [part[dim].stop - part[dim].start for part in parts]
    piece = local.movedim(dim, 0)
    padded = piece.new_zeros((max(rows), *piece.shape[1:]))
    padded[: piece.shape[0]] = piece
    gathered = comm.all_gather(padded, name=spec.name).view(comm.size, *padded.shape)
    full = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    for part, count, slices in zip(gathered, rows, parts, strict=True):
        full[slices] = part[:count].movedim(0, dim)
    return full


def full_tensors(
    named: Mapping[str, Tensor], names: Sequence[str], specs: Mapping[str, Spec], mesh: Mesh, device: torch.device
) -> dict[str, Tensor]:
    """:func:`full_tensor` of each of ``names``, in that order; with a pipeline its holder gives it to the other stages.

    ``named`` has this rank's slices; every rank must call with the same ``names``.
    """
    if mesh.pp.size == 1:
        return {name: full_tensor(specs[name], named[name], mesh) for name in names}
    holders = mesh.pp.gather_objects({name: tensor.dtype for name, tensor in named.items()})
    full: dict[str, Tensor] = {}
    for name in names:
        root = next(rank for rank, held in enumerate(holders) if name in held)
        if name in named:
            tensor = full_tensor(specs[name], named[name], mesh).contiguous()
        else:
            tensor = torch.empty(specs[name].shape, dtype=holders[root][name], device=device)
        full[name] = mesh.pp.broadcast(tensor, root, name=name)
    return full


def local_tensors(named: Mapping[str, Tensor], specs: Mapping[str, Spec], mesh: Mesh) -> dict[str, Tensor]:
    """This rank's slices of full tensors."""
    return {name: full[specs[name].slices(mesh.layout, mesh.coordinates)] for name, full in named.items()}
