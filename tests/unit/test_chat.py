"""Conversations: the template's text, which tokens are answers, packing whole, and the loss on answers only."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError, DataError
from shardwright.train.chat import CHATML, ChatTemplate, encode_conversation, read_messages
from shardwright.train.data import open_blend
from shardwright.train.prepare import prepare_data, tokenize_sources
from shardwright.train.text import load_dataset_info
from shardwright.train.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from shardwright.train.windows import IGNORE, ConversationDataset

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "Three, I think."},
]


def write(path: Path, count: int = 40) -> Path:
    lines = [{"messages": [{"role": "user", "content": f"What is {i} and {i}?"},
                           {"role": "assistant", "content": "It is " + " ".join(["one"] * (i % 7 + 1))}]}
             for i in range(count)]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(["one two three and What is it user assistant"] * 5, 280, tmp_path_factory.mktemp("tokenizer"))


def answers_of(tokenizer: Tokenizer, template: ChatTemplate, talk: list[dict[str, str]]) -> tuple[str, str]:
    """What the marked tokens say, and all of them."""
    ids, counts = encode_conversation(tokenizer, template.conversation(talk))
    assert len(ids) == len(counts)
    return (
        tokenizer.decode([one for one, counted in zip(ids, counts, strict=True) if counted], skip_special=False),
        tokenizer.decode(ids, skip_special=False),
    )


def test_answers_and_their_end_marks_count_and_nothing_else(tokenizer: Tokenizer) -> None:
    said, whole = answers_of(tokenizer, ChatTemplate(CHATML, "chatml"), TALK)
    assert said == "Two.<|im_end|>\nThree, I think.<|im_end|>\n<|endoftext|>"
    assert whole.startswith("<|im_start|>system\nBe brief.<|im_end|>\n") and whole.endswith("\n<|endoftext|>")


def test_the_template_of_a_real_tokenizer_writes_what_transformers_writes(shared: Path) -> None:
    folder = shared / "data" / "models" / "smollm2-135m-instruct-q4_1"
    template, real = ChatTemplate.load(folder), load_tokenizer(folder)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert template.render(TALK) == theirs.apply_chat_template(TALK, tokenize=False)
    assert template.render(TALK[:2], prompt=True) == theirs.apply_chat_template(
        TALK[:2], tokenize=False, add_generation_prompt=True
    )
    said, whole = answers_of(real, template, TALK)
    assert said == "Two.<|im_end|>\nThree, I think.<|im_end|>\n" and whole == template.render(TALK)  # it ends itself


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for m in messages %}{{ m.content", "not valid"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[-1].content }}{% for m in messages %}{{ m.content }}{% endfor %}", "in another way when more follow"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        ChatTemplate(template, "here").conversation(TALK)


def test_generation_marks_are_read_over() -> None:
    text = "{% for m in messages %}{% generation %}{{ m.content }};{% endgeneration %}{% endfor %}"
    assert ChatTemplate(text, "here").render(TALK[:2]) == "Be brief.;One and one?;"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "f:3: not JSON"),
        ('{"text": "a"}', "no field 'messages'"),
        ('{"messages": "a"}', "not a list"),
        ('{"messages": [{"role": "user"}]}', "message 0 of 'messages' needs a role and a content"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "nothing to learn"),
    ],
)
def test_a_line_without_a_conversation_is_named(line: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        read_messages(line, "f:3", "messages")


def test_a_run_packs_whole_conversations_and_predicts_answers_only(tmp_path: Path) -> None:
    table = {
        "model": {"preset": "tiny", "vocab_size": 270},
        "data": {
            "sources": [{"path": str(write(tmp_path / "talks.jsonl")), "format": "chat"}],
            "chat_template": "chatml", "seq_len": 160, "valid_fraction": 0.1,
        },
        "train": {"run_dir": str(tmp_path / "run")},
    }  # fmt: skip
    config = RunConfig.of(table)
    data = prepare_data(config)
    (info,) = data.infos
    assert info.train_documents + info.valid_documents == 40 and info.valid_documents > 0
    dataset = open_blend(data.train, "train", 160, 0).datasets[0]
    assert isinstance(dataset, ConversationDataset) and dataset.num_cut == 0
    assert data.tokenizer_folder is not None
    known = load_tokenizer(data.tokenizer_folder)
    talks = 0
    for place in range(dataset.num_windows):
        window = dataset.cut(place)
        assert len(window.tokens) == sum(window.lengths) == 160
        first = 0
        for length in window.lengths:
            said = window.targets[first : first + length]
            text = known.decode([int(one) for one in said[said != IGNORE]], skip_special=False)
            if text:
                talks += 1
                assert text.startswith("It is one") and text.endswith("<|im_end|>\n<|endoftext|>")
                assert known.decode(window.tokens[first : first + 6].tolist()).startswith("<|")
            first += length
    assert talks == info.train_documents, "every conversation once, none cut"
    again = prepare_data(config)
    assert again.infos == data.infos


def test_a_conversation_that_is_too_long_keeps_its_beginning(tmp_path: Path) -> None:
    talks = [str(write(tmp_path / "a.jsonl"))]
    tokenize_sources(talks, tmp_path / "set", None, 270, "messages", 0.1, chat=True, template="chatml")
    whole = open_blend([(tmp_path / "set", 1.0)], "train", 300, 0).datasets[0]
    short = open_blend([(tmp_path / "set", 1.0)], "train", 60, 0).datasets[0]
    assert isinstance(short, ConversationDataset) and short.num_cut > 0
    assert isinstance(whole, ConversationDataset) and whole.num_windows < short.num_windows
    window = short.cut(0)
    assert window.lengths == (60,) and np.array_equal(window.tokens, whole.cut(0).tokens[:60])
    with pytest.raises(DataError, match="comes to an answer within seq_len=20"):
        open_blend([(tmp_path / "set", 1.0)], "train", 20, 0)
    with pytest.raises(DataError, match="must not cross"):
        open_blend([(tmp_path / "set", 1.0)], "train", 60, 0, cross_documents=True)


def test_a_dataset_made_again_from_text_has_no_answers_left(tmp_path: Path) -> None:
    out = tmp_path / "set"
    tokenize_sources([str(write(tmp_path / "a.jsonl"))], out, None, 270, "messages", 0.1, chat=True, template="chatml")
    assert (out / "train-answers.idx").is_file()
    (tmp_path / "b.txt").write_text("some plain text of a few words " * 30)
    tokenize_sources([str(tmp_path / "b.txt")], out, out / "tokenizer", 270, "text", 0.1)
    assert not list(out.glob("*-answers.*")) and load_dataset_info(out).documents == 1


def test_what_a_chat_source_lacks_is_said(tmp_path: Path) -> None:
    talks = str(write(tmp_path / "talks.jsonl"))
    base = {"model": {"preset": "tiny", "vocab_size": 270}, "train": {"run_dir": str(tmp_path / "run")}}
    plain = RunConfig.of({**base, "data": {"sources": [{"path": talks, "format": "chat"}]}})
    with pytest.raises(DataError, match="no chat template; set"):
        prepare_data(plain)
    (tmp_path / "a.txt").write_text("hello")
    text = RunConfig.of({**base, "data": {"sources": [{"path": str(tmp_path / "a.txt"), "format": "chat"}]}})
    with pytest.raises(DataError, match="holds no conversations"):
        prepare_data(text)
    with pytest.raises(ConfigError, match="format"):
        RunConfig.of({**base, "data": {"sources": [{"path": talks, "format": "talk"}]}})
