"""The ceiling: the same bytes with plain system calls, one new preallocated and synced file per thread, nothing else.

On a disk past the page cache, from memory that is aligned already; on tmpfs plain ``pwrite``. Reading is ``preadv``
straight into the tensors.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from benchmarks._machine import file_system_of
from benchmarks._peer import IO_THREADS, Peer, State
from dcp_plugin.core.tensors._torch import DTensor

_BLOCK = 4 << 20
_aligned: dict[int, tuple[mmap.mmap, int]] = {}


def local_bytes(state: State) -> list[memoryview]:
    """This rank's memory."""
    views = []
    for value in state.values():
        local = value.to_local() if isinstance(value, DTensor) else value
        views.append(local.detach().reshape(-1).view(torch.uint8).numpy().data)
    return views


def prepare(state: State) -> None:
    if id(state) not in _aligned:
        total = sum(map(len, local_bytes(state)))
        memory = mmap.mmap(-1, -(-total // (4096 * IO_THREADS)) * 4096 * IO_THREADS)
        whole, position = np.frombuffer(memory, np.uint8), 0
        for view in local_bytes(state):
            whole[position : position + len(view)] = np.frombuffer(view, np.uint8)
            position += len(view)
        _aligned.clear()
        _aligned[id(state)] = memory, total


def _name(path: Path, part: int) -> str:
    return f"{path}/{int(os.environ.get('RANK', '0'))}-{part}"


def save(state: State, path: Path) -> None:
    memory = memoryview(_aligned[id(state)][0])
    share = len(memory) // IO_THREADS
    path.mkdir(exist_ok=True)

    def write(part: int) -> None:
        fd = os.open(_name(path, part), os.O_WRONLY | os.O_CREAT | os.O_EXCL | (0 if _in_memory(path) else os.O_DIRECT))
        os.posix_fallocate(fd, 0, share)
        for at in range(part * share, (part + 1) * share, _BLOCK):
            os.pwrite(fd, memory[at : min(at + _BLOCK, (part + 1) * share)], at - part * share)
        os.fsync(fd)
        os.close(fd)

    with ThreadPoolExecutor(IO_THREADS) as pool:
        list(pool.map(write, range(IO_THREADS)))
    directory = os.open(path, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def _in_memory(path: Path) -> bool:
    """tmpfs has no page cache to get past."""
    return file_system_of(path).startswith("tmpfs")


def load(state: State, path: Path) -> None:
    share = os.path.getsize(_name(path, 0))
    pieces: list[list[tuple[int, memoryview]]] = [[] for _ in range(IO_THREADS)]
    position = 0
    for view in local_bytes(state):
        at = 0
        while at < len(view):
            part, offset = divmod(position, share)
            count = min(len(view) - at, share - offset, 2 * _BLOCK)
            pieces[part].append((offset, view[at : at + count]))
            at, position = at + count, position + count

    def read(part: int) -> None:
        fd = os.open(_name(path, part), os.O_RDONLY)
        batch: list[memoryview] = []
        start = size = 0
        for offset, view in pieces[part]:
            if batch and (size + len(view) > 2 * _BLOCK or len(batch) == 1000):
                assert os.preadv(fd, batch, start) == size
                batch, start, size = [], offset, 0
            batch.append(view)
            size += len(view)
        if batch:
            assert os.preadv(fd, batch, start) == size
        os.close(fd)

    with ThreadPoolExecutor(IO_THREADS) as pool:
        list(pool.map(read, range(IO_THREADS)))


PEERS = [Peer("ceiling (raw I/O)", save, load, prepare=prepare)]
