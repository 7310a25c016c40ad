"""Every case by name: ``<corpus>/<name>``, and combinations of three corpora."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.containers import CONTAINERS
from tests.conformance.containers import run as run_container
from tests.conformance.differences import CALLED_IN_ONE_ORDER, UNCAST_SLOT
from tests.conformance.interchange import ENTRIES
from tests.conformance.interchange import differs as interchange_differs
from tests.conformance.interchange import run as interchange_run
from tests.conformance.known import known_failure
from tests.conformance.modules import MODULES, NoHook, Small
from tests.conformance.moments import MOMENTS
from tests.conformance.optimizers import OPTIMIZERS
from tests.conformance.per_rank import ENTRIES as PER_RANK
from tests.conformance.per_rank import WAYS
from tests.conformance.per_rank import run as run_per_rank
from tests.conformance.programs import PROGRAMS, run
from tests.conformance.runs import RUNS
from tests.conformance.tensors import CAST_IN_SLOTS, TENSORS
from tests.conformance.tensors import run as run_tensor
from tests.conformance.tools import Tool
from tests.conformance.trace import Trace
from tests.conformance.training import WORLD_SIZE, resume

UserCode = Callable[[Tool, Trace], None]


@dataclass(frozen=True)
class Case:
    name: str
    code: UserCode
    layout: str = "plain"
    oracle: str = "stock"
    differs: Mapping[str, str] = field(default_factory=dict)
    must_work: bool = True
    """Ours has to restore what is right where stock fails. Where this is false, it may raise a CheckpointError, too."""

    @property
    def world_size(self) -> int:
        return WORLD_SIZE[self.layout]


def _in_each_layout(
    corpus: str, entries: Mapping[str, Any], code: Callable[[Any, str], UserCode], must_work: bool | None = True
) -> dict[str, Case]:
    """A case for every entry in every layout that it goes with. Where ``must_work`` is None the entry says it."""
    return {
        f"{layout}-{name}": Case(
            f"{corpus}/{layout}-{name}",
            code(entry, layout),
            layout,
            getattr(entry, "oracle", "stock"),
            entry.differs,
            must_work=entry.must_work if must_work is None else must_work,
        )
        for name, entry in entries.items()
        for layout in entry.layouts
    }


@functools.cache
def modules() -> dict[str, Case]:
    def code(entry: Any, layout: str) -> UserCode:
        return functools.partial(resume, layout=layout, module=entry.make)

    return _in_each_layout("modules", MODULES, code, must_work=False)


@functools.cache
def optimizers() -> dict[str, Case]:
    def code(entry: Any, layout: str) -> UserCode:
        return functools.partial(resume, layout=layout, module=entry.module, optimizer=entry.make)

    return _in_each_layout("optimizers", OPTIMIZERS, code, must_work=None)


@functools.cache
def moments() -> dict[str, Case]:
    """AdamW, which has state from its first step on, and a plain model, at every moment."""
    adam = OPTIMIZERS["AdamW"].make

    def code(moment: Any, layout: str) -> UserCode:
        return functools.partial(resume, layout=layout, module=NoHook, optimizer=adam, moment=moment)

    return _in_each_layout("moments", MOMENTS, code)


@functools.cache
def programs() -> dict[str, Case]:
    return _in_each_layout("programs", PROGRAMS, lambda entry, layout: functools.partial(run, entry, layout), None)


@functools.cache
def tensors() -> dict[str, Case]:
    return {
        f"{place}-{name}": Case(
            f"tensors/{place}-{name}",
            functools.partial(run_tensor, entry, place),
            "plain" if entry.world_size == 1 else "ddp",
            entry.oracle,
            UNCAST_SLOT if place == "slot" and name in CAST_IN_SLOTS else entry.differs,
            must_work=False,
        )
        for name, entry in TENSORS.items()
        for place in entry.places
    }


@functools.cache
def runs() -> dict[str, Case]:
    return {
        f"plain-{name}": Case(f"runs/plain-{name}", entry.code, differs=entry.differs, must_work=False)
        for name, entry in RUNS.items()
    }


@functools.cache
def interchange() -> dict[str, Case]:
    return {
        f"{way}-{name}": Case(
            f"interchange/{way}-{name}",
            functools.partial(interchange_run, entry, way),
            "plain" if entry.world_size == 1 else "ddp",
            differs=interchange_differs(name, way),
            must_work=False,
        )
        for name, entry in ENTRIES.items()
        for way in entry.ways
    }


@functools.cache
def containers() -> dict[str, Case]:
    return {
        f"plain-{name}": Case(
            f"containers/plain-{name}",
            functools.partial(run_container, entry),
            "plain" if entry.world_size == 1 else "ddp",
            differs=entry.differs,
        )
        for name, entry in CONTAINERS.items()
    }


@functools.cache
def per_rank() -> dict[str, Case]:
    return {
        f"{way}-{name}": Case(
            f"per_rank/{way}-{name}", functools.partial(run_per_rank, entry, way), layout="ddp", oracle="right"
        )
        for name, entry in PER_RANK.items()
        for way in WAYS
    }


CORPORA: dict[str, Callable[[], dict[str, Case]]] = {
    "modules": modules,
    "optimizers": optimizers,
    "moments": moments,
    "programs": programs,
    "tensors": tensors,
    "runs": runs,
    "interchange": interchange,
    "containers": containers,
    "per_rank": per_rank,
}


def find(name: str) -> Case:
    corpus, _, rest = name.partition("/")
    return combination(*rest.split("+")) if corpus == "random" else CORPORA[corpus]()[rest]


def combination(layout: str, module: str, optimizer: str, moment: str) -> Case:
    """One of each corpus."""
    parts = MODULES[module], OPTIMIZERS[optimizer], MOMENTS[moment]
    return Case(
        f"random/{layout}+{module}+{optimizer}+{moment}",
        functools.partial(resume, layout=layout, module=parts[0].make, optimizer=parts[1].make, moment=parts[2]),
        layout,
        differs={**CALLED_IN_ONE_ORDER, **{aspect: text for part in parts for aspect, text in part.differs.items()}},
        must_work=False,
    )


_LOAD_SOMETHING_ELSE = ("StateDictHook", "StateDictPreHook", "OverriddenLoad", "HookChangesWhatIsSaved")
"""Modules and optimizers that load other values than were saved, or that a save changes. A combination of these that
stock cannot run has no oracle."""


def combinable(layout: str) -> tuple[list[str], list[str], list[str]]:
    """The modules, optimizers and moments that go with each other, and in which nothing is known to be wrong."""

    def fine(corpus: str, name: str, layouts: Iterable[str], oracle: str = "stock") -> bool:
        return layout in layouts and oracle == "stock" and not known_failure(f"{corpus}/{layout}-{name}")

    return (
        [
            name
            for name, each in MODULES.items()
            if fine("modules", name, each.layouts, each.oracle) and not name.startswith(_LOAD_SOMETHING_ELSE)
        ],
        [
            name
            for name, each in OPTIMIZERS.items()
            if each.module is Small
            and fine("optimizers", name, each.layouts, each.oracle)
            and not name.startswith(_LOAD_SOMETHING_ELSE)
        ],
        [name for name, each in MOMENTS.items() if fine("moments", name, each.layouts)],
    )


def all_cases() -> list[Case]:
    return [case for corpus in CORPORA.values() for case in corpus().values()]
