"""Types shared by all layers, and the reports that users get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dcp_plugin.paths import Where

if TYPE_CHECKING:
    import torch

VERSION = "0.1.0"
"""Of this package, noted in each checkpoint."""

Shape = tuple[int, ...]


class LocalChunk(NamedTuple):
    """A box of a global tensor that lives on this rank: ``tensor`` has shape ``sizes`` and starts at ``offsets``."""

    offsets: Shape
    sizes: Shape
    tensor: torch.Tensor


@dataclass(frozen=True)
class ShardedValue:
    """A global tensor as one rank sees it: its shape and dtype, and the chunks that this rank holds (maybe none)."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[LocalChunk, ...]
    any_rank: bool = False
    """Ranks that hold the same chunk hold the same bytes, so any of them may write it, or a part of it. Otherwise the
    first one writes: buffers under DDP, for one, differ between ranks, and rank 0's are those that count."""
    frozen: bool = False
    """A parameter that is not trained: it will probably be the same at the next save."""
    stored_whole: bool = False
    """Its chunks have no memory of their own, or not only (:mod:`dcp_plugin.tensors.kinds`): each is one item that
    ``torch.save`` makes, and is never cut."""
    layout: str = "replicated or single"
    """How the tensor is distributed, for the summary."""
    origin: Any = field(default=None, compare=False, repr=False)
    """The tensor that the chunks are views of, where that matters. In-place operations on a DTensor are counted on it,
    and not on its local tensor; and a slot of an optimizer is known by its identity."""

    @classmethod
    def of_all(cls, tensor: torch.Tensor, any_rank: bool = False) -> ShardedValue:
        """A tensor of which this rank has all. Saves make thousands: the fields are set without the ``__setattr__`` of
        a frozen class, which takes three times as long; the others are the defaults that the class has."""
        shape = tuple(tensor.shape)
        chunk = tuple.__new__(LocalChunk, ((0,) * len(shape), shape, tensor))
        made = object.__new__(cls)
        fields = made.__dict__
        fields["shape"], fields["dtype"], fields["chunks"], fields["any_rank"] = shape, tensor.dtype, (chunk,), any_rank
        return made


@dataclass(frozen=True)
class EncodedValue:
    """A value that is no tensor, as the bytes that go to disk."""

    data: bytes
    is_empty_mapping: bool = False


Flat = dict[str, "ShardedValue | EncodedValue"]
"""State by key, as the state layer hands it to staging, and staging to planning."""

KeyPath = tuple[Any, ...]
"""Where a key sits in the nested state: ``str`` for a mapping key, ``int`` for a list index, ``("t", i)`` for a
tuple index, ``("k", key)`` for a mapping key that is no text. The key of a mapping of another class than ``dict`` has
the name of the class in :data:`~dcp_plugin.format.values.MAPPING_CLASSES` in place of ``"k"``, also if it is text."""


@dataclass
class Wanted:
    """Tensors and values of a checkpoint that one object of the state loads. Keys are relative to the object's name."""

    targets: dict[str, Any] = field(default_factory=dict)
    """Tensors to fill; :class:`~dcp_plugin.state.module_load.Deferred` for those that get memory later; None for other
    values, which are replaced by what was read."""
    missing: list[str] = field(default_factory=list)
    """Keys that the object has and the checkpoint has not. Of an optimizer: parameters unfrozen since, for one."""
    unexpected: list[str] = field(default_factory=list)
    """Keys that only the checkpoint has. Of an optimizer: parameters frozen since, for one."""
    unmatched: list[str] = field(default_factory=list)
    """The keys of a module of which nothing is stored under its own names."""
    lacking: dict[str, Any] = field(default_factory=dict)
    """Tensors of data or of a Stateful that the checkpoint has not."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the checkpoint has for the object and the object does not have, for targets that get memory later: its own
    ``load_state_dict`` or hooks may take it."""
    in_room: set[str] = field(default_factory=set)
    """The keys of ``extra`` for which the object has an empty mapping or None, or another leaf that they replace."""
    resized: dict[str, Any] = field(default_factory=dict)
    """The object's own tensors where those of the checkpoint have another shape; ``targets`` has that shape."""
    undecided: list[str] = field(default_factory=list)
    """Missing keys of a module on which its own load hooks decide."""
    stored_as: dict[str, str] = field(default_factory=dict)
    """Targets of an optimizer that have another key in the checkpoint, and that key: that of this rank's own state, or
    one with the number of the parameter."""
    lost: list[str] = field(default_factory=list)
    """Those of which none is for this rank."""
    for_other_ranks: list[str] = field(default_factory=list)
    """Those that are for other ranks only."""
    empty: bool = False
    """Nothing is stored because the object had nothing to store: it is loaded with that."""
    refused: dict[str, str] = field(default_factory=dict)
    """Targets that have to exist in the object before a load can fill them, and why."""
    unfit: str = ""
    """Why the state of an optimizer cannot be taken at all."""
    tolerated: str = ""
    """What missing and unexpected keys mean, for a warning, where they are no error."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint, as :func:`dcp_plugin.inspect` lists it."""

    key: str
    shape: Shape
    dtype: str
    chunks: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says about itself, read without a model and without torch.distributed."""

    path: Where
    format: str
    """``"dcp_plugin"``, ``"stock"`` (any other writer of DCP checkpoints), ``"safetensors"``, ``"torch.save"``,
    ``"lightning"`` or ``"accelerate"``."""
    step: int | None
    time: float | None
    """Seconds since the epoch at which the checkpoint was published."""
    world_size: int | None
    tensors: list[TensorInfo]
    values: list[str]
    """Keys that hold no tensor."""
    nbytes: int
    """Unique payload bytes; aliases count once."""
    versions: dict[str, str]
    bytes_reused: int = 0
    """Of the bytes on the disk, those that were linked from an earlier checkpoint instead of written."""
    base: Where | None = None
    """The checkpoint that has what this one leaves out."""
    left_out: list[str] = field(default_factory=list)
    """Keys of frozen tensors that are in the base."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that were given to the save, such as the validation loss. Not all need be finite."""

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        writer = "" if self.world_size is None else f", written by {self.world_size} rank(s)"
        reused = f" ({self.bytes_reused / 2**20:.1f} MiB linked)" if self.bytes_reused else ""
        metrics = "".join(f", {name} {value:g}" for name, value in list(self.metrics.items())[:4])
        base = f"; {len(self.left_out)} more tensors are in its base {self.base}" if self.base else ""
        return (
            f"{self.path}: {self.format} checkpoint{step}{writer}, {len(self.tensors)} tensors and "
            f"{len(self.values)} values, {self.nbytes / 2**20:.1f} MiB{reused}{metrics}{base}"
        )


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of reading every byte of a checkpoint."""

    path: Where
    items: int
    nbytes: int
    errors: list[str]
    """One line per damaged item, naming file and key."""
    unverified: list[str] = field(default_factory=list)
    """Keys without a checksum."""

    @property
    def ok(self) -> bool:
        return not self.errors

    def __str__(self) -> str:
        state = "intact" if self.ok else f"DAMAGED, {len(self.errors)} item(s): " + "; ".join(self.errors[:5])
        unverified = f"; {len(self.unverified)} key(s) have no checksum and were only read" if self.unverified else ""
        return f"{self.path}: {self.items} items, {self.nbytes / 2**20:.1f} MiB, {state}{unverified}"


@dataclass(frozen=True)
class CheckpointState:
    """A directory that is, or pretends to be, a checkpoint."""

    path: Where
    committed: bool
    reason: str = ""
    """Why it is not a checkpoint; empty for one that is."""
    step: int | None = None
    time: float = 0.0
    tier: Literal["durable", "local"] = "durable"
    """``"local"``: it is in ``local_dir`` of the nodes alone, and nothing is at the path."""
    metrics: dict[str, float] = field(default_factory=dict, hash=False)
    """As in :class:`CheckpointInfo`; empty with tier ``"local"``."""
