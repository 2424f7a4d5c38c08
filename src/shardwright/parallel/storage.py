"""What a rank holds, by class and pool: device memory and, with offload, host memory (ZeRO-Offload; Ren et al. 2021).

Offload:  optimizer[host] or every shard[host]  |  ``offload_fraction`` of each shard, its first elements
copies per step: gradients out as their reduction ends, updated parameters back (``optimizer``), or the parameters of a
shard in before each gather (``params``). They are booked like messages, on the axis ``host``.

The pools are counted apart also where both are the same memory (a machine without an accelerator), so that the accounting
can be tested there. Parameters, gradients and optimizer state stay; gathered parameters and buffers have windows, from
where they are made to where they are freed.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from shardwright.comm.record import Recorder
from shardwright.core.buckets import BucketPlan
from shardwright.core.layout import Layout
from shardwright.core.ledger import StorageWindow


class Storage:
    """The windows of one rank's step and the most bytes of each class at any time; copies to and from the host.

    ``hosts_state``, ``hosts_parameters``: whether a part of the optimizer state, of the parameters is in host memory.
    """

    def __init__(self, recorder: Recorder | None = None, layout: Layout | None = None) -> None:
        self.recorder, self.layout = recorder or Recorder(), layout or Layout()
        self.hosts_state = self.layout.offload != "none"
        self.hosts_parameters = self.layout.offload == "params"
        self.peak: dict[str, int] = {}
        self.windows: list[StorageWindow] = []
        self._now: dict[str, int] = {}
        self._origin = time.perf_counter()

    def begin(self) -> None:
        """A step begins: windows and peaks are its own."""
        self.windows, self.peak = [], dict(self._now)
        self._origin = time.perf_counter()

    def open(self, kind: str, name: str, plan: BucketPlan, num_bytes: int) -> StorageWindow:
        """``num_bytes`` of class ``kind`` are held from now on."""
        start = time.perf_counter() - self._origin
        window = StorageWindow(kind, name, plan.unit_names, self.recorder.current, num_bytes, start, start)
        self.windows.append(window)
        now = self._now[kind] = self._now.get(kind, 0) + num_bytes
        self.peak[kind] = max(self.peak.get(kind, 0), now)
        return window

    def close(self, window: StorageWindow) -> None:
        """What ``window`` stands for is freed."""
        window.end = time.perf_counter() - self._origin
        self._now[window.kind] -= window.bytes

    # -- the host ----------------------------------------------------------------------------------------

    @staticmethod
    def host_empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor in host memory, pinned where ``device`` copies from it; on meta for a dry run."""
        if device.type == "meta":
            return torch.empty(size, dtype=dtype, device=device)
        return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")

    def copy_out(self, host: Tensor, tensor: Tensor, name: str, *, add: bool = False) -> None:
        """``tensor`` of the device to (or added to) ``host``; it is there when this returns."""
        start = time.perf_counter()
        if add:
            host.add_(tensor.to(host.device))
        else:
            host.copy_(tensor)
        self._book("copy_out", name, tensor, start)

    def copy_in(self, tensor: Tensor, host: Tensor, name: str) -> None:
        """``host`` to ``tensor`` of the device, rounded to its dtype on the host."""
        start = time.perf_counter()
        tensor.copy_(host.to(tensor.dtype))
        self._book("copy_in", name, tensor, start)

    def _book(self, verb: str, name: str, moved: Tensor, start: float) -> None:
        entry = self.recorder.book(verb, "host", name, moved.nbytes)
        seconds = time.perf_counter() - start
        entry.seconds += seconds
        entry.exposed_seconds += seconds
