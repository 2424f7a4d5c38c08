"""Who a rank is: made by the launcher for local ranks, read from the environment under torchrun and srun; and how a
rank joins the process group.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from shardwright.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEFAULT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RankEnv:
    """Who a rank is and how it meets the others. ``send(obj)`` passes a picklable object to the starting process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    init_method: str
    store_path: str | None = None  # the file of the rendezvous, for local ranks
    timeout_s: float = DEFAULT_TIMEOUT_S  # of the rendezvous and of each collective
    node_rank: int = 0
    num_nodes: int = 1
    agent_store: bool = False  # the rendezvous' store is that of torchrun's agents, which outlives the ranks
    sender: Callable[[Any], None] | None = field(default=None, repr=False, compare=False)
    noter: Callable[[str], None] | None = field(default=None, repr=False, compare=False)

    def send(self, message: Any) -> None:
        """Pass ``message`` to ``on_message(rank, message)`` of whoever started the ranks; dropped if there is none."""
        if self.sender is not None:
            self.sender(message)

    def note(self, doing: str) -> None:
        """Leave in memory what the rank is at; if it dies or stalls there, the error says so. Cheap; dropped under torchrun."""
        if self.noter is not None:
            self.noter(doing)


def device_for(env: RankEnv, kind: Literal["auto", "cpu", "cuda"] = "auto") -> torch.device:
    """The device of this rank: ``cuda:local_rank`` where every rank of the node has a GPU of its own, else the CPU.

    Raises ConfigError if ``kind`` is "cuda" and the node has fewer GPUs than ranks.
    """
    import torch

    num_gpus = torch.cuda.device_count() if kind != "cpu" and torch.cuda.is_available() else 0
    if num_gpus >= env.local_world_size:
        return torch.device("cuda", env.local_rank)
    if kind == "cuda":
        raise ConfigError(
            f"device=cuda needs a GPU for each of the {env.local_world_size} ranks of a node, found {num_gpus}; "
            "use device=cpu or fewer ranks"
        )
    return torch.device("cpu")


def init_process_group(env: RankEnv, device: Literal["cpu", "cuda"] = "cpu") -> None:
    """Join the default process group: gloo for CPU tensors and, on CUDA, NCCL for tensors on this rank's GPU.

    Raises ConfigError if another program listens where rank 0 should.
    """
    import torch
    import torch.distributed as dist

    backend, device_id, timeout = "gloo", None, timedelta(seconds=env.timeout_s)
    if device == "cuda":
        backend, device_id = "cpu:gloo,cuda:nccl", torch.device("cuda", env.local_rank)
        torch.cuda.set_device(device_id)
    where: dict[str, Any] = {"init_method": env.init_method}
    if env.agent_store:
        from torch.distributed.rendezvous import rendezvous

        from shardwright.comm.rendezvous import fresh_store

        store, _, _ = next(rendezvous(env.init_method, env.rank, env.world_size, timeout=timeout))
        where = {"store": fresh_store(store, env.rank, env.world_size, env.timeout_s)}
    try:
        dist.init_process_group(
            backend, rank=env.rank, world_size=env.world_size, timeout=timeout, device_id=device_id, **where
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"rank {env.rank} cannot listen at the port of MASTER_PORT, another program does ({error}); set MASTER_PORT to one "
            "that is free, or start with torchrun --standalone, which finds one"
        ) from None
    if device == "cpu":  # a rank that is done and leaves at once would break the connections that others still make
        dist.barrier()


def leave_process_group() -> None:
    """Free sockets and NCCL communicators, if the target joined a process group and did not leave it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def torchrun_env(environ: Mapping[str, str] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> RankEnv | None:
    """This process's rank if torchrun (``RANK`` ...) or Slurm's srun (``SLURM_PROCID`` ...) started it, else None.

    ``environ`` is the process's environment unless given. Raises ConfigError for half an environment: then one side
    thinks that ranks were started, and starting them here again would run everything several times.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        env = _from_torchrun(environ, timeout_s)
    elif "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ):
        slurm = _from_srun(environ, timeout_s)
        if slurm is None:
            return None
        env = slurm
    else:
        return None
    if not (0 <= env.rank < env.world_size and 0 <= env.local_rank < env.local_world_size <= env.world_size):
        raise ConfigError(
            f"the environment says rank {env.rank} of {env.world_size} and local rank {env.local_rank} of "
            f"{env.local_world_size}, which cannot be; start with torchrun, or unset RANK and WORLD_SIZE"
        )
    return env


def _from_torchrun(environ: Mapping[str, str], timeout_s: float) -> RankEnv:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not; start with torchrun, or unset RANK and "
            "WORLD_SIZE to start ranks here"
        )
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", 1)
    return RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK", 0),
        local_world_size=local_world_size,
        init_method="env://",
        timeout_s=timeout_s,
        node_rank=_integer(environ, "GROUP_RANK", rank // max(1, local_world_size)),
        num_nodes=max(1, world_size // max(1, local_world_size)),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_srun(environ: Mapping[str, str], timeout_s: float) -> RankEnv | None:
    world_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _integer(environ, world_name, 1)
    if "MASTER_ADDR" not in environ:
        if world_size == 1:  # one task that may start its own ranks
            return None
        raise ConfigError(
            f"srun started {world_size} tasks but MASTER_ADDR is not set; before srun, export MASTER_ADDR=$(scontrol "
            'show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    num_nodes = _integer(environ, nodes_name, 1)
    node_rank = _integer(environ, "SLURM_NODEID", 0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    per_node: list[int] = []  # "4(x2),1" is 4, 4, 1
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        per_node += [int(count)] * int(times or 1)
    # Jobs that share a node must not meet: below the ports that systems give away by themselves, one for each job and step.
    job, step = (_integer(environ, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    host, port = environ["MASTER_ADDR"], _integer(environ, "MASTER_PORT", 10000 + (16 * job + step) % 20000)
    return RankEnv(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_integer(environ, "SLURM_LOCALID", 0),
        local_world_size=per_node[node_rank] if node_rank < len(per_node) else max(1, world_size // max(1, num_nodes)),
        init_method=f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}",
        timeout_s=timeout_s,
        node_rank=node_rank,
        num_nodes=num_nodes,
    )


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not a whole number; start with torchrun, or unset it")
    return int(text)
