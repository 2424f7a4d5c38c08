"""What every verb does when it is used right: the files it leaves, the JSON it prints, and what other programs make of them."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import socket
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import zstandard

import shardwright as package
from e2e.conftest import STEPS, TrainedRun
from e2e.kit import TINY, Outcome, finish, program, read_jsonl, sets, shardwright
from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.train.indexed import IndexedDataset

METRICS = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "step_seconds", "data_seconds",
    "exposed_communication_seconds", "peak_memory_bytes",
}  # fmt: skip

# ------------------------------------------------------------------------------------------------- train


def test_json_is_one_object_and_nothing_else(trained: TrainedRun) -> None:
    summary = trained.summary
    assert trained.outcome.err == ""
    assert (summary["steps"], summary["stopped"], summary["run_dir"]) == (STEPS, False, str(trained.folder))
    assert summary["checkpoint"] == str(trained.checkpoint)
    assert set(summary["ledger"]) == {"predicted", "measured"}
    assert set(summary["memory"]) == {"parameters", "gradients", "optimizer"}


def test_metrics_have_a_line_for_each_step(trained: TrainedRun) -> None:
    records = read_jsonl(trained.folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record.keys() >= METRICS
        assert all(math.isfinite(record[name]) for name in METRICS)
    assert [record["step"] for record in records if "valid_loss" in record] == [10, 20]
    assert records[-1]["loss"] == trained.summary["loss"] < records[0]["loss"] - 0.5


def test_the_loss_on_held_out_text_is_also_given_in_bits_per_byte(trained: TrainedRun, cache: Path) -> None:
    (info,) = [json.loads(path.read_text()) for path in cache.glob("text-*/dataset.json")]
    summary = trained.summary
    nats_per_byte = summary["valid_loss"] * info["valid_tokens"] / info["valid_bytes"]
    assert summary["bits_per_byte"] == pytest.approx(nats_per_byte / math.log(2))


def test_what_was_sent_is_what_was_predicted(trained: TrainedRun) -> None:
    ledger = json.loads((trained.folder / "ledger.json").read_text())
    assert ledger["differences"] == []
    assert ledger["predicted"]["total_bytes"] == ledger["measured"]["total_bytes"] > 0


def test_the_config_of_the_run_folder_is_the_whole_run(trained: TrainedRun) -> None:
    changes = [word for word in sets(**trained.changes) if word != "--set"]
    assert RunConfig.load(trained.folder / "config.toml") == RunConfig.load(TINY, changes, "dp=2")


def test_tensorboard_reads_the_run(trained: TrainedRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    assert [event.step for event in events.Scalars("valid/loss")] == [10, 20]


def test_the_curves_are_pictures(trained: TrainedRun) -> None:
    assert (trained.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(trained.folder / "loss.svg").getroot().tag.endswith("svg")


def test_the_trace_holds_the_steps_of_the_model(trained: TrainedRun) -> None:
    events = json.loads((trained.folder / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" and event["dur"] > 0 for event in events)
    assert sum(str(event.get("name", "")).startswith("ProfilerStep") for event in events) >= 3


def test_checkpoints_are_kept_by_number(trained: TrainedRun) -> None:
    assert sorted(path.name for path in (trained.folder / "checkpoints").iterdir()) == ["step-10", "step-20"]


def test_a_run_that_goes_on_says_so_and_prints_what_happened(trained: TrainedRun, tmp_path: Path) -> None:
    shutil.copytree(trained.folder, tmp_path / "run")
    more = sets(train__run_dir=tmp_path / "run", train__steps=STEPS + 2)
    outcome = shardwright("train", str(trained.folder / "config.toml"), "--resume", "auto", *more)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == f"resumed from step-{STEPS}: step {STEPS}, {4 * STEPS} samples read"
    assert any(line.startswith("step 22/22") and "valid" in line for line in lines)
    for words in ("bits per byte", "all_reduce", "run folder", "step-22"):
        assert words in outcome.out
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 23))

    again = shardwright("train", str(tmp_path / "run" / "config.toml"), "--resume", "auto")
    assert (again.code, again.err) == (0, "")
    assert "nothing to do: step 22 of 22 was done; raise train.steps" in again.out


def test_text_of_which_nothing_is_held_out_trains_without_evaluation(tmp_path: Path, short: dict[str, Any]) -> None:
    changes = sets(**short, train__run_dir=tmp_path / "run", data__valid_fraction=0)
    summary = shardwright("train", TINY, "--json", *changes).json()
    assert (summary["valid_loss"], summary["bits_per_byte"]) == (None, None)
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "manifest.json").is_file()


def test_ctrl_c_before_the_first_step_is_no_traceback(tmp_path: Path, short: dict[str, Any]) -> None:
    with mock.patch("shardwright.train.start.prepare_data", side_effect=KeyboardInterrupt):
        outcome = shardwright("train", TINY, *sets(**short, train__run_dir=tmp_path / "run"))
    assert outcome == Outcome(130, "", "stopped by Ctrl-C; no checkpoint was saved\ninterrupted\n")


def test_under_torchrun_one_rank_speaks_for_all(tmp_path: Path, short: dict[str, Any], trained: TrainedRun) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = ["-m", "shardwright", "train", TINY, "--layout", "dp=2", "--json", *sets(**short, train__run_dir="run")]
    with (
        program(command, tmp_path, **place, RANK="0", LOCAL_RANK="0") as first,
        program(command, tmp_path, **place, RANK="1", LOCAL_RANK="1") as second,
    ):
        outcomes = finish(first), finish(second)
    assert outcomes[0].json()["steps"] == 2
    assert (outcomes[1].code, outcomes[1].out) == (0, "")
    ours = read_jsonl(trained.folder / "metrics.jsonl")[0]["loss"]
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]["loss"] == ours


# ------------------------------------------------------------------------------------------------- fine-tuning


def test_a_run_that_starts_from_weights_goes_on_from_their_loss(
    trained: TrainedRun, tmp_path: Path, short: dict[str, Any]
) -> None:
    changes = {
        **short,
        "train__steps": 1,
        "optim__lr": 1e-12,
        "optim__warmup_steps": 0,
        "train__run_dir": tmp_path / "run",
    }
    start = sets(**changes, train__init_from=trained.checkpoint, model=trained.checkpoint)
    summary = shardwright("train", TINY, "--json", *start).json()
    assert summary["valid_loss"] == pytest.approx(trained.summary["valid_loss"], rel=1e-6)
    assert summary["steps"] == 1


# ------------------------------------------------------------------------------------------------- verify


def test_verify_has_the_keys_of_the_contract(short: dict[str, Any]) -> None:
    found = shardwright("verify", TINY, "--layout", "dp=2", "--json", *sets(**short)).json()
    assert found["passed"] is True
    for name, tolerance in (("loss", 1e-6), ("gradients", 1e-5), ("parameters", 1e-5)):
        assert found[name]["tolerance"] == tolerance
        assert found[name]["max_rel_diff"] <= tolerance
    ledger = found["ledger"]
    assert ledger["equal"] is True
    assert ledger["predicted_bytes"] == ledger["dryrun_bytes"] == ledger["measured_bytes"] > 0
    assert isinstance(found["worst"], str)


def test_verify_writes_the_gradients_of_both_as_files(short: dict[str, Any], tmp_path: Path) -> None:
    words = ["verify", TINY, "--layout", "dp=2", "--steps", "1", "--write-gradients", str(tmp_path), "--json", *sets(**short)]
    found = shardwright(*words).json()
    assert found["passed"] and found["gradient_files"]["max_rel_diff"] <= found["gradient_files"]["tolerance"] == 1e-5
    for name in ("layout", "reference"):
        assert (tmp_path / name / "step-0" / "state" / "gradients.safetensors").is_file()
    again = shardwright(*words)
    assert again.code == 2 and "holds gradients already; remove them, or give another folder" in again.err


def test_verify_says_no_when_the_reduction_is_left_out(short: dict[str, Any]) -> None:
    broken = ("--mutate", "drop-gradient-all-reduce")
    outcome = shardwright("verify", TINY, "--layout", "dp=2", "--steps", "1", *broken, *sets(**short))
    assert (outcome.code, outcome.err) == (1, "")
    assert outcome.out.rstrip().endswith("failed")
    assert "FAIL" in outcome.out


# ------------------------------------------------------------------------------------------------- generate


def test_generate_continues_a_prompt_as_transformers_does(trained: TrainedRun) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = shardwright(
        "generate", str(trained.checkpoint), "--prompt", "Ada found", "--max-tokens", "12", "--json"
    ).json()
    assert ours.keys() >= {"text", "tokens", "tokens_per_second"}
    assert ours["tokens_per_second"] > 0
    model = AutoModelForCausalLM.from_pretrained(trained.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(trained.checkpoint)
    prompt = tokenizer("Ada found", return_tensors="pt")
    theirs = model.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert ours["tokens"] == theirs.tolist()
    assert ours["text"] == tokenizer.decode(theirs, skip_special_tokens=True)


def test_generate_draws_the_same_with_the_same_seed(trained: TrainedRun) -> None:
    def drawn(seed: int) -> list[int]:
        options = ("--temperature", "2", "--seed", str(seed), "--max-tokens", "20", "--json")
        return shardwright("generate", str(trained.checkpoint), "--prompt", "Ada", *options).json()["tokens"]

    assert drawn(1) == drawn(1) != drawn(2)


def test_generate_prints_the_prompt_and_what_follows(trained: TrainedRun) -> None:
    outcome = shardwright("generate", str(trained.checkpoint), "--prompt", "Ada [bold] found", "--max-tokens", "3")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("Ada [bold] found")
    assert "3 tokens," in outcome.out


# ------------------------------------------------------------------------------------------------- tokenize


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in every kind of file that is read, 6 documents of which each names its own kind."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("books") / "books"
    (folder / "deep" / "deeper").mkdir(parents=True)
    texts = {
        name: f"The {name} file tells of a quiet harbour. " * 30 for name in ("plain", "lines", "gz", "zst", "parquet")
    }
    (folder / "plain.txt").write_text(texts["plain"])
    (folder / "deep" / "lines.jsonl").write_text(
        "".join(json.dumps({"text": texts["lines"], "n": n}) + "\n" for n in (1, 2))
    )
    with gzip.open(folder / "deep" / "packed.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": texts["gz"]}) + "\n")
    packed = zstandard.ZstdCompressor().compress(json.dumps({"text": texts["zst"]}).encode() + b"\n")
    (folder / "deep" / "deeper" / "packed.jsonl.zst").write_bytes(packed)
    parquet.write_table(arrow.table({"text": [texts["parquet"]]}), folder / "rows.parquet")
    (folder / "picture.txt").write_bytes(bytes(range(256)) * 8)
    return folder


@pytest.fixture(scope="module")
def dataset(books: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The books as a dataset, and what ``tokenize --json`` said."""
    out = tmp_path_factory.mktemp("data") / "books"
    options = ("--out", str(out), "--vocab-size", "290", "--valid-fraction", "0.2", "--json")
    return out, shardwright("tokenize", str(books), *options).json()


def test_tokenize_reads_every_kind_of_file(dataset: tuple[Path, dict[str, Any]]) -> None:
    out, info = dataset
    assert (info["files"], info["documents"], info["skipped_binary"], info["vocab_size"]) == (6, 6, 1, 290)
    train, valid = IndexedDataset(out / "train"), IndexedDataset(out / "valid")
    assert (len(train) + len(valid), train.num_tokens) == (6, info["train_tokens"])
    assert 1 <= len(valid) < 6
    from shardwright.train.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(out)
    texts = [tokenizer.decode(part.document(index)) for part in (train, valid) for index in range(len(part))]
    for name in ("plain", "lines", "gz", "zst", "parquet"):
        assert any(text.startswith(f"The {name} file tells") for text in texts)


def test_tokenize_takes_globs_and_a_tokenizer(
    books: Path, dataset: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(books.parent)
    options = ("--out", str(tmp_path / "out"), "--tokenizer", str(dataset[0]))
    outcome = shardwright("tokenize", "books/**/*.jsonl*", "books/plain.txt", *options)
    assert (outcome.code, outcome.err) == (0, "")
    assert "5 documents of 4 files" in " ".join(outcome.out.split())
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["vocab_size"] == 290


@pytest.mark.parametrize("form", ["folder", "prefix", "file of a pair"])
def test_training_reads_a_tokenised_dataset(
    dataset: tuple[Path, dict[str, Any]], tmp_path: Path, short: dict[str, Any], form: str
) -> None:
    out, _ = dataset
    source = {
        "folder": f"[{{path='{out}'}}]",
        "prefix": f"[{{path='{out}/train', valid_path='{out}/valid'}}]",
        "file of a pair": f"[{{path='{out}/train.bin', valid_path='{out}/valid.idx'}}]",
    }[form]
    changes = sets(**short, data__sources=source, model__vocab_size=290, train__run_dir=tmp_path / "run")
    summary = shardwright("train", TINY, "--json", *changes).json()
    assert math.isfinite(summary["valid_loss"])
    assert (summary["bits_per_byte"] is None) == (form != "folder")  # a bare pair does not say how long its text is
    assert (Path(summary["checkpoint"]) / "tokenizer.json").is_file() == (form == "folder")


def test_sources_are_mixed_by_weight(books: Path, tmp_path: Path, short: dict[str, Any], cache: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(books / "deep", tmp_path / name)
        (tmp_path / name / f"{name}.txt").write_text(f"Only source {name} has this line, again and again. " * 40)

    def losses(first: int, second: int) -> list[float]:
        folder = tmp_path / f"run-{first}-{second}"
        source = f"[{{path='{tmp_path}/one', weight={first}}}, {{path='{tmp_path}/two', weight={second}}}]"
        changes = sets(**short, data__sources=source, model__vocab_size=290, train__run_dir=folder)
        assert shardwright("train", TINY, "--json", *changes).json()["valid_loss"] > 0
        return [record["loss"] for record in read_jsonl(folder / "metrics.jsonl")]

    assert losses(9, 1) != losses(1, 9)


# ------------------------------------------------------------------------------------------------- bench


def test_bench_train_times_both_sides(tmp_path: Path) -> None:
    shape = ("--model", "tiny", "--seq-len", "16", "--layout", "dp=2,micro_batch=1", "--rounds", "2")
    kept = tmp_path / "new" / "bench.json"
    found = shardwright("bench", "train", *shape, "--peer", "ddp", "--out", str(kept), "--json").json()
    assert found["ratio"] == pytest.approx(found["ours"]["step_seconds"] / found["peer"]["step_seconds"])
    assert [len(found["samples"][side]) for side in ("ours", "peer")] == [2, 2]
    assert found["largest_loss_difference"] < 1e-4
    assert json.loads(kept.read_text()) == found


# ------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("verb", [["train"], ["verify"], ["generate"], ["tokenize"], ["bench"], ["bench", "train"], []])
def test_help_has_an_example(verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    outcome = shardwright(*verb, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"Example: shardwright {' '.join(verb)}".rstrip() in outcome.out
    if verb and verb != ["bench"]:
        assert "--json" in outcome.out


def test_the_examples_of_the_help_are_right(trained: TrainedRun) -> None:
    """Every option that an example uses exists, and every layout in one can be read."""
    for verb in (["train"], ["verify"], ["generate"], ["tokenize"], ["bench", "train"]):
        text = " ".join(shardwright(*verb, "--help").out.split())
        example = text.split("Example: shardwright ")[1].split()
        assert all(word in text.split("Example:")[0] for word in example if word.startswith("--"))
        if "--layout" in example:
            assert Layout.parse(example[example.index("--layout") + 1]).world_size == 2


def test_without_arguments_the_help_is_shown() -> None:
    outcome = shardwright()
    assert (outcome.code, outcome.err) == (2, "")
    assert "Usage: shardwright" in outcome.out


def test_the_version_is_that_of_the_package() -> None:
    outcome = shardwright("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"{package.__version__}\n", "")


def test_shells_can_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--install-completion" in shardwright("--help").out
    for name, value in {
        "_SHARDWRIGHT_COMPLETE": "complete_bash",
        "COMP_WORDS": "shardwright ver",
        "COMP_CWORD": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert shardwright() == Outcome(0, "verify\n", "")
