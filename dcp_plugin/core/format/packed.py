"""Format of a checkpoint whose files are written under their final names, on media without rename.

The save puts one object last, ``.metadata``, and this makes the directory a checkpoint. The object is the pickle that
stock readers expect, then the summary, then an end that names the save. ``pickle`` reads no further than its own end.

The rule: two saves to one path never write to the same object. All objects except ``.metadata`` therefore have the
save's token in their names. Data files are ``__{rank}_{n}-{token}.distcp``; the index and the files of a framework are
in ``dcp_plugin-{token}/``. The token begins with the time of the save, in milliseconds. So a listing shows which
checkpoint is the newest.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
import zlib
from collections.abc import Iterable

from dcp_plugin.core.format import DATA_SUFFIX, PACKED

_TIME_DIGITS, _RANDOM_BYTES = 12, 4
_TOKEN = rf"[0-9a-f]{{{_TIME_DIGITS + 2 * _RANDOM_BYTES}}}"
_OWN_NAME = re.compile(rf"(?:{PACKED}(?P<folder>{_TOKEN})/?.*|__\d+_\d+-(?P<data>{_TOKEN}){re.escape(DATA_SUFFIX)})")
_DATA_NAME = re.compile(rf"__(\d{{1,9}})_(\d{{1,9}})(?:-[0-9a-f]+)?{re.escape(DATA_SUFFIX)}")
_END = struct.Struct("<II20sI21s")  # length of the summary, edition, token, CRC32 of these three, magic
_MAGIC = b"\ndcp_plugin packed 1\n"


def new_token(time: float, of: bytes | None = None) -> str:
    """Return a token for a save that begins at ``time``, in seconds since the epoch.

    Args:
        of: Content of the save: the same content gets the same token. If None, the token is random.
    """
    last = secrets.token_bytes(_RANDOM_BYTES) if of is None else hashlib.sha256(of).digest()[:_RANDOM_BYTES]
    milliseconds = min(max(0, int(time * 1000)), 16**_TIME_DIGITS - 1)
    return f"{milliseconds:0{_TIME_DIGITS}x}{last.hex()}"


def time_of(token: str) -> float:
    """Return when the save began, in seconds since the epoch."""
    return int(token[:_TIME_DIGITS], 16) / 1000


def token_in(name: str) -> str:
    """Return the token of the save that wrote a file of this name, given without its folder; empty without a token."""
    match = _OWN_NAME.fullmatch(name)
    return (match["folder"] or match["data"]) if match else ""


def position_of(name: str) -> tuple[int, int] | None:
    """Return the rank and the number of a data file, with any token in its name; None for another file."""
    match = _DATA_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def folders(names: Iterable[str]) -> set[str]:
    """Return the tokens of the saves that have a folder among these names."""
    return {token_in(name) for name in names if name.startswith(PACKED)} - {""}


def packed(metadata: bytes, summary: bytes, token: str) -> bytes:
    """Return the last object of a save."""
    return metadata + summary + _end(len(summary), 0, token.encode())


def _end(length: int, edition: int, token: bytes) -> bytes:
    return _END.pack(length, edition, token, _crc(length, edition, token), _MAGIC)


def _crc(length: int, edition: int, token: bytes) -> int:
    return zlib.crc32(struct.pack("<II", length, edition) + token)


def next_edition(last: bytes) -> bytes:
    """Return the object with another edition number; unchanged if it is not packed.

    A store gives the changed object another tag, so that a late request of a dead save fails.
    """
    if end_of(last) is None:
        return last
    length, edition, token, *_ = _END.unpack(last[-END:])
    return last[:-END] + _end(length, edition + 1, token)


END = _END.size
"""Bytes after the summary."""
_MOST_SUMMARY = 1 << 20
_LAST_KEY = b'"sha256": "'
"""Last key of a summary, before its value and the closing bytes."""
_AFTER_LAST_KEY = 80


def end_of(last: bytes) -> tuple[str, int] | None:
    """Return the token and the summary's length, from the last bytes of a ``.metadata``; None if it is not packed."""
    if len(last) < END:
        return None
    length, edition, token, crc, magic = _END.unpack(last[-END:])
    text = token.decode("latin-1")
    is_intact = magic == _MAGIC and crc == _crc(length, edition, token)
    return (text, length) if is_intact and re.fullmatch(_TOKEN, text) and length <= _MOST_SUMMARY else None


def has_damaged_end(last: bytes) -> bool:
    """Return whether the last bytes of a ``.metadata``, in which :func:`end_of` found no token, are a damaged end.

    Otherwise the object is of another tool, which has saved to the same path.
    """
    return _LAST_KEY in last[-END - _AFTER_LAST_KEY - len(_LAST_KEY) :]
