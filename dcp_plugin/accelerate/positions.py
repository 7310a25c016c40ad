"""Where prepared dataloaders are, in words that do not depend on the number of processes, and how they get back there.

Accelerate saves the position of a ``StatefulDataLoader`` only, all ranks into one file, in batches of one rank. Here
a position is: the epoch, the state of the random generator from which the order of this epoch came, and the number of
samples that all ranks together have consumed of it. From these any number of processes continues.

- :class:`TrackedSampler`, around the innermost sampler, remembers where the order of an epoch came from, and can
  give the rest of an epoch.
- :class:`Tracker` counts what a loader has handed out. It sits below Accelerate's loader, which reads one batch
  ahead, in the ``__iter__`` of the ``DataLoader`` inside of it (whose class is replaced by a subclass: iteration is
  looked up on the class).

A loader made with ``use_stateful_dataloader=True`` continues by itself, as it does natively. Any other begins its
epoch again, in the same order, and :meth:`Tracker.resume` says how many batches to skip.

Creating an iterator draws from the global random generators, which a run that was not interrupted does not do in the
middle of an epoch. So they are set once more, when the first batch of a resumed epoch is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler

from dcp_plugin.accelerate._accelerate import PreparedLoader

Position = dict[str, Any]


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
        if order is not None:
            generator = own if own is not None else torch.Generator()
            generator.set_state(order)
            self.inside.generator = generator
        self.order = self._order_to_come()
        try:
            yield from islice(iter(self.inside), skip, None)
        finally:
            if order is not None:
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


class Tracker:
    """The position of one prepared dataloader."""

    def __init__(self, loader: PreparedLoader) -> None:
        self.loader = loader
        self._delivered = 0
        self._exhausted = True
        self._first_batch: Callable[[], None] | None = None
        self._skipped = 0
        self.step_back = 0
        """Batches handed out that have to come again: their gradients are not saved."""
        self._owner = _owner_of_sampler(loader)
        self._sampler: TrackedSampler | None = None
        if self._owner is not None and hasattr(self._owner.sampler, "generator"):
            self._owner.sampler = self._sampler = TrackedSampler(self._owner.sampler)
        _track(loader.base_dataloader, self)

    @property
    def name(self) -> str:
        return f"the dataloader over {type(self.loader.dataset).__name__}"

    def follow(self, skipping: Any, batches: int) -> None:
        """``skipping`` is what ``skip_first_batches`` made of the loader: its epoch is the loader's epoch."""
        self._skipped = batches
        _track(skipping.base_dataloader, self)

    def untrack(self) -> None:
        base = self.loader.base_dataloader
        base.__class__ = type(base).__mro__[1]
        if self._sampler is not None:
            self._owner.sampler = self._sampler.inside

    # Save

    def position(self) -> Position | None:
        """Where the training is. An epoch whose last batch has been handed out is over.

        None on a rank that does not read the data itself but gets it dispatched.
        """
        if isinstance(self.loader, DataLoaderDispatcher) and self.loader.state.process_index != 0:
            return None
        within = not self._exhausted
        handed_out = self._skipped + self._delivered - self._ahead()
        consumed = max(0, handed_out - self.step_back) if within else 0
        sampler = self._sampler
        in_last_batch = self._exhausted and any(one is self.loader for one in self._in_use())
        return {
            "epoch": self.loader.iteration + int(in_last_batch),  # which Accelerate counts when the loop has ended
            "samples": consumed * self._samples_per_batch(),
            "order": None if sampler is None else sampler.order if within else _generator_state(sampler),
            "seed": getattr(sampler, "initial_seed", None),
        }

    def own_state(self) -> Any:
        """The state of a stateful loader over a dataset that only the dataset itself can find its place in."""
        return self.loader.state_dict() if self._is_stateful() and not self._counts() else None

    # Load

    def resume(self, position: Position, own_state: Any, restore_rng: Callable[[], None]) -> str:
        """Go on at ``position`` with the next iteration. Returns what has to be said about it, if anything."""
        self._delivered, self._exhausted, self._skipped = 0, True, 0
        self.loader.set_epoch(position["epoch"])
        if own_state is not None:
            self.loader.load_state_dict(own_state)
        self._renew_iterator()
        samples, total = position["samples"], self._samples_per_batch()
        batches, rest = divmod(samples, total) if total else (0, 0)
        by_itself = self._is_stateful() and self._counts()
        if self._sampler is not None:
            if position["seed"] is not None and isinstance(self._sampler.inside, SeedableRandomSampler):
                self._sampler.inside.initial_seed = position["seed"]
            self._sampler.resume(position["order"], batches * total if by_itself else 0)
        if not samples:
            return ""
        self._skipped = batches if by_itself else 0
        self._first_batch = restore_rng
        return self._what_to_say(position, own_state, batches, rest, by_itself)

    def _what_to_say(self, position: Position, own_state: Any, batches: int, rest: int, by_itself: bool) -> str:
        said = []
        if position["order"] is None and self._sampler is not None and position["seed"] is None:
            said.append("was being iterated before it was tracked: the order of this epoch is drawn anew")
        if rest:
            said.append(
                f"had consumed {position['samples']} samples of this epoch, which is no multiple of the "
                f"{self._samples_per_batch()} that all processes now take at once: {rest} are repeated"
            )
        if not by_itself and own_state is None:
            said.append(
                f"was after batch {batches} of an epoch (as this number of processes counts them) and keeps no "
                f"position: iterate over accelerator.skip_first_batches(dataloader, {batches}) first, or prepare it "
                f"with DataLoaderConfiguration(use_stateful_dataloader=True)"
            )
        return f"{self.name} {'; '.join(said)}" if said else ""

    # What _track calls

    def begins(self) -> None:
        self._delivered, self._exhausted = 0, False

    def delivers(self) -> None:
        self._delivered += 1
        if (restore := self._first_batch) is not None:
            self._first_batch = None
            restore()

    def ends(self, base: Any) -> None:
        self._exhausted, self._skipped = True, 0
        if base is not self.loader.base_dataloader:  # skip_first_batches counts its own epochs
            self.loader.iteration += 1

    def _in_use(self) -> list[Any]:
        """The loaders that are being iterated over."""
        return list(self.loader.gradient_state.dataloader_references)

    def _ahead(self) -> int:
        """Batches that Accelerate's loader has read and not handed out."""
        dispatches = isinstance(self.loader, DataLoaderDispatcher) and not self.loader.split_batches
        return self.loader.state.num_processes if dispatches else 1

    def _samples_per_batch(self) -> int:
        if not self._counts():
            return 0
        if isinstance(self.loader, DataLoaderDispatcher):
            return int(self.loader.batch_sampler.batch_size)
        return int(self.loader.total_batch_size)

    def _counts(self) -> bool:
        """Whether the place in the data is a number of samples: there is a sampler, and the dataset has no state."""
        return self._owner is not None and not hasattr(self.loader.dataset, "state_dict")

    def _is_stateful(self) -> bool:
        return bool(getattr(self.loader, "use_stateful_dataloader", False))

    def _renew_iterator(self) -> None:
        """A StatefulDataLoader holds a first iterator from the moment it was made, with an order of its own."""
        if self._is_stateful() and self._counts():
            with torch.random.fork_rng(devices=[]):
                self.loader.base_dataloader.untracked_iterator()


def _owner_of_sampler(loader: PreparedLoader) -> Any:
    """What draws single samples: the innermost batch sampler. None where the dataset itself gives the order.

    Accelerate's ``get_sampler`` does not see through the batch sampler that it puts around the user's.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None
    owner = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(owner, "batch_sampler"):
        owner = owner.batch_sampler
    return owner if hasattr(owner, "sampler") else None


def _generator_state(sampler: TrackedSampler) -> torch.Tensor | None:
    generator = getattr(sampler.inside, "generator", None)
    return None if generator is None else generator.get_state()


def _track(base: Any, tracker: Tracker) -> None:
    kind: Any = type(base)
    base.__class__ = _tracked_class(kind)
    base.dcp_tracker = tracker


@functools.cache
def _tracked_class(base: Any) -> Any:
    if getattr(base, "tracked_by_dcp_plugin", False):
        return base

    class Tracked(base):  # type: ignore[misc]
        tracked_by_dcp_plugin = True
        dcp_tracker: Tracker

        def untracked_iterator(self) -> Any:
            return super().__iter__()

        def __iter__(self) -> Iterator[Any]:
            batches = super().__iter__()
            self.dcp_tracker.begins()
            for batch in batches:
                self.dcp_tracker.delivers()
                yield batch
            self.dcp_tracker.ends(self)

    Tracked.__name__ = Tracked.__qualname__ = base.__name__
    return Tracked
