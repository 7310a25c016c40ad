"""Values that differ between ranks, under one name of the state.

A value that all ranks share is stored once, and all ranks get the value of the first rank back. Other values, such as
the random state and the position in the data, differ between ranks. Each rank's entry of such a value is stored under
``<name>.<rank>``, and each rank loads its own entry. The packages for frameworks store random streams in the same way
(``extra.rng.<rank>``).

The user marks such a value with :class:`PerRank`. The loaders and samplers of torchdata need no mark: their state is
the position of one rank in the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from dcp_plugin.core.types import public_class


@public_class()
class PerRank:
    """Value of the state that differs between ranks.

    Without this mark all ranks get the value of rank 0 back. With it each rank saves and loads its own value, under
    ``<name>.<rank>``. Every rank has to mark the value. A rank without an entry in the checkpoint raises
    :class:`~dcp_plugin.CheckpointMismatch` in a ``load``, and keeps its value with a warning in a ``resume_or_init``.

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


def without_sampler(position: Any) -> Any:
    """Return the state of a torchdata loader without that of our sampler (``ResumableSampler``).

    Lightning's own sampler takes no state. torchdata then skips the batches that the rank had read.
    """
    if type(position) is list:
        return [without_sampler(child) for child in position]
    if type(position) is not dict:
        return position
    of_sampler = position.get("sampler_state")
    is_ours = isinstance(of_sampler, dict) and "order_from" in of_sampler
    return {key: without_sampler(child) for key, child in position.items() if not (is_ours and key == "sampler_state")}


def is_position(value: Any) -> bool:
    """Return whether a value is a loader or a sampler of torchdata, whose ``state_dict`` is the position of this rank.

    A subclass with its own ``state_dict`` does not count. Such a class may have the positions of all ranks in its
    state, as torchtitan's does.
    """
    module: str = getattr(getattr(type(value), "state_dict", None), "__module__", None) or ""
    return module.partition(".")[0] == "torchdata" and isinstance(value, Stateful)
