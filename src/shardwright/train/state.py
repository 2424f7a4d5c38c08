"""A rank's slices and the full logical tensors of a checkpoint: put together to save, cut apart to load."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.specs import Spec


def full_tensor(spec: Spec, local: Tensor, mesh: Mesh) -> Tensor:
    """The whole tensor of ``spec`` from the slices of the tp ranks; all of them must call. Uneven slices are padded."""
    sharded = spec.shard_axes()
    if "tp" not in sharded or mesh.tp.size == 1:
        return local
    dim, layout = sharded["tp"], mesh.layout
    parts = [spec.slices(layout, {**mesh.coordinates, "tp": rank}) for rank in range(mesh.tp.size)]
    rows = [part[dim].stop - part[dim].start for part in parts]
    piece = local.movedim(dim, 0)
    padded = piece.new_zeros((max(rows), *piece.shape[1:]))
    padded[: piece.shape[0]] = piece
    gathered = mesh.tp.all_gather(padded, name=spec.name).view(mesh.tp.size, *padded.shape)
    full = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
    for part, count, slices in zip(gathered, rows, parts, strict=True):
        full[slices] = part[:count].movedim(0, dim)
    return full


def full_tensors(named: Mapping[str, Tensor], specs: Mapping[str, Spec], mesh: Mesh) -> dict[str, Tensor]:
    """:func:`full_tensor` of each name, in the same order on every rank."""
    return {name: full_tensor(specs[name], local, mesh) for name, local in named.items()}


def local_tensors(named: Mapping[str, Tensor], specs: Mapping[str, Spec], mesh: Mesh) -> dict[str, Tensor]:
    """This rank's slices of full tensors."""
    return {name: full[specs[name].slices(mesh.layout, mesh.coordinates)] for name, full in named.items()}
