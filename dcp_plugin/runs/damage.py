"""A checkpoint that turns out to be damaged while it is loaded is set aside: it stays, and no start takes it again.

It keeps its name, and gets a file that says what was found (``dcp_plugin.damaged``). With that file in it a directory
counts as no checkpoint: ``latest`` and every automatic resume pass over it, ``keep_last`` neither counts nor deletes
it, and a save to the same name replaces it. Who deletes the file has the checkpoint back as it was.

Only what this package saved is set aside, only if an automatic resume has chosen it, and only for bytes that are not
those that were saved: not for a file system that fails to read (:class:`~dcp_plugin.CheckpointUnreadable`), not for
what does not fit, and not if it is the base that is damaged, which other checkpoints have in common.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dcp_plugin.errors import CheckpointCorrupt, CheckpointUnreadable
from dcp_plugin.format import DAMAGED, exists
from dcp_plugin.format.summary import Base
from dcp_plugin.media import medium_of
from dcp_plugin.paths import PathLike, Where, as_path, resolved
from dcp_plugin.storage.published import read_summary

if TYPE_CHECKING:
    from dcp_plugin.ranks import Ranks

logger = logging.getLogger("dcp_plugin")

_chosen: set[Where] = set()
"""What automatic resumes of this process have chosen, and nobody has named."""


def note_chosen(path: PathLike) -> None:
    """Remember that an automatic resume has chosen this checkpoint: it may be set aside."""
    _chosen.add(as_path(path))


@contextmanager
def setting_aside(ranks: Ranks, path: PathLike) -> Iterator[None]:
    """Around a load: if an automatic resume has chosen the checkpoint and it turns out to be damaged, it is set aside.
    Not every framework can go on with an older one, but its next start does. Collective.

    Raises:
        CheckpointCorrupt: Of the load; with a note if it was set aside.
    """
    try:
        yield
    except CheckpointCorrupt as error:
        damage, where = error, as_path(path)
        if ranks.from_zero(f"set {path} aside", lambda: where in _chosen and set_aside(where, damage)):
            error.add_note("It is set aside: the next automatic resume goes on with the checkpoint before it.")
        raise


def set_aside(path: Where, error: CheckpointCorrupt) -> bool:
    """Set a checkpoint aside if ``error``, with which a load of it has failed, means that it is damaged. On rank 0.

    Returns:
        Whether it is damaged; where nothing can be written, that is only logged.
    """
    if not _is_damage(path, error):
        return False
    medium = medium_of(path)
    if exists(medium.open(path), DAMAGED):
        return True
    kept = f"It is kept with a file {DAMAGED} in it, and passed over from now on."
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
        kept = f"It cannot be marked ({failure.strerror}), so the next start will find it again: delete or move it."
    logger.warning("%s is DAMAGED: %s. %s", path, str(error).rstrip("."), kept)
    return True


def _is_damage(path: Where, error: CheckpointCorrupt) -> bool:
    if isinstance(error, CheckpointUnreadable) or str(path) not in str(error) or not _is_ours(path):
        return False
    with suppress(CheckpointCorrupt):
        summary = read_summary(path)
        if summary is None:  # another tool has saved there
            return False
        if summary.base:
            base = Base.of_summary(summary.base, path)
            places = {str(base.path), str(resolved(base.path)), str(resolved(path / base.relative))}
            return not any(f"{place}/" in str(error) for place in places)
    return True


def _is_ours(path: Where) -> bool:
    try:
        return read_summary(path) is not None
    except CheckpointCorrupt:
        return True  # its summary is what is damaged
