"""The progress of a save on stderr, by a subscriber of its events. Imported only where the progress is shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dcp_plugin.core import events
from dcp_plugin.core.paths import Where

NOTE_SECONDS = 10.0
"""Interval between progress lines of an asynchronous save."""


@contextmanager
def shown(path: Where, in_background: bool = False) -> Iterator[None]:
    """Show the progress of the save to ``path`` on stderr during the block.

    A blocking save that takes over a second redraws its line every half second. During a background save, the training
    may draw a progress bar on the same terminal. The save then writes a separate line every ten seconds, through tqdm
    if it is loaded, so that the bar stays intact. (rich redirects stderr while it draws, which has the same effect.)
    """
    began = noted = time.monotonic()
    drawn = False

    def show(event: events.Event) -> None:
        nonlocal noted, drawn
        if event.path != path:
            return
        now = time.monotonic()
        pause = NOTE_SECONDS if in_background else 0.5 if drawn else 1.0
        if isinstance(event, events.BytesWritten) and now - noted >= pause:
            noted, drawn = now, True
            rate, mib = event.written / (now - began), 2**20
            done = f"{event.written / mib:,.0f} of {event.total / mib:,.0f} MiB on rank 0, {rate / mib:,.0f} MiB/s"
            if in_background:
                _write_line(f"saving {path.name} in the background: {done}")
            else:
                seconds_left = (event.total - event.written) / rate if rate else 0.0
                _write(f"\rsaving {path.name}: {done}, {seconds_left:.0f} s left ")
        elif isinstance(event, events.SaveFinished) and in_background and drawn:
            _write_line(f"saved {path.name} in {event.seconds:.0f} s")

    unsubscribe = events.subscribe(show)
    try:
        yield
    finally:
        unsubscribe()
        if drawn and not in_background:
            _write("\n")


def _write_line(line: str) -> None:
    if (tqdm := sys.modules.get("tqdm")) is None:
        _write(f"{line}\n")
        return
    with suppress(Exception):
        tqdm.tqdm.write(line, file=sys.stderr)  # erases the bars, writes, and draws them again


def _write(text: str) -> None:
    with suppress(Exception):  # a closed stream, or an object of the user that has only some methods of one
        sys.stderr.write(text)
        sys.stderr.flush()
