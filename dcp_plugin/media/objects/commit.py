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
the dead, by the number of its process. What they tell of is deleted by the next save beside it (:func:`sweep`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dcp_plugin.errors import CheckpointError, SaveFailed
from dcp_plugin.format import DATA_SUFFIX, INDEX, METADATA, PACKED, SUMMARY, has_traces
from dcp_plugin.format.packed import END, end_of, new_token, packed, time_of, token_in
from dcp_plugin.media import Reservation, is_target, workspace_of
from dcp_plugin.media.disk import posix
from dcp_plugin.media.objects.client import Changed, Client, Found, NoConditions, client_of
from dcp_plugin.paths import ObjectPath

logger = logging.getLogger("dcp_plugin")

_BEAT = 60.0
_LEASE = 15 * _BEAT
"""Seconds after which who has not put its record again is dead, unless its machine says so before."""
_CLOCKS_DIFFER = 2.0
"""Seconds. Below that, the clock of this machine is the finer one; a store tells full seconds."""
_ATTEMPTS = 5
HAS_BASE = "dcp_plugin.base"
"""An empty object beside the index of a checkpoint that leaves out what a base has: a listing shows it."""
_TORCH_FILE = b"PK\x03\x04"


@dataclass
class _Held:
    """A save in flight of this process."""

    reservation: Reservation[ObjectPath]
    tag: str | None
    """Of the ``.metadata`` that this save replaces."""
    said: bytes
    """What its record says."""
    ended: threading.Event


_held: dict[str, _Held] = {}
_conditional: dict[str, bool] = {}
"""Whether a store has conditional requests, where that was tried."""
_last_time = [0.0]


def below(path: ObjectPath, name: str) -> str:
    """The key of a name below a path."""
    return f"{path.key}/{name}" if path.key else name


def _record(reservation: Reservation[ObjectPath]) -> str:
    return below(workspace_of(reservation.final), f"{reservation.token}.json")


def final_of(directory: ObjectPath) -> ObjectPath:
    """The path of the checkpoint that a reserved directory is of."""
    return directory.parent


ADVICE = "Is the bucket there, can it be reached, and may this job write to it?"


def reserve(final: ObjectPath, among_other_files: bool = False) -> Reservation[ObjectPath]:
    """Begin a save. See :meth:`dcp_plugin.media.Medium.reserve`."""
    client = client_of(final)
    if not final.key:
        raise SaveFailed(f"cannot save to {final}: it is a whole bucket. Save below it: {final / 'checkpoint'}.")
    try:
        objects, folders = client.directly_below(final.key)
        names = {one.key.rpartition("/")[2]: one for one in objects}
        _refuse_to_replace_other_things(client, final, [*names, *folders], among_other_files)
        tag = names[METADATA].tag if METADATA in names else None
        reservation = _begin(client, final, tag)
        try:
            alive = sweep(client, workspace_of(final))
            if names or folders:
                _clean(client, final, alive)
        except BaseException:
            discard(reservation)
            raise
    except OSError as error:
        raise SaveFailed(f"cannot save {final}: {error}. {ADVICE}") from error
    return reservation


def _begin(client: Client, final: ObjectPath, tag: str | None, **noted: Any) -> Reservation[ObjectPath]:
    """Put a record of what is to be done with the checkpoint at a path.

    Its token has the time of this machine's clock, if that agrees with the store's, and else of the latter.
    """
    workspace = workspace_of(final)
    now = time.time()
    for _ in range(2):
        began = _last_time[0] = max(now, _last_time[0] + 0.001)
        token = new_token(began)
        reservation = Reservation(final, token, final / f"{token}.saving", time_of(token))
        maker = {"host": socket.gethostname(), "machine": posix.machine(), "pid": os.getpid(), "time": now}
        target = final.key.removeprefix(workspace.parent.key).lstrip("/")
        said = json.dumps({"target": target, **maker, **noted}).encode()
        client.put(_record(reservation), said)
        found = client.head(_record(reservation))
        if found is None or abs(found.modified - now) <= _CLOCKS_DIFFER:
            break
        client.delete([_record(reservation)])
        now = found.modified
    if final.store not in _conditional:
        _conditional[final.store] = _refuses(client, _record(reservation), said)
        if not _conditional[final.store]:
            _say_unconditional(final.store)
    _held[token] = _Held(reservation, tag, said, threading.Event())
    threading.Thread(target=_beat, args=(client, _held[token]), name="dcp-beat", daemon=True).start()
    return reservation


def _beat(client: Client, held: _Held) -> None:
    """Put a record again every minute, as long as its save is in flight."""
    while not held.ended.wait(_BEAT):
        with suppress(OSError):
            if client.head(_record(held.reservation)) is not None:  # else the save was taken for dead
                client.put(_record(held.reservation), held.said)


def _refuses(client: Client, record: str, said: bytes) -> bool:
    """Whether the store refuses to put an object, that is there, on the condition that it is not."""
    try:
        client.put_if(record, said, None)
    except Changed:
        return True
    except NoConditions:
        pass
    return False


def _say_unconditional(store: str) -> None:
    logger.warning(
        "%s has no conditional requests: of two saves to one path at the same time, the last to end wins, and the "
        "other is not told. Let one job save to a path at a time.",
        store,
    )


def _refuse_to_replace_other_things(
    client: Client, final: ObjectPath, names: list[str], among_other_files: bool
) -> None:
    if names and not (has_traces([name.rstrip("/").rpartition("/")[2] for name in names]) or among_other_files):
        raise SaveFailed(
            f"cannot save to {final}: there are other things below it than a checkpoint. Save to a new name, for "
            f"example {final / 'checkpoint'}."
        )
    if not names and (there := client.head(final.key)) is not None and there.size:
        first = bytearray(len(_TORCH_FILE))
        client.read(final.key, 0, [memoryview(first)], None)
        if first != _TORCH_FILE:
            raise SaveFailed(f"cannot save to {final}: there is an object of that name that is no checkpoint.")


def publish(reservation: Reservation[ObjectPath], files: Mapping[str, bytes]) -> None:
    """Put the tables of contents, ``.metadata`` last.

    Raises:
        SaveFailed: Another save was published there since this one began, or was taken for dead.
        OSError: What was there is there still.
    """
    final, token = reservation.final, reservation.token
    client = client_of(final)
    beside = {name: data for name, data in files.items() if name not in (METADATA, SUMMARY)}
    if json.loads(files[SUMMARY])["base"]:
        beside[HAS_BASE] = b""
    for name, data in beside.items():
        client.put(below(final, f"{PACKED}{token}/{name}"), data)
    if client.head(_record(reservation)) is None:
        raise SaveFailed(
            f"cannot commit {final}: another job took this save for dead, since nothing was heard of it for "
            f"{_LEASE / 60:.0f} minutes, and has deleted what it had written. Save again."
        )
    _commit(client, reservation, packed(files[METADATA], files[SUMMARY], token), token)
    with suppress(OSError):  # a checkpoint in one file, which this one replaces
        if client.head(final.key) is not None:
            client.delete([final.key])
    _let_go(client, reservation)


def _commit(client: Client, reservation: Reservation[ObjectPath], data: bytes, token: str) -> None:
    """Put ``.metadata``. An answer that was lost on the way is no failure: what is there tells whose it is."""
    final, tag = reservation.final, _held[reservation.token].tag
    key = below(final, METADATA)
    failure: Exception | None = None
    for _ in range(_ATTEMPTS):
        try:
            if _conditional.get(final.store, True):
                client.put_if(key, data, tag)
            else:
                client.put(key, data)
            return
        except NoConditions:
            _conditional[final.store] = False
            _say_unconditional(final.store)
            continue
        except (Changed, OSError) as error:
            failure = error
        if token and token_at(client, final) == token:
            return
        if isinstance(failure, Changed):
            raise SaveFailed(
                f"cannot commit {final}: another save was published there, or it was deleted, since this one began. "
                f"What is there stays. Let one job save to a path at a time."
            ) from failure
    raise failure or OSError(f"{final} cannot be written")


def token_at(client: Client, path: ObjectPath) -> str:
    """The save that is published at a path; empty if it is none of this kind."""
    found = client.head(below(path, METADATA))
    if found is None or found.size < END:
        return ""
    last = bytearray(END)
    with suppress(Changed, FileNotFoundError):
        client.read(found.key, found.size - END, [memoryview(last)], found.tag)
    end = end_of(bytes(last))
    return end[0] if end else ""


def discard(reservation: Reservation[ObjectPath]) -> None:
    """Delete what a save has written that was not published. What fails is left for the next save."""
    if reservation.token not in _held:
        return
    client = client_of(reservation.final)
    try:
        if token_at(client, reservation.final) != reservation.token:
            keys = [one.key for one in client.below(reservation.final.key) if _is_of(reservation, one)]
            client.delete(keys)
        _let_go(client, reservation)
    except OSError as error:
        _held.pop(reservation.token).ended.set()
        logger.warning("what the save of %s has written is left for the next save: %s", reservation.final, error)


def _is_of(reservation: Reservation[ObjectPath], found: Found) -> bool:
    return token_in(_name_below(reservation.final, found.key)) == reservation.token


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
    try:
        there = [one.key for one in client.below(path.key)] if path.key else []
        if there:
            reservation = _begin(client, path, None, deletes=True)
            _delete_all(client, path, there)
            _let_go(client, reservation)
        elif client.head(path.key) is not None:
            client.delete([path.key])
    except OSError as error:
        raise CheckpointError(
            f"cannot delete {path}: {error}. It is there as it was, or is no checkpoint any more; delete it again."
        ) from error


def _delete_all(client: Client, path: ObjectPath, keys: Iterable[str]) -> None:
    metadata = below(path, METADATA)
    client.delete([metadata])
    client.delete([key for key in keys if key != metadata])


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
        published = client.head(below(path, METADATA))
        reservation = _begin(client, path, published.tag if published else None, copies=token)
        for name, one in there.items():
            if token_in(name) in ("", token):
                client.copy(one.key, below(path, name))
        _commit(client, reservation, bytes(data), token)
        _clean(client, path, [token])
    except (OSError, Changed, NoConditions, KeyError, SaveFailed) as error:
        why = f"{target} is not there" if isinstance(error, KeyError) else error
        raise CheckpointError(f"cannot copy {target} to {path}: {why}. What was there is there still.") from error
    finally:
        if reservation is not None:
            _let_go(client, reservation)


def sweep(client: Client, workspace: ObjectPath) -> set[str]:
    """Delete what saves have left that died. What fails again is left for the next time.

    Returns:
        The tokens of those that live.
    """
    prefix = below(workspace, "")
    records = [one for one in client.below(workspace.key) if one.key.endswith(".json")]
    now = max((one.modified for one in records), default=0.0)  # that of this save was put just now
    alive: set[str] = set()
    dead: list[dict[str, Any]] = []
    for found in records:
        token = found.key.removeprefix(prefix).removesuffix(".json")
        noted = _noted(client, found) if token not in _held else {}
        if token in _held or not _is_dead(noted, found, now):
            alive |= {token, str(noted.get("copies", ""))}
            continue
        client.delete([found.key])  # first: who is not dead after all learns of it before it commits
        dead.append(noted)
    for noted in dead:
        if not is_target(noted.get("target")):
            continue
        path = workspace.parent / noted["target"]
        try:
            if noted.get("deletes"):
                _delete_all(client, path, [one.key for one in client.below(path.key)])
            else:
                _clean(client, path, alive)
        except OSError as error:
            logger.warning("what is left of a save of %s cannot be deleted: %s", path, error)
    return alive


def _is_dead(noted: Mapping[str, Any], found: Found, now: float) -> bool:
    return posix.has_ended(noted.get("machine"), noted.get("pid")) or now - found.modified > _LEASE


def target_of(client: Client, record: Found) -> str | None:
    """The checkpoint that a record is about, relative to the workspace's parent; None if nobody can tell."""
    target = _noted(client, record).get("target")
    return target if is_target(target) else None


def _noted(client: Client, found: Found) -> dict[str, Any]:
    data = bytearray(min(found.size, 1 << 16))
    with suppress(Changed):
        client.read(found.key, 0, [memoryview(data)], None)
    try:
        noted = json.loads(bytes(data))
    except (ValueError, RecursionError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _clean(client: Client, path: ObjectPath, alive: Iterable[str]) -> None:
    """Delete the objects of saves to this path that are neither published nor alive."""
    published = token_at(client, path)
    keep = {*alive, published}
    there = [(_name_below(path, one.key), one.key) for one in client.below(path.key)]
    dead = [key for name, key in there if (token := token_in(name)) and token not in keep]
    if published:  # what an earlier checkpoint, copied from a disk, had under names of its own
        dead += [key for name, key in there if name in (INDEX, SUMMARY)]
        dead += [key for name, key in there if name.endswith(DATA_SUFFIX) and "/" not in name and not token_in(name)]
    client.delete(dead)
