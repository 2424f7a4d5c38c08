"""``bench comm``: seconds of every verb against size, on every transport that is at hand, in one run.

For each verb and size the transports take turns (A B A B ...), each turn after a barrier; the figure is the median over
turns of the slowest rank. A line ``latency + bytes sent / bandwidth`` is fitted to each verb and transport, and the
all-reduces of the best transport become the link of a cluster file that ``plan --cluster`` reads: seconds of a hop, the
highest rate, and the share of it that each size gets.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil, log2
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from shardwright.bench_steps import Step, copy_rate, with_software
from shardwright.comm.base import Comm
from shardwright.comm.dist import DistComm
from shardwright.comm.transport import transport_maker
from shardwright.core.cluster import Chip, Cluster, LinkLevel, find_chip
from shardwright.core.ledger import ring_bytes
from shardwright.errors import ConfigError
from shardwright.launch import RankEnv, device_for, init_process_group, launch, torchrun_env
from shardwright.train.peak import measured_matmul_flops
from shardwright.train.units import format_bytes, format_seconds

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "exchange")
"""``exchange``: each rank sends a buffer to the next and receives one from the one before."""
CPU_TRANSPORTS = ("gloo", "gloo composed", "shm", "shm own")
SECONDS_PER_POINT = 0.6
SECONDS_PER_TURN = 0.004
MOST_CALLS = 100
LEAST_TURNS, MOST_TURNS = 7, 40


@dataclass(frozen=True)
class Point:
    """One measured median. ``bytes`` is the full buffer, ``sent`` what the ring formulas say that one rank sends,
    ``moved`` what it reads and writes in memory (None where the transport does not tell).
    """

    verb: str
    transport: str
    bytes: int
    sent: int
    seconds: float
    moved: int | None


@dataclass(frozen=True)
class Fit:
    """``seconds = latency + sent / bandwidth`` (seconds, bytes per second)."""

    verb: str
    transport: str
    latency: float
    bandwidth: float


def bench_comm(ranks: int, most_bytes: int, transports: Sequence[str] = (), steps: bool = False) -> dict[str, Any]:
    """Measure and fit; ``transports`` of ``gloo``, ``gloo composed``, ``shm``, ``shm own`` and ``nccl``, all that are at hand
    by default.

    ``gloo`` has the verbs of PyTorch, ``gloo composed`` those that we make of them. ``shm own``: buffers of `Comm.empty`,
    which peers read in place. In all transports a rank's part in a gather or a scatter is its own slice of the full buffer.
    ``steps``: train a few steps too, where the ranks are the CPU's and started here, for what the software takes.
    Raises `ConfigError` below 2 ranks, for a transport that is not here, and where torchrun has started several nodes.
    """
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: a link has two ends; use 2 or more")
    env = torchrun_env()
    if env is not None and env.num_nodes > 1:
        raise ConfigError(
            f"bench comm measures the links of one node, and {env.num_nodes} were started; start it on one, and add the link "
            "between nodes to the cluster file as further [[levels]]"
        )
    here = at_hand(ranks)
    for name in transports:
        if name not in here:
            raise ConfigError(f"--transport {name} is not here; use one of {', '.join(here)}")
    results = launch(_rank, ranks, (most_bytes, tuple(transports)), layout=f"dp={ranks}", threads_per_rank=1)
    found: dict[str, Any] = results[0]
    points = [Point(**point) for point in found["points"]]
    fits = [fit(points, verb, transport) for transport in found["transports"] for verb in VERBS]
    cluster = link_cluster(found, fits, ranks)
    timed: list[Step] = []
    if steps and env is None and found["device"] == "cpu":
        cluster, timed = with_software(cluster)
    lines, rows = [asdict(line) for line in fits], [asdict(step) for step in timed]
    return {**found, "ranks": ranks, "fits": lines, "steps": rows, "cluster": cluster.to_toml()}


def at_hand(ranks: int) -> tuple[str, ...]:
    """The transports of ``ranks`` ranks on this machine: NCCL where each has a GPU, else those of the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ("nccl",) if gpus >= ranks else CPU_TRANSPORTS


def fit(points: Iterable[Point], verb: str, transport: str) -> Fit:
    """The latency is the least time measured; the bandwidth that of the largest size beyond it."""
    mine = sorted((p for p in points if p.verb == verb and p.transport == transport), key=lambda p: p.bytes)
    latency = min(p.seconds for p in mine)
    largest = mine[-1]
    return Fit(verb, transport, latency, largest.sent / max(largest.seconds - latency, 1e-9))


# -- in the ranks ------------------------------------------------------------------------------------------


def _rank(env: RankEnv, most_bytes: int, wanted: tuple[str, ...]) -> dict[str, Any]:
    device = device_for(env)
    init_process_group(env, "cuda" if device.type == "cuda" else "cpu")
    comms = _transports(env, device, wanted)
    points = []
    size = 1024
    while size <= most_bytes:
        for verb in VERBS:
            calls = {name: _call(verb, comm, size // 4, device, own) for name, (comm, own) in comms.items()}
            moved = {name: _moved(call, comms[name][0]) for name, call in calls.items()}
            for name, seconds in _medians(calls, comms).items():
                sent = _sent(verb, size // 4, env.world_size)
                points.append(asdict(Point(verb, name, size, sent, seconds, moved[name])))
        size *= 4
    return {
        "points": points,
        "transports": list(comms),
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "matmul_flops": measured_matmul_flops(torch.float32) if device.type == "cpu" else None,
        "copy_bytes_per_second": copy_rate() if device.type == "cpu" else None,
    }


def _transports(env: RankEnv, device: torch.device, wanted: tuple[str, ...]) -> dict[str, tuple[Comm, bool]]:
    groups = (tuple(range(env.world_size)),)
    found: dict[str, tuple[Comm, bool]] = {}
    for kind in ("nccl",) if device.type == "cuda" else ("gloo", "shm"):
        if wanted and not any(name.split()[0] == kind for name in wanted):
            continue
        comm = transport_maker(kind, env.rank, env.timeout_s, ("world",))("world", groups)
        if kind == "gloo":
            found["gloo"] = (DistComm("world", groups[0], None, composed=False), False)
            found["gloo composed"] = (comm, False)
        else:
            found[kind] = (comm, False)
        if kind == "shm":
            found["shm own"] = (comm, True)
    return {name: pair for name, pair in found.items() if not wanted or name in wanted}


def _call(verb: str, comm: Comm, numel: int, device: torch.device, own: bool) -> Callable[[], object]:
    """A call of ``verb`` over a full buffer of ``numel`` fp32 elements."""

    def buffer(count: int) -> Tensor:
        made = comm.empty(count, torch.float32, device) if own else torch.empty(count, device=device)
        return made.zero_()  # sums stay finite over many calls

    full, share = buffer(numel), numel // comm.size
    whole, part = full[: share * comm.size], full[comm.rank * share : (comm.rank + 1) * share]
    if verb == "all_reduce":
        return lambda: comm.all_reduce_start(full, name=verb).wait()
    if verb == "reduce_scatter":
        return lambda: comm.reduce_scatter_start(part, whole, name=verb).wait()
    if verb == "all_gather":
        return lambda: comm.all_gather_start(whole, part, name=verb).wait()
    if verb == "all_to_all":
        sizes = [share] * comm.size
        return lambda: comm.all_to_all(full[: sum(sizes)], sizes, sizes, name=verb)
    if verb == "broadcast":
        return lambda: comm.broadcast(full, name=verb)
    received = buffer(numel)

    def exchange() -> None:
        sending = comm.send(full, (comm.rank + 1) % comm.size, name=verb)
        comm.receive(received, (comm.rank - 1) % comm.size, name=verb).wait()
        sending.wait()

    return exchange


def _moved(call: Callable[[], object], comm: Comm) -> int | None:
    """Bytes of memory that this rank reads and writes in one call."""
    before = comm.moved_bytes
    call()
    after = comm.moved_bytes
    return None if before is None or after is None else after - before


def _medians(calls: dict[str, Callable[[], object]], comms: dict[str, tuple[Comm, bool]]) -> dict[str, float]:
    """Seconds of each call, the slowest rank's, medians over turns; all ranks make the same number of turns and calls."""
    names, judge = list(calls), next(iter(comms.values()))[0]
    _turn(calls, comms, [1] * len(names))  # touches the memory
    first = _agreed(judge, _turn(calls, comms, [2] * len(names)))
    repeats = [max(1, min(MOST_CALLS, int(SECONDS_PER_TURN / max(seconds, 1e-7)))) for seconds in first]
    turn_seconds = sum(seconds * count for seconds, count in zip(first, repeats, strict=True))
    turns = max(LEAST_TURNS, min(MOST_TURNS, int(SECONDS_PER_POINT / turn_seconds)))
    rows = [_agreed(judge, _turn(calls, comms, repeats)) for _ in range(turns)]
    return {name: statistics.median(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _turn(
    calls: dict[str, Callable[[], object]], comms: dict[str, tuple[Comm, bool]], repeats: Sequence[int]
) -> list[float]:
    """Seconds of one call, each transport's ``repeats`` in a row after a barrier."""
    seconds = []
    for (name, call), count in zip(calls.items(), repeats, strict=True):
        comms[name][0].barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        seconds.append((time.perf_counter() - start) / count)
    return seconds


def _agreed(judge: Comm, seconds: Sequence[float]) -> list[float]:
    """The slowest rank's."""
    return list(judge.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max", name="seconds").tolist())


def _sent(verb: str, numel: int, ranks: int) -> int:
    if verb == "exchange":
        return numel * 4
    if verb == "all_to_all":
        return numel // ranks * (ranks - 1) * 4
    return ring_bytes(verb, numel, 4, ranks)


# -- what comes out ----------------------------------------------------------------------------------------


def link_level(points: Iterable[Point], line: Fit, ranks: int) -> LinkLevel:
    """The link of ``line``'s all-reduces, such that the planner's take what was measured: 2 log2 n hops of a tree where they
    are small, 2 (n - 1) of a ring where they are large.

    The rate of a size is that of its bytes beyond the hops, where these are no more than half of the time; smaller messages
    get the share of the smallest of these.
    """
    hop = line.latency / (2 * ceil(log2(ranks)))
    ring = 2 * (ranks - 1) * hop
    rates = [
        (point.bytes / ranks, point.sent / (point.seconds - ring))
        for point in sorted(points, key=lambda point: point.bytes)
        if (point.verb, point.transport) == (line.verb, line.transport) and point.seconds >= 2 * ring > 0
    ]
    highest = max((rate for _, rate in rates), default=line.bandwidth)
    curve = tuple((size, rate / highest) for size, rate in rates)
    return LinkLevel("host", ranks, highest, hop, curve)


def link_cluster(found: dict[str, Any], fits: Sequence[Fit], ranks: int) -> Cluster:
    """This machine as the planner sees it: one node, one link level, the best transport's all-reduce."""
    best = max((line for line in fits if line.verb == "all_reduce"), key=lambda line: line.bandwidth)
    level = link_level((Point(**point) for point in found["points"]), best, ranks)
    if found["device"] != "cpu":
        return Cluster(find_chip(found["device"]), 1, ranks, (level,))
    flops, memory = found["matmul_flops"], found["copy_bytes_per_second"]
    chip = Chip(
        name="cpu-core",
        bf16=None,
        fp16=None,
        fp8=None,
        fp4=None,
        fp32=flops,
        memory_bytes=_memory_bytes() // ranks,
        memory_bandwidth=memory,
        intra_bandwidth=level.bandwidth,
        inter_bandwidth=None,
        domain_size=ranks,
        source="measured by bench comm",
    )
    return Cluster(chip, 1, ranks, (level,))


def _memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def comm_table(result: dict[str, Any]) -> Table:
    """Medians of every verb and size, a column for each transport, and how much faster the last is than the first."""
    transports = result["transports"]
    title = f"{result['ranks']} ranks, {result['device']}: medians of the slowest rank"
    table = Table(title=title, title_justify="left")
    table.add_column("verb")
    for name in ("bytes", *transports, "gain"):
        table.add_column(name, justify="right")
    by_key: dict[tuple[str, int], dict[str, float]] = {}
    for point in result["points"]:
        by_key.setdefault((point["verb"], point["bytes"]), {})[point["transport"]] = point["seconds"]
    for verb in VERBS:
        for (name, size), row in by_key.items():
            if name == verb:
                gain = f"{row[transports[0]] / row[transports[-1]]:.1f}x" if len(transports) > 1 else ""
                table.add_row(verb, format_bytes(size), *(format_seconds(row[t]) for t in transports), gain)
        table.add_section()
    return table


def plot_comm(result: dict[str, Any], path: Path) -> None:
    """Seconds against bytes, one panel for each verb, logarithmic."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True).flatten()
    for axes, verb in zip(panels, VERBS, strict=True):
        for transport in result["transports"]:
            points = [p for p in result["points"] if p["verb"] == verb and p["transport"] == transport]
            axes.loglog([p["bytes"] for p in points], [p["seconds"] for p in points], marker="o", ms=3, label=transport)
        axes.set_title(verb, fontsize=10)
        axes.grid(True, which="major", alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.supxlabel("bytes of the full buffer")
    figure.supylabel("seconds, median")
    figure.suptitle(f"{result['ranks']} ranks on {result['device']}")
    figure.savefig(path, dpi=130)
