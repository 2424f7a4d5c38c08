"""Which transport an axis gets: shared memory between CPU ranks of one host, gloo between hosts, NCCL on GPUs.

``comm=auto`` takes shared memory for every group of ranks that can share it. ``comm=shm`` refuses where a group cannot,
``comm=gloo`` never shares memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from shardwright.comm.base import Comm
from shardwright.comm.dist import DistComm, dist_comm
from shardwright.comm.host import Hosts, open_hosts
from shardwright.comm.shm import ShmComm
from shardwright.comm.solo import SoloComm
from shardwright.errors import LayoutError

Groups = tuple[tuple[int, ...], ...]


def transport_maker(kind: str, rank: int, timeout_s: float, axes: Sequence[str]) -> Callable[[str, Groups], Comm]:
    """A function that makes this rank's communicator of one of ``axes``, over the initialised process group; collective.

    ``kind`` is a layout's ``comm``. Raises `LayoutError` if it asks for what the ranks' devices or hosts do not allow.
    """
    on_gpu = "nccl" in dist.get_backend()
    if on_gpu and kind not in ("auto", "nccl"):
        raise LayoutError(f"comm={kind} moves CPU tensors and these ranks have GPUs; use comm=auto or train.device=cpu")
    if kind == "nccl" and not on_gpu:
        raise LayoutError("comm=nccl needs a GPU for each rank; use comm=auto")

    def over_dist(axis: str, groups: Groups) -> Comm:
        return dist_comm(axis, groups, timeout_s)

    if on_gpu or kind == "gloo" or dist.get_world_size() == 1:
        return over_dist
    world = DistComm("world", tuple(range(dist.get_world_size())), None)
    hosts = open_hosts(rank, world.size, world.gather_objects)

    def make(axis: str, groups: Groups) -> Comm:
        problems = [problem for problem in map(hosts.problem, groups) if problem is not None]
        if problems and kind == "shm":
            raise LayoutError(f"comm=shm: {axis} cannot use shared memory: {problems[0]}; use comm=auto or comm=gloo")
        others = over_dist(axis, groups) if problems else None  # its groups are made by all ranks together
        ranks = next(group for group in groups if rank in group)
        if len(ranks) == 1:
            return SoloComm(axis, rank)
        if others is not None and hosts.problem(ranks) is not None:
            return others
        return _shared(axis, ranks, hosts, axes.index(axis), timeout_s)

    return make


def _shared(axis: str, ranks: tuple[int, ...], hosts: Hosts, index: int, timeout_s: float) -> ShmComm:
    assert hosts.own is not None, f"{axis}: ranks that can share memory have no host"
    return ShmComm(axis, ranks, hosts.own, index, timeout_s)
