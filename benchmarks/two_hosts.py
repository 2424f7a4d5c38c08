"""Two hosts made of network namespaces with a throttled link between them: torchrun on two nodes of two ranks each.

    python benchmarks/two_hosts.py [--mbit 100] [--json FILE]

Each host has a name, process ids and network of its own, so ranks of one host share memory and gloo carries the rest
over the link. Shown: which transport each axis got; `verify` on the four ranks; seconds of a training step with tensor
parallelism inside the hosts and across the link, beside what the planner says of both. Needs root, ``ip`` and ``tc``;
where these are not allowed it says why and passes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ADDRESSES = ("10.83.7.1", "10.83.7.2")
PORT = 29541
INSIDE, ACROSS = "tp=2,dp=2,micro_batch=2", "tp=4,micro_batch=4"
"""Two layouts with the same samples in a step: tp within each host with dp between them; tp over both."""
MODEL = {
    "vocab_size": 320, "dim": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 512, "max_positions": 256,
}  # fmt: skip
SEQUENCE, STEPS = 128, 8


class NotAllowed(Exception):
    """This machine does not let us make what is needed; the text says what."""


def root(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAllowed(f"{' '.join(words)}: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")


@contextlib.contextmanager
def two_hosts(mbit: float) -> Iterator[tuple[str, str]]:
    """Names of two network namespaces that are joined by a link of ``mbit`` Mbit/s in each direction."""
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            raise NotAllowed(f"{tool} is not installed")
    if os.geteuid() != 0:
        raise NotAllowed("network namespaces need root")
    mark = os.getpid() % 100_000
    names = (f"shw{mark}a", f"shw{mark}b")
    made: list[str] = []
    try:
        for name in names:
            root("ip", "netns", "add", name)
            made.append(name)
        ends = (f"sw{mark}a", f"sw{mark}b")
        root("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            root("ip", "-n", name, "link", "set", end, "name", "link0")
            root("ip", "-n", name, "address", "add", f"{address}/24", "dev", "link0")
            for device in ("lo", "link0"):
                root("ip", "-n", name, "link", "set", device, "up")
            shape = ("tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms")
            root("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "link0", "root", *shape)
        yield names
    finally:
        for name in made:
            subprocess.run(("ip", "netns", "delete", name), check=False, capture_output=True)


def torchrun(hosts: tuple[str, str], *words: str, timeout: float = 600.0) -> str:
    """Run ``python -m torch.distributed.run ... words`` on both hosts; what the first one printed."""
    running = []
    for node, (name, address) in enumerate(zip(hosts, ADDRESSES, strict=True)):
        start = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2",
            "--master-addr", ADDRESSES[0], "--master-port", str(PORT), "--local-addr", address, *words,
        ]  # fmt: skip
        shell = f'hostname {name}; exec "$@"'
        command = ["ip", "netns", "exec", name, "unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child",
                   "sh", "-c", shell, "sh", *start]  # fmt: skip
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        extra = {"GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "PYTHONPATH": path}
        running.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | extra, cwd=ROOT)
        )
    outputs = []
    try:
        for process in running:
            outputs.append(process.communicate(timeout=timeout))
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise RuntimeError("\n".join(f"host {node}: {err.strip()[-1500:]}" for node, (_, err) in enumerate(outputs)))
    return outputs[0][0]


# -- on the ranks ------------------------------------------------------------------------------------------


def table(folder: Path) -> dict[str, Any]:
    return {
        "model": MODEL,
        "data": {"sources": "synthetic:sentences", "seq_len": SEQUENCE, "cache": str(folder / "datasets")},
        "optim": {"name": "sgd", "lr": 0.01},
        "train": {"steps": 100, "threads": 1, "run_dir": str(folder / "run"), "timeout_s": 120},
    }


def worker(folder: Path) -> None:
    """One rank: transports of each axis, and median seconds of a step, for both layouts."""
    from shardwright.comm.mesh import MESH_AXES, Mesh
    from shardwright.comm.shm import ShmComm
    from shardwright.core.run_config import RunConfig
    from shardwright.launch import init_process_group, torchrun_env
    from shardwright.train.prepare import prepare_data
    from shardwright.train.step import Trainer
    from shardwright.verify.parity import train_sampler

    env = torchrun_env(timeout_s=120)
    assert env is not None
    init_process_group(env)
    found: dict[str, Any] = {}
    for text in (INSIDE, ACROSS):
        config = RunConfig.of(table(folder), (), text)
        mesh = Mesh.distributed(config.layout, env.rank, 120)
        kinds = {}
        for axis in MESH_AXES:
            comm = mesh.axis(axis)
            if comm.size > 1:
                kinds[axis] = "shared memory" if isinstance(getattr(comm, "inner", comm), ShmComm) else "gloo"
        trainer, seconds = Trainer(config, mesh), []
        sampler = train_sampler(config, prepare_data(config), mesh.coordinates["dp"])
        for step in range(STEPS):
            batches = sampler.batches(step)
            mesh.world.barrier()
            start = time.perf_counter()
            result = trainer.step(batches, step)
            seconds.append(time.perf_counter() - start)
        found[text] = {"transports": kinds, "step_seconds": statistics.median(seconds[2:]), "loss": result.loss}
    if env.rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


# -- beside the planner ------------------------------------------------------------------------------------


def planned(mbit: float) -> dict[str, float]:
    """Seconds of a step that the planner gives both layouts, on this machine's measured chip and a link of ``mbit``."""
    from shardwright.bench_comm import bench_comm
    from shardwright.core.cluster import Cluster, LinkLevel
    from shardwright.core.layout import Layout
    from shardwright.core.model_config import ModelConfig
    from shardwright.plan.neighbours import price_with_neighbours
    from shardwright.plan.step_time import Pricer

    with tempfile.TemporaryDirectory(prefix="shardwright-cluster-") as name:
        path = Path(name) / "cluster.toml"
        path.write_text(bench_comm(2, 1 << 20, ())["cluster"], encoding="utf-8")
        one = Cluster.load(str(path))
    link = LinkLevel("link", 4, mbit * 1e6 / 8 / 2, 1e-3)  # both ranks of a host share it
    cluster = replace(one, nodes=2, gpus_per_node=2, levels=(replace(one.levels[0], size=2), link))
    pricer = Pricer(ModelConfig(**MODEL), cluster, SEQUENCE)
    return {text: price_with_neighbours(pricer, Layout.parse(text)).step.seconds for text in (INSIDE, ACROSS)}


def measure(mbit: float) -> dict[str, Any]:
    """Everything; raises `NotAllowed`."""
    with tempfile.TemporaryDirectory(prefix="shardwright-hosts-") as name, two_hosts(mbit) as hosts:
        folder = Path(name)
        from shardwright.core.run_config import RunConfig
        from shardwright.train.prepare import prepare_data

        prepare_data(RunConfig.of(table(folder)))
        printed = torchrun(hosts, str(Path(__file__).resolve()), "--worker", str(folder))
        found = json.loads(printed.split("RESULT ", 1)[1].splitlines()[0])
        sets = ("--set", "model.dim=64", "--set", f"train.run_dir={folder}/verify", "--set", "data.seq_len=32")
        run = ("verify", "examples/tiny.toml", "--layout", "tp=2,pp=2,microbatches=3", "--json", *sets)
        answer = json.loads(torchrun(hosts, "-m", "shardwright", *run))
    shown = {key: answer[key] for key in ("passed", "loss", "gradients", "ledger")}
    return {"mbit": mbit, "layouts": found, "verify": shown, "planned_seconds": planned(mbit)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker)
        return 0
    try:
        found = measure(arguments.mbit)
    except NotAllowed as reason:
        found = {"skipped": str(reason)}
    print(json.dumps(found, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
