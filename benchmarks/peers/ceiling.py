"""The ceiling: the same bytes with plain system calls, one new preallocated and synced file per thread, nothing else.

On a disk past the page cache, from memory that is aligned already; on tmpfs plain ``pwrite``. Reading is ``preadv``
straight into the tensors, whose memory is used already: no page of it is new. The ceiling of a load that verifies reads
and hashes: each piece by blocks, as our checksums cover them, while the piece is in the processor's cache. That of a
save hashes blocks of the smallest size and writes them.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from benchmarks._machine import file_system_of
from benchmarks._peer import IO_THREADS, Peer, State
from dcp_plugin.core.format.payload import SMALLEST_BLOCK, block_size
from dcp_plugin.core.tensors._torch import DTensor

_BLOCK = 4 << 20
_HASHED = 512 << 10  # read and then hashed, unless a block is larger
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


def save(state: State, path: Path, hashes: bool = False) -> None:
    memory = memoryview(_aligned[id(state)][0])
    share, size = len(memory) // IO_THREADS, _HASHED if hashes else _BLOCK
    path.mkdir(exist_ok=True)

    def write(part: int) -> None:
        fd = os.open(_name(path, part), os.O_WRONLY | os.O_CREAT | os.O_EXCL | (0 if _in_memory(path) else os.O_DIRECT))
        os.posix_fallocate(fd, 0, share)
        for at in range(part * share, (part + 1) * share, size):
            piece = memory[at : min(at + size, (part + 1) * share)]
            if hashes:
                hash_blocks(piece, SMALLEST_BLOCK)
            os.pwrite(fd, piece, at - part * share)
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


def load(state: State, path: Path, hashes: bool = False) -> None:
    share = os.path.getsize(_name(path, 0))
    pieces: list[list[tuple[int, memoryview, int]]] = [[] for _ in range(IO_THREADS)]
    position = 0
    for view in local_bytes(state):
        at, block = 0, block_size(len(view))
        most = max(_HASHED, block) if hashes else 2 * _BLOCK
        while at < len(view):
            part, offset = divmod(position, share)
            count = min(len(view) - at, share - offset, most)
            pieces[part].append((offset, view[at : at + count], block))
            at, position = at + count, position + count

    def read(part: int) -> None:
        fd = os.open(_name(path, part), os.O_RDONLY)
        batch: list[memoryview] = []
        blocks: list[int] = []
        start = size = 0
        for offset, view, block in [*pieces[part], (0, memoryview(b""), 0)]:
            if batch and (size + len(view) > (_HASHED if hashes else 2 * _BLOCK) or len(batch) == 1000 or not view):
                assert os.preadv(fd, batch, start) == size
                for done, size_of_block in zip(batch, blocks, strict=True) if hashes else ():
                    hash_blocks(done, size_of_block)
                batch, blocks, start, size = [], [], offset, 0
            batch.append(view)
            blocks.append(block)
            size += len(view)
        os.close(fd)

    with ThreadPoolExecutor(IO_THREADS) as pool:
        list(pool.map(read, range(IO_THREADS)))


def hash_blocks(view: memoryview, block: int) -> None:
    """Hash each block."""
    for at in range(0, len(view), block):
        xxh3_64_intdigest(view[at : at + block])


PEERS = [
    Peer("ceiling (raw I/O)", save, load, prepare=prepare),
    Peer("raw write and hash", partial(save, hashes=True), load, only="save", prepare=prepare),
    Peer("raw read and hash", save, partial(load, hashes=True), only="load", prepare=prepare),
]
