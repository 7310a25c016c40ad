"""Reads DCP's own table of contents, ``.metadata``, without executing code, and makes an index of it.

Stock readers unpickle the file as it comes, so its author runs code on every rank that loads it. Here it becomes plain
records (:mod:`~dcp_plugin.format.pickles.records`), these are checked, and their numbers become the columns of an
index. Nothing of the file is hashed but text and bytes, for which no collisions can be made, and everything takes a
time that is linear in the file: a list that is named many times counts as many times.
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
from dcp_plugin.format.columns import NO_TENSOR, Column, KeyColumns, Places, default_path
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.pickles.records import (
    Pairs,
    Record,
    argument,
    columns_of,
    fields,
    new_pairs,
    without_dictionaries,
)
from dcp_plugin.format.pickles.unpickler import Accepted, Refused, Unpickler, Use
from dcp_plugin.tensors._torch import transforms_of
from dcp_plugin.types import KeyPath

_MOST_DIMENSIONS = 64
_MOST_PARTS = 256
"""Parts of a key's path, and of a path in a file system."""
_MOST_TRANSFORMS = 16
_MOST_DEPTH = 100
"""How deep what another planner noted may be nested."""
_MOST_VALUES = 1_000_000
_EXACT = 1 << 53
_MOST_TUPLES = 10_000
"""Keys that are tuples: unlike text, an attacker can make many of them that collide."""


class _Metadata(Record):
    __slots__ = ()


class _Tensor(Record):
    __slots__ = ()


class _Value(Record):
    __slots__ = ()


class _Properties(Record):
    __slots__ = ()


class _Chunk(Record):
    __slots__ = ()


class _Item(Record):
    """``MetadataIndex``"""

    __slots__ = ()


class _Place(Record):
    """``_StorageInfo``"""

    __slots__ = ()


class _StorageMeta(Record):
    __slots__ = ()


class _Path(Record):
    """Of ``pathlib``; its only state is a tuple of its parts."""

    __slots__ = ()


def _path(*parts: Any) -> _Path:
    if len(parts) > _MOST_PARTS or not all(type(part) is str for part in parts):
        raise ValueError("a path of something else than some names")
    made: _Path = list.__new__(_Path)
    made.append(parts)
    return made


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
    # Python 3.13 has moved the classes, and 3.14 moved them back.
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
    """What a ``.metadata`` says, checked for everything but the files that it names."""

    table: KeyColumns
    places: Places
    files: list[str]
    """All that it names, sorted; those that have nothing of a key too."""
    transforms: dict[tuple[str, int], tuple[str, ...]]
    planner_data: tuple[Any, ...]
    storage_meta: StorageMeta | None
    version: str | None
    """The version of DCP's layout; None before torch 2.9."""

    @property
    def save_id(self) -> str:
        """Tells one save from any other; empty if the writer noted none (torch before 2.3)."""
        return (self.storage_meta and self.storage_meta.save_id) or ""


def read_index(files: Files, folder: str = "") -> CheckpointIndex:
    """The index of a stock checkpoint: items of unknown inner layout, without checksums.

    Args:
        folder: Where in ``files`` it is, with a ``/`` at the end. Names of files are relative to it.

    Raises:
        UnsafeCheckpoint, CheckpointCorrupt: As :func:`decode`, and if an item lies outside its file.
    """
    return index_of(decode(read(files, folder + METADATA), f"{files.where}/{folder}{METADATA}"), files, folder)


def index_of(metadata: StockMetadata, files: Files, folder: str = "") -> CheckpointIndex:
    """:func:`read_index` of what :func:`decode` returned. Of the files, only the sizes are asked for."""
    sizes = {name: _size(files, folder, name) for name in metadata.files}
    index = CheckpointIndex.of(metadata.table, metadata.places, sizes)
    index.validate(f"{files.where}/{folder}".rstrip("/"))
    index.transforms = metadata.transforms
    index.storage_meta = metadata.storage_meta
    index.planner_data = metadata.planner_data
    index.version = metadata.version
    return index


def decode(data: bytes, where: str) -> StockMetadata:
    """Read ``.metadata``.

    Args:
        where: What messages call the file.

    Raises:
        UnsafeCheckpoint: It refers to anything but DCP's metadata.
        CheckpointCorrupt: It is no metadata, or contradicts itself.
    """
    try:
        with damage_in(where):
            return _checked(_load(data))
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{where} {error}") from None


def _load(data: bytes) -> Any:
    unpickler = Unpickler(io.BytesIO(data), Accepted(STOCK_METADATA))
    unpickler.persistent_load = new_pairs  # type: ignore[method-assign]
    try:
        return unpickler.load()
    except Refused as error:
        raise UnsafeCheckpoint(
            f"refers to {error}, which is no part of DCP's metadata; it was not executed. The checkpoint was written "
            f"by an unknown tool, or tampered with."
        ) from None


def _checked(record: Any) -> StockMetadata:
    said = fields(record, _Metadata)
    keys, stored = _items(said["state_dict_metadata"])
    items, places = _items(said["storage_data"])
    if not _are(keys, str) or len(set(keys)) != len(keys):
        raise ValueError("keys that are no text, or occur twice")
    is_tensor = np.array([type(one) is _Tensor for one in stored], bool)
    if not _are(stored, _Tensor, _Value):
        raise ValueError("a key is neither a tensor nor a value")
    properties, sizes, chunks = columns_of(
        [one for one in stored if type(one) is _Tensor], _Tensor, "properties", "size", "chunks"
    )
    if not _are(chunks, list) or sum(map(len, chunks)) > len(items):
        raise ValueError("tensors have more chunks than there are places")
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
    paths, planner_data = _planner_data(said.get("planner_data"), keys)
    table = KeyColumns(keys, dtype_names, paths, columns)
    found, files, transforms = _placed(table, items, places)
    version = said.get("version")
    meta = _storage_meta(said.get("storage_meta"))
    return StockMetadata(table, found, files, transforms, planner_data, meta, version if type(version) is str else None)


def _items(pairs: Any) -> tuple[list[Any], list[Any]]:
    """The keys and the values of a dictionary."""
    if type(pairs) is not Pairs or len(pairs) % 2:
        raise ValueError("no dictionary where one belongs")
    return pairs[::2], pairs[1::2]


def _are(values: Iterable[Any], *kinds: type) -> bool:
    return set(map(type, values)) <= set(kinds)


def _numbers(rows: Sequence[Any]) -> tuple[Column, Column]:
    """The numbers in tuples, end to end, and how many are in each."""
    if not _are(rows, tuple):
        raise ValueError("a shape that is no tuple")
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    if counts.max(initial=0) > _MOST_DIMENSIONS:
        raise ValueError(f"{counts.max()} dimensions")
    return _integers(list(chain.from_iterable(rows))), counts


def _integers(values: list[Any]) -> Column:
    if not _are(values, int):
        raise ValueError("something that is no number")
    return np.array(values, np.int64)


def _dtypes(properties: Sequence[Any]) -> tuple[list[str], list[int]]:
    """The names of all dtypes, and the number of each tensor's. Of later versions' properties it is the first too."""
    if not _are(properties, _Properties) or any(len(one) != 1 or type(one[0]) is not tuple for one in properties):
        raise ValueError("a tensor has no properties")
    dtypes = [one[0][0] for one in properties]
    if not _are(dtypes, torch.dtype):
        raise ValueError("a tensor has no dtype")
    numbers = {dtype: number for number, dtype in enumerate(dict.fromkeys(dtypes))}
    return [str(dtype).removeprefix("torch.") for dtype in numbers], [numbers[dtype] for dtype in dtypes]


def _placed(
    table: KeyColumns, items: list[Any], places: list[Any]
) -> tuple[Places, list[str], dict[tuple[str, int], tuple[str, ...]]]:
    """Where all chunks of a table are; the names of files; and what the items went through."""
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
    went_through = {
        (name, offset): _descriptors(said)
        for name, offset, said in zip(names, offsets, described, strict=True)
        if said is not None and said != [] and said != ()
    }
    for descriptors in set(went_through.values()):
        _check_transforms(descriptors)
    return Places.without_hashes(files, file, place), files, went_through


def _found(table: KeyColumns, items: list[Any]) -> Column:
    """Of each chunk of a table, which of the items it is. Raises KeyError if it is none.

    An item is known by its key and its offsets. What is hashed are their bytes.
    """
    keys, offsets = columns_of(items, _Item, "fqn", maybe="offset")
    if not _are(keys, str):
        raise ValueError("an item whose key is no text")
    slots = np.fromiter((table.slots.get(key, -1) for key in keys), np.int64, len(keys))
    starts, counts = _numbers([() if offset is None else offset for offset in offsets])
    order = np.zeros(int(table.chunk_starts[-1]), np.int64)

    @functools.cache
    def numbers_of(ndim: int) -> dict[bytes, int]:
        among = np.flatnonzero((counts == ndim) & (slots >= 0))
        begins = (np.cumsum(counts) - counts)[among]
        known = _rows(slots[among], starts[begins[:, None] + np.arange(ndim)])
        numbers = dict(zip(known, among.tolist(), strict=True))
        if len(numbers) != len(known):
            raise ValueError("an item occurs twice")
        return numbers

    chunks_of = np.diff(table.chunk_starts)
    for wanted_slots, chunks, boxes in table.by_ndim():
        numbers, owners = numbers_of(boxes.shape[2]), np.repeat(wanted_slots, chunks_of[wanted_slots])
        order[chunks] = [numbers[row] for row in _rows(owners, boxes[:, 0])]
    return order


def _rows(slots: Column, offsets: Column) -> list[bytes]:
    rows = np.ascontiguousarray(np.concatenate((slots[:, None], offsets), axis=1))
    found: list[bytes] = rows.view(f"V{8 * rows.shape[1]}").ravel().tolist()
    return found


def _descriptors(said: Any) -> tuple[str, ...]:
    if not (_are([said], list, tuple) and len(said) <= _MOST_TRANSFORMS and _are(said, str)):
        raise ValueError("an item went through something that is no list of transforms")
    return tuple(said)


def _check_transforms(descriptors: tuple[str, ...]) -> None:
    try:
        transforms_of(descriptors)
    except Exception as error:  # each transform has its own
        raise ValueError(
            f"the items went through the stream transforms {list(descriptors)}, which torch cannot undo: {error}"
        ) from error


def _text(path: Any) -> str:
    return path if type(path) is str else str(_posix_path(path))


def _posix_path(record: Any) -> PosixPath:
    if type(record) is not _Path or len(record) != 1:
        raise ValueError("something that is no path")
    return PosixPath(*record[0])


def _planner_data(said: Any, keys: list[str]) -> tuple[dict[str, KeyPath], tuple[Any, ...]]:
    """The paths of keys that do not follow the default, which DCP's own planners note; or else what it is, one item."""
    if type(said) is Pairs:
        named, paths = _items(said)
        if (
            _are(named, str)
            and _are(paths, tuple, list)
            and max(map(len, paths), default=0) <= _MOST_PARTS
            and all(_are(path, str, int) for path in paths)
            and set(named) <= set(keys)
        ):
            noted = zip(named, map(tuple, paths), strict=True)
            return {key: path for key, path in noted if path != default_path(key)}, ()
    return {}, (_Restoring().of(said),)


class _Restoring:
    """Makes plain values again of what is in a pickle."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._tuples = 0
        self._values = 0

    def of(self, value: Any, depth: int = 0) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        self._values += 1
        if depth > _MOST_DEPTH or self._values > _MOST_VALUES:
            raise ValueError("what its planner noted is nested too deep, or too much")
        if type(value) is list:
            made: Any = []
            self._made[id(value)] = made
            made += [self.of(one, depth + 1) for one in value]
        elif type(value) is Pairs:
            made = {}
            self._made[id(value)] = made
            for key, one in zip(*_items(value), strict=True):
                made[self._key(key)] = self.of(one, depth + 1)
        elif type(value) is tuple:
            made = tuple([self.of(one, depth + 1) for one in value])
        elif type(value) is _Path:
            made = _posix_path(value)
        elif isinstance(value, (str, int, float, type(None), torch.dtype)):
            return value
        else:
            raise ValueError(f"its planner noted a {type(value).__name__}")
        self._made[id(value)] = made
        return made

    def _key(self, key: Any) -> Any:
        if type(key) is tuple:
            self._tuples += 1
            if self._tuples > _MOST_TUPLES or len(key) > _MOST_PARTS:
                raise ValueError("its planner noted too many tuples as keys")
            return tuple([self._key(part) if type(part) is not tuple else _refuse(part) for part in key])
        if isinstance(key, int) and abs(key) > _EXACT:
            _refuse(key)
        return key if isinstance(key, (str, int, float, type(None))) else _refuse(key)


def _refuse(key: Any) -> Any:
    raise ValueError(f"its planner noted a key that is a {type(key).__name__}")


def _storage_meta(said: Any) -> StorageMeta | None:
    """What the writer noted of its save, as far as it is of the types that it has."""
    if said is None:
        return None
    noted: Mapping[str, Any] = fields(said, _StorageMeta)
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
    except (OSError, ValueError) as error:  # a name with a zero in it, for one
        raise CheckpointCorrupt(
            f"{files.where}: data file {folder}{name[:200]} is missing ({getattr(error, 'strerror', None) or error})"
        ) from error
