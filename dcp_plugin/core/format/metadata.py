"""DCP's own table of contents, ``.metadata``, written from our index; :mod:`~.stock_metadata` reads it.

The rule: no object per chunk. The pickle holds five objects for each chunk; making and pickling a million of these
would take longer than the rest of a save. All chunks with equally many dimensions have pickles of the same length that
differ only in some integers. So :func:`pieces` writes one such record opcode by opcode, repeats it as the rows of an
array, and fills in the integers by column. A test compares the result with ``pickle.dumps`` of
:func:`~dcp_plugin.core.format.stock_objects.metadata_of`.

*Under other keys.* A framework's own sharded loader looks for the same bytes under other keys. Aliases are additional
keys in ``.metadata``: Lightning looks for ``optimizer_0.…``. Views are additional ``.metadata`` files in sub-folders:
Accelerate reads the model from ``pytorch_model_fsdp_0/.metadata``, which names the data files as ``../__0_0-….distcp``.
This package reads neither.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
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

from dcp_plugin.core.format import METADATA
from dcp_plugin.core.format.index import NO_TENSOR, CheckpointIndex, Column, KeyColumns, KeyPath
from dcp_plugin.core.tensors._torch import StorageInfo


def as_stock_knows_it(index: CheckpointIndex) -> CheckpointIndex:
    """Return the index without the keys of empty mappings, for which stock makes no keys."""
    if not index.empty:
        return index
    from dcp_plugin.core.format.derived_index import selected  # few states have empty mappings

    known = selected(index, {key: key for key in index if key not in set(index.empty)}, index.table.paths)
    known.planner_data, known.version = index.planner_data, index.version
    return known


def stock_path(path: KeyPath) -> Sequence[str | int]:
    """Return a path in stock's form, which has mapping keys as text and list indices as numbers."""
    if {str, int}.issuperset(map(type, path)):  # true for nearly all paths
        return path
    return tuple(
        part if isinstance(part, (str, int)) else (part[1] if part[0] == "t" else str(part[1])) for part in path
    )


def pieces(index: CheckpointIndex, storage_meta: StorageMeta | None) -> Iterator[bytes | memoryview]:
    """Yield the bytes of ``.metadata`` in the form that stock readers expect.

    A chunk takes 150 bytes there, and 10^7 chunks more memory than the rest of a save. So they are made while they are
    written, some thousands at a time.
    """
    index = as_stock_knows_it(index)
    table, memo = index.table, _Memo()
    # Keys and files occur once per chunk: each is defined once, and the records refer to its number in the memo.
    keys = np.array([memo.number(key, _text) for key in table.keys], np.uint32)
    files = np.array([memo.number(name, _text) for name in index.file_names], np.uint32)
    for repeated in _REPEATED:
        memo.number(repeated)
    for dtype in table.torch_dtypes:
        memo.number(dtype, _properties)
    paths = {key: stock_path(table.path_of(key)) for key in table.keys}
    parts: dict[bytes, Iterator[bytes | memoryview]] = {
        b"state": _state(table, memo, keys),
        b"storage": _storage(index, memo, keys, files),
    }
    content = memo.instance(
        Metadata,
        state_dict_metadata=[b"}(", b"state", b"u"],
        planner_data=[_plain(index.planner_data[0] if index.planner_data else paths)],
        storage_data=[b"}(", b"storage", b"u"],
        storage_meta=[_plain(storage_meta)],
        version=[_plain(index.version)],
    )
    yield from (b"\x80\x04", bytes(memo.definitions))
    for piece in cast(list[bytes], content):
        yield from parts.get(piece) or (piece,)
    yield b"."


def encode(index: CheckpointIndex, storage_meta: StorageMeta | None) -> bytes:
    """Return :func:`pieces`, joined."""
    return b"".join(pieces(index, storage_meta))


def _state(table: KeyColumns, memo: _Memo, keys: Column) -> Iterator[bytes | memoryview]:
    """Yield the items of ``state_dict_metadata``, in the order of the keys."""
    dtype_numbers, around_chunks = table.columns["dtype"].tolist(), dict[Any, tuple[bytes, bytes]]()
    for stretch in table.stretches():
        state: dict[int, tuple[bytes | memoryview, ...]] = {}
        shapes = dict(zip(stretch.tolist(), table.shapes_of(stretch), strict=True))
        for slots, chunks, boxes in table.by_ndim(stretch):  # the records of a group have equal lengths
            offsets, sizes = memo.sizes(boxes[:, 0]), memo.sizes(boxes[:, 1])
            records = _rows(len(chunks), memo.instance(ChunkStorageMetadata, offsets=offsets, sizes=sizes))
            # The chunk lists of all keys of a group are slices of one buffer: a million keys copy no bytes here.
            counts = table.chunk_starts[slots + 1] - table.chunk_starts[slots]
            listed, ends = records.reshape(-1).data, (np.cumsum(counts) * records.shape[1]).tolist()
            key_of = keys[slots].tobytes()
            for number, (slot, start, end) in enumerate(zip(slots.tolist(), [0, *ends], ends, strict=False)):
                kind = dtype_numbers[slot], shapes[slot]  # many keys have the same dtype and shape
                if kind not in around_chunks:
                    around_chunks[kind] = _around_chunks(memo, table.dtype_of(slot), shapes[slot])
                before, behind = around_chunks[kind]
                reference = key_of[4 * number : 4 * number + 4]
                chunks_of_key = listed[start:end] if behind else b""  # only a tensor has bytes after its chunks
                state[slot] = (b"j", reference, before, chunks_of_key, behind)
        yield from itertools.chain.from_iterable(state[slot] for slot in stretch.tolist())


def _storage(index: CheckpointIndex, memo: _Memo, keys: Column, files: Column) -> Iterator[memoryview]:
    """Yield the items of ``storage_data``."""
    table = index.table
    is_value = table.columns["dtype"] == NO_TENSOR
    for slots, chunks, boxes in itertools.chain.from_iterable(map(table.by_ndim, table.stretches())):
        counts, (row, file) = table.chunk_starts[slots + 1] - table.chunk_starts[slots], index.places.rows_of(chunks)
        place: dict[str, _Fields] = {
            "relative_path": [files[file]],
            "offset": [index.columns["place"][row, 0]],
            "length": [index.columns["place"][row, 1]],
        }
        key, offsets = np.repeat(keys[slots], counts), memo.sizes(boxes[:, 0])
        info = memo.instance(StorageInfo, **place)
        # The MetadataIndex of a tensor's chunk has an offset, and that of a value has none.
        for chosen, offset in ((~is_value[slots], {"offset": offsets}), (is_value[slots], {})):
            if chosen.any():
                record = [*memo.instance(MetadataIndex, fqn=[key], index=[b"N"], **offset), *info]
                rows, matching = _rows(len(chunks), record), np.repeat(chosen, counts)
                yield (rows if matching.all() else rows[matching]).reshape(-1).data


def _around_chunks(memo: _Memo, dtype: torch.dtype | None, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes before and after the records of a key's chunks; a value that is no tensor has none after."""
    if dtype is None:
        return memo.joined(BytesStorageMetadata), b""
    properties, size = memo.get(dtype, _properties), _plain(torch.Size(shape))
    pickled = memo.joined(TensorStorageMetadata, properties=[properties], size=[size], chunks=[b"](", b"e"])
    # The list of chunks is the last field, so the last "](" opens it. The records of the chunks go behind this.
    before, opened, behind = pickled.rpartition(b"](")
    return before + opened, behind


FIELDS_OF_ALL_VERSIONS = 5
"""Fields of ``TensorProperties``, pickled as a tuple, that every version of torch unpickles. Torch 2.15 added another,
the strides, and so its files cannot be opened by 2.13."""


def _properties(dtype: torch.dtype) -> bytes:
    """Return the pickle of a tensor's properties, which is the same for all versions of torch."""
    fields: tuple[Any, ...] = TensorProperties(dtype=dtype).__getstate__()  # type: ignore[no-untyped-call]
    return _plain(TensorProperties) + b")\x81" + _plain(fields[:FIELDS_OF_ALL_VERSIONS]) + b"b"


_REPEATED: tuple[Hashable, ...] = (
    *(Metadata, "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    *(TensorStorageMetadata, "properties", "size", "chunks", BytesStorageMetadata),
    *(ChunkStorageMetadata, torch.Size, "offsets", "sizes"),
    *(MetadataIndex, "fqn", "index", "offset", StorageInfo, "relative_path", "length"),
)
"""Classes and names of fields in the records. The memo has all of them before the first record is made."""

_Fields = list["bytes | memoryview | Column"]
"""Pieces of a pickle: opcodes, equal in all records; columns of int64, a number in each record; or columns of uint32, a
reference to the memo in each record."""


class _Memo:
    """Memo of a pickle: each repeated object is pickled once at the start, and each use is a reference to it."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.definitions = bytearray()

    def number(self, value: Hashable, pickled: Callable[[Any], bytes] | None = None) -> int:
        if value not in self._numbers:
            number = self._numbers[value] = len(self._numbers)
            body = (pickled or _plain)(value)
            # LONG_BINPUT stores the object in the memo, and POP takes it off the stack.
            self.definitions += body + b"r" + number.to_bytes(4, "little") + b"0"
        return self._numbers[value]

    def get(self, value: Hashable, pickled: Callable[[Any], bytes] | None = None) -> bytes:
        return b"j" + self.number(value, pickled).to_bytes(4, "little")

    def instance(self, cls: type, **fields: _Fields) -> _Fields:
        state: _Fields = [b"}("]
        for name, body in fields.items():
            state += [self.get(name), *body]
        return [self.get(cls), b")\x81", *(state if fields else []), *([b"ub"] if fields else [])]

    def joined(self, cls: type, **fields: list[bytes]) -> bytes:
        """Return the pickle of an instance without columns."""
        return b"".join(cast(list[bytes], self.instance(cls, **cast(dict[str, _Fields], fields))))

    def sizes(self, rows: Column) -> _Fields:
        """Return a ``torch.Size`` for each record."""
        return [self.get(torch.Size), b"(", *rows.T, b"t\x85R"]


_RECORDS_IN_CACHE = 1 << 12
"""Records filled at a time, with all their numbers: this many stay in the processor's cache."""


def _rows(count: int, record: _Fields) -> Column:
    """Return ``count`` copies of the record with the numbers of its columns filled in, one row of bytes each."""
    template, numbers = b"", []
    for piece in record:
        if not isinstance(piece, np.ndarray):
            template += piece
            continue
        # BININT has 4 bytes, and LONG1 has 8: the short form is used if all numbers of the column fit into it.
        small = piece.min(initial=0) >= -(1 << 31) and piece.max(initial=0) < 1 << 31
        opcode, dtype = (b"J", "<i4") if small else (b"\x8a\x08", "<i8")
        if piece.dtype == np.uint32:
            opcode, dtype = b"j", "<u4"
        template += opcode
        numbers.append((len(template), dtype, piece))
        template += bytes(np.dtype(dtype).itemsize)
    rows = np.empty((count, len(template)), np.uint8)
    # A structured view has one field at one offset of every row, so that numpy writes a column of numbers at once.
    fields = [
        (rows.view(np.dtype({"names": ["at"], "formats": [dtype], "offsets": [at], "itemsize": len(template)})), piece)
        for at, dtype, piece in numbers
    ]
    for start in range(0, count, _RECORDS_IN_CACHE):
        some = slice(start, start + _RECORDS_IN_CACHE)
        rows[some] = np.frombuffer(template, np.uint8)
        for field, piece in fields:
            field["at"][some, 0] = piece[some]
    return rows


def _plain(value: Any) -> bytes:
    """Return the pickle of a small object, to be inserted into another pickle."""
    # Protocol 3 has no frames, and ``fast`` makes no references to a memo. The slice drops PROTO and STOP.
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 3)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]


def _text(value: str) -> bytes:
    """Return :func:`_plain` of a text without a pickler, which would cost time for every key."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


Aliases = Mapping[str, tuple[str, KeyPath]]
"""Key -> another name of the same bytes, and the path of that name. Keys that are not stored are skipped."""

Views = Mapping[str, Mapping[str, str]]
"""Sub-folder -> its contents: the name in the checkpoint -> the name in the view."""


def with_aliases(index: CheckpointIndex, aliases: Aliases) -> CheckpointIndex:
    """Return the index with some keys repeated under other names."""
    repeated = {alias: key for key, (alias, _) in aliases.items() if key in index and alias not in index}
    if not repeated:
        return index
    from dcp_plugin.core.format.derived_index import selected  # only frameworks have aliases

    paths = {**index.table.paths, **dict(aliases.values())}
    return selected(index, {**{key: key for key in index}, **repeated}, paths)


def encoded_views(views: Views, index: CheckpointIndex, storage_meta: StorageMeta | None) -> dict[str, bytes]:
    """Return the ``.metadata`` files of the views by name, to be stored with the checkpoint's own."""
    if not views:
        return {}
    from dcp_plugin.core.format.derived_index import renamed  # only frameworks have views

    return {
        f"{folder}/{METADATA}": encode(renamed(index, names, below=".."), storage_meta)
        for folder, names in views.items()
    }


def with_renamed_files(data: bytes, names: Mapping[str, str]) -> bytes:
    """Return a ``.metadata`` made by :func:`encode`, with other names of data files.

    Each name occurs once, as a definition; all other places refer to that definition.
    """
    for old, new in names.items():
        data = data.replace(_plain(old) + b"r", _plain(new) + b"r")
    return data
