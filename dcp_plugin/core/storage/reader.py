"""Reader of a checkpoint: it reads the index or the stock metadata, then the byte ranges of a plan.

It is a DCP ``StorageReader``: ``torch.distributed.checkpoint.load(sd, storage_reader=ShardedReader(path))`` uses it
with any planner, on our checkpoints and on stock ones.

The items of a plan become fetches (:mod:`~dcp_plugin.core.storage.fetch`), and neighbouring fetches become batches that
several threads read (:mod:`~dcp_plugin.core.storage.reading`). Items of other layouts are in
:mod:`~dcp_plugin.core.storage.stock.stock_items`. :mod:`~dcp_plugin.core.storage.open` determines the contents of the
checkpoint; after that, all is the same for all tools. The planner is only called from the caller's thread.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import planner as stock
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, UnsafeCheckpoint
from dcp_plugin.core.format.index import CheckpointIndex, Location, StoredChunk, StoredTensor, StoredValue
from dcp_plugin.core.format.payload import block_size
from dcp_plugin.core.format.summary import Summary
from dcp_plugin.core.format.values import encode
from dcp_plugin.core.paths import StorageOptions, as_path, is_path
from dcp_plugin.core.records import LARGEST_CHUNK, LoadPlan, OpenCheckpoint, WholeChunk
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.storage import fetch, reading
from dcp_plugin.core.storage.fetch import Fetch
from dcp_plugin.core.storage.open import check_files, open_checkpoint, open_files
from dcp_plugin.core.storage.published import gone_or_damaged
from dcp_plugin.core.tensors.host_memory import finish_device_work
from dcp_plugin.core.tensors.kinds import fill, is_stored_whole, require_memory
from dcp_plugin.core.types import Shape, public_class

logger = logging.getLogger("dcp_plugin")


@dataclass(frozen=True)
class _Read:
    """Read item of a planner and its location; a value has no chunk."""

    item: ReadItem
    location: Location
    chunk: StoredChunk | None = None
    dtype: torch.dtype = torch.uint8

    @property
    def key(self) -> str:
        """Key in the checkpoint."""
        return self.item.storage_index.fqn

    @property
    def box(self) -> tuple[Shape, Shape]:
        """Offsets and lengths in the chunk."""
        return tuple(self.item.storage_offsets), tuple(self.item.lengths)


@public_class()
class ShardedReader(StorageReader):
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

    Example:
        >>> import dcp_plugin, torch, torch.distributed.checkpoint as stock
        >>> dcp_plugin.save({"weights": torch.ones(3)}, "run/step-1")
        >>> state = {"weights": torch.zeros(3)}
        >>> stock.load(state, storage_reader=dcp_plugin.ShardedReader("run/step-1"))
        >>> state["weights"]
        tensor([1., 1., 1.])
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
        self.load_id = str(uuid.uuid4())
        """Identifier that differs for every load."""
        self._layouts: dict[tuple[str, int], StoredChunk] = {}
        self.bytes_read = 0
        """Bytes read from data files, including checksum blocks and gaps."""
        self.unchecked_bytes = 0
        """Bytes among these whose block was read only in part, so that its checksum could not be compared."""

    @property
    def opened(self) -> OpenCheckpoint:
        """Open checkpoint; opened at the first use."""
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

    def __enter__(self) -> ShardedReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def index(self) -> CheckpointIndex:
        return self.opened.index

    @property
    def fingerprint(self) -> str:
        """Hash of the table of contents: equal for the same checkpoint, wherever it is stored."""
        return self.opened.fingerprint

    @property
    def save(self) -> tuple[str, str]:
        """Identity that is equal on ranks that read the same save: a hash of the content, and an id that
        distinguishes saves of the same content."""
        return self.opened.identity, self.opened.save_id

    @property
    def summary(self) -> Summary | None:
        """Content of ``dcp_plugin.json``; None for a checkpoint of another tool."""
        return self.opened.summary

    @property
    def kinds(self) -> dict[str, str]:
        """Kind of each name, ``module`` or ``optimizer``, if the checkpoint records it."""
        return self.opened.kinds

    def hold_files(self, plan: LoadPlan, keys: Iterable[str] = ()) -> None:
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
            entries = (self.index[key] for key in keys)
            more = (chunk for entry in entries if isinstance(entry, StoredTensor) for chunk in entry.chunks)
            locations = (*(self._find(item).location for item in plan.items), *(chunk.location for chunk in more))
            names = {*(location.file for location in locations), *self._files_of(plan.chunks)}
            check_files(self.opened, names)
        try:
            self.opened.files.pin(names)
        except OSError as error:
            raise gone_or_damaged(self.opened.files, f"cannot open {error.filename}", error) from error

    # torch.distributed.checkpoint.StorageReader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._asked_for = as_path(checkpoint_id, self._storage_options)
        self._forget()
        self.load_id = str(uuid.uuid4())

    def _forget(self) -> None:
        self.close()
        self.path = self._asked_for
        self._opened = None
        self._layouts = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that DCP requests at the start of each load, of the checkpoint that is at the path
        now."""
        from dcp_plugin.core.format.stock_objects import metadata_of  # only planners that DCP drives need it

        self._forget()
        save_id = self.summary.save_id if self.summary else None
        noted = self.index.storage_meta or StorageMeta(str(self.opened.path), save_id)
        return metadata_of(self.index, replace(noted, load_id=self.load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the index is read at its first use."""

    def prepare_local_plan(self, plan: stock.LoadPlan) -> stock.LoadPlan:
        return replace(plan, storage_data=self.save)

    def prepare_global_plan(self, plans: list[stock.LoadPlan]) -> list[stock.LoadPlan]:
        """Check on one rank that all ranks have opened the same save: each has opened the checkpoint for itself."""
        saves = [plan.storage_data for plan in plans]
        other = next((rank for rank, save in enumerate(saves) if save != saves[0]), None)
        if other is not None:
            raise CheckpointMismatch(
                f"rank {other} and rank 0 opened different checkpoints at {self._asked_for}: it was replaced "
                f"meanwhile, or the ranks load from different paths. Load again."
            )
        return plans

    def read_data(self, plan: stock.LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.read_parts(LoadPlan(plan.items, ()), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_path(checkpoint_id)

    # Methods in addition to those of StorageReader

    def read_parts(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read the items and chunks of a plan.

        Raises:
            CheckpointCorrupt, CheckpointNotFound, CheckpointUnreadable: The message names file and key. Targets may be
                partly filled.
        """
        reads = [self._find(item) for item in plan.items]
        with suppress(OSError):  # the read of the key reports the error
            self.opened.files.pin({*(read.location.file for read in reads), *self._files_of(plan.chunks)})
        reads = self._recognised(reads)
        values: dict[tuple[str, int], bytearray] = {}
        targets, wholes = [], []
        fetches: list[Fetch] = []
        for read in reads:
            location = read.location
            if read.chunk is not None:
                target = self._resolve(planner, read.item)
                targets.append((read.item, target))
                if is_stored_whole(target):
                    wholes.append((read, target))
                else:
                    fetches += self._fetches_of_tensor(read, read.chunk, target)
            elif read.key not in self.index.values_here and (location.file, location.offset) not in values:
                fetch_of_value, memory = fetch.of_value(read.key, location, self._block(location))
                values[location.file, location.offset] = memory  # equal values share an item
                fetches.append(fetch_of_value)
        finish_device_work(target for _, target in targets)
        self._read(fetches, plan.chunks)
        for read, target in wholes:  # one at a time in this thread: their classes may run code of their own
            self._fill(read, target)
        for read in reads:
            if read.chunk is None:
                planner.load_bytes(read.item, io.BytesIO(self._value(read, values)))
        for item, target in targets:
            planner.commit_tensor(item, target)

    def item(self, key: str) -> bytes:
        """Return all bytes of a value, or of a tensor that is one item, after checking them.

        Raises:
            CheckpointMismatch: The key has several items.
        """
        if key in self.index.values_here:
            return self._value_here(key)
        entry = self.index[key]
        places = [entry.location] if isinstance(entry, StoredValue) else [chunk.location for chunk in entry.chunks]
        if len(places) != 1:
            raise CheckpointMismatch(
                f"{self.path}: {key} is stored in {len(places)} parts, so it cannot be read as one item"
            )
        location = replace(places[0], payload_offset=None, payload_length=places[0].length)
        fetch_of_item, memory = fetch.of_value(key, location, self._block(location))
        self._read([fetch_of_item])
        return bytes(self._plain(memory, location))

    @staticmethod
    def _resolve(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
        """Return the target of a read; planners of other packages hand over any tensor of the state."""
        target = planner.resolve_tensor(item)
        if is_stored_whole(target):
            return target
        try:
            target = target.detach()
            require_memory(target)
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{item.dest_index.fqn} is {error}") from error
        return target

    def _read(self, fetches: list[Fetch], chunks: Sequence[WholeChunk] = ()) -> None:
        files = self.opened.files
        if files.cost.gap >= LARGEST_CHUNK:  # a read costs more than objects: all neighbours are read together
            fetches, chunks = [*fetches, *itertools.chain.from_iterable(map(self._fetches_of_chunk, chunks))], ()
        batches = [
            *reading.batches_of(fetches, files.cost),
            *reading.batches_of_chunks(chunks, self.index, files.cost, self._verify),
        ]
        count = reading.read(files, batches, self._io_threads)
        self.bytes_read += count.read
        self.unchecked_bytes += count.unchecked

    def _files_of(self, chunks: Sequence[WholeChunk]) -> set[str]:
        numbers = self.index.columns["file"][[chunk.number for chunk in chunks]] if chunks else ()
        return {self.index.file_names[number] for number in set(map(int, numbers))}

    def _find(self, item: ReadItem) -> _Read:
        """Return the stored chunk of a read item; planners give its offset and a hint at its position."""
        entry = self.index[item.storage_index.fqn]
        if isinstance(entry, StoredValue):
            return _Read(item, entry.location)
        offset = tuple(item.storage_index.offset or ())
        chunk = entry.chunk_at(offset, item.storage_index.index)
        if chunk is None:
            raise CheckpointCorrupt(f"{self.path}: {item.storage_index.fqn} has no chunk at {offset}")
        return _Read(item, chunk.location, chunk, entry.dtype)

    def _recognised(self, reads: list[_Read]) -> list[_Read]:
        """Find the payloads of a stock checkpoint's tensors, so that they need not go through ``torch.load``."""
        unknown = [
            (read.chunk, read.dtype)
            for read in reads
            if read.chunk is not None
            and read.location.payload_offset is None
            and read.key not in self.index.strides
            and (read.location.file, read.location.offset) not in self.index.transforms
        ]
        if not unknown:
            return reads
        from dcp_plugin.core.storage.stock.stock_items import recognise

        self.bytes_read += recognise(self.opened.files, unknown, self._layouts)
        chunks = [self._layouts.get((read.location.file, read.location.offset)) for read in reads]
        pairs = zip(reads, chunks, strict=True)
        return [read if chunk is None else replace(read, location=chunk.location, chunk=chunk) for read, chunk in pairs]

    def _value(self, read: _Read, values: dict[tuple[str, int], bytearray]) -> bytes | bytearray:
        if read.key in self.index.values_here:
            return self._value_here(read.key)
        return self._plain(values[read.location.file, read.location.offset], read.location)

    def _value_here(self, key: str) -> bytes:
        from dcp_plugin.core.format.foreign.torch_file import RefusedValue  # only such files have values in their index

        value = self.index.values_here[key]
        if isinstance(value, RefusedValue):
            raise UnsafeCheckpoint(
                f"{self.path}: {key} is, or contains, an object of {value.of}, which can only be restored by "
                f"executing code; nothing was executed. To load the rest, leave it out with exclude={key!r}."
            )
        return encode(value)

    def _fetches_of_tensor(self, read: _Read, chunk: StoredChunk, target: torch.Tensor) -> Iterator[Fetch]:
        key = read.key
        if (shape := tuple(target.shape)) != read.box[1]:
            raise CheckpointMismatch(
                f"{self.path}: the part of {key} to read has shape {read.box[1]}, but its target has shape {shape}"
            )
        if key in self.index.strides:
            yield from fetch.of_view(key, chunk.location, read.dtype, self.index.strides[key], read.box[0], target)
            return
        block = self._block(chunk.location)
        if chunk.location.payload_offset is None:
            from dcp_plugin.core.storage.stock.stock_items import tensor_in

            def take(item: bytearray) -> None:
                transforms = self._transforms(chunk.location)
                loaded = tensor_in(self.path, key, item, chunk, read.dtype, read.box, target, transforms)
                self._take(key, loaded, target)

            yield fetch.of_item(key, chunk.location, take, block)
        else:
            gap = self.opened.files.cost.gap
            yield from fetch.of_box(key, chunk, read.dtype, read.box, target, block, gap)

    def _fetches_of_chunk(self, chunk: WholeChunk) -> Iterator[Fetch]:
        target, sizes = chunk.target, tuple(chunk.target.shape)
        stored, corner = StoredChunk((), sizes, self.index.places.location(chunk.number)), (0,) * len(sizes)
        return fetch.of_box(chunk.key, stored, target.dtype, (corner, sizes), target, self._block(stored.location))

    def _block(self, location: Location) -> int | None:
        """Return the bytes per checksum of an item; None if no checksum is compared."""
        return block_size(location.payload_length) if self._verify and location.hashes is not None else None

    def _fill(self, read: _Read, target: torch.Tensor) -> None:
        """Fill a target without memory of its own: through a plain tensor, or from an item that ``torch.save`` made."""
        assert read.chunk is not None, "it is a tensor"
        if read.location.payload_offset is None and read.key not in self.index.strides:
            self._read(list(self._fetches_of_tensor(read, read.chunk, target)))
            return
        memory = torch.empty(read.box[1], dtype=read.dtype, device="cpu")
        self._read(list(self._fetches_of_tensor(read, read.chunk, memory)))
        self._take(read.key, memory, target)

    def _take(self, key: str, loaded: torch.Tensor, target: torch.Tensor) -> None:
        try:
            fill(target, loaded)
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{self.path}: {key} is {error}") from error

    def _transforms(self, location: Location) -> tuple[str, ...]:
        return self.index.transforms.get((location.file, location.offset), ())

    def _plain(self, item: bytearray, location: Location) -> bytes | bytearray:
        """Return an item without its stream transforms."""
        if not (transforms := self._transforms(location)):
            return item
        from dcp_plugin.core.storage.stock.stock_items import without_transforms

        return without_transforms(self.path, item, location, transforms)
