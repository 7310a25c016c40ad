"""Files of checkpoints for the framework packages, which open no path themselves.

A framework package asks for the kind of a path, and reads small files of stock frameworks. Hooks and frameworks open
extra files themselves, so they get a local directory with the extra files of a checkpoint (:func:`local_copy`).
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, UnsafeCheckpoint, damage_in
from dcp_plugin.core.format import DAMAGED, DATA_SUFFIX, METADATA, PACKED, exists, has_traces, is_own, read
from dcp_plugin.core.format.foreign.detect import META as META
from dcp_plugin.core.format.packed import token_in
from dcp_plugin.core.media import Readable, files_below, locate, medium_of, snapshot, unpacked
from dcp_plugin.core.media import uncommitted_reason as uncommitted_reason
from dcp_plugin.core.media.packed_view import PackedFiles
from dcp_plugin.core.paths import Where, on_file_system
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.storage.open import open_files
from dcp_plugin.core.storage.published import comparison_of, in_one_view
from dcp_plugin.core.storage.published import read_summary as read_summary
from dcp_plugin.core.storage.published import summary_if_readable as summary_if_readable

_AT_ONCE = 8 << 20
"""Number of bytes that one request fetches."""


def kind_of(path: Where) -> str:
    """Return the kind of a path: ``"folder"``, ``"file"``, or an empty string if it does not exist. Raises OSError."""
    return medium_of(path).kind(path)


def is_regular_file(path: Where) -> bool:
    """Return whether a path is a regular file or an object. A named pipe, which blocks its reader, is neither."""
    return kind_of(path) == "file"


def is_taken(path: Where) -> bool:
    """Return whether something other than the files of a save in flight or an interrupted save is at a path.

    Raises:
        CheckpointError: The medium does not answer.
    """
    medium = medium_of(path)
    try:
        kind = medium.kind(path)
        entries = medium.entries(path) if kind == "folder" else []
        return bool(kind) and not (entries and all(token_in(entry.path.name) for entry in entries))
    except OSError as error:
        raise CheckpointError(f"cannot see whether {path} is there: {error}. {medium.advice}") from error


def paths_in(folder: Where) -> list[Where]:
    """Return the paths directly below a folder; an empty list if the folder does not exist. Raises OSError."""
    with suppress(FileNotFoundError):
        return [entry.path for entry in medium_of(folder).entries(folder)]
    return []


def names_in(path: Where) -> set[str]:
    """Return the names directly below a path; a name of a folder ends in ``/``. Raises OSError."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return set(medium_of(path).open(path).names())
    return set()


def read_file(path: Where, name: str, files: SourceFiles | None) -> bytes:
    """Return the bytes of a file of a checkpoint, empty if the checkpoint lacks the file.

    Args:
        name: Name of the file, with ``/`` between folders.
        files: The files from :meth:`dcp_plugin.checkpointer.Internals.shown`.

    Raises:
        CheckpointUnreadable: The file system fails to read.
    """
    with damage_in(path):
        source = files or unpacked(medium_of(path).open(path))
        return read(source, name) if exists(source, name) else b""


def has_our_files(path: Where) -> bool:
    """Return whether a directory has files of a checkpoint of this package or of stock DCP, committed or not."""
    return has_traces(names_in(locate(path)))


def is_of_stock_lightning(path: Where) -> bool:
    """Return whether a sharded strategy of Lightning or Fabric saved the directory without this package, possibly over
    a checkpoint of ours.

    Raises:
        CheckpointCorrupt: The directory mixes the files of both.
    """
    return is_regular_file(path / META) and read_summary(path) is None


def is_quarantined(path: Where) -> bool:
    """Return whether a load has marked a checkpoint as damaged. Raises OSError."""
    return exists(medium_of(path).open(path), DAMAGED)


def saved_at(path: Where) -> float | None:
    """Return the time at which a checkpoint directory or file was saved; None if the path does not exist."""
    if is_regular_file(path):
        return medium_of(path).open(path.parent).modified(path.name)
    if (summary := summary_if_readable(path)) is not None:
        return summary.time
    with suppress(OSError):  # a checkpoint of stock DCP has no summary
        return medium_of(path).open(path).modified(METADATA)
    return None


def load_torch_file(path: Where, weights_only: bool | None, if_trusted: str, map_location: Any = "cpu") -> Any:
    """Load a file of ``torch.save``.

    A large local file is mapped into memory, so that ranks of one node share its pages. A smaller file is read instead,
    because the kernel ends a process that reads from a mapped file after the file has shrunk.

    Args:
        weights_only: True to refuse values that only executing code from the file restores. None takes torch's default,
            which refuses them.
        if_trusted: The call that a user who trusts the file can make instead, for the message.

    Raises:
        UnsafeCheckpoint: The file has such values.
        CheckpointNotFound: The path is no regular file.
    """
    try:
        local = on_file_system(path)
        if local is None:
            with medium_of(path).open(path.parent).open(path.name) as file:
                return torch.load(file, map_location, weights_only=weights_only)
        if kind_of(path) not in ("file", ""):
            raise CheckpointNotFound(f"{path} is no regular file. Name a checkpoint.")
        mapped = zipfile.is_zipfile(local) and local.stat().st_size > _AT_ONCE
        return torch.load(local, map_location, mmap=mapped, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpoint(
            f"{path} holds something that is not loaded without executing code from the file: {_refused(error)}. "
            f"If you trust its origin: {if_trusted}."
        ) from error


def _refused(error: Exception) -> str:
    """Return the line of torch's long message that names what torch refuses."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip().partition(" Please ")[0] for line in lines if "rror:" in line), lines[0]).rstrip(".")


@contextmanager
def local_copy(
    path: Where, wanted: Callable[[str], bool] = lambda name: True, files: SourceFiles | None = None
) -> Iterator[Path]:
    """Yield a local directory with the files of a checkpoint, except those of tensors, for the duration of the block.

    For a checkpoint in a local directory it is that directory. Otherwise it is a temporary one: this rank fetches the
    files from an object store, or from a source, and compares the latter with the checksums of the save. Files that
    were copied from a store to a disk are copied to their usual names.

    Args:
        wanted: Function that selects files by their names in the checkpoint, with ``/`` between folders.
        files: The files from :meth:`dcp_plugin.checkpointer.Internals.shown`.

    Raises:
        CheckpointNotFound, CheckpointCorrupt, CheckpointUnreadable: The files cannot be fetched.
    """
    local = on_file_system(path)
    if files is None and local is not None and not _is_packed(local):
        yield local
        return
    with tempfile.TemporaryDirectory(prefix="dcp-plugin-") as root:
        with damage_in(path):
            if files is not None:
                _verify(files, path, wanted)
                copy = _fetched(files, files.all_names(), wanted, Path(root))
            else:
                copy = in_one_view(path, lambda _, opened: _fetched(opened, _names(opened, path), wanted, Path(root)))
        yield copy


def _is_packed(path: Path) -> bool:
    with suppress(OSError):
        return isinstance(unpacked(medium_of(path).open(path)), PackedFiles)
    return False


def _verify(files: SourceFiles, path: Where, wanted: Callable[[str], bool]) -> None:
    """Select for each file a node whose copy has the checksum of the save. Raises CheckpointCorrupt if no node has
    one."""
    saved = open_files(path, files).index.extra_files
    for name in filter(wanted, saved):
        while comparison_of(files, name) != saved[name]:
            with files.open(name) as file:
                file.peek(1)  # selects the node
                if not files.mark_unreliable(file):
                    raise CheckpointCorrupt(f"{files.where}/{name} is not what was saved with the checkpoint")


def _fetched(files: Readable, names: Iterable[str], wanted: Callable[[str], bool], root: Path) -> Path:
    """Return a new directory with the extra files among ``names``, which frameworks and users have added."""
    copy = Path(tempfile.mkdtemp(dir=root))  # new in each call: after a save replaces the files, a second call follows
    for name in (name for name in names if _is_extra(name) and wanted(name)):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        with files.open(name) as source, open(copy / name, "wb") as target:
            shutil.copyfileobj(source, target, _AT_ONCE)
    return copy


def _names(files: Readable, path: Where) -> set[str]:
    """Return the names of all files of a checkpoint at its path."""
    medium = snapshot(medium_of(path), path)
    folders = [path, path / f"{PACKED}{files.token}"] if isinstance(files, PackedFiles) else [path]
    return {name for folder in folders for name, _ in files_below(medium, folder)}


def _is_extra(name: str) -> bool:
    return not is_own(name.partition("/")[0]) and not name.endswith(DATA_SUFFIX)
