"""A checkpoint whose files are written under their final names, where nothing can be renamed.

What makes it a checkpoint is one object, put last: ``.metadata``. It is what stock readers expect, followed by the
summary and by an end that says which save it is of; ``pickle`` reads no further than its own end. Everything else has
the save's token in its name, so that two saves to one path never write to the same object: data files are
``__{rank}_{n}-{token}.distcp``, and the index and what a framework has added are in ``dcp_plugin-{token}/``.

The token begins with the time of the save, in milliseconds. So a listing tells which checkpoint is the newest.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
import zlib
from collections.abc import Iterable

from dcp_plugin.format import DATA_SUFFIX, PACKED

_TIME_DIGITS, _RANDOM_BYTES = 12, 4
_TOKEN = rf"[0-9a-f]{{{_TIME_DIGITS + 2 * _RANDOM_BYTES}}}"
_OWN_NAME = re.compile(rf"(?:{PACKED}(?P<folder>{_TOKEN})/?.*|__\d+_\d+-(?P<data>{_TOKEN}){re.escape(DATA_SUFFIX)})")
_DATA_NAME = re.compile(rf"__(\d{{1,9}})_(\d{{1,9}})(?:-[0-9a-f]+)?{re.escape(DATA_SUFFIX)}")
_END = struct.Struct("<II20sI21s")
_MAGIC = b"\ndcp_plugin packed 1\n"


def new_token(time: float, of: bytes | None = None) -> str:
    """A name for a save that begins now, in seconds since the epoch.

    Args:
        of: What is saved, if the same is to have the same name.
    """
    last = secrets.token_bytes(_RANDOM_BYTES) if of is None else hashlib.sha256(of).digest()[:_RANDOM_BYTES]
    milliseconds = min(max(0, int(time * 1000)), 16**_TIME_DIGITS - 1)
    return f"{milliseconds:0{_TIME_DIGITS}x}{last.hex()}"


def time_of(token: str) -> float:
    """When the save began."""
    return int(token[:_TIME_DIGITS], 16) / 1000


def token_in(name: str) -> str:
    """The save that a file of this name is of, its folder left out; empty if the name tells of none."""
    found = _OWN_NAME.fullmatch(name)
    return (found["folder"] or found["data"]) if found else ""


def renamed(names: Iterable[str], token: str) -> dict[str, str]:
    """What data files are called where they have the token of their save in their names, by their names now."""
    new: dict[str, str] = {}
    taken = {name for name in names if token_in(name) == token}
    for name in names:
        found = _DATA_NAME.fullmatch(name)
        rank, number = (int(found[1]), int(found[2])) if found else (0, 0)
        there = name
        while name not in taken and (there == name or there in taken):
            there = f"__{rank}_{number}-{token}{DATA_SUFFIX}"
            number += 1
        taken.add(there)
        new[name] = there
    return new


def folders(names: Iterable[str]) -> set[str]:
    """The tokens of the saves that have a folder among these names."""
    return {token_in(name) for name in names if name.startswith(PACKED)} - {""}


def packed(metadata: bytes, summary: bytes, token: str) -> bytes:
    """The last object of a save."""
    return metadata + summary + _end(len(summary), 0, token.encode())


def _end(length: int, edition: int, token: bytes) -> bytes:
    return _END.pack(length, edition, token, _crc(length, edition, token), _MAGIC)


def _crc(length: int, edition: int, token: bytes) -> int:
    return zlib.crc32(struct.pack("<II", length, edition) + token)


def next_edition(last: bytes) -> bytes:
    """The same as other bytes, so that a store gives it another tag; as it is, if it is not packed."""
    if end_of(last) is None:
        return last
    length, edition, token, *_ = _END.unpack(last[-END:])
    return last[:-END] + _end(length, edition + 1, token)


END = _END.size
"""Bytes after the summary."""
_MOST_SUMMARY = 1 << 20
_LAST_KEY = b'"sha256": "'
"""Of a summary; its value and what closes it follow."""
_AFTER_LAST_KEY = 80


def end_of(last: bytes) -> tuple[str, int] | None:
    """The token, and the length of the summary, that the last bytes of a ``.metadata`` tell; None: it is not packed."""
    if len(last) < END:
        return None
    length, edition, token, crc, magic = _END.unpack(last[-END:])
    text = token.decode("latin-1")
    whole = magic == _MAGIC and crc == _crc(length, edition, token)
    return (text, length) if whole and re.fullmatch(_TOKEN, text) and length <= _MOST_SUMMARY else None


def has_damaged_end(last: bytes) -> bool:
    """Whether these last bytes of a ``.metadata``, which no save is known by, were those of a packed one."""
    return _LAST_KEY in last[-END - _AFTER_LAST_KEY - len(_LAST_KEY) :]
