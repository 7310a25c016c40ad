"""The bytes of tensors, in pieces, as host memory.

A contiguous tensor on the host is its own memory; nothing is copied. Any other one (strided, conjugated, on a device)
passes piece by piece through a :class:`Ring` of blocks, so no save or load needs memory for a complete tensor.
For a device the blocks are pinned and the copies asynchronous: while one block is written or read, the next is on
its way.
"""

from __future__ import annotations

import ctypes
import gc
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dcp_plugin.errors import CheckpointMismatch

READ_PIECE = 1 << 20
"""Bytes that are read and then checked, at most: fewer than the processor's cache holds, since 8 MiB that are checked
after all were read come from memory once more. A multiple of any block of checksums."""
PIECE = 512 << 10
"""Bytes that are checked and then written, for the same reason. The page cache keeps them together, so they are read
faster than smaller ones; larger ones are written back later, which a save waits for."""
BLOCK = 4 << 20
_BLOCKS = 3  # one that is being worked on, two on their way


class Block:
    """A piece of host memory that copies go through."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.memory = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=cuda)
        self._taken = 0
        self._event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def take(self, count: int) -> torch.Tensor:
        """The next ``count`` bytes, aligned for any dtype; fresh memory if the block is used up."""
        start, self._taken = self._taken, self._taken + count + -count % 64
        return self.memory[start : start + count] if self._taken <= BLOCK else torch.empty(count, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy between the device and this block; see :meth:`wait`."""
        if self._stream is None or self._event is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._event.record()

    def wait(self) -> None:
        """Wait until the last copy is done; then all of the block is free."""
        self._taken = 0
        if self._event is not None:
            self._event.synchronize()


class Ring:
    """The blocks of one thread for one device, used in turn."""

    def __init__(self, device: torch.device) -> None:
        self._blocks = [Block(device) for _ in range(_BLOCKS if device.type == "cuda" else 1)]
        self._next = 0

    def next(self) -> Block:
        """A block whose last copy is done."""
        block = self._blocks[self._next % len(self._blocks)]
        self._next += 1
        block.wait()
        return block

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor, row by row. A piece is valid until the next one is asked for."""
        on_their_way: deque[tuple[Block, int]] = deque()
        for part in parts_of(tensor, BLOCK):
            block = self.next()
            block.copy(block.take(part.nbytes).view(part.dtype).view(part.shape), part)
            on_their_way.append((block, part.nbytes))
            if len(on_their_way) == len(self._blocks):
                yield _arrived(*on_their_way.popleft())
        while on_their_way:
            yield _arrived(*on_their_way.popleft())

    def wait(self) -> None:
        for block in self._blocks:
            block.wait()


class Rings:
    """The rings of one thread, made when a device is first met."""

    def __init__(self) -> None:
        self._rings: dict[torch.device, Ring] = {}

    def of(self, device: torch.device) -> Ring:
        if device not in self._rings:
            self._rings[device] = Ring(device)
        return self._rings[device]

    def pieces(self, tensor: torch.Tensor, size: int = PIECE) -> Iterator[memoryview]:
        """The bytes of a tensor in row-major order. ``size``: of a piece of what is plain memory already."""
        if not is_plain_memory(tensor):
            yield from self.of(tensor.device).pieces(tensor)
            return
        memory = memory_view(tensor)
        for start in range(0, len(memory), size):
            yield memory[start : start + size]

    def wait(self) -> None:
        for ring in self._rings.values():
            ring.wait()


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory on the host is its bytes in row-major order."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor for which :func:`is_plain_memory`. The view keeps the tensor alive.

    ``tensor.numpy()`` knows fewer dtypes and takes five times as long, which counts for thousands of small ones.
    """
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(address_of(tensor))
    memory.owner = tensor  # type: ignore[attr-defined]  # an upload that was broken off may read it for a moment more
    return memoryview(memory).cast("B")


def address_of(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins. What is read or written at address 0 ends the process.

    Raises:
        CheckpointMismatch: It has no memory. Who takes tensors in has asked before, and named the key.
    """
    if tensor.nbytes and not tensor.untyped_storage().data_ptr():  # which raises for most that have none
        raise CheckpointMismatch(f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory")
    return tensor.data_ptr()


def bytes_at(addresses: np.ndarray[Any, np.dtype[np.int64]], count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A copy of ``count`` bytes at each address, as one more axis. All of them are in memory that the caller holds."""
    first = int(addresses.min())
    between = (ctypes.c_ubyte * (int(addresses.max()) + count - first)).from_address(first)
    memory = np.frombuffer(memoryview(between), np.uint8)
    return np.asarray(memory[(addresses - first)[..., None] + np.arange(count)])


def parts_of(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Views that make up the tensor in row-major order, each of at most ``limit`` bytes."""
    if tensor.nbytes <= limit:
        if tensor.numel():
            yield tensor
        return
    rows = limit // (tensor.nbytes // len(tensor))
    if rows:
        for at in range(0, len(tensor), rows):
            yield tensor[at : at + rows]
    else:
        for row in tensor:
            yield from parts_of(row, limit)


def finish_device_work(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for what this thread has queued on the tensors' devices: copies to and from them run on other streams."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _arrived(block: Block, count: int) -> memoryview:
    block.wait()
    return memory_view(block.memory)[:count]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Saves and loads make many small objects, none of them garbage: looking for it again and again takes most of
    the time of a checkpoint of small tensors. Not in the background, where training makes garbage meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
