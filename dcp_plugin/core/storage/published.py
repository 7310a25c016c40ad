"""Facts about a published checkpoint that need no index.

They are its summary, the save that its files belong to, and comparisons of its extra files.

Stock may have saved over one of our checkpoints; our index and summary do not know of its ``.metadata``. So the summary
records the save of our ``.metadata``, and its hash. A ``.metadata`` of another save makes the directory a stock
checkpoint if it is complete without any data file of ours; otherwise the files of two saves are mixed, which is damage.
The save's id at the end of the file distinguishes the two cases (:func:`read_summary`). The hash detects damage
(:func:`check_metadata`); it is compared less often, because a million items have a ``.metadata`` of 150 MB.

The rule: this module imports no torch, so that a catalogue of checkpoints needs none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from io import BufferedReader
from typing import TypeVar, cast

from xxhash import xxh3_64_hexdigest

from dcp_plugin.core.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    UnsafeCheckpoint,
    damage_in,
    unreadable,
)
from dcp_plugin.core.format import (
    DATA_SUFFIX,
    INDEX,
    METADATA,
    SUMMARY,
    Files,
    exists,
    opened,
    read,
    uncommitted_reason,
)
from dcp_plugin.core.format.summary import MAX_SIZE, Summary, fingerprint, sizes_listed
from dcp_plugin.core.media import Medium, Readable, files_below, locate, medium_of, unpacked
from dcp_plugin.core.paths import Where

T = TypeVar("T")

_MOST_LOOKS = 50
"""Attempts to read a checkpoint that saves replace meanwhile: a save takes longer than an attempt."""
_END = 1 << 10
"""Bytes that exceed the length after the save's id in our ``.metadata``."""
MOST_HASHED = 64 << 20
"""Largest extra file, in bytes, that a save hashes: the save waits for the hash."""
BYTES = " bytes"


class HasCome(OSError):
    """Error for a path that exists now but did not before: read it again, even if it has disappeared meanwhile."""


def in_one_view(
    path: Where,
    look: Callable[[Where, Readable], T],
    find: Callable[[Where], Where] = lambda path: path,
    keep_open: bool = False,
    medium: Medium | None = None,
) -> T:
    """Return the result of ``look`` for the files at a path. Call it again if another process replaces them meanwhile.

    Args:
        look: Function of the path and its files, which are all of one save. Its exception is raised if the same
            directory still exists.
        find: Function that returns where the checkpoint of the path is stored.
        keep_open: Leave the files open: the result of ``look`` closes them.
        medium: The medium of the path, if the caller knows it.

    Raises:
        CheckpointNotFound: It was deleted during the call, or replaced at every attempt.
    """
    failure: Exception | None = None
    medium = medium or medium_of(path)
    for _ in range(_MOST_LOOKS):
        location = find(path)
        files = medium.open(location, pin=True)
        done = False
        try:
            with suppress(FileNotFoundError, NotADirectoryError):  # look() meets the same error and reports it
                files = unpacked(files)
            result = look(location, files)
            done = True
            return result
        except (OSError, CheckpointError) as error:
            if location == find(path) and not files.moved() and not isinstance(error, HasCome):
                if failure is not None and isinstance(error, FileNotFoundError):
                    raise CheckpointNotFound(f"{path} was deleted while it was read.") from failure
                raise
            failure = error
        finally:
            if not (done and keep_open):
                files.close()
    raise CheckpointNotFound(
        f"{path} was replaced during each of {_MOST_LOOKS} attempts to open it ({failure})."
    ) from failure


def refuse_if_moved(files: Readable) -> None:
    if files.moved():
        raise CheckpointNotFound(f"{files.where} was deleted or replaced while it was read.")


def gone_or_damaged(files: Readable, what: str, error: OSError) -> CheckpointError:
    """Return the error for an unreadable file of an open checkpoint: another process may have deleted it."""
    if files.moved():
        return CheckpointNotFound(
            f"{files.where} was deleted or replaced while it was read: {what} ({error.strerror}). Load it again if it "
            f"was replaced; dcp_plugin.latest(root) finds the newest checkpoint."
        )
    return unreadable(f"{files.where}: {what}", error)


def summary_of(files: Files) -> Summary:
    """Return the content of ``dcp_plugin.json``. Raises CheckpointCorrupt if it is missing or no summary."""
    with damage_in(files.where):
        return Summary.decode(read(files, SUMMARY, MAX_SIZE + 1), f"{files.where}/{SUMMARY}")


_MOST_TIMES = 1 << 12
_times: dict[tuple[Where, int, float], float] = {}
"""Recorded times of our checkpoints by path, number of the directory, and time of its last change."""


def newest_time(medium: Medium, root: Where) -> float:
    """Return the greatest recorded time of the checkpoints directly below ``root``, in seconds since the epoch. A
    checkpoint of stock counts with the time of its files.

    Every save calls this while all ranks wait. On a disk it reads each summary once: of the others it takes a stat.
    """
    newest = 0.0
    for entry in medium.entries(root):
        if not entry.is_file:
            with suppress(CheckpointCorrupt, OSError):
                newest = max(newest, _time_of(medium.open(entry.path), entry.path, entry.number))
    return newest


def _time_of(files: Readable, path: Where, number: int) -> float:
    """Return the recorded time of a checkpoint, or that of the last change if the directory has no summary."""
    directory = (path, number, files.modified("")) if number else None  # a store does not number its folders
    if directory in _times:
        return _times[directory]
    files = unpacked(files)
    if not exists(files, SUMMARY):
        return files.modified("")
    time = summary_of(files).time
    if directory is not None:
        if len(_times) >= _MOST_TIMES:  # in a long run nearly all are of deleted checkpoints
            _times.clear()
        _times[directory] = time
    return time


def read_summary(path: Where) -> Summary | None:
    """Return the summary of a committed checkpoint of ours. None if it is not ours, or stock has since saved over it.

    Raises:
        CheckpointCorrupt: The summary is damaged; or ``.metadata`` is of another save, which is incomplete.
    """
    with damage_in(path):
        return in_one_view(path, lambda _, files: summary_in(files))


def summary_if_readable(path: Where) -> Summary | None:
    """Return :func:`read_summary`; None as well if it cannot be read or is damaged."""
    with suppress(CheckpointError, OSError):
        return read_summary(path)
    return None


def summary_in(files: Readable) -> Summary | None:
    """Return the summary in pinned files, as :func:`read_summary`."""
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
    """Return whether a ``.metadata`` is of the save of the summary."""
    with opened(files, name) as file:
        file.seek(max(0, files.size(name) - _END))
        return summary.save_id.encode() in file.read()


def _check_views(files: Files, summary: Summary) -> None:
    """Check that the views are of this save. Accelerate without this package overwrites only the views."""
    for name in summary.attached:
        view = f"{name}/{METADATA}"
        if exists(files, view) and not _is_of_save(files, view, summary):
            raise CheckpointCorrupt(
                f"{files.where}: another tool has saved over {name}, but not over the rest of the checkpoint. Load "
                f"another checkpoint. Without {METADATA}, {INDEX} and {SUMMARY}, the directory is the checkpoint of "
                f"the other tool."
            )


def _check_that_stock_saved_over(files: Readable, summary: Summary) -> None:
    """Check that a ``.metadata`` of another save is of a complete stock checkpoint.

    Stock writes ``.metadata`` last: after that, no data file that it names is ours. A file that stock has written under
    the name of one of ours has another size: our items are padded to 64 bytes, and stock's are not.
    """
    # Imported here because they need torch, and few checkpoints reach this point.
    from dcp_plugin.core.format import index_file, stock_metadata

    index = index_file.decode(read(files, INDEX), summary.index_sha256, f"{files.where}/{INDEX}")
    try:
        saved = stock_metadata.decode(read(files, METADATA), f"{files.where}/{METADATA}")
        sizes = stock_metadata.index_of(saved, files).files
    except (CheckpointCorrupt, UnsafeCheckpoint) as error:
        raise _mixed(files, str(error)) from error
    ours = [name for name, size in sizes.items() if index.files.get(name) == size]
    if ours:
        raise _mixed(files, f"{METADATA} names {ours[0]}, which is still the data file that {INDEX} describes")
    if saved.save_id in ("", summary.save_id):
        raise _mixed(files, f"{METADATA} has no save_id, or that of this save")


def check_metadata(files: Readable, summary: Summary) -> None:
    """Check that our ``.metadata`` is the saved one, to the last byte.

    Raises:
        CheckpointCorrupt: It is another one.
        CheckpointNotFound: The checkpoint was deleted or replaced since it was opened.
    """
    try:
        with opened(files, METADATA) as file:
            digest = hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()
        if digest != summary.metadata_sha256:
            raise _mixed(files, f"{METADATA} is of the same save, but was changed")
    except CheckpointCorrupt:
        refuse_if_moved(files)
        raise


def _mixed(files: Files, reason: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{files.where}: {METADATA} is not the one that was saved with {INDEX}, and no stock save has replaced the "
        f"whole checkpoint: {reason}. Load another checkpoint. If you trust this {METADATA}, delete {INDEX} and "
        f"{SUMMARY}: then the directory is a stock checkpoint."
    )


def check_if_ours(path: Where) -> bool:
    """Check that the files of a checkpoint of this package are those of its save; of data files, compare only the
    sizes.

    Returns:
        False if no such checkpoint is published at the path. Then nothing was checked.

    Raises:
        CheckpointNotFound, CheckpointCorrupt, UnsafeCheckpoint: It cannot be loaded.
    """
    medium = medium_of(path)
    with damage_in(path):
        return in_one_view(path, lambda _, files: _check_if_ours(files), locate, medium=medium)


def _check_if_ours(files: Readable) -> bool:
    try:
        names = [name.rstrip("/") for name in files.names()]
    except OSError:
        return False
    if uncommitted_reason(names) or INDEX not in names or (summary := summary_in(files)) is None:
        return False
    check_metadata(files, summary)
    check_own_files(files, summary)
    return True


def check_own_files(files: Readable, summary: Summary) -> None:
    """Check that the index is the saved one, and that its data files exist and have their sizes.

    Raises:
        CheckpointCorrupt: A check failed; the message names the file.
        OtherFormat: The index is of another version.
    """
    path, data = f"{files.where}/{INDEX}", read(files, INDEX)
    is_saved_one = fingerprint(data) == summary.index_sha256
    try:
        sizes = sizes_listed(data, path)
    except CheckpointCorrupt:
        if is_saved_one:
            raise
    if not is_saved_one:
        raise CheckpointCorrupt(f"{path} is not the index that was saved (its SHA-256 differs)")
    check_sizes(files, sizes, sizes)


def check_sizes(files: Readable, sizes: dict[str, int], names: Iterable[str], links: bool = False) -> None:
    """Check that these data files exist, inside the checkpoint, with the sizes in the index.

    Args:
        links: Accept links to other places.

    Raises:
        CheckpointCorrupt: A check failed; the message names the file.
    """
    for name in names:
        try:
            size = files.size(name)
        except OSError as error:
            raise gone_or_damaged(files, f"data file {name[:200]} is missing", error) from error
        if not links and files.leads_elsewhere(name):
            raise CheckpointCorrupt(f"{files.where}: {name} is a link to a place outside the checkpoint")
        if size < sizes[name]:
            raise CheckpointCorrupt(f"{files.where}: {name} is truncated: {size} of {sizes[name]} bytes")
        if size > sizes[name]:
            raise CheckpointCorrupt(
                f"{files.where}: {name} has {size} bytes, and had {sizes[name]} when it was saved. A program has "
                f"written to it since, perhaps a save of another tool."
            )


def comparisons_below(medium: Medium, directory: Where) -> dict[str, str]:
    """Return a comparison for each extra file of a save in flight, by name. Raises OSError.

    The comparison is the file's XXH3-64, or the size of a file that would take long to hash. Links and entries that
    are no files are left out.
    """
    files, below = medium.open(directory), files_below(medium, directory)
    names = [name for name, entry in below if entry.is_file and ("/" in name or not name.endswith(DATA_SUFFIX))]
    return {name: comparison_of(files, name) for name in names}


def hash_of(data: bytes) -> str:
    return xxh3_64_hexdigest(data)


def sizes_only(comparisons: Mapping[str, str]) -> list[str]:
    """Return the files of which only the size is compared."""
    return [name for name, comparison in comparisons.items() if comparison.endswith(BYTES)]


def comparison_of(files: Files, name: str) -> str:
    """Return the comparison of one file, as in :func:`comparisons_below`."""
    with files.open(name) as file:
        size = files.size(name)
        return hash_of(file.read()) if size <= MOST_HASHED else f"{size}{BYTES}"
