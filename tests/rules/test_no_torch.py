"""Layouts, schedules and plans are plain values: they work without torch, and start at once where it is there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rules.source import ROOT, SRC, Module, imports, package_modules, part_of

TORCH_FREE_PARTS = ("core", "schedule", "plan", "errors")
TORCH_FREE_SERVING = ("request", "blocks", "scheduler", "batch", "router")
FOREIGN = ("torch", "torchvision", "transformers", "safetensors.torch", "tensorboard")


def is_torch_free(name: str) -> bool:
    """Whether the module ``name`` must work without torch."""
    parts = name.split(".")
    if part_of(name) == "serve":
        return len(parts) > 2 and parts[2] in TORCH_FREE_SERVING
    return part_of(name) in TORCH_FREE_PARTS


MODULES = package_modules()
KNOWN = frozenset(module.name for module in MODULES)
TORCH_FREE = [module for module in MODULES if is_torch_free(module.name)]


def complaints(module: Module) -> list[str]:
    """Imports of torch, and of parts of the package that need it."""
    found = []
    for item in imports(module, KNOWN):
        foreign = any(item.full == name or item.full.startswith(name + ".") for name in FOREIGN)
        inside = item.target.startswith(ROOT + ".") and item.target != f"{ROOT}.serve"
        if foreign or (inside and not is_torch_free(item.target)):
            found.append(f"{module.path}:{item.line} imports {item.full}, which needs torch")
    return found


@pytest.mark.parametrize("module", TORCH_FREE, ids=lambda module: module.name)
def test_source_names_no_torch(module: Module) -> None:
    assert not complaints(module), "\n" + "\n".join(complaints(module))


@pytest.mark.parametrize(
    "code",
    [
        "import torch",
        "from torch import nn",
        "import torch.nn as nn",
        "def f():\n    import torch",
        "from safetensors import torch",
        "from shardwright.comm.mesh import Mesh",
        "from ..model import mlp",
    ],
)
def test_torch_is_found_in_source(code: str) -> None:
    assert len(complaints(Module(f"{ROOT}.core.x", "x.py", code))) == 1


def run_python(code: str) -> str:
    """Standard output of ``code`` in a new interpreter that finds the package in src."""
    program = f"import sys\nsys.path.insert(0, {str(SRC.parent)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_they_load_without_torch() -> None:
    """Each in turn in one interpreter; the first that brings torch in, through whatever chain, is named."""
    names = [module.name for module in TORCH_FREE]
    code = f"""
import importlib, json
guilty = None
for name in {names!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        guilty = name
        break
print(json.dumps([guilty, sys.modules["shardwright"].__file__]))
"""
    guilty, where = json.loads(run_python(code))
    assert guilty is None, f"importing {guilty} imports torch"
    assert where == str(SRC / "__init__.py")


def test_the_package_itself_is_lazy() -> None:
    """``import shardwright`` and a look at its names import no torch and no other heavy library."""
    heavy = run_python(
        "import shardwright\ndir(shardwright)\nshardwright.__version__\n"
        "print(*[name for name in ('torch', 'numpy', 'pydantic', 'matplotlib') if name in sys.modules])"
    )
    assert heavy.split() == []
