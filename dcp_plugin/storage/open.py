"""What is at a path, whoever wrote it: the index, and what else a load needs to know.

Stock may have saved over one of our checkpoints; our index and summary do not know of its ``.metadata``. So the summary
notes the save that our ``.metadata`` is of, and its hash. A ``.metadata`` of another save makes the directory a stock
checkpoint if it is complete without any data file of ours; otherwise files of two saves are mixed, which is damage. The
save's id at the end of the file tells which of the two it is (:func:`read_summary`). The hash tells whether it was
damaged (:func:`check_files`); it is compared less often, as a million items have a ``.metadata`` of 150 MB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BufferedReader
from typing import Any, TypeVar, cast

from dcp_plugin.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMismatch,
    CheckpointNotFound,
    UnsafeCheckpoint,
    damage_in,
    unreadable,
)
from dcp_plugin.format import (
    INDEX,
    METADATA,
    SUMMARY,
    Files,
    exists,
    has_traces,
    index_file,
    is_own,
    opened,
    read,
    stock_metadata,
    uncommitted_reason,
)
from dcp_plugin.format.foreign import Contents, detect, fingerprint_of, frameworks
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.summary import MAX_SIZE, Base, Summary, fingerprint
from dcp_plugin.media import Medium, RangedFile, Readable, medium_of
from dcp_plugin.media.packed import unpacked
from dcp_plugin.paths import ObjectPath, Where, as_path, resolved
from dcp_plugin.records import OpenCheckpoint
from dcp_plugin.tensors.host_memory import collector_paused

T = TypeVar("T")

_MOST_LOOKS = 50
"""How often a checkpoint is looked at again that another one replaces meanwhile: a save takes longer than a look."""
_MOST_LISTED = 1000
"""Entries of a directory that are looked at for a hint."""
_END = 1 << 10
"""More bytes than come after the save's id in our ``.metadata``."""


def check_files(opened: OpenCheckpoint, names: Iterable[str] | None = None) -> None:
    """Check that these data files, or all, are in their directories and have the size that they had at the save.

    With all of them, check also that our ``.metadata`` is the saved file, to the last byte.

    Raises:
        CheckpointCorrupt: Naming the file.
        CheckpointNotFound: The checkpoint was deleted or replaced since it was opened.
    """
    if names is None and opened.summary is not None:
        try:
            _check_metadata(opened.files, opened.summary)
        except CheckpointCorrupt:
            _refuse_if_moved(opened.files)
            raise
    names = list(opened.index.files if names is None else names)
    below = f"{opened.base.files.where}/" if opened.base else ""
    mine = [name for name in names if not below or not name.startswith(below)]
    with damage_in(opened.path):
        check_sizes(opened.files, opened.index.files, mine, opened.links)
    if opened.base:
        check_files(opened.base, [name.removeprefix(below) for name in names if name.startswith(below)])


class _HasCome(OSError):
    """There is something now where there was nothing: look again, even if it has gone again meanwhile."""


def in_one_view(
    path: Where,
    look: Callable[[Where, Readable], T],
    find: Callable[[Where], Where] = lambda path: path,
    keep_open: bool = False,
    medium: Medium | None = None,
) -> T:
    """What ``look`` finds in the files of what is at a path; again if something else takes its place meanwhile.

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
        files = medium.hold(there)
        done = False
        try:
            with suppress(FileNotFoundError, NotADirectoryError):  # whoever looks finds that, too
                files = unpacked(files)
            found = look(there, files)
            done = True
            return found
        except (OSError, CheckpointError) as error:
            if there == find(path) == path and not files.moved() and not isinstance(error, _HasCome):
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


def _refuse_if_moved(files: Readable) -> None:
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


def open_checkpoint(path: Where, base: Where | None = None, check: bool = False) -> OpenCheckpoint:
    """Read and validate the table of contents; of a checkpoint that leaves out what a base has, together with that.

    Args:
        base: Where the base is, if it was moved.
        check: See :meth:`OpenCheckpoint.check_files`.

    Returns:
        What has to be closed.

    Raises:
        CheckpointNotFound: There is nothing that we know; the message lists what was looked for. Or it is the base
            that is not there, or was deleted meanwhile.
        CheckpointIncomplete, CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: It cannot be read.
    """
    return _open(path, lambda opened: completed(opened, base), check)


def open_files(path: Where, files: Readable, base: Where | None = None) -> OpenCheckpoint:
    """:func:`open_checkpoint` of files that are held: of a checkpoint of ours, called by ``path``, wherever they are.

    Raises:
        CheckpointCorrupt, CheckpointNotFound, CheckpointMismatch: As there.
    """
    with damage_in(path), collector_paused():
        while True:
            try:
                summary = summary_of(files)
                opened = OpenCheckpoint(
                    path, files, _own_index(files, summary), summary.index_sha256, "dcp_plugin", summary.kinds, summary
                )
                break
            except CheckpointCorrupt:
                if not _elsewhere(files):
                    raise
        return completed(opened, base)


def _elsewhere(files: Readable) -> bool:
    """Whether one of the files that say what a checkpoint is can be read from another place."""
    expected = None
    for name in (SUMMARY, INDEX):
        with suppress(OSError), files.open(name) as file:
            data = file.read()
            try:
                found = Summary.decode(data, name).index_sha256 if name == SUMMARY else fingerprint(data)
            except CheckpointCorrupt:
                return files.distrust(file)
            if expected not in (None, found):
                return files.distrust(file)
            expected = found
    return False


def open_alone(path: Where, check: bool = False) -> OpenCheckpoint:
    """:func:`open_checkpoint` without what a base would add."""
    return _open(path, lambda opened: opened, check)


def _open(path: Where, complete: Callable[[OpenCheckpoint], OpenCheckpoint], check: bool) -> OpenCheckpoint:
    def look(there: Where, files: Readable) -> OpenCheckpoint:
        opened = complete(_open_held(there, files))
        try:
            if opened.summary is None:  # the rest of one of ours that is being deleted may look like something else
                _refuse_if_moved(files)
            if check:
                check_files(opened)
        except BaseException:
            opened.close()
            raise
        return opened

    medium = medium_of(path)
    with damage_in(path), collector_paused():
        return in_one_view(path, look, medium.locate, keep_open=True, medium=medium)


@dataclass(frozen=True)
class _WithBase:
    """The files of a checkpoint, and those of its base under their full paths."""

    own: Readable
    base: Readable

    @property
    def where(self) -> str:
        return self.own.where

    @property
    def streams(self) -> int:
        return max(self.own.streams, self.base.streams)

    @property
    def gap(self) -> int:
        return max(self.own.gap, self.base.gap)

    def _of(self, name: str) -> tuple[Readable, str]:
        below = f"{self.base.where}/"
        return (self.base, name.removeprefix(below)) if name.startswith(below) else (self.own, name)

    def names(self) -> list[str]:
        return self.own.names()

    def size(self, name: str) -> int:
        files, name = self._of(name)
        return files.size(name)

    def modified(self, name: str) -> float:
        files, name = self._of(name)
        return files.modified(name)

    def open(self, name: str) -> RangedFile:
        files, name = self._of(name)
        return files.open(name)

    def leads_elsewhere(self, name: str) -> bool:
        files, name = self._of(name)
        return files.leads_elsewhere(name)

    def keep(self, names: Iterable[str]) -> None:
        for name in names:
            files, name = self._of(name)
            files.keep([name])

    def distrust(self, file: RangedFile) -> bool:
        return self.own.distrust(file) or self.base.distrust(file)

    def moved(self) -> bool:
        return self.own.moved() or self.base.moved()

    def close(self) -> None:
        self.own.close()
        self.base.close()


def completed(opened: OpenCheckpoint, base: Where | None) -> OpenCheckpoint:
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
        found.close()
        raise CheckpointMismatch(f"{found.path} has no {lost[0]}, which {opened.path} leaves out because of it")
    added = found.index.selected(left_out, {}, below=found.files.where)
    files = _WithBase(opened.files, found.files)
    return replace(opened, files=files, index=opened.index.with_added(added), base=found)


def _find_base(opened: OpenCheckpoint, said: Base, moved: Where | None) -> OpenCheckpoint:
    """The base, where it is said to be: by the caller, by the checkpoint, or in the same place seen from there."""
    others = []
    for place in [moved] if moved else _places_of(said, opened.path):
        try:
            found = open_alone(resolved(place))
        except (CheckpointNotFound, OSError, ValueError):  # no name of a file at all
            continue
        if found.fingerprint == said.fingerprint:
            return found
        found.close()
        others.append(found)
    what = f"{opened.path} leaves out {len(opened.index.left_out)} frozen tensors that its base has"
    if others:
        raise CheckpointMismatch(
            f"{what}; {others[0].path} is not that base: its fingerprint is {others[0].fingerprint[:12]} and that of "
            f"the base {said.fingerprint[:12]}, which was {said.path}. Name the right one: base=PATH."
        )
    raise CheckpointNotFound(f"{what}, and {moved or said.path} is not there. If it was moved, name it: base=PATH.")


def _places_of(said: Base, checkpoint: Where) -> list[Where]:
    """Where a base may be. What a checkpoint says of it is followed on the same medium only: whoever has written it is
    not to choose which server is asked."""
    near = isinstance(said.path, ObjectPath) == isinstance(checkpoint, ObjectPath)
    if isinstance(said.path, ObjectPath) and isinstance(checkpoint, ObjectPath):
        near = said.path.store == checkpoint.store
    return [*([as_path(said.path)] if near else []), checkpoint / said.relative]


def _open_held(path: Where, files: Readable) -> OpenCheckpoint:
    """What the files of a directory are, or what is at a path that is none."""
    try:
        names = [name.rstrip("/") for name in files.names()]
    except OSError:
        if reason := medium_of(path).uncommitted_reason(path):
            return _open_foreign(path, files, reason)
        raise _HasCome(f"{path} has just come") from None
    reason = uncommitted_reason(names)
    if reason and has_traces(names):
        raise CheckpointIncomplete(
            f"{path} is not a checkpoint: {reason}. dcp_plugin.latest(root) finds the newest good one."
        )
    if reason:
        return _open_foreign(path, files, reason)
    if INDEX in names and (summary := summary_in(files)) is not None:
        index = _own_index(files, summary)
        return OpenCheckpoint(path, files, index, summary.index_sha256, "dcp_plugin", summary.kinds, summary)
    if frameworks.is_of_accelerate(path.name) and exists(medium_of(path).open(path.parent), INDEX):
        files.close()
        return open_alone(path.parent)  # a view of ours, which names the files of the checkpoint above it
    data = read(files, METADATA)
    if frameworks.is_of_lightning(files):
        index, kinds = frameworks.lightning_index(files)
        return OpenCheckpoint(path, files, index, fingerprint(data), "lightning", kinds)
    index = stock_metadata.index_of(stock_metadata.decode(data, f"{files.where}/{METADATA}"), files)
    return OpenCheckpoint(path, files, index, fingerprint(data), "stock")


def _own_index(files: Readable, summary: Summary) -> CheckpointIndex:
    return index_file.decode(read(files, INDEX), summary.index_sha256, f"{files.where}/{INDEX}")


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
        _refuse_if_moved(files)
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
    index = _own_index(files, summary)
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


def _check_metadata(files: Readable, summary: Summary) -> None:
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


def _open_foreign(path: Where, files: Readable, reason: str) -> OpenCheckpoint:
    kind = medium_of(path).kind(path)
    is_folder = kind == "folder"
    folders = frameworks.accelerate_folders(files) if is_folder else []
    if folders:
        index, kinds = frameworks.accelerate_index(files, folders)
        said = fingerprint(b"".join(read(files, f"{folder}/{METADATA}") for folder in folders))
        return OpenCheckpoint(path, files, index, said, "accelerate", kinds)
    if is_folder:
        try:
            contents = detect.read_directory(files, reason)
        except CheckpointNotFound:
            _refuse_directory_of_checkpoints(path)
            raise
    else:
        files = medium_of(path).open(path.parent)
        contents = _read_one(files, path, kind, reason)
    index = contents.index(files.where)
    if not files.streams:
        return OpenCheckpoint(
            path, files, index, fingerprint_of(files, contents), contents.format, contents.kinds, links=True
        )

    def find_fingerprint() -> str:
        with damage_in(path):
            return fingerprint_of(files, contents)

    said = repr([(name, size, files.modified(name)) for name, size in sorted(contents.files.items())])
    identity, known = fingerprint(said.encode()), contents.kinds
    return OpenCheckpoint(
        path, files, index, identity, contents.format, known, None, True, find_fingerprint=find_fingerprint
    )


def _read_one(files: Readable, path: Where, kind: str, reason: str) -> Contents:
    if not kind:
        is_link = not isinstance(path, ObjectPath) and path.is_symlink()
        raise detect.not_found(str(path), reason if is_link else "nothing is there")
    if is_own(path.name) and has_traces(files.names()):
        raise detect.not_found(str(path), f"it is one of the files of {path.parent}. Name that directory")
    return detect.read_file(files, path.name)


def _refuse_directory_of_checkpoints(path: Where) -> None:
    """A run's directory of checkpoints is named easily in place of one of them."""
    medium = medium_of(path).snapshot(path)
    for found in medium.entries(path)[:_MOST_LISTED]:
        names: list[str] = []
        with suppress(OSError):
            names = [] if found.is_file or found.path.name.startswith(".") else medium.open(found.path).names()
        if has_traces(names):
            raise CheckpointNotFound(
                f"{path} is not a checkpoint: it has checkpoints in it, such as {found.path}. Name one of them; "
                f"dcp_plugin.latest({str(path)!r}) finds the newest."
            )


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
            raise gone_or_damaged(files, f"data file {name} is missing", error) from error
        if not links and files.leads_elsewhere(name):
            raise CheckpointCorrupt(f"{files.where}: {name} is a link that leaves the checkpoint")
        if found < sizes[name]:
            raise CheckpointCorrupt(f"{files.where}: {name} is truncated: {found} of {sizes[name]} bytes")
        if found > sizes[name]:
            raise CheckpointCorrupt(
                f"{files.where}: {name} has {found} bytes, and had {sizes[name]} when it was saved: something, perhaps "
                f"a save of another tool, has written to it since"
            )
