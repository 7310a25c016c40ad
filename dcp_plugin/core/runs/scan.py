"""Scan of a directory for checkpoints, while other processes publish, replace and delete there.

Two rules: a checkpoint that exists throughout a scan is in its result, and an error never counts as an empty directory.

One listing does not ensure the first. During a replacement the checkpoint may be missing under its name when the
directory is listed, and missing in the workspace when the workspace is listed. All directories are therefore listed
again until two rounds in a row have the same folders. A round examines only new entries.

For the second, reads that fail with a transient error are repeated for 10 s. Then an error at the root is raised.
Entries below the root that cannot be read are in :attr:`Scan.unreadable`, and
:func:`dcp_plugin.core.runs.catalog.refuse_unreadable` decides whether they can be passed over.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar, cast

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointError, CheckpointUnreadable, damage_in, unreadable
from dcp_plugin.core.format import has_traces, uncommitted_reason
from dcp_plugin.core.format.summary import OtherFormat
from dcp_plugin.core.media import Listed, Readable, is_workspace, locate, medium_of, snapshot
from dcp_plugin.core.media.packed_view import time_from_names
from dcp_plugin.core.paths import Where, is_link
from dcp_plugin.core.runs.foreign import Saved, in_order, saved_as_files, saved_as_folder
from dcp_plugin.core.storage.published import in_one_view, summary_in
from dcp_plugin.core.types import CheckpointState

_DEPTH = 6
"""Levels below a root that are scanned: frameworks nest checkpoints (``logs/version_0/checkpoints/…``)."""
_MOST_ROUNDS = 100
LOST_AND_FOUND = "lost+found"
"""Directory that mkfs makes at the top of a volume. Only root can read it."""
_MAY_PASS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN}
_PATIENCE = 10.0
_PAUSE = 0.5
_LITTLE = 64 << 10
"""Most bytes that a scan reads, unasked, of each file of another tool and each record of a save.

If a single read costs more, the name of a file decides, and records are not read.
"""

T = TypeVar("T")


class Patience:
    """Retry of reads that fail with a transient error, for 10 s in total."""

    def __init__(self) -> None:
        self._until: float | None = None

    def read(self, read: Callable[[], T]) -> T:
        """Return the result of ``read``.

        Raises:
            OSError, CheckpointUnreadable: The last failure of ``read``.
        """
        while True:
            try:
                return read()
            except (OSError, CheckpointUnreadable) as error:
                if not may_pass(error):
                    raise
                self._until = self._until or monotonic() + _PATIENCE
                if monotonic() >= self._until:
                    raise
            sleep(_PAUSE)


def read_each(entries: Sequence[Listed[Any]], read: Callable[[Listed[Any]], T], files: Readable) -> list[T]:
    """Return the results of ``read``, in a store from threads: one after the other, each would take a round trip.

    Args:
        files: The files of the folder of the entries, which know the cost of a read.
    """
    if files.cost.at_once == 1:
        return list(map(read, entries))
    with ThreadPoolExecutor(files.cost.at_once, thread_name_prefix="dcp-scan") as pool:
        return list(pool.map(read, entries))


def may_pass(error: Exception) -> bool:
    """Return whether the file system failed with an error after which the same read may succeed."""
    return _code_of(error) in _MAY_PASS


def _code_of(error: Exception) -> int | None:
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause.errno if isinstance(cause, OSError) else None


def cannot_read(path: Where, error: Exception) -> CheckpointUnreadable:
    """Return the error to raise for a path that cannot be read, with its errno."""
    if isinstance(error, CheckpointUnreadable):
        return error
    code = _code_of(error) or 0
    return CheckpointUnreadable(f"{path} cannot be read: [Errno {code}] {getattr(error, 'strerror', None) or error}")


def state_of(path: Where, patience: Patience | None = None) -> CheckpointState | None:
    """Return the state of a directory; None if it has no file of a DCP checkpoint.

    Raises:
        CheckpointUnreadable: The file system fails to read it.
    """
    try:
        return (patience or Patience()).read(lambda: in_one_view(path, _state_in))
    except (FileNotFoundError, NotADirectoryError):  # absent, or deleted during the scan
        return None
    except OSError as error:
        raise cannot_read(path, error) from error


def _state_in(path: Where, files: Readable, summaries: bool = True) -> CheckpointState | None:
    names = [name.rstrip("/") for name in files.names()]
    reason = uncommitted_reason(names)
    # A directory that has moved since it was opened may be partly deleted: its names show nothing.
    if reason and files.moved():
        raise FileNotFoundError(f"{path} is being deleted")
    if not has_traces(names):
        return None
    written = files.modified("")
    step, metrics = None, dict[str, float]()
    try:
        with suppress(OtherFormat), damage_in(path):
            if summaries and not reason and (summary := summary_in(files)) is not None:
                written, step, metrics = summary.time, summary.step, dict(summary.metrics)
    except CheckpointCorrupt as error:
        if files.moved() or isinstance(error, CheckpointUnreadable):
            raise
        return CheckpointState(path, False, str(error), None, written)
    return CheckpointState(path, not reason, reason, step, written, metrics=metrics)


def age_of(checkpoint: CheckpointState | Saved) -> tuple[float, int, list[int]]:
    """Return the sort key of a checkpoint; the newest has the greatest.

    A store's times are full seconds, so numbers in the names of other tools break ties.
    """
    if isinstance(checkpoint, Saved):
        return checkpoint.time, -1, [int(digits) for digits in re.findall(r"\d+", checkpoint.path.name)]
    return checkpoint.time, checkpoint.step or -1, []


class Scan:
    """Scan of all entries below a directory.

    Args:
        others: Include resumable checkpoints of other tools. Directories inside one are not scanned.
        read_all: Read each checkpoint, and each file that may be one. If False, a checkpoint is not read if names of
            files show when it was saved; its step is then unknown.
        in_flight: Include saves in flight whose records have to be read, also without ``read_all``.
        patience: Retry that the scans of a search share, for 10 s in total.
        summaries: Read the summary of each checkpoint. If False, the caller examines each checkpoint itself, and the
            scan knows only the facts that names of files show.

    Raises:
        CheckpointUnreadable: The root cannot be read, or the store of a URL cannot be listed.
    """

    states: dict[Where, CheckpointState]
    """DCP checkpoints, complete or not."""
    of_others: list[Saved]
    workspaces: dict[Where, list[Where]]
    """Directories of saves in flight, and of garbage of interrupted ones, with their entries."""
    unreadable: dict[Where, CheckpointUnreadable]
    """Entries below the root that may hold checkpoints, and cannot be read."""
    is_stable = False
    """True if the last two rounds have listed the same entries. Listings of large directories are not atomic."""
    _listed: dict[Where, frozenset[tuple[Where, int]]]
    _folders: dict[Where, list[tuple[Where, int]]]
    """Entries of each scanned directory, by path and number; and those of them that are folders."""

    def __init__(
        self,
        root: Where,
        others: bool = False,
        read_all: bool = False,
        in_flight: bool = False,
        patience: Patience | None = None,
        summaries: bool = True,
    ) -> None:
        self._root, self._patience = root, patience or Patience()
        self._others, self._read_all, self._summaries = others, read_all, summaries
        self._reads_records = read_all or in_flight
        self._read: dict[object, Any] = {}
        """Results of reads in earlier rounds, by path and number of the entry. A replaced entry has another number."""
        try:
            self.medium = snapshot(medium_of(root), root)
        except OSError as error:
            raise unreadable(f"{root} cannot be listed", error) from error
        folders: object = None
        listed: object = None
        for _ in range(_MOST_ROUNDS):
            self._look_once()
            before, folders = folders, (self._folders, self.workspaces, self.states.keys())
            self.is_stable, listed = self._listed == listed, self._listed
            if folders == before:  # files are not compared: other processes add and delete them all the time
                break

    def _look_once(self) -> None:
        self.states, self.of_others, self.workspaces, self.unreadable = {}, [], {}, {}
        self._listed, self._folders = {}, {}
        if not self._look(self._root):  # the root may be a checkpoint that is being replaced at this moment
            try:
                self._look(self._patience.read(lambda: locate(self._root)))
            except OSError as error:
                raise cannot_read(self._root, error) from error

    def checkpoints(self) -> list[CheckpointState | Saved]:
        """Return the checkpoints of this package and of other tools, complete or not, oldest first."""
        return sorted([*self.states.values(), *in_order(self.of_others)], key=age_of)

    def complete(self) -> list[CheckpointState | Saved]:
        """Return the checkpoints, oldest first, without interrupted saves and without damaged ones of this package."""
        return [
            checkpoint
            for checkpoint in self.checkpoints()
            if (not checkpoint.interrupted if isinstance(checkpoint, Saved) else checkpoint.committed)
        ]

    def links(self) -> dict[Path, Path]:
        """Return the symbolic links in the scanned directories, and their targets."""
        entries = [path for listed in self._listed.values() for path, _ in listed]
        return {path: Path(os.path.realpath(path)) for path in entries if is_link(path)}

    def _once(self, key: object, read: Callable[[], T]) -> T:
        """Return the result of ``read``, called once for each key in all rounds."""
        if key not in self._read:
            self._read[key] = self._patience.read(read)
        return cast(T, self._read[key])

    def _look(self, directory: Where, number: int = 0, depth: int = _DEPTH) -> bool:
        """Examine a directory and those below it. Return False if it does not exist any more."""
        try:
            state = self._once((directory, number), lambda: self._state(directory))
            if state is None:
                self._look_below(directory, depth)
            else:
                self.states[directory] = state
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            pass
        except CheckpointUnreadable as error:
            self._note_unreadable(directory, error)
            self.states[directory] = CheckpointState(directory, False, str(error), None, self._modified(directory))
        except OSError as error:
            if directory == self._root:
                raise cannot_read(directory, error) from error
            self._note_unreadable(directory, error)
        return True

    def _note_unreadable(self, path: Where, error: Exception) -> None:
        if path.name != LOST_AND_FOUND or path == self._root:
            self.unreadable[path] = cannot_read(path, error)

    def _modified(self, directory: Where) -> float:
        with suppress(OSError):
            return self.medium.open(directory).modified("")
        return 0.0

    def _state(self, directory: Where) -> CheckpointState | None:
        time = None if self._read_all else time_from_names(directory, self.medium)
        if time is not None:
            return CheckpointState(directory, True, "", None, time)
        return in_one_view(directory, lambda path, files: _state_in(path, files, self._summaries), medium=self.medium)

    def _read_ahead(self, directory: Where, folders: list[Listed[Any]]) -> None:
        """Examine the folders of a store at the same time."""

        def examine(folder: Listed[Any]) -> None:
            with suppress(OSError, CheckpointError):  # met again, and reported, by the caller
                self._once((folder.path, folder.number), lambda: self._state(folder.path))

        files = self.medium.open(directory)
        if self._read_all and files.cost.at_once > 1:
            read_each(folders, examine, files)

    def _look_below(self, directory: Where, depth: int) -> None:
        entries = self._patience.read(lambda: self.medium.entries(directory))
        listed = frozenset((entry.path, entry.number) for entry in entries)
        if self._others:
            saved, in_files = self._once((directory, listed), lambda: self._saved_by_others(directory, entries))
            self.of_others += [*([] if saved is None else [saved]), *in_files]
            if saved is not None and not saved.export:
                return
        folders = [entry for entry in entries if entry.is_folder]
        self._listed[directory] = listed
        self._folders[directory] = [(entry.path, entry.number) for entry in folders]
        below = [entry for entry in folders if depth > 0 and not is_workspace(entry.path.name)]
        self._read_ahead(directory, below)
        for entry in below:
            self._look(entry.path, entry.number, depth - 1)
        for entry in folders:
            if is_workspace(entry.path.name):
                self._look_into_workspace(entry.path)

    def _saved_by_others(self, directory: Where, entries: list[Listed[Any]]) -> tuple[Saved | None, list[Saved]]:
        """Return the checkpoint of another tool that consists of the directory, and those that are files in it."""
        files = self.medium.open(directory)
        saved = saved_as_folder(files, (entry.path.name for entry in entries))
        if saved is not None and not saved.export:
            return saved, []
        names = [entry.path.name for entry in entries if entry.is_file]
        return saved, list(saved_as_files(files, names, look=self._read_all or files.cost.gap <= _LITTLE))

    def _look_into_workspace(self, workspace: Where) -> None:
        """Record the saves in flight, and the checkpoints that are being replaced."""
        self.workspaces[workspace] = []
        try:
            entries = self._patience.read(lambda: self.medium.entries(workspace))
        except FileNotFoundError:
            return
        except OSError as error:
            self._note_unreadable(workspace, error)
            return
        self.workspaces[workspace] = [entry.path for entry in entries]
        reads_records = self._reads_records or self.medium.open(workspace).cost.gap <= _LITTLE
        for entry in entries:
            try:
                is_replaced = entry.path.suffix == ".aside" and self._add_replaced(entry)
                if reads_records and not is_replaced:
                    self._add_in_flight(entry)
            except CheckpointUnreadable as error:
                self._note_unreadable(entry.path, error)

    def _add_replaced(self, entry: Listed[Any]) -> bool:
        """Record the checkpoint that is being replaced; return False for another entry."""
        state = self._once((entry.path, entry.number), lambda: state_of(entry.path, self._patience))
        if state is not None:
            self.states[entry.path] = state
        return state is not None

    def _add_in_flight(self, entry: Listed[Any]) -> None:
        save = self._once((entry.path, entry.number, "in flight"), entry.in_flight)
        if save is None:
            return
        at_target = self.states.get(entry.path.parent.parent / save.target)
        if save.is_at_target and at_target is not None and not at_target.committed:  # the scan has seen it there
            return
        user = "" if save.user is None else f" by another user (uid {save.user})"
        reason = f"a save of {save.target}{user} that is in flight or was interrupted"
        self.states[entry.path] = CheckpointState(entry.path, False, reason, None, save.time)
