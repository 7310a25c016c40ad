"""The journal of a node: all state of its saves that survives a rank or a keeper. No other module knows its files.

==========================  ===========================================================================================
``<token>.<rank>.job``      the part of a save that a rank hands over (``RankJob``)
``<token>.<rank>.files/``   extra files of a framework
``<token>.go``              on the node of rank 0: all ranks have handed over their parts (``Go``)
``<token>.revoked``         the ranks write the save themselves, so no keeper publishes it
``<token>.<rank>.part``     the keeper has written the part of a rank (``Part``)
``<token>.state``           progress of the keeper with the save (``State``)
``keeper.address``          address at which the keeper answers other nodes; its successor uses it again
==========================  ===========================================================================================

:mod:`~dcp_plugin.tiers.journal_records` has the classes. The files are in the directory of a
:class:`~dcp_plugin.tiers.spool.Spool`, and appear complete. Ranks write the first four, and the keeper of the node
writes the others. A keeper that replaces a dead one reads them. They are in memory, which outlives every process of the
node, so nothing is synced.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dcp_plugin.core.errors import SaveFailed
from dcp_plugin.core.paths import Where
from dcp_plugin.tiers import plain
from dcp_plugin.tiers.journal_records import End, Go, Part, RankJob, State
from dcp_plugin.tiers.local_checkpoints import time_of
from dcp_plugin.tiers.spool import Spool
from dcp_plugin.tiers.wire import Address

_MOST_ENDS = 64  # ended saves whose state is kept
_OF_A_SAVE = re.compile(r"[0-9a-f]{24}\.")


class Journal:
    """The journal in a spool."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self._changed = threading.Condition()
        """Notified of each change of a state. Used in the keeper, since only the keeper changes states."""

    def _read(self, name: str) -> Any:
        """Return the value in a file; None if it does not exist. Raises ValueError if it cannot be read."""
        data = self.spool.get(name)
        return None if data is None else plain.decode(data)

    # Written by ranks

    def hand_over(self, job: RankJob, files: Path | None) -> None:
        """Add the part of a rank.

        Args:
            files: A directory in the spool with extra files.

        Raises:
            OSError: The memory is full, for example.
            TypeError: The options of the store have an object that cannot be handed to another process.
        """
        # The job is written last: once it is visible, the part is complete.
        if files is not None:
            os.rename(files, self.files_of(job.token, job.rank))
        self.spool.put(f"{job.token}.{job.rank}.job", plain.encode(job))

    def go(self, go: Go) -> None:
        """Record that all ranks have handed a save over. Raises OSError."""
        self.spool.put(f"{go.token}.go", plain.encode(go))

    def take_back(self, token: str, rank: int) -> None:
        """Remove the part of a rank from a save that was not handed over."""
        self.spool.drop(f"{token}.go", f"{token}.{rank}.job", f"{token}.{rank}.files")

    def revoke(self, token: str, rank: int) -> None:
        """Withdraw a save from the keepers. The extra files of the rank stay. Raises OSError."""
        self.spool.put(f"{token}.revoked", b"")
        self.spool.drop(f"{token}.go", f"{token}.{rank}.job")

    # Read by ranks and the keeper

    def newest_time(self) -> float:
        """Return the greatest recorded time of a save, in seconds since the epoch; 0 without saves."""
        return max((time_of(name) for name in self.spool.names("") if _OF_A_SAVE.match(name)), default=0.0)

    def ready(self) -> list[str]:
        """Return the saves that all ranks have handed over and whose records still exist, oldest first."""
        return [name.removesuffix(".go") for name in self.spool.names(".go")]

    def unfinished(self) -> list[str]:
        """Return those of the :meth:`ready` saves that have not ended."""
        return [token for token in self.ready() if self.state(token).end is None]

    def in_flight(self) -> list[str]:
        """Return the saves of which this node has a part and that have not ended, oldest first."""
        tokens = sorted({name.split(".")[0] for name in self.spool.names(".job")})
        return [token for token in tokens if self.state(token).end is None]

    def go_of(self, token: str) -> Go:
        """Return the record that all ranks have handed a save over. Raises ValueError if it cannot be read."""
        return cast(Go, self._read(f"{token}.go"))

    def job(self, token: str, rank: int) -> RankJob:
        """Return the job of a rank.

        Raises:
            SaveFailed: The rank has handed nothing over.
            ValueError: The job cannot be read.
        """
        job: RankJob | None = self._read(f"{token}.{rank}.job")
        if job is None:
            raise SaveFailed(f"rank {rank} has not handed over its part of the save {token}")
        return job

    def ranks_of(self, token: str) -> list[int]:
        """Return the ranks of this node that have handed over their part of a save."""
        names = [name.split(".") for name in self.spool.names(".job")]
        return [int(rank) for each, rank, _ in names if each == token]

    def files_of(self, token: str, rank: int) -> Path:
        """Return the directory with the extra files of a rank; it does not exist without such files."""
        return self.spool.folder / f"{token}.{rank}.files"

    def refuse_revoked(self, token: str) -> None:
        """Raise SaveFailed if the ranks have revoked the save, because a keeper missed its deadline."""
        if self.spool.get(f"{token}.revoked") is not None:
            raise SaveFailed(f"the save {token} was revoked: the ranks have stopped waiting for it")

    def state(self, token: str) -> State:
        """Return how far the keeper of this node has come with a save."""
        return self._read(f"{token}.state") or State()

    def published(self) -> dict[str, tuple[str, float]]:
        """Return the newest save that was published at each path: path -> token and recorded time. Saves whose end is
        no longer recorded are unknown."""
        tokens = [name.removesuffix(".state") for name in self.spool.names(".state")]
        ends = [(token, end) for token in tokens if (end := self.state(token).end) is not None and end.published]
        return {end.path: (token, end.time) for token, end in ends}

    # Written by the keeper

    def change(self, token: str, **fields: Any) -> None:
        """Set fields of the state of a save, and wake the threads that wait for them. Raises OSError."""
        with self._changed:
            self.spool.put(f"{token}.state", plain.encode(replace(self.state(token), **fields)))
            self._changed.notify_all()

    def part(self, token: str, rank: int, directory: Where | None) -> Part | None:
        """Return the part of a rank that was written to a directory (None: ``keeper.dir``); None if it was not."""
        part: Part | None = self._read(f"{token}.{rank}.part")
        return part if part is not None and part.directory == str(directory or "") else None

    def add_part(self, token: str, rank: int, part: Part) -> None:
        """Record that the part of a rank is written. Raises OSError."""
        self.spool.put(f"{token}.{rank}.part", plain.encode(part))

    def end(self, token: str, end: End) -> None:
        """Record how a save has ended, and remove the records that no process needs any more. Raises OSError."""
        self.change(token, end=end, written=True, local=end.local)
        # A save that has ended locally can be reopened (drain_newest), which needs its jobs and parts.
        kept = (".state",) if end.is_final else (".state", ".go", ".job", ".part")
        records = [name for name in self.spool.names("") if name.startswith(f"{token}.")]
        self.spool.drop(*(name for name in records if not name.endswith(kept)))
        ended = [name for name in self.spool.names(".state") if self.state(name.removesuffix(".state")).end is not None]
        self.spool.drop(*ended[:-_MOST_ENDS])

    def forget(self, token: str) -> None:
        """Remove the records without which no keeper can bring the save to its path any more. Called on the node of
        rank 0."""
        self.spool.drop(f"{token}.go", f"{token}.0.job")

    def forget_before(self, token: str, needed: Collection[str]) -> None:
        """Remove the jobs and parts of older saves that have ended, except for the tokens in ``needed``."""
        for name in self.spool.names(".job"):
            older = name.split(".")[0]
            if older < token and older not in needed and self.state(older).end is not None:
                self.spool.drop(name, f"{name.removesuffix('.job')}.part", f"{older}.go")

    def wait(self, token: str, milestone: str, seconds: float, known: float = math.inf) -> State:
        """Wait for news of a save: a milestone (a field of :class:`~dcp_plugin.tiers.journal_records.State`), its end,
        or more than ``known`` messages.

        Returns:
            The state of the save, also after ``seconds`` without news.

        Raises:
            SaveFailed: The journal has no records of the save.
        """
        # The records are looked up first: if the save ends in between, it has lost them, but has an end by then.
        if not self.ranks_of(token) and self.state(token).end is None:
            raise SaveFailed(f"this keeper has no record of the save {token}: its host copies are gone")

        def has_news() -> bool:
            state = self.state(token)
            return state.has_reached(milestone) or len(state.messages) > known

        with self._changed:
            self._changed.wait_for(has_news, seconds)
            return self.state(token)

    # The successor of a dead keeper

    def address(self) -> Address | None:
        """Return the address at which a keeper has answered other nodes; None if none has."""
        return cast("Address | None", self._read("keeper.address"))

    def set_address(self, address: Address) -> None:
        self.spool.put("keeper.address", plain.encode(address))
