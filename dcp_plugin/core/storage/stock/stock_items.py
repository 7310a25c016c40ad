"""Items whose layout the index does not have: those of stock DCP, and tensors that are stored as one object.

A stock item with the layout that this package writes is read like our own (:func:`recognise`). Other items are read
completely, and go through ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import prod

import torch

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, UnsafeCheckpoint
from dcp_plugin.core.format.index import Location, StoredChunk
from dcp_plugin.core.format.payload import Frame, frame_if_possible
from dcp_plugin.core.format.values import decode_tensor
from dcp_plugin.core.media import Readable
from dcp_plugin.core.paths import Where
from dcp_plugin.core.storage import reading
from dcp_plugin.core.storage.fetch import Fetch, of_item
from dcp_plugin.core.tensors._torch import undo_transforms
from dcp_plugin.core.tensors.kinds import size_of

_MOST_FRAME = 1 << 20
"""Bytes that exceed the length of any frame of a tensor's payload, in all versions of torch."""
_HEADS_GAP, _HEADS_TOGETHER = 64 << 10, 1 << 20
"""Bytes between the beginnings of two items that one read takes, and of the largest such read."""

Transforms = tuple[str, ...]
"""Stream transforms of an item, as the checkpoint names them."""


def without_transforms(
    path: Where, item: bytes | bytearray, location: Location, transforms: Transforms, limit: int = -1
) -> bytes | bytearray:
    """Return an item without its stream transforms; of an item that expands beyond ``limit``, only the first bytes."""
    try:
        return undo_transforms(item, transforms, limit) if transforms else item
    except Exception as error:  # each transform raises its own types
        raise CheckpointCorrupt(
            f"{path}: {location.file} has no valid {'+'.join(transforms)} data at byte {location.offset}: {error}"
        ) from error


def tensor_in(
    path: Where,
    key: str,
    item: bytearray,
    chunk: StoredChunk,
    dtype: torch.dtype,
    box: tuple[tuple[int, ...], tuple[int, ...]],
    target: torch.Tensor,
    transforms: Transforms,
) -> torch.Tensor:
    """Return a box of the tensor in an item, which is loaded through torch.

    Args:
        path: The checkpoint, for messages.
        box: Offsets and lengths in the chunk.
        target: Tensor that the box will fill.
    """
    label = f"the item of {key} in {chunk.location.file}"
    largest = prod(chunk.sizes) * dtype.itemsize + size_of(target) + _MOST_FRAME
    try:
        stored = decode_tensor(without_transforms(path, item, chunk.location, transforms, largest), target)
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{path}: {key} is {error}") from error
    except Exception as error:
        raise CheckpointCorrupt(f"{label} is damaged: {error}") from error
    if not isinstance(stored, torch.Tensor) or tuple(stored.shape) != chunk.sizes:
        raise CheckpointCorrupt(f"{label} is not the tensor that the metadata describes")
    if box[1] == chunk.sizes:
        return stored
    try:
        with torch.no_grad():
            return stored[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))]
    except Exception as error:  # the class may raise any type
        raise CheckpointMismatch(
            f"{path}: {key} is stored as one {type(stored).__name__}, of which no part can be taken ({error}). Load it "
            f"with the sharding that it had when it was saved."
        ) from error


def recognise(
    files: Readable, wanted: Iterable[tuple[StoredChunk, torch.dtype]], known: dict[tuple[str, int], StoredChunk]
) -> int:
    """Find the payloads in items of a stock checkpoint, and record them in ``known`` by file and offset.

    The beginning of an item holds the pickle with dtype, shape and strides. If it equals the one that this package
    writes, but for CRCs, the payload is at the same place too. Items of other versions of torch stay unknown.

    Returns:
        The number of bytes that were read.
    """
    heads: dict[tuple[str, int], Fetch] = {}
    for chunk, dtype in wanted:
        place, around = (chunk.location.file, chunk.location.offset), frame_if_possible(dtype, chunk.sizes)
        if place not in known and around is not None and around.length == chunk.location.length:
            head = replace(chunk.location, length=around.payload_offset)
            heads[place] = of_item("", head, partial(_compare, chunk, around, known), block=None)
    cost = files.cost
    near = replace(cost, gap=min(cost.gap, _HEADS_GAP), most=_HEADS_TOGETHER)
    try:
        return reading.read(files, reading.batches_of(list(heads.values()), near), io_threads=1).read
    except CheckpointError:  # the read of the payload reports the error
        return 0


def _compare(chunk: StoredChunk, around: Frame, known: dict[tuple[str, int], StoredChunk], head: bytearray) -> None:
    if around.begins(head):
        location = replace(chunk.location, payload_offset=around.payload_offset, payload_length=around.payload_length)
        known[location.file, location.offset] = replace(chunk, location=location)
