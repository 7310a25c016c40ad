"""How a run starts: from its own newest checkpoint, else with the weights of a pre-trained model, else from scratch.

Rank 0 looks, and all ranks do what it found: ranks that looked for themselves could see different things on a shared
file system, and one would resume where the other starts anew. What was decided is done or raised: a run whose
checkpoints cannot be loaded never starts from something else. If the newest turns out to be damaged while it is loaded,
``"auto"`` sets it aside (:mod:`~dcp_plugin.runs.damage`) and goes on with the one before, on all ranks.

A resumed run takes everything from its checkpoint; what it was once warm-started from is not looked at, and need not
exist any more. A warm start takes the model only: optimizer, schedules, counters and random streams are a new run's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import nn

from dcp_plugin.calls import Call, together
from dcp_plugin.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointNotFound, some
from dcp_plugin.media import locate, medium_of
from dcp_plugin.media.packed import uncommitted_reason
from dcp_plugin.partial import PartialLoad
from dcp_plugin.paths import PathLike, StorageOptions, Where, as_path, public, resolved
from dcp_plugin.records import LoadReport
from dcp_plugin.runs import damage, hydra_jobs
from dcp_plugin.runs.catalog import find_newest, was_published
from dcp_plugin.runs.foreign import RESUMABLE
from dcp_plugin.storage.published import read_summary
from dcp_plugin.types import CheckpointState

if TYPE_CHECKING:
    from dcp_plugin.ranks import Ranks


@dataclass(frozen=True)
class Restart:
    """How a run has started. ``str()`` of it is one line for the log."""

    how: Literal["resumed", "warm-started", "fresh"]
    path: Where | None = None
    """The run's own checkpoint, or what it was warm-started from."""
    step: int | None = None
    """The step at which the run's own checkpoint was made, if that says."""
    report: LoadReport | None = None
    """What was loaded from there; None if a framework has loaded a file of its own."""
    damaged: tuple[Where, ...] = ()
    """Newer checkpoints of the run that turned out to be damaged while they were loaded, and are set aside."""

    def __str__(self) -> str:
        if self.how == "fresh":
            return "starts fresh: nothing to resume from, and no init_from"
        at = "" if self.step is None else f" at step {self.step}"
        said = f"{self.how}{at}: {self.report}" if self.report is not None else f"{self.how} from {self.path}{at}"
        return f"{said}; DAMAGED and set aside: {', '.join(map(str, self.damaged))}" if self.damaged else said


class Loader(Protocol):
    """What a start needs of a :class:`~dcp_plugin.Checkpointer`."""

    @property
    def ranks(self) -> Ranks: ...

    def load(
        self, state: Mapping[str, Any], path: PathLike, partial: PartialLoad | None = None, strict: bool = True
    ) -> LoadReport: ...

    def set_local_aside(self, path: Where) -> bool: ...


@dataclass(frozen=True)
class StartOptions:
    """What a user says about the start of a run, see :func:`dcp_plugin.resume_or_init`.

    Raises:
        ValueError: A ``partial`` without ``init_from``, which nothing would heed: a resume takes all of its checkpoint.
    """

    resume: str | PathLike = "auto"
    init_from: PathLike | None = None
    partial: PartialLoad | None = None
    strict: bool = True
    storage_options: StorageOptions | None = field(default=None, repr=False)
    local: tuple[CheckpointState, ...] = ()
    """What can be loaded although nothing is at its path, see :meth:`dcp_plugin.Checkpointer.surviving`."""

    def __post_init__(self) -> None:
        if self.partial is not None and self.init_from is None:
            raise ValueError(
                "partial says what is taken from init_from, which is not given: name the pre-trained checkpoint as "
                "init_from=PATH, or take partial out. A resumed run takes everything from its own checkpoint."
            )

    def find(self, root: PathLike, tools: Collection[str] = RESUMABLE, without: Collection[Where] = ()) -> Where | None:
        """The run's own checkpoint to resume from, see :func:`resolve_resume`.

        What another tool saved at ``init_from`` is what the run was warm-started from, and no checkpoint of its own.

        Args:
            tools: Whose checkpoints the integration resumes from, besides those of this package.
            without: What has turned out to be damaged.
        """
        hydra_jobs.keep_apart(root, self.resume, self.storage_options)
        found = self._find(root, tools, without)
        hydra_jobs.compare(root, self.resume, found, self.storage_options)
        return found

    def _find(self, root: PathLike, tools: Collection[str], without: Collection[Where]) -> Where | None:
        if self.resume == "never":
            return None
        if self.resume in ("auto", "must"):
            where = as_path(root, self.storage_options)
            found = find_newest(where, tools, self.init_from, without, self.local)
            if found.path is None and self.resume == "must":
                reasons = f" Passed over: {found.reasons()}." if found.reasons() else ""
                raise CheckpointNotFound(f"resume=must, but there is no committed checkpoint below {root}.{reasons}")
            # Beside what other tools have saved, a run may still begin with the weights of init_from.
            lost = [one for one in found.passed_over if self.init_from is None or isinstance(one, CheckpointState)]
            if found.path is None and any(map(was_published, lost)):
                raise CheckpointCorrupt(
                    f"there are checkpoints below {root}, but none that can be loaded: {found.reasons()}. To start "
                    "without them, say resume=never; to start with the weights of one, name it as init_from, too."
                )
            found.warn(root)
            return found.path
        path = as_path(self.resume, self.storage_options)
        if any(one.path == path or one.path == resolved(path) for one in self.local):
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
        loader: Loader,
        modules: Mapping[str, Any],
        find: Callable[[Collection[Where]], Where | None] = lambda damaged: None,
        resume: Callable[[Where], LoadReport | None] = lambda path: None,
    ) -> Restart:
        """Resume, or load the weights of ``init_from``, or neither. Collective.

        Args:
            modules: What ``init_from`` is loaded into.
            find: Finds the checkpoint of this run to resume from, or None if there is none; not among those that it is
                given, which are damaged. Called on rank 0.
            resume: Loads that checkpoint. Called on every rank.

        Raises:
            CheckpointNotFound: There is nothing to resume from, and nothing at ``init_from`` either.
            CheckpointCorrupt: All that this run has saved is damaged; or what there is, if it was not ``"auto"`` that
                has chosen it.
            CheckpointError: What ``find``, ``resume`` or the load of ``init_from`` raises; on every rank.
        """
        damaged: list[Where] = []
        while True:
            with together(Call("resume", "looks for a checkpoint to resume from", ["resume"])):
                begun = loader.ranks.from_zero("decide what to start from", lambda: self._decide(find, damaged))
            if begun.path is None:
                return begun
            if begun.how != "resumed":
                return replace(begun, report=loader.load(modules, begun.path, self.partial, self.strict))
            try:
                report = resume(begun.path)
            except CheckpointCorrupt as error:
                if self.resume != "auto" or not self._set_aside(loader, begun.path, error):
                    raise
                damaged.append(begun.path)
                continue
            _refuse_a_mixture(begun, report, damaged)
            return replace(begun, report=report, damaged=tuple(damaged))

    @staticmethod
    def _set_aside(loader: Loader, path: Where, error: CheckpointCorrupt) -> bool:
        if loader.set_local_aside(path):
            return True
        return loader.ranks.from_zero(f"set {path} aside", lambda: damage.set_aside(path, error))

    def _decide(self, find: Callable[[Collection[Where]], Where | None], damaged: list[Where]) -> Restart:
        own = find(damaged)
        if own is None and damaged:
            raise CheckpointCorrupt(_all_damaged(damaged))
        if own is not None:
            if (local := next((one for one in self.local if one.path == own), None)) is not None:
                return Restart("resumed", own, local.step)
            summary = None
            with suppress(CheckpointCorrupt):  # damaged since it was found: the load will say so
                summary = read_summary(own)
            return Restart("resumed", own, summary.step if summary is not None else None)
        if self.init_from is None:
            return Restart("fresh")
        source = locate(as_path(self.init_from, self.storage_options))
        if not medium_of(source).kind(source):
            raise CheckpointNotFound(
                f"nothing is at init_from={self.init_from}, and this run has no checkpoint of its own to resume from. "
                "Give the path of a checkpoint, or no init_from to start from scratch."
            )
        return Restart("warm-started", source)


def _all_damaged(damaged: list[Where]) -> str:
    return (
        f"no checkpoint of this run can be loaded: {', '.join(map(str, damaged))} turned out to be damaged, and there "
        f"is no other. What was loaded into is half filled. To start without them, say resume=never."
    )


def _refuse_a_mixture(begun: Restart, report: LoadReport | None, damaged: list[Where]) -> None:
    """What a damaged checkpoint had half filled is filled again, if the one before has it."""
    if damaged and report is not None and report.missing:
        raise CheckpointCorrupt(
            f"{damaged[-1]} turned out to be damaged while it was loaded, and {begun.path}, which is older, has no "
            f"{some(report.missing)}, where values of the damaged one may be left. The next start begins with the "
            f"older one alone."
        )


def resolve_resume(
    resume: str | PathLike, root: PathLike, storage_options: StorageOptions | None = None
) -> Path | str | None:
    """What to resume from.

    Args:
        resume: ``"never"``: nothing. ``"auto"``: the newest committed checkpoint below ``root`` if there is one.
            ``"must"``: the same, but there has to be one. Anything else: the path of a checkpoint.
        root: Where the run's checkpoints are, see :func:`~dcp_plugin.latest`.
        storage_options: How the store of a URL is reached, see :class:`~dcp_plugin.CheckpointConfig`.

    Returns:
        The path of a checkpoint, or its URL as a ``str``; None for a run that starts anew.

    Raises:
        CheckpointNotFound: ``"must"`` and there is none, or nothing is at the path.
        CheckpointIncomplete: The path is a torn checkpoint.
        CheckpointUnreadable: ``"auto"`` or ``"must"``, and ``root`` cannot be read; or an entry below it cannot, and no
            complete checkpoint is beside or above that entry; or a newer version of this package has saved the newest.
        CheckpointCorrupt: ``"auto"``, and all that this run has saved is damaged, or only another tool can load it. A
            save that was interrupted is not damage: a run that never completed one starts anew.
        CheckpointMismatch: ``"auto"`` or ``"must"`` in a job of a Hydra sweep, and ``root`` has the checkpoints of
            another job.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.save({"step": 1}, "run/step-1")
        >>> dcp_plugin.resolve_resume("auto", "run").name
        'step-1'
        >>> dcp_plugin.resolve_resume("never", "run")
    """
    found = StartOptions(resume, storage_options=storage_options).find(root)
    if resume == "auto" and found is not None:
        damage.note_chosen(found, by_framework=False)
    return public(found)


def modules_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The modules of a state under their names, nested as they are there."""
    modules: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            modules[name] = value
        elif isinstance(value, Mapping) and (inner := modules_of(value)):
            modules[name] = inner
    return modules
