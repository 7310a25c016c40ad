"""Reader of a checkpoint: it reads the table of contents, then the byte ranges of a plan.

The boxes of a plan become fetches (:mod:`~dcp_plugin.core.storage.fetch`), and neighbouring fetches become batches that
several threads read (:mod:`~dcp_plugin.core.storage.reading`). Items of other layouts are in
:mod:`~dcp_plugin.core.storage.stock.stock_items`. :mod:`~dcp_plugin.core.storage.open` determines the contents of the
checkpoint. After that, all is the same for all tools.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, UnsafeCheckpoint, logger
from dcp_plugin.core.format.columns import ranges
from dcp_plugin.core.format.index import CheckpointIndex, Location, StoredChunk, StoredTensor
from dcp_plugin.core.format.payload import block_size
from dcp_plugin.core.format.summary import Summary
from dcp_plugin.core.format.values import encode
from dcp_plugin.core.paths import StorageOptions, as_path
from dcp_plugin.core.records import LARGEST_CHUNK, BoxRead, OpenCheckpoint, ReadPlan
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.storage import reading
from dcp_plugin.core.storage.open import check_files, open_checkpoint, open_files
from dcp_plugin.core.storage.published import gone_or_damaged
from dcp_plugin.core.tensors.host_memory import address_of, finish_device_work, is_plain_memory
from dcp_plugin.core.tensors.kinds import fill, is_stored_whole

if TYPE_CHECKING:
    from dcp_plugin.core.storage.fetch import Fetch


class _Box(NamedTuple):
    """A read, the stored chunk that it reads from, and the dtype of the stored tensor."""

    read: BoxRead
    chunk: StoredChunk
    dtype: torch.dtype


class CheckpointReader:
    """Reader of one checkpoint: ours, any of DCP's, or another tool's (:mod:`dcp_plugin.core.format.foreign`).

    Args:
        path: The checkpoint: a directory, or a file of another tool.
        io_threads: Threads that read, per rank.
        verify: Compare the bytes with the checksums.
        check_files: Compare the sizes of all data files with the index when the checkpoint is opened.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        files: The files of the checkpoint, if those at the path are not to be read. :meth:`close` closes them.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: When the index is first used.
    """

    salvages = False
    """True to read what is intact, see :func:`~dcp_plugin.core.storage.open.open_checkpoint`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        io_threads: int = 2,
        verify: bool = True,
        check_files: bool = True,
        storage_options: StorageOptions | None = None,
        files: SourceFiles | None = None,
    ) -> None:
        self._storage_options = storage_options
        self.files = files
        self.path = self._asked_for = as_path(path, storage_options)
        self._io_threads = io_threads
        self._verify = verify
        self._check_files = check_files
        self._opened: OpenCheckpoint | None = None
        self._layouts: dict[tuple[str, int], StoredChunk] = {}
        self.bytes_read = 0
        """Bytes read from data files, including checksum blocks and gaps."""
        self.unchecked_bytes = 0
        """Bytes among these whose block was read only in part, so that its checksum could not be compared."""

    def open(self) -> OpenCheckpoint:
        """Open the checkpoint at the first call, and return it. Later calls return the same one, until :meth:`reset`.

        The properties of this class call it.
        """
        if self._opened is None:
            self._opened = self._opened_in_source() or open_checkpoint(self.path, self._check_files, self.salvages)
            self.path = self._opened.path
        return self._opened

    def _opened_in_source(self) -> OpenCheckpoint | None:
        """Return the open checkpoint in the source; None if it is read at its path."""
        if self.files is None:
            return None
        try:
            return open_files(self.path, self.files)
        except CheckpointError as error:
            if not self.files.is_at_path:
                raise
            logger.warning("%s is read at its path alone: %s", self.path, error)
            return None

    def close(self) -> None:
        """Close the files. The index stays usable; unread data can no longer be read."""
        if self._opened is not None:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def index(self) -> CheckpointIndex:
        return self.open().index

    @property
    def fingerprint(self) -> str:
        """Hash of the table of contents: equal for the same checkpoint, wherever it is stored."""
        return self.open().fingerprint

    @property
    def identity(self) -> tuple[str, str]:
        """Identity of the save, equal on ranks that read the same save: a hash of the content, and an id that
        distinguishes saves of the same content."""
        return self.open().identity, self.open().save_id

    @property
    def summary(self) -> Summary | None:
        """Content of ``dcp_plugin.json``; None for a checkpoint of another tool."""
        return self.open().summary

    @property
    def kinds(self) -> dict[str, str]:
        """Kind of each name, ``module`` or ``optimizer``, if the checkpoint records it."""
        return self.open().kinds

    def reset(self) -> None:
        """Close the checkpoint. The next use opens the checkpoint that is at the path then."""
        self.close()
        self.path = self._asked_for
        self._opened = None
        self._layouts = {}

    def pin_files(self, plan: ReadPlan, keys: Iterable[str] = ()) -> None:
        """Pin the files of a plan and of some keys, so that they can be read even if the checkpoint is deleted
        meanwhile.

        The files are checked unless all were checked when the checkpoint was opened.

        Raises:
            CheckpointCorrupt: A file is missing, truncated or a redirected link.
            CheckpointNotFound: The checkpoint was deleted meanwhile.
        """
        if self._check_files:
            names = set(self.index.files)  # finding only those of the plan would take longer
        else:
            names = self._files_of(plan, keys)
            check_files(self.open(), names)
        try:
            self.open().files.pin(names)
        except OSError as error:
            raise gone_or_damaged(self.open().files, f"cannot open {error.filename}", error) from error

    def read(self, plan: ReadPlan) -> dict[str, bytes | bytearray | memoryview]:
        """Fill the targets of a plan, and return the bytes of its values by key in the checkpoint.

        Raises:
            CheckpointCorrupt, CheckpointNotFound, CheckpointUnreadable: The message names file and key. Targets may be
                partly filled.
            CheckpointMismatch: Two targets share memory, and have different values in the checkpoint.
        """
        files, index = self.open().files, self.index
        with suppress(OSError):  # the read of the key reports the error
            files.pin(self._files_of(plan))
        reads, values = self._values([key for key in plan.values.values() if key not in index.values_here])
        boxes, chunks = [self._box(read) for read in plan.boxes], [*plan.chunks, *reads]
        if files.cost.gap >= LARGEST_CHUNK:  # a read costs more than objects: all neighbours are read together
            boxes += map(self._box_of_all, chunks)
            chunks = []
        boxes = self._recognised(boxes)
        wholes, scaled = list[_Box](), list[BoxRead]()
        fetches: list[Fetch] = []
        for box in boxes:
            if box.read.is_scaled:
                scaled.append(box.read)
            elif is_stored_whole(box.read.target):
                wholes.append(box)
            else:
                fetches += self._fetches(box, box.read.target)
        finish_device_work(read.target for read in plan.boxes)
        try:
            self._read(fetches, chunks)
        except CheckpointCorrupt as error:
            self._refuse_shared_memory(plan, error.key)
            raise
        for box in wholes:  # one at a time in this thread: their classes may run code of their own
            self._fill(box, box.read.target)
        if scaled:
            from dcp_plugin.core.storage.dequantize import read_scaled  # only for folders of other tools

            read_scaled(self.index, scaled, self.read)
        if index.transforms or index.values_here:
            return {key: self._value(key, values) for key in plan.values.values()}
        return values

    def checked(self, chunks: Sequence[BoxRead]) -> dict[int, int]:
        """Return the hash that a read has compared with the bytes of each target, by the ``id`` of the target.

        Targets without a hash, and those with several, are left out.
        """
        starts, counts = self.index.places.hashes_of(np.array([chunk.number for chunk in chunks], np.int64))
        alone = np.flatnonzero(counts * self._verify == 1)
        hashes = self.index.columns["hash"][starts[alone]].tolist()
        return {id(chunks[at].target): digest for at, digest in zip(alone.tolist(), hashes, strict=True)}

    def item(self, key: str) -> bytes:
        """Return all bytes of a value, or of a tensor that is one item, after checking them.

        Raises:
            CheckpointMismatch: The key has several items.
        """
        if (count := len(self.index.rows_of(key))) != 1:
            raise CheckpointMismatch(f"{self.path}: {key} is stored in {count} parts, so it cannot be read as one item")
        return bytes(self.read(ReadPlan(values={key: key}))[key])

    def _read(self, fetches: list[Fetch], chunks: Sequence[BoxRead] = ()) -> None:
        files = self.open().files
        batches = [
            *reading.batches_of(fetches, files.cost),
            *reading.batches_of_chunks(chunks, self.index, files.cost, self._verify),
        ]
        count = reading.read(files, batches, self._io_threads)
        self.bytes_read += count.read
        self.unchecked_bytes += count.unchecked

    def _refuse_shared_memory(self, plan: ReadPlan, key: str) -> None:
        """Raise CheckpointMismatch if the target of a key differs from its checksum only because another target has the
        same memory. Raise CheckpointCorrupt if the file is damaged.

        Bytes are checked in the memory of the target. The read of another target that shares it overwrites them.
        """
        boxes = [*map(self._box, plan.boxes), *map(self._box_of_all, plan.chunks)]
        boxes = [box for box in boxes if not is_stored_whole(box.read.target) and is_plain_memory(box.read.target)]
        spans = [_span(box.read.target) for box in boxes if box.read.key == key]
        shared = [
            box
            for box in boxes
            if any(begin < stop and start < end for begin, end in spans for start, stop in [_span(box.read.target)])
        ]
        if others := {box.read.key for box in shared} - {key}:
            boxes = self._recognised(shared)
            self._read([fetch for box in boxes for fetch in self._fetches(box, torch.empty_like(box.read.target))])
            raise CheckpointMismatch(
                f"{self.path} does not fit the state: {key} and {min(others)} share memory here, and have different "
                "values in the checkpoint. Load one of them, or give each its own memory."
            )

    def _files_of(self, plan: ReadPlan, keys: Iterable[str] = ()) -> set[str]:
        """Return the files of a plan and of some keys. Columns have them, without an object for a chunk."""
        index, rows = self.index, [read.number for read in itertools.chain(plan.boxes, plan.chunks)]
        slots = np.array([index.slots[key] for key in itertools.chain(plan.values.values(), keys)], np.int64)
        starts = index.table.chunk_starts[slots]
        of_keys = ranges(starts, index.table.chunk_starts[slots + 1] - starts)
        _, numbers = index.places.rows_of(np.concatenate((np.array(rows, np.int64), of_keys)))
        return {index.file_names[number] for number in set(numbers.tolist())}

    def _values(self, keys: list[str]) -> tuple[list[BoxRead], dict[str, bytes | bytearray | memoryview]]:
        """Return the reads of values, and the memory of each that they fill. Equal values share an item."""
        index, of_place = self.index, dict[tuple[int, int], int]()
        chunks = index.table.chunk_starts[np.array([index.slots[key] for key in keys], np.int64)]
        row, file = index.places.rows_of(chunks)
        place = index.columns["place"][row]
        at_places = list(zip(file.tolist(), place[:, 0].tolist(), strict=True))
        first = [of_place.setdefault(at, number) for number, at in enumerate(at_places)]
        alone = list(of_place.values())
        lengths = reading.lengths_in(place[alone]).tolist()
        # One allocation that is divided: one for each of thousands of values would take longer.
        memory, ends = np.empty(sum(lengths), np.uint8), itertools.accumulate(lengths)
        targets = torch.split(torch.from_numpy(memory), lengths)
        reads = [
            BoxRead(keys[number], chunk, target, (0,), (length,))
            for number, chunk, target, length in zip(alone, chunks[alone].tolist(), targets, lengths, strict=True)
        ]
        filled = {n: memory.data[end - length : end] for n, length, end in zip(alone, lengths, ends, strict=True)}
        return reads, {key: filled[number] for key, number in zip(keys, first, strict=True)}

    def _box(self, read: BoxRead) -> _Box:
        entry = self.index[read.key]
        assert isinstance(entry, StoredTensor), "a plan has boxes of tensors"
        return _Box(read, entry.chunks[read.number - self.index.rows_of(read.key)[0]], entry.dtype)

    def _box_of_all(self, read: BoxRead) -> _Box:
        """Return the box that is a complete chunk, or a value."""
        location = self.index.places.location(read.number)
        if location.payload_offset is None:  # a value: the item of a tensor with an unknown layout is no complete chunk
            location = replace(location, payload_offset=0, payload_length=location.length)
        return _Box(read, StoredChunk(read.offsets, read.sizes, location), read.target.dtype)

    def _recognised(self, boxes: list[_Box]) -> list[_Box]:
        """Find the payloads of a stock checkpoint's tensors, so that they need not go through ``torch.load``."""
        unknown = [
            (box.chunk, box.dtype)
            for box in boxes
            if box.chunk.location.payload_offset is None
            and box.read.key not in self.index.strides
            and not self._transforms(box.chunk.location)
        ]
        if not unknown:
            return boxes
        from dcp_plugin.core.storage.stock.stock_items import recognise

        self.bytes_read += recognise(self.open().files, unknown, self._layouts)
        places = ((box.chunk.location.file, box.chunk.location.offset) for box in boxes)
        pairs = zip(boxes, map(self._layouts.get, places), strict=True)
        return [box if chunk is None else box._replace(chunk=chunk) for box, chunk in pairs]

    def _value(self, key: str, values: Mapping[str, bytes | bytearray | memoryview]) -> bytes | bytearray | memoryview:
        if key in values:
            return self._plain(bytes(values[key]), self.index[key].chunks[0].location)
        from dcp_plugin.core.format.foreign.torch_file import RefusedValue  # only such files have values in their index

        value = self.index.values_here[key]
        if isinstance(value, RefusedValue) and value.reason:
            raise CheckpointMismatch(f"{self.path}: {key} {value.reason}")
        if isinstance(value, RefusedValue):
            raise UnsafeCheckpoint(
                f"{self.path}: {key} is, or contains, an object of {value.of}, which can only be restored by "
                f"executing code; nothing was executed. To load the rest, leave it out with exclude={key!r}."
            )
        return encode(value)

    def _fetches(self, box: _Box, target: torch.Tensor) -> Iterator[Fetch]:
        from dcp_plugin.core.storage import fetch  # complete chunks need no fetch

        (read, chunk, dtype), index = box, self.index
        key, offsets, sizes = read.key, read.offsets, read.sizes
        if (shape := tuple(target.shape)) != sizes:
            raise CheckpointMismatch(
                f"{self.path}: the part of {key} to read has shape {sizes}, but its target has shape {shape}"
            )
        if key in index.strides:
            strides = index.strides[key][chunk.location.file, chunk.location.offset]
            yield from fetch.of_view(key, chunk.location, dtype, strides, offsets, target)
            return
        block = self._block(chunk.location)
        if chunk.location.payload_offset is None:
            from dcp_plugin.core.storage.stock.stock_items import tensor_in

            def fill_from(item: bytearray) -> None:
                transforms = self._transforms(chunk.location)
                loaded = tensor_in(self.path, key, item, chunk, dtype, (offsets, sizes), target, transforms)
                self._copy_into(key, loaded, target)

            yield fetch.of_item(key, chunk.location, fill_from, block)
        else:
            gap = self.open().files.cost.gap
            yield from fetch.of_box(key, chunk, dtype, (offsets, sizes), target, block, gap)

    def _block(self, location: Location) -> int | None:
        """Return the bytes per checksum of an item; None if no checksum is compared."""
        return block_size(location.payload_length) if self._verify and location.hashes is not None else None

    def _fill(self, box: _Box, target: torch.Tensor) -> None:
        """Fill a target without memory of its own: through a plain tensor, or from an item that ``torch.save`` made."""
        if box.chunk.location.payload_offset is None and box.read.key not in self.index.strides:
            self._read(list(self._fetches(box, target)))
            return
        memory = torch.empty(box.read.sizes, dtype=box.dtype, device="cpu")
        self._read(list(self._fetches(box, memory)))
        self._copy_into(box.read.key, memory, target)

    def _copy_into(self, key: str, loaded: torch.Tensor, target: torch.Tensor) -> None:
        try:
            fill(target, loaded)
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{self.path}: {key} is {error}") from error

    def _transforms(self, location: Location) -> tuple[str, ...]:
        return self.index.transforms.get((location.file, location.offset), ())

    def _plain(self, item: bytes, location: Location) -> bytes | bytearray | memoryview:
        """Return an item without its stream transforms."""
        if not (transforms := self._transforms(location)):
            return item
        from dcp_plugin.core.storage.stock.stock_items import without_transforms

        return without_transforms(self.path, item, location, transforms)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the begin and the end of a tensor in plain memory."""
    return address_of(tensor), address_of(tensor) + tensor.nbytes
