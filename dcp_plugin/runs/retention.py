"""Deletion of checkpoints: only of checkpoints, and never of one that another checkpoint needs.

Every deletion for a policy, a framework or a user goes through :func:`delete`. With ``trainable_only``, checkpoints
leave out frozen parameters that another one, their *base*, has: no deletion, save, copy or link takes a base from a
checkpoint that could not be loaded without it.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dcp_plugin.errors import CheckpointCorrupt, CheckpointError, CheckpointUnreadable, SaveFailed, warn_once
from dcp_plugin.format import METADATA, exists, has_traces
from dcp_plugin.format.summary import Base, Summary
from dcp_plugin.media import (
    Listed,
    Medium,
    is_workspace,
    medium_of,
    other_format_at,
    refuse_to_replace_other_format,
    snapshot,
    uncommitted_reason,
    unpacked,
)
from dcp_plugin.media.packed import may_have_base, time_from_names
from dcp_plugin.paths import PathLike, Where, as_path, is_link, resolved
from dcp_plugin.retention import Retention
from dcp_plugin.runs.catalog import step_in_name
from dcp_plugin.runs.foreign import Saved, is_checkpoint_folder
from dcp_plugin.runs.scan import LOST_AND_FOUND, Patience, cannot_read, may_pass, read_each
from dcp_plugin.storage.published import read_summary, summary_if_readable, summary_of
from dcp_plugin.types import CheckpointState

logger = logging.getLogger("dcp_plugin")

_Sibling = tuple[CheckpointState, Summary | None]
"""A checkpoint of this package in a folder of checkpoints, and its summary if it was read."""


def prune(newest: Where, keep_last: int | Retention) -> None:
    """Delete the checkpoints in the folder of ``newest``, which has just been saved, that ``keep_last`` does not keep.

    Checkpoints of other tools stay, and so does a checkpoint of this package to whose path another tool has saved. So
    do parts of the same checkpoint, such as ``checkpoint-5/model`` beside ``checkpoint-5/optimizer``.
    """
    policy = keep_last if isinstance(keep_last, Retention) else Retention(newest=int(keep_last))
    by_names = policy.every_steps is None and policy.best is None
    siblings, _ = _siblings_in(newest.parent, by_names)
    states = [replace(state, time=float("inf")) if path == newest else state for path, (state, _) in siblings.items()]
    in_folder_of_step = step_in_name(newest.parent) is not None
    doomed = policy.select(states)
    if any(state.step is None for state in doomed):  # their steps decide which of them are parts of the newest
        summaries = {path: summary_if_readable(path) for path in (newest, *(state.path for state in doomed))}
        steps = {path: summary.step for path, summary in summaries.items() if summary is not None}
        doomed = policy.select([replace(state, step=steps.get(state.path, state.step)) for state in states])
    medium = medium_of(newest)

    def remove_unchanged(path: Where) -> None:
        time = time_from_names(path, medium) if by_names else None
        if time is None and (summary := summary_if_readable(path)) is not None:
            time = summary.time
        if time == siblings[path][0].time:  # not saved again, or deleted, meanwhile
            remove(path)

    remove_all((state.path for state in doomed if not (in_folder_of_step and state.step is None)), remove_unchanged)


def rotate(oldest_first: Iterable[Where], keep: int, remove_one: Callable[[Where], None]) -> None:
    """Delete all checkpoints except the last ``keep``, for a framework with its own order."""
    remove_all(reversed([*oldest_first][:-keep]), remove_one)


def remove_all(paths: Iterable[Where], remove_one: Callable[[Where], None]) -> None:
    """Delete checkpoints. Log failures: the newer checkpoint is published, and old ones do no harm."""
    for path in paths:
        try:
            remove_one(path)
        except (OSError, CheckpointError) as error:
            logger.warning("could not delete the old checkpoint %s: %s", path, error)


def remove(path: PathLike) -> None:
    """Delete a checkpoint. At no moment does a partly deleted directory count as a checkpoint.

    Keep the checkpoint, with a warning in the log, if it is the base of another one in its folder (``trainable_only``),
    or if an unreadable entry may need it as its base.

    Raises:
        CheckpointError: The path is no checkpoint, or one of another version of this package; or the file system
            failed. The checkpoint is unchanged.
    """
    path = as_path(path)
    try:
        completed, unreadable = _completed_by(path)
    except OSError as error:
        raise CheckpointError(f"cannot delete {path}: {error}. It is unchanged.") from error
    if completed is not None:
        warn_once(f"{path} is not deleted: it has the frozen parameters that checkpoints beside it leave out")
    elif unreadable:
        warn_once(f"{path} is not deleted: {next(iter(unreadable))} cannot be read, and may leave out what it has")
    else:
        delete(path)


def delete(path: Where) -> None:
    """Delete a checkpoint of this package or another tool, complete or torn, or a link to one; refuse other paths.

    Unlike :func:`remove`, it does not ask whether another checkpoint needs this one as its base.

    Raises:
        CheckpointError: The path is no checkpoint, or one of another version of this package; or the file system
            failed.
        CheckpointUnreadable: The file system fails to read it.
    """
    refuse_other_things(path)
    medium_of(path).remove(path)


def refuse_other_things(path: Where) -> None:
    """Refuse to delete a path that is no checkpoint, or one of another version. Raise the errors of :func:`delete`."""
    if _is_other_thing(path):
        raise CheckpointError(
            f"{path} is no checkpoint, and is not deleted. Name a checkpoint: dcp_plugin.list_checkpoints(root) has "
            f"those below a directory."
        )
    if error := other_format_at(path):
        raise CheckpointError(f"{path} is not deleted: {error}") from error


def _is_other_thing(path: Where) -> bool:
    """Return whether something is at a path, and is no checkpoint.

    Raises:
        CheckpointUnreadable: The file system fails to read it.
    """
    medium = medium_of(path)
    try:
        kind = medium.kind(path)
        if kind == "folder":
            names = [name.rstrip("/") for name in medium.open(path).names()]
            is_ours = has_traces(names) or is_workspace(path.parent.name)
            return not (is_ours or is_checkpoint_folder(medium.open(path), path.name))
        return bool(kind) and Saved(medium.open(path.parent), path.name, 0.0).examined() is None
    except FileNotFoundError:  # another process has deleted it
        return False
    except OSError as error:
        raise cannot_read(path, error) from error


def link(path: PathLike, target: PathLike) -> None:
    """Make ``path`` a link to a checkpoint, in place of the present link or checkpoint.

    Raises:
        SaveFailed: ``path`` is the base of another checkpoint.
        CheckpointError: ``path`` is no checkpoint, or one of another version of this package; or the file system
            failed. ``path`` is unchanged.
    """
    where = as_path(path)
    if not is_link(where):
        if _is_other_thing(where):
            raise CheckpointError(
                f"{where} is no checkpoint, and stays as it is: a link to {target} may not replace it. Move it away."
            )
        refuse_to_replace_other_format(where)
        refuse_to_replace_a_base(where)
    medium_of(where).link(where, as_path(target))


def _siblings_in(folder: Where, by_names: bool = True) -> tuple[dict[Where, _Sibling], dict[Where, Exception]]:
    """Return the checkpoints of this package directly in a folder, and the entries that cannot be read.

    A damaged checkpoint counts, with its base: it may be repaired.

    Args:
        by_names: Read no summary where names of files show the time, and that the checkpoint is complete without a
            base. Steps and metrics of such checkpoints are unknown.

    Raises:
        OSError: The folder cannot be listed.
    """
    patience = Patience()
    medium = snapshot(folder)  # the client of a store repeats requests by itself

    def look(entry: Listed[Any]) -> _Sibling | Exception | None:
        try:
            return patience.read(functools.partial(_look_at, entry, medium, by_names))
        except FileNotFoundError:  # another process deleted the entry
            return None
        except (CheckpointUnreadable, OSError) as error:
            return None if getattr(error, "errno", 0) == errno.ELOOP else error  # at a link to itself there is nothing
        except (CheckpointCorrupt, ValueError):
            return None

    entries = [
        entry
        for entry in patience.read(lambda: medium.entries(folder))
        if not (entry.is_file or entry.path.name == LOST_AND_FOUND or is_workspace(entry.path.name))
    ]
    siblings: dict[Where, _Sibling] = {}
    unreadable: dict[Where, Exception] = {}
    for entry, sibling in zip(entries, read_each(entries, look, medium.open(folder)), strict=True):
        if isinstance(sibling, Exception):
            unreadable[entry.path] = sibling
        elif sibling is not None:
            siblings[entry.path] = sibling
    return siblings, unreadable


def _look_at(entry: Listed[Any], medium: Medium, by_names: bool) -> _Sibling | None:
    path = entry.path
    reason = uncommitted_reason(path, medium) or ("" if entry.is_folder else "it is a link")
    if not may_have_base(path, medium):
        time = time_from_names(path, medium) if by_names and not reason else None
        if reason or time is not None:
            return None if time is None else (CheckpointState(path, True, time=time), None)
    try:
        summary = read_summary(path)
    except CheckpointUnreadable:
        raise
    except CheckpointCorrupt as error:
        reason, summary = str(error), summary_of(unpacked(medium.open(path)))
    if summary is None:  # stock DCP saved to the same path
        return None
    places = Base.of_summary(summary.base, path).places(path) if summary.base else ()
    metrics = dict(summary.metrics)
    state = CheckpointState(path, not reason, reason, summary.step, summary.time, metrics=metrics, bases=places)
    return state, summary


def _completed_by(base: Where) -> tuple[Where | None, dict[Where, Exception]]:
    """Return a checkpoint in the same folder that cannot be loaded without ``base``, and the unreadable entries.

    The entries are those of the folder that may be such a checkpoint. A symbolic link is no base.
    """
    medium = medium_of(base)
    if is_link(base) or not exists(medium.open(base), METADATA):
        return None, {}
    siblings, unreadable = _siblings_in(base.parent)
    own, save = siblings.get(base, (None, None))
    location = resolved(base)
    for path, (state, summary) in siblings.items():
        is_same_save = save is None or summary is None or summary.base.get("fingerprint") == save.index_sha256
        if location in state.bases and is_same_save:
            return path, {}
    if own is not None:
        saved = float("inf") if own.bases else own.time  # a checkpoint with a base is not a base
        unreadable = {path: error for path, error in unreadable.items() if may_need(path, saved, medium)}
    return None, unreadable


def may_need(unreadable: Where, saved: float, medium: Medium) -> bool:
    """Return whether an unreadable entry may need a checkpoint saved at this time as its base.

    A base is older than the checkpoints that need it.
    """
    with suppress(OSError):
        return medium.open(unreadable.parent).modified(unreadable.name) >= saved
    return True


def refuse_to_replace_a_base(path: Where) -> None:
    """Refuse to replace a checkpoint that is the base of another checkpoint, which could not be loaded any more.

    Raises:
        SaveFailed: Another checkpoint needs it, or a failing disk hides whether another one does.
    """
    dependent, unreadable = _completed_by(path)
    if error := next(filter(may_pass, unreadable.values()), None):
        raise SaveFailed(
            f"cannot replace {path}: {error}. That checkpoint may need the frozen parameters at {path}."
        ) from error
    if dependent is not None:
        raise SaveFailed(
            f"cannot replace {path}: the checkpoint there has the frozen parameters that {dependent} leaves "
            f"out. Choose a new name, or delete {dependent} first."
        )
