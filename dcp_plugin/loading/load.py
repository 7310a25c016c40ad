"""One load, step by step: open, match, plan, read, apply.

Every step that can fail ends in an all-or-none collective. Everything that can be checked is checked before the first
byte of a target is overwritten, and what does not fit is raised in one error that names all of it.
"""

from __future__ import annotations

import logging
import socket
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
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
from dcp_plugin.planning.sharing import BroadcastRead, Rule
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
    """What a rank is about to load; the same on all ranks, but for the path."""

    asked_for: str
    path: str
    save: tuple[str, str]
    partial: str
    from_store: bool
    """Whether each read is a request to an object store."""
    host: str


class Loading:
    """One load. :meth:`run` has its steps.

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
        self._asked, self._partial, self._strict = partial, partial, strict
        self._reader = ShardedReader(
            path,
            io_threads=config.io_threads,
            verify=config.verify_on_load,
            check_files=ranks.rank == 0,
            base=config.base,
            files=files,
        )
        self._files, self._began = files, time.monotonic()
        self._waiting: list[str] = []
        self._adapters: list[StateAdapter] = []

    @property
    def opened(self) -> OpenCheckpoint:
        """The checkpoint, with its base if it has one."""
        return self._reader.opened

    def run(self, state: Mapping[str, Any]) -> LoadReport:
        """Load into ``state``, in place. Collective."""
        try:
            with self._reader:
                return self._run(state)
        finally:
            self._adapters = []  # an adapter may refer to this object, and the cycle would keep users' objects alive

    def _run(self, state: Mapping[str, Any]) -> LoadReport:
        match = self._prepare(state)
        self._read_tensors()
        self._apply(match)
        if self._ranks.rank == 0:
            for message in match.warnings:  # last: a warning that was made an error must not stop a load half-way
                warnings.warn(printable(message), stacklevel=3)
        reader, loaded = self._reader, [*self._targets, *match.deferred]
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

    def _prepare(self, state: Mapping[str, Any]) -> Match:
        """Everything before the first tensor is overwritten; from the start, on all ranks, if another process deletes
        or replaces the checkpoint meanwhile. At the end each rank has open what it reads."""
        failure: CheckpointNotFound | None = None
        for _ in range(_MOST_TRIES):
            try:
                self._open_together(state)
            except CheckpointNotFound as error:
                if failure is None:
                    raise
                raise CheckpointNotFound(f"{self._path} was deleted while it was loaded: {failure}") from error
            try:
                match = self._fit()
                self._ranks.agree(f"read the values of {self._path}", partial(self._read_values, match))
                return match
            except CheckpointNotFound as error:  # all ranks raise the same
                failure = error
                self._reader.reset()
        assert failure is not None
        raise failure

    def _open_together(self, state: Mapping[str, Any]) -> None:
        """Open the checkpoint, the same on all ranks: another process may replace it between one rank and the next."""
        for _ in range(_MOST_TRIES):
            difference, self._rule = self._ranks.combine(
                f"open {self._path}",
                lambda: self._open(state),
                lambda opened: (self._all_the_same(opened), self._rule_of(opened)),
            )
            if not difference:
                return
            self._reader.reset()
        raise CheckpointMismatch(difference)

    def dry_run(self, state: Mapping[str, Any]) -> PlannedLoad:
        """What :meth:`run` would do, for this process alone. Nothing is allocated, read or changed."""
        with self._reader:
            self._open(state)
        matching = self._matching(dry_run=True)
        matching.run(self._adapters)
        self._judge_match(matching, Union())
        match = matching.match
        self._plan(match)
        items = [_planned(key, match, self._reader.index) for key in (*match.targets, *match.deferred)]
        return PlannedLoad(self._path, items, match.report, misfit(self._path, match.problems), match.warnings)

    def _open(self, state: Mapping[str, Any]) -> _Request:
        self._planner = ShardedLoadPlanner(strict=False, allow_pickle=self._config.allow_pickle)
        self._adapters = adapters_of(state, place=Place(self._ranks.rank, self._ranks.size))
        if self._asked is not None:
            self._partial = locate(self._asked, self._adapters)
        save = self._reader.save
        from_store = self._reader.opened.files.streams > 0
        asked_for, found = str(self._path), str(self._reader.path)
        return _Request(asked_for, found, save, repr(self._partial), from_store, socket.gethostname())

    def _rule_of(self, opened: list[_Request]) -> Rule:
        """When ranks read for each other."""
        hosts = len({one.host for one in opened})
        return Rule.of(self._config.read_broadcast, any(one.from_store for one in opened), hosts)

    @staticmethod
    def _all_the_same(opened: list[_Request]) -> str:
        """What is wrong if ranks have opened different saves at the same path, which may be another one by now."""
        first, difference = opened[0], ""
        for rank, other in enumerate(opened):
            if other.save != first.save:
                difference = (
                    f"rank 0 loads {first.path} and rank {rank} {other.path}, which is another checkpoint. Decide "
                    f"on rank 0 what to load, and broadcast it."
                )
                if other.asked_for != first.asked_for:
                    raise CheckpointMismatch(difference)
            if other.partial != first.partial:
                raise CheckpointMismatch(
                    f"rank 0 loads {first.partial[:500]} of {first.path}, and rank {rank} {other.partial[:500]}. Give "
                    f"all ranks the same."
                )
        return difference

    def _fit(self) -> Match:
        """Match and plan; raise everything that does not fit, in one error. Collective.

        A rank with no question for other ranks plans at once. Usually that is every rank, and one small collective is
        all. A rank with questions, or with a plan that failed, has all ranks answer. Then the ranks with questions
        plan, and each failure is raised on all ranks.
        """
        step = f"compare {self._path} with the state"
        matching = self._matching()
        planned_at_once: Attempt[None] | None = None

        def match() -> list[str] | None:
            nonlocal planned_at_once
            for adapter in self._adapters:
                if adapter.kind == "module" and adapter.module is not None:
                    self._waiting += [join(adapter.name, key) for key in materialise(adapter.module)]
            matching.run(self._adapters)
            if matching.questions is not None:
                return matching.questions
            planned_at_once = Attempt.of(partial(self._judge_and_plan, matching, Union()))
            return None if planned_at_once.failure is None else []

        def judge(union: Union) -> list[str]:
            if planned_at_once is not None:
                planned_at_once.get()
            else:
                self._judge_and_plan(matching, union)
            return matching.match.warnings

        union = ask_all(self._ranks, step, match, matching.answer)
        if union is not None:
            warnings_of_all = self._ranks.combine(step, lambda: judge(union), said_by_ranks)
            matching.match.warnings[:] = warnings_of_all
        return matching.match

    def _matching(self, dry_run: bool = False) -> Matching:
        index, kinds, summary = self._reader.index, self._reader.kinds, self._reader.summary
        classes = summary.optimizers if summary is not None else {}
        saved_by = summary.world_size if summary is not None else None
        return Matching(self._path, index, kinds, self._partial, self._strict, dry_run, self._mode, classes, saved_by)

    def _judge_and_plan(self, matching: Matching, union: Union) -> None:
        """Judge the match, and plan the reads.

        Raises:
            CheckpointMismatch: Naming all that does not fit.
        """
        match = matching.match
        self._judge_match(matching, union)
        undecided = {join(name, key) for name, want in match.wanted.items() for key in want.undecided}
        left = [key for key in self._waiting if key not in match.targets.keys() | match.deferred.keys() | undecided]
        if left:
            match.warnings.append(
                f"{self._path} does not fill {some(left)}, which had been on the meta device: the values are what was "
                "in memory by chance. Initialise them now."
            )
        self._load_plan = self._plan(match)
        if match.problems:
            raise CheckpointMismatch(misfit(self._path, match.problems))
        self._reader.hold_files(self._load_plan, [match.stored[key] for key in match.deferred])

    def _judge_match(self, matching: Matching, union: Union) -> None:
        matching.judge(union)
        if matching.match.problems:
            missing = matching.match.report.missing
            matching.match.problems.extend(about_excluded(self._reader.summary, missing))

    def _plan(self, match: Match) -> LoadPlan:
        """The reads. What the planner finds is added to the problems, in front."""
        self._targets: dict[str, Any] = dict(match.targets)
        self._planner.use_index(self._targets, self._reader.index, match.stored)
        try:
            return self._planner.plan_apart()
        except CheckpointMismatch:
            match.problems[:0] = [*first(self._planner.misfits), *self._about_shapes(match)]
            return LoadPlan((), ())

    def _about_shapes(self, match: Match) -> list[str]:
        """A line where parts of modules have another shape, and nothing else is wrong."""
        index = self._reader.index
        there = {key: index.table.shape_of(index.slots[match.stored[key]]) for key in match.targets}
        other = [key for key, one in match.targets.items() if one is not None and one.shape != there[key]]
        if match.problems or len(other) != len(self._planner.misfits) or 2 * len(other) > len(match.targets):
            return []
        modules = {
            adapter.name: [o.name for o in self._adapters if o.kind == "optimizer" and o.module is adapter.module]
            for adapter in self._adapters
            if adapter.kind == "module"
        }
        line = about_shapes(other, modules, index, bool(match.report.cast))
        return [line] if line else []

    def _read_values(self, match: Match) -> None:
        """Read values before tensors: they are small, and what does not fit is found before a tensor is overwritten."""
        self._reader.read_parts(_only(LoadItemType.BYTE_IO, self._load_plan), self._planner)
        if self._planner.plain:
            match.warnings.append(
                f"{self._path}: values came back without their class: {some(self._planner.plain, separator='; ')}. "
                f"Import the modules of the classes before the load."
            )
        for adapter in self._adapters:
            targets = match.wanted[adapter.name].targets
            keys = [key for key, target in targets.items() if target is None]
            if targets:
                values = {key: self._targets[join(adapter.name, key)] for key in keys}
                adapter.check(values, self._strict and self._partial is None)

    def _read_tensors(self) -> None:
        """Read tensors into the targets. What others read for this rank is passed on once all ranks have read without a
        failure."""
        shared = BroadcastRead(self._ranks, self._planner, self._rule, socket.gethostname(), str(self._path))
        plan = LoadPlan(self._planner.create_local_plan().items, ()) if shared.may_share else self._load_plan
        plan = _only(LoadItemType.TENSOR, plan)
        shared.run(plan, lambda plan: self._reader.read_parts(plan, self._planner))

    def _apply(self, match: Match) -> None:
        """Hand everything to its object; raise what load hooks then find missing and unexpected. Collective."""
        step = f"apply {self._path}"
        found: dict[str, Incompatible] = {}

        def unexpected() -> set[str]:
            return {join(name, key) for name, each in found.items() for key in each.unexpected}

        def take() -> list[str] | None:
            found.update(self._take(match))
            return sorted(unexpected()) if found else None

        def answer(asked: list[str]) -> Answer:
            return Answer.of(asked, match.stored.keys() - unexpected(), (), frozenset())

        def judge(union: Union) -> None:
            problems = [line for name, each in found.items() for line in self._judge(name, match, each, union)]
            if problems:
                raise CheckpointMismatch(misfit(self._path, problems))

        union = ask_all(self._ranks, step, take, answer)
        if union is not None:
            self._ranks.agree(step, lambda: judge(union))

    def _take(self, match: Match) -> dict[str, Incompatible]:
        """Hand everything to its object. Returns what the own code of modules finds missing and unexpected, by name."""
        found: dict[str, Incompatible] = {}
        strict = self._strict and self._partial is None
        for adapter in self._adapters:
            want = match.wanted[adapter.name]
            if want.targets or want.empty:
                filled = {k: self._targets[join(adapter.name, k)] if t is None else t for k, t in want.targets.items()}
                if self._mode is LoadMode.FILL:
                    filled |= want.lacking
                incompatible = adapter.take(filled, partial(self._read_deferred, adapter.name, match), strict)
                if incompatible is not None and incompatible != Incompatible():
                    found[adapter.name] = incompatible
        return found

    def _read_deferred(self, name: str, match: Match, tensors: dict[str, Any]) -> None:
        """Read tensors that have just got their memory, on this rank alone."""
        planner = ShardedLoadPlanner(strict=False)
        targets: dict[str, Any] = {join(name, key): sharded_value(tensor) for key, tensor in tensors.items()}
        planner.use_index(targets, self._reader.index, match.stored)
        self._reader.read_parts(planner.plan_apart(), planner)

    def _judge(self, name: str, match: Match, found: Incompatible, union: Union) -> list[str]:
        """The problems after a module's own load hooks. Keys that were not to be loaded may be missing, and a key that
        another rank has taken is not unexpected."""
        left_out = set(match.report.left_out)
        missing = [key for key in (join(name, inner) for inner in found.missing) if key not in left_out]
        unexpected = [key for key in (join(name, inner) for inner in found.unexpected) if key not in union.taken]
        match.report.missing.extend(missing)
        match.report.unexpected.extend(unexpected)
        problems = list(found.errors)
        asked = self._partial or PartialLoad()
        for keys, policy, what in ((missing, asked.missing, "missing"), (unexpected, asked.unexpected, "unexpected")):
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
