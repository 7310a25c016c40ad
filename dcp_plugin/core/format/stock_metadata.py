"""Reader of DCP's own table of contents, ``.metadata``: it makes an index of the file, and executes no code.

Stock readers unpickle the file directly, so its author runs code on every rank that loads it. Here the pickle becomes
inert nodes (:mod:`~dcp_plugin.core.format.pickles.nodes`), which are checked. Their numbers become the columns of an
index.

The rule: no file takes more than linear time. The only hashed objects are text and bytes, for which an attacker can
make no collisions. A list that the pickle names many times counts as many times.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import PosixPath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointUnreadable, UnsafeCheckpoint, damage_in
from dcp_plugin.core.format import METADATA, Files, read
from dcp_plugin.core.format.index import NO_TENSOR, CheckpointIndex, Column, KeyColumns, KeyPath, Places, unusual_paths
from dcp_plugin.core.format.pickles.metadata_nodes import columns_of, fields, items_of, kind_of, state_of
from dcp_plugin.core.format.pickles.nodes import Name, Node, nodes_of
from dcp_plugin.core.format.pickles.unpickler import Accepted, Use
from dcp_plugin.core.format.pickles.walk import Refused, Walk
from dcp_plugin.core.interrupts import collector_paused
from dcp_plugin.core.tensors._torch import transforms_of

_MOST_DIMENSIONS = 64
_MOST_PARTS = 256
"""Most parts of a key's path, and of a path in a file system."""
_MOST_TRANSFORMS = 16

_ARGUMENT = "argument"
"""Kind of the classes and functions that are called with one argument, which stands for the result."""
_DCP = "torch.distributed.checkpoint"
_GLOBALS: dict[str, Any] = {
    f"{_DCP}.metadata.Metadata": "Metadata",
    f"{_DCP}.metadata.TensorStorageMetadata": "Tensor",
    f"{_DCP}.metadata.BytesStorageMetadata": "Value",
    f"{_DCP}.metadata.TensorProperties": "Properties",
    f"{_DCP}.metadata.ChunkStorageMetadata": "Chunk",
    f"{_DCP}.metadata.MetadataIndex": "Item",
    f"{_DCP}.metadata.StorageMeta": "StorageMeta",
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": _ARGUMENT,
    f"{_DCP}.filesystem._StorageInfo": "Place",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": "Properties",  # torch 2.2 and earlier
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": _ARGUMENT,
    "torch.Size": _ARGUMENT,
    "torch.serialization._get_layout": _ARGUMENT,
    "torch._utils._get_layout": _ARGUMENT,
    "collections.OrderedDict": "OrderedDict",
    # Python 3.13 moved the classes, and 3.14 moved them back.
    **{
        f"{module}.{name}": "Path"
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath")
    },
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}
STOCK_METADATA = Use(_GLOBALS, allows_user=False)


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
    """Return the index of a stock checkpoint. Its items have an unknown inner layout and no checksums.

    Args:
        folder: Folder of the checkpoint in ``files``, with a ``/`` at the end. Names of files are relative to it.

    Raises:
        UnsafeCheckpoint, CheckpointCorrupt: As :func:`decode`; or an item is outside its file.
    """
    return index_of(decode(read(files, folder + METADATA), f"{files.where}/{folder}{METADATA}"), files, folder)


def index_of(metadata: StockMetadata, files: Files, folder: str = "") -> CheckpointIndex:
    """Return the index of decoded metadata, as :func:`read_index`. It reads the sizes of data files, no contents."""
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
        CheckpointUnreadable: This process lacks a stream transform of the items.
    """
    try:
        with damage_in(label), collector_paused():
            return _checked(_load(data), len(data))
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{label} {error}") from None
    except CheckpointUnreadable as error:
        raise CheckpointUnreadable(f"{label}: {error}") from error


def _load(data: bytes) -> Any:
    try:
        return nodes_of(data, Accepted(STOCK_METADATA).get)
    except Refused as error:
        writer = "The checkpoint was written by an unknown tool, or tampered with."
        if str(error).startswith("megatron."):
            writer = (
                "It is a checkpoint of Megatron-Core (torch_dist), as NeMo writes too. Convert it with Megatron Bridge "
                "(convert_checkpoints.py export --hf-model MODEL --megatron-path FOLDER --hf-path "
                "OUT), or with NeMo (nemo llm export path=FOLDER target=hf output_path=OUT)."
            )
        raise UnsafeCheckpoint(
            f"refers to {error}, which is not part of DCP's metadata; it was not executed. {writer}"
        ) from None


def _checked(record: Any, nbytes: int) -> StockMetadata:
    # Each step reads one attribute of all keys or all chunks, and compares the set of their types: no Python code runs
    # for a single object, of which there are millions.
    attributes = fields(record, "Metadata")
    keys, stored = items_of(attributes["state_dict_metadata"])
    items, places = items_of(attributes["storage_data"])
    if not _are(keys, str) or len(set(keys)) != len(keys):
        raise ValueError("a key is not text, or occurs twice")
    kinds = list(map(kind_of, stored))
    is_tensor = np.array([kind == "Tensor" for kind in kinds], bool)
    if not set(kinds) <= {"Tensor", "Value"}:
        raise ValueError("a key is neither a tensor nor a value")
    tensors = [record for record, kind in zip(stored, kinds, strict=True) if kind == "Tensor"]
    properties, sizes, chunks = columns_of(tensors, "Tensor", "properties", "size", "chunks")
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
    offsets, lengths = columns_of(list(chain.from_iterable(chunks)), "Chunk", "offsets", "sizes")
    box, of_box = _numbers(list(chain.from_iterable(zip(offsets, lengths, strict=True))))
    of_chunk = np.repeat(np.arange(len(keys)), counts)
    # A chunk has two rows in ``box``, its offsets and its sizes. Both have to have the dimensions of its tensor.
    if (of_box != np.repeat(ndim[of_chunk[is_tensor[of_chunk]]], 2)).any():
        raise ValueError("a chunk and its tensor differ in their dimensions")
    columns: dict[str, Column] = {
        "dtype": dtype, "ndim": ndim.astype(np.uint8), "shape": shape, "box_ends": np.cumsum(counts),
        "box_count": np.ones(counts.sum(), np.int32), "box": box,
    }  # fmt: skip
    paths, planner_data = _planner_data(attributes.get("planner_data"), keys, nbytes)
    table = KeyColumns(keys, dtype_names, paths, columns)
    located, files, transforms = _placed(table, items, places)
    version = attributes.get("version")
    meta = _storage_meta(attributes.get("storage_meta"))
    return StockMetadata(
        table, located, files, transforms, planner_data, meta, version if type(version) is str else None
    )


def _are(values: Iterable[Any], *kinds: type) -> bool:
    return set(map(type, values)) <= set(kinds)


def _numbers(rows: Sequence[Any]) -> tuple[Column, Column]:
    """Return the numbers in tuples or calls of ``torch.Size``, end to end, and the count of numbers in each."""
    rows = [_argument(row) if type(row) is Node else row for row in rows]
    if not _are(rows, tuple):
        raise ValueError("a shape is not a tuple")
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    if counts.max(initial=0) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {counts.max()} dimensions, more than the limit of {_MOST_DIMENSIONS}")
    return _integers(list(chain.from_iterable(rows))), counts


def _argument(node: Any) -> Any:
    _, (argument,), _ = node
    if kind_of(node) != _ARGUMENT:
        raise ValueError("an entry is not a shape")
    return argument


def _integers(values: list[Any]) -> Column:
    if not _are(values, int):
        raise ValueError("an entry is not an integer")
    return np.array(values, np.int64)


def _dtypes(properties: Sequence[Any]) -> tuple[list[str], list[int]]:
    """Return the names of all dtypes, and the number of each tensor's dtype.

    In all versions of torch, the dtype is the first property.
    """
    states = [state_of(record, "Properties") for record in properties]
    if not _are(states, tuple):
        raise ValueError("a tensor has no properties")
    dtypes = [state[0] for state in states]
    if not _are(dtypes, torch.dtype):
        raise ValueError("a tensor has no dtype")
    numbers = {dtype: number for number, dtype in enumerate(dict.fromkeys(dtypes))}
    return [str(dtype).removeprefix("torch.") for dtype in numbers], [numbers[dtype] for dtype in dtypes]


def _placed(
    table: KeyColumns, items: list[Any], places: list[Any]
) -> tuple[Places, list[str], dict[tuple[str, int], tuple[str, ...]]]:
    """Return the places of all chunks of a table, the names of files, and the transforms of items."""
    paths, offsets, lengths, described = columns_of(
        places, "Place", "relative_path", "offset", "length", maybe="transform_descriptors"
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
    """Return for each chunk of a table the number of its item. Raises KeyError if a chunk has no item.

    An item is identified by its key and its offsets. They are compared as the bytes of a row of numbers: bytes have no
    hash collisions that the author of a file could cause.
    """
    keys, offsets = columns_of(items, "Item", "fqn", maybe="offset")
    if not _are(keys, str):
        raise ValueError("the key of an item is not text")
    slots = np.fromiter((table.slots.get(key, -1) for key in keys), np.int64, len(keys))  # -1: ignored below
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
    for wanted_slots, chunks, boxes in chain.from_iterable(map(table.by_ndim, table.stretches())):
        numbers, owners = numbers_of(boxes.shape[2]), np.repeat(wanted_slots, chunks_of[wanted_slots])
        order[chunks] = [numbers[row] for row in _rows(owners, boxes[:, 0])]
    return order


def _rows(slots: Column, offsets: Column) -> list[bytes]:
    """Return each slot with its offsets, as bytes."""
    # A view of each row as one void element makes the bytes of all rows at once.
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
        raise CheckpointUnreadable(
            f"the items went through the stream transforms {list(descriptors)}, which torch cannot undo here: {error}. "
            f"Nothing is damaged: install the package of the transforms, or register them."
        ) from error


def _text(path: Any) -> str:
    return path if type(path) is str else str(_posix_path(path))


def _posix_path(record: Any) -> PosixPath:
    parts = record[1] if kind_of(record) == "Path" and len(record) == 3 else [None]
    if len(parts) > _MOST_PARTS or not _are(parts, str):
        raise ValueError("an entry is not a path, or has too many parts")
    return PosixPath(*parts)


def _planner_data(note: Any, keys: list[str], nbytes: int) -> tuple[dict[str, KeyPath], tuple[Any, ...]]:
    """Return the paths of keys that differ from the default, and an empty tuple, if DCP's own planner made the note.

    For any other note, return no paths, and the note as a tuple of one.

    Args:
        nbytes: Bytes of the pickle.
    """
    if type(note) is Node and note[0] is None:
        named, paths = items_of(note)
        if (
            _are(named, str)
            and _are(paths, tuple, list)
            and max(map(len, paths), default=0) <= _MOST_PARTS
            and all(_are(path, str, int) for path in paths)
            and set(named) <= set(keys)
        ):
            return unusual_paths(dict(zip(named, map(tuple, paths), strict=True))), ()
    return {}, (_Note(nbytes).of(note),)


class _Note(Walk):
    """Walk that makes plain values of another planner's note."""

    def called(self, name: Name, args: Any, is_new: bool) -> Any:
        if name.value == "Path":
            return _posix_path(Node([name, args, is_new]))
        if name.value == "OrderedDict" and args == ():
            return {}
        if name.value != _ARGUMENT:
            raise ValueError(f"its planner_data contains {name.of}")
        (argument,) = args
        return argument

    def filled(self, target: Any, name: Name, args: Any, items: list[Any], state: tuple[Any, ...]) -> Any:
        if (items and name.value != "OrderedDict") or state:
            raise ValueError(f"its planner_data fills a {name.of}")
        self.put(target, items[::2], items[1::2])
        return target


def _storage_meta(record: Any) -> StorageMeta | None:
    """Return the note of the writer about its save, without attributes of unexpected types."""
    if record is None:
        return None
    noted: Mapping[str, Any] = fields(record, "StorageMeta")
    place = noted.get("checkpoint_id")
    modules = noted.get("modules")
    texts = {name: noted.get(name) for name in ("save_id", "load_id")}
    return StorageMeta(
        checkpoint_id=_posix_path(place) if kind_of(place) == "Path" else place if type(place) is str else None,
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
