"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models, text and vectors beside the project; tests that need it are skipped without it."""
    path = PROJECT.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs the folder ../shared (real models, text and vectors), which is not beside this checkout")
    return path
