"""What every test keeps: it asserts something, it reads no clock, and it stands in one place under its own name."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parents[1]
CLOCKS = {
    *("tests.launch", "tests.slowness", "tests.conformance.launching", "tests.conformance.__main__"),
    *("tests.faults.fuzz", "tests.faults.in_keeper.sitecustomize", "tests.faults.soak", "tests.faults.stores"),
    *("tests.faults.keepers", "tests.tiers.test_keeper", "tests.limits"),
}
"""They end ranks that hang, make delays, tell how long a case took, go on for so many minutes, and look again and again
at what a process does that nobody can wait for."""


@functools.cache
def _files() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of the tests."""
    return {
        ".".join(path.relative_to(HERE.parent).with_suffix("").parts): ast.parse(path.read_text())
        for path in sorted(HERE.rglob("*.py"))
    }


def _tests() -> Iterator[tuple[str, ast.FunctionDef]]:
    for module, tree in _files().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{module}.{node.name}", node


def _named_in(module: str, imported: dict[str, str], definition: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """ "assert", and the full names of all that the body may mean of the tests' modules."""
    for node in (inner for statement in definition.body for inner in ast.walk(statement)):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr in ("raises", "warns")):
            yield "assert"
        elif isinstance(node, ast.Name):
            yield imported.get(node.id, f"{module}.{node.id}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            yield f"{imported[node.value.id]}.{node.attr}"


def test_every_test_asserts_something() -> None:
    """Itself, or by a function or a class of the tests that it names, or that this one names, and so on."""
    named: dict[str, set[str]] = {}
    for module, tree in _files().items():
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tests"
            for alias in node.names
        }
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                named[f"{module}.{node.name}"] = set(_named_in(module, imported, node))
    asserting = {"assert"}
    while more := {name for name, others in named.items() if others & asserting} - asserting:
        asserting |= more
    assert [name for name, _ in _tests() if name not in asserting] == []


def test_no_test_reads_a_clock_or_looks_functions_up_by_name() -> None:
    found = [
        f"{module}, line {node.lineno}"
        for module, tree in _files().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and "time" in {alias.name for alias in node.names} and module not in CLOCKS)
        or (isinstance(node, ast.ImportFrom) and node.module == "time")
        or (isinstance(node, ast.Subscript) and ast.unparse(node.value) == "globals()")
    ]
    assert found == []


def test_no_test_only_forwards_to_a_function_on_ranks() -> None:
    """``on_ranks`` runs its body on them."""
    bodies = {name: node.body[ast.get_docstring(node) is not None :] for name, node in _tests()}
    assert [name for name, body in bodies.items() if [ast.unparse(s)[:11] for s in body] == ["launch.run("]] == []
