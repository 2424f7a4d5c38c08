"""Conversations to tokens: the tokenizer's chat template, and which tokens are an answer.

A conversation is a list of messages ``{"role": ..., "content": ...}``. The template is a Jinja2 text, as in
``tokenizer_config.json``, that gets ``messages``, ``add_generation_prompt`` and the special tokens. An answer is what the
template adds for a message of the assistant after the prompt for it: content and end mark.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from shardwright.errors import DataError
from shardwright.train.tokenizer import Tokenizer, read_json

ANSWERS_OF = "assistant"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template that ``chatml`` names, for a tokenizer without one."""


@dataclass(frozen=True)
class Conversation:
    """A rendered conversation. ``answers``: (first, one past the last) character of each answer."""

    text: str
    answers: tuple[tuple[int, int], ...]


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}``, which some templates put around answers, is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@dataclass(frozen=True)
class ChatTemplate:
    """A template and its special tokens; ``where`` is for messages."""

    source: str
    where: str
    special: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, tokenizer_folder: Path | None, given: str | None = None) -> ChatTemplate:
        """``given`` (``chatml``, or a file with a template), else the one of the tokenizer in ``tokenizer_folder``."""
        config: dict[str, Any] = {}
        if tokenizer_folder is not None and (tokenizer_folder / "tokenizer_config.json").is_file():
            config = read_json(tokenizer_folder / "tokenizer_config.json")
        names = {name: value for name, value in config.items() if name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        special = {name: value["content"] if isinstance(value, dict) else str(value) for name, value in names.items() if value}
        if given == "chatml":
            return cls(CHATML, given, special)
        beside = tokenizer_folder / "chat_template.jinja" if tokenizer_folder is not None else None
        if given is not None or (beside is not None and beside.is_file()):
            path = Path(given) if given is not None else beside
            assert path is not None
            try:
                return cls(path.read_text(encoding="utf-8"), str(path), special)
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"cannot read the chat template {path}: {error}; give a file, or chatml") from error
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((one["template"] for one in source if one.get("name") == "default"), None)
        if not isinstance(source, str):
            raise DataError(
                f"the tokenizer in {tokenizer_folder} has no chat template; set data.chat_template=chatml, or to a file with one"
            )
        return cls(source, f"{tokenizer_folder}/tokenizer_config.json", special)

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
        environment.globals |= {"raise_exception": _raise, "strftime_now": datetime.datetime.now().strftime}
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template of {self.where} is not valid: {error}; set data.chat_template") from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str:
        """The text of ``messages``, with the beginning of an answer after them if ``prompt``."""
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=prompt, **self.special)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise DataError(f"the chat template of {self.where} refuses the messages: {error}") from None

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """Render ``messages`` and find the answers; a DataError where the template changes what it has written before."""
        whole, answers = self.render(messages), list[tuple[int, int]]()
        for index, message in enumerate(messages):
            if message["role"] == ANSWERS_OF:
                before = self.render(messages[:index], prompt=True)
                after = self.render(messages[: index + 1])
                if not (after.startswith(before) and whole.startswith(after)):
                    raise DataError(
                        f"the chat template of {self.where} writes earlier messages in another way when more follow, so the "
                        f"answer in message {index} cannot be found; end conversations there, or give data.chat_template"
                    )
                answers.append((len(before), len(after)))
        return Conversation(whole, tuple(answers))


def read_messages(line: str, where: str, name: str) -> list[dict[str, Any]]:
    """The messages of one JSON line, checked; a DataError that names ``where`` and what is wrong."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); one JSON object a line is needed") from error
    if not isinstance(record, dict) or name not in record:
        raise DataError(f"{where}: no field {name!r}; needed is one object a line with a list of messages in it")
    messages = record[name]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: field {name!r} is not a list of messages; write [{{\"role\": ..., \"content\": ...}}, ...]")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f"{where}: message {index} of {name!r} needs a role and a content that are texts")
    if not any(message["role"] == ANSWERS_OF for message in messages):
        raise DataError(f"{where}: no message of the role {ANSWERS_OF!r}, so there is nothing to learn; leave the line out")
    return messages


def encode_conversation(tokenizer: Tokenizer, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Token ids, and a 1 for each token that begins in an answer.

    The end-of-text token follows the last answer, and counts, unless the template's end mark holds it already.
    """
    encoded = tokenizer.backend.encode(conversation.text, add_special_tokens=False)
    counts = [int(any(first <= start < stop for first, stop in conversation.answers)) for start, _ in encoded.offsets]
    ids = list(encoded.ids)
    last = len(counts) - counts[::-1].index(1) if 1 in counts else 0
    ends_itself = tokenizer.eos_id in [index for index, one in zip(ids[:last][-4:], counts[:last][-4:], strict=True) if one]
    return (ids, counts) if ends_itself else ([*ids[:last], tokenizer.eos_id], [*counts[:last], 1])
