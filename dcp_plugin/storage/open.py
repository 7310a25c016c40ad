"""Opening of the checkpoint at a path, whichever tool wrote it: the index, and the other facts that a load needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from dcp_plugin.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointMismatch,
    CheckpointNotFound,
    damage_in,
)
from dcp_plugin.format import (
    INDEX,
    SUMMARY,
    has_traces,
    index_file,
    read,
    uncommitted_reason,
)
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.summary import Base, Summary, fingerprint
from dcp_plugin.media import RangedFile, Readable, locate, medium_of, packed
from dcp_plugin.paths import Where, are_on_same_medium, as_path, resolved
from dcp_plugin.records import OpenCheckpoint
from dcp_plugin.storage.published import (
    HasCome,
    check_metadata,
    check_sizes,
    in_one_view,
    refuse_if_moved,
    summary_in,
    summary_of,
)
from dcp_plugin.tensors.host_memory import collector_paused


def check_files(opened: OpenCheckpoint, names: Iterable[str] | None = None) -> None:
    """Check that these data files, or all, are in their directories and have the sizes of the save.

    With all data files, check also that our ``.metadata`` is the saved file, to the last byte.

    Raises:
        CheckpointCorrupt: A check failed; the message names the file.
        CheckpointNotFound: The checkpoint was deleted or replaced since it was opened.
    """
    if names is None and opened.summary is not None:
        try:
            check_metadata(opened.files, opened.summary)
        except CheckpointCorrupt:
            refuse_if_moved(opened.files)
            raise
    names = list(opened.index.files if names is None else names)
    below = f"{opened.base.files.where}/" if opened.base else ""
    own_names = [name for name in names if not below or not name.startswith(below)]
    with damage_in(opened.path):
        check_sizes(opened.files, opened.index.files, own_names, opened.links)
    if opened.base:
        check_files(opened.base, [name.removeprefix(below) for name in names if name.startswith(below)])


def open_checkpoint(path: Where, base: Where | None = None, check: bool = False) -> OpenCheckpoint:
    """Read and validate the table of contents; together with that of its base, if the checkpoint has one.

    Args:
        base: Path of the base, if it was moved.
        check: Call :func:`check_files`.

    Returns:
        The open checkpoint, which the caller has to close.

    Raises:
        CheckpointNotFound: The path has no known checkpoint, and the message lists the names that were looked for. Or
            the base does not exist, or the checkpoint was deleted meanwhile.
        CheckpointIncomplete, CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: It cannot be read.
    """
    return _open(path, lambda opened: completed(opened, base), check)


def open_files(path: Where, files: Readable, base: Where | None = None, complete: bool = True) -> OpenCheckpoint:
    """Open the files of a checkpoint of ours, from any medium, as :func:`open_checkpoint`; messages name ``path``.

    Args:
        complete: Open the base, too.

    Raises:
        CheckpointCorrupt, CheckpointNotFound, CheckpointMismatch: As :func:`open_checkpoint`.
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
        return completed(opened, base) if complete else opened


def _elsewhere(files: Readable) -> bool:
    """Return whether a contradicting table of contents can be read again from another source.

    An unreadable summary, or an index with another fingerprint than the summary's, is marked unreliable.
    """
    expected = None
    for name in (SUMMARY, INDEX):
        with suppress(OSError), files.open(name) as file:
            data = file.read()
            try:
                sha256 = Summary.decode(data, name).index_sha256 if name == SUMMARY else fingerprint(data)
            except CheckpointCorrupt:
                return files.distrust(file)
            if expected not in (None, sha256):
                return files.distrust(file)
            expected = sha256
    return False


def open_alone(path: Where, check: bool = False) -> OpenCheckpoint:
    """Open a checkpoint as :func:`open_checkpoint`, without its base."""
    return _open(path, lambda opened: opened, check)


def _open(path: Where, complete: Callable[[OpenCheckpoint], OpenCheckpoint], check: bool) -> OpenCheckpoint:
    def look(location: Where, files: Readable) -> OpenCheckpoint:
        opened = complete(_open_held(location, files))
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


@dataclass(frozen=True)
class _WithBase:
    """Files of a checkpoint, and those of its base under their full paths."""

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
    """Return the checkpoint together with its base, if it has one.

    Raises:
        CheckpointNotFound: The base does not exist.
        CheckpointMismatch: The checkpoint at the path of the base is another one.
    """
    left_out = opened.index.left_out
    if not left_out:
        return opened
    recorded = Base.of_summary(opened.summary.base if opened.summary else {}, opened.path)
    base_checkpoint = _find_base(opened, recorded, base)
    lost = [key for key in left_out.values() if key not in base_checkpoint.index]
    if lost:
        base_checkpoint.close()
        raise CheckpointMismatch(
            f"{base_checkpoint.path} has no {lost[0]}, but {opened.path} leaves it out and has this base"
        )
    added = base_checkpoint.index.selected(left_out, {}, below=base_checkpoint.files.where)
    files = _WithBase(opened.files, base_checkpoint.files)
    return replace(opened, files=files, index=opened.index.with_added(added), base=base_checkpoint)


def _find_base(opened: OpenCheckpoint, recorded: Base, moved: Where | None) -> OpenCheckpoint:
    """Return the base: at the path from the caller, from the checkpoint, or at the same relative path."""
    wrong = []
    for place in [moved] if moved else _places_of(recorded, opened.path):
        try:
            candidate = open_alone(resolved(place))
        except (CheckpointNotFound, OSError, ValueError):  # ValueError: no valid file name
            continue
        if candidate.fingerprint == recorded.fingerprint:
            return candidate
        candidate.close()
        wrong.append(candidate)
    problem = f"{opened.path} leaves out {len(opened.index.left_out)} frozen tensors that its base has"
    if wrong:
        raise CheckpointMismatch(
            f"{problem}; {wrong[0].path} is not that base: its fingerprint is {wrong[0].fingerprint[:12]} instead of "
            f"{recorded.fingerprint[:12]}. The base was saved at {recorded.path}. Name it with base=PATH."
        )
    raise CheckpointNotFound(
        f"{problem}, but {moved or recorded.path} does not exist. If the base was moved, name it with base=PATH."
    )


def _places_of(recorded: Base, checkpoint: Where) -> list[Where]:
    """Return the possible paths of a base.

    The path in a checkpoint is followed only on the same medium: its author must not choose which server is contacted.
    """
    near = are_on_same_medium(recorded.path, checkpoint)
    return [*([as_path(recorded.path)] if near else []), checkpoint / recorded.relative]


def _open_held(path: Where, files: Readable) -> OpenCheckpoint:
    """Open the files of a directory, or the file at a path that is no directory."""
    try:
        names = [name.rstrip("/") for name in files.names()]
    except OSError:
        if reason := packed.uncommitted_reason(path):
            return _open_foreign(path, files, reason)
        raise HasCome(f"{path} has just come") from None
    reason = uncommitted_reason(names)
    if reason and has_traces(names):
        raise CheckpointIncomplete(
            f"{path} is not a checkpoint: {reason}. dcp_plugin.latest(root) finds the newest good one."
        )
    if not reason and INDEX in names and (summary := summary_in(files)) is not None:
        index = _own_index(files, summary)
        return OpenCheckpoint(path, files, index, summary.index_sha256, "dcp_plugin", summary.kinds, summary)
    return _open_foreign(path, files, reason)


def _open_foreign(path: Where, files: Readable, reason: str) -> OpenCheckpoint:
    from dcp_plugin.storage.open_foreign import open_foreign  # most loads are of our checkpoints and do not need it

    return open_foreign(path, files, reason)


def _own_index(files: Readable, summary: Summary) -> CheckpointIndex:
    return index_file.decode(read(files, INDEX), summary.index_sha256, f"{files.where}/{INDEX}")
