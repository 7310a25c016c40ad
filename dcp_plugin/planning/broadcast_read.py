"""Read once what several ranks want, and pass it on over the process group.

Replicas (DDP, HSDP) want the same parts of the same stored chunks, in the same order. Ranks compare digests of what
they want, in two classes, because under HSDP the shards are wanted by the ranks of one column of the mesh and
replicated tensors by all. Those whose digests agree divide the list among them by a rule that each applies alone.

All ranks first read their parts into their own tensors and agree that none failed; only then do they pass them on, so
no rank ever waits for bytes that another one could not read. Parts are passed on in windows of bounded size, in which
each rank sends what it has read to all others of its group: the load is even.

On one machine it does not pay, because the second reader finds the bytes in the page cache. With ``"auto"``, only what
is wanted on at least :data:`MIN_HOSTS` hosts is read once.
"""

from __future__ import annotations

import hashlib
import itertools
import socket
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import add
from typing import Literal

import torch
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_plugin.planning.load import ShardedLoadPlanner
from dcp_plugin.planning.load_balance import BoxPart
from dcp_plugin.ranks import Ranks
from dcp_plugin.tensors import is_stored_whole

MIN_HOSTS = 8
"""Hosts that have to want the same bytes before ``"auto"`` has them read once."""

_WINDOW = 32 << 20
"""Bytes that are passed on at a time, and that a rank needs memory for."""

_MAX_READ = 8 << 20
"""Reads are divided into parts of this many bytes, so that few large tensors are shared out evenly too."""

_TENSOR_ALIGNMENT = 16


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
    """The parts that one rank reads itself, and those that it receives from others.

    Args:
        ranks: All ranks of the load.
        planner: Resolves items to targets.
        policy: ``True``: read once whatever two ranks want.
    """

    def __init__(self, ranks: Ranks, planner: ShardedLoadPlanner, policy: bool | Literal["auto"]) -> None:
        self._ranks = ranks
        self._planner = planner
        self._min_hosts = {True: 1, False: ranks.size + 1, "auto": MIN_HOSTS}[policy]
        self._shared: list[tuple[list[int], list[_Read]]] = []

    def meet(self, step: str, plan: LoadPlan) -> LoadPlan:
        """Find the ranks that want the same, and return the reads that are left for this rank. Collective."""
        if self._ranks.size <= max(1, self._min_hosts - 1):
            return plan
        classes: list[list[_Read]] = [[], []]
        mine: list[ReadItem] = []

        def wants() -> tuple[str, list[bytes]]:
            for item in plan.items:
                target = self._planner.resolve_tensor(item)
                if is_stored_whole(target):
                    mine.append(item)
                else:
                    classes[self._planner.fills_whole_tensor(item)].append(_Read(item, target.detach()))
            return socket.gethostname(), list(map(_digest, classes))

        for reads, groups in zip(classes, self._ranks.combine(step, wants, self._groups), strict=True):
            group = next((group for group in groups if self._ranks.rank in group), None)
            if group is not None:
                reads = _with_readers(reads, group)
                self._shared.append((group, reads))
            mine += [read.item for read in reads if group is None or read.reader == self._ranks.rank]
        return replace(plan, items=mine)

    def pass_on(self, step: str) -> None:
        """Exchange what all have read. Collective; called only if no rank failed to read."""
        for group, reads in self._shared:
            for window in _windows(reads):
                self._pass_window(step, window, group)

    def _pass_window(self, step: str, window: list[_Read], group: list[int]) -> None:
        sizes: dict[int, int] = defaultdict(int)
        places = []
        for read in window:
            places.append(sizes[read.reader])
            sizes[read.reader] += -(-read.nbytes // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT
        buffers = {rank: torch.empty(size, dtype=torch.uint8) for rank, size in sizes.items()}
        packed = [
            (read, buffers[read.reader][at : at + read.nbytes].view(read.target.dtype).view(read.target.shape))
            for read, at in zip(window, places, strict=True)
        ]
        for read, memory in packed:
            if read.reader == self._ranks.rank:
                memory.copy_(read.target)
        self._ranks.exchange(step, buffers, group)
        for read, memory in packed:
            if read.reader != self._ranks.rank:
                read.target.copy_(memory)

    def _groups(self, wants: list[tuple[str, list[bytes]]]) -> list[list[list[int]]]:
        """For each class, the sets of ranks that share, given the host and the digests of every rank."""
        classes = []
        for digests in zip(*(digests for _, digests in wants), strict=True):
            groups: dict[bytes, list[int]] = defaultdict(list)
            for rank, digest in enumerate(digests):
                groups[digest].append(rank)
            enough = (group for group in groups.values() if len({wants[rank][0] for rank in group}) >= self._min_hosts)
            classes.append([group for group in enough if len(group) > 1 and digests[group[0]]])
        return classes


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


def _with_readers(reads: list[_Read], group: list[int]) -> list[_Read]:
    """The reads in parts, each given to the rank that has the least to read so far."""
    loads = dict.fromkeys(group, 0)
    shared = []
    for part in itertools.chain.from_iterable(map(_divided, reads)):
        reader = min(loads, key=loads.__getitem__)
        loads[reader] += part.nbytes
        shared.append(replace(part, reader=reader))
    return shared


def _divided(read: _Read) -> Iterator[_Read]:
    item = read.item
    entire = BoxPart((0,) * len(item.lengths), tuple(item.lengths), read.target.element_size())
    for part in entire.at_most(_MAX_READ):
        box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
        piece = replace(
            item,
            dest_offsets=torch.Size(map(add, item.dest_offsets, part.offsets)),
            storage_offsets=torch.Size(map(add, item.storage_offsets, part.offsets)),
            lengths=torch.Size(part.sizes),
        )
        yield _Read(piece, read.target[box])


def _windows(reads: list[_Read]) -> Iterator[list[_Read]]:
    """The reads in order, in groups of :data:`_WINDOW` bytes, and at most one read more."""
    starts = itertools.accumulate((read.nbytes for read in reads), initial=0)
    for _, window in itertools.groupby(zip(starts, reads, strict=False), lambda pair: pair[0] // _WINDOW):
        yield [read for _, read in window]
