"""`Chip` and `Cluster`: what the planner knows about a machine.

Units: FLOP/s, bytes, bytes per second, seconds. Peaks are dense (no sparsity), bandwidths per direction and per GPU.

>>> cluster = Cluster.parse("h100-80gb:8x8")
>>> cluster.chip.name, cluster.world_size, [level.name for level in cluster.levels]
('H100-SXM5-80GB', 64, ['intra', 'inter'])
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwright.core.suggest import did_you_mean
from shardwright.errors import ConfigError

GB, TB, GIB = 1e9, 1e12, 2**30
INTRA_LATENCY, INTER_LATENCY = 10e-6, 20e-6
"""Seconds per message inside a scale-up domain and between nodes: calculon's values for A100, a starting point."""


@dataclass(frozen=True)
class Chip:
    """One accelerator as a framework sees it. None: the chip cannot do it, or no source gives it.

    `domain_size` is the number of GPUs that the fast links (`intra_bandwidth`) join; `unconfirmed` names the fields
    that `source` does not give.
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
    """One level of the network: `size` ranks reach each other over it; bytes/s per direction per GPU; seconds."""

    name: str
    size: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of one chip. `levels` go from the fastest links outwards; a node is (part of) one scale-up domain."""

    chip: Chip
    nodes: int
    gpus_per_node: int
    levels: tuple[LinkLevel, ...]

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read ``CHIP:NODESxGPUS`` (``h100-80gb:8x8``); raises `ConfigError` that says what to write instead."""
        match = re.fullmatch(r"\s*(.+?)\s*:\s*(\d+)\s*[x×]\s*(\d+)\s*", text)
        if match is None:
            raise ConfigError(f"cluster {text!r} is not CHIP:NODESxGPUS; write h100-80gb:8x8 for 8 nodes of 8, say")
        return cls.of(find_chip(match[1]), int(match[2]), int(match[3]))

    @classmethod
    def of(cls, chip: Chip, nodes: int, gpus_per_node: int) -> Cluster:
        """A cluster with the chip's own links; raises `ConfigError` if they do not reach that far."""
        if nodes < 1 or gpus_per_node < 1:
            raise ConfigError(f"cluster of {nodes} nodes with {gpus_per_node} GPUs each; both must be at least 1")
        if gpus_per_node > chip.domain_size:
            raise ConfigError(
                f"{gpus_per_node} GPUs per node, but the fast links of {chip.name} join {chip.domain_size}; "
                f"write the same GPUs as nodes of at most {chip.domain_size}"
            )
        levels = []
        if gpus_per_node > 1:
            levels.append(LinkLevel("intra", gpus_per_node, chip.intra_bandwidth, INTRA_LATENCY))
        if nodes > 1:
            if chip.inter_bandwidth is None:
                raise ConfigError(f"no bandwidth between nodes is known for {chip.name}; use one node")
            levels.append(LinkLevel("inter", nodes * gpus_per_node, chip.inter_bandwidth, INTER_LATENCY))
        return cls(chip, nodes, gpus_per_node, tuple(levels))


def _chip(
    name: str,
    tflops: tuple[float | None, float | None, float | None, float | None],
    memory_gib: float,
    links: tuple[float, float, float | None, int],
    source: str,
    unconfirmed: str = "",
) -> Chip:
    """A row: TFLOP/s in bf16, fp16, fp8, fp32; memory; TB/s of memory, GB/s intra, GB/s inter, domain size."""
    bf16, fp16, fp8, fp32 = (None if value is None else value * TB for value in tflops)
    memory_bandwidth, intra, inter, domain = links
    return Chip(
        name, bf16, fp16, fp8, None, fp32,
        memory_bytes=int(memory_gib * GIB),
        memory_bandwidth=memory_bandwidth * TB,
        intra_bandwidth=intra * GB,
        inter_bandwidth=None if inter is None else inter * GB,
        domain_size=domain,
        source=source,
        unconfirmed=tuple(unconfirmed.split()),
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
          _AIC + "b200_sxm.yaml; mlcommons/inference_results_v6.0 closed/Nebius/systems", "fp32"),
    _chip("GB200-NVL72", (2500, 2500, 5000, 80), 189471 / 1024, (8.0, 900, 50, 72),
          _AIC + "gb200.yaml; mlcommons/inference_results_v6.1 closed/Crusoe/systems", "fp32"),
    _chip("GB300-NVL72", (2500, 2500, 5000, 80), 284208 / 1024, (8.0, 900, 100, 72), _AIC + "gb300.yaml", "fp32"),
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

_SAYS_NOTHING = frozenset(
    ("nvidia", "amd", "google", "tesla", "geforce", "instinct", "gpu", "sxm", "oam", "hbm2", "hbm2e", "hbm3", "hbm3e")
)


def find_chip(name: str) -> Chip:
    """The chip that ``name`` means: "h100-80gb", "gb200", "NVIDIA A100-SXM4-80GB" (a device's own name).

    Every word of ``name`` must be a word of the chip's name, makers and memory kinds apart. Raises `ConfigError` when
    no chip or more than one fits.
    """
    words = _words(name) - _SAYS_NOTHING
    found = [chip for chip in CHIPS.values() if words and words <= _words(chip.name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"chip {name!r} may be {' or '.join(chip.name.lower() for chip in found)}; name one of them")
    raise ConfigError(f"no chip {name!r}; {did_you_mean(name, [known.lower() for known in CHIPS])}")


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))
