"""safetensors: one file, an index of several, or files that have parts of the same tensors.

Stock DCP's ``HuggingFaceStorageWriter(save_distributed=True)`` writes the last kind, a file for each rank. The metadata
of each notes where in the tensors its parts begin, which Hugging Face's own tools ignore.

A file is 8 bytes of length, a JSON header, and the tensors end to end. The header is checked before it is used: it is
bounded, its tensors have no holes and do not overlap, and the last one ends where the file does.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from dcp_plugin.errors import CheckpointCorrupt, CheckpointMismatch
from dcp_plugin.format import Files
from dcp_plugin.format.foreign import Contents, View
from dcp_plugin.types import Shape

MOST_HEADER = 100_000_000
"""Bytes of a header; as in the safetensors library."""
_MOST_DIMENSIONS = 64

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip

_SHARDING = "DCP_SHARDING_INFO"
_PART_OF_RANK = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class _Header:
    """What a file says before its tensors begin, at byte ``start``."""

    size: int
    start: int
    tensors: list[tuple[str, str, Shape, int]]
    """Key, name of the dtype, shape and number of bytes, as they lie in the file."""
    noted: dict[str, str]


def has_parts(files: Files, name: str) -> bool:
    """Whether stock DCP wrote the file, and noted where in the tensors its parts begin.

    Raises:
        CheckpointCorrupt: It is no safetensors file.
    """
    return bool(_header(files, name).noted.get(_SHARDING))


def rank_of(files: Files, name: str) -> int | None:
    """Of which rank a file has the parts, counted from 0; None if it is none of several."""
    named = _PART_OF_RANK.fullmatch(name)
    return int(named[1]) - 1 if named and has_parts(files, name) else None


def read_parts(files: Files, names: list[str]) -> Contents:
    """What several files say together that have parts of the same tensors.

    Raises:
        CheckpointCorrupt, CheckpointMismatch: As :func:`read_file`; or they contradict each other, or one is missing.
    """
    merged = Contents("safetensors", {})
    parts: dict[str, dict[Shape, View]] = {}
    for name in names:
        contents = read_file(files, name)
        begins = _begins(files, name, contents)
        merged.files.update(contents.files)
        for key, view in contents.views.items():
            known = parts.setdefault(key, {})
            known[begins[key]] = replace(view, offsets=begins[key])  # of two that are the same, the last: as stock
            first = next(iter(known.values()))
            if (first.dtype, len(first.shape)) != (view.dtype, len(view.shape)):
                raise CheckpointCorrupt(
                    f"{files.where}/{name}: {key} is {view.dtype} of shape {view.shape}; {first.file} has another"
                )
    for key, known in parts.items():
        filled = [view for view in known.values() if 0 not in view.shape]
        merged.parts[key] = filled or list(known.values())[:1]
    return merged


def _begins(files: Files, name: str, contents: Contents) -> dict[str, Shape]:
    """Where in the tensors the parts of a file begin."""
    try:
        said = json.loads(_header(files, name).noted[_SHARDING])
        begins = {key: tuple(said[key]["saved_offsets"]) for key in contents.views}
        for key, begin in begins.items():
            if len(begin) != len(contents.views[key].shape) or not _are_counts(begin):
                raise ValueError(f"{key} at {begin}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        where = f"{files.where}/{name}"
        raise CheckpointCorrupt(f"{where}: its {_SHARDING} does not tell where its tensors begin: {error!r}") from error
    return begins


def read_file(files: Files, name: str) -> Contents:
    """What a safetensors file says; keys without a prefix.

    Raises:
        CheckpointCorrupt: The header contradicts itself or the file.
        CheckpointMismatch: It has a dtype that torch has no tensors of.
    """
    header = _header(files, name)
    contents = Contents("safetensors", {name: header.size})
    at = header.start
    for key, dtype, shape, nbytes in header.tensors:
        if dtype not in DTYPES:
            raise CheckpointMismatch(
                f"{files.where}/{name}: {key} has the dtype {dtype}, which torch has no tensors of"
            )
        if nbytes != prod(shape) * DTYPES[dtype].itemsize:
            raise _damaged(files, name, f"{key} has {nbytes} bytes and the shape {shape}")
        contents.views[key] = View(name, at, DTYPES[dtype], shape)
        at += nbytes
    return contents


def _header(files: Files, name: str) -> _Header:
    try:
        size = files.size(name)
        with files.open(name) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MOST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes")
            said = json.loads(file.read(length).decode())
        noted = said.pop("__metadata__", None) or {}
        if not isinstance(noted, dict) or not all(isinstance(text, str) for text in noted.values()):
            raise TypeError("its __metadata__ is not text")
        tensors, end = [], 0
        for key, one in sorted(said.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape, (begin, stop) = one["dtype"], one["shape"], one["data_offsets"]
            sound = isinstance(dtype, str) and len(shape) <= _MOST_DIMENSIONS and _are_counts((*shape, begin, stop))
            if not sound or begin != end or stop < begin:
                raise ValueError(f"{key} is {one}, where byte {end} is expected")
            tensors.append((key, dtype, tuple(shape), stop - begin))
            end = stop
        if 8 + length + end != size:
            raise ValueError(f"its tensors end at byte {8 + length + end}, the file at byte {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(files, name, error) from error
    return _Header(size, 8 + length, tensors, noted)


def _are_counts(numbers: tuple[Any, ...]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _damaged(files: Files, name: str, error: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{files.where}/{name} is truncated or no safetensors file: {error}")
