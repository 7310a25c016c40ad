"""Coordinator of the saves of a job, in the keeper of rank 0's node: from a handed-over save to a published one.

The saves under way are in one queue, oldest first. Three threads take each save through its stages:

- *write*: every node writes its part and gets the complete index,
- *replicate*: copies go to other nodes, and then the save is complete locally,
- *drain*: the parts go to the durable path.

A slow link or a store that is down delays only its own stage, and host copies are free as soon as they are written.

The rule: the queue is only the order of the work. Everything that must survive this process is in the journal, and
every request can be repeated, so a successor continues each save.

A stage asks all nodes at once, and repeats requests that failed for a passing reason. A tier that fails is reported,
and the other tiers continue. Without room in ``keeper.dir`` the save goes straight to its path. If a neighbour cannot
be reached, the save has no copy. While a store is down, the newest ``keeper.keep`` saves wait, and older ones are
dropped.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_plugin.core import events
from dcp_plugin.core.errors import CheckpointError, DurabilityUnknown, SaveFailed, logger
from dcp_plugin.core.format import INDEX, index_file
from dcp_plugin.core.format.index import CheckpointIndex, Places
from dcp_plugin.core.format.summary import fingerprint
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.paths import Where, resolved
from dcp_plugin.core.ranks.collectives import Attempt
from dcp_plugin.core.runs import deletion, figures
from dcp_plugin.core.storage.part_writer import Facts, Publication, compose
from dcp_plugin.core.storage.published import read_summary
from dcp_plugin.tiers import plain
from dcp_plugin.tiers.journal_records import End, Go, Head, Part, Peer, RankJob
from dcp_plugin.tiers.local_checkpoints import Record, make_run, path_of, shown, time_of
from dcp_plugin.tiers.node import Node
from dcp_plugin.tiers.plain import sendable
from dcp_plugin.tiers.wire import KeeperLost, connect

_AT_ONCE = 64
"""Nodes that are asked at the same time."""
_MOST_TRIES = 5
"""Keepers that may die with one save in flight before the save is given up. The save may be the cause."""
_WITHOUT_TRAINING = 30.0
"""Seconds for which another node is asked again if the training is dead, since no rank starts its keeper again."""
_UNANSWERED = 60.0
"""Seconds in which another keeper has to give a sign of life."""
_SILENT = 2.0
"""The same, for a keeper that has missed a deadline before."""
_WARN_AFTER = 0.8
"""Failures of a request are reported when the pause before its repetition has grown to this many seconds."""
_MOST_PAUSE = 15.0

Stage = Literal["write", "replicate", "drain", "ended", "reopen"]


@dataclass(eq=False)
class Save:
    """One save under way."""

    go: Go
    job: RankJob
    """The job of rank 0."""
    head: Head
    stage: Stage = "write"
    is_in_work: bool = False
    """True while a thread works on the save's stage."""
    began: float = field(default_factory=time.monotonic)
    parts: dict[int, Part] = field(default_factory=dict)
    number: int = 0
    """The number of the save in its run, once it is in ``keeper.dir``."""
    local_seconds: float | None = None
    """Time from the call until the save was complete locally; None if it is not."""
    published_at: float = 0.0
    """The recorded time of the published checkpoint; 0 if the save is not published."""
    copies: int = 0
    degraded: list[str] = field(default_factory=list)
    """The parts of the configuration that the save does not fulfil, with reasons."""

    @property
    def token(self) -> str:
        return self.go.token

    @property
    def path(self) -> Where:
        return self.job.where

    @property
    def nodes(self) -> list[list[Peer]]:
        return self.go.nodes()

    def names_of(self, node: Sequence[Peer]) -> list[str]:
        """Return the names of the files that the ranks of a node have written."""
        mine = [self.parts[peer.rank] for peer in node]
        return [name for part in mine for name in (*part.files, *part.attached)]


class Coordinator:
    """Queue of the saves that this keeper leads, with a thread for each stage.

    Args:
        node: This node's own part of the work.
        attended: Returns whether the training is alive.
    """

    def __init__(self, node: Node, attended: Callable[[], bool]) -> None:
        self._node, self._attended = node, attended
        self._journal = node.journal
        self._saves: list[Save] = []
        """The queue, oldest first."""
        self._changed = threading.Condition()
        self._starting, self._reopening = threading.Lock(), threading.Lock()
        """Locks for adding new saves to the queue, and for adding a save again that had ended locally."""
        self._runs: dict[tuple[str, bytes], str] = {}
        """The identifier of each run, by folder of checkpoints and key of the training."""
        self._numbers: dict[str, int] = {}
        self._newest_token, self._members = "", set[str]()
        """The nodes of the training, from its newest save. No request waits for a node that is not among them."""
        self._warned_of_copies = False
        self._silent: set[str] = set()
        """The nodes whose keepers have missed their deadlines, until they answer again."""
        self._publishing = threading.Lock()
        self._published = self._journal.published()
        """The newest save that was published at each path."""
        for stage, work in (("write", self._write), ("replicate", self._replicate), ("drain", self._drain)):
            threading.Thread(target=self._run, args=(stage, work), name=f"keeper-{stage}", daemon=True).start()

    # The queue

    def _run(self, stage: Stage, work: Callable[[Save], Stage]) -> None:
        """Take the oldest save of a stage, work on it, and put it into the stage that the work returns."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting(stage)))
                save = self._waiting(stage)[0]
                save.is_in_work = True
            try:
                following = work(save)
            except Exception:  # the work handles all failures, so this is a bug. It must not end the thread.
                logger.exception("a keeper's work has failed")
                following = "ended"
            self._put(save, following)

    def _waiting(self, stage: Stage) -> list[Save]:
        return [save for save in self._saves if save.stage == stage and not save.is_in_work]

    def _put(self, save: Save, stage: Stage) -> None:
        """Put a save into a stage, or take it out of the queue."""
        with self._changed:
            save.stage, save.is_in_work = stage, False
            if stage == "ended":
                self._saves.remove(save)
            elif save not in self._saves:
                bisect.insort(self._saves, save, key=lambda each: each.token)
            self._changed.notify_all()

    def tokens(self) -> list[str]:
        """Return the saves under way."""
        with self._changed:
            return [save.token for save in self._saves]

    def begin(self) -> None:
        """Begin the saves that all ranks have handed over since the last call, in that order."""
        with self._starting:
            # Read before the journal. In the other order, a save that ends in between would look new, and begin again.
            known = self.tokens()
            for token in [token for token in self._journal.unfinished() if token not in known]:
                try:
                    save = self._save_of(token)
                    self._journal.change(token, tries=self._journal.state(token).tries + 1)
                    self._put(save, "write")
                except Exception as error:  # a damaged record of one save must not stop the others
                    logger.exception("cannot begin the save %s", token)
                    failure = SaveFailed(
                        f"the host copies of the save cannot be read ({type(error).__name__}: {error})"
                    )
                    self._node.end(token, self._journal.ranks_of(token), End(False, False, failure))

    def _save_of(self, token: str) -> Save:
        job = self._journal.job(token, 0)
        save = Save(self._journal.go_of(token), job, plain.decode(job.head))
        if token > self._newest_token:  # a token begins with the time of its save
            self._newest_token, self._members = token, {peer.node for peer in save.go.peers}
        return save

    def drain_newest(self, token: str) -> bool:
        """Copy a save to its path that has ended locally. Return whether the save is at its path or will be."""
        with self._reopening:  # the first rank that asks reopens the save, and the others wait for that
            end = self._journal.state(token).end
            if end is None or end.is_final or token not in self._journal.ready():
                return token in self.tokens() or (end is not None and end.published)
            save = self._save_of(token)
            if self._node.local_checkpoints(save.job).find(token) is None:
                return False
            save.local_seconds, save.copies = end.local_seconds, end.copies
            save.degraded += filter(None, [end.degraded])
            self._put(save, "reopen")  # no thread works on this stage: the save waits until all nodes have reopened it
            try:
                self._on_all(save, "reopen", lambda node: ())
            except Exception:
                self._put(save, "ended")
                raise
            self._put(save, "drain")
            return True

    def forget(self, path: str) -> None:
        """Forget locally ended saves to a deleted path, so that none is copied to the path any more."""
        with self._reopening:
            for token in self._journal.ready():
                ended = self._journal.state(token).end is not None
                if ended and str(path_of(self._journal.job(token, 0).path)) == path:
                    self._journal.forget(token)

    # Asking the nodes

    def _on_all(self, save: Save, what: str, call: Callable[[list[Peer]], tuple[Any, ...]]) -> list[Any]:
        """Make the same request to every node.

        Args:
            call: Returns the arguments for a node.

        Raises:
            Exception: The first exception of a node.
        """
        return self._of_all(save, lambda node: self._ask(save, node[0], what, call(node)))

    @staticmethod
    def _of_all(save: Save, ask: Callable[[list[Peer]], Any]) -> list[Any]:
        """Call ``ask`` for every node at the same time. Return its results, or raise its first exception."""
        with ThreadPoolExecutor(min(_AT_ONCE, len(save.nodes)), thread_name_prefix="keeper-ask") as pool:
            return list(pool.map(ask, save.nodes))

    def _ask(self, save: Save, peer: Peer, what: str, args: tuple[Any, ...]) -> Any:
        """Make a request to the keeper of a node, and repeat it while the connection fails. Return its reply.

        Raises:
            KeeperLost: The keeper does not answer.
            Exception: The exception that the request raised there.
        """
        if peer.node == save.go.peers[0].node:
            return getattr(self._node, what)(save.token, *args)

        heard = time.monotonic()  # the last sign of life of that keeper

        def is_passed_over() -> bool:
            """Return whether the request gives up early. A living training then writes the save itself."""
            return peer.node in self._silent and self._attended()

        def ask() -> Attempt[Any]:
            nonlocal heard
            seconds = _SILENT if is_passed_over() else min(_UNANSWERED, save.job.config.timeout)
            with closing(connect(peer.address, save.job.key)) as keeper:
                try:
                    return keeper.ask(seconds, what, save.token, *args)
                finally:
                    heard = max(heard, keeper.heard)

        def patience() -> float:
            if peer.node not in self._members or is_passed_over():
                return 0.0
            waited = time.monotonic() - heard if self._attended() else 0.0  # without a training, no rank waits
            return self._patience(save) - waited

        name = f"{save.path} on {peer.host} (rank {peer.rank})"
        try:
            answer = self._retried(save, ask, patience, f"to {what} {name}")
        except OSError as error:
            text = f"the keeper of rank {peer.rank} on {peer.host} does not answer ({error})"
            if peer.node not in self._silent:
                self._silent.add(peer.node)
                self._warn(save, text)
            raise KeeperLost(text) from error
        self._silent.discard(peer.node)
        return answer.get()

    def _retried(self, save: Save, call: Callable[[], Any], patience: Callable[[], float], what: str) -> Any:
        """Return the result of ``call``. Repeat it after failures of a connection or a store, which may pass.

        Args:
            patience: Returns the seconds in which the failures have to end. Called after each of them.
            what: The request, in messages.
        """
        began: float | None = None
        pause = 0.05
        while True:
            try:
                value = call()
            except OSError as error:
                began = time.monotonic() if began is None else began
                if time.monotonic() - began > patience():
                    raise
                if _WARN_AFTER <= pause < 2 * _WARN_AFTER:  # once, since the pause doubles
                    self._warn(save, f"{what} fails ({error}) and is tried again")
                time.sleep(pause)
                pause = min(2 * pause, _MOST_PAUSE)
            else:
                if pause > _WARN_AFTER:
                    self._warn(save, f"{what} works again")
                return value

    def _patience(self, save: Save) -> float:
        """Return the seconds in which failures that may pass have to end. They are fewer without a training."""
        timeout = save.job.config.timeout
        return timeout if self._attended() else min(timeout, _WITHOUT_TRAINING)

    @staticmethod
    def _ranks(node: Sequence[Peer]) -> list[int]:
        return [peer.rank for peer in node]

    # Write

    def _write(self, save: Save) -> Stage:
        try:
            if self._journal.state(save.token).tries > _MOST_TRIES:
                raise SaveFailed(f"{_MOST_TRIES} keepers have died while they wrote this save")
            if save.job.keeper.dir is None:
                return self._write_to_path(save)
            try:
                self._write_locally(save)
            except (OSError, CheckpointError) as error:
                if save.job.keeper.durable_every is None:
                    raise
                self._degrade(save, f"{save.path} is not kept in keeper.dir, but goes straight to its path: {error}")
                return self._write_to_path(save)
        except Exception as error:
            return self._fail(save, error)
        try:
            self._on_all(save, "free", lambda node: ())
        except Exception as error:  # complete() frees the host copies of that node as well
            self._warn(save, f"a node does not hear that {save.path} is written: {error}")
        return "replicate"

    def _write_to_path(self, save: Save) -> Stage:
        with self._reserved(save) as (publication, directory):
            self._write_parts(save, directory)
            self._publish(save, publication, self._index(save, publication.file_sizes()))
        self._prune(save)
        return self._end(save, published=True)

    @contextmanager
    def _reserved(self, save: Save) -> Iterator[tuple[Publication, Where]]:
        """Reserve at the path, and record the reservation, so that the ranks can revoke it.

        The keeper records the reservation first, and then checks for a revocation: either the ranks find the record, or
        the keeper finds that the save is revoked. An error of the block discards the written files.
        """
        publication = Publication(save.path, medium_of(save.path, save.job.config.io.direct))
        publication.save_id = save.head.save_id
        try:
            directory = publication.reserve(save.head.among_other_files, time_of(save.token))
            self._journal.change(save.token, reserved=directory.stem)
            self._journal.refuse_revoked(save.token)
            yield publication, directory
        except BaseException:
            publication.discard()
            raise

    def _write_parts(self, save: Save, directory: Where | None) -> None:
        """Have every node write its part, as :meth:`Node.write` does."""
        of_nodes = self._on_all(save, "write", lambda node: (self._ranks(node), directory))
        save.parts = {rank: part for parts in of_nodes for rank, part in parts.items()}

    def _publish(self, save: Save, publication: Publication, index: CheckpointIndex) -> None:
        """Publish a save, but never in place of a later one.

        A later save may have gone straight to its path, and so have overtaken this one. Or the ranks have written later
        saves themselves while this keeper was stopped.
        """
        path, recorded = str(save.path), time_of(save.token)
        self._journal.refuse_revoked(save.token)
        with self._publishing:
            token, time = self._published.get(path, ("", 0.0))
            if token > save.token or _newest_at(save.path, time, save.head.save_id) >= recorded:
                raise SaveFailed(f"a newer save was published at {path}. An older save does not replace it.")
            save.published_at = publication.compose_and_commit(index, self._facts(save)).time
            self._published[path] = save.token, save.published_at

    def _write_locally(self, save: Save) -> None:
        save.number = self._next_number(save)
        self._write_parts(save, None)
        head, recorded, parts = save.head, time_of(save.token), save.parts.values()
        sizes = {name: size for part in parts for name, size in part.files.items()}
        index = self._index(save, sizes)
        index.extra_files = {name: comparison for part in parts for name, comparison in part.attached.items()}
        extra_files = {name.partition("/")[0] for name in index.extra_files}
        composed, summary = compose(
            save.path, StorageMeta(str(save.path), head.save_id), index, self._facts(save), extra_files, recorded
        )
        all_sizes = sizes | {name: size for part in parts for name, size in part.attached_sizes.items()}
        files = {name: bytes(data) for name, data in composed.items()}
        all_sizes |= {name: len(data) for name, data in files.items()}
        record = Record(
            path=str(path_of(save.path)),
            token=save.token,
            save_id=head.save_id,
            index_sha256=summary.index_sha256,
            time=recorded,
            step=save.job.step,
            run=self._run_of(save),
            number=save.number,
            files=all_sizes,
            nodes=len(save.nodes),
        )
        self._on_all(save, "take", lambda node: (self._ranks(node), files, record))

    def _next_number(self, save: Save) -> int:
        """Return the number of a save, which ``keeper.durable_every`` counts.

        It continues the count of the previous training. Otherwise a training that dies often would never copy a save to
        the durable storage.
        """
        root, checkpoints = str(resolved(save.path.parent)), self._node.local_checkpoints(save.job)
        if (checkpoint := checkpoints.find(save.token)) is not None:  # a keeper that died has numbered it
            return checkpoint.record.number
        if root not in self._numbers:
            self._numbers[root] = max((checkpoint.record.number for checkpoint in checkpoints.all()), default=0)
        self._numbers[root] += 1
        return self._numbers[root]

    def _index(self, save: Save, sizes: dict[str, int]) -> CheckpointIndex:
        head = save.head
        written = [save.parts[rank].written for rank in sorted(save.parts)]
        places = Places.merged([part.places for part in written], head.order)
        index = CheckpointIndex.of(head.table, places, sizes)
        index.left_out, index.rounded = dict(head.left_out), dict(head.rounded)
        index.empty = [key for key in head.empty if key in index]
        return index

    @staticmethod
    def _facts(save: Save) -> Facts:
        head = save.head
        written = [part.written for part in save.parts.values()]
        items, nbytes = sum(part.items_reused for part in written), sum(part.bytes_reused for part in written)
        reused = {"bytes": nbytes, "items": items, "from": "the checkpoint before"} if items else {}
        return replace(head.facts, reused=reused)

    def _run_of(self, save: Save) -> str:
        """Return the name of the run; empty until the durable storage has answered.

        Each training asks once: the folder of checkpoints may have been emptied before it began, and then has another
        run. A thread asks, so that a slow storage does not delay the local tier.
        """
        if save.job.keeper.durable_every is None:
            return ""
        root = resolved(save.path.parent)
        known = self._runs.get((str(root), save.job.key))
        if known is None:
            self._runs[str(root), save.job.key] = ""
            threading.Thread(target=self._find_run, args=(root, save.job.key), name="keeper-run", daemon=True).start()
        return known or ""

    def _find_run(self, root: Where, key: bytes) -> None:
        try:
            self._runs[str(root), key] = make_run(root)
        except (OSError, CheckpointError):  # asked again with the next save
            self._runs.pop((str(root), key), None)

    # Replicate

    def _replicate(self, save: Save) -> Stage:
        keeper, others = save.job.keeper, len(save.nodes) - 1
        copies = min(keeper.replicas, others)
        if keeper.replicas > others:
            nodes = f"{others + 1} node{'s' * bool(others)}"
            text = f"saves have {others} copies, and not keeper.replicas={keeper.replicas}: the job has {nodes}"
            save.degraded.append(text)
            if not self._warned_of_copies:
                self._warn(save, text)
            self._warned_of_copies = True
        try:
            if copies:
                self._copy_around(save, copies)
            save.copies = copies
        except Exception as error:  # a save without copies is better than none, and the next save tries again
            self._degrade(save, f"{save.path} has no copies on other nodes: {error}")
        failure = self._complete(save)
        if keeper.durable_every and (save.number % keeper.durable_every == 0 or save.head.durable):
            self._drop_overtaken(keeper.keep - 1)
            return "drain"
        return self._end(save, published=False) if failure is None else self._fail(save, failure)

    def _complete(self, save: Save) -> Exception | None:
        """Record on all nodes that they have their parts; return the failure of a node."""
        needed, run = self.tokens(), self._run_of(save)
        try:
            self._on_all(save, "complete", lambda node: (self._ranks(node), needed, run, save.copies))
        except Exception as error:
            self._degrade(save, f"{save.path} is not complete locally: {error}")
            return error
        save.local_seconds = time.monotonic() - save.job.began
        return None

    def _copy_around(self, save: Save, replicas: int) -> None:
        """Have each node send its part to the nodes that follow it."""
        nodes = save.nodes

        def call(node: list[Peer]) -> tuple[Any, ...]:
            at = nodes.index(node)
            to = [nodes[(at + step) % len(nodes)][0].address for step in range(1, replicas + 1)]
            return node[0].rank, save.names_of(node), to, save.job.key

        self._retried(
            save,
            lambda: self._on_all(save, "replicate", call),
            lambda: 0.0 if self._waiting("replicate") else self._patience(save),
            f"to copy {save.path} to other nodes",
        )

    def _drop_overtaken(self, keep: int) -> None:
        """Drop all but the newest saves that wait for the durable storage.

        Args:
            keep: Number of waiting saves that stay. The caller adds one more.
        """
        with self._changed:
            waiting = self._waiting("drain")
            overtaken = waiting[: max(0, len(waiting) - keep)]
            for save in overtaken:
                save.is_in_work = True
        for save in overtaken:
            self._put(save, self._give_way(save, "newer saves have overtaken it in keeper.dir"))

    def _give_way(self, save: Save, why: str) -> Stage:
        """End a save that is not copied to its path, because newer ones wait. If it is complete locally, that is no
        failure."""
        if save.local_seconds is None:
            return self._fail(save, SaveFailed(f"{save.path} was not copied to its path: {why}"))
        self._degrade(save, f"{save.path} is in keeper.dir, and was not copied to its path: {why}")
        self._end(save, published=False)
        self._journal.forget(save.token)
        return "ended"

    # Drain

    def _drain(self, save: Save) -> Stage:
        def is_overtaken() -> bool:
            return len(self._waiting("drain")) >= save.job.keeper.keep

        try:
            self._retried(
                save,
                lambda: self._drain_once(save),
                lambda: 0.0 if is_overtaken() else save.job.config.timeout,
                f"to bring {save.path} to its path",
            )
        except DurabilityUnknown as error:
            return self._end(save, published=True, error=error)
        except Exception as error:
            return self._give_way(save, str(error)) if is_overtaken() else self._fail(save, error)
        self._prune(save)
        return self._end(save, published=True)

    def _drain_once(self, save: Save) -> None:
        try:
            if not save.parts:  # written by a previous keeper, or before the save was reopened: the journal has them
                self._write_parts(save, None)
            with self._reserved(save) as (publication, directory):
                renamed = directory.stem
                self._of_all(save, lambda node: self._drain_part(save, node, directory, renamed))
                self._publish(save, publication, self._index_of(save, renamed))
        except SaveFailed as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None  # _retried() repeats OSErrors, which may pass
            raise

    def _drain_part(self, save: Save, node: list[Peer], directory: Where, renamed: str) -> None:
        """Have a node copy its part to the path. If it does not answer, have a node with a copy of the part do it."""
        nodes = save.nodes
        at, copies = nodes.index(node), min(save.job.keeper.replicas, len(nodes) - 1)
        for step in range(copies + 1):
            holder = nodes[(at + step) % len(nodes)][0]
            try:
                self._ask(save, holder, "drain", (holder.rank, save.names_of(node), directory, renamed))
                return
            except (OSError, KeeperLost):
                if step == copies:
                    raise

    def _index_of(self, save: Save, renamed: str) -> CheckpointIndex:
        """Return the locally written index with the names of the files at the path."""
        file = self._node.local_checkpoints(save.job).folder_of(save.token) / INDEX
        data = file.read_bytes()
        index = index_file.decode(data, fingerprint(data), str(file))
        index.rename_files(lambda name: name.replace(f"-{save.token}", f"-{renamed}"))
        return index

    # The end

    def _warn(self, save: Save, text: str) -> None:
        """Log a warning, and record it for the ranks."""
        text = shown(text)
        logger.warning("%s", text)
        with suppress(OSError):  # the memory may be full
            self._journal.change(save.token, messages=(*self._journal.state(save.token).messages, text))

    def _degrade(self, save: Save, text: str) -> None:
        """Record that a save lacks a tier or a copy, and log a warning."""
        save.degraded.append(text)
        self._warn(save, text)

    def _prune(self, save: Save) -> None:
        if (keep_last := save.job.config.keep_last) is not None:
            try:
                deletion.prune(save.path, keep_last)
            except (OSError, CheckpointError) as error:
                self._warn(save, f"could not delete old checkpoints beside {save.path}: {error}")

    def _fail(self, save: Save, error: Exception) -> Stage:
        if not isinstance(error, CheckpointError):
            error = SaveFailed(f"cannot save {save.path}: {type(error).__name__}: {error}")
        is_local = save.local_seconds is not None
        self._warn(save, f"{save.path} was NOT saved{' but locally' if is_local else ''}: {error}")
        return self._end(save, published=False, error=error)

    def _end(self, save: Save, published: bool, error: Exception | None = None) -> Stage:
        end = End(
            published,
            local=save.local_seconds is not None,
            error=None if error is None else sendable(error),
            seconds=time.monotonic() - save.began,
            path=str(save.path),
            time=save.published_at,
            copies=save.copies,
            degraded=shown("; ".join(save.degraded)),
            local_seconds=save.local_seconds,
        )
        self._note(save, end)

        def call(node: list[Peer]) -> tuple[Any, ...]:
            written = {peer.rank: save.parts[peer.rank].written for peer in node if peer.rank in save.parts}
            bytes_of = {rank: (part.nbytes, part.bytes_reused) for rank, part in written.items()}
            return self._ranks(node), replace(end, bytes=bytes_of), save.path

        try:
            self._on_all(save, "end", call)
        except Exception as failure:  # a node is gone: record the end here, for the ranks that ask this keeper
            logger.warning("cannot notify all nodes of the end of the save of %s: %s", save.path, failure)
            self._node.end(save.token, *call(save.nodes[0]))
        return "ended"

    @staticmethod
    def _note(save: Save, end: End) -> None:
        """Add the cost of the save to the figures of the run."""
        head, step = save.head, save.job.step
        if end.failure is None and not save.parts:  # reopened and given up, before its parts were read from the journal
            return
        if end.failure is not None:
            record = events.SaveRecord(head.save_id, head.run)
            error = f"{type(end.failure).__name__}: {end.failure}"
            figures.note(events.SaveAborted(save.path, step, 0, error, record))
            return
        parts = [save.parts[rank].written for rank in sorted(save.parts)]
        seconds, blocked = time.monotonic() - save.job.began, save.job.spent.blocked_seconds
        event = events.SaveFinished(
            save.path,
            step,
            0,
            seconds=seconds,
            blocked_seconds=seconds if blocked is None else blocked,
            staging_seconds=save.job.spent.staging_seconds,
            write_seconds=end.seconds,
            tier="durable" if end.published else "local",
            local_seconds=end.local_seconds,
            copies=end.copies,
            degraded=end.degraded,
            record=events.SaveRecord(head.save_id, head.run, head.facts.metrics, figures.costs_of(parts)),
        )
        figures.note(event)


def _newest_at(path: Where, but: float, save_id: str) -> float:
    """Return the recorded time of the checkpoint at a path.

    Return 0 without a checkpoint, for the time ``but``, and for a checkpoint of the save itself. A keeper may die after
    it has published a save and before it has recorded that.
    """
    with suppress(CheckpointError):
        summary = read_summary(path)
        if summary is not None and summary.time != but and summary.save_id != save_id:
            return summary.time
    return 0.0
