"""``bench train``: a training step of ours beside a peer's, on the same model, weights, batches and steps.

Each side has its own rank processes, started as its users start them: ours by `launch`, the peer's with a plain
environment and one OpenMP thread, as torchrun does. They take turns (A B A B ...); while one side works the other sleeps,
so the machine's mood is the same for both. The figure is the ratio of medians. The last turn of each side is not timed:
a thread looks at the memory of each rank. Peers are files of ``benchmarks/peers`` with a class
``Peer(config, weights, mesh, device)`` whose ``step(batches)`` trains one step and returns the rank's mean loss; they
need a checkout. ``weights`` has the initial values of the whole model by our names. The peer ``own`` is ours again, with
another layout.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from rich.table import Table
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.model_config import ModelConfig
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError, RankError, ShardwrightError
from shardwright.launch import RankEnv, device_for, init_process_group, launch
from shardwright.model.transformer import Transformer
from shardwright.train.data import MicroBatch
from shardwright.train.memory import MemoryWatch
from shardwright.train.start import check_start
from shardwright.train.step import Trainer
from shardwright.train.supported import DTYPES
from shardwright.train.units import format_bytes

OWN = "own"
"""The peer that is our own step with another layout."""
PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
TURN_LIMIT_S = 300.0
POLL_S = 0.002


class Peer(Protocol):
    """One rank of a peer: trains one step on the rank's micro-batches and returns the mean loss of its tokens, or NaN
    on a rank of a pipeline that has no loss.
    """

    def step(self, batches: list[MicroBatch]) -> Tensor: ...


@dataclass(frozen=True)
class Side:
    """What one side is told; ``name`` is ``ours`` or ``peer``. Turns are files in ``folder``.

    ``tuned``: its ranks start with our settings of the memory allocator.
    """

    name: str
    peer: str
    table: dict[str, Any]
    rounds: int
    steps: int
    folder: str
    tuned: bool = True

    @property
    def config(self) -> RunConfig:
        return RunConfig.of(self.table)

    def turn_file(self, index: int, name: str) -> Path:
        return Path(self.folder) / f"{index}.{name}"

    @property
    def failed(self) -> Path:
        """A file that is there when the peer's process has failed."""
        return Path(self.folder) / "peer.failed"

    @property
    def result_file(self) -> Path:
        return Path(self.folder) / f"{self.name}.result"


def bench_training(
    layout: str,
    peer: str,
    model: str,
    seq_len: int,
    rounds: int,
    steps: int,
    *,
    peer_layout: str = "",
    tune_peer: bool = False,
) -> dict[str, Any]:
    """Run both and return ``ratio`` (ours / peer, of medians), medians, every sample and where our time goes.

    ``peer_layout``: the peer's, as ours if empty; it must make the same global batch. ``tune_peer`` gives the peer our settings
    of the memory allocator instead of those that torchrun starts it with.
    """
    config = bench_config(layout, model, seq_len)
    other = bench_config(peer_layout or layout, model, seq_len)
    check_start(config)
    check_peer(peer, other)
    if config.layout.global_batch != other.layout.global_batch:
        raise ConfigError(
            f"{config.layout} has {config.layout.global_batch} sequences a step and {other.layout} has "
            f"{other.layout.global_batch}; choose dp x microbatches x micro_batch alike"
        )
    with tempfile.TemporaryDirectory(prefix="shardwright-bench-") as folder:
        ours = Side("ours", peer, config.to_table(), rounds, steps, folder)
        tuned = tune_peer or peer == OWN
        theirs = replace(ours, name="peer", table=other.to_table(), tuned=tuned)
        result, of_peer = _run_both(ours, theirs)
        found = summarise(config, peer, result, of_peer)
        return found | {"peer_layout": str(other.layout), "peer_is_tuned": tuned}


def _run_both(ours: Side, theirs: Side) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both sides' results; the peer's ranks are started by a process of its own, whatever it prints."""
    folder = Path(ours.folder)
    task, complaint = folder / "peer.json", folder / "peer.stderr"
    task.write_text(json.dumps(asdict(theirs)), encoding="utf-8")
    command = [sys.executable, "-m", "shardwright.bench", str(task)]
    with (
        complaint.open("w", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors) as process,
    ):
        watching = threading.Thread(target=_note_failure, args=(process, theirs), daemon=True)
        watching.start()
        try:
            result = _run_side(ours)
            process.wait(TURN_LIMIT_S)
        except RankError:
            if not theirs.failed.exists():
                raise
        finally:
            process.kill()
            watching.join()
    if process.returncode != 0:
        raise RankError(f"peer {theirs.peer} failed: {complaint.read_text(encoding='utf-8').strip()[-2000:]}")
    return result, json.loads(theirs.result_file.read_text(encoding="utf-8"))


def _note_failure(process: subprocess.Popen[bytes], side: Side) -> None:
    """Wait for the peer's process; the other side, which may wait for its turn, looks at the file."""
    if process.wait():
        side.failed.touch()


def bench_config(layout: str, model: str, seq_len: int) -> RunConfig:
    """What both sides train: AdamW without clipping on ``seq_len`` tokens of ``model``.

    At 1e-3 the losses of these few repeated tokens magnify rounding by 1e5 in 30 steps (docs/log.md), and could not be compared.
    """
    optim = {"lr": 1e-4, "clip": 0.0, "schedule": "constant", "betas": [0.9, 0.999], "weight_decay": 0.01}
    data = {"sources": "synthetic:sentences", "seq_len": seq_len}
    return RunConfig.of({"model": model, "data": data, "optim": optim, "layout": layout})


def _load_peer(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"shardwright_peer_{name}", PEERS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_peer(name: str, config: RunConfig) -> None:
    """A peer's file names the axes that it can use in ``AXES``, and its ``check(config)`` refuses other runs."""
    if name == OWN:
        check_start(config)
        return
    if not (PEERS / f"{name}.py").is_file():
        known = sorted(path.stem for path in PEERS.glob("*.py"))
        others = ", ".join(known) or "others need a source checkout"
        raise ConfigError(f"peer {name!r} is not known; known: {OWN}, {others}")
    peer = _load_peer(name)
    axes: tuple[str, ...] = peer.AXES
    for axis in ("dp", "tp", "cp", "pp", "ep"):
        if getattr(config.layout, axis) > 1 and axis not in axes:
            raise ConfigError(f"peer {name} cannot run {axis}={getattr(config.layout, axis)}; use {', '.join(axes)} only")
    peer.check(config)


def _run_side(side: Side) -> dict[str, Any]:
    config = side.config
    world = config.layout.world_size
    results = launch(
        _bench_rank,
        world,
        (side,),
        layout=str(config.layout),
        threads_per_rank=1,
        tune_memory=side.tuned,
        timeout_s=TURN_LIMIT_S,  # the other ranks wait in a barrier for the turn
    )
    found: dict[str, Any] = results[0]
    return found


def random_batches(config: ModelConfig, count: int, sequences: int, seq_len: int, seed: int) -> list[MicroBatch]:
    """``count`` micro-batches of ``sequences`` whole sequences of random tokens, the same for ours and the peer."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        text = torch.randint(0, config.vocab_size, (sequences, seq_len + 1), generator=generator)
        positions = torch.arange(seq_len).repeat(sequences)
        tokens, targets = text[:, :-1].reshape(-1), text[:, 1:].reshape(-1)
        lengths = (seq_len,) * sequences
        batches.append(MicroBatch(tokens, targets, positions, positions, lengths, tokens.numel(), tuple(range(sequences))))
    return batches


def _bench_rank(env: RankEnv, side: Side) -> dict[str, Any]:
    config, layout = side.config, side.config.layout
    device = device_for(env)
    if env.world_size > 1:
        init_process_group(env, "cuda" if device.type == "cuda" else "cpu")
        mesh = Mesh.distributed(layout, env.rank, env.timeout_s)
    else:
        mesh = Mesh.solo()
    seed = 100 + mesh.coordinates["dp"]
    batches = random_batches(config.model, layout.microbatches, layout.micro_batch, config.data.seq_len, seed)
    batches = [batch.to(device) for batch in batches]
    parts: list[dict[str, float]] = []
    classes: dict[str, int] = {}
    losses: list[Tensor] = []
    if side.name == "ours" or side.peer == OWN:
        step = _our_step(config, mesh, device, parts, classes)
    else:
        step = peer_step(side.peer, config, mesh, device)
    samples: list[float] = []
    processor: list[float] = []
    watch = MemoryWatch()
    for index in range(side.rounds + 2):
        if env.rank == 0:
            _wait_for_turn(side, index)
        mesh.world.barrier()
        looked_at = index > side.rounds
        begin, cpu = time.perf_counter(), time.process_time()
        with watch if looked_at else nullcontext():
            losses += [step(batches) for _ in range(side.steps)]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            mesh.world.barrier()
        if index and not looked_at:  # the first round warms up
            samples.append((time.perf_counter() - begin) / side.steps)
            processor.append((time.process_time() - cpu) / side.steps)
        if env.rank == 0:
            side.turn_file(index, side.name).touch()
    known = torch.stack(losses).double()
    counted = torch.stack([known.nan_to_num(0.0), (~known.isnan()).double()])
    sums, counts = mesh.world.all_reduce(counted, name="losses")
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else watch.peak
    return {
        "samples": samples,
        "processor": processor,
        "losses": (sums / counts).tolist(),
        "parts": parts[side.steps : -side.steps],
        "memory": mesh.world.gather_objects(peak),
        "classes": mesh.world.gather_objects(classes),
    }


def _our_step(
    config: RunConfig, mesh: Mesh, device: torch.device, parts: list[dict[str, float]], classes: dict[str, int]
) -> Callable[[list[MicroBatch]], Tensor]:
    trainer = Trainer(config, mesh, device)

    def step(batches: list[MicroBatch]) -> Tensor:
        result = trainer.step(batches, len(parts))
        busy, exposed = result.busy_seconds[mesh.rank], result.ledger.exposed_seconds
        parts.append({"forward_backward": busy, "exposed_communication": exposed})
        classes.update(result.ledger.peak)
        return torch.tensor(result.loss, device=device)

    return step


def peer_step(name: str, config: RunConfig, mesh: Mesh, device: torch.device) -> Callable[[list[MicroBatch]], Tensor]:
    """A step of one rank of the peer ``name``, with our initial values."""
    model = Transformer(config.model, Mesh.solo(), DTYPES[config.layout.precision]).initialise(config.train.seed)
    weights = {key: parameter.detach() for key, parameter in model.spec_parameters().items()}
    peer: Peer = _load_peer(name).Peer(config, weights, mesh, device)
    return lambda batches: peer.step(batches).detach().clone()


def _wait_for_turn(side: Side, index: int) -> None:
    """Sleep until the other side has had the turn before this one."""
    before = side.turn_file(index - 1, "peer") if side.name == "ours" else side.turn_file(index, "ours")
    limit = time.monotonic() + TURN_LIMIT_S
    while index + (side.name == "peer") > 0 and not before.exists():
        if side.name == "ours" and side.failed.exists():
            raise RankError("the peer has failed")
        if time.monotonic() > limit:
            raise RankError(f"{side.name}: the other side did not finish its turn in {TURN_LIMIT_S:.0f} s")
        time.sleep(POLL_S)


def summarise(config: RunConfig, name: str, our: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """The JSON of the contract: ``ratio``, ``ours``, ``peer`` (medians and rates) and every sample."""
    layout = config.layout
    tokens = layout.global_batch * config.data.seq_len
    seconds = {side: statistics.median(found["samples"]) for side, found in (("ours", our), ("peer", peer))}
    processor = {side: statistics.median(found["processor"]) for side, found in (("ours", our), ("peer", peer))}
    pairs = [a / b for a, b in zip(our["samples"], peer["samples"], strict=True)]
    drift = max(abs(a - b) / abs(b) for a, b in zip(our["losses"], peer["losses"], strict=True))
    parts = {key: statistics.median(part[key] for part in our["parts"]) for key in our["parts"][0]}
    rows = {
        side: {
            "step_seconds": seconds[side],
            "tokens_per_second": tokens / seconds[side],
            "processor_seconds": processor[side],
            "peak_memory_bytes": max(found["memory"]),
            "memory_bytes_of_ranks": found["memory"],
        }
        for side, found in (("ours", our), ("peer", peer))
    }
    classes = {
        side: {name: max(rank[name] for rank in found["classes"]) for name in found["classes"][0]}
        for side, found in (("ours", our), ("peer", peer))
    }
    return {
        "ratio": seconds["ours"] / seconds["peer"],
        "ratio_of_pairs": statistics.median(pairs),
        "ratio_of_processor_time": processor["ours"] / processor["peer"],
        "ratio_of_memory": rows["ours"]["peak_memory_bytes"] / rows["peer"]["peak_memory_bytes"],
        "ours": {**rows["ours"], **parts, "memory_by_class": classes["ours"]},
        "peer": {"name": name, **rows["peer"], "memory_by_class": classes["peer"]},
        "samples": {"ours": our["samples"], "peer": peer["samples"]},
        "losses": {"ours": our["losses"], "peer": peer["losses"]},
        "largest_loss_difference": drift,
        "model": config.model.name,
        "parameters": config.model.num_parameters(),
        "layout": str(layout),
        "tokens_per_step": tokens,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, 1 thread per rank",
    }


def bench_table(result: dict[str, Any]) -> Table:
    """Medians side by side, peak memory, and the ratios."""
    table = Table(title=f"{result['model']}, {result['layout']}, {result['tokens_per_step']} tokens a step", title_justify="left")
    for name in ("", "step", "tokens/s", "processor time of a rank", "peak memory of a rank"):
        table.add_column(name, justify="left" if not name else "right")
    for name, row in (("shardwright", result["ours"]), (result["peer"]["name"], result["peer"])):
        rate, processor = f"{row['tokens_per_second']:,.0f}", f"{row['processor_seconds'] * 1e3:.1f} ms"
        memory = format_bytes(row["peak_memory_bytes"])
        table.add_row(name, f"{row['step_seconds'] * 1e3:.1f} ms", rate, processor, memory)
    table.add_section()
    ratios = (result["ratio"], result["ratio_of_pairs"], result["ratio_of_processor_time"], result["ratio_of_memory"])
    table.add_row("ratio ours / peer", f"{ratios[0]:.3f}", f"pairs {ratios[1]:.3f}", *(f"{ratio:.3f}" for ratio in ratios[2:]))
    table.add_row("losses differ by", f"{result['largest_loss_difference']:.1e}", "", "", "")
    return table


def _peer_main(path: str) -> int:
    """The peer's side in its own process: reads its task, writes its result."""
    side = Side(**json.loads(Path(path).read_text(encoding="utf-8")))
    try:
        side.result_file.write_text(json.dumps(_run_side(side)), encoding="utf-8")
    except ShardwrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_peer_main(sys.argv[1]))
