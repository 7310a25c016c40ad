"""safetensors: one file, or an index of several.

The header is read and checked by the safetensors library: bounded, no holes, no overlap, as long as the file. So the
tensors lie end to end in the order of their offsets, and where each begins follows from the sizes of those before.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dcp_plugin.errors import CheckpointCorrupt, CheckpointMismatch
from dcp_plugin.storage.foreign.contents import Contents, View

MOST_HEADER = 100_000_000
"""The library's own bound, in bytes."""

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


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
        raise CheckpointCorrupt(f"{path} is truncated or no safetensors file: {error}") from error
    if start != size:
        raise CheckpointCorrupt(f"{path}: its tensors end at byte {start}, the file at byte {size}")
    return contents
