"""The order of the samples in an epoch: from which random generator it came, and how the rest of it is given again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler


class TrackedSampler(Sampler[int]):
    """Yields what the sampler inside yields, and can do so from a given order and sample on, once."""

    def __init__(self, sampler: Any) -> None:
        self.inside = sampler
        self.order: torch.Tensor | None = None
        """The state of the generator that gave the order of this epoch."""
        self._next: tuple[torch.Tensor | None, int] = (None, 0)

    def resume(self, order: torch.Tensor | None, skip: int) -> None:
        self._next = (order, skip)

    def __iter__(self) -> Iterator[int]:
        (order, skip), self._next = self._next, (None, 0)
        own = getattr(self.inside, "generator", None)
        takes_generator = hasattr(self.inside, "generator")
        if order is not None and takes_generator:
            generator = own if own is not None else torch.Generator()
            generator.set_state(order)
            self.inside.generator = generator
        elif order is not None:  # if it draws at all, then from the global one, which is set again at the first batch
            torch.set_rng_state(order)
        self.order = self._order_to_come()
        try:
            yield from islice(iter(self.inside), skip, None)
        finally:
            if order is not None and takes_generator:
                self.inside.generator = own

    def __len__(self) -> int:
        return len(self.inside)

    def __getattr__(self, name: str) -> Any:
        if name == "inside":
            raise AttributeError(name)
        return getattr(self.inside, name)

    def _order_to_come(self) -> torch.Tensor:
        """The state of the generator that the order comes from, or would come from if the sampler had its own."""
        if getattr(self.inside, "generator", None) is not None:
            return self.inside.generator.get_state()  # type: ignore[no-any-return]
        state = torch.get_rng_state()
        if isinstance(self.inside, RandomSampler):  # it seeds a generator with its first draw from the global one
            peek = torch.Generator()
            peek.set_state(state)
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=peek).item())
            return torch.Generator().manual_seed(seed).get_state()
        return state


@contextmanager
def untracked_sampler(loader: Any) -> Iterator[None]:
    """Accelerate looks at the class of a sampler when it prepares a loader, which may have been prepared before."""
    owner: Any = owner_of_sampler(loader) if isinstance(loader, DataLoader) else None
    sampler = getattr(owner, "sampler", None)
    if not isinstance(sampler, TrackedSampler):
        yield
        return
    owner.sampler = sampler.inside
    try:
        yield
    finally:
        if owner.sampler is sampler.inside:
            owner.sampler = sampler


def owner_of_sampler(loader: Any) -> Any:
    """What draws single samples: the innermost batch sampler. None where the dataset itself gives the order.

    Accelerate's ``get_sampler`` does not see through the batch sampler that it puts around the user's.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None
    owner = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(owner, "batch_sampler"):
        owner = owner.batch_sampler
    return owner if hasattr(owner, "sampler") else None


def generator_state(sampler: TrackedSampler) -> torch.Tensor | None:
    generator = getattr(sampler.inside, "generator", None)
    return None if generator is None else generator.get_state()
