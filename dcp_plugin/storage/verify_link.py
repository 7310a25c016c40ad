"""Reads a data file that another process has written, before it is linked: what its index says of it is only a claim.

A load compares the checksums of the index with the bytes it reads. A link reads nothing, so a disk that lost bytes, or
an attacker who stored other weights under the hash of those in memory, would put unseen bytes into the next checkpoint.
Only the places of the items are taken from the index; their checksums are computed anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from isal.isal_zlib import crc32

from dcp_plugin.format.checksums import RunningCrc, RunningHash, block_size
from dcp_plugin.format.columns import Location
from dcp_plugin.format.torch_zip import frame_if_possible
from dcp_plugin.host_memory import BLOCK
from dcp_plugin.media.disk.hard_links import CannotLink, LinkableFile
from dcp_plugin.types import Shape

Claim = tuple[torch.dtype, Shape, Location]
"""Dtype and shape of an item, and where the index says it is."""


def verify_link(file: LinkableFile, claims: Mapping[int, Claim]) -> tuple[LinkableFile, dict[int, Location]]:
    """The file with its identity, and where its items are, with checksums of the bytes that are there.

    Raises:
        CannotLink: It has other bytes.
    """
    with file.open() as (fd, known):
        memory = memoryview(bytearray(BLOCK))
        return known, {slot: _verified(fd, *claim, memory) for slot, claim in claims.items()}


def _verified(fd: int, dtype: torch.dtype, shape: Shape, at: Location, memory: memoryview) -> Location:
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
    tail = os.pread(fd, around.length - around.payload_offset - around.payload_length, end)
    framed = head == around.head and tail in (around.tail(checksum.crc), around.tail(0))  # saved without checksums: 0
    if not framed or running_hash.digest() != at.hash:
        raise CannotLink(f"what is in {at.file} are not the bytes that its index says; see dcp_plugin.verify")
    frame_crc = crc32(tail, around.head_crc)
    return replace(
        at, payload_length=around.payload_length, frame_crc=frame_crc, checksums=np.array(checksum.ends, np.uint32)
    )
