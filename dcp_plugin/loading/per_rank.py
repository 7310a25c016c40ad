"""Match of values that differ between ranks (:class:`~dcp_plugin.PerRank`): each rank's entry in the checkpoint."""

from __future__ import annotations

from collections import defaultdict

from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.loading.matching import LoadMode, Matching
from dcp_plugin.state.per_rank import RankEntry
from dcp_plugin.types import Wanted


def name_on_rank(matching: Matching, entry: RankEntry) -> str | None:
    """Return the name in the checkpoint for a per-rank value; None if the value stays as it is.

    Problems, warnings and missing keys are added to the match.
    """
    own, index, path = entry.name_on(entry.rank), matching.index, matching.path
    entries = _entries(index, entry)
    if not entries:
        shared = entry.shared_name
        is_shared = shared in index or bool(index.under(f"{shared}."))
        if is_shared and entry.world_size > 1:
            matching.warn(f"{path} has one value of {shared!r} for all ranks: each rank takes it.")
        return shared if is_shared else own
    if entry.is_derived:
        from dcp_plugin.state.random_streams import about_new_ranks  # the only objects of this kind

        if about := about_new_ranks(len(entries), entry.world_size):
            matching.warn(f"{path}: {about}.")
        return own if entry.rank in entries else entry.name_on(min(entries))
    saved_by = (matching.summary and matching.summary.world_size) or max(entries) + 1
    if saved_by == entry.world_size or (saved_by > entry.world_size and not entry.is_position):
        return own
    keys = [own + key for key in entries[min(entries)]]
    matching.keys += keys
    is_kept = entry.is_position or entry.rank not in entries
    if matching.partial is None or any(map(matching.partial.selects, keys)):
        line = _about_ranks(entry, saved_by)
        if matching.mode is LoadMode.RESTORE:
            matching.warn(f"{path}: {line}. To continue exactly, resume on {saved_by} ranks.")
        else:
            matching.absent.append(f"{line} with strict=False, or in a resume_or_init. Else load on {saved_by} ranks")
        matching.match.report.missing.extend([own] if is_kept else [])
    if is_kept:
        matching.match.wanted[own] = Wanted()
        return None
    return own


def _entries(index: CheckpointIndex, entry: RankEntry) -> dict[int, list[str]]:
    """Return the stored keys of a per-rank value by rank, without the value's name in front."""
    entries: dict[int, list[str]] = defaultdict(list)
    steps = entry.above.count(".") + 1
    for key in index.under(f"{entry.above}."):
        rank = key.removeprefix(f"{entry.above}.").partition(".")[0]
        # The step is text. An integer step would be the index of a list.
        if rank.isdecimal() and index.path_of(key)[steps : steps + 1] == (rank,):
            name = entry.name_on(int(rank))
            if f"{key}.".startswith(f"{name}."):
                entries[int(rank)].append(key.removeprefix(name))
    return entries


def _about_ranks(entry: RankEntry, saved_by: int) -> str:
    """Return a line about a per-rank value in a checkpoint that another number of ranks saved."""
    name, world_size = entry.shared_name, entry.world_size
    if entry.is_position:
        return (
            f"{name!r} has the positions of {saved_by} ranks in the data, which {world_size} ranks divide otherwise: "
            f"the data starts at the beginning"
        )
    to_last = "" if world_size == saved_by + 1 else f" to {world_size - 1}"
    return f"{name!r} has the values of {saved_by} ranks, and none for rank {saved_by}{to_last}: these keep their own"
