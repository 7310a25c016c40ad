"""Hard links of data that has not changed since the run's last checkpoint, instead of writing it again.

Each checkpoint is complete by itself: a linked file is an ordinary data file, and deleting one checkpoint removes
nothing from another. Only files can be linked, so stable items are in separate files
(:mod:`~dcp_plugin.core.storage.write_items`). The rules:

- An item is unchanged if key, box, dtype and the hashes of its bytes equal those in the last checkpoint, and for no
  other reason. Frozen parameters follow the same rule: being frozen only makes a parameter worth hashing.
- A file is linked if it still is the one that was written then, and at least 7/8 of its bytes are unchanged items. The
  unchanged items of other files are written again.
- A file that another process has written is compared with memory, byte by byte, before it is linked.
- Each rank decides alone about the items that it writes. A failure here is never an error: the bytes are in memory, and
  are written.

A state in which every item changes must cost little. A save hashes its bytes while it writes them, and to hash all of
them before would be a second pass. A save first hashes only a few bytes of an item that is not known to be stable (a
*sample*). If the sample is the same at the next save, the item is written among the stable ones. Later saves first hash
all its bytes, and link it if it is unchanged. After each change of an item that was assumed to be stable, it needs
twice as many equal samples. The index marks the files of stable items, so that a resumed run examines only these.

The index of another process is only a claim. A load compares its hashes with the bytes that it reads, but a link reads
nothing. Without verification, unread bytes would enter the next checkpoint: those of a disk that lost data, or of an
attacker who stored other weights under the hash of those in memory. Only the places of the items are taken from the
index. Their bytes are compared with those in memory, and the new checkpoint gets hashes of the bytes in the file.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointError, logger
from dcp_plugin.core.format.columns import Location, in_all
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.format.payload import frame_if_possible, hashes_of, padded, sample_of
from dcp_plugin.core.media import CannotLink, DataFile, Medium, stretches
from dcp_plugin.core.paths import Where
from dcp_plugin.core.records import NewItem
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.storage.reading import equal_item
from dcp_plugin.core.storage.write_items import Destination
from dcp_plugin.core.tensors.host_memory import BLOCK, READ_PIECE, Rings, device_of_thread, finish_device_work

WORTH_LINKING = 64 << 10
"""Least bytes of all stable items of a rank together; with fewer, they are written among the others. Also the least
bytes of an item that is sampled although it is not frozen."""

_MOST_DEAD = 1 / 8  # of the bytes of a linked file: disk space that no item uses


@dataclass(frozen=True)
class Item:
    """Box of a tensor."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Findings:
    """Decision about each item that this rank is about to write, by its position."""

    linked: dict[int, Location]
    """Locations in the new checkpoint of the items that were linked."""
    stable: frozenset[int]
    """Items to be written into separate files, to be linked next time."""
    why_not: str = ""
    """Reason why not more was linked, in words; empty if nothing prevented it."""

    @property
    def names(self) -> set[str]:
        """Names of the linked files."""
        return {location.file for location in self.linked.values()}

    @property
    def bytes(self) -> int:
        """Bytes that need not be written."""
        return sum({(at.file, at.offset): padded(at.length) for at in self.linked.values()}.values())


NOTHING = Findings({}, frozenset())


@dataclass(frozen=True)
class _Known:
    """Knowledge of an item since the last save: its hash if it was stable, otherwise a sample.

    ``streak`` is the number of equal samples in a row. ``falls`` is the number of times that the item was assumed to be
    stable and had changed. An item with a hash and without a file was written to a file that cannot be linked.
    """

    hash: bytes | None = None
    file: DataFile | None = None
    location: Location | None = None
    sample: bytes | None = None
    streak: int = 0
    falls: int = 0


class Reuse:
    """Knowledge of one rank about the last checkpoint that its run has saved or loaded."""

    def __init__(self) -> None:
        self._known: dict[Item, _Known] = {}
        self._pending: dict[Item, _Known] = {}
        self._items: dict[int, Item] = {}
        self._loaded: Where | None = None
        self._warned = ""
        self.previous: Where | None = None
        """Path of the last checkpoint."""

    def note_loaded(self, path: Where) -> None:
        """Make a checkpoint that was loaded the last one. Its index is read by the next save."""
        self._loaded = path

    def examine(self, new_items: Sequence[NewItem], frozen: Collection[str], to: Destination) -> Findings:
        """Link unchanged items into the new checkpoint.

        Args:
            frozen: Keys of parameters that are not trained. Their first save already writes them as stable items.
        """
        tensors = {
            slot: item.data
            for slot, item in enumerate(new_items)
            if isinstance(item.data, torch.Tensor) and item.data.nbytes >= (1 if item.key in frozen else WORTH_LINKING)
        }
        self._items = items = {
            slot: Item(new_items[slot].key, new_items[slot].offsets, new_items[slot].sizes, data.dtype)
            for slot, data in tensors.items()
        }
        why_not = self._recall(items.values())
        finish_device_work(tensors.values())
        previous = {slot: self._known.get(item, _Known()) for slot, item in items.items()}
        certain = {slot: record for slot, record in previous.items() if record.hash is not None}
        comparisons = _compare(certain, items, tensors, to)
        # A comparison has hashed the bytes that are equal. Items without a known hash cannot be linked yet.
        hashes = {
            slot: _hash(at)
            for part in chain(*comparisons.values())
            if part.exception() is None
            for slot, at in part.result()[1].items()
        }
        others = [slot for slot in certain if slot not in hashes]
        hashes |= zip(others, hashes_of([tensors[slot] for slot in others], to.io_threads), strict=True)
        same = {slot: record for slot, record in certain.items() if hashes[slot] == record.hash}
        linked, reason = _link(same, comparisons, to)
        # The knowledge for the next save. It becomes valid only in published(), since this save may fail.
        self._pending = {}
        stable: set[int] = set()
        for slot, item in items.items():
            before, now = previous[slot], hashes.get(slot)
            if now is None:
                after, expected = _looked_at(tensors[slot], item.key in frozen, before)
            elif now == before.hash:  # linked, or written among the stable items again
                after, expected = _Known(hash=now, falls=before.falls), True
            else:
                after, expected = _Known(sample=sample_of(tensors[slot]), falls=before.falls + 1), False
            self._pending[item] = after
            if expected:
                stable.add(slot)
        for slot, (file, location) in linked.items():
            self._pending[items[slot]] = replace(same[slot], file=file, location=location)
        stable -= linked.keys()
        if sum(tensors[slot].nbytes for slot in stable) < WORTH_LINKING:
            stable = set()
        return Findings({slot: at for slot, (_, at) in linked.items()}, frozenset(stable), why_not or reason)

    def wrote(self, locations: Mapping[int, Location], medium: Medium, directory: Where) -> None:
        """Record the stable items that were written into ``directory``, so that the next save can link them.

        Args:
            locations: Position of each among the examined items -> its location.
        """
        files: dict[str, DataFile] = {}
        opened = medium.open(directory)
        for slot, at in locations.items():
            if at.file not in files:
                files[at.file] = DataFile.written(opened, directory / at.file)
            item = self._items[slot]
            self._pending[item] = replace(self._pending[item], hash=_hash(at), file=files[at.file], location=at)

    def published(self, path: Where) -> None:
        """Make the examined and written items those of the last checkpoint, which is now published."""
        files: dict[str, DataFile] = {}
        for item, pending in self._pending.items():
            if pending.file is not None and pending.location is not None:
                name = pending.location.file
                self._pending[item] = replace(pending, file=files.setdefault(name, pending.file.published(path / name)))
        self._known, self._pending = self._pending, {}
        self.previous = path

    def warn(self, why_not: str) -> None:
        """Log why not more is reused; once, until the reason changes."""
        if why_not and why_not != self._warned:
            logger.warning(
                "tensors that have not changed since %s are written again instead of linked: %s.",
                self.previous,
                why_not,
            )
        self._warned = why_not

    def _recall(self, items: Collection[Item]) -> str:
        """Look the items up in the loaded checkpoint, if one was loaded since the last save.

        Return why some items that it should have were not found; empty if all were.
        """
        path, self._loaded = self._loaded, None
        if path is None:
            return ""
        self.previous = path
        try:
            with CheckpointReader(path, check_files=False) as reader:
                index = reader.index
        except (OSError, CheckpointError) as error:
            return f"it cannot be opened any more ({error})"
        files: dict[str, DataFile] = {}
        linkable_keys = _linkable_keys(index)
        why_not = ""
        for item in items:
            if item.key not in linkable_keys:
                continue
            location = _location_in(index, item)
            if location is None:
                why_not = f"it was saved by other ranks or in another layout ({item.key}, for one)"
            elif location.file not in index.linkable or "/" in location.file:
                continue
            elif self._known.get(item, _Known()).hash != _hash(location):
                name = location.file
                if name not in files:
                    files[name] = DataFile(tuple(dict.fromkeys((reader.path / name, path / name))), index.files[name])
                self._known[item] = _Known(hash=_hash(location), file=files[name], location=location)
        return why_not


def _looked_at(data: torch.Tensor, frozen: bool, before: _Known) -> tuple[_Known, bool]:
    """Return the new knowledge of an item without a known hash, and whether it is expected to be stable from now on."""
    if frozen and before.falls == 0:  # written among the stable items at once, without a sample
        return before, True
    sample = sample_of(data)
    streak = before.streak + 1 if sample is not None and sample == before.sample else 0
    # After each fall, twice as many equal samples: an item that changes now and then would be hashed in vain.
    return replace(before, sample=sample, streak=streak), streak >= 1 << min(before.falls, 16)


def _link(
    same: Mapping[int, _Known], comparisons: Mapping[DataFile, list[_Part]], to: Destination
) -> tuple[dict[int, tuple[DataFile, Location]], str]:
    """Link the files of which enough is unchanged. Return the new location of each item, and why not more was
    linked."""
    linked: dict[int, tuple[DataFile, Location]] = {}
    names: list[str] = []
    why_not = ""
    for file, locations in _worth_linking(same).items():
        name = to.free_name(names)
        try:
            if file.identity is None:  # this process has not written it
                identified, compared = zip(*(part.result() for part in comparisons[file]), strict=True)
                if len(set(identified)) > 1:
                    raise CannotLink("another file has taken its name just now")
                equal = dict(ChainMap(*compared))
                if not equal.keys() >= locations.keys():
                    raise CannotLink(
                        f"what is in {file.homes[0].name} are not the bytes that its index says; see dcp_plugin.verify"
                    )
                file, locations = identified[0], {slot: equal[slot] for slot in locations}
            target = to.medium.link_file(file, to.directory / name)
        except (CannotLink, OSError) as error:
            why_not = str(error)
            continue
        names.append(name)
        linked |= {slot: (target, replace(location, file=name)) for slot, location in locations.items()}
    return linked, why_not


def _worth_linking(same: Mapping[int, _Known]) -> dict[DataFile, dict[int, Location]]:
    """Return the files of which enough is unchanged, and the locations of these items."""
    items_of: dict[DataFile, dict[int, Location]] = {}
    for slot, record in same.items():
        if record.file is not None and record.location is not None:
            items_of.setdefault(record.file, {})[slot] = record.location
    return {
        file: locations
        for file, locations in items_of.items()
        # Keyed by offset, since items that share a place count once.
        if sum({location.offset: padded(location.length) for location in locations.values()}.values())
        >= file.size * (1 - _MOST_DEAD)
    }


def _location_in(index: CheckpointIndex, item: Item) -> Location | None:
    """Return the location at which a checkpoint has exactly this box."""
    slot = index.slots.get(item.key)
    if slot is None or index.table.dtype_of(slot) != item.dtype:
        return None
    offsets, sizes = index.table.boxes_of(slot)
    if offsets.shape[1] != len(item.offsets):
        return None
    matches = in_all((offsets == item.offsets) & (sizes == item.sizes)).nonzero()[0]
    return index.places.location(int(index.table.chunk_starts[slot] + matches[0])) if len(matches) else None


def _linkable_keys(index: CheckpointIndex) -> set[str]:
    """Return the keys with chunks in files that are meant to be linked."""
    # Over columns, since a checkpoint may have a million chunks: rows of linkable files, then the slot of each row.
    is_linkable = np.array([name in index.linkable for name in index.file_names], bool)
    chunks = np.flatnonzero(is_linkable[index.places.by_item.file])
    return {index.table.keys[slot] for slot in set(index.table.slots_of(chunks).tolist())}


def _hash(location: Location) -> bytes:
    """Return the hashes of an item of ours as :func:`~dcp_plugin.core.format.payload.hashes_of` does."""
    assert location.hashes is not None, "this package has written the item"
    return location.hashes.tobytes()


_Part = Future[tuple[DataFile, dict[int, Location]]]
"""Result for some items of a file: the file with its identity, and the locations of the items whose bytes are equal."""


def _compare(
    records: Mapping[int, _Known], items: Mapping[int, Item], tensors: Mapping[int, torch.Tensor], to: Destination
) -> dict[DataFile, list[_Part]]:
    """Compare the tensors in memory with the files that may be linked and that another process has written.

    The first save after a resume may read a complete frozen backbone. Each thread reads neighbours, for which the
    system reads ahead. It compares each piece as soon as it is read. Further threads that hash the tensors meanwhile
    would take the processor and the interpreter's lock from the readers.
    """
    comparisons: dict[DataFile, list[_Part]] = {}
    parts: list[list[tuple[int, Location]]] = []
    try:
        with ThreadPoolExecutor(to.io_threads, "dcp-verify", device_of_thread()) as pool:
            for file, locations in _worth_linking(records).items():
                if file.identity is None:
                    in_order = sorted(locations.items(), key=lambda item: item[1].offset)
                    work = stretches([at.length for _, at in in_order], to.io_threads)
                    parts += (of_file := [[in_order[number] for number in some] for some in work if some])
                    comparisons[file] = [
                        pool.submit(_equal_items, file, part, items, tensors, to.medium) for part in of_file
                    ]
    finally:
        for part in parts:
            part.clear()  # after Ctrl-C, the threads end with the item that they read
    return comparisons


def _equal_items(
    file: DataFile,
    locations: Sequence[tuple[int, Location]],
    items: Mapping[int, Item],
    tensors: Mapping[int, torch.Tensor],
    medium: Medium,
) -> tuple[DataFile, dict[int, Location]]:
    """Return the file with its identity, and the locations of the items that are equal, with hashes of their bytes in
    the file."""
    rings, memory, equal = Rings(), np.empty(BLOCK, np.uint8).data, dict[int, Location]()
    with file.opened(medium) as (opened, identified):
        for slot, at in locations:
            around = frame_if_possible(items[slot].dtype, items[slot].sizes)
            if around is None or (at.length, at.payload_offset) != (around.length, around.payload_offset):
                raise CannotLink("another version of torch or of dcp_plugin has saved it")
            pieces = rings.pieces(tensors[slot], READ_PIECE)
            if (hashes := equal_item(opened, at.offset, around, pieces, memory)) is not None:
                equal[slot] = replace(at, payload_length=around.payload_length, frame=around.hash, hashes=hashes)
    return identified, equal
