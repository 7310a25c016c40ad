"""Refusal of a root to which several ranks of a launch save separately, each without a process group.

The ranks would resume from each other's checkpoints, or replace them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.media import Listed, is_workspace, medium_of, workspaces_in
from dcp_plugin.core.paths import Where
from dcp_plugin.core.ranks.launcher import Launch
from dcp_plugin.core.storage.published import summary_if_readable


def refuse_other_ranks(root: Where, launch: Launch) -> None:
    """Refuse a root to which another rank of the same launch saves without a process group.

    Args:
        launch: :attr:`Ranks.launch` of this process.

    Raises:
        CheckpointMismatch: The root has a checkpoint of that rank, or a save in flight.
    """
    medium = medium_of(root)
    entries: list[Listed[Any]] = []
    for folder in (root, *workspaces_in(root)):
        with suppress(OSError):
            entries += medium.entries(folder)
    for entry in entries:
        in_flight = entry.in_flight() if is_workspace(entry.path.parent.name) else None
        if in_flight is not None and (rank := launch.rank_in(in_flight.launch)) is not None:
            raise _without_group(root / in_flight.target, rank, launch)
        if entry.is_folder:
            refuse_another_rank(entry.path, launch)


def refuse_another_rank(path: Where, launch: Launch) -> None:
    """Refuse a checkpoint that another rank of the same launch has saved without a process group.

    Args:
        launch: :attr:`Ranks.launch` of this process.

    Raises:
        CheckpointMismatch: Both ranks have no process group, and the checkpoint is of the other rank.
    """
    summary = summary_if_readable(path)
    if summary is None or summary.world_size > 1:
        return
    if (rank := launch.rank_in(summary.launch)) is not None:
        raise _without_group(path, rank, launch)


def _without_group(path: Where, rank: int, launch: Launch) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"{path} is of rank {rank} of the same launch by {launch.launcher}, and this is rank {launch.rank} of "
        f"{launch.world_size}, without a process group: the ranks would resume from each other's checkpoints, or "
        f"replace them. Call torch.distributed.init_process_group() before the first save or load. Ranks that are to "
        f"train by themselves need a root each; Checkpointer(solo=True) accepts any checkpoint."
    )
