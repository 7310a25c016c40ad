"""Meaning of the bytes of a checkpoint.

Functions turn bytes and columns into an index, values or metadata, and back. The rule: no function here opens a path or
talks to another rank. The bytes to read come through :class:`Files`, which a medium provides.

A checkpoint is committed if, and only if, it has ``.metadata``. A checkpoint of this package also has
``dcp_plugin.json`` (the summary) and ``dcp_plugin.index`` (the index). The data files of rank ``r`` are called
``__{r}_{n}.distcp``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, BinaryIO, Protocol

from dcp_plugin.core.errors import CheckpointCorrupt, unreadable

METADATA = ".metadata"
SUMMARY = "dcp_plugin.json"
INDEX = "dcp_plugin.index"
DATA_SUFFIX = ".distcp"
DAMAGED = "dcp_plugin.damaged"
"""Marker in a quarantined directory: a load found damage, and the directory no longer counts as a checkpoint."""

PACKED = "dcp_plugin-"
"""Prefix of the folder of a save that is written in place, see :mod:`dcp_plugin.core.format.packed`."""

MOST_TABLE = 1 << 32
"""Largest size in bytes of a ``.metadata`` or an index. Those of 16 million chunks take 2.4 GB."""

MOST_JSON = 1 << 20
"""Largest size in bytes of a small JSON file."""
MOST_NESTED = 64
"""Largest number of lists and objects in each other in a JSON file."""
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
"""Pattern of the brackets in a JSON text, and of the texts in it, whose brackets do not count."""

_OF_OTHER_TOOLS = (
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "*.distcp", METADATA, "global_step*"),
    *("optimizer*", "scheduler*", "scaler*", "sampler*", "dl_state_dict*", "custom_checkpoint_*", "random_states_*"),
    *("rng_state*", "trainer_state.json", "training_args.bin", "checkpoint-is-incomplete.txt", "adapter_*", "latest"),
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer*"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model", "chat_template*"),
    *("zero_to_fp32.py",),
)
"""Names of the files and folders that torch, Lightning, Accelerate and transformers write into a checkpoint."""
NUMBERED = re.compile(r"checkpoint[-_]\d+")
"""Folders that Accelerate and transformers rotate, complete or not."""

_METADATA_OF_ONE_RANK = re.compile(r"__\d+\.metadata")


@dataclass(frozen=True)
class Pieces:
    """Content of a file that is made while it is written. It need not fit into memory.

    ``make`` yields the pieces. Each reader calls it again, and gets the same bytes.
    """

    make: Callable[[], Iterator[bytes | memoryview]]

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return self.make()

    def __bytes__(self) -> bytes:
        return b"".join(self)

    @functools.cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for piece in self:
            digest.update(piece)
        return digest.hexdigest()


class Files(Protocol):
    """Files of one checkpoint, read-only, as a medium opens them.

    Names are relative to the checkpoint and have ``/`` between folders.
    """

    @property
    def where(self) -> str:
        """Name of the checkpoint in messages: its path or address."""

    def names(self) -> list[str]:
        """Return the names directly in the checkpoint, sorted; the name of a folder ends in ``/``."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes. Raises OSError if the file does not exist."""

    def modified(self, name: str) -> float:
        """Return when a file, or the folder ``""``, last changed, in seconds since the epoch. Raises OSError."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading; it is seekable. Raises OSError if the name is not that of a readable file."""


def exists(files: Files, name: str) -> bool:
    """Return whether a file of this name exists. An unreadable file counts: the code that opens it raises the error."""
    try:
        files.size(name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


@contextmanager
def opened(files: Files, name: str) -> Iterator[BinaryIO]:
    """Open a file for reading.

    Raises:
        CheckpointCorrupt: The file does not exist.
        CheckpointUnreadable: The file cannot be opened or read.
    """
    try:
        with files.open(name) as file:
            yield file
    except OSError as error:
        raise unreadable(f"{files.where}/{name} cannot be read", error) from error


def read(files: Files, name: str, most: int | None = None) -> bytes:
    """Return the bytes of a file, or its first ``most`` bytes.

    Raises:
        CheckpointCorrupt: The file does not exist; or ``most`` is None, and it is larger than any table of contents.
    """
    with opened(files, name) as file:
        if most is None and (size := file.seek(0, os.SEEK_END)) > MOST_TABLE:
            raise CheckpointCorrupt(
                f"{files.where}/{name} is damaged: it has {size} bytes, and the limit for a table of contents is "
                f"{MOST_TABLE}"
            )
        if most is None:
            file.seek(0)
        return file.read(-1 if most is None else most)


def json_object(data: bytes, most: int = MOST_JSON) -> dict[str, Any]:
    """Return the object in a small JSON file, which any user may have written.

    Args:
        most: Largest size in bytes.

    Raises:
        ValueError: The file is larger, is no JSON, has another value than an object, or is nested deeper than
            :data:`MOST_NESTED`.
    """
    if len(data) > most:
        raise ValueError(f"it has {len(data)} bytes, and the limit is {most}")
    depths = accumulate((token in b"[{") - (token in b"]}") for token in _BRACKETS.findall(data))
    if max(depths, default=0) > MOST_NESTED:
        raise ValueError(f"it has more than {MOST_NESTED} lists and objects in each other")
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"it has a {type(value).__name__}, not an object")
    return value


def expect(file: BinaryIO, ranges: Iterable[tuple[int, int]]) -> None:
    """Announce the ranges of a file that will be read in small pieces.

    A file whose reads each cost a request then fetches the ranges at once. Other files have no ``expect``.
    """
    if announce := getattr(file, "expect", None):
        announce(ranges)


def is_own(name: str) -> bool:
    """Return whether a file of this name belongs to the checkpoint itself, not to a framework or a user."""
    return name in (METADATA, SUMMARY, INDEX, DAMAGED) or name.endswith(DATA_SUFFIX) or name.startswith(PACKED)


def is_of_other_tool(name: str) -> bool:
    """Return whether a file or folder of this name, directly in a checkpoint, is of the tool that saved it."""
    return any(fnmatchcase(name, pattern) for pattern in _OF_OTHER_TOOLS)


def has_traces(names: Collection[str]) -> bool:
    """Return whether the names include a file that only checkpoints have, committed or not."""
    return any(name in (METADATA, INDEX) or name.endswith(DATA_SUFFIX) or name.startswith(PACKED) for name in names)


def has_lost_a_table(names: Collection[str]) -> bool:
    """Return whether a checkpoint of this package with these names has only one of its two tables."""
    return METADATA in names and DAMAGED not in names and (SUMMARY in names) != (INDEX in names)


def uncommitted_reason(names: Collection[str]) -> str:
    """Return why a directory with these names is no committed checkpoint, or an empty string if it is one."""
    if DAMAGED in names:
        return f"it is quarantined, since a load found it damaged. {DAMAGED} in it says why; delete that file to use it"
    if METADATA not in names:
        if any(map(_METADATA_OF_ONE_RANK.fullmatch, names)):
            return (
                "it was saved without a coordinator (use_collectives=False), so each rank has a table of contents and "
                "none is for all; torch.distributed.checkpoint.load(..., use_collectives=False) reads it, on as many "
                "ranks. Save with use_collectives=True"
            )
        return "it has no .metadata" + (
            ": its save was never committed, or a copy has lost the hidden file (as cp DIR/* does)"
            if has_traces(names)
            else ""
        )
    if has_lost_a_table(names):
        return "incomplete: {} is missing. Without {} as well, it is a checkpoint of stock DCP, unverified".format(
            *((SUMMARY, INDEX) if INDEX in names else (INDEX, SUMMARY))
        )
    return ""
