"""Who may import whom. The layers are those of ``[tool.importlinter]`` in pyproject.toml, highest first.

On top of them:

- ``model`` is told, it never asks: of the machinery it sees `MODEL_SEES`, nothing else;
- ``launch`` starts processes, so only those named in `LAUNCH_FOR` may use it;
- nothing inside imports from the package's own ``__init__`` (but ``__version__``), which is for users.
"""

from __future__ import annotations

import tomllib

import pytest

from rules.source import PROJECT, ROOT, Import, Module, imports, package_modules, part_of

MODEL_SEES = ("core", "ops", "errors", "comm.base", "comm.mesh", "comm.regions", "parallel.tensor", "parallel.expert")
LAUNCH_FOR = ("train", "verify", "bench", "bench_comm", "bench_steps", "cli", "demo")
MODULES = package_modules()
KNOWN = frozenset(module.name for module in MODULES)


def read_layers() -> list[tuple[set[str], bool]]:
    """The layers from the highest to the lowest: their members, and whether these are independent of each other."""
    with (PROJECT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (lines,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [({name.strip(" ()") for name in line.replace("|", ":").split(":")}, ":" not in line) for line in lines]


LAYERS = read_layers()
HEIGHT = {part: len(LAYERS) - index for index, (parts, _) in enumerate(LAYERS) for part in parts}


def complaint(module: Module, found: Import) -> str | None:
    """Why ``module`` must not import ``found``, or None where it may."""
    if found.target != ROOT and not found.target.startswith(ROOT + "."):
        return None
    here, there = module.part, part_of(found.target)
    if here == "":
        return None  # the package's __init__ offers names of every layer; test_no_torch.py sees that it is lazy
    if there == "":
        return None if found.name == "__version__" else "import from the module that defines it, not from shardwright"
    if there not in HEIGHT:
        return f"{there} has no place in the layers of pyproject.toml"
    if here == there:
        return None
    return wrong_way(here, there) or too_much(here, found)


def wrong_way(here: str, there: str) -> str | None:
    if HEIGHT[there] > HEIGHT[here]:
        return f"{there} is above {here}: imports go down only"
    if HEIGHT[there] == HEIGHT[here] and LAYERS[len(LAYERS) - HEIGHT[here]][1]:
        return f"{there} and {here} are independent of each other: move what both need to a lower layer"
    return None


def too_much(here: str, found: Import) -> str | None:
    inside = found.full.removeprefix(ROOT + ".")
    if here == "model" and not any(inside == seen or inside.startswith(seen + ".") for seen in MODEL_SEES):
        return f"model sees {', '.join(MODEL_SEES)} and nothing else"
    if part_of(found.target) == "launch" and here not in LAUNCH_FOR:
        return f"only {', '.join(LAUNCH_FOR)} start processes"
    return None


def complaints(module: Module, known: frozenset[str] = KNOWN) -> list[str]:
    wrong = [(found, complaint(module, found)) for found in imports(module, known)]
    return [f"{module.path}:{found.line} imports {found.full}: {why}" for found, why in wrong if why]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_imports_go_down(module: Module) -> None:
    assert not complaints(module), "\n" + "\n".join(complaints(module))


def test_every_module_has_a_layer() -> None:
    missing = {module.part for module in MODULES} - set(HEIGHT) - {""}
    assert not missing, f"add {sorted(missing)} to the layers of pyproject.toml"


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ("core.layout", "from shardwright.comm import mesh"),
        ("core.layout", "def f():\n    from ..train.loop import run"),
        ("ops.norm", "import shardwright.comm.base"),
        ("ops.norm", "from shardwright.parallel.tensor import split"),
        ("parallel.data", "from ..checkpoint import io"),
        ("train.loop", "from shardwright import serve"),
        ("serve.engine", "from shardwright.train.step import step"),
        ("model.mlp", "from shardwright.comm.dist import DistComm"),
        ("model.mlp", "from shardwright.comm import Mesh"),
        ("model.mlp", "from shardwright.parallel import pipeline"),
        ("model.mlp", "from ..plan import memory"),
        ("serve.engine", "from shardwright import launch"),
        ("train.loop", "if TYPE_CHECKING:\n    from shardwright.verify import parity"),
        ("train.loop", "import importlib\nimportlib.import_module('shardwright.cli')"),
        ("train.loop", "from shardwright import Layout"),
        ("core.layout", "from shardwright.other import x"),
    ],
)
def test_a_wrong_import_is_found(part: str, code: str) -> None:
    known = KNOWN | {f"{ROOT}.serve", f"{ROOT}.launch"}
    assert len(complaints(Module(f"{ROOT}.{part}", "x.py", code), known)) == 1


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ("model.mlp", "from shardwright.comm.mesh import Mesh\nfrom shardwright.comm import regions"),
        ("model.mlp", "from ..parallel.tensor import split\nfrom ..core import specs\nfrom .. import errors"),
        ("train.loop", "from .. import launch\nfrom .step import step\nfrom shardwright import __version__"),
        ("verify.parity", "from shardwright.train import loop\nfrom shardwright.serve import engine\nimport torch"),
        ("demo", "from shardwright.cli import main"),
    ],
)
def test_a_right_import_passes(part: str, code: str) -> None:
    known = KNOWN | {f"{ROOT}.{name}" for name in ("serve", "launch", "train.loop", "comm.regions", "serve.engine")}
    assert complaints(Module(f"{ROOT}.{part}", "x.py", code), frozenset(known)) == []
