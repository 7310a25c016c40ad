"""What has to wait until a checkpoint is published.

``ModelCheckpoint`` links to a checkpoint, deletes the one that it replaces and tells the loggers as soon as
``Trainer.save_checkpoint`` has returned. With a save in the background that is too early: after a crash the link would
lead nowhere, and neither the new nor the old checkpoint would be there. So these things are put off until the save is
published, and never happen if it fails.

Files are dealt with at once, in the thread that published, so that ``last`` is the newest from the first moment on.
What concerns the training (loggers) waits for :meth:`Afterwards.settle`, which the training's own thread calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dcp_plugin import events
from dcp_plugin.config import PathLike, local_path
from dcp_plugin.saving.queue import SaveHandle

Action = Callable[[], object]


@dataclass
class Expected:
    """A save that has begun, and what follows it."""

    path: Path
    handle: SaveHandle | None = None
    """None until ``save`` has returned."""
    published: events.SaveFinished | None = None
    with_files: list[Action] = field(default_factory=list)
    in_training: list[Callable[[events.SaveFinished], object]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.published is None and self.handle is not None and self.handle.done()


class Afterwards:
    """Follows the saves of one plugin on this rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[Expected] = []
        self._newest: Expected | None = None
        self._due: list[Action] = []
        self._unsubscribe: Action = _nothing

    def __reduce__(self) -> tuple[type[Afterwards], tuple[()]]:
        """To the processes of ``ddp_spawn`` it goes empty."""
        return Afterwards, ()

    def expect(self, path: PathLike) -> Expected:
        """A save to ``path`` is about to begin."""
        with self._lock:
            if not self._under_way:
                self._unsubscribe()
                self._unsubscribe = events.subscribe(self._look)
            self._under_way = [one for one in self._under_way if not one.failed]
            self._newest = Expected(local_path(path))
            self._under_way.append(self._newest)
            return self._newest

    def forget(self) -> None:
        """The save that began last has failed, and the training has been told: nothing follows it."""
        with self._lock:
            if self._newest is not None and self._newest.published is None:
                self._under_way = [one for one in self._under_way if one is not self._newest]
                self._newest = None

    def is_under_way(self, path: PathLike) -> bool:
        """Whether ``path`` will be a checkpoint soon."""
        with self._lock:
            return any(one.path == local_path(path) and not one.failed for one in self._under_way)

    def with_files(self, action: Action, first: bool = False) -> None:
        """Do something to checkpoints when the save that began last is published. Now, if it is or there is none.

        Args:
            first: Before what was said earlier: a link, before what it leads to so far is deleted.
        """
        with self._lock:
            newest = self._newest
            if newest is not None and newest.published is None:
                newest.with_files.insert(0 if first else len(newest.with_files), action)
                return
        action()

    def in_training(self, action: Callable[[events.SaveFinished], object]) -> None:
        """The same for what only the training's thread may do. It learns what was saved."""
        with self._lock:
            newest = self._newest
            if newest is None:
                return
            if newest.published is None:
                newest.in_training.append(action)
                return
        action(newest.published)

    def settle(self) -> None:
        """In the training's thread: do what became due."""
        with self._lock:
            due, self._due = self._due, []
        for action in due:
            action()

    def close(self) -> None:
        """No save is under way any more; what was to follow one that failed is forgotten."""
        self.settle()
        with self._lock:
            self._unsubscribe()
            self._unsubscribe, self._under_way, self._newest = _nothing, [], None

    def _look(self, event: events.Event) -> None:
        if not isinstance(event, events.SaveFinished):
            return
        with self._lock:
            found = next((one for one in self._under_way if one.path == event.path and not one.failed), None)
            if found is None:  # somebody else's
                return
            self._under_way.remove(found)
            found.published = event
            with_files = found.with_files
            self._due += [_about(action, event) for action in found.in_training]
        for action in with_files:
            action()


def _about(action: Callable[[events.SaveFinished], object], event: events.SaveFinished) -> Action:
    return lambda: action(event)


def _nothing() -> None:
    """Stands for an action that there is not."""
