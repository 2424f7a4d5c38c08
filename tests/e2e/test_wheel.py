"""The wheel holds the whole package and runs outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SRC = PROJECT / "src"


def run(*arguments: str, cwd: Path, site: Path | None = None) -> str:
    """Standard output of this Python with ``arguments``, in ``cwd``, with only ``site`` on PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if site is not None:
        env["PYTHONPATH"] = str(site)
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(PROJECT), cwd=folder)
    (path,) = folder.glob("shardwright-*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    target = folder / "site"
    run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=folder)
    return target


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    source = {
        str(path.relative_to(SRC))
        for path in (SRC / "shardwright").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "shardwright/py.typed" in names
    assert source == {name for name in names if ".dist-info/" not in name}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_it_imports_outside_the_checkout(site: Path) -> None:
    code = "import shardwright, importlib.metadata as m; print(shardwright.__file__, m.version('shardwright'), sep='|')"
    where, version = run("-c", code, cwd=site.parent, site=site).strip().split("|")
    assert Path(where) == site / "shardwright" / "__init__.py"
    with (PROJECT / "pyproject.toml").open("rb") as file:
        assert version == tomllib.load(file)["project"]["version"]


@pytest.mark.parametrize("start", [["-m", "shardwright"], ["site/bin/shardwright"]], ids=["module", "script"])
def test_the_command_line_runs_outside_the_checkout(site: Path, start: list[str]) -> None:
    text = run(*start, "--help", cwd=site.parent, site=site)
    assert all(verb in text for verb in ("train", "verify", "bench"))
