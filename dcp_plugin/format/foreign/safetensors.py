"""safetensors: one file, an index of several, or files that have parts of the same tensors.

The last are what stock DCP's ``HuggingFaceStorageWriter(save_distributed=True)`` writes, for each rank its own. Each
notes where in the tensors its parts begin; Hugging Face's own tools take no notice of that.

The header is read and checked by the safetensors library: bounded, no holes, no overlap, as long as the file. So the
tensors lie end to end in the order of their offsets, and where each begins follows from the sizes of those before.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dcp_plugin.errors import CheckpointCorrupt, CheckpointMismatch
from dcp_plugin.format.foreign import Contents, View
from dcp_plugin.types import Shape

MOST_HEADER = 100_000_000
"""The library's own bound, in bytes."""

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


_SHARDING = "DCP_SHARDING_INFO"
_PART_OF_RANK = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")


def has_parts(path: Path) -> bool:
    """Whether stock DCP wrote the file, and noted where in the tensors its parts begin.

    Raises:
        CheckpointCorrupt: It is no safetensors file.
    """
    return bool(_noted(path).get(_SHARDING))


def rank_of(path: Path) -> int | None:
    """Of which rank a file has the parts, counted from 0; None if it is none of several."""
    named = _PART_OF_RANK.fullmatch(path.name)
    return int(named[1]) - 1 if named and has_parts(path) else None


def read_parts(paths: list[Path]) -> Contents:
    """What several files say together that have parts of the same tensors.

    Raises:
        CheckpointCorrupt, CheckpointMismatch: As :func:`read_file`; or they contradict each other, or one is missing.
    """
    whole = Contents("safetensors", {})
    parts: dict[str, dict[Shape, View]] = {}
    for path in paths:
        contents = read_file(path)
        begins = _begins(path, contents)
        whole.files.update(contents.files)
        for key, view in contents.views.items():
            known = parts.setdefault(key, {})
            known[begins[key]] = replace(view, offsets=begins[key])  # of two that are the same, the last: as stock
            first = next(iter(known.values()))
            if (first.dtype, len(first.shape)) != (view.dtype, len(view.shape)):
                raise CheckpointCorrupt(
                    f"{path}: {key} is {view.dtype} of shape {view.shape}; {first.file} has another"
                )
    for key, known in parts.items():
        filled = [view for view in known.values() if 0 not in view.shape]
        whole.parts[key] = filled or list(known.values())[:1]
    return whole


def _begins(path: Path, contents: Contents) -> dict[str, Shape]:
    """Where in the tensors the parts of a file begin."""
    try:
        said = json.loads(_noted(path)[_SHARDING])
        begins = {key: tuple(said[key]["saved_offsets"]) for key in contents.views}
        for key, begin in begins.items():
            if len(begin) != len(contents.views[key].shape) or not all(type(at) is int and at >= 0 for at in begin):
                raise ValueError(f"{key} at {begin}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path}: its {_SHARDING} does not tell where its tensors begin: {error!r}") from error
    return begins


def _noted(path: Path) -> dict[str, str]:
    try:
        with safe_open(str(path), framework="numpy") as header:
            return header.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{path} is truncated or no safetensors file: {error}")


def read_file(path: Path) -> Contents:
    """What a safetensors file says; keys without a prefix.

    Raises:
        CheckpointCorrupt: The header contradicts itself or the file.
        CheckpointMismatch: It has a dtype that torch has no tensors of.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        contents = Contents("safetensors", {path.name: size})
        with safe_open(str(path), framework="numpy") as header:
            for key in header.offset_keys():
                described = header.get_slice(key)
                name, shape = described.get_dtype(), tuple(described.get_shape())
                if name not in _DTYPES:
                    raise CheckpointMismatch(f"{path}: {key} has the dtype {name}, which torch has no tensors of")
                contents.views[key] = View(path.name, start, _DTYPES[name], shape)
                start += prod(shape) * _DTYPES[name].itemsize
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error
    if start != size:
        raise CheckpointCorrupt(f"{path}: its tensors end at byte {start}, the file at byte {size}")
    return contents
