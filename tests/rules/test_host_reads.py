"""A value read from a tensor to the host stops the device, and has no answer in a dry run.

So under model, parallel, ops and train it happens in functions named in `ALLOWED` only. A module that does not
import torch has arrays of the host and is left alone. Found are calls of the methods in `READS`; `int(x.max())` and the
like (`NUMBERS` around `REDUCTIONS`); and a tensor taken for true or false (`if x.any():`). What an AST cannot see, such
as `if x:` or a mask used as an index, the dry run itself refuses.
"""

from __future__ import annotations

import ast

import pytest

from rules.source import ROOT, Module, functions, imports, package_modules

PARTS = ("model", "parallel", "ops", "train")
READS = ("item", "tolist", "nonzero", "numpy", "cpu", "masked_select", "is_nonzero", "equal", "allclose")
NUMBERS = ("bool", "int", "float")
TRUTHS = ("any", "all", "isnan", "isinf", "isfinite")
REDUCTIONS = (*TRUTHS, "sum", "max", "min", "amax", "amin", "mean", "prod", "norm", "argmax", "argmin", "count_nonzero")
NOT_TENSORS = ("np", "numpy", "math")

# {file below src/shardwright: {function, as `function` or `Class.method`}}
ALLOWED: dict[str, set[str]] = {
    "model/generate.py": {"_Choice.__call__"},  # the one token of each call
    "ops/routing.py": {"host_counts"},  # rows of each expert, spread evenly in a dry run
    "parallel/data.py": {"fingerprint"},  # once, before the first step
    "parallel/expert.py": {"ExpertExchange._read"},  # once for each dispatch; a dry run's plan is assumed
    "parallel/module_executor.py": {"_numbers"},  # once for each boundary between stages of a user's own modules
    "train/blame.py": {"_number"},  # after a step that is not applied
    "train/step.py": {"_read", "_read_all", "Trainer.evaluate"},  # what a dry run answers with zeros
}


def method(node: ast.AST) -> str:
    """``any`` for the call ``x.any()``; empty for anything else and for calls on numpy and math themselves."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    value = node.func.value
    return "" if isinstance(value, ast.Name) and value.id in NOT_TENSORS else node.func.attr


def taken_for_truth(node: ast.AST) -> list[ast.expr]:
    """The expressions whose truth ``node`` asks for."""
    if isinstance(node, ast.If | ast.While | ast.Assert | ast.IfExp):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    return node.ifs if isinstance(node, ast.comprehension) else []


def what_it_reads(node: ast.AST) -> str:
    """The host read that ``node`` itself is, in words; empty if it is none."""
    if method(node) in READS:
        return f".{method(node)}()"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NUMBERS:
        inner = [method(argument) for argument in node.args if method(argument) in REDUCTIONS]
        return f"{node.func.id}(.{inner[0]}())" if inner else ""
    truths = [method(expression) for expression in taken_for_truth(node) if method(expression) in TRUTHS]
    return f"truth of .{truths[0]}()" if truths else ""


def host_reads(module: Module) -> dict[str, list[str]]:
    """For each function that reads from the host: where, and what."""
    found: dict[str, list[str]] = {}
    for where, node in functions(module.tree):
        if what := what_it_reads(node):
            line = getattr(node, "lineno", 0)
            found.setdefault(where, []).append(f"{module.path}:{line} in {where}: {what}")
    return found


def imports_torch(module: Module) -> bool:
    return any(found.target.split(".")[0] == "torch" for found in imports(module, frozenset()))


MODULES = {
    module.path.removeprefix(f"src/{ROOT}/"): module
    for module in package_modules()
    if module.part in PARTS and imports_torch(module)
}


@pytest.mark.parametrize("file", MODULES)
def test_host_reads_are_in_named_functions(file: str) -> None:
    reads = host_reads(MODULES[file])
    wrong = [line for where, lines in reads.items() if where not in ALLOWED.get(file, ()) for line in lines]
    assert not wrong, "\n".join(["move it into a function that the dry run answers, and name that in ALLOWED:", *wrong])


def test_no_entry_is_stale() -> None:
    stale = [
        f"{file}: {where}"
        for file, names in ALLOWED.items()
        for where in sorted(names)
        if file not in MODULES or where not in host_reads(MODULES[file])
    ]
    assert not stale, f"these no longer read from the host (or are gone); remove them from ALLOWED: {stale}"


@pytest.mark.parametrize(
    "code",
    [
        "loss.item()",
        "mask.nonzero()",
        "torch.nonzero(mask)",
        "x.detach().cpu()",
        "bool(torch.isnan(x).any())",
        "int(lengths.max())",
        "if x.any():\n    pass",
        "y = 1 if not x.all() else 2",
        "while ready and x.isnan():\n    pass",
    ],
)
def test_a_host_read_is_found(code: str) -> None:
    body = "\n".join("        " + line for line in code.split("\n"))
    module = Module(f"{ROOT}.model.x", "x.py", f"class A:\n    def f(self):\n{body}\n")
    assert list(host_reads(module)) == ["A.f"]


@pytest.mark.parametrize(
    "code", ["d.items()", "any(x for x in y)", "int(config.size)", "np.nonzero(a)", "x.max()", "os.cpu_count()"]
)
def test_other_code_passes(code: str) -> None:
    assert host_reads(Module(f"{ROOT}.model.x", "x.py", code)) == {}
