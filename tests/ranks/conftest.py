"""Fixtures for tests on real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks.kit import living_ranks, preload
from shardwright.launch import start_forkserver


@pytest.fixture(scope="session", autouse=True)
def _forkserver() -> None:
    """Import torch for all ranks of the session while the first test is being set up."""
    start_forkserver(preload())


@pytest.fixture(autouse=True)
def _no_rank_left() -> Iterator[None]:
    """Every test must end every rank that it started."""
    yield
    left = living_ranks()
    assert not left, f"the test left ranks behind: processes {sorted(left)}"
