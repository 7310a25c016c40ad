"""One load, stage by stage: open, match, plan, read the values, read the tensors, apply.

:mod:`dcp_plugin.core.records` has the record that each stage takes and returns. :class:`_Request` alone is here,
because no stage takes it: ranks compare their requests while they open the checkpoint.

A load that restarts drops all records. Each stage that can fail ends in an all-or-none collective. All checks run
before the first byte of a target is overwritten, and a single error names all misfits.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Mapping, Sequence
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
from dcp_plugin.core.loading import MOST_REMEMBERED, LoadedPart, loaded_parts, on_delivery
from dcp_plugin.core.loading.matching import LoadMode, Matching
from dcp_plugin.core.paths import Where, resolved
from dcp_plugin.core.planning.reads import ReadPlanner, decoded
from dcp_plugin.core.ranks.collectives import Attempt, Ranks, pack, said_by_ranks, unpack
from dcp_plugin.core.records import FittedLoad, LoadReport, Match, OpenCheckpoint, OpenedLoad, ReadPlan
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.state.adapters import OptimizerAdapter, StateAdapter
from dcp_plugin.core.state.module import materialise
from dcp_plugin.core.state.named_objects import RankAndSize, adapters_of
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
    """:attr:`~dcp_plugin.core.storage.reader.CheckpointReader.identity`."""
    selection: str
    many_hosts: int
    """:attr:`~dcp_plugin.core.media.medium.ReadCost.hosts` of the files."""
    host: str
    objects: dict[str, str]
    """Name -> kind of each module and optimizer."""


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

    def checkpoint(self) -> OpenCheckpoint:
        """Return the checkpoint. The first call on this rank opens it. After :meth:`run` its files are closed."""
        return self._reader.open()

    def run(self, state: Mapping[str, Any]) -> LoadReport:
        """Load into ``state``, in place. Collective."""
        with self._reader:
            fitted = self._prepare(state)
            with on_delivery.get()(state, fitted, self._ranks, self._reader) as note_delivered:
                self._read_tensors(fitted)
                note_delivered()
                match = self._apply(fitted)
        self._note_loaded(fitted)
        if self._ranks.rank == 0:
            for message in match.warnings:  # at the end: warnings turned into errors must not interrupt a load
                warn(printable(message))
        return match.report if self._files is None else self._with_sources(match.report, self._files)

    def _note_loaded(self, fitted: FittedLoad) -> None:
        """Note the checkpoint among the loaded ones."""
        fingerprint = "" if self.checkpoint().find_fingerprint else self.checkpoint().known_identity
        path = resolved(self.checkpoint().path)
        part = loaded_parts[path, fingerprint] = loaded_parts.pop((path, fingerprint), LoadedPart())
        for adapter in fitted.opened.adapters:
            keys = [join(adapter.name, key) for key in fitted.match.wanted[adapter.name].targets]
            if keys and adapter.kind != "optimizer":
                part.keys.update(fitted.match.stored[key] for key in keys if key in fitted.match.stored)
                part.modules.update(() if adapter.module is None else adapter.module.modules())
        for oldest in list(loaded_parts)[:-MOST_REMEMBERED]:
            loaded_parts.pop(oldest, None)

    def _with_sources(self, report: LoadReport, files: SourceFiles) -> LoadReport:
        seconds = time.monotonic() - self._began
        if self._ranks.rank == 0:
            sources = ", ".join(f"{count / 2**20:,.1f} MiB from {name}" for name, count in files.bytes_from.items())
            logger.info("%s: rank 0 has read %s in %.2f s", self._path, sources or "nothing", seconds)
        return replace(report, sources=dict(files.bytes_from), passed_over=files.problems, seconds=seconds)

    def _prepare(self, state: Mapping[str, Any]) -> FittedLoad:
        """Run all stages that precede overwriting, and open the files that this rank reads. All ranks restart if
        another process deletes or replaces the checkpoint meanwhile."""
        failure: CheckpointError | None = None
        allocated: list[str] = []
        for _ in range(_MOST_TRIES):
            try:
                opened, difference = self._open_together(state)
            except CheckpointNotFound as error:
                if failure is None:
                    raise
                raise CheckpointNotFound(f"{self._path} was deleted while it was loaded: {failure}") from error
            if difference:
                failure = CheckpointMismatch(difference)
            else:
                try:
                    return self._fit(opened, allocated)
                except CheckpointNotFound as error:  # raised on all ranks by the collective
                    failure = error
            self._reader.reset()
        assert failure is not None
        raise failure

    def _open_together(self, state: Mapping[str, Any]) -> tuple[OpenedLoad, str]:
        """Open the checkpoint on all ranks. The second result is a message if they opened different saves; else ""."""
        adapters: list[StateAdapter] = []
        selection: PartialLoad | None = None

        def open_here() -> _Request:
            nonlocal adapters, selection
            adapters = adapters_of(state, this_rank=RankAndSize(self._ranks.rank, self._ranks.size))
            if self._partial is not None:
                from dcp_plugin.core.loading.renames import locate  # most loads are of everything

                selection = locate(self._partial, adapters)
            return _Request(
                str(self._path),
                str(self.checkpoint().path),
                self._reader.identity,
                repr(selection),  # as text: its module is equal only to itself, and does not travel between ranks
                self.checkpoint().files.cost.hosts,
                socket.gethostname(),
                {adapter.name: adapter.kind for adapter in adapters if adapter.kind in ("module", "optimizer")},
            )

        def compare(requests: list[_Request]) -> tuple[str, int | None, dict[str, str]]:
            objects = {name: kind for request in reversed(requests) for name, kind in request.objects.items()}
            return self._difference(requests), self._least_hosts(requests), objects

        difference, least, objects = self._ranks.combine(f"open {self._path}", open_here, compare)
        return OpenedLoad(adapters, selection, least, objects), difference

    def forecast(self, state: Mapping[str, Any]) -> Match:
        """Return the match of :meth:`run` for this process alone. No value is read, and no object of the state changes.

        Two things happen as in :meth:`run`. FSDP2 modules reshard parameters that a forward has left gathered. An
        optimizer allocates the slots that it does not have yet. They are garbage after this call.
        """
        with self._reader:
            opened, _ = self._open_together(state)
            matching = Matching(self._path, self.checkpoint(), opened, self._strict, True, self._mode)
        step = f"compare {self._path} with the state"
        union = self._ask_all(step, lambda: _questions(matching), lambda asked: _differences(matching).answer(asked))
        return self._planned(_judged(matching, union))[0]

    def _least_hosts(self, requests: list[_Request]) -> int | None:
        """Return :attr:`~dcp_plugin.core.records.OpenedLoad.least_hosts`."""
        if len(requests) == 1:
            return None
        from dcp_plugin.core.planning.sharing import least_hosts  # imported late, since a single rank never needs it

        hosts = len({request.host for request in requests})
        return least_hosts(self._config.io.broadcast, min(request.many_hosts for request in requests), hosts)

    @staticmethod
    def _difference(requests: list[_Request]) -> str:
        """Return a message if ranks have opened different saves, as when the path was replaced meanwhile; else "".

        Raises:
            CheckpointMismatch: Ranks request different paths or different parts.
        """
        of_zero, difference = requests[0], ""
        for rank, other in enumerate(requests):
            if other.save != of_zero.save:
                difference = (
                    f"rank 0 loads {of_zero.path}, but rank {rank} loads another checkpoint, {other.path}. Decide "
                    f"on rank 0 what to load, and broadcast it."
                )
                if other.asked_for != of_zero.asked_for:
                    raise CheckpointMismatch(difference)
            if other.selection != of_zero.selection:
                raise CheckpointMismatch(
                    f"rank 0 loads {of_zero.selection[:500]} of {of_zero.path}, but rank {rank} loads "
                    f"{other.selection[:500]}. Give all ranks the same arguments."
                )
        return difference

    def _fit(self, opened: OpenedLoad, allocated: list[str]) -> FittedLoad:
        """Match, plan, and read the values. All misfits are raised in one error. Collective.

        Usually no rank has a question for other ranks. Each rank has then planned and read its values before the first
        exchange, which is the only one. A rank that failed to do so asks no question. The error has the misfits of all.

        Args:
            allocated: Keys of modules that were on the meta device. Keys that get memory in this call are added.
        """
        step = f"compare {self._path} with the state"
        matching = Matching(self._path, self.checkpoint(), opened, self._strict, False, self._mode)
        attempts: list[Attempt[FittedLoad]] = []

        def fit(union: Union | None) -> FittedLoad:
            return self._read_values(self._plan(opened, self._with_unset(_judged(matching, union), allocated)))

        def ask() -> list[str] | None:
            for adapter in opened.adapters:
                if adapter.kind == "module" and adapter.module is not None:
                    allocated.extend(join(adapter.name, key) for key in materialise(adapter.module))
            if (asked := _questions(matching)) is None:
                attempts.append(Attempt.of(lambda: fit(None)))
            return [] if attempts and attempts[0].failure else asked

        union = self._ask_all(step, ask, lambda asked: _differences(matching).answer(asked))
        fitted = attempts[0] if attempts else Attempt.of(lambda: fit(union))  # a value may be unpickled only once
        if union is None:
            return fitted.get()
        warnings = self._ranks.combine(
            f"read the values of {self._path}", lambda: [*fitted.get().match.warnings], said_by_ranks
        )
        return replace(fitted.get(), match=replace(fitted.get().match, warnings=warnings))

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
        packed = self._ranks.combine(step, lambda: None if (asked := work()) is None else pack(asked), _joined)
        if packed is None:
            return None
        from dcp_plugin.core.state.across_ranks import Union  # most loads find equal keys

        asked = unpack(packed)
        return self._ranks.combine(step, lambda: answer(asked), lambda answers: Union.of(asked, answers))

    def _with_unset(self, match: Match, allocated: list[str]) -> Match:
        """Return the match with a warning for memory allocated by this load that it does not fill."""
        undecided = {join(name, key) for name, want in match.wanted.items() for key in want.left_to_hooks}
        unset = [key for key in allocated if key not in match.targets.keys() | match.deferred.keys() | undecided]
        unset_memory = (
            f"{self._path} does not fill {some(unset)}, which had been on the meta device: the values are what was "
            "in memory by chance. Initialise them now."
        )
        return replace(match, warnings=[*match.warnings, unset_memory]) if unset else match

    def _plan(self, opened: OpenedLoad, match: Match) -> FittedLoad:
        """Plan the reads, and open the files to read.

        Raises:
            CheckpointMismatch: The checkpoint does not fit the state. The message names all misfits.
        """
        match, planner = self._planned(match)
        if match.problems:
            raise CheckpointMismatch(about_misfits(self._path, match.problems))
        plan = planner.plan()
        scaled = (self._reader.index.scaled[key].scale for key, is_applied in match.scales.items() if is_applied)
        self._reader.pin_files(plan, [*(match.stored[key] for key in match.deferred), *scaled])
        return FittedLoad(opened, match, plan, match.targets)

    def _planned(self, match: Match) -> tuple[Match, ReadPlanner]:
        """Return the planner of the reads, and the match with all misfits that the planner finds before the other
        problems."""
        if self._reader.index.scaled:
            from dcp_plugin.core.loading.quantized import judged  # only for folders of other tools

            match = judged(match, self._reader.index)
        planner = ReadPlanner(match.targets, self._reader.index, match.stored, match.scales)
        return replace(match, problems=[*first(planner.misfits), *match.problems]), planner

    def _read_values(self, fitted: FittedLoad) -> FittedLoad:
        """Read and check the values. They are small, so a misfit stops the load before a tensor is overwritten."""
        match, notes = fitted.match, list[str]()
        data = self._reader.read(ReadPlan(values=fitted.plan.values))
        targets = {**fitted.targets, **decoded(fitted.plan, data, self._config.allow_pickle, notes)}
        if notes:
            lost_classes = (
                f"{self._path}: values came back without their class: {some(notes, separator='; ')}. "
                f"Import the modules of the classes before the load."
            )
            match = replace(match, warnings=[*match.warnings, lost_classes])
        for adapter in fitted.opened.adapters:
            if wanted := match.wanted[adapter.name].targets:
                values = {key: targets[join(adapter.name, key)] for key, target in wanted.items() if target is None}
                adapter.check(values, self._raises_for_missing(fitted))
        return replace(fitted, match=match, targets=targets)

    def _raises_for_missing(self, fitted: FittedLoad) -> bool:
        """Return whether missing keys are errors for the objects themselves.

        A partial load leaves keys out on purpose. ``load_state_dict`` cannot tell these from missing keys, so it must
        accept both. The policies of the partial load judge the missing keys.
        """
        return self._strict and fitted.opened.selection is None

    def _read_tensors(self, fitted: FittedLoad) -> None:
        """Read tensors into the targets. Collective.

        With shared reading, this rank reads a part of the plan. Ranks broadcast their parts after every rank has read
        without failure.
        """
        plan = replace(fitted.plan, values={})
        if fitted.opened.least_hosts is None:
            self._ranks.agree(f"read {self._path}", lambda: self._reader.read(plan))
            return
        from dcp_plugin.core.planning.sharing import BroadcastRead

        host, path = socket.gethostname(), str(self._path)
        BroadcastRead(self._ranks, fitted.opened.least_hosts, host, path).run(plan, self._reader.read)

    def _apply(self, fitted: FittedLoad) -> Match:
        """Pass the targets to their objects, and return the match with the final report and warnings. Collective.

        Most tensors are in their final memory already, and the objects only run their load hooks. Raises an error for
        keys that these report as missing or unexpected.
        """
        step, match = f"apply {self._path}", fitted.match
        incompatible: dict[str, Incompatible] = {}

        def hand_over() -> list[str] | None:
            if self._ranks.size > 1:
                self._note_received(fitted)
            incompatible.update(self._hand_over(fitted))
            return _unexpected(incompatible) if incompatible else None

        def answer(asked: list[str]) -> Answer:
            from dcp_plugin.core.state.across_ranks import Answer  # as in _ask_all

            return Answer.of(asked, match.stored.keys() - set(_unexpected(incompatible)), (), frozenset())

        union = self._ask_all(step, hand_over, answer)
        if union is not None:
            match = self._ranks.agree(step, lambda: self._judge_hooks(fitted, incompatible, union))
        return replace(
            match,
            report=replace(
                match.report,
                loaded=[*fitted.targets, *match.deferred],
                bytes_read=self._reader.bytes_read,
                unchecked_bytes=self._reader.unchecked_bytes,
            ),
        )

    def _note_received(self, fitted: FittedLoad) -> None:
        """Remember the state of optimizers, and values that fill places that were empty on this rank, now or at an
        earlier load.

        Another rank may hold the same value and change it. The next save then prefers the value of that rank
        (:class:`~dcp_plugin.core.types.Standing`).
        """
        from dcp_plugin.core.state.across_ranks import (  # a process alone shares nothing with others
            note_received,
            note_slots,
            received,
        )

        for adapter in fitted.opened.adapters:
            want = fitted.match.wanted[adapter.name]
            if isinstance(adapter, OptimizerAdapter):
                slots = {
                    key: fitted.targets[join(adapter.name, key)] if target is None else sharded_value(target)
                    for key, target in want.targets.items()
                    if key.startswith("state.")
                }
                note_slots(adapter.optimizer, slots)
            for key in want.targets if (want.received or received) and adapter.entry is None else ():
                full = join(adapter.name, key)
                if key in want.received or full in received:
                    value = fitted.targets.get(full)  # a deferred tensor is not read yet
                    known = EncodedValue(encode(value)) if value is not None and is_plain(value) else None
                    described = value if isinstance(value, ShardedValue) else known
                    note_received(full, described, id(adapter.live), key in want.received)

    def _hand_over(self, fitted: FittedLoad) -> dict[str, Incompatible]:
        """Pass the targets to their objects. Return the missing and unexpected keys that code of modules reports, by
        name of the object."""
        incompatible: dict[str, Incompatible] = {}
        for adapter in fitted.opened.adapters:
            want = fitted.match.wanted[adapter.name]
            if want.targets or want.kept_frozen or want.saved_empty:
                filled = want.kept_frozen | {
                    key: fitted.targets[join(adapter.name, key)] if target is None else target
                    for key, target in want.targets.items()
                }
                if self._mode is LoadMode.FILL:
                    filled |= want.missing_tensors
                # The adapter keeps this function. A reference to the adapter in it would be a cycle that keeps the
                # objects alive.
                read = functools.partial(self._read_deferred, adapter.name, fitted.match.stored, fitted.match.scales)
                result = adapter.take(filled, read, self._raises_for_missing(fitted))
                if result is not None and result != Incompatible():
                    incompatible[adapter.name] = result
        return incompatible

    def _read_deferred(
        self, name: str, stored: Mapping[str, str], scales: Mapping[str, bool], tensors: dict[str, Any]
    ) -> None:
        """Read tensors whose memory was allocated just now, on this rank alone."""
        targets = {join(name, key): sharded_value(tensor) for key, tensor in tensors.items()}
        self._reader.read(ReadPlanner(targets, self._reader.index, stored, scales).plan())

    def _judge_hooks(self, fitted: FittedLoad, incompatible: Mapping[str, Incompatible], union: Union) -> Match:
        """Judge the keys that load hooks report as missing or unexpected, and add them to the report.

        Keys that were not selected may be missing. Keys that another rank has taken are not unexpected.

        Raises:
            CheckpointMismatch: The policies make them errors.
        """
        from dcp_plugin.core.partial import PartialLoad  # most loads are of everything, and report no keys

        match, rules = fitted.match, fitted.opened.selection or PartialLoad()
        report, left_out = match.report, set(match.report.left_out)
        warnings, problems = [*match.warnings], list[str]()
        for name, each in incompatible.items():
            missing = [key for key in (join(name, inner) for inner in each.missing) if key not in left_out]
            unexpected = [key for key in (join(name, inner) for inner in each.unexpected) if key not in union.taken]
            report = replace(report, missing=[*report.missing, *missing], unexpected=[*report.unexpected, *unexpected])
            problems += each.errors
            for keys, policy, adjective in (
                (missing, rules.missing, "missing"),
                (unexpected, rules.unexpected, "unexpected"),
            ):
                line = f"{some(keys)}: {adjective} after the load hooks of {name!r}"
                if keys and policy == "error" and self._strict:
                    problems.append(line)
                elif keys and policy == "warn":
                    warnings.append(f"{self._path}: {line}.")
        if problems:
            raise CheckpointMismatch(about_misfits(self._path, problems))
        return replace(match, report=report, warnings=warnings)


def _questions(matching: Matching) -> list[str] | None:
    """Match this rank's objects, and return the questions to all ranks, see :meth:`Loading._ask_all`."""
    return _differences(matching).questions() if matching.run() else None


def _judged(matching: Matching, union: Union | None) -> Match:
    """Judge all keys, and return the match with its problems and warnings.

    Args:
        union: The answers of all ranks to the questions of all ranks; None if no rank has asked.
    """
    if union is None:
        matching.judge_dtypes()
    else:
        _differences(matching).judge(union)
    return matching.result()


def _differences(matching: Matching) -> Differences:
    from dcp_plugin.core.loading.differences import Differences  # most loads find equal keys

    return Differences(matching)


def _joined(questions: list[bytes | None]) -> bytes | None:
    """Return the questions of all ranks without duplicates; None if no rank needs the union."""
    different = {packed for packed in questions if packed is not None}
    return pack(sorted({key for packed in different for key in unpack(packed)})) if different else None


def _unexpected(incompatible: Mapping[str, Incompatible]) -> list[str]:
    """Return the unexpected keys of all objects."""
    return sorted({join(name, key) for name, each in incompatible.items() for key in each.unexpected})


def about_misfits(path: Where, problems: Sequence[str]) -> str:
    """Return a single error message for all problems; empty without problems."""
    if not problems:
        return ""
    if len(problems) == 1:
        return f"{path} does not fit the state: {problems[0]}{'' if problems[0].endswith('?') else '.'}"
    return f"{path} does not fit the state:\n  " + "\n  ".join(problems)
