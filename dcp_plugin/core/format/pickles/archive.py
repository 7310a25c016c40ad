"""Reader of the zip of a ``torch.save`` file.

The rule: a file never expands to more bytes than it has. A record of a zip may be compressed a thousandfold, and many
records may share bytes. Here a record must be stored uncompressed, in bytes of its own. Torch's own reader is not used:
it ignores the case of names, and calculates offsets from values in the pickle.
"""

from __future__ import annotations

import struct
import sys
import zipfile
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dcp_plugin.core.format import expect
from dcp_plugin.core.format.torch_archive import MAGIC

_LOCAL_HEADER = struct.Struct("<4s22xHH")
PICKLE = "data.pkl"


class Archive:
    """Records of a ``torch.save`` file.

    Args:
        size: Bytes of the file.

    Raises:
        ValueError: A record is compressed, shares bytes with another record, or is outside of the file.
        Exception: The zip is damaged otherwise.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        with zipfile.ZipFile(file) as archive:
            members = sorted(archive.infolist(), key=lambda member: member.header_offset)
        roots = [name.removesuffix(PICKLE) for member in members if (name := member.filename).endswith(f"/{PICKLE}")]
        if len(roots) > 1:
            raise ValueError(f"it has more than one {PICKLE}")
        self.is_of_torch = bool(roots)
        """False if it is a zip of something else."""
        self.records: dict[str, tuple[int, int]] = {}
        """Position and size in bytes of each record, by its name below the root."""
        expect(file, [(member.header_offset, member.header_offset + _LOCAL_HEADER.size) for member in members])
        end = 0
        for member in members if roots else ():
            begin = self._begin_of(member)
            if member.header_offset < end or begin + member.file_size > size:
                raise ValueError(f"the record {member.filename} overlaps another record or lies outside the file")
            end = begin + member.file_size
            if member.filename.startswith(roots[0]):
                self.records[member.filename.removeprefix(roots[0])] = begin, member.file_size
        order = self.read("byteorder").tobytes() if "byteorder" in self.records else b"little"
        self.is_swapped = order != sys.byteorder.encode()
        """True if its tensors have the other byte order than this machine."""

    def _begin_of(self, member: zipfile.ZipInfo) -> int:
        """Return the position of the first byte of a record. Its local header may be longer than the directory says."""
        self._file.seek(member.header_offset)
        magic, name, extra = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        is_stored = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1
        if magic != MAGIC or not is_stored or member.compress_size != member.file_size:
            raise ValueError(f"the record {member.filename} is compressed, encrypted or damaged")
        return member.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)

    def read(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a record. Raises KeyError if it has no such record."""
        begin, size = self.records[name]
        content = np.empty(size, np.uint8)
        self._file.seek(begin)
        if self._file.readinto(content) != size:  # type: ignore[attr-defined]
            raise EOFError(f"the record {name} is truncated")
        return content
