"""Draw the way of a save, of a background save and of a load, from traces of one process.

``python docs/calls.py`` writes the drawings into docs/project/architecture.md, and a test compares that page with a
fresh trace. Run it after a change of the stages. A column is a folder, and an arrow a call, with the file of the called
function and the records (:mod:`dcp_plugin.core.records`) that it takes. A dashed arrow returns a record. Each stage
shows one call for each file of another folder. Left out are most calls within a folder, the modules in ``USED_BY_ALL``
and ``HELPERS``, calls of events to their subscribers, and threads that read or write for a stage.
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import dcp_plugin as dcp
from dcp_plugin.core.ranks.collectives import Attempt

PACKAGE = Path(dcp.__file__).parent
PAGE = Path(__file__).parent / "project" / "architecture.md"
USED_BY_ALL = {
    "config", "errors", "events", "format", "interrupts", "media", "options", "paths", "ranks", "records", "tensors",
    "types",
}  # fmt: skip
HELPERS = {
    "loading/__init__.py",
    "media/__init__.py",
    "media/disk/local_files.py",
    "media/disk/posix.py",
    "media/lease.py",
    "media/medium.py",
    "media/places.py",
    "runs/figures.py",
    "saving/save_timing.py",
    "state/names.py",
    "storage/reuse.py",
}
HELPER_CLASS = "BlockFile"
"""A helper as well: a new file in ``media/disk/local_disk.py``, which reports its progress to the stage that writes."""
HELPER_FUNCTIONS = {"checkpoint", "identity", "index", "_planned", "_prepare"}
"""Functions that only return a part of an object, or that repeat or share the body of a stage."""
SHOWN = {"loading", "media", "storage"}
"""Rooms whose calls from file to file are shown."""
RECORDS = {
    "SaveRequest", "LiveState", "GatheredState", "StagedState", "SavePlan", "WrittenPart",
    "OpenCheckpoint", "OpenedLoad", "Match", "ReadPlan", "FittedLoad", "LoadReport",
}  # fmt: skip
EVENTS = str(PACKAGE / "core" / "events.py")
THREAD = "dcp-save"


@dataclass
class Call:
    """A call of a function of the package, and the calls that it made."""

    file: str
    """Path below the package or ``core/``."""
    function: str
    takes: list[str]
    """Names of the records among the arguments."""
    returns: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def room(self) -> str:
        return self.file.partition("/")[0].removesuffix(".py")


def _file_of(code: CodeType) -> str:
    """Return the file of a function, below the package or ``core/``; empty outside the package."""
    if not code.co_filename.startswith(f"{PACKAGE}/") or code.co_name == "<module>":
        return ""
    parts = Path(code.co_filename).relative_to(PACKAGE).parts
    return "/".join(parts[parts[0] == "core" :])


def _function_of(code: CodeType) -> str:
    """Return the name of a function; that of the class for ``__init__``, that of the outer function for a closure."""
    *outer, name = code.co_qualname.partition(".<locals>")[0].split(".")
    return outer[-1] if name == "__init__" else name


def _records_in(values: Iterable[Any]) -> list[str]:
    """Return the names of the records among values, attempts of stages, and lists of these."""
    plain = [value.value if isinstance(value, Attempt) else value for value in values]
    types = [type(item) for value in plain for item in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(kind.__name__ for kind in types if kind.__name__ in RECORDS))


@contextmanager
def traced() -> Iterator[dict[str, list[Call]]]:
    """Collect the calls of the current thread, and of those that start meanwhile, by the name of the thread."""
    roots: dict[str, list[Call]] = {}
    running: dict[int, Call] = {}

    def note(frame: FrameType, event: str, result: Any) -> None:
        if event == "return" and (ended := running.pop(id(frame), None)) is not None:
            ended.returns = _records_in([result])
        code = frame.f_code
        if event != "call" or not (file := _file_of(code)) or code.co_name in HELPER_FUNCTIONS:
            return
        if code.co_qualname.startswith(f"{HELPER_CLASS}."):
            return
        caller: FrameType | None = frame
        while caller is not None and id(caller) not in running:
            if caller.f_code.co_filename == EVENTS or caller.f_code.co_name == "__del__":
                return
            caller = caller.f_back
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        call = Call(file, _function_of(code), _records_in(frame.f_locals.get(name) for name in arguments))
        siblings = roots.setdefault(threading.current_thread().name, [])
        (siblings if caller is None else running[id(caller)].calls).append(call)
        running[id(frame)] = call

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield roots
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _without(calls: list[Call], hidden: Callable[[Call], bool]) -> list[Call]:
    """Return the calls without hidden ones, in whose place the calls that they made appear."""
    kept: list[Call] = []
    for call in calls:
        inner = _without(call.calls, hidden)
        kept += inner if hidden(call) else [Call(call.file, call.function, call.takes, call.returns, inner)]
    return kept


def rooms(roots: dict[str, list[Call]]) -> dict[tuple[str, str], None]:
    """Return the pairs of folders of which one calls the other, without those that all others use."""
    edges: dict[tuple[str, str], None] = {}

    def walk(caller: Call) -> None:
        for call in caller.calls:
            if call.room != caller.room:
                edges.setdefault((caller.room, call.room))
            walk(call)

    for calls in roots.values():
        for call in _without(calls, lambda call: call.room in USED_BY_ALL or call.room.startswith("_")):
            walk(call)
    return edges


@dataclass
class Arrow:
    """Line of a sequence diagram."""

    ends: str
    file: str
    functions: list[str]
    takes: str = ""

    def add(self, function: str) -> None:
        """Name another function of the same file, of at most three."""
        if function not in self.functions and len(self.functions) < 3:
            self.functions.append(function)

    def __str__(self) -> str:
        return f"  {self.ends}: {self.file} {', '.join(self.functions)}{self.takes}".rstrip()


class Drawing:
    """Lines of a sequence diagram, in the order of the calls."""

    def __init__(self) -> None:
        self.lines: list[Arrow | str] = []
        self._arrows: dict[tuple[str, ...], Arrow] = {}
        self._made: set[tuple[str, str]] = set()

    def add(self, caller: Call, call: Call, stage: str = "") -> None:
        """Add the arrow of a call, if it is to be shown, and those of the calls that it made.

        Args:
            stage: The innermost function that encloses the call and takes or returns a record.
        """
        if (call.file, call.function) == (caller.file, caller.function):  # a closure
            for inner in call.calls:
                self.add(caller, inner, stage)
            return
        crosses = call.room != caller.room
        makes = [name for name in call.returns if self._is_new(name, caller, crosses)]
        has_records = bool(call.takes or makes)
        is_known = not has_records and any((name, "") in self._made for name in call.returns)
        own = f"{call.file} {call.function}" if has_records else stage
        key = (stage, own, *call.takes) if has_records else (stage, caller.room, call.file)
        wanted = has_records or (not is_known and (crosses or (call.room in SHOWN and call.file != caller.file)))
        if wanted and key in self._arrows:
            self._arrows[key].add(call.function)
            wanted = False
        arrow = Arrow(f"{caller.room}->>{call.room}", call.file.partition("/")[2] or call.file, [call.function])
        if call.takes:
            arrow.takes = f"({', '.join(call.takes)})"
        if wanted:
            self._arrows[key] = arrow
        position = len(self.lines)
        for inner in call.calls:
            self.add(call, inner, own)
        makes = [name for name in makes if crosses or (name, "") not in self._made]
        if wanted and (crosses or makes or not has_records or len(self.lines) > position):
            self.lines.insert(position, arrow)
            if makes:
                self.lines.append(f"  {call.room}-->>{caller.room}: {', '.join(makes)}")
                self._made.update((name, room) for name in makes for room in ("", caller.room))

    def _is_new(self, name: str, caller: Call, crosses: bool) -> bool:
        """Return whether a returned record is to be drawn: once for each folder, by its outermost function."""
        if crosses:
            return (name, caller.room) not in self._made
        return (name, "") not in self._made and name not in caller.returns


def drawing_of(roots: dict[str, list[Call]]) -> str:
    """Return the sequence diagram of the first call in the current thread, then of the thread of a save."""
    drawing, you = Drawing(), Call("you", "", [])
    hidden: Collection[str] = USED_BY_ALL - {"media"}

    def is_hidden(call: Call) -> bool:
        return (
            call.room in hidden or call.room.startswith("_") or call.file in HELPERS or call.function.startswith("__")
        )

    drawing.add(you, _without(roots[threading.current_thread().name], is_hidden)[0])
    for call in (in_thread := _without(roots.get(THREAD, []), is_hidden)):
        if call is in_thread[0]:
            drawing.lines.append(f"  Note over {call.room}: thread {THREAD}")
        drawing.add(Call(call.file, "", []), call)
    return "\n".join(["sequenceDiagram", *map(str, drawing.lines)])


def drawings(folder: Path) -> dict[str, str]:
    """Return the drawings by their titles.

    Args:
        folder: Empty folder for the checkpoints.
    """
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer, "step": 1}
    drawn = {}
    for title in ("save", "background save", "load"):
        config = dcp.CheckpointConfig(async_save=title == "background save", progress=False, reuse=False)
        with dcp.Checkpointer(config) as checkpointer:
            path = folder / title.replace(" ", "-")
            checkpointer.save(state, path / "step-1")
            checkpointer.wait()
            checkpointer.load(state, path / "step-1")  # modules that are imported late are imported now
            with traced() as roots:
                if title == "load":
                    checkpointer.load(state, path / "step-1")
                else:
                    checkpointer.save(state, path / "step-2")
                    checkpointer.wait()
            drawn[title] = drawing_of(roots)
    return drawn


def with_drawings(page: str, drawn: dict[str, str]) -> str:
    """Return a page with other drawings: each replaces the Mermaid block below the heading that ends in its title."""
    for title, text in drawn.items():
        block = re.compile(rf"(^## A {title}\n.*?^```mermaid\n).*?(?=^```$)", re.M | re.S)
        found = block.search(page)
        assert found is not None, f"the page has no drawing of a {title}"
        page = f"{page[: found.start()]}{found[1]}{text}\n{page[found.end() :]}"
    return page


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        PAGE.write_text(with_drawings(PAGE.read_text(), drawings(Path(temporary))))
