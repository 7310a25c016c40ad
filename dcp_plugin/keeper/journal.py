"""The journal of a node: all state of its saves that survives a rank or a keeper. No other module knows its files.

==========================  ===========================================================================================
``<token>.<rank>.job``      the part of a save that a rank hands over: a :class:`~dcp_plugin.keeper.records.RankJob`
``<token>.<rank>.files/``   extra files of a framework
``<token>.go``              on the node of rank 0: all ranks have handed over; a :class:`~dcp_plugin.keeper.records.Go`
``<token>.<rank>.part``     this node has written the part of a rank
``<token>.free``            all nodes have written their parts: host copies may have changed
``<token>.tries``           the number of keepers that have begun the save
``<token>.reserved``        the token of the reservation at the path
``<token>.revoked``         the ranks write the save themselves: no keeper publishes it
``<token>.end``             how it has ended: an :class:`~dcp_plugin.keeper.records.End`
``keeper.keys``             the keys of the trainings, by name
``keeper.address``          where the keeper answers other nodes, so that its successor does, too
==========================  ===========================================================================================

They are in the directory of a :class:`~dcp_plugin.keeper.spool.Spool`, and appear complete. Ranks append jobs and a go,
or a revocation; the keeper appends the rest. A keeper that replaces a dead one replays them. They are in memory, which
outlives every process of the node, so there is nothing to sync.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dcp_plugin.errors import SaveFailed
from dcp_plugin.keeper.local_checkpoints import time_of
from dcp_plugin.keeper.records import End, Go, Part, Progress, RankJob
from dcp_plugin.keeper.spool import Spool
from dcp_plugin.keeper.wire import Address
from dcp_plugin.paths import Where

_MOST_ENDS = 64
_OF_A_SAVE = re.compile(r"[0-9a-f]{24}\.")


class Journal:
    """The journal in a spool."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self._progress: dict[str, Progress] = {}
        self._changed = threading.Condition()

    # Appended by ranks

    def hand_over(self, job: RankJob, files: Path | None) -> None:
        """Append the part of a rank.

        Args:
            files: A directory in the spool with the files beside the tensors.

        Raises:
            OSError: The memory is full, for one.
        """
        if files is not None:
            os.rename(files, self.files_of(job.token, job.rank))
        self.spool.put(f"{job.token}.{job.rank}.job", pickle.dumps(job, protocol=5))

    def go(self, go: Go) -> None:
        """Record that all ranks have handed a save over. Raises OSError."""
        self.spool.put(f"{go.token}.go", pickle.dumps(go))

    def take_back(self, token: str, rank: int) -> None:
        """Remove the part of a rank, of a save that was not handed over."""
        self.spool.drop(f"{token}.go", f"{token}.{rank}.job", f"{token}.{rank}.files")

    def revoke(self, token: str, rank: int) -> None:
        """Withdraw a save from the keepers. The files of the rank beside the tensors stay. Raises OSError."""
        self.spool.put(f"{token}.revoked", b"")
        self.spool.drop(f"{token}.go", f"{token}.{rank}.job")

    # Read by ranks and the keeper

    def newest_time(self) -> float:
        """Return the greatest recorded time of a save, in seconds since the epoch; 0 without saves."""
        return max((time_of(name) for name in self.spool.names("") if _OF_A_SAVE.match(name)), default=0.0)

    def ready(self) -> list[str]:
        """Return the saves that all ranks have handed over, oldest first, as far as their records are still here."""
        return [name.removesuffix(".go") for name in self.spool.names(".go")]

    def unfinished(self) -> list[str]:
        """Return those of the :meth:`ready` saves that have not ended."""
        return [token for token in self.ready() if self.progress(token).end is None]

    def in_flight(self) -> list[str]:
        """Return the saves that this node has a part of, and that have not ended, oldest first."""
        tokens = sorted({name.split(".")[0] for name in self.spool.names(".job")})
        return [token for token in tokens if self.progress(token).end is None]

    def go_of(self, token: str) -> Go:
        go: Go = pickle.loads(self.spool.get(f"{token}.go") or b"")
        return go

    def job(self, token: str, rank: int) -> RankJob:
        """Return the job of a rank. Raises SaveFailed if the rank has handed nothing over."""
        data = self.spool.get(f"{token}.{rank}.job")
        if data is None:
            raise SaveFailed(f"rank {rank} has not handed over its part of the save {token}")
        job: RankJob = pickle.loads(data)
        return job

    def ranks_of(self, token: str) -> list[int]:
        """Return the ranks of this node that have handed over their part of a save."""
        names = [name.split(".") for name in self.spool.names(".job")]
        return [int(rank) for each, rank, _ in names if each == token]

    def files_of(self, token: str, rank: int) -> Path:
        """Return the directory with the files of a rank beside the tensors; it does not exist without such files."""
        return self.spool.folder / f"{token}.{rank}.files"

    def reservation(self, token: str) -> str | None:
        data = self.spool.get(f"{token}.reserved")
        return None if data is None else data.decode()

    def is_free(self, token: str) -> bool:
        """Return whether the host copies of a save may have other bytes by now."""
        return self.spool.get(f"{token}.free") is not None

    def refuse_revoked(self, token: str) -> None:
        """Raise SaveFailed if the ranks write the save themselves, since a keeper has missed its deadline."""
        if self.spool.get(f"{token}.revoked") is not None:
            raise SaveFailed(f"the save {token} was revoked: the ranks have stopped waiting for it")

    def published(self) -> dict[str, tuple[str, float]]:
        """Return by path the token and the recorded time of the newest save there, of those whose end is known."""
        newest: dict[str, tuple[str, float]] = {}
        for name in self.spool.names(".end"):
            token = name.removesuffix(".end")
            if (end := self.progress(token).end) is not None and end.published:
                newest[end.path] = token, end.time
        return newest

    # Appended by the keeper

    def begin(self, token: str) -> int:
        """Count the keepers that begin with a save; return how many have before. Raises OSError."""
        before = int(self.spool.get(f"{token}.tries") or 0)
        self.spool.put(f"{token}.tries", str(before + 1).encode())
        return before

    def reserve(self, token: str, directory: Where) -> None:
        """Record the reservation at the path, so that the ranks can revoke it. Raises OSError."""
        self.spool.put(f"{token}.reserved", directory.stem.encode())

    def part(self, token: str, rank: int, directory: Where | None) -> Part | None:
        """Return the part of a rank that was written to a directory (None: ``local_dir``); None if it was not."""
        written, part = pickle.loads(self.spool.get(f"{token}.{rank}.part") or pickle.dumps((None, None)))
        return part if written == str(directory or "") else None

    def add_part(self, token: str, rank: int, directory: Where | None, part: Part) -> None:
        """Record that the part of a rank is written. Raises OSError."""
        self.spool.put(f"{token}.{rank}.part", pickle.dumps((str(directory or ""), part)))

    def free(self, token: str) -> None:
        """Record that the host copies of a save are not needed any more. Raises OSError."""
        self.spool.put(f"{token}.free", b"")
        self.reach(token, written=True)

    def end(self, token: str, end: End) -> None:
        """Record how a save has ended, and remove the records that nobody needs any more. Raises OSError."""
        self.spool.put(f"{token}.end", pickle.dumps(end))
        self.reach(token, end=end, written=True, local=end.local)
        kept = (".end",) if end.is_final else (".end", ".go", ".job", ".part")
        records = [name for name in self.spool.names("") if name.startswith(f"{token}.")]
        self.spool.drop(*(name for name in records if not name.endswith(kept)))
        for old in self.spool.names(".end")[:-_MOST_ENDS]:
            self.spool.drop(old)
            self._progress.pop(old.removesuffix(".end"), None)

    def reopen(self, token: str) -> None:
        """Let a save that had ended locally go on to its path."""
        self.spool.drop(f"{token}.end")
        with self._changed:
            self._progress[token] = Progress(written=True, local=True)

    def forget(self, token: str) -> None:
        """Remove what was handed over on the node of rank 0: the save is not brought to its path any more."""
        self.spool.drop(f"{token}.go", f"{token}.0.job")

    def forget_before(self, token: str, needed: Collection[str]) -> None:
        """Remove what was handed over for older saves that have ended, except for the tokens in ``needed``."""
        for name in self.spool.names(".job"):
            older = name.split(".")[0]
            if older < token and older not in needed and self.progress(older).end is not None:
                self.spool.drop(name, f"{name.removesuffix('.job')}.part")

    # Progress in this process

    def progress(self, token: str) -> Progress:
        """Return the stages that a save has reached on this node."""
        with self._changed:
            if token not in self._progress:
                end = None
                if (data := self.spool.get(f"{token}.end")) is not None:
                    end = pickle.loads(data)
                self._progress[token] = Progress() if end is None else Progress(True, end.local, end.copies, end)
            return self._progress[token]

    def reach(self, token: str, **stages: Any) -> None:
        """Set fields of the progress of a save, and wake the threads that wait for them."""
        with self._changed:
            self._progress[token] = replace(self.progress(token), **stages)
            self._changed.notify_all()

    def wait(self, token: str, stage: str, seconds: float) -> Progress:
        """Wait until a save has reached a stage (a field of :class:`Progress`), or has ended, but not longer than some
        seconds; return its progress.

        Raises:
            SaveFailed: The journal has no records of the save.
        """
        # In this order: a save that ends meanwhile loses its records, and has an end by then.
        if not self.ranks_of(token) and self.progress(token).end is None:
            raise SaveFailed(f"this keeper has no record of the save {token}: its host copies are gone")

        with self._changed:
            self._changed.wait_for(lambda: self.progress(token).has_reached(stage), seconds)
            return self.progress(token)

    # The successor of a dead keeper

    def keys(self) -> dict[str, bytes]:
        """Return the keys of the trainings that may connect, by name."""
        data = self.spool.get("keeper.keys")
        return {} if data is None else pickle.loads(data)

    def set_keys(self, keys: Mapping[str, bytes]) -> None:
        self.spool.put("keeper.keys", pickle.dumps(dict(keys)))

    def address(self) -> Address | None:
        """Return the address at which a keeper has answered other nodes; None if none has."""
        data = self.spool.get("keeper.address")
        return tuple(json.loads(data)) if data else None

    def set_address(self, address: Address) -> None:
        self.spool.put("keeper.address", json.dumps(address).encode())
