"""Finding files, reading documents, tokenizers, and the dataset folder."""

from __future__ import annotations

import fcntl
import gzip
import importlib
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from shardwright.errors import ConfigError, DataError
from shardwright.train import text as text_module
from shardwright.train.indexed import IndexedDataset
from shardwright.train.prepare import check_vocabulary
from shardwright.train.text import (
    TextCounts,
    find_files,
    load_dataset_info,
    python_library_files,
    read_documents,
    tokenize,
)
from shardwright.train.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

WORDS = ["the", "shard", "and", "rank", "share", "a", "ring", "of", "tokens", "while", "stage", "waits", "its", "turn"]


def story(number: int, words: int = 40) -> str:
    """A text that differs for every number."""
    return f"Story {number}.\n" + " ".join(WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(words))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer([story(number) for number in range(20)], 300, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 30 stories in 30 files."""
    path = tmp_path / "stories"
    path.mkdir()
    for number in range(30):
        (path / f"{number:02}.txt").write_text(story(number))
    return path


def message(call: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read(*files: Path, named: bool = True, field: str = "text") -> tuple[list[str], TextCounts]:
    counts = TextCounts()
    return list(read_documents(files, field, counts, named=files if named else ())), counts


def documents_of(out: Path, split: str, tokenizer: Tokenizer) -> list[str]:
    data = IndexedDataset(out / split)
    return [tokenizer.decode(data.document(place).tolist()) for place in range(len(data))]


# ---------------------------------------------------------------------------------------------------- finding files


def test_find_files_takes_files_folders_and_patterns_each_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "code.c", "sub/c.py", "sub/d.jsonl.gz", ".hidden/e.txt", "sub/__pycache__/f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    def found(*sources: str) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in find_files([f"{tmp_path}/{s}" for s in sources])]

    assert found("") == ["a.md", "b.txt", "sub/c.py", "sub/d.jsonl.gz"]
    assert found("code.c", "sub") == ["code.c", "sub/c.py", "sub/d.jsonl.gz"]
    assert found("b.txt", "*.txt", "sub/../b.txt") == ["b.txt"]
    assert found("**/*.py") == ["sub/__pycache__/f.py", "sub/c.py"]


def test_sources_without_a_file_are_named(tmp_path: Path) -> None:
    assert "no text given" in message(lambda: find_files([]))
    assert "no file or folder 'absent.txt'" in message(lambda: find_files(["absent.txt"]))
    assert "*.nothing' matches no file" in message(lambda: find_files([tmp_path / "*.nothing"]))
    assert f"folder {tmp_path} has no .txt" in message(lambda: find_files([tmp_path]))


def test_the_python_library_is_found_without_installed_packages() -> None:
    files = python_library_files()
    names = {path.name for path in files}
    assert {"ast.py", "decoder.py", "typing.py"} <= names
    assert len(files) > 300 and files == sorted(files)
    assert not any({"site-packages", "dist-packages", "__pycache__"} & set(path.parts) for path in files)
    assert find_files(["python:library"]) == files


# ------------------------------------------------------------------------------------------------ reading documents


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"id": n, "text": story(n)}) + "\n\n" for n in range(3)).encode()
    texts = [story(n) for n in range(3)]
    for name, pack in (("a.jsonl", bytes), ("a.json.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)):
        (tmp_path / name).write_bytes(pack(lines))
        assert read(tmp_path / name)[0] == texts
    for name, pack in (("b.txt", bytes), ("b.txt.gz", gzip.compress), ("b.md.zst", zstandard.compress)):
        (tmp_path / name).write_bytes(pack(story(1).encode()))
        assert read(tmp_path / name)[0] == [story(1)]
    (tmp_path / "two.txt.zst").write_bytes(zstandard.compress(b"one ") + zstandard.compress(b"two"))
    assert read(tmp_path / "two.txt.zst")[0] == ["one two"]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"body": ["one", None, "two"], "number": [1, 2, 3]}), path)
    texts, counts = read(path, field="body")
    assert (texts, counts.skipped_empty) == (["one", "two"], 1)
    assert "no column 'text', only 'body', 'number'" in message(lambda: read(path))
    assert "holds int" in message(lambda: read(path, field="number"))
    path.write_bytes(path.read_bytes()[:-9])
    assert f"cannot read {path}" in message(lambda: read(path, field="body"))


def test_parquet_without_pyarrow_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert "pip install 'shardwright[parquet]'" in message(lambda: read(tmp_path / "rows.parquet"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"body": "x"}', "no field 'text', only 'body'"),
        ('{"text": 3}', "field 'text' is a int"),
        ('["x"]', "a JSON list"),
        ('{"text": ', "not JSON"),
    ],
)
def test_a_wrong_json_line_is_named_by_file_and_line(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    said = message(lambda: read(path))
    assert f"{path}:3: " in said and expected in said


def test_binary_files_are_an_error_by_name_and_counted_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("fine")
    (tmp_path / "nul.txt").write_bytes(b"text until here \0 and then not")
    (tmp_path / "koi8.txt").write_bytes("это вовсе не юникод".encode("koi8-r"))
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(bytes(range(256)) * 9))
    for name in ("nul.txt", "koi8.txt", "packed.txt.gz"):
        assert f"{tmp_path / name} is not text" in message(lambda name=name: read(tmp_path / name))
    texts, counts = read(*find_files([tmp_path]), named=False)
    assert (texts, counts.files, counts.documents, counts.skipped_binary) == (["fine"], 4, 1, 3)


def test_text_that_is_not_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    latin = "Le café est fermé le dimanche.\n"
    (tmp_path / "a.txt").write_bytes(latin.encode("latin-1"))
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "caf\xe9"}\n{"text": "half \\ud83d pair"}\n')
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (tmp_path / "d.txt").write_bytes(b"a" * 1023 + "é".encode())  # the first KB ends inside a character
    texts, counts = read(*find_files([tmp_path]))
    assert texts[:5] == [latin.replace("é", "\ufffd"), "caf\ufffd", "caf\ufffd", "half ? pair", "with a mark"]
    assert (counts.replaced, counts.documents, counts.skipped_binary) == (2, 6, 0)


def test_empty_files_are_skipped_and_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    for name, content in (("a.txt", b""), ("b.txt", b" \n\n"), ("c.jsonl", b""), ("d.jsonl", b'{"text": ""}\n')):
        (tmp_path / name).write_bytes(content)
    said = message(lambda: read(*find_files([tmp_path])))
    assert "nothing to read in 4 files: 0 documents" in said and "4 empty" in said
    (tmp_path / "e.txt").write_text("x")
    texts, counts = read(*find_files([tmp_path]))
    assert (texts, counts.skipped_empty) == (["x"], 4)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt.zst"])
def test_damaged_packed_files_are_named(tmp_path: Path, name: str) -> None:
    pack = gzip.compress if name.endswith(".gz") else zstandard.compress
    raw = pack(os.urandom(3000).hex().encode())
    (tmp_path / name).write_bytes(raw[: len(raw) // 2] if name.endswith(".gz") else b"junk" + raw)
    said = message(lambda: read(tmp_path / name))
    assert str(tmp_path / name) in said


def test_a_separator_cuts_a_text_file_into_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one<|endoftext|>two<|endoftext|>\n")
    assert list(read_documents([tmp_path / "a.txt"], separator="<|endoftext|>")) == ["one", "two"]


# -------------------------------------------------------------------------------------------------------- tokenizers


def test_a_trained_tokenizer_round_trips_any_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    hard = "tabs\tand\r\nline ends, émoji 🙂, 漢字, \x00 and\u00a0more  "
    assert tokenizer.decode(tokenizer.encode(hard)) == hard
    assert tokenizer.eos_id == tokenizer.backend.token_to_id("<|endoftext|>") == 0
    assert 257 < tokenizer.vocab_size <= 300
    assert tokenizer.encode_batch(["the ring", ""]) == [tokenizer.encode("the ring"), []]
    assert tokenizer.decode([*tokenizer.encode("a"), 0]) == "a"
    assert tokenizer.decode([*tokenizer.encode("a"), 0], skip_special=False) == "a<|endoftext|>"
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_tokenizer(path)
        assert (again.sha256, again.eos_id, again.vocab_size) == (tokenizer.sha256, 0, tokenizer.vocab_size)
    same = train_tokenizer((story(number) for number in range(20)), 300, tmp_path / "tokenizer.json")
    assert same.sha256 == tokenizer.sha256 and load_tokenizer(tmp_path).sha256 == tokenizer.sha256


def test_special_tokens_come_from_the_config_then_from_usual_names(tokenizer: Tokenizer, tmp_path: Path) -> None:
    description = json.loads(tokenizer.backend.to_str())

    def loaded(tokens: list[str], config: dict[str, object] | None) -> tuple[str | None, str | None]:
        first = max(description["model"]["vocab"].values()) + 1
        added = [
            {**description["added_tokens"][0], "content": token, "id": first + place}
            for place, token in enumerate(tokens)
        ]
        vocab = {name if index else "unused": index for name, index in description["model"]["vocab"].items()}
        changed = {**description, "added_tokens": added, "model": {**description["model"], "vocab": vocab}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        result = load_tokenizer(tmp_path)
        bos = None if result.bos_id is None else result.backend.id_to_token(result.bos_id)
        assert result.vocab_size == first + len(tokens)
        return result.backend.id_to_token(result.eos_id), bos

    assert loaded(["<s>", "</s>"], None) == ("</s>", "<s>")
    assert loaded(["<|im_end|>", "<stop>"], {"eos_token": "<stop>"}) == ("<stop>", None)
    assert loaded(["<|im_end|>", "</s>"], {"eos_token": {"content": "<|im_end|>"}}) == ("<|im_end|>", None)
    assert "no end-of-text token" in message(lambda: loaded(["<other>"], None))
    assert "no end-of-text token" in message(lambda: loaded(["</s>"], {"eos_token": "<absent>"}))


def test_wrong_tokenizers_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert "no tokenizer at" in message(lambda: load_tokenizer(tmp_path))
    file = tmp_path / "tokenizer.json"
    for content, expected in (("{", "cannot read"), ("[]", "JSON list"), ('{"model": 3}', "is not a tokenizer")):
        file.write_text(content)
        assert expected in message(lambda: load_tokenizer(file))
    assert "vocab_size=256 is too small" in message(lambda: train_tokenizer(["x"], 256, tmp_path))


def test_truncation_in_a_description_does_not_cut_documents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    description = json.loads(tokenizer.backend.to_str())
    description["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    assert load_tokenizer(tmp_path).encode(story(1)) == tokenizer.encode(story(1))


def test_real_tokenizers_load(shared: Path) -> None:
    small = load_tokenizer(shared / "data/models/smollm2-135m-instruct-q4_1")
    assert (small.vocab_size, small.eos_id, small.bos_id) == (49152, 2, 1)
    characters = load_tokenizer(shared / "data/models/babyllama-tok105")
    assert (characters.vocab_size, characters.eos_id, characters.bos_id) == (105, 2, 1)
    gpt2 = load_tokenizer(shared / "data/tokenizers/gpt2_tokenizer.json")
    assert (gpt2.encode("Hello world"), gpt2.eos_id) == ([15496, 995], 50256)


def test_a_cut_document_has_the_tokens_of_the_whole(tokenizer: Tokenizer) -> None:
    library = {path.name: path for path in python_library_files()}
    texts = list(read_documents([library[name] for name in ("argparse.py", "string.py", "typing.py")]))
    texts += [story(3, 4000), story(4, 4000).replace(" ", "\r\n", 500)]
    for whole in texts:
        pieces = list(text_module._pieces([whole], 500))
        assert "".join(piece for piece, _ in pieces) == whole and len(pieces) > 10
        assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
        joined = [token for ids in tokenizer.encode_batch([piece for piece, _ in pieces]) for token in ids]
        assert joined == tokenizer.encode(whole)
    assert list(text_module._pieces(["x" * 5000], 500)) == [("x" * 5000, True)]


def test_a_tokenizer_that_prefixes_texts_gets_documents_whole(shared: Path, tmp_path: Path) -> None:
    characters = load_tokenizer(shared / "data/models/babyllama-tok105")
    text = story(3, 12000)
    assert len(text) > 2 * text_module._PIECE_CHARS
    (tmp_path / "a.txt").write_text(text)
    tokenize([tmp_path / "a.txt"], tmp_path / "out", characters)
    assert IndexedDataset(tmp_path / "out/train").document(0).tolist() == [*characters.encode(text), 2]


# ------------------------------------------------------------------------------------------------------ the dataset


def test_tokenize_writes_every_document_once(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (folder / "extra.jsonl").write_text("".join(json.dumps({"text": story(n)}) + "\n" for n in range(30, 60)))
    (folder / "empty.txt").write_text("")
    (folder / "picture.txt").write_bytes(b"\0\1\2")
    (folder / "latin.txt").write_bytes("Un café bien serré".encode("latin-1"))
    calls: list[tuple[int, int, str]] = []
    out = tmp_path / "out"
    info = tokenize([folder], out, tokenizer, valid_fraction=0.2, progress=lambda *call: calls.append(call))
    train, valid = (documents_of(out, split, tokenizer) for split in ("train", "valid"))
    expected = [*(story(n) for n in range(60)), "Un caf\ufffd bien serr\ufffd"]
    assert sorted(train + valid) == sorted(expected)
    assert 4 <= len(valid) <= 24 and not set(train) & set(valid)
    for split in ("train", "valid"):
        data = IndexedDataset(out / split)
        assert all(data.document(place)[-1] == tokenizer.eos_id for place in range(len(data)))
    assert (info.files, info.documents, info.skipped_binary, info.skipped_empty, info.replaced) == (34, 61, 1, 1, 1)
    assert info.skipped == 2
    assert (info.train_documents, info.valid_documents) == (len(train), len(valid))
    assert info.train_bytes == sum(len(text.encode()) for text in train)
    assert info.valid_bytes == sum(len(text.encode()) for text in valid)
    assert info.valid_tokens == sum(len(tokenizer.encode(text)) + 1 for text in valid)
    assert info.train_tokens == IndexedDataset(out / "train").num_tokens
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert calls[-1][:2] == (total, total) and all(0 <= done <= total for done, _, _ in calls)
    content = json.loads((out / "dataset.json").read_text())
    assert content["vocab_size"] == tokenizer.vocab_size and content["tokenizer_sha256"] == tokenizer.sha256
    assert load_dataset_info(out) == info and load_tokenizer(out).sha256 == tokenizer.sha256
    assert {path.name for path in out.iterdir()} == {*text_module._DATASET_FILES, "dataset.json", ".lock"}


def test_validation_depends_on_the_documents_alone(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenize([folder], tmp_path / "a", tokenizer, valid_fraction=0.2)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "all.jsonl").write_text("".join(json.dumps({"text": story(n)}) + "\n" for n in reversed(range(30))))
    tokenize([moved], tmp_path / "b", tokenizer, valid_fraction=0.2)
    first, second = (sorted(documents_of(tmp_path / name, "valid", tokenizer)) for name in "ab")
    assert first == second and 0 < len(first) < 30


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_both_splits_get_a_document(tmp_path: Path, tokenizer: Tokenizer, count: int, fraction: float) -> None:
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text(story(number))
    info = tokenize([tmp_path / "*.txt"], tmp_path / "out", tokenizer, valid_fraction=fraction)
    assert min(info.train_documents, info.valid_documents) == 1
    assert info.train_documents + info.valid_documents == count
    none = tokenize([tmp_path / "*.txt"], tmp_path / "none", tokenizer, valid_fraction=0.0)
    assert (none.train_documents, none.valid_documents, none.valid_tokens) == (count, 0, 0)


def test_a_single_long_document_gives_its_end_to_validation(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = story(5, 60000)
    (tmp_path / "book.txt").write_text(text)
    info = tokenize([tmp_path / "book.txt"], tmp_path / "out", tokenizer, valid_fraction=0.1)
    train, valid = (documents_of(tmp_path / "out", split, tokenizer)[0] for split in ("train", "valid"))
    assert train + valid == text and 0.04 < len(valid) / len(text) < 0.16
    assert (info.documents, info.train_documents, info.valid_documents) == (1, 1, 1)
    assert (info.train_bytes, info.valid_bytes) == (len(train), len(valid))
    stream = [IndexedDataset(tmp_path / "out" / split).document(0).tolist() for split in ("train", "valid")]
    assert stream[0] + stream[1] == [*tokenizer.encode(text), 0]
    (tmp_path / "note.txt").write_text(story(1))
    assert tokenize([tmp_path / "note.txt"], tmp_path / "short", tokenizer).valid_documents == 0


def test_the_same_input_is_reused_and_a_change_is_not(
    folder: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    built: list[int] = []
    build = text_module._build
    monkeypatch.setattr(text_module, "_build", lambda *given: built.append(1) or build(*given))
    first = tokenize([folder], out, tokenizer)
    assert tokenize([folder], out, tokenizer) == first and len(built) == 1
    os.utime(folder / "00.txt", (1, 1))
    tokenize([folder], out, tokenizer)
    tokenize([folder], out, tokenizer, valid_fraction=0.5)
    assert len(built) == 3
    (folder / "00.txt").write_text("changed")
    info = tokenize([folder], out, tokenizer, valid_fraction=0.5)
    assert len(built) == 4 and "changed" in documents_of(out, "train", tokenizer) + documents_of(
        out, "valid", tokenizer
    )
    with (out / "train.bin").open("r+b") as torn:
        torn.truncate(10)
    assert tokenize([folder], out, tokenizer, valid_fraction=0.5) == info and len(built) == 5


def test_a_dataset_inside_its_source_is_not_read_as_text(folder: Path, tokenizer: Tokenizer) -> None:
    first = tokenize([folder], folder / "out", tokenizer)
    assert tokenize([folder], folder / "out", tokenizer) == first
    (folder / "00.txt").write_text("changed")
    assert tokenize([folder], folder / "out", tokenizer).documents == 30


def test_an_interrupted_run_leaves_nothing_that_looks_complete(
    folder: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def interrupt(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize([folder], out, tokenizer, progress=interrupt)
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert "is not a complete dataset" in message(lambda: load_dataset_info(out))
    (out / ".partial").mkdir()  # what a killed run leaves
    (out / ".partial" / "train.idx").write_text("junk")
    assert tokenize([folder], out, tokenizer).documents == 30

    def fail(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(text_module, "write_aside", fail)  # killed between the data and dataset.json
    with pytest.raises(KeyboardInterrupt):
        tokenize([folder], out, tokenizer, valid_fraction=0.3)
    assert "is not a complete dataset" in message(lambda: load_dataset_info(out))


def test_bad_input_leaves_an_existing_dataset_alone(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    out = tmp_path / "out"
    info = tokenize([folder], out, tokenizer)
    (tmp_path / "binary.txt").write_bytes(b"\0" * 50)
    (tmp_path / "empty.txt").write_bytes(b"")
    for name, expected in (("binary.txt", "is not text"), ("empty.txt", "nothing to read"), ("absent", "no file")):
        assert expected in message(lambda name=name: tokenize([tmp_path / name], out, tokenizer))
    assert "valid_fraction=1.0" in message(lambda: tokenize([folder], out, tokenizer, valid_fraction=1.0))
    assert load_dataset_info(out) == info and not (out / ".partial").exists()
    assert "cannot make the folder" in message(lambda: tokenize([folder], tmp_path / "empty.txt", tokenizer))


def test_a_second_process_waits_and_reuses(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    info = tokenize([folder], tmp_path / "ready", tokenizer)
    out = tmp_path / "out"
    out.mkdir()
    said: list[str] = []
    waiting = threading.Event()

    def report(done: int, total: int, what: str) -> None:
        said.append(what)
        waiting.set()

    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results: list[object] = []
        second = threading.Thread(target=lambda: results.append(tokenize([folder], out, tokenizer, progress=report)))
        second.start()
        assert waiting.wait(20) and "waiting for another process" in said[0]
        for path in (tmp_path / "ready").iterdir():  # the first process finishes
            if path.name != ".lock":
                path.rename(out / path.name)
    second.join(20)
    assert results == [info] and len(said) == 1


def test_bits_per_byte_of_a_uniform_model_follow_from_the_counts(
    folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    info = tokenize([folder], tmp_path / "out", tokenizer, valid_fraction=0.3)
    nats = info.valid_tokens * math.log(info.vocab_size)
    texts = documents_of(tmp_path / "out", "valid", tokenizer)
    by_hand = sum(len(tokenizer.encode(text)) + 1 for text in texts) * math.log2(info.vocab_size)
    assert nats / math.log(2) / info.valid_bytes == pytest.approx(by_hand / sum(len(text) for text in texts))


def test_a_model_has_a_row_for_every_token_and_from_scratch_no_other() -> None:
    check_vocabulary(24, 24)
    check_vocabulary(20, 24, from_scratch=False)
    for from_scratch in (True, False):
        with pytest.raises(ConfigError, match=r"25 tokens.*model\.vocab_size=24.*model\.vocab_size=25"):
            check_vocabulary(25, 24, from_scratch=from_scratch)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=24.*20 tokens.*model\.vocab_size=20"):
        check_vocabulary(20, 24)
