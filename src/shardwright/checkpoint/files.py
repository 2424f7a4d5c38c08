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
from shardwright.checkpoint.runs import Place, Rows
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


Dtypes = Mapping[str, torch.dtype]


def plan_files(stem: str, shapes: Shapes, dtypes: Dtypes, shard_bytes: int = SHARD_BYTES) -> list[TensorFile]:
    """``STEM.safetensors``, or several files of at most ``shard_bytes`` (``STEM-00001-of-00002.safetensors``)."""
    if unknown := set(dtypes.values()) - _NAMES.keys():
        raise CheckpointError(f"{stem}: tensors of {unknown.pop()} cannot be saved; use one of {', '.join(map(str, _NAMES))}")
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtypes[name].itemsize
        if filled and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    total = len(groups)
    return [
        _plan_file(stem if total == 1 else f"{stem}-{index:05d}-of-{total:05d}", group, shapes, dtypes)
        for index, group in enumerate(groups, 1)
    ]


def _plan_file(stem: str, names: Sequence[str], shapes: Shapes, dtypes: Dtypes) -> TensorFile:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in sorted(names, key=lambda name: -dtypes[name].itemsize):  # the wide ones first: all are aligned
        starts[name], begin = end, end
        end += prod(shapes[name]) * dtypes[name].itemsize
        header[name] = {"dtype": _NAMES[dtypes[name]], "shape": list(shapes[name]), "data_offsets": [begin, end]}
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
    tensors: Sequence[HFTensor], specs: Mapping[str, Spec], files: Sequence[TensorFile]
) -> dict[str, tuple[Place, ...]]:
    """Where each of our parameters lies in the files of a Hugging Face folder."""
    found: dict[str, tuple[Place, ...]] = {}
    where = {name: (file.name, offset) for file in files for name, offset in file.offsets.items()}
    for tensor in tensors:
        file, offset = where[tensor.name]
        shape = tensor.shape(specs)
        pitch = shape[-1] if len(shape) == 2 else 1
        row = 0
        for part in tensor.parts:
            count = specs[part].shape[0]
            lead = None
            rows: tuple[Rows, ...] = (Rows(0, count, row),)
            if tensor.expert is not None:
                lead, start, stop = tensor.expert
                rows = (Rows(start, stop, 0),)
            elif tensor.turned is not None:
                rows = _turned(count, *tensor.turned)
            found[part] = (*found.get(part, ()), Place(file, offset, pitch, tensor.transposed, lead, rows))
            row += count
    return found


def _turned(count: int, size: int, rotated: int) -> tuple[Rows, ...]:
    """Heads of ``size`` rows whose last ``rotated`` ones are two halves, which the file has interleaved."""
    half = rotated // 2
    rows = []
    for head in range(0, count, size):
        turn = head + size - rotated
        rows += [Rows(head, turn, head), Rows(turn, turn + half, turn, 2), Rows(turn + half, head + size, turn + 1, 2)]
    return tuple(rows)


def plain_places(shapes: Shapes, files: Sequence[TensorFile], dtypes: Dtypes) -> dict[str, tuple[Place, ...]]:
    """Where each tensor lies in files that hold it under its own name."""
    return {
        name: tuple(_plain(file.name, offset, shapes[name], dtypes[name].itemsize))
        for file in files
        for name, offset in file.offsets.items()
    }


def _plain(file: str, offset: int, shape: Sequence[int], itemsize: int) -> Iterator[Place]:
    if len(shape) < 3:
        yield Place(file, offset, shape[1] if len(shape) == 2 else 1)
        return
    for lead in range(shape[0]):
        yield Place(file, offset + lead * prod(shape[1:]) * itemsize, shape[-1], lead=lead)
