"""How a directory of files becomes a checkpoint, and what a crash leaves behind.

A checkpoint is real when, and only when, ``.metadata`` is in its final directory (for our own: ``dcp_plugin.json``
and ``dcp_plugin.index`` too). So a save never writes there. It goes through these verbs:

- :func:`reserve` makes ``<parent>/.dcp_plugin/<token>.saving/``, on the same file system as the final name, and
  ``<token>.json`` that says which checkpoint this will be. The process that saves holds a lock on the latter.
- All ranks write and sync their files there.
- :func:`publish` writes and syncs the metadata, and renames the directory to its final name. If something is there
  already, both names are exchanged in one system call, so there is no moment in which neither the old nor the new
  checkpoint can be loaded; where that call does not exist, the old one is moved to ``<token>.aside`` in between and
  :func:`locate` finds it there. Then the old one is deleted.
- :func:`discard` ends a save that failed.

Deleting renames to ``<token>.deleted`` first, for the same reason. After a crash, the kernel has dropped the lock:
:func:`sweep`, called by the next save, puts back what was moved aside and deletes the rest. Nothing in
``.dcp_plugin`` is ever taken for a checkpoint, and its names do not contain those of checkpoints, because frameworks
look for patterns in names.

Two saves to one path at the same time are not guarded against each other beyond this: the last to publish wins.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dcp_plugin.errors import SaveFailed
from dcp_plugin.storage import files

WORKSPACE = ".dcp_plugin"
METADATA = ".metadata"
SUMMARY = "dcp_plugin.json"
INDEX = "dcp_plugin.index"
DATA_SUFFIX = ".distcp"

_OURS = {METADATA, SUMMARY, INDEX, "meta.pt"}
_mine: dict[str, tuple[int, str]] = {}
"""The locks that this process holds: descriptor and target, by token. POSIX locks do not exclude their own process,
and closing any descriptor of a file drops them: the records of these tokens must not be opened again."""

_ATTEMPTS = 20
"""Another process may remove the empty workspace just after we made it."""


@dataclass(frozen=True)
class Reservation:
    """A save in flight: where its files go and what it will be called."""

    final: Path
    token: str

    @property
    def directory(self) -> Path:
        return self._beside("saving")

    @property
    def record(self) -> Path:
        return self._beside("json")

    def _beside(self, suffix: str) -> Path:
        return self.final.parent / WORKSPACE / f"{self.token}.{suffix}"


def reserve(final: Path) -> Reservation:
    """Make the directory that a save to ``final`` writes into.

    Raises:
        SaveFailed: ``final`` is a directory with other things in it than a checkpoint, or cannot be written.
    """
    _refuse_to_replace_other_things(final)
    try:
        files.make_directories(final.parent)
        sweep(final.parent)
        reservation = _open_record(final)
        reservation.directory.mkdir()
    except OSError as error:
        raise SaveFailed(f"cannot save {final}: {error}. Is the file system full, read-only or gone?") from error
    return reservation


def publish(reservation: Reservation) -> None:
    """Give the finished directory its final name. All its files are synced already."""
    final, directory = reservation.final, reservation.directory
    files.sync_directory(directory)
    if not os.path.lexists(final):
        os.rename(directory, final)
    elif files.exchange(directory, final):
        _keep_other_files(directory, final)
        files.sync_directory(directory.parent)
    else:
        aside = reservation._beside("aside")
        os.rename(final, aside)
        os.rename(directory, final)
        _keep_other_files(aside, final)
    files.sync_directory(final.parent)
    discard(reservation)


def discard(reservation: Reservation) -> None:
    """Delete what is left of a save, whether it was published or not."""
    for suffix in ("saving", "aside", "deleted"):
        files.delete(reservation._beside(suffix))
    _close_record(reservation)


def remove(path: Path) -> None:
    """Delete a checkpoint; from the first moment on, nothing half-deleted can be taken for one."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    reservation = _open_record(path)
    os.rename(path, reservation._beside("deleted"))
    files.sync_directory(path.parent)
    discard(reservation)


def sweep(parent: Path) -> None:
    """Tidy up after processes that died: put back what they moved aside, delete what they left."""
    for record in sorted((parent / WORKSPACE).glob("*.json")):
        token = record.stem
        if token in _mine:
            continue
        target = target_of(record)
        try:
            descriptor = files.lock(record)
        except OSError:  # no locks on this file system: nobody can tell whether that process lives
            continue
        if descriptor is None:  # it lives
            continue
        try:
            if target is not None:
                _recover(Reservation(parent / target, token))
            for leftover in (parent / WORKSPACE).glob(f"{token}.*"):
                files.delete(leftover)
        finally:
            os.close(descriptor)


def locate(path: Path) -> Path:
    """``path``, or where its checkpoint is if a crash came between the two renames of an overwrite."""
    if not path.exists():
        for record in (path.parent / WORKSPACE).glob("*.json"):
            aside = record.with_suffix(".aside")
            if target_of(record) == path.name and uncommitted_reason(aside) == "":
                return aside
    return path


def uncommitted_reason(path: Path) -> str:
    """Why the directory is not a committed checkpoint, or an empty string if it is one."""
    if not path.is_dir():
        return "no such directory" if not path.exists() else "not a directory"
    names = os.listdir(path)
    if METADATA not in names:
        return "its save was never committed (no .metadata)" if looks_like_checkpoint(path) else "not a checkpoint"
    if (SUMMARY in names) != (INDEX in names):
        return f"incomplete: {SUMMARY if INDEX in names else INDEX} is missing"
    return ""


def looks_like_checkpoint(path: Path) -> bool:
    """Whether a directory has files that only checkpoints have, committed or not."""
    return path.is_dir() and any(name in (METADATA, INDEX) or name.endswith(DATA_SUFFIX) for name in os.listdir(path))


def _refuse_to_replace_other_things(final: Path) -> None:
    if final.is_file() and not final.is_symlink() and not zipfile.is_zipfile(final):
        raise SaveFailed(
            f"cannot save to {final}: there is a file of that name that is no checkpoint, and replacing it would "
            f"delete it. Save to a new name."
        )
    if final.is_dir() and os.listdir(final) and not looks_like_checkpoint(final):
        raise SaveFailed(
            f"cannot save to {final}: the directory has other things in it than a checkpoint, and replacing it would "
            f"delete them. Save to a new name, for example {final / 'checkpoint'}."
        )


def _keep_other_files(old: Path, new: Path) -> None:
    """Files that somebody put into the old checkpoint directory move to the new one."""
    if old.is_dir() and not old.is_symlink():
        for name in os.listdir(old):
            foreign = name not in _OURS and not name.endswith(DATA_SUFFIX)
            if foreign and not os.path.lexists(new / name):
                os.rename(old / name, new / name)


def _open_record(final: Path) -> Reservation:
    """A new token, with its locked record in the workspace."""
    for attempt in range(_ATTEMPTS):
        reservation = Reservation(final, uuid.uuid4().hex[:16])
        files.make_directories(reservation.record.parent)
        try:
            _lock_record(reservation)
        except FileNotFoundError:
            if attempt + 1 == _ATTEMPTS:
                raise
        else:
            break
    return reservation


def _lock_record(reservation: Reservation) -> None:
    try:
        descriptor = files.lock(reservation.record)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without locks: then nobody sweeps
        descriptor = os.open(reservation.record, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if descriptor is None:
        raise SaveFailed(f"cannot save {reservation.final}: another process is sweeping beside it. Try again.")
    _mine[reservation.token] = (descriptor, reservation.final.name)
    said = {"target": reservation.final.name, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    os.write(descriptor, json.dumps(said).encode())
    os.fsync(descriptor)


def _close_record(reservation: Reservation) -> None:
    reservation.record.unlink(missing_ok=True)
    descriptor, _ = _mine.pop(reservation.token, (None, ""))
    if descriptor is not None:
        os.close(descriptor)
    with suppress(OSError):  # other saves are using it
        reservation.record.parent.rmdir()


def target_of(record: Path) -> str | None:
    """The name of the checkpoint that a record is about; None if it was torn while being written."""
    if record.stem in _mine:
        return _mine[record.stem][1]
    try:
        target = json.loads(record.read_bytes())["target"]
    except (ValueError, KeyError, TypeError, OSError):
        return None
    return target if isinstance(target, str) and target == os.path.basename(target) else None


def _recover(reservation: Reservation) -> None:
    aside = reservation._beside("aside")
    if aside.exists() and not os.path.lexists(reservation.final):
        os.rename(aside, reservation.final)
        files.sync_directory(reservation.final.parent)
