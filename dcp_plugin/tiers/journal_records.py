"""Records in the journal of a keeper and in its messages: saves that ranks hand over, and their outcomes.

A change to a class here raises :data:`~dcp_plugin.tiers.spool.FORMAT_VERSION`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_plugin.core.config import IO, CheckpointConfig, Keeper
from dcp_plugin.core.format.columns import Column, KeyColumns, Places
from dcp_plugin.core.format.values import WholeItem
from dcp_plugin.core.paths import Where, with_options
from dcp_plugin.core.planning.global_plan import Share
from dcp_plugin.core.planning.local_inventory import Description, LocalInventory
from dcp_plugin.core.planning.save import items_to_write
from dcp_plugin.core.records import NewItem, RankPlan, Spent, WrittenPart
from dcp_plugin.core.retention import Retention
from dcp_plugin.core.storage.part_writer import Facts
from dcp_plugin.core.storage.stock.stock_save import items_of
from dcp_plugin.core.tensors.host_memory import host_bytes
from dcp_plugin.core.types import EncodedValue, Flat, ShardedValue
from dcp_plugin.tiers.local_checkpoints import Record
from dcp_plugin.tiers.plain import CLASSES
from dcp_plugin.tiers.spool import Spool
from dcp_plugin.tiers.wire import Address


def keeper_options(config: CheckpointConfig) -> Keeper:
    """Return the keeper's options of a configuration that has them."""
    assert config.keeper is not None, "without a keeper nothing of this package is made"
    return config.keeper


@dataclass(frozen=True)
class _EncodedItem(WholeItem):
    """A tensor that ``torch.save`` has written, since its class need not be known to the keeper."""

    data: bytes = b""

    def encode(self) -> bytes:
        return self.data


@dataclass(frozen=True)
class Items:
    """Items of a rank, without the bytes that are in shared memory: a few columns for any number of items."""

    share: Share
    inventory: LocalInventory
    """The items follow from these two fields, see :func:`dcp_plugin.core.storage.stock.stock_save.items_of`."""
    slabs: list[str]
    slab: Column
    """The number of the slab that has the contiguous bytes of an item, for each item; -1 if ``others`` has them."""
    offset: Column
    """The position in bytes at which they begin in the slab, for each item."""
    others: dict[int, Any]
    """The bytes of a value or of a file of ``torch.save``, or a tensor in other memory, by number of the item."""
    whole: Collection[int]
    """Numbers of the items that ``torch.save`` has written."""

    @classmethod
    def of(cls, plan: RankPlan, state: Flat, spool: Spool) -> Items:
        names, items = [slab.name for slab in spool.slabs], items_to_write(plan, state)
        slab, offset = np.full(len(items), -1, np.int32), np.zeros(len(items), np.int64)
        others: dict[int, Any] = {}
        whole = [number for number, item in enumerate(items) if isinstance(item.data, WholeItem)]
        for number, (key, data, _, sizes) in enumerate(items):
            place = None
            if isinstance(data, torch.Tensor):
                data = data.as_subclass(torch.Tensor)  # its class need not be known to the keeper
                if data.numel() and data.is_contiguous() and _is_box(data, state[key], sizes):
                    place = spool.place_of(data)
            if place is None:
                others[number] = data.encode() if isinstance(data, WholeItem) else data
            else:
                slab[number], offset[number] = place
        described = replace(plan.inventory.description, paths={})  # they are in the table of the plan
        return cls(plan.share, replace(plan.inventory, description=described), names, slab, offset, others, whole)

    def decoded(self, spool: Spool) -> Iterator[NewItem]:
        """Yield the items. In the keeper. Raises OSError if a host copy is gone."""
        slabs = {number: spool.map(self.slabs[number]) for number in set(self.slab.tolist()) - {-1}}
        places, whole = zip(self.slab.tolist(), self.offset.tolist(), strict=True), set(self.whole)
        for number, (item, (slab, offset)) in enumerate(zip(items_of(self.share, self.inventory), places, strict=True)):
            data: Any = self.others.get(number)
            tensor = item.tensor_data
            if number in whole:
                data = _EncodedItem(host_bytes(0), len(data), data)
            if slab >= 0:
                assert tensor is not None, "values are not in slabs"
                dtype, shape = tensor.properties.dtype, tensor.chunk.sizes
                data = slabs[slab][offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            box = (tuple(tensor.chunk.offsets), tuple(tensor.chunk.sizes)) if tensor else ()
            yield NewItem(item.index.fqn, data, *box)


def _is_box(tensor: torch.Tensor, value: ShardedValue | EncodedValue, sizes: tuple[int, ...]) -> bool:
    """Return whether a tensor has the shape and the dtype of the plan."""
    return isinstance(value, ShardedValue) and value.dtype == tensor.dtype and sizes == tuple(tensor.shape)


@dataclass(frozen=True)
class Head:
    """Part of rank 0: the data that makes a checkpoint of the parts of all ranks."""

    table: KeyColumns
    """The items of all ranks."""
    order: Column
    """The items of all ranks, in the order of ranks, in the order of the table."""
    left_out: dict[str, str]
    rounded: dict[str, str]
    empty: list[str]
    facts: Facts
    save_id: str
    among_other_files: bool
    """True if the path may be a directory with other files in it, which stay."""
    run: str
    """The identifier of the run in the figures."""
    durable: bool
    """True if the save is copied to its path whatever ``keeper.durable_every`` says."""


@dataclass(frozen=True)
class RankJob:
    """Part of a save that one rank hands over."""

    token: str
    rank: int
    path: Where
    step: int | None
    config: CheckpointConfig
    items: bytes
    """:class:`Items`, encoded: they are large, and needed once."""
    frozen: frozenset[str]
    """Keys of tensors that the training does not mean to change."""
    loaded: str | None
    """The checkpoint that was loaded since the last save. The next save may link its files."""
    options: dict[str, Any] | None
    """The ``storage_options`` of the path, which neither the path nor the configuration has in another process."""
    client: str = ""
    """The client in the spool that has staged the save."""
    key: bytes = b""
    """The secret of the training, which its keepers prove to each other that they know."""
    began: float = 0.0
    """Time at which the call began, in seconds of this node's monotonic clock."""
    spent: Spent = field(default_factory=Spent)
    """The time that the stages took until the save was handed over."""
    beside_rank_zero: bool = True
    """True if rank 0 is on this node, whose keeper then leads the save."""
    head: bytes = b""
    """:class:`Head`, encoded; empty but on rank 0."""

    @property
    def where(self) -> Where:
        """The path, with the options of its store."""
        return with_options(self.path, self.options or {})

    @property
    def keeper(self) -> Keeper:
        return keeper_options(self.config)


@dataclass(frozen=True)
class Peer:
    """Address of the keeper of a rank."""

    rank: int
    node: str
    host: str
    address: Address
    local_dir: str = ""


@dataclass(frozen=True)
class Go:
    """All ranks have handed a save over."""

    token: str
    peers: list[Peer]

    def nodes(self) -> list[list[Peer]]:
        """The ranks of each node, in the order of the first of them."""
        by_node: dict[str, list[Peer]] = {}
        for peer in self.peers:
            by_node.setdefault(peer.node, []).append(peer)
        return list(by_node.values())


@dataclass(frozen=True)
class Part:
    """Files that one rank has written for a save."""

    written: WrittenPart
    files: dict[str, int]
    """Data file -> its size in bytes."""
    attached: dict[str, str]
    """Comparisons of extra files, see :func:`dcp_plugin.core.storage.published.comparisons_below`."""
    attached_sizes: dict[str, int]
    directory: str = ""
    """The directory at the path that has the files; empty if it is ``keeper.dir``."""


@dataclass(frozen=True)
class End:
    """End of a save."""

    published: bool
    """True if the checkpoint is at its path."""
    local: bool
    """True if the save is complete in ``keeper.dir``."""
    error: Exception | None = None
    seconds: float = 0.0
    """Seconds since the save was handed over."""
    path: str = ""
    bytes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """The number of bytes written and the number of bytes linked instead, by rank."""
    time: float = 0.0
    """The recorded time of the checkpoint at its path, in seconds since the epoch; 0 if it is not there."""
    copies: int = 0
    degraded: str = ""
    local_seconds: float | None = None
    """This field and the two before it have the meaning of those of :class:`~dcp_plugin.core.events.SaveFinished`."""

    @property
    def failure(self) -> Exception | None:
        """The reason why the save was not published; None if it was, or need not be."""
        return None if self.published else self.error

    @property
    def has_failed(self) -> bool:
        """True if neither the path nor ``keeper.dir`` has the save."""
        return self.failure is not None and not self.local

    @property
    def is_final(self) -> bool:
        """False if the save is complete in ``keeper.dir`` alone, and may be brought to its path yet."""
        return self.published or not self.local or self.error is not None


@dataclass(frozen=True)
class State:
    """Progress of the keeper of a node with a save. The keeper alone changes it."""

    tries: int = 0
    """Keepers that have begun the save."""
    reserved: str = ""
    """The token of the reservation at the path, so that the ranks can revoke it; on the node of rank 0."""
    written: bool = False
    """True if all nodes have written their parts: the host copies of the node may get other bytes."""
    local: bool = False
    """True if the save is complete in ``keeper.dir``."""
    copies: int = 0
    """Other nodes that hold a copy of each node's part."""
    messages: tuple[str, ...] = ()
    """Warnings for the training; on the node of rank 0."""
    end: End | None = None

    def has_reached(self, milestone: str) -> bool:
        """Return whether the save has reached a milestone (the name of a field), or has ended."""
        return self.end is not None or bool(getattr(self, milestone))


_TRAVELLING = (
    *(RankJob, Items, Share, LocalInventory, Description, Head, KeyColumns, Facts, CheckpointConfig, Keeper, IO),
    *(Retention, Spent, Go, Peer, Part, WrittenPart, Places, Record, State, End),
)
CLASSES.update({each.__name__: each for each in _TRAVELLING})
