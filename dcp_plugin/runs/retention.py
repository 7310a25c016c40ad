"""Deletion of checkpoints: only of checkpoints, and never of one that another checkpoint needs.

Every deletion of this package goes through :func:`delete`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from dcp_plugin.errors import CheckpointCorrupt, CheckpointError
from dcp_plugin.format import has_traces
from dcp_plugin.media import is_workspace, medium_of
from dcp_plugin.paths import PathLike, Where, as_path
from dcp_plugin.retention import Retention
from dcp_plugin.runs.bases import completed_by, siblings_in
from dcp_plugin.runs.catalog import step_in_name
from dcp_plugin.runs.foreign import Saved, is_checkpoint_folder
from dcp_plugin.runs.patience import cannot_read
from dcp_plugin.storage.published import read_summary
from dcp_plugin.types import CheckpointState

logger = logging.getLogger("dcp_plugin")


def prune(newest: Where, policy: Retention) -> None:
    """Delete the checkpoints in the folder of ``newest``, which has just been saved, that a policy does not keep.

    Checkpoints of other tools stay, and so does a checkpoint of this package to whose path another tool has saved. So
    do parts of the same checkpoint, such as ``checkpoint-5/model`` beside ``checkpoint-5/optimizer``.
    """
    by_names = policy.every_steps is None and policy.best is None
    siblings, _ = siblings_in(newest.parent, by_names)
    states = [
        replace(sibling.state, time=float("inf")) if path == newest else sibling.state
        for path, sibling in siblings.items()
    ]
    in_folder_of_step = step_in_name(newest.parent) is not None
    doomed = policy.select(states)
    if any(state.step is None for state in doomed):  # their steps decide which of them are parts of the newest
        steps = {path: _step_of(path) for path in (newest, *(state.path for state in doomed))}
        doomed = policy.select([replace(state, step=steps.get(state.path, state.step)) for state in states])
    remove_all(state.path for state in doomed if not (in_folder_of_step and state.step is None))


def _step_of(path: Where) -> int | None:
    with suppress(CheckpointCorrupt, OSError):
        return summary.step if (summary := read_summary(path)) else None
    return None


def rotate(oldest_first: Iterable[Where], keep: int, delete: Callable[[Where], None] | None = None) -> None:
    """Delete all checkpoints except the last ``keep``, for a framework with its own order."""
    states = [CheckpointState(path, True, time=number) for number, path in enumerate(oldest_first)]
    remove_all((state.path for state in Retention(newest=keep).select(states)), delete)


def remove_all(paths: Iterable[Where], delete: Callable[[Where], None] | None = None) -> None:
    """Delete checkpoints. Log failures: the newer checkpoint is published, and old ones do no harm."""
    for path in paths:
        try:
            (delete or remove)(path)
        except (OSError, CheckpointError) as error:
            logger.warning("could not delete the old checkpoint %s: %s", path, error)


def remove(path: PathLike) -> None:
    """Delete a checkpoint. At no moment does a partly deleted directory count as a checkpoint.

    Keep the checkpoint, with a warning in the log, if it is the base of another one in its folder (``trainable_only``),
    or if an unreadable entry may need it as its base.

    Raises:
        CheckpointError: The path is no checkpoint; or the file system failed, and the checkpoint is unchanged.
    """
    path = as_path(path)
    try:
        completed, unreadable = completed_by(path)
    except OSError as error:
        raise CheckpointError(f"cannot delete {path}: {error}. It is there as it was.") from error
    if completed is not None:
        _warn_once(f"{path} is not deleted: it has the frozen parameters that checkpoints beside it leave out")
    elif unreadable:
        _warn_once(f"{path} is not deleted: {next(iter(unreadable))} cannot be read, and may leave out what it has")
    else:
        delete(path)


def delete(path: Where) -> None:
    """Delete a checkpoint of this package or another tool, complete or torn, or a link to one; refuse other paths.

    Raises:
        CheckpointError: The path is no checkpoint, or the file system failed.
        CheckpointUnreadable: The file system fails to read it.
    """
    refuse_other_things(path)
    medium_of(path).remove(path)


def refuse_other_things(path: Where) -> None:
    """Refuse a path that is no checkpoint. Raise the errors of :func:`delete`."""
    medium = medium_of(path)
    try:
        kind = medium.kind(path)
        if kind == "folder":
            names = [name.rstrip("/") for name in medium.open(path).names()]
            is_ours = has_traces(names) or is_workspace(path.parent.name)
            is_checkpoint = is_ours or is_checkpoint_folder(medium.open(path), path.name)
        else:
            is_checkpoint = not kind or Saved(medium.open(path.parent), path.name, 0.0).examined() is not None
    except OSError as error:
        raise cannot_read(path, error) from error
    if not is_checkpoint:
        raise CheckpointError(
            f"{path} is no checkpoint, and is not deleted. Name a checkpoint: dcp_plugin.list_checkpoints(root) has "
            f"those below a directory."
        )


@functools.cache  # a policy is applied after every save
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
