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

import copy
import functools
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
from dcp_plugin.core.errors import logger


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
        sampler = self.inside
        if type(sampler).__iter__ is RandomSampler.__iter__ and sampler.generator is None:
            # Give a copy the generator that the sampler would make for this epoch, and would show to no one.
            sampler = copy.copy(sampler)
            drawn = torch.empty((), dtype=torch.int64, device=torch.get_default_device()).random_()
            sampler.generator = torch.Generator(device="cpu").manual_seed(int(drawn.item()))
        own: torch.Generator | None = getattr(sampler, "generator", None)
        generator = torch.default_generator if own is None else own
        if order is not None:  # the default generator is restored at the first batch
            generator.set_state(order)
        self.order = generator.get_state()
        yield from islice(iter(sampler), skip, None)

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
class _Loop:
    """One loop over a loader, or over the loader that skips its first batches."""

    loader: Callable[[], Any]
    skipped: int
    # Weak reference to the iterator over the ``DataLoader`` inside. Accelerate's loop alone refers to the iterator,
    # until the script has ended the loop or has left it (``break``).
    batches: Callable[[], Iterator[Any] | None] = lambda: None
    delivered: int = 0
    exhausted: bool = False

    @property
    def in_last_batch(self) -> bool:
        return self.exhausted and self.loader().end_of_dataloader


@dataclass(frozen=True)
class _Resumed:
    """Loaded position, until the next loop begins at this position."""

    position: Position
    restore_rng: Callable[[], None] | None
    batches: int
    by_itself: bool
    """True if the loader skips these batches, and not the script."""


class Tracker:
    """Position of one prepared dataloader, whose ``DataLoader`` inside has it in its ``__iter__``."""

    def __init__(self, loader: PreparedLoader) -> None:
        self._loader = weakref.ref(loader)
        self._loop: _Loop | None = None  # the newest loop, running or not
        self._resumed: _Resumed | None = None
        self._resumed_state: Any = None  # the loaded state of the loader, which its state_dict does not return
        self._owner = owner_of_sampler(loader)
        if self._owner is not None and not isinstance(self._owner.sampler, TrackedSampler):
            self._owner.sampler = TrackedSampler(self._owner.sampler)
        equal_batches = getattr(type(self._owner), "__iter__", None) is BatchSampler.__iter__
        self._counts = equal_batches and not hasattr(loader.dataset, "state_dict")
        """True if a number of samples is a position: all batches have the size that their sampler reports, and the
        dataset has no state."""
        self._is_stateful = bool(getattr(loader, "use_stateful_dataloader", False))
        vars(loader.base_dataloader)["__iter__"] = _TrackedIter(self, loader)

    @classmethod
    def of(cls, loader: PreparedLoader) -> Tracker:
        """Return the tracker of a loader. Track the loader from now on if it has none."""
        installed = vars(loader.base_dataloader).get("__iter__")
        return installed.tracker if isinstance(installed, _TrackedIter) else cls(loader)

    @property
    def loader(self) -> PreparedLoader:
        """The prepared loader, until it is freed."""
        loader = self._loader()
        assert loader is not None, "only a live loader is iterated over, saved and loaded"
        return loader

    @property
    def name(self) -> str:
        return f"the dataloader over {type(self.loader.dataset).__name__}"

    @property
    def _running(self) -> _Loop | None:
        """The loop that is running. A loop that has ended, or that the script has left, is over: the script begins its
        next loop with a new epoch."""
        return self._loop if self._loop is not None and self._loop.batches() is not None else None

    def follow(self, skipping: Any, batches: int) -> None:
        """Also track ``skipping``, which ``skip_first_batches`` has made from the loader: both have the same epoch."""
        skipping.iteration = self.loader.iteration  # Accelerate before 1.15 takes the order of epoch 0
        vars(skipping.base_dataloader)["__iter__"] = _TrackedIter(self, skipping, batches)

    def untrack(self) -> None:
        del vars(self.loader.base_dataloader)["__iter__"]
        if self._sampler is not None:
            self._owner.sampler = self._sampler.inside

    @property
    def _sampler(self) -> TrackedSampler | None:
        sampler = getattr(self._owner, "sampler", None)
        return sampler if isinstance(sampler, TrackedSampler) else None

    # Save

    def position(self, repeated: int) -> Position | None:
        """Return the position of the training; None on a rank to which another rank dispatches the data.

        An epoch ends with its last batch.

        Args:
            repeated: Number of batches to repeat after a resume, since their gradients are not saved.
        """
        loader, loop, sampler = self.loader, self._running, self._sampler
        if isinstance(loader, DataLoaderDispatcher) and loader.state.process_index != 0:
            return None
        if self._resumed is not None:
            return self._resumed.position
        consumed, epoch, order = 0, loader.iteration, None if sampler is None else sampler.next_order()
        if loop is not None and loop.in_last_batch:
            epoch += loop.loader() is loader  # Accelerate counts an epoch after its loop
        elif loop is not None:
            consumed = max(0, loop.skipped + loop.delivered - self._ahead(loop) - repeated)
            order = None if sampler is None else sampler.order
        return {
            "epoch": epoch,
            "batches": consumed,
            "samples": consumed * self._samples_per_batch(),
            "order": order,
            "seed": getattr(sampler, "initial_seed", None),
        }

    def own_state(self) -> Any:
        """Return the state of a stateful loader over a dataset with a position of its own, between two epochs the state
        of the dataset alone. Return None for other loaders.

        With the state of a loader that is at its end, torchdata makes an iterator more, which draws random numbers.
        """
        if not self._is_stateful or self._counts:
            return None
        if self._resumed is not None:
            return self._resumed_state
        if self._running is not None and not self._running.in_last_batch:
            return self.loader.state_dict()
        dataset = _stateful_dataset(self.loader)
        return None if dataset is None else {_BETWEEN_EPOCHS: dataset.state_dict()}

    def _ahead(self, loop: _Loop) -> int:
        """Return the number of batches that Accelerate's loader has read but not yielded."""
        if isinstance(self.loader, DataLoaderDispatcher) and not self.loader.split_batches:
            processes: int = self.loader.state.num_processes  # one batch for each process; fewer at the end
            return loop.delivered % processes or processes
        return 1

    # Load

    def resume_dataset(self, state: Any) -> None:
        """Continue at the position of the dataset itself, see :meth:`own_state`, with the next loop."""
        if state.keys() == {_BETWEEN_EPOCHS}:
            self._use_up_first_iterator()
            _stateful_dataset(self.loader).load_state_dict(state[_BETWEEN_EPOCHS])
        else:
            self.loader.load_state_dict(state)
        self._resumed_state = state

    def _use_up_first_iterator(self) -> None:
        """Take the iterator that a ``StatefulDataLoader`` has from its construction, with an order of its own."""
        with torch.random.fork_rng(devices=[]):
            _untracked_iter(self.loader.base_dataloader)

    def resume(self, position: Position, has_own_state: bool, restore_rng: Callable[[], None]) -> str:
        """Continue at ``position`` with the next loop. Return a message for the user, if any.

        Args:
            has_own_state: True if :meth:`resume_dataset` is called, too.
        """
        self.loader.set_epoch(position["epoch"])
        if self._is_stateful and not has_own_state:
            self._use_up_first_iterator()
        samples, total = position["samples"], self._samples_per_batch()
        batches, remainder = divmod(samples, total) if total else (position["batches"], 0)
        by_itself = has_own_state or (self._is_stateful and self._counts)
        if self._sampler is not None:
            if position["seed"] is not None and isinstance(self._sampler.inside, SeedableRandomSampler):
                self._sampler.inside.initial_seed = position["seed"]
            # Between two epochs only a generator of its own orders a sampler. Within an epoch the order may be that of
            # the default generator, which is restored at the first batch.
            has_order = position["batches"] or self._sampler.next_order() is not None
            self._sampler.resume(position["order"] if has_order else None, batches * total if by_itself else 0)
        self._resumed = _Resumed(position, restore_rng if position["batches"] else None, batches, by_itself)
        if not position["batches"]:
            return ""
        parts = []
        if position["order"] is None and self._sampler is not None and position["seed"] is None:
            parts.append("was being iterated before it was tracked: the order of this epoch is drawn anew")
        if remainder:
            parts.append(
                f"had consumed {samples} samples of this epoch, which is no multiple of the "
                f"{total} that all processes now take at once: {remainder} are repeated"
            )
        return f"{self.name} {'; '.join(parts)}" if parts else ""

    def _samples_per_batch(self) -> int:
        if not self._counts:
            return 0
        if isinstance(self.loader, DataLoaderDispatcher):
            return int(self.loader.batch_sampler.batch_size)
        return int(self.loader.total_batch_size)

    # A loop

    def iterate(self, loop: _Loop) -> Iterator[Any]:
        """Yield the batches of the ``DataLoader`` inside of the loop's loader, and count them."""
        loader = loop.loader()
        batches = _untracked_iter(loader.base_dataloader)
        resumed, self._resumed, self._loop = self._resumed, None, loop
        if resumed is not None and resumed.by_itself:
            loop.skipped += resumed.batches
        elif resumed is not None and resumed.batches > 0 and not loop.skipped:
            self._warn_that_none_are_skipped(resumed.batches)
        for batch in batches:
            loop.delivered += 1
            self._resumed = None  # a loop that began before the load continues
            if loop.delivered == 1 and resumed is not None and resumed.restore_rng is not None:
                resumed.restore_rng()
            yield batch
        loop.exhausted = True
        if loader is not self.loader:  # skip_first_batches counts its own epochs
            self.loader.iteration += 1

    def _warn_that_none_are_skipped(self, batches: int) -> None:
        if PartialState().is_main_process:
            logger.warning(
                "%s was after batch %d of an epoch (as this number of processes counts them) and keeps no position: "
                "iterate over accelerator.skip_first_batches(dataloader, %d) first, or prepare it with "
                "DataLoaderConfiguration(use_stateful_dataloader=True)",
                self.name,
                batches,
                batches,
            )


_BETWEEN_EPOCHS = "between_epochs"  # key of the state of a dataset that no loop reads


def _stateful_dataset(loader: PreparedLoader) -> Any:
    """Return the dataset with a state, which Accelerate may have wrapped; None without one."""
    datasets = (loader.dataset, getattr(loader.dataset, "dataset", None))
    return next((dataset for dataset in datasets if hasattr(dataset, "state_dict")), None)


def _untracked_iter(base: Any) -> Iterator[Any]:
    return type(base).__iter__(base)  # type: ignore[no-any-return]


class _TrackedIter:
    """``__iter__`` of the ``DataLoader`` inside of a loader, for callers that look up the method on the instance.

    A pickled copy of the loader is not tracked.
    """

    def __init__(self, tracker: Tracker, loader: Any, skipped: int = 0) -> None:
        self.tracker = tracker
        self._loader: Callable[[], Any] = weakref.ref(loader)
        self._skipped = skipped

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_untracked_iter, self._loader().base_dataloader)

    def __call__(self) -> Iterator[Any]:
        loop = _Loop(self._loader, self._skipped)
        batches = self.tracker.iterate(loop)
        loop.batches = weakref.ref(batches)
        return batches
