"""A checkpoint of this package, laid out for any number of ranks. Stock ``torch.distributed.checkpoint`` reads it.

Each rank gets the rows of a tensor that FSDP2 would give it. Tensors that share bytes in the source share them in the
output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from dcp_plugin.format.derived_index import index_of
from dcp_plugin.format.index import CheckpointIndex, Entry, Location, StoredChunk, StoredTensor, StoredValue
from dcp_plugin.format.payload import MAX_PAYLOAD
from dcp_plugin.media import medium_of
from dcp_plugin.paths import Where
from dcp_plugin.planning.load_balance import BoxPart
from dcp_plugin.storage import write_items
from dcp_plugin.storage.write_items import Streamed
from dcp_plugin.storage.writer import Facts, Publication
from dcp_plugin.tools.formats import Selected
from dcp_plugin.tools.stream import Counter, Part, Stream, is_opaque
from dcp_plugin.types import KeyPath


@dataclass(frozen=True)
class _Item:
    """An entry in the file of a rank: a box of a tensor, or a complete value."""

    key: str
    part: Part | None = None


class DcpCheckpoint:
    """The checkpoint that an export makes.

    Args:
        selected: The keys to write.
        ranks: The number of ranks that the checkpoint is laid out for.
    """

    def __init__(self, selected: Selected, ranks: int) -> None:
        self._selected = selected
        self._ranks = ranks
        self._first: dict[object, str] = {}
        self._same: dict[str, str] = {}
        self._items = [self._items_of(rank) for rank in range(ranks)]

    @property
    def nbytes(self) -> int:
        return sum(item.part.nbytes for items in self._items for item in items if item.part)

    def write(self, rank: int, directory: Where, out: Where, count: Counter) -> list[Location]:
        """Write the file of one rank. Return the location of each of its items."""
        items = self._items[rank]
        reader = self._selected.reader
        stream = Stream(reader, [item.part for item in items if item.part])
        pieces = groupby(stream, key=lambda piece: piece.part)

        def bytes_of(nbytes: int) -> Iterator[memoryview]:
            if nbytes:
                for piece in next(pieces)[1]:
                    yield piece.data
                    count.add(len(piece.data))

        data: list[bytes | Streamed] = []
        for item in items:
            part = item.part
            if part is None:
                data.append(reader.item(item.key))
            else:
                data.append(Streamed(part.dtype, part.sizes, lambda nbytes=part.nbytes: bytes_of(nbytes)))  # type: ignore[misc]
        medium = medium_of(out)
        to = write_items.Destination(medium, directory, rank, directory.stem, 1, True)
        places = write_items.write(data, to, out)
        medium.flush(directory)
        locations = []
        for number, item in enumerate(items):
            location = places.location(number)
            if item.part is None and isinstance(reader.index[item.key], StoredTensor):
                location = replace(location, payload_offset=None)
            locations.append(location)
        return locations

    def publish(self, publication: Publication, locations: Sequence[Sequence[Location]]) -> None:
        """Write the index over the files of all ranks, and publish the checkpoint under its name."""
        index = self._index(locations, publication.file_sizes())
        summary, reader = self._selected.reader.summary, self._selected.reader
        names = {name.partition(".")[0] for name in self._selected.names.values()}
        kinds = {name: kind for name, kind in reader.kinds.items() if name in names}
        classes = summary.optimizers if summary else {}
        optimizers = {name: cls for name, cls in classes.items() if name in names}
        step = summary.step if summary else None
        facts = Facts(step=step, world_size=self._ranks, kinds=kinds, optimizers=optimizers)
        publication.publish(index, facts)

    def _index(self, locations: Sequence[Sequence[Location]], files: dict[str, int]) -> CheckpointIndex:
        chunks: dict[str, list[StoredChunk]] = {}
        values: dict[str, Location] = {}
        for items, places in zip(self._items, locations, strict=True):
            for item, location in zip(items, places, strict=True):
                if item.part is None:
                    values[item.key] = location
                else:
                    chunks.setdefault(item.key, []).append(StoredChunk(item.part.offsets, item.part.sizes, location))
        index = self._selected.reader.index
        entries: list[tuple[str, Entry]] = []
        paths: dict[str, KeyPath] = {}
        for key, name in self._selected.names.items():
            source = self._same.get(key, key)
            stored = index[key]
            if not isinstance(stored, StoredTensor):
                entries.append((name, StoredValue(values[source])))
            elif source in values:
                chunk = StoredChunk((0,) * len(stored.shape), stored.shape, values[source])
                entries.append((name, StoredTensor(stored.dtype, stored.shape, (chunk,))))
            else:
                dtype = self._selected.part(key).dtype
                entries.append((name, StoredTensor(dtype, stored.shape, tuple(chunks[source]))))
            if name == key:
                paths[name] = index.path_of(key)
        made = index_of(entries, files, paths)
        made.empty = [name for key, name in self._selected.names.items() if key in index.empty]
        return made

    def _items_of(self, rank: int) -> list[_Item]:
        reader = self._selected.reader
        items = []
        for key in self._selected.names:
            entry = reader.index[key]
            if isinstance(entry, StoredValue) or (is_opaque(reader, key) and len(entry.chunks) == 1):
                items += [_Item(key)] if rank == 0 else []
                continue
            if rank == 0:
                first = self._first.setdefault(_bytes_of(key, entry), key)
                self._same.update({key: first} if first != key else {})
            if key not in self._same:
                items += [_Item(key, part) for part in _of_rank(self._selected.part(key), rank, self._ranks)]
        return items


def _bytes_of(key: str, entry: StoredTensor) -> object:
    """Return a value that is equal for tensors with the same bytes of the same files."""
    places = [(chunk.location.file, chunk.location.offset, chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    return (entry.dtype, entry.shape, *places) if places and entry.chunks[0].location.length else key


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
