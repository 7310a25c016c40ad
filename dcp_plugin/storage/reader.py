"""Reads a checkpoint: the index or the stock metadata, then the byte ranges that a plan asks for.

A real DCP ``StorageReader``: ``torch.distributed.checkpoint.load(sd, storage_reader=ShardedReader(path))`` uses it
with any planner, on our checkpoints and on stock ones.

A payload of known layout is read by blocks, straight into the target's memory where a run of bytes is contiguous
there, and every block that is touched is checked against its checksum. An item of unknown layout (a stock
checkpoint's) goes through ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from isal.isal_zlib import crc32
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_plugin._torch import load_bytes
from dcp_plugin.config import local_path
from dcp_plugin.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointNotFound
from dcp_plugin.storage import commit, stock
from dcp_plugin.storage.index import CheckpointIndex, Location, StoredChunk, StoredValue
from dcp_plugin.storage.metadata import metadata_of
from dcp_plugin.storage.summary import Summary, fingerprint
from dcp_plugin.storage.validation import check_files
from dcp_plugin.types import Shape


@dataclass(frozen=True)
class _Read:
    """A planner's read and where it is; a value has no chunk."""

    item: ReadItem
    location: Location
    chunk: StoredChunk | None = None
    dtype: torch.dtype = torch.uint8


class ShardedReader(StorageReader):
    """Reader of one checkpoint directory.

    Args:
        path: The checkpoint.
        io_threads: Threads that read.
        verify: Check what is read against the checksums.
        check_files: Look at all data files when the checkpoint is opened. In a group of ranks, one of them does.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: When the index is first used.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, io_threads: int = 2, verify: bool = True, check_files: bool = True
    ) -> None:
        self.path = local_path(path)
        self._io_threads = io_threads
        self._verify = verify
        self._check_files = check_files
        self._index: CheckpointIndex | None = None
        self.summary: Summary | None = None
        """What ``dcp_plugin.json`` says; None for a stock checkpoint. Known once the index is."""
        self.bytes_read = 0

    @property
    def fingerprint(self) -> str:
        """Equal for the same checkpoint, wherever it is: a hash of its table of contents."""
        self.index  # noqa: B018 - reads the summary
        return self.summary.index_sha256 if self.summary else fingerprint((self.path / commit.METADATA).read_bytes())

    @property
    def index(self) -> CheckpointIndex:
        if self._index is None:
            self._index = self._open()
        return self._index

    def _open(self) -> CheckpointIndex:
        self.path = commit.locate(self.path)
        reason = commit.uncommitted_reason(self.path)
        if reason:
            kind = CheckpointIncomplete if commit.looks_like_checkpoint(self.path) else CheckpointNotFound
            raise kind(f"{self.path} is not a checkpoint: {reason}. dcp_plugin.latest(root) finds the newest good one.")
        if (self.path / commit.INDEX).exists():
            self.summary = Summary.read(self.path / commit.SUMMARY)
            index = CheckpointIndex.read(self.path / commit.INDEX, self.summary.index_sha256)
        else:
            index = stock.read_index(self.path)
        if self._check_files:
            check_files(self.path, index.files, index.files)
        return index

    def check_files(self, plan: LoadPlan) -> None:
        """Check the files that a plan reads from, if not all were checked when the checkpoint was opened.

        Raises:
            CheckpointCorrupt: One is missing, truncated or a link that leads elsewhere.
        """
        if not self._check_files:
            check_files(self.path, self.index.files, {self._find(item).location.file for item in plan.items})

    # torch.distributed.checkpoint.StorageReader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = local_path(checkpoint_id)
        self._index = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return metadata_of(self.index)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the index is read when it is first needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[_Read]] = defaultdict(list)
        for item in plan.items:
            read = self._find(item)
            by_file[read.location.file].append(read)
        with ThreadPoolExecutor(self._io_threads, thread_name_prefix="dcp-read") as pool:
            jobs = [pool.submit(self._read_file, name, wanted, planner) for name, wanted in by_file.items()]
            for job in jobs:
                self.bytes_read += job.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    # Beyond the interface

    def check(self, key: str, location: Location) -> str:
        """Read one item completely. An empty string, or what is wrong with it."""
        try:
            with open(self.path / location.file, "rb") as file:
                if location.checksums is None or location.payload_offset is None:
                    self._read_bytes(file.fileno(), key, location)
                    return ""
                for _ in self._blocks(file.fileno(), key, location, 0, location.payload_length):
                    pass
                head = os.pread(file.fileno(), location.payload_offset, location.offset)
                behind = location.payload_offset + location.payload_length
                tail = os.pread(file.fileno(), location.length - behind, location.offset + behind)
                if crc32(tail, crc32(head)) != location.frame_crc:
                    raise CheckpointCorrupt(f"{key} in {location.file}: the frame's checksum differs")
        except Exception as error:
            return str(error)
        return ""

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

    def _read_file(self, name: str, wanted: list[_Read], planner: LoadPlanner) -> int:
        count = 0
        with open(self.path / name, "rb") as file:
            for read in sorted(wanted, key=lambda read: read.location.offset):
                if read.chunk is None:
                    data = self._read_bytes(file.fileno(), read.item.storage_index.fqn, read.location)
                    planner.load_bytes(read.item, io.BytesIO(data))
                    count += len(data)
                else:
                    count += self._read_tensor(file.fileno(), read.item, read.chunk, read.dtype, planner)
        return count

    def _read_tensor(
        self, fd: int, item: ReadItem, chunk: StoredChunk, dtype: torch.dtype, planner: LoadPlanner
    ) -> int:
        key = item.storage_index.fqn
        target = planner.resolve_tensor(item).detach()
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        if chunk.location.payload_offset is None:
            stored = self._load_item(fd, key, chunk.location)
            if not isinstance(stored, torch.Tensor) or tuple(stored.shape) != chunk.sizes:
                raise CheckpointCorrupt(f"{self.path}: the item of {key} is not the tensor that the metadata describes")
            target.copy_(stored[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))])
            count = chunk.location.length
        else:
            count = self._read_box(fd, key, dtype, chunk, offsets, lengths, target)
        planner.commit_tensor(item, target)
        return count

    def _load_item(self, fd: int, key: str, location: Location) -> Any:
        """An item of unknown layout, through torch."""
        try:
            return load_bytes(self._read_bytes(fd, key, location), weights_only=True)
        except CheckpointCorrupt:
            raise
        except Exception as error:
            raise CheckpointCorrupt(f"{self.path}: the item of {key} in {location.file} is damaged: {error}") from error

    def _read_box(
        self,
        fd: int,
        key: str,
        dtype: torch.dtype,
        chunk: StoredChunk,
        offsets: Shape,
        lengths: Shape,
        target: torch.Tensor,
    ) -> int:
        """Read the box ``offsets``/``lengths`` of a stored chunk (in its own coordinates) into ``target``."""
        if prod(lengths) == 0:
            return 0
        strides = [prod(chunk.sizes[dim + 1 :]) for dim in range(len(chunk.sizes))]
        first = sum(o * s for o, s in zip(offsets, strides, strict=True))
        last = sum((o + n - 1) * s for o, n, s in zip(offsets, lengths, strides, strict=True))
        start, stop = first * dtype.itemsize, (last + 1) * dtype.itemsize
        contiguous = last + 1 - first == prod(lengths)
        direct = contiguous and target.is_contiguous() and target.device.type == "cpu" and target.dtype == dtype
        flat = target.reshape(-1).view(torch.uint8) if direct else torch.empty(stop - start, dtype=torch.uint8)
        out = flat.numpy().data
        for position, block in self._blocks(fd, key, chunk.location, start, stop):
            out[position : position + len(block)] = block
        if not direct:
            box = torch.as_strided(flat.view(dtype), lengths, strides)
            target.copy_(box)
        return stop - start

    def _read_bytes(self, fd: int, key: str, location: Location) -> bytes | bytearray:
        """The payload of a value's item, or the whole item where its layout is unknown."""
        if location.payload_offset is None:
            item = bytearray(location.length)
            if _read_fully(fd, memoryview(item), location.offset) < len(item):
                raise CheckpointCorrupt(f"{self.path}: {location.file} ends within {key}")
            return item
        return b"".join(bytes(block) for _, block in self._blocks(fd, key, location, 0, location.payload_length))

    def _blocks(self, fd: int, key: str, location: Location, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """The bytes ``start`` to ``stop`` of a payload, in pieces with their position relative to ``start``.

        With checksums, whole blocks are read even where only a part of them is wanted.
        """
        assert location.payload_offset is not None
        size = self.index.block_size
        base = location.offset + location.payload_offset
        checksums = location.checksums if self._verify else None
        scratch = memoryview(bytearray(min(size, location.payload_length)))
        for number in range(start // size, -(-stop // size)):
            low, high = number * size, min((number + 1) * size, location.payload_length)
            if checksums is None:
                low, high = max(low, start), min(high, stop)
            block = scratch[: high - low]
            if _read_fully(fd, block, base + low) < len(block):
                raise CheckpointCorrupt(f"{self.path}: {location.file} ends within {key}")
            if checksums is not None:
                before = int(checksums[number - 1]) if number else 0
                if crc32(block, before) != checksums[number]:
                    raise CheckpointCorrupt(
                        f"{self.path}: the bytes of {key} in {location.file} are not those that were saved (checksum "
                        f"differs in block {number}, at byte {base + low} of the file). Load an older checkpoint."
                    )
            begin, end = max(low, start), min(high, stop)
            yield begin - start, block[begin - low : end - low]


def _read_fully(fd: int, buffer: memoryview, offset: int) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
