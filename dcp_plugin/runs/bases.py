"""Checkpoints that others need, because these leave out what a base has (``trainable_only``).

The rule: no save and no deletion takes a base from a checkpoint that could not be loaded without it.
"""

from __future__ import annotations

import functools
from contextlib import suppress

from dcp_plugin.errors import CheckpointCorrupt, CheckpointUnreadable, SaveFailed
from dcp_plugin.format import METADATA, exists
from dcp_plugin.format.summary import Base, Summary
from dcp_plugin.media import Medium, is_workspace, medium_of, snapshot
from dcp_plugin.media.packed import may_have_base
from dcp_plugin.paths import Where, is_link, resolved
from dcp_plugin.runs.patience import LOST_AND_FOUND, Patience, may_pass
from dcp_plugin.storage.published import read_summary, said_base


def completed_by(base: Where) -> tuple[Where | None, dict[Where, Exception]]:
    """Return a checkpoint in the same directory that cannot be loaded without this one; and the entries there that may
    be one, and cannot be read. Symlinks are ignored."""
    medium = medium_of(base)
    if is_link(base) or not exists(medium.open(base), METADATA):
        return None, {}
    summary: Summary | None = None
    with suppress(CheckpointCorrupt):
        summary = read_summary(base)
    own = summary.index_sha256 if summary else ""
    patience = Patience()
    medium = snapshot(base.parent)  # requests to a store have been repeated by its client
    unreadable: dict[Where, Exception] = {}
    for one in patience.read(lambda: medium.entries(base.parent)):
        checkpoint: Where = one.path
        is_none = one.is_file or checkpoint.name == LOST_AND_FOUND or is_workspace(checkpoint.name)
        if is_none or not may_have_base(checkpoint, medium):
            continue
        try:
            said = patience.read(functools.partial(said_base, checkpoint, medium))
            needed = said and _is_base(base, own, Base.of_summary(said, checkpoint), checkpoint)
            if needed and not _is_replaced(checkpoint):
                return checkpoint, {}
        except FileNotFoundError:  # deleted meanwhile
            continue
        except (CheckpointUnreadable, OSError) as error:
            if summary is None or (not summary.base and may_need(checkpoint, summary.time, medium)):
                unreadable[checkpoint] = error
        except (CheckpointCorrupt, ValueError):
            continue
    return None, unreadable


def may_need(unreadable: Where, saved: float, medium: Medium) -> bool:
    """Return whether an entry that cannot be read may need a checkpoint saved at this time as its base: a base is older
    than the checkpoints that need it."""
    with suppress(OSError):
        return medium.open(unreadable.parent).modified(unreadable.name) >= saved
    return True


def refuse_to_replace_a_base(path: Where) -> None:
    """Refuse to replace a checkpoint that completes another one, which could not be loaded any more.

    Raises:
        SaveFailed: It does, or a failing disk hides whether it does.
    """
    dependent, unreadable = completed_by(path)
    if error := next(filter(may_pass, unreadable.values()), None):
        raise SaveFailed(f"cannot save {path}: {error}. It may leave out what the checkpoint there has.") from error
    if dependent is not None:
        raise SaveFailed(
            f"cannot save {path}: the checkpoint there has the frozen parameters that {dependent} leaves "
            f"out. Save to a new name, or delete {dependent} first."
        )


def _is_replaced(checkpoint: Where) -> bool:
    """Whether stock has saved over a checkpoint of ours. One that is damaged may be repaired, and needs its base."""
    try:
        return read_summary(checkpoint) is None
    except CheckpointCorrupt:
        return False


def _is_base(path: Where, fingerprint: str, said: Base, checkpoint: Where) -> bool:
    """Whether a load of the checkpoint would find its base at this path."""
    places = map(resolved, (said.path, checkpoint / said.relative))
    return resolved(path) in places and fingerprint in ("", said.fingerprint)
