"""ZeRO-3 for a module of the user's own: its units' parameters are gathered by module hooks, and saved weights by name.

ZeRO-3:  every state / N, units of the module gathered around their forward and backward  |  sends as `parallel.gather`

On our own model the executor knows when a unit is used. Here a unit is a submodule: hooks gather before its forward and free
after it. What autograd would save of a gathered weight is packed as (group, offset, shape, stride) instead of memory, and
the backward that unpacks it gathers the group again. A group is free once all its gradients are there, at the latest
when the backward pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from shardwright.errors import ConfigError
from shardwright.parallel.flat import FlatParameters


@dataclass(frozen=True)
class Packed:
    """A view of gathered parameters that autograd saved: enough to find it again when they are gathered anew."""

    group: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class UnitHooks:
    """Gathers ``groups`` around the forward and backward of the units of ``module`` that use them.

    ``units``: names of disjoint submodules ("" is the module itself, for what lies in no other); ``users``: the units of
    each group. ``keep``: what a forward has gathered stays until its backward. ``prefetch``: gathers of so many following
    uses are started ahead, in the order learnt from the passes before; ranks that leave it must leave it alike.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[str],
        groups: Sequence[FlatParameters],
        users: Sequence[Sequence[str]],
        *,
        keep: bool,
        prefetch: int,
    ) -> None:
        self.groups, self.users, self.keep, self.prefetch = groups, users, keep, prefetch
        self._inside: dict[int, int] = {}
        """Group -> how many forwards of its units are running."""
        self._order: list[int] = []
        self._place = 0
        self._members = {member.name: i for i, group in enumerate(groups) for member in group.plan.members}
        self._missing: list[int] = []
        self._pass: int | None = None
        self._contexts: list[saved_tensors_hooks] = []
        for name in units:
            unit = module.get_submodule(name)
            mine = [index for index, using in enumerate(users) if name in using]
            unit.register_forward_pre_hook(self._enter(mine), prepend=True)
            unit.register_forward_hook(self._leave(mine), always_call=True)

    # -- forward -------------------------------------------------------------------------------------------

    def _enter(self, mine: Sequence[int]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            for index in mine:
                self._need(index)
                self._inside[index] = self._inside.get(index, 0) + 1
            context = saved_tensors_hooks(self._pack, self._unpack)
            context.__enter__()
            self._contexts.append(context)

        return hook

    def _leave(self, mine: Sequence[int]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._contexts.pop().__exit__(None, None, None)
            for index in mine:
                self._inside[index] -= 1
                if not self._inside[index] and not (self.keep and torch.is_grad_enabled()):
                    self._free(index)

        return hook

    def _pack(self, tensor: Tensor) -> Tensor | Packed:
        for index, group in enumerate(self.groups):
            whole = group.full
            if whole is None or tensor.device != whole.device or not tensor.numel():
                continue
            offset = tensor.data_ptr() - whole.data_ptr()
            if 0 <= offset < whole.nbytes and tensor.dtype == whole.dtype:
                place = offset // whole.element_size()
                return Packed(index, place, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        return tensor

    # -- backward ------------------------------------------------------------------------------------------

    def _unpack(self, saved: Tensor | Packed) -> Tensor:
        if not isinstance(saved, Packed):
            return saved
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass not in (-1, self._pass):  # the first use in a backward pass; -1: somebody looks from outside
            self._pass = backward_pass
            self._missing = [len(group.plan.members) for group in self.groups]
            Variable._execution_engine.queue_callback(self._end)
        self._need(saved.group)
        whole = self.groups[saved.group].full
        assert whole is not None
        return whole.as_strided(saved.shape, saved.stride, whole.storage_offset() + saved.offset)

    def written(self, name: str) -> None:
        """The gradient of the parameter ``name`` is complete: nothing of this pass reads its value any more."""
        index = self._members[name]
        if self._missing:
            self._missing[index] -= 1
            if not self._missing[index] and not self._inside.get(index):
                self._free(index)

    def _end(self) -> None:
        """A backward pass is over: free what is left, and begin the learnt order again."""
        self._missing, self._pass = [], None
        for index in range(len(self.groups)):
            if not self._inside.get(index):
                self._free(index)
        self._order, self._place = self._order[: self._place], 0

    # -- gathers -------------------------------------------------------------------------------------------

    def _need(self, index: int) -> None:
        """Return when the group is there; start those that follow by the learnt order."""
        group = self.groups[index]
        if group.gathered_in_place:
            return
        if group.full is None:
            group.start_gather()
        group.finish_gather()
        if not torch.is_grad_enabled() and not self._missing:
            return  # an evaluation: its order is another
        if self._place >= len(self._order) or self._order[self._place] != index:
            self._order = [*self._order[: self._place], index]
        self._place += 1
        for following in self._order[self._place : self._place + self.prefetch]:
            if self.groups[following].gathered_in_place:
                break
            if self.groups[following].full is None:
                self.groups[following].start_gather()

    def _free(self, index: int) -> None:
        group = self.groups[index]
        if group.full is not None:
            group.finish_gather()
            group.free()


_LISTS = (nn.ModuleList, nn.ModuleDict)


def _children(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the direct children, with lists of modules taken apart."""
    found: list[str] = []
    for name, child in module.named_children():
        lists = isinstance(child, _LISTS)
        found += _children(child, f"{prefix}{name}.") if lists else [f"{prefix}{name}"]
    return found


def unit_of_parameters(module: nn.Module, units: Sequence[str] | None) -> tuple[list[str], Mapping[str, tuple[str, ...]]]:
    """The units' names ("" last, if it has parameters) and, for each parameter, those that use it.

    ``units`` of None takes the direct children, of lists of modules their members. Raises `ConfigError` for names that are
    not there, lie in one another, or name a list, which is never called itself.
    """
    names = _children(module) if units is None else list(units)
    known = dict(module.named_modules())
    for name in names:
        if name not in known or not name:
            raise ConfigError(f"unit {name!r} is no submodule of the module; give names as in named_modules()")
        if isinstance(known[name], _LISTS):
            raise ConfigError(f"unit {name!r} is a list of modules, which is never called itself; give {_children(module)}")
        inside = next((other for other in names if name.startswith(f"{other}.")), None)
        if inside is not None:
            raise ConfigError(f"unit {name!r} lies in unit {inside!r}; give units that do not contain one another")
    first: dict[int, str] = {}
    users: dict[str, tuple[str, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = next((unit for unit in names if name.startswith(f"{unit}.")), "")
        known_as = first.setdefault(id(parameter), name)
        users[known_as] = tuple(dict.fromkeys((*users.get(known_as, ()), unit)))
    used = {unit for using in users.values() for unit in using}
    return [name for name in (*names, "") if name in used], users
