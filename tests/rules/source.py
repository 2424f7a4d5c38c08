"""Reads the package's source: its modules, and what each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
ROOT = "shardwright"
SRC = PROJECT / "src" / ROOT


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name (``shardwright.comm.mesh``), where it is, and its text."""

    name: str
    path: str
    text: str
    is_package: bool = False

    @property
    def part(self) -> str:
        """Its place in the layers: ``comm`` for ``shardwright.comm.mesh``, empty for the package's own ``__init__``."""
        return part_of(self.name)

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)


@dataclass(frozen=True)
class Import:
    """``target`` is the module that is imported, ``name`` what is taken from it (empty: the module itself)."""

    target: str
    name: str
    line: int

    @property
    def full(self) -> str:
        return f"{self.target}.{self.name}" if self.name else self.target


def part_of(module: str) -> str:
    """``comm`` for ``shardwright.comm.mesh``; empty for ``shardwright``."""
    return module.split(".")[1] if "." in module else ""


def package_modules() -> list[Module]:
    """Every module under src/shardwright."""
    return [load(path) for path in sorted(SRC.rglob("*.py"))]


def load(path: Path) -> Module:
    parts = [ROOT, *path.relative_to(SRC).with_suffix("").parts]
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    return Module(name, str(path.relative_to(PROJECT)), path.read_text(encoding="utf-8"), is_package)


def imports(module: Module, known: frozenset[str]) -> list[Import]:
    """All imports of ``module``, wherever they stand: in functions, under TYPE_CHECKING, by ``import_module("...")``.

    ``known`` holds the names of all modules of the package; it tells ``from shardwright.comm import mesh`` (a
    module) from ``from shardwright.comm.mesh import Mesh`` (a name in one).
    """
    return [found for node in ast.walk(module.tree) for found in _imports_of(node, module, known)]


def _imports_of(node: ast.AST, module: Module, known: frozenset[str]) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, "", node.lineno)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node.level, node.module or "", module)
        for alias in node.names:
            if f"{base}.{alias.name}" in known:
                yield Import(f"{base}.{alias.name}", "", node.lineno)
            else:
                yield Import(base, alias.name, node.lineno)
    elif isinstance(node, ast.Call) and node.args and _called(node) in ("import_module", "__import__"):
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            level = len(first.value) - len(first.value.lstrip("."))
            yield Import(_absolute(level, first.value.lstrip("."), module), "", node.lineno)


def _absolute(level: int, name: str, module: Module) -> str:
    """The absolute name of a relative import: ``level`` dots, then ``name``, written in ``module``."""
    if level == 0:
        return name
    parts = module.name.split(".")
    drop = level - 1 if module.is_package else level
    base = parts[: len(parts) - drop]
    return ".".join([*base, name] if name else base)


def _called(node: ast.Call) -> str:
    """The last name of what is called: ``import_module`` for ``importlib.import_module(...)``."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every node with the function it stands in: ``Loader.next``, ``outer.inner`` or ``<module>``."""
    yield from _walk(tree, "<module>")


def _walk(node: ast.AST, where: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = child.name if where == "<module>" else f"{where}.{child.name}"
        yield inside, child
        yield from _walk(child, inside)
