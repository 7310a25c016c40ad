"""What a published checkpoint says of itself without its index: its summary, its base, and the save of its files.

Stock may have saved over one of our checkpoints; our index and summary do not know of its ``.metadata``. So the summary
notes the save that our ``.metadata`` is of, and its hash. A ``.metadata`` of another save makes the directory a stock
checkpoint if it is complete without any data file of ours; otherwise files of two saves are mixed, which is damage. The
save's id at the end of the file tells which of the two it is (:func:`read_summary`). The hash tells whether it was
damaged (:func:`check_metadata`); it is compared less often, as a million items have a ``.metadata`` of 150 MB.

The rule: this module imports no torch, so that a catalogue of checkpoints needs none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BufferedReader
from typing import Any, TypeVar, cast

from dcp_plugin.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    UnsafeCheckpoint,
    damage_in,
    unreadable,
)
from dcp_plugin.format import INDEX, METADATA, SUMMARY, Files, exists, opened, read, uncommitted_reason
from dcp_plugin.format.summary import MAX_SIZE, Summary, fingerprint, sizes_listed
from dcp_plugin.media import Medium, Readable, medium_of
from dcp_plugin.media.packed import unpacked
from dcp_plugin.paths import Where

T = TypeVar("T")

_MOST_LOOKS = 50
"""How often a checkpoint is looked at again that another one replaces meanwhile: a save takes longer than a look."""
_END = 1 << 10
"""More bytes than come after the save's id in our ``.metadata``."""


class HasCome(OSError):
    """There is something now where there was nothing: look again, even if it has gone again meanwhile."""


def in_one_view(
    path: Where,
    look: Callable[[Where, Readable], T],
    find: Callable[[Where], Where] = lambda path: path,
    keep_open: bool = False,
    medium: Medium | None = None,
) -> T:
    """Return what ``look`` returns for the files at a path. Call it again if others replace them meanwhile.

    Args:
        look: Gets the path, and the files, which are all of one save. What it raises is raised if the same directory is
            still there.
        find: Where the checkpoint is that has the path.
        keep_open: What ``look`` returns closes the files.
        medium: What the path is of, where that is known.

    Raises:
        CheckpointNotFound: It was deleted while it was looked at, or replaced every time.
    """
    failure: Exception | None = None
    medium = medium or medium_of(path)
    for _ in range(_MOST_LOOKS):
        there = find(path)
        files = medium.open(there, pin=True)
        done = False
        try:
            with suppress(FileNotFoundError, NotADirectoryError):  # whoever looks finds that, too
                files = unpacked(files)
            found = look(there, files)
            done = True
            return found
        except (OSError, CheckpointError) as error:
            if there == find(path) == path and not files.moved() and not isinstance(error, HasCome):
                if failure is not None and isinstance(error, FileNotFoundError):
                    raise CheckpointNotFound(f"{path} was deleted while it was read.") from failure
                raise
            failure = error
        finally:
            if not (done and keep_open):
                files.close()
    raise CheckpointNotFound(
        f"{path} was replaced each of {_MOST_LOOKS} times that it was looked at ({failure})."
    ) from failure


def refuse_if_moved(files: Readable) -> None:
    if files.moved():
        raise CheckpointNotFound(f"{files.where} was deleted or replaced while it was read.")


def gone_or_damaged(files: Readable, what: str, error: OSError) -> CheckpointError:
    """What to raise when a file of a checkpoint that was open cannot be read: others may have deleted it."""
    if files.moved():
        return CheckpointNotFound(
            f"{files.where} was deleted or replaced while it was read: {what} ({error.strerror}). Load what is there "
            f"now; dcp_plugin.latest(root) finds the newest."
        )
    return unreadable(f"{files.where}: {what}", error)


def summary_of(files: Files) -> Summary:
    """What ``dcp_plugin.json`` says. Raises CheckpointCorrupt if it is not there or no summary."""
    with damage_in(files.where):
        return Summary.decode(read(files, SUMMARY, MAX_SIZE + 1), f"{files.where}/{SUMMARY}")


def said_base(path: Where, medium: Medium) -> dict[str, Any]:
    """What the summary of a checkpoint says of its base, if it is one of ours; else nothing."""
    files = unpacked(medium.open(path))
    return summary_of(files).base if exists(files, SUMMARY) else {}


def newest_time(medium: Medium, root: Where) -> float:
    """When the newest of the checkpoints directly below ``root`` was saved, in seconds since the epoch."""
    newest = 0.0
    for found in medium.entries(root):
        if not found.is_file:
            with suppress(CheckpointCorrupt):
                newest = max(newest, summary_of(medium.open(found.path)).time)
    return newest


def read_summary(path: Where) -> Summary | None:
    """The summary of a committed checkpoint of ours. None if it is not ours, or not any more: stock has saved there.

    Raises:
        CheckpointCorrupt: The summary is damaged; or ``.metadata`` is of another save, and not of a complete one.
    """
    with damage_in(path):
        return in_one_view(path, lambda _, files: summary_in(files))


def summary_in(files: Readable) -> Summary | None:
    """:func:`read_summary` of files that are held."""
    if not exists(files, SUMMARY):
        refuse_if_moved(files)
        return None
    summary = summary_of(files)
    if not _is_of_save(files, METADATA, summary):
        _check_that_stock_saved_over(files, summary)
        return None
    _check_views(files, summary)
    return summary


def _is_of_save(files: Files, name: str, summary: Summary) -> bool:
    """Whether a ``.metadata`` is of the save of the summary."""
    with opened(files, name) as file:
        file.seek(max(0, files.size(name) - _END))
        return summary.save_id.encode() in file.read()  # an empty id, of an earlier version, is in any file


def _check_views(files: Files, summary: Summary) -> None:
    """Check that the views are of this save. Accelerate without this package saves over them, and over nothing else."""
    for name in summary.attached if summary.save_id else ():
        view = f"{name}/{METADATA}"
        if exists(files, view) and not _is_of_save(files, view, summary):
            raise CheckpointCorrupt(
                f"{files.where}: another tool has saved over {name}, and over nothing else. Load another checkpoint. "
                f"What the other tool saved is a checkpoint without {METADATA}, {INDEX} and {SUMMARY}."
            )


def _check_that_stock_saved_over(files: Readable, summary: Summary) -> None:
    """Check that ``.metadata``, which is not ours, is of a complete checkpoint of stock's.

    Stock writes ``.metadata`` last: when it is there, no data file that it names is ours any more. A file that stock
    has written under the name of one of ours has another size: our items are padded to 64 bytes, and stock's are not.
    """
    # These need torch, and few checkpoints come here.
    from dcp_plugin.format import index_file, stock_metadata

    index = index_file.decode(read(files, INDEX), summary.index_sha256, f"{files.where}/{INDEX}")
    try:
        saved = stock_metadata.decode(read(files, METADATA), f"{files.where}/{METADATA}")
        found = stock_metadata.index_of(saved, files).files
    except (CheckpointCorrupt, UnsafeCheckpoint) as error:
        raise _mixed(files, str(error)) from error
    ours = [name for name, size in found.items() if index.files.get(name) == size]
    if ours:
        raise _mixed(files, f"it names {ours[0]}, which is still the data file that {INDEX} describes")
    if saved.save_id in ("", summary.save_id):
        raise _mixed(files, "it has no save_id of its own")


def check_metadata(files: Readable, summary: Summary) -> None:
    """Check that our ``.metadata`` is the one that was saved, to the last byte. Raises CheckpointCorrupt."""
    if not summary.metadata_sha256:  # of an earlier version
        return
    with opened(files, METADATA) as file:
        found = hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()
    if found != summary.metadata_sha256:
        raise _mixed(files, "it is of the same save, but was changed")


def _mixed(files: Files, reason: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{files.where}: {METADATA} is not the one that was saved with {INDEX}, and no other save has replaced "
        f"the whole checkpoint: {reason}. Load another checkpoint. If you trust this {METADATA}, delete "
        f"{INDEX} and {SUMMARY}: then the directory is a stock checkpoint."
    )


def check_complete(path: Where) -> None:
    """Check that a checkpoint is published and that its files are those of its save; compare sizes of data files alone.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: It cannot be loaded.
    """
    medium = medium_of(path)
    with damage_in(path):
        is_ours = in_one_view(path, lambda _, files: _is_ours_and_complete(files), medium.locate, medium=medium)
    if not is_ours:
        from dcp_plugin.storage.open import open_alone  # other tools' tables of contents need torch

        open_alone(path, check=True).close()


def _is_ours_and_complete(files: Readable) -> bool:
    try:
        names = [name.rstrip("/") for name in files.names()]
    except OSError:
        return False
    if uncommitted_reason(names) or INDEX not in names or (summary := summary_in(files)) is None:
        return False
    try:
        check_metadata(files, summary)
    except CheckpointCorrupt:
        refuse_if_moved(files)
        raise
    check_own_files(files, summary)
    return True


def check_own_files(files: Readable, summary: Summary) -> None:
    """Check that the index is the one that was saved, and that the data files in it are there and have their sizes.

    Raises:
        CheckpointCorrupt: Naming the file.
        NewerFormat: The index is of a later version.
    """
    where, data = f"{files.where}/{INDEX}", read(files, INDEX)
    is_saved_one = fingerprint(data) == summary.index_sha256
    try:
        sizes = sizes_listed(data, where)
    except CheckpointCorrupt:
        if is_saved_one:
            raise
    if not is_saved_one:
        raise CheckpointCorrupt(f"{where} is not the index that was saved (its SHA-256 differs)")
    check_sizes(files, sizes, sizes)


def check_sizes(files: Readable, sizes: dict[str, int], names: Iterable[str], links: bool = False) -> None:
    """Check that these data files are there, inside of the checkpoint, and of the size that the index says.

    Args:
        links: They may be links that lead elsewhere.

    Raises:
        CheckpointCorrupt: Naming the file.
    """
    for name in names:
        try:
            found = files.size(name)
        except OSError as error:
            raise gone_or_damaged(files, f"data file {name[:200]} is missing", error) from error
        if not links and files.leads_elsewhere(name):
            raise CheckpointCorrupt(f"{files.where}: {name} is a link that leaves the checkpoint")
        if found < sizes[name]:
            raise CheckpointCorrupt(f"{files.where}: {name} is truncated: {found} of {sizes[name]} bytes")
        if found > sizes[name]:
            raise CheckpointCorrupt(
                f"{files.where}: {name} has {found} bytes, and had {sizes[name]} when it was saved: something, perhaps "
                f"a save of another tool, has written to it since"
            )
