"""How objects become a checkpoint where nothing can be renamed, and what a crash leaves behind.

A checkpoint is real when, and only when, ``.metadata`` is at its prefix (:mod:`dcp_plugin.format.packed`). A save goes
through these verbs:

- :func:`reserve` puts a record beside the checkpoint, ``<parent>/.dcp_plugin/<token>.json``, and remembers which
  ``.metadata`` is there now. While the process lives, it puts the record again every minute.
- All ranks write their objects, under names with the token in them, which no other save uses.
- :func:`publish` puts ``.metadata``: only if there is none, or only in place of the one that was there at the start. Of
  two saves to one path the second therefore fails, and what it has written is deleted.
- :func:`discard` deletes what a save has written.

Whoever reads the old checkpoint while a new one takes its place still finds the objects of the old one. They are
deleted by the save after the new one. Deleting a checkpoint deletes ``.metadata`` first.

Records of the dead are recognised by the time at which they were last put, by the clock of the store; on the machine of
the dead, by the number of its process. What they tell of is deleted by the next save beside it (:func:`sweep`), for up
to 100 of them together:

1. The record is put again, as that of one who is dead. Who is not dead after all learns of it before it commits, and
   the next one goes on if this one dies, too.
2. Where the dead would have replaced a checkpoint, ``.metadata`` gets another tag, so that a request of the dead which
   is still on its way fails. Where there was none, who commits looks at its record afterwards, too.
3. The objects are listed, then the records, then ``.metadata`` is looked at: in this order whatever was listed has a
   record if its save lives, or is published. The rest is deleted, and last the record.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from dcp_plugin.errors import CheckpointError, SaveFailed
from dcp_plugin.format import (
    DATA_SUFFIX,
    INDEX,
    METADATA,
    NUMBERED,
    PACKED,
    SUMMARY,
    has_traces,
    is_of_other_tool,
    is_own,
)
from dcp_plugin.format.packed import END, end_of, new_token, next_edition, packed, time_of, token_in
from dcp_plugin.format.summary import MAX_SIZE
from dcp_plugin.format.torch_archive import MAGIC
from dcp_plugin.launcher import launch_record
from dcp_plugin.media import Leftover, Reservation, is_target, is_workspace, lease, other_things, workspace_of
from dcp_plugin.media.disk import posix
from dcp_plugin.media.objects.client import (
    IN_FLIGHT,
    MOST_COPIED,
    PART,
    STREAMS,
    Changed,
    Client,
    Found,
    NoConditions,
    client_of,
)
from dcp_plugin.media.packed import HAS_BASE
from dcp_plugin.paths import ObjectPath

logger = logging.getLogger("dcp_plugin")

_CLOCKS_DIFFER = 2.0
"""Seconds. Below that, the clock of this machine is the finer one; a store tells full seconds."""
_ATTEMPTS = 5
_SWEPT_AT_ONCE = 16
"""Records beside which a save itself deletes what the dead have left: each takes some ten requests."""
_SWEPT_TOGETHER = 100
"""Records that are deleted by one request."""
_COMMITTING = 60.0
"""Seconds after which no other attempt to put ``.metadata`` begins."""
SAVING = ".saving"
_OTHER_TAG = f'"{32 * "0"}"'


@dataclass
class _Held:
    """A save in flight of this process."""

    reservation: Reservation[ObjectPath]
    tag: str | None
    """Of the ``.metadata`` that this save replaces."""
    replaced: str
    """The token in that ``.metadata``; empty if it has none."""
    said: bytes
    """What its record says."""
    ended: threading.Event
    copies: str = ""
    """The save whose objects this one copies, if it is no save itself."""
    replaces_file: bool = False
    """Whether there is a checkpoint in one object of the name: some frameworks write both under one name."""
    in_doubt: bool = False
    """Whether nobody knows if ``.metadata`` was put."""


_held: dict[str, _Held] = {}
_swept_in_threads: set[ObjectPath] = set()
_conditional: dict[str, bool] = {}
"""Whether a store has conditional requests, where that was tried."""
_last_time = [0.0]


def below(path: ObjectPath, name: str) -> str:
    """The key of a name below a path."""
    return f"{path.key}/{name}" if path.key else name


def _record(reservation: Reservation[ObjectPath]) -> str:
    return below(workspace_of(reservation.final), f"{reservation.token}.json")


ADVICE = "Is the bucket there, can it be reached, and may this job write to it?"


def reserve(final: ObjectPath, among_other_files: bool = False, copy_of: str = "") -> Reservation[ObjectPath]:
    """Begin a save. See :meth:`dcp_plugin.media.Medium.reserve`."""
    client = client_of(final)
    if not final.key:
        raise SaveFailed(f"cannot save to {final}: it is a whole bucket. Save below it: {final / 'checkpoint'}.")
    try:
        objects, folders = client.directly_below(final.key)
        names = {one.key.rpartition("/")[2]: one for one in objects}
        among_other_files = among_other_files or bool(copy_of)  # who copies has looked at what is there
        replaces_file = _refuse_to_replace_other_things(client, final, [*names, *folders], among_other_files)
        reservation = _begin(client, final, names.get(METADATA), **({"copies": copy_of} if copy_of else {}))
        if copy_of:
            reservation = replace(reservation, directory=final / f"{copy_of}{SAVING}", time=None)
        _held[reservation.token].replaces_file = replaces_file
        try:
            if copy_of:
                _refuse_if_copied_twice(client, reservation)
            records = _Records(client, workspace_of(final))
            _sweep_beside(client, workspace_of(final), records)
            if names or folders:
                _clean(client, final, _listed(client, final), records.alive())
        except BaseException:
            _let_go(client, reservation)  # nothing is written yet
            raise
    except OSError as error:
        raise SaveFailed(f"cannot save {final}: {error}. {ADVICE}") from error
    return reservation


def _refuse_if_copied_twice(client: Client, reservation: Reservation[ObjectPath]) -> None:
    """Two copies of the same to one path would write the same objects, and the first to fail delete them."""
    workspace = workspace_of(reservation.final)
    records = _records(client, workspace)
    now = max((one.modified for one in records.values()), default=0.0)
    for token, found in records.items():
        noted = _noted(client, found) if token != reservation.token else None
        if noted is None or noted.get("copies") != reservation.directory.stem:
            continue
        if not is_target(noted.get("target")) or workspace.parent / noted["target"] != reservation.final:
            continue
        if token in _held or not _is_dead(noted, found, now):
            raise SaveFailed(
                f"cannot copy to {reservation.final}: another process ({noted.get('pid')} on {noted.get('host')}) is "
                f"copying the same, or has died less than {lease.LEASE / 60:.0f} minutes ago."
            )


def _begin(client: Client, final: ObjectPath, published: Found | None, **noted: Any) -> Reservation[ObjectPath]:
    """Put a record of what is to be done with the checkpoint at a path, of which ``published`` is the ``.metadata``.

    Its token has the time of this machine's clock, if that agrees with the store's, and else of the latter.
    """
    now, last = time.time(), _last_time[0]
    held = _put_record(client, final, published, now, noted)
    try:
        found = client.head(_record(held.reservation))
        if found is not None and abs(found.modified - now) > _CLOCKS_DIFFER:
            _let_go(client, held.reservation)
            _last_time[0] = last  # what comes next need not be later than a time that is wrong
            held = _put_record(client, final, published, found.modified, noted)
        if final.store not in _conditional:
            _conditional[final.store] = _refuses(client, _record(held.reservation), held.said)
            if not _conditional[final.store]:
                _say_unconditional(final.store)
    except BaseException:
        _let_go(client, held.reservation)
        raise
    lease.start_heartbeat(held.ended, lambda: _put_again(client, held))
    return held.reservation


def _put_record(
    client: Client, final: ObjectPath, published: Found | None, now: float, noted: Mapping[str, Any]
) -> _Held:
    began = _last_time[0] = max(now, _last_time[0] + 0.001)
    token = new_token(began)
    reservation = Reservation(final, token, final / f"{token}.saving", time_of(token))
    maker = {"host": socket.gethostname(), "machine": posix.machine(), "pid": os.getpid(), "time": now}
    target = final.key.removeprefix(workspace_of(final).parent.key).lstrip("/")
    tag = published.tag if published else None
    said = json.dumps({"target": target, **maker, "launch": launch_record(), "replaces": tag, **noted}).encode()
    replaced = _token_of(client, published)
    held = _held[token] = _Held(reservation, tag, replaced, said, threading.Event(), str(noted.get("copies", "")))
    try:
        client.put(_record(reservation), said)
    except BaseException:
        del _held[token]  # a record of this process of which it does not know is one of the dead
        raise
    return held


def _put_again(client: Client, held: _Held) -> None:
    """Put the record of a save of this process again, unless another job took the save for dead."""
    with suppress(Changed):
        if (found := _own(client, held)) is not None:
            _put_over(client, held.reservation.final, found.key, held.said, found.tag)


def _own(client: Client, held: _Held) -> Found | None:
    """The record of a save of this process; None if another job took the save for dead, which makes it longer."""
    found = client.head(_record(held.reservation))
    return found if found is not None and found.size == len(held.said) else None


def _put_over(client: Client, final: ObjectPath, key: str, data: bytes, tag: str | None) -> None:
    """Put an object where the store can tell: if there is the one with this tag, or none.

    Raises:
        Changed: There is another one.
    """
    if _conditional.get(final.store, True):
        try:
            client.put_if(key, data, tag)
            return
        except NoConditions:
            _conditional[final.store] = False
            _say_unconditional(final.store)
    client.put(key, data)


def _refuses(client: Client, record: str, said: bytes) -> bool:
    """Whether the store refuses to put an object that is there, on the condition that it is not or is another one."""
    for tag in (None, _OTHER_TAG):
        try:
            client.put_if(record, said, tag)
            return False
        except Changed:
            continue
        except NoConditions:
            return False
    return True


def _say_unconditional(store: str) -> None:
    logger.warning(
        "%s has no conditional requests: of two saves to one path at the same time, the last to end wins, and the "
        "other is not told. Let one job save to a path at a time.",
        store,
    )


def _refuse_to_replace_other_things(
    client: Client, final: ObjectPath, names: list[str], among_other_files: bool
) -> bool:
    """Whether there is an object that has the name itself, and is a checkpoint in one file."""
    last = [name.rstrip("/").rpartition("/")[2] for name in names]
    if names and not (has_traces(last) or among_other_files):
        raise other_things(final, last)
    if not names and (there := client.head(final.key)) is not None and there.size:
        first = bytearray(len(MAGIC))
        client.read(final.key, 0, [memoryview(first)], None)
        if first != MAGIC:
            raise SaveFailed(f"cannot save to {final}: there is an object of that name that is no checkpoint.")
        return True
    return False


def publish(reservation: Reservation[ObjectPath], files: Mapping[str, bytes] | None) -> None:
    """Put the tables of contents, ``.metadata`` last.

    Raises:
        SaveFailed: Another save was published there since this one began, or was taken for dead.
        OSError: What was there is there still.
    """
    final, token = reservation.final, reservation.directory.stem
    client = client_of(final)
    if files is None:
        raise OSError(errno.ENOTSUP, "an object has its name from the first moment", str(final))
    if SUMMARY not in files:
        _publish_of_others(client, reservation, files)
        return
    beside = {name: data for name, data in files.items() if name not in (METADATA, SUMMARY)}
    if json.loads(files[SUMMARY])["base"]:
        beside[HAS_BASE] = b""
    for name, data in beside.items():
        client.put(below(final, f"{PACKED}{token}/{name}"), data)
    held = _held[reservation.token]
    _refuse_if_taken_for_dead(client, held)
    _commit(client, reservation, packed(files[METADATA], files[SUMMARY], token), token)
    if held.tag is None:
        _undo_if_taken_for_dead(client, held)
    if held.replaces_file:
        with suppress(OSError):
            client.delete([final.key])
    _let_go(client, reservation)


def _publish_of_others(client: Client, reservation: Reservation[ObjectPath], files: Mapping[str, bytes]) -> None:
    """Put the last files of a checkpoint of another tool."""
    held = _held[reservation.token]
    _refuse_if_taken_for_dead(client, held)
    for name, data in files.items():
        if name == METADATA:
            _commit(client, reservation, data, "")
        else:
            client.put(below(reservation.final, name), data)
    _let_go(client, reservation)


def _refuse_if_taken_for_dead(client: Client, held: _Held) -> None:
    if _own(client, held) is None:
        raise SaveFailed(
            f"cannot commit {held.reservation.final}: another job took this save for dead, since nothing was heard of "
            f"it for {lease.LEASE / 60:.0f} minutes, and has deleted what it had written. Save again."
        )


def _undo_if_taken_for_dead(client: Client, held: _Held) -> None:
    """A process that was stopped just before it put ``.metadata`` may have done so when its objects were gone."""
    try:
        _refuse_if_taken_for_dead(client, held)
    except SaveFailed:
        client.delete([below(held.reservation.final, METADATA)])
        raise
    except OSError as error:  # it was there a moment ago
        logger.debug("whether %s was taken for dead cannot be seen: %s", held.reservation.final, error)


def _commit(client: Client, reservation: Reservation[ObjectPath], data: bytes, token: str) -> None:
    """Put ``.metadata``. An answer that was lost on the way is no failure: what is there tells whose it is. Nor is
    another edition of the checkpoint that is replaced: a dead save would have replaced it too."""
    final, held = reservation.final, _held[reservation.token]
    key = below(final, METADATA)
    until = time.monotonic() + _COMMITTING
    for attempt in range(_ATTEMPTS):
        failure: Exception
        try:
            _put_over(client, final, key, data, held.tag)
            return
        except (Changed, OSError) as error:
            failure = error
        held.in_doubt = held.in_doubt or isinstance(failure, OSError)
        with suppress(OSError):
            found = client.head(key)
            published = _token_of(client, found)
            if token and published == token:
                held.in_doubt = False
                return
            if isinstance(failure, Changed):
                held.in_doubt = False
                if found is not None and published and published == held.replaced:  # see _outdate
                    _refuse_if_taken_for_dead(client, held)
                    held.tag = found.tag
                    continue
        if isinstance(failure, Changed):
            raise SaveFailed(
                f"cannot commit {final}: another save was published there, or it was deleted, since this one began. "
                f"What is there stays. Let one job save to a path at a time."
            ) from failure
        if failure.errno == errno.EACCES or time.monotonic() > until or attempt + 1 == _ATTEMPTS:
            break
    raise failure


def token_at(client: Client, path: ObjectPath) -> str:
    """The save that is published at a path; empty if it is none of this kind."""
    return _token_of(client, client.head(below(path, METADATA)))


def _token_of(client: Client, found: Found | None) -> str:
    """Return the token at the end of a ``.metadata``; empty if it has none, or is gone."""
    if found is None or found.size < END:
        return ""
    last = bytearray(END)
    with suppress(Changed, FileNotFoundError):
        client.read(found.key, found.size - END, [memoryview(last)], found.tag)
    end = end_of(bytes(last))
    return end[0] if end else ""


def discard(reservation: Reservation[ObjectPath], all_ended: bool = True, keep: bool = False) -> None:
    """End a save that was not published. See :meth:`dcp_plugin.media.Medium.discard`. A record that is kept is a record
    of an ended process from now on."""
    held = _held.pop(reservation.token, None) if keep else _held.get(reservation.token)
    if held is None or keep:
        if held is not None:
            held.ended.set()
        return
    client, token = client_of(reservation.final), reservation.directory.stem
    try:
        if held.in_doubt:
            raise OSError("nobody knows yet whether it was published")
        if token_at(client, reservation.final) != token:
            there = client.below(reservation.final.key)
            client.delete([one.key for one in there if token_in(_name_below(reservation.final, one.key)) == token])
        if all_ended:
            _let_go(client, reservation)
    except OSError as error:
        logger.warning("what the save of %s has written is left for the next save: %s", reservation.final, error)
    finally:
        _held.pop(reservation.token, held).ended.set()


def _name_below(path: ObjectPath, key: str) -> str:
    return key.removeprefix(below(path, ""))


def _let_go(client: Client, reservation: Reservation[ObjectPath]) -> None:
    held = _held.pop(reservation.token, None)
    if held is not None:
        held.ended.set()
    with suppress(OSError):  # the next save beside it finds that it tells of nothing any more
        client.delete([_record(reservation)])


def remove(path: ObjectPath) -> None:
    """Delete a checkpoint, ``.metadata`` first; or an object.

    Raises:
        CheckpointError: It could not be deleted, or not completely. From the first moment on it is no checkpoint.
    """
    client = client_of(path)
    if not path.key:
        raise CheckpointError(f"cannot delete {path}: it is a whole bucket. Name a checkpoint in it.")
    try:
        if names := {_name_below(path, one.key): one for one in client.below(path.key)}:
            keeps = _names_of_others(client, path, names)
            reservation = _begin(client, path, None, deletes=True, keeps=keeps)
            client.delete([below(path, METADATA)])
            there = _listed(client, path)
            _clean(client, path, there, _Records(client, workspace_of(path)).alive(), all_of_it=True, keeps=keeps)
            _let_go(client, reservation)
        elif client.head(path.key) is not None:
            client.delete([path.key])
    except OSError as error:
        raise CheckpointError(
            f"cannot delete {path}: {error}. It is there as it was, or is no checkpoint any more; delete it again."
        ) from error


def _names_of_others(client: Client, path: ObjectPath, names: Mapping[str, Found]) -> list[str]:
    """Return the objects and folders directly below a checkpoint that are no part of it."""
    attached: list[Any] = []
    entries = {name.partition("/")[0] for name in names}
    if SUMMARY in names:
        attached = _list_in(_noted(client, names[SUMMARY], MAX_SIZE) or {}, "attached")
    elif not token_at(client, path):
        others = {name for name in entries if not is_of_other_tool(name)}
        if NUMBERED.fullmatch(path.name):  # it is rotated as a whole, but for a checkpoint in it
            others = {name for name in others if is_workspace(name) or f"{name}/{METADATA}" in names}
        return sorted(others) if others != entries else []  # no checkpoint at all: the caller wants all to go
    return sorted(name for name in entries if not is_own(name) and name not in attached)


def _list_in(noted: Mapping[str, Any], name: str) -> list[Any]:
    value = noted.get(name)
    return value if isinstance(value, list) else []


def link(path: ObjectPath, target: ObjectPath) -> None:
    """Copy a checkpoint within the store, by the same rule; a store has no links.

    Raises:
        CheckpointError: What was at ``path`` is there still.
    """
    client = client_of(path)
    reservation = None
    try:
        token = token_at(client, target)
        there = {_name_below(target, one.key): one for one in client.below(target.key)}
        metadata = there.pop(METADATA)
        data = bytearray(metadata.size)
        client.read(metadata.key, 0, [memoryview(data)], metadata.tag)
        reservation = _begin(client, path, client.head(below(path, METADATA)), copies=token)
        _clean(client, path, _listed(client, path), _Records(client, workspace_of(path)).alive())
        for name, one in there.items():
            if token_in(name) in ("", token):
                _copy(client, one, below(path, name))
        _commit(client, reservation, bytes(data), token)
    except (OSError, Changed, NoConditions, KeyError, SaveFailed) as error:
        why = f"{target} is not there" if isinstance(error, KeyError) else error
        raise CheckpointError(f"cannot copy {target} to {path}: {why}. What was there is there still.") from error
    finally:
        if reservation is not None:
            _let_go(client, reservation)


def _copy(client: Client, found: Found, to: str) -> None:
    """Copy an object; one that is too large for a request of the store passes through here."""
    if found.size <= MOST_COPIED:
        client.copy(found.key, to)
        return
    with client.create(to, found.size, IN_FLIGHT) as copy:
        for begin in range(0, found.size, PART):
            memory = memoryview(bytearray(min(PART, found.size - begin)))
            done = 0
            while done < len(memory):
                done += client.read(found.key, begin + done, [memory[done:]], found.tag)
            copy.write(memory, kept=True)


@dataclass(frozen=True)
class _Dead:
    """The record of a save whose process has died."""

    token: str
    record: Found
    noted: dict[str, Any]


class _Records:
    """The records of a workspace. Each is read once, and again when it has changed."""

    def __init__(self, client: Client, workspace: ObjectPath) -> None:
        self._client, self._workspace = client, workspace
        self._noted: dict[tuple[str, str], dict[str, Any] | None] = {}

    def read(self) -> dict[str, tuple[Found, dict[str, Any] | None]]:
        """Return the records that are there now, by token, and what each says."""
        found = _records(self._client, self._workspace)
        unknown = [one for one in found.values() if (one.key, one.tag) not in self._noted]
        if unknown:
            with ThreadPoolExecutor(min(STREAMS, len(unknown)), thread_name_prefix="dcp-records") as pool:
                read = pool.map(lambda one: _noted(self._client, one), unknown)
                self._noted |= {(one.key, one.tag): noted for one, noted in zip(unknown, read, strict=True)}
        return {token: (one, self._noted[one.key, one.tag]) for token, one in found.items()}

    def alive(self) -> set[str]:
        """Return the tokens of saves in flight, and of those whose objects are being copied."""
        alive = set[str]()
        for token, (_, noted) in self.read().items():
            held = _held.get(token)
            noted = {"copies": held.copies} if held else noted
            if noted is not None and not noted.get("dead"):
                alive |= {token, str(noted.get("copies", ""))}
        return alive


def sweep(client: Client, workspace: ObjectPath, records: _Records | None = None) -> None:
    """Delete what saves have left that died. What fails is left for the next time."""
    records = records or _Records(client, workspace)
    there = records.read()
    now = max((found.modified for found, _ in there.values()), default=0.0)  # that of this save was put just now
    dead = [
        _Dead(token, found, noted)
        for token, (found, noted) in there.items()
        if token not in _held and noted is not None and _is_dead(noted, found, now)
    ]
    for first in range(0, len(dead), _SWEPT_TOGETHER):
        _sweep_some(client, workspace, records, dead[first : first + _SWEPT_TOGETHER])


def _sweep_some(client: Client, workspace: ObjectPath, records: _Records, dead: list[_Dead]) -> None:
    """Delete what some of the dead have left. The order is the one that the module's docstring gives."""
    left: dict[ObjectPath, list[_Dead]] = {}
    gone: list[_Dead] = []
    for one in dead:
        path = workspace.parent / one.noted["target"] if is_target(one.noted.get("target")) else None
        with _left_for_the_next(path), suppress(Changed):  # it has let go, or says that it lives
            if not one.noted.get("dead"):
                said = json.dumps({**one.noted, "dead": True}).encode()
                _put_over(client, workspace, one.record.key, said, one.record.tag)
            if path is None:
                gone.append(one)
            else:
                _outdate(client, path, one.noted)
                left.setdefault(path, []).append(one)
    there: dict[ObjectPath, dict[str, str]] = {}
    for path in left:
        with _left_for_the_next(path):
            there[path] = _listed(client, path)
    alive = records.alive()
    for path, objects in there.items():
        with _left_for_the_next(path):
            deletes = [one.noted for one in left[path] if one.noted.get("deletes")]
            keeps = {name for noted in deletes for name in _list_in(noted, "keeps")}
            _clean(client, path, objects, alive, bool(deletes), keeps)
            gone += left[path]
    copied = {str(one.noted.get("copies", "")) for one in gone} - {"", *alive}
    if gone:
        client.abort_uploads(workspace.parent.key, {one.token for one in gone} | copied)
        client.delete([one.record.key for one in gone])


@contextmanager
def _left_for_the_next(path: ObjectPath | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("what is left of a save of %s cannot be deleted: %s", path, error)


def _sweep_beside(client: Client, workspace: ObjectPath, records: _Records) -> None:
    """:func:`sweep`, in a thread where so many records are there that the save would wait for it."""
    if len(records.read()) <= _SWEPT_AT_ONCE:
        sweep(client, workspace, records)
    elif workspace not in _swept_in_threads:
        _swept_in_threads.add(workspace)
        threading.Thread(target=_sweep_in_thread, args=(client, workspace), name="dcp-sweep", daemon=True).start()


def _sweep_in_thread(client: Client, workspace: ObjectPath) -> None:
    try:
        with _left_for_the_next(workspace):
            sweep(client, workspace)
    finally:
        _swept_in_threads.discard(workspace)


def _leftovers(client: Client, workspace: ObjectPath) -> list[Leftover[ObjectPath]]:
    """What :func:`collect_garbage` would delete, as far as the clock of this machine tells who is dead."""
    found: list[Leftover[ObjectPath]] = []
    uploads = client.unfinished_uploads(workspace.parent.key)  # before the records: whoever lives has one by then
    for token, record in _records(client, workspace).items():
        noted = _noted(client, record) if token not in _held else None
        if noted is None or not is_target(noted.get("target")):
            continue
        if _is_dead(noted, record, time.time()):
            found += _left_by(client, workspace.parent / noted["target"], token, bool(noted.get("deletes")))
    alive = _Records(client, workspace).alive()
    for key in uploads:
        path, token = _save_of(workspace.parent, key)
        if token and token not in alive and workspace_of(path) == workspace:
            found.append(Leftover(workspace.parent / _name_below(workspace.parent, key), _UPLOAD, None))
    return found


_UPLOAD = "an upload that was never completed"


def _left_by(client: Client, path: ObjectPath, token: str, deletes: bool) -> Iterator[Leftover[ObjectPath]]:
    there = {_name_below(path, one.key): one.size for one in client.below(path.key)}
    if deletes and METADATA not in there:
        yield Leftover(path, f"what an interrupted removal of {path} has left", sum(there.values()))
    elif not deletes and token_at(client, path) != token:
        written = [size for name, size in there.items() if token_in(name) == token]
        if written:
            yield Leftover(path, f"an interrupted save of {path}", sum(written))


def _save_of(root: ObjectPath, key: str) -> tuple[ObjectPath, str]:
    """The checkpoint below a root that an object is of, and the token of its save; empty if its name tells of none."""
    parts = _name_below(root, key).split("/")
    for number in range(len(parts)):
        if token := token_in("/".join(parts[number:])):
            return root / "/".join(parts[:number]) if number else root, token
    return root, ""


def collect_garbage(client: Client, workspace: ObjectPath, dry_run: bool) -> list[Leftover[ObjectPath]]:
    """:func:`sweep`, and abort the uploads that no record tells of any more."""
    left = _leftovers(client, workspace)
    if dry_run or not left:
        return left
    name = next((one.path.name for one in left if is_target(one.path.name)), "prune")
    reservation = _begin(client, workspace.parent / name, None)  # whose record tells the time by the store's clock
    try:
        sweep(client, workspace)
        alive = _Records(client, workspace).alive()
        for one in left:
            path, token = _save_of(workspace.parent, one.path.key)
            if one.what == _UPLOAD and token not in alive:
                client.abort_uploads(path.key, {token})
    finally:
        _let_go(client, reservation)
    return left


def _records(client: Client, workspace: ObjectPath) -> dict[str, Found]:
    """By token."""
    prefix = below(workspace, "")
    there = (one for one in client.below(workspace.key) if one.key.endswith(".json"))
    return {one.key.removeprefix(prefix).removesuffix(".json"): one for one in there}


def _outdate(client: Client, path: ObjectPath, noted: Mapping[str, Any]) -> None:
    """Give ``.metadata`` another tag, if a request of the dead may be on its way to replace it."""
    found = client.head(below(path, METADATA)) if noted.get("replaces") else None
    if found is None or found.tag != noted["replaces"]:
        return
    data = bytearray(found.size)
    client.read(found.key, 0, [memoryview(data)], found.tag)
    if (other := next_edition(bytes(data))) != data:
        _put_over(client, path, found.key, other, found.tag)


def _is_dead(noted: Mapping[str, Any], record: Found, now: float) -> bool:
    return bool(noted.get("dead")) or lease.has_ended(noted, lambda: now - record.modified)


def noted_in(client: Client, record: Found) -> tuple[str | None, object]:
    """The checkpoint that a record is about, relative to the workspace's parent, or None if it names none; and the
    launch of the process that saves."""
    noted = _noted(client, record) or {}
    target = noted.get("target")
    return target if is_target(target) else None, noted.get("launch")


def _noted(client: Client, found: Found, most: int = 1 << 16) -> dict[str, Any] | None:
    """What a record says; None if it is there no more."""
    data = bytearray(min(found.size, most))
    try:
        client.read(found.key, 0, [memoryview(data)], None)
        noted = json.loads(bytes(data))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, Changed):
        return {}
    return noted if isinstance(noted, dict) else {}


def _listed(client: Client, path: ObjectPath) -> dict[str, str]:
    """Return the keys of the objects below a path, by the names there."""
    return {_name_below(path, one.key): one.key for one in client.below(path.key)}


def _clean(
    client: Client,
    path: ObjectPath,
    there: dict[str, str],
    alive: set[str],
    all_of_it: bool = False,
    keeps: Collection[str] = (),
) -> None:
    """Delete the objects of saves to this path that are neither published nor alive.

    Args:
        there: The objects, listed before ``alive`` was.
        all_of_it: Whatever else is there too, if nothing is published.
        keeps: Objects and folders directly below that stay.
    """
    last = client.head(below(path, METADATA))
    published = token_at(client, path) if last else ""
    dead = [key for name, key in there.items() if (token := token_in(name)) and token not in {*alive, published}]
    if published:  # what an earlier checkpoint, copied from a disk, had under names of its own
        dead += [key for name, key in there.items() if name in (INDEX, SUMMARY)]
        dead += [key for name, key in there.items() if _is_data_of_a_disk(name)]
    elif all_of_it and last is None:
        dead += [key for name, key in there.items() if not token_in(name) and name.partition("/")[0] not in keeps]
    client.delete(dead)


def _is_data_of_a_disk(name: str) -> bool:
    return name.endswith(DATA_SUFFIX) and "/" not in name and not token_in(name)
