"""The names that users may rely on. A change here is a change of the public interface: CHANGELOG.md must say so."""

from __future__ import annotations

import tomllib

import shardwright
from rules.source import PROJECT

EXPORTS = [
    "ColumnParallelLinear",
    "DataParallel",
    "ExpertParallel",
    "Layout",
    "Ledger",
    "Mesh",
    "ModelConfig",
    "RowParallelLinear",
    "RunConfig",
    "Schedule",
    "ShardwrightError",
    "Stage",
    "Transformer",
    "VocabParallelEmbedding",
    "__version__",
    "full_state_dict",
    "parallelize",
    "ring_attention",
    "ring_tokens",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_softmax",
]


def test_all_is_frozen() -> None:
    assert sorted(shardwright.__all__) == EXPORTS


def test_every_name_resolves_and_is_listed() -> None:
    for name in EXPORTS:
        assert getattr(shardwright, name) is not None
    assert set(EXPORTS) <= set(dir(shardwright))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(shardwright, "no_such_name")


def test_version_is_that_of_the_project() -> None:
    with (PROJECT / "pyproject.toml").open("rb") as file:
        assert shardwright.__version__ == tomllib.load(file)["project"]["version"]
