"""The peak that MFU is measured against: a chip's data sheet on CUDA, a measured matrix product on CPU."""

from __future__ import annotations

import time

import torch

from shardwright.core.cluster import find_chip
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError


def peak_flops(config: RunConfig, device: torch.device) -> float | None:
    """FLOP/s of one rank's device at the run's precision; None for a GPU that is not in the table of chips."""
    if config.train.peak_tflops is not None:
        return config.train.peak_tflops * 1e12
    precision = config.layout.precision
    if device.type == "cuda":
        try:
            return find_chip(torch.cuda.get_device_name(device)).peak(precision)
        except ConfigError:
            return None
    return measured_matmul_flops({"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32))


def measured_matmul_flops(dtype: torch.dtype, size: int = 1024, repeats: int = 4) -> float:
    """FLOP/s of a square matrix product with this rank's threads, the best of a few (about 0.1 s)."""
    a = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
