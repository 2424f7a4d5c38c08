"""The safetensors files of a checkpoint as values: header, size and the place of every parameter, before a byte is written.

All follows from names, shapes and a dtype, so every rank plans the same files without a word between them.
Format: 8 bytes with the header's length, a JSON header, the tensors one after another
(github.com/huggingface/safetensors, README, section Format).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from shardwright.checkpoint.hf import HFTensor, Shapes
from shardwright.checkpoint.runs import Place
from shardwright.core.specs import Spec
from shardwright.errors import CheckpointError

SHARD_BYTES = 5 * 10**9
"""Most bytes of one file, as in `transformers`; a larger tensor has a file of its own."""
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
}  # fmt: skip


@dataclass(frozen=True)
class TensorFile:
    """One planned file: ``header`` with its length, ``offsets`` of each tensor from the file's start, ``size`` in bytes."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


def plan_files(stem: str, shapes: Shapes, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES) -> list[TensorFile]:
    """``STEM.safetensors``, or several files of at most ``shard_bytes`` (``STEM-00001-of-00002.safetensors``)."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{stem}: tensors of {dtype} cannot be saved; use one of {', '.join(map(str, _NAMES))}")
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        if filled and filled + size > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += size
    total = len(groups)
    return [
        _plan_file(stem if total == 1 else f"{stem}-{index:05d}-of-{total:05d}", group, dtype)
        for index, group in enumerate(groups, 1)
    ]


def _plan_file(stem: str, shapes: Shapes, dtype: torch.dtype) -> TensorFile:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name, shape in shapes.items():
        starts[name], begin = end, end
        end += prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    data = 8 + len(text)
    offsets = {name: data + start for name, start in starts.items()}
    return TensorFile(f"{stem}.safetensors", len(text).to_bytes(8, "little") + text, offsets, data + end)


def index_text(files: Sequence[TensorFile]) -> str:
    """The index that names the file of each tensor."""
    total = sum(file.size - len(file.header) for file in files)
    weight_map = {name: file.name for file in files for name in file.offsets}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


# -- places ----------------------------------------------------------------------------------------


def weight_places(
    tensors: Sequence[HFTensor], specs: Mapping[str, Spec], files: Sequence[TensorFile], dtype: torch.dtype
) -> dict[str, tuple[Place, ...]]:
    """Where each of our parameters lies in the files of a Hugging Face folder."""
    found: dict[str, tuple[Place, ...]] = {}
    where = {name: (file.name, offset) for file in files for name, offset in file.offsets.items()}
    for tensor in tensors:
        file, offset = where[tensor.name]
        width = prod(specs[tensor.parts[0]].shape[1:])
        rows = sum(specs[part].shape[0] for part in tensor.parts)
        for part in tensor.parts:
            pitch = rows if tensor.transposed else width
            found[part] = (Place(file, offset, pitch, tensor.transposed),)
            offset += specs[part].shape[0] * (1 if tensor.transposed else width) * dtype.itemsize
    return found


def plain_places(shapes: Shapes, files: Sequence[TensorFile], dtype: torch.dtype) -> dict[str, tuple[Place, ...]]:
    """Where each tensor lies in files that hold it under its own name."""
    return {
        name: tuple(_plain(file.name, offset, shapes[name], dtype))
        for file in files
        for name, offset in file.offsets.items()
    }


def _plain(file: str, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Iterator[Place]:
    if len(shape) < 3:
        yield Place(file, offset, shape[-1] if shape else 1)
        return
    for lead in range(shape[0]):
        yield Place(file, offset + lead * prod(shape[1:]) * dtype.itemsize, shape[-1], lead=lead)
