"""``torch.distributed.checkpoint``, as it comes and tuned: several threads, no CRC."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks._peer import IO_THREADS, Peer, State


def save(state: State, path: Path) -> None:
    _quiet()
    dcp.save({"state": state}, checkpoint_id=path)


def save_tuned(state: State, path: Path) -> None:
    _quiet()
    torch.serialization.set_crc32_options(False)
    try:
        writer = dcp.FileSystemWriter(path, thread_count=IO_THREADS)
        dcp.save({"state": state}, storage_writer=writer)
    finally:
        torch.serialization.set_crc32_options(True)


def load(state: State, path: Path) -> None:
    _quiet()
    dcp.load({"state": state}, checkpoint_id=path)


def _quiet() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is")


PEERS = [Peer("stock", save, load), Peer("stock, tuned", save_tuned, load, only="save")]
