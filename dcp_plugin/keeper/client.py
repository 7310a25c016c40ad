"""A rank's side of its keeper: it starts one if none is alive, hands saves over, and waits for what becomes of them.

A keeper that dies is started again at once, by whichever rank of the node notices first, and goes on with what was
handed over: all of that is in the spool.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import NoSharedMemory, RankFailure, SaveFailed
from dcp_plugin.keeper.inventory import node_of
from dcp_plugin.keeper.spool import End, Go, Peer, RankJob, Spool
from dcp_plugin.keeper.wire import Channel, connect, new_key
from dcp_plugin.paths import Where, resolved
from dcp_plugin.ranks import Attempt, Ranks

logger = logging.getLogger("dcp_plugin")

_START_SECONDS = 120.0
"""In which a keeper has to answer: it imports torch, maybe from a slow file system, beside a training that starts."""
_POLL = 30.0
_ANSWER = 60.0
_FORGET = 60.0

_this_job = uuid.uuid4().hex
"""Stands for the training that this process is rank 0 of."""


@dataclass(frozen=True)
class _Job:
    """What all ranks of a training know."""

    name: str
    key: bytes
    nodes: int
    first: str
    """The node of rank 0."""


class KeeperClient:
    """The keeper of this rank's node, as this rank sees it. Collective to make.

    Args:
        config: Of the checkpointer.
        root: The folder of checkpoints of the first save.
        ranks: All that save together.

    Raises:
        NoSharedMemory: On every rank: some node has none.
    """

    def __init__(self, config: CheckpointConfig, root: Where, ranks: Ranks) -> None:
        self._config, self.rank, self._root = config, ranks.rank, resolved(root)
        self._solo = ranks.size == 1
        self._closing = False
        self._last_news = 0
        self._attached: Channel | None = None
        self._info: dict[str, Any] | None = None
        self._is_attached = threading.Event()
        self._failure: SaveFailed | None = None
        self._coordinator: Peer | None = None
        self._go: Go | None = None
        """On rank 0: the last save that was handed over."""

        def prepare() -> str:
            self.spool = Spool.of(self._root, config.local_dir)
            self.spool.enter()
            self.spool.put("root", str(self._root).encode())
            return node_of(Path(config.local_dir or self.spool.folder))

        def met(nodes: list[str]) -> _Job:
            return _Job(f"{_this_job}-{os.getpid()}", new_key(), len(set(nodes)), nodes[0])

        self._node = ""

        def tell() -> str:
            self._node = prepare()
            return self._node

        try:
            self._job = ranks.combine(f"find the keepers for {root}", tell, met)
        except BaseException:
            if hasattr(self, "spool"):
                self.spool.leave()
            raise
        self.beside_rank_zero = self._job.first == self._node
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._stay, name="dcp-keeper", daemon=True)
        self._thread.start()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory that the keeper sees. Raises NoSharedMemory."""
        return self.spool.allocate(self.rank, nbytes)

    # The connection that says that this rank is alive

    def _stay(self) -> None:
        """Start the keeper if there is none, stay connected, and pass on what it says, until :meth:`close`."""
        deaths = 0
        while not self._closing:
            try:
                channel = self._open()
                self._attached = channel
                try:
                    self._info = self._ask(channel, "attach", *self._who())
                except SaveFailed as error:
                    self._failure = error
                    self._is_attached.set()
                    return
                if self._info is None:
                    raise ConnectionAbortedError("it has just ended")
                self._is_attached.set()
                while not self._closing:
                    channel.timeout(None)
                    for number, text in self._ask(channel, "news", self._last_news, _POLL):
                        self._last_news = number
                        if self.rank == 0 or self._job.nodes > 1:
                            logger.warning("keeper of rank %d: %s", self.rank, text)
            except NoSharedMemory as error:
                self._failure = error
                self._is_attached.set()
                return
            except Exception as error:
                self._is_attached.clear()
                if self._attached is not None:
                    self._attached.close()
                if self._is_closing():
                    return
                deaths += 1
                self._last_news = 0
                logger.warning("the keeper of rank %d has died (%s); another one goes on", self.rank, error)
                time.sleep(min(5.0, 0.1 * 2 ** min(deaths, 10)))

    def _is_closing(self) -> bool:
        return self._closing

    def _who(self) -> tuple[Any, ...]:
        name = "" if self._solo else self._job.name
        return self.rank, name, os.getpid(), self._job.key, self._config.keeper_linger, self._job.nodes > 1

    def _open(self) -> Channel:
        """A connection to the keeper, which is started if there is none.

        Raises:
            NoSharedMemory: It does not come.
        """
        deadline = time.monotonic() + _START_SECONDS
        started: subprocess.Popen[bytes] | None = None
        while True:
            try:
                return connect(self.spool.socket, b"", _ANSWER)
            except OSError as error:
                if self._closing:
                    raise
                if started is not None and started.poll() not in (None, 0):
                    raise NoSharedMemory(f"the keeper ended at once: see {self.spool.folder}/start.log") from error
                if time.monotonic() > deadline:
                    raise NoSharedMemory(f"no keeper answers: see {self.spool.folder}/start.log") from error
                if started is None or (started.poll() is not None and not self.spool.is_kept()):
                    started = start_keeper(self.spool, self._config.keeper_linger)
                time.sleep(0.02)

    @staticmethod
    def _ask(channel: Channel, what: str, *args: Any) -> Any:
        channel.send((what, args))
        answer, value = channel.receive()
        if answer == "error":
            raise value
        return value

    def _call(self, what: str, *args: Any, wait: float = 0.0) -> Any:
        """Ask the keeper over a connection of its own; again if it dies meanwhile.

        Args:
            wait: Seconds that the answer may take by what is asked for.

        Raises:
            SaveFailed: It refuses, or no keeper answers within ``timeout`` seconds.
        """
        deadline = time.monotonic() + self._config.timeout + wait
        while True:
            self._ready()
            try:
                with connect(self.spool.socket, b"", _ANSWER) as channel:
                    channel.timeout(_ANSWER + wait)
                    return self._ask(channel, what, *args)
            except (OSError, EOFError) as error:
                if self._closing:
                    raise
                if time.monotonic() > deadline:
                    raise SaveFailed(f"the keeper of rank {self.rank} does not answer ({error})") from error
                time.sleep(0.1)

    def _ready(self) -> None:
        """Wait until the keeper is there.

        Raises:
            SaveFailed: It does not come, or is another training's.
        """
        if not self._is_attached.wait(_START_SECONDS):
            raise SaveFailed(f"the keeper of rank {self.rank} does not answer: see {self.spool.folder}/start.log")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure

    @property
    def is_attached(self) -> bool:
        """Whether the keeper is there now."""
        return self._is_attached.is_set() and self._failure is None

    # Saves

    def hand_over(self, path: Where, token: str, job: Attempt[RankJob], attached: Path | None, ranks: Ranks) -> None:
        """Give a save to the keepers. When it returns, no rank is needed any more. Collective.

        Args:
            token: Stands for the save; the same on all ranks.
            job: This rank's.
            attached: A directory in the spool with what lies beside the tensors.

        Raises:
            CheckpointError: On every rank: it was not handed over.
        """

        def give() -> Peer:
            mine = job.get()
            if self._failure is not None:
                self._ready()
            try:
                if attached is not None:
                    os.rename(attached, self.spool.folder / f"{token}.{self.rank}.files")
                self.spool.put(f"{token}.{self.rank}.job", mine.encode())
            except OSError as error:
                raise NoSharedMemory(f"rank {self.rank} cannot hand over {path}: {error}") from error
            if self._job.nodes > 1:
                self._ready()
            info = self._info or {"host": "localhost", "address": ("127.0.0.1", 0)}
            return Peer(self.rank, self._node, info["host"], info["address"], self._config.local_dir or "")

        def go(peers: list[Peer]) -> Peer:
            self._go = Go(token, peers, self._job.key)
            self.spool.put(f"{token}.go", self._go.encode())
            return peers[0]

        try:
            self._coordinator = ranks.combine(f"hand over the save of {path}", give, go)
        except RankFailure:  # nobody knows whether rank 0 has got everything, and then it is written
            raise
        except Exception:
            self._take_back(token)
            raise
        if self.rank == 0:
            threading.Thread(target=self._poke, args=(token,), name="dcp-keeper", daemon=True).start()

    def _take_back(self, token: str) -> None:
        self.spool.drop(f"{token}.go", f"{token}.{self.rank}.job", f"{token}.{self.rank}.files")

    def _poke(self, token: str) -> None:
        with suppress(OSError, EOFError, SaveFailed):
            self._call("go", token)  # a keeper that starts now finds it by itself

    def wait(self, token: str, stage: str, timeout: float | None = None) -> End | bool:
        """As :meth:`dcp_plugin.keeper.node.Node.wait`.

        Raises:
            SaveFailed: There is no keeper any more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _POLL if deadline is None else min(_POLL, max(0.0, deadline - time.monotonic()))
            try:
                found = cast(End | bool, self._call("wait", token, stage, left, wait=left))
            except SaveFailed:
                if self._failure is not None:  # the keeper is another training's, and would find it there some day
                    self._take_back(token)
                raise
            if found is not False or (deadline is not None and time.monotonic() >= deadline):
                return found

    def drain(self, token: str) -> bool:
        """Bring a save that ended locally to its path; whether it is there or will be."""
        return cast(bool, self._call("drain_newest", token, self._coordinator, self._job.key))

    def forget(self, path: Where) -> None:
        """Delete what this node has of the saves to a path; on rank 0, what all nodes have."""
        if self._config.local_dir is not None:
            self._call("forget", str(path), path.parent, self._config.local_dir, self._go, wait=_FORGET)

    def close(self, all_over: bool = True) -> None:
        """Leave the keeper.

        Args:
            all_over: The training has ended as it should: the keeper need not wait for it.
        """
        if os.getpid() != self._process:
            return  # forked: the connection is the parent's, too
        self._closing = True
        if self._attached is not None:
            self._attached.close()
        self._thread.join(_ANSWER)
        if self._attached is not None:
            with suppress(OSError, EOFError, SaveFailed), connect(self.spool.socket, b"", _ANSWER) as last:
                self._ask(last, "detach", all_over)
        self.spool.leave()


def start_keeper(spool: Spool, linger: float) -> subprocess.Popen[bytes] | None:
    """Start a keeper that has nothing of this process: no pipe, no terminal, no device. None: there is one."""
    if spool.is_kept():
        return None
    spool.folder.mkdir(mode=0o700, exist_ok=True)
    ours = str(Path(__file__).parents[2])
    path = os.pathsep.join([ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_KEEPERS}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with open(spool.folder / "start.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dcp_plugin.keeper", str(spool.folder), str(linger)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=environment,
        )
    _started[:] = [*(one for one in _started if one.poll() is None), process]
    return process


_started: list[subprocess.Popen[bytes]] = []
"""Held, so that those that have ended are reaped, and nobody is warned of one that goes on, as it is meant to."""


_NOT_FOR_KEEPERS = ("PYTHONSTARTUP", "PYTHONINSPECT", "LD_PRELOAD")


def settle_before_restart(config: CheckpointConfig, root: Where, ranks: Ranks) -> None:
    """Wait for keepers of the training before, which may be about to publish what it has handed over. Collective."""

    def wait() -> list[str]:
        return [token for spool in Spool.below(resolved(root)) for token in _settle(spool, config)]

    left = ranks.agree(f"wait for what was handed over before, in {root}", wait)
    if left:
        logger.warning("%s: %d saves that were handed over before are not written, and not waited for", root, len(left))


def _settle(spool: Spool, config: CheckpointConfig) -> list[str]:
    """Wait until a keeper, started in place of one that died, has published the saves in its journal, or completed them
    in ``local_dir``. The tokens of the others. A journal of another version of this package is left as it is."""
    try:
        spool.refuse_other_format()
    except NoSharedMemory as error:
        logger.warning("%s", error)
        return []
    unfinished = [name[:-3] for name in spool.names(".go") if spool.get(f"{name[:-3]}.end") is None]
    if not unfinished and not spool.is_kept():
        return []
    start_keeper(spool, config.keeper_linger)
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, EOFError), connect(spool.socket, b"", _ANSWER) as channel:
            channel.timeout(config.timeout + _ANSWER)
            return cast(list[str], KeeperClient._ask(channel, "settle", config.timeout))
        if not spool.folder.exists():  # it has ended meanwhile
            return []
        time.sleep(0.05)
    return unfinished
