"""Quarantine of damaged checkpoints: a damaged checkpoint stays in place, and no later start loads it.

A quarantined checkpoint keeps its name and gets a file with the reason (``dcp_plugin.damaged``). A directory with that
file counts as no checkpoint. ``latest`` and every automatic resume pass over it. No retention policy counts or deletes
it. A save to the same name replaces it. Deleting the file ends the quarantine.

The rule: no load but that of an automatic resume quarantines a checkpoint. The checkpoint must be of this package, and
its bytes must differ from those that were saved. A file system that fails to read
(:class:`~dcp_plugin.CheckpointUnreadable`) is no reason, and neither is a state that does not fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointUnreadable, logger
from dcp_plugin.core.format import DAMAGED, exists
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.paths import PathLike, Where, as_path
from dcp_plugin.core.storage.published import read_summary

if TYPE_CHECKING:
    from dcp_plugin.core.ranks.collectives import Ranks


_chosen: dict[Where, bool] = {}
"""Checkpoint chosen by an automatic resume of this process -> True if an integration loads it (:func:`note_chosen`)."""


def note_chosen(path: PathLike, by_framework: bool = True) -> None:
    """Record that an automatic resume has chosen a checkpoint, which its load may quarantine.

    Args:
        by_framework: True if an integration chose it, and loads it by ``Internals.restore``. If False, the caller got
            the path, and may load it by either method.
    """
    _chosen[as_path(path)] = by_framework


@contextmanager
def quarantine_damaged(ranks: Ranks, path: PathLike, restores: bool) -> Iterator[None]:
    """Quarantine a damaged checkpoint if the enclosed load is that of an automatic resume. Collective.

    The error is raised all the same: some frameworks cannot continue with an older checkpoint after a failed load. The
    next start takes an older checkpoint.

    The first successful load ends a resume whose checkpoint the caller loads. It does not end a resume of an
    integration, which may need several loads.

    Args:
        restores: The load is :meth:`~dcp_plugin.checkpointer.Internals.restore`, which integrations call.

    Raises:
        CheckpointCorrupt: The error of the load, with a note if the checkpoint is quarantined.
    """
    checkpoint_path = as_path(path)
    try:
        yield
    except CheckpointCorrupt as error:
        damage, is_resume = error, checkpoint_path in _chosen and (restores or not _chosen[checkpoint_path])
        if ranks.from_zero(f"set {path} aside", lambda: is_resume and set_aside(checkpoint_path, damage)):
            error.add_note("It is quarantined: the next automatic resume takes the checkpoint before it.")
        raise
    if checkpoint_path in _chosen and restores:
        _chosen[checkpoint_path] = True
    elif not _chosen.get(checkpoint_path, True):
        del _chosen[checkpoint_path]


def set_aside(path: Where, error: CheckpointCorrupt) -> bool:
    """Quarantine a checkpoint whose load failed with ``error``, if the checkpoint is damaged. On rank 0.

    If the directory is not writable, the damage is only logged.

    Returns:
        True if the checkpoint is damaged.
    """
    if not _is_damage(path, error):
        return False
    medium = medium_of(path)
    if exists(medium.open(path), DAMAGED):
        return True
    outcome = f"It is kept with a file {DAMAGED} in it, and passed over from now on."
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    try:
        medium.note(
            path / DAMAGED,
            (
                f"{now}: a load of this checkpoint failed: {error}\n"
                f"It is not taken for a checkpoint while this file is in it: no automatic resume takes it, and nothing "
                f"but a save to the same name deletes it. Delete this file to use it again.\n"
            ).encode(),
            only_new=True,
        )
    except OSError as failure:
        outcome = f"It cannot be marked ({failure.strerror}), so the next start will find it again: delete or move it."
    logger.warning("%s is DAMAGED: %s. %s", path, str(error).rstrip("."), outcome)
    return True


def _is_damage(path: Where, error: CheckpointCorrupt) -> bool:
    """Return whether an error is about the bytes of the checkpoint at ``path``.

    A ``load_state_dict`` or a hook may load another checkpoint during the load, and that one may be damaged. The
    message decides, because an error from another rank arrives as a class and a text. So each message about damage
    must have the path of its checkpoint.
    """
    if isinstance(error, CheckpointUnreadable) or str(path) not in str(error):
        return False
    try:
        return read_summary(path) is not None  # else another tool saved to the same path
    except CheckpointCorrupt:  # the summary itself is damaged
        return True
