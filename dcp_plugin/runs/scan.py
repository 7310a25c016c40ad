"""Which checkpoints are below a directory, while others publish, replace and delete there.

What exists throughout a scan is in its result. A listing alone does not give that: a checkpoint that is being replaced
may be neither under its name, when that is listed, nor set aside in the workspace, when that is. So a directory with a
workspace in it is listed again until two listings in a row are the same, and only what is new is looked into again.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from dcp_plugin.errors import CheckpointCorrupt, damage_in, unreadable
from dcp_plugin.format import has_traces, uncommitted_reason
from dcp_plugin.format.foreign.frameworks import Saved, saved_as_files, saved_as_folder
from dcp_plugin.format.summary import NewerFormat
from dcp_plugin.media import WORKSPACE, Listed, Readable, medium_of
from dcp_plugin.paths import ObjectPath, Where
from dcp_plugin.storage.open import in_one_view, summary_in
from dcp_plugin.types import CheckpointState

_DEPTH = 6
"""How deep below a root checkpoints are looked for: frameworks nest theirs (``logs/version_0/checkpoints/…``)."""
_MOST_ROUNDS = 100


def state_of(path: Where) -> CheckpointState | None:
    """The state of one directory; None if it is no DCP checkpoint and does not pretend to be one."""
    try:
        return in_one_view(path, _state_in)
    except OSError:  # there is none, or it was deleted while we looked
        return None


def _state_in(path: Where, files: Readable) -> CheckpointState | None:
    names = [name.rstrip("/") for name in files.names()]
    reason = uncommitted_reason(names)
    if reason and files.moved():
        raise FileNotFoundError(f"{path} is being deleted")
    if not has_traces(names):
        return None
    written = files.modified("")
    step, metrics = None, dict[str, float]()
    try:
        with suppress(NewerFormat), damage_in(path):
            if not reason and (summary := summary_in(files)) is not None:
                written, step, metrics = summary.time, summary.step, dict(summary.metrics)
    except CheckpointCorrupt as error:
        if files.moved():
            raise
        return CheckpointState(path, False, str(error), None, written)
    return CheckpointState(path, not reason, reason, step, written, metrics=metrics)


class Scan:
    """One look at all that is below a directory.

    Args:
        others: Whether to look for what other tools have saved for a resume, too. What is inside of that is no
            checkpoint of its own.
        read_all: Whether to look into each checkpoint. Otherwise, where names of files tell when it was saved, nothing
            is read of it, its step included.
        in_flight: Whether to note saves in flight where their records would have to be read for that.

    Raises:
        CheckpointUnreadable: The store of a URL cannot be listed.
    """

    def __init__(
        self, root: Where, others: bool = False, read_all: bool = False, in_flight: bool | None = None
    ) -> None:
        self.states: dict[Where, CheckpointState] = {}
        """What is a checkpoint of DCP, or pretends to be one."""
        self.of_others: list[Saved] = []
        self.workspaces: list[Where] = []
        """Where saves in flight are made, or noted, and what interrupted ones have left is."""
        self._others, self._read_all = others, read_all
        self._reads_records = read_all if in_flight is None else in_flight
        try:
            self.medium = medium_of(root).snapshot(root)
        except OSError as error:
            raise unreadable(f"{root} cannot be listed", error) from error
        self._listed: dict[Where, set[tuple[Where, int]]] = {}
        self._complete = self._visit(root, _DEPTH)
        if not self._complete:  # it may be a checkpoint that is set aside at this moment
            self._complete = self._visit(self.medium.locate(root), _DEPTH) or not self.medium.kind(root)

    def links(self) -> dict[Path, Path]:
        """The symbolic links beside checkpoints and above them, and what they lead to."""
        entries = [path for listed in self._listed.values() for path, _ in listed]
        return {path: path.resolve() for path in entries if isinstance(path, Path) and path.is_symlink()}

    def is_current(self) -> bool:
        """Whether nothing came or went since. A directory of very many entries may not be listed in one moment."""
        return self._complete and all(self._entries(path) == there for path, there in self._listed.items())

    def _entries(self, directory: Where) -> set[tuple[Where, int]]:
        with suppress(OSError):
            return {(one.path, one.number) for one in self.medium.entries(directory)}
        return set()

    def _visit(self, directory: Where, depth: int) -> bool:
        """Whether the directory was there until it was looked into."""
        try:
            state = self._state(directory)
            if state is None:
                return self._look_below(directory, depth)
            self.states[directory] = state
        except FileNotFoundError:
            return False
        except OSError:  # not ours to read
            pass
        return True

    def _state(self, directory: Where) -> CheckpointState | None:
        time = None if self._read_all else self.medium.time_from_names(directory)
        if time is not None:
            return CheckpointState(directory, True, "", None, time)
        return in_one_view(directory, _state_in, medium=self.medium)

    def _look_below(self, directory: Where, depth: int) -> bool:
        entries = self.medium.entries(directory)
        if self._others and self._is_of_others(directory, entries):
            return True
        seen: dict[Where, int] = {}
        before = None
        for _ in range(_MOST_ROUNDS):
            self._listed[directory] = {(one.path, one.number) for one in entries}
            folders = {one.path: one.number for one in entries if one.is_folder}
            workspace = directory / WORKSPACE
            has_workspace = folders.pop(workspace, None) is not None
            for path in seen.keys() - folders.keys():
                self.states.pop(path, None)
            there = True
            for path, number in folders.items():
                if depth > 0 and seen.get(path) != number:
                    self.states.pop(path, None)
                    there = self._visit(path, depth - 1) and there
            seen = folders
            now = folders, self._look_into_workspace(workspace) if has_workspace else []
            if (there and not has_workspace) or now == before:
                break
            before = now
            entries = self.medium.entries(directory)
        return True

    def _is_of_others(self, directory: Where, entries: list[Listed[Any]]) -> bool:
        """Whether it is the checkpoint of another tool. Such files are noted."""
        files = self.medium.open(directory)
        saved = saved_as_folder(files, (one.path.name for one in entries))
        if saved is not None:
            self.of_others.append(saved)
            if not saved.export:
                return True
        names = [one.path.name for one in entries if one.is_file]
        self.of_others += saved_as_files(files, names, look=files.streams == 0)
        return False

    def _look_into_workspace(self, workspace: Where) -> list[Where]:
        """Note the saves in flight, and what is set aside. What is there."""
        if workspace not in self.workspaces:
            self.workspaces.append(workspace)
        for path in [path for path in self.states if path.parent == workspace]:
            del self.states[path]
        try:
            paths = [one.path for one in self.medium.entries(workspace)]
        except OSError:
            return []
        for path in paths:
            state = state_of(path) if path.suffix == ".aside" else self._in_flight(path)
            if state is not None:
                self.states[path] = state
        return paths

    def _in_flight(self, entry: Where) -> CheckpointState | None:
        if isinstance(entry, ObjectPath) and not self._reads_records:  # it would have to be read, for the list alone
            return None
        noted = self.medium.in_flight(entry)
        if noted is None or self._is_seen(entry.parent.parent / noted[0]):
            return None
        reason = f"a save of {noted[0]} that is in flight or was interrupted"
        return CheckpointState(entry, False, reason, None, noted[1])

    def _is_seen(self, path: Where) -> bool:
        """Whether a save that is made in place is seen there already."""
        state = self.states.get(path)
        return isinstance(path, ObjectPath) and state is not None and not state.committed
