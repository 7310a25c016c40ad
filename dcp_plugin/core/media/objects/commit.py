"""Commit of objects as a checkpoint without renames, and garbage collection after a crash.

A checkpoint is real when, and only when, ``.metadata`` is at its prefix (:mod:`dcp_plugin.core.format.packed`). Steps
of a save:

- :func:`reserve` puts a record, ``<parent>/.dcp_plugin/<token>.json``, and remembers the tag of the ``.metadata`` at
  the prefix. A live process puts the record again every minute.
- All ranks write their objects, under names with the token in them, which no other save uses.
- :func:`publish` puts ``.metadata`` on the condition that it is still absent, or still has the remembered tag.
  Therefore the second of two saves to a path fails, and its objects are deleted.
- :func:`discard` deletes the objects of a save.

A reader of the old checkpoint still finds its objects after a new one has replaced it. The save after the new one
deletes them. A removal deletes ``.metadata`` first.

The record of an ended process is recognised by the time of its last put, by the clock of the store. On the same
machine, it is recognised by the number of the process. The next save in the folder deletes the objects of up to 100
such records together (:func:`sweep`):

1. The record is put again, marked as dead. A save wrongly declared dead sees the mark before it commits. If the
   sweeping process dies too, the next sweep continues.
2. If the dead save would have replaced a checkpoint, ``.metadata`` gets another tag. Then a request of the dead save
   that is still in flight fails. If the path had no checkpoint, a save checks its record after the commit, too.
3. The sweep lists the objects, then the records, then reads ``.metadata``. In this order, each listed object of a live
   save has a record or is published. The other objects are deleted, and last the record.
"""

from __future__ import annotations

import errno
import json
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from dcp_plugin.core.errors import CheckpointError, SaveFailed, logger
from dcp_plugin.core.format import (
    DATA_SUFFIX,
    INDEX,
    METADATA,
    NUMBERED,
    PACKED,
    SUMMARY,
    Pieces,
    has_traces,
    is_of_other_tool,
    is_own,
    json_object,
)
from dcp_plugin.core.format.packed import END, end_of, new_token, next_edition, packed, time_of, token_in
from dcp_plugin.core.format.summary import MAX_SIZE, time_after
from dcp_plugin.core.format.torch_archive import MAGIC
from dcp_plugin.core.interrupts import interrupts_held
from dcp_plugin.core.media import lease
from dcp_plugin.core.media.medium import Leftover, Reservation
from dcp_plugin.core.media.objects.client import (
    IN_FLIGHT,
    MOST_COPIED,
    PART,
    STREAMS,
    Changed,
    Client,
    NoConditions,
    ObjectInfo,
    client_of,
    key_of,
)
from dcp_plugin.core.media.objects.object_files import ObjectFiles
from dcp_plugin.core.media.places import (
    is_target,
    is_workspace,
    other_things,
    refuse_to_replace_other_format,
    refuse_workspace,
    workspace_of,
)
from dcp_plugin.core.paths import ObjectPath

_CLOCKS_DIFFER = 2.0
"""Seconds. Up to this difference the clock of this machine is more precise: a store counts full seconds."""
_ATTEMPTS = 5
_SWEPT_AT_ONCE = 16
"""Number of records up to which a save sweeps itself: each record takes some ten requests."""
_SWEPT_TOGETHER = 100
"""Records that are deleted by one request."""
_COMMITTING = 60.0
"""Seconds after which no other attempt to put ``.metadata`` begins."""
SAVING = ".saving"
_SWEEPER = "dcp-sweep"
_OTHER_TAG = f'"{32 * "0"}"'


@dataclass
class _Held:
    """A save in flight of this process."""

    final: ObjectPath
    record: str
    """The key of its record."""
    owner: Callable[[], Reservation[ObjectPath] | None]
    """Returns the reservation; None once the caller has dropped it. A save that Ctrl-C ended has no other sign of its
    end."""
    tag: str | None
    """The tag of the ``.metadata`` that this save replaces."""
    replaced: str
    """The token in that ``.metadata``; empty if it has none."""
    contents: bytes
    """The contents of its record."""
    stop_heartbeat: Callable[[], None] = lambda: None
    replaces_file: bool = False
    """True if an object of the name is a checkpoint in a single file: some frameworks write both under one name."""
    in_doubt: bool = False
    """True if the answer to the put of ``.metadata`` was lost."""


_held: dict[str, _Held] = {}
_conditional: dict[str, bool] = {}
"""Stores that were probed, and whether they have conditional requests."""
_last_time = [0.0]


def _record_key(reservation: Reservation[ObjectPath]) -> str:
    """Return the key of the record of a save."""
    return key_of(workspace_of(reservation.final), f"{reservation.token}.json")


ADVICE = "Is the bucket there, can it be reached, and may this job write to it?"


def reserve(
    final: ObjectPath, among_other_files: bool = False, copy_of: str = "", recorded: float | None = None
) -> Reservation[ObjectPath]:
    """Begin a save. See :meth:`dcp_plugin.core.media.medium.Medium.reserve`."""
    client = client_of(final)
    refuse_workspace(final)
    if not final.key:
        raise SaveFailed(f"cannot save to {final}: it is a whole bucket. Save below it: {final / 'checkpoint'}.")
    try:
        objects, folders = client.directly_below(final.key)
        names = {item.key.rpartition("/")[2]: item for item in objects}
        among_other_files = among_other_files or bool(copy_of)  # a copy has checked the path already
        replaces_file = _refuse_to_replace_other_things(client, final, [*names, *folders], among_other_files)
        begun = _begin(client, final, names.get(METADATA), recorded, **({"copies": copy_of} if copy_of else {}))
        reservation = replace(begun, directory=final / f"{copy_of}{SAVING}", time=None) if copy_of else begun
        held = _held[reservation.token]
        held.replaces_file, held.owner = replaces_file, weakref.ref(reservation)
        try:
            records = _Records(workspace_of(final))
            if copy_of:
                _refuse_if_copied_twice(reservation, records.read())
            _sweep_beside(records)
            if names or folders:
                _clean(client, final, objects_of(client, final), records.alive())
        except BaseException:
            _let_go(reservation)  # nothing is written yet
            raise
    except OSError as error:
        raise SaveFailed(f"cannot save {final}: {error}. {ADVICE}") from error
    return reservation


def _refuse_if_copied_twice(reservation: Reservation[ObjectPath], records: list[_Record]) -> None:
    """Refuse a second copy to a path: both would write the same objects, and a failed copy delete them."""
    now = _newest(records)
    for record in records:
        noted = record.noted
        if record.token == reservation.token or noted.get("copies") != reservation.directory.stem:
            continue
        if record.path == reservation.final and not record.is_dead(now):
            raise SaveFailed(
                f"cannot copy to {reservation.final}: another process ({noted.get('pid')} on {noted.get('host')}) is "
                f"copying the same, or has died less than {lease.LEASE / 60:.0f} minutes ago."
            )


def _begin(
    client: Client, final: ObjectPath, published: ObjectInfo | None, recorded: float | None = None, **noted: Any
) -> Reservation[ObjectPath]:
    """Put the record of a save or a removal at a path, of which ``published`` is the ``.metadata``.

    Its token has the recorded time. A save without one gets the time of this machine's clock if that agrees with the
    store's clock. Otherwise it gets the time of the store's clock.
    """
    now, last = time.time(), _last_time[0]
    reservation = _put_record(client, final, published, _later(now) if recorded is None else recorded, noted)
    try:
        entry = client.head(_record_key(reservation)) if recorded is None else None
        if entry is not None and abs(entry.modified - now) > _CLOCKS_DIFFER:
            _let_go(reservation)
            _last_time[0] = last  # a wrong time is no lower bound of later times
            reservation = _put_record(client, final, published, _later(entry.modified), noted)
        held = _held[reservation.token]
        if final.store not in _conditional:
            _conditional[final.store] = _refuses(client, held.record, held.contents)
            if not _conditional[final.store]:
                _warn_unconditional(final.store)
        with interrupts_held():
            held.stop_heartbeat = lease.start_heartbeat(lambda: _put_again(held))
    except BaseException:
        _let_go(reservation)
        raise
    return reservation


def _later(now: float) -> float:
    """Return the recorded time of a save that begins now. Those of a process never run back."""
    _last_time[0] = max(now, time_after(_last_time[0]))
    return _last_time[0]


def _put_record(
    client: Client, final: ObjectPath, published: ObjectInfo | None, recorded: float, noted: Mapping[str, Any]
) -> Reservation[ObjectPath]:
    token = new_token(recorded)
    reservation = Reservation(final, token, final / f"{token}.saving", time_of(token))
    target = final.key.removeprefix(workspace_of(final).parent.key).lstrip("/")
    tag = published.tag if published else None
    text = json.dumps({"target": target, **lease.maker(recorded), "replaces": tag, **noted}).encode()
    replaced, record = _token_of(client, published), _record_key(reservation)
    _held[token] = _Held(final, record, weakref.ref(reservation), tag, replaced, text)
    try:
        client.put(record, text)
    except BaseException:
        _forget(token)  # otherwise a sweep of this process spares the record
        raise
    return reservation


def _put_again(held: _Held) -> None:
    """Put the record of a save of this process again, unless another job has marked the save as dead."""
    with suppress(Changed):
        if (entry := _own(held)) is not None:
            _put_over(client_of(held.final), held.final, entry.key, held.contents, entry.tag)


def _own(held: _Held) -> ObjectInfo | None:
    """Return the record of a save of this process; None if another job has marked it as dead, which makes it longer."""
    entry = client_of(held.final).head(held.record)
    return entry if entry is not None and entry.size == len(held.contents) else None


def has_conditions(final: ObjectPath) -> bool:
    """Return whether the store of a reservation has conditional requests."""
    return _conditional.get(final.store, True)


def _put_over(client: Client, final: ObjectPath, key: str, data: bytes, tag: str | None) -> None:
    """Put an object, on the condition that it has this tag or is absent, if the store has conditional requests.

    Raises:
        Changed: There is another one.
    """
    if has_conditions(final):
        try:
            client.put_if(key, data, tag)
            return
        except NoConditions:
            _conditional[final.store] = False
            _warn_unconditional(final.store)
    client.put(key, data)


def _refuses(client: Client, record: str, contents: bytes) -> bool:
    """Return whether the store refuses a put over an object, on the condition that it is absent or has another tag."""
    for tag in (None, _OTHER_TAG):
        try:
            client.put_if(record, contents, tag)
            return False
        except Changed:
            continue
        except NoConditions:
            return False
    return True


def _warn_unconditional(store: str) -> None:
    logger.warning(
        "%s has no conditional requests: of two saves to one path at the same time, the last to end wins, and the "
        "other does not notice. Let one job save to a path at a time.",
        store,
    )


def _refuse_to_replace_other_things(
    client: Client, final: ObjectPath, names: list[str], among_other_files: bool
) -> bool:
    """Refuse to replace other files than a checkpoint. Return whether the path is a checkpoint in a single object."""
    last = [name.rstrip("/").rpartition("/")[2] for name in names]
    if names and not (has_traces(last) or among_other_files):
        raise other_things(final, last)
    if METADATA in last:
        refuse_to_replace_other_format(final, ObjectFiles(client, final))
    if not names and (entry := client.head(final.key)) is not None and entry.size:
        first = bytearray(len(MAGIC))
        client.read(final.key, 0, [memoryview(first)], None)
        if first != MAGIC:
            raise SaveFailed(f"cannot save to {final}: there is an object of that name that is no checkpoint.")
        return True
    return False


def publish(reservation: Reservation[ObjectPath], files: Mapping[str, bytes | Pieces]) -> None:
    """Put the tables of contents, ``.metadata`` last. One request takes each, so that they are in memory.

    Raises:
        SaveFailed: Another save to the path was published since this one began, or this one was declared dead.
        OSError: The path is unchanged.
    """
    final, token = reservation.final, reservation.directory.stem
    client = client_of(final)
    if SUMMARY not in files:
        _publish_of_others(reservation, files)
        return
    beside = {name: data for name, data in files.items() if name not in (METADATA, SUMMARY)}
    for name, data in beside.items():
        client.put(key_of(final, f"{PACKED}{token}/{name}"), bytes(data))
    held = _held[reservation.token]
    _refuse_if_taken_for_dead(held)
    _commit(reservation, packed(bytes(files[METADATA]), bytes(files[SUMMARY]), token), token)
    if held.tag is None:
        _undo_if_taken_for_dead(held)
    if held.replaces_file:
        with suppress(OSError):
            client.delete([final.key])
    _let_go(reservation)


def _publish_of_others(reservation: Reservation[ObjectPath], files: Mapping[str, bytes | Pieces]) -> None:
    """Put the last files of a checkpoint of another tool."""
    held = _held[reservation.token]
    _refuse_if_taken_for_dead(held)
    for name, data in files.items():
        if name == METADATA:
            _commit(reservation, bytes(data), "")
        else:
            client_of(reservation.final).put(key_of(reservation.final, name), bytes(data))
    _let_go(reservation)


def _refuse_if_taken_for_dead(held: _Held) -> None:
    if _own(held) is None:
        raise SaveFailed(
            f"cannot commit {held.final}: another job took this save for dead, since its lease was not "
            f"renewed for {lease.LEASE / 60:.0f} minutes, and has deleted its files. Save again."
        )


def _undo_if_taken_for_dead(held: _Held) -> None:
    """Delete ``.metadata`` if a sweep has deleted the objects of this save while the process was stopped."""
    try:
        _refuse_if_taken_for_dead(held)
    except SaveFailed:
        client_of(held.final).delete([key_of(held.final, METADATA)])
        raise
    except OSError as error:  # it was there a moment ago
        logger.debug("whether %s was taken for dead cannot be seen: %s", held.final, error)


def _commit(reservation: Reservation[ObjectPath], data: bytes, token: str) -> None:
    """Put ``.metadata``. A lost answer is no failure: the token in ``.metadata`` identifies its save. A new generation
    of the replaced checkpoint is no failure either: a sweep made it against a dead save."""
    final, held = reservation.final, _held[reservation.token]
    client, key = client_of(final), key_of(final, METADATA)
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
            entry = client.head(key)
            published = _token_of(client, entry)
            if token and published == token:
                held.in_doubt = False
                return
            if isinstance(failure, Changed):
                held.in_doubt = False
                if entry is not None and published and published == held.replaced:  # see _supersede
                    _refuse_if_taken_for_dead(held)
                    held.tag = entry.tag
                    continue
        if isinstance(failure, Changed):
            raise SaveFailed(
                f"cannot commit {final}: another save was published there, or it was deleted, since this save began. "
                f"This save was not published. Let one job save to a path at a time."
            ) from failure
        if failure.errno == errno.EACCES or time.monotonic() > until or attempt + 1 == _ATTEMPTS:
            break
    raise failure


def token_at(client: Client, path: ObjectPath) -> str:
    """Return the token of the save that is published at a path; empty if it has none."""
    return _token_of(client, client.head(key_of(path, METADATA)))


def _token_of(client: Client, info: ObjectInfo | None) -> str:
    """Return the token at the end of a ``.metadata``; empty if it has none, or is gone."""
    if info is None or info.size < END:
        return ""
    last = bytearray(END)
    with suppress(Changed, FileNotFoundError):
        client.read(info.key, info.size - END, [memoryview(last)], info.tag)
    end = end_of(bytes(last))
    return end[0] if end else ""


def discard(reservation: Reservation[ObjectPath], all_ended: bool = True, keep: bool = False) -> None:
    """End a save that was not published. See :meth:`dcp_plugin.core.media.medium.Medium.discard`. A record that is kept
    is a record of an ended process from now on."""
    held = _held.get(reservation.token)
    if held is None:
        return
    try:
        if keep:
            return
        client, token = client_of(reservation.final), reservation.directory.stem
        if held.in_doubt:
            raise OSError("it is not known yet whether the save was published")
        if token_at(client, reservation.final) != token:
            objects = objects_of(client, reservation.final)
            client.delete([item.key for name, item in objects.items() if token_in(name) == token])
        if all_ended:
            _let_go(reservation)
    except OSError as error:
        logger.warning(
            "cannot delete the files of a failed save of %s; the next save deletes them: %s", reservation.final, error
        )
    finally:
        _forget(reservation.token)


def _name_below(path: ObjectPath, key: str) -> str:
    return key.removeprefix(key_of(path, ""))


def _forget(token: str) -> None:
    """End the heartbeat of a save. Its record counts as that of an ended process from now on."""
    if (held := _held.get(token)) is not None:
        held.stop_heartbeat()  # before it is forgotten: after Ctrl-C in between, the next sweep repeats this
        _held.pop(token, None)


def _let_go(reservation: Reservation[ObjectPath]) -> None:
    _forget(reservation.token)
    with suppress(OSError):  # the next save in the folder finds no objects of it
        client_of(reservation.final).delete([_record_key(reservation)])


def remove(path: ObjectPath) -> None:
    """Delete a checkpoint, ``.metadata`` first; or an object.

    Raises:
        CheckpointError: It was not deleted, or not completely. After the first request it is no checkpoint.
    """
    client = client_of(path)
    if not path.key:
        raise CheckpointError(f"cannot delete {path}: it is a whole bucket. Name a checkpoint in it.")
    try:
        if names := objects_of(client, path):
            keeps = _names_of_others(client, path, names)
            reservation = _begin(client, path, None, deletes=True, keeps=keeps)
            try:
                client.delete([key_of(path, METADATA)])
                objects = objects_of(client, path)  # anew: another save may have put some before that request
                _clean(client, path, objects, _Records(workspace_of(path)).alive(), all_of_it=True, keeps=keeps)
            except BaseException:
                discard(reservation, keep=True)  # the next save in the folder completes the removal
                raise
            _let_go(reservation)
        elif client.head(path.key) is not None:
            client.delete([path.key])
    except OSError as error:
        raise CheckpointError(
            f"cannot delete {path}: {error}. It is unchanged, or is no checkpoint any more. Delete it again."
        ) from error


def _names_of_others(client: Client, path: ObjectPath, names: Mapping[str, ObjectInfo]) -> list[str]:
    """Return the objects and folders directly below a checkpoint that are no part of it."""
    extra_files: list[Any] = []
    entries = {name.partition("/")[0] for name in names}
    if SUMMARY in names:
        extra_files = _list_in(json_in(client, names[SUMMARY]) or {}, "attached")
    elif not token_at(client, path):
        others = {name for name in entries if not is_of_other_tool(name)}
        if NUMBERED.fullmatch(path.name):  # it is rotated as a whole, but for a checkpoint in it
            others = {name for name in others if is_workspace(name) or f"{name}/{METADATA}" in names}
        return sorted(others) if others != entries else []  # no checkpoint at all: the caller wants all to go
    return sorted(name for name in entries if not is_own(name) and name not in extra_files)


def _list_in(noted: Mapping[str, Any], name: str) -> list[Any]:
    value = noted.get(name)
    return value if isinstance(value, list) else []


def link(path: ObjectPath, target: ObjectPath) -> None:
    """Copy a checkpoint within the store, by the same rule; a store has no links.

    Raises:
        CheckpointError: ``path`` is unchanged.
    """
    client = client_of(path)
    reservation = None
    try:
        token = token_at(client, target)
        objects = objects_of(client, target)
        metadata = objects.pop(METADATA)
        data = bytearray(metadata.size)
        client.read(metadata.key, 0, [memoryview(data)], metadata.tag)
        reservation = _begin(client, path, client.head(key_of(path, METADATA)), copies=token)
        _clean(client, path, objects_of(client, path), _Records(workspace_of(path)).alive())
        for name, item in objects.items():
            if token_in(name) in ("", token):
                _copy(client, item, key_of(path, name))
        _commit(reservation, bytes(data), token)
    except (OSError, Changed, NoConditions, KeyError, SaveFailed) as error:
        why = f"{target} is not there" if isinstance(error, KeyError) else error
        raise CheckpointError(f"cannot copy {target} to {path}: {why}. Nothing was changed.") from error
    finally:
        if reservation is not None:
            _let_go(reservation)


def _copy(client: Client, info: ObjectInfo, to: str) -> None:
    """Copy an object. One that is too large for a request of the store passes through this process."""
    if info.size <= MOST_COPIED:
        client.copy(info.key, to)
        return
    with client.create(to, info.size, IN_FLIGHT) as copy:
        for begin in range(0, info.size, PART):
            memory = memoryview(bytearray(min(PART, info.size - begin)))
            done = 0
            while done < len(memory):
                done += client.read(info.key, begin + done, [memory[done:]], info.tag)
            copy.write(memory, kept=True)


@dataclass(frozen=True)
class _Record:
    """The record of a save or a removal, by any process."""

    token: str
    entry: ObjectInfo
    noted: dict[str, Any]
    path: ObjectPath | None
    """The checkpoint; None if the record names none."""

    def is_dead(self, now: float) -> bool:
        """Return whether its process has ended, ``now`` by the clock of the store."""
        if self.token in _held:
            return False
        return bool(self.noted.get("dead")) or lease.has_ended(self.noted, lambda: now - self.entry.modified)


def _newest(records: list[_Record]) -> float:
    """Return the time at which the newest record was put: the clock of the store, if a save has just put its own."""
    return max((record.entry.modified for record in records), default=0.0)


class _Records:
    """The records of a workspace. Each is read once, and again when it has changed."""

    def __init__(self, workspace: ObjectPath) -> None:
        self.workspace, self.client = workspace, client_of(workspace)
        self._noted: dict[tuple[str, str], dict[str, Any] | None] = {}

    def read(self) -> list[_Record]:
        """Return the present records, after the saves of this process that have ended are forgotten."""
        for token in [token for token, held in list(_held.items()) if held.owner() is None]:
            _forget(token)
        items = [item for item in self.client.below(self.workspace.key) if item.key.endswith(".json")]
        unknown = [item for item in items if (item.key, item.tag) not in self._noted]
        if unknown:
            with ThreadPoolExecutor(min(STREAMS, len(unknown)), thread_name_prefix="dcp-records") as pool:
                read = pool.map(self._noted_in, unknown)
                self._noted |= {(item.key, item.tag): noted for item, noted in zip(unknown, read, strict=True)}
        records = []
        for item in items:
            if (noted := self._noted[item.key, item.tag]) is not None:
                target = lease.target_in(noted)
                path = self.workspace.parent / target if target else None
                records.append(_Record(self._token_of(item), item, noted, path))
        return records

    def _noted_in(self, item: ObjectInfo) -> dict[str, Any] | None:
        held = _held.get(self._token_of(item))
        return json_in(self.client, item) if held is None else json_object(held.contents)

    def _token_of(self, item: ObjectInfo) -> str:
        return _name_below(self.workspace, item.key).removesuffix(".json")

    def alive(self) -> set[str]:
        """Return the tokens of saves in flight, and of those whose objects are being copied."""
        alive = set[str]()
        for record in self.read():
            if record.token in _held or not record.noted.get("dead"):
                alive |= {record.token, str(record.noted.get("copies", ""))}
        return alive


def sweep(workspace: ObjectPath) -> None:
    """Delete the objects of dead saves. The next sweep repeats a step that fails."""
    records = _Records(workspace)
    _sweep_dead(records, records.read())


def _sweep_dead(records: _Records, present: list[_Record]) -> None:
    """Sweep as :func:`sweep` does, after the records are read."""
    now = _newest(present)
    dead = [record for record in present if record.is_dead(now)]
    for first in range(0, len(dead), _SWEPT_TOGETHER):
        _sweep_some(records, dead[first : first + _SWEPT_TOGETHER])


def revoke(path: ObjectPath, token: str) -> None:
    """Treat a save of another process as dead: it learns of that before it commits. Raises OSError."""
    records = _Records(workspace_of(path))
    _sweep_some(records, [record for record in records.read() if record.token == token])


def _sweep_some(records: _Records, dead: list[_Record]) -> None:
    """Delete the objects of some dead saves, in the order of the module's docstring."""
    client, workspace = records.client, records.workspace
    by_path: dict[ObjectPath, list[_Record]] = {}
    finished: list[_Record] = []
    for save in dead:
        path = save.path
        with _failures_logged(path), suppress(Changed):  # it has ended, or has just put its record again
            if not save.noted.get("dead"):
                text = json.dumps({**save.noted, "dead": True}).encode()
                _put_over(client, workspace, save.entry.key, text, save.entry.tag)
            if path is None:
                finished.append(save)
            else:
                _supersede(client, path, save.noted)
                by_path.setdefault(path, []).append(save)
    listed: dict[ObjectPath, dict[str, ObjectInfo]] = {}
    for path in by_path:
        with _failures_logged(path):
            listed[path] = objects_of(client, path)
    alive = records.alive()
    for path, objects in listed.items():
        with _failures_logged(path):
            deletes = [save.noted for save in by_path[path] if save.noted.get("deletes")]
            keeps = {name for noted in deletes for name in _list_in(noted, "keeps")}
            _clean(client, path, objects, alive, bool(deletes), keeps)
            finished += by_path[path]
    copied = {str(save.noted.get("copies", "")) for save in finished} - {"", *alive}
    if finished:
        if client.further:
            client.further.abort_uploads(workspace.parent.key, {save.token for save in finished} | copied)
        client.delete([save.entry.key for save in finished])


@contextmanager
def _failures_logged(path: ObjectPath | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("cannot delete the files of an interrupted save of %s: %s", path, error)


def _sweep_beside(records: _Records) -> None:
    """Sweep; in a thread if the workspace has so many records that the save would wait for it. A process has one such
    thread at a time: a later save sweeps another workspace."""
    present, workspace = records.read(), records.workspace
    if len(present) <= _SWEPT_AT_ONCE:
        _sweep_dead(records, present)
    elif all(thread.name != _SWEEPER for thread in threading.enumerate()):
        sweep_and_log = _failures_logged(workspace)(sweep)
        threading.Thread(target=sweep_and_log, args=(workspace,), name=_SWEEPER, daemon=True).start()


def _leftovers(client: Client, workspace: ObjectPath) -> list[Leftover[ObjectPath]]:
    """Return the garbage that :func:`collect_garbage` would delete, by the clock of this machine."""
    garbage: list[Leftover[ObjectPath]] = []
    # Before the records: each save in flight has one by then.
    uploads = client.further.unfinished_uploads(workspace.parent.key) if client.further else []
    records = _Records(workspace)
    for record in records.read():
        if record.path is not None and record.is_dead(time.time()):
            garbage += _left_by(client, record.path, record.token, bool(record.noted.get("deletes")))
    alive = records.alive()
    for key in uploads:
        path, token = _save_of(workspace.parent, key)
        if token and token not in alive and workspace_of(path) == workspace:
            garbage.append(Leftover(workspace.parent / _name_below(workspace.parent, key), _UPLOAD, None))
    return garbage


_UPLOAD = "an upload that was never completed"


def _left_by(client: Client, path: ObjectPath, token: str, deletes: bool) -> Iterator[Leftover[ObjectPath]]:
    objects = objects_of(client, path)
    if deletes and METADATA not in objects:
        nbytes = sum(item.size for item in objects.values())
        yield Leftover(path, f"what an interrupted removal of {path} has left", nbytes)
    elif not deletes and token_at(client, path) != token:
        written = [item.size for name, item in objects.items() if token_in(name) == token]
        if written:
            yield Leftover(path, f"an interrupted save of {path}", sum(written))


def _save_of(root: ObjectPath, key: str) -> tuple[ObjectPath, str]:
    """Return the checkpoint below a root that an object belongs to, and the token of its save; empty without one."""
    parts = _name_below(root, key).split("/")
    for number in range(len(parts)):
        if token := token_in("/".join(parts[number:])):
            return root / "/".join(parts[:number]) if number else root, token
    return root, ""


def collect_garbage(workspace: ObjectPath, dry_run: bool = False) -> list[Leftover[ObjectPath]]:
    """Sweep, and abort the uploads without a record. See
    :meth:`dcp_plugin.core.media.medium.Medium.collect_garbage`."""
    client = client_of(workspace)
    garbage = _leftovers(client, workspace)
    if dry_run or not garbage:
        return garbage
    name = next((item.path.name for item in garbage if is_target(item.path.name)), "prune")
    reservation = _begin(client, workspace.parent / name, None)  # its record has the time of the store's clock
    try:
        sweep(workspace)
        alive = _Records(workspace).alive()
        for item in garbage:
            path, token = _save_of(workspace.parent, item.path.key)
            if client.further and item.what == _UPLOAD and token not in alive:
                client.further.abort_uploads(path.key, {token})
    finally:
        _let_go(reservation)
    return _leftovers(client, workspace)


def _supersede(client: Client, path: ObjectPath, noted: Mapping[str, Any]) -> None:
    """Give ``.metadata`` another tag if a request of a dead save that replaces it may be in flight."""
    entry = client.head(key_of(path, METADATA)) if noted.get("replaces") else None
    if entry is None or entry.tag != noted["replaces"]:
        return
    data = bytearray(entry.size)
    client.read(entry.key, 0, [memoryview(data)], entry.tag)
    if (other := next_edition(bytes(data))) != data:
        _put_over(client, path, entry.key, other, entry.tag)


def json_in(client: Client, info: ObjectInfo) -> dict[str, Any] | None:
    """Return the contents of a record or a summary, empty if it cannot be read; None if the object was deleted."""
    data = bytearray(min(info.size, MAX_SIZE))
    try:
        client.read(info.key, 0, [memoryview(data)], None)
    except FileNotFoundError:
        return None
    except Changed:
        return {}
    return lease.contents(bytes(data), info.key)


def objects_of(client: Client, path: ObjectPath) -> dict[str, ObjectInfo]:
    """Return the objects below a path, by the names below it."""
    return {_name_below(path, item.key): item for item in client.below(path.key)}


def _clean(
    client: Client,
    path: ObjectPath,
    objects: dict[str, ObjectInfo],
    alive: set[str],
    all_of_it: bool = False,
    keeps: Collection[str] = (),
) -> None:
    """Delete the objects of saves to this path that are neither published nor alive.

    Args:
        objects: The objects, listed before ``alive`` was.
        all_of_it: Delete all other objects too, if no checkpoint is published.
        keeps: Objects and folders directly below the path that stay.
    """
    last = client.head(key_of(path, METADATA))
    published = token_at(client, path) if last else ""
    dead = [name for name in objects if (token := token_in(name)) and token not in {*alive, published}]
    if published:  # what an earlier checkpoint, copied from a disk, had under names of its own
        data = (name for name in objects if name.endswith(DATA_SUFFIX) and "/" not in name and not token_in(name))
        dead += [*data, *({INDEX, SUMMARY} & objects.keys())]
    elif all_of_it and last is None:
        dead += [name for name in objects if not token_in(name) and name.partition("/")[0] not in keeps]
    client.delete([objects[name].key for name in dead])
