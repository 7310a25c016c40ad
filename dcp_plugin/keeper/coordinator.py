"""Coordinator of the saves of a job, in the keeper of rank 0's node: from a handed-over save to a published one.

Three threads take one save after the other: *write* (every node writes its part and gets the complete index),
*replicate* (copies go to other nodes; then the save is complete locally), *drain* (the parts go to the durable path).
So a slow link or a store that is down delays only its own step, and host copies are free as soon as they are written.

A step asks all nodes at once, and repeats requests that failed for a passing reason. A tier that fails is reported, and
the other tiers continue. Without room in ``local_dir`` the save goes straight to its path. If a neighbour cannot be
reached, the save has no copy. While a store is down, the newest ``local_keep`` saves wait, and older ones are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_plugin import events
from dcp_plugin.errors import CheckpointError, DurabilityUnknown, SaveFailed
from dcp_plugin.format import INDEX, index_file
from dcp_plugin.format.columns import Places
from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.summary import Summary, fingerprint
from dcp_plugin.keeper.local_checkpoints import Record, make_run, path_of, shown, time_of
from dcp_plugin.keeper.node import Node, retried
from dcp_plugin.keeper.records import End, Go, Head, Part, Peer, RankJob
from dcp_plugin.keeper.requests import KeeperLost, Requests, sendable
from dcp_plugin.media import medium_of
from dcp_plugin.paths import Where, resolved
from dcp_plugin.ranks import Attempt
from dcp_plugin.runs import figures, retention
from dcp_plugin.storage.published import read_summary
from dcp_plugin.storage.writer import Facts, Publication, compose

logger = logging.getLogger("dcp_plugin.keeper")

_AT_ONCE = 64
"""Nodes that are asked at the same time."""
_MOST_TRIES = 5
"""Keepers that may die with one save in flight before it is given up: it may be what kills them."""
_WITHOUT_TRAINING = 30.0
"""Seconds for which another node is asked again when the training is dead: nobody will start its keeper anew."""
_UNANSWERED = 60.0
"""Seconds in which another keeper has to give a sign of life."""
_SILENT = 2.0
"""The same, for one that has missed that already."""


@dataclass
class Save:
    """One save under way."""

    go: Go
    job: RankJob
    """Of rank 0."""
    began: float
    nodes: list[list[Peer]]
    parts: dict[int, Part] = field(default_factory=dict)
    number: int = 0
    """Which save of the run it is, from 1 on."""
    record: Record | None = None
    local: bool = False
    local_at: float | None = None
    published_at: float = 0.0
    """The recorded time of the checkpoint at its path; 0 if it is not there."""
    copies: int = 0
    degraded: list[str] = field(default_factory=list)
    """What it lacks of what the configuration asks for, and why."""
    hopeless: bool = False
    """True if several keepers have died while they wrote this save."""

    @property
    def token(self) -> str:
        return self.go.token

    @property
    def path(self) -> Where:
        return self.job.where

    @property
    def head(self) -> Head:
        assert self.job.head is not None, "it is rank 0's"
        return self.job.head

    def names_of(self, node: Sequence[Peer]) -> list[str]:
        """Return the names of the files that the ranks of a node have written."""
        mine = [self.parts[peer.rank] for peer in node]
        return [name for part in mine for name in (*part.files, *part.attached)]


class Line:
    """Saves that wait for one thread."""

    def __init__(self, name: str, work: Callable[[Save], None]) -> None:
        self.waiting: list[Save] = []
        self.now: Save | None = None
        self._work = work
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=f"keeper-{name}", daemon=True).start()

    def add(self, save: Save) -> None:
        with self._changed:
            self.waiting.append(save)
            self._changed.notify_all()

    def tokens(self) -> list[str]:
        with self._changed:
            return [save.token for save in (*self.waiting, *([self.now] if self.now else []))]

    def overtaken(self, keep: int) -> list[Save]:
        """Take all waiting saves but the newest ``keep`` out of the queue, and return them."""
        with self._changed:
            gone, self.waiting = self.waiting[:-keep], self.waiting[-keep:]
            return gone

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self.waiting))
                self.now = self.waiting.pop(0)
            try:
                self._work(self.now)
            except Exception:  # the work tells its own failures: this is a mistake of ours, and must not end the thread
                logger.exception("a keeper's work has failed")
            with self._changed:
                self.now = None


class Coordinator:
    """Args:
    node: This node's own part of the work.
    attended: Returns whether the training is alive.
    say: Sends a message to the training.
    """

    def __init__(self, node: Node, attended: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._node, self._attended, self._say = node, attended, say
        self._known: set[str] = set()
        self._newest: Save | None = None
        """Complete locally and not durable."""
        self._runs: dict[tuple[str, bytes], str] = {}
        self._numbers: dict[str, int] = {}
        self._newest_token, self._members = "", set[str]()
        """The nodes of the training, as its newest save has them: nobody waits for one that is not among them."""
        self._warned: set[str] = set()
        self._silent: set[str] = set()
        """The nodes whose keepers have missed their deadlines, until they answer again."""
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._journal = node.journal
        self._published = self._journal.published()
        """By path: the newest save that was published there."""
        self._writing = Line("write", self._write)
        self._replicating = Line("replicate", self._replicate)
        self._draining = Line("drain", self._drain)

    def begin(self) -> None:
        """Begin the saves that all ranks have handed over since the last call, in that order."""
        with self._lock:
            tokens = self._journal.ready()
            fresh = [token for token in tokens if token not in self._known]
            self._known = set(tokens)
            for token in fresh:
                try:
                    self._begin(token)
                except Exception as error:  # nothing that is in a file may keep the keeper from the others
                    logger.exception("cannot begin the save %s", token)
                    failure = SaveFailed(
                        f"the host copies of the save cannot be read ({type(error).__name__}: {error})"
                    )
                    self._node.end(token, self._journal.ranks_of(token), End(False, False, failure))

    def _begin(self, token: str) -> None:
        go = self._journal.go_of(token)
        save = Save(go, self._journal.job(token, 0), time.monotonic(), go.nodes())
        end = self._journal.progress(token).end
        if token > self._newest_token:  # they are numbered by the time
            self._newest_token, self._members = token, {peer.node for peer in go.peers}
        if end is None:
            save.hopeless = self._journal.begin(token) >= _MOST_TRIES
            self._writing.add(save)
        elif not end.is_final:  # the keeper before could have drained it yet
            step = self._node.steps(save.job).find(token)
            if step is not None:
                save.record, save.local, self._newest = step.record, True, save

    def leads(self, token: str) -> bool:
        """Return True if a save was begun here."""
        return token in self._known

    @property
    def busy(self) -> bool:
        return any(line.tokens() for line in (self._writing, self._replicating, self._draining))

    def drain_newest(self, token: str) -> bool:
        """Copy a locally complete save to its path after all. Return whether it is there or will be."""
        with self._lock:
            newest = self._newest
            if newest is None or newest.token != token:
                end = self._journal.progress(token).end
                return token in self._draining.tokens() or (end is not None and end.published)
            self._newest = None
        try:
            self._on_all(newest, "reopen", lambda node: ())
        except Exception:
            with self._lock:
                self._newest = self._newest or newest
            raise
        self._draining.add(newest)
        return True

    def forget(self, path: str) -> None:
        """Do not copy the saves to a deleted path there any more."""
        with self._lock:
            gone = self._newest
            if gone is None or str(path_of(gone.path)) != path:
                return
            self._newest = None
        self._journal.forget(gone.token)

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
        if len(save.nodes) == 1:
            return [ask(save.nodes[0])]
        with ThreadPoolExecutor(min(_AT_ONCE, len(save.nodes)), thread_name_prefix="keeper-ask") as pool:
            asked = [pool.submit(ask, node) for node in save.nodes]
        failures = [one.exception() for one in asked]
        for failure in failures:
            if failure is not None:
                raise failure
        return [one.result() for one in asked]

    def _ask(self, save: Save, peer: Peer, what: str, args: tuple[Any, ...]) -> Any:
        if peer.node == save.go.peers[0].node:
            return getattr(self._node, what)(save.token, *args)

        heard = time.monotonic()

        def is_passed_over() -> bool:
            """Return whether the ranks write the save instead: only a training that lives can."""
            return peer.node in self._silent and self._attended()

        def ask() -> Attempt[Any]:
            nonlocal heard
            seconds = _SILENT if is_passed_over() else min(_UNANSWERED, save.job.config.timeout)
            with closing(Requests(peer.address, save.go.key)) as keeper:
                try:
                    return keeper.ask(seconds, what, save.token, *args)
                finally:
                    heard = max(heard, keeper.heard)

        def patience() -> float:
            if peer.node not in self._members or is_passed_over():
                return 0.0
            waited = time.monotonic() - heard if self._attended() else 0.0  # without a training, nobody waits
            return self._patience(save) - waited

        name = f"{save.path} on {peer.host} (rank {peer.rank})"
        try:
            answer = retried(ask, patience, self._say, f"to {what} {name}")
        except OSError as error:
            if peer.node not in self._silent:
                self._silent.add(peer.node)
                self._say(f"the keeper of rank {peer.rank} on {peer.host} does not answer ({error})")
            raise KeeperLost(f"the keeper of rank {peer.rank} on {peer.host} does not answer ({error})") from error
        self._silent.discard(peer.node)
        return answer.get()

    def _patience(self, save: Save) -> float:
        timeout = save.job.config.timeout
        return timeout if self._attended() else min(timeout, _WITHOUT_TRAINING)

    @staticmethod
    def _ranks(node: Sequence[Peer]) -> list[int]:
        return [peer.rank for peer in node]

    # Write

    def _write(self, save: Save) -> None:
        try:
            if save.hopeless:
                raise SaveFailed(f"{_MOST_TRIES} keepers have died while they wrote this save")
            if save.job.config.local_dir is None:
                self._write_to_path(save)
                return
            try:
                self._write_locally(save)
            except (OSError, CheckpointError) as error:
                if save.job.config.durable_every is None:
                    raise
                self._degrade(save, f"{save.path} is not kept in local_dir, but goes straight to its path: {error}")
                self._write_to_path(save)
                return
            self._free(save)
            self._replicating.add(save)
        except Exception as error:
            self._fail(save, error)

    def _free(self, save: Save) -> None:
        """Give the host copies back to the ranks, after every node has written its part.

        Before that, the save may have to be written again, to another place."""
        try:
            self._on_all(save, "free", lambda node: ())
        except Exception as error:  # they are told when it is complete
            self._say(f"a node does not hear that {save.path} is written: {error}")

    def _write_to_path(self, save: Save) -> None:
        head = save.head
        publication = Publication(save.path, medium_of(save.path, save.job.config.direct_io))
        publication.save_id = head.save_id
        try:
            retention.refuse_to_replace_a_base(save.path)
            directory = self._reserve(save, publication)
            self._write_parts(save, directory)
            index = self._index(save, publication.file_sizes())
            self._publish(save, lambda: publication.publish(index, self._facts(save), time_of(save.token)))
        except BaseException:
            publication.discard()
            raise
        self._prune(save)
        self._end(save, End(published=True, local=False))

    def _reserve(self, save: Save, publication: Publication) -> Where:
        """Reserve at the path, and record the reservation, so that the ranks can revoke it.

        In this order either the ranks find the record, or the keeper finds that the save is revoked.
        """
        directory = publication.reserve(save.head.among_other_files)
        self._journal.reserve(save.token, directory)
        self._journal.refuse_revoked(save.token)
        return directory

    def _write_parts(self, save: Save, directory: Where | None) -> None:
        """Have every node write its part, as :meth:`Node.write` does."""
        parts = self._on_all(save, "write", lambda node: (self._ranks(node), directory))
        save.parts = {rank: part for told in parts for rank, part in told.items()}

    def _publish(self, save: Save, publish: Callable[[], Summary]) -> None:
        """Publish a save, but never in place of a later one.

        A save that went straight to its path may have overtaken this one. And while this keeper was stopped, the ranks
        may have written later saves themselves.
        """
        path = str(save.path)
        self._journal.refuse_revoked(save.token)
        with self._publishing:
            token, time = self._published.get(path, ("", 0.0))
            if token > save.token or _newest_at(save.path, time, save.head.save_id) >= time_of(save.token):
                raise SaveFailed(f"a newer save was published at {path}. An older save does not replace it.")
            summary = publish()
            save.published_at = summary.time
            self._published[path] = save.token, summary.time

    def _write_locally(self, save: Save) -> None:
        save.number = self._next_number(save)
        self._write_parts(save, None)
        head = save.head
        sizes = {name: size for part in save.parts.values() for name, size in part.files.items()}
        index = self._index(save, sizes)
        index.extra_files = {name: told for part in save.parts.values() for name, told in part.attached.items()}
        attached = {name.partition("/")[0] for name in index.extra_files}
        now = time_of(save.token)
        files, summary = compose(
            save.path, StorageMeta(str(save.path), head.save_id), index, self._facts(save), attached, now
        )
        beside = {name: size for part in save.parts.values() for name, size in part.attached_sizes.items()}
        save.record = Record(
            path=str(path_of(save.path)),
            token=save.token,
            save_id=head.save_id,
            index_sha256=summary.index_sha256,
            time=now,
            step=save.job.step,
            run=self._run_of(save),
            number=save.number,
            files={**sizes, **beside, **{name: len(data) for name, data in files.items()}},
            nodes=len(save.nodes),
        )
        record = save.record
        self._on_all(save, "take", lambda node: (self._ranks(node), files, record))

    def _next_number(self, save: Save) -> int:
        """Return the number of a save. It continues the count of the previous training: a training that dies often
        reaches the durable storage, too."""
        root, steps = str(resolved(save.path.parent)), self._node.steps(save.job)
        if (known := steps.find(save.token)) is not None:  # a keeper has died with it
            return known.record.number
        if root not in self._numbers:
            before = steps.all()
            self._numbers[root] = max((step.record.number for step in before), default=0)
        self._numbers[root] += 1
        return self._numbers[root]

    def _index(self, save: Save, sizes: dict[str, int]) -> CheckpointIndex:
        head = save.head
        written = [save.parts[rank].written for rank in sorted(save.parts)]
        places = Places.joined([part.places for part in written]).take(head.order)
        index = CheckpointIndex.of(head.table, places, sizes)
        index.left_out = dict(head.left_out)
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

        Each training asks once, because the folder of checkpoints may have been emptied before the training began.
        """
        if save.job.config.durable_every is None:
            return ""
        root = resolved(save.path.parent)
        known = self._runs.get((str(root), save.go.key))
        if known is None:
            self._runs[str(root), save.go.key] = ""
            threading.Thread(target=self._find_run, args=(root, save.go.key), name="keeper-run", daemon=True).start()
        return known or ""

    def _find_run(self, root: Where, key: bytes) -> None:
        try:
            self._runs[str(root), key] = make_run(root)
        except (OSError, CheckpointError):  # asked again with the next save
            self._runs.pop((str(root), key), None)

    # Replicate

    def _replicate(self, save: Save) -> None:
        asked, others = save.job.config.replicas, len(save.nodes) - 1
        copies = min(asked, others)
        if asked > others:
            nodes = f"{others + 1} node{'s' * bool(others)}"
            text = f"saves have {others} of the {asked} copies that replicas asks for: the job has {nodes}"
            self._degrade(save, text, once=True)
        try:
            if copies:
                self._copy_around(save, copies)
            save.copies = copies
        except Exception as error:  # the next save has copies again, or says that it has none
            self._degrade(save, f"{save.path} has no copies on other nodes: {error}")
        failure = self._complete(save)
        every = save.job.config.durable_every
        drained = every is not None and (save.number % every == 0 or save.head.durable)
        only_local = not drained and failure is None
        with self._lock:
            before, self._newest = self._newest, save if only_local else None
        if before is not None:
            self._journal.forget(before.token)
        if drained:
            self._draining.add(save)
            self._make_room(save)
        elif failure is not None:
            self._fail(save, failure)
        else:
            self._end(save, End(published=False, local=True))

    def _complete(self, save: Save) -> Exception | None:
        """Record on all nodes that they have their parts; return the failure of a node."""
        needed = [*self._writing.tokens(), *self._replicating.tokens(), *self._draining.tokens()]
        run = self._run_of(save)
        try:
            self._on_all(save, "complete", lambda node: (self._ranks(node), needed, run, save.copies))
        except Exception as error:
            self._degrade(save, f"{save.path} is not complete locally: {error}")
            return error
        save.local, save.local_at = True, time.monotonic()
        return None

    def _copy_around(self, save: Save, replicas: int) -> None:
        """Have each node send its part to the nodes that follow it."""
        number = {node[0].node: at for at, node in enumerate(save.nodes)}
        count = len(save.nodes)

        def call(node: list[Peer]) -> tuple[Any, ...]:
            at = number[node[0].node]
            to = [save.nodes[(at + step) % count][0].address for step in range(1, replicas + 1)]
            return node[0].rank, save.names_of(node), to, save.go.key

        retried(
            lambda: self._on_all(save, "replicate", call),
            lambda: 0.0 if self._replicating.waiting else self._patience(save),
            self._say,
            f"to copy {save.path} to other nodes",
        )

    def _make_room(self, save: Save) -> None:
        """Drop the saves that have waited for the durable storage while too many newer ones came."""
        for old in self._draining.overtaken(save.job.config.local_keep):
            self._give_way(old, "newer saves have overtaken it in local_dir")

    def _give_way(self, save: Save, why: str) -> None:
        """End a save that does not reach its path, because a newer one will. No caller waits for it."""
        if not save.local:
            self._fail(save, SaveFailed(f"{save.path} was not copied to its path: {why}"))
            return
        self._degrade(save, f"{save.path} is in local_dir, and was not copied to its path: {why}")
        self._end(save, End(published=False, local=True))
        self._journal.forget(save.token)

    # Drain

    def _drain(self, save: Save) -> None:
        try:
            retried(
                lambda: self._drain_once(save),
                lambda: 0.0 if self._is_overtaken(save) else save.job.config.timeout,
                self._say,
                f"to bring {save.path} to its path",
            )
            self._prune(save)
            self._end(save, End(published=True, local=save.local))
        except DurabilityUnknown as error:
            self._end(save, End(published=True, local=save.local, error=error))
        except Exception as error:
            if self._is_overtaken(save):
                self._give_way(save, str(error))
            else:
                self._fail(save, error)

    def _is_overtaken(self, save: Save) -> bool:
        return len(self._draining.waiting) >= save.job.config.local_keep

    def _drain_once(self, save: Save) -> None:
        record = save.record
        assert record is not None, "it was written locally"
        config = save.job.config
        publication = Publication(save.path, medium_of(save.path, config.direct_io))
        publication.save_id = record.save_id
        try:
            retention.refuse_to_replace_a_base(save.path)
            if not save.parts:  # a keeper before has written it
                self._write_parts(save, None)
            directory = self._reserve(save, publication)
            renamed = directory.stem
            self._of_all(save, lambda node: self._drain_part(save, node, directory, renamed))
            index = self._index_of(save, renamed)
            self._publish(save, lambda: publication.publish(index, self._facts(save), record.time))
        except SaveFailed as error:
            publication.discard()
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None  # which may pass
            raise
        except BaseException:
            publication.discard()
            raise

    def _drain_part(self, save: Save, node: list[Peer], directory: Where, renamed: str) -> None:
        """Have a node copy its part to the path; if it does not answer, have a node with a copy of the part do it."""
        at, count = save.nodes.index(node), len(save.nodes)
        copies = min(save.job.config.replicas, count - 1)
        for step in range(copies + 1):
            holder = save.nodes[(at + step) % count][0]
            try:
                args = holder.rank, save.names_of(node), directory, renamed
                self._ask(save, holder, "drain", args)
                return
            except (OSError, KeeperLost):
                if step == copies:
                    raise

    def _index_of(self, save: Save, renamed: str) -> CheckpointIndex:
        """Return the locally written index with the names of the files at the path."""
        record = save.record
        assert record is not None
        folder = self._node.steps(save.job).folder_of(save.token)
        data = (folder / INDEX).read_bytes()
        index = index_file.decode(data, fingerprint(data), str(folder / INDEX))
        if renamed:
            index.rename_files(lambda name: name.replace(f"-{save.token}", f"-{renamed}"))
        return index

    # The end

    def _degrade(self, save: Save, text: str, once: bool = False) -> None:
        """Record that a save lacks a tier or a copy, and log a warning."""
        save.degraded.append(text)
        if not once or text not in self._warned:
            self._warned.add(text)
            self._say(text)

    def _prune(self, save: Save) -> None:
        policy = save.job.config.policy()
        if policy is not None:
            try:
                retention.prune(save.path, policy)
            except (OSError, CheckpointError) as error:
                self._say(f"could not delete old checkpoints beside {save.path}: {error}")

    def _fail(self, save: Save, error: Exception) -> None:
        if not isinstance(error, CheckpointError):
            error = SaveFailed(f"cannot save {save.path}: {type(error).__name__}: {error}")
        self._say(f"{save.path} was NOT saved{' but locally' if save.local else ''}: {error}")
        self._end(save, End(published=False, local=save.local, error=error))

    def _end(self, save: Save, end: End) -> None:
        end = replace(
            end,
            seconds=time.monotonic() - save.began,
            path=str(save.path),
            error=None if end.error is None else sendable(end.error),
            time=save.published_at,
            copies=save.copies,
            degraded=shown("; ".join(save.degraded)),
        )
        self._note(save, end)
        path = save.path if end.published else None
        try:
            self._on_all(save, "end", lambda node: (self._ranks(node), self._told(save, node, end), path))
        except Exception as error:  # a node that is gone; this one knows
            logger.warning("cannot notify all nodes of the end of the save of %s: %s", save.path, error)
            here = save.nodes[0]
            self._node.end(save.token, self._ranks(here), self._told(save, here, end), path)

    @staticmethod
    def _note(save: Save, end: End) -> None:
        """Record the cost of the save."""
        if (head := save.job.head) is None:
            return
        seconds = time.monotonic() - save.job.began
        failed = end.error is not None and not end.published
        if failed or not save.parts:
            record = events.SaveRecord(head.save_id, head.run)
            error = f"{type(end.error).__name__}: {end.error}"
            figures.note(events.SaveAborted(save.path, save.job.step, 0, error, record))
            return
        parts = [save.parts[rank].written for rank in sorted(save.parts)]
        blocked = save.job.spent.blocked_seconds
        event = events.SaveFinished(
            save.path,
            save.job.step,
            0,
            seconds=seconds,
            blocked_seconds=seconds if blocked is None else blocked,
            staging_seconds=save.job.spent.staging_seconds,
            write_seconds=end.seconds,
            tier="durable" if end.published else "local",
            local_seconds=save.local_at and save.local_at - save.job.began,
            copies=end.copies,
            degraded=end.degraded,
            record=events.SaveRecord(head.save_id, head.run, head.facts.metrics, figures.costs_of(parts)),
        )
        figures.note(event)

    @staticmethod
    def _told(save: Save, node: Sequence[Peer], end: End) -> End:
        """Return the end of a save with the bytes that the ranks of a node have written."""
        written = {peer.rank: save.parts[peer.rank].written for peer in node if peer.rank in save.parts}
        return replace(end, bytes={rank: (part.nbytes, part.bytes_reused) for rank, part in written.items()})


def _newest_at(path: Where, but: float, save_id: str) -> float:
    """Return the recorded time of the checkpoint at a path.

    Returns 0 if there is none, if its time is ``but``, or if it is of the save itself: a keeper may die after it has
    published a save and before it has recorded that.
    """
    with suppress(CheckpointError):
        summary = read_summary(path)
        if summary is not None and summary.time != but and summary.save_id != save_id:
            return summary.time
    return 0.0
