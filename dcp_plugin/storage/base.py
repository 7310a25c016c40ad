"""The base of a checkpoint: another checkpoint with the frozen tensors that this one leaves out."""

from __future__ import annotations

from dataclasses import replace

from dcp_plugin.errors import CheckpointError, CheckpointMismatch, CheckpointNotFound
from dcp_plugin.format import derived_index
from dcp_plugin.format.summary import Base
from dcp_plugin.media import RangedFile, Readable, ReadCost
from dcp_plugin.media.view import View
from dcp_plugin.paths import Where, are_on_same_medium, options_of, resolved, with_options
from dcp_plugin.records import OpenCheckpoint
from dcp_plugin.storage.open import open_checkpoint


class _WithBase(View):
    """Files of a checkpoint, and those of its base under their full paths."""

    def __init__(self, own: Readable, base: Readable) -> None:
        super().__init__(own)
        self._base = base

    @property
    def cost(self) -> ReadCost:
        return max(self.files.cost, self._base.cost, key=lambda cost: cost.gap)

    def located(self, name: str) -> tuple[Readable, str]:
        below = f"{self._base.where}/"
        return (self._base, name.removeprefix(below)) if name.startswith(below) else (self.files, name)

    def mark_unreliable(self, file: RangedFile) -> bool:
        return self.files.mark_unreliable(file) or self._base.mark_unreliable(file)

    def moved(self) -> bool:
        return self.files.moved() or self._base.moved()

    def close(self) -> None:
        self.files.close()
        self._base.close()


def with_base(opened: OpenCheckpoint, base: Where | None) -> OpenCheckpoint:
    """Return the checkpoint together with its base.

    Raises:
        CheckpointNotFound: The base does not exist.
        CheckpointMismatch: The checkpoint at the path of the base is another one.
    """
    left_out = opened.index.left_out
    recorded = Base.of_summary(opened.summary.base if opened.summary else {}, opened.path)
    base_checkpoint = _find_base(opened, recorded, base)
    lost = [key for key in left_out.values() if key not in base_checkpoint.index]
    if lost:
        base_checkpoint.close()
        raise CheckpointMismatch(
            f"{base_checkpoint.path} has no {lost[0]}, but {opened.path} leaves it out and has this base"
        )
    added = derived_index.selected(base_checkpoint.index, left_out, {}, below=base_checkpoint.files.where)
    added.linkable = added.files  # which have more items than those of this index
    files = _WithBase(opened.files, base_checkpoint.files)
    return replace(opened, files=files, index=derived_index.joined(opened.index, added), base=base_checkpoint)


def _find_base(opened: OpenCheckpoint, recorded: Base, moved: Where | None) -> OpenCheckpoint:
    """Return the base: at the path from the caller, from the checkpoint, or at the same relative path.

    A copy of a run has a copy of the base at the relative path. The path in the checkpoint is that of the original,
    which may be damaged or replaced meanwhile.

    Raises:
        CheckpointError: No place has the base. The error is that of the first place with any other checkpoint.
    """
    problem = f"{opened.path} leaves out {len(opened.index.left_out)} frozen tensors that its base has"
    refusal: CheckpointError | None = None
    for place in [moved] if moved else _places_of(recorded, opened.path):
        try:
            candidate = open_checkpoint(resolved(place), complete=False)
        except (CheckpointNotFound, OSError, ValueError):  # ValueError: no valid file name
            continue
        except CheckpointError as error:
            refusal = refusal or error
            continue
        if candidate.fingerprint == recorded.fingerprint:
            return candidate
        candidate.close()
        refusal = refusal or CheckpointMismatch(
            f"{problem}; {candidate.path} is not that base: its fingerprint is {candidate.fingerprint[:12]} instead of "
            f"{recorded.fingerprint[:12]}. The base was saved at {recorded.path}. Name it with base=PATH."
        )
    raise refusal or CheckpointNotFound(
        f"{problem}, but {moved or recorded.path} does not exist. If the base was moved, name it with base=PATH."
    )


def _places_of(recorded: Base, checkpoint: Where) -> list[Where]:
    """Return the possible paths of a base.

    The path in a checkpoint is followed only on the same medium: its author must not choose which server is contacted.
    """
    relative = checkpoint / recorded.relative
    if not are_on_same_medium(recorded.path, checkpoint):
        return [relative]
    return [with_options(recorded.path, options_of(checkpoint)), relative]
