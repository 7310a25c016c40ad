"""How a training continues where its checkpoint was made: random streams and the positions of dataloaders.

Creating an iterator over a dataloader draws from the random generators, and the loop that does it is the user's,
after the load. So the load itself creates the iterator: ``StatefulDataLoader.state_dict()`` makes the one that the
next ``for batch in loader`` takes, and the random streams are restored after that. Between two epochs that iterator
is at its end, and the loop begins the next one in its ordinary way, with the same draws as without the interruption.

All that is asked of the user: the loader is in the state, and ``fabric.load`` comes before the loop over it.

Random streams are kept by global rank, positions by the rank of the data, so that ranks which share their data
(tensor parallelism) share the position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from dcp_plugin.integration import random_streams
from dcp_plugin.integration.sampler_state import made_by

STARTS_AGAIN = "the dataloader starts with its first batch, so samples of the epoch under way come again"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Through:
    """An object of the state that is made of two functions, which the core calls when all ranks take part."""

    get: Callable[[], dict[str, Any]]
    put: Callable[[dict[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        return self.get()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.put(state)

    @classmethod
    def saves(cls, get: Callable[[], dict[str, Any]]) -> Through:
        return cls(get, lambda state: None)

    @classmethod
    def loads(cls, put: Callable[[dict[str, Any]], None]) -> Through:
        return cls(dict, put)


def has_position(value: object) -> bool:
    """Whether this is a dataloader that knows where it is, as torchdata's ``StatefulDataLoader``."""
    return isinstance(value, DataLoader) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def position_of(loader: Any) -> dict[str, Any]:
    sampler = _sampler_with_epoch(loader)
    return {
        "position": loader.state_dict(),
        "made_by": made_by(loader),
        "epoch": None if sampler is None else sampler.epoch,
        "generator": None if loader.generator is None else loader.generator.get_state(),
    }


def continue_at(loader: Any, say: Say, state: Mapping[str, Any]) -> None:
    """Have the next iteration over the loader go on where :func:`position_of` was asked, without drawing first."""
    sampler, finished = _sampler_with_epoch(loader), state["position"].get("_iterator_finished", False)
    if sampler is not None and state["epoch"] is not None:
        _number_epochs_from(sampler, state["epoch"], finished)
    if state["made_by"] == made_by(loader):
        loader.load_state_dict(state["position"])
        loader.state_dict()
    elif not finished:
        say(
            f"it has a position of a dataloader with {state['made_by']}, and here it is one with {made_by(loader)}: "
            f"{STARTS_AGAIN}. To continue exactly, keep num_workers and shuffle, and the strategy: Fabric changes the "
            "sampler for strategies of several ranks. Or resume from a checkpoint made between two epochs."
        )
    if loader.generator is not None and state["generator"] is not None:
        loader.generator.set_state(state["generator"])


def restore_rng(strategy: Any, saved_on: int, say: Say, state: Mapping[str, Any]) -> None:
    """Continue this rank's streams, or start some of its own if the checkpoint, made by fewer ranks, has none."""
    rank = getattr(strategy, "global_rank", 0)
    if rank < saved_on:
        random_streams.restore(state["streams"], strategy.root_device)
    else:
        random_streams.derive(state["streams"], rank)
    if (ranks := getattr(strategy, "world_size", 1)) > saved_on:
        say(f"it has {random_streams.about_new_ranks(saved_on, ranks)}")


def _sampler_with_epoch(loader: Any) -> Any:
    """The sampler that is told the epoch, as torch's ``DistributedSampler``; None if there is none."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int):
            return sampler
    return None


def _number_epochs_from(sampler: Any, epoch: int, finished: bool) -> None:
    """Fabric calls ``set_epoch`` with the number of times that the loader was iterated in this process. Count on from
    the epoch of the checkpoint instead; otherwise the orders of the first epochs would come again."""
    set_epoch = type(sampler).set_epoch.__get__(sampler)
    offset: int | None = None

    def counting_on(calls: int) -> None:
        nonlocal offset
        if offset is None:
            offset = epoch + finished - calls
        set_epoch(calls + offset)

    set_epoch(epoch)
    sampler.set_epoch = counting_on


def rank_streams(device: torch.device) -> dict[str, Any]:
    """The random streams of this rank, as every door stores them."""
    return {"streams": random_streams.capture(device)}
