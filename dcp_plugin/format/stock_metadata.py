"""Checkpoints that stock torch wrote: their ``.metadata``, read without executing code from it.

``.metadata`` is a pickle. Stock readers unpickle it as it comes, so whoever writes the file runs code on every rank
that loads it. Here an unpickler knows the classes that DCP's metadata consists of, and nothing else.
"""

from __future__ import annotations

import importlib
import io
import pickle
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
from dcp_plugin.format.names import METADATA, Files, read
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


def decode(data: bytes, where: str) -> Metadata:
    """Unpickle ``.metadata`` with nothing but DCP's own classes.

    Args:
        where: What messages call the file.

    Raises:
        UnsafeCheckpoint: It refers to anything else.
        CheckpointCorrupt: It is no metadata.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{where} {error}") from None
    except Exception as error:
        raise CheckpointCorrupt(f"{where} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointCorrupt(f"{where} holds a {type(metadata).__name__}, not the metadata of a DCP checkpoint")
    return metadata


def read_index(files: Files) -> CheckpointIndex:
    """The index of a stock checkpoint: items of unknown inner layout, without checksums.

    Raises:
        UnsafeCheckpoint, CheckpointCorrupt: As :func:`decode`, and if an item lies outside its file.
    """
    return index_of(decode(read(files, METADATA), f"{files.where}/{METADATA}"), files)


def index_of(metadata: Metadata, files: Files) -> CheckpointIndex:
    """:func:`read_index` of what :func:`decode` returned. Of the files, only the sizes are asked for."""
    try:
        entries = [
            (key, _entry(metadata.storage_data, key, stored)) for key, stored in metadata.state_dict_metadata.items()
        ]
        names = sorted({info.relative_path for info in metadata.storage_data.values()})
        noted = planner_paths(metadata.planner_data, metadata.state_dict_metadata)
        paths = {key: _key_path(path) for key, path in (noted or {}).items()}
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointCorrupt(f"{files.where}/{METADATA} contradicts itself: {error!r}") from error
    sizes = {name: _size(files, name) for name in names}
    index = CheckpointIndex.build(entries, sizes, paths)
    index.validate(files.where)
    index.transforms = _transforms(metadata)
    index.storage_meta = metadata.storage_meta if isinstance(metadata.storage_meta, StorageMeta) else None
    if noted is None:
        index.planner_data = (metadata.planner_data,)
    return index


def save_id_of(metadata: Metadata) -> str:
    """Tells one save from any other; empty if the writer noted none (torch before 2.3)."""
    return str(getattr(metadata.storage_meta, "save_id", None) or "")


def _size(files: Files, name: str) -> int:
    try:
        return files.size(name)
    except OSError as error:
        raise CheckpointCorrupt(f"{files.where}: data file {name} is missing ({error.strerror})") from error


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
