"""Every case by name: ``<corpus>/<variant>-<name>``, and combinations of three corpora."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.conformance import containers, hooks, interchange, per_rank, programs, ranks, runs, settings, tensors
from tests.conformance.differences import CALLED_IN_ONE_ORDER
from tests.conformance.modules import MODULES, ModuleEntry, Small
from tests.conformance.moments import MOMENTS, Moment
from tests.conformance.optimizers import OPTIMIZERS, OptimizerEntry
from tests.conformance.tools import Tool
from tests.conformance.trace import Trace
from tests.conformance.training import WORLD_SIZE, resume
from tests.conformance.verdict import Seen, Verdict

UserCode = Callable[[Tool, Trace], None]


@dataclass(frozen=True)
class Case:
    name: str
    code: UserCode
    variant: str
    world_size: int
    oracle: str = "stock"
    differs: Mapping[str, str] = field(default_factory=dict)
    must_work: bool = False
    of_stock: str = ""
    """The case that stock runs in its place, by name."""
    judge: Callable[[Seen, Seen], Verdict] | None = None
    """The rule of a corpus of its own."""


def _cases(
    corpus: str,
    entries: Mapping[str, Any],
    run: Callable[[Any, str, Tool, Trace], None],
    must_work: bool = True,
) -> dict[str, Case]:
    """Return a case for every entry in each of its variants.

    Args:
        run: Runs an entry in a variant. One that is no layout runs on as many ranks as the entry says.
        must_work: Whether the entries say themselves which of them must work; else none must.
    """
    return {
        f"{variant}-{name}": Case(
            f"{corpus}/{variant}-{name}",
            functools.partial(run, entry, variant),
            variant,
            getattr(entry, "world_size", None) or WORLD_SIZE[variant],
            entry.oracle,
            entry.differs_in(variant),
            must_work and entry.must_work,
            f"{corpus}/{entry.of_stock(variant)}-{name}",
            getattr(entry, "judge", None),
        )
        for name, entry in entries.items()
        for variant in entry.variants
    }


def _module(entry: ModuleEntry, layout: str, tool: Tool, trace: Trace) -> None:
    resume(tool, trace, layout, entry.make)


def _optimizer(entry: OptimizerEntry, layout: str, tool: Tool, trace: Trace) -> None:
    resume(tool, trace, layout, entry.module, entry.make)


def _moment(moment: Moment, layout: str, tool: Tool, trace: Trace) -> None:
    """AdamW, which has state from its first step on, and a plain model, at every moment."""
    resume(tool, trace, layout, Small, OPTIMIZERS["AdamW"].make, moment)


CORPORA: dict[str, dict[str, Case]] = {
    "modules": _cases("modules", MODULES, _module, must_work=False),
    "optimizers": _cases("optimizers", OPTIMIZERS, _optimizer),
    "moments": _cases("moments", MOMENTS, _moment),
    "programs": _cases("programs", programs.PROGRAMS, programs.run),
    "tensors": _cases("tensors", tensors.TENSORS, tensors.run, must_work=False),
    "runs": _cases("runs", runs.RUNS, runs.run, must_work=False),
    "hooks": _cases("hooks", hooks.HOOKS, hooks.run, must_work=False),
    "interchange": _cases("interchange", interchange.ENTRIES, interchange.run, must_work=False),
    "containers": _cases("containers", containers.CONTAINERS, containers.run),
    "per_rank": _cases("per_rank", per_rank.ENTRIES, per_rank.run),
    "ranks": _cases("ranks", ranks.ENTRIES, ranks.run),
    "settings": _cases("settings", settings.ENTRIES, settings.run),
}


def find(name: str) -> Case:
    corpus, _, rest = name.partition("/")
    return combination(*rest.split("+")) if corpus == "random" else CORPORA[corpus][rest]


def combination(layout: str, module: str, optimizer: str, moment: str) -> Case:
    """One of each corpus."""
    parts = MODULES[module], OPTIMIZERS[optimizer], MOMENTS[moment]
    return Case(
        f"random/{layout}+{module}+{optimizer}+{moment}",
        functools.partial(resume, layout=layout, module=parts[0].make, optimizer=parts[1].make, moment=parts[2]),
        layout,
        WORLD_SIZE[layout],
        differs={**CALLED_IN_ONE_ORDER, **{aspect: text for part in parts for aspect, text in part.differs.items()}},
    )


_LOAD_SOMETHING_ELSE = ("StateDictHook", "StateDictPreHook", "OverriddenLoad", "HookChangesWhatIsSaved")
"""Modules and optimizers that load other values than were saved, or that a save changes. A combination of these that
stock cannot run has no oracle."""


def combinable(layout: str) -> list[list[str]]:
    """The modules, optimizers and moments that go with each other."""
    whole_models = {name: entry for name, entry in OPTIMIZERS.items() if entry.module is Small}
    corpora: list[Mapping[str, Any]] = [MODULES, whole_models, MOMENTS]
    return [
        [
            name
            for name, entry in corpus.items()
            if layout in entry.variants and entry.oracle == "stock" and not name.startswith(_LOAD_SOMETHING_ELSE)
        ]
        for corpus in corpora
    ]


def all_cases() -> list[Case]:
    return [case for corpus in CORPORA.values() for case in corpus.values()]
