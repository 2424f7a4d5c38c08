"""Every mistake of the user: exit code 2, one line on standard error that says what to do, and nothing else touched."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import STEPS, TrainedRun
from e2e.kit import TINY, Outcome, finish, program, sets, shardwright

STEP = f"step-{STEPS}"
Snapshot = dict[str, tuple[int, int]]


@pytest.fixture
def place(tmp_path: Path, trained: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with files to get wrong, a finished run, and one whose checkpoints are all truncated."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.toml").touch()
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "prose.toml").write_text("Dear model, please train.\n")
    (tmp_path / "no_data.toml").write_text('model = "tiny"\n')
    (tmp_path / "words.txt").write_text("a few words, again and again. " * 30)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.bin").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "other_field.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    (tmp_path / "torn.jsonl").write_text('{"text": "one"}\n{"text": "tw')
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1" + bytes(100))
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "half.idx").write_bytes(b"MMIDIDX\0\0" + bytes(8))
    (tmp_path / "half.bin").write_bytes(bytes(64))
    shutil.copytree(trained.folder, tmp_path / "used")
    shutil.copytree(trained.folder, tmp_path / "torn")
    for weights in (tmp_path / "torn").glob("checkpoints/*/model.safetensors"):
        os.truncate(weights, 1000)
    (tmp_path / "metrics_only").mkdir()
    shutil.copy(trained.folder / "metrics.jsonl", tmp_path / "metrics_only")
    return tmp_path


def snapshot(folder: Path) -> Snapshot:
    """Every file and folder below ``folder`` with its size and the time of its last change."""
    stats = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*")}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def refused(outcome: Outcome, message: str) -> None:
    """Exit code 2, nothing on standard output, and on standard error one line that matches ``message``."""
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert outcome.err.startswith("error: ") and outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1, outcome.err
    assert re.search(message, outcome.err), outcome.err


def check(place: Path, arguments: list[str], message: str) -> None:
    before = snapshot(place)
    refused(shardwright(*arguments, "--json"), message)
    assert snapshot(place) == before


def train(short: dict[str, Any], **changes: Any) -> list[str]:
    """``train examples/tiny.toml`` into the folder ``new``, with changes as in `sets`."""
    return ["train", TINY, *sets(**{**short, "train__run_dir": "new", **changes})]


# -- the run file and what is said beside it ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nowhere.toml", r"run file nowhere\.toml does not exist; give a TOML file such as"),
        ("empty.toml", r"model is missing; add it \(see examples/tiny\.toml\)"),
        ("binary.toml", r"binary\.toml is not TOML: .*; see examples/tiny\.toml"),
        ("prose.toml", r"prose\.toml is not TOML: .* line 1, .*; see examples/tiny\.toml"),
        ("no_data.toml", r"data is missing; add it"),
        ("empty_folder", r"cannot read empty_folder: Is a directory"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "verify"])
def test_a_run_file_that_is_none(place: Path, verb: str, file: str, message: str) -> None:
    check(place, [verb, file], message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.lrr=1e-3", r"unknown key optim\.lrr; did you mean 'lr'\?"),
        ("train.step=3", r"unknown key train\.step; did you mean 'steps'"),
        ("optin.lr=1", r"unknown key optin; did you mean 'optim'"),
        ("data.sources=[{pth='a'}]", r"unknown key data\.sources\.0\.pth; did you mean 'path'"),
        ("model.dimm=64", r"unknown field 'dimm'; did you mean 'dim'"),
        ("layout.microbatch=2", r"unknown key 'microbatch'; did you mean micro_batch\?"),
        ("optim.lr", r"--set 'optim\.lr' is not section\.key=value; write for instance"),
        ("=3", r"--set '=3' is not section\.key=value"),
        (".lr=3", r"--set '\.lr=3' is not section\.key=value"),
        ("train.=3", r"--set 'train\.=3' is not section\.key=value"),
        ("optim.lr=fast", r"optim\.lr='fast': input should be a valid number"),
        ("optim.lr=-1", r"optim\.lr=-1: input should be greater than 0"),
        ("train.steps=-5", r"train\.steps=-5: input should be greater than or equal to 1"),
        ("train.steps=2.5", r"train\.steps=2\.5: input should be a valid integer"),
        ("train.seed=-1", r"train\.seed=-1: input should be greater than or equal to 0"),
        ("data.seq_len=1", r"data\.seq_len=1: input should be greater than or equal to 2"),
        ("data.valid_fraction=1", r"data\.valid_fraction=1: input should be less than 1"),
        ("data.sources=[]", r"data\.sources=\[\]: .* at least 1 item"),
        ("data.sources=7", r"data\.sources=7 is not a list"),
        (
            "data.sources=[{path='words.txt', weight=-1}]",
            r"data\.sources\.0\.weight=-1: input should be greater than 0",
        ),
        ("data=7", r"data=7 is not a table; write its keys below \[data\]"),
        ("model=7", r"model=7 is neither a name nor a table; write model = "),
        ("model=tinny", r"model 'tinny' is neither a preset nor a file or folder; did you mean 'tiny'"),
        ("model.preset=lama-3.1-8b", r"no preset 'lama-3\.1-8b'; did you mean 'llama-3\.1-8b'"),
        ("model.num_heads=0", r"num_heads=0: input should be greater than 0"),
        ("optim.warmup_steps=3", r"optim\.warmup_steps=3 is more than train\.steps=2; warm up for fewer steps"),
    ],
)
def test_a_value_that_cannot_be(place: Path, short: dict[str, Any], change: str, message: str) -> None:
    check(place, [*train(short), "--set", change], message)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp=0", r"dp=0 must be at least 1; leave it out for 1"),
        ("dp=-2", r"dp=-2 must be at least 1"),
        ("dp=two", r"dp=two must be a whole number"),
        ("dp", r"'dp' is not key=value; write for instance dp=2,zero=1"),
        ("ddp=2", r"unknown key 'ddp'; did you mean dp\?"),
        ("dp=2,dp=3", r"dp is given twice; give it once"),
        ("recompute=some", r"recompute=some is not known; use one of none, selective, full"),
        ("tp=3", r"tp=3 must divide the model's 4 attention heads; use tp=1, 2 or 4"),
        ("pp=3", r"pp\*virtual=3 stages need as many layers, the model has 2; use at most pp=2"),
        ("ep=3", r"ep=3 must divide tp\*cp\*dp=1; use ep=1"),
        ("offload=params", r"offload=params with zero=0: only ZeRO-3 .*; set zero=3, or use offload=optimizer"),
        ("precision=fp8", r"precision=fp8 can be planned but not trained; use fp32, bf16 or fp64"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "verify"])
def test_a_layout_that_cannot_be(place: Path, short: dict[str, Any], verb: str, layout: str, message: str) -> None:
    command = [verb, *train(short)[1:], "--layout", layout]
    check(place, [*command, "--set", "data.cache=new_cache"], message)


@pytest.mark.parametrize("verb", ["train", "verify"])
def test_a_layout_for_another_number_of_processes(
    place: Path, short: dict[str, Any], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    place_of_a_rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (place_of_a_rank | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    command = [verb, *train(short, data__cache="new_cache")[1:], "--layout", "dp=3"]
    check(place, command, r"dp=3\S* needs 3 processes .* but 2 were started; start 3 or use dp=2")


def test_half_of_torchruns_environment(place: Path, short: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check(place, train(short), r"MASTER_ADDR and MASTER_PORT not; start with torchrun, or unset RANK and WORLD_SIZE")


# -- data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", r"no file or folder 'nowhere\.txt' \(looked in .*\); give a path that exists or a pattern"),
        ("*.md", r"pattern '\*\.md' matches no file"),
        ("empty_folder", r"folder empty_folder has no \.txt .* file; name others by a pattern"),
        ("empty.txt", r"nothing to read in .*; give files that contain text"),
        ("picture.bin", r"picture\.bin is not text \(or not UTF-8\); give a text, \.jsonl or \.parquet file"),
        ("other_field.jsonl", r"other_field\.jsonl:2: no field 'text', only 'body'; name the text's field"),
        ("torn.jsonl", r"torn\.jsonl:2: not JSON .*; one JSON object a line is needed"),
        ("damaged.parquet", r"cannot read damaged\.parquet: .*; repair the file or leave it out"),
        ("half.bin", r"half\.idx has 17 bytes, its header alone needs \d+; make the dataset again"),
        (
            "[{path='words.txt', valid_path='half'}]",
            r"valid_path='half' goes with an indexed dataset, but words\.txt is",
        ),
    ],
)
def test_text_that_cannot_be_read(place: Path, short: dict[str, Any], source: str, message: str) -> None:
    fresh = train(short, data__sources=source, data__cache="new_cache")
    check(place, fresh, message)


@pytest.mark.parametrize("source", ["nowhere.txt", "empty.txt", "empty_folder", "picture.bin", "other_field.jsonl"])
def test_tokenize_leaves_nothing_of_text_that_cannot_be_read(place: Path, source: str) -> None:
    check(
        place,
        ["tokenize", source, "--out", "new"],
        source.replace(".", r"\.") if source != "empty.txt" else "nothing to read",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--field", "body"], r"words\.jsonl:1: no field 'body', only 'text'; name the text's field"),
        (["--vocab-size", "100"], r"vocab_size=100 is too small: 256 bytes and"),
        (
            ["--vocab-size", "-1"],
            r"invalid value for '--vocab-size': .* greater than or equal to 1; see shardwright tok",
        ),
        (["--valid-fraction", "2"], r"invalid value for '--valid-fraction': .* less than or equal to 0\.999; see"),
        (["--tokenizer", "nowhere"], r"no tokenizer at nowhere; give a tokenizer\.json or a folder with one"),
        (["--tokenizer", "used/config.toml"], r"cannot read used/config\.toml: .*; it must be a JSON file"),
        (["--tokenizer", "used/ledger.json"], r"used/ledger\.json is not a tokenizer: .*; give a tokenizer\.json"),
        (["--out", "words.txt/new"], r"cannot write words\.txt/new.*: Not a directory; give another folder with --out"),
        (["--out", "words.txt"], r"cannot write words\.txt.*; give another folder with --out"),
    ],
)
def test_tokenize_with_an_option_that_cannot_be(place: Path, options: list[str], message: str) -> None:
    (place / "words.jsonl").write_text('{"text": "a few words"}\n')
    source = "words.jsonl" if "--field" in options else "words.txt"
    out = [] if "--out" in options else ["--out", "new"]
    check(place, ["tokenize", source, *out, *options], message)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (500, r"model\.vocab_size=500 is larger than the tokenizer's 320 tokens; set model\.vocab_size=320, or"),
        (300, r"the tokenizer has 320 tokens but model\.vocab_size=300; set model\.vocab_size=320 or use a smaller"),
    ],
)
def test_a_vocabulary_of_another_size_than_the_tokenizers(
    place: Path, short: dict[str, Any], size: int, message: str
) -> None:
    tokenizer = f"used/checkpoints/{STEP}"
    fresh = train(short, model__vocab_size=size, data__tokenizer=tokenizer, data__cache="new_cache")
    check(place, fresh, message)


def test_a_vocabulary_larger_than_the_text_gives_and_then_more_text(place: Path, short: dict[str, Any]) -> None:
    """The tokenizer that was too small is not kept: what the message advises works."""
    command = train(short, data__sources="words.txt", model__vocab_size=290, data__cache="new_cache")
    refused(
        shardwright(*command, "--json"),
        r"model\.vocab_size=290 is larger than the tokenizer's \d+ tokens; set .* more text",
    )
    assert not (place / "new").exists()
    with (place / "words.txt").open("a") as file:
        file.write("Many different words, for instance harbour, garden, library, market, lantern and mill. " * 30)
    assert shardwright(*command, "--json").json()["steps"] == 2


def test_a_dataset_of_another_vocabulary(place: Path, short: dict[str, Any]) -> None:
    assert (
        shardwright("tokenize", "words.txt", "--out", "data", "--vocab-size", "260", "--json").json()["vocab_size"]
        == 260
    )
    check(place, train(short, data__sources="data"), r"model\.vocab_size=320 is larger than the tokenizer's 260 tokens")
    pair = train(short, data__sources="data/train", model__vocab_size=257)
    refused(
        shardwright(*pair, "--json"), r"data/train holds token \d+, the model's vocabulary is 257; set vocab_size to"
    )


def test_held_out_data_that_is_not_there_is_noticed_before_training(place: Path, short: dict[str, Any]) -> None:
    shardwright("tokenize", "words.txt", "--out", "data", "--vocab-size", "260")
    source = "[{path='data/train', valid_path='data/nowhere'}]"
    changes = train(short, data__sources=source, model__vocab_size=260)
    check(place, changes, r"no dataset at data/nowhere: neither a folder made by `shardwright tokenize` nor")


# -- run folders and checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "resume", "message"),
    [
        (
            "used",
            "none",
            r"used/checkpoints already holds checkpoints \(step-10, step-20\); continue with --resume auto, or",
        ),
        (
            "metrics_only",
            "none",
            r"metrics_only holds the metrics of another run; resume that run, or give another run",
        ),
        ("new", "nowhere", r"--resume nowhere: no such checkpoint; give a folder step-N, auto or none"),
        (
            "new",
            "empty_folder",
            r"empty_folder has no manifest\.json: not a checkpoint, or a save that was interrupted",
        ),
        ("new", "words.txt", r"--resume words\.txt: no such checkpoint"),
        (
            "new",
            f"torn/checkpoints/{STEP}",
            r"model\.safetensors has 1000 bytes instead of \d+; use another checkpoint",
        ),
        ("torn", "auto", r"no complete checkpoint to continue from \(step-10, step-20 lack data\); move them away"),
        (
            "used",
            "used/checkpoints/step-10",
            r"later checkpoints \(step-20\) than step-10, .*; move them away, use --resume",
        ),
    ],
)
def test_a_run_folder_or_checkpoint_that_cannot_be_used(
    place: Path, short: dict[str, Any], folder: str, resume: str, message: str
) -> None:
    fresh = train(short, train__run_dir=folder, train__steps=STEPS + 2, data__cache="new_cache")
    if folder == "metrics_only":  # noticed by the rank that would write there, after the text is tokenised
        fresh = train(short, train__run_dir=folder)
    check(place, [*fresh, "--resume", resume], message)


def test_a_checkpoint_of_another_model(place: Path, short: dict[str, Any]) -> None:
    changes = train(short, model__dim=32, train__steps=STEPS + 2)
    check(
        place,
        [*changes, "--resume", f"used/checkpoints/{STEP}"],
        r"was saved from another model: model\.dim is 32 instead of 64; .*; take these fields back to resume",
    )


def test_a_corrupt_checkpoint_of_full_size(place: Path, short: dict[str, Any]) -> None:
    weights = place / "used" / "checkpoints" / STEP / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changes = train(short, train__run_dir="used", train__steps=STEPS + 2)
    check(
        place,
        [*changes, "--resume", str(weights.parent)],
        r"model\.safetensors is corrupt \(its crc32 differs in bytes \d+ to \d+\); use another checkp",
    )


@pytest.mark.parametrize("run_dir", ["words.txt", "words.txt/deeper/still"])
def test_a_run_folder_below_a_file(place: Path, short: dict[str, Any], run_dir: str) -> None:
    message = rf"train\.run_dir={run_dir} cannot be made: \S*words\.txt is no folder to write in; give another"
    check(place, train(short, train__run_dir=run_dir, data__cache="new_cache"), message)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(place: Path, short: dict[str, Any]) -> None:
    (place / "empty_folder").chmod(0o555)
    check(
        place,
        train(short, train__run_dir="empty_folder/run"),
        r"cannot be made: \S*empty_folder is no folder to write in",
    )
    check(
        place, train(short, data__cache="empty_folder/data"), r"cannot write empty_folder/data: Permission denied; give"
    )


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nobody can make a folder")
def test_a_run_folder_that_only_its_rank_finds_unwritable(place: Path, short: dict[str, Any]) -> None:
    check(place, train(short, train__run_dir="/proc/self/run"), r"train\.run_dir=/proc/self/run cannot be")


def test_a_cache_below_a_file(place: Path, short: dict[str, Any]) -> None:
    check(
        place,
        train(short, data__cache="words.txt/data"),
        r"cannot write words\.txt/data: Not a directory; give another",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__init_from": "nowhere"}, r"model folder nowhere does not exist; give a folder with config\.json and"),
        (
            {"train__init_from": f"torn/checkpoints/{STEP}"},
            r"model\.safetensors is truncated or not safetensors .*; copy",
        ),
        (
            {"train__init_from": f"used/checkpoints/{STEP}", "model__dim": 32},
            r"is another model than \[model\]; set model = .*model\.dim is 32 instead of ",
        ),
        ({"train__freeze": "['blok.']"}, r"train\.freeze='blok\.' matches no parameter; names look like blocks\.0"),
        ({"data__tokenizer": "nowhere"}, r"no tokenizer at nowhere; give a tokenizer\.json or a folder with one"),
    ],
)
def test_a_start_that_cannot_be(place: Path, short: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    check(place, train(short, **changes), message)


def test_a_run_that_goes_on_as_another_model(place: Path, short: dict[str, Any]) -> None:
    """The weights have the same shapes, so only the saved config tells; no field of it is left out of the line."""
    heads = {"model__num_heads": 2, "model__num_kv_heads": 1, "model__head_dim": 32, "model__rope_theta": 77}
    start = train(short, train__run_dir="used", train__steps=STEPS + 2, **heads)
    check(
        place,
        [*start, "--resume", "auto"],
        rf"checkpoints/{STEP} was saved from another model: model\.num_heads is 2 instead of 4; model\.num_kv_heads is 1 "
        r"instead of 2; model\.head_dim is 32 instead of 16; model\.rope_theta is 77\.0 instead of .*; take these fields back",
    )


# -- the other verbs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nowhere", r"model folder nowhere does not exist; give a folder with config\.json and model\.safetensors"),
        ("empty_folder", r"empty_folder has no config\.json; give a Hugging Face model folder"),
        ("words.txt", r"words\.txt is a file; give the folder that holds config\.json and model\.safetensors"),
        ("used", rf"used is no model folder; give one of its checkpoints, such as used/checkpoints/{STEP}"),
        ("used/checkpoints", rf"checkpoints is no model folder; give one of its checkpoints, such as \S+{STEP}"),
        (f"torn/checkpoints/{STEP}", r"model\.safetensors is truncated or not safetensors .*; copy or save it again"),
    ],
)
def test_generate_without_a_model(place: Path, folder: str, message: str) -> None:
    check(place, ["generate", folder, "--prompt", "Ada"], message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], r"the prompt has no tokens; give some text"),
        (
            ["--prompt", "Ada " * 200],
            r"\d+ prompt tokens and 64 new ones need \d+ positions, but step-20 has 256; shorten",
        ),
        (["--prompt", "Ada", "--max-tokens", "300"], r"has 256; shorten the prompt, or ask for at most 25\d tokens"),
        (
            ["--prompt", "Ada", "--max-tokens", "-3"],
            r"'--max-tokens': .* greater than or equal to 1; see shardwright gen",
        ),
        (
            ["--prompt", "Ada", "--temperature", "-1"],
            r"'--temperature': .* greater than or equal to 0; see shardwright",
        ),
        (["--prompt", "Ada", "--top-p", "0"], r"top_p=0\.0 must be above 0 and at most 1"),
        ([], r"missing option '--prompt'; see shardwright generate --help"),
    ],
)
def test_generate_with_an_option_that_cannot_be(place: Path, options: list[str], message: str) -> None:
    check(place, ["generate", f"used/checkpoints/{STEP}", *options], message)


def test_generate_without_a_tokenizer(place: Path) -> None:
    folder = f"used/checkpoints/{STEP}"
    (place / folder / "tokenizer.json").unlink()
    check(
        place, ["generate", folder, "--prompt", "Ada"], rf"no tokenizer at {folder}; give a tokenizer\.json or a folder"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", TINY], r"no such command 'trian'\. Did you mean 'train'\?"),
        (["train"], r"missing argument 'CONFIG'; see shardwright train --help"),
        (["train", TINY, "more.toml"], r"unexpected extra argument.*more\.toml.*; see shardwright train --help"),
        (["train", TINY, "--stes", "3"], r"no such option: --stes .*--set.*; see shardwright train --help"),
        (
            ["train", TINY, "--set"],
            r"--set '--json' is not section\.key=value; write for instance",
        ),  # it takes the next word
        (["verify", TINY, "--steps", "0"], r"'--steps': .* greater than or equal to 1; see shardwright verify --help"),
        (["verify", TINY, "--steps", "some"], r"'--steps': .* integer.*; see shardwright verify --help"),
        (["verify", TINY, "--least", "3"], r"--least 3 is for --matrix; add --matrix or leave it out"),
        (["verify", TINY, "--most-ranks", "4"], r"--most-ranks 4 is for --matrix; add --matrix or leave it out"),
        (["verify", TINY, "--out", "x"], r"--out x is for --matrix or --mutate all"),
        (["verify", TINY, "--matrix", "--write-gradients", "x"], r"--write-gradients is for one layout; leave --matrix out"),
        (["verify", TINY, "--mutate", "drop-gradients"], r"mutation 'drop-gradients' is not known; did you mean '"),
        (["tokenize", "--out", "new"], r"missing argument 'SRC\.\.\.'; see shardwright tokenize --help"),
        (["tokenize", "words.txt"], r"missing option '--out'; see shardwright tokenize --help"),
        (["bench", "train", "--peer", "dpp"], r"peer 'dpp' is not known; known: .*ddp"),
        (
            ["bench", "train", "--model", "tinny"],
            r"model 'tinny' is neither a preset nor a file or folder; did you mean",
        ),
        (["bench", "train", "--layout", "dp=0"], r"dp=0 must be at least 1; leave it out for 1"),
        (
            ["bench", "train", "--rounds", "-1"],
            r"'--rounds': .* greater than or equal to 2; see shardwright bench train",
        ),
    ],
)
def test_a_command_line_that_cannot_be(place: Path, arguments: list[str], message: str) -> None:
    check(place, arguments, message)


def test_a_program_of_its_own_says_the_same(place: Path) -> None:
    """No traceback and no warning comes from outside of `main` either."""
    with program(["-m", "shardwright", "train", "empty.toml", "--json"], place) as process:
        refused(finish(process), r"^error: model is missing; add it \(see examples/tiny\.toml\)$")
