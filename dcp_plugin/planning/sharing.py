"""Reads that several ranks share: replicas (DDP, HSDP) read each byte once and pass it on.

Replicas want the same parts of the same stored chunks in the same order. Ranks compare digests of what they want, in
two classes, because under HSDP the shards are wanted by the ranks of one column of the mesh and replicated tensors by
all. Those whose digests agree divide the list among them by a rule that each applies alone.

All ranks first read their parts into their own tensors and agree that none failed; only then do they pass them on, so
no rank ever waits for bytes that another one could not read. Parts are passed on in windows of bounded size, in which
each rank sends what it has read to all others of its group: the load is even. Large parts go from the memory of one
target into that of the other.

On one host it does not pay, however slow the storage: the second reader of a byte finds it in the page cache, or waits
for it there. From an object store it always pays: nothing caches there. From a file system, ``"auto"`` shares the bytes
that :data:`MANY_HOSTS` hosts want.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import add, itemgetter
from typing import Literal

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_plugin.planning.load import ShardedLoadPlanner
from dcp_plugin.planning.load_balance import BoxPart
from dcp_plugin.ranks import Ranks
from dcp_plugin.records import LoadPlan
from dcp_plugin.tensors.host_memory import is_plain_memory
from dcp_plugin.tensors.kinds import is_stored_whole
from dcp_plugin.types import Shape

MANY_HOSTS = 8
"""Hosts that have to want the same bytes of a file system before ``"auto"`` has them read once."""

_WINDOW = 32 << 20
"""Bytes that are passed on at a time, and that a rank may need memory for."""

_MAX_MESSAGE = 8 << 20
"""Bytes of a message, at most."""

_ALONE = 256 << 10
"""Parts of this many bytes are messages of their own: they need no copy, and no memory that has not been used yet."""

_TENSOR_ALIGNMENT = 16


def least_hosts(policy: bool | Literal["auto"], from_store: bool, hosts: int) -> float:
    """Return how many hosts have to want the same bytes for them to be read once; infinity if no number is enough.

    Args:
        policy: ``read_broadcast`` of the configuration.
        from_store: Whether each read is a request to an object store.
        hosts: Hosts of all ranks together.
    """
    if policy is True or (policy == "auto" and from_store):
        return 1
    return MANY_HOSTS if policy == "auto" and hosts >= MANY_HOSTS else float("inf")


@dataclass(frozen=True)
class _Read:
    """A read, the tensor that it fills, and the rank that reads it for all of its group."""

    item: ReadItem
    target: torch.Tensor
    reader: int = -1

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.target.element_size()


class BroadcastRead:
    """One load's reading of tensors: the parts that one rank reads itself, and those that it receives from others.

    Args:
        ranks: All ranks of the load.
        planner: Resolves items to targets.
        least: Hosts that have to want the same bytes, see :func:`least_hosts`.
        host: Of this rank.
        where: What messages call the checkpoint.
    """

    def __init__(self, ranks: Ranks, planner: ShardedLoadPlanner, least: float, host: str, where: str) -> None:
        self._ranks, self._planner, self._least, self._host, self._where = ranks, planner, least, host, where
        self._mine: list[ReadItem] = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def run(self, plan: LoadPlan, read: Callable[[LoadPlan], None]) -> None:
        """Fill the targets of a plan. Collective.

        Args:
            read: Reads a part of the plan on this rank.
        """
        shared = self._meet(plan)
        mine = [*self._mine, *self._read_here(shared)]
        self._ranks.agree(f"read {self._where}", lambda: read(replace(plan, items=mine)))
        self._pass_on(shared)

    def _meet(self, plan: LoadPlan) -> list[_Shared]:
        """Return the reads that this rank shares with others. Collective."""
        classes: list[list[_Read]] = [[], []]

        def wants() -> tuple[str, list[bytes]]:
            for item in plan.items:
                target = self._planner.resolve_tensor(item)
                if is_stored_whole(target):
                    self._mine.append(item)
                else:
                    classes[self._planner.fills_whole_tensor(item)].append(_Read(item, target.detach()))
            return self._host, list(map(_digest, classes))

        shared = []
        groups_of_classes = self._ranks.combine(f"share the reading of {self._where}", wants, self._groups)
        for reads, groups in zip(classes, groups_of_classes, strict=True):
            group = next((group for group in groups if self._ranks.rank in group), None)
            if group is None:
                self._mine += [read.item for read in reads]
            else:
                shared.append(_shared(group, reads))
        return shared

    def _groups(self, wanted_by: list[tuple[str, list[bytes]]]) -> list[list[list[int]]]:
        """Return, for each class, the sets of ranks that share, given the host and the digests of every rank."""
        classes = []
        for digests in zip(*(digests for _, digests in wanted_by), strict=True):
            same: dict[bytes, list[int]] = defaultdict(list)
            for rank, digest in enumerate(digests):
                same[digest].append(rank)
            groups = [ranks for digest, ranks in same.items() if digest and len(ranks) > 1]
            classes.append([ranks for ranks in groups if len({wanted_by[rank][0] for rank in ranks}) >= self._least])
        return classes

    def _read_here(self, shared: list[_Shared]) -> list[ReadItem]:
        return [read.item for _, reads in shared for read in reads if read.reader == self._ranks.rank]

    def _pass_on(self, shared: list[_Shared]) -> None:
        """Exchange what all have read. Called only if no rank failed to read."""
        for group, reads in shared:
            for window in _windows(reads):
                self._pass_window(f"pass on what was read of {self._where}", window, group)

    def _pass_window(self, step: str, window: list[_Read], group: list[int]) -> None:
        messages = list(_messages(window))
        self._reserve(sum(map(_room, messages)))
        at = end = 0
        sent: list[tuple[int, torch.Tensor]] = []
        packed: list[tuple[_Read, torch.Tensor]] = []
        for message in messages:
            sender, start = message[0].reader, at
            if len(message) == 1 and is_plain_memory(message[0].target):
                sent.append((sender, message[0].target.reshape(-1).view(torch.uint8)))
                continue
            for read in message:
                end = at + read.nbytes
                packed.append((read, self._memory[at:end].view(read.target.dtype).view(read.target.shape)))
                at = start + _aligned(end - start)
            sent.append((sender, self._memory[start:end]))  # to the last byte: it may be in place on other ranks
        for read, memory in packed:
            if read.reader == self._ranks.rank:
                memory.copy_(read.target)
        self._ranks.exchange(step, sent, group)
        for read, memory in packed:
            if read.reader != self._ranks.rank:
                read.target.copy_(memory)

    def _reserve(self, size: int) -> None:
        """Memory for a window; kept, because the system takes as long to give memory as six copies into it take."""
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)


_Shared = tuple[list[int], list[_Read]]
"""The ranks of a group, and what they want."""


def _digest(reads: list[_Read]) -> bytes:
    """A digest that is equal for ranks that want the same bytes, in the same dtypes; empty without reads."""
    if not reads:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    for read in reads:
        item = read.item
        where = (item.storage_index.fqn, item.storage_index.offset, item.storage_offsets, item.lengths)
        digest.update(repr((*where, read.target.dtype)).encode())
    return digest.digest()


def _shared(group: list[int], reads: list[_Read]) -> _Shared:
    """The reads, each with the rank that reads it. A rank gets a stretch of the list: what the system reads ahead for
    it is then mostly its own."""
    left = sum(read.nbytes for read in reads)
    found = []
    for number, rank in enumerate(group):
        mine, reads = _split(reads, left // (len(group) - number))
        left -= sum(read.nbytes for read in mine)
        found += [replace(read, reader=rank) for read in mine]
    return group, found


def _split(reads: list[_Read], nbytes: int) -> tuple[list[_Read], list[_Read]]:
    """The first of the reads, of about so many bytes, and the others. One may be cut for that."""
    first: list[_Read] = []
    for number, read in enumerate(reads):
        if nbytes <= 0:
            return first, reads[number:]
        now, left = _cut(read, nbytes)
        first.append(now)
        nbytes -= now.nbytes
        if left is not None:
            return first, [left, *reads[number + 1 :]]
    return first, []


def _cut(read: _Read, nbytes: int) -> tuple[_Read, _Read | None]:
    """The first rows of a read, of about so many bytes but one row at least, and the others."""
    sizes = tuple(read.item.lengths)
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    rows = 0 if dim is None else max(1, nbytes * sizes[dim] // max(1, read.nbytes))
    if dim is None or rows >= sizes[dim]:
        return read, None
    begin = (0,) * len(sizes)
    behind = (*begin[:dim], rows, *begin[dim + 1 :])
    first, rest = ((*sizes[:dim], count, *sizes[dim + 1 :]) for count in (rows, sizes[dim] - rows))
    return _part_of(read, begin, first), _part_of(read, behind, rest)


def _divided(read: _Read) -> Iterator[_Read]:
    entire = BoxPart((0,) * len(read.item.lengths), tuple(read.item.lengths), read.target.element_size())
    for part in entire.at_most(_MAX_MESSAGE):
        yield _part_of(read, part.offsets, part.sizes)


def _part_of(read: _Read, offsets: Shape, sizes: Shape) -> _Read:
    item = read.item
    box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    piece = replace(
        item,
        dest_offsets=torch.Size(map(add, item.dest_offsets, offsets)),
        storage_offsets=torch.Size(map(add, item.storage_offsets, offsets)),
        lengths=torch.Size(sizes),
    )
    return replace(read, item=piece, target=read.target[box])


def _windows(reads: list[_Read]) -> Iterator[list[_Read]]:
    """Groups of :data:`_WINDOW` bytes, and at most one part more, in each of which all ranks have as much to send."""
    ends: dict[int, int] = defaultdict(int)
    placed = []
    for part in itertools.chain.from_iterable(map(_divided, reads)):
        placed.append((ends[part.reader], part))
        ends[part.reader] += part.nbytes
    in_turn = [part for _, part in sorted(placed, key=itemgetter(0))]
    starts = itertools.accumulate((read.nbytes for read in in_turn), initial=0)
    for _, window in itertools.groupby(zip(starts, in_turn, strict=False), lambda pair: pair[0] // _WINDOW):
        yield [read for _, read in window]


def _messages(window: list[_Read]) -> Iterator[list[_Read]]:
    """What travels together: large reads alone, the small ones of a rank in one message. The same on all ranks."""
    small: dict[int, list[_Read]] = defaultdict(list)
    for read in window:
        if read.nbytes >= _ALONE:
            yield [read]
        else:
            small[read.reader].append(read)
    yield from small.values()


def _room(message: list[_Read]) -> int:
    """Bytes of memory that a message may need beside the targets."""
    if len(message) == 1 and is_plain_memory(message[0].target):
        return 0
    return sum(_aligned(read.nbytes) for read in message)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT
