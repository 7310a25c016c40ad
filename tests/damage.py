"""Damages checkpoints, and saves. The sizes of all files stay, so nothing but a checksum tells."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin import events


def flip_byte(file: Path, at: int | None = None) -> None:
    """Turn one bit of a file: of its byte ``at``, which counts from the end if it is negative, or in the middle."""
    size = file.stat().st_size
    offset = size // 2 if at is None else at % size
    with open(file, "r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))


def flip(path: Path, key: str, chunk: int = 0, byte: int = 0) -> None:
    """Turn one bit of a byte of a tensor in a checkpoint."""
    place = dcp.ShardedReader(path).index[key].chunks[chunk].location  # type: ignore[union-attr]
    flip_byte(path / place.file, place.offset + (place.payload_offset or 0) + byte)


def flip_any(path: Path, prefix: str) -> str:
    """The same in the first tensor whose key begins like this; its key."""
    key = next(tensor.key for tensor in dcp.inspect(path).tensors if tensor.key.startswith(prefix) and tensor.nbytes)
    flip(path, key)
    return key


def flip_in_memory(tensor: torch.Tensor, element: int) -> None:
    """Turn one bit of a live tensor, through a view that no version counter sees."""
    tensor.data.view(-1).view(torch.int32)[element] ^= 1


def fill_disk(step: int, rank: int | None = None) -> None:
    """Let the saves of a step fail when they begin, on all ranks or on one."""

    def fail(event: events.Event) -> None:
        if isinstance(event, events.SaveStarted) and event.step == step and rank in (None, dist.get_rank()):
            raise OSError("disk full")

    events.subscribe(fail)
