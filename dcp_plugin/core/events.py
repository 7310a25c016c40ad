"""Events of a save: start, bytes written, end, durations.

Subscribers are called on every rank, in the thread where the event happens, and must be quick. The save waits for them,
so a subscriber that waits for the save or starts another save with the same checkpointer gets an error. The error of a
subscriber is logged, and the save goes on. This package has three subscribers of its own: the file of JSON lines
(:func:`append_to`), the figures of a run (:mod:`dcp_plugin.core.runs.figures`) and the progress line on rank 0
(:mod:`dcp_plugin.core.saving.progress`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeVar

from dcp_plugin.core.errors import logger
from dcp_plugin.core.paths import Where
from dcp_plugin.core.types import public_class


@public_class("dcp_plugin.events")
@dataclass(frozen=True)
class SaveStarted:
    """The state is gathered; this rank starts to write."""

    path: Where
    step: int | None


@public_class("dcp_plugin.events")
@dataclass(frozen=True)
class BytesWritten:
    """This rank has passed ``written`` of its ``total`` bytes to the file system."""

    path: Where
    written: int
    total: int


@public_class("dcp_plugin.events")
@dataclass(frozen=True)
class SaveRecord:
    """Facts about a save that only rank 0 has."""

    save: str
    """Identifier of the save."""
    run: str
    """Identifier of the run that saves."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """Costs of the save on each rank: a column for each of :data:`dcp_plugin.core.runs.figures.COLUMNS`. None in the
    column ``blocked_seconds`` stands for the time until the save was published."""


@public_class("dcp_plugin.events")
@dataclass(frozen=True)
class SaveFinished:
    """The checkpoint is published. This rank wrote ``bytes`` and linked ``bytes_reused`` instead of writing them."""

    path: Where
    step: int | None
    bytes: int
    seconds: float
    """Time from the call until the checkpoint is published."""
    blocked_seconds: float
    """Time for which the caller waited."""
    staging_seconds: float = 0.0
    """Time of the copy to host memory."""
    write_seconds: float = 0.0
    """Time of planning, writing and publishing."""
    rank: int = 0
    bytes_reused: int = 0
    tier: Literal["durable", "local"] = "durable"
    """``"local"``: the save is complete in ``keeper.dir``, and will not be copied to its path."""
    local_seconds: float | None = None
    """With ``keeper.dir``: time from the call until the save is complete there."""
    copies: int = 0
    """Number of other nodes that hold a copy of each node's part, with ``keeper.replicas``."""
    degraded: str = ""
    """The parts of the configuration that the save does not fulfil, with reasons; empty if it fulfils all."""
    record: SaveRecord | None = field(default=None, repr=False, compare=False)
    """Further facts; None except on rank 0 of a save that this process writes without a keeper."""

    @property
    def gb_per_second(self) -> float:
        """Rate of this rank's writing."""
        return self.bytes / 1e9 / self.write_seconds if self.write_seconds else 0.0


@public_class("dcp_plugin.events")
@dataclass(frozen=True)
class SavedLocally:
    """The save is complete in ``keeper.dir`` of all nodes, with the copies that ``keeper.replicas`` requires."""

    path: Where
    step: int | None
    seconds: float
    """Time since the call."""
    rank: int = 0
    copies: int = 0
    """Number of other nodes that hold a copy of each node's part; fewer than ``keeper.replicas`` are a warning."""


@public_class("dcp_plugin.events")
@dataclass(frozen=True)
class SaveAborted:
    """The save has failed; nothing was published."""

    path: Where
    step: int | None
    rank: int
    error: str
    record: SaveRecord | None = field(default=None, repr=False, compare=False)
    """Further facts; None except on rank 0 of a save that this process writes without a keeper."""


@public_class("dcp_plugin.events")
@dataclass(frozen=True)
class ReplicasDiffer:
    """Parameters or optimizer state that should be equal on several ranks differ. A run reports this once, at the save
    that detects it.

    This save and later ones take each part of a tensor from the lowest rank that holds it.
    """

    path: Where
    step: int | None
    ranks: Mapping[str, Sequence[int]]
    """Key -> the ranks that differ: the minority, or all that hold the key."""
    difference: float
    """The largest relative difference between the elements that were compared."""
    rank: int = 0


Event = SaveStarted | BytesWritten | SavedLocally | SaveFinished | SaveAborted | ReplicasDiffer
E = TypeVar("E", bound=Event)

_subscribers: list[Callable[[Event], None]] = []
"""Subscribers of this process. There is no lock, because a process forked while a thread holds it could never take
it."""
_reported: list[Callable[..., object]] = []
"""Callbacks whose error for :class:`BytesWritten` has been logged. A save has many of these events."""
_here = threading.local()


def subscribe(callback: Callable[[Event], None]) -> Callable[[], None]:
    """Call ``callback`` with every later event of this process, in the thread where the event happens.

    The error of ``callback`` is logged. It does not fail the save.

    Returns:
        A function that ends the subscription.

    Example:
        >>> import dcp_plugin
        >>> unsubscribe = dcp_plugin.core.events.subscribe(lambda event: print(type(event).__name__))
        >>> dcp_plugin.save({"epoch": 3}, "run/step-1")
        SaveStarted
        BytesWritten
        SaveFinished
        >>> unsubscribe()
    """
    _subscribers.append(callback)

    def unsubscribe() -> None:
        with suppress(ValueError):
            _subscribers.remove(callback)

    return unsubscribe


def emit(event: Event, json_lines: str | None = None) -> None:
    """Call all subscribers, see :func:`call_each`.

    Args:
        json_lines: The file of the checkpointer's log, whose subscriber :func:`append_to` is called last.
    """
    own = [] if json_lines is None else [lambda ended: append_to(Path(json_lines), ended)]
    call_each((*_subscribers, *own), event)


def append_to(json_lines: Path, event: Event) -> None:
    """Append the end of a save, or a difference between ranks, to a file as one line of JSON, on rank 0."""
    if isinstance(event, SaveFinished | SaveAborted | ReplicasDiffer) and event.rank == 0:
        json_lines.parent.mkdir(parents=True, exist_ok=True)
        with json_lines.open("a") as file:  # one write: programs that share the file do not cut each other's lines
            file.write(json.dumps(as_json(event)) + "\n")


def call_each(callbacks: Iterable[Callable[[E], object]], event: E) -> None:
    """Call all callbacks with ``event``. Log the errors of those that raise.

    An error does not fail the save, since the other ranks would wait for this one. During the calls,
    :func:`is_in_subscriber` is true in this thread. KeyboardInterrupt and SystemExit are raised in the main thread.
    """
    outside, _here.in_subscriber = is_in_subscriber(), True
    try:
        for callback in callbacks:
            try:
                callback(event)
            except BaseException as error:
                if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                    raise
                if isinstance(event, BytesWritten):
                    if callback in _reported:
                        continue
                    _reported.append(callback)
                logger.error(
                    "a callback for %s of %s failed; the save goes on", type(event).__name__, event.path, exc_info=error
                )
    finally:
        _here.in_subscriber = outside


def is_in_subscriber() -> bool:
    """Return whether this thread is running a subscriber or a callback of a save."""
    return getattr(_here, "in_subscriber", False)


_NAMES = {SaveFinished: "saved", SaveAborted: "failed", ReplicasDiffer: "differ"}


def as_json(event: SaveFinished | SaveAborted | ReplicasDiffer) -> dict[str, object]:
    """Return the fields of an event, its name and the current time, as values of JSON."""
    values: dict[str, object] = {"event": _NAMES[type(event)], "time": time.time()}
    values |= {name: getattr(event, name) for item in fields(event) if (name := item.name) != "record"}
    values["path"] = str(event.path)
    if isinstance(event, SaveFinished):
        values["gb_per_second"] = event.gb_per_second
    return values
