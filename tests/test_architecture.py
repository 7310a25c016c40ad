"""The floors of the house, the public names, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dcp_plugin as dcp

ROOT = Path(dcp.__file__).parent
FLOORS = [
    ("_torch", "_python", "config", "errors", "types", "tensors", "progress", "ranks", "_entry_points"),
    ("storage",),
    ("planning", "staging"),
    ("state", "partial", "hints"),
    (
        *("lifecycle", "inspection", "matching", "loading", "omission", "origins", "attached", "conventions"),
        *("gathered", "saving", "background", "preemption", "checkpointer", "api", "restart"),
    ),
    ("lightning", "fabric", "accelerate", "cli", "__main__"),
]
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}
MODULES = sorted(ROOT.rglob("*.py"))


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """The rooms of this package that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    inside = {name.split(".")[1] for name in names if name.startswith("dcp_plugin.")}
    return {room for room in inside if room in FLOOR_OF}


@pytest.mark.parametrize(
    "path", [path for path in MODULES if _room(path) != "__init__"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_lower_floor_never_imports_a_higher_one(path: Path) -> None:
    here = FLOOR_OF[_room(path)]
    above = {room for room in _imports(path) if FLOOR_OF[room] > here}
    assert not above, f"floor {here} imports {above}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is_for_and_private_torch_has_one_place(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    if path.name == "_torch.py":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            private = [
                name for name in [*(node.module or "").split("."), *(a.name for a in node.names)] if name[0] == "_"
            ]
            assert not private, f"line {node.lineno} imports private torch: {private}"


def test_the_public_names_are_exactly_these() -> None:
    assert dcp.__all__ == sorted(dcp.__all__)
    assert set(dcp.__all__) == set(dcp._HOME_OF)
    for name in dcp.__all__:
        assert getattr(dcp, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'sav'"):
        dcp.sav  # noqa: B018


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_is_fast_and_brings_no_framework() -> None:
    loaded = _python(
        "import sys, torch, time; before = set(sys.modules); t = time.perf_counter(); import dcp_plugin; "
        "took = time.perf_counter() - t; new = {n.split('.')[0] for n in set(sys.modules) - before}; print(took, *new)"
    ).split()
    assert float(loaded[0]) < 0.3
    assert set(loaded[1:]) == {"dcp_plugin"}


def test_saving_brings_no_framework_either(tmp_path: Path) -> None:
    loaded = _python(
        f"import sys, torch, dcp_plugin; dcp_plugin.save({{'n': 1}}, {str(tmp_path / 'ck')!r}); "
        "print(*{n.split('.')[0] for n in sys.modules})"
    ).split()
    assert not {"lightning", "pytorch_lightning", "accelerate", "transformers", "hydra"} & set(loaded)
