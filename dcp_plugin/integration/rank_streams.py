"""Random streams of every rank, saved as ``extra.rng.<rank>.streams`` and restored on any number of ranks.

:mod:`~dcp_plugin.core.state.random_streams` reads and sets the generators. This module selects the streams that a rank
restores: its own, or streams derived from rank 0's if the checkpoint has none of this rank.

Creating an iterator over a dataloader draws from the streams, so each framework package chooses when it restores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_plugin.core.state import random_streams
from dcp_plugin.integration.stored import RNG


def of_rank(rank: int, device: torch.device, **more: Any) -> dict[str, dict[str, Any]]:
    """Return the value of ``extra.rng`` on a rank: its own streams under its own number.

    Args:
        device: The device whose generator is stored in addition to those of the CPU.
        more: Further state of a framework.
    """
    return {str(rank): {"streams": random_streams.capture(device), **more}}


@dataclass(frozen=True)
class SavedStreams:
    """Random streams in a checkpoint, for one rank of the run that loads them."""

    saved_on: frozenset[int]
    """The ranks whose streams are in the checkpoint."""
    rank: int
    world_size: int
    device: torch.device
    loaded: dict[str, Any] = field(default_factory=dict)
    """The state that was restored last, or that a load has filled into this mapping."""

    @classmethod
    def among(cls, names: Iterable[str], rank: int, world_size: int, device: torch.device) -> SavedStreams:
        """Return the streams of a checkpoint with these names or keys in ``extra``, as ``rng.0.streams.torch``."""
        stored = [name.split(".", 2)[1] for name in names if name.startswith(f"{RNG}.")]
        return cls(frozenset(int(number) for number in stored if number.isdecimal()), rank, world_size, device)

    @property
    def source(self) -> int | None:
        """The rank whose streams this rank reads: its own, else rank 0's; None if the checkpoint has neither."""
        return next((rank for rank in (self.rank, 0) if rank in self.saved_on), None)

    @property
    def name(self) -> str | None:
        """The name in ``extra`` of the streams of :attr:`source`: ``rng.<rank>``."""
        return None if self.source is None else f"{RNG}.{self.source}"

    @property
    def is_new_rank(self) -> bool:
        """True if the checkpoint, made by fewer ranks, has no streams of this rank."""
        return self.rank not in self.saved_on

    def restore(self, state: Mapping[str, Any] | None = None) -> None:
        """Continue this rank's streams, or start derived streams if the checkpoint has none of this rank.

        Args:
            state: The value of :func:`of_rank` for the rank :attr:`source`; by default the state in :attr:`loaded`. If
                both are empty, nothing is restored.
        """
        self.loaded.update(state or {})
        if self.loaded and self.is_new_rank:
            random_streams.derive(self.loaded["streams"], self.rank)
        elif self.loaded:
            random_streams.restore(self.loaded["streams"], self.device)

    @property
    def about_new_ranks(self) -> str:
        """A message for the user about new ranks; empty if no rank is new, or the checkpoint has no streams."""
        return random_streams.about_new_ranks(len(self.saved_on), self.world_size)
