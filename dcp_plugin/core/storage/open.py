"""Opening of the checkpoint at a path, whichever tool wrote it: the index, and the other facts that a load needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointIncomplete, damage_in
from dcp_plugin.core.format import (
    INDEX,
    MOST_TABLE,
    SUMMARY,
    has_lost_a_table,
    has_traces,
    index_file,
    read,
    uncommitted_reason,
)
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.format.summary import MAX_SIZE, Summary
from dcp_plugin.core.interrupts import collector_paused
from dcp_plugin.core.media import Readable, locate, medium_of
from dcp_plugin.core.media import uncommitted_reason as reason_at
from dcp_plugin.core.paths import Where
from dcp_plugin.core.records import OpenCheckpoint
from dcp_plugin.core.storage.published import (
    HasCome,
    check_metadata,
    check_sizes,
    in_one_view,
    refuse_if_moved,
    summary_in,
)

T = TypeVar("T")


def check_files(opened: OpenCheckpoint, names: Iterable[str] | None = None) -> None:
    """Check that these data files, or all, are in their directories and have the sizes of the save.

    With all data files, check also that our ``.metadata`` is the saved file, to the last byte.

    Raises:
        CheckpointCorrupt: A check failed; the message names the file.
        CheckpointNotFound: The checkpoint was deleted or replaced since it was opened.
    """
    if names is None and opened.summary is not None:
        check_metadata(opened.files, opened.summary)
    with damage_in(opened.path):
        check_sizes(opened.files, opened.index.files, opened.index.files if names is None else names, opened.links)


def open_checkpoint(path: Where, check: bool = False, salvage: bool = False) -> OpenCheckpoint:
    """Read and validate the table of contents.

    Args:
        check: Call :func:`check_files`.
        salvage: Open a checkpoint that has lost one of our two tables as one of stock DCP, without checksums.

    Returns:
        The open checkpoint, which the caller has to close.

    Raises:
        CheckpointNotFound: The path has no known checkpoint, and the message lists the names that were looked for. Or
            the checkpoint was deleted meanwhile.
        CheckpointIncomplete, CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: It cannot be read.
    """

    def look(location: Where, files: Readable) -> OpenCheckpoint:
        opened = _open_held(location, files, salvage)
        try:
            if opened.summary is None:  # the remains of one of ours under deletion may look like another tool's
                refuse_if_moved(files)
            if check:
                check_files(opened)
        except BaseException:
            opened.close()
            raise
        return opened

    medium = medium_of(path)  # outside the block: options that the store refuses are no damage
    with damage_in(path), collector_paused():
        return in_one_view(path, look, locate, keep_open=True, medium=medium)


def open_files(path: Where, files: Readable) -> OpenCheckpoint:
    """Open the files of a checkpoint of ours, from any medium, as :func:`open_checkpoint`; messages name ``path``.

    Raises:
        CheckpointCorrupt, CheckpointNotFound: As :func:`open_checkpoint`.
    """
    with damage_in(path), collector_paused():
        summary = _trusted(files, SUMMARY, MAX_SIZE + 1, lambda data: Summary.decode(data, f"{files.where}/{SUMMARY}"))
        index = _trusted(files, INDEX, MOST_TABLE + 1, lambda data: _decoded(data, files, summary))
        return OpenCheckpoint(path, files, index, summary.index_sha256, "dcp_plugin", summary.kinds, summary)


def _trusted(files: Readable, name: str, most: int, decode: Callable[[bytes], T]) -> T:
    """Return the contents of a table, from the first source of the file that has a valid one.

    Args:
        most: Bytes of the file that are read. ``decode`` refuses a longer table.
    """
    while True:
        with damage_in(f"{files.where}/{name}"), files.open(name) as file:
            try:
                return decode(file.read(min(files.size(name), most)))
            except CheckpointCorrupt:
                if not files.mark_unreliable(file):
                    raise


def _open_held(path: Where, files: Readable, salvage: bool) -> OpenCheckpoint:
    """Open the files of a directory, or the file at a path that is no directory."""
    try:
        names = [name.rstrip("/") for name in files.names()]
        reason = uncommitted_reason(names)
    except OSError:
        names, reason = [], reason_at(path)
        if not reason:
            raise HasCome(f"{path} has just come") from None
    if salvage and has_lost_a_table(names):
        reason = ""
    elif reason and has_traces(names):
        raise CheckpointIncomplete(
            f"{path} is not a checkpoint: {reason}. dcp_plugin.latest(root) finds the newest good one."
        )
    if not reason and {INDEX, SUMMARY} <= {*names} and (summary := summary_in(files)) is not None:
        index = _decoded(read(files, INDEX), files, summary)
        return OpenCheckpoint(path, files, index, summary.index_sha256, "dcp_plugin", summary.kinds, summary)
    from dcp_plugin.core.storage import open_foreign  # most loads are of our checkpoints and do not need it

    if not reason and open_foreign.is_view_of_ours(path):
        files.close()
        return open_checkpoint(path.parent)
    return open_foreign.open_foreign(path, files, reason)


def _decoded(data: bytes, files: Readable, summary: Summary) -> CheckpointIndex:
    return index_file.decode(data, summary.index_sha256, f"{files.where}/{INDEX}")
