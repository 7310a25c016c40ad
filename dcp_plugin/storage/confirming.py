"""A data file of another process is read once before it is linked: what its index says of it is only a claim.

The checksums of a loaded checkpoint protect a load, because they are compared with its bytes. A link reads nothing. So
a disk that forgot, or somebody who wrote other weights under the hash of those in memory, would put bytes into the next
checkpoint that nobody has seen. Nothing of the index is taken over but where things are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from isal.isal_zlib import crc32

from dcp_plugin.storage.checksums import RunningCrc, block_size
from dcp_plugin.storage.framing import frame_if_possible
from dcp_plugin.storage.hashing import RunningHash
from dcp_plugin.storage.hostmemory import BLOCK
from dcp_plugin.storage.links import CannotLink, LinkableFile
from dcp_plugin.storage.table import Location
from dcp_plugin.types import Shape

Claim = tuple[torch.dtype, Shape, Location]
"""Dtype and shape of an item, and where it is said to be."""


def confirmed(file: LinkableFile, claims: Mapping[int, Claim]) -> tuple[LinkableFile, dict[int, Location]]:
    """The file, which is known from now on, and where its items are, with checksums of the bytes that are there.

    Raises:
        CannotLink: It has other bytes.
    """
    with file.opened() as (fd, known):
        memory = memoryview(bytearray(BLOCK))
        return known, {slot: _confirmed(fd, *claim, memory) for slot, claim in claims.items()}


def _confirmed(fd: int, dtype: torch.dtype, shape: Shape, at: Location, memory: memoryview) -> Location:
    around = frame_if_possible(dtype, shape)
    if around is None or (at.length, at.payload_offset) != (around.length, around.payload_offset):
        raise CannotLink("another version of torch or of dcp_plugin has saved it")
    head = os.pread(fd, len(around.head), at.offset)
    checksum, running_hash = RunningCrc(block_size(around.payload_length)), RunningHash()
    begin, end = at.offset + around.payload_offset, at.offset + around.payload_offset + around.payload_length
    while begin < end:
        count = os.preadv(fd, [memory[: end - begin]], begin)
        if not count:
            break
        checksum.add(memory[:count])
        running_hash.update(memory[:count])
        begin += count
    rest = around.length - around.payload_offset - around.payload_length
    tail = os.pread(fd, rest, end)
    framed = head == around.head and tail in (around.tail(checksum.crc), around.tail(0))  # saved without checksums: 0
    if not framed or running_hash.digest() != at.hash:
        raise CannotLink(f"what is in {at.file} are not the bytes that its index says; see dcp_plugin.verify")
    frame_crc = crc32(tail, around.head_crc)
    ends = np.array(checksum.ends, np.uint32)
    return replace(at, payload_length=around.payload_length, frame_crc=frame_crc, checksums=ends)
