"""A position for the sampler that Lightning puts into a stateful dataloader on several ranks.

On several ranks, Lightning 2.6 wraps the shuffling sampler of ``StatefulDataLoader(dataset, shuffle=True)`` in one
that has no state: each time it is iterated it draws a new order from the inner sampler's generator. Resumed in the
middle of an epoch, such a loader would skip the right number of samples of the wrong order, without a word.

:class:`ResumableSampler` goes around it. It yields what Lightning's sampler yields, and remembers which state of the
generator the order of this epoch came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Sampler


class ResumableSampler(Sampler[int]):
    """A sampler whose order comes from ``generator`` at the moment it is iterated, with a position that can be saved.

    ``StatefulDataLoader`` saves and loads it, since it has ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, sampler: Any, generator: torch.Generator) -> None:
        self._sampler = sampler
        self._generator = generator
        self._order_from = generator.get_state()
        self._yielded = 0
        self._to_skip = 0

    def __iter__(self) -> Iterator[int]:
        self._yielded, self._to_skip = self._to_skip, 0
        self._order_from = self._generator.get_state()
        return self._counted(islice(iter(self._sampler), self._yielded, None))

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"order_from": self._order_from, "yielded": self._yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["order_from"])
        self._to_skip = state["yielded"]

    def _counted(self, order: Iterator[int]) -> Iterator[int]:
        for index in order:
            self._yielded += 1
            yield index


def made_by(dataloader: Any) -> str:
    """What has to be the same for a stateful dataloader to take a position: its sampler, which Lightning and Fabric
    wrap for strategies of several ranks, and the number of workers. Given another one, it fails without a reason."""
    sampler = getattr(getattr(dataloader, "batch_sampler", None), "sampler", getattr(dataloader, "sampler", None))
    return f"{type(sampler).__name__} and num_workers={getattr(dataloader, 'num_workers', 0)}"


def make_resumable(dataloader: Any, inside_distributed_sampler: Callable[[Any], Any]) -> None:
    """Give a stateful dataloader a sampler with a position, where Lightning has put one without.

    Args:
        inside_distributed_sampler: The user's sampler in Lightning's; None for any other sampler.
    """
    batches = getattr(dataloader, "batch_sampler", None)
    inner = inside_distributed_sampler(getattr(batches, "sampler", None))
    generator = getattr(inner, "generator", None)
    if hasattr(dataloader, "load_state_dict") and isinstance(generator, torch.Generator):
        batches.sampler = ResumableSampler(batches.sampler, generator)  # type: ignore[union-attr]


def data_rank(owner: Any) -> tuple[int, int]:
    """This rank's number among the ranks that see different data, and how many those are.

    ``owner`` is what a framework keeps its ``distributed_sampler_kwargs`` on: a trainer, a strategy.
    """
    kwargs = getattr(owner, "distributed_sampler_kwargs", None)
    return (0, 1) if kwargs is None else (kwargs["rank"], kwargs["num_replicas"])
