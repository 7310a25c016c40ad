"""A rank's side of its keeper: start a keeper if none is alive, hand saves over, and wait until they end.

The first rank of the node that notices a dead keeper starts another one. That continues all saves that were handed
over, because they are in the journal.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import CheckpointError, NoSharedMemory, RankFailure, SaveFailed, logger
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.paths import Where, on_file_system, resolved
from dcp_plugin.core.ranks.collectives import Attempt, Ranks
from dcp_plugin.core.saving.queue import SaveQueue
from dcp_plugin.core.storage.published import newest_time
from dcp_plugin.tiers.journal import Journal
from dcp_plugin.tiers.journal_records import Go, Peer, RankJob, State, keeper_options
from dcp_plugin.tiers.local_checkpoints import LocalCheckpoints, node_of
from dcp_plugin.tiers.locks import described
from dcp_plugin.tiers.spool import Spool
from dcp_plugin.tiers.wire import NO_ADDRESS, Address, Channel, KeeperLost, connect, new_key

_START_SECONDS = 120.0
"""Seconds in which a new keeper has to answer: it imports torch beside a training that starts, which takes long on a
slow file system."""
_POLL = 30.0
"""Seconds of the longest wait for a save in one request."""
_ANSWER = 60.0
"""Seconds in which a keeper that is alive has to answer, if ``timeout`` is not shorter."""


@dataclass(frozen=True)
class _Training:
    """Identity of a training, equal on all its ranks."""

    name: str
    key: bytes
    """Proves to other nodes that a keeper belongs to it."""
    nodes: int = 1
    first: str = ""
    """The node of rank 0."""
    newest: float = 0.0
    """The greatest recorded time of the run that the nodes had at the start, in seconds since the epoch."""


_trainings: dict[int, _Training] = {}
"""The training of this process, by process ID. A process that saves alone, too, does so in the same training."""


class KeeperClient:
    """The keeper of this rank's node, as this rank sees it. Collective to make.

    Args:
        config: The configuration of the checkpointer.
        root: The folder of checkpoints of the first save.
        ranks: The ranks that save together.
        queue: The saves of the training. It says when the training stops waiting for them.

    Raises:
        NoSharedMemory: On every rank: a node has no shared memory.
    """

    def __init__(self, config: CheckpointConfig, root: Where, ranks: Ranks, queue: SaveQueue) -> None:
        self._config, self.rank, self._root, self._queue = config, ranks.rank, resolved(root), queue
        self._options = keeper_options(config)
        self._patience = min(_ANSWER, config.timeout)
        """Seconds in which a keeper that is there has to answer."""
        self._closing = False
        self._reached_at: tuple[str, Address] | None = None
        """The host and the address at which other nodes reach the keeper; None before it has answered first."""
        self._failure: NoSharedMemory | None = None
        """Reason for which saves bypass the keeper now; None if they use it."""
        self._logged: Counter[str] = Counter()
        """The number of messages that this rank has logged of each save, by token."""
        self._coordinator: Peer | None = None
        self._go: Go | None = None
        """The last save that rank 0 has handed over."""
        self._process = os.getpid()
        self._store_clock: tuple[float, float] | None = None
        """The time by the clock of the store, and by a clock of this host that nobody sets; None without a store."""

        try:
            self.training = _trainings[self._process] = self._meet(root, ranks)
            ranks.agree(f"claim {root}", lambda: self.spool.claim(self.training.name))
        except BaseException:
            if hasattr(self, "spool"):
                self.spool.leave()
            raise
        self.beside_rank_zero = self.training.first == self._node
        with suppress(OSError):  # it starts while the first save is staged; the first request starts it otherwise
            start_keeper(self.spool, self._options.linger)

    def _meet(self, root: Where, ranks: Ranks) -> _Training:
        """Enter the journal of this node, and return the training with what all nodes know of it. Collective."""

        def enter() -> tuple[str, float]:
            self.spool = Spool.of(self._root, self._options.dir)
            self.spool.enter(self._root)
            self.journal = Journal(self.spool)
            self._node = node_of(Path(self._options.dir or self.spool.folder))
            return self._node, self._newest_time()

        def met(nodes_and_times: list[tuple[str, float]]) -> _Training:
            nodes, times = zip(*nodes_and_times, strict=True)
            training = _trainings.get(self._process) or _Training(uuid.uuid4().hex, new_key())
            return replace(training, nodes=len(set(nodes)), first=nodes[0], newest=max(times))

        return ranks.combine(f"find the keepers for {root}", enter, met)

    def _newest_time(self) -> float:
        """Return the greatest recorded time in the journal, in ``keeper.dir``, and on rank 0 at the path as well."""
        times = [self.journal.newest_time()]
        if self._options.dir is not None:
            saves = LocalCheckpoints(Path(self._options.dir), self._root).all()
            times += [save.record.time for save in saves]
        if self.rank == 0:
            thread = threading.Thread(target=self._look_at_path, args=(times,), name="dcp-times", daemon=True)
            thread.start()
            thread.join(0.75 * self._patience)  # the path may hang, and the other ranks wait for this one
        return max(times)

    def _look_at_path(self, times: list[float]) -> None:
        with suppress(OSError, CheckpointError):
            medium = medium_of(self._root)
            times.append(newest_time(medium, self._root))
            if on_file_system(self._root) is None:  # a reservation has the time of the store
                began, reservation = time.clock_gettime(time.CLOCK_BOOTTIME), medium.reserve(self._root / "clock")
                medium.discard(reservation)
                self._store_clock = None if reservation.time is None else (reservation.time, began)

    def now(self) -> float:
        """Return the time by the clock of the store, or of this host without a store, in seconds since the epoch.

        Saves are published with the time that they have in ``keeper.dir``, and others with the time of the store: one
        clock orders both, whoever sets that of this host.
        """
        if self._store_clock is None:
            return time.time()
        time_there, then = self._store_clock
        return time_there + time.clock_gettime(time.CLOCK_BOOTTIME) - then

    # Requests

    def _lost(self) -> KeeperLost:
        """Return the error that names the keeper of this node, which does not answer."""
        return KeeperLost(
            f"the keeper of rank {self.rank} on {socket.gethostname()} does not answer: it is "
            f"{described(self.spool.pid())}"
        )

    def pass_over(self, error: KeeperLost) -> None:
        """Let saves bypass the keeper until it answers again."""
        if self._failure is None:
            self._failure = NoSharedMemory(str(error))
            logger.warning("%s; saves go on without it", error)
            threading.Thread(target=self._await_answer, name="dcp-keeper", daemon=True).start()

    def _await_answer(self) -> None:
        while not self._closing:
            try:
                self._open().close()
                self._failure = None
                return
            except NoSharedMemory:
                return
            except (OSError, SaveFailed):
                time.sleep(1.0)

    def refuse_if_passed_over(self) -> None:
        """Raise NoSharedMemory if saves bypass the keeper."""
        if self._failure is not None:
            raise NoSharedMemory(str(self._failure)) from self._failure

    def _open(self) -> Channel:
        """Connect to the keeper, which learns that this rank needs it; start one if none is alive.

        Raises:
            NoSharedMemory: No keeper can be started; later saves bypass it.
            OSError: It does not answer, or has just ended.
        """
        keeper = self._connect()
        key = self.training.key if self.training.nodes > 1 else None
        try:
            self._reached_at = keeper.ask(self._patience, "attach", self._options.linger, key).get()
            if self._reached_at is None:
                raise ConnectionAbortedError("the keeper has just ended")
        except BaseException:
            keeper.close()
            raise
        return keeper

    def _connect(self) -> Channel:
        """Connect to the keeper as :meth:`_open` does."""
        deadline = time.monotonic() + _START_SECONDS
        started: subprocess.Popen[bytes] | None = None
        while True:
            try:
                return connect(self.spool.socket, timeout=self._patience)
            except TimeoutError:
                raise
            except OSError as error:
                if self._closing:
                    raise
                self.spool.require_folder()
                has_ended = started is not None and (started.poll() or 0) > 0  # it has not been killed
                if has_ended or time.monotonic() > deadline:
                    folder = self.spool.folder
                    ended = NoSharedMemory(f"the keeper ended at once: see {folder}/start.log")
                    self._failure = ended if has_ended else NoSharedMemory(f"no keeper answers: see {folder}/start.log")
                    raise self._failure from error
                if started is None or (started.poll() is not None and not self.spool.is_kept()):
                    started = start_keeper(self.spool, self._options.linger)
                    if started is not None and self._reached_at is not None:
                        logger.warning("the keeper of rank %d has died. Another keeper takes over.", self.rank)
                time.sleep(0.02)

    def _call(self, what: str, *args: Any) -> Any:
        """Make a request to the keeper over a separate connection; repeat it if the keeper dies meanwhile.

        Raises:
            SaveFailed: The keeper refuses.
            KeeperLost: The keeper does not answer.
            NoSharedMemory: Saves bypass the keeper, or none can be started.
        """
        failing_since: float | None = None
        while True:
            self.refuse_if_passed_over()
            try:
                with closing(self._open()) as keeper:
                    reply = keeper.ask(self._patience, what, *args)
                break
            except TimeoutError as error:
                raise self._lost() from error
            except OSError as error:
                failing_since = failing_since or time.monotonic()
                if self._closing:
                    raise
                if time.monotonic() - failing_since > _START_SECONDS:
                    raise self._lost() from error
                time.sleep(0.1)
        if isinstance(reply.failure, OSError):  # of the keeper's own work, unlike those above
            reason = f"{type(reply.failure).__name__}: {reply.failure}"
            raise SaveFailed(
                f"a request to the keeper on {socket.gethostname()} has failed: {reason}"
            ) from reply.failure
        return reply.get()

    def _address(self) -> tuple[str, Address]:
        """Return the host and the address at which other nodes reach the keeper. Raises NoSharedMemory."""
        if self.training.nodes == 1:
            return "localhost", NO_ADDRESS
        while self._reached_at is None:
            self._call("attach", self._options.linger, None)
        return self._reached_at

    # Saves

    def hand_over(self, path: Where, token: str, job: Attempt[RankJob], extra_files: Path | None, ranks: Ranks) -> None:
        """Give a save to the keepers. When it returns, no rank is needed any more. Collective.

        Args:
            token: Name of the save; the same on all ranks.
            job: The job of this rank.
            extra_files: A directory in the journal with the extra files.

        Raises:
            CheckpointError: On every rank: the save was not handed over.
        """

        def give() -> Peer:
            mine = job.get()
            self.refuse_if_passed_over()
            try:
                self.journal.hand_over(mine, extra_files)
                host, address = self._address()
            except (OSError, TypeError, KeeperLost) as error:
                raise NoSharedMemory(f"rank {self.rank} cannot hand over {path}: {error}") from error
            return Peer(self.rank, self._node, host, address, self._options.dir or "")

        def go(peers: list[Peer]) -> Peer:
            self._go = Go(token, peers)
            self.journal.go(self._go)
            return peers[0]

        try:
            self._coordinator = ranks.combine(f"hand over the save of {path}", give, go)
        except RankFailure:  # nobody knows whether rank 0 has got everything, and then it is written
            raise
        except Exception:
            self.journal.take_back(token, self.rank)
            raise
        if self.rank == 0:
            threading.Thread(target=self._poke, name="dcp-keeper", daemon=True).start()

    def revoke(self, token: str, path: Where) -> Path:
        """Withdraw a save from the keepers: none of them publishes it any more.

        The path and ``keeper.dir`` may hang, so a thread with a deadline changes them. Raises OSError.

        Returns:
            The directory with the extra files of this rank.
        """
        try:
            self.journal.revoke(token, self.rank)
        except FileNotFoundError:
            self.spool.require_folder()
            raise
        thread = threading.Thread(target=self._void, args=(token, path), name="dcp-revoke", daemon=True)
        thread.start()
        thread.join(self._patience)
        return self.journal.files_of(token, self.rank)

    def _void(self, token: str, path: Where) -> None:
        try:
            if self._options.dir is not None:
                LocalCheckpoints(Path(self._options.dir), self._root).remove(token)
            if self.rank == 0 and (reserved := self.journal.state(token).reserved):
                medium_of(path).revoke(path, reserved)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: cannot revoke the save of a keeper that does not answer: %s", path, error)

    def _poke(self) -> None:
        with suppress(OSError, SaveFailed):
            self._call("begin")  # a keeper that starts now finds it by itself

    def wait(self, token: str, milestone: str, timeout: float | None = None) -> State:
        """Wait as :meth:`.Journal.wait` does; without ``timeout``, until the training stops waiting.

        Rank 0 logs the messages of the save.

        Raises:
            SaveFailed: The keeper does not answer.
        """
        left = timeout
        while True:
            if timeout is None and self._queue.closes_at is not None:
                left = max(0.0, self._queue.closes_at - time.monotonic())
            step = min(_POLL, self._config.timeout / 2, *(() if left is None else (left,)))
            asked = time.monotonic()
            state: State = self._call("wait", token, milestone, step, self._logged[token])
            if left is not None:
                left -= min(step, time.monotonic() - asked)  # not the seconds in which another keeper was started
            for text in state.messages[self._logged[token] :] if self.rank == 0 else ():
                logger.warning("keeper of rank %d: %s", self.rank, text)
            self._logged[token] = len(state.messages)
            if state.has_reached(milestone) or (left is not None and left <= 0):
                return state

    def drain(self, token: str) -> bool:
        """Copy a save that ended locally to its path. Return whether it is there or will be."""
        return cast(bool, self._call("drain_newest", token, self._coordinator, self.training.key))

    def forget(self, path: Where) -> None:
        """Delete this node's parts of the saves to a path; on rank 0, those of all nodes."""
        if self._options.dir is not None:
            others = [node[0] for node in self._go.nodes()[1:]] if self._go else []
            asked = str(path), path.parent, self._options.dir, others, self.training.key
            for text in self._call("forget", *asked):
                logger.warning("keeper of rank %d: %s", self.rank, text)

    def close(self) -> None:
        """Leave the keeper, which then does not wait for this training any more."""
        if os.getpid() != self._process:
            return  # forked: the lock is the parent's
        self._closing = True
        self.spool.leave()


def start_keeper(spool: Spool, linger: float) -> subprocess.Popen[bytes] | None:
    """Start a keeper that shares no pipe, terminal or device with this process. Return None if a keeper is alive."""
    if spool.is_kept():
        return None
    spool.folder.mkdir(mode=0o700, exist_ok=True)
    ours = str(Path(__file__).parents[2])
    path = os.pathsep.join([ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_KEEPERS}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with open(spool.folder / "start.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dcp_plugin.tiers", str(spool.folder), str(linger)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=environment,
        )
    for earlier in _started:
        earlier.poll()
    _started.append(process)
    return process


_started: list[subprocess.Popen[bytes]] = []
"""The keepers that this process has started. The references keep Python from warning of a keeper that continues, and
let it reap those that have ended."""


_NOT_FOR_KEEPERS = ("PYTHONSTARTUP", "PYTHONINSPECT", "LD_PRELOAD")


def settle_before_restart(config: CheckpointConfig, root: Where, ranks: Ranks) -> None:
    """Wait for keepers of the previous training, which may be about to publish its saves. Collective."""

    def wait() -> list[str]:
        deadline = time.monotonic() + 0.75 * config.timeout  # the other ranks wait for this one until the timeout
        return [text for spool in Spool.below(resolved(root)) for text in _settle(spool, config, deadline)]

    for text in ranks.agree(f"wait for what was handed over before, in {root}", wait):
        logger.warning("%s: %s", root, text)


def _settle(spool: Spool, config: CheckpointConfig, deadline: float) -> list[str]:
    """Wait until a keeper, started in place of one that died, has published the saves in its journal, or completed them
    in ``keeper.dir``, or dropped them. A journal of another version of this package is left as it is.

    Returns:
        Messages about the saves that are not there.
    """
    try:
        spool.refuse_other_format()
    except NoSharedMemory as error:
        return [str(error)]
    journal = Journal(spool)
    tokens = journal.in_flight() if spool.is_kept() else journal.unfinished()
    if not tokens:
        return []
    start_keeper(spool, keeper_options(config).linger)
    start, problems = time.monotonic() + _START_SECONDS, []
    while tokens and (seconds := deadline - time.monotonic()) > 0:
        patience = min(_ANSWER, seconds)
        try:
            with closing(connect(spool.socket, timeout=patience)) as keeper:
                state: State = keeper.ask(patience, "wait", tokens[0], "local", patience / 2).get()
        except TimeoutError:
            problems.append(f"the keeper of {spool.folder} does not answer: it is {described(spool.pid())}")
            break
        except OSError:
            if not spool.folder.exists():  # it has ended meanwhile
                return []
            if time.monotonic() > start:
                break
            time.sleep(0.05)
            continue
        except SaveFailed:  # it has no record of the save any more
            tokens.pop(0)
            continue
        if state.end is not None and state.end.has_failed:
            problems.append(f"a save that was handed over before has failed: {state.end.error}")
        if state.has_reached("local"):
            tokens.pop(0)
    if tokens:
        problems.append(f"{len(tokens)} saves that were handed over before are not written yet")
    return problems
