"""Damages checkpoints."""

from __future__ import annotations

from pathlib import Path

import dcp_plugin as dcp


def flip(path: Path, key: str, chunk: int = 0) -> None:
    """Turn one bit of a tensor. The sizes of all files stay, so nothing but a checksum tells."""
    place = dcp.ShardedReader(path).index[key].chunks[chunk].location  # type: ignore[union-attr]
    with open(path / place.file, "r+b") as file:
        file.seek(place.offset + (place.payload_offset or 0))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def flip_any(path: Path, prefix: str) -> str:
    """The same in the first tensor whose key begins like this; its key."""
    key = next(tensor.key for tensor in dcp.inspect(path).tensors if tensor.key.startswith(prefix) and tensor.nbytes)
    flip(path, key)
    return key
