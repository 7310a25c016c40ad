"""The protocol of all writers of saves, and the writer whose caller waits, the calling thread.

The other two writers are a background thread (:mod:`dcp_plugin.core.saving.background`) and the keeper
(:mod:`dcp_plugin.core.sources`). ``submit`` of each writer calls the stages of :mod:`~dcp_plugin.core.saving.job`, from
live objects to the published checkpoint, in the order in which they run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import is_terminal, logger
from dcp_plugin.core.interrupts import collector_paused
from dcp_plugin.core.media import add_files, medium_of
from dcp_plugin.core.paths import Where
from dcp_plugin.core.ranks.collectives import Attempt, Ranks
from dcp_plugin.core.ranks.groups import RankGroups
from dcp_plugin.core.records import LiveState, SaveRequest
from dcp_plugin.core.saving.job import SavePipeline, raise_as_failed_save
from dcp_plugin.core.saving.queue import RunningSave, SaveQueue
from dcp_plugin.core.state.names import module_cache
from dcp_plugin.core.storage.part_writer import Publication


class SavesInKeeper(Protocol):
    """Saves of one checkpointer that a keeper may be writing."""

    def forget(self, path: Where) -> None:
        """Delete the nodes' parts of the saves to ``path``."""

    def bring_newest(self) -> None:
        """Copy the newest save to its path if the path does not have it yet."""


class Writer(Protocol):
    """Thread or process that writes the saves of one checkpointer."""

    @property
    def saves(self) -> SavesInKeeper | None:
        """The saves that a keeper may be writing; None if this process writes all saves."""

    def submit(self, handle: RunningSave, request: SaveRequest, live: LiveState, ranks: Ranks) -> None:
        """Begin a save, and return when training may continue. Collective.

        The writer ends the handle when the checkpoint is published or the save has failed.

        Raises:
            CheckpointError: On every rank: the save has failed.
        """

    def wait_for_ranks(self) -> Ranks:
        """Wait until no save in flight needs the group of ranks, and return the group. Collective.

        A background thread needs it until its save has ended. A save that a keeper has taken over needs it no more.

        Raises:
            CheckpointError: On every rank: a save that this call waited for failed. The failure of a save that a keeper
                writes is raised by its handle instead.
        """

    def free_modules(self) -> None:
        """Take hooks off the modules that have been copied. Called in the training thread."""

    def holdings(self) -> list[str]:
        """Return the resources that :meth:`close` gives back, in words."""

    def close(self) -> None:
        """Give back memory and leave the keeper."""


# The constructor of a keeper's writer, with the writer of the saves that it cannot take.
WriterFactory = Callable[[CheckpointConfig, SavePipeline, SaveQueue, RankGroups, Writer], Writer]


def is_rank_zero_busy(queue: SaveQueue, groups: RankGroups, path: Where) -> bool:
    """Return whether rank 0 is busy with an earlier save, so that no rank saves to ``path``. Collective.

    Rank 0 logs a warning if it is busy.
    """
    ranks = groups.for_calls()
    busy = ranks.from_zero("see whether a save is in flight", lambda: not queue.is_free)
    if busy and ranks.rank == 0:
        logger.warning("%s is NOT saved: an earlier save is still in flight (when_busy='skip')", path)
    return busy


class CallingThread:
    """Writer of saves whose caller waits. It writes from the memory of the state, without a copy."""

    saves = None

    def __init__(self, config: CheckpointConfig, pipeline: SavePipeline, groups: RankGroups) -> None:
        self._config, self._pipeline, self._groups = config, pipeline, groups

    def submit(self, handle: RunningSave, request: SaveRequest, live: LiveState, ranks: Ranks) -> None:
        with (
            discarded_on_error(request, self._config, ranks) as publication,
            collector_paused(),
            progress_of(request, self._config, ranks),
        ):
            with module_cache():
                gathered = Attempt.of(lambda: self._pipeline.gather(live, ranks))
                staged = gathered.then(self._pipeline.stage_in_place)
            event = self._pipeline.plan_write_publish(publication, request, staged, ranks)
        handle.set_published(event)

    def wait_for_ranks(self) -> Ranks:
        return self._groups.for_saves()

    def free_modules(self) -> None:
        pass  # without a copy there are no hooks

    def holdings(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


@contextmanager
def discarded_on_error(
    request: SaveRequest, config: CheckpointConfig, ranks: Ranks, is_in_flight: Callable[[], bool] = lambda: False
) -> Iterator[Publication]:
    """Yield the unpublished checkpoint, with the caller's files in it. Collective if the caller has files.

    An error of the block, such as Ctrl-C, discards the checkpoint. After a block without an error, the checkpoint is
    published, or a thread continues to write it.

    Args:
        is_in_flight: Returns true once a thread writes the checkpoint. An error of the block then discards nothing.
    """
    publication = Publication(request.path, medium_of(request.path, config.io.direct))
    try:
        if request.files is not None:
            _add_files(publication, request.files, ranks)
        yield publication
    except BaseException:
        if not is_in_flight():
            publication.discard()
        raise


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


def progress_of(
    request: SaveRequest, config: CheckpointConfig, ranks: Ranks, in_background: bool = False
) -> AbstractContextManager[None]:
    """Show the progress of a save during the block, on rank 0 and if the configuration asks for it."""
    wanted = is_terminal(sys.stderr) if config.progress == "auto" else config.progress
    if not wanted or ranks.rank != 0:
        return nullcontext()
    from dcp_plugin.core.saving import progress  # only few saves show it

    return progress.shown(request.path, in_background)
