"""Positions of prepared dataloaders, independent of the number of processes.

Accelerate saves the position of a ``StatefulDataLoader`` only. All its ranks write to one file, in batches of one rank.
Here a position consists of the epoch, the state of the random generator that gave the order of this epoch, and the
number of samples that all ranks together have consumed. Any number of processes continues from these.

- :class:`TrackedSampler`, around the innermost sampler, records the generator's state that gives the order of an epoch,
  and can yield the remaining part of an epoch.
- :class:`Tracker` counts the batches of a loader. Accelerate's loader reads one batch ahead, so the tracker counts in
  the ``DataLoader`` inside. Accelerate calls the ``__iter__`` of this ``DataLoader`` by name: :class:`_TrackedIter`
  replaces the method on the instance.

A loader made with ``use_stateful_dataloader=True`` continues by itself, as in stock Accelerate. Any other loader begins
its epoch again, in the same order. If the script then skips no batches, a warning reports the number to skip.

Creating an iterator draws from the global random generators, which an uninterrupted run does not do in the middle of an
epoch. The generators are therefore restored again when the first batch of a resumed epoch is read.

References to loaders are weak: a loader refers to its tracker, and a cycle would keep the loader, with its workers,
until the garbage collector runs.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate import PartialState
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from dcp_plugin.accelerate._accelerate import PreparedLoader

logger = logging.getLogger("dcp_plugin")


class TrackedSampler(Sampler[int]):
    """Sampler around another sampler that can yield, once, the remaining part of an epoch with a recorded order."""

    def __init__(self, sampler: Any) -> None:
        self.inside = sampler
        self.order: torch.Tensor | None = None  # state of the generator that gave the order of this epoch
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
        elif order is not None:  # the sampler may draw from the global generator, restored at the first batch
            torch.set_rng_state(order)
        self.order = self._order_to_come()
        try:
            yield from islice(iter(self.inside), skip, None)
        finally:
            if order is not None and takes_generator:
                self.inside.generator = own

    def next_order(self) -> torch.Tensor | None:
        """Return the state of the sampler's own generator, which orders the next epoch; None without a generator."""
        generator = getattr(self.inside, "generator", None)
        return None if generator is None else generator.get_state()

    def __len__(self) -> int:
        return len(self.inside)

    def __getattr__(self, name: str) -> Any:
        if name == "inside":
            raise AttributeError(name)
        return getattr(self.inside, name)

    def _order_to_come(self) -> torch.Tensor:
        """Return the state of the generator that gives the order: the sampler's own, or a copy of the global state."""
        if (own := self.next_order()) is not None:
            return own
        state = torch.get_rng_state()
        if isinstance(self.inside, RandomSampler):  # its first global draw seeds its own generator
            peek = torch.Generator()
            peek.set_state(state)
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=peek).item())
            return torch.Generator().manual_seed(seed).get_state()
        return state


@contextmanager
def untracked_sampler(loader: Any) -> Iterator[None]:
    """Remove the tracked sampler, within the context, from a loader that is prepared again: Accelerate looks at the
    class of the sampler."""
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
    """Return the innermost batch sampler, which draws single samples; None if the dataset itself gives the order.

    Accelerate's ``get_sampler`` does not look inside the batch sampler that Accelerate puts around the user's.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None
    owner = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(owner, "batch_sampler"):
        owner = owner.batch_sampler
    return owner if hasattr(owner, "sampler") else None


Position = dict[str, Any]


@dataclass
class _Iteration:
    """One loop over a loader, or over the loader that skips its first batches."""

    loader: weakref.ref[Any]
    skipped: int
    with_gradients: bool  # True in training, False in an evaluation
    delivered: int = 0
    exhausted: bool = False
    running: bool = True

    @property
    def over(self) -> bool:
        """True if the epoch has ended. The loader of ``skip_first_batches`` is freed together with its loop."""
        loader = self.loader()
        return self.exhausted and (loader is None or loader.end_of_dataloader)


@dataclass(frozen=True)
class _Resumed:
    """Loaded position, until the next iteration begins at this position."""

    position: Position
    own_state: Any
    restore_rng: Callable[[], None] | None
    batches_to_skip: int
    """Number of batches that the script has to skip, if the loader does not skip them."""


class Tracker:
    """Position of one prepared dataloader."""

    def __init__(self, loader: PreparedLoader) -> None:
        self._loader = weakref.ref(loader)
        self.step_back = 0  # number of batches to repeat, since their gradients are not saved
        self._iteration: _Iteration | None = None  # the newest iteration, running or not
        self._skipping: Callable[[], Any] = lambda: None
        self._to_skip = 0
        self._resumed: _Resumed | None = None
        self._at_first_batch: Callable[[], None] | None = None
        self._owner = owner_of_sampler(loader)
        if self._owner is not None and not isinstance(self._owner.sampler, TrackedSampler):
            self._owner.sampler = TrackedSampler(self._owner.sampler)
        equal_batches = getattr(type(self._owner), "__iter__", None) is BatchSampler.__iter__
        self._counts = equal_batches and not hasattr(loader.dataset, "state_dict")
        """True if a number of samples is a position: all batches have the size that their sampler reports, and the
        dataset has no state."""
        self._is_stateful = bool(getattr(loader, "use_stateful_dataloader", False))
        _TrackedIter(self, loader.base_dataloader).install()

    @classmethod
    def of(cls, loader: PreparedLoader) -> Tracker:
        """Return the tracker of a loader: its present tracker if it is prepared again, or by a second accelerator."""
        installed = vars(loader.base_dataloader).get("__iter__")
        is_ours = isinstance(installed, _TrackedIter) and installed.tracker.tracks(loader)
        return installed.tracker if is_ours else cls(loader)

    @property
    def loader(self) -> PreparedLoader:
        """The prepared loader, until it is freed."""
        loader = self._loader()
        assert loader is not None, "only a live loader is iterated over, saved and loaded"
        return loader

    def tracks(self, loader: PreparedLoader) -> bool:
        return self._loader() is loader

    @property
    def name(self) -> str:
        return f"the dataloader over {type(self.loader.dataset).__name__}"

    @property
    def running(self) -> bool:
        return self._iteration is not None and self._iteration.running

    def follow(self, skipping: Any, batches: int) -> None:
        """Also track ``skipping``, which ``skip_first_batches`` has made from the loader: both have the same epoch."""
        self._skipping, self._to_skip = weakref.ref(skipping), batches
        _TrackedIter(self, skipping.base_dataloader).install()

    def untrack(self) -> None:
        loader = self._loader()
        installed = {} if loader is None else vars(loader.base_dataloader)
        if getattr(installed.get("__iter__"), "tracker", None) is self:
            del installed["__iter__"]
        if self._sampler is not None:
            self._owner.sampler = self._sampler.inside

    @property
    def _sampler(self) -> TrackedSampler | None:
        sampler = getattr(self._owner, "sampler", None)
        return sampler if isinstance(sampler, TrackedSampler) else None

    # Save

    def position(self, others_run: bool) -> Position | None:
        """Return the position of the training; None on a rank to which another rank dispatches the data.

        An epoch ends with its last batch.

        Args:
            others_run: True if a loop over any dataloader is running.
        """
        if isinstance(self.loader, DataLoaderDispatcher) and self.loader.state.process_index != 0:
            return None
        if self._resumed is not None:
            return self._resumed.position
        loop = self._iteration
        over = loop is None or loop.over
        within, consumed = False, 0
        # A training that stopped in its loop continues there. A program that has left the loop for another loader, or
        # evaluated, begins its next iteration with the first batch.
        was_left = loop is not None and not loop.running and (others_run or not loop.with_gradients)
        if loop is not None and not over and not was_left:
            within, consumed = True, max(0, loop.skipped + loop.delivered - self._ahead(loop) - self.step_back)
        sampler = self._sampler
        in_last_batch = over and any(other is self.loader for other in self.loader.gradient_state.dataloader_references)
        return {
            "epoch": self.loader.iteration + int(in_last_batch),  # Accelerate counts an epoch after its loop
            "batches": consumed,
            "samples": consumed * self._samples_per_batch(),
            "order": None if sampler is None else sampler.order if within else sampler.next_order(),
            "seed": getattr(sampler, "initial_seed", None),
        }

    def own_state(self) -> Any:
        """Return the state of a stateful loader over a dataset with a position of its own; None for other loaders."""
        if not self._is_stateful or self._counts:
            return None
        return self.loader.state_dict() if self._resumed is None else self._resumed.own_state

    # Load

    def resume(self, position: Position, own_state: Any, restore_rng: Callable[[], None]) -> str:
        """Continue at ``position`` with the next iteration. Return a message for the user, if any."""
        self.loader.set_epoch(position["epoch"])
        if own_state is not None:
            self.loader.load_state_dict(own_state)
        counts_itself = self._is_stateful and self._counts
        if counts_itself:
            # A StatefulDataLoader has a first iterator from its construction, with an order of its own: use it up.
            with torch.random.fork_rng(devices=[]):
                _untracked_iter(self.loader.base_dataloader)
        samples, total = position["samples"], self._samples_per_batch()
        batches, remainder = divmod(samples, total) if total else (position["batches"], 0)
        by_itself = own_state is not None or counts_itself
        if self._sampler is not None:
            if position["seed"] is not None and isinstance(self._sampler.inside, SeedableRandomSampler):
                self._sampler.inside.initial_seed = position["seed"]
            self._sampler.resume(position["order"], batches * total if by_itself else 0)
        to_skip = 0 if by_itself else batches
        self._resumed = _Resumed(position, own_state, restore_rng if position["batches"] else None, to_skip)
        self._to_skip = batches if by_itself else 0
        if not position["batches"]:
            return ""
        parts = []
        if position["order"] is None and self._sampler is not None and position["seed"] is None:
            parts.append("was being iterated before it was tracked: the order of this epoch is drawn anew")
        if remainder:
            parts.append(
                f"had consumed {position['samples']} samples of this epoch, which is no multiple of the "
                f"{total} that all processes now take at once: {remainder} are repeated"
            )
        return f"{self.name} {'; '.join(parts)}" if parts else ""

    # Called by _TrackedIter

    def begin(self, base: Any) -> _Iteration:
        skipping = self._skipping()
        loader = skipping if base is getattr(skipping, "base_dataloader", None) else self.loader
        self._iteration = _Iteration(weakref.ref(loader), self._to_skip, torch.is_grad_enabled())
        self._warn_unless_skipped()
        resumed, self._resumed, self._to_skip = self._resumed, None, 0
        self._at_first_batch = resumed.restore_rng if resumed is not None else None
        return self._iteration

    def _warn_unless_skipped(self) -> None:
        batches = 0 if self._resumed is None or self._to_skip else self._resumed.batches_to_skip
        if batches and PartialState().is_main_process:
            logger.warning(
                "%s was after batch %d of an epoch (as this number of processes counts them) and keeps no position: "
                "iterate over accelerator.skip_first_batches(dataloader, %d) first, or prepare it with "
                "DataLoaderConfiguration(use_stateful_dataloader=True)",
                self.name,
                batches,
                batches,
            )

    def deliver(self, iteration: _Iteration) -> None:
        iteration.delivered += 1
        self._resumed = None  # an iteration that began before the load continues
        if (restore := self._at_first_batch) is not None:
            self._at_first_batch = None
            restore()

    def end(self, iteration: _Iteration, base: Any) -> None:
        iteration.exhausted = True
        if base is not self.loader.base_dataloader:  # skip_first_batches counts its own epochs
            self.loader.iteration += 1

    def _ahead(self, iteration: _Iteration) -> int:
        """Return the number of batches that Accelerate's loader has read but not yielded."""
        if isinstance(self.loader, DataLoaderDispatcher) and not self.loader.split_batches:
            processes: int = self.loader.state.num_processes  # one batch for each process; fewer at the end
            return iteration.delivered % processes or processes
        return 1

    def _samples_per_batch(self) -> int:
        if not self._counts:
            return 0
        if isinstance(self.loader, DataLoaderDispatcher):
            return int(self.loader.batch_sampler.batch_size)
        return int(self.loader.total_batch_size)


def _untracked_iter(base: Any) -> Iterator[Any]:
    return type(base).__iter__(base)  # type: ignore[no-any-return]


class _TrackedIter:
    """``__iter__`` of one ``DataLoader``, for callers that look up the method on the instance.

    A pickled copy of the loader is not tracked.
    """

    def __init__(self, tracker: Tracker, base: Any) -> None:
        self.tracker = tracker
        self._base = weakref.ref(base)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_untracked_iter, self._base())

    def install(self) -> None:
        vars(self._base())["__iter__"] = self

    def __call__(self) -> Iterator[Any]:
        base = self._base()
        batches = _untracked_iter(base)
        iteration = self.tracker.begin(base)
        try:
            for batch in batches:
                self.tracker.deliver(iteration)
                yield batch
            self.tracker.end(iteration, base)
        finally:
            iteration.running = False  # at the end, or when the loop breaks
