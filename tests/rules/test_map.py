"""docs/map.md answers "where is X": each path that it names in backticks exists."""

from __future__ import annotations

import re

import pytest

from rules.source import PROJECT, SRC

MAP = PROJECT / "docs" / "map.md"
BASES = (PROJECT, SRC)
TOP = ("src", "tests", "docs", "benchmarks", "examples", ".ci", ".github")
NAMED_FILE = re.compile(r"[\w.*-]+\.(py|md|toml|lock|yaml)|Makefile|LICENSE")
# Files of a run folder or of a model folder, which are not in the project.
NOT_OURS = ("config.toml",)


def paths_in(text: str) -> list[str]:
    """What looks like one of the project's paths among the words in backticks, without ``:line`` or ``::name``."""
    words = [word.split(":")[0] for word in re.findall(r"`([^`\n]+)`", text)]
    return sorted({word for word in words if looks_like_path(word)})


def looks_like_path(word: str) -> bool:
    """``core/layout.py``, ``tests/ranks/``, ``benchmarks/*.py``, ``Makefile``; not ``tokens/s`` or ``../shared``."""
    if not re.fullmatch(r"[\w./*-]+", word) or word.startswith(("../", "/", "-")) or word in NOT_OURS:
        return False
    if "/" not in word:
        return NAMED_FILE.fullmatch(word) is not None
    parts = {path.name for path in SRC.iterdir() if path.is_dir()}
    return word.split("/")[0] in (*TOP, *parts) or NAMED_FILE.fullmatch(word.split("/")[-1]) is not None


def exists(word: str) -> bool:
    """Whether it is there, below the project or the package; with ``*`` at least one match."""
    if "*" in word:
        return any(any(base.glob(word)) for base in BASES)
    return any((base / word).is_dir() if word.endswith("/") else (base / word).exists() for base in BASES)


def test_every_path_of_the_map_exists() -> None:
    paths = paths_in(MAP.read_text(encoding="utf-8"))
    assert len(paths) >= 10, f"docs/map.md names {len(paths)} paths; is it the map?"
    missing = [path for path in paths if not exists(path)]
    assert not missing, f"docs/map.md names what is not there (from the project or src/shardwright): {missing}"


@pytest.mark.parametrize("word", ["core/nothing.py", "src/shardwright/core/gone/", "tests/none*.py", "nothing.py"])
def test_a_missing_path_is_found(word: str) -> None:
    assert [path for path in paths_in(f"see `{word}` and `tokens/s`") if not exists(path)] == [word]


@pytest.mark.parametrize("word", ["errors.py", "core/", "tests/rules/test_map.py::exists", "Makefile", "tests/*.py"])
def test_a_present_path_passes(word: str) -> None:
    assert [exists(path) for path in paths_in(f"see `{word}`")] == [True]


@pytest.mark.parametrize("word", ["tokens/s", "metrics.jsonl", "../shared/x.py", "make test", "--json", "config.toml"])
def test_other_words_are_left_alone(word: str) -> None:
    assert paths_in(f"see `{word}`") == []
