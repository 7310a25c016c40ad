"""List of the runs and checkpoints below a directory or URL, with their sizes and states.

:func:`~dcp_plugin.list_checkpoints` lists DCP checkpoints alone, and is fast. This module examines each checkpoint, of
any tool: its summary, the sizes of its files, and the files that it shares with others by hard links. It reads no
tensor, so :func:`~dcp_plugin.verify` may find damaged bytes in a checkpoint that is listed as ``"whole"``.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from dcp_plugin.core.errors import CheckpointError, CheckpointUnreadable
from dcp_plugin.core.format import DAMAGED, SUMMARY, exists, uncommitted_reason
from dcp_plugin.core.format.summary import OtherFormat, Summary
from dcp_plugin.core.media import Medium, Readable, is_workspace, medium_of
from dcp_plugin.core.media.usage import Usage
from dcp_plugin.core.media.usage import usage as usage_of
from dcp_plugin.core.paths import PathLike, StorageOptions, Where, as_path
from dcp_plugin.core.runs.catalog import local_below, newest_among, step_in_name, warn_of_unreadable
from dcp_plugin.core.runs.foreign import Saved
from dcp_plugin.core.runs.scan import Patience, Scan, cannot_read, may_pass
from dcp_plugin.core.storage.published import check_own_files, in_one_view, summary_in, summary_of
from dcp_plugin.core.types import CheckpointState, public_class

OURS, STOCK = "dcp_plugin", "stock"
_STEPS = ("global_step", "step", "step_count", "iter_num", "iteration")
"""Names of the step in files that programs write with ``torch.save``."""


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint, complete or not, in the result of :func:`list_runs`."""

    path: Where
    state: Literal["whole", "torn", "damaged", "other format", "foreign"]
    """``"whole"``: of this package, with all its files. ``"torn"``: its save or a copy was interrupted, or is in
    flight. ``"damaged"``: files are cut or lost, or a load has found it damaged. ``"other format"``: another version
    of this package saved it, in a format that this one does not read. ``"foreign"``: another tool's."""
    reason: str
    """The reason why the checkpoint is torn or damaged, or cannot be read or resumed from; else empty."""
    format: str
    """``"dcp_plugin"``, ``"stock"`` (another writer of DCP), ``"Lightning"``, ``"Accelerate"``, ``"transformers"`` or
    ``"torch.save"``; empty if unknown."""
    step: int | None
    time: float
    """Seconds since the epoch."""
    nbytes: int
    """Bytes of all its files, each file counted once."""
    own_bytes: int
    """Bytes that a deletion of the checkpoint frees. Other checkpoints share its further bytes as hard links."""
    tier: Literal["durable", "local"] = "durable"
    """``"local"``: only ``keeper.dir`` of the nodes has the checkpoint, and there is none at the path."""
    resumes: bool = False
    """True if an automatic resume of its run would load it."""
    world_size: int | None = None
    layouts: list[str] = field(default_factory=list)
    """Distributions of its tensors at the save."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The ``metrics`` of the save."""
    base: str | None = None
    """Path of the checkpoint from which the parameters were loaded that this one leaves out (``trainable_only``)."""


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class Run:
    """The checkpoints in one folder, with parts of checkpoints in its folders (``step-100/model``)."""

    folder: Where
    checkpoints: list[ListedCheckpoint]
    """Oldest first."""
    nbytes: int
    """Bytes of all of them; files that several of them share count once."""

    @property
    def resumes(self) -> ListedCheckpoint | None:
        """The checkpoint that an automatic resume would load."""
        return next((listed for listed in self.checkpoints if listed.resumes), None)


def list_runs(
    root: PathLike, storage_options: StorageOptions | None = None, local_dir: PathLike | None = None
) -> list[Run]:
    """Return every run at or below ``root``, with its checkpoints: of this package, of stock DCP and of other tools.

    Args:
        root: A directory, or the URL of a prefix, which is searched six directories deep. Links are not followed.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        local_dir: The ``keeper.dir`` of the runs. The list then includes the saves that only this host has there, with
            ``tier="local"``.

    Returns:
        The runs, sorted by folder. A save that a crash interrupted is listed as torn. Weights alone are no checkpoint
        of a run. They are not listed.

    Raises:
        CheckpointUnreadable: The directory or the store of a URL cannot be listed.

    Example:
        >>> import dcp_plugin, torch
        >>> dcp_plugin.save({"w": torch.zeros(1000)}, "run/step-1", step=1)
        >>> [run] = dcp_plugin.tools.list_runs("run")
        >>> [(one.path.name, one.state, one.step, one.nbytes > 4000, one.resumes) for one in run.checkpoints]
        [('step-1', 'whole', 1, True, True)]
    """
    return look_below(as_path(root, storage_options), storage_options, local_dir).runs


@dataclass(frozen=True)
class Found:
    """Result of a search below a root."""

    runs: list[Run]
    unreadable: set[Where]
    """Entries that cannot be read, and may be checkpoints."""
    scan: Scan

    @functools.cached_property
    def listed(self) -> dict[Where, ListedCheckpoint]:
        """The checkpoints of all runs."""
        return {listed.path: listed for run in self.runs for listed in run.checkpoints}


def look_below(root: Where, storage_options: StorageOptions | None = None, local_dir: PathLike | None = None) -> Found:
    """Return the result of :func:`list_runs`, with the scan."""
    scan, patience = Scan(root, others=True, in_flight=True, summaries=False), Patience()
    candidates = [*scan.checkpoints(), *local_below(root, local_dir, storage_options)]
    at_once = medium_of(root).open(root).cost.at_once
    with ThreadPoolExecutor(at_once, thread_name_prefix="dcp-list") as pool:
        looks = [
            look for look in pool.map(lambda candidate: _look(candidate, scan.medium, patience), candidates) if look
        ]
    in_order = sorted(looks, key=lambda look: (str(look.folder), look.listed.time, look.listed.step or -1))
    failures = {look.listed.path: look.failure for look in looks if look.failure is not None}
    warn_of_unreadable(
        scan.unreadable | {path: error for path, error in failures.items() if not isinstance(error, OtherFormat)}
    )
    runs = [_run(folder, list(members)) for folder, members in groupby(in_order, key=lambda look: look.folder)]
    return Found(runs, {*scan.unreadable, *failures}, scan)


@dataclass(frozen=True)
class _Looked:
    listed: ListedCheckpoint
    found: CheckpointState | Saved
    usage: Usage = field(default_factory=Usage)
    failure: CheckpointUnreadable | None = None
    """The reason why the checkpoint cannot be read, and may be intact."""

    @property
    def folder(self) -> Where:
        above = self.listed.path.parent
        return above.parent if is_workspace(above.name) or self.is_part else above

    @property
    def is_part(self) -> bool:
        """True if this is a part of the checkpoint after which the folder above is named."""
        without_step = self.found.name != "" if isinstance(self.found, Saved) else self.found.step is None
        return without_step and step_in_name(self.listed.path.parent) is not None

    def in_run(self, newest: Where | None) -> ListedCheckpoint:
        """Return the entry of a run: with the step of the folder above for a part without a step.

        Args:
            newest: The checkpoint that an automatic resume of the run loads.
        """
        is_named = self.is_part and self.listed.step is None
        step = step_in_name(self.listed.path.parent) if is_named else self.listed.step
        return replace(
            self.listed,
            resumes=self.listed.path == newest,
            step=step,
            nbytes=self.usage.nbytes,
            own_bytes=self.usage.own,
        )


def _run(folder: Where, members: list[_Looked]) -> Run:
    usable = [member.found for member in members if member.listed.state in ("whole", "foreign", "other format")]
    newest: Where | None = None
    with suppress(OtherFormat):  # an automatic resume does not fall back to an older checkpoint
        newest = newest_among(usable)[0].path
    listed = [member.in_run(newest) for member in members]
    return Run(folder, listed, Usage.of_all(member.usage for member in members).nbytes)


def _look(checkpoint: CheckpointState | Saved, medium: Medium, patience: Patience) -> _Looked | None:
    """Examine a checkpoint. Return None if it was deleted meanwhile, and for a file without a training."""
    try:
        if isinstance(checkpoint, Saved):
            look = _look_into_saved(checkpoint)
        elif checkpoint.tier == "local":
            return _Looked(replace(_entry(checkpoint, "whole"), tier="local"), checkpoint)
        elif is_workspace(checkpoint.path.parent.name) and not checkpoint.committed:  # a save in flight, by its record
            look = _Looked(_entry(checkpoint, "torn", checkpoint.reason), checkpoint)
        else:
            look = patience.read(
                lambda: in_one_view(checkpoint.path, lambda _, files: _look_at_files(checkpoint, files), medium=medium)
            )
        return None if look is None else replace(look, usage=usage_of(medium, checkpoint.path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, CheckpointUnreadable) as error:
        if isinstance(checkpoint, Saved):
            return None
        failure = cannot_read(checkpoint.path, error)
        return _Looked(_entry(checkpoint, "damaged", str(failure)), checkpoint, failure=failure)


_State = Literal["whole", "torn", "damaged", "other format", "foreign"]


def _entry(checkpoint: CheckpointState, state: _State, reason: str = "", tool: str = OURS) -> ListedCheckpoint:
    return ListedCheckpoint(checkpoint.path, state, reason, tool, checkpoint.step, checkpoint.time, 0, 0)


def _look_into_saved(checkpoint: Saved) -> _Looked | None:
    examined = checkpoint.examined()
    if examined is None:
        return None
    state: _State = "foreign"
    if examined.reason and not examined.export:
        state = "torn" if checkpoint.reason else "damaged"
    listed = ListedCheckpoint(
        checkpoint.path, state, examined.reason, examined.tool, _step_in(checkpoint), checkpoint.time, 0, 0
    )
    return _Looked(listed, checkpoint)


def _step_in(checkpoint: Saved) -> int | None:
    """Return the step among the values of a ``torch.save`` file; None if it has no step."""
    from dcp_plugin.core.format.foreign import torch_file  # imports torch, which few lists need

    values: dict[str, Any] = {}
    with suppress(CheckpointError):
        values = torch_file.read_file(checkpoint.files, checkpoint.name).values if checkpoint.name else {}
    return next((values[name] for name in _STEPS if type(values.get(name)) is int), None)


def _look_at_files(checkpoint: CheckpointState, files: Readable) -> _Looked:
    names = [name.rstrip("/") for name in files.names()]
    reason = uncommitted_reason(names)
    state: _State = "torn"
    summary: Summary | None = None
    failure: CheckpointUnreadable | None = None
    if reason:
        state = "damaged" if DAMAGED in names else "torn"
        with suppress(CheckpointError, OSError):
            summary = summary_of(files) if exists(files, SUMMARY) else None
    else:
        try:
            summary = summary_in(files)
            state = "foreign" if summary is None else "whole"
            if summary is not None:
                check_own_files(files, summary)
        except CheckpointError as error:
            if files.moved():
                raise FileNotFoundError(f"{checkpoint.path} was replaced") from error
            if may_pass(error):
                raise
            state = "other format" if isinstance(error, OtherFormat) else "damaged"
            reason = str(error).removeprefix(f"{checkpoint.path}: ")
            failure = error if isinstance(error, CheckpointUnreadable) else None
    tool = OURS if summary is not None or SUMMARY in names else "" if state == "torn" else STOCK
    listed = _entry(checkpoint, state, reason, tool)
    if summary is not None:
        checkpoint = replace(checkpoint, step=summary.step, time=summary.time)
        listed = replace(
            listed,
            step=summary.step,
            time=summary.time,
            world_size=summary.world_size,
            layouts=list(summary.layouts),
            metrics=dict(summary.metrics),
            base=summary.base.get("path"),
        )
    return _Looked(listed, checkpoint, failure=failure)


def is_in_flight(checkpoint: ListedCheckpoint) -> bool:
    """Return whether the entry is a save that is not published yet, or a checkpoint that is being replaced."""
    return is_workspace(checkpoint.path.parent.name)
