"""Deletes the checkpoints of runs that no rule keeps, and what interrupted saves have left.

A rule keeps; what no rule keeps goes. The checkpoints of one folder are a run, and the rules hold in each run for
itself. Some are kept whatever the rules say: deleting them would lose what nobody can make again, or break what others
are doing. Runs that are in training may save and delete in the same folders meanwhile, and other processes may prune
there: each checkpoint is looked at once more before it goes, and goes by the way of :mod:`dcp_plugin.media`, so that at
no moment something half-deleted can be taken for one.
"""

from __future__ import annotations

import math
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
from dcp_plugin.runs import figures
from dcp_plugin.runs.bases import may_need
from dcp_plugin.runs.scan import state_of
from dcp_plugin.tools.listing import OURS, Found, ListedCheckpoint, Run, is_in_flight, look_below
from dcp_plugin.tools.stream import Progress


@dataclass(frozen=True)
class PrunedCheckpoint:
    """What became of a checkpoint."""

    path: Where
    step: int | None
    nbytes: int
    """Bytes of all its files."""
    deleted: bool
    """Or it would be, of a dry run."""
    reasons: list[str]
    """Why it is kept; of one that could not be deleted, why."""
    failed: bool = False
    """It is there, or a part of it, because it could not be deleted."""


@dataclass(frozen=True)
class PrunedLeftover:
    """What became of what an interrupted save or removal had left."""

    path: Where
    what: str
    nbytes: int | None
    """None for an upload of which the store does not tell that."""
    deleted: bool
    """Or put back where it was; or it would be, of a dry run."""


@dataclass(frozen=True)
class PruneReport:
    """What :func:`prune` did, or would do. ``str()`` of it is one line."""

    root: Where
    dry_run: bool
    checkpoints: list[PrunedCheckpoint] = field(default_factory=list)
    """Run by run, oldest first."""
    leftovers: list[PrunedLeftover] = field(default_factory=list)
    bytes_freed: int = 0
    """On the disk or in the store: a file that a kept checkpoint shares is not freed."""

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


@dataclass(frozen=True)
class Rules:
    """What to keep, see :func:`prune`.

    Raises:
        ValueError: No rule at all, which would delete everything; or one that makes no sense.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    best: str | None = None
    mode: Literal["min", "max"] = "min"
    keep_best: int = 1

    def __post_init__(self) -> None:
        if self.keep_last is None and self.keep_every is None and self.best is None:
            raise ValueError("say what to keep: keep_last, keep_every or best. Without any of them, all would go")
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value}: it is a number from 1 on")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode={self.mode!r}: it is 'min' or 'max'")

    def kept(self, checkpoints: list[ListedCheckpoint]) -> dict[Where, list[str]]:
        """Why each of a run's checkpoints, sorted from old to new, is kept; nothing for one that is not.

        A rule judges what it can: ``keep_every`` what has a step, ``best`` what has the metric. What no rule can judge
        is kept.
        """
        why: dict[Where, list[str]] = {one.path: [] for one in checkpoints}
        judged: set[Where] = set()
        if self.keep_last is not None:
            judged |= why.keys()
            for one in checkpoints[-self.keep_last :]:
                why[one.path].append(f"among the last {self.keep_last}")
        if self.keep_every is not None:
            with_step = [(one, one.step) for one in checkpoints if one.step is not None]
            judged |= {one.path for one, _ in with_step}
            for one, step in with_step:
                if step % self.keep_every == 0:
                    why[one.path].append(f"step {step} is a multiple of {self.keep_every}")
        if self.best is not None:
            judged |= self._keep_best(checkpoints, self.best, why)
        unknown = [what for what, rule in (("step", self.keep_every), (f"metric {self.best}", self.best)) if rule]
        for path in why.keys() - judged:
            why[path].append(f"it has no {' and no '.join(unknown)} to decide by")
        return why

    def _keep_best(
        self, checkpoints: list[ListedCheckpoint], metric: str, why: Mapping[Where, list[str]]
    ) -> set[Where]:
        """Note the best of them; those that have the metric. One that is not a number is never the best."""
        sign = 1 if self.mode == "min" else -1
        known = [(one, one.metrics[metric]) for one in reversed(checkpoints) if metric in one.metrics]
        numbers = [(one, value) for one, value in known if not math.isnan(value)]
        for one, value in sorted(numbers, key=lambda pair: sign * pair[1])[: self.keep_best]:
            why[one.path].append(f"best {metric}: {value:g}")
        return {one.path for one, _ in known}


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
    """Delete the checkpoints at or below ``root`` that no rule keeps, and what interrupted saves have left.

    Each folder is a run of its own, and the rules hold in each. A checkpoint is deleted if a rule can judge it and none
    keeps it: ``keep_last`` judges all, ``keep_every`` those with a step, ``best`` those with the metric.

    Kept whatever the rules say: the newest whole checkpoint of a run; what another checkpoint needs as its base
    (``trainable_only``); what a symbolic link beside or above it leads to, such as Lightning's ``last``; what is being
    saved; what is damaged; and what another tool has saved. Call it on one process.

    Args:
        root: Where to look, up to six directories deep: a directory, or the URL of a prefix.
        keep_last: Keep so many of the newest whole checkpoints.
        keep_every: Keep those whose step is a multiple of this.
        best: Keep those with the best value of this metric, which ``save(..., metrics={...})`` has noted.
        mode: Whether the lowest (``"min"``) or the highest (``"max"``) value is best.
        keep_best: How many of the best to keep.
        damaged: Delete those of this package that are damaged, too.
        dry_run: Delete nothing, and say what would go.
        storage_options: How the store of a URL is reached, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with the bytes deleted, and all that are to go.

    Returns:
        What was kept and why, what was deleted and what that has freed. What could not be deleted is in it, too.

    Raises:
        ValueError: No rule, one that makes no sense, or a metric that no checkpoint has.
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
    rules = Rules(keep_last, keep_every, best, mode, keep_best)
    where = as_path(root, storage_options)
    found = look_below(where, storage_options)
    _check_metric(rules, found, where)
    leftovers = _leftovers(found)
    decided = _decided(found, rules, damaged, where, in_flight=_is_saving(found, leftovers))
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


def _check_metric(rules: Rules, found: Found, root: Where) -> None:
    """A name that is misspelt would keep nothing, and other rules would delete the best."""
    ours = [one for run in found.runs for one in run.checkpoints if one.format == OURS and one.state == "whole"]
    known = {name for one in ours for name in one.metrics}
    if rules.best is not None and ours and rules.best not in known:
        there = (
            f"they have {', '.join(sorted(known))}" if known else "none has any: save(..., metrics={...}) notes them"
        )
        raise ValueError(f"no checkpoint below {root} has a metric {rules.best!r}; {there}")


def _decided(found: Found, rules: Rules, damaged: bool, root: Where, in_flight: bool) -> dict[Where, PrunedCheckpoint]:
    links = _links(found, root)
    decided: dict[Where, PrunedCheckpoint] = {}
    for run in found.runs:
        why = _why_kept(run, rules, damaged, found.unreadable)
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


def _why_kept(run: Run, rules: Rules, damaged: bool, unreadable: Collection[Where]) -> dict[Where, list[str]]:
    ours = [one for one in run.checkpoints if _may_go(one) and one.path.parent == run.folder]
    why = rules.kept(ours)
    newest = ours[-1].path if ours else None
    for one in run.checkpoints:
        if one.path in why:
            why[one.path] += ["the newest of its run"] if one.path == newest or one.resumes else []
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
    """Whether what is damaged is a checkpoint of ours, and nothing that is only being made, by whomsoever."""
    files = medium_of(path).open(path)
    return exists(files, SUMMARY) or exists(files, DAMAGED)


def _links(found: Found, root: Where) -> dict[Path, Path]:
    """The symbolic links beside and above what was found, and where they lead."""
    links = found.scan.links()
    if isinstance(root, Path):
        with suppress(OSError), os.scandir(root.parent) as entries:
            links |= {Path(one.path): Path(os.path.realpath(one.path)) for one in entries if one.is_symlink()}
    return links


def _keep_bases(decided: dict[Where, PrunedCheckpoint], bases: Mapping[Where, set[Where]], in_flight: bool) -> None:
    """Keep what a checkpoint that stays needs; while something is being saved, which may need the same, what any
    needs."""
    by_place = {resolved(path): path for path in decided}
    todo = [path for path in bases if path not in decided or in_flight or not decided[path].deleted]
    while todo:
        path = todo.pop()
        for place in bases.get(path, ()):
            base = by_place.get(place)
            if base is None or base == path:
                continue
            before = decided[base]
            decided[base] = replace(before, deleted=False, reasons=[*before.reasons, f"{path} needs it as its base"])
            todo += [base] if before.deleted else []


def _keep_what_unreadable_ones_may_need(decided: dict[Where, PrunedCheckpoint], found: Found) -> None:
    """Keep each checkpoint that has everything itself, and is older than an entry that cannot be read."""
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
    """Whether a save is in flight whose process may live."""
    left = {one.path for one in leftovers}
    noted = [one for run in found.runs for one in run.checkpoints if is_in_flight(one) or one.state == "torn"]
    return any(one.path not in left for one in noted)


def _delete(found: Found, decided: dict[Where, PrunedCheckpoint], progress: Progress | None) -> Usage:
    """Delete what was decided on, the newest first: a base goes after what it completes. What it had."""
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


def _deleted(one: ListedCheckpoint) -> str:
    """Delete a checkpoint; or why it is there."""
    try:
        now = state_of(one.path)
        if now is not None and now.committed and (now.time, now.step) != (one.time, one.step):
            return _AGAIN
        medium_of(one.path).remove(one.path)
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


def _tidy(found: Found, leftovers: list[Leftover[Any]]) -> list[PrunedLeftover]:
    for workspace in _workspaces(found) if leftovers else ():
        with suppress(OSError):
            medium_of(workspace).collect_garbage(workspace)
    still = {(one.path, one.what) for one in _leftovers(found)} if leftovers else set()
    return [PrunedLeftover(one.path, one.what, one.nbytes, (one.path, one.what) not in still) for one in leftovers]
