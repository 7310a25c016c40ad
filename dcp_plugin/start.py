"""Start of a run: from its own newest checkpoint, else with the weights of a pre-trained model, else from scratch.

Rank 0 searches and decides for all ranks. If each rank searched, ranks could see different files on a shared file
system: one would resume, and another would start from scratch.

The rule: the ranks carry out the decision or raise. A run never starts from another source because its checkpoints
cannot be loaded. If the load finds that the newest checkpoint is damaged, ``"auto"`` quarantines it
(:mod:`~dcp_plugin.core.runs.damage`) and loads the checkpoint before it, on all ranks.

A resumed run takes everything from its checkpoint. If that leaves out parameters of the source of the warm start
(``trainable_only``), the source is loaded first, and the checkpoint over it. A warm start takes only the model:
optimizer, schedules, counters and random streams are new.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from dcp_plugin import core
from dcp_plugin.checkpointer import Checkpointer, Internals
from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMismatch,
    CheckpointNotFound,
    as_html,
    logger,
    some,
)
from dcp_plugin.core.media import locate, medium_of, refuse_real_run, uncommitted_reason
from dcp_plugin.core.partial import PartialLoad
from dcp_plugin.core.paths import PathLike, StorageOptions, Where, as_path, public, resolved
from dcp_plugin.core.ranks.collectives import Call, Ranks, refuse_differences, together
from dcp_plugin.core.records import LoadReport
from dcp_plugin.core.runs import damage, hydra_jobs
from dcp_plugin.core.runs.catalog import find_newest, sibling_parts, was_published
from dcp_plugin.core.runs.foreign import RESUMABLE
from dcp_plugin.core.runs.launches import refuse_other_ranks
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.state.names import is_list_of
from dcp_plugin.core.storage.published import read_summary, summary_if_readable
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.types import CheckpointState, public_class


@public_class()
@dataclass(frozen=True)
class Start:
    """Start of a run. ``str()`` returns one line for the log."""

    how: Literal["resumed", "warm-started", "fresh"]
    path: Where | None = None
    """The run's own checkpoint, or the source of its warm start."""
    step: int | None = None
    """The step of the run's own checkpoint; None if the checkpoint has none."""
    report: LoadReport | None = None
    """Report of the load; None if a framework has loaded a file of its own."""
    damaged: tuple[Where, ...] = ()
    """Newer checkpoints of the run that were damaged, and are quarantined."""

    _repr_html_ = as_html

    def __str__(self) -> str:
        if self.how == "fresh":
            return "starts fresh: nothing to resume from, and no init_from"
        at = "" if self.step is None else f" at step {self.step}"
        line = f"{self.how}{at}: {self.report}" if self.report is not None else f"{self.how} from {self.path}{at}"
        return f"{line}; DAMAGED and quarantined: {', '.join(map(str, self.damaged))}" if self.damaged else line


def begin_check(ranks: Ranks, mode: Any, expect_changed: Sequence[str] = ()) -> Any:
    """Return the comparison of one resume, a ``ResumeCheck``; None if ``mode`` is False. Collective.

    Raises:
        CheckpointMismatch: Ranks have different modes. A rank that compares would wait for a rank that does not.
        ValueError: ``mode`` is none of ``"auto"``, ``"error"`` and False.
    """
    ranks.combine("compare the configurations", lambda: {"verify_resume": mode}, refuse_differences)
    return None if mode is False or core.resume_check is None else core.resume_check().ResumeCheck(mode, expect_changed)


def watching(check: Any) -> AbstractContextManager[None]:
    """Return a block whose loads ``check`` compares; without a check, a block without effect."""
    return nullcontext() if check is None else check.watching()


@dataclass(frozen=True)
class StartOptions:
    """Options of a user for the start of a run, see :func:`dcp_plugin.resume_or_init`.

    Raises:
        ValueError: ``partial`` is given without ``init_from``, and would have no effect.
    """

    resume: str | PathLike = "auto"
    init_from: PathLike | None = None
    partial: PartialLoad | None = None
    strict: bool = True
    storage_options: StorageOptions | None = field(default=None, repr=False)
    local: tuple[CheckpointState, ...] = ()
    """Saves that can be loaded although their paths do not exist, see
    :meth:`dcp_plugin.checkpointer.Internals.surviving`."""

    def __post_init__(self) -> None:
        if self.partial is not None and self.init_from is None:
            raise ValueError(
                "partial says what is taken from init_from, which is not given: name the pre-trained checkpoint as "
                "init_from=PATH, or take partial out. A resumed run takes everything from its own checkpoint."
            )

    def with_local(self, checkpointer: Checkpointer, root: PathLike) -> StartOptions:
        """Return the options with the saves at or below ``root`` that only the nodes have. Collective."""
        return self if self.resume == "never" else replace(self, local=Internals(checkpointer).surviving(root))

    def find(self, root: PathLike, tools: Collection[str] = RESUMABLE, without: Collection[Where] = ()) -> Where | None:
        """Return the run's own checkpoint to resume from, see :func:`resolve_resume`.

        A checkpoint of another tool at ``init_from`` is the source of a warm start, not a checkpoint of the run.

        Args:
            tools: Other tools whose checkpoints the integration can resume from.
            without: Checkpoints to ignore, because they are damaged.
        """
        root_path = as_path(root, self.storage_options)
        refuse_real_run(root_path, medium_of(root_path))  # before the notes of a job of Hydra
        hydra_jobs.refuse_other_jobs(root_path, self.resume)
        checkpoint = self._find(root, tools, without)
        hydra_jobs.compare(root_path, self.resume, checkpoint)
        return checkpoint

    def _find(self, root: PathLike, tools: Collection[str], without: Collection[Where]) -> Where | None:
        if self.resume == "never":
            return None
        if self.resume in ("auto", "must"):
            root_path = as_path(root, self.storage_options)
            newest = find_newest(root_path, tools, self.init_from, without, self.local)
            if newest.path is None and self.resume == "must":
                reasons = f" Passed over: {newest.reasons()}." if newest.reasons() else ""
                raise CheckpointNotFound(f"resume=must, but there is no committed checkpoint below {root}.{reasons}")
            # With init_from a run may begin in a directory with checkpoints of other tools.
            candidates = [
                state for state in newest.passed_over if self.init_from is None or isinstance(state, CheckpointState)
            ]
            if newest.path is None and any(map(was_published, candidates)):
                raise CheckpointCorrupt(
                    f"there are checkpoints below {root}, but none that can be loaded: {newest.reasons()}. To start "
                    "without them, say resume=never; to start with the weights of one, name it as init_from, too."
                )
            newest.warn(root)
            return newest.path
        path = as_path(self.resume, self.storage_options)
        if any(state.path == path or state.path == resolved(path) for state in self.local):
            return path
        path = locate(path)
        kind = medium_of(path).kind(path)
        if reason := uncommitted_reason(path) if kind == "folder" else "":
            raise CheckpointIncomplete(f"cannot resume from {path}: {reason}. Try resume=auto.")
        if not kind:
            raise CheckpointNotFound(f"cannot resume from {path}: it does not exist. Try resume=auto.")
        return path

    def start(
        self,
        checkpointer: Checkpointer,
        modules: Mapping[str, Any],
        find: Callable[[Collection[Where]], Where | None] = lambda damaged: None,
        resume: Callable[[Where], LoadReport | None] = lambda path: None,
    ) -> Start:
        """Resume, or load the weights of ``init_from``, or neither. Collective.

        Args:
            modules: The targets of the load of ``init_from``.
            find: Returns the checkpoint of this run to resume from, or None. Called on rank 0, with the damaged
                checkpoints, which it must not return.
            resume: Loads a checkpoint of this run. Called on every rank.

        Raises:
            CheckpointNotFound: The run has no checkpoint, and the path ``init_from`` does not exist.
            CheckpointCorrupt: Every checkpoint of this run is damaged. Or a checkpoint that ``"auto"`` did not choose
                is damaged.
            CheckpointError: An error of ``find``, ``resume`` or the load of ``init_from``; on every rank.
        """
        damaged: list[Where] = []
        while True:
            with together(Call("resume", "looks for a checkpoint to resume from", ["resume"])):
                start = Internals(checkpointer).ranks.from_zero(
                    "decide what to start from", lambda: self._decide(find, damaged)
                )
            if start.path is None:
                return start
            if start.how != "resumed":
                return replace(start, report=checkpointer.load(modules, start.path, self.partial, self.strict))
            # Outside of the try block: if init_from is damaged, this checkpoint must not be quarantined.
            if self.init_from is not None:
                with Internals(checkpointer).shown(start.path) as files:
                    self.load_before(checkpointer, modules, start.path, files)
            try:
                report = resume(start.path)
            except CheckpointCorrupt as error:
                if self.resume != "auto" or not self._set_aside(checkpointer, start.path, error):
                    raise
                damaged.append(start.path)
                continue
            _refuse_a_mixture(start, report, damaged)
            return replace(start, report=report, damaged=tuple(damaged))

    def load_before(
        self, checkpointer: Checkpointer, modules: Mapping[str, Any], path: Where, files: SourceFiles | None
    ) -> None:
        """Load ``init_from`` if the checkpoint to resume from leaves out parameters. Collective.

        Args:
            files: The files of the checkpoint, see :meth:`Internals.shown`.
        """
        if (init_from := self.init_from) is None:
            return

        def find() -> Where | None:
            left_out: Collection[str] = ()
            with suppress(CheckpointError, OSError), CheckpointReader(path, check_files=False, files=files) as reader:
                left_out = reader.index.left_out  # the load raises the error of a checkpoint that cannot be read
            return self._source(init_from) if left_out else None

        source = Internals(checkpointer).ranks.from_zero(f"look at {path}", find)
        if source is not None:
            checkpointer.load(modules, source, self.partial, self.strict)

    def _source(self, init_from: PathLike) -> Where:
        source = locate(as_path(init_from, self.storage_options))
        if not medium_of(source).kind(source):
            raise CheckpointNotFound(
                f"nothing is at init_from={init_from}, and this run has no complete checkpoint of its own to "
                "resume from. Give the path of a checkpoint, or no init_from to start from scratch."
            )
        return source

    @staticmethod
    def _set_aside(checkpointer: Checkpointer, path: Where, error: CheckpointCorrupt) -> bool:
        if Internals(checkpointer).set_local_aside(path):
            return True
        return Internals(checkpointer).ranks.from_zero(f"set {path} aside", lambda: damage.set_aside(path, error))

    def _decide(self, find: Callable[[Collection[Where]], Where | None], damaged: list[Where]) -> Start:
        own = find(damaged)
        if own is None and damaged:
            raise CheckpointCorrupt(
                f"no checkpoint of this run can be loaded: {', '.join(map(str, damaged))} turned out to be damaged, "
                f"and there is no other. What was loaded into is half filled. To start without them, say resume=never."
            )
        if own is not None:
            if (local := next((state for state in self.local if state.path == own), None)) is not None:
                return Start("resumed", own, local.step)
            summary = summary_if_readable(own)  # None if it was damaged after the search: the load raises the error
            return Start("resumed", own, summary.step if summary is not None else None)
        if self.init_from is None:
            return Start("fresh")
        return Start("warm-started", self._source(self.init_from))


def _refuse_a_mixture(start: Start, report: LoadReport | None, damaged: list[Where]) -> None:
    """Refuse a resume after which the state may have values of a damaged checkpoint that was loaded in part."""
    if damaged and report is not None and report.missing:
        raise CheckpointCorrupt(
            f"{damaged[-1]} turned out to be damaged while it was loaded, and {start.path}, which is older, has no "
            f"{some(report.missing)}, where values of the damaged one may be left. The next start begins with the "
            f"older one alone."
        )


def resolve_resume(
    resume: str | PathLike, root: PathLike, storage_options: StorageOptions | None = None
) -> Path | str | None:
    """Return the checkpoint to resume from.

    Args:
        resume: ``"never"``: start from scratch. ``"auto"``: resume from the newest committed checkpoint below ``root``,
            if one exists. ``"must"``: the same, but raise if none exists. Any other value: the path of a checkpoint.
        root: The directory of the run's checkpoints, see :func:`~dcp_plugin.latest`.
        storage_options: Access to the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.

    Returns:
        The path of a checkpoint, or its URL as a ``str``; None for a run that starts from scratch.

    Raises:
        CheckpointNotFound: ``"must"`` and no checkpoint exists, or the path does not exist.
        CheckpointIncomplete: The path is a torn checkpoint.
        CheckpointUnreadable: ``"auto"`` or ``"must"``, and ``root`` cannot be read. Or an entry below it cannot be
            read, and no complete checkpoint is in the same directory as that entry or above it. Or another version of
            this package has saved the newest checkpoint in a format that this one does not read.
        CheckpointCorrupt: ``"auto"``, and every checkpoint of this run is damaged, or only another tool can load it. An
            interrupted save is not damage: a run that never completed a save starts from scratch.
        CheckpointMismatch: ``"auto"`` or ``"must"`` in a job of a Hydra sweep, and ``root`` has the checkpoints of
            another job.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.save({"step": 1}, "run/step-1")
        >>> dcp_plugin.resolve_resume("auto", "run").name
        'step-1'
        >>> dcp_plugin.resolve_resume("never", "run")
    """
    checkpoint = StartOptions(resume, storage_options=storage_options).find(root)
    if resume == "auto" and checkpoint is not None:
        damage.note_chosen(checkpoint, by_framework=False)
    return public(checkpoint)


def modules_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the modules of a state by name, nested as in the state."""
    modules: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module) or is_list_of(value, nn.Module):
            modules[name] = value
        elif isinstance(value, Mapping) and (inner := modules_of(value)):
            modules[name] = inner
    return modules


def resume_or_init(
    state: Mapping[str, Any],
    root: PathLike,
    *,
    resume: str | PathLike = "auto",
    init_from: PathLike | None = None,
    partial: PartialLoad | None = None,
    strict: bool = True,
    checkpointer: Checkpointer | None = None,
    config: CheckpointConfig | None = None,
    verify_resume: Literal["auto", "error", False] = "auto",
    expect_changed: Sequence[str] = (),
    **overrides: Any,
) -> Start:
    """Load the run's newest checkpoint into ``state``, or else the pre-trained weights ``init_from``. Collective.

    A resume gives mappings, lists and ``Stateful`` objects the tensors that they had at the save, of any shape and
    number. A warning names the tensors that the target has and the checkpoint lacks.

    Args:
        state: The state to fill, see :meth:`Checkpointer.load`. A resume loads all of it, a warm start only its
            modules.
        root: Directory of this run's checkpoints; it need not exist yet. Only rank 0 reads it.
        resume: ``"auto"``, ``"must"``, ``"never"`` or the path of a checkpoint, see :func:`~dcp_plugin.resolve_resume`.
            If the newest checkpoint proves to be damaged during the load, ``"auto"`` quarantines it and loads the
            checkpoint before it; ``"must"`` and a path raise.
        init_from: A checkpoint with the model's weights, used if the run has no checkpoint. Give it at each start. If
            the run's checkpoint leaves out frozen parameters (``trainable_only``), ``init_from`` is loaded first, and
            the run's checkpoint over it.
        partial: Rules for the modules' keys that ``init_from`` fills; all keys by default.
        strict: If true, keys that do not fit are errors.
        checkpointer: The checkpointer that saves, whose settings and process group the load uses. Without it, a
            temporary checkpointer is made from ``config`` and ``overrides``.
        verify_resume: Compare the state at the end of a resume with what was loaded. ``"auto"`` warns of a difference,
            ``"error"`` raises it on all ranks, False compares nothing. See :func:`~dcp_plugin.verify_resume`.
        expect_changed: Globs of keys, or of their last segments, that differ on purpose, such as ``"lr"``.

    Returns:
        The start of the run: ``"resumed"``, ``"warm-started"`` or ``"fresh"``, the source, and the report of the load.

    Raises:
        ValueError: ``partial`` is given without ``init_from``, or a checkpointer together with settings.
        CheckpointNotFound: ``resume="must"`` and the run has no checkpoint. Or ``init_from`` is needed and does not
            exist.
        CheckpointError: The chosen checkpoint cannot be loaded; raised on every rank. The only case in which another
            checkpoint is tried is ``"auto"`` with a damaged newest checkpoint.
        RankFailure: A rank died, or did not answer within the timeout.

    Example:
        >>> import torch, dcp_plugin
        >>> state = {"model": torch.nn.Linear(2, 2), "step": 0}
        >>> dcp_plugin.resume_or_init(state, "run").how
        'fresh'
        >>> dcp_plugin.save(state, "run/step-1", step=1)
        >>> str(dcp_plugin.resume_or_init(state, "run"))  # doctest: +ELLIPSIS
        'resumed at step 1: loaded 3 items from ...run/step-1'
    """
    options = StartOptions(resume, init_from, partial, strict)  # first, since it checks the arguments
    if checkpointer is not None and (config is not None or overrides):
        raise ValueError("give either a checkpointer or settings: a checkpointer has its own settings.")
    besides = ("resume", "init_from", "partial", "strict", "checkpointer", "verify_resume", "expect_changed")
    used = checkpointer or Checkpointer(CheckpointConfig.merge(config, besides, **overrides))
    try:
        options = replace(options, storage_options=used.config.storage_options).with_local(used, root)

        def find(damaged: Collection[Where]) -> Where | None:
            if resume != "never" and (launch := Internals(used).ranks.launch) is not None:
                refuse_other_ranks(as_path(root, used.config.storage_options), launch)
            return options.find(root, without=damaged)

        def load(path: Where) -> LoadReport:
            check = begin_check(Internals(used).ranks, verify_resume, expect_changed)
            with watching(check):
                report = _resume(used, state, path, strict)
            return report if check is None else check.finish(Internals(used).ranks, report)

        return options.start(used, modules_of(state), find, load)
    finally:
        if checkpointer is None:
            used.close()


_OF_RANDOM_NUMBERS = re.compile(r"rng|random|\.streams\.", re.I)
"""Pattern of keys of random numbers, which :class:`~dcp_plugin.RandomStreams` or the user has stored."""


@functools.cache
def _warn_of_new_random_numbers() -> None:
    """Log once that a resumed run draws other random numbers than a run without interruption."""
    logger.warning(
        "random numbers start anew: this resume has loaded none. To continue them, have "
        '"rng": dcp_plugin.RandomStreams() in the state that you save and resume.'
    )


def _resume(checkpointer: Checkpointer, state: Mapping[str, Any], path: Where, strict: bool) -> LoadReport:
    try:
        report = Internals(checkpointer).restore(state, path, strict=strict)
        if not any(map(_OF_RANDOM_NUMBERS.search, report.loaded)) and Internals(checkpointer).ranks.rank == 0:
            _warn_of_new_random_numbers()
        return report
    except CheckpointMismatch as error:
        if len(parts := sibling_parts(path)) > 1:
            error.add_note(
                f"{path} is one of {len(parts)} parts of {path.parent}, each a checkpoint of its own: "
                f"{', '.join(part.name for part in parts)}. Load each into what it was saved from: "
                + ", ".join(f"dcp_plugin.load({{...}}, {str(part)!r})" for part in parts)
                + "."
            )
        elif medium_of(path).kind(path) == "file" or read_summary(path) is None:
            error.add_note(
                f"Another tool has saved {path}. What only that tool restores, such as an optimizer whose "
                "parameters have numbers, is resumed there. To take the weights alone: "
                "resume_or_init(..., resume='never', init_from=PATH)."
            )
        raise
