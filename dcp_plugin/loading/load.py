"""One load, stage by stage: open, match, plan, read, apply.

Each stage takes the records of the stages before it and returns its own. A load that begins anew drops all of them.
Each stage that can fail ends in an all-or-none collective. All checks come before the first byte of a target is
overwritten, and one error names everything that does not fit.
"""

from __future__ import annotations

import functools
import logging
import socket
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch.distributed.checkpoint.planner import LoadItemType

from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import CheckpointMismatch, CheckpointNotFound, first, printable, some
from dcp_plugin.format.index import CheckpointIndex, StoredTensor
from dcp_plugin.format.keys import join
from dcp_plugin.loading.matching import LoadMode, Matching, locate
from dcp_plugin.loading.suggestions import about_excluded, about_shapes
from dcp_plugin.loading.union import Answer, Union, ask_all
from dcp_plugin.partial import PartialLoad
from dcp_plugin.paths import PathLike, Where, as_path
from dcp_plugin.planning.load import ShardedLoadPlanner
from dcp_plugin.ranks import Attempt, Ranks, said_by_ranks
from dcp_plugin.records import LoadPlan, LoadReport, Match, OpenCheckpoint
from dcp_plugin.sources import SourceFiles
from dcp_plugin.state.adapters import Place, StateAdapter, adapters_of
from dcp_plugin.state.module import materialise
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tensors._torch import sharded_value
from dcp_plugin.tensors._torch_modules import Incompatible
from dcp_plugin.types import Shape

logger = logging.getLogger("dcp_plugin")

_MOST_TRIES = 20
"""How often a load begins anew because the checkpoint was replaced before the ranks had opened its files."""


@dataclass(frozen=True)
class PlannedItem:
    """A target that a load would fill."""

    key: str
    stored: str
    """Its key in the checkpoint."""
    shape: Shape | None
    """None for a value that is no tensor."""
    dtype: str
    """In the checkpoint; empty for a value."""
    target_dtype: str
    nbytes: int
    """In the checkpoint."""


@dataclass(frozen=True)
class PlannedLoad:
    """What a load would do, from :func:`plan_load`."""

    path: Where
    items: list[PlannedItem]
    report: LoadReport
    """What would be missing, unexpected, renamed, left out and cast; nothing is loaded."""
    error: str
    """With which message it would fail; empty if it would not."""
    warnings: list[str]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True)
class _Request:
    """The load that one rank asks for. Ranks compare these."""

    asked_for: str
    path: str
    save: tuple[str, str]
    selection: str
    from_store: bool
    """Whether each read is a request to an object store."""
    host: str


@dataclass(frozen=True)
class _Begun:
    """The objects to load into, once all ranks have opened the same save."""

    adapters: list[StateAdapter]
    selection: PartialLoad | None
    """The partial load, with the place of its submodule in the state; None for a load of everything."""
    least_hosts: float
    """Hosts that have to want the same bytes for ranks to read for each other."""


@dataclass(frozen=True)
class _Fitted:
    """A load that fits the state, and its reads."""

    match: Match
    plan: LoadPlan
    planner: ShardedLoadPlanner
    targets: dict[str, Any]
    """Targets by key; values that were read take the place of None."""


class Loading:
    """One load. :meth:`run` has its stages; between them this object keeps the request and the open files alone.

    Args:
        files: The files that a source has opened; None: those at the path.
        mode: How tensors of data and of Stateful objects are judged that only the target or the checkpoint has.
    """

    def __init__(
        self,
        ranks: Ranks,
        config: CheckpointConfig,
        path: Where,
        partial: PartialLoad | None,
        strict: bool,
        files: SourceFiles | None = None,
        mode: LoadMode = LoadMode.FILL,
    ) -> None:
        self._ranks, self._config, self._path, self._mode = ranks, config, path, mode
        self._partial, self._strict = partial, strict
        self._reader = ShardedReader(
            path,
            io_threads=config.io_threads,
            verify=config.verify_on_load,
            check_files=ranks.rank == 0,
            base=config.base,
            files=files,
        )
        self._files, self._began = files, time.monotonic()

    @property
    def opened(self) -> OpenCheckpoint:
        """The checkpoint, with its base if it has one."""
        return self._reader.opened

    def run(self, state: Mapping[str, Any]) -> LoadReport:
        """Load into ``state``, in place. Collective."""
        with self._reader:
            begun, fitted = self._prepare(state)
            self._read_tensors(begun, fitted)
            self._apply(begun, fitted)
        match = fitted.match
        if self._ranks.rank == 0:
            for message in match.warnings:  # last: a warning that was made an error must not stop a load half-way
                warnings.warn(printable(message), stacklevel=2)
        reader, loaded = self._reader, [*fitted.targets, *match.deferred]
        report = replace(
            match.report, loaded=loaded, bytes_read=reader.bytes_read, unchecked_bytes=reader.unchecked_bytes
        )
        return report if self._files is None else self._with_sources(report, self._files)

    def _with_sources(self, report: LoadReport, files: SourceFiles) -> LoadReport:
        seconds = time.monotonic() - self._began
        if self._ranks.rank == 0:
            sources = ", ".join(f"{count / 2**20:,.1f} MiB from {name}" for name, count in files.bytes_from.items())
            logger.info("%s: rank 0 has read %s in %.2f s", self._path, sources or "nothing", seconds)
        return replace(report, sources=dict(files.bytes_from), passed_over=files.problems, seconds=seconds)

    def _prepare(self, state: Mapping[str, Any]) -> tuple[_Begun, _Fitted]:
        """Run all stages before the first tensor is overwritten, and open the files that this rank reads. All ranks
        begin anew if another process deletes or replaces the checkpoint meanwhile."""
        failure: CheckpointNotFound | None = None
        allocated: list[str] = []
        for _ in range(_MOST_TRIES):
            try:
                begun = self._open_together(state)
            except CheckpointNotFound as error:
                if failure is None:
                    raise
                raise CheckpointNotFound(f"{self._path} was deleted while it was loaded: {failure}") from error
            try:
                fitted = self._fit(begun, allocated)
                step = f"read the values of {self._path}"
                self._ranks.agree(step, functools.partial(self._read_values, begun, fitted))
                return begun, fitted
            except CheckpointNotFound as error:  # all ranks raise the same
                failure = error
                self._reader.reset()
        assert failure is not None
        raise failure

    def _open_together(self, state: Mapping[str, Any]) -> _Begun:
        """Open the checkpoint, the same on all ranks: another process may replace it between one rank and the next."""
        adapters: list[StateAdapter] = []
        selection: PartialLoad | None = None

        def open_here() -> _Request:
            nonlocal selection
            adapters[:] = adapters_of(state, place=Place(self._ranks.rank, self._ranks.size))
            selection = None if self._partial is None else locate(self._partial, adapters)
            return self._open(selection)

        for _ in range(_MOST_TRIES):
            difference, least = self._ranks.combine(
                f"open {self._path}",
                open_here,
                lambda requests: (self._difference(requests), self._least_hosts(requests)),
            )
            if not difference:
                return _Begun(adapters, selection, least)
            self._reader.reset()
        raise CheckpointMismatch(difference)

    def dry_run(self, state: Mapping[str, Any]) -> PlannedLoad:
        """Return what :meth:`run` would do, for this process alone. Nothing is allocated, read or changed."""
        adapters = adapters_of(state, place=Place(self._ranks.rank, self._ranks.size))
        selection = None if self._partial is None else locate(self._partial, adapters)
        with self._reader:
            begun = _Begun(adapters, selection, self._least_hosts([self._open(selection)]))
        matching = self._matching(begun, dry_run=True)
        matching.run(adapters)
        self._judge_match(matching, Union())
        match = self._plan(begun, matching.match).match
        items = [_planned(key, match, self._reader.index) for key in (*match.targets, *match.deferred)]
        return PlannedLoad(self._path, items, match.report, misfit(self._path, match.problems), match.warnings)

    def _open(self, selection: PartialLoad | None) -> _Request:
        """Open the checkpoint on this rank; return what this rank is about to load."""
        save = self._reader.save
        from_store = self._reader.opened.files.streams > 0
        paths = str(self._path), str(self._reader.path)
        return _Request(*paths, save, repr(selection), from_store, socket.gethostname())

    def _least_hosts(self, requests: list[_Request]) -> float:
        """Return how many hosts have to want the same bytes for ranks to read for each other."""
        if len(requests) == 1:
            return float("inf")
        from dcp_plugin.planning.sharing import least_hosts  # a rank alone shares no reads

        hosts = len({request.host for request in requests})
        return least_hosts(self._config.read_broadcast, any(request.from_store for request in requests), hosts)

    @staticmethod
    def _difference(requests: list[_Request]) -> str:
        """Describe ranks that have opened different saves at the same path, which may have been replaced meanwhile.

        Raises:
            CheckpointMismatch: Ranks ask for different paths or different parts.
        """
        first, difference = requests[0], ""
        for rank, other in enumerate(requests):
            if other.save != first.save:
                difference = (
                    f"rank 0 loads {first.path} and rank {rank} {other.path}, which is another checkpoint. Decide "
                    f"on rank 0 what to load, and broadcast it."
                )
                if other.asked_for != first.asked_for:
                    raise CheckpointMismatch(difference)
            if other.selection != first.selection:
                raise CheckpointMismatch(
                    f"rank 0 loads {first.selection[:500]} of {first.path}, and rank {rank} {other.selection[:500]}. "
                    f"Give all ranks the same."
                )
        return difference

    def _fit(self, begun: _Begun, allocated: list[str]) -> _Fitted:
        """Match and plan; raise everything that does not fit, in one error. Collective.

        A rank with no question for other ranks plans at once. Usually that is every rank, and one small collective is
        all. A rank with questions, or with a plan that failed, has all ranks answer. Then the ranks with questions
        plan, and each failure is raised on all ranks.

        Args:
            allocated: Keys of modules that were on the meta device. Those that get memory now are added.
        """
        step = f"compare {self._path} with the state"
        matching = self._matching(begun)
        fitted: Attempt[_Fitted] | None = None

        def match() -> list[str] | None:
            nonlocal fitted
            for adapter in begun.adapters:
                if adapter.kind == "module" and adapter.module is not None:
                    allocated.extend(join(adapter.name, key) for key in materialise(adapter.module))
            matching.run(begun.adapters)
            if matching.questions is not None:
                return matching.questions
            fitted = Attempt.of(lambda: self._judge_and_plan(begun, matching, Union(), allocated))
            return None if fitted.failure is None else []

        def judge(union: Union) -> list[str]:
            nonlocal fitted
            if fitted is None:
                fitted = Attempt(self._judge_and_plan(begun, matching, union, allocated))
            return fitted.get().match.warnings

        union = ask_all(self._ranks, step, match, matching.answer)
        if union is not None:
            warnings_of_all = self._ranks.combine(step, lambda: judge(union), said_by_ranks)
            matching.match.warnings[:] = warnings_of_all
        assert fitted is not None
        return fitted.get()

    def _matching(self, begun: _Begun, dry_run: bool = False) -> Matching:
        index, kinds, summary = self._reader.index, self._reader.kinds, self._reader.summary
        classes = summary.optimizers if summary is not None else {}
        saved_by = summary.world_size if summary is not None else None
        selection, strict, mode = begun.selection, self._strict, self._mode
        return Matching(self._path, index, kinds, selection, strict, dry_run, mode, classes, saved_by)

    def _judge_and_plan(self, begun: _Begun, matching: Matching, union: Union, allocated: list[str]) -> _Fitted:
        """Judge the match, plan the reads, and open their files.

        Raises:
            CheckpointMismatch: Naming all that does not fit.
        """
        match = matching.match
        self._judge_match(matching, union)
        undecided = {join(name, key) for name, want in match.wanted.items() for key in want.undecided}
        left = [key for key in allocated if key not in match.targets.keys() | match.deferred.keys() | undecided]
        if left:
            match.warnings.append(
                f"{self._path} does not fill {some(left)}, which had been on the meta device: the values are what was "
                "in memory by chance. Initialise them now."
            )
        fitted = self._plan(begun, match)
        if match.problems:
            raise CheckpointMismatch(misfit(self._path, match.problems))
        self._reader.hold_files(fitted.plan, [match.stored[key] for key in match.deferred])
        return fitted

    def _judge_match(self, matching: Matching, union: Union) -> None:
        matching.judge(union)
        if matching.match.problems:
            missing = matching.match.report.missing
            matching.match.problems.extend(about_excluded(self._reader.summary, missing))

    def _plan(self, begun: _Begun, match: Match) -> _Fitted:
        """Plan the reads. The misfits that the planner finds are added to the problems, in front."""
        targets: dict[str, Any] = dict(match.targets)
        planner = ShardedLoadPlanner(strict=False, allow_pickle=self._config.allow_pickle)
        planner.use_index(targets, self._reader.index, match.stored)
        plan = LoadPlan((), ())
        try:
            plan = planner.plan_apart()
        except CheckpointMismatch:
            match.problems[:0] = [*first(planner.misfits), *self._about_shapes(begun, match, len(planner.misfits))]
        return _Fitted(match, plan, planner, targets)

    def _about_shapes(self, begun: _Begun, match: Match, misfits: int) -> list[str]:
        """Return a line if some parts of modules have another shape, and nothing else is wrong."""
        index = self._reader.index
        shapes = {key: index.table.shape_of(index.slots[match.stored[key]]) for key in match.targets}
        other = [key for key, target in match.targets.items() if target is not None and target.shape != shapes[key]]
        if match.problems or len(other) != misfits or 2 * len(other) > len(match.targets):
            return []
        modules = {
            adapter.name: [o.name for o in begun.adapters if o.kind == "optimizer" and o.module is adapter.module]
            for adapter in begun.adapters
            if adapter.kind == "module"
        }
        line = about_shapes(other, modules, index, bool(match.report.cast))
        return [line] if line else []

    def _read_values(self, begun: _Begun, fitted: _Fitted) -> None:
        """Read values before tensors: they are small, and misfits are found before a tensor is overwritten."""
        planner, match = fitted.planner, fitted.match
        self._reader.read_parts(_only(LoadItemType.BYTE_IO, fitted.plan), planner)
        if planner.plain:
            match.warnings.append(
                f"{self._path}: values came back without their class: {some(planner.plain, separator='; ')}. "
                f"Import the modules of the classes before the load."
            )
        for adapter in begun.adapters:
            targets = match.wanted[adapter.name].targets
            keys = [key for key, target in targets.items() if target is None]
            if targets:
                values = {key: fitted.targets[join(adapter.name, key)] for key in keys}
                adapter.check(values, self._strict and begun.selection is None)

    def _read_tensors(self, begun: _Begun, fitted: _Fitted) -> None:
        """Read tensors into the targets. Ranks pass on what they read for others once all have read without a
        failure. Collective."""

        def read(plan: LoadPlan) -> None:
            self._reader.read_parts(_only(LoadItemType.TENSOR, plan), fitted.planner)

        if begun.least_hosts == float("inf"):
            self._ranks.agree(f"read {self._path}", lambda: read(fitted.plan))
            return
        from dcp_plugin.planning.sharing import BroadcastRead

        host, path = socket.gethostname(), str(self._path)
        shared = BroadcastRead(self._ranks, fitted.planner, begun.least_hosts, host, path)
        items = fitted.planner.create_local_plan().items
        shared.run(_only(LoadItemType.TENSOR, LoadPlan(items, ())), read)

    def _apply(self, begun: _Begun, fitted: _Fitted) -> None:
        """Hand everything to its object; raise what load hooks then find missing and unexpected. Collective."""
        step, match = f"apply {self._path}", fitted.match
        incompatible: dict[str, Incompatible] = {}

        def unexpected() -> set[str]:
            return {join(name, key) for name, each in incompatible.items() for key in each.unexpected}

        def take() -> list[str] | None:
            incompatible.update(self._take(begun, fitted))
            return sorted(unexpected()) if incompatible else None

        def answer(asked: list[str]) -> Answer:
            return Answer.of(asked, match.stored.keys() - unexpected(), (), frozenset())

        def judge(union: Union) -> None:
            rules = begun.selection or PartialLoad()
            problems = [
                line for name, each in incompatible.items() for line in self._judge(name, rules, match, each, union)
            ]
            if problems:
                raise CheckpointMismatch(misfit(self._path, problems))

        union = ask_all(self._ranks, step, take, answer)
        if union is not None:
            self._ranks.agree(step, lambda: judge(union))

    def _take(self, begun: _Begun, fitted: _Fitted) -> dict[str, Incompatible]:
        """Hand everything to its object; return what the own code of modules finds missing and unexpected, by name."""
        incompatible: dict[str, Incompatible] = {}
        strict = self._strict and begun.selection is None
        for adapter in begun.adapters:
            want = fitted.match.wanted[adapter.name]
            if want.targets or want.empty:
                filled = {
                    key: fitted.targets[join(adapter.name, key)] if target is None else target
                    for key, target in want.targets.items()
                }
                if self._mode is LoadMode.FILL:
                    filled |= want.lacking
                # The adapter keeps this function, which must not lead back to it: the cycle would keep objects alive.
                read = functools.partial(self._read_deferred, adapter.name, fitted.match.stored)
                result = adapter.take(filled, read, strict)
                if result is not None and result != Incompatible():
                    incompatible[adapter.name] = result
        return incompatible

    def _read_deferred(self, name: str, stored: Mapping[str, str], tensors: dict[str, Any]) -> None:
        """Read tensors that have just got their memory, on this rank alone."""
        planner = ShardedLoadPlanner(strict=False)
        targets: dict[str, Any] = {join(name, key): sharded_value(tensor) for key, tensor in tensors.items()}
        planner.use_index(targets, self._reader.index, stored)
        self._reader.read_parts(planner.plan_apart(), planner)

    def _judge(
        self, name: str, rules: PartialLoad, match: Match, incompatible: Incompatible, union: Union
    ) -> list[str]:
        """Return the problems after a module's own load hooks. Keys that were not selected may be missing, and a key
        that another rank has taken is not unexpected."""
        left_out = set(match.report.left_out)
        missing = [key for key in (join(name, inner) for inner in incompatible.missing) if key not in left_out]
        unexpected = [key for key in (join(name, inner) for inner in incompatible.unexpected) if key not in union.taken]
        match.report.missing.extend(missing)
        match.report.unexpected.extend(unexpected)
        problems = list(incompatible.errors)
        for keys, policy, what in ((missing, rules.missing, "missing"), (unexpected, rules.unexpected, "unexpected")):
            line = f"{some(keys)}: {what} after the load hooks of {name!r}"
            if keys and policy == "error" and self._strict:
                problems.append(line)
            elif keys and policy == "warn":
                match.warnings.append(f"{self._path}: {line}.")
        return problems


def _only(kind: LoadItemType, plan: LoadPlan) -> LoadPlan:
    items = [item for item in plan.items if item.type == kind]
    return LoadPlan(items, plan.chunks if kind is LoadItemType.TENSOR else ())


def plan_load(
    state: Mapping[str, Any], path: PathLike, partial: PartialLoad | None = None, strict: bool = True
) -> PlannedLoad:
    """What :func:`dcp_plugin.load` would take and what would not fit, without loading. Modules may be on the meta
    device.

    Args:
        state: What would be loaded into.
        path: The checkpoint.
        partial: What to load of it; everything by default.
        strict: Whether missing and unexpected keys are errors where ``partial`` does not say otherwise.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: It cannot be opened.
        CheckpointMismatch: A sub-module is not in the state. Everything else that does not fit is in the result.
    """
    return Loading(Ranks(), CheckpointConfig(), as_path(path), partial, strict).dry_run(state)


def _planned(key: str, match: Match, index: CheckpointIndex) -> PlannedItem:
    stored, target = match.stored[key], match.targets.get(key) or match.deferred.get(key)
    entry = index[stored]
    wanted = str((target and target.dtype) or "").removeprefix("torch.")
    if isinstance(entry, StoredTensor):
        dtype = str(entry.dtype).removeprefix("torch.")
        return PlannedItem(key, stored, entry.shape, dtype, wanted, prod(entry.shape) * entry.dtype.itemsize)
    return PlannedItem(key, stored, None, "", wanted, entry.location.length)


def misfit(path: Where, problems: list[str]) -> str:
    """The one error for all that does not fit; empty if all does."""
    if not problems:
        return ""
    if len(problems) == 1:
        return f"{path} does not fit the state: {problems[0]}{'' if problems[0].endswith('?') else '.'}"
    return f"{path} does not fit the state:\n  " + "\n  ".join(problems)
