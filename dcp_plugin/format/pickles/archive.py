"""Checks of the zip of a ``torch.save`` file before it is loaded.

A record of a zip may be compressed a thousandfold, records may share bytes, and torch's reader and Python's may see
different files in one.
"""

from __future__ import annotations

import struct
import zipfile
from typing import BinaryIO


def check(file: BinaryIO, size: int) -> None:
    """Check the zip of a ``torch.save`` file: no record is compressed, and no two records share bytes.

    Args:
        size: Bytes of the file.

    Raises:
        ValueError: The file would take more memory or time than a file of its size needs, or is no such archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            pickle_of(archive, size)
    except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError, LookupError, TypeError) as error:
        raise ValueError(f"it is not an archive of torch.save: {error!r}") from error


def pickle_of(archive: zipfile.ZipFile, size: int) -> zipfile.ZipInfo:
    """Return the entry of ``data.pkl``, after a check of all entries. Raises ValueError if it is no such archive."""
    _check_end(archive.fp, size)  # type: ignore[arg-type]
    members = archive.infolist()
    if any(
        member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size for member in members
    ):
        raise ValueError("a record is compressed")
    if sum(m.file_size for m in members) > size or min((m.header_offset for m in members), default=1):
        raise ValueError("its records are larger than the file, or the first record is not at byte 0")
    pickles = [member for member in members if member.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("it needs exactly one data.pkl")
    return pickles[0]


def bytes_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return the bytes of a record, which is read once."""
    if not member.CRC:  # torch writes zeros under torch.serialization.set_crc32_options(False)
        del member.CRC  # zipfile then compares none
    return archive.read(member)


_END, _END64, _LOCATOR = struct.Struct("<4s6xHLLH"), struct.Struct("<4s28xQQQ"), struct.Struct("<4s4xQ4x")


def _check_end(file: BinaryIO, size: int) -> None:
    """Check that the end of a zip states where its directory is. Raises ValueError if not, or if it has a comment.

    Torch's reader and Python's tolerate a wrong offset in different ways, and would see different files.

    Args:
        size: Bytes of the file.
    """
    length = _END64.size + _LOCATOR.size + _END.size
    file.seek(max(size - length, 0))
    tail = file.read(length).rjust(length, b"\0")
    magic, count, directory, offset, comment = _END.unpack(tail[-_END.size :])
    end = size - _END.size
    magic64, place = _LOCATOR.unpack(tail[_END64.size : -_END.size])
    is_right = magic == b"PK\5\6" and not comment
    if magic64 == b"PK\6\7":
        end = size - length
        short = count, directory, offset
        magic64, count, directory, offset = _END64.unpack(tail[: _END64.size])
        is_right &= magic64 == b"PK\6\6" and place == end
        is_right &= short == (min(count, 0xFFFF), min(directory, 0xFFFFFFFF), min(offset, 0xFFFFFFFF))
    if not is_right or offset + directory != end:
        raise ValueError("its last record gives a wrong position of its directory")
