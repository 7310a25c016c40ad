"""Delete the checkpoints of runs that no rule of a :class:`~dcp_plugin.Retention` keeps, and garbage of crashed saves.

The checkpoints of one folder are a run, and the rules apply to each run separately. Some checkpoints stay under any
rule: they cannot be replaced, or another process uses them. Meanwhile trainings may save and delete in the same
folders, and other processes may prune there. Each checkpoint is therefore examined again just before its deletion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from dcp_plugin.core.errors import CheckpointError, as_html, size
from dcp_plugin.core.format import DAMAGED, SUMMARY, exists
from dcp_plugin.core.media import Leftover, medium_of, refuse_real_run, workspace_of
from dcp_plugin.core.media.usage import Usage
from dcp_plugin.core.media.usage import usage as usage_of
from dcp_plugin.core.paths import PathLike, StorageOptions, Where, as_path, links_in, resolved
from dcp_plugin.core.retention import Retention
from dcp_plugin.core.runs import figures
from dcp_plugin.core.runs.deletion import remove
from dcp_plugin.core.runs.scan import state_of
from dcp_plugin.core.types import CheckpointState, public_class
from dcp_plugin.tools.listing import OURS, Found, ListedCheckpoint, is_in_flight, look_below
from dcp_plugin.tools.stream import Counter, Progress


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class PrunedCheckpoint:
    """A checkpoint, and whether it was deleted."""

    path: Where
    step: int | None
    nbytes: int
    """Bytes of all its files."""
    deleted: bool
    """True if the checkpoint is deleted; in a dry run, if it would be."""
    reasons: list[str]
    """The reasons why the checkpoint stays, or why its deletion failed."""
    failed: bool = False
    """True if the deletion failed, so that the checkpoint or a part of it stays."""


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class PrunedLeftover:
    """Garbage of an interrupted save or deletion."""

    path: Where
    what: str
    nbytes: int | None
    """None for an upload whose size the store does not report."""
    deleted: bool
    """True if the garbage is deleted or moved back to its path; in a dry run, if it would be. The garbage of another
    user stays."""


@public_class("dcp_plugin.tools")
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

    _repr_html_ = as_html

    @property
    def kept(self) -> list[PrunedCheckpoint]:
        return [checkpoint for checkpoint in self.checkpoints if not checkpoint.deleted]

    @property
    def deleted(self) -> list[PrunedCheckpoint]:
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.deleted]

    @property
    def failed(self) -> list[PrunedCheckpoint]:
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.failed]

    def __str__(self) -> str:
        would = "would delete" if self.dry_run else "deleted"
        removed = [leftover for leftover in self.leftovers if leftover.deleted]
        garbage = f" and {len(removed)} leftover(s) of interrupted saves" if removed else ""
        failed = f"; {len(self.failed)} could not be deleted" if self.failed else ""
        freed = "freeing" if self.dry_run else "freed"
        return (
            f"{self.root}: {would} {len(self.deleted)} of {len(self.checkpoints)} checkpoint(s){garbage}, {freed} "
            f"{size(self.bytes_freed)}{failed}"
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
    younger_than: float | None = None,
) -> PruneReport:
    """Delete the checkpoints at or below ``root`` that no rule keeps, and garbage of interrupted saves.

    Each folder is a separate run, and the rules apply to each. A checkpoint is deleted if a rule can judge it and none
    keeps it: ``keep_last`` and ``younger_than`` judge all, ``keep_every`` those with a step, ``best`` those with the
    metric.

    These checkpoints stay under any rule: the newest complete checkpoint of a run, with others of its step; the target
    of a symbolic link in the same folder or above, such as Lightning's ``last``; a save in flight; a damaged
    checkpoint; and a checkpoint of another tool. Call it on one process.

    Args:
        root: A directory, or the URL of a prefix, which is searched six directories deep.
        keep_last: Number of the newest complete checkpoints to keep.
        keep_every: Keep checkpoints whose step is a multiple of this.
        best: Keep checkpoints with the best value of this metric, which ``save(..., metrics={...})`` records.
        mode: ``"min"`` if the lowest value is best, ``"max"`` if the highest is.
        keep_best: Number of the best checkpoints to keep.
        damaged: Also delete damaged checkpoints of this package.
        dry_run: Delete nothing, and report what would be deleted.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with the bytes deleted so far, and the bytes of all checkpoints to delete.
        younger_than: Keep checkpoints that were saved less than so many seconds ago.

    Returns:
        The kept checkpoints with reasons, the deleted ones, those whose deletion failed, and the bytes freed.

    Raises:
        ValueError: There is no rule, a value is out of range, or no checkpoint has the metric.
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
    policy = _policy(keep_last, keep_every, best, mode, keep_best, younger_than)
    root_path = as_path(root, storage_options)
    refuse_real_run(root_path, medium_of(root_path))
    listing = look_below(root_path, storage_options)
    _check_metric(best, listing, root_path)
    paths = [item.path for item in listing.listed.values() if item.format == OURS and not is_in_flight(item)]
    own_workspaces = (workspace_of(cast(Path, path)) for path in paths)
    workspaces = list(dict.fromkeys([*listing.scan.workspaces, *own_workspaces]))
    leftovers = [item for place in workspaces for item in medium_of(place).collect_garbage(place, True)]
    why = _why_kept(listing, policy, damaged, root_path)
    doomed = [listing.listed[path] for path, reasons in why.items() if not reasons]
    usages = {listed.path: usage_of(medium_of(listed.path), listed.path) for listed in doomed}
    spared: dict[Where, str] = {}
    remaining = set[tuple[Where, str]]()
    if not dry_run:
        spared = _delete(doomed, progress)
        remaining = _tidy(workspaces) if leftovers else remaining
        for workspace in workspaces:
            figures.compact(workspace.parent)
    why |= {path: [reason] for path, reason in spared.items()}
    checkpoints = [
        PrunedCheckpoint(
            path,
            listing.listed[path].step,
            listing.listed[path].nbytes,
            deleted=not reasons,
            reasons=reasons,
            failed=path in spared and spared[path] != _AGAIN,
        )
        for path, reasons in why.items()
    ]
    pruned = [
        PrunedLeftover(item.path, item.what, item.nbytes, not item.stays and (item.path, item.what) not in remaining)
        for item in leftovers
    ]
    freed = Usage.of_all(usage for path, usage in usages.items() if path not in spared).own
    freed += sum(leftover.nbytes or 0 for leftover in pruned if leftover.deleted)
    return PruneReport(root_path, dry_run, checkpoints, pruned, freed)


def _policy(
    keep_last: int | None,
    keep_every: int | None,
    best: str | None,
    mode: Literal["min", "max"],
    keep_best: int,
    younger_than: float | None,
) -> Retention:
    for name, value in {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best}.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value}: it is a number from 1 on")
    if mode not in ("min", "max"):
        raise ValueError(f"mode={mode!r}: it is 'min' or 'max'")
    rules = (keep_last, keep_every, None if best is None else (best, mode, keep_best), younger_than)
    if all(rule is None for rule in rules):
        raise ValueError(
            "say what to keep: keep_last, keep_every, best or younger_than. Without a rule, all would be deleted"
        )
    return Retention(*rules)


def _check_metric(metric: str | None, listing: Found, root: Where) -> None:
    """Refuse a misspelt metric, which would keep nothing while other rules delete the best."""
    ours = [listed for listed in listing.listed.values() if _may_go(listed)]
    metrics = {name for listed in ours for name in listed.metrics}
    if metric is not None and ours and metric not in metrics:
        available = (
            f"they have {', '.join(sorted(metrics))}"
            if metrics
            else "none has any: save(..., metrics={...}) notes them"
        )
        raise ValueError(f"no checkpoint below {root} has a metric {metric!r}; {available}")


def _why_kept(listing: Found, policy: Retention, damaged: bool, root: Where) -> dict[Where, list[str]]:
    """Return the reasons why each checkpoint stays, run by run; an empty list if it is to be deleted."""
    why: dict[Where, list[str]] = {}
    for run in listing.runs:
        ours = [listed for listed in run.checkpoints if _may_go(listed) and listed.path.parent == run.folder]
        judged = policy.reasons(
            [CheckpointState(one.path, True, "", one.step, one.time, metrics=one.metrics) for one in ours]
        )
        for listed in run.checkpoints:
            if is_in_flight(listed):
                continue
            reasons = judged.get(listed.path)
            if reasons is None:
                may_go = damaged and listed.path not in listing.unreadable and _is_damaged(listed)
                reasons = [] if may_go else [_why_no_rule_judges(listed)]
            elif listed.resumes and not reasons:
                reasons.append(_RESUMES)
            why[listed.path] = reasons
    links = listing.scan.links() | links_in(root.parent)
    for path, reasons in why.items():
        target = resolved(path)
        reasons += [f"{link} leads to it" for link, to in links.items() if target in (to, *to.parents)]
    return why


def _why_no_rule_judges(listed: ListedCheckpoint) -> str:
    if listed.state == "damaged" and listed.format == OURS:
        return f"damaged: {listed.reason}"
    if listed.state == "other format":
        return listed.reason
    if listed.state == "whole" and listed.tier == "durable":
        return f"a part of {listed.path.parent}, which no rule judges"
    if listed.state == "torn":
        return f"it is being saved, or its save was interrupted: {listed.reason}"
    return f"saved by {'stock DCP' if listed.format == 'stock' else listed.format}, not by this package"


def _may_go(checkpoint: ListedCheckpoint) -> bool:
    return (
        checkpoint.format == OURS
        and checkpoint.state == "whole"
        and checkpoint.tier == "durable"
        and not is_in_flight(checkpoint)
    )


def _is_damaged(checkpoint: ListedCheckpoint) -> bool:
    """Return whether this is a damaged checkpoint of this package that was published, and not a save in flight."""
    if checkpoint.state != "damaged" or checkpoint.format != OURS:
        return False
    files = medium_of(checkpoint.path).open(checkpoint.path)
    return exists(files, SUMMARY) or exists(files, DAMAGED)


def _delete(doomed: list[ListedCheckpoint], progress: Progress | None) -> dict[Where, str]:
    """Delete the newest first. Return those that stay, and why."""
    spared: dict[Where, str] = {}
    count = Counter(sum(listed.nbytes for listed in doomed), progress)
    for listed in sorted(doomed, key=lambda listed: -listed.time):
        try:
            now = state_of(listed.path)
            if now is not None and now.committed and (now.time, now.step) != (listed.time, listed.step):
                spared[listed.path] = _AGAIN
            else:
                remove(listed.path)
        except (OSError, CheckpointError) as error:
            spared[listed.path] = str(error)
        count.add(listed.nbytes)
    return spared


_AGAIN = "it was saved again meanwhile"
_RESUMES = "an automatic resume loads it"


def _tidy(workspaces: list[Where]) -> set[tuple[Where, str]]:
    """Delete the garbage of interrupted saves. Return path and description of what remains."""
    remaining: list[Leftover[Any]] = []
    for workspace in workspaces:
        medium = medium_of(workspace)
        try:
            remaining += medium.collect_garbage(workspace)
        except OSError:
            remaining += medium.collect_garbage(workspace, dry_run=True)
    return {(leftover.path, leftover.what) for leftover in remaining}
