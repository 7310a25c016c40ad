"""The life of a keeper: it answers ranks and other keepers, and ends when no process needs it.

It ends when all ranks have left and no save is in flight; or when the training has died, its saves have ended, and no
rank has come back within ``keeper_linger`` seconds. On SIGTERM, which a cluster sends to the remaining processes of a
job, it finishes the saves in flight and ends. It stays in the control group of its job, and ends with that. It logs
unfinished saves in ``keeper.log``, and the next keeper of the same journal continues them.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from dcp_plugin.errors import CheckpointError, NoSharedMemory, SaveFailed
from dcp_plugin.keeper.coordinator import Coordinator
from dcp_plugin.keeper.journal import Journal
from dcp_plugin.keeper.local_checkpoints import LocalCheckpoints, shown
from dcp_plugin.keeper.locks import is_keeper
from dcp_plugin.keeper.node import Node
from dcp_plugin.keeper.records import End, Go, Peer
from dcp_plugin.keeper.requests import Requests
from dcp_plugin.keeper.server import Server
from dcp_plugin.keeper.spool import Spool
from dcp_plugin.keeper.wire import NO_ADDRESS, Address, Channel, own_address
from dcp_plugin.paths import Where, as_path
from dcp_plugin.ranks import Attempt

logger = logging.getLogger("dcp_plugin.keeper")

_TICK = 0.5
_NEIGHBOUR = 10.0
"""Seconds in which another keeper has to answer."""
_MOST_NEWS = 1000
_MOST_LOG = 1 << 20
_MOST_KEYS = 8
_NEVER_CALLED = 60.0
"""Seconds after the death of the training in which the coordinator of a save has to ask for this node's part."""
_OF_LEADERS = ("write", "free", "take", "replicate", "complete", "drain", "end", "reopen")
"""What the keeper that leads a save asks a :class:`~dcp_plugin.keeper.node.Node` for."""


@dataclass
class _Left:
    """A save whose ranks on this node are gone, and which this keeper does not lead."""

    client: str
    leads: bool
    limit: float
    """Seconds in which whoever leads it has to ask for something."""
    heard: float


class Keeper:
    """Args:
    held: The descriptor of its lock, see :func:`~dcp_plugin.keeper.locks.become_keeper`.
    linger: Seconds, see ``keeper_linger``.
    """

    def __init__(self, spool: Spool, held: int, linger: float) -> None:
        self.spool, self._held, self._linger = spool, held, linger
        self._clients: list[str] = []
        self._alone_since = time.monotonic()
        self._has_crashed = True
        """Whether the training may come back: it has not ended as it should."""
        self._settling: set[str] = set()
        """The saves that a restart has waited for."""
        self._to_end = False
        self._lock = threading.Lock()
        self._news: deque[tuple[int, str]] = deque(maxlen=_MOST_NEWS)
        self._has_news = threading.Condition()
        self._keys: dict[str, bytes] = {}
        self._tcp: Server | None = None
        self._left: dict[str, _Left] = {}
        self._gone: Path | None = None
        _log_to(spool.folder / "keeper.log")
        self._journal = Journal(spool)
        self.node = Node(self._journal)
        self.coordinator = Coordinator(self.node, lambda: bool(self._clients), self.say)
        self._calls: dict[str, Callable[..., Any]] = {
            "attach": self._attach,
            "begin": self.coordinator.begin,
            "wait": self._journal.wait,
            "drain_newest": self._drain_newest,
            "forget": self._forget,
            "settle": self._settle,
            **{what: self._of_leader(getattr(self.node, what)) for what in _OF_LEADERS},
        }
        """What ranks of this node, and other keepers, may ask for."""
        self._streams: dict[str, Callable[..., None]] = {"news": self._send_news, "put": self._put}

    def say(self, text: str) -> None:
        """Send a message to the ranks, and log it."""
        text = shown(text)
        logger.warning("%s", text)
        with self._has_news:
            number = self._news[-1][0] + 1 if self._news else 1
            self._news.append((number, text))
            self._has_news.notify_all()

    def run(self) -> int:
        """Run until no process needs the keeper. Return the exit status."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._end_soon)
        logger.info("keeper %d of %s", os.getpid(), self.spool.folder)
        for gone in self.spool.folder.parent.glob(".*.gone"):  # of one that was killed while it deleted them
            shutil.rmtree(gone, ignore_errors=True)
        self._listen_as_before()
        server = Server(self.spool.socket, {}, self._calls, self._streams)
        while not self._is_over():
            time.sleep(_TICK)
        server.close()
        if self._tcp is not None:
            self._tcp.close()
        if self._gone is not None:
            if not self._has_crashed:
                self.node.leave_memory()
            shutil.rmtree(self._gone, ignore_errors=True)
        logging.shutdown()
        return 0

    def _end_soon(self, number: int, frame: Any) -> None:
        self._to_end = True

    def _is_over(self) -> bool:
        if not is_keeper(
            self.spool.folder, self._held
        ):  # no process can reach this keeper, and the ranks start another
            logger.error("%s was deleted", self.spool.folder)
            return True
        try:
            self._look_around()
        except Exception:  # a disk that is full, for one: it must not end what others wait for
            logger.exception("a periodic check has failed")
        alone = time.monotonic() - self._alone_since
        if self._clients or self.coordinator.busy or self._journal.in_flight():
            return False
        if self._has_crashed and not self._to_end and alone <= self._linger:
            return False
        with self._lock:
            try:
                self._gone = self.spool.take_away()
            except (OSError, NoSharedMemory):
                logger.exception("cannot remove %s now", self.spool.folder)
            return self._gone is not None

    def _look_around(self) -> None:
        self._clients, has_death = self.spool.clients()
        if self._clients:
            self._alone_since = time.monotonic()
            self._has_crashed = False
        self._has_crashed |= has_death
        self.coordinator.begin()
        in_flight = self._journal.in_flight()
        self._left = {token: self._left.get(token) or self._left_of(token) for token in in_flight}
        self._give_up_left()
        self.spool.drop_host_copies({left.client for left in self._left.values()})

    def _left_of(self, token: str) -> _Left:
        try:
            job = self._journal.job(token, self._journal.ranks_of(token)[0])
            limit = _NEVER_CALLED + (job.config.timeout if self._journal.is_free(token) else 0.0)
            return _Left(job.client, job.beside_rank_zero, limit, time.monotonic())
        except Exception:  # it cannot be read, or has just ended
            return _Left("", False, 0.0, time.monotonic())

    def _give_up_left(self) -> None:
        """End saves that cannot complete: the training died before all ranks had handed over, or the node that leads
        the save is gone."""
        for token, left in self._left.items():
            if self.coordinator.leads(token) or self.spool.is_used_by(left.client):
                left.heard = time.monotonic()
            elif left.leads or time.monotonic() - left.heard > left.limit:
                logger.warning(
                    "the save %s is dropped: the training has died before all ranks had handed it over", token
                )
                error = SaveFailed("the training has died before all ranks had handed it over")
                local = self._journal.progress(token).local
                self.node.end(token, self._journal.ranks_of(token), End(False, local, error))

    # Requests

    def _of_leader(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a request that also notes that the leader of a save lives."""

        def call(token: str, *args: Any) -> Any:
            self._hear(token)
            return work(token, *args)

        return call

    def _hear(self, token: str) -> None:
        if (left := self._left.get(token)) is not None:
            left.heard = time.monotonic()

    def _put(self, channel: Channel, token: str, *args: Any) -> None:
        """Take a file as :meth:`Node.put` does; a neighbour sends it because the leader of the save has asked."""
        self._hear(token)
        self.node.put(channel, token, *args)

    def _attach(self, linger: float, job: tuple[str, bytes] | None) -> tuple[str, Address] | None:
        """Return the host and the address for other nodes to a new rank; None if this keeper has just ended.

        Args:
            job: The name and the key of a training that has several nodes.
        """
        with self._lock:
            if self._gone is not None:
                return None
            self._linger = linger
            self._has_crashed = False  # a rank that comes and leaves between two looks has not crashed either
            if job is not None:
                self._add_key(*job)
                self._tcp = self._tcp or self._listen()
        return socket.gethostname(), self._tcp.address if self._tcp else NO_ADDRESS

    def _add_key(self, job: str, key: bytes) -> None:
        if self._keys.get(job) != key:
            self._keys.pop(job, None)
            self._keys[job] = key
            for old in list(self._keys)[:-_MOST_KEYS]:
                del self._keys[old]
            self._journal.set_keys(self._keys)

    def _listen_as_before(self) -> None:
        """Listen for other keepers as the dead keeper before did: they may lead saves that it had in flight."""
        try:
            if self._journal.in_flight() and (keys := self._journal.keys()):
                self._keys.update(keys)
                self._tcp = self._listen()
        except Exception:
            logger.exception("other keepers cannot reach this one")

    def _listen(self) -> Server:
        """Listen at the address of the previous keeper, if any: other keepers may be about to use it."""
        for address in (self._journal.address(), (own_address(), 0)):
            if address is not None:
                with suppress(OSError):
                    server = Server(address, self._keys, self._calls, self._streams)
                    self._journal.set_address(server.address)
                    return server
        raise SaveFailed(f"the keeper on {socket.gethostname()} cannot listen for other nodes")

    def _send_news(self, channel: Channel, since: int, seconds: float) -> None:
        """Reply with the news after number ``since``, once there are any, or with none after some seconds."""

        def fresh() -> list[tuple[int, str]]:
            return [one for one in self._news if one[0] > since]

        deadline = time.monotonic() + seconds
        with self._has_news:
            while not fresh() and not channel.is_closed() and time.monotonic() < deadline:
                self._has_news.wait(_TICK)
            news = fresh()
        channel.send(("ok", news))

    def _drain_newest(self, token: str, coordinator: Peer | None, key: bytes) -> bool:
        """Bring a save to its path, here or by the keeper that leads it; return whether it is there or will be."""
        if self.coordinator.drain_newest(token):
            return True
        if coordinator is None or self._tcp is None or coordinator.address == self._tcp.address:
            return False
        return bool(_ask_keeper(coordinator.address, key, "drain_newest", token, None, b"").value)

    def _forget(self, path: str, root: Where, local_dir: str, go: Go | None) -> None:
        """Delete the files and records for saves to a path, of this node, and of the other nodes of a save."""
        self.coordinator.forget(path)
        LocalCheckpoints(Path(local_dir), root).forget(as_path(path))
        if go is None:
            return
        for peer in [node[0] for node in go.nodes()[1:]]:
            try:
                _ask_keeper(peer.address, go.key, "forget", path, root, peer.local_dir, None).get()
            except (OSError, CheckpointError) as error:
                self.say(f"{peer.host} has not deleted what it has of {path} in {peer.local_dir}: {error}")

    def _settle(self, seconds: float) -> list[str]:
        """Wait until every save that was handed over is where a restart looks for it, or has failed.

        Returns:
            Messages about the saves that are not there.
        """
        deadline = time.monotonic() + seconds
        self._settling |= set(self._journal.in_flight())
        while (left := self._unsettled()) and time.monotonic() < deadline:
            self._journal.wait(left[0], "local", min(1.0, max(0.0, deadline - time.monotonic())))
        ends = [end for token in self._settling if (end := self._journal.progress(token).end) is not None]
        lost = [f"a save that was handed over before has failed: {end.error}" for end in ends if end.has_failed]
        return lost + [f"{len(left)} saves that were handed over before are not written yet"] * bool(left)

    def _unsettled(self) -> list[str]:
        return [token for token in self._journal.in_flight() if not self._journal.progress(token).local]


def _ask_keeper(address: Address, key: bytes, what: str, *args: Any) -> Attempt[Any]:
    """Return the reply of another keeper. Raises OSError: it does not answer."""
    with closing(Requests(address, key)) as keeper:
        return keeper.ask(_NEIGHBOUR, what, *args)


def _log_to(path: Path) -> None:
    handler = RotatingFileHandler(path, maxBytes=_MOST_LOG, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("dcp_plugin")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
