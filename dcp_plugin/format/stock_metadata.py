"""Reader of DCP's own table of contents, ``.metadata``: it executes no code, and makes an index of the file.

Stock readers unpickle the file directly, so its author runs code on every rank that loads it. Here the pickle becomes
plain records (:mod:`~dcp_plugin.format.pickles.records`), these are checked, and their numbers become the columns of an
index. Of the file's objects, only text and bytes are hashed, for which an attacker can make no collisions. Every step
takes a time that is linear in the file: a list that is named many times counts as many times.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import PosixPath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_plugin.errors import CheckpointCorrupt, UnsafeCheckpoint, damage_in
from dcp_plugin.format import METADATA, Files, read
from dcp_plugin.format.columns import NO_TENSOR, Column, KeyColumns, Places, unusual_paths
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.pickles.records import (
    Pairs,
    Record,
    argument,
    columns_of,
    fields,
    kind_of_record,
    new_pairs,
    without_dictionaries,
)
from dcp_plugin.format.pickles.unpickler import Accepted, Refused, Unpickler, Use
from dcp_plugin.tensors._torch import transforms_of
from dcp_plugin.types import KeyPath

_MOST_DIMENSIONS = 64
_MOST_PARTS = 256
"""Most parts of a key's path, and of a path in a file system."""
_MOST_TRANSFORMS = 16
_MOST_DEPTH = 100
"""Deepest nesting of another planner's note."""
_MOST_VALUES = 1_000_000
_EXACT = 1 << 53
_MOST_TUPLES = 10_000
"""Most keys that are tuples: unlike text, an attacker can make many of them that collide."""


_Metadata = kind_of_record("_Metadata")
_Tensor = kind_of_record("_Tensor")
_Value = kind_of_record("_Value")
_Properties = kind_of_record("_Properties")
_Chunk = kind_of_record("_Chunk")
_Item = kind_of_record("_Item")  # MetadataIndex
_Place = kind_of_record("_Place")  # _StorageInfo
_StorageMeta = kind_of_record("_StorageMeta")
_Path = kind_of_record("_Path")  # its only state is a tuple of its parts


def _path(*parts: Any) -> Record:
    if len(parts) > _MOST_PARTS or not all(type(part) is str for part in parts):
        raise ValueError("a path has too many parts, or parts that are not text")
    path = list.__new__(_Path)
    path.append(parts)
    return path


_DCP = "torch.distributed.checkpoint"
_GLOBALS: dict[str, Any] = {
    f"{_DCP}.metadata.Metadata": _Metadata,
    f"{_DCP}.metadata.TensorStorageMetadata": _Tensor,
    f"{_DCP}.metadata.BytesStorageMetadata": _Value,
    f"{_DCP}.metadata.TensorProperties": _Properties,
    f"{_DCP}.metadata.ChunkStorageMetadata": _Chunk,
    f"{_DCP}.metadata.MetadataIndex": _Item,
    f"{_DCP}.metadata.StorageMeta": _StorageMeta,
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": argument,
    f"{_DCP}.filesystem._StorageInfo": _Place,
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": _Properties,  # torch 2.2 and earlier
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": argument,
    "torch.Size": argument,
    "torch.serialization._get_layout": argument,
    "torch._utils._get_layout": argument,
    "collections.OrderedDict": lambda: new_pairs(None),
    # Python 3.13 moved the classes, and 3.14 moved them back.
    **{
        f"{module}.{name}": _path
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath")
    },
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}
STOCK_METADATA = Use(_GLOBALS, allows_user=False, prepare=without_dictionaries)


@dataclass(frozen=True)
class StockMetadata:
    """Contents of a ``.metadata``, checked except for the sizes of the files that it names."""

    table: KeyColumns
    places: Places
    files: list[str]
    """All files that it names, sorted, including those without an item of a key."""
    transforms: dict[tuple[str, int], tuple[str, ...]]
    planner_data: tuple[Any, ...]
    storage_meta: StorageMeta | None
    version: str | None
    """Version of DCP's layout; None before torch 2.9."""

    @property
    def save_id(self) -> str:
        """Identifier that differs for every save; empty if the writer noted none (torch before 2.3)."""
        return (self.storage_meta and self.storage_meta.save_id) or ""


def read_index(files: Files, folder: str = "") -> CheckpointIndex:
    """Return the index of a stock checkpoint, whose items have an unknown inner layout and no checksums.

    Args:
        folder: Folder of the checkpoint in ``files``, with a ``/`` at the end. Names of files are relative to it.

    Raises:
        UnsafeCheckpoint, CheckpointCorrupt: As :func:`decode`; or an item is outside its file.
    """
    return index_of(decode(read(files, folder + METADATA), f"{files.where}/{folder}{METADATA}"), files, folder)


def index_of(metadata: StockMetadata, files: Files, folder: str = "") -> CheckpointIndex:
    """Return the index of decoded metadata, as :func:`read_index`. Only the sizes of the data files are read."""
    sizes = {name: _size(files, folder, name) for name in metadata.files}
    index = CheckpointIndex.of(metadata.table, metadata.places, sizes)
    index.validate(f"{files.where}/{folder}".rstrip("/"))
    index.transforms = metadata.transforms
    index.storage_meta = metadata.storage_meta
    index.planner_data = metadata.planner_data
    index.version = metadata.version
    return index


def decode(data: bytes, label: str) -> StockMetadata:
    """Read ``.metadata``.

    Args:
        label: Name of the file in messages.

    Raises:
        UnsafeCheckpoint: The file refers to anything but DCP's metadata.
        CheckpointCorrupt: The file is no metadata, or contradicts itself.
    """
    try:
        with damage_in(label):
            return _checked(_load(data))
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{label} {error}") from None


def _load(data: bytes) -> Any:
    unpickler = Unpickler(io.BytesIO(data), Accepted(STOCK_METADATA))
    unpickler.persistent_load = new_pairs  # type: ignore[method-assign]
    try:
        return unpickler.load()
    except Refused as error:
        raise UnsafeCheckpoint(
            f"refers to {error}, which is not part of DCP's metadata; it was not executed. The checkpoint was written "
            f"by an unknown tool, or tampered with."
        ) from None


def _checked(record: Any) -> StockMetadata:
    attributes = fields(record, _Metadata)
    keys, stored = _items(attributes["state_dict_metadata"])
    items, places = _items(attributes["storage_data"])
    if not _are(keys, str) or len(set(keys)) != len(keys):
        raise ValueError("a key is not text, or occurs twice")
    is_tensor = np.array([type(record) is _Tensor for record in stored], bool)
    if not _are(stored, _Tensor, _Value):
        raise ValueError("a key is neither a tensor nor a value")
    properties, sizes, chunks = columns_of(
        [record for record in stored if type(record) is _Tensor], _Tensor, "properties", "size", "chunks"
    )
    if not _are(chunks, list) or sum(map(len, chunks)) > len(items):
        raise ValueError("the tensors have more chunks than the metadata has items")
    counts = np.ones(len(keys), np.int64)
    counts[is_tensor] = list(map(len, chunks))
    dtype_names, dtypes = _dtypes(properties)
    dtype = np.full(len(keys), NO_TENSOR, np.uint8)
    dtype[is_tensor] = dtypes
    shape, dimensions = _numbers(sizes)
    ndim = np.zeros(len(keys), np.int64)
    ndim[is_tensor] = dimensions
    offsets, lengths = columns_of(list(chain.from_iterable(chunks)), _Chunk, "offsets", "sizes")
    box, of_box = _numbers(list(chain.from_iterable(zip(offsets, lengths, strict=True))))
    of_chunk = np.repeat(np.arange(len(keys)), counts)
    if (of_box != np.repeat(ndim[of_chunk[is_tensor[of_chunk]]], 2)).any():
        raise ValueError("a chunk and its tensor differ in their dimensions")
    columns: dict[str, Column] = {
        "dtype": dtype, "ndim": ndim.astype(np.uint8), "shape": shape, "chunk_ends": np.cumsum(counts), "box": box,
    }  # fmt: skip
    paths, planner_data = _planner_data(attributes.get("planner_data"), keys)
    table = KeyColumns(keys, dtype_names, paths, columns)
    located, files, transforms = _placed(table, items, places)
    version = attributes.get("version")
    meta = _storage_meta(attributes.get("storage_meta"))
    return StockMetadata(
        table, located, files, transforms, planner_data, meta, version if type(version) is str else None
    )


def _items(pairs: Any) -> tuple[list[Any], list[Any]]:
    """Return the keys and the values of a dictionary."""
    if type(pairs) is not Pairs or len(pairs) % 2:
        raise ValueError("an entry is not a dictionary")
    return pairs[::2], pairs[1::2]


def _are(values: Iterable[Any], *kinds: type) -> bool:
    return set(map(type, values)) <= set(kinds)


def _numbers(rows: Sequence[Any]) -> tuple[Column, Column]:
    """Return the numbers in tuples, end to end, and how many each tuple has."""
    if not _are(rows, tuple):
        raise ValueError("a shape is not a tuple")
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    if counts.max(initial=0) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {counts.max()} dimensions, more than the limit of {_MOST_DIMENSIONS}")
    return _integers(list(chain.from_iterable(rows))), counts


def _integers(values: list[Any]) -> Column:
    if not _are(values, int):
        raise ValueError("an entry is not an integer")
    return np.array(values, np.int64)


def _dtypes(properties: Sequence[Any]) -> tuple[list[str], list[int]]:
    """Return the names of all dtypes, and the number of each tensor's. In all versions it is the first property."""
    if not _are(properties, _Properties) or any(
        len(record) != 1 or type(record[0]) is not tuple for record in properties
    ):
        raise ValueError("a tensor has no properties")
    dtypes = [record[0][0] for record in properties]
    if not _are(dtypes, torch.dtype):
        raise ValueError("a tensor has no dtype")
    numbers = {dtype: number for number, dtype in enumerate(dict.fromkeys(dtypes))}
    return [str(dtype).removeprefix("torch.") for dtype in numbers], [numbers[dtype] for dtype in dtypes]


def _placed(
    table: KeyColumns, items: list[Any], places: list[Any]
) -> tuple[Places, list[str], dict[tuple[str, int], tuple[str, ...]]]:
    """Return the places of all chunks of a table, the names of files, and the transforms of items."""
    paths, offsets, lengths, described = columns_of(
        places, _Place, "relative_path", "offset", "length", maybe="transform_descriptors"
    )
    names = paths if _are(paths, str) else [_text(path) for path in paths]
    files = sorted(set(names))
    numbers = {name: number for number, name in enumerate(files)}
    order = _found(table, items)
    place = np.zeros((len(order), 4), np.int64)
    place[:, 0], place[:, 1], place[:, 2] = _integers(offsets)[order], _integers(lengths)[order], -1
    file = np.fromiter((numbers[name] for name in names), np.int32, len(names))[order]
    transforms_at = {
        (name, offset): _descriptors(descriptors_of_item)
        for name, offset, descriptors_of_item in zip(names, offsets, described, strict=True)
        if descriptors_of_item is not None and descriptors_of_item != [] and descriptors_of_item != ()
    }
    for descriptors in set(transforms_at.values()):
        _check_transforms(descriptors)
    return Places.without_hashes(files, file, place), files, transforms_at


def _found(table: KeyColumns, items: list[Any]) -> Column:
    """Return for each chunk of a table the number of its item. Raises KeyError if it has none.

    An item is identified by its key and its offsets. Only the bytes of these numbers are hashed.
    """
    keys, offsets = columns_of(items, _Item, "fqn", maybe="offset")
    if not _are(keys, str):
        raise ValueError("the key of an item is not text")
    slots = np.fromiter((table.slots.get(key, -1) for key in keys), np.int64, len(keys))
    starts, counts = _numbers([() if offset is None else offset for offset in offsets])
    order = np.zeros(int(table.chunk_starts[-1]), np.int64)

    @functools.cache
    def numbers_of(ndim: int) -> dict[bytes, int]:
        candidates = np.flatnonzero((counts == ndim) & (slots >= 0))
        begins = (np.cumsum(counts) - counts)[candidates]
        rows_of_items = _rows(slots[candidates], starts[begins[:, None] + np.arange(ndim)])
        numbers = dict(zip(rows_of_items, candidates.tolist(), strict=True))
        if len(numbers) != len(rows_of_items):
            raise ValueError("an item occurs twice")
        return numbers

    chunks_of = np.diff(table.chunk_starts)
    for wanted_slots, chunks, boxes in table.by_ndim():
        numbers, owners = numbers_of(boxes.shape[2]), np.repeat(wanted_slots, chunks_of[wanted_slots])
        order[chunks] = [numbers[row] for row in _rows(owners, boxes[:, 0])]
    return order


def _rows(slots: Column, offsets: Column) -> list[bytes]:
    """Return each slot with its offsets as bytes, which are a key for a dict without a tuple of integers."""
    rows = np.ascontiguousarray(np.concatenate((slots[:, None], offsets), axis=1))
    rows_as_bytes: list[bytes] = rows.view(f"V{8 * rows.shape[1]}").ravel().tolist()
    return rows_as_bytes


def _descriptors(descriptors: Any) -> tuple[str, ...]:
    if not (_are([descriptors], list, tuple) and len(descriptors) <= _MOST_TRANSFORMS and _are(descriptors, str)):
        raise ValueError("the transforms of an item are not a list of names")
    return tuple(descriptors)


def _check_transforms(descriptors: tuple[str, ...]) -> None:
    try:
        transforms_of(descriptors)
    except Exception as error:  # each transform raises its own types
        raise ValueError(
            f"the items went through the stream transforms {list(descriptors)}, which torch cannot undo: {error}"
        ) from error


def _text(path: Any) -> str:
    return path if type(path) is str else str(_posix_path(path))


def _posix_path(record: Any) -> PosixPath:
    if type(record) is not _Path or len(record) != 1:
        raise ValueError("an entry is not a path")
    return PosixPath(*record[0])


def _planner_data(note: Any, keys: list[str]) -> tuple[dict[str, KeyPath], tuple[Any, ...]]:
    """Return the paths of keys that differ from the default, as DCP's own planners note them.

    Any other note comes back as the second item, a tuple of one.
    """
    if type(note) is Pairs:
        named, paths = _items(note)
        if (
            _are(named, str)
            and _are(paths, tuple, list)
            and max(map(len, paths), default=0) <= _MOST_PARTS
            and all(_are(path, str, int) for path in paths)
            and set(named) <= set(keys)
        ):
            return unusual_paths(dict(zip(named, map(tuple, paths), strict=True))), ()
    return {}, (_Restoring().of(note),)


class _Restoring:
    """Conversion of the records in a pickle back to plain values."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._tuples = 0
        self._values = 0

    def of(self, value: Any, depth: int = 0) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        self._values += 1
        if depth > _MOST_DEPTH or self._values > _MOST_VALUES:
            raise ValueError("its planner_data is nested too deep, or too large")
        if type(value) is list:
            restored: Any = []
            self._made[id(value)] = restored
            restored += [self.of(child, depth + 1) for child in value]
        elif type(value) is Pairs:
            restored = {}
            self._made[id(value)] = restored
            for key, child in zip(*_items(value), strict=True):
                restored[self._key(key)] = self.of(child, depth + 1)
        elif type(value) is tuple:
            restored = tuple([self.of(child, depth + 1) for child in value])
        elif type(value) is _Path:
            restored = _posix_path(value)
        elif isinstance(value, (str, int, float, type(None), torch.dtype)):
            return value
        else:
            raise ValueError(f"its planner_data contains a {type(value).__name__}")
        self._made[id(value)] = restored
        return restored

    def _key(self, key: Any) -> Any:
        if type(key) is tuple:
            self._tuples += 1
            if self._tuples > _MOST_TUPLES or len(key) > _MOST_PARTS:
                raise ValueError("its planner_data has too many tuples as keys")
            return tuple([self._key(part) if type(part) is not tuple else _refuse(part) for part in key])
        if isinstance(key, int) and abs(key) > _EXACT:
            _refuse(key)
        return key if isinstance(key, (str, int, float, type(None))) else _refuse(key)


def _refuse(key: Any) -> Any:
    raise ValueError(f"its planner_data has a key that is a {type(key).__name__}")


def _storage_meta(record: Any) -> StorageMeta | None:
    """Return the note of the writer about its save, without attributes of unexpected types."""
    if record is None:
        return None
    noted: Mapping[str, Any] = fields(record, _StorageMeta)
    place = noted.get("checkpoint_id")
    modules = noted.get("modules")
    texts = {name: noted.get(name) for name in ("save_id", "load_id")}
    return StorageMeta(
        checkpoint_id=_posix_path(place) if type(place) is _Path else place if type(place) is str else None,
        modules=list(modules) if type(modules) is list and _are(modules, str) else [],
        **{name: text if type(text) is str else None for name, text in texts.items()},
    )


def _size(files: Files, folder: str, name: str) -> int:
    try:
        return files.size(folder + name)
    except (OSError, ValueError) as error:  # a name with a zero byte, for example
        raise CheckpointCorrupt(
            f"{files.where}: data file {folder}{name[:200]} is missing ({getattr(error, 'strerror', None) or error})"
        ) from error
