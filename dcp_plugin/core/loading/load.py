"""One load, stage by stage: open, match, plan, read the values, read the tensors, apply.

Two records of this module travel with those of :mod:`dcp_plugin.core.records`. :class:`_Begun` exists after the
checkpoint is open, and :class:`_Fitted` after match and plan. :class:`_Fitted` owns the plan until all tensors are
read, also where ranks read for each other.

A load that restarts drops all records. Each stage that can fail ends in an all-or-none collective. All checks run
before the first byte of a target is overwritten, and a single error names all misfits.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    first,
    logger,
    printable,
    some,
    warn,
)
from dcp_plugin.core.format.keys import join
from dcp_plugin.core.format.values import encode, is_plain
from dcp_plugin.core.loading import MOST_LOADED, Loaded, loaded
from dcp_plugin.core.loading.matching import LoadMode, Matching
from dcp_plugin.core.paths import Where, resolved
from dcp_plugin.core.planning.reads import ReadPlanner, decoded
from dcp_plugin.core.ranks.collectives import Attempt, Ranks, pack, said_by_ranks, unpack
from dcp_plugin.core.records import LoadReport, Match, OpenCheckpoint, ReadPlan
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.state.adapters import StateAdapter
from dcp_plugin.core.state.module import materialise
from dcp_plugin.core.state.named_objects import Place, adapters_of
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.tensors._torch import sharded_value
from dcp_plugin.core.tensors._torch_modules import Incompatible
from dcp_plugin.core.types import EncodedValue, ShardedValue

if TYPE_CHECKING:
    from dcp_plugin.core.loading.differences import Differences
    from dcp_plugin.core.partial import PartialLoad
    from dcp_plugin.core.state.across_ranks import Answer, Union


_MOST_TRIES = 20
"""Number of attempts of a load. A load restarts if the checkpoint is replaced before the ranks have opened its
files."""


@dataclass(frozen=True)
class _Request:
    """The load that one rank requests. Rank 0 compares the requests of all ranks."""

    asked_for: str
    path: str
    save: tuple[str, str]
    selection: str
    many_hosts: int
    """:attr:`~dcp_plugin.core.media.medium.ReadCost.hosts` of the files."""
    host: str
    objects: dict[str, str]
    """Name -> kind of each module and optimizer."""


@dataclass(frozen=True)
class _Begun:
    """The objects to load into, and settings that are valid once all ranks have opened the same save."""

    adapters: list[StateAdapter]
    selection: PartialLoad | None
    """The partial load, with the position of its submodule in the state; None for a load of everything."""
    least_hosts: float
    """Number of hosts that must want the same bytes before ranks share the reading."""
    objects: dict[str, str]
    """Name -> kind of the modules and optimizers of all ranks."""


@dataclass(frozen=True)
class _Fitted:
    """A load that fits the state, and its reads."""

    match: Match
    plan: ReadPlan
    targets: dict[str, Any]
    """Targets by key; each value that was read replaces a None."""


class Loading:
    """One load. :meth:`run` has its stages. Between stages, this object keeps only the request and the open files.

    Args:
        files: Files that a source has opened; None to open the files at the path.
        mode: Rule for tensors of data and Stateful objects that only the target or only the checkpoint has.
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
        self._reader = CheckpointReader(
            path,
            io_threads=config.io.threads,
            verify=config.io.verify,
            check_files=ranks.rank == 0,
            storage_options=config.storage_options,
            files=files,
        )
        self._files, self._began = files, time.monotonic()

    @property
    def opened(self) -> OpenCheckpoint:
        """The checkpoint, open or closed again."""
        return self._reader.opened

    def run(self, state: Mapping[str, Any]) -> LoadReport:
        """Load into ``state``, in place. Collective."""
        with self._reader:
            context, fitted = self._prepare(state)
            self._read_tensors(context, fitted)
            report = self._apply(context, fitted)
        self._note_loaded(context, fitted.match)
        if self._ranks.rank == 0:
            for message in fitted.match.warnings:  # at the end: warnings turned into errors must not interrupt a load
                warn(printable(message))
        return report if self._files is None else self._with_sources(report, self._files)

    def _note_loaded(self, context: _Begun, match: Match) -> None:
        """Note the checkpoint among the loaded ones."""
        fingerprint = "" if self.opened.find_fingerprint else self.opened.known_identity
        path = resolved(self.opened.path)
        part = loaded[path, fingerprint] = loaded.pop((path, fingerprint), Loaded())
        for adapter in context.adapters:
            keys = [join(adapter.name, key) for key in match.wanted[adapter.name].targets]
            if keys and adapter.kind != "optimizer":
                part.keys.update(match.stored[key] for key in keys if key in match.stored)
                part.modules.update(() if adapter.module is None else adapter.module.modules())
        for oldest in list(loaded)[:-MOST_LOADED]:
            loaded.pop(oldest, None)

    def _with_sources(self, report: LoadReport, files: SourceFiles) -> LoadReport:
        seconds = time.monotonic() - self._began
        if self._ranks.rank == 0:
            sources = ", ".join(f"{count / 2**20:,.1f} MiB from {name}" for name, count in files.bytes_from.items())
            logger.info("%s: rank 0 has read %s in %.2f s", self._path, sources or "nothing", seconds)
        return replace(report, sources=dict(files.bytes_from), passed_over=files.problems, seconds=seconds)

    def _prepare(self, state: Mapping[str, Any]) -> tuple[_Begun, _Fitted]:
        """Run all stages that precede overwriting, and open the files that this rank reads. All ranks restart if
        another process deletes or replaces the checkpoint meanwhile."""
        failure: CheckpointError | None = None
        allocated: list[str] = []
        for _ in range(_MOST_TRIES):
            try:
                context, difference = self._open_together(state)
            except CheckpointNotFound as error:
                if failure is None:
                    raise
                raise CheckpointNotFound(f"{self._path} was deleted while it was loaded: {failure}") from error
            if difference:
                failure = CheckpointMismatch(difference)
            else:
                try:
                    return context, self._fit(context, allocated)
                except CheckpointNotFound as error:  # raised on all ranks by the collective
                    failure = error
            self._reader.reset()
        assert failure is not None
        raise failure

    def _open_together(self, state: Mapping[str, Any]) -> tuple[_Begun, str]:
        """Open the checkpoint on all ranks. The second result is a message if they opened different saves; else ""."""
        adapters: list[StateAdapter] = []
        selection: PartialLoad | None = None

        def open_here() -> _Request:
            nonlocal adapters, selection
            adapters = adapters_of(state, place=Place(self._ranks.rank, self._ranks.size))
            selection = self._located(adapters)
            return self._open(selection, _objects_in(adapters))

        def compare(requests: list[_Request]) -> tuple[str, float, dict[str, str]]:
            objects = {name: kind for request in reversed(requests) for name, kind in request.objects.items()}
            return self._difference(requests), self._least_hosts(requests), objects

        difference, least, objects = self._ranks.combine(f"open {self._path}", open_here, compare)
        return _Begun(adapters, selection, least, objects), difference

    def _open(self, selection: PartialLoad | None, objects: dict[str, str]) -> _Request:
        """Open the checkpoint on this rank, and return the rank's request."""
        many_hosts = self._reader.opened.files.cost.hosts  # ``opened`` opens the checkpoint
        return _Request(
            str(self._path),
            str(self._reader.path),
            self._reader.save,
            repr(selection),
            many_hosts,
            socket.gethostname(),
            objects,
        )

    def _located(self, adapters: list[StateAdapter]) -> PartialLoad | None:
        """Return the partial load, with the position of its submodule in the state; None for a load of everything."""
        if self._partial is None:
            return None
        from dcp_plugin.core.loading.renames import locate  # most loads are of everything

        return locate(self._partial, adapters)

    def forecast(self, state: Mapping[str, Any]) -> Match:
        """Return the match of :meth:`run` for this process alone. Nothing is allocated, read or changed."""
        adapters = adapters_of(state, place=Place(self._ranks.rank, self._ranks.size))
        selection = self._located(adapters)
        with self._reader:
            objects = _objects_in(adapters)
            matching = Matching(self._path, self.opened, selection, self._strict, True, self._mode, objects)
        step = f"compare {self._path} with the state"
        union = self._ask_all(
            step, lambda: _questions(matching, adapters), lambda asked: _differences(matching).answer(asked)
        )
        _judge_keys(matching, union)
        self._planner(matching.match)
        return matching.match

    def _least_hosts(self, requests: list[_Request]) -> float:
        """Return the number of hosts that must want the same bytes before ranks share the reading."""
        if len(requests) == 1:
            return float("inf")
        from dcp_plugin.core.planning.sharing import least_hosts  # imported late, since a single rank never needs it

        hosts = len({request.host for request in requests})
        return least_hosts(self._config.io.broadcast, min(request.many_hosts for request in requests), hosts)

    @staticmethod
    def _difference(requests: list[_Request]) -> str:
        """Return a message if ranks have opened different saves, as when the path was replaced meanwhile; else "".

        Raises:
            CheckpointMismatch: Ranks request different paths or different parts.
        """
        first, difference = requests[0], ""
        for rank, other in enumerate(requests):
            if other.save != first.save:
                difference = (
                    f"rank 0 loads {first.path}, but rank {rank} loads another checkpoint, {other.path}. Decide "
                    f"on rank 0 what to load, and broadcast it."
                )
                if other.asked_for != first.asked_for:
                    raise CheckpointMismatch(difference)
            if other.selection != first.selection:
                raise CheckpointMismatch(
                    f"rank 0 loads {first.selection[:500]} of {first.path}, but rank {rank} loads "
                    f"{other.selection[:500]}. Give all ranks the same arguments."
                )
        return difference

    def _fit(self, context: _Begun, allocated: list[str]) -> _Fitted:
        """Match, plan, and read the values. All misfits are raised in one error. Collective.

        Usually no rank has a question for other ranks. The first exchange is then one small collective.

        Args:
            allocated: Keys of modules that were on the meta device. Keys that get memory in this call are added.
        """
        step = f"compare {self._path} with the state"
        opened, selection, objects = self._reader.opened, context.selection, context.objects
        matching = Matching(self._path, opened, selection, self._strict, False, self._mode, objects)

        def match() -> list[str] | None:
            for adapter in context.adapters:
                if adapter.kind == "module" and adapter.module is not None:
                    allocated.extend(join(adapter.name, key) for key in materialise(adapter.module))
            return _questions(matching, context.adapters)

        union = self._ask_all(step, match, lambda asked: _differences(matching).answer(asked))
        fitted = Attempt.of(lambda: self._judge_and_plan(context, matching, union, allocated))
        if union is not None:
            warnings_of_all = self._ranks.combine(step, lambda: fitted.get().match.warnings, said_by_ranks)
            matching.match.warnings[:] = warnings_of_all
        step = f"read the values of {self._path}"
        return self._ranks.agree(step, lambda: self._read_values(context, fitted.get()))

    def _ask_all(
        self, step: str, work: Callable[[], list[str] | None], answer: Callable[[list[str]], Answer]
    ) -> Union | None:
        """Run ``work`` on every rank, and have all ranks answer the questions of all ranks. Collective.

        Args:
            work: Returns the keys that this rank asks about, possibly none; None if the rank does not need the union.
            answer: Answers the questions of all ranks.

        Returns:
            The union, equal on every rank; None if no rank needs it.
        """
        packed = self._ranks.combine(step, lambda: _packed(work()), _joined)
        if packed is None:
            return None
        from dcp_plugin.core.state.across_ranks import Union  # most loads find equal keys

        asked = unpack(packed)
        return self._ranks.combine(step, lambda: answer(asked), lambda answers: Union.of(asked, answers))

    def _judge_and_plan(
        self, context: _Begun, matching: Matching, union: Union | None, allocated: list[str]
    ) -> _Fitted:
        """Judge the match, plan the reads, and open the files to read.

        Raises:
            CheckpointMismatch: The checkpoint does not fit the state. The message names all misfits.
        """
        match = matching.match
        _judge_keys(matching, union)
        undecided = {join(name, key) for name, want in match.wanted.items() for key in want.undecided}
        unset = [key for key in allocated if key not in match.targets.keys() | match.deferred.keys() | undecided]
        if unset:
            match.warnings.append(
                f"{self._path} does not fill {some(unset)}, which had been on the meta device: the values are what was "
                "in memory by chance. Initialise them now."
            )
        planner = self._planner(match)
        if match.problems:
            raise CheckpointMismatch(misfit(self._path, match.problems))
        plan = planner.plan()
        self._reader.pin_files(plan, [match.stored[key] for key in match.deferred])
        return _Fitted(match, plan, dict(match.targets))

    def _planner(self, match: Match) -> ReadPlanner:
        """Return the planner of the reads. Misfits that it finds are inserted before the other problems."""
        planner = ReadPlanner(match.targets, self._reader.index, match.stored)
        match.problems[:0] = first(planner.misfits)
        return planner

    def _read_values(self, context: _Begun, fitted: _Fitted) -> _Fitted:
        """Read and check the values. They are small, so a misfit stops the load before a tensor is overwritten."""
        match, notes = fitted.match, list[str]()
        data = self._reader.read(ReadPlan(values=fitted.plan.values))
        fitted.targets.update(decoded(fitted.plan, data, self._config.allow_pickle, notes))
        if notes:
            match.warnings.append(
                f"{self._path}: values came back without their class: {some(notes, separator='; ')}. "
                f"Import the modules of the classes before the load."
            )
        for adapter in context.adapters:
            targets = match.wanted[adapter.name].targets
            keys = [key for key, target in targets.items() if target is None]
            if targets:
                values = {key: fitted.targets[join(adapter.name, key)] for key in keys}
                adapter.check(values, self._strict and context.selection is None)
        return fitted

    def _read_tensors(self, context: _Begun, fitted: _Fitted) -> None:
        """Read tensors into the targets. Collective.

        With shared reading, this rank reads a part of the plan. Ranks broadcast their parts after every rank has read
        without failure.
        """
        plan = replace(fitted.plan, values={})
        if context.least_hosts == float("inf"):
            self._ranks.agree(f"read {self._path}", lambda: self._reader.read(plan))
            return
        from dcp_plugin.core.planning.sharing import BroadcastRead

        host, path = socket.gethostname(), str(self._path)
        BroadcastRead(self._ranks, context.least_hosts, host, path).run(plan, self._reader.read)

    def _apply(self, context: _Begun, fitted: _Fitted) -> LoadReport:
        """Pass the targets to their objects, and return the report. Collective.

        Most tensors are in their final memory already, and the objects only run their load hooks. Raises an error for
        keys that these report as missing or unexpected.
        """
        step, match = f"apply {self._path}", fitted.match
        incompatible: dict[str, Incompatible] = {}

        def take() -> list[str] | None:
            if self._ranks.size > 1:
                self._note_received(context, fitted)
            incompatible.update(self._take(context, fitted))
            return _unexpected(incompatible) if incompatible else None

        def answer(asked: list[str]) -> Answer:
            from dcp_plugin.core.state.across_ranks import Answer  # as in _ask_all

            return Answer.of(asked, match.stored.keys() - set(_unexpected(incompatible)), (), frozenset())

        union = self._ask_all(step, take, answer)
        if union is not None:
            self._ranks.agree(step, lambda: self._judge(context, match, incompatible, union))
        return replace(
            match.report,
            loaded=[*fitted.targets, *match.deferred],
            bytes_read=self._reader.bytes_read,
            unchecked_bytes=self._reader.unchecked_bytes,
        )

    def _note_received(self, context: _Begun, fitted: _Fitted) -> None:
        """Remember the values that this rank got although it had nothing there, now or at an earlier load.

        Another rank may hold these values.
        """
        from dcp_plugin.core.state.across_ranks import (  # a process alone shares nothing with others
            note_received,
            received,
        )

        for adapter in context.adapters:
            want = fitted.match.wanted[adapter.name]
            for key in want.targets if (want.received or received) and adapter.entry is None else ():
                full = join(adapter.name, key)
                if key in want.received or full in received:
                    value = fitted.targets.get(full)  # a deferred tensor is not read yet
                    known = EncodedValue(encode(value)) if value is not None and is_plain(value) else None
                    described = value if isinstance(value, ShardedValue) else known
                    note_received(full, described, id(adapter.live), key in want.received)

    def _take(self, context: _Begun, fitted: _Fitted) -> dict[str, Incompatible]:
        """Pass the targets to their objects. Return the missing and unexpected keys that code of modules reports, by
        name of the object."""
        incompatible: dict[str, Incompatible] = {}
        strict = self._strict and context.selection is None
        for adapter in context.adapters:
            want = fitted.match.wanted[adapter.name]
            if want.targets or want.kept or want.empty:
                filled = want.kept | {
                    key: fitted.targets[join(adapter.name, key)] if target is None else target
                    for key, target in want.targets.items()
                }
                if self._mode is LoadMode.FILL:
                    filled |= want.lacking
                # The adapter keeps this function. A reference to the adapter in it would be a cycle that keeps the
                # objects alive.
                read = functools.partial(self._read_deferred, adapter.name, fitted.match.stored)
                result = adapter.take(filled, read, strict)
                if result is not None and result != Incompatible():
                    incompatible[adapter.name] = result
        return incompatible

    def _read_deferred(self, name: str, stored: Mapping[str, str], tensors: dict[str, Any]) -> None:
        """Read tensors whose memory was allocated just now, on this rank alone."""
        targets = {join(name, key): sharded_value(tensor) for key, tensor in tensors.items()}
        self._reader.read(ReadPlanner(targets, self._reader.index, stored).plan())

    def _judge(self, context: _Begun, match: Match, incompatible: Mapping[str, Incompatible], union: Union) -> None:
        """Judge the keys that load hooks report as missing or unexpected.

        Keys that were not selected may be missing. Keys that another rank has taken are not unexpected.

        Raises:
            CheckpointMismatch: The policies make them errors.
        """
        from dcp_plugin.core.partial import PartialLoad  # most loads are of everything, and report no keys

        rules, left_out, problems = context.selection or PartialLoad(), set(match.report.left_out), list[str]()
        for name, each in incompatible.items():
            missing = [key for key in (join(name, inner) for inner in each.missing) if key not in left_out]
            unexpected = [key for key in (join(name, inner) for inner in each.unexpected) if key not in union.taken]
            match.report.missing.extend(missing)
            match.report.unexpected.extend(unexpected)
            problems += each.errors
            for keys, policy, adjective in (
                (missing, rules.missing, "missing"),
                (unexpected, rules.unexpected, "unexpected"),
            ):
                line = f"{some(keys)}: {adjective} after the load hooks of {name!r}"
                if keys and policy == "error" and self._strict:
                    problems.append(line)
                elif keys and policy == "warn":
                    match.warnings.append(f"{self._path}: {line}.")
        if problems:
            raise CheckpointMismatch(misfit(self._path, problems))


def _objects_in(adapters: list[StateAdapter]) -> dict[str, str]:
    return {adapter.name: adapter.kind for adapter in adapters if adapter.kind in ("module", "optimizer")}


def _questions(matching: Matching, adapters: list[StateAdapter]) -> list[str] | None:
    """Match this rank's objects, and return the questions to all ranks, see :meth:`Loading._ask_all`."""
    return _differences(matching).questions() if matching.run(adapters) else None


def _judge_keys(matching: Matching, union: Union | None) -> None:
    """Add the problems and warnings to a match.

    Args:
        union: The answers of all ranks to the questions of all ranks; None if no rank has asked.
    """
    if union is None:
        matching.judge_dtypes()
    else:
        _differences(matching).judge(union)


def _differences(matching: Matching) -> Differences:
    from dcp_plugin.core.loading.differences import Differences  # most loads find equal keys

    return Differences(matching)


def _packed(asked: list[str] | None) -> bytes | None:
    return None if asked is None else pack(asked)


def _joined(questions: list[bytes | None]) -> bytes | None:
    """Return the questions of all ranks without duplicates; None if no rank needs the union."""
    different = {packed for packed in questions if packed is not None}
    return pack(sorted({key for packed in different for key in unpack(packed)})) if different else None


def _unexpected(incompatible: Mapping[str, Incompatible]) -> list[str]:
    """Return the unexpected keys of all objects."""
    return sorted({join(name, key) for name, each in incompatible.items() for key in each.unexpected})


def misfit(path: Where, problems: list[str]) -> str:
    """Return a single error message for all problems; empty without problems."""
    if not problems:
        return ""
    if len(problems) == 1:
        return f"{path} does not fit the state: {problems[0]}{'' if problems[0].endswith('?') else '.'}"
    return f"{path} does not fit the state:\n  " + "\n  ".join(problems)
