"""Reads that several ranks share: replicas (DDP, HSDP) read each byte once and broadcast it.

The rule: no rank waits for bytes that another rank could not read. The steps:

1. The ranks compare digests of the reads that they want. Ranks with equal digests form a group: replicas want the same
   parts of the same stored chunks in the same order. There are two classes of reads. Under HSDP, the ranks of one mesh
   column want the same shards, and all ranks want the same replicated tensors.
2. Each rank of a group divides the list of reads by the same rule, without communication. It reads its parts into its
   own tensors. All ranks agree that no read failed.
3. The ranks broadcast in windows of bounded size. In a window, each rank sends its parts to all other ranks of its
   group, which balances the load. Large parts move from the memory of one target directly into that of the others.

On one host sharing does not pay, however slow the storage is: the page cache serves the second reader of a byte. An
object store has no cache, so sharing always pays. The medium therefore knows how many hosts must want the same bytes
before ``"auto"`` shares them (:attr:`~dcp_plugin.core.media.medium.ReadCost.hosts`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import add, itemgetter
from typing import Any, Literal, NamedTuple

import torch

from dcp_plugin.core.planning.load_balance import BoxPart
from dcp_plugin.core.ranks.collectives import Ranks
from dcp_plugin.core.records import BoxRead, ReadPlan
from dcp_plugin.core.tensors.host_memory import host_bytes, is_plain_memory
from dcp_plugin.core.tensors.kinds import is_stored_whole

_WINDOW = 32 << 20
"""Bytes of a window, which is also the buffer memory that a rank may need."""

_MAX_MESSAGE = 8 << 20
"""Largest message, in bytes."""

_ALONE = 256 << 10
"""Bytes from which on a part is a message by itself. Such a message needs no copy and no buffer."""

_TENSOR_ALIGNMENT = 16


def least_hosts(policy: bool | Literal["auto"], many: int, hosts: int) -> int | None:
    """Return the number of hosts that must want the same bytes before ranks share reads; None to share none.

    Args:
        policy: ``io.broadcast`` of the configuration.
        many: Number of hosts from which on ``"auto"`` reads the same bytes once, see
            :attr:`~dcp_plugin.core.media.medium.ReadCost.hosts`.
        hosts: Number of hosts of all ranks together.
    """
    if policy == "auto":
        return many if hosts >= many else None
    return 1 if policy else None


class _Read(NamedTuple):
    """A read of the plan or a part of one, and the rank that performs it for its group."""

    box: BoxRead
    reader: int = -1

    @property
    def nbytes(self) -> int:
        return self.box.target.nbytes


class BroadcastRead:
    """Shared reading of one load: the parts that this rank reads, and the parts that it receives from other ranks.

    Args:
        ranks: All ranks of the load.
        least: Number of hosts that must want the same bytes, see :func:`least_hosts`.
        host: Name of this rank's host.
        label: Name of the checkpoint in messages.
    """

    def __init__(self, ranks: Ranks, least: int, host: str, label: str) -> None:
        self._ranks, self._least, self._host, self._label = ranks, least, host, label
        self._mine: list[BoxRead] = []
        self._memory = host_bytes(0)

    def run(self, plan: ReadPlan, read: Callable[[ReadPlan], Any]) -> None:
        """Fill the targets of a plan. Collective.

        Args:
            read: Reads a part of the plan on this rank.
        """
        shared = self._meet(plan)
        assigned = (read.box for _, reads in shared for read in reads if read.reader == self._ranks.rank)
        part = ReadPlan([*self._mine, *assigned])
        self._ranks.agree(f"read {self._label}", lambda: read(part))
        for group, reads in shared:
            for window in _windows(reads):
                self._pass_window(f"pass on what was read of {self._label}", window, group)

    def _meet(self, plan: ReadPlan) -> list[_Shared]:
        """Return the reads that this rank shares with others. Collective."""
        classes: list[list[_Read]] = [[], []]

        def wants() -> tuple[str, list[bytes]]:
            for box in sorted([*plan.chunks, *plan.boxes], key=_place):
                if is_stored_whole(box.target):  # its bytes are no memory that could be sent
                    self._mine.append(box)
                else:
                    classes[box.fills_tensor].append(_Read(box))
            return self._host, list(map(_digest, classes))

        shared = []
        groups_of_classes = self._ranks.combine(f"share the reading of {self._label}", wants, self._groups)
        for reads, groups in zip(classes, groups_of_classes, strict=True):
            group = next((group for group in groups if self._ranks.rank in group), None)
            if group is None:
                self._mine += [read.box for read in reads]
            else:
                shared.append(_shared(group, reads))
        return shared

    def _groups(self, wanted_by: list[tuple[str, list[bytes]]]) -> list[list[list[int]]]:
        """Return for each class the groups of ranks that share. ``wanted_by`` has the host and digests of each rank."""
        classes = []
        for digests in zip(*(digests for _, digests in wanted_by), strict=True):
            same: dict[bytes, list[int]] = defaultdict(list)
            for rank, digest in enumerate(digests):
                same[digest].append(rank)
            groups = [ranks for digest, ranks in same.items() if digest and len(ranks) > 1]
            classes.append([ranks for ranks in groups if len({wanted_by[rank][0] for rank in ranks}) >= self._least])
        return classes

    def _pass_window(self, step: str, window: list[_Read], group: list[int]) -> None:
        # A message is a large target itself, or a stretch of the buffer for targets that are small or not plain memory.
        # The sender fills its stretches before the exchange, and the others empty them afterwards.
        messages = list(_messages(window))
        self._reserve(sum(map(_room, messages)))
        at = end = 0
        sent: list[tuple[int, torch.Tensor]] = []
        packed: list[tuple[_Read, torch.Tensor]] = []
        for message in messages:
            sender, start = message[0].reader, at
            if len(message) == 1 and is_plain_memory(message[0].box.target):
                sent.append((sender, message[0].box.target.reshape(-1).view(torch.uint8)))
                continue
            for read in message:
                end = at + read.nbytes
                packed.append((read, self._memory[at:end].view(read.box.target.dtype).view(read.box.target.shape)))
                at = start + _aligned(end - start)
            # Without padding at the end: another rank may send or receive the same message in its target's memory.
            sent.append((sender, self._memory[start:end]))
        for read, memory in packed:
            if read.reader == self._ranks.rank:
                memory.copy_(read.box.target)
        self._ranks.exchange(step, sent, group)
        for read, memory in packed:
            if read.reader != self._ranks.rank:
                read.box.target.copy_(memory)

    def _reserve(self, size: int) -> None:
        """Allocate the buffer of a window. Later windows reuse it: fresh memory costs as much time as six copies."""
        if len(self._memory) < size:
            self._memory = host_bytes(size)


_Shared = tuple[list[int], list[_Read]]
"""The ranks of a group, and the reads that they share."""


def _place(box: BoxRead) -> tuple[object, ...]:
    """Return a key that sorts reads by their place in the checkpoint. Only reads of the same bytes into the same dtype
    have equal keys."""
    return box.number, box.offsets, box.sizes, str(box.target.dtype), box.is_scaled


def _digest(reads: list[_Read]) -> bytes:
    """Return a digest that is equal for ranks that want the same bytes in the same dtypes; empty without reads."""
    if not reads:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    for read in reads:
        digest.update(repr(_place(read.box)).encode())
    return digest.digest()


def _shared(group: list[int], reads: list[_Read]) -> _Shared:
    """Assign each read to a rank of the group.

    A rank gets a stretch of the list. Most bytes of the system's read-ahead are then bytes that the same rank wants.
    """
    remaining = sum(read.nbytes for read in reads)
    assigned = []
    for number, rank in enumerate(group):
        reads_of_rank, reads = _split(reads, remaining // (len(group) - number))
        remaining -= sum(read.nbytes for read in reads_of_rank)
        assigned += [read._replace(reader=rank) for read in reads_of_rank]
    return group, assigned


def _split(reads: list[_Read], nbytes: int) -> tuple[list[_Read], list[_Read]]:
    """Split the reads into the first ones, with about ``nbytes`` bytes, and the others. At most one read is cut."""
    first: list[_Read] = []
    for number, read in enumerate(reads):
        if nbytes <= 0:
            return first, reads[number:]
        head, tail = _cut(read, nbytes)
        first.append(head)
        nbytes -= head.nbytes
        if tail is not None:
            return first, [tail, *reads[number + 1 :]]
    return first, []


def _cut(read: _Read, nbytes: int) -> tuple[_Read, _Read | None]:
    """Split a read into its first rows, with about ``nbytes`` bytes but at least one row, and the other rows."""
    sizes = read.box.sizes
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    rows = 0 if dim is None else max(1, nbytes * sizes[dim] // max(1, read.nbytes))
    if dim is None or rows >= sizes[dim]:
        return read, None
    begin = (0,) * len(sizes)
    behind = (*begin[:dim], rows, *begin[dim + 1 :])
    first_sizes, other_sizes = ((*sizes[:dim], count, *sizes[dim + 1 :]) for count in (rows, sizes[dim] - rows))
    return _part_of(read, begin, first_sizes), _part_of(read, behind, other_sizes)


def _part_of(read: _Read, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> _Read:
    target = read.box.target[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
    part = read.box._replace(target=target, offsets=tuple(map(add, read.box.offsets, offsets)), sizes=sizes)
    return read._replace(box=part)


def _windows(reads: list[_Read]) -> Iterator[list[_Read]]:
    """Yield windows of :data:`_WINDOW` bytes and at most one part more. All ranks send about equally much in each."""
    # Each part is placed at the count of bytes that its reader has before it. Sorted by this place, the parts of all
    # readers alternate.
    ends: dict[int, int] = defaultdict(int)
    placed = []
    for read in reads:
        entire = BoxPart((0,) * len(read.box.sizes), read.box.sizes, read.box.target.element_size())
        for part in entire.at_most(_MAX_MESSAGE):
            placed.append((ends[read.reader], _part_of(read, part.offsets, part.sizes)))
            ends[read.reader] += part.nbytes
    in_turn = [part for _, part in sorted(placed, key=itemgetter(0))]
    starts = itertools.accumulate((read.nbytes for read in in_turn), initial=0)
    for _, window in itertools.groupby(zip(starts, in_turn, strict=False), lambda pair: pair[0] // _WINDOW):
        yield [read for _, read in window]


def _messages(window: list[_Read]) -> Iterator[list[_Read]]:
    """Yield the messages of a window, equal on all ranks: each large read, and all small reads of a reader together."""
    small: dict[int, list[_Read]] = defaultdict(list)
    for read in window:
        if read.nbytes >= _ALONE:
            yield [read]
        else:
            small[read.reader].append(read)
    yield from small.values()


def _room(message: list[_Read]) -> int:
    """Return the bytes of buffer that a message needs."""
    if len(message) == 1 and is_plain_memory(message[0].box.target):
        return 0
    return sum(_aligned(read.nbytes) for read in message)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT
