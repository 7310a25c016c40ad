"""How a run starts: from its own newest checkpoint, else with the weights of a pre-trained model, else from scratch.

The rule: rank 0 looks, and all ranks do what it found. Ranks that look for themselves can see different things on a
shared file system, and one would resume where the other starts anew. What was decided is done or raised: a run whose
checkpoint cannot be loaded never starts from something else.

A resumed run takes everything from its checkpoint; what it was once warm-started from is not looked at, and need not
exist any more. A warm start takes the model only: optimizer, schedules, counters and random streams are a new run's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.config import CheckpointConfig, PathLike, local_path
from dcp_plugin.errors import CheckpointMismatch, CheckpointNotFound
from dcp_plugin.loading.partial import PartialLoad
from dcp_plugin.media.disk import commit
from dcp_plugin.ranks import Ranks
from dcp_plugin.runs.catalog import resolve
from dcp_plugin.storage.open import read_summary
from dcp_plugin.types import LoadReport


@dataclass(frozen=True)
class Restart:
    """How a run has started. ``str()`` of it is one line for the log."""

    how: Literal["resumed", "warm-started", "fresh"]
    path: Path | None = None
    """The run's own checkpoint, or what it was warm-started from."""
    step: int | None = None
    """The step at which the run's own checkpoint was made, if that says."""
    report: LoadReport | None = None
    """What was loaded from there; None if a framework has loaded a file of its own."""

    def __str__(self) -> str:
        if self.how == "fresh":
            return "starts fresh: nothing to resume from, and no init_from"
        at = "" if self.step is None else f" at step {self.step}"
        return f"{self.how}{at}: {self.report}" if self.report is not None else f"{self.how} from {self.path}{at}"


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
    **overrides: Any,
) -> Restart:
    """Load the run's own newest checkpoint into ``state``; else the pre-trained weights ``init_from``. Collective.

    Args:
        state: As for :meth:`Checkpointer.load`. A resume loads all of it, a warm start only the modules in it.
        root: Where this run's checkpoints are; it need not exist yet. Only rank 0 looks there.
        resume: ``"auto"``, ``"must"``, ``"never"`` or the path of a checkpoint, see
            :func:`~dcp_plugin.resolve_resume`.
        init_from: A checkpoint to take the model's weights from if there is none of this run.
        partial: Which of the modules' keys ``init_from`` fills, and from where; all if omitted. Not for a resume.
        strict: Whether keys that do not fit are errors.
        checkpointer: The one that saves, to load with its settings and process group; else ``config`` and
            ``overrides`` are those of a new one.

    Raises:
        ValueError: ``partial`` without ``init_from``; a checkpointer and settings.
        CheckpointNotFound: ``"must"`` and there is nothing to resume from; or ``init_from`` is needed and not there.
        CheckpointError: What there is to start from cannot be loaded; on every rank. Nothing else is tried.
        RankFailure: A rank died, or did not answer within the timeout.
    """
    refuse_partial_of_nothing(partial, init_from)
    if checkpointer is not None and (config is not None or overrides):
        raise ValueError("either a checkpointer, or the settings of a new one: the given one has its own.")
    besides = ("resume", "init_from", "partial", "strict", "checkpointer")
    used = checkpointer or Checkpointer(CheckpointConfig.merge(config, besides, **overrides))
    try:
        start = decide(used.ranks, lambda: resolve(resume, root, init_from=init_from), init_from)
        if start.how == "resumed":
            return _resumed(start, used, state, strict)
        if start.how == "warm-started":
            return load_from(start, used, modules_of(state), partial, strict)
        return start
    finally:
        if checkpointer is None:
            used.close()


def refuse_partial_of_nothing(partial: PartialLoad | None, init_from: PathLike | None) -> None:
    """Raises ValueError for a ``partial`` that nothing would heed: a resume takes all of its checkpoint."""
    if partial is not None and init_from is None:
        raise ValueError(
            "partial says what is taken from init_from, which is not given: name the pre-trained checkpoint as "
            "init_from=PATH, or take partial out. A resumed run takes everything from its own checkpoint."
        )


def decide(ranks: Ranks, own: Callable[[], Path | None], init_from: PathLike | None) -> Restart:
    """What to start from, without loading it. Collective; only rank 0 looks.

    Args:
        own: Finds the checkpoint of this run to resume from; None if there is none.

    Raises:
        CheckpointError: What ``own`` raises; or there is none, and nothing is at ``init_from`` either.
    """
    return ranks.from_zero("decide what to start from", lambda: _look(own(), init_from))


def load_from(
    start: Restart, checkpointer: Checkpointer, state: Mapping[str, Any], partial: PartialLoad | None, strict: bool
) -> Restart:
    """Load what :func:`decide` found; with the report. Collective."""
    assert start.path is not None
    return replace(start, report=checkpointer.load(state, start.path, partial, strict))


def _resumed(start: Restart, checkpointer: Checkpointer, state: Mapping[str, Any], strict: bool) -> Restart:
    try:
        return load_from(start, checkpointer, state, None, strict)
    except CheckpointMismatch as error:
        if start.path is not None and (start.path.is_file() or read_summary(start.path) is None):
            error.add_note(
                f"Another tool has saved {start.path}. What only that tool restores, such as an optimizer whose "
                "parameters have numbers, is resumed there. To take the weights alone: "
                "resume_or_init(..., resume='never', init_from=PATH)."
            )
        raise


def modules_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The modules of a state under their names, nested as they are there."""
    modules: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            modules[name] = value
        elif isinstance(value, Mapping) and (inner := modules_of(value)):
            modules[name] = inner
    return modules


def _look(own: Path | None, init_from: PathLike | None) -> Restart:
    if own is not None:
        summary = read_summary(own)
        return Restart("resumed", own, summary.step if summary is not None else None)
    if init_from is None:
        return Restart("fresh")
    source = commit.locate(local_path(init_from))
    if not source.exists():
        raise CheckpointNotFound(
            f"nothing is at init_from={init_from}, and this run has no checkpoint of its own to resume from. Give the "
            "path of a checkpoint, or no init_from to start from scratch."
        )
    return Restart("warm-started", source)
