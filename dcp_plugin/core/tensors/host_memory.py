"""The bytes of tensors, in pieces, as host memory.

The rule: no save or load needs memory for the copy of a complete tensor. A contiguous tensor on the host is read and
written in place. Any other tensor (strided, conjugated, on a device) is copied piece by piece, through the blocks of
:class:`Rings`. For a device the blocks are pinned and the copies asynchronous: while one block is written or read, the
next block is being copied.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointMismatch

READ_PIECE = 512 << 10
"""Largest piece that is read and then checked, in bytes, unless one checksum block is larger.

The piece and its page cache fit into the processor's cache. Pieces of 8 MiB would be fetched from DRAM again for the
check.
"""
PIECE = 512 << 10
"""Largest piece that is checked and then written, in bytes. It fits into the processor's cache for the same reason.

The page cache stores a piece as one unit, so smaller pieces are slower to read. Larger pieces are written back later,
and a save waits for that.
"""
BLOCK = 4 << 20
_BLOCKS = 3  # one block is being written or read while two are being copied


def host_bytes(nbytes: int, pinned: bool = False) -> torch.Tensor:
    """Allocate host memory, independent of the default device and of ``inference_mode``.

    A later save reuses the memory outside of ``inference_mode``, where torch refuses to write memory made inside of it.
    """
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


class Block:
    """A piece of host memory that buffers copies from and to a device."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.memory = host_bytes(BLOCK, pinned=cuda)
        self._reserved = 0
        self._event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def reserve(self, count: int) -> torch.Tensor:
        """Return the next ``count`` bytes, aligned for any dtype, or fresh memory if the block is used up."""
        start, self._reserved = self._reserved, self._reserved + count + -count % 64
        return self.memory[start : start + count] if self._reserved <= BLOCK else host_bytes(count)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy between the device and this block; :meth:`wait` waits for it."""
        if self._stream is None or self._event is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=can_be_queued(source))
            self._event.record()

    def wait(self) -> None:
        """Wait until the last copy is done, and free the complete block."""
        self._reserved = 0
        if self._event is not None:
            self._event.synchronize()


class Rings:
    """Blocks of one thread, made on first use: some for each device, used in turn."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, deque[Block]] = {}

    def next(self, device: torch.device) -> Block:
        """Return the next block for a device, after its last copy is done."""
        if device not in self._blocks:
            count = _BLOCKS if device.type == "cuda" else 1
            self._blocks[device] = deque(Block(device) for _ in range(count))
        block = self._blocks[device][0]
        self._blocks[device].rotate(-1)
        block.wait()
        return block

    def pieces(self, tensor: torch.Tensor, size: int = PIECE) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in row-major order. A piece is valid until the caller requests the next piece.

        Args:
            size: Bytes of the pieces of plain memory.
        """
        if is_plain_memory(tensor):
            memory = memory_view(tensor)
            yield from (memory[start : start + size] for start in range(0, len(memory), size))
            return
        # All blocks of the device are being filled before the first is yielded. While the caller uses a piece, the
        # copies into the other blocks continue.
        copies_under_way: deque[tuple[Block, int]] = deque()
        for part in parts_of(tensor, BLOCK):
            block = self.next(tensor.device)
            block.copy(block.reserve(part.nbytes).view(part.dtype).view(part.shape), part)
            copies_under_way.append((block, part.nbytes))
            if len(copies_under_way) == len(self._blocks[tensor.device]):
                yield _arrived(*copies_under_way.popleft())
        while copies_under_way:
            yield _arrived(*copies_under_way.popleft())

    def wait(self) -> None:
        for blocks in self._blocks.values():
            for block in blocks:
                block.wait()


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's host memory has its bytes in row-major order."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor for which :func:`is_plain_memory` is true. The view keeps the tensor alive."""
    # A ctypes array at the address. ``tensor.numpy()`` supports fewer dtypes, and takes five times as long: that counts
    # for thousands of small tensors. The owner keeps the memory: an aborted upload may read it a moment longer.
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(address_of(tensor))
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def equal_bytes(left: memoryview, right: memoryview) -> bool:
    """Return whether two pieces of writable memory of the same length are equal."""
    # ctypes passes an array as its address, and releases the interpreter's lock during the call. Objects of Python are
    # compared with the lock, and numpy writes a third array.
    addresses = map((ctypes.c_char * 0).from_buffer, (left, right))
    return bool(_c_library().memcmp(*addresses, ctypes.c_size_t(len(left))) == 0)


@functools.cache  # to load it takes longer than to compare a piece in the cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's memory. It is 0 only for a tensor without elements.

    Raises:
        CheckpointMismatch: The tensor has no memory. Saves and loads check for this earlier, with the key.
    """
    # An access at address 0 would kill the process. For most tensors without memory, data_ptr() raises by itself.
    if tensor.nbytes and not tensor.untyped_storage().data_ptr():
        raise CheckpointMismatch(f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory")
    return tensor.data_ptr()


def bytes_at(addresses: np.ndarray[Any, np.dtype[np.int64]], count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Copy ``count`` bytes at each address; the result has them on an additional axis.

    The caller keeps the memory alive.
    """
    # One numpy index on a view of the complete address range, instead of a read in Python for each address. It touches
    # only the bytes at the addresses: memory between them may be unmapped.
    first = int(addresses.min())
    # A ctypes array would be of a new type for each length, and a type is slow to make and becomes garbage.
    between = {"data": (first, True), "shape": (int(addresses.max()) + count - first,), "typestr": "|u1", "version": 3}
    memory, places = np.asarray(SimpleNamespace(__array_interface__=between)), addresses - first
    if count in (2, 4, 8) and not (places % count).any():  # aligned elements need one index each, not one per byte
        return np.asarray(memory.view(f"u{count}")[places // count][..., None].view(np.uint8))
    return np.asarray(memory[places[..., None] + np.arange(count)])


def parts_of(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield views that together are the tensor, in row-major order. Each has at most ``limit`` bytes."""
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


def can_be_queued(source: torch.Tensor) -> bool:
    """Return whether torch copies a tensor of a device to the host correctly without waiting for the copy."""
    # Torch conjugates or negates the host's copy as soon as it has queued the copy: before the bytes arrive.
    return not (source.is_conj() or source.is_neg())


def device_of_thread() -> Callable[[], None]:
    """Return a function that gives another thread the CUDA device of this thread. Without CUDA it does nothing.

    A thread starts on device 0. There its first call of CUDA would take some 500 MB, in the process of each rank.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def finish_device_work(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the work that this thread has queued on the tensors' devices: copies use other streams."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _arrived(block: Block, count: int) -> memoryview:
    block.wait()
    return memory_view(block.memory)[:count]
