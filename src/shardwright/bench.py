"""``bench train``: a training step of ours beside a peer's, on the same model, weights, batches and steps.

Both live in the same rank processes and take turns (A B A B ...), with a barrier before each turn, so the machine's
mood is the same for both. The figure is the ratio of medians. Peers are files of ``benchmarks/peers`` with a class
``Peer(config, weights, mesh)`` whose ``step(batch)`` trains one step and returns the loss; they need a checkout.
"""

from __future__ import annotations

import importlib.util
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.table import Table
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.model_config import ModelConfig
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.launch import RankEnv, device_for, init_process_group, launch
from shardwright.train.data import MicroBatch
from shardwright.train.step import Trainer

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"


class Peer(Protocol):
    """One rank of a peer: trains one step on the rank's micro-batches and returns the mean loss of its tokens."""

    def step(self, batches: list[MicroBatch]) -> Tensor: ...


def bench_training(layout: str, peer: str, model: str, seq_len: int, rounds: int, steps: int) -> dict[str, Any]:
    """Run both and return ``ratio`` (ours / peer, of medians), medians, every sample and where our time goes."""
    if not (PEERS / f"{peer}.py").is_file():
        known = ", ".join(sorted(path.stem for path in PEERS.glob("*.py"))) or "none here: peers need a source checkout"
        raise ConfigError(f"peer {peer!r} is not known; known: {known}")
    config = RunConfig.of(
        {
            "model": model,
            "data": {"sources": "synthetic:sentences", "seq_len": seq_len},
            "optim": {"lr": 1e-3, "clip": 0.0, "schedule": "constant", "betas": [0.9, 0.999], "weight_decay": 0.01},
            "layout": layout,
        }
    )
    results = launch(
        _bench_rank,
        config.layout.world_size,
        (config, peer, rounds, steps),
        layout=str(config.layout),
        threads_per_rank=1,
    )
    return summarise(config, peer, results[0])


def random_batches(config: ModelConfig, layout_batches: int, sequences: int, seq_len: int, seed: int) -> list[MicroBatch]:
    """Random tokens, the same for ours and the peer: ``layout_batches`` micro-batches of whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(layout_batches):
        text = torch.randint(0, config.vocab_size, (sequences, seq_len + 1), generator=generator)
        positions = torch.arange(seq_len).repeat(sequences)
        tokens, targets = text[:, :-1].reshape(-1), text[:, 1:].reshape(-1)
        batches.append(
            MicroBatch(tokens, targets, positions, positions, (seq_len,) * sequences, tokens.numel(), tuple(range(sequences)))
        )
    return batches


def _bench_rank(env: RankEnv, config: RunConfig, peer_name: str, rounds: int, steps: int) -> dict[str, Any]:
    device = device_for(env)
    if env.world_size > 1:
        init_process_group(env, "cuda" if device.type == "cuda" else "cpu")
        mesh = Mesh.distributed(config.layout, env.rank)
    else:
        mesh = Mesh.solo()
    trainer = Trainer(config, mesh, device)
    weights = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    peer = _load_peer(peer_name, config, weights, mesh, device)
    layout = config.layout
    batches = random_batches(config.model, layout.microbatches, layout.micro_batch, config.data.seq_len, 100 + env.rank)
    batches = [batch.to(device) for batch in batches]
    ours: list[float] = []
    theirs: list[float] = []
    parts: list[dict[str, float]] = []
    losses: dict[str, list[float]] = {"ours": [], "peer": []}
    cpu: dict[str, list[float]] = {"ours": [], "peer": []}
    peer_losses: list[Tensor] = []
    step = 0

    def our_turn() -> None:
        nonlocal step
        for _ in range(steps):
            result = trainer.step(batches, step)
            losses["ours"].append(result.loss)
            parts.append(_parts(result.busy_seconds[env.rank], result.ledger.exposed_seconds))
            step += 1

    def peer_turn() -> None:
        for _ in range(steps):
            peer_losses.append(peer.step(batches).detach().clone())

    for index in range(rounds + 1):
        for turn, samples, processor in ((our_turn, ours, cpu["ours"]), (peer_turn, theirs, cpu["peer"])):
            before = time.process_time()
            seconds = _timed(turn, mesh, device) / steps
            if index:  # the first round warms up
                samples.append(seconds)
                processor.append((time.process_time() - before) / steps)
    totals = mesh.world.all_reduce(torch.stack(peer_losses).double(), name="peer losses") / mesh.world.size
    losses["peer"] = totals.tolist()
    return {"ours": ours, "peer": theirs, "cpu": cpu, "losses": losses, "parts": parts[steps:]}


def _parts(busy: float, exposed: float) -> dict[str, float]:
    return {"forward_backward": busy, "exposed_communication": exposed}


def _timed(turn: Callable[[], None], mesh: Mesh, device: torch.device) -> float:
    mesh.world.barrier()
    start = time.perf_counter()
    turn()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    mesh.world.barrier()
    return time.perf_counter() - start


def _load_peer(name: str, config: RunConfig, weights: dict[str, Tensor], mesh: Mesh, device: torch.device) -> Peer:
    spec = importlib.util.spec_from_file_location(f"shardwright_peer_{name}", PEERS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    peer: Peer = module.Peer(config, weights, mesh, device)
    return peer


def summarise(config: RunConfig, peer: str, result: dict[str, Any]) -> dict[str, Any]:
    """The JSON of the contract: ``ratio``, ``ours``, ``peer`` (medians and rates) and every sample."""
    layout = config.layout
    tokens = layout.global_batch * config.data.seq_len
    ours, theirs = statistics.median(result["ours"]), statistics.median(result["peer"])
    cpu = {side: statistics.median(samples) for side, samples in result["cpu"].items()}
    pairs = [a / b for a, b in zip(result["ours"], result["peer"], strict=True)]
    drift = max(abs(a - b) / abs(b) for a, b in zip(result["losses"]["ours"], result["losses"]["peer"], strict=True))
    parts = {key: statistics.median(part[key] for part in result["parts"]) for key in result["parts"][0]}
    return {
        "ratio": ours / theirs,
        "ratio_of_pairs": statistics.median(pairs),
        "ratio_of_processor_time": cpu["ours"] / cpu["peer"],
        "ours": {"step_seconds": ours, "tokens_per_second": tokens / ours, "processor_seconds": cpu["ours"], **parts},
        "peer": {
            "name": peer,
            "step_seconds": theirs,
            "tokens_per_second": tokens / theirs,
            "processor_seconds": cpu["peer"],
        },
        "samples": {"ours": result["ours"], "peer": result["peer"]},
        "losses": result["losses"],
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
    """Medians side by side, and the ratio."""
    table = Table(title=f"{result['model']}, {result['layout']}, {result['tokens_per_step']} tokens a step", title_justify="left")
    for name in ("", "step", "tokens/s", "processor time of a rank"):
        table.add_column(name, justify="left" if not name else "right")
    for name, row in (("shardwright", result["ours"]), (result["peer"]["name"], result["peer"])):
        rate, processor = f"{row['tokens_per_second']:,.0f}", f"{row['processor_seconds'] * 1e3:.1f} ms"
        table.add_row(name, f"{row['step_seconds'] * 1e3:.1f} ms", rate, processor)
    table.add_section()
    ratios = (result["ratio"], result["ratio_of_pairs"], result["ratio_of_processor_time"])
    table.add_row("ratio ours / peer", f"{ratios[0]:.3f}", f"pairs {ratios[1]:.3f}", f"{ratios[2]:.3f}")
    table.add_row("losses differ by", f"{result['largest_loss_difference']:.1e}", "", "")
    return table
