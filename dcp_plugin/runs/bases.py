"""Bases: checkpoints with the frozen parameters that others leave out (``trainable_only``).

The rule: no save and no deletion takes a base from a checkpoint that could not be loaded without it.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dcp_plugin.errors import CheckpointCorrupt, CheckpointUnreadable, SaveFailed
from dcp_plugin.format import METADATA, exists
from dcp_plugin.format.summary import Base
from dcp_plugin.media import Listed, Medium, is_workspace, medium_of, snapshot
from dcp_plugin.media.packed import may_have_base, time_from_names, uncommitted_reason, unpacked
from dcp_plugin.paths import Where, is_link, resolved
from dcp_plugin.runs.patience import LOST_AND_FOUND, Patience, may_pass
from dcp_plugin.storage.published import read_summary, summary_of
from dcp_plugin.types import CheckpointState


@dataclass(frozen=True)
class Sibling:
    """Checkpoint of this package in a folder of checkpoints. A damaged one needs its base: it may be repaired."""

    state: CheckpointState
    fingerprint: str = ""
    """Fingerprint of its index; empty if its summary was not read."""
    base_fingerprint: str = ""


def siblings_in(folder: Where, by_names: bool = True) -> tuple[dict[Where, Sibling], dict[Where, Exception]]:
    """Return the checkpoints of this package directly in a folder, and the entries that cannot be read.

    Args:
        by_names: Read no summary where names of files show the time, and that the checkpoint is complete without a
            base. Steps and metrics of such checkpoints are unknown.

    Raises:
        OSError: The folder cannot be listed.
    """
    patience = Patience()
    medium = snapshot(folder)  # the client of a store repeats requests by itself
    siblings: dict[Where, Sibling] = {}
    unreadable: dict[Where, Exception] = {}
    for entry in patience.read(lambda: medium.entries(folder)):
        if entry.is_file or entry.path.name == LOST_AND_FOUND or is_workspace(entry.path.name):
            continue
        try:
            sibling = patience.read(functools.partial(_look_at, entry, medium, by_names))
        except FileNotFoundError:  # another process deleted the entry
            continue
        except (CheckpointUnreadable, OSError) as error:
            unreadable[entry.path] = error
        except (CheckpointCorrupt, ValueError):
            continue
        else:
            siblings |= {} if sibling is None else {entry.path: sibling}
    return siblings, unreadable


def _look_at(entry: Listed[Any], medium: Medium, by_names: bool) -> Sibling | None:
    path = entry.path
    reason = uncommitted_reason(path, medium) or ("" if entry.is_folder else "it is a link")
    if not may_have_base(path, medium):
        time = time_from_names(path, medium) if by_names and not reason else None
        if reason or time is not None:
            return None if time is None else Sibling(CheckpointState(path, True, time=time))
    try:
        summary = read_summary(path)
    except CheckpointUnreadable:
        raise
    except CheckpointCorrupt as error:
        reason, summary = str(error), summary_of(unpacked(medium.open(path)))
    if summary is None:  # stock DCP saved to the same path
        return None
    base = Base.of_summary(summary.base, path) if summary.base else None
    places = base.places(path) if base else ()
    metrics = dict(summary.metrics)
    state = CheckpointState(path, not reason, reason, summary.step, summary.time, metrics=metrics, bases=places)
    return Sibling(state, summary.index_sha256, base.fingerprint if base else "")


def completed_by(base: Where) -> tuple[Where | None, dict[Where, Exception]]:
    """Return a checkpoint in the same folder that cannot be loaded without ``base``, and the unreadable entries.

    The entries are those of the folder that may be such a checkpoint. A symbolic link is no base.
    """
    medium = medium_of(base)
    if is_link(base) or not exists(medium.open(base), METADATA):
        return None, {}
    siblings, unreadable = siblings_in(base.parent)
    own, location = siblings.get(base), resolved(base)
    for path, sibling in siblings.items():
        is_same_save = own is None or own.fingerprint in ("", sibling.base_fingerprint)
        if location in sibling.state.bases and is_same_save:
            return path, {}
    if own is not None:
        saved = float("inf") if own.state.bases else own.state.time  # a checkpoint with a base is not a base
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
    dependent, unreadable = completed_by(path)
    if error := next(filter(may_pass, unreadable.values()), None):
        raise SaveFailed(f"cannot save {path}: {error}. It may leave out what the checkpoint there has.") from error
    if dependent is not None:
        raise SaveFailed(
            f"cannot save {path}: the checkpoint there has the frozen parameters that {dependent} leaves "
            f"out. Save to a new name, or delete {dependent} first."
        )
