"""The life of a keeper: it answers ranks and other keepers, and ends when nobody needs it.

It ends when all ranks have said goodbye and nothing is in flight; or when the training has died, all that it had handed
over is done, and nobody has come back within ``keeper_linger`` seconds. SIGTERM, as a cluster sends it to all that a
job has left, has it finish what is in flight and end. It never leaves the control group of its job, so what ends that
ends it as well. Whatever it leaves undone is said in ``keeper.log``, and taken up by the next keeper of the same spool.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_plugin.errors import CheckpointError, SaveFailed
from dcp_plugin.keeper.coordinator import Coordinator
from dcp_plugin.keeper.node import Node
from dcp_plugin.keeper.spool import SLAB, Peer, Spool
from dcp_plugin.tiers.wire import Address, Channel, Server, connect, own_address

logger = logging.getLogger("dcp_plugin.keeper")

_TICK = 0.5
_MOST_NEWS = 1000
_MOST_LOG = 1 << 20
_NEVER_CALLED = 60.0
"""Seconds after the death of the training in which the coordinator of a save has to ask for this node's part."""
_ASKED = {"write", "take", "replicate", "complete", "drain", "end", "forget", "reopen", "drain_newest"}
"""What other keepers may ask a :class:`~dcp_plugin.keeper.node.Node` for."""


@dataclass(frozen=True)
class _Client:
    """A rank that is connected."""

    rank: int
    job: str
    pid: int


class Keeper:
    """Args:
    spool: Locked.
    linger: Seconds, see ``keeper_linger``.
    """

    def __init__(self, spool: Spool, linger: float) -> None:
        self.spool, self._linger = spool, linger
        self._clients: dict[Channel, _Client] = {}
        self._alone_since = time.monotonic()
        self._told_goodbye = False
        self._to_end = False
        self._ended = False
        self._lock = threading.Lock()
        self._news: deque[tuple[int, str]] = deque(maxlen=_MOST_NEWS)
        self._has_news = threading.Condition()
        self._keys: dict[str, bytes] = {}
        self._tcp: Server | None = None
        self._last_heard = time.monotonic()
        _log_to(spool.folder / "keeper.log")
        self.node = Node(spool)
        self.coordinator = Coordinator(self.node, lambda: bool(self._clients), self.say)

    def say(self, text: str) -> None:
        """Tell the ranks, and the log."""
        logger.warning("%s", text)
        with self._has_news:
            number = self._news[-1][0] + 1 if self._news else 1
            self._news.append((number, text))
            self._has_news.notify_all()

    def run(self) -> int:
        """Until nobody needs it. Returns the exit status."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._end_soon)
        server = Server(self.spool.socket, {}, self._serve_rank)
        logger.info("keeper %d of %s", os.getpid(), self.spool.folder)
        for name in self.spool.names(".go"):  # of a keeper that died
            with suppress(CheckpointError):
                self.coordinator.begin(name.split(".")[0])
        while not self._is_over():
            time.sleep(_TICK)
        server.close()
        if self._tcp is not None:
            self._tcp.close()
        left = self.node.in_flight()
        if left:
            logger.error("ended with %s in flight", ", ".join(left))
        else:
            if self._told_goodbye:
                self.node.leave_memory()
            shutil.rmtree(self.spool.folder, ignore_errors=True)
        logging.shutdown()
        return 0

    def _end_soon(self, number: int, frame: Any) -> None:
        self._to_end = True

    def _is_over(self) -> bool:
        with self._lock:
            if self._clients:
                return False
            alone = time.monotonic() - self._alone_since
        if self.coordinator.busy:
            return False
        if self.node.in_flight():
            quiet = min(alone, time.monotonic() - self._last_heard)
            return quiet > _NEVER_CALLED
        with self._lock:
            if self._clients:
                return False
            self._give_back_slabs()
            self._ended = self._told_goodbye or self._to_end or alone > self._linger
            return self._ended

    def _give_back_slabs(self) -> None:
        """Those of ranks that are gone: who comes back makes its own."""
        self.spool.drop(*(name for name in os.listdir(self.spool.folder) if name.startswith(SLAB)))

    # Ranks of this node

    def _serve_rank(self, channel: Channel) -> None:
        channel.timeout(None)
        try:
            while True:
                what, args = channel.receive()
                try:
                    answer: Any = ("ok", getattr(self, f"_on_{what}")(channel, *args))
                except (CheckpointError, OSError) as error:
                    answer = ("error", error)
                channel.send(answer)
        finally:
            with self._lock:
                if self._clients.pop(channel, None) is not None and not self._clients:
                    self._alone_since = time.monotonic()

    def _on_attach(
        self, channel: Channel, rank: int, job: str, pid: int, key: bytes, linger: float, reachable: bool
    ) -> dict[str, Any]:
        """A rank of a training is there, until the connection ends."""
        with self._lock:
            if self._ended:
                raise ConnectionAbortedError("this keeper has just ended")
            others = {one.job for one in self._clients.values()} - {job}
            if others and job:
                pids = sorted(one.pid for one in self._clients.values() if one.job != job)
                raise SaveFailed(
                    f"another training on {socket.gethostname()} (pid {', '.join(map(str, pids))}) saves to the same "
                    f"folder of checkpoints with the same local_dir: give one of them another"
                )
            self._clients[channel] = _Client(rank, job, pid)
            self._told_goodbye, self._linger, self._keys[job] = False, linger, key
            if reachable and self._tcp is None:
                self._tcp = self._listen()
        address = self._tcp.address if self._tcp else ("127.0.0.1", 0)
        return {"address": address, "host": socket.gethostname(), "pid": os.getpid()}

    def _listen(self) -> Server:
        """At the address of the keeper before, if there was one: other keepers may be about to ask it."""
        noted = self.spool.get("keeper.address")
        before: Address | None = tuple(json.loads(noted)) if noted else None
        for address in (before, (own_address(), 0)):
            if address is not None:
                with suppress(OSError):
                    server = Server(address, self._keys, self._serve_keeper)
                    self.spool.put("keeper.address", json.dumps(server.address).encode())
                    return server
        raise SaveFailed(f"the keeper on {socket.gethostname()} cannot listen for other nodes")

    def _on_detach(self, channel: Channel, all_over: bool) -> None:
        with self._lock:
            self._clients.pop(channel, None)
            self._alone_since = time.monotonic()
            self._told_goodbye = all_over

    def _on_news(self, channel: Channel, since: int, seconds: float) -> list[tuple[int, str]]:
        def fresh() -> list[tuple[int, str]]:
            return [one for one in self._news if one[0] > since]

        deadline = time.monotonic() + seconds
        with self._has_news:
            while not fresh() and not channel.is_closed() and time.monotonic() < deadline:
                self._has_news.wait(_TICK)
            return fresh()

    def _on_go(self, channel: Channel, token: str) -> None:
        self.coordinator.begin(token)

    def _on_wait(self, channel: Channel, token: str, stage: str, seconds: float) -> Any:
        return self.node.wait(token, stage, seconds)

    def _on_drain_newest(self, channel: Channel, token: str, coordinator: Peer | None, key: bytes) -> bool:
        if self.coordinator.drain_newest(token):
            return True
        if coordinator is None or self._tcp is None or coordinator.address == self._tcp.address:
            return False
        with connect(coordinator.address, key, _TICK * 20) as there:
            there.timeout(None)
            there.send(("drain_newest", (token,)))
            answer, value = there.receive()
        return answer == "ok" and bool(value)

    def _on_forget(self, channel: Channel, path: str, root: Any, local_dir: str) -> None:
        self.node.forget("", path, root, local_dir)

    def _on_settle(self, channel: Channel, seconds: float) -> list[str]:
        """Wait until nothing that was handed over is on its way to where a restart would look for it."""
        deadline = time.monotonic() + seconds
        while (left := self._unsettled()) and time.monotonic() < deadline:
            self.node.wait(left[0], "local", min(1.0, max(0.0, deadline - time.monotonic())))
        return self._unsettled()

    def _unsettled(self) -> list[str]:
        return [token for token in self.node.in_flight() if not self.node.known(token).local]

    # Other keepers

    def _serve_keeper(self, channel: Channel) -> None:
        channel.timeout(None)
        while True:
            what, args = channel.receive()
            self._last_heard = time.monotonic()
            if what == "put":
                self.node.put(channel, *args)
                continue
            try:
                if what not in _ASKED:
                    raise SaveFailed(f"a keeper does not {what}")
                asked = self.coordinator if what == "drain_newest" else self.node
                answer: Any = ("ok", getattr(asked, what)(*args))
            except (CheckpointError, OSError) as error:
                answer = ("error", error)
            channel.send(answer)


def _log_to(path: Path) -> None:
    with suppress(OSError):
        if path.stat().st_size > _MOST_LOG:
            path.replace(path.with_suffix(".log.old"))
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("dcp_plugin")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
