"""What tests do to a checkpoint that may be on a disk or in a bucket."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, StorageReader, StorageWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from dcp_plugin.core.media.objects.client import client_of
from dcp_plugin.core.media.places import WORKSPACE
from dcp_plugin.core.paths import ObjectPath, Where
from dcp_plugin.core.runs import figures


def names_in(folder: Path) -> list[str]:
    """What is in a folder of checkpoints, but for a workspace in which nothing is left but figures."""
    return sorted(one.name for one in folder.iterdir() if one.name != WORKSPACE or not is_tidy(folder))


def bytes_in(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of a folder, by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def is_tidy(folder: Path) -> bool:
    """Whether saves have left nothing in the workspace of a folder but figures."""
    workspace = folder / WORKSPACE
    return not workspace.exists() or os.listdir(workspace) == [figures.NAME]


def stock_reader(path: Where) -> StorageReader:
    return FileSystemReader(path) if isinstance(path, Path) else FsspecReader(path)


def stock_writer(path: Where) -> StorageWriter:
    return FileSystemWriter(path) if isinstance(path, Path) else FsspecWriter(path)


def save_file(value: Any, path: Where) -> None:
    """As torch, or a framework by itself, saves to one file."""
    with fsspec.open(str(path), "wb") as file:
        torch.save(value, file)


def copy_folder(folder: Path, to: Where) -> None:
    """As ``cp -r`` and ``aws s3 cp --recursive`` do."""
    if isinstance(to, Path):
        shutil.copytree(folder, to)
        return
    for path in folder.rglob("*"):
        if path.is_file():
            client_of(to).put((to / path.relative_to(folder).as_posix()).key, path.read_bytes())


def delete_file(file: Where) -> None:
    if isinstance(file, ObjectPath):
        client_of(file).delete([file.key])
    else:
        file.unlink()
