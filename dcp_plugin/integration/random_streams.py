"""Random streams of every rank, saved as ``extra.rng.<rank>.streams`` and restored on any number of ranks.

A rank continues its stream from the time of the save. A rank without a stream in the checkpoint (the world has grown)
derives a stream from rank 0's state and its own number, so that two resumes of the same checkpoint on the same number
of ranks are the same training.

Creating an iterator over a dataloader draws from the streams, so each framework package chooses when it restores them.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_plugin.integration.stored import RNG

RngState = dict[str, Any]


def of_rank(rank: int, device: torch.device, **more: Any) -> dict[str, dict[str, Any]]:
    """Return the value of ``extra.rng`` on a rank: its own streams under its own number.

    Args:
        device: The device whose generator is stored in addition to those of the CPU.
        more: Further state of a framework.
    """
    return {str(rank): {"streams": capture(device), **more}}


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
            state: The value of :func:`of_rank` for the rank :attr:`source`; by default the state in :attr:`loaded`, and
                nothing happens without one.
        """
        self.loaded.update(state or {})
        if self.loaded and self.is_new_rank:
            derive(self.loaded["streams"], self.rank)
        elif self.loaded:
            restore(self.loaded["streams"], self.device)

    @property
    def about_new_ranks(self) -> str:
        """A message for the user about new ranks; empty if no rank is new, or the checkpoint has no streams."""
        count = len(self.saved_on)
        if not 0 < count < self.world_size:
            return ""
        return (
            f"random states for {count} of {self.world_size} ranks: the others start streams of their own, derived "
            "from rank 0's state and their number"
        )


def capture(device: torch.device) -> RngState:
    """Return the state of every generator that training code commonly draws from, without drawing."""
    version, words, gauss = random.getstate()
    python = {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss}
    state: RngState = {"torch": torch.get_rng_state(), "python": python}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        words = torch.from_numpy(keys.astype("int64"))
        state["numpy"] = {"name": name, "words": words, "position": position, "gauss": [has_gauss, cached]}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def restore(state: RngState, device: torch.device) -> None:
    """Continue the streams of :func:`capture`. Seed the device if its type differs from that at the save."""
    if device.type != "cpu" and device.type not in state:
        torch.get_device_module(device).manual_seed(_seed(state, "device"))
    elif device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type].cpu())
    torch.set_rng_state(state["torch"].cpu())
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        saved = state["numpy"]
        words = saved["words"].numpy().astype("uint32")
        numpy.random.set_state((saved["name"], words, saved["position"], *saved["gauss"]))


def derive(state_of_rank_0: RngState, rank: int) -> None:
    """Start streams for a rank without streams in the checkpoint."""
    seed = _seed(state_of_rank_0, f"rank {rank}")
    torch.manual_seed(seed)  # also seeds every device
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _seed(state: RngState, purpose: str) -> int:
    digest = hashlib.blake2b(state["torch"].cpu().numpy().tobytes() + purpose.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes a signed 64-bit seed
