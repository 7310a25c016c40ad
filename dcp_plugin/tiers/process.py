"""The life of a keeper: it answers ranks and other keepers, and ends when no process needs it.

It ends in three cases, each after the saves in flight have ended:

- all ranks have left,
- the training has died, and has not restarted within ``keeper.linger`` seconds,
- the training has died, and SIGTERM arrives, which a cluster sends to the remaining processes of a job.

It also ends if its spool is deleted, because no process can reach it then. It stays in the control group of its job,
and is killed with that. The next keeper of the same journal continues unfinished saves.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from dcp_plugin.core.errors import CheckpointError, NoSharedMemory, SaveFailed, logger
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.paths import Where, as_path
from dcp_plugin.core.ranks.collectives import Attempt
from dcp_plugin.tiers.coordinator import Coordinator
from dcp_plugin.tiers.journal import Journal
from dcp_plugin.tiers.journal_records import End, Peer
from dcp_plugin.tiers.local_checkpoints import LocalCheckpoints
from dcp_plugin.tiers.locks import is_keeper
from dcp_plugin.tiers.node import Node
from dcp_plugin.tiers.server import Server
from dcp_plugin.tiers.spool import Spool
from dcp_plugin.tiers.wire import NO_ADDRESS, Address, Channel, connect, own_address

_TICK = 0.5
"""Seconds between two checks whether the keeper is still needed."""
_NEIGHBOUR = 10.0
"""Seconds in which another keeper has to answer."""
_MOST_LOG = 1 << 20
"""Bytes of ``keeper.log``, of which one earlier file is kept."""
_NEVER_CALLED = 60.0
"""Seconds after the death of the training in which the keeper that leads a save has to ask for this node's part."""
_OF_LEADERS = ("write", "free", "take", "replicate", "complete", "drain", "end", "reopen")
"""Requests of the keeper that leads a save. Each is a method of :class:`~dcp_plugin.tiers.node.Node`."""


@dataclass
class _InFlight:
    """A save in flight of which this node has a part."""

    client: str
    """The client of a rank that has handed its part over on this node."""
    is_led_here: bool
    """True if this keeper leads the save."""
    limit: float
    """Seconds after the last sign of life in which the keeper that leads the save has to make a request."""
    heard: float
    """Time of the last sign of life of the ranks or of that keeper, on the monotonic clock."""


class KeeperProcess:
    """Process of a keeper: its servers, its coordinator, and the periodic checks that decide when it ends.

    Args:
        held: The descriptor of its lock, see :func:`~dcp_plugin.tiers.locks.become_keeper`.
        linger: Seconds, see :class:`~dcp_plugin.Keeper`.
    """

    def __init__(self, spool: Spool, held: int, linger: float) -> None:
        self.spool, self._held, self._linger = spool, held, linger
        self._clients: list[str] = []
        self._alone_since = time.monotonic()
        self._has_crashed = True
        """True if the training may restart, because it has not ended with ``close``."""
        self._to_end = False
        self._lock = threading.Lock()
        self._keys: set[bytes] = set()
        """The keys of the trainings whose keepers on other nodes may connect."""
        self._tcp: Server | None = None
        self._in_flight: dict[str, _InFlight] = {}
        """The saves of :meth:`.Journal.in_flight`, by token."""
        self._is_gone = False
        """True once the spool is no longer where ranks look for it."""
        _log_to(spool.folder / "keeper.log")
        self._journal = Journal(spool)
        self.node = Node(self._journal)
        self.coordinator = Coordinator(self.node, lambda: bool(self._clients))
        self._calls: dict[str, Callable[..., Any]] = {
            "attach": self._attach,
            "begin": self.coordinator.begin,
            "wait": self._journal.wait,
            "drain_newest": self._drain_newest,
            "forget": self._forget,
            **{what: self._of_leader(getattr(self.node, what)) for what in _OF_LEADERS},
        }
        """The requests that ranks of this node and other keepers may send."""
        self._streams: dict[str, Callable[..., None]] = {"put": self._put}

    def run(self) -> int:
        """Run until no process needs the keeper. Return the exit status."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._end_soon)
        logger.info("keeper %d of %s", os.getpid(), self.spool.folder)
        with suppress(OSError), posix.OwnFolder(self.spool.folder.parent) as base:
            for gone in base.path.glob(".*.gone"):  # garbage of a keeper that was killed while it deleted its spool
                base.delete(gone.name)
        self._listen_as_before()
        server = Server(self.spool.socket, (), self._calls, self._streams)
        while not self._is_over():
            time.sleep(_TICK)
        server.close()
        if self._tcp is not None:
            self._tcp.close()
        if self._is_gone:
            if not self._has_crashed:
                self.node.free_memory()
            with suppress(OSError), posix.OwnFolder(self.spool.folder.parent) as base:
                base.delete(self.spool.folder.name)
        logging.shutdown()
        return 0

    def _end_soon(self, number: int, frame: Any) -> None:
        self._to_end = True

    def _is_over(self) -> bool:
        """Do the periodic checks. Return whether the keeper ends, because its spool was deleted, or is taken away
        now."""
        # No process can reach a keeper without its spool, and the ranks start another one.
        if not is_keeper(self.spool.folder, self._held):
            logger.error("%s was deleted", self.spool.folder)
            return True
        try:
            self._check()
        except Exception:  # for example, a full disk must not end a keeper that others wait for
            logger.exception("a periodic check has failed")
        alone = time.monotonic() - self._alone_since
        may_come_back = self._has_crashed and not self._to_end and alone <= self._linger
        if may_come_back or self._clients or self.coordinator.tokens() or self._journal.in_flight():
            return False
        with self._lock:  # so that no rank attaches to a keeper that has just ended
            try:
                self._is_gone = self.spool.take_away()
            except (OSError, NoSharedMemory):
                logger.exception("cannot remove %s now", self.spool.folder)
            return self._is_gone

    def _check(self) -> None:
        """Find the ranks that are alive, begin new saves, and end saves that cannot complete."""
        self._clients, has_death = self.spool.clients()
        if self._clients:
            self._alone_since = time.monotonic()
            self._has_crashed = False
        self._has_crashed |= has_death
        self.coordinator.begin()
        in_flight = self._journal.in_flight()
        self._in_flight = {token: self._in_flight.get(token) or self._read(token) for token in in_flight}
        self._give_up_orphans()
        self.spool.drop_host_copies({save.client for save in self._in_flight.values()})

    def _read(self, token: str) -> _InFlight:
        """Return a save in flight. If its job cannot be read, its limit is 0, so the keeper ends it."""
        try:
            job = self._journal.job(token, self._journal.ranks_of(token)[0])
            limit = _NEVER_CALLED + (job.config.timeout if self._journal.state(token).written else 0.0)
            return _InFlight(job.client, job.beside_rank_zero, limit, time.monotonic())
        except Exception:  # the job cannot be read, or the save has just ended
            return _InFlight("", False, 0.0, time.monotonic())

    def _give_up_orphans(self) -> None:
        """End saves that cannot complete, because the training died before all ranks had handed over, or because the
        node that leads the save is gone."""
        handed_over = self._journal.ready()  # saves that this keeper leads, and will finish without any rank
        for token, save in self._in_flight.items():
            if token in handed_over or self.spool.is_used_by(save.client):
                save.heard = time.monotonic()
            elif save.is_led_here or time.monotonic() - save.heard > save.limit:
                logger.warning(
                    "the save %s is dropped: the training has died before all ranks had handed it over", token
                )
                error = SaveFailed("the training has died before all ranks had handed it over")
                local = self._journal.state(token).local
                self.node.end(token, self._journal.ranks_of(token), End(False, local, error))

    # Requests

    def _of_leader(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a request that also notes a sign of life of the keeper that leads the save."""

        def call(token: str, *args: Any) -> Any:
            self._hear(token)
            return work(token, *args)

        return call

    def _hear(self, token: str) -> None:
        if (save := self._in_flight.get(token)) is not None:
            save.heard = time.monotonic()

    def _put(self, channel: Channel, token: str, *args: Any) -> None:
        """Take a file as :meth:`Node.put` does. It is a sign of life of the keeper that leads the save, which has asked
        the neighbour to send the file."""
        self._hear(token)
        self.node.put(channel, token, *args)

    def _attach(self, linger: float, key: bytes | None) -> tuple[str, Address] | None:
        """Attach a rank. Return the host and the address for other nodes; None if this keeper has just ended.

        Args:
            key: The key of a training that has several nodes.
        """
        with self._lock:
            if self._is_gone:
                return None
            self._linger = linger
            self._has_crashed = False  # a rank may attach and leave between two checks, which is no crash
            if key is not None:
                self._keys.add(key)
                self._tcp = self._tcp or self._listen()
        return socket.gethostname(), self._tcp.address if self._tcp else NO_ADDRESS

    def _listen_as_before(self) -> None:
        """Listen for other keepers if the dead keeper before has done so: they may lead saves that were in flight."""
        try:
            for token in self._journal.in_flight():
                self._keys.add(self._journal.job(token, self._journal.ranks_of(token)[0]).key)
            if self._keys and self._journal.address() is not None:
                self._tcp = self._listen()
        except Exception:
            logger.exception("other keepers cannot reach this one")

    def _listen(self) -> Server:
        """Listen at the address of the previous keeper if possible, since other keepers may be about to use it."""
        for address in (self._journal.address(), (own_address(), 0)):
            if address is not None:
                with suppress(OSError):
                    server = Server(address, self._keys, self._calls, self._streams)
                    self._journal.set_address(server.address)
                    return server
        raise SaveFailed(f"the keeper on {socket.gethostname()} cannot listen for other nodes")

    def _drain_newest(self, token: str, coordinator: Peer | None, key: bytes) -> bool:
        """Have a save copied to its path, by this keeper or by the one that leads it. Return whether it is at its path
        or will be."""
        if self.coordinator.drain_newest(token):
            return True
        if coordinator is None or self._tcp is None or coordinator.address == self._tcp.address:
            return False
        return bool(_ask_keeper(coordinator.address, key, "drain_newest", token, None, b"").value)

    def _forget(self, path: str, root: Where, local_dir: str, others: list[Peer], key: bytes) -> list[str]:
        """Delete the files and records of saves to a path, on this node and on others.

        Args:
            others: The first rank of each other node.

        Returns:
            Messages about the nodes that have not deleted theirs.
        """
        self.coordinator.forget(path)
        LocalCheckpoints(Path(local_dir), root).forget(as_path(path))
        problems = []
        for peer in others:
            try:
                _ask_keeper(peer.address, key, "forget", path, root, peer.local_dir, [], b"").get()
            except (OSError, CheckpointError) as error:
                problems.append(f"{peer.host} has not deleted what it has of {path} in {peer.local_dir}: {error}")
        return problems


def _ask_keeper(address: Address, key: bytes, what: str, *args: Any) -> Attempt[Any]:
    """Return the reply of another keeper. Raises OSError if it does not answer."""
    with closing(connect(address, key)) as keeper:
        return keeper.ask(_NEIGHBOUR, what, *args)


def _log_to(path: Path) -> None:
    handler = RotatingFileHandler(path, maxBytes=_MOST_LOG, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
