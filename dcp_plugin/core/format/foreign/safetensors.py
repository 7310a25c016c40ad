"""Reader of safetensors: one file, an index of several, or files with parts of the same tensors.

A file consists of 8 bytes of length, a JSON header, and the tensors end to end. The rule: the header is checked before
use. Its size is bounded, its tensors have no holes and do not overlap, and the last one ends where the file does.

Stock DCP's ``HuggingFaceStorageWriter(save_distributed=True)`` writes files with parts, one for each rank. The metadata
of each file record where its parts begin in the tensors; Hugging Face's own tools ignore this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from math import prod
from operator import le, mul, sub
from typing import Any

import torch

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointMismatch
from dcp_plugin.core.format import Files
from dcp_plugin.core.format.foreign import Contents, View

MOST_HEADER = 100_000_000
"""Largest header in bytes, as in the safetensors library."""
_MOST_DIMENSIONS = 64

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip

_PREFIX, _KINDS = "model.", {"model": "module"}
_SHARDING = "DCP_SHARDING_INFO"
_PART_OF_RANK = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class _Header:
    """Header of a file whose tensors begin at byte ``start``. Its lists are in the order of the tensors' bytes."""

    size: int
    start: int
    keys: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    ends: list[int]
    """End of the bytes of each tensor, counted from ``start``."""
    noted: dict[str, str]


def has_parts(files: Files, name: str) -> bool:
    """Return whether stock DCP wrote the file, with a note where its parts begin in the tensors.

    Raises:
        CheckpointCorrupt: The file is no safetensors file.
    """
    return bool(_header(files, name).noted.get(_SHARDING))


def rank_of(files: Files, name: str) -> int | None:
    """Return the rank whose parts a file has, counted from 0; None if the file is not one of several."""
    named = _PART_OF_RANK.fullmatch(name)
    return int(named[1]) - 1 if named and has_parts(files, name) else None


def read_parts(files: Files, names: list[str]) -> Contents:
    """Return the joint contents of several files that have parts of the same tensors.

    Raises:
        CheckpointCorrupt, CheckpointMismatch: A file cannot be read (:func:`read_file`), a file is missing, or the
            files contradict each other.
    """
    merged = Contents("safetensors", {}, kinds=dict(_KINDS))
    parts: dict[str, dict[tuple[int, ...], View]] = {}
    for name in names:
        contents = read_file(files, name, prefix="")
        begins = _begins(files, name, contents)
        merged.files.update(contents.files)
        for key, view in contents.views.items():
            views = parts.setdefault(key, {})
            # The last of several parts at one place counts, as in stock.
            views[begins[key]] = view._replace(offsets=begins[key])
            first = next(iter(views.values()))
            if (first.dtype, len(first.shape)) != (view.dtype, len(view.shape)):
                raise CheckpointCorrupt(
                    f"{files.where}/{name}: {key} is {view.dtype} of shape {view.shape}, which does not fit its part "
                    f"in {first.file}"
                )
    for key, views in parts.items():
        filled = [view for view in views.values() if 0 not in view.shape]
        merged.parts[f"{_PREFIX}{key}"] = filled or list(views.values())[:1]
    return merged


def _begins(files: Files, name: str, contents: Contents) -> dict[str, tuple[int, ...]]:
    """Return where the parts of a file begin in their tensors."""
    try:
        notes = json.loads(_header(files, name).noted[_SHARDING])
        begins = {key: tuple(notes[key]["saved_offsets"]) for key in contents.views}
        for key, begin in begins.items():
            if len(begin) != len(contents.views[key].shape) or not _are_counts(begin):
                raise ValueError(f"{key} has the invalid position {begin}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        path = f"{files.where}/{name}"
        raise CheckpointCorrupt(
            f"{path}: its {_SHARDING} does not give the positions of its tensors: {error!r}"
        ) from error
    return begins


def read_file(files: Files, name: str, prefix: str = _PREFIX) -> Contents:
    """Return the content of a safetensors file, which is one model.

    Args:
        prefix: The beginning of all keys.

    Raises:
        CheckpointCorrupt: The header contradicts itself or the file.
        CheckpointMismatch: A tensor has a dtype that torch lacks.
    """
    header = _header(files, name)
    if unknown := set(header.dtypes) - DTYPES.keys():
        key, dtype = next(pair for pair in zip(header.keys, header.dtypes, strict=True) if pair[1] in unknown)
        raise CheckpointMismatch(f"{files.where}/{name}: {key} has the dtype {dtype}, which this torch does not have")
    itemsizes = {dtype: DTYPES[dtype].itemsize for dtype in set(header.dtypes)}
    begins = [0, *header.ends[:-1]] if header.ends else []
    nbytes = list(map(sub, header.ends, begins))
    expected = list(map(mul, map(prod, header.shapes), map(itemsizes.__getitem__, header.dtypes)))
    if nbytes != expected:
        at = next(n for n, length in enumerate(nbytes) if length != expected[n])
        raise _damaged(files, name, f"{header.keys[at]} has {nbytes[at]} bytes and the shape {header.shapes[at]}")
    # A view is made as a plain tuple of columns. Its constructor would be a Python call for each of a million tensors.
    starts = map(header.start.__add__, begins)
    columns = (repeat(name), starts, map(DTYPES.__getitem__, header.dtypes), header.shapes, repeat(None), repeat(None))
    views = map(partial(tuple.__new__, View), zip(*columns, strict=False))
    named = dict(zip(map(prefix.__add__, header.keys), views, strict=True))
    return Contents("safetensors", {name: header.size}, named, kinds=dict(_KINDS))


def _header(files: Files, name: str) -> _Header:
    try:
        size = files.size(name)
        with files.open(name) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MOST_HEADER, size - 8):
                raise ValueError(f"its header would have {length} bytes")
            entries = json.loads(file.read(length).decode())
        noted = entries.pop("__metadata__", None) or {}
        if not isinstance(noted, dict) or not all(isinstance(text, str) for text in noted.values()):
            raise TypeError("its __metadata__ is not text")
        header = _columns(entries, size, 8 + length, noted)
        if (end := header.start + max(header.ends, default=0)) != size:
            raise ValueError(f"its tensors end at byte {end}, the file at byte {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(files, name, error) from error
    return header


def _columns(entries_by_key: dict[str, Any], size: int, start: int, noted: dict[str, str]) -> _Header:
    """Check the entries of a header in bulk, and return them as columns.

    For a million entries, a loop over entries would take twice as long as parsing them.

    Raises:
        ValueError, KeyError, TypeError: An entry is malformed, or there is a hole or an overlap before its tensor.
    """
    keys, entries = list(entries_by_key), list(entries_by_key.values())
    offsets = [entry["data_offsets"] for entry in entries]
    # Each pair of offsets is compared with the next: most headers are in the order of the bytes, and need no sort.
    if not all(map(le, offsets, islice(offsets, 1, None))):
        keys.sort(key=lambda key: entries_by_key[key]["data_offsets"])
        entries = [entries_by_key[key] for key in keys]
    dtypes, shapes, offsets = ([entry[name] for entry in entries] for name in ("dtype", "shape", "data_offsets"))
    numbers = list(chain.from_iterable(offsets))
    if (
        not set(map(type, dtypes)) <= {str}
        or not set(map(type, chain(shapes, offsets))) <= {list}
        or not set(map(len, offsets)) <= {2}
        or max(map(len, shapes), default=0) > _MOST_DIMENSIONS
        or not _are_counts(numbers)
        or not _are_counts(list(chain.from_iterable(shapes)))
    ):
        raise ValueError("an entry lacks a valid dtype, shape or data_offsets")
    begins, ends = numbers[::2], numbers[1::2]
    expected = [0, *ends]
    if begins != expected[:-1] or not all(map(le, begins, ends)):
        at = next(n for n, entry in enumerate(offsets) if entry[0] != expected[n] or entry[1] < entry[0])
        raise ValueError(f"{keys[at]} has the entry {entries[at]}, but must begin at byte {expected[at]}")
    return _Header(size, start, keys, dtypes, list(map(tuple, shapes)), ends, noted)


def _are_counts(numbers: Sequence[Any]) -> bool:
    return set(map(type, numbers)) <= {int} and min(numbers, default=0) >= 0


def _damaged(files: Files, name: str, error: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{files.where}/{name} is truncated or not a safetensors file: {error}")
