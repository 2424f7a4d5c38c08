"""`Chip` and `Cluster`: what the planner knows about a machine.

Units: FLOP/s, bytes, bytes per second, seconds. Peaks are dense (no sparsity), bandwidths per direction and per GPU.
A cluster is ``CHIP:NODESxGPUS``, or a TOML file (`Cluster.load`; units are in the names of its keys)::

    chip = "h100-80gb"          # or a table [chip] with name, bf16_tflops, memory_gib, memory_gb_s, ...
    nodes = 8
    gpus_per_node = 8
    storage_gb_s = 1.0          # to shared storage, per node; left out: 1
    cores = 2                   # that a node's ranks share, where chips are CPU cores; left out: each chip is a rank's own

    [[levels]]                  # from the fastest links outwards; left out: the chip's own links
    name = "intra"              # "rack": fast links that join nodes
    size = 8                    # ranks that reach each other over these links
    gb_s = 450.0                # per direction and GPU
    latency_us = 10.0
    efficiency = [[1e4, 0.05], [1e6, 0.4], [1e8, 0.8]]    # [bytes of a message, share of gb_s that it gets]

    [software]                  # as `bench comm` fits it to steps on this machine; left out: the planner's own for the chip
    message = 3e-4              # constants by the names of `plan.stack.Stack`

>>> cluster = Cluster.parse("h100-80gb:8x8")
>>> cluster.chip.name, cluster.world_size, [level.name for level in cluster.levels]
('H100-SXM5-80GB', 64, ['intra', 'inter'])
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardwright.core.suggest import did_you_mean
from shardwright.errors import ConfigError

GB, TB, GIB = 1e9, 1e12, 2**30
INTRA_LATENCY, INTER_LATENCY = 10e-6, 20e-6
"""Seconds per message inside a scale-up domain and between nodes: calculon's values for A100, a starting point."""

BOARD = 8
"""GPUs of the largest board whose links end at the node; a chip with a larger domain has links between nodes."""
STORAGE = 1e9
"""Bytes/s that a node writes to shared storage where nothing is known: Llama 3's 16,384 GPUs had 2 TB/s (Grattafiori et al.
2024, section 3.3.1), about 1 GB/s for each of 2,000 nodes."""
RACK = "rack"
"""The level of fast links that join several nodes."""


@dataclass(frozen=True)
class Chip:
    """One accelerator as a framework sees it. None: the chip cannot do it, or no source gives it.

    `domain_size` is the number of GPUs that the fast links (`intra_bandwidth`) join; `num_sms` the parts that share the
    tiles of one matrix product (0: not known); `unconfirmed` names the fields that `source` does not give.
    """

    name: str
    bf16: float | None
    fp16: float | None
    fp8: float | None
    fp4: float | None
    fp32: float | None
    memory_bytes: int
    memory_bandwidth: float
    intra_bandwidth: float
    inter_bandwidth: float | None
    domain_size: int
    source: str
    unconfirmed: tuple[str, ...] = ()
    num_sms: int = 0

    def peak(self, precision: str) -> float:
        """Peak dense FLOP/s in ``precision`` (bf16, fp16, fp8, fp4 or fp32); raises `ConfigError` if there is none."""
        peaks = {"bf16": self.bf16, "fp16": self.fp16, "fp8": self.fp8, "fp4": self.fp4, "fp32": self.fp32}
        value = peaks.get(precision)
        if value is None:
            known = ", ".join(name for name, peak in peaks.items() if peak is not None)
            raise ConfigError(f"no {precision} peak is known for {self.name}; use one of: {known}")
        return value


@dataclass(frozen=True)
class LinkLevel:
    """One level of the network: `size` ranks reach each other over it; bytes/s per direction per GPU; seconds.

    ``efficiency`` holds points (bytes of a message, share of the bandwidth that it gets), sizes rising: a measured curve.
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    efficiency: tuple[tuple[float, float], ...] = ()

    def efficiency_at(self, num_bytes: float) -> float:
        """The share of the bandwidth that a message of ``num_bytes`` gets: between points linear in the logarithm of
        the size, beyond the ends constant, 1 without a curve."""
        if not self.efficiency:
            return 1.0
        if num_bytes <= self.efficiency[0][0]:
            return self.efficiency[0][1]
        for (low, first), (high, second) in pairwise(self.efficiency):
            if num_bytes <= high:
                return first + (second - first) * log(num_bytes / low) / log(high / low)
        return self.efficiency[-1][1]


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of one chip. `levels` go from the fastest links outwards; a node is (part of) one scale-up domain.

    A level named ``rack`` is of the same kind as the links inside a node, and the levels below it too. ``storage_bandwidth``:
    bytes/s that each node writes to where checkpoints are. ``cores``: those that a node's ranks share where chips are CPU cores
    (0: each chip is a rank's own). ``software``: constants of the planner's stack that were measured here, by name.
    """

    chip: Chip
    nodes: int
    gpus_per_node: int
    levels: tuple[LinkLevel, ...]
    storage_bandwidth: float = STORAGE
    cores: int = 0
    software: tuple[tuple[str, float | bool], ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def fast_size(self) -> int:
        """GPUs of the scale-up domain: a rack's where a level has that name, else those of the innermost level."""
        rack = [level.size for level in self.levels if level.name == RACK]
        return max(rack) if rack else self.levels[0].size if self.levels else 1

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read ``CHIP:NODESxGPUS`` (``h100-80gb:8x8``); raises `ConfigError` that says what to write instead."""
        match = re.fullmatch(r"\s*(.+?)\s*:\s*(\d+)\s*[x×]\s*(\d+)\s*", text)
        if match is None:
            raise ConfigError(f"cluster {text!r} is not CHIP:NODESxGPUS; write h100-80gb:8x8 for 8 nodes of 8, say")
        return cls.of(find_chip(match[1]), int(match[2]), int(match[3]))

    @classmethod
    def load(cls, text: str) -> Cluster:
        """From ``CHIP:NODESxGPUS`` or the path of a TOML file; raises `ConfigError`."""
        path = Path(text)
        if path.suffix != ".toml":
            return cls.parse(text)
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; give a cluster file or CHIP:NODESxGPUS") from None
        except ValueError as error:  # bad TOML and bad UTF-8
            raise ConfigError(
                f"{path} is not TOML ({error}); write chip, nodes, gpus_per_node and [[levels]]"
            ) from None
        return _from_toml(content, str(path))

    def to_toml(self) -> str:
        """The text of a cluster file that `load` reads back to an equal value."""
        lines = [f"nodes = {self.nodes}", f"gpus_per_node = {self.gpus_per_node}"]
        lines.append(f"storage_gb_s = {self.storage_bandwidth / GB!r}")
        lines += [f"cores = {self.cores}"] * (self.cores > 0) + ["", "[chip]"]
        for key, (field, unit) in _CHIP_KEYS.items():
            value = getattr(self.chip, field)
            if value is None or (field == "unconfirmed" and not value):
                continue
            lines.append(f"{key} = {_toml_value(value, unit)}")
        for level in self.levels:
            lines += ["", "[[levels]]", f'name = "{level.name}"', f"size = {level.size}"]
            lines += [f"gb_s = {level.bandwidth / GB!r}", f"latency_us = {level.latency * 1e6!r}"]
            if level.efficiency:
                points = ", ".join(f"[{size!r}, {share!r}]" for size, share in level.efficiency)
                lines.append(f"efficiency = [{points}]")
        if self.software:
            lines += ["", "[software]", *(f"{key} = {repr(value).lower()}" for key, value in self.software)]
        return "\n".join(lines) + "\n"

    @classmethod
    def of(cls, chip: Chip, nodes: int, gpus_per_node: int) -> Cluster:
        """A cluster with the chip's own links; raises `ConfigError` if they do not reach that far.

        Where the fast links join the boards of a rack (a domain of more GPUs than a board has), as many whole nodes as fit
        are one level ``rack``, in place of the nodes': it is the same links.
        """
        if nodes < 1 or gpus_per_node < 1:
            raise ConfigError(f"cluster of {nodes} nodes with {gpus_per_node} GPUs each; both must be at least 1")
        if gpus_per_node > chip.domain_size:
            raise ConfigError(
                f"{gpus_per_node} GPUs per node, but the fast links of {chip.name} join {chip.domain_size}; "
                f"write the same GPUs as nodes of at most {chip.domain_size}"
            )
        levels = []
        joined = min(nodes, chip.domain_size // gpus_per_node) if chip.domain_size > BOARD else 1
        if joined > 1:
            levels.append(LinkLevel(RACK, joined * gpus_per_node, chip.intra_bandwidth, INTRA_LATENCY))
        elif gpus_per_node > 1:
            levels.append(LinkLevel("intra", gpus_per_node, chip.intra_bandwidth, INTRA_LATENCY))
        if nodes > joined:
            if chip.inter_bandwidth is None:
                raise ConfigError(f"no bandwidth between nodes is known for {chip.name}; use one node")
            levels.append(LinkLevel("inter", nodes * gpus_per_node, chip.inter_bandwidth, INTER_LATENCY))
        return cls(chip, nodes, gpus_per_node, tuple(levels))


_NUM_SMS: Mapping[str, int] = MappingProxyType({
    "V100": 80, "A100": 108, "H100": 132, "H200": 132, "H800": 132, "B200": 148, "GB200": 148, "B300": 148,
    "GB300": 148, "MI250X": 220, "MI300X": 304, "MI325X": 304, "MI355X": 256, "L40S": 142, "RTX": 128,
})  # fmt: skip
"""Streaming multiprocessors (compute units at AMD) of a chip, by the first part of its name; TPUs have none."""


def _chip(
    name: str,
    tflops: tuple[float | None, float | None, float | None, float | None],
    memory_gib: float,
    links: tuple[float, float, float | None, int],
    source: str,
    unconfirmed: str = "",
    fp4: float | None = None,
) -> Chip:
    """A row: TFLOP/s in bf16, fp16, fp8, fp32; memory; TB/s of memory, GB/s intra, GB/s inter, domain size."""
    bf16, fp16, fp8, fp32 = (None if value is None else value * TB for value in tflops)
    memory_bandwidth, intra, inter, domain = links
    return Chip(
        name, bf16, fp16, fp8, None if fp4 is None else fp4 * TB, fp32,
        memory_bytes=int(memory_gib * GIB),
        memory_bandwidth=memory_bandwidth * TB,
        intra_bandwidth=intra * GB,
        inter_bandwidth=None if inter is None else inter * GB,
        domain_size=domain,
        source=source,
        unconfirmed=tuple(unconfirmed.split()),
        num_sms=_NUM_SMS.get(name.split("-")[0], 0),
    )  # fmt: skip


_AIC = "ai-dynamo/aiconfigurator aic-core/src/aiconfigurator_core/systems/"
_ANALYSIS = "cli99/llm-analysis llm_analysis/gpu_configs/"

# Memory sold as "80 GB" is 80 GiB to within 1 or 2 %, so it is taken as GiB; where the source gives what the driver
# reports, that is taken.
_ROWS = (
    _chip("V100-SXM2-32GB", (None, 125, None, 15.7), 32, (0.9, 150, 12.5, 8), _ANALYSIS + "v100-sxm-32gb.json",
          "fp32 inter_bandwidth"),
    _chip("A100-SXM4-40GB", (312, 312, None, 19.5), 40, (1.555, 300, 25, 8),
          _ANALYSIS + "a100-sxm-40gb.json; " + _AIC + "a100_sxm.yaml", "fp32"),
    _chip("A100-SXM4-80GB", (312, 312, None, 19.5), 80, (2.039, 300, 25, 8),
          _AIC + "a100_sxm.yaml; " + _ANALYSIS + "a100-sxm-80gb.json", "fp32"),
    _chip("H100-SXM5-80GB", (989, 989, 1978, 67), 80, (3.35, 450, 50, 8), _AIC + "h100_sxm.yaml", "fp32"),
    _chip("H200-SXM-141GB", (989, 989, 1978, 67), 141, (4.8, 450, 50, 8),
          _AIC + "h200_sxm.yaml; mlcommons/inference_results_v4.1 closed/NVIDIA/systems", "fp32"),
    _chip("B200-SXM-180GB", (2250, 2250, 4500, 75), 180, (7.7, 900, 50, 8),
          _AIC + "b200_sxm.yaml; mlcommons/inference_results_v6.0 closed/Nebius/systems", "fp32 fp4", fp4=9000),
    _chip("GB200-NVL72", (2500, 2500, 5000, 80), 189471 / 1024, (8.0, 900, 50, 72),
          _AIC + "gb200.yaml; mlcommons/inference_results_v6.1 closed/Crusoe/systems", "fp32 fp4", fp4=10000),
    _chip("GB300-NVL72", (2500, 2500, 5000, 80), 284208 / 1024, (8.0, 900, 100, 72), _AIC + "gb300.yaml",
          "fp32 fp4", fp4=15000),
    _chip("MI250X", (383, 383, None, 47.9), 128, (3.2, 400, 25, 4),  # a package of two devices; halve it per device
          _ANALYSIS + "mi250x-128gb.json; rocm.docs.amd.com reference/gpu-arch/mi250",
          "fp32 inter_bandwidth domain_size"),
    _chip("MI300X", (1307.4, 1307.4, 2614.9, 163.4), 192, (5.3, 448, 50, 8),
          "alpharomercoma/MI300X-vs-H200 METHODOLOGY.md; rooflinenotes.dev/accelerators",
          "fp32 intra_bandwidth inter_bandwidth"),
    _chip("MI325X", (1307.4, 1307.4, 2614.9, 163.4), 256, (6.0, 448, 50, 8),
          "docs.vultr.com inference-cookbook rocm hardware-requirements; rooflinenotes.dev/accelerators",
          "fp8 fp32 intra_bandwidth inter_bandwidth"),
    _chip("MI355X", (2516.6, 2516.6, 5033.2, 157.3), 288, (8.0, 537.6, 50, 8),
          "boston-uk AMD Instinct MI355X page; world-today-news p=7253162",
          "bf16 fp32 intra_bandwidth inter_bandwidth"),
    _chip("TPU-v4", (275, None, None, None), 32, (1.2, 300, None, 4096), "cloud.google.com/tpu/docs/v4",
          "intra_bandwidth inter_bandwidth"),
    _chip("TPU-v5e", (197, None, None, None), 16, (0.819, 200, 3.1, 256), "docs.cloud.google.com/tpu/docs/v5e"),
    _chip("TPU-v5p", (459, None, None, None), 95, (2.765, 600, 6.25, 8960),
          "docs.cloud.google.com/tpu/docs/v5p-training", "inter_bandwidth"),
    _chip("TPU-v6e", (918, None, None, None), 32, (1.638, 400, 12.5, 256), "docs.cloud.google.com/tpu/docs/v6e",
          "inter_bandwidth"),
    _chip("L40S", (362, 362, 733, 91.6), 48, (0.864, 32, 25, 8), _AIC + "l40s.yaml", "fp32"),
    _chip("RTX-4090", (165.2, 165.2, 330.3, 82.6), 24, (1.008, 32, 12.5, 8),
          "waredb.com/processor/nvidia-geforce-rtx-4090; gigagpu.com/?p=34220", "intra_bandwidth inter_bandwidth"),
)  # fmt: skip

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _ROWS})

_RELATIVES = (
    _chip("H800-SXM5-80GB", (989, 989, 1978, 67), 80, (3.35, 200, 50, 8), "an H100 with fewer NVLinks",
          "bf16 fp16 fp8 fp32 memory_bytes memory_bandwidth intra_bandwidth inter_bandwidth"),
    _chip("B300-SXM", (2250, 2250, 4500, 75), 268, (8.0, 900, 100, 8), "a GB300 on an 8-GPU board",
          "bf16 fp16 fp8 fp4 fp32 memory_bytes memory_bandwidth intra_bandwidth inter_bandwidth", fp4=13500),
)  # fmt: skip
RELATIVES: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _RELATIVES})
"""Chips of published runs that no source of ours confirms: their figures follow from their relatives in `CHIPS`."""

_SAYS_NOTHING = frozenset(
    ("nvidia", "amd", "google", "tesla", "geforce", "instinct", "gpu", "sxm", "oam", "hbm2", "hbm2e", "hbm3", "hbm3e")
)


def find_chip(name: str) -> Chip:
    """The chip that ``name`` means: "h100-80gb", "gb200", "NVIDIA A100-SXM4-80GB" (a device's own name).

    Every word of ``name`` must be a word of the chip's name, makers and memory kinds apart. Raises `ConfigError` when
    no chip or more than one fits.
    """
    words = _words(name) - _SAYS_NOTHING
    everything = (*CHIPS.values(), *RELATIVES.values())
    found = [chip for chip in everything if words and words <= _words(chip.name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"chip {name!r} may be {' or '.join(chip.name.lower() for chip in found)}; name one of them")
    raise ConfigError(f"no chip {name!r}; {did_you_mean(name, [known.name.lower() for known in everything])}")


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


# -- cluster files -----------------------------------------------------------------------------------

_CHIP_KEYS: Mapping[str, tuple[str, float]] = MappingProxyType({
    "name": ("name", 0),
    **{f"{kind}_tflops": (kind, TB) for kind in ("bf16", "fp16", "fp8", "fp4", "fp32")},
    "memory_bytes": ("memory_bytes", 1),
    "memory_gb_s": ("memory_bandwidth", GB),
    "intra_gb_s": ("intra_bandwidth", GB),
    "inter_gb_s": ("inter_bandwidth", GB),
    "domain_size": ("domain_size", 1),
    "num_sms": ("num_sms", 1),
    "source": ("source", 0),
    "unconfirmed": ("unconfirmed", 0),
})  # fmt: skip
"""Key of a cluster file's [chip] table -> (field of `Chip`, unit; 0: not a number)."""

_LEVEL_KEYS = ("name", "size", "gb_s", "latency_us", "efficiency")
_WHOLE = ("memory_bytes", "domain_size", "num_sms")


def _toml_value(value: Any, unit: float) -> str:
    if unit == 0:
        if isinstance(value, tuple):
            return "[" + ", ".join(f'"{item}"' for item in value) + "]"
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value) if unit == 1 else repr(value / unit)


def _from_toml(content: Mapping[str, Any], where: str) -> Cluster:
    _known_keys(content, ("chip", "nodes", "gpus_per_node", "storage_gb_s", "cores", "levels", "software"), where)
    nodes, gpus = (_number(content, key, where, whole=True) for key in ("nodes", "gpus_per_node"))
    chip = content.get("chip")
    if isinstance(chip, str):
        found = find_chip(chip)
    elif isinstance(chip, Mapping):
        found = _chip_from_toml(chip, where)
    else:
        raise ConfigError(f'{where}: chip is missing; write chip = "h100-80gb" or a table [chip]')
    storage = _number(content, "storage_gb_s", where) * GB if "storage_gb_s" in content else STORAGE
    if storage <= 0:
        raise ConfigError(f"{where}: storage_gb_s={content['storage_gb_s']} must be above 0; leave it out for 1")
    cores = int(_number(content, "cores", where, whole=True)) if "cores" in content else 0
    if cores < 0:
        raise ConfigError(f"{where}: cores={cores} must be at least 1; leave it out where each chip is a rank's own")
    further: dict[str, Any] = {"storage_bandwidth": storage, "cores": cores, "software": _software(content, where)}
    if "levels" not in content:
        return replace(Cluster.of(found, int(nodes), int(gpus)), **further)
    if nodes < 1 or gpus < 1:
        raise ConfigError(f"{where}: {nodes} nodes with {gpus} GPUs each; both must be at least 1")
    levels = tuple(_level_from_toml(level, where) for level in content["levels"])
    sizes = [level.size for level in levels]
    world = int(nodes * gpus)
    if sizes != sorted(set(sizes)) or (world > 1 and (not sizes or sizes[-1] < world)):
        raise ConfigError(
            f"{where}: levels of {sizes} ranks must grow and the last must hold all {world}; list them from the fastest out"
        )
    return Cluster(found, int(nodes), int(gpus), levels, **further)


def _software(content: Mapping[str, Any], where: str) -> tuple[tuple[str, float | bool], ...]:
    """The table [software]; which constants there are is the planner's to say."""
    table = content.get("software", {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: software must be a table of constants")
    wrong = next((key for key, value in table.items() if not isinstance(value, int | float)), None)
    if wrong is not None:
        raise ConfigError(f"{where}: software.{wrong}={table[wrong]!r} must be a number, true or false")
    return tuple(table.items())


def _chip_from_toml(table: Mapping[str, Any], where: str) -> Chip:
    _known_keys(table, tuple(_CHIP_KEYS), f"{where}: chip")
    values: dict[str, Any] = {
        "bf16": None, "fp16": None, "fp8": None, "fp4": None, "fp32": None, "inter_bandwidth": None,
        "source": where, "name": "custom", "intra_bandwidth": 1.0, "domain_size": 1,
    }  # fmt: skip
    for key in table:
        field, unit = _CHIP_KEYS[key]
        if unit:
            number = _number(table, key, f"{where}: chip", whole=field in _WHOLE)
            values[field] = int(number) if field in _WHOLE else number * unit
        else:
            values[field] = tuple(table[key]) if field == "unconfirmed" else str(table[key])
    for key in ("memory_bytes", "memory_gb_s"):
        if key not in table:
            raise ConfigError(f"{where}: chip.{key} is missing; add it")
    return Chip(**values)


def _level_from_toml(table: Mapping[str, Any], where: str) -> LinkLevel:
    where = f"{where}: levels"
    _known_keys(table, _LEVEL_KEYS, where)
    bandwidth, latency = _number(table, "gb_s", where) * GB, _number(table, "latency_us", where) / 1e6
    if bandwidth <= 0 or latency < 0:
        raise ConfigError(
            f"{where}: gb_s={table['gb_s']} must be above 0 and latency_us={table['latency_us']} not below"
        )
    curve = tuple((float(size), float(share)) for size, share in table.get("efficiency", ()))
    sizes = [size for size, _ in curve]
    if sizes != sorted(set(sizes)) or any(size <= 0 or not 0 < share <= 1 for size, share in curve):
        raise ConfigError(f"{where}: efficiency needs points [bytes, share] with rising bytes and shares in (0, 1]")
    return LinkLevel(
        str(table.get("name", "link")), int(_number(table, "size", where, whole=True)), bandwidth, latency, curve
    )


def _known_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; {did_you_mean(key, known)}")


def _number(table: Mapping[str, Any], key: str, where: str, *, whole: bool = False) -> float:
    value = table.get(key)
    good = isinstance(value, int) or (isinstance(value, float) and not whole)
    if not good or isinstance(value, bool):
        raise ConfigError(f"{where}: {key}={value!r} must be {'a whole number' if whole else 'a number'}")
    assert isinstance(value, int | float)
    return value
