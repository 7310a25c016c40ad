"""How a directory of files becomes a checkpoint, and what a crash leaves behind.

A checkpoint is real when, and only when, ``.metadata`` is in its final directory (for our own: ``dcp_plugin.json``
and ``dcp_plugin.index`` too). So a save never writes there. It goes through these verbs:

- :func:`reserve` makes ``<parent>/.dcp_plugin/<token>.saving/``, on the same file system as the final name, and
  ``<token>.json`` that says which checkpoint this will be. The process that saves holds a lock on the latter.
- All ranks write and sync their files there. What a framework keeps beside model and optimizer may be among them.
- :func:`publish` writes and syncs the metadata, and renames the directory to its final name. If something is there
  already, both names are exchanged in one system call, so there is no moment in which neither the old nor the new
  checkpoint can be loaded; where that call does not exist, the old one is moved to ``<token>.aside`` in between and
  :func:`locate` finds it there. Then the old one is deleted, but for files that others put into it: these move over.
- :func:`discard` ends a save that failed.

Deleting renames to ``<token>.deleted`` first, for the same reason. After a crash, the kernel has dropped the lock:
:func:`sweep`, called by the next save, puts back what was moved aside and deletes the rest. Nothing in
``.dcp_plugin`` is ever taken for a checkpoint, and its names do not contain those of checkpoints, because frameworks
look for patterns in names.

Two saves to one path at the same time are not guarded against each other beyond this: the last to publish wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
import uuid
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from dcp_plugin import format as layout
from dcp_plugin.errors import SaveFailed
from dcp_plugin.media import Reservation
from dcp_plugin.media.disk import posix

WORKSPACE = ".dcp_plugin"
_ACCELERATE_NUMBERED = re.compile(r"checkpoints/checkpoint_\d+")
_mine: dict[str, tuple[int, str]] = {}
"""The locks that this process holds: descriptor and target, by token. POSIX locks do not exclude their own process,
and closing any descriptor of a file drops them: the records of these tokens must not be opened again."""

_MAX_RECORD = 1 << 16
_ATTEMPTS = 20
"""Another process may remove the empty workspace just after we made it."""


def workspace_of(final: Path) -> Path:
    """Where a checkpoint is made and deleted: beside it. Only not among the numbered checkpoints of an Accelerate
    project: Accelerate takes every entry of that folder for one of them."""
    numbered = _ACCELERATE_NUMBERED.fullmatch(f"{final.parent.name}/{final.name}")
    return (final.parent.parent if numbered else final.parent) / WORKSPACE


def _reservation(final: Path, token: str) -> Reservation:
    return Reservation(final, token, workspace_of(final) / f"{token}.saving")


def _record(reservation: Reservation) -> Path:
    return reservation.directory.with_suffix(".json")


def reserve(final: Path, among_other_files: bool = False) -> Reservation:
    """Make the directory that a save to ``final`` writes into.

    Args:
        among_other_files: ``final`` may be a directory with other things in it than a checkpoint. They stay.

    Raises:
        SaveFailed: ``final`` is a directory with other things in it than a checkpoint, or below a file, or cannot be
            written.
    """
    _refuse_to_replace_other_things(final, among_other_files)
    _refuse_below_a_file(final)
    try:
        posix.make_directories(final.parent)
        sweep(workspace_of(final))
        reservation = _open_record(final)
        reservation.directory.mkdir()
    except OSError as error:
        raise SaveFailed(f"cannot save {final}: {error}. Is the file system full, read-only or gone?") from error
    return reservation


def publish(reservation: Reservation) -> None:
    """Give the finished directory its final name. All its files are synced already."""
    final, directory = reservation.final, reservation.directory
    posix.sync_directory(directory)
    if not os.path.lexists(final):
        os.rename(directory, final)
        posix.sync_directory(final.parent)
        discard(reservation)
        return
    _note_in_record(reservation, {"publishing": _identity(directory)})
    if posix.exchange(directory, final):
        _keep_other_files(directory, final)
        posix.sync_directory(directory.parent)
    else:
        aside = reservation.directory.with_suffix(".aside")
        os.rename(final, aside)
        os.rename(directory, final)
        _keep_other_files(aside, final)
    posix.sync_directory(final.parent)
    discard(reservation)


def discard(reservation: Reservation) -> None:
    """Delete what is left of a save, whether it was published or not. What it was to replace stays, if it was not."""
    _restore(reservation)
    for suffix in (".saving", ".aside", ".deleted"):
        posix.delete(reservation.directory.with_suffix(suffix))
    _close_record(reservation)


def remove(path: Path) -> None:
    """Delete a checkpoint; from the first moment on, nothing half-deleted can be taken for one."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    reservation = _open_record(path)
    os.rename(path, reservation.directory.with_suffix(".deleted"))
    posix.sync_directory(path.parent)
    discard(reservation)


def link(path: Path, target: Path) -> None:
    """Make ``path`` a link to the checkpoint ``target``, relative, so that both can be moved together.

    What was at ``path``, a link or a checkpoint, is there until the link is. Only where the kernel cannot exchange
    names there is a moment with neither, and only if it was a checkpoint.
    """
    reservation = _open_record(path)
    fresh = reservation.directory
    try:
        os.symlink(os.path.relpath(target, path.parent), fresh)
        if path.is_symlink() or not path.is_dir():
            os.replace(fresh, path)
        elif not posix.exchange(fresh, path):
            os.rename(path, reservation.directory.with_suffix(".aside"))
            os.rename(fresh, path)
        posix.sync_directory(path.parent)
    finally:
        discard(reservation)


def sweep(workspace: Path) -> None:
    """Tidy up after processes that died: put back what they moved aside, delete what they left."""
    for record in sorted(workspace.glob("*.json")):
        token = record.stem
        if token in _mine:
            continue
        try:
            descriptor = posix.lock(record)
        except OSError:  # no locks on this file system: whether that process lives is not known
            continue
        if descriptor is None:  # it lives
            continue
        try:
            # Through the descriptor: closing another one of the file would drop the lock.
            noted = _parsed(os.pread(descriptor, _MAX_RECORD, 0))
            if (target := _checked_target(noted)) is not None:
                _recover(_reservation(workspace.parent / target, token), noted)
            for leftover in workspace.glob(f"{token}.*"):
                posix.delete(leftover)
        finally:
            os.close(descriptor)


def locate(path: Path) -> Path:
    """``path``, or where its checkpoint is if a crash came between the two renames of an overwrite."""
    if not looks_like_checkpoint(path):
        workspace = workspace_of(path)
        for record in workspace.glob("*.json"):
            aside = record.with_suffix(".aside")
            if target_of(record) == _name_in(workspace, path) and uncommitted_reason(aside) == "":
                return aside
    return path


def uncommitted_reason(path: Path) -> str:
    """Why the directory is not a committed checkpoint, or an empty string if it is one."""
    if not path.is_dir():
        return "no such directory" if not path.exists() else "not a directory"
    return layout.uncommitted_reason(os.listdir(path))


def looks_like_checkpoint(path: Path) -> bool:
    """Whether a directory has files that only checkpoints have, committed or not."""
    return path.is_dir() and layout.has_traces(os.listdir(path))


def _refuse_to_replace_other_things(final: Path, among_other_files: bool) -> None:
    if final.is_file() and not final.is_symlink() and not zipfile.is_zipfile(final):
        raise SaveFailed(
            f"cannot save to {final}: there is a file of that name that is no checkpoint, and replacing it would "
            f"delete it. Save to a new name."
        )
    if final.is_dir() and final.samefile(os.curdir):
        raise SaveFailed(
            f"cannot save to {final}: it is the working directory of this process, which would go with the directory "
            f"that is replaced. Save to a new name, for example {final / 'checkpoint'}."
        )
    if final.is_dir() and os.listdir(final) and not (looks_like_checkpoint(final) or among_other_files):
        raise SaveFailed(
            f"cannot save to {final}: the directory has other things in it than a checkpoint, and replacing it would "
            f"delete them. Save to a new name, for example {final / 'checkpoint'}."
        )


def _refuse_below_a_file(final: Path) -> None:
    for above in final.parents:
        if os.path.lexists(above) and not os.path.isdir(above):
            raise SaveFailed(
                f"cannot save to {final}: {above} is in the way, which is no directory. Save to another place, or move "
                f"that away."
            )


def _keep_other_files(old: Path, new: Path) -> None:
    """Move files that others put into the old checkpoint directory to the new one; what its save made stays."""
    if old.is_dir() and not old.is_symlink():
        attached = _attached(old)
        for name in os.listdir(old):
            foreign = name not in attached and not layout.is_own(name)
            if foreign and not os.path.lexists(new / name):
                os.rename(old / name, new / name)


def _attached(checkpoint: Path) -> list[str]:
    """What the summary lists besides the checkpoint's own files."""
    try:
        return [str(name) for name in json.loads(_summary(checkpoint))["attached"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _summary(checkpoint: Path) -> bytes:
    with posix.open_regular(checkpoint / layout.SUMMARY) as file:
        return file.readall()


def _identity(checkpoint: Path) -> str:
    """Tells one save from any other; empty if this is no checkpoint of ours."""
    try:
        return hashlib.sha256(_summary(checkpoint)).hexdigest()
    except OSError:
        return ""


def _open_record(final: Path) -> Reservation:
    """A new token, with its locked record in the workspace."""
    for attempt in range(_ATTEMPTS):
        reservation = _reservation(final, uuid.uuid4().hex[:16])
        posix.make_directories(_record(reservation).parent)
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
        descriptor = posix.lock(_record(reservation))
    except FileNotFoundError:
        raise
    except OSError:  # a file system without locks: then nothing is swept
        descriptor = os.open(_record(reservation), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if descriptor is None:
        raise SaveFailed(f"cannot save {reservation.final}: another process is sweeping beside it. Try again.")
    target = _name_in(workspace_of(reservation.final), reservation.final)
    _mine[reservation.token] = (descriptor, target)
    host, pid, now = socket.gethostname(), os.getpid(), time.time()
    _note_in_record(reservation, {"target": target, "host": host, "pid": pid, "time": now})


def _note_in_record(reservation: Reservation, said: dict[str, Any]) -> None:
    """Add a line to the record, durably."""
    descriptor, _ = _mine[reservation.token]
    os.write(descriptor, json.dumps(said).encode() + b"\n")
    os.fsync(descriptor)


def _parsed(record: bytes) -> dict[str, Any]:
    """All that a record says, but for a line that was torn while it was written."""
    noted: dict[str, Any] = {}
    with suppress(ValueError, TypeError):
        for line in record.splitlines():
            noted.update(json.loads(line))
    return noted


def _name_in(workspace: Path, final: Path) -> str:
    return final.relative_to(workspace.parent).as_posix()


def _close_record(reservation: Reservation) -> None:
    _record(reservation).unlink(missing_ok=True)
    descriptor, _ = _mine.pop(reservation.token, (None, ""))
    if descriptor is not None:
        os.close(descriptor)
    with suppress(OSError):  # other saves are using it
        _record(reservation).parent.rmdir()


def target_of(record: Path) -> str | None:
    """The checkpoint that a record is about, relative to the workspace's parent; None if it is not known."""
    if record.stem in _mine:
        return _mine[record.stem][1]
    try:
        return _checked_target(_parsed(record.read_bytes()))
    except OSError:
        return None


def _checked_target(noted: dict[str, Any]) -> str | None:
    target = noted.get("target")
    known = isinstance(target, str) and (target == os.path.basename(target) or _ACCELERATE_NUMBERED.fullmatch(target))
    return target if known else None


def _recover(reservation: Reservation, noted: dict[str, Any]) -> None:
    """Put back the old checkpoint if the new one did not get its name, else what others had put into the old one."""
    final, aside = reservation.final, reservation.directory.with_suffix(".aside")
    if not _restore(reservation) and _identity(final) and _identity(final) == noted.get("publishing"):
        for old in (reservation.directory, aside):
            _keep_other_files(old, final)
        posix.sync_directory(final)


def _restore(reservation: Reservation) -> bool:
    """Put back the old checkpoint if it was moved aside and the new one did not get its name."""
    final, aside = reservation.final, reservation.directory.with_suffix(".aside")
    if not os.path.lexists(aside):  # a link leads nowhere from there
        return False
    made_anew = final.is_dir() and not final.is_symlink() and not looks_like_checkpoint(final)
    needed = not os.path.lexists(final) or (made_anew and not aside.is_symlink())
    if needed:
        _put_back(aside, final)
    return needed


def _put_back(aside: Path, final: Path) -> None:
    """Give the old checkpoint its name again. A script may have made the directory anew, and put files there."""
    if final.is_dir():
        for name in os.listdir(final):
            posix.delete(aside / name)
            os.rename(final / name, aside / name)
    os.rename(aside, final)  # replaces an empty directory
    posix.sync_directory(final.parent)
