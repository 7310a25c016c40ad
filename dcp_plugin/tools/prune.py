"""Delete the checkpoints of runs that no rule of a :class:`~dcp_plugin.Retention` keeps, and garbage of crashed saves.

The checkpoints of one folder are a run, and the rules apply to each run separately. Some checkpoints stay whatever the
rules say: nobody could make them again, or another process uses them. Meanwhile trainings may save and delete in the
same folders, and other processes may prune there. So each checkpoint is examined once more before its deletion.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from dcp_plugin.errors import CheckpointError
from dcp_plugin.format import DAMAGED, SUMMARY, exists
from dcp_plugin.media import Leftover, is_workspace, medium_of, workspace_of
from dcp_plugin.media.usage import Usage
from dcp_plugin.media.usage import usage as usage_of
from dcp_plugin.paths import PathLike, StorageOptions, Where, as_path, resolved
from dcp_plugin.retention import Retention, needed
from dcp_plugin.runs import figures
from dcp_plugin.runs.bases import may_need
from dcp_plugin.runs.retention import delete
from dcp_plugin.runs.scan import state_of
from dcp_plugin.tools.listing import OURS, Found, ListedCheckpoint, Run, is_in_flight, look_below
from dcp_plugin.tools.stream import Progress
from dcp_plugin.types import CheckpointState


@dataclass(frozen=True)
class PrunedCheckpoint:
    """A checkpoint, and whether it was deleted."""

    path: Where
    step: int | None
    nbytes: int
    """Bytes of all its files."""
    deleted: bool
    """Whether it is deleted; in a dry run, whether it would be."""
    reasons: list[str]
    """Why it stays, or why its deletion failed."""
    failed: bool = False
    """Whether its deletion failed, so that it or a part of it stays."""


@dataclass(frozen=True)
class PrunedLeftover:
    """Garbage of an interrupted save or deletion."""

    path: Where
    what: str
    nbytes: int | None
    """None for an upload whose size the store does not report."""
    deleted: bool
    """Whether it is deleted or moved back to its path; in a dry run, whether it would be."""


@dataclass(frozen=True)
class PruneReport:
    """Result of :func:`prune`. ``str()`` of it is one line."""

    root: Where
    dry_run: bool
    checkpoints: list[PrunedCheckpoint] = field(default_factory=list)
    """Run by run, oldest first."""
    leftovers: list[PrunedLeftover] = field(default_factory=list)
    bytes_freed: int = 0
    """Bytes freed on the disk or in the store. A file that a kept checkpoint shares is not freed."""

    @property
    def kept(self) -> list[PrunedCheckpoint]:
        return [one for one in self.checkpoints if not one.deleted]

    @property
    def deleted(self) -> list[PrunedCheckpoint]:
        return [one for one in self.checkpoints if one.deleted]

    @property
    def failed(self) -> list[PrunedCheckpoint]:
        return [one for one in self.checkpoints if one.failed]

    def __str__(self) -> str:
        would = "would delete" if self.dry_run else "deleted"
        gone = [one for one in self.leftovers if one.deleted]
        left = f" and {len(gone)} leftover(s) of interrupted saves" if gone else ""
        failed = f"; {len(self.failed)} could not be deleted" if self.failed else ""
        freed = "freeing" if self.dry_run else "freed"
        return (
            f"{self.root}: {would} {len(self.deleted)} of {len(self.checkpoints)} checkpoint(s){left}, {freed} "
            f"{self.bytes_freed / 2**20:.1f} MiB{failed}"
        )


def prune(
    root: PathLike,
    keep_last: int | None = None,
    keep_every: int | None = None,
    best: str | None = None,
    mode: Literal["min", "max"] = "min",
    keep_best: int = 1,
    damaged: bool = False,
    dry_run: bool = False,
    storage_options: StorageOptions | None = None,
    progress: Progress | None = None,
) -> PruneReport:
    """Delete the checkpoints at or below ``root`` that no rule keeps, and garbage of interrupted saves.

    Each folder is a separate run, and the rules apply to each. A checkpoint is deleted if a rule can judge it and none
    keeps it: ``keep_last`` judges all, ``keep_every`` those with a step, ``best`` those with the metric.

    These stay whatever the rules say: the newest complete checkpoint of a run, with others of its step; a base of
    another checkpoint (``trainable_only``); the target of a symbolic link beside or above it, such as Lightning's
    ``last``; a save in flight; a damaged checkpoint; and a checkpoint of another tool. Call it on one process.

    Args:
        root: Where to look, up to six directories deep: a directory, or the URL of a prefix.
        keep_last: Number of the newest complete checkpoints to keep.
        keep_every: Keep checkpoints whose step is a multiple of this.
        best: Keep checkpoints with the best value of this metric, which ``save(..., metrics={...})`` records.
        mode: Whether the lowest (``"min"``) or the highest (``"max"``) value is best.
        keep_best: Number of the best to keep.
        damaged: Also delete damaged checkpoints of this package.
        dry_run: Delete nothing, and report what would be deleted.
        storage_options: How the store of a URL is reached, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with the bytes deleted so far, and the bytes of all checkpoints to delete.

    Returns:
        The kept checkpoints with reasons, the deleted ones, those whose deletion failed, and the bytes freed.

    Raises:
        ValueError: No rule, a value out of range, or a metric that no checkpoint has.
        CheckpointUnreadable: ``root`` cannot be listed.

    Example:
        >>> import dcp_plugin
        >>> for step in range(1, 6):
        ...     dcp_plugin.save({"step": step}, f"run/step-{step}", step=step)
        >>> report = dcp_plugin.prune("run", keep_last=1, keep_every=2)
        >>> [one.path.name for one in report.deleted]
        ['step-1', 'step-3']
        >>> [one.reasons for one in report.kept]
        [['step 2 is a multiple of 2'], ['step 4 is a multiple of 2'], ['among the last 1', 'the newest of its run']]
    """
    policy = _policy(keep_last, keep_every, best, mode, keep_best)
    where = as_path(root, storage_options)
    found = look_below(where, storage_options)
    _check_metric(best, found, where)
    leftovers = _leftovers(found)
    decided = _decided(found, policy, damaged, where, in_flight=_is_saving(found, leftovers))
    doomed = [one for one in decided.values() if one.deleted]
    if dry_run:
        usage = Usage.of_all(usage_of(medium_of(one.path), one.path) for one in doomed)
        left = [PrunedLeftover(one.path, one.what, one.nbytes, True) for one in leftovers]
    else:
        usage = _delete(found, decided, progress)
        left = _tidy(found, leftovers)
        for workspace in _workspaces(found):
            figures.compact(workspace.parent)
    freed = usage.own + sum(one.nbytes or 0 for one in left if one.deleted)
    return PruneReport(where, dry_run, list(decided.values()), left, freed)


def _policy(
    keep_last: int | None, keep_every: int | None, best: str | None, mode: Literal["min", "max"], keep_best: int
) -> Retention:
    for name, value in {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best}.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value}: it is a number from 1 on")
    if mode not in ("min", "max"):
        raise ValueError(f"mode={mode!r}: it is 'min' or 'max'")
    if keep_last is None and keep_every is None and best is None:
        raise ValueError("say what to keep: keep_last, keep_every or best. Without any of them, all would go")
    return Retention(keep_last, keep_every, None if best is None else (best, mode, keep_best))


def _check_metric(metric: str | None, found: Found, root: Where) -> None:
    """Refuse a misspelt metric, which would keep nothing while other rules delete the best."""
    ours = [one for run in found.runs for one in run.checkpoints if _may_go(one)]
    known = {name for one in ours for name in one.metrics}
    if metric is not None and ours and metric not in known:
        there = (
            f"they have {', '.join(sorted(known))}" if known else "none has any: save(..., metrics={...}) notes them"
        )
        raise ValueError(f"no checkpoint below {root} has a metric {metric!r}; {there}")


def _decided(
    found: Found, policy: Retention, damaged: bool, root: Where, in_flight: bool
) -> dict[Where, PrunedCheckpoint]:
    links = _links(found, root)
    decided: dict[Where, PrunedCheckpoint] = {}
    for run in found.runs:
        why = _why_kept(run, policy, damaged, found.unreadable)
        for one in run.checkpoints:
            if is_in_flight(one):
                continue
            reasons = why[one.path]
            target = resolved(one.path)
            reasons += [f"{link} leads to it" for link, to in links.items() if target in (to, *to.parents)]
            decided[one.path] = PrunedCheckpoint(one.path, one.step, one.nbytes, not reasons, reasons)
    _keep_bases(decided, found.bases, in_flight)
    _keep_what_unreadable_ones_may_need(decided, found)
    return decided


def _why_kept(run: Run, policy: Retention, damaged: bool, unreadable: Collection[Where]) -> dict[Where, list[str]]:
    ours = [one for one in run.checkpoints if _may_go(one) and one.path.parent == run.folder]
    why = policy.reasons([CheckpointState(one.path, True, "", one.step, one.time, metrics=one.metrics) for one in ours])
    for one in run.checkpoints:
        if one.path in why:
            why[one.path] += [_RESUMES] if one.resumes and not why[one.path] else []
        elif one.state == "damaged" and one.format == OURS:
            may_go = damaged and one.path not in unreadable and _was_published(one.path)
            why[one.path] = [] if may_go else [f"damaged: {one.reason}"]
        elif one.state == "newer format":
            why[one.path] = [one.reason]
        elif one.state == "whole" and one.tier == "durable":
            why[one.path] = [f"a part of {one.path.parent}, which no rule judges"]
        elif one.state == "torn":
            why[one.path] = [f"it is being saved, or its save was interrupted: {one.reason}"]
        else:
            why[one.path] = [f"saved by {'stock DCP' if one.format == 'stock' else one.format}, not by this package"]
    return why


def _may_go(one: ListedCheckpoint) -> bool:
    return one.format == OURS and one.state == "whole" and one.tier == "durable" and not is_in_flight(one)


def _was_published(path: Where) -> bool:
    """Return whether a damaged directory is a published checkpoint of this package, and no save in the making."""
    files = medium_of(path).open(path)
    return exists(files, SUMMARY) or exists(files, DAMAGED)


def _links(found: Found, root: Where) -> dict[Path, Path]:
    """Return the symbolic links beside and above the checkpoints, and their targets."""
    links = found.scan.links()
    if isinstance(root, Path):
        with suppress(OSError), os.scandir(root.parent) as entries:
            links |= {Path(one.path): Path(os.path.realpath(one.path)) for one in entries if one.is_symlink()}
    return links


def _keep_bases(decided: dict[Where, PrunedCheckpoint], bases: Mapping[Where, set[Where]], in_flight: bool) -> None:
    """Keep the bases of checkpoints that stay; during a save, which may need the same base, those of all."""
    staying = {path: bases[path] for path in bases if path not in decided or in_flight or not decided[path].deleted}
    for base, path in needed(decided, staying).items():
        reasons = [*decided[base].reasons, f"{path} needs it as its base"]
        decided[base] = replace(decided[base], deleted=False, reasons=reasons)


def _keep_what_unreadable_ones_may_need(decided: dict[Where, PrunedCheckpoint], found: Found) -> None:
    """Keep each checkpoint that may be the base of an entry that cannot be read."""
    listed = {one.path: one for run in found.runs for one in run.checkpoints}
    for path, one in decided.items():
        needed_by = [
            entry
            for entry in found.unreadable
            if one.deleted
            and path not in found.bases
            and not is_workspace(entry.name)
            and may_need(entry, listed[path].time, found.scan.medium)
        ]
        if needed_by:
            reason = f"{needed_by[0]} cannot be read, and may leave out what this one has"
            decided[path] = replace(one, deleted=False, reasons=[*one.reasons, reason])


def _leftovers(found: Found) -> list[Leftover[Any]]:
    return [one for workspace in _workspaces(found) for one in medium_of(workspace).collect_garbage(workspace, True)]


def _workspaces(found: Found) -> list[Where]:
    paths = [one.path for run in found.runs for one in run.checkpoints if one.format == OURS and not is_in_flight(one)]
    return list(dict.fromkeys([*found.scan.workspaces, *(workspace_of(cast(Path, path)) for path in paths)]))


def _is_saving(found: Found, leftovers: Iterable[Leftover[Any]]) -> bool:
    """Return whether a save is in flight whose process may be alive."""
    left = {one.path for one in leftovers}
    noted = [one for run in found.runs for one in run.checkpoints if is_in_flight(one) or one.state == "torn"]
    return any(one.path not in left for one in noted)


def _delete(found: Found, decided: dict[Where, PrunedCheckpoint], progress: Progress | None) -> Usage:
    """Delete the newest first: a base goes after the checkpoints that need it. Return what they occupied."""
    listed = {one.path: one for run in found.runs for one in run.checkpoints}
    doomed = sorted((path for path, one in decided.items() if one.deleted), key=lambda path: -listed[path].time)
    usages = {path: usage_of(medium_of(path), path) for path in doomed}  # before a file loses the first of its names
    total, done = sum(decided[path].nbytes for path in doomed), 0
    for path in doomed:
        if kept := _deleted(listed[path]):
            decided[path] = replace(decided[path], deleted=False, reasons=[kept], failed=kept != _AGAIN)
            del usages[path]
        done += decided[path].nbytes
        if progress is not None:
            progress(done, total)
    return Usage.of_all(usages.values())


_AGAIN = "it was saved again meanwhile"
_RESUMES = "an automatic resume loads it"


def _deleted(one: ListedCheckpoint) -> str:
    """Delete a checkpoint; return why it stays, or an empty text."""
    try:
        now = state_of(one.path)
        if now is not None and now.committed and (now.time, now.step) != (one.time, one.step):
            return _AGAIN
        delete(one.path)
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


def _tidy(found: Found, leftovers: list[Leftover[Any]]) -> list[PrunedLeftover]:
    for workspace in _workspaces(found) if leftovers else ():
        with suppress(OSError):
            medium_of(workspace).collect_garbage(workspace)
    still = {(one.path, one.what) for one in _leftovers(found)} if leftovers else set()
    return [PrunedLeftover(one.path, one.what, one.nbytes, (one.path, one.what) not in still) for one in leftovers]
