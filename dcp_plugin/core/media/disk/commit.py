"""Commit of a directory of files as a checkpoint, and garbage collection after a crash.

A checkpoint is real when, and only when, ``.metadata`` is in its final directory (for our own: ``dcp_plugin.json``
and ``dcp_plugin.index`` too). A save never writes into the final directory. Its steps:

- :func:`reserve` makes ``<parent>/.dcp_plugin/<token>.saving/``, on the same file system as the final name. Its record,
  ``<token>.json``, says which checkpoint this will be. The process that saves holds a lock on the record.
- All ranks write and sync their files in it, also the extra files of a framework.
- The medium (:meth:`dcp_plugin.core.media.disk.local_disk.LocalDisk.publish`) writes and syncs the metadata.
- :func:`publish` renames the directory to its final name. If an earlier checkpoint has the name, one system call
  exchanges both names. So the old or the new checkpoint can be loaded at every moment. Where that call does not exist,
  the old checkpoint moves to ``<token>.aside`` in between, and :func:`locate` returns that path. Then the files of
  other programs in the old checkpoint move to the new one, and the old checkpoint is deleted.
- :func:`discard` ends a save that failed. It can keep the directory of a copy. The next reservation of the same copy
  takes over the record and the directory, as it does after a copy that died.

A removal renames to ``<token>.deleted`` first, for the same reason.

After a crash, the next save calls :func:`sweep`. It gives a moved checkpoint its name back and deletes the other files.
First it renames the directory of the ended save to ``<token>.deleted``, so that a save wrongly declared dead cannot be
published. A lock that can be taken proves that a process has ended only where both processes share locks: in one boot
of one machine, and on one mount. Between others the lease decides (:mod:`dcp_plugin.core.media.lease`). Lustre with
``localflock`` and NFS with ``nolock`` grant the same lock on each node.

No entry of ``.dcp_plugin`` is ever taken for a checkpoint. Its names do not contain names of checkpoints, because
frameworks search for patterns. If ``.dcp_plugin`` belongs to another user, the directory of this user has the number of
the user at the end of its name. Garbage of another user is read, and never changed
(:class:`dcp_plugin.core.media.disk.posix.OwnFolder`).

Two saves to one path at the same time are not guarded against each other beyond this: the last to publish wins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
import uuid
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from dcp_plugin.core import format as layout
from dcp_plugin.core.errors import CheckpointError, DurabilityUnknown, SaveFailed, logger
from dcp_plugin.core.interrupts import interrupts_held
from dcp_plugin.core.media import lease
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.media.disk.local_files import LocalFiles
from dcp_plugin.core.media.medium import Leftover, Reservation
from dcp_plugin.core.media.places import (
    is_workspace,
    other_things,
    refuse_to_replace_other_format,
    refuse_workspace,
    workspace_of,
    workspaces_of,
)

R = TypeVar("R")
F = TypeVar("F", bound=posix.Folder)


@dataclass
class _Held:
    """A record that this process has made, and locked where the file system has locks."""

    workspace: posix.OwnFolder
    target: str
    owner: Callable[[], Reservation[Path] | None]
    """Returns the reservation; None once the caller has dropped it. A save that Ctrl-C ended has no other sign of its
    end."""
    descriptor: int = -1
    as_a_whole: bool = False
    """True for a copy: it replaces a directory together with all files in it."""
    naming: bool = False
    """True from the moment at which the save gets its final name. From then on its directory may be the old checkpoint,
    with files of the user."""
    stop_heartbeat: Callable[[], None] = lambda: None
    """Ends the heartbeat of the record."""


_held: dict[str, _Held] = {}
"""The held records by token. They must not be opened again: a POSIX lock does not exclude its own process, and closing
any descriptor of the file drops it."""

_MAX_RECORD = 1 << 16
_ATTEMPTS = 20
"""Another process may remove the empty workspace just after we made it, or publish while we look."""


def _reservation(final: Path, token: str) -> Reservation[Path]:
    return Reservation(final, token, workspace_of(final) / f"{token}.saving")


def reserve(
    final: Path, among_other_files: bool = False, copy_of: str = "", recorded: float | None = None
) -> Reservation[Path]:
    """Make the directory that a save to ``final`` writes into.

    Args:
        among_other_files: ``final`` may be a directory with other things in it than a checkpoint. They stay.
        copy_of, recorded: See :meth:`dcp_plugin.core.media.medium.Medium.reserve`.

    Raises:
        SaveFailed: ``final`` is a directory with other things in it than a checkpoint, or below a file, or cannot be
            written.
    """
    reservation = None
    try:
        refuse_workspace(final)
        _refuse_working_directory(final)
        if not copy_of:  # a copy has checked the path already
            _refuse_to_replace_other_things(final, among_other_files)
        _refuse_below_a_file(final)
        posix.make_directories(final.parent)
        reservation = _taken_over(final, copy_of) if copy_of else None
        for workspace in workspaces_of(final):
            sweep(workspace)
        if reservation is None:
            reservation = _open_record(final, **({"copy_of": copy_of} if copy_of else {}))
        held, timed = _held[reservation.token], replace(reservation, time=recorded)
        held.as_a_whole, held.owner = bool(copy_of), weakref.ref(timed)
        if not (copy_of and held.workspace.has(reservation.directory.name)):
            os.mkdir(reservation.directory.name, dir_fd=held.workspace.descriptor)
    except OSError as error:
        if reservation is not None:
            _end_own(reservation)
        if error.errno == errno.EPERM:
            raise SaveFailed(f"cannot save {final}: {error}. Have it removed, or save to another folder.") from error
        raise SaveFailed(f"cannot save {final}: {error}. Is the file system full, read-only or gone?") from error
    return timed


def _taken_over(final: Path, copy_of: str) -> Reservation[Path] | None:
    """Return the reservation of the same copy by a process that has ended. Raise SaveFailed if that process runs."""
    workspace = workspace_of(final)
    for folder, token in _records(workspace, posix.OwnFolder):
        if token in _held:
            continue
        noted = _noted(folder, token)
        if noted.get("copy_of") != copy_of or lease.target_in(noted) != _name_in(workspace, final):
            continue
        with suppress(OSError):
            reservation = _reservation(final, token)
            descriptor = _open_if_ended(folder, token)
            if descriptor is None:
                raise SaveFailed(
                    f"cannot copy to {final}: another process ({noted.get('pid')} on {noted.get('host')}) is copying "
                    f"the same, or died on another machine less than {lease.LEASE / 60:.0f} minutes ago."
                )
            held = _Held(posix.OwnFolder(workspace), str(noted["target"]), weakref.ref(reservation), descriptor)
            _held[token] = held
            os.lseek(descriptor, 0, os.SEEK_END)
            _note_maker(reservation)
            return reservation
    return None


def publish(reservation: Reservation[Path]) -> None:
    """Give the finished directory its final name. All its files are synced already.

    Raises:
        OSError: The final name is unchanged.
        DurabilityUnknown: The checkpoint is published, but a loss of power may undo that.
    """
    final, name = reservation.final, reservation.directory.name
    held = _held[reservation.token]
    with held.workspace.folder(name) as folder:
        folder.sync()
    replaces = os.path.lexists(final)
    publishing = _identity(held.workspace, name) if replaces and not held.as_a_whole else None
    if publishing is not None:
        _note_in_record(reservation, {"publishing": publishing})
    held.naming = True
    try:
        _take_name(reservation, replaces)
        _make_name_durable(final, held.workspace)
    except OSError:
        held.naming = False  # the name is free or unchanged, and the old checkpoint can get it back
        if os.path.lexists(final) == replaces:
            raise
        # Another process has published or deleted there since the look. No limit as in _ATTEMPTS: each turn needs a
        # further process that finishes a save or a deletion, and a save that gave up would be lost.
        publish(reservation)
        return
    except BaseException:  # Ctrl-C, or the name is not durable: the next sweep reads the record
        _let_go(reservation.token)
        raise
    # After the names are durable: otherwise a loss of power could undo the exchange, but not the moves of other files.
    _end_own(reservation, publishing)


def _make_name_durable(final: Path, workspace: posix.Folder) -> None:
    """Sync the folders between which a checkpoint was renamed. Raises DurabilityUnknown."""
    try:
        posix.sync_directory(final.parent)
        workspace.sync()
    except OSError as error:
        raise DurabilityUnknown(
            f"{final} is saved, and can be loaded, but its name could not be made durable ({error}). After a loss "
            f"of power the previous checkpoint may be back. Look at the disk, and save again."
        ) from error


def publish_file(reservation: Reservation[Path]) -> None:
    """Give the single file of a copy its final name. Raises as :func:`publish`."""
    final, workspace = reservation.final, _held[reservation.token].workspace
    with workspace.folder(reservation.directory.name) as folder:
        folder.sync()
        folder.give(final.name, final)
    try:
        _make_name_durable(final, workspace)
    finally:
        _end_own(reservation)


def _take_name(reservation: Reservation[Path], replaces: bool) -> None:
    """Rename the directory to its final name. The earlier entry gets the name of the directory, or ``.aside``."""
    final, name, workspace = reservation.final, reservation.directory.name, _held[reservation.token].workspace
    if replaces and posix.exchange(workspace, name, final):
        return
    if replaces:
        # Raises before the old checkpoint moves, if another process has renamed the directory.
        os.stat(name, dir_fd=workspace.descriptor, follow_symlinks=False)
        workspace.take(final, f"{reservation.token}.aside")
    workspace.give(name, final)


def discard(reservation: Reservation[Path], all_ended: bool = True, keep: bool = False) -> None:
    """End a save that was not published. See :meth:`dcp_plugin.core.media.medium.Medium.discard`."""
    held = _held.get(reservation.token)
    if keep or (held is not None and held.naming):
        _let_go(reservation.token)
    elif held is not None:
        _end_own(reservation)


def revoke(final: Path, token: str) -> None:
    """Move the directory of a save away, so that its process cannot publish it. The next sweep deletes the directory
    when that process has ended."""
    with suppress(FileNotFoundError), posix.OwnFolder(workspace_of(final)) as folder:
        folder.rename(f"{token}.saving", f"{token}.deleted")


def remove(path: Path) -> None:
    """Delete a checkpoint. A half-deleted one is never taken for a checkpoint.

    Raises:
        CheckpointError: The checkpoint is unchanged.
    """
    with _as_it_was(f"delete {path}"):
        try:
            if path.is_symlink() or not path.is_dir():
                path.unlink()
                return
            if _has_working_directory(path):
                raise CheckpointError(f"cannot delete {path}: the working directory of this process is there.")
            with _renaming(path) as (reservation, workspace):
                workspace.take(path, f"{reservation.token}.deleted")
        except (FileNotFoundError, NotADirectoryError):
            if os.path.lexists(path):  # otherwise nothing is there, or another process has just deleted it
                raise


def link(path: Path, target: Path) -> None:
    """Make ``path`` a relative link to the checkpoint ``target``: both can be moved together.

    The link replaces an earlier link or checkpoint at once. If the kernel cannot exchange names, a checkpoint has no
    name for a moment.

    Raises:
        CheckpointError: ``path`` is unchanged.
    """
    with _as_it_was(f"link {path} to {target}"), _renaming(path) as (reservation, workspace):
        fresh = reservation.directory.name
        os.symlink(os.path.relpath(target, path.parent), fresh, dir_fd=workspace.descriptor)
        if path.is_symlink() or not path.is_dir():
            workspace.give(fresh, path)
        else:
            _take_name(reservation, replaces=True)


@contextmanager
def _renaming(path: Path) -> Iterator[tuple[Reservation[Path], posix.OwnFolder]]:
    """Yield a reservation and its workspace for a block that renames ``path`` or a link to it. Then delete the earlier
    entry, durably."""
    reservation = _open_record(path)
    try:
        yield reservation, _held[reservation.token].workspace
        with suppress(OSError):  # otherwise a loss of power may undo the renames
            posix.sync_directory(path.parent)
    finally:
        _end_own(reservation)


def note(path: Path, data: bytes, replaced: Iterable[Path] = (), only_new: bool = False) -> bool:
    """Make a small file. See :meth:`dcp_plugin.core.media.medium.Medium.note`. A file that replaces another one is not
    durable at once."""
    is_in_workspace = is_workspace(path.parent.name)

    def write() -> bool:
        if is_in_workspace:
            posix.make_directories(path.parent)
        with posix.OwnFolder(path.parent) if is_in_workspace else posix.NamedFolder(path.parent.resolve()) as folder:
            if only_new and folder.has(path.name):
                return False
            fresh = path.name if only_new else f"{path.name}.new"
            if not only_new:
                folder.delete(fresh)
            with open(folder.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(data)
                if only_new:
                    file.flush()
                    os.fsync(file.fileno())
            if not only_new:
                folder.rename(fresh, path.name)
            for other in replaced:
                folder.delete(other.name)
        return True

    # An empty workspace was removed; or another process does the same.
    return _repeated(write, FileNotFoundError, FileExistsError)


def _repeated(call: Callable[[], R], *errors: type[OSError]) -> R:
    """Return the result of a call, which is repeated after these errors: another process is at work there."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(*errors):
            return call()
    return call()


@contextmanager
def _as_it_was(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {what}: {error}. Nothing was changed.") from error


def sweep(workspace: Path) -> None:
    """Collect the garbage of ended processes of this user and of failed calls. Moved checkpoints get their names back,
    and the other files are deleted. The next sweep repeats a step that fails."""
    for folder, token, noted in _ended_saves(workspace):
        with suppress(OSError):
            target = lease.target_in(noted)
            final = folder.path.parent / target if target else None
            if _end(folder, token, final, noted.get("publishing")):
                folder.delete(f"{token}.json")


def collect_garbage(workspace: Path, freed_by: Callable[[Path], int], dry_run: bool = False) -> list[Leftover[Path]]:
    """See :meth:`dcp_plugin.core.media.medium.Medium.collect_garbage`.

    Args:
        freed_by: Returns the bytes that deleting a path frees. May raise OSError.
    """
    if not dry_run:
        sweep(workspace)
    garbage: list[Leftover[Path]] = []
    for folder, token, noted in _ended_saves(workspace):
        with suppress(OSError):
            garbage += _left_by(folder, token, noted, freed_by)
    return [*garbage, *_of_other_users(workspace, freed_by)]


def _of_other_users(workspace: Path, freed_by: Callable[[Path], int]) -> Iterator[Leftover[Path]]:
    """Yield the garbage of other users, which stays, as far as this process can see that their saves have ended."""
    with suppress(OSError):
        for folder, token in _records(workspace, posix.Folder):
            path = folder.path / f"{token}.json"
            with suppress(OSError):
                status, noted = os.lstat(path), _noted(folder, token)
                of_folder = posix.why_not_own(os.fstat(folder.descriptor), folder.path)
                reason = of_folder or posix.why_not_own(status, path)
                if reason and lease.has_ended(noted, partial(float, time.time() - status.st_mtime)):
                    for leftover in _left_by(folder, token, noted, freed_by):
                        yield replace(leftover, what=f"{leftover.what}: {reason}", stays=True)


def _ended_saves(workspace: Path) -> Iterator[tuple[posix.OwnFolder, str, dict[str, Any]]]:
    """Yield the open workspace, the token and the contents of each record of an ended process of this user. The record
    is locked until the next one, where the file system has locks. Skip a record that cannot be opened."""
    for token in [token for token, held in list(_held.items()) if held.owner() is None]:
        _let_go(token)
    with suppress(OSError):
        for folder, token in _records(workspace, posix.OwnFolder):
            with suppress(OSError):
                descriptor = None if token in _held else _open_if_ended(folder, token)
                if descriptor is None:
                    continue
                try:
                    # Through the descriptor: closing another one of the file would drop the lock.
                    yield folder, token, _parsed(descriptor, folder.path / f"{token}.json")
                finally:
                    os.close(descriptor)


def _left_by(
    folder: posix.Folder, token: str, noted: Mapping[str, Any], freed_by: Callable[[Path], int]
) -> Iterator[Leftover[Path]]:
    final = folder.path.parent / (lease.target_in(noted) or "?")
    texts = {".saving": "an interrupted save of {}", ".deleted": "what an interrupted removal of {} has left"}
    aside = "{}, moved aside by a save that was interrupted"
    for path in (folder.path / name for name in folder.names() if name.startswith(f"{token}.")):
        if path.suffix == ".aside" and _is_missed(folder, path.name, final):
            yield Leftover(path, f"{aside}: it gets its name back".format(final), 0)
        elif path.suffix != ".json":
            yield Leftover(path, texts.get(path.suffix, aside).format(final), freed_by(path))


def _open_if_ended(folder: posix.OwnFolder, token: str) -> int | None:
    """Return the descriptor of a record of this user; None if the process that made it may be alive. The record is
    locked where the file system has locks. Raises OSError, also if another user has made it."""
    descriptor, is_locked = _locked(folder, token, create=False)
    if descriptor is None:
        return None
    has_ended, record = False, folder.path / f"{token}.json"
    try:
        if posix.refuse_other_user(descriptor, record).st_nlink > 1:  # another user gave a file of ours this name
            raise PermissionError(errno.EPERM, "it is a hard link", str(record))
        noted = _parsed(descriptor, record)
        # Without "mount" it is torn.
        shares_locks = "mount" not in noted or (noted["mount"] and noted["mount"] == posix.mount_of(descriptor))
        has_ended = (is_locked and shares_locks) or lease.has_ended(noted, lambda: _age(folder, descriptor))
    finally:
        if not has_ended:
            os.close(descriptor)
    return descriptor if has_ended else None


def _age(folder: posix.Folder, descriptor: int) -> float:
    """Return the seconds since the last heartbeat of a record. The clock is that of the file system: the workspace gets
    its present time."""
    os.utime(folder.descriptor)
    return os.fstat(folder.descriptor).st_mtime - os.fstat(descriptor).st_mtime


def locate(path: Path) -> Path:
    """Return ``path``, or the path of its checkpoint after a crash between the two renames of an overwrite."""
    for _ in range(_ATTEMPTS):
        if layout.has_traces(_names_in(path)):
            break
        is_in_flight = False
        for workspace in workspaces_of(path):
            with suppress(NotADirectoryError):
                for folder, token in _records(workspace, posix.Folder):
                    if lease.target_in(_noted(folder, token)) == _name_in(workspace, path):
                        is_in_flight, aside = True, workspace / f"{token}.aside"
                        if layout.uncommitted_reason(_names_in(aside)) == "":
                            return aside
        if not is_in_flight:
            break  # otherwise the new one may have its name by now
    return path


def _names_in(path: Path) -> list[str]:
    """Return the names in a directory; none if the path is no directory."""
    return _repeated(lambda: os.listdir(path) if path.is_dir() else [], FileNotFoundError, NotADirectoryError)


def _refuse_to_replace_other_things(final: Path, among_other_files: bool) -> None:
    # Each question is asked once: another save may replace the path at any time.
    try:
        mode = os.lstat(final).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    is_file = stat.S_ISREG(mode) and zipfile.is_zipfile(final)
    if not (stat.S_ISDIR(mode) or stat.S_ISLNK(mode) or is_file):
        raise SaveFailed(
            f"cannot save to {final}: there is a file of that name that is no checkpoint, and replacing it would "
            f"delete it. Save to a new name."
        )
    if (names := _names_in(final)) and not (layout.has_traces(names) or among_other_files):
        raise other_things(final, names)
    if layout.METADATA in names:
        refuse_to_replace_other_format(final, LocalFiles(final))


def _has_working_directory(path: Path) -> bool:
    """Return whether the working directory of this process is at a path or below it."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was deleted
        return False
    return any(path.samefile(above) for above in (here, *here.parents))


def _refuse_working_directory(final: Path) -> None:
    if final.is_dir() and _has_working_directory(final):
        raise SaveFailed(
            f"cannot save to {final}: it has the working directory of this process, which would go with the directory "
            f"that is replaced. Save to a new name, for example {final / 'checkpoint'}."
        )


def _refuse_below_a_file(final: Path) -> None:
    for above in final.parents:
        if os.path.lexists(above) and not os.path.isdir(above):
            raise SaveFailed(
                f"cannot save to {final}: {above} is not a directory. Save to another path, or move that file away."
            )


def _keep_other_files(workspace: posix.OwnFolder, old: str, new: posix.Folder) -> None:
    """Move files of other programs from the old checkpoint directory to the new one. Files of the old save stay."""
    try:
        folder = workspace.folder(old)
    except (FileNotFoundError, NotADirectoryError):
        return
    with folder:
        if not layout.has_traces(new.names()):
            raise OSError(errno.ENOENT, "it is no checkpoint any more", str(new.path))
        extra_files, moved = _extra_files(folder), False
        for name in folder.names():
            foreign = name not in extra_files and not layout.is_own(name)
            if foreign and not new.has(name):
                folder.give(name, name, to=new)
                moved = True
        if moved:  # before the old directory is deleted
            new.sync()


def _extra_files(checkpoint: posix.Folder) -> list[str]:
    """Return the names of the extra files in the summary."""
    try:
        return [str(name) for name in layout.json_object(_contents(checkpoint, layout.SUMMARY))["attached"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _contents(folder: posix.Folder, name: str) -> bytes:
    with FileIO(folder.open(name, os.O_RDONLY)) as file:
        return file.read(layout.MOST_JSON + 1)


def _identity(workspace: posix.Folder, name: str) -> str:
    """Return a value that no other save has; empty for a checkpoint of another tool."""
    try:
        with workspace.folder(name) as checkpoint:
            return hashlib.sha256(_contents(checkpoint, layout.SUMMARY)).hexdigest()
    except OSError:
        return ""


def _records(workspace: Path, kind: type[F]) -> Iterator[tuple[F, str]]:
    """Yield a workspace, open, and the token of each record in it.

    Args:
        kind: ``OwnFolder`` for records that the caller may change: the workspace of another user then has none.

    Raises:
        NotADirectoryError: It is a link. The target may have files of the user's.
    """
    try:
        folder = kind(workspace)
    except (FileNotFoundError, PermissionError):
        return
    with folder:
        for name in folder.names():
            if name.endswith(".json"):
                yield folder, name.removesuffix(".json")


def _open_record(final: Path, **entries: str) -> Reservation[Path]:
    """Return a reservation with a new token and its locked record in the workspace."""
    # PermissionError: another user has just made the workspace.
    return _repeated(lambda: _make_record(final, entries), FileNotFoundError, BlockingIOError, PermissionError)


def _note_maker(reservation: Reservation[Path], **entries: str) -> None:
    """Note in a record that this process has made it, and begin its heartbeat."""
    held, record = _held[reservation.token], reservation.directory.with_suffix(".json")
    _note_in_record(reservation, {**lease.maker(time.time()), "mount": posix.mount_of(held.descriptor), **entries})
    with interrupts_held():
        # By its path: the descriptor may belong to another file once the record is closed.
        held.stop_heartbeat = lease.start_heartbeat(lambda: os.utime(record, follow_symlinks=False))


def _make_record(final: Path, entries: dict[str, str]) -> Reservation[Path]:
    reservation = _reservation(final, uuid.uuid4().hex[:16])
    posix.make_directories(reservation.directory.parent)
    workspace = posix.OwnFolder(reservation.directory.parent)
    target = _name_in(workspace.path, reservation.final)
    # Before the record exists: a sweep in another thread of this process could lock it, and would drop the lock.
    held = _held[reservation.token] = _Held(workspace, target, weakref.ref(reservation))
    try:
        descriptor, _ = _locked(workspace, reservation.token, create=True)
        if descriptor is None:
            raise BlockingIOError(errno.EAGAIN, "another process is sweeping there", str(workspace.path))
        held.descriptor = descriptor
        _note_maker(reservation, target=target, **entries)
        # Before the directory of the save: a sweep after a loss of power finds garbage by its record.
        workspace.sync()
    except BaseException:
        _let_go(reservation.token, finished=True)
        raise
    return reservation


def _locked(workspace: posix.Folder, token: str, create: bool) -> tuple[int | None, bool]:
    """Open a record, and lock it where the file system has locks.

    Returns:
        Its descriptor, None while another process has the lock; and whether it is locked.
    """
    record = f"{token}.json"
    try:
        return posix.lock(workspace, record, create), True
    except FileNotFoundError:
        raise
    except OSError:  # a file system without locks
        return workspace.open(record, os.O_RDWR | (os.O_CREAT if create else 0)), False


def _note_in_record(reservation: Reservation[Path], entries: dict[str, Any]) -> None:
    """Add a line to the record, durably."""
    descriptor = _held[reservation.token].descriptor
    os.write(descriptor, json.dumps(entries).encode() + b"\n")
    os.fsync(descriptor)


def _end_own(reservation: Reservation[Path], publishing: str | None = None) -> None:
    """End a save or a removal of this process. The next save repeats a failed step."""
    is_over = False
    with suppress(OSError):
        is_over = _end(_held[reservation.token].workspace, reservation.token, reservation.final, publishing)
    _let_go(reservation.token, is_over)


def _end(workspace: posix.OwnFolder, token: str, final: Path | None, publishing: str | None) -> bool:
    """Give a moved checkpoint its name back, or move the files of other programs from it to the checkpoint that has
    replaced it. Then delete the files of the save.

    Args:
        final: The path of the checkpoint; None if the record is torn.
        publishing: The identity of a checkpoint that keeps the other files of the one that it replaces.

    Returns:
        Whether all files are durably deleted. Only then may the record be deleted.
    """
    # First of all the directory loses its name. Its process may only have been suspended, on a node that shares no
    # locks with this one. It would give the final name to a directory that is half deleted.
    with suppress(FileNotFoundError):
        workspace.rename(f"{token}.saving", f"{token}.deleted")
    aside = f"{token}.aside"
    if final is None and workspace.has(aside):  # whose name is unknown
        return False
    if final is not None and _is_missed(workspace, aside, final):
        _put_back(workspace, aside, final)
    elif final is not None and publishing is not None and final.is_dir():
        try:
            with posix.Folder(final) as new:
                for name in (f"{token}.deleted", aside):
                    if _identity(workspace, name) != publishing:
                        _keep_other_files(workspace, name, new)
        except OSError as error:
            logger.warning(
                "%s is saved, but the extra files of the previous checkpoint could not be moved into it (%s). They are "
                "in %s, and the next save in the same folder tries again.",
                *(final, error, workspace.path),
            )
            return False
    names = [name for name in workspace.names() if name.startswith(f"{token}.") and name != f"{token}.json"]
    remaining = [name for name in names if not workspace.delete(name)]
    if names:
        workspace.sync()
    return not remaining


def _let_go(token: str, finished: bool = False) -> None:
    """Drop the lock of a record.

    Args:
        finished: Delete the record. Otherwise the next save in the folder, also one of this process, sweeps its files.
    """
    held = _held.get(token)
    if held is None:
        return
    if finished:
        held.workspace.delete(f"{token}.json")
    held.stop_heartbeat()
    with interrupts_held():
        _held.pop(token, None)
        held.workspace.close()
        with suppress(OSError):
            os.close(held.descriptor)
    with suppress(OSError):  # not if other saves are using it
        held.workspace.remove()


def _parsed(descriptor: int, record: Path) -> dict[str, Any]:
    """Return the contents of an open record; nothing if it cannot be read."""
    return lease.contents(os.pread(descriptor, _MAX_RECORD, 0), record)


def _name_in(workspace: Path, final: Path) -> str:
    return final.relative_to(workspace.parent).as_posix()


def _noted(folder: posix.Folder, token: str) -> dict[str, Any]:
    """Return the contents of a record; nothing if it cannot be read. For a save of this process, return the target
    alone: closing its record would drop the lock."""
    if token in _held:
        return {"target": _held[token].target}
    with suppress(OSError), FileIO(folder.open(f"{token}.json", os.O_RDONLY)) as record:
        return _parsed(record.fileno(), folder.path / f"{token}.json")
    return {}


def record_of(directory: Path) -> dict[str, Any]:
    """Return the contents of the record of a save in flight; nothing if it cannot be read."""
    with suppress(OSError), posix.Folder(directory.parent) as folder:
        return _noted(folder, directory.stem)
    return {}


def _is_missed(workspace: posix.Folder, aside: str, final: Path) -> bool:
    """Return whether the old checkpoint was moved and its name is free."""
    if not workspace.has(aside):
        return False
    if not os.path.lexists(final):
        return True
    made_anew = final.is_dir() and not final.is_symlink() and not layout.has_traces(_names_in(final))
    return made_anew and not (workspace.path / aside).is_symlink()


def _put_back(workspace: posix.OwnFolder, aside: str, final: Path) -> None:
    """Give the old checkpoint its name back. A script may have made a new directory of that name with files in it."""
    if final.is_dir():
        with workspace.folder(aside) as old, posix.Folder(final) as new:
            for folder in (old, new):
                posix.refuse_other_user(folder.descriptor, folder.path)
            for name in new.names():
                old.delete(name)
                old.take(name, name, of=new)
    workspace.give(aside, final)  # replaces an empty directory
    posix.sync_directory(final.parent)
