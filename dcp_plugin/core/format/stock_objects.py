"""DCP's own metadata objects, made from our index and turned into entries of an index.

They serve planners and writers that ``torch.distributed.checkpoint`` drives. Saves and loads of this package use
columns, because an object for each of a million chunks costs seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_plugin.core.format.index import (
    CheckpointIndex,
    Entry,
    KeyColumns,
    KeyPath,
    Location,
    StoredChunk,
    StoredTensor,
    StoredValue,
)
from dcp_plugin.core.format.metadata import as_stock_knows_it, stock_path
from dcp_plugin.core.tensors._torch import StorageInfo


def state_metadata(table: KeyColumns) -> dict[str, Any]:
    """Return DCP's metadata of each key in a table."""
    state: dict[str, Any] = {}
    for slot, key in enumerate(table.keys):
        dtype = table.dtype_of(slot)
        if dtype is None:
            state[key] = BytesStorageMetadata()
            continue
        offsets, sizes = (boxes.tolist() for boxes in table.boxes_of(slot))
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in zip(offsets, sizes, strict=True)]
        state[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(table.shape_of(slot)), chunks)
    return state


def metadata_of(index: CheckpointIndex, storage_meta: StorageMeta | None = None) -> Metadata:
    """Return the DCP metadata of an index, for planners of other packages."""
    index = as_stock_knows_it(index)
    state = state_metadata(index.table)
    storage: dict[MetadataIndex, Any] = {}
    for key in state:
        entry = index[key]
        if isinstance(entry, StoredValue):
            storage[MetadataIndex(key)] = storage_info(entry.chunks[0].location)
        else:
            storage |= {MetadataIndex(key, torch.Size(c.offsets)): storage_info(c.location) for c in entry.chunks}
    planner_data = (
        index.planner_data[0] if index.planner_data else {key: stock_path(index.path_of(key)) for key in state}
    )
    return Metadata(state, planner_data, storage, storage_meta or StorageMeta(), index.version)


def storage_info(location: Location) -> Any:
    """Return a location as DCP's ``_StorageInfo``."""
    return StorageInfo(location.file, location.offset, location.length)


def planner_paths(planner_data: Any, keys: Collection[str]) -> dict[str, KeyPath] | None:
    """Return the paths of keys in the note of DCP's own planner; None for the note of another planner."""
    if not isinstance(planner_data, Mapping):
        return None
    is_paths = all(
        key in keys and isinstance(path, (tuple, list)) and all(isinstance(part, (str, int, tuple)) for part in path)
        for key, path in planner_data.items()
    )
    return dict(planner_data) if is_paths else None


def entries_of(metadata: Metadata, places: Mapping[MetadataIndex, Location]) -> Iterator[tuple[str, Entry]]:
    """Yield each key of DCP's metadata with its entry, given the places of items.

    Raises KeyError if an item has no place.
    """
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            yield key, StoredValue((StoredChunk((), (), places[MetadataIndex(key)]),))
        else:
            located = ((c, places[MetadataIndex(key, c.offsets)]) for c in stored.chunks)
            chunks = tuple(StoredChunk(tuple(c.offsets), tuple(c.sizes), location) for c, location in located)
            yield key, StoredTensor(stored.properties.dtype, tuple(stored.size), chunks)
