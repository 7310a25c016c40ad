"""Tensors that are distributed over ranks, described by their chunks on this rank.

The protocols that DCP uses give the position of a shard. DTensor and ``LocalShardsWrapper`` have
``__create_chunk_list__``; torch has no public ``compute_local_shape_and_global_offset``. Since torch 2.14 a tensor may
have the fields of ``CheckpointableTensor``. Like :mod:`dcp_plugin.core.tensors._torch`, this module names private parts
of torch.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # what collectives return under no_grad
from torch.distributed._shard.sharded_tensor.api import ShardedTensor  # FSDP1 state dicts consist of these
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.tensors.kinds import (
    CHECKPOINTABLE,
    is_dense_memory,
    is_stored_whole,
    of_full,
    require_memory,
    require_parts,
)
from dcp_plugin.core.types import Box, LocalChunk, ShardedValue


def described(value: Any, any_rank: bool) -> ShardedValue:
    """Return the result of :func:`dcp_plugin.core.tensors._torch.sharded_value` for tensors that are not plain.

    They are not of torch's own class, or have the fields of a ``CheckpointableTensor``.
    """
    if isinstance(value, ShardedTensor):
        metadata = value.metadata()
        chunks = [
            _chunk(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes), shard.tensor)
            for shard in value.local_shards()
        ]
        return _of_chunks(tuple(metadata.size), metadata.tensor_properties.dtype, chunks)
    if isinstance(value, DTensor):
        local = settled(value._local_tensor)  # to_local() would make a view for autograd, which is slow
        if hasattr(local, "__create_chunk_list__"):
            return _of_protocol(local, tuple(value.shape), value.dtype, value)
        box = _box_of(value)
        return _of_chunks(tuple(value.shape), value.dtype, [] if box is None else [_chunk(*box, local)], value)
    value = settled(value)
    if hasattr(value, "__create_chunk_list__"):
        return _of_protocol(value, tuple(value.shape), value.dtype)
    if all(hasattr(value, name) for name in CHECKPOINTABLE):
        return _of_chunks(tuple(value.global_shape), value.dtype, _chunks_from_fields(value))
    if hasattr(value, "__create_write_items__"):  # stock saves its shards, and loads into it as a complete tensor
        raise CheckpointMismatch(
            f"a {type(value).__name__}, which has __create_write_items__ but not __create_chunk_list__: its shards "
            f"cannot be found. Add __create_chunk_list__ and __get_tensor_shard__ to the class."
        )
    # Any other subclass with ordinary memory is complete on each rank. Stock stores it so, too: its one write item has
    # offset 0 and the shape of the tensor. A class of shards that has no protocol of DCP cannot be recognised.
    return of_full(value, any_rank)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective, after waiting for it; return any other tensor unchanged."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _of_chunks(
    shape: tuple[int, ...], dtype: torch.dtype, chunks: list[LocalChunk], origin: Any = None
) -> ShardedValue:
    """Describe a distributed tensor."""
    unusual = [chunk.tensor for chunk in chunks if not is_dense_memory(chunk.tensor)]
    stored_whole = any(map(is_stored_whole, unusual))
    for tensor in unusual:
        (require_parts if stored_whole else require_memory)(tensor)
    return ShardedValue(shape, dtype, tuple(chunks), not stored_whole, stored_whole=stored_whole, origin=origin)


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], tensor: torch.Tensor) -> LocalChunk:
    is_plain = type(tensor) is torch.Tensor and not tensor.requires_grad  # detach() takes 2 us, for thousands of shards
    return LocalChunk(offsets, sizes, tensor if is_plain or is_stored_whole(tensor) else tensor.detach())


def _of_protocol(value: Any, shape: tuple[int, ...], dtype: torch.dtype, origin: Any = None) -> ShardedValue:
    """Describe a tensor with DCP's protocol ``_Checkpointable``. Chunks without elements are left out."""
    chunks = []
    with torch.device("cpu"):  # as in _box_of
        listed = value.__create_chunk_list__()
    for number, chunk in enumerate(listed):
        if 0 not in chunk.sizes or 0 in shape:
            shard = settled(value.__get_tensor_shard__(MetadataIndex("", chunk.offsets, number)))
            chunks.append(_chunk(tuple(chunk.offsets), tuple(chunk.sizes), shard))
    if chunks:  # the dtype of a LocalShardsWrapper may differ from that of its shards, which are written
        dtype = chunks[0].tensor.dtype
    return _of_chunks(shape, dtype, chunks, origin)


def _chunks_from_fields(value: Any) -> list[LocalChunk]:
    """Return the chunks of a ``CheckpointableTensor``, as views that leave out its padding.

    Raises:
        CheckpointMismatch: The fields contradict each other, or describe elements outside of the tensor.
    """
    fields = [[tuple(map(int, bounds)) for bounds in getattr(value, name)] for name in CHECKPOINTABLE[1:]]
    shape = tuple(value.global_shape)
    chunks = []
    try:
        for offsets, start, sizes in zip(*fields, strict=True):
            _check_inside(offsets, sizes, shape)
            _check_inside(start, sizes, tuple(value.shape))
            part = value.detach()
            for dim, (at, size) in enumerate(zip(start, sizes, strict=True)):
                if size < part.shape[dim]:
                    part = part.narrow(dim, at, size)
            if 0 not in sizes or 0 in shape:
                chunks.append(LocalChunk(offsets, sizes, part))
    except ValueError as error:
        names = ", ".join(f"{name} {getattr(value, name)}" for name in CHECKPOINTABLE)
        raise CheckpointMismatch(f"a tensor of shape {tuple(value.shape)} with {names}: {error}") from error
    return chunks


def _check_inside(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    for at, size, length in zip(offsets, sizes, shape, strict=True):
        if at < 0 or size < 0 or at + size > length:
            raise ValueError(f"{size} elements at {at} are not inside of {length}")


def shard_of(value: DTensor) -> Box | None:
    """Return the result of :func:`dcp_plugin.core.tensors._torch.shard_of` for a DTensor."""
    if not any(
        placement.is_shard() and size > 1
        for placement, size in zip(value.placements, value.device_mesh.shape, strict=True)
    ):
        return None
    return _box_of(value) or Box((), ())


def _box_of(value: DTensor) -> Box | None:
    """Return this rank's shard; None if the rank has no shard.

    Torch takes 0.3 ms for the computation. Results are cached, because layers are mostly alike.
    """
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the tensor's mesh
        return None
    layout = (tuple(value.device_mesh.shape), tuple(coordinate), value.placements, tuple(value.shape))
    if layout not in _boxes:
        _check_placements(value)
        with torch.device("cpu"):  # torch computes with a tensor on the default device, which may be meta
            chunks = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
        assert len(chunks) == 1, "a DTensor has one chunk per rank"
        sizes = tuple(chunks[0].sizes)
        fewer_rows_than_ranks = 0 in sizes and 0 not in value.shape
        if len(_boxes) >= _MOST_BOXES:
            _boxes.clear()
        _boxes[layout] = None if fewer_rows_than_ranks else Box(tuple(chunks[0].offsets), sizes)
    return _boxes[layout]


def _check_placements(value: DTensor) -> None:
    """Check that the part of each rank is a single box.

    Raises:
        CheckpointMismatch: A rank has a summand of the tensor, or several boxes.
    """
    description = f"a DTensor with the placements {value.placements}"
    if any(placement.is_partial() for placement in value.placements):
        raise CheckpointMismatch(
            f"{description}, of which each rank has only a summand: redistribute() it to Shard or Replicate"
        )
    for number, placement in enumerate(value.placements):
        split = getattr(placement, "split_factor", 1)  # _StridedShard: number of cuts of the dimension before this one
        dim = getattr(placement, "dim", None)
        within = (at for at, other in enumerate(value.placements) if at > number and getattr(other, "dim", -1) == dim)
        if split != 1 and split != prod(value.device_mesh.size(at) for at in within):
            raise CheckpointMismatch(f"{description}, of which each rank has several boxes: redistribute() it to Shard")


_MOST_BOXES = 10_000
_boxes: dict[Any, Box | None] = {}
"""Boxes by all values that determine a shard's position. The mesh itself is no key: a later process group has another.
"""
