"""What tests do to a checkpoint that may be on a disk or in a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, StorageReader, StorageWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from dcp_plugin.media.objects.client import client_of
from dcp_plugin.paths import ObjectPath, Where


def stock_reader(path: Where) -> StorageReader:
    return FileSystemReader(path) if isinstance(path, Path) else FsspecReader(path)


def stock_writer(path: Where) -> StorageWriter:
    return FileSystemWriter(path) if isinstance(path, Path) else FsspecWriter(path)


def save_file(value: Any, path: Where) -> None:
    """As torch, or a framework by itself, saves to one file."""
    with fsspec.open(str(path), "wb") as file:
        torch.save(value, file)


def delete_file(file: Where) -> None:
    if isinstance(file, ObjectPath):
        client_of(file).delete([file.key])
    else:
        file.unlink()
