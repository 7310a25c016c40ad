"""Records that travel through a save and a load. Each stage takes records of earlier stages and returns the next.

A save, in order; :mod:`dcp_plugin.core.saving.job` has the stages:

=======  =============================  =========================================================
stage    takes                          returns
=======  =============================  =========================================================
gather   :class:`LiveState`             :class:`GatheredState`: this rank's part, in live memory
stage    :class:`GatheredState`         :class:`StagedState`: memory and bytes to write
plan     :class:`StagedState`           :class:`SavePlan`: the items that this rank writes
write    :class:`SavePlan`              :class:`WrittenPart`: the place of each item
publish  :class:`WrittenPart` of all    the checkpoint at its path
=======  =============================  =========================================================

A load, in order; :mod:`dcp_plugin.core.loading.load` has the stages:

=======  =============================  =========================================================
stage    takes                          returns
=======  =============================  =========================================================
open     a path and a state             :class:`OpenedLoad`: the objects to load into, of all ranks
match    :class:`OpenedLoad`            :class:`Match`: the key in the checkpoint of each target
plan     :class:`Match`                 :class:`FittedLoad`: the values and boxes that this rank reads
values   :class:`FittedLoad`            :class:`FittedLoad` with checked values; no tensor is overwritten
tensors  :class:`FittedLoad`            filled targets
apply    :class:`FittedLoad`            :class:`Match` with the final :class:`LoadReport`
=======  =============================  =========================================================

Opening also opens an :class:`OpenCheckpoint`: the index, and files for reading. A :class:`ReadPlan` has the reads.

Tensors and values inside these records are :class:`~dcp_plugin.core.types.ShardedValue` and
:class:`~dcp_plugin.core.types.EncodedValue`. Sizes are in bytes, durations in seconds, shapes and offsets in elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dcp_plugin.core.errors import as_html, size, some
from dcp_plugin.core.format.index import CheckpointIndex, KeyPath, Places
from dcp_plugin.core.format.summary import Summary
from dcp_plugin.core.media import Readable
from dcp_plugin.core.paths import Where
from dcp_plugin.core.types import Box, Flat, ShardedValue, Wanted, public_class

if TYPE_CHECKING:
    import torch

    from dcp_plugin.core.format.metadata import Aliases, Views
    from dcp_plugin.core.format.values import WholeItem
    from dcp_plugin.core.partial import PartialLoad
    from dcp_plugin.core.planning.global_plan import GlobalPlan, Share
    from dcp_plugin.core.planning.local_inventory import LocalInventory
    from dcp_plugin.core.planning.replicas import LocalReplicas
    from dcp_plugin.core.ranks.collectives import Call

Shards = Mapping[str, Mapping[str, Box]]
"""Parts of sharded parameters on this rank: by the name of their optimizer, then by the name of the parameter."""


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of one call of :meth:`dcp_plugin.Checkpointer.save`, without the state."""

    path: Where
    call: Call
    """The call that all ranks make together."""
    step: int | None
    began: float
    """Time of the call, in seconds of ``time.monotonic``."""
    blocked_seconds: float | None = None
    """Time for which the call blocked; None if the caller waits until the checkpoint is published."""
    views: Views = field(default_factory=dict)
    aliases: Aliases = field(default_factory=dict)
    files: Callable[[Path], None] | None = None
    """Function that adds the caller's files to the directory of the save. If it is given, files that are already at the
    path stay."""
    durable: bool = False
    """True to copy the save from ``keeper.dir`` to its path, independent of ``keeper.durable_every``."""


@dataclass(frozen=True)
class LiveState:
    """Objects to save. Later records do not refer to the objects, so the caller can free them during the save."""

    state: Mapping[str, Any]
    """Name -> Module, Optimizer, Stateful, tensor, plain value, or a mapping of these."""
    kinds: Mapping[str, str]
    """Names that are state dicts of a ``"module"`` or an ``"optimizer"``."""
    owners: Sequence[Any]
    """Modules and optimizers whose state dicts are in ``state`` without the objects."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Numbers, or tensors of one element."""
    compared: tuple[str, ...] = ("",)
    """Prefixes of the keys of data that the first save compares between ranks. ``""`` is the prefix of every key."""
    is_data: bool = False
    """True if objects inside the mappings of ``state`` are plain values. Their ``state_dict`` is not called."""


@dataclass(frozen=True)
class StateDetails:
    """Details of this rank's part of the state, besides its values."""

    paths: Mapping[str, KeyPath]
    """Path of each key in the nested state."""
    kinds: Mapping[str, str]
    """Name in the state -> ``"module"`` or ``"optimizer"``, for the summary."""
    optimizers: Mapping[str, str]
    """Name in the state -> class of the optimizer, for the summary."""
    replicas: frozenset[str]
    """Keys whose bytes should be equal on all ranks that hold them: parameters, and the state of optimizers."""
    per_rank: frozenset[str]
    """Names below which each rank has its own value."""
    shards: Shards
    metrics: dict[str, float]
    """Metrics of this rank. The checkpoint records those of rank 0."""
    shared: frozenset[str]
    """Keys of data that should be equal on all ranks. The first save compares them."""
    loaded: Mapping[str, Mapping[str, bytes]]
    """Names of optimizers that a load has given slots -> the hashes of these slots, by key in the optimizer."""


@dataclass(frozen=True)
class GatheredState:
    """This rank's part of the state, in live memory that training may change."""

    leaves: Mapping[str, Any]
    """Key -> tensor, DTensor, ShardedTensor, ShardedValue or plain value."""
    details: StateDetails


@dataclass(frozen=True)
class StagedState:
    """This rank's part of the state as it will be written.

    A background save has a copy on the host, which nothing changes (:mod:`dcp_plugin.core.staging.snapshot`). If the
    caller waits until the save is written, the chunks are views of the memory that training uses.
    """

    state: Flat
    """Key -> chunks of a tensor in memory, or the bytes of a value."""
    details: StateDetails
    layouts: list[str]
    """Distributions of the tensors, in words, for the summary."""
    copy_seconds: float = 0.0
    """Duration of the copy to host memory."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Keys left out of the state because the base has them -> their keys in the base."""
    rounded: Mapping[str, str] = field(default_factory=dict)
    """Keys left out that the base has in a dtype of more precision -> their dtype in this state. The load from the base
    has rounded their numbers to it. A load of this checkpoint needs the same dtype."""
    base: Mapping[str, str] = field(default_factory=dict)
    """Record of the base in the summary; empty without one."""


class NewItem(NamedTuple):
    """An item that a rank writes: a box of a tensor, or a value.

    A tensor is on this rank, has memory, and needs no gradient.
    :func:`~dcp_plugin.core.tensors.kinds.require_memory` has checked that.
    """

    key: str
    data: torch.Tensor | WholeItem | bytes
    offsets: tuple[int, ...] = ()
    """Offsets of the box in the tensor."""
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankPlan:
    """One rank's view of a plan; ``global_plan`` is None except on rank 0."""

    digest: bytes
    inventory: LocalInventory
    share: Share
    global_plan: GlobalPlan | None

    @functools.cached_property
    def replicas(self) -> LocalReplicas:
        from dcp_plugin.core.planning.replicas import LocalReplicas  # a process alone has none

        return LocalReplicas(self.inventory, self.share.replica, self.share.weight)


@dataclass(frozen=True)
class SavePlan:
    """The items that one rank writes, and the directory for their files."""

    rank: int
    directory: Where
    """Reserved directory of this save, the same on all ranks."""
    state: Flat
    """Key -> memory or bytes, under the keys of the plan."""
    rank_plan: RankPlan
    """This rank's items. On rank 0 the object also has the plan of all ranks."""

    @property
    def frozen(self) -> frozenset[str]:
        """Keys of parameters that are not trained."""
        return frozenset(key for key, value in self.state.items() if isinstance(value, ShardedValue) and value.frozen)


@dataclass(frozen=True)
class Spent:
    """Seconds that one rank spent on its part of a save."""

    blocked_seconds: float | None = None
    """Time for which the training waited; None if it waited until the save was published."""
    staging_seconds: float = 0.0
    write_seconds: float = 0.0


@dataclass(frozen=True)
class WrittenPart:
    """One rank's part of a save on the medium, as the rank reports it to rank 0."""

    places: Places
    """Place of each item, in the order of the plan."""
    nbytes: int
    """Bytes of this rank's new data files."""
    items_reused: int = 0
    """Items linked from the run's last checkpoint instead of written."""
    bytes_reused: int = 0
    why_not_reused: str = ""
    """The reason why no more items were linked, in words; empty without a reason."""
    spent: Spent = field(default_factory=Spent)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint, opened for reading."""

    path: Where
    """A directory, or a file of another tool."""
    files: Readable
    """Files that the names in the index refer to."""
    index: CheckpointIndex
    known_identity: str
    """:attr:`identity` if opening the checkpoint has computed it; else empty."""
    format: str
    """Format, see :class:`~dcp_plugin.tools.CheckpointInfo`."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Name -> ``"module"`` or ``"optimizer"``, for names that the checkpoint records."""
    summary: Summary | None = None
    """Summary of a checkpoint of this package; None for other tools."""
    links: bool = False
    """True if data files may be symbolic links, as in checkpoints without an index of this package."""
    find_fingerprint: Callable[[], str] | None = field(default=None, repr=False)

    @property
    def identity(self) -> str:
        """Text that is equal for the same checkpoint in the same place. It is :attr:`fingerprint`, unless computing the
        fingerprint takes requests to a store."""
        return self.known_identity or self.fingerprint

    @functools.cached_property
    def fingerprint(self) -> str:
        """Text that is equal for the same checkpoint in any place. For files of other tools, computing it reads a part
        of every tensor."""
        return self.find_fingerprint() if self.find_fingerprint else self.known_identity

    @property
    def save_id(self) -> str:
        """Identity of this save, which differs from that of another save of the same contents. Empty for checkpoints of
        other tools."""
        return self.summary.save_id if self.summary else ""

    @property
    def absent(self) -> str:
        """Sentence about the parameters that the checkpoint leaves out; empty if it is complete."""
        if not self.index.left_out or self.summary is None:
            return ""
        return (
            f"{self.path} leaves out {some(list(self.index.left_out))}: they were frozen, and loaded from "
            f"{self.summary.base.get('path')}"
        )

    def close(self) -> None:
        """Close the files. Records that were read stay valid."""
        self.files.close()


@dataclass(frozen=True)
class OpenedLoad:
    """A load whose checkpoint all ranks have opened: the objects to load into, and the agreed settings."""

    adapters: Sequence[Any]
    """Objects of this rank: :class:`~dcp_plugin.core.state.adapters.StateAdapter`."""
    selection: PartialLoad | None
    """The partial load, with the position of its submodule in the state; None for a load of everything."""
    least_hosts: int | None
    """Number of hosts that must want the same bytes before ranks share the reading; None if ranks share none."""
    objects: Mapping[str, str]
    """Name -> kind of the modules and optimizers of all ranks."""


@dataclass(frozen=True)
class Match:
    """The targets of a load, and the key in the checkpoint of each. Keys of targets begin with the name of their
    object. :class:`~dcp_plugin.core.loading.matching.Matching` makes it after all keys are judged."""

    wanted: Mapping[str, Wanted]
    """Name of an object -> the tensors and values that it loads, reduced to the selected targets."""
    targets: Mapping[str, ShardedValue | None]
    """Tensors to fill; None for other values."""
    deferred: Mapping[str, Any]
    """Tensors that are read when their submodule is loaded: :class:`~dcp_plugin.core.state.module_load.Deferred`."""
    stored: Mapping[str, str]
    """Target -> its key in the checkpoint."""
    report: LoadReport
    """Keys that will be missing, left out and so on. Nothing is loaded yet."""
    problems: Sequence[str]
    """Reasons why the load is impossible; empty if it is possible."""
    warnings: Sequence[str]
    scales: Mapping[str, bool] = field(default_factory=dict)
    """Key in the checkpoint of a quantized tensor -> True if its scale is applied; False if it is loaded as it is
    stored."""


class BoxRead(NamedTuple):
    """The read of a box of a stored chunk, and the memory that it fills."""

    key: str
    """Key in the checkpoint."""
    number: int
    """Number of the chunk among those of all keys."""
    target: torch.Tensor
    """A tensor of the shape of the box, on this rank."""
    offsets: tuple[int, ...]
    """Offsets of the box in the chunk."""
    sizes: tuple[int, ...]
    fills_tensor: bool = False
    """True if this rank wants the complete tensor, of which the box may be a part."""
    is_scaled: bool = False
    """True if the elements are multiplied with the scale of a quantized tensor."""


LARGEST_CHUNK = 1 << 20
"""Bytes of the largest chunk in :attr:`ReadPlan.chunks`. The objects for a larger one cost little compared with its
bytes."""


@dataclass(frozen=True)
class ReadPlan:
    """The reads of one rank."""

    boxes: Sequence[BoxRead] = ()
    """All boxes that are not in ``chunks``."""
    chunks: Sequence[BoxRead] = ()
    """Small stored chunks that are read without conversion: complete, into plain memory of their dtype and size."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Target of a value that is no tensor -> its key in the checkpoint."""


@dataclass(frozen=True)
class FittedLoad:
    """A load that fits the state, and its reads. The plan stays here also if ranks read for each other."""

    opened: OpenedLoad
    match: Match
    plan: ReadPlan
    targets: Mapping[str, Any]
    """Targets by key. A value is None until it is read; a tensor is filled in place."""


@public_class()
@dataclass(frozen=True)
class LoadReport:
    """Result of a load. Keys are keys of the target, unless stated otherwise."""

    path: Where
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Keys of the target that the checkpoint lacks; the target kept its values."""
    unexpected: list[str] = field(default_factory=list)
    """Keys of the checkpoint under the loaded names that the target lacks."""
    cast: list[str] = field(default_factory=list)
    """Keys whose dtype differed; the values were converted to the target's."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Loaded keys with another key in the checkpoint -> that key."""
    left_out: list[str] = field(default_factory=list)
    """Keys that a partial load did not select, or that the checkpoint leaves out (``trainable_only``); the target kept
    its values."""
    bytes_read: int = 0
    """Bytes that this rank read from data files, including reads to check and to skip."""
    unchecked_bytes: int = 0
    """Bytes read whose checksum could not be compared, because only narrow columns of stored tensors were read."""
    sources: dict[str, int] = field(default_factory=dict)
    """With ``keeper.dir``: bytes that this rank read, by place: ``"this node"``, ``"node <host>"``, ``"durable"``."""
    passed_over: list[str] = field(default_factory=list)
    """With ``keeper.dir``: saves that were ignored or could not be read, with the reason."""
    seconds: float = 0.0
    """With ``keeper.dir``: duration of the search and the load."""
    exact: bool | None = None
    """Of a resume: True if the live state is the loaded one; False if it differs; None if nothing was compared."""

    _repr_html_ = as_html

    def __str__(self) -> str:
        parts = [f"loaded {len(self.loaded)} items from {self.path}"]
        for name in ("missing", "unexpected", "cast"):
            keys: list[str] = getattr(self, name)
            if keys:
                parts.append(f"{len(keys)} {name} ({_first(keys)})")
        if self.renamed:
            pairs = [f"{key} from {stored}" for key, stored in self.renamed.items()]
            parts.append(f"{len(pairs)} renamed ({_first(pairs)})")
        if self.left_out:
            parts.append(f"{len(self.left_out)} left out")
        if self.sources:
            read = [f"{size(count)} from {place}" for place, count in self.sources.items()]
            parts.append(f"this rank read {', '.join(read)} in {self.seconds:.2f} s")
        if self.passed_over:
            parts.append(f"passed over: {_first(self.passed_over)}")
        return "; ".join(parts)


def _first(texts: list[str]) -> str:
    return ", ".join(texts[:3]) + (", …" if len(texts) > 3 else "")
