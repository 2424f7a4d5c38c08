"""Numbers as people read them: sizes, times, counts, and a curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCKS = "▁▂▃▄▅▆▇█"


def format_bytes(num_bytes: float) -> str:
    """``512 B``, ``1.50 KiB``, ``23.4 MiB``: three digits."""
    size, units = float(num_bytes), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = 0
    while abs(size) >= 1023.5 and power < len(units) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.0f} B" if power == 0 else f"{_three_digits(size)} {units[power]}"


def format_seconds(seconds: float) -> str:
    """A short time, with three digits: ``85 µs``, ``4.25 ms``, ``1.07 s``."""
    if abs(seconds) < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs" if seconds else "0"
    if abs(seconds) < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds)} s" if abs(seconds) < 999.5 else format_duration(seconds)


def format_duration(seconds: float) -> str:
    """Time on a clock: ``0:07``, ``12:34``, ``5:06:07``, ``3d 04:05``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def format_count(number: float) -> str:
    """``950``, ``12,345``, ``1.23 M``, ``45.6 B``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if abs(number) >= 0.9995 * size:
            return f"{_three_digits(number / size)} {unit}"
    return f"{number:,.0f}"


def _three_digits(number: float) -> str:
    magnitude = abs(number)
    return f"{number:.{0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2}f}"


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """``values`` as at most ``width`` block characters, each the mean of its share; a blank where none is finite."""
    numbers = np.array([np.nan if value is None else value for value in values], dtype=float)
    numbers[~np.isfinite(numbers)] = np.nan
    if not numbers.size:
        return ""
    means = [_mean(share) for share in np.array_split(numbers, min(width, numbers.size))]
    known = [mean for mean in means if mean is not None]
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low
    top = len(BLOCKS) - 1
    return "".join(" " if m is None else BLOCKS[round((m - low) / span * top) if span else 0] for m in means)


def _mean(numbers: NDArray[np.float64]) -> float | None:
    known = numbers[~np.isnan(numbers)]
    return float(known.mean()) if known.size else None
