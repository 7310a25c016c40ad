"""A checkpoint of this package, laid out for any number of ranks. Stock ``torch.distributed.checkpoint`` reads it.

Each rank gets the rows of a tensor that FSDP2 would give it. Tensors that share bytes in the source share them in the
output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from dcp_plugin.core.format.derived_index import index_of
from dcp_plugin.core.format.index import CheckpointIndex, Entry, Location, StoredChunk, StoredTensor, StoredValue
from dcp_plugin.core.format.payload import MAX_PAYLOAD
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.paths import Where
from dcp_plugin.core.planning.load_balance import BoxPart
from dcp_plugin.core.ranks.collectives import Ranks
from dcp_plugin.core.storage import write_items
from dcp_plugin.core.storage.part_writer import Facts, Publication
from dcp_plugin.core.storage.write_items import Streamed
from dcp_plugin.tools.formats import Selected, place_of
from dcp_plugin.tools.stream import Counter, Part, Progress, Stream, is_opaque


@dataclass(frozen=True)
class _Item:
    """An entry in the file of a rank: a box of a tensor, or a complete value."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: Part | None = None
    """None if it is copied as the writer of the source has written it."""


class DcpCheckpoint:
    """The checkpoint that an export makes.

    Args:
        selected: The keys to write.
        ranks: The number of ranks that the checkpoint is laid out for.
        out: The path of the checkpoint.
    """

    def __init__(self, selected: Selected, ranks: int, out: Where) -> None:
        self.selected, self.notes = selected, list[str]()
        self._ranks = ranks
        self._publication = Publication(out, medium_of(out))
        self.begin, self.discard = self._publication.reserve, self._publication.discard
        self._first: dict[object, str] = {}
        self._same: dict[str, str] = {}
        """Tensors -> the first tensor with the same bytes."""
        self._items = [self._items_of(rank) for rank in range(ranks)]

    @property
    def nbytes(self) -> int:
        return sum(item.part.nbytes for items in self._items for item in items if item.part)

    def write(self, directory: Where, group: Ranks, progress: Progress | None) -> dict[int, list[Location]]:
        """Write the files of some ranks. Return the location of each of their items."""
        self._publication.medium.join(directory, self._publication.path)
        count = Counter(self.nbytes // group.size, progress)
        return {rank: self._write(rank, directory, count) for rank in range(group.rank, self._ranks, group.size)}

    def _write(self, rank: int, directory: Where, count: Counter) -> list[Location]:
        items = self._items[rank]
        reader, medium = self.selected.reader, self._publication.medium
        stream = Stream(reader, [item.part for item in items if item.part])
        pieces = groupby(stream, key=lambda piece: piece.part)

        def bytes_of(nbytes: int) -> Iterator[memoryview]:
            if nbytes:
                for piece in next(pieces)[1]:
                    yield piece.data
                    count.add(len(piece.data))

        data: list[bytes | Streamed] = [
            reader.item(item.key)
            if (part := item.part) is None
            else Streamed(part.dtype, part.sizes, partial(bytes_of, part.nbytes))
            for item in items
        ]
        to = write_items.Destination(medium, directory, rank, 1)
        places = write_items.write(data, to, self._publication.path)
        medium.flush(directory)
        locations = [places.location(number) for number in range(len(items))]
        return [
            replace(location, payload_offset=None)
            if item.part is None and isinstance(reader.index[item.key], StoredTensor)
            else location
            for item, location in zip(items, locations, strict=True)
        ]

    def publish(self, directory: Where, written: list[dict[int, list[Location]]]) -> list[str]:
        """Write the index over the files of all ranks, and publish the checkpoint. Return the names of its files."""
        locations = {rank: places for part in written for rank, places in part.items()}
        in_order = [locations[rank] for rank in range(self._ranks)]
        index = self._index(in_order, self._publication.file_sizes())
        summary, reader = self.selected.reader.summary, self.selected.reader
        names = {name.partition(".")[0] for name in self.selected.names.values()}
        kinds = {name: kind for name, kind in reader.kinds.items() if name in names}
        classes = summary.optimizers if summary else {}
        optimizers = {name: cls for name, cls in classes.items() if name in names}
        step = summary.step if summary else None
        facts = Facts(step=step, world_size=self._ranks, kinds=kinds, optimizers=optimizers)
        self._publication.compose_and_commit(index, facts)
        published = self._publication.medium.open(self._publication.path)
        return sorted(name.rstrip("/") for name in published.names())

    def _index(self, locations: Sequence[Sequence[Location]], files: dict[str, int]) -> CheckpointIndex:
        chunks: dict[str, list[StoredChunk]] = defaultdict(list)
        for items, places in zip(self._items, locations, strict=True):
            for item, location in zip(items, places, strict=True):
                chunks[item.key].append(StoredChunk(item.offsets, item.sizes, location))
        index = self.selected.reader.index
        entries: list[tuple[str, Entry]] = []
        for key, name in self.selected.names.items():
            stored, written = index[key], chunks[self._same.get(key, key)]
            if isinstance(stored, StoredTensor):
                dtype = stored.dtype if is_opaque(self.selected.reader, key) else self.selected.part(key).dtype
                entries.append((name, StoredTensor(dtype, stored.shape, tuple(written))))
            else:
                entries.append((name, StoredValue(written[0].location)))
        paths = {name: index.path_of(key) for key, name in self.selected.names.items() if name == key}
        made = index_of(entries, files, paths)
        made.empty = [name for key, name in self.selected.names.items() if key in index.empty]
        return made

    def _items_of(self, rank: int) -> list[_Item]:
        reader = self.selected.reader
        items = []
        for key in self.selected.names:
            entry = reader.index[key]
            if isinstance(entry, StoredValue):
                items += [_Item(key, (), ())] if rank == 0 else []
            elif is_opaque(reader, key) and len(entry.chunks) == 1:
                items += [_Item(key, entry.chunks[0].offsets, entry.chunks[0].sizes)] if rank == 0 else []
            elif self._same.setdefault(key, self._first.setdefault(_bytes_of(key, entry), key)) == key:
                parts = _of_rank(self.selected.part(key), rank, self._ranks)
                items += [_Item(key, part.offsets, part.sizes, part) for part in parts]
        return items


def _bytes_of(key: str, entry: StoredTensor) -> object:
    """Return a value that is equal for tensors with the same bytes of the same files."""
    return place_of(entry) if entry.chunks and entry.chunks[0].location.length else key


def _of_rank(part: Part, rank: int, ranks: int) -> list[Part]:
    """Return the rows of a tensor that ``torch.chunk`` gives to a rank, in items of a size that zip takes."""
    offsets, sizes = part.offsets, part.sizes
    if sizes and ranks > 1:
        rows = -(-sizes[0] // ranks)
        begin = min(rank * rows, sizes[0])
        offsets, sizes = (begin, *offsets[1:]), (min(rows, sizes[0] - begin), *sizes[1:])
        if not sizes[0] and (rank or part.sizes[0]):
            return []
    elif rank:
        return []
    boxes = BoxPart(offsets, sizes, part.dtype.itemsize).at_most(MAX_PAYLOAD)
    return [replace(part, offsets=box.offsets, sizes=box.sizes) for box in boxes]
