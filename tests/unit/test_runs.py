"""Where parts of logical tensors lie in files: every interval of every slice, read back by safetensors itself."""

from __future__ import annotations

import hashlib
import json
import os
import random
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwright.checkpoint.files import index_text, plain_places, plan_files, weight_places
from shardwright.checkpoint.hf import HFTensor, read_tensors, shapes
from shardwright.checkpoint.manifest import check_hashes
from shardwright.checkpoint.runs import Bytes, Place, Run, hash_run, map_file, parts, uncovered, write_runs
from shardwright.core.specs import Spec
from shardwright.errors import CheckpointError

ITEM = 4


def intervals(rng: random.Random, numel: int) -> Iterator[tuple[int, int]]:
    cuts = sorted({0, numel, *(rng.randint(0, numel) for _ in range(rng.randint(0, 4)))})
    return pairwise(cuts)


def cut_in_two(rng: random.Random, tensor: Tensor) -> list[tuple[slice, ...]]:
    """Two slices along one dim, that together are the tensor."""
    dim = rng.randrange(tensor.dim())
    at = rng.randint(0, tensor.shape[dim])
    whole = [slice(0, size) for size in tensor.shape]
    return [(*whole[:dim], half, *whole[dim + 1 :]) for half in (slice(0, at), slice(at, tensor.shape[dim]))]


def write_all(path: Path, header: bytes, size: int, content: list[tuple[Run, Tensor]]) -> list[Run]:
    path.write_bytes(header + bytes(size - len(header)))
    descriptor = os.open(path, os.O_WRONLY)
    content = sorted(content, key=lambda item: item[0].offset)
    written = write_runs(descriptor, [(run, as_bytes(tensor)) for run, tensor in content])
    os.close(descriptor)
    mapped = map_file(path)
    assert all(hash_run(mapped, run) == digest for run, digest in written)
    return [Run(0, len(header), len(header), 1), *(run for run, _ in written)]


def as_bytes(tensor: Tensor) -> Bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def pieces_of(rng: random.Random, places: tuple[Place, ...], tensor: Tensor) -> Iterator[tuple[Run, Tensor]]:
    for slices in cut_in_two(rng, tensor):
        local = tensor[slices].contiguous().view(-1)
        for start, stop in intervals(rng, local.numel()):
            for part in parts(places, slices, start, stop, ITEM):
                yield part.run, part.take(local[start:stop], start)


@pytest.mark.parametrize("seed", range(12))
def test_any_cut_into_slices_and_intervals_writes_every_byte_once(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 9),), (rng.randint(1, 9), rng.randint(1, 9)), (2, 7), (3, rng.randint(1, 5), 4)]
    tensors = {f"t{index}": torch.randn(size) for index, size in enumerate(sizes)}
    dtypes = dict.fromkeys(tensors, torch.float32)
    (file,) = plan_files("plain", shapes(tensors), dtypes)
    places = plain_places(shapes(tensors), [file], dtypes)
    content = [piece for name, tensor in tensors.items() for piece in pieces_of(rng, places[name], tensor)]
    runs = write_all(tmp_path / "file", file.header, file.size, content)
    assert uncovered(runs, file.size) is None
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("seed", range(8))
def test_joined_transposed_stacked_and_turned_tensors(seed: int, tmp_path: Path) -> None:
    """GPT-2's c_attn (q, k and v joined, then transposed), experts one by one, and rotated halves that are interleaved."""
    rng = random.Random(seed)
    width = rng.randint(1, 6)
    ours = {f"{name}.weight": torch.randn(rng.randint(1, 6), width) for name in "qkv"}
    ours |= {f"{name}.bias": torch.randn(ours[f"{name}.weight"].shape[0]) for name in "qkv"}
    ours |= {"experts.up": torch.randn(3, 4, width), "turned.weight": torch.randn(10, width)}
    specs = {name: Spec(name, tuple(t.shape), ("embed",) * t.dim(), tuple(t.shape), "head", True) for name, t in ours.items()}
    theirs = [
        HFTensor("c.weight", ("q.weight", "k.weight", "v.weight"), transposed=True),
        HFTensor("c.bias", ("q.bias", "k.bias", "v.bias")),
        *(HFTensor(f"experts.{index}.gate", ("experts.up",), expert=(index, 0, 2)) for index in range(3)),
        *(HFTensor(f"experts.{index}.up", ("experts.up",), expert=(index, 2, 4)) for index in range(3)),
        HFTensor("t.weight", ("turned.weight",), turned=(5, 4)),
    ]
    dtypes = dict.fromkeys((tensor.name for tensor in theirs), torch.float32)
    (file,) = plan_files("model", {tensor.name: tensor.shape(specs) for tensor in theirs}, dtypes)
    places = weight_places(theirs, specs, [file])
    content = [piece for name, tensor in ours.items() for piece in pieces_of(rng, places[name], tensor)]
    runs = write_all(tmp_path / "file", file.header, file.size, content)
    assert uncovered(runs, file.size) is None
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[tensor.name], tensor.join(ours)) for tensor in theirs)


def test_wide_tensors_come_first_so_that_all_are_aligned(tmp_path: Path) -> None:
    tensors = {"narrow": torch.ones(3, dtype=torch.bfloat16), "wide": torch.full((2,), 2.0), "more": torch.zeros(1).bfloat16()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    (file,) = plan_files("model", shapes(tensors), dtypes)
    places = plain_places(shapes(tensors), [file], dtypes)
    content = [
        (part.run, tensor)
        for name, tensor in tensors.items()
        for part in parts(places[name], (slice(0, len(tensor)),), 0, len(tensor), tensor.element_size())
    ]
    write_all(tmp_path / "file", file.header, file.size, content)
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_many_tensors_make_several_files_with_an_index(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.full((8,), float(index), dtype=torch.bfloat16) for index in range(5)}
    dtypes = dict.fromkeys(tensors, torch.bfloat16)
    files = plan_files("model", shapes(tensors), dtypes, shard_bytes=40)
    assert [file.name for file in files] == [f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)]
    places = plain_places(shapes(tensors), files, dtypes)
    whole = (slice(0, 8),)
    for file in files:
        mine = [(part.run, tensors[name]) for name in file.offsets for part in parts(places[name], whole, 0, 8, 2)]
        write_all(tmp_path / file.name, file.header, file.size, mine)
    (tmp_path / "model.safetensors.index.json").write_text(index_text(files))
    found = read_tensors(tmp_path)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_gap_an_overlap_and_a_short_file_are_found() -> None:
    rows = Run(0, 4, 8, 3)  # 0 to 4, 8 to 12, 16 to 20
    assert uncovered([rows, Run(4, 4, 8, 3)], 24) is None
    assert uncovered([rows, Run(4, 4, 8, 2)], 24) == "bytes 20 to 24 are written by nobody"
    assert uncovered([rows, Run(4, 4, 8, 2), Run(19, 5, 5, 1)], 24) == "bytes 19 to 20 are written twice"
    assert uncovered([rows, Run(12, 4, 4, 1), Run(20, 4, 4, 1)], 24) == "bytes 4 to 8 are written by nobody"


def test_whole_rows_are_one_write_and_columns_are_strided() -> None:
    place = (Place("file", 100, 6),)
    (rows,) = parts(place, (slice(2, 5), slice(0, 6)), 1, 18, ITEM)
    assert rows.run == Run(100 + 13 * ITEM, 17 * ITEM, 17 * ITEM, 1)
    (columns,) = parts(place, (slice(0, 4), slice(2, 4)), 0, 8, ITEM)
    assert columns.run == Run(100 + 2 * ITEM, 2 * ITEM, 6 * ITEM, 4)
    assert list(parts(place, (slice(0, 4), slice(2, 4)), 3, 3, ITEM)) == []


def test_integers_are_not_weights() -> None:
    with pytest.raises(CheckpointError, match=r"torch\.int64 cannot be saved"):
        plan_files("model", {"a": (2,)}, {"a": torch.int64})


def test_neighbours_are_written_together_and_hashed_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls, original = tmp_path / "file", [], os.pwritev
    content = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8)
    path.write_bytes(bytes(content.size + 10))
    cuts = [0, 5, 5, 300, 1_000_000, 2_999_999, content.size]
    pieces = [(Run(10 + a, b - a, b - a, 1), content[a:b]) for a, b in pairwise(cuts)]

    def cut_off(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        """As the kernel may: not all of it at once."""
        calls.append(offset)
        data = b"".join(buffers)
        return original(descriptor, [data[: max(1, len(data) * 2 // 3)]], offset)

    monkeypatch.setattr(os, "pwritev", cut_off)
    descriptor = os.open(path, os.O_WRONLY)
    apart = [(Run(3, 2, 2, 1), content[:2]), (Run(5, 1, 2, 2), content[:2]), *pieces]
    written = write_runs(descriptor, apart)
    os.close(descriptor)
    assert [run for run, _ in written] == [Run(3, 2, 2, 1), Run(5, 1, 2, 2), Run(10, content.size, content.size, 1)]
    assert written[-1][1] == f"{zlib.crc32(content):08x}"
    found = path.read_bytes()
    assert found[10:] == content.tobytes() and len(calls) > 12
    assert (found[3:5], found[5:8:2]) == (content[:2].tobytes(), content[:2].tobytes())


@pytest.mark.parametrize("version", [1, 2])
def test_checkpoints_of_earlier_versions_are_read(version: int, tmp_path: Path) -> None:
    """They have SHA-256, version 1 of whole files only."""
    content = b"0123456789"
    (tmp_path / "file").write_bytes(content)
    digests = [hashlib.sha256(part).hexdigest() for part in (content[:4], content[4::2], content[5::2], content)]
    ranges = [[0, 4, 4, 1, digests[0]], [4, 1, 2, 3, digests[1]], [5, 1, 2, 3, digests[2]]]
    entry = {"size": 10, "ranges": ranges} if version == 2 else {"size": 10, "sha256": digests[3]}
    (tmp_path / "manifest.json").write_text(json.dumps({"format_version": version, "files": {"file": entry}}))
    check_hashes(tmp_path)
    (tmp_path / "file").write_bytes(b"012345678x")
    with pytest.raises(CheckpointError, match=r"file is corrupt \(its sha256 differs"):
        check_hashes(tmp_path)
