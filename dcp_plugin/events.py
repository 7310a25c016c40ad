"""Events of a save: what is written, how much of it, how long it took.

Subscribers are called on every rank, in the thread where the event happens, and must be quick. The save waits for them,
so they cannot wait for the save, nor begin another one with the same checkpointer: both are refused. A subscriber that
raises before the checkpoint is published makes the save fail; after that, its error is logged. The progress line for
people (rank 0) is itself a subscriber.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeVar

from dcp_plugin.errors import CheckpointError
from dcp_plugin.paths import Where


@dataclass(frozen=True)
class SaveStarted:
    """The state is gathered; this rank starts to write."""

    path: Where
    step: int | None


@dataclass(frozen=True)
class BytesWritten:
    """``written`` of this rank's ``total`` bytes are handed to the file system."""

    path: Where
    written: int
    total: int


@dataclass(frozen=True)
class RankCost:
    """Seconds and bytes that one rank has spent on a save."""

    blocked_seconds: float | None
    """How long its training waited; None if until the save was published."""
    staging_seconds: float
    write_seconds: float
    bytes: int
    bytes_reused: int


@dataclass(frozen=True)
class SaveRecord:
    """Facts about a save that rank 0 alone has."""

    save: str
    """Identifies the save."""
    run: str
    """Identifies the run that saves."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[RankCost, ...] = ()


@dataclass(frozen=True)
class SaveFinished:
    """The checkpoint is published. ``bytes`` is what this rank wrote, ``bytes_reused`` what it linked instead."""

    path: Where
    step: int | None
    bytes: int
    seconds: float
    """From the call until it is published."""
    blocked_seconds: float
    """What the caller waited."""
    staging_seconds: float = 0.0
    """What the copy to host memory took."""
    write_seconds: float = 0.0
    """What planning, writing and publishing took."""
    rank: int = 0
    bytes_reused: int = 0
    tier: Literal["durable", "local"] = "durable"
    """``"local"``: it is complete in ``local_dir``, and is not to go on to its path."""
    local_seconds: float | None = None
    """With ``local_dir``: from the call until it is complete there."""
    record: SaveRecord | None = field(default=None, repr=False, compare=False)
    """On rank 0 of a save that no keeper writes."""

    @property
    def gb_per_second(self) -> float:
        """Of this rank's writing."""
        return self.bytes / 1e9 / self.write_seconds if self.write_seconds else 0.0


@dataclass(frozen=True)
class SavedLocally:
    """The save is complete in ``local_dir`` of all nodes, with the copies that ``replicas`` asks for."""

    path: Where
    step: int | None
    seconds: float
    """From the call."""
    rank: int = 0


@dataclass(frozen=True)
class SaveAborted:
    """The save has failed; nothing was published."""

    path: Where
    step: int | None
    rank: int
    error: str
    record: SaveRecord | None = field(default=None, repr=False, compare=False)
    """On rank 0 of a save that no keeper writes."""


@dataclass(frozen=True)
class IntervalProposed:
    """Rank 0 proposes how often to save, by all that is known when the checkpoint is published."""

    path: Where
    step: int | None
    seconds: float
    """Of training between two saves."""
    steps: int | None
    cost_seconds: float
    """What the training loses by one save."""
    mtbf_seconds: float
    """Mean seconds of training between two failures."""


Event = SaveStarted | BytesWritten | SavedLocally | SaveFinished | SaveAborted | IntervalProposed
E = TypeVar("E", bound=Event)

_subscribers: list[Callable[[Event], None]] = []
"""Without a lock, which a process that is forked meanwhile would find locked for ever."""
_here = threading.local()


def subscribe(callback: Callable[[Event], None]) -> Callable[[], None]:
    """Call ``callback`` with every event of this process from now on, in the thread where it happens.

    Returns:
        A function that ends it.

    Example:
        >>> import dcp_plugin
        >>> unsubscribe = dcp_plugin.events.subscribe(lambda event: print(type(event).__name__))
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


def emit(event: Event) -> None:
    """Tell all subscribers, also if one of them raises; then raise that."""
    call_each(tuple(_subscribers), event)


def call_each(callbacks: Iterable[Callable[[E], object]], event: E) -> None:
    """Call all of them with ``event``, also if one raises; then raise the first error.

    While they run, :func:`is_telling` is true in this thread.

    Raises:
        CheckpointError: One has raised SystemExit, or the like, in a thread of ours: that would end this thread alone,
            and the other ranks would wait for it. In the main thread it is raised as it is, Ctrl-C for one.
    """
    failure: Exception | None = None
    outside, _here.telling = is_telling(), True
    try:
        for callback in callbacks:
            try:
                callback(event)
            except Exception as error:
                failure = failure or error
            except BaseException as error:
                if threading.current_thread() is threading.main_thread():
                    raise
                told = CheckpointError(f"a subscriber raised {type(error).__name__}({error})")
                told.__cause__ = error
                failure = failure or told
    finally:
        _here.telling = outside
    if failure is not None:
        raise failure


def is_telling() -> bool:
    """Whether this thread runs a subscriber, or a callback of a save, now."""
    return getattr(_here, "telling", False)


NOTE_SECONDS = 10.0
"""How often an asynchronous save says how far it is."""


@contextmanager
def progress(path: Where, wanted: bool, in_background: bool = False) -> Iterator[None]:
    """While active, show on stderr how far the save to ``path`` is.

    Once a save that blocks takes over a second, its line is drawn again every half second. In the background, where
    whoever trains may draw a progress bar on the same terminal, it is a line of its own every ten seconds: that does
    not garble the bar if its library is told (tqdm; rich takes over stderr while it draws).
    """
    if not wanted:
        yield
        return
    began = shown = time.monotonic()
    drawn = False

    def show(event: Event) -> None:
        nonlocal shown, drawn
        if event.path != path:
            return
        now = time.monotonic()
        pause = NOTE_SECONDS if in_background else 0.5 if drawn else 1.0
        if isinstance(event, BytesWritten) and now - shown >= pause:
            shown, drawn = now, True
            rate, mib = event.written / (now - began), 2**20
            done = f"{event.written / mib:,.0f} of {event.total / mib:,.0f} MiB on rank 0, {rate / mib:,.0f} MiB/s"
            if in_background:
                _write_line(f"saving {path.name} in the background: {done}")
            else:
                left = (event.total - event.written) / rate if rate else 0.0
                sys.stderr.write(f"\rsaving {path.name}: {done}, {left:.0f} s left ")
                sys.stderr.flush()
        elif isinstance(event, SaveFinished) and in_background and drawn:
            _write_line(f"saved {path.name} in {event.seconds:.0f} s")

    unsubscribe = subscribe(show)
    try:
        yield
    finally:
        unsubscribe()
        if drawn and not in_background:
            sys.stderr.write("\n")


def _write_line(line: str) -> None:
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None:
        tqdm.tqdm.write(line, file=sys.stderr)  # takes the bars away, writes, and draws them again
    else:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


_NAMES = {SaveFinished: "saved", SaveAborted: "failed", IntervalProposed: "interval"}


def as_json(event: SaveFinished | SaveAborted | IntervalProposed) -> dict[str, object]:
    """Return the fields of an event, its name and the time now, as values of JSON."""
    values: dict[str, object] = {"event": _NAMES[type(event)], "time": time.time()}
    values |= {name: getattr(event, name) for one in fields(event) if (name := one.name) != "record"}
    values["path"] = str(event.path)
    if isinstance(event, SaveFinished):
        values["gb_per_second"] = event.gb_per_second
    return values


def append_json(path: Path, event: SaveFinished | SaveAborted | IntervalProposed) -> None:
    """Append how a save has ended, or what was proposed after it, to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:  # one write, so that programs that share the file do not cut each other's lines
        file.write(json.dumps(as_json(event)) + "\n")
