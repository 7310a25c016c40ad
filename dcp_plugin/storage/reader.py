"""Reads a checkpoint: the index or the stock metadata, then the byte ranges that a plan asks for.

A real DCP ``StorageReader``: ``torch.distributed.checkpoint.load(sd, storage_reader=ShardedReader(path))`` uses it with
any planner, on our checkpoints and on stock ones.

What a plan asks for becomes fetches (:mod:`~dcp_plugin.storage.fetch`), neighbours of these batches
(:mod:`~dcp_plugin.storage.batches`), and these are carried out by :mod:`~dcp_plugin.storage.read_items`. Stock items
whose layout is the one we would have written are read like our own; others go through
``torch.load(weights_only=True)``. What there is to read, :mod:`~dcp_plugin.storage.open` finds out; whoever wrote it,
the rest is the same. The planner is only called from the caller's thread.
"""

from __future__ import annotations

import io
import itertools
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import planner as stock
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_plugin.errors import CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint
from dcp_plugin.format.index import CheckpointIndex, Location, StoredChunk, StoredTensor, StoredValue
from dcp_plugin.format.metadata import metadata_of
from dcp_plugin.format.payload import block_size
from dcp_plugin.format.pickles.rebuild import RefusedValue
from dcp_plugin.format.summary import Summary
from dcp_plugin.format.values import encode
from dcp_plugin.format.whole_tensors import decode
from dcp_plugin.paths import StorageOptions, as_path, is_path
from dcp_plugin.records import LoadPlan, OpenCheckpoint, WholeChunk
from dcp_plugin.sources import SourceFiles
from dcp_plugin.storage import fetch, read_items
from dcp_plugin.storage.batches import batches_of, batches_of_chunks
from dcp_plugin.storage.fetch import Fetch
from dcp_plugin.storage.open import check_files, open_alone, open_checkpoint, open_files
from dcp_plugin.storage.published import gone_or_damaged
from dcp_plugin.tensors._torch import undo_transforms
from dcp_plugin.tensors.host_memory import finish_device_work
from dcp_plugin.tensors.kinds import fill, is_stored_whole, require_memory, size_of
from dcp_plugin.types import Shape

_MOST_FRAME = 1 << 20
"""More than anything around a tensor's payload takes, whichever version of torch wrote it."""


@dataclass(frozen=True)
class _Read:
    """A planner's read and where it is; a value has no chunk."""

    item: ReadItem
    location: Location
    chunk: StoredChunk | None = None
    dtype: torch.dtype = torch.uint8

    @property
    def box(self) -> tuple[Shape, Shape]:
        """Offsets and lengths in the chunk."""
        return tuple(self.item.storage_offsets), tuple(self.item.lengths)


class ShardedReader(StorageReader):
    """Reader of one checkpoint: ours, any of DCP's, or another tool's (:mod:`dcp_plugin.format.foreign`).

    Args:
        path: The checkpoint: a directory, or a file of another tool.
        io_threads: Threads that read, per rank.
        verify: Compare what is read with the checksums.
        check_files: Compare the sizes of all data files with the index when the checkpoint is opened.
        base: Where the checkpoint is that has what this one leaves out, if it was moved.
        complete: Open the base too. Otherwise the index lacks the keys that the base has.
        storage_options: How the store of a URL is reached, see :class:`~dcp_plugin.CheckpointConfig`.
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

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        io_threads: int = 2,
        verify: bool = True,
        check_files: bool = True,
        base: str | os.PathLike[str] | None = None,
        complete: bool = True,
        storage_options: StorageOptions | None = None,
        files: SourceFiles | None = None,
    ) -> None:
        self._storage_options = storage_options
        self.files = files
        self.path = self._asked_for = as_path(path, storage_options)
        self._io_threads = io_threads
        self._verify = verify
        self._check_files = check_files
        self._base = as_path(base, storage_options) if base else None
        self._complete = complete
        self._opened: OpenCheckpoint | None = None
        self.load_id = str(uuid.uuid4())
        """Tells one load from any other."""
        self._layouts: dict[tuple[str, int], StoredChunk] = {}
        self.bytes_read = 0
        """Bytes of data files that were read, to the last one: checksum blocks and gaps included."""
        self.unchecked_bytes = 0
        """Of these, bytes whose block was read in part only, so that its checksum could not be compared."""

    @property
    def opened(self) -> OpenCheckpoint:
        """The checkpoint; opened when it is first needed."""
        if self._opened is None:
            if self.files is not None:
                self._opened = open_files(self.path, self.files, self._base, self._complete)
            elif self._complete:
                self._opened = open_checkpoint(self.path, self._base, self._check_files)
            else:
                self._opened = open_alone(self.path, self._check_files)
            self.path = self._opened.path
        return self._opened

    def close(self) -> None:
        """Let go of the files. The index stays; what is not read by now cannot be read any more."""
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
        """Equal for the same checkpoint, wherever it is: a hash of its table of contents."""
        return self.opened.fingerprint

    @property
    def save(self) -> tuple[str, str]:
        """Equal on ranks that read the same save: a hash of what it has, and what tells saves of the same apart."""
        return self.opened.identity, self.opened.save_ids

    @property
    def summary(self) -> Summary | None:
        """What ``dcp_plugin.json`` says; None for a checkpoint of another tool."""
        return self.opened.summary

    @property
    def kinds(self) -> dict[str, str]:
        """Which names are a ``module`` and which an ``optimizer``, as far as the checkpoint tells."""
        return self.opened.kinds

    def hold_files(self, plan: LoadPlan, keys: Iterable[str] = ()) -> None:
        """Open the files of a plan and of some keys, so that they can be read even if the checkpoint is deleted
        meanwhile. They are checked if not all were when the checkpoint was opened.

        Raises:
            CheckpointCorrupt: One is missing, truncated or a link that leads elsewhere.
            CheckpointNotFound: It was deleted meanwhile.
        """
        if self._check_files:
            names = set(self.index.files)  # those of the plan would have to be found out, and that takes longer
        else:
            entries = (self.index[key] for key in keys)
            more = (chunk for one in entries if isinstance(one, StoredTensor) for chunk in one.chunks)
            found = (*(self._find(item).location for item in plan.items), *(chunk.location for chunk in more))
            names = {*(location.file for location in found), *self._files_of(plan.chunks)}
            check_files(self.opened, names)
        try:
            self.opened.files.keep(names)
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
        """What DCP asks for at the start of each load. The checkpoint may be another one than in the load before."""
        self._forget()
        save_id = self.summary.save_id if self.summary else None
        noted = self.index.storage_meta or StorageMeta(str(self.opened.path), save_id)
        return metadata_of(self.index, replace(noted, load_id=self.load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the index is read when it is first needed."""

    def prepare_local_plan(self, plan: stock.LoadPlan) -> stock.LoadPlan:
        return replace(plan, storage_data=self.save)

    def prepare_global_plan(self, plans: list[stock.LoadPlan]) -> list[stock.LoadPlan]:
        """On one rank: each has opened the checkpoint for itself."""
        saves = [plan.storage_data for plan in plans]
        other = next((rank for rank, save in enumerate(saves) if save != saves[0]), None)
        if other is not None:
            raise CheckpointMismatch(
                f"rank {other} has opened another checkpoint at {self._asked_for} than rank 0: it was replaced "
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

    # Beyond the interface

    def read_parts(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read the items and chunks of a plan.

        Raises:
            CheckpointCorrupt, CheckpointNotFound, CheckpointUnreadable: Naming file and key. Targets may be partly
                filled.
        """
        reads = [self._find(item) for item in plan.items]
        with suppress(OSError):  # the read of the key will say what is wrong
            self.opened.files.keep({*(read.location.file for read in reads), *self._files_of(plan.chunks)})
        self._recognise(reads)
        values: dict[tuple[str, int], bytearray] = {}
        targets, wholes = [], []
        fetches: list[Fetch] = []
        for read in reads:
            if read.item.storage_index.fqn in self.index.values_here:
                continue
            if read.chunk is None:
                fetches += self._fetch_of_value(read, values)
            else:
                target = self._resolve(planner, read.item)
                targets.append((read.item, target))
                if is_stored_whole(target):
                    wholes.append((read, read.chunk, target))
                else:
                    fetches += self._fetches_of_tensor(read, read.chunk, target)
        finish_device_work(target for _, target in targets)
        self._read(fetches, plan.chunks)
        for read, chunk, target in wholes:  # here, and one at a time: their classes have code of their own
            self._fill(read, chunk, target)
        for read in reads:
            if read.chunk is None:
                planner.load_bytes(read.item, io.BytesIO(self._value(read, values)))
        for item, target in targets:
            planner.commit_tensor(item, target)

    def check(self, items: list[tuple[str, Location]]) -> list[str]:
        """Read items of one file completely, by key. Return a line for each that is wrong."""
        return read_items.check_items(self.opened.files, items, self.index.smallest_block)

    def item(self, key: str) -> bytes:
        """All bytes of a value, or of a tensor that is one item, checked.

        Raises:
            CheckpointMismatch: It is in several items.
        """
        if key in self.index.values_here:
            return self._value_here(key)
        entry = self.index[key]
        places = [entry.location] if isinstance(entry, StoredValue) else [chunk.location for chunk in entry.chunks]
        if len(places) != 1:
            raise CheckpointMismatch(f"{self.path}: {key} is stored in {len(places)} parts, and is no object without")
        where = replace(places[0], payload_offset=0, payload_length=places[0].length)
        found, memory = fetch.of_value(key, where, self._block(where))
        self._read([found])
        return bytes(self._plain(memory, where))

    @staticmethod
    def _resolve(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
        """The target of a read; other planners than ours hand over whatever the state has."""
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
        if files.streams:  # each call is a request, which costs more than objects do: neighbours are read together
            fetches, chunks = [*fetches, *itertools.chain.from_iterable(map(self._fetches_of_chunk, chunks))], ()
        found = [*batches_of(fetches, files), *batches_of_chunks(chunks, self.index, files, self._verify)]
        count = read_items.read(files, found, self._io_threads)
        self.bytes_read += count.read
        self.unchecked_bytes += count.unchecked

    def _files_of(self, chunks: Sequence[WholeChunk]) -> set[str]:
        numbers = self.index.columns["file"][[chunk.number for chunk in chunks]] if chunks else ()
        return {self.index.file_names[number] for number in set(map(int, numbers))}

    def _find(self, item: ReadItem) -> _Read:
        """The stored chunk that a read is about; planners tell its offset and a hint at its position."""
        entry = self.index[item.storage_index.fqn]
        if isinstance(entry, StoredValue):
            return _Read(item, entry.location)
        offset = tuple(item.storage_index.offset or ())
        chunk = entry.chunk_at(offset, item.storage_index.index)
        if chunk is None:
            raise CheckpointCorrupt(f"{self.path}: {item.storage_index.fqn} has no chunk at {offset}")
        return _Read(item, chunk.location, chunk, entry.dtype)

    def _recognise(self, reads: list[_Read]) -> None:
        """Find the payloads of a stock checkpoint's tensors, so that they need not go through ``torch.load``."""
        unknown = [
            (read.chunk, read.dtype)
            for read in reads
            if read.chunk is not None
            and read.location.payload_offset is None
            and read.item.storage_index.fqn not in self.index.strides
            and (read.location.file, read.location.offset) not in self.index.transforms
        ]
        self.bytes_read += read_items.recognise(self.opened.files, unknown, self._layouts)

    def _value(self, read: _Read, values: dict[tuple[str, int], bytearray]) -> bytes | bytearray:
        key = read.item.storage_index.fqn
        if key in self.index.values_here:
            return self._value_here(key)
        return self._plain(values[read.location.file, read.location.offset], read.location)

    def _value_here(self, key: str) -> bytes:
        value = self.index.values_here[key]
        if isinstance(value, RefusedValue):
            raise UnsafeCheckpoint(
                f"{self.path}: {key} is, or has in it, an object of {value.of}, which only executing code would "
                f"restore; nothing was executed. The rest can be had without it: exclude={key!r}."
            )
        return encode(value)

    def _fetch_of_value(self, read: _Read, values: dict[tuple[str, int], bytearray]) -> Iterator[Fetch]:
        """Values that are equal share an item, which is read once."""
        location = read.location
        if (location.file, location.offset) in values:
            return
        if location.payload_offset is None:
            location = replace(location, payload_offset=0, payload_length=location.length)
        found, memory = fetch.of_value(read.item.storage_index.fqn, location, self._block(location))
        values[location.file, location.offset] = memory
        yield found

    def _fetches_of_tensor(self, read: _Read, chunk: StoredChunk, target: torch.Tensor) -> Iterator[Fetch]:
        key = read.item.storage_index.fqn
        if (shape := tuple(target.shape)) != read.box[1]:
            raise CheckpointMismatch(f"{self.path}: {key} is read as {read.box[1]} into a target of {shape}")
        if key in self.index.strides:
            yield from fetch.of_view(key, chunk.location, read.dtype, self.index.strides[key], read.box[0], target)
            return
        if chunk.location.payload_offset is None:
            chunk = self._layouts.get((chunk.location.file, chunk.location.offset), chunk)
        block = self._block(chunk.location)
        if chunk.location.payload_offset is None:
            take = lambda item: self._load_item(item, read, chunk, target)  # noqa: E731
            yield fetch.of_item(key, chunk.location, take, block)
        else:
            gap = self.opened.files.gap if self.opened.files.streams else 0
            yield from fetch.of_box(key, chunk, read.dtype, read.box, target, block, gap)

    def _fetches_of_chunk(self, chunk: WholeChunk) -> Iterator[Fetch]:
        target, sizes = chunk.target, tuple(chunk.target.shape)
        stored, corner = StoredChunk((), sizes, self.index.location(chunk.number)), (0,) * len(sizes)
        return fetch.of_box(chunk.key, stored, target.dtype, (corner, sizes), target, self._block(stored.location))

    def _block(self, location: Location) -> int | None:
        """Bytes per checksum of an item; None if nothing is checked."""
        if not self._verify or location.checksums is None:
            return None
        return block_size(location.payload_length, self.index.smallest_block)

    def _fill(self, read: _Read, chunk: StoredChunk, target: torch.Tensor) -> None:
        """Fill a target without memory of its own: through a tensor that has, or from an item that torch.save made."""
        known = self._layouts.get((chunk.location.file, chunk.location.offset), chunk)
        key = read.item.storage_index.fqn
        if known.location.payload_offset is None and key not in self.index.strides:
            self._read(list(self._fetches_of_tensor(read, chunk, target)))
            return
        memory = torch.empty(read.box[1], dtype=read.dtype)
        self._read(list(self._fetches_of_tensor(read, chunk, memory)))
        self._take(key, memory, target)

    def _take(self, key: str, loaded: torch.Tensor, target: torch.Tensor) -> None:
        try:
            fill(target, loaded)
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{self.path}: {key} is {error}") from error

    def _plain(self, item: bytearray, location: Location, limit: int = -1) -> bytes | bytearray:
        """An item as it was before stream transforms; of one that turns out larger, the first bytes."""
        transforms = self.index.transforms.get((location.file, location.offset), ())
        try:
            return undo_transforms(item, transforms, limit) if transforms else item
        except Exception as error:  # each transform has its own
            raise CheckpointCorrupt(
                f"{self.path}: byte {location.offset} of {location.file} on is no {'+'.join(transforms)}: {error}"
            ) from error

    def _load_item(self, item: bytearray, read: _Read, chunk: StoredChunk, target: torch.Tensor) -> None:
        """A tensor of unknown layout, through torch."""
        key = read.item.storage_index.fqn
        where = f"the item of {key} in {chunk.location.file}"
        largest = prod(chunk.sizes) * read.dtype.itemsize + size_of(target) + _MOST_FRAME
        try:
            stored = decode(self._plain(item, chunk.location, largest), target)
        except UnsafeCheckpoint as error:
            raise UnsafeCheckpoint(f"{self.path}: {key} is {error}") from error
        except Exception as error:
            raise CheckpointCorrupt(f"{where} is damaged: {error}") from error
        if not isinstance(stored, torch.Tensor) or tuple(stored.shape) != chunk.sizes:
            raise CheckpointCorrupt(f"{where} is not the tensor that the metadata describes")
        if read.box[1] != chunk.sizes:
            try:
                with torch.no_grad():
                    stored = stored[tuple(slice(at, at + size) for at, size in zip(*read.box, strict=True))]
            except Exception as error:  # whatever the class does
                raise CheckpointMismatch(
                    f"{self.path}: {key} is stored whole, as a {type(stored).__name__}, of which no part can be taken "
                    f"({error}): load it as it was distributed when it was saved"
                ) from error
        self._take(key, stored, target)
