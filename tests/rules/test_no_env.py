"""Only the launcher reads the environment; everything else is told."""

from __future__ import annotations

import ast

import pytest

from rules.source import ROOT, Module, package_modules

READS = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
ALLOWED = f"{ROOT}.launch"
MODULES = package_modules()


def complaints(module: Module) -> list[str]:
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = ["environ" for alias in node.names if alias.name == "os" and alias.asname]  # hides what is read
        else:
            continue
        where = f"{module.path}:{node.lineno}"
        found += [f"{where} reads os.{name}: take it as an argument" for name in names if name in READS]
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_no_environment_reads(module: Module) -> None:
    if not f"{module.name}.".startswith(f"{ALLOWED}."):
        assert not complaints(module), "\n" + "\n".join(complaints(module))


@pytest.mark.parametrize(
    "code", ["import os\nx = os.environ['A']", "import os\nos.getenv('A')", "from os import environ", "import os as o"]
)
def test_a_read_is_found(code: str) -> None:
    assert len(complaints(Module(f"{ROOT}.x", "x.py", code))) == 1
    assert complaints(Module(f"{ROOT}.x", "x.py", "import os\nos.cpu_count(), os.path.join('a', 'b')")) == []
