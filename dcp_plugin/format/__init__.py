"""Meaning of the bytes of a checkpoint.

Bytes and columns go in, an index, values or metadata come out, and the other way round. The rule: nothing here opens a
path or talks to another rank. What has to be read comes through :class:`Files`, which a medium provides.

A checkpoint is committed if, and only if, it has ``.metadata``; one of ours has ``dcp_plugin.json`` (the summary) and
``dcp_plugin.index`` (the index) as well. The data files of rank ``r`` are called ``__{r}_{n}.distcp``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol

from dcp_plugin.errors import CheckpointCorrupt, unreadable

METADATA = ".metadata"
SUMMARY = "dcp_plugin.json"
INDEX = "dcp_plugin.index"
DATA_SUFFIX = ".distcp"
DAMAGED = "dcp_plugin.damaged"
"""In a directory that counts as no checkpoint, since a load has found it damaged."""

PACKED = "dcp_plugin-"
"""How the folder of a save begins that is written in place, see :mod:`dcp_plugin.format.packed`."""

MOST_TABLE = 1 << 32
"""Bytes of a ``.metadata`` or an index. Those of 16 million chunks take 2.4 GB."""

_METADATA_OF_ONE_RANK = re.compile(r"__\d+\.metadata")


class Files(Protocol):
    """The files of one checkpoint, read-only, as a medium opens them.

    Names are relative to the checkpoint and have ``/`` between folders.
    """

    @property
    def where(self) -> str:
        """What messages call the checkpoint: its path or address."""

    def names(self) -> list[str]:
        """What is directly in it, sorted; the name of a folder ends in ``/``."""

    def size(self, name: str) -> int:
        """Bytes of a file. Raises OSError if it is not there."""

    def modified(self, name: str) -> float:
        """When a file, or the folder ``""``, was last changed, in seconds since the epoch. Raises OSError."""

    def open(self, name: str) -> BinaryIO:
        """A file, seekable. Raises OSError if it is not a readable file."""


def exists(files: Files, name: str) -> bool:
    """Whether there is a file of this name, or something that cannot be read: whoever opens it will say so."""
    try:
        files.size(name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


@contextmanager
def opened(files: Files, name: str) -> Iterator[BinaryIO]:
    """A file, open for reading.

    Raises:
        CheckpointCorrupt: It is not there.
        CheckpointUnreadable: It cannot be opened or read.
    """
    try:
        with files.open(name) as file:
            yield file
    except OSError as error:
        raise unreadable(f"{files.where}/{name} cannot be read", error) from error


def read(files: Files, name: str, most: int | None = None) -> bytes:
    """Return a file, or its first bytes.

    Raises:
        CheckpointCorrupt: As :func:`opened`; or all of a file was asked for that is larger than any table of contents.
    """
    with opened(files, name) as file:
        if most is None and (size := file.seek(0, os.SEEK_END)) > MOST_TABLE:
            raise CheckpointCorrupt(f"{files.where}/{name} has {size} bytes, more than a table of contents ever has")
        if most is None:
            file.seek(0)
        return file.read(-1 if most is None else most)


def expect(file: BinaryIO, ranges: Iterable[tuple[int, int]]) -> None:
    """Tell a file which ranges will be read in small pieces: where each read costs a request, they are made at once."""
    if tell := getattr(file, "expect", None):
        tell(ranges)


def is_own(name: str) -> bool:
    """Whether a file of this name belongs to the checkpoint itself, and was not added by a framework or a user."""
    return name in (METADATA, SUMMARY, INDEX, DAMAGED) or name.endswith(DATA_SUFFIX) or name.startswith(PACKED)


def has_traces(names: Collection[str]) -> bool:
    """Whether a directory with these entries has files that only checkpoints have, committed or not."""
    return any(name in (METADATA, INDEX) or name.endswith(DATA_SUFFIX) or name.startswith(PACKED) for name in names)


def uncommitted_reason(names: Collection[str]) -> str:
    """Why a directory with these entries is not a committed checkpoint, or an empty string if it is one."""
    if DAMAGED in names:
        return f"it is set aside, since a load found it damaged: {DAMAGED} in it says why; delete that to use it again"
    if METADATA not in names:
        if any(map(_METADATA_OF_ONE_RANK.fullmatch, names)):
            return (
                "it was saved without a coordinator (use_collectives=False), so each rank has a table of contents and "
                "none is for all; torch.distributed.checkpoint.load(..., use_collectives=False) reads it, on as many "
                "ranks. Save with use_collectives=True"
            )
        return "its save was never committed (no .metadata)" if has_traces(names) else "it has no .metadata"
    if (SUMMARY in names) != (INDEX in names):
        return f"incomplete: {SUMMARY if INDEX in names else INDEX} is missing"
    return ""
