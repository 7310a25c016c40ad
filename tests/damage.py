"""Damages checkpoints, and saves. The sizes of all files stay, so nothing but a checksum tells."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin.core.saving import job
from dcp_plugin.core.storage import part_writer, write_items


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


def fill_disk(step: int | None, rank: int | None = None) -> None:
    """Let the saves of a step fail when they begin to write, on all ranks or on one."""
    write = job.SavePipeline._write

    def fail_or_write(pipeline: Any, publication: Any, request: Any, *rest: Any) -> Any:
        if request.step == step and (rank is None or rank == dist.get_rank()):
            raise OSError("disk full")
        return write(pipeline, publication, request, *rest)

    job.SavePipeline._write = fail_or_write  # type: ignore[method-assign]


@contextmanager
def bad_disk(fail: Callable[[], None], rank: int | None = None) -> Iterator[None]:
    """Call ``fail``, on all ranks or on one, after every piece that is written and after the last one: the write raises
    what it raises."""
    add, write = write_items._Meter.add, part_writer.PartWriter.write

    def add_or_fail(meter: Any, count: int) -> None:
        add(meter, count)
        fail_here()

    def write_or_fail(*args: Any) -> Any:
        written = write(*args)
        fail_here()
        return written

    def fail_here() -> None:
        if rank is None or rank == dist.get_rank():
            fail()

    with (
        mock.patch.object(write_items._Meter, "add", add_or_fail),
        mock.patch.object(part_writer.PartWriter, "write", write_or_fail),
    ):
        yield


def raising(error: Exception) -> Callable[[], None]:
    """A function that raises this error."""

    def fail() -> None:
        raise error

    return fail
