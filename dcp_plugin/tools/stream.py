"""Reads the tensors of a checkpoint one after the other, within bounded memory: what all tools read with.

The tensors that are wanted are cut into pieces of consecutive elements, and pieces that are next to each other fill a
window of memory together. While one window is used, a thread fills the other.
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
"""Bytes of each of two windows."""
_MOST_PIECES = 4096
_ALIGNMENT = 64

Progress = Callable[[int, int], None]
"""Called with bytes done, and bytes in all."""


@dataclass(frozen=True)
class Part:
    """A box of a stored tensor that is wanted, as elements of a dtype."""

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
    """Consecutive elements of a part, in memory until the next window is asked for."""

    part: int
    """The number of the part."""
    tensor: torch.Tensor
    """On the host, contiguous."""
    start: int
    """Where it begins in the part, in elements."""

    @property
    def data(self) -> memoryview:
        return memory_view(self.tensor)


class Stream:
    """The parts in their order, each in one or more pieces. An empty part has no piece.

    Args:
        reader: Of the checkpoint.
        parts: What is wanted.
        window: Bytes of memory; twice as many are used.

    Raises:
        CheckpointMismatch: A tensor is of a class of its own, without elements that could be read one by one.
        CheckpointError: As a load.
    """

    def __init__(self, reader: ShardedReader, parts: Sequence[Part], window: int = WINDOW) -> None:
        self._reader = reader
        self._parts = parts
        self._window = window
        self.nbytes = sum(part.nbytes for part in parts)
        """Of all parts."""

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
        """The pieces that are read together: number of the part, box, and where it begins in the part."""
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
    """Memory from which a file can be written without a copy."""
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][:nbytes]


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT


def read_boxes(reader: ShardedReader, boxes: Sequence[tuple[str, Shape, torch.Tensor]]) -> None:
    """Fill tensors with parts of stored ones, converted to their dtypes.

    Args:
        boxes: Of each part the key, where it begins in the stored tensor, and what it fills, which has its shape.

    Raises:
        CheckpointMismatch: A key has no tensor, or one without elements that can be read one by one.
        CheckpointError: As a load.
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
    """Raises CheckpointMismatch if a tensor has no elements that can be read one by one."""
    if stored.stored_whole and reader.opened.format == "dcp_plugin":
        raise CheckpointMismatch(
            f"{reader.path}: {key} is of a class of its own (quantized, or a wrapper of other tensors), which "
            f"torch.save has written as a whole: dcp_plugin.read gives it. To go on without it: exclude={key!r}."
        )
