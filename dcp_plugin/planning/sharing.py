"""Which rank reads what several want: replicas (DDP, HSDP) read once and pass on, where that is faster.

Replicas want the same parts of the same stored chunks in the same order. Ranks compare digests of what they want, in
two classes, because under HSDP the shards are wanted by the ranks of one column of the mesh and replicated tensors by
all. Those whose digests agree divide the list among them by a rule that each applies alone.

All ranks first read their parts into their own tensors and agree that none failed; only then do they pass them on, so
no rank ever waits for bytes that another one could not read. Parts are passed on in windows of bounded size, in which
each rank sends what it has read to all others of its group: the load is even. Large parts go from the memory of one
target into that of the other.

On one host it does not pay, however slow the storage: the second reader of a byte finds it in the page cache, or waits
for it there. In an object store it always pays: nothing caches there. In between, with ``"auto"``:

- What :data:`MANY_HOSTS` hosts want is read once.
- What fewer hosts want is *tried*: the first :data:`TRIAL` bytes are read once and passed on, and both are timed. Read
  on every host, the rest would take at least the time of reading it once, times the hosts, from a file server that they
  share and from disks of their own alike. If passing on takes less than what is saved (:func:`pays`), it goes on so.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import add, itemgetter
from time import perf_counter
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
"""Hosts that have to want the same bytes before ``"auto"`` has them read once without trying."""

TRIAL = 16 << 20
"""Bytes of each group of ranks by which it is found out what is faster."""

_WORTH_TRYING = 4
"""Times :data:`TRIAL` that a group has to want; a trial costs three more steps of all ranks."""

_WINDOW = 32 << 20
"""Bytes that are passed on at a time, and that a rank may need memory for."""

_MAX_MESSAGE = 8 << 20
"""Bytes of a message, at most."""

_ALONE = 256 << 10
"""Parts of this many bytes are messages of their own: they need no copy, and no memory that has not been used yet."""

_TENSOR_ALIGNMENT = 16


def pays(hosts: int, reading: float, passing: float) -> bool:
    """Whether reading once and passing on is faster than reading on every host, by what a trial took.

    Args:
        hosts: That want the same.
        reading: Seconds of the slowest rank to read its part.
        passing: Seconds of the slowest rank to pass on and be passed.

    Example:
        >>> pays(hosts=2, reading=0.3, passing=0.1)
        True
    """
    return (hosts - 1) * reading > passing


@dataclass(frozen=True)
class Rule:
    """How many hosts have to want the same for it to be read once; and for it to be tried."""

    sure: float
    tried: float

    @classmethod
    def of(cls, policy: bool | Literal["auto"], from_store: bool, hosts: int) -> Rule:
        """The rule of a load.

        Args:
            from_store: Whether each read is a request to an object store.
            hosts: Of all ranks together.
        """
        never = float("inf")
        if policy is True or (policy == "auto" and from_store):
            return cls(1, never)
        return cls(MANY_HOSTS, 2) if policy == "auto" and hosts > 1 else cls(never, never)

    @property
    def ever(self) -> bool:
        return min(self.sure, self.tried) < float("inf")


@dataclass(frozen=True)
class _Read:
    """A read, the tensor that it fills, and the rank that reads it for all of its group."""

    item: ReadItem
    target: torch.Tensor
    reader: int = -1

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.target.element_size()


@dataclass(frozen=True)
class _Wanted:
    """What a rank wants of one class."""

    digest: bytes
    nbytes: int


@dataclass(frozen=True)
class _Group:
    """Ranks that want the same."""

    ranks: list[int]
    hosts: int
    tried: bool
    """Whether it is to be found out first what is faster."""


class BroadcastRead:
    """One load's reading of tensors: the parts that one rank reads itself, and those that it receives from others.

    Args:
        ranks: All ranks of the load.
        planner: Resolves items to targets.
        host: Of this rank.
        where: What messages call the checkpoint.
    """

    def __init__(self, ranks: Ranks, planner: ShardedLoadPlanner, rule: Rule, host: str, where: str) -> None:
        self._ranks, self._planner, self._rule, self._host, self._where = ranks, planner, rule, host, where
        self._mine: list[ReadItem] = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def may_share(self) -> bool:
        """Whether any rank may read for others; the same on all ranks."""
        return self._ranks.size > 1 and self._rule.ever

    def run(self, plan: LoadPlan, read: Callable[[LoadPlan], None]) -> None:
        """Fill the targets of a plan. Collective.

        Args:
            read: Reads a part of the plan on this rank.
        """
        if not self.may_share:
            self._ranks.agree(f"read {self._where}", lambda: read(plan))
            return
        sure, tried, hosts = self._meet(plan)
        if hosts:
            halves = [(group, *_split(reads, TRIAL)) for group, reads in tried]
            first = [_shared(group, begin) for group, begin, _ in halves]
            if self._try(hosts, first, lambda items: read(replace(plan, items=items))):
                sure += [_shared(group, rest) for group, _, rest in halves]
            else:
                self._mine += [one.item for _, _, rest in halves for one in rest]
        mine = [*self._mine, *self._read_here(sure)]
        self._ranks.agree(f"read {self._where}", lambda: read(replace(plan, items=mine)))
        self._pass_on(sure)

    def _meet(self, plan: LoadPlan) -> tuple[list[_Shared], list[_Shared], int]:
        """What this rank shares for sure and what is to be tried; and the fewest hosts of a group on trial, on any
        rank; 0: none is."""
        classes: list[list[_Read]] = [[], []]

        def wants() -> tuple[str, list[_Wanted]]:
            for item in plan.items:
                target = self._planner.resolve_tensor(item)
                if is_stored_whole(target):
                    self._mine.append(item)
                else:
                    classes[self._planner.fills_whole_tensor(item)].append(_Read(item, target.detach()))
            return self._host, [_Wanted(_digest(reads), sum(read.nbytes for read in reads)) for reads in classes]

        sure: list[_Shared] = []
        tried: list[_Shared] = []
        found = self._ranks.combine(f"share the reading of {self._where}", wants, self._groups)
        for reads, groups in zip(classes, found, strict=True):
            group = next((group for group in groups if self._ranks.rank in group.ranks), None)
            if group is None:
                self._mine += [read.item for read in reads]
            else:
                (tried if group.tried else sure).append((group.ranks, reads))
        hosts = [group.hosts for groups in found for group in groups if group.tried]
        return [_shared(*one) for one in sure], tried, min(hosts, default=0)

    def _groups(self, told: list[tuple[str, list[_Wanted]]]) -> list[list[_Group]]:
        """For each class, the sets of ranks that share, given the host and the wants of every rank."""
        classes = []
        for wants in zip(*(wants for _, wants in told), strict=True):
            same: dict[bytes, list[int]] = defaultdict(list)
            for rank, wanted in enumerate(wants):
                same[wanted.digest].append(rank)
            groups = []
            for ranks in same.values():
                hosts, wanted = len({told[rank][0] for rank in ranks}), wants[ranks[0]]
                tried = hosts < self._rule.sure
                enough = not tried or (hosts >= self._rule.tried and wanted.nbytes >= _WORTH_TRYING * TRIAL)
                if wanted.digest and len(ranks) > 1 and enough:
                    groups.append(_Group(ranks, hosts, tried))
            classes.append(groups)
        return classes

    def _try(self, hosts: int, first: list[_Shared], read: Callable[[list[ReadItem]], None]) -> bool:
        """Read and pass on what comes first, and tell from the time that it takes whether to go on so."""
        began = perf_counter()
        took: list[float] = []

        def timed() -> None:
            read(self._read_here(first))
            took.append(perf_counter() - began)

        self._ranks.agree(f"read {self._where}", timed)
        began = perf_counter()
        self._pass_on(first)
        took.append(perf_counter() - began)
        return self._ranks.combine(
            f"decide how to read {self._where}",
            lambda: took,
            lambda all_took: pays(hosts, *(max(column) for column in zip(*all_took, strict=True))),
        )

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
