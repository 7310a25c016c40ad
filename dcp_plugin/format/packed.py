"""A checkpoint whose files are written under their final names, where nothing can be renamed.

What makes it a checkpoint is one object, put last: ``.metadata``. It is what stock readers expect, followed by the
summary and by an end that says which save it is of; ``pickle`` reads no further than its own end. Everything else has
the save's token in its name, so that two saves to one path never write to the same object: data files are
``__{rank}_{n}-{token}.distcp``, and the index and what a framework has added are in ``dcp_plugin-{token}/``.

The token begins with the time of the save, in milliseconds. So a listing tells which checkpoint is the newest.
"""

from __future__ import annotations

import re
import secrets
import struct
import zlib
from collections.abc import Iterable

from dcp_plugin.format import DATA_SUFFIX, PACKED

_TIME_DIGITS, _RANDOM_BYTES = 12, 4
_TOKEN = rf"[0-9a-f]{{{_TIME_DIGITS + 2 * _RANDOM_BYTES}}}"
_OWN_NAME = re.compile(rf"(?:{PACKED}(?P<folder>{_TOKEN})/?.*|__\d+_\d+-(?P<data>{_TOKEN}){re.escape(DATA_SUFFIX)})")
_END = struct.Struct("<II20sI21s")
_MAGIC = b"\ndcp_plugin packed 1\n"


def new_token(time: float) -> str:
    """A name for a save that begins now, in seconds since the epoch."""
    return f"{int(time * 1000):0{_TIME_DIGITS}x}{secrets.token_hex(_RANDOM_BYTES)}"


def time_of(token: str) -> float:
    """When the save began."""
    return int(token[:_TIME_DIGITS], 16) / 1000


def token_in(name: str) -> str:
    """The save that a file of this name is of, its folder left out; empty if the name tells of none."""
    found = _OWN_NAME.fullmatch(name)
    return (found["folder"] or found["data"]) if found else ""


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
