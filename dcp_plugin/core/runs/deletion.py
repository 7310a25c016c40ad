"""Deletion of checkpoints. The rule: nothing but a checkpoint is deleted.

Every deletion for a policy, a framework or a user therefore goes through :func:`remove`, which refuses other paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dcp_plugin.core.errors import CheckpointError, logger
from dcp_plugin.core.format import has_traces
from dcp_plugin.core.media import (
    Listed,
    Medium,
    is_workspace,
    medium_of,
    other_format_at,
    refuse_real_run,
    refuse_to_replace_other_format,
    snapshot,
    uncommitted_reason,
)
from dcp_plugin.core.media.packed_view import time_from_names
from dcp_plugin.core.paths import PathLike, Where, as_path, is_link
from dcp_plugin.core.retention import Retention
from dcp_plugin.core.runs.catalog import step_in_name
from dcp_plugin.core.runs.foreign import Saved, is_checkpoint_folder
from dcp_plugin.core.runs.scan import LOST_AND_FOUND, Patience, cannot_read, read_each
from dcp_plugin.core.storage.published import read_summary, summary_if_readable
from dcp_plugin.core.types import CheckpointState


def prune(newest: Where, keep_last: int | Retention) -> None:
    """Delete the checkpoints in the folder of ``newest``, which has just been saved, that ``keep_last`` does not keep.

    These stay: checkpoints of other tools; a checkpoint of this package to whose path another tool has saved; and parts
    of the same checkpoint, such as ``checkpoint-5/model`` and ``checkpoint-5/optimizer``.
    """
    policy = keep_last if isinstance(keep_last, Retention) else Retention(newest=int(keep_last))
    by_names = policy.every_steps is None and policy.best is None
    found = _states_in(newest.parent, by_names)
    # The checkpoint that was just saved counts as the newest: the recorded time of another one may be in the future.
    states = [replace(state, time=float("inf")) if path == newest else state for path, state in found.items()]
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
        if time == found[path].time:  # not saved again, or deleted, meanwhile
            remove(path)

    remove_all((state.path for state in doomed if not (in_folder_of_step and state.step is None)), remove_unchanged)


def rotate(oldest_first: Iterable[Where], keep: int, remove_one: Callable[[Where], None]) -> None:
    """Delete all checkpoints except the last ``keep``, for a framework with its own order."""
    remove_all(reversed([*oldest_first][:-keep]), remove_one)


def remove_all(paths: Iterable[Where], remove_one: Callable[[Where], None]) -> None:
    """Delete checkpoints, and log failures: the newer checkpoint is published, and old ones do no harm."""
    for path in paths:
        try:
            remove_one(path)
        except (OSError, CheckpointError) as error:
            logger.warning("could not delete the old checkpoint %s: %s", path, error)


def remove(path: PathLike) -> None:
    """Delete a checkpoint of this package or another tool, complete or torn, or a link to one. Refuse other paths.

    A partly deleted directory never counts as a checkpoint.

    Raises:
        CheckpointError: The path is no checkpoint, the checkpoint is of another version of this package, or the file
            system failed. The checkpoint is unchanged.
        CheckpointUnreadable: The file system fails to read it.
    """
    where = as_path(path)
    refuse_real_run(where.parent, medium_of(where))
    refuse_other_things(where)
    medium_of(where).remove(where)


def refuse_other_things(path: Where) -> None:
    """Raise the errors of :func:`remove` for a path that is no checkpoint, or a checkpoint of another version."""
    if _is_other_thing(path):
        raise CheckpointError(
            f"{path} is no checkpoint, and is not deleted. Name a checkpoint: dcp_plugin.list_checkpoints(root) has "
            f"those below a directory."
        )
    if error := other_format_at(path, medium_of(path).open(path)):
        raise CheckpointError(f"{path} is not deleted: {error}") from error


def _is_other_thing(path: Where) -> bool:
    """Return whether a path exists and is no checkpoint.

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
        CheckpointError: ``path`` is no checkpoint, the checkpoint is of another version of this package, or the file
            system failed. ``path`` is unchanged.
    """
    where = as_path(path)
    refuse_real_run(where.parent, medium_of(where))
    if not is_link(where):
        if _is_other_thing(where):
            raise CheckpointError(
                f"{where} is no checkpoint, and stays as it is: a link to {target} may not replace it. Move it away."
            )
        refuse_to_replace_other_format(where, medium_of(where).open(where))
    medium_of(where).link(where, as_path(target))


def _states_in(folder: Where, by_names: bool) -> dict[Where, CheckpointState]:
    """Return the complete checkpoints of this package directly in a folder, without those that cannot be read.

    Args:
        by_names: Read no summary of a checkpoint if names of files show its time and that it is complete. Its step and
            its metrics are then unknown.

    Raises:
        OSError: The folder cannot be listed.
    """
    patience = Patience()
    medium = snapshot(medium_of(folder), folder)  # the client of a store repeats requests by itself

    def look(entry: Listed[Any]) -> CheckpointState | None:
        with suppress(CheckpointError, OSError, ValueError):
            return patience.read(lambda: _look_at(entry, medium, by_names))
        return None

    entries = [
        entry
        for entry in patience.read(lambda: medium.entries(folder))
        if entry.is_folder and entry.path.name != LOST_AND_FOUND and not is_workspace(entry.path.name)
    ]
    states = read_each(entries, look, medium.open(folder))
    return {state.path: state for state in states if state is not None}


def _look_at(entry: Listed[Any], medium: Medium, by_names: bool) -> CheckpointState | None:
    path = entry.path
    if uncommitted_reason(path, medium):
        return None
    if by_names and (time := time_from_names(path, medium)) is not None:
        return CheckpointState(path, True, time=time)
    if (summary := read_summary(path)) is None:  # stock DCP saved to the same path
        return None
    return CheckpointState(path, True, "", summary.step, summary.time, metrics=dict(summary.metrics))
