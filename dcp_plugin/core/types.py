"""Types shared by all layers, and the reports that the public functions return."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, ForwardRef, Literal, NamedTuple, TypeVar

from dcp_plugin.core.paths import Where

if TYPE_CHECKING:
    import torch

VERSION = "0.1.0"
"""Version of this package, recorded in each checkpoint."""

C = TypeVar("C", bound=type)


def public_class(package: str = "dcp_plugin") -> Callable[[C], C]:
    """Return a decorator that names the package from which users import a class as its module.

    Pickles of users refer to a class by its module, so they survive a move of the code. Each annotation refers to the
    module that contains it, so ``typing.get_type_hints`` still resolves it.
    """

    def named(cls: C) -> C:
        cls.__annotations__ = {
            name: ForwardRef(text, is_argument=False, module=cls.__module__, is_class=True)
            if isinstance(text, str)
            else text
            for name, text in get_annotations(cls).items()
        }
        cls.__module__ = package
        return cls

    return named


class Box(NamedTuple):
    """A rectangular part of a tensor; ``Box((), ())`` for no part at all."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class LocalChunk(NamedTuple):
    """A box of a global tensor on this rank: ``tensor`` has shape ``sizes`` and starts at ``offsets``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class ShardedValue:
    """One rank's view of a global tensor: shape, dtype, and the chunks that the rank holds, possibly none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[LocalChunk, ...]
    any_rank: bool = False
    """True if ranks with the same chunk hold the same bytes, so each of them may write the chunk or a part of it. If
    false, the first rank writes it. Buffers under DDP, for example, differ between ranks, and those of rank 0 count."""
    frozen: bool = False
    """True for a parameter that is not trained. It probably has the same bytes at the next save."""
    stored_whole: bool = False
    """True if the memory of a chunk does not have all its data (:mod:`dcp_plugin.core.tensors.kinds`). ``torch.save``
    then makes one item of each chunk, and a chunk is never cut."""
    layout: str = "replicated or single"
    """Distribution of the tensor, in words, for the summary."""
    origin: Any = field(default=None, compare=False, repr=False)
    """The tensor of which the chunks are views, if a stage needs it. A DTensor counts in-place operations on itself and
    not on its local tensor. A slot of an optimizer is recognized by the identity of its tensor."""

    @classmethod
    def of_all(cls, tensor: torch.Tensor, any_rank: bool = False) -> ShardedValue:
        """Describe a tensor that is complete on this rank."""
        shape = tuple(tensor.shape)
        chunk = tuple.__new__(LocalChunk, ((0,) * len(shape), shape, tensor))
        # Saves call this for thousands of tensors, and filling __dict__ takes a third of the time that the constructor
        # of a frozen dataclass takes. Fields that are not set here have the class's defaults.
        made = object.__new__(cls)
        fields = made.__dict__
        fields["shape"], fields["dtype"], fields["chunks"], fields["any_rank"] = shape, tensor.dtype, (chunk,), any_rank
        return made


class Standing(enum.IntEnum):
    """Precedence of an entry among those that several ranks have under one key. A checkpoint stores an entry with the
    lowest number here, and ignores entries with a higher one."""

    HOLDS = 0
    CHANGED = 1
    """The rank had no value there before a load gave it one, and has changed the value since."""
    RECEIVED = 2
    """The rank had no value there, and still has the one that a load gave it. Another rank may have changed its own
    since."""
    EMPTY = 3
    """None, or an empty sequence or set."""
    EMPTY_MAPPING = 4
    """Stock stores no key for it."""


@dataclass(frozen=True)
class EncodedValue:
    """A value that is no tensor, encoded as the bytes to store."""

    data: bytes
    standing: Standing = Standing.HOLDS


Flat = dict[str, "ShardedValue | EncodedValue"]
"""State by key. The state layer passes it to staging, and staging passes it to planning."""


@dataclass
class Wanted:
    """Tensors and values of a checkpoint that one object of the state loads. Keys are relative to the object's name.

    The first fields are targets, and the facts that a load needs about them. The others are differences between the
    keys of the object and those of the checkpoint. An object only reports them:
    :class:`~dcp_plugin.core.loading.differences.Differences` decides which of them are errors.
    """

    # Targets.
    targets: dict[str, Any] = field(default_factory=dict)
    """Tensors to fill; :class:`~dcp_plugin.core.state.module_load.Deferred` for tensors that get memory later; None for
    other values, which the loaded values replace."""
    stored_as: dict[str, str] = field(default_factory=dict)
    """Targets of an optimizer -> their key in the checkpoint, if it differs. That key names a rank if each rank stored
    its own state. It has a number in place of the parameter's name if the optimizer was saved by numbers."""
    resized: dict[str, Any] = field(default_factory=dict)
    """The object's tensors whose shape differs from the checkpoint's. ``targets`` has the checkpoint's shape."""
    unfillable: dict[str, str] = field(default_factory=dict)
    """Targets that a load cannot fill -> the reason: a tensor that must exist in the object first, or one of two names
    of the same memory that have different values in the checkpoint."""
    received: set[str] = field(default_factory=set)
    """Keys that the object gets although it has nothing there: nothing, None or an empty container."""
    kept_frozen: dict[str, Any] = field(default_factory=dict)
    """Frozen parameters that the checkpoint leaves out, and that keep their values. They are no longer missing."""
    saved_empty: bool = False
    """True if the checkpoint has no keys because the object had none. The object is then loaded from an empty state."""

    # Keys that only the object has, in order of their consequence.
    missing: list[str] = field(default_factory=list)
    """Keys that only the object has, apart from those in the other fields of this group. For an optimizer, these
    include parameters unfrozen since the save."""
    missing_tensors: dict[str, Any] = field(default_factory=dict)
    """Tensors of data or of a Stateful that only the object has. Missing if the target determines the loaded keys. In a
    restore they are only reported."""
    left_to_hooks: list[str] = field(default_factory=list)
    """Keys that only a module has, and whose load hooks decide if they are missing."""
    lost_per_rank: list[str] = field(default_factory=list)
    """Keys of per-rank state that the checkpoint has, but not for this rank's part of the parameter. Always missing."""
    per_rank_of_others: list[str] = field(default_factory=list)
    """Keys of per-rank state for parameters of which this rank has no part. Never missing."""
    prefix_candidates: list[str] = field(default_factory=list)
    """All keys of a module if the checkpoint has none of them. They may be stored below a prefix. They are also in
    ``missing`` or ``left_to_hooks``."""

    # Keys that only the checkpoint has.
    unexpected: list[str] = field(default_factory=list)
    """Keys that the object cannot take. For an optimizer, these include parameters frozen since the save."""
    extra_targets: dict[str, Any] = field(default_factory=dict)
    """Entries that the object may take, as targets that get memory later: by ``load_state_dict`` or by hooks."""
    extra_in_gaps: set[str] = field(default_factory=set)
    """Keys of ``extra_targets`` that replace an empty mapping, None or another leaf of the object."""

    # Reasons that hold for all differences of an optimizer.
    unusable: str = ""
    """The reason why an optimizer cannot use the stored state at all; empty if it can."""
    tolerated: str = ""
    """The meaning of missing and unexpected keys, for a warning, if they are no error."""


@public_class()
class PerRank:
    """Value of the state that differs between ranks, such as the random state or the position in the data.

    Without this mark all ranks get the value of rank 0 back. With it each rank saves and loads its own value, under
    ``<name>.<rank>``. Every rank has to mark the value. A rank without an entry in the checkpoint raises
    :class:`~dcp_plugin.CheckpointMismatch` in a ``load``, and keeps its value with a warning in a ``resume_or_init``.
    The loaders and samplers of torchdata need no mark: their state is the position of one rank in the data.

    Args:
        value: A tensor, a plain value, an object with a ``state_dict``, or a mapping of these. Modules and optimizers
            are refused.

    Example:
        >>> import dcp_plugin, torch
        >>> state = {"extra": dcp_plugin.PerRank({"rng": torch.get_rng_state(), "batch": (1, 2)})}
        >>> dcp_plugin.save(state, "run/step-1")
        >>> dcp_plugin.inspect("run/step-1").values
        ['extra.0.batch']
        >>> state = {"extra": dcp_plugin.PerRank({"rng": torch.get_rng_state(), "batch": None})}
        >>> _ = dcp_plugin.load(state, "run/step-1")
        >>> state["extra"].value["batch"]
        (1, 2)
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        """Value of this rank; after a load, the loaded one. Tensors and objects are filled in place."""

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class OfEachRank:
    """Base class of objects that differ between ranks without a mark. A rank without an entry in the checkpoint loads
    the entry of rank 0, from which the object derives its own state."""


@dataclass(frozen=True)
class RankEntry:
    """Entry of one rank, for a value that differs between ranks."""

    above: str
    """Name that the entries of all ranks share."""
    below: str
    """Name of the object in the value of a rank; empty if the value is the object."""
    rank: int
    world_size: int
    is_position: bool
    """True if the value is a position in the data, which is valid only on the same number of ranks."""
    is_derived: bool = False
    """True if a rank without an entry loads that of rank 0."""

    @property
    def shared_name(self) -> str:
        """Name of the object in a checkpoint that has one value for all ranks."""
        return f"{self.above}.{self.below}" if self.below else self.above

    def name_on(self, rank: int) -> str:
        """Return the name of the object of ``rank``."""
        return f"{self.above}.{rank}.{self.below}" if self.below else f"{self.above}.{rank}"


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class CheckpointState:
    """A directory that is a checkpoint or looks like one."""

    path: Where
    committed: bool
    reason: str = ""
    """The reason why the directory is not a checkpoint; empty if it is one."""
    step: int | None = None
    time: float = 0.0
    tier: Literal["durable", "local"] = "durable"
    """``"local"``: only ``keeper.dir`` of the nodes has the checkpoint, and there is none at the path."""
    metrics: dict[str, float] = field(default_factory=dict, hash=False)
    """Metrics, see :class:`CheckpointInfo`; empty with tier ``"local"``."""
