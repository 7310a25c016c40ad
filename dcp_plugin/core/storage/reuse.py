"""Hard links of data that has not changed since the run's last checkpoint, instead of writing it again.

Each checkpoint is complete by itself: a linked file is an ordinary data file, and deleting one checkpoint removes
nothing from another. Only files can be linked, so stable items are in separate files
(:mod:`~dcp_plugin.core.storage.write_items`). The rules:

- An item is unchanged if key, box, dtype and the hashes of its bytes equal those in the last checkpoint, and for no
  other reason. Frozen parameters follow the same rule: being frozen only makes a parameter worth hashing.
- A file is linked if it still is the one that was written then, and at least 7/8 of its bytes are unchanged items. The
  unchanged items of other files are written again.
- A file that another process has written is verified before it is linked.
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
index; their hashes are computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointError, logger
from dcp_plugin.core.format.columns import Location, in_all
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.format.payload import frame_if_possible, hashes_of, padded, sample_of
from dcp_plugin.core.media import CannotLink, DataFile, Medium, RangedFile, stretches
from dcp_plugin.core.paths import Where
from dcp_plugin.core.records import NewItem
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.storage.reading import framed_item
from dcp_plugin.core.storage.write_items import Destination
from dcp_plugin.core.tensors.host_memory import finish_device_work

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
        # Items without a hash cannot be linked yet. The files of the others are verified while their hashes are
        # computed.
        certain = [slot for slot, record in previous.items() if record.hash is not None]
        with _Verification({slot: previous[slot] for slot in certain}, items, to.medium, to.io_threads) as verification:
            hashes = dict(zip(certain, hashes_of([tensors[slot] for slot in certain], to.io_threads), strict=True))
            same = {slot: previous[slot] for slot in certain if hashes[slot] == previous[slot].hash}
            linked, reason = _link(same, verification, to)
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
                home, size = reader.path / location.file, index.files[location.file]
                homes = tuple(dict.fromkeys((home, path / location.file)))
                file = files.setdefault(location.file, DataFile(homes, size))
                self._known[item] = _Known(hash=_hash(location), file=file, location=location)
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
    same: Mapping[int, _Known], verification: _Verification, to: Destination
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
                file, verified = verification.of(file)
                locations = {slot: verified[slot] for slot in locations}
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


class _Verification:
    """Reader of files that may be linked and that another process has written.

    It runs while the items in memory are hashed, since reading waits for the disk and leaves the processor free. The
    first save after a resume may read a complete frozen backbone. Each thread reads and hashes neighbours, for which
    the system reads ahead.
    """

    def __init__(
        self, records: Mapping[int, _Known], item_at: Mapping[int, Item], medium: Medium, threads: int
    ) -> None:
        self._item_at, self._medium = item_at, medium
        self._needless = False
        self._parts: dict[DataFile, list[Future[tuple[DataFile, dict[int, Location]]]]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dcp-verify")
        for file, locations in _worth_linking(records).items():
            if file.identity is None:
                in_order = sorted(locations.items(), key=lambda item: item[1].offset)
                work = stretches([at.length for _, at in in_order], threads)
                parts = (dict(in_order[number] for number in some) for some in work if some)
                self._parts[file] = [self._pool.submit(self._read, file, part) for part in parts]

    def __enter__(self) -> _Verification:
        return self

    def __exit__(self, *_: object) -> None:
        self._needless = True  # ends the reads of files whose items have changed, so that the save does not wait
        self._pool.shutdown(cancel_futures=True)

    def of(self, file: DataFile) -> tuple[DataFile, dict[int, Location]]:
        """Return the file with its identity, and the locations of its items, with hashes of the bytes in the file.

        Raises:
            CannotLink: The file has other bytes.
        """
        parts = [part.result() for part in self._parts[file]]
        (identity, _), *more = parts
        if any(other != identity for other, _ in more):
            raise CannotLink("another file has taken its name just now")
        return identity, {slot: at for _, some in parts for slot, at in some.items()}

    def _read(self, file: DataFile, locations: Mapping[int, Location]) -> tuple[DataFile, dict[int, Location]]:
        verified = dict[int, Location]()
        with file.opened(self._medium) as (opened, identity):
            for slot, at in locations.items():
                if self._needless:
                    raise CannotLink("its items have changed")
                verified[slot] = _verified_item(opened, self._item_at[slot], at)
        return identity, verified


def _verified_item(file: RangedFile, item: Item, at: Location) -> Location:
    around = frame_if_possible(item.dtype, item.sizes)
    if around is None or (at.length, at.payload_offset) != (around.length, around.payload_offset):
        raise CannotLink("another version of torch or of dcp_plugin has saved it")
    hashes = framed_item(file, at.offset, around)
    if hashes is None or hashes.tobytes() != _hash(at):
        raise CannotLink(f"what is in {at.file} are not the bytes that its index says; see dcp_plugin.verify")
    return replace(at, payload_length=around.payload_length, frame=around.hash, hashes=hashes)
