"""The layers of the package, the public names, and what an import costs."""

from __future__ import annotations

import ast
import importlib
import pickle
import pickletools
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

import dcp_plugin as dcp
from dcp_plugin import core
from tests import programs

ROOT = Path(dcp.__file__).parent
LAYERS = [
    (
        *("config", "paths", "errors", "retention", "types", "tensors", "events", "ranks", "partial"),
        "interrupts",
    ),
    ("format",),
    ("media",),
    ("records", "planning"),
    ("storage", "sources"),
    ("state",),
    ("staging",),
    ("loading",),
    ("runs",),
    ("saving",),
]
"""The rooms of ``core/``, each after those that it may import."""
OUTER_LAYERS = [
    ("tiers",),
    ("checkpointer", "api", "start", "errors", "events"),
    ("tools",),
    ("integration",),
    ("lightning", "fabric", "accelerate", "transformers", "tools.cli", "conf", "__main__", "_entry_points"),
]
"""The rooms outside of ``core/``, which may all import it."""
ROOMS = [tuple(f"core.{name}" for name in names) for names in LAYERS] + OUTER_LAYERS
LAYER_OF = {name: number for number, names in enumerate(ROOMS) for name in names}
MODULES = sorted(ROOT.rglob("*.py"))


def _room(module: str) -> str:
    """Return the room of a module, or of a name in it: a folder of the package, of ``core/`` or of ``tools/``."""
    parts = module.split(".")[1:]
    return next((room for n in (2, 1) if (room := ".".join(parts[:n])) in LAYER_OF), "")


def _package_of(path: Path) -> str:
    return _room(".".join(("dcp_plugin", *path.relative_to(ROOT).with_suffix("").parts)))


def _imports(path: Path) -> set[str]:
    """The rooms that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {room for name in names if name.startswith("dcp_plugin.") and (room := _room(name))}


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name != "__init__.py"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_lower_layer_never_imports_a_higher_one(path: Path) -> None:
    here = LAYER_OF[_package_of(path)]
    above = {package for package in _imports(path) if LAYER_OF[package] > here}
    assert not above, f"layer {here} imports {above}"


FRAMEWORKS = ("lightning", "fabric", "accelerate", "transformers")
INSIDES = {"core.media", "core.format", "tiers", "core.storage", "core.planning"}
FORBIDDEN = {
    "core.state": {"core.planning"},
    "core.planning": {"core.storage"},
    "core.runs": {"core.loading"},
}
FORBIDDEN |= dict.fromkeys(FRAMEWORKS, INSIDES)
"""Packages that a package does not import, besides those of higher layers."""


def test_packages_import_no_insides_of_others() -> None:
    broken = {
        str(path.relative_to(ROOT)): imported
        for path in MODULES
        if (imported := _imports(path) & FORBIDDEN.get(_package_of(path), set()))
    }
    assert not broken


def _modules_imported() -> dict[str, dict[str, set[str]]]:
    """The modules of the package that each module imports anywhere in it, with the names that it takes from them."""
    files = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in MODULES}
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    imported: dict[str, dict[str, set[str]]] = {module: {} for module in modules}
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                origin = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
                name = f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in modules else origin
                if name in modules and name != module:
                    imported[module].setdefault(name, set()).add(alias.name)
    return imported


def test_frameworks_import_of_the_core_what_its_docstring_lists() -> None:
    paragraph = re.search(r"The packages of frameworks import (.+?)\.\s+The", str(core.__doc__), re.DOTALL)
    assert paragraph is not None
    imported = {
        name.removeprefix("dcp_plugin.core.")
        for module, names in _modules_imported().items()
        if module.split(".")[1:2] and module.split(".")[1] in FRAMEWORKS
        for name in names
        if name.startswith("dcp_plugin.core.")
    }
    assert imported == set(re.findall(r"``([\w.]+)``", paragraph[1]))


def test_no_files_import_each_other_in_a_circle() -> None:
    """Not under ``TYPE_CHECKING`` or in a function either: the files of a circle are understood only together."""
    imported = _modules_imported()
    reached = {module: {*names} for module, names in imported.items()}
    for middle in imported:
        for module in imported:
            if middle in reached[module]:
                reached[module] |= reached[middle]
    assert "dcp_plugin.core.records" in reached["dcp_plugin.api"]
    drawn = {
        f"{module} -> {name}": sorted(names)
        for module, found in imported.items()
        for name, names in found.items()
        if module in reached[name]
    }
    assert drawn == {}


SAME_NAMES = {
    "commit.py": "the commit rule of a disk, and that of an object store",
    "errors.py": "the public face, and its home in core/",
    "events.py": "the public face, and its home in core/",
}
"""Names that two files of the package have, with the reason."""


def test_no_two_files_have_one_name() -> None:
    count = Counter(path.name for path in MODULES if path.stem not in ("__init__", "__main__"))
    assert {name: number for name, number in count.items() if number > 1} == dict.fromkeys(SAME_NAMES, 2)


LIMITS = {
    "entries at the top": 18,
    "folders at the top": 9,
    "files": 233,
    "statements": 33_776,
    "statements in core/": 19_995,
    "imports of the package per file": 6.5,
}
"""Size of the package. Whoever makes it smaller lowers these; whoever has to raise one says why in the commit."""


def test_the_package_does_not_grow() -> None:
    entries = [path for path in ROOT.iterdir() if path.name != "__pycache__"]
    nodes = {path: [*ast.walk(ast.parse(path.read_text()))] for path in MODULES}
    statements = {path: sum(isinstance(node, ast.stmt) for node in found) for path, found in nodes.items()}
    origins = {
        (path, alias.name if isinstance(node, ast.Import) else node.module)
        for path, found in nodes.items()
        for node in found
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    figures = {
        "entries at the top": len(entries),
        "folders at the top": sum(path.is_dir() for path in entries),
        "files": len(MODULES),
        "statements": sum(statements.values()),
        "statements in core/": sum(n for path, n in statements.items() if path.is_relative_to(ROOT / "core")),
        "imports of the package per file": round(
            sum(str(origin).split(".")[0] == "dcp_plugin" for _, origin in origins) / len(MODULES), 1
        ),
    }
    assert {name: figure for name, figure in figures.items() if figure > LIMITS[name]} == {}, LIMITS


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is_for_and_private_torch_has_one_place(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    if path.name.startswith("_torch"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            private = [
                name for name in [*(node.module or "").split("."), *(a.name for a in node.names)] if name[0] == "_"
            ]
            assert not private, f"line {node.lineno} imports private torch: {private}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_new_tensor_names_its_device_and_dtype(path: Path) -> None:
    """A user's default device may be one whose memory has no address on the host, and a default dtype may be any."""
    factories = {function.__name__ for function in _device_constructors()}
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    for call in calls:
        module, _, function = ast.unparse(call.func).rpartition(".")
        needed = {"device", "dtype"} if function in factories else {"device"} if function == "Generator" else set()
        if module == "torch":
            assert needed <= {keyword.arg for keyword in call.keywords}, f"line {call.lineno}: {ast.unparse(call)}"


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(dcp.__all__) == sorted(dcp._HOME_OF)
    for name in dcp.__all__:
        assert getattr(dcp, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'sav'"):
        dcp.sav  # noqa: B018


def test_tools_for_complete_runs_and_the_results_of_tools_are_in_tools() -> None:
    assert dcp.tools.__all__ == sorted(dcp.tools._HOME_OF)
    assert [name for name in dcp.tools.__all__ if getattr(dcp.tools, name) is None or name in dcp.__all__] == []
    with pytest.raises(AttributeError, match="no attribute 'reprot'"):
        dcp.tools.reprot  # noqa: B018


PACKAGES = ["dcp_plugin", *(f"dcp_plugin.{name}" for name in ("tools", *FRAMEWORKS))]


@pytest.mark.parametrize("package", PACKAGES)
def test_pickles_name_public_classes_by_their_packages(package: str) -> None:
    """Otherwise a move of the code would break pickles of users. ``of_lightning`` tells Lightning's packages apart."""
    _python(
        f"""
        import pickle, typing, {package} as public

        classes = [cls for name in public.__all__ if isinstance(cls := getattr(public, name), type)]
        for cls in classes:
            assert pickle.loads(pickle.dumps(cls)) is cls, cls
            assert cls.__module__ in (public.__name__, "dcp_plugin.lightning.of_lightning"), cls.__module__
            if hasattr(cls, "__dataclass_fields__") and cls.__name__ != "CheckpointConfig":
                typing.get_type_hints(cls)
        """,
        imported=programs.TORCH,
    )


@pytest.mark.parametrize(
    "value",
    [
        dcp.CheckpointConfig(keep_last=dcp.Retention(newest=3), keeper=dcp.Keeper()),
        dcp.PartialLoad(rename={"a": "b"}, missing="warn"),
        dcp.PerRank([1]),
        dcp.Start("resumed", Path("run/step-1"), 1),
        dcp.tools.CheckpointState(Path("run/step-1"), True, step=1),
        dcp.CheckpointNotFound("nothing is at run/step-1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_pickle_of_a_user_names_no_internal_module(value: Any) -> None:
    text = pickle.dumps(value)
    assert type(pickle.loads(text)) is type(value) and str(pickle.loads(text)) == str(value)
    named = {str(item) for _, item, _ in pickletools.genops(text) if str(item).startswith("dcp_plugin")}
    assert named <= {"dcp_plugin", "dcp_plugin.tools"}


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """``import dcp_plugin.x`` sets the attribute ``x`` of the package, also where that is a function for users."""
    modules = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert modules & set(dcp.__all__) <= {"events"}
    modules = {path.stem for path in ROOT.glob("tools/*.py")} | {path.parent.name for path in ROOT.glob("tools/*/*.py")}
    assert not modules & set(dcp.tools.__all__)


def _python(code: str, *arguments: object, imported: Sequence[str] = programs.BARE) -> str:
    ended = programs.run("-c", code, *arguments, imported=imported)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_import_is_fast_and_brings_no_framework() -> None:
    loaded = _python(
        "import sys, torch; before = set(sys.modules); import dcp_plugin; print(*set(sys.modules) - before)"
    ).split()
    assert {name.split(".")[0] for name in loaded} == {"dcp_plugin"}
    assert len(loaded) <= 4, "each name is imported when it is first asked for"


def test_a_plain_save_and_load_import_no_framework_and_no_part_of_the_keeper(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    loaded = _python(
        f"import sys, torch, dcp_plugin as dcp; state = {{'model': torch.nn.Linear(2, 2), 'n': 1}}; "
        f"dcp.save(state, {path!r}); dcp.load(state, {path!r}); dcp.latest({str(tmp_path)!r}); print(*sys.modules)"
    ).split()
    assert "dcp_plugin.core.loading.load" in loaded
    assert not [name for name in loaded if name.startswith(("dcp_plugin.tiers", "dcp_plugin.core.storage.stock"))]
    frameworks = {"lightning", "pytorch_lightning", "accelerate", "transformers", "hydra"}
    assert not frameworks & {name.split(".")[0] for name in loaded}


def test_a_model_from_a_checkpoint_imports_no_trainer() -> None:
    loaded = _python("import sys; from dcp_plugin.transformers import from_pretrained; print(*sys.modules)").split()
    assert "transformers.modeling_utils" in loaded and "dcp_plugin.transformers.plan" in loaded
    assert not {"transformers.trainer", "dcp_plugin.transformers.mixin"} & {*loaded}


CORE_FILES, CORE_STATEMENTS = 75, 11_635
"""Size of what a plain save and load on a local disk import. Whoever makes it smaller lowers these; they never rise."""


def test_the_core_that_a_plain_save_and_load_import_does_not_grow(tmp_path: Path) -> None:
    printed = _python(
        "import sys, torch, dcp_plugin as dcp; model = torch.nn.Linear(4, 4); "
        "optimizer = torch.optim.AdamW(model.parameters()); model(torch.ones(1, 4)).sum().backward(); "
        "optimizer.step(); state = {'model': model, 'optim': optimizer, 'step': 1}; "
        f"path = {str(tmp_path / 'step-1')!r}; dcp.save(state, path); dcp.load(state, path); "
        "ours = {m.__file__ for name, m in sys.modules.items() if name.split('.')[0] == 'dcp_plugin'}; "
        "print(*ours, sep=chr(10))"
    )
    sizes = {
        path: sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(Path(path).read_text())))
        for path in printed.splitlines()
    }
    assert (len(sizes) <= CORE_FILES, sum(sizes.values()) <= CORE_STATEMENTS) == (True, True), sizes


IMPORTS_OF_THREADS = """
import importlib.abc, importlib.util, sys, threading

names = []
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if threading.current_thread() is not threading.main_thread() and name.startswith("dcp_plugin"):
            names.append(name)
sys.meta_path.insert(0, Watch())

import torch, dcp_plugin as dcp
from dcp_plugin.checkpointer import Internals
model = torch.nn.Linear(4, 4)
state, root = {"model": model, "empty": {}}, sys.argv[1]
aliases, views = {"model.weight": ("alias.weight", ("alias", "weight"))}, {"view": {"model": "module"}}
for options in ({}, {"staging": "lazy", "progress": True}, {"keep_last": 2}):
    saver = Internals(dcp.Checkpointer(async_save=True, **options))
    for step in (0, 1, 1, 2):
        saver.save(state, f"{root}/step-{step}", step=step, aliases=aliases, views=views).wait()
open(f"{root}/file", "w").close()
try:
    saver.save(state, f"{root}/file/step-3").wait()
except dcp.CheckpointError as error:
    print(type(error).__name__, *names)
watched = threading.Thread(target=importlib.util.find_spec, args=("dcp_plugin.seen",))
watched.start()
watched.join()
print(*names)
"""


def test_a_background_save_imports_no_module_in_its_thread(tmp_path: Path) -> None:
    """An import in a thread can meet a changed file of the package, or a fork: it would fail hours after the start."""
    printed = _python(IMPORTS_OF_THREADS, tmp_path).splitlines()
    assert printed == ["SaveFailed", "dcp_plugin.seen"], "the last name is one that a thread asks for here"


def test_only_the_keeper_and_one_registration_know_that_a_keeper_exists() -> None:
    importing = {
        str(path.relative_to(ROOT))
        for path in MODULES
        if _package_of(path) != "tiers" and ("tiers" in _imports(path) or _names_as_text(path, "dcp_plugin.tiers"))
    }
    assert importing == {"__init__.py"}


def _names_as_text(path: Path, module: str) -> bool:
    """Whether a module names another one in a text, as ``importlib`` and ``python -m`` take it."""
    texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    return any(isinstance(text, str) and text.startswith(module) for text in texts)


LOCAL_DIR_OF_USERS = {"core/runs/catalog.py", "tools/listing.py", "tools/cli/runs.py"}
"""Public functions and a command that take ``local_dir`` from the user and hand it to a :class:`~dcp_plugin.Keeper`."""


def test_only_the_configuration_and_the_keeper_know_the_directory_of_a_node() -> None:
    knowing = {
        str(path.relative_to(ROOT))
        for path in MODULES
        if _package_of(path) != "tiers" and ("local_dir" in _names_in(path) or _reads_directory(path))
    }
    assert knowing == {"core/config.py", *LOCAL_DIR_OF_USERS}


def _reads_directory(path: Path) -> bool:
    attributes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
    return any(ast.unparse(node).endswith("keeper.dir") for node in attributes)


def _names_in(path: Path) -> set[str]:
    """Every name, attribute, argument and keyword in a module."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {str(node.arg) for node in nodes if isinstance(node, ast.arg | ast.keyword)}


READ_JSON_OF_ANOTHER_KIND = {
    "core/format/index_file.py": "header of an index, whose hash the summary has",
    "core/format/summary.py": "header of an index",
    "core/format/foreign/detect.py": "index of another tool",
    "core/format/foreign/safetensors.py": "header of a file of another tool",
    "tiers/plain.py": "message of a process",
    "accelerate/attendance.py": "entry of a store of torch",
}


def test_small_json_files_are_read_by_one_function() -> None:
    readers = {str(path.relative_to(ROOT)) for path in MODULES if re.search(r"\bjson\.loads?\(", path.read_text())}
    assert readers == READ_JSON_OF_ANOTHER_KIND.keys() | {"core/format/__init__.py"}


def test_a_catalogue_of_checkpoints_imports_no_torch(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"n": step}, tmp_path / f"step-{step}", step=step)
    printed = _python(
        f"import sys, dcp_plugin; root = {str(tmp_path)!r}; (run,) = dcp_plugin.tools.list_runs(root); "
        "print(dcp_plugin.latest(root).name, len(dcp_plugin.list_checkpoints(root)), len(run.checkpoints)); "
        "from dcp_plugin.tools.cli.app import app; app(['ls', root], standalone_mode=False); "
        "print('torch' in sys.modules)",
        imported=(),
    ).splitlines()
    assert (printed[0], printed[-1]) == ("step-2 2 2", "False")


def test_an_inspection_of_a_checkpoint_of_ours_imports_no_torch(tmp_path: Path) -> None:
    dcp.save({"model": torch.nn.Linear(2, 2), "counts": Counter(a=1), "half": torch.ones(2).half()}, tmp_path / "c")
    printed = _python(
        f"import sys; from dcp_plugin.tools.cli.app import app; app(['inspect', {str(tmp_path / 'c')!r}, '--all'], "
        "standalone_mode=False); print('torch' in sys.modules)",
        imported=(),
    )
    assert "model.weight" in printed and "float16" in printed and printed.splitlines()[-1] == "False"


_KINDS = {"Path", "ObjectPath", "LocalDisk", "ObjectStore", "LocalFiles", "PinnedFiles", "ObjectFiles", "ListedFiles"}


def _tests_the_kind(node: Any) -> bool:
    """Whether a node is ``isinstance`` of a class of paths, media or files, ``is_url``, or an attribute by which a disk
    and a store differ."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        return bool(_KINDS & {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)})
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "is_url":
        return True
    return isinstance(node, ast.Attribute) and node.attr == "keeps_names"


def test_only_media_and_paths_know_which_kind_of_path_it_is() -> None:
    testing = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        if _package_of(path) not in ("core.media", "core.paths")
        for node in ast.walk(ast.parse(path.read_text()))
        if _tests_the_kind(node)
    ]
    assert testing == []


def test_the_protocols_of_media_stay_small() -> None:
    """Those of ``media/``, with the files of ``format/`` that they extend: at most 32 members, 16 of them in Medium."""
    members: dict[str, set[str]] = {}
    for path in [*(ROOT / "core" / "media").rglob("*.py"), ROOT / "core" / "format" / "__init__.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                members[node.name] = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    members["Readable"] -= members["Files"]
    assert len(members["Medium"]) <= 16
    assert sum(map(len, members.values())) <= 32, members


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that draws the calls, ``docs/calls.py``."""
    monkeypatch.syspath_prepend(str(ROOT.parent / "docs"))
    return importlib.import_module("calls")


def test_no_stage_of_a_save_calls_a_higher_layer(tmp_path: Path, calls: Any) -> None:
    model = torch.nn.Linear(2, 2)
    with calls.traced() as roots:
        dcp.save({"model": model, "optim": torch.optim.AdamW(model.parameters())}, tmp_path / "ck")
    edges = calls.rooms(roots)
    assert {callee for _, callee in edges} >= {"saving", "planning", "storage"}
    layer_of = {room.removeprefix("core."): layer for room, layer in LAYER_OF.items()}
    assert [(caller, callee) for caller, callee in edges if layer_of[caller] < layer_of[callee]] == []


def test_a_load_executes_its_plan_without_calls_of_the_planner(tmp_path: Path, calls: Any) -> None:
    dcp.save({"model": torch.nn.Linear(2, 2), "n": 1}, tmp_path / "ck")
    with calls.traced() as roots:
        dcp.load({"model": torch.nn.Linear(2, 2), "n": 0}, tmp_path / "ck")
    edges = calls.rooms(roots)
    assert {("loading", "planning"), ("loading", "storage")} <= {*edges}
    assert not {("storage", "planning"), ("storage", "loading"), ("planning", "loading")} & {*edges}


def test_the_drawings_of_a_save_and_a_load_are_those_of_a_trace(tmp_path: Path, calls: Any) -> None:
    page = calls.PAGE.read_text()
    drawn = calls.drawings(tmp_path)
    assert calls.with_drawings(page, drawn) == page, "python docs/calls.py draws them anew"
    assert all(text.count("\n") < 50 for text in drawn.values()), "a drawing fills more than a screen"


def test_the_tree_has_every_folder_above_those_that_it_imports(calls: Any) -> None:
    tree = re.findall(r"^ +(.*)$", calls.PAGE.read_text().split("```")[1], re.M)
    named = [name for line in tree for name in re.findall(r"(\w+)/ ", line.split("   ")[0] + " ")]
    folders = {path.parent.name for path in MODULES if path.parent.parent != ROOT.parent}
    assert sorted(named) == sorted(folders)
    layer_of = {room.removeprefix("core."): layer for room, layer in LAYER_OF.items() if room != "core"}
    layers = [layer_of[name] for name in named if name in layer_of and name != "conf"]
    assert layers == sorted(layers, reverse=True)


def test_no_environment_is_tracked() -> None:
    """``.venv`` may be a link in a worktree. Once committed, a merge replaces the environment of a checkout by it."""
    listed = subprocess.run(["git", "-C", ROOT.parent, "ls-files", ".venv"], capture_output=True, text=True)
    assert listed.stdout == ""
