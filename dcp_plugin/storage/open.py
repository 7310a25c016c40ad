"""What is at a path, whoever wrote it: the index, and what else a load needs to know of it.

Our index and summary say nothing of a ``.metadata`` that stock has saved beside them since. So the summary names the
save that its ``.metadata`` is of, and its hash. A ``.metadata`` of another save makes the directory a checkpoint of
stock's if it is whole without any data file of ours; otherwise files of two saves are mixed, and that is damage. The
save's id, at the end of the file, tells which of the two it is (:func:`read_summary`). The hash, for which all of it is
read, tells whether it was damaged (:meth:`Opened.check_files`); a million items have a ``.metadata`` of 150 MB.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dcp_plugin.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointMismatch,
    CheckpointNotFound,
    UnsafeCheckpoint,
)
from dcp_plugin.format import stock_metadata
from dcp_plugin.format.foreign import dcp_folder, detect
from dcp_plugin.format.foreign.contents import fingerprint_of
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.index_file import check_files
from dcp_plugin.format.summary import Base, Summary, fingerprint
from dcp_plugin.media.disk import commit, posix

_END = 1 << 10
"""More bytes than come after the save's id in our ``.metadata``."""


@dataclass(frozen=True)
class Opened:
    """An open checkpoint."""

    path: Path
    """Where it is: a directory, or a file of another tool."""
    directory: Path
    """What the files of the index are relative to."""
    index: CheckpointIndex
    fingerprint: str
    """Equal for the same checkpoint, wherever it is."""
    format: str
    """As :class:`~dcp_plugin.types.CheckpointInfo` has it."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Which names are a ``module`` and which an ``optimizer``, as far as the checkpoint tells."""
    summary: Summary | None = None
    """Of our own checkpoints only."""
    links: bool = False
    """Whether its files may be links that lead elsewhere: only among those that no index of ours lists."""
    base: Opened | None = None
    """The checkpoint that has what this one leaves out; its files are in the index, with their whole paths."""

    def check_files(self, names: Iterable[str] | None = None) -> None:
        """Check that these data files, or all, are there, in their directories, and of the size that they had.

        With all of them, also that our ``.metadata`` is the one that was saved, to the last byte.

        Raises:
            CheckpointCorrupt: Naming the file.
        """
        if names is None and self.summary is not None:
            _check_metadata(self.path, self.summary)
        names = list(self.index.files if names is None else names)
        below = f"{self.base.directory}/" if self.base else ""
        mine = [name for name in names if not below or not name.startswith(below)]
        check_files(self.directory, self.index.files, mine, self.links)
        if self.base:
            self.base.check_files([name.removeprefix(below) for name in names if name.startswith(below)])


def open_checkpoint(path: Path, base: Path | None = None) -> Opened:
    """Read and validate the table of contents; of a checkpoint that leaves out what a base has, together with that.

    Args:
        base: Where the base is, if it was moved.

    Raises:
        CheckpointNotFound: There is nothing that we know; the message lists what was looked for. Or it is the base
            that is not there.
        CheckpointIncomplete, CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: It cannot be read.
    """
    return completed(open_alone(path), base)


def completed(opened: Opened, base: Path | None) -> Opened:
    """The checkpoint together with its base, if it has one.

    Raises:
        CheckpointNotFound: The base is not there.
        CheckpointMismatch: What is there is not the base.
    """
    left_out = opened.index.left_out
    if not left_out:
        return opened
    said = Base.of_summary(opened.summary.base if opened.summary else {}, opened.path)
    found = _find_base(opened, said, base)
    lost = [there for there in left_out.values() if there not in found.index]
    if lost:
        raise CheckpointMismatch(f"{found.path} has no {lost[0]}, which {opened.path} leaves out because of it")
    added = found.index.selected(left_out, {}, below=str(found.directory))
    return replace(opened, index=opened.index.with_added(added), base=found)


def _find_base(opened: Opened, said: Base, moved: Path | None) -> Opened:
    """The base, where it is said to be: by the caller, by the checkpoint, or in the same place seen from there."""
    others = []
    for place in [moved] if moved else [said.path, opened.path / said.relative]:
        try:
            found = open_alone(Path(os.path.realpath(place)))
        except (CheckpointNotFound, OSError, ValueError):  # no name of a file at all
            continue
        if found.fingerprint == said.fingerprint:
            return found
        others.append(found)
    what = f"{opened.path} leaves out {len(opened.index.left_out)} frozen tensors that its base has"
    if others:
        raise CheckpointMismatch(
            f"{what}; {others[0].path} is not that base: its fingerprint is {others[0].fingerprint[:12]} and that of "
            f"the base {said.fingerprint[:12]}, which was {said.path}. Name the right one: base=PATH."
        )
    raise CheckpointNotFound(f"{what}, and {moved or said.path} is not there. If it was moved, name it: base=PATH.")


def open_alone(path: Path) -> Opened:
    """:func:`open_checkpoint` without what a base would add."""
    path = commit.locate(path)
    reason = commit.uncommitted_reason(path)
    if reason and commit.looks_like_checkpoint(path):
        raise CheckpointIncomplete(
            f"{path} is not a checkpoint: {reason}. dcp_plugin.latest(root) finds the newest good one."
        )
    if reason:
        return _open_foreign(path, reason)
    if (path / commit.INDEX).exists():
        summary = read_summary(path)
        if summary is not None:
            index = CheckpointIndex.read(path / commit.INDEX, summary.index_sha256)
            return Opened(path, path, index, summary.index_sha256, "dcp_plugin", summary.kinds, summary)
    if dcp_folder.is_of_accelerate(path) and (path.parent / commit.INDEX).exists():
        return open_alone(path.parent)  # a view of ours, which names the files of the checkpoint above it
    said = fingerprint(stock_metadata.read_bytes(path))
    if dcp_folder.is_of_lightning(path):
        index, kinds = dcp_folder.lightning_index(path)
        return Opened(path, path, index, said, "lightning", kinds)
    return Opened(path, path, stock_metadata.read_index(path), said, "stock")


def read_summary(path: Path) -> Summary | None:
    """The summary of a committed checkpoint of ours. None if it is not ours, or not any more: stock has saved there.

    Raises:
        CheckpointCorrupt: The summary is damaged; or ``.metadata`` is another one, and no whole checkpoint of stock's.
    """
    if not (path / commit.SUMMARY).exists():
        return None
    summary = Summary.read(path / commit.SUMMARY)
    try:  # an empty id, of an earlier version, is in any file
        ours = summary.save_id.encode() in posix.read_end(path / commit.METADATA, _END)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not ours:
        _check_that_stock_saved_over(path, summary)
        return None
    _check_views(path, summary)
    return summary


def _check_views(path: Path, summary: Summary) -> None:
    """Check that the views are of this save. Accelerate without this package saves over them, and over nothing else."""
    for name in summary.attached if summary.save_id else ():
        file = path / name / commit.METADATA
        if file.is_file() and summary.save_id.encode() not in posix.read_end(file, _END):
            raise CheckpointCorrupt(
                f"{path}: another tool has saved over {name}, and over nothing else. Load another checkpoint. What the "
                f"other tool saved is a checkpoint without {commit.METADATA}, {commit.INDEX} and {commit.SUMMARY}."
            )


def _check_that_stock_saved_over(path: Path, summary: Summary) -> None:
    """Check that ``.metadata``, which is not ours, is of a whole checkpoint of stock's.

    Stock writes ``.metadata`` last: when it is there, no data file that it names is ours any more. A file that stock
    has written under the name of one of ours has another size: our items are padded to 64 bytes, and stock's are not.
    """
    index = CheckpointIndex.read(path / commit.INDEX, summary.index_sha256)
    try:
        metadata = stock_metadata.read_metadata(path)
        found = stock_metadata.index_of(metadata, path).files
    except (CheckpointCorrupt, UnsafeCheckpoint) as error:
        raise _mixed(path, str(error)) from error
    still_ours = [name for name, size in found.items() if index.files.get(name) == size]
    if still_ours:
        raise _mixed(path, f"it names {still_ours[0]}, which is still the data file that {commit.INDEX} describes")
    if stock_metadata.save_id_of(metadata) in ("", summary.save_id):
        raise _mixed(path, "it has no save_id of its own")


def _check_metadata(path: Path, summary: Summary) -> None:
    if not summary.metadata_sha256:  # of an earlier version
        return
    try:
        found = posix.sha256_of(path / commit.METADATA)
    except OSError as error:
        raise _unreadable(path, error) from error
    if found != summary.metadata_sha256:
        raise _mixed(path, "it is of the same save, but was changed")


def _unreadable(path: Path, error: OSError) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{path / commit.METADATA} cannot be read: {error.strerror}")


def _mixed(path: Path, reason: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{path}: {commit.METADATA} is not the one that was saved with {commit.INDEX}, and no other save has replaced "
        f"the whole checkpoint: {reason}. Load another checkpoint. If you trust this {commit.METADATA}, delete "
        f"{commit.INDEX} and {commit.SUMMARY}: then the directory is a stock checkpoint."
    )


def _open_foreign(path: Path, reason: str) -> Opened:
    folders = dcp_folder.accelerate_folders(path) if path.is_dir() else []
    if folders:
        index, kinds = dcp_folder.accelerate_index(path, folders)
        said = fingerprint(b"".join(stock_metadata.read_bytes(path / folder) for folder in folders))
        return Opened(path, path, index, said, "accelerate", kinds)
    directory, contents = detect.read(path, reason)
    index = contents.index(directory)
    said = fingerprint_of(directory, contents)
    return Opened(path, directory, index, said, contents.format, contents.kinds, links=True)
