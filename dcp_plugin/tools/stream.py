"""Read tensors of a checkpoint one after the other, within bounded memory. All tools read tensors with this module.

The tensors are cut into pieces of consecutive elements, and successive pieces fill a window of memory together. While
the caller uses one window, a thread fills the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch

from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.format.index import StoredTensor
from dcp_plugin.media import PAGE
from dcp_plugin.planning.load import ShardedLoadPlanner
from dcp_plugin.planning.load_balance import BoxPart
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tensors.host_memory import memory_view
from dcp_plugin.types import LocalChunk, Shape, ShardedValue

WINDOW = 64 << 20
"""Size of each of the two windows, in bytes."""
_MOST_PIECES = 4096
_ALIGNMENT = 64

Progress = Callable[[int, int], None]
"""Callback that takes the bytes done, and the bytes in all."""


@dataclass(frozen=True)
class Part:
    """A box of a stored tensor to be read, and the dtype that its elements are converted to."""

    key: str
    offsets: Shape
    sizes: Shape
    dtype: torch.dtype

    @classmethod
    def whole(cls, key: str, stored: StoredTensor, dtype: torch.dtype | None = None) -> Part:
        return cls(key, (0,) * len(stored.shape), stored.shape, dtype or stored.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a part. They stay in memory until the caller takes a piece of the next window."""

    part: int
    """The number of the part in the stream."""
    tensor: torch.Tensor
    """A contiguous tensor on the host."""
    start: int
    """The position of the first element within the part."""

    @property
    def data(self) -> memoryview:
        return memory_view(self.tensor)


class Stream:
    """Pieces of parts, in the order of the parts. An empty part has no piece.

    Args:
        reader: The reader of the checkpoint.
        parts: The parts to read.
        window: Size of a window in bytes. Two windows are used.

    Raises:
        CheckpointMismatch: A tensor is of a custom class, whose elements cannot be read one by one.
        CheckpointError: The checkpoint cannot be read, or its bytes do not match their checksums.
    """

    def __init__(self, reader: ShardedReader, parts: Sequence[Part], window: int = WINDOW) -> None:
        self._reader = reader
        self._parts = parts
        self._window = window
        self.nbytes = sum(part.nbytes for part in parts)
        """Bytes of all parts."""

    def __iter__(self) -> Iterator[Piece]:
        windows = self._windows()
        first = next(windows, None)
        if first is None:
            return
        memory = [_page_aligned(self._size(first)) for _ in range(2)]
        with ThreadPoolExecutor(1, thread_name_prefix="dcp-stream") as pool:
            reading: Future[list[Piece]] | None = pool.submit(self._read, first, memory[0])
            turn = 0
            while reading is not None:
                pieces = reading.result()
                turn = 1 - turn
                following, reading = next(windows, None), None
                if following is not None:
                    if self._size(following) > len(memory[turn]):
                        memory[turn] = _page_aligned(self._size(following))
                    reading = pool.submit(self._read, following, memory[turn])
                yield from pieces

    def _windows(self) -> Iterator[list[tuple[int, BoxPart, int]]]:
        """Yield the pieces of each window: number of the part, box, and position of its first element in the part."""
        window: list[tuple[int, BoxPart, int]] = []
        filled = 0
        for number, part in enumerate(self._parts):
            start = 0
            if not part.nbytes:
                continue
            for box in BoxPart(part.offsets, part.sizes, part.dtype.itemsize).at_most(self._window):
                size = _aligned(box.nbytes)
                if window and (filled + size > self._window or len(window) >= _MOST_PIECES):
                    yield window
                    window, filled = [], 0
                window.append((number, box, start))
                filled += size
                start += prod(box.sizes)
        if window:
            yield window

    @staticmethod
    def _size(window: list[tuple[int, BoxPart, int]]) -> int:
        return sum(_aligned(box.nbytes) for _, box, _ in window)

    def _read(self, window: list[tuple[int, BoxPart, int]], memory: torch.Tensor) -> list[Piece]:
        pieces, at = [], 0
        boxes = []
        for number, box, start in window:
            part = self._parts[number]
            tensor = memory[at : at + box.nbytes].view(part.dtype).view(box.sizes)
            at += _aligned(box.nbytes)
            pieces.append(Piece(number, tensor, start))
            boxes.append((part.key, box.offsets, tensor))
        read_boxes(self._reader, boxes)
        return pieces


def _page_aligned(nbytes: int) -> torch.Tensor:
    """Return memory from which a file can be written without a copy."""
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][:nbytes]


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT


def read_boxes(reader: ShardedReader, boxes: Sequence[tuple[str, Shape, torch.Tensor]]) -> None:
    """Fill tensors with parts of stored tensors, converted to the dtypes of the targets.

    Args:
        boxes: The key of each part, its offsets in the stored tensor, and the tensor to fill, which has its shape.

    Raises:
        CheckpointMismatch: A key is no tensor, or the elements of the tensor cannot be read one by one.
        CheckpointError: The checkpoint cannot be read, or its bytes do not match their checksums.
    """
    targets = {}
    for number, (key, offsets, tensor) in enumerate(boxes):
        stored = reader.index[key]
        if not isinstance(stored, StoredTensor):
            raise CheckpointMismatch(f"{reader.path}: {key} is no tensor")
        require_elements(reader, key, stored)
        chunk = LocalChunk(offsets, tuple(tensor.shape), tensor)
        targets[str(number)] = ShardedValue(stored.shape, tensor.dtype, (chunk,))
    planner = ShardedLoadPlanner()
    planner.use_index(targets, reader.index, {str(number): key for number, (key, _, _) in enumerate(boxes)})
    reader.read_data(planner.create_local_plan(), planner).wait()


def require_elements(reader: ShardedReader, key: str, stored: StoredTensor) -> None:
    """Raise CheckpointMismatch if the elements of a tensor cannot be read one by one."""
    if stored.stored_whole and reader.opened.format == "dcp_plugin":
        raise CheckpointMismatch(
            f"{reader.path}: {key} is of a class of its own (quantized, or a wrapper of other tensors), which "
            f"torch.save has written as a whole: dcp_plugin.read gives it. To go on without it: exclude={key!r}."
        )
