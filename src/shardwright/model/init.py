"""Parameters: made from the spec table, filled by name, so that every layout starts from the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from shardwright.comm.mesh import Mesh
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import Spec, parameter_specs


class ParameterTable:
    """Makes the local part of each parameter of the spec table, uninitialised; ``hollow``: of its shape, without memory."""

    def __init__(
        self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype, device: torch.device, *, hollow: bool = False
    ) -> None:
        self.specs = parameter_specs(config)
        self._mesh, self._dtype, self._device, self._hollow = mesh, dtype, device, hollow

    def make(self, name: str) -> nn.Parameter:
        """The parameter ``name``, of this rank's shape."""
        spec = self.specs[name]
        shape = spec.local_shape(self._mesh.layout, self._mesh.coordinates)
        dtype = torch.promote_types(self._dtype, torch.float32) if spec.buffer else self._dtype
        hollow = self._hollow and not spec.buffer
        made = torch.empty(() if hollow else shape, dtype=dtype, device=self._device)
        return nn.Parameter(made.expand(shape) if hollow else made, requires_grad=not spec.buffer)

    def maybe(self, name: str) -> nn.Parameter | None:
        """The parameter ``name`` if this model has it."""
        return self.make(name) if name in self.specs else None

    def first_row(self, name: str) -> int:
        """The global number of this rank's first row of ``name``."""
        rows = self.specs[name].slices(self._mesh.layout, self._mesh.coordinates)[0]
        return int(rows.start)


def full_value(spec: Spec, seed: int) -> Tensor:
    """The whole initial tensor of ``spec`` in fp32: a function of the seed and the name alone."""
    if spec.init == "ones":
        return torch.ones(spec.shape)
    if spec.init == "zeros":
        return torch.zeros(spec.shape)
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(spec.shape).normal_(0.0, spec.std, generator=generator)


@torch.no_grad()
def initialise(parameters: Iterable[tuple[str, Tensor]], specs: Mapping[str, Spec], mesh: Mesh, seed: int) -> None:
    """Fill each local parameter with its slice of the full initial value; parameters on meta are left alone."""
    for name, parameter in parameters:
        if not parameter.is_meta:
            spec = specs[name]
            part = spec.slices(mesh.layout, mesh.coordinates)
            parameter.copy_(full_value(spec, seed)[part])
