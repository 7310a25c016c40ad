"""The protocol of all writers of saves, and the writer whose caller waits, the calling thread.

The other two writers are a background thread (:mod:`dcp_plugin.core.saving.background`) and the keeper
(:mod:`dcp_plugin.core.sources`).

A writer takes live objects through all stages of :mod:`~dcp_plugin.core.saving.job`. It also plans, because a
background save plans in the background, and a lazy save has no staged state when the call returns.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import is_terminal
from dcp_plugin.core.interrupts import collector_paused
from dcp_plugin.core.media.choice import medium_of
from dcp_plugin.core.media.places import add_files
from dcp_plugin.core.paths import Where
from dcp_plugin.core.ranks.collectives import Attempt, Ranks
from dcp_plugin.core.ranks.groups import RankGroups
from dcp_plugin.core.records import LiveState, SaveRequest
from dcp_plugin.core.saving.job import SavePipeline, raise_as_failed_save
from dcp_plugin.core.saving.queue import RunningSave, SaveQueue, first_unreported
from dcp_plugin.core.sources import keeper_of
from dcp_plugin.core.state.names import module_cache
from dcp_plugin.core.storage.part_writer import Publication

logger = logging.getLogger("dcp_plugin")


class Writer(Protocol):
    """Thread or process that writes the saves of one checkpointer."""

    is_attached: bool = False
    """True if a keeper may be writing saves of this checkpointer."""

    def submit(self, handle: RunningSave, request: SaveRequest, live: LiveState, ranks: Ranks) -> None:
        """Begin a save, and return when training may continue. Collective.

        The handle ends when the checkpoint is published or the save has failed.

        Raises:
            CheckpointError: On every rank: the save has failed.
        """

    def idle_ranks(self) -> Ranks:
        """Return the group of ranks after all saves in flight have finished with it. Collective.

        Raises:
            CheckpointError: On every rank: a save in flight failed.
        """

    def is_free(self) -> bool:
        """Return whether the next save would begin without waiting for an earlier one."""

    def free_modules(self) -> None:
        """Take hooks off the modules that have been copied. Called in the training thread."""
        return

    def holdings(self) -> list[str]:
        """Return the resources that :meth:`close` gives back, in words."""
        return []

    def forget(self, path: Where) -> bool:
        """Delete the nodes' parts of the saves to ``path``; return whether this writer knows of such parts."""
        return False

    def bring_newest(self) -> None:
        """Copy the newest save to its path if the path does not have it yet."""
        return

    def close(self) -> None:
        """Give back memory and leave the keeper."""
        return


def writer_of(config: CheckpointConfig, pipeline: SavePipeline, queue: SaveQueue, groups: RankGroups) -> Writer:
    """Return the writer that a configuration asks for."""
    writer: Writer
    if config.async_save:
        from dcp_plugin.core.saving.background import BackgroundThread  # only asynchronous saves need host copies

        writer = BackgroundThread(config, pipeline, queue, groups)
    else:
        writer = CallingThread(config, pipeline, queue, groups)
    keeper = keeper_of(config)
    if keeper is not None:
        writer = keeper.writer(config, pipeline, queue, groups, writer)
    return writer


def is_rank_zero_busy(writer: Writer, groups: RankGroups, path: Where) -> bool:
    """Return whether rank 0 is busy with an earlier save, so that no rank saves to ``path``. Rank 0 logs a
    warning then. Collective."""
    front = groups.front()
    busy = front.from_zero("see whether a save is in flight", lambda: not writer.is_free())
    if busy and front.rank == 0:
        logger.warning("%s is NOT saved: an earlier save is still in flight (when_busy='skip')", path)
    return busy


class CallingThread(Writer):
    """Writer of saves whose caller waits. It writes from the memory of the state, without a copy."""

    def __init__(self, config: CheckpointConfig, pipeline: SavePipeline, queue: SaveQueue, groups: RankGroups) -> None:
        self._config, self._pipeline, self._queue, self._groups = config, pipeline, queue, groups

    def submit(self, handle: RunningSave, request: SaveRequest, live: LiveState, ranks: Ranks) -> None:
        with (
            self.publication(handle, request, ranks) as publication,
            collector_paused(),
            self.progress(handle, ranks),
        ):
            with module_cache():
                gathered = Attempt.of(lambda: self._pipeline.gather(live, ranks))
                staged = gathered.then(self._pipeline.stage_in_place)
            event = self._pipeline.run(publication, request, staged, ranks)
        handle.set_published(event)

    @contextmanager
    def publication(self, handle: RunningSave, request: SaveRequest, ranks: Ranks) -> Iterator[Publication]:
        """Yield the unpublished checkpoint, with the caller's files in it. Collective if the caller has files.

        An error of the block, such as Ctrl-C, discards the checkpoint, unless a thread writes it by then.
        """
        publication = Publication(request.path, medium_of(request.path, self._config.io.direct))
        try:
            if request.files is not None:
                _add_files(publication, request.files, ranks)
            yield publication
        except BaseException:
            if handle not in self._queue.handles:
                publication.discard()
            raise

    def progress(self, handle: RunningSave, ranks: Ranks, in_background: bool = False) -> AbstractContextManager[None]:
        wanted = is_terminal(sys.stderr) if self._config.progress == "auto" else self._config.progress
        if not wanted or ranks.rank != 0:
            return nullcontext()
        from dcp_plugin.core.saving import progress  # only few saves show it

        return progress.shown(handle.path, in_background)

    def idle_ranks(self) -> Ranks:
        """Wait for the saves in flight, and return the group of ranks.

        All ranks know the failures of these saves, but on some ranks the handle may have raised them already: then all
        ranks raise if any rank has not.
        """
        ended = self._queue.wait_for_all()
        self.free_modules()
        unreported = first_unreported(ended)
        try:
            ranks = self._groups.main()
        except BaseException as error:  # must not hide the failure that this call was about to raise
            if unreported is not None:
                error.add_note(
                    f"Before that, a save in the background failed: {type(unreported).__name__}: {unreported}"
                )
            raise
        if any(handle.exception() is not None for handle in ended):
            try:
                ranks.agree("go on after a failed save", Attempt(None, unreported).get)
            except Exception:
                if unreported is not None:
                    raise unreported from unreported.__cause__  # with the traceback of the background thread
                raise
        return ranks

    def is_free(self) -> bool:
        return all(handle.done() for handle in self._queue.handles)


def _add_files(publication: Publication, files: Callable[[Path], None], ranks: Ranks) -> None:
    """Reserve the directory of a checkpoint, and let every rank add files to it. Collective."""
    path = publication.path

    def add() -> None:
        publication.medium.join(directory, path)
        add_files(publication.medium, directory, files)

    try:
        directory = ranks.from_zero(f"reserve {path}", lambda: publication.reserve(among_other_files=True))
        ranks.agree(f"add files to {path}", add)
    except Exception as error:
        raise_as_failed_save(error, path)
