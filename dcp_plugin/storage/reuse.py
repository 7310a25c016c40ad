"""Hard-links what has not changed since the run's last checkpoint into the next one, instead of writing it again.

Each checkpoint is complete by itself: a linked file is a data file like any other, and deleting one checkpoint takes
nothing from another. Only files can be linked, so stable items lie in files of their own
(:mod:`~dcp_plugin.storage.write_items`). The rules:

- An item is unchanged if key, box, dtype and the 128-bit hash of its bytes are those of the last checkpoint, and for no
  other reason. That a parameter is frozen only means that hashing it is worth the time.
- A file is linked if it is the one that was written then and at least 7/8 of its bytes are unchanged items. The
  unchanged items of other files are written again. A file that another process has written is verified first.
- Each rank decides alone about the items that it writes. A failure here is never an error: the bytes are in memory, and
  are written.

A state in which all changes must cost little. So of an item that is not known to be stable only a few bytes are hashed
(a *sample*). If these are the same at the next save, the item is written among the stable ones, with its hash, and
linked from then on. An item that was taken for stable and then changed needs twice as many equal samples each time.

A data file that another process has written is verified before it is linked: what its index says of it is only a claim.
A load compares the checksums of the index with the bytes it reads. A link reads nothing, so a disk that lost bytes, or
an attacker who stored other weights under the hash of those in memory, would put unseen bytes into the next checkpoint.
Only the places of the items are taken from the index; their checksums are computed anew.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from isal.isal_zlib import crc32

from dcp_plugin.errors import CheckpointError
from dcp_plugin.format.columns import Location, in_all
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.payload import (
    RunningCrc,
    RunningHash,
    block_size,
    frame_if_possible,
    hashes_of,
    padded,
    sample_of,
)
from dcp_plugin.media import CannotLink, Linkable, Medium, RangedFile, stretches
from dcp_plugin.paths import Where
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.storage.write_items import Destination, free_name
from dcp_plugin.tensors.host_memory import READ_PIECE, finish_device_work
from dcp_plugin.types import Shape

logger = logging.getLogger("dcp_plugin")

WORTH_LINKING = 64 << 10
"""Bytes of a rank's stable items below which they are written with the rest; and of an item that is not frozen, to look
at it at all."""

_MOST_DEAD = 1 / 8  # of the bytes of a linked file: space on the disk that no item uses


@dataclass(frozen=True)
class Item:
    """A box of a tensor."""

    key: str
    offsets: Shape
    sizes: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Candidate:
    """An item that this rank is about to write, and its bytes."""

    item: Item
    data: torch.Tensor
    frozen: bool
    """Whether it is of a parameter that is not trained."""


@dataclass(frozen=True)
class Findings:
    """What to do with each candidate, by its position."""

    linked: dict[int, Location]
    """Where those are in the new checkpoint that were linked."""
    stable: frozenset[int]
    """Those to be written into files of their own, with their hashes, to be linked next time."""
    why_not: str = ""
    """Why not more was linked, in words; empty if nothing stood in the way."""

    @property
    def names(self) -> set[str]:
        """Of the linked files."""
        return {location.file for location in self.linked.values()}

    @property
    def bytes(self) -> int:
        """Bytes that need not be written."""
        return sum({(at.file, at.offset): padded(at.length) for at in self.linked.values()}.values())


NOTHING = Findings({}, frozenset())


@dataclass(frozen=True)
class _Known:
    """What is known of an item since the last save: its hash if it was stable, else a sample.

    ``streak`` counts how often in a row the sample was the same; ``falls`` how often the item was taken for stable
    and had changed. A hash without a file: it was written, but not where it could be linked from.
    """

    hash: bytes | None = None
    file: Linkable | None = None
    location: Location | None = None
    sample: bytes | None = None
    streak: int = 0
    falls: int = 0


class Reuse:
    """What one rank knows of the last checkpoint that its run has saved or loaded."""

    def __init__(self) -> None:
        self._known: dict[Item, _Known] = {}
        self._pending: dict[Item, _Known] = {}
        self._loaded: Where | None = None
        self._warned = ""
        self.base: Where | None = None
        """The last checkpoint."""

    def loaded(self, path: Where) -> None:
        """The run goes on from this checkpoint. Its index is read when there is something to save."""
        self._loaded = path

    def examine(self, candidates: Sequence[Candidate | None], to: Destination) -> Findings:
        """Find what has not changed, and link it into the new checkpoint. None stands for what cannot be linked."""
        asked = {slot: one for slot, one in enumerate(candidates) if one is not None}
        why_not = self._recall(asked.values(), to.medium)
        finish_device_work(one.data for one in asked.values())
        known = {slot: self._known.get(one.item, _Known()) for slot, one in asked.items()}
        items = {slot: one.item for slot, one in asked.items()}
        certain = [slot for slot, one in known.items() if one.hash is not None]
        with _Verification({slot: known[slot] for slot in certain}, items, to.io_threads) as verification:
            hashes = dict(zip(certain, hashes_of([asked[slot].data for slot in certain], to.io_threads), strict=True))
            same = {slot: known[slot] for slot in certain if hashes[slot] == known[slot].hash}
            linked, reason = _link(same, verification, to)
        self._pending = {}
        stable: set[int] = set()
        for slot, one in asked.items():
            before, now = known[slot], hashes.get(slot)
            if now is None:
                after, expected = _looked_at(one, before)
            elif now == before.hash:
                after, expected = _Known(hash=now, falls=before.falls), True
            else:
                after, expected = _Known(sample=sample_of(one.data), falls=before.falls + 1), False
            self._pending[one.item] = after
            if expected:
                stable.add(slot)
        for slot, (file, location) in linked.items():
            self._pending[asked[slot].item] = replace(same[slot], file=file, location=location)
        stable -= linked.keys()
        if sum(asked[slot].data.nbytes for slot in stable) < WORTH_LINKING:
            stable = set()
        return Findings({slot: at for slot, (_, at) in linked.items()}, frozenset(stable), why_not or reason)

    def wrote(self, locations: Mapping[Item, Location], medium: Medium, directory: Where) -> None:
        """These stable items were written into ``directory``, and can be linked next time."""
        files: dict[str, Linkable] = {}
        for item, at in locations.items():
            if at.file not in files:
                files[at.file] = medium.linkable(directory / at.file)
            known = self._pending[item]
            self._pending[item] = replace(known, hash=at.hash, file=files[at.file], location=at)

    def published(self, path: Where) -> None:
        """What was examined and written is a checkpoint now, and the base of the next one."""
        files: dict[str, Linkable] = {}
        for item, known in self._pending.items():
            if known.file is not None and known.location is not None:
                name = known.location.file
                self._pending[item] = replace(known, file=files.setdefault(name, known.file.published(path / name)))
        self._known, self._pending = self._pending, {}
        self.base = path

    def warn(self, why_not: str) -> None:
        """Log why not more is reused; once, as long as the reason is the same."""
        if why_not and why_not != self._warned:
            logger.warning("what has not changed since %s is written again: %s.", self.base, why_not)
        self._warned = why_not

    def _recall(self, candidates: Collection[Candidate], medium: Medium) -> str:
        """Look the candidates up in the checkpoint that was loaded, if one was since the last save.

        Returns why not all could be found that should be there.
        """
        path, self._loaded = self._loaded, None
        if path is None:
            return ""
        self.base = path
        try:
            with ShardedReader(path, check_files=False, complete=False) as reader:
                index = reader.index
        except (OSError, CheckpointError) as error:
            return f"it cannot be opened any more ({error})"
        found: dict[str, Linkable] = {}
        keys_with_hash = _keys_with_hash(index)
        why_not = ""
        for one in candidates:
            if one.item.key not in keys_with_hash:
                continue
            location = _location_in(index, one.item)
            if location is None or location.hash is None:
                why_not = f"it was saved by other ranks or in another layout ({one.item.key}, for one)"
            elif "/" not in location.file and self._known.get(one.item, _Known()).hash != location.hash:
                home, size = reader.path / location.file, index.files[location.file]
                file = found.setdefault(location.file, medium.linkable(home, path / location.file, size=size))
                self._known[one.item] = _Known(hash=location.hash, file=file, location=location)
        return why_not


def _looked_at(one: Candidate, before: _Known) -> tuple[_Known, bool]:
    """An item whose hash is not known: what to remember of it, and whether it is expected to be stable from now on."""
    if one.frozen and before.falls == 0:
        return before, True
    sample = sample_of(one.data)
    streak = before.streak + 1 if sample is not None and sample == before.sample else 0
    return replace(before, sample=sample, streak=streak), streak >= 1 << min(before.falls, 16)


def _link(
    same: Mapping[int, _Known], verification: _Verification, to: Destination
) -> tuple[dict[int, tuple[Linkable, Location]], str]:
    """Link the files of which enough is unchanged. Where each item is then; and why not more."""
    linked: dict[int, tuple[Linkable, Location]] = {}
    names: list[str] = []
    why_not = ""
    for file, locations in _worth_linking(same).items():
        wanted = "" if to.medium.keeps_names else next(iter(locations.values())).file
        name = free_name(to.rank, names, to.token, wanted)
        try:
            if not file.verified:
                file, there_now = verification.of(file)
                locations = {slot: there_now[slot] for slot in locations}
            there = file.link_to(to.directory / name)
        except (CannotLink, OSError) as error:
            why_not = str(error)
            continue
        names.append(name)
        linked |= {slot: (there, replace(where, file=name)) for slot, where in locations.items()}
    return linked, why_not


def _worth_linking(same: Mapping[int, _Known]) -> dict[Linkable, dict[int, Location]]:
    """The files of which enough is unchanged, and where these items are in them."""
    items_of: dict[Linkable, dict[int, Location]] = {}
    for slot, known in same.items():
        if known.file is not None and known.location is not None:
            items_of.setdefault(known.file, {})[slot] = known.location
    return {
        file: locations
        for file, locations in items_of.items()
        if sum({where.offset: padded(where.length) for where in locations.values()}.values())
        >= file.size * (1 - _MOST_DEAD)
    }


def _location_in(index: CheckpointIndex, item: Item) -> Location | None:
    """Where a checkpoint has exactly this box."""
    slot = index.slots.get(item.key)
    if slot is None or index.table.dtype_of(slot) != item.dtype:
        return None
    offsets, sizes = index.table.boxes_of(slot)
    if offsets.shape[1] != len(item.offsets):
        return None
    found = in_all((offsets == item.offsets) & (sizes == item.sizes)).nonzero()[0]
    return index.location(int(index.table.chunk_starts[slot] + found[0])) if len(found) else None


def _keys_with_hash(index: CheckpointIndex) -> set[str]:
    slots = index.columns["chunk_ends"].searchsorted(index.columns.get("hashed", np.empty(0, np.int64)), "right")
    return {index.table.keys[slot] for slot in slots.tolist()}


class _Verification:
    """Reads the files that may be linked and that another process has written, while what is in memory is hashed: the
    disk is waited for and the processor is not.

    All of a frozen backbone is read by the first save after a resume, so each thread reads and hashes neighbours, for
    which the system reads ahead.
    """

    def __init__(self, known: Mapping[int, _Known], item_at: Mapping[int, Item], threads: int) -> None:
        self._item_at = item_at
        self._needless = False
        self._parts: dict[Linkable, list[Future[tuple[Linkable, dict[int, Location]]]]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dcp-verify")
        for file, locations in _worth_linking(known).items():
            if not file.verified:
                in_order = sorted(locations.items(), key=lambda item: item[1].offset)
                work = stretches([at.length for _, at in in_order], threads)
                parts = (dict(in_order[number] for number in some) for some in work if some)
                self._parts[file] = [self._pool.submit(self._read, file, part) for part in parts]

    def __enter__(self) -> _Verification:
        return self

    def __exit__(self, *_: object) -> None:
        self._needless = True
        self._pool.shutdown(cancel_futures=True)

    def of(self, file: Linkable) -> tuple[Linkable, dict[int, Location]]:
        """The file with its identity, and where its items are, with checksums of the bytes that are there.

        Raises:
            CannotLink: It has other bytes.
        """
        found = [part.result() for part in self._parts[file]]
        (known, _), *others = found
        if any(other != known for other, _ in others):
            raise CannotLink("another file has taken its name just now")
        return known, {slot: at for _, some in found for slot, at in some.items()}

    def _read(self, file: Linkable, locations: Mapping[int, Location]) -> tuple[Linkable, dict[int, Location]]:
        memory, found = memoryview(bytearray(READ_PIECE)), dict[int, Location]()
        with file.opened() as (there, known):
            for slot, at in locations.items():
                if self._needless:
                    raise CannotLink("its items have changed")
                found[slot] = _verified_item(there, self._item_at[slot], at, memory)
        return known, found


def _verified_item(file: RangedFile, item: Item, at: Location, memory: memoryview) -> Location:
    around = frame_if_possible(item.dtype, item.sizes)
    if around is None or (at.length, at.payload_offset) != (around.length, around.payload_offset):
        raise CannotLink("another version of torch or of dcp_plugin has saved it")
    head = _read(file, at.offset, len(around.head))
    checksum, running_hash = RunningCrc(block_size(around.payload_length)), RunningHash()
    begin, end = at.offset + around.payload_offset, at.offset + around.payload_offset + around.payload_length
    while begin < end:
        count = file.read_into([memory[: end - begin]], begin)
        if not count:
            break
        checksum.add(memory[:count])
        running_hash.update(memory[:count])
        begin += count
    tail = _read(file, end, around.length - around.payload_offset - around.payload_length)
    framed = head == around.head and tail in (around.tail(checksum.crc), around.tail(0))  # saved without checksums: 0
    if not framed or running_hash.digest() != at.hash:
        raise CannotLink(f"what is in {at.file} are not the bytes that its index says; see dcp_plugin.verify")
    frame_crc = crc32(tail, around.head_crc)
    return replace(
        at, payload_length=around.payload_length, frame_crc=frame_crc, checksums=np.array(checksum.ends, np.uint32)
    )


def _read(file: RangedFile, offset: int, count: int) -> bytes:
    memory = bytearray(count)
    return bytes(memory[: file.read_into([memoryview(memory)], offset)])
