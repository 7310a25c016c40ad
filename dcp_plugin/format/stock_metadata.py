"""Checkpoints that stock torch wrote: their ``.metadata``, read without executing code from it.

``.metadata`` is a pickle. Stock readers unpickle it as it comes, so whoever writes the file runs code on every rank
that loads it. Here an unpickler knows the classes that DCP's metadata consists of, and nothing else.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_plugin._torch import transforms_of
from dcp_plugin.errors import CheckpointCorrupt, UnsafeCheckpoint
from dcp_plugin.format.index import CheckpointIndex, Entry, Location, StoredChunk, StoredTensor, StoredValue
from dcp_plugin.format.metadata import FIELDS_OF_ALL_VERSIONS, planner_paths
from dcp_plugin.format.torch_zip import Frame, frame_if_possible
from dcp_plugin.media.disk.commit import METADATA
from dcp_plugin.media.disk.posix import read_regular
from dcp_plugin.types import KeyPath

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_DCP}.metadata", name)
    for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),  # torch 2.2 and earlier
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}  # fmt: skip


class _AnyProperties(TensorProperties):
    """Those of any version: later ones have more of them, at the end. The dtype, which is all we need, is the first."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[:FIELDS_OF_ALL_VERSIONS])  # type: ignore[no-untyped-call]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (TensorProperties.__module__, TensorProperties.__name__):
            return _AnyProperties
        if (module, name) in _ALLOWED:
            return getattr(importlib.import_module(module), name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise UnsafeCheckpoint(
            f"refers to {module}.{name}, which is no part of DCP's metadata; it was not executed. The checkpoint was "
            f"written by an unknown tool, or tampered with."
        )


def read_metadata(directory: Path) -> Metadata:
    """Unpickle ``.metadata`` with nothing but DCP's own classes.

    Raises:
        UnsafeCheckpoint: It refers to anything else.
        CheckpointCorrupt: It is no metadata.
    """
    path = directory / METADATA
    try:
        metadata = _MetadataUnpickler(io.BytesIO(read_bytes(directory))).load()
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{path} {error}") from None
    except Exception as error:
        raise CheckpointCorrupt(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointCorrupt(f"{path} holds a {type(metadata).__name__}, not the metadata of a DCP checkpoint")
    return metadata


def read_bytes(directory: Path) -> bytes:
    """``.metadata`` as it is.

    Raises:
        CheckpointCorrupt: It cannot be read.
    """
    try:
        return read_regular(directory / METADATA)
    except OSError as error:
        raise CheckpointCorrupt(f"{directory / METADATA} cannot be read: {error.strerror}") from error


def read_index(directory: Path) -> CheckpointIndex:
    """The index of a stock checkpoint: items of unknown inner layout, without checksums.

    Raises:
        UnsafeCheckpoint, CheckpointCorrupt: As :func:`read_metadata`, and if an item lies outside its file.
    """
    return index_of(read_metadata(directory), directory)


def index_of(metadata: Metadata, directory: Path) -> CheckpointIndex:
    """:func:`read_index` of what :func:`read_metadata` returned."""
    try:
        entries = [
            (key, _entry(metadata.storage_data, key, stored)) for key, stored in metadata.state_dict_metadata.items()
        ]
        files = sorted({info.relative_path for info in metadata.storage_data.values()})
        noted = planner_paths(metadata.planner_data, metadata.state_dict_metadata)
        paths = {key: _key_path(path) for key, path in (noted or {}).items()}
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointCorrupt(f"{directory / METADATA} contradicts itself: {error!r}") from error
    sizes = {name: _size(directory, name) for name in files}
    index = CheckpointIndex.build(entries, sizes, paths)
    index.validate(directory)
    index.transforms = _transforms(metadata)
    index.storage_meta = metadata.storage_meta if isinstance(metadata.storage_meta, StorageMeta) else None
    if noted is None:
        index.planner_data = (metadata.planner_data,)
    return index


def save_id_of(metadata: Metadata) -> str:
    """Tells one save from any other; empty if the writer noted none (torch before 2.3)."""
    return str(getattr(metadata.storage_meta, "save_id", None) or "")


def _size(directory: Path, name: str) -> int:
    try:
        return (directory / name).stat().st_size
    except OSError as error:
        raise CheckpointCorrupt(f"{directory}: data file {name} is missing ({error.strerror})") from error


def _transforms(metadata: Metadata) -> dict[tuple[str, int], tuple[str, ...]]:
    found = {}
    for info in metadata.storage_data.values():
        descriptors = tuple(map(str, info.transform_descriptors or ()))
        if descriptors:
            found[str(info.relative_path), int(info.offset)] = descriptors
    for descriptors in set(found.values()):
        try:
            transforms_of(descriptors)
        except ValueError as error:
            raise CheckpointCorrupt(
                f"the items went through the stream transforms {list(descriptors)}, which torch cannot undo: {error}"
            ) from error
    return found


def _entry(places: dict[MetadataIndex, Any], key: str, stored: Any) -> Entry:
    if isinstance(stored, BytesStorageMetadata):
        return StoredValue(_location(places[MetadataIndex(key)]))
    assert isinstance(stored, TensorStorageMetadata)
    chunks = tuple(
        StoredChunk(tuple(c.offsets), tuple(c.sizes), _location(places[MetadataIndex(key, c.offsets)]))
        for c in stored.chunks
    )
    return StoredTensor(stored.properties.dtype, tuple(stored.size), chunks)


def _location(info: Any) -> Location:
    return Location(str(info.relative_path), int(info.offset), int(info.length), None, 0)


def _key_path(path: Any) -> KeyPath:
    return tuple(part if isinstance(part, (str, int)) else str(part) for part in path)


def recognise(
    directory: Path,
    wanted: Iterable[tuple[StoredChunk, torch.dtype]],
    layouts: dict[tuple[str, int], StoredChunk],
) -> int:
    """Note in ``layouts``, by file and offset, the items that begin as we would begin them; the bytes it took to see.

    The beginning of an item holds the pickle that says dtype, shape and strides, so it settles where the payload is.
    Another version of torch may write another beginning; such items stay unknown.
    """
    read = 0
    by_file: dict[str, dict[int, tuple[StoredChunk, Frame]]] = defaultdict(dict)
    for chunk, dtype in wanted:
        around = frame_if_possible(dtype, chunk.sizes)
        if around is not None and around.length == chunk.location.length:
            by_file[chunk.location.file][chunk.location.offset] = chunk, around
    for name, items in by_file.items():
        with (
            suppress(OSError),
            open(directory / name, "rb", buffering=0) as file,
        ):  # who reads it will say what is wrong
            for offset in sorted(items.keys() - {known for file_name, known in layouts if file_name == name}):
                chunk, around = items[offset]
                read += len(around.head)
                if os.pread(file.fileno(), len(around.head), offset) == around.head:
                    place = replace(
                        chunk.location, payload_offset=around.payload_offset, payload_length=around.payload_length
                    )
                    layouts[name, offset] = replace(chunk, location=place)
    return read
