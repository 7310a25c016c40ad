"""Deletes old checkpoints: none that is needed, and nothing that is no checkpoint."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from dcp_plugin.errors import CheckpointCorrupt, CheckpointError
from dcp_plugin.format import has_traces
from dcp_plugin.media import Medium, is_workspace, medium_of, snapshot
from dcp_plugin.media.packed import time_from_names, uncommitted_reason
from dcp_plugin.paths import PathLike, Where, as_path
from dcp_plugin.runs.bases import completed_by
from dcp_plugin.runs.foreign import Saved, is_checkpoint_folder
from dcp_plugin.runs.patience import Patience, cannot_read
from dcp_plugin.storage.published import read_summary

logger = logging.getLogger("dcp_plugin")


def prune(newest: Where, keep: int) -> None:
    """Delete all but the newest ``keep`` committed checkpoints among the siblings of ``newest``.

    Only checkpoints of this package are candidates: what others wrote, over one of ours too, is not ours to delete. Nor
    is a checkpoint of the same step, such as ``checkpoint-5/model`` beside ``checkpoint-5/optimizer``.
    """
    times: dict[Where, float] = {}
    patience = Patience()
    medium = snapshot(newest.parent)  # requests to a store have been repeated by its client
    for one in patience.read(lambda: medium.entries(newest.parent)):
        if one.path != newest and one.is_folder:
            with suppress(CheckpointCorrupt, OSError):
                time = patience.read(functools.partial(_time_if_ours, one.path, medium))
                if time is not None:
                    times[one.path] = time
    oldest = sorted(times, key=times.__getitem__)[: max(0, len(times) - keep + 1)]
    remove_oldest([path for path in oldest if not _have_the_same_step(path, newest)], 0)


def _have_the_same_step(*paths: Where) -> bool:
    with suppress(CheckpointCorrupt, OSError):
        steps = {summary.step if (summary := read_summary(path)) else None for path in paths}
        return len(steps) == 1 and steps != {None}
    return False


def _time_if_ours(path: Where, medium: Medium) -> float | None:
    if uncommitted_reason(path, medium):
        return None
    if (time := time_from_names(path, medium)) is not None:
        return time
    summary = read_summary(path)
    return summary.time if summary is not None else None


def remove_oldest(paths: Sequence[Where], keep: int, delete: Callable[[Where], None] | None = None) -> None:
    """Delete all but the last ``keep`` of ``paths``, which are sorted from old to new.

    What cannot be deleted is logged: the checkpoint that replaces it is published, and an old one does no harm.
    """
    # The newest of them first: a base can go only after the checkpoints that it completes.
    for path in reversed(paths[: max(0, len(paths) - keep)]):
        try:
            (delete or remove)(path)
        except (OSError, CheckpointError) as error:
            logger.warning("could not delete the old checkpoint %s: %s", path, error)


def remove(path: PathLike) -> None:
    """Delete a checkpoint, so that at no moment something half-deleted can be taken for one.

    One that completes another beside it (``trainable_only``), or may complete one that cannot be read, is kept, with a
    warning in the log.

    Raises:
        CheckpointError: The file system failed, and it is there as it was.
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
        medium_of(path).remove(path)


def refuse_to_remove_other_things(path: Where) -> None:
    """Refuse to delete anything but a checkpoint of this package or another tool, complete or torn, or a link to one.

    Raises:
        CheckpointError: The path is something else.
        CheckpointUnreadable: The file system fails to read it.
    """
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


@functools.cache  # ``keep_last`` comes by after every save
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
