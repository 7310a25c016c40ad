"""Compare the bytes of two checkpoints' keys by their stored checksums, without reading the bytes.

Tensors stored in equal chunks have hashes of the same bytes on both sides: the XXH3-64 of each block. Two different
blocks have the same hash once in 2^64 times.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from dcp_plugin.core.format.index import NO_TENSOR, CheckpointIndex, Column, Places
from dcp_plugin.core.interrupts import collector_paused

VALUE = "value"
"""Stand-in for the dtype of a key that is no tensor."""
_TELLING = 16
"""Size in bytes from which on two tensors are hardly equal by chance."""
_MOST_PARTS = 32
"""Largest number of trailing parts of a name that are compared to pair equal tensors."""


class Signature(NamedTuple):
    """The facts about the bytes of a key that are known without reading them."""

    dtype: str
    """The name of the dtype; :data:`VALUE` for a key that is no tensor."""
    shape: tuple[int, ...]
    layout: bytes
    """Boxes and sizes of the chunks. Keys of one layout have hashes of the same ranges."""
    hashes: bytes | None
    """The hashes of all blocks; None if a chunk has none."""

    def same_bytes(self, other: Signature) -> bool | None:
        """Return whether two keys of one dtype and shape have the same bytes; None if the hashes do not decide."""
        if self.layout != other.layout or self.hashes is None or other.hashes is None:
            return None
        return self.hashes == other.hashes


@collector_paused()
def signatures(index: CheckpointIndex, keys: Collection[str]) -> dict[str, Signature]:
    """Return the signature of each key.

    A checkpoint may have a million keys. Cutting lists and bytes takes a tenth of the time of slices of the columns.
    """
    table, items = index.table.by_chunk, index.places.by_item
    is_framed, length = items.place[:, 2] >= 0, items.place[:, 3]
    has_hashes = (np.diff(items.block_starts) > 0) | (is_framed & (length == 0))
    slots = np.array([index.slots[key] for key in keys], np.int64)
    dtypes = {**dict(enumerate(table.dtypes)), NO_TENSOR: VALUE}
    numbers = table.columns["dtype"][slots].tolist()
    sizes = np.stack((length, is_framed), axis=1)
    boxes = _rows(table.columns["box"], table.box_starts, slots)
    layouts = map(bytes.__add__, boxes, _rows(sizes, table.chunk_starts, slots))
    columns = (
        [dtypes[number] for number in numbers],
        table.shapes_of(slots),
        layouts,
        _if_complete(items, table.chunk_starts, has_hashes, slots),
    )
    return dict(zip(keys, map(partial(tuple.__new__, Signature), zip(*columns, strict=True)), strict=True))


def _rows(column: Column, starts: Column, slots: Column) -> list[bytes]:
    """Return the bytes of the rows of each slot."""
    data, bounds = column.tobytes(), starts * column[:1].nbytes
    return [data[begin:end] for begin, end in zip(bounds[slots].tolist(), bounds[1:][slots].tolist(), strict=True)]


def _if_complete(items: Places, chunk_starts: Column, has_hashes: Column, slots: Column) -> list[bytes | None]:
    """Return the hashes of each slot; None for a slot of which a chunk has none."""
    missing = np.concatenate(([0], np.cumsum(~has_hashes)))[chunk_starts]
    is_complete = (np.diff(missing) == 0)[slots]
    rows = _rows(items.hash, items.block_starts[chunk_starts], slots)
    return [row if complete else None for row, complete in zip(rows, is_complete.tolist(), strict=True)]


def paired(removed: Sequence[str], added: Sequence[str], nbytes: int) -> dict[str, str]:
    """Pair removed with added keys of the same bytes. Keys whose names share the longest ending are paired first."""
    pairs: dict[str, str] = {}
    least = 1 if nbytes < _TELLING else 0  # small tensors are equal by chance: the last part of the name has to agree
    most = min(_MOST_PARTS, max(key.count(".") + 1 for key in (*removed, *added)))
    for parts in range(most, least - 1, -1):
        taken = set(pairs.values())
        by_end: dict[str, deque[str]] = defaultdict(deque)
        for key in added:
            if key not in taken:
                by_end[_end(key, parts)].append(key)
        for key in removed:
            if key not in pairs and (candidates := by_end[_end(key, parts)]):
                pairs[key] = candidates.popleft()
        if len(pairs) == min(len(removed), len(added)):
            break
    return pairs


def _end(key: str, parts: int) -> str:
    return ".".join(key.split(".")[-parts:]) if parts else ""
