"""File of the index: numpy columns in the safetensors format, without pickle, validated when they are read.

The rule: a file that contradicts itself is refused (:meth:`~dcp_plugin.core.format.index.CheckpointIndex.validate`).
The columns, for K keys, R rows of boxes, I rows of items and B blocks. A row has one or more chunks that follow each
other regularly (:mod:`~dcp_plugin.core.format.columns`). Chunks and their items are in the order of the keys:

=======================  ======  ===================================================================================
``keys``, ``key_ends``   K       UTF-8 text of all keys, and the end of each
``dtype``, ``ndim``      K       number of the dtype's name (255: a value that is no tensor), dimensions
``shape``                ragged  global shape, ``ndim`` numbers per key
``box_ends``             K       running number of rows of boxes
``box_count``            R       number of boxes: each is the next cell, row by row, of the grid of such boxes
``box``                  ragged  per row ``ndim`` offsets, then ``ndim`` sizes, of the first box
``item_count``           I       number of items, all with the same place and frame, in different files
``file``, ``file_step``  I       index into the files for the first item, and the step to that of the next
``place``                I x 4   offset and length of the item in its file; payload's offset and length in the item
``frame``                I       32 bits of the XXH3-64 of the item without its payload
``hash``                 B       XXH3-64 of each block of the payload; the length gives the number of blocks
``left_out``             text    optional: a JSON object of the keys left out -> the key in the base
``rounded``              text    optional: a JSON object of keys left out that the base has more exactly -> dtype
``empty``                text    optional: a JSON list of the keys of empty mappings
``beside``               text    optional: a JSON object of extra files of the save -> XXH3-64, or size
``planner_data``         bytes   optional: another planner's ``planner_data``, as ``torch.save`` bytes (weights only)
=======================  ======  ===================================================================================

The header has the names of dtypes and files, the sizes of the files, the paths of keys, and ``linkable``: the names of
the files that later saves are meant to link.
"""

from __future__ import annotations

import json
import posixpath
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from safetensors.numpy import load as load_columns
from safetensors.numpy import save as save_columns

from dcp_plugin.core.errors import CheckpointCorrupt, damage_in
from dcp_plugin.core.format.columns import MAPPING_CLASSES, NO_TENSOR, Column, KeyColumns, KeyPath, itemsize_named
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.format.payload import block_counts
from dcp_plugin.core.format.summary import INDEX_VERSION, check_index_version, fingerprint

_MOST_DIMENSIONS = 64
"""Most dimensions of a tensor with several boxes. Without a limit, a box takes 500 times the bytes of its hash."""
_OPTIONAL = ("left_out", "rounded", "empty", "beside")
"""Columns of JSON text, of which an index has those with content."""


def encode(index: CheckpointIndex) -> bytes:
    """Return the bytes of the index file."""
    about = {
        "format": "dcp_plugin",
        "format_version": str(INDEX_VERSION),
        "dtypes": json.dumps(index.table.dtypes),
        "files": json.dumps(index.files),
        "linkable": json.dumps(sorted(index.linkable)),
        "paths": json.dumps(index.table.paths),  # tuples as lists
    }
    optional = {
        "left_out": index.left_out,
        "rounded": index.rounded,
        "empty": list(index.empty),
        "beside": index.extra_files,
    }
    more = {name: json.dumps(value).encode() for name, value in optional.items() if value}
    if index.planner_data:
        from dcp_plugin.core.format import values

        more["planner_data"] = values.encode(index.planner_data[0])
    columns = {name: np.frombuffer(data, np.uint8) for name, data in more.items()}
    return save_columns({**index.columns, **columns}, metadata=about)


def encode_alike(index: CheckpointIndex) -> bytes:
    """Return the bytes of :func:`encode` with a sorted header, equal for all copies of a save.

    safetensors writes the entries of its header in no order.
    """
    data = encode(index)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(dict(sorted(header.items())), separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors pads its header to 8 bytes
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def decode(data: bytes, sha256: str, label: str) -> CheckpointIndex:
    """Return the index in a file with this fingerprint, if the file does not contradict itself.

    Args:
        label: Name of the file in messages.

    Raises:
        CheckpointCorrupt: The file has another fingerprint, is no index, or contradicts itself.
    """
    # A thread computes the hash while this one checks the columns: both take long for millions of chunks.
    with ThreadPoolExecutor(1, thread_name_prefix="dcp-hash") as pool:
        digest = pool.submit(fingerprint, data)
        other = CheckpointCorrupt(f"{label} is not the index that was saved (its SHA-256 differs)")
        try:
            index = _decoded(data, label)
        except CheckpointCorrupt:
            if digest.result() == sha256:
                raise
            raise other from None  # the differing hash explains any other contradiction
        if digest.result() != sha256:
            raise other
    return index


def _decoded(data: bytes, name: str) -> CheckpointIndex:
    with damage_in(name):
        columns = load_columns(data)  # validates the header
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = header.get("__metadata__", {})
        check_index_version(about, name)
        index = _checked(columns, about)
        index.validate(posixpath.dirname(name))
        if (block_counts(columns["place"][:, 3]) * columns["item_count"]).sum() != len(columns["hash"]):
            raise ValueError("the items have another number of blocks than of hashes")
        if ((columns["file_step"] == 0) & (columns["item_count"] > 1)).any():
            raise ValueError("a row has several items in one file")
    return index


def _checked(columns: dict[str, Column], about: dict[str, str]) -> CheckpointIndex:
    # Later steps slice columns by these counts, so dtypes, lengths and counts are checked first.
    expected = {
        "keys": np.uint8, "key_ends": np.int64, "dtype": np.uint8, "ndim": np.uint8, "shape": np.int64,
        "box_ends": np.int64, "box_count": np.int32, "box": np.int64, "item_count": np.int32, "file": np.int32,
        "file_step": np.int32, "place": np.int64, "frame": np.uint32, "hash": np.uint64,
    }  # fmt: skip
    for name, dtype in expected.items():
        if columns[name].dtype != dtype or columns[name].ndim != (2 if name == "place" else 1):
            raise ValueError(f"column {name} is {columns[name].dtype}, {columns[name].ndim}-dimensional")
    count, rows = len(columns["key_ends"]), len(columns["file"])
    for name, counted in (("key_ends", "keys"), ("box_ends", "box_count")):
        _check_ends(name, columns[name], len(columns[counted]))
    if not (len(columns["dtype"]) == len(columns["ndim"]) == len(columns["box_ends"]) == count):
        raise ValueError("columns of keys differ in length")
    if columns["place"].shape != (rows, 4) or not (
        len(columns["frame"]) == len(columns["file_step"]) == len(columns["item_count"]) == rows
    ):
        raise ValueError("columns of items differ in length")
    _check_counts(columns)
    dtypes = json.loads(about["dtypes"])
    for name in dtypes:
        itemsize_named(name)  # raises for an unknown name
    if (columns["dtype"][columns["dtype"] != NO_TENSOR] >= len(dtypes)).any():
        raise ValueError("a key has a dtype that is not listed")
    files = {str(name): int(size) for name, size in json.loads(about["files"]).items()}
    paths = {key: _path_from_json(value) for key, value in json.loads(about["paths"]).items()}
    table = KeyColumns(_split_keys(columns["keys"], columns["key_ends"]), dtypes, paths, columns)
    if len(table.slots) != count:
        raise ValueError("a key occurs twice")
    optional = {name: json.loads(columns[name].tobytes()) for name in _OPTIONAL if name in columns}
    left_out = {str(key): str(base_key) for key, base_key in optional.get("left_out", {}).items()}
    if not table.slots.keys().isdisjoint(left_out):
        raise ValueError("a key is both stored and left out")
    if table.shape_starts[-1] != len(columns["shape"]) or table.box_starts[-1] != len(columns["box"]):
        raise ValueError("shapes and boxes do not fit the dimensions")
    numbers = (columns["ndim"] * np.diff(table.chunk_starts)).sum()
    if numbers > _MOST_DIMENSIONS * (len(columns["box"]) + len(columns["hash"])):
        raise ValueError("a row describes too many boxes of too many dimensions")
    planner_data: tuple[Any, ...] = ()
    if "planner_data" in columns:
        from dcp_plugin.core.format import values  # late, since it imports torch

        planner_data = (values.decode("planner_data", columns["planner_data"].tobytes()),)
    index = CheckpointIndex(table, columns, files)
    index.linkable = {str(name) for name in json.loads(about["linkable"])}
    index.left_out, index.rounded, index.planner_data = left_out, dict(optional.get("rounded", {})), planner_data
    index.empty = [str(key) for key in optional.get("empty", ())]
    index.extra_files = {str(name): str(comparison) for name, comparison in optional.get("beside", {}).items()}
    return index


def _split_keys(text: Column, ends: Column) -> list[str]:
    data = text.tobytes()
    decoded = data.decode()
    spans = zip([0, *ends.tolist()], ends.tolist(), strict=False)
    # Ends count bytes. In ASCII text, a character is a byte: then the text is decoded once instead of key by key.
    if len(decoded) == len(data):
        return [decoded[start:end] for start, end in spans]
    return [data[start:end].decode() for start, end in spans]


def _check_ends(name: str, ends: Column, total: int) -> None:
    counts = np.diff(ends, prepend=0)
    if (counts < 0).any() or (ends[-1] if len(ends) else 0) != total:
        raise ValueError(f"column {name} does not count up to {total}")


def _check_counts(columns: dict[str, Column]) -> None:
    """Check that there are no more chunks than rows and hashes: what readers make of a file is bounded by its size."""
    boxes, items = columns["box_count"], columns["item_count"]
    if boxes.min(initial=1) < 1 or items.min(initial=1) < 1 or boxes.sum(dtype=np.int64) != items.sum(dtype=np.int64):
        raise ValueError("the rows have another number of boxes than of items")
    several = np.flatnonzero(items > 1)
    if (columns["place"][several, 3] < 1).any() or items[several].sum(dtype=np.int64) > len(columns["hash"]):
        raise ValueError("the rows have more items than hashes")


_PLAIN = {str, int}
"""Types of the names and numbers in a path. All other parts are tuples."""


def _tuples(part: Any) -> Any:
    """Return JSON's lists as tuples, at any depth: the key of a mapping may be a tuple of tuples."""
    return tuple(map(_tuples, part)) if isinstance(part, list) else part


def _path_from_json(parts: Any) -> KeyPath:
    if {*map(type, parts)} <= _PLAIN:  # nearly all of the paths, of which a checkpoint may have a million
        return tuple(parts)
    path = tuple(_tuples(part) for part in parts)
    for part in path:
        match part:
            case str() | int() | ("t", str() | int()):
                pass
            case (str(kind), key) if (kind == "k" or kind in MAPPING_CLASSES) and _is_key(key):
                pass
            case _:
                raise ValueError(f"the key path {parts!r} is invalid")
    return path


def _is_key(key: Any) -> bool:
    return all(map(_is_key, key)) if isinstance(key, tuple) else isinstance(key, (str, int, float, type(None)))
