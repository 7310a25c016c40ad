"""Writes a checkpoint: data files on every rank, then the metadata and the commit on the coordinator.

A real DCP ``StorageWriter``: ``torch.distributed.checkpoint.save(sd, storage_writer=ShardedWriter(path))`` uses it
with any planner, and gets the same checkpoint, committed by the same rule, as :func:`dcp_plugin.save`.

The way of an item: the planner resolves it to a tensor or to bytes; its frame is computed from dtype and shape; the
payload goes from tensor memory to the file, block by block, each block checksummed while it is in the cache. Two
items on one rank that are the same memory or the same bytes (tied weights, equal values) are written once.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from isal.isal_zlib import crc32
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_plugin import progress
from dcp_plugin._torch import StorageInfo
from dcp_plugin.config import local_path
from dcp_plugin.errors import SaveFailed
from dcp_plugin.storage import commit, files
from dcp_plugin.storage.framing import ALIGNMENT, frame
from dcp_plugin.storage.index import (
    BLOCK_SIZE,
    CheckpointIndex,
    Entry,
    Location,
    StoredChunk,
    StoredTensor,
    StoredValue,
)
from dcp_plugin.storage.summary import Summary
from dcp_plugin.storage.views import Views, write_views
from dcp_plugin.types import KeyPath, memory_of

_NOTICE_SECONDS = 10.0
"""How long a directory made by another rank may take to appear: NFS clients cache that a name does not exist."""


@dataclass(frozen=True)
class Assignment:
    """What the coordinator tells each rank with its plan: who it is and where this save's files go."""

    rank: int
    directory: Path


class ShardedWriter(StorageWriter):
    """Writer of one checkpoint directory.

    Args:
        path: The final directory. It appears when the save is complete, and replaces a checkpoint that is there.
        step: Training step, for the summary.
        io_threads: Threads, and data files, per rank.
        checksum: Whether to compute CRC32 checksums.
        views: More tables of contents, see :mod:`dcp_plugin.storage.views`.
        facts: More for the summary: ``kinds`` and ``layouts`` (see :class:`~dcp_plugin.storage.summary.Summary`).

    Raises:
        SaveFailed: From any method: the checkpoint was not committed; what was at ``path`` is untouched.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        io_threads: int = 2,
        checksum: bool = True,
        views: Views | None = None,
        **facts: Any,
    ) -> None:
        self.path = local_path(path)
        self._step = step
        self._io_threads = io_threads
        self._checksum = checksum
        self._views = views or {}
        self.facts = facts
        self._reservation: commit.Reservation | None = None
        self.bytes_written = 0
        """Bytes of this rank's data files."""

    # torch.distributed.checkpoint.StorageWriter

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = local_path(checkpoint_id)
        self._reservation = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise SaveFailed(
                f"cannot save {self.path} with use_collectives=False: without a coordinator nobody commits it."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        directory = self.reserve()
        return [replace(plan, storage_data=Assignment(rank, directory)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assignment: Assignment = plan.storage_data
        wait_until_visible(assignment.directory, self.path)
        resolved = [(item, _resolve(planner, item)) for item in plan.items]
        unique, same_as = _without_duplicates(resolved)
        total = sum(_size(data) for _, data in unique)
        meter = _Meter(self.path, total)
        buckets = _buckets(unique, self._io_threads, total)
        try:
            with ThreadPoolExecutor(max(1, len(buckets)), thread_name_prefix="dcp-write") as pool:
                jobs = [pool.submit(self._write_file, assignment, n, bucket, meter) for n, bucket in enumerate(buckets)]
                results = {index: result for job in jobs for index, result in job.result()}
            files.sync_directory(assignment.directory)
        except OSError as error:
            raise SaveFailed(f"cannot save {self.path}: {error}. Is the file system full or gone?") from error
        for item, original in same_as:
            results[item.index] = replace(results[original.index], index=item.index)
        done: Future[list[WriteResult]] = Future()
        done.set_result(list(results.values()))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._reservation is not None, "the coordinator has prepared the plans"
        directory = self._reservation.directory
        places: dict[MetadataIndex, Location] = {r.index: r.storage_data for rank in results for r in rank}
        paths = metadata.planner_data or {}
        try:
            index = CheckpointIndex.build(_entries(metadata, places), _file_sizes(directory), paths)
        except KeyError as error:
            raise SaveFailed(f"cannot save {self.path}: no rank wrote {error}") from error
        encoded = index.encode()
        tensors = sum(isinstance(m, TensorStorageMetadata) for m in metadata.state_dict_metadata.values())
        attached = {name for name in os.listdir(directory) if not name.endswith(commit.DATA_SUFFIX)}
        summary = Summary.describe(
            encoded,
            self.path.parent,
            attached=sorted(attached.union(self._views)),
            step=self._step,
            world_size=len(results),
            tensors=tensors,
            values=len(index) - tensors,
            payload_bytes=index.payload_bytes,
            **self.facts,
        )
        described = summary.encode()
        try:
            files.write_durably(directory / commit.INDEX, encoded)
            files.write_durably(directory / commit.SUMMARY, described)
            files.sync_tree(directory, but=commit.DATA_SUFFIX)  # what others have added
            files.write_durably(directory / commit.METADATA, self._stock_metadata(metadata, places))
            write_views(directory, self._views, metadata)
            commit.publish(self._reservation)
        except OSError as error:
            raise SaveFailed(f"cannot commit {self.path}: {error}. Is the file system full or gone?") from error
        self._reservation = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self.path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    # Beyond the interface

    def reserve(self, among_other_files: bool = False) -> Path:
        """The directory that this save writes into, made if there is none yet. On the coordinator.

        See :func:`dcp_plugin.storage.commit.reserve`.
        """
        if self._reservation is None:
            self._reservation = commit.reserve(self.path, among_other_files)
        return self._reservation.directory

    def discard(self) -> None:
        """Delete what this save has written so far. On the coordinator; elsewhere nothing happens."""
        if self._reservation is not None:
            commit.discard(self._reservation)
            self._reservation = None

    def _write_file(
        self, assignment: Assignment, number: int, items: list[tuple[WriteItem, Any]], meter: _Meter
    ) -> list[tuple[MetadataIndex, WriteResult]]:
        name = f"__{assignment.rank}_{number}{commit.DATA_SUFFIX}"
        written = []
        with open(assignment.directory / name, "xb", buffering=BLOCK_SIZE) as file:
            for item, data in items:
                location = self._write_item(file, name, data, meter)
                written.append((item.index, WriteResult(item.index, location.length, location)))
            file.flush()
            os.fsync(file.fileno())
            meter.files(file.tell())
        self.bytes_written = meter.file_bytes
        return written

    def _write_item(self, file: IO[bytes], name: str, data: torch.Tensor | bytes, meter: _Meter) -> Location:
        offset = file.tell()
        file.write(b"\0" * (-offset % ALIGNMENT))
        offset += -offset % ALIGNMENT
        around = None if isinstance(data, bytes) else frame(data.dtype, tuple(data.shape))
        payload = memoryview(data) if isinstance(data, bytes) else _memory(data)
        head = around.head if around else b""
        file.write(head)
        crc = 0
        running = []
        for start in range(0, len(payload), BLOCK_SIZE):
            block = payload[start : start + BLOCK_SIZE]
            if self._checksum:
                crc = crc32(block, crc)
                running.append(crc)
            file.write(block)
            meter.add(len(block))
        tail = around.tail(crc) if around else b""
        file.write(tail)
        return Location(
            name,
            offset,
            len(head) + len(payload) + len(tail),
            len(head),
            len(payload),
            crc32(tail, crc32(head)) if self._checksum else 0,
            np.array(running, np.uint32) if self._checksum else None,
        )

    def _stock_metadata(self, metadata: Metadata, places: dict[MetadataIndex, Location]) -> bytes:
        """``.metadata`` as stock readers want it."""
        metadata.planner_data = {key: _stock_path(path) for key, path in (metadata.planner_data or {}).items()}
        metadata.storage_data = {
            index: StorageInfo(where.file, where.offset, where.length) for index, where in places.items()
        }
        metadata.storage_meta = self.storage_meta()
        return pickle.dumps(metadata)


class _Meter:
    """Counts what all threads of one save have written, and tells the world."""

    def __init__(self, path: Path, total: int) -> None:
        self._path, self._total = path, total
        self._written = 0
        self._lock = threading.Lock()
        self.file_bytes = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._written += count
            event = progress.BytesWritten(self._path, self._written, self._total)
        progress.emit(event)

    def files(self, count: int) -> None:
        with self._lock:
            self.file_bytes += count


def wait_until_visible(directory: Path, path: Path) -> None:
    """The directory was made by the coordinator. Not seeing it means that the ranks do not share the file system."""
    deadline = time.monotonic() + _NOTICE_SECONDS
    while not directory.is_dir():
        if time.monotonic() > deadline:
            raise SaveFailed(
                f"cannot save {path}: this rank does not see {directory}, which rank 0 has made. The "
                f"checkpoint directory must be on a file system that all ranks share."
            )
        with suppress(OSError):
            os.listdir(directory.parent)  # makes an NFS client look again
        time.sleep(0.1)


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor | bytes:
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        return cast(Any, data).getvalue()  # type: ignore[no-any-return]
    assert isinstance(data, torch.Tensor)
    return data.detach().resolve_conj().resolve_neg()


def _without_duplicates(
    resolved: list[tuple[WriteItem, Any]],
) -> tuple[list[tuple[WriteItem, Any]], list[tuple[WriteItem, WriteItem]]]:
    """The items to write, and those that equal one of them: the same bytes, or the same memory seen the same way."""
    first: dict[Any, WriteItem] = {}
    unique, same_as = [], []
    for item, data in resolved:
        if isinstance(data, bytes):
            identity: Any = data
        elif data.numel() == 0:
            identity = item.index
        else:
            identity = memory_of(data)
        if identity in first:
            same_as.append((item, first[identity]))
        else:
            first[identity] = item
            unique.append((item, data))
    return unique, same_as


def _size(data: torch.Tensor | bytes) -> int:
    return len(data) if isinstance(data, bytes) else data.numel() * data.element_size()


def _buckets(items: list[tuple[WriteItem, Any]], count: int, total: int) -> list[list[tuple[WriteItem, Any]]]:
    """Items spread over files by size, the largest first. Little data is not worth a second file."""
    if count == 1 or total < BLOCK_SIZE:
        return [items] if items else []
    buckets: list[list[tuple[WriteItem, Any]]] = [[] for _ in range(count)]
    loads = [0] * count
    for item in sorted(items, key=lambda item: _size(item[1]), reverse=True):
        lightest = loads.index(min(loads))
        buckets[lightest].append(item)
        loads[lightest] += _size(item[1])
    return [bucket for bucket in buckets if bucket]


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; its own memory where it lies on the host like that."""
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _file_sizes(directory: Path) -> dict[str, int]:
    names = sorted(name for name in os.listdir(directory) if name.endswith(commit.DATA_SUFFIX))
    return {name: (directory / name).stat().st_size for name in names}


def _entries(metadata: Metadata, places: dict[MetadataIndex, Location]) -> Iterator[tuple[str, Entry]]:
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            yield key, StoredValue(places[MetadataIndex(key)])
        else:
            chunks = tuple(
                StoredChunk(tuple(c.offsets), tuple(c.sizes), places[MetadataIndex(key, c.offsets)])
                for c in stored.chunks
            )
            yield key, StoredTensor(stored.properties.dtype, tuple(stored.size), chunks)


def _stock_path(path: KeyPath) -> Sequence[str | int]:
    """Stock paths know mapping keys as text and list indices as numbers."""
    return tuple(
        part if isinstance(part, (str, int)) else (part[1] if part[0] == "t" else str(part[1])) for part in path
    )
