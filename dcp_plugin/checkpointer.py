"""Save and load live objects: the one thing that every door talks to.

A save goes one way: gather the state, (stage it on the host,) plan, write, publish. With ``async_save`` everything
after staging runs in a background thread. A load goes one way: open, want, plan, read, take.

Ranks meet twice in a save: to plan (a second time if the plan is not the last one's), and when all have written, to
learn that it is published. In a load they agree on each step that can fail: to open, to compare, to read, to take. No
rank's part of a load depends on another's, unless they share the reading.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from dcp_plugin import lifecycle, progress
from dcp_plugin._python import before_threads_end
from dcp_plugin.config import CheckpointConfig, PathLike, local_path
from dcp_plugin.errors import CheckpointError, SaveFailed
from dcp_plugin.loading import Loading
from dcp_plugin.partial import PartialLoad
from dcp_plugin.planning.exchange import Exchange, in_table_order
from dcp_plugin.planning.holdings import Holding
from dcp_plugin.planning.save import ShardedSavePlanner, encode_state
from dcp_plugin.ranks import Ranks
from dcp_plugin.staging.snapshot import HostBuffers
from dcp_plugin.state.app import gather_state, layouts_of, parts_of
from dcp_plugin.storage.table import Location, Places
from dcp_plugin.storage.views import Aliases, Views
from dcp_plugin.storage.writer import Assignment as WhereToWrite
from dcp_plugin.storage.writer import ShardedWriter, wait_until_visible
from dcp_plugin.types import Flat, KeyPath, LoadReport

logger = logging.getLogger("dcp_plugin")


class SaveHandle:
    """A save under way.

    :meth:`wait` raises what the save raised. An error that nobody asked for is raised by the checkpointer at the
    next save, at ``wait`` or at ``close``; whoever gets it first has taken it.
    """

    def __init__(self, path: Path, step: int | None) -> None:
        self.path = path
        self.step = step
        self._done = threading.Event()
        self._error: Exception | None = None
        self._told = False

    def staged(self) -> bool:
        """Whether training may change the state again. True when ``save`` returns."""
        return True

    def done(self) -> bool:
        """Whether the save has ended: published or failed."""
        return self._done.is_set()

    def exception(self) -> Exception | None:
        """The error of an ended save, without raising it."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save is published.

        Raises:
            SaveFailed: It failed; on every rank.
            TimeoutError: It has not ended within ``timeout`` seconds. It goes on.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the save of {self.path} has not ended within {timeout} s; it goes on")
        if self._error is not None and not self._told:
            self._told = True
            raise self._error

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self._done.set()


@dataclass(frozen=True)
class _Job:
    """What is left to do when the state is gathered, on one rank. ``failure``: gathering has failed here."""

    path: Path
    step: int | None
    state: Flat
    paths: dict[str, KeyPath]
    failure: Exception | None
    began: float
    writer: ShardedWriter


class Checkpointer:
    """Saves and loads, with one configuration, one process group and one host copy for all its saves.

    Args:
        config: Defaults to ``CheckpointConfig()``.
        solo: This process alone saves and loads; no collectives.
        overrides: Fields of the configuration.
    """

    def __init__(self, config: CheckpointConfig | None = None, *, solo: bool = False, **overrides: Any) -> None:
        self.config = CheckpointConfig.merge(config, **overrides)
        self._solo = solo
        self._ranks: Ranks | None = None
        self._buffers = HostBuffers()
        self._exchange = Exchange()
        self._in_flight: SaveHandle | None = None
        self._thread: threading.Thread | None = None

    def save(
        self,
        state: Mapping[str, Any],
        path: PathLike,
        step: int | None = None,
        files: Callable[[Path], None] | None = None,
        views: Views | None = None,
        aliases: Aliases | None = None,
    ) -> SaveHandle:
        """Save ``state`` as the checkpoint directory ``path``. Collective.

        Args:
            state: Name to Module, Optimizer, Stateful, tensor, plain value, or a mapping of these.
            path: A directory that all ranks share. A checkpoint that is there is replaced when this one is complete.
            step: Recorded in the checkpoint.
            files: Called on every rank, before anything else happens, with the directory in which the checkpoint is
                being made. What it puts there is published with the checkpoint, and belongs to it. It may still
                change ``state``. With it, ``path`` may be a directory that has other files in it already; they stay.
            views: More tables of contents for stock loaders, see :mod:`dcp_plugin.storage.views`.
            aliases: More keys for stock loaders, see there too.

        Returns:
            A handle; the save is complete already unless the configuration says ``async_save``.

        Raises:
            SaveFailed: On every rank, naming the ranks where it went wrong. What was at ``path`` is untouched. Also
                raised for an earlier background save that failed.
            UnsafeCheckpoint, CheckpointMismatch: The state cannot be saved; naming all keys.
            RankFailure: A rank died, or did not answer within the timeout.
        """
        ranks = self._meet_again()
        began = time.monotonic()
        writer = self._writer(local_path(path), step, views, aliases)
        if files is not None:
            self._add_files(writer, ranks, files)
        handle = SaveHandle(writer.path, step)
        if not self.config.async_save:
            with _collector_paused(), progress.progress_line(writer.path, self._shows_progress(ranks)):
                self._write(self._gather(state, step, writer, began), ranks, blocked=None)
            handle._end(None)
            return handle
        job = self._gather(state, step, writer, began)
        blocked = time.monotonic() - job.began
        self._in_flight = handle
        _unattended.add(self)
        _attend_when_the_program_ends()
        self._thread = threading.Thread(
            target=self._run, args=(handle, lambda: self._write(job, ranks, blocked)), name="dcp-save"
        )
        self._thread.start()
        return handle

    def load(
        self, state: Mapping[str, Any], path: PathLike, partial: PartialLoad | None = None, strict: bool = True
    ) -> LoadReport:
        """Load a checkpoint into ``state``, in place. Collective.

        Modules and optimizers may be wrapped and distributed in another way than those that were saved. Tensors are
        filled; plain values are replaced in the mapping that holds them; a mapping without live objects receives
        everything that the checkpoint has under its name.

        Everything that can be checked is checked before the first byte is overwritten. What remains: if reading
        fails half-way (a bad disk, a checksum that differs), modules and existing optimizer state are partly loaded.

        Parameters and buffers are filled in their own memory, without hooks of ``load_state_dict``; whatever else a
        module has in its state dict goes through ``load_state_dict``.

        Args:
            partial: Which keys of ``state`` to load, and from where; the others keep their values. The same on all
                ranks. Without one, everything is loaded, and converted to the dtypes of ``state``.
            strict: Whether missing and unexpected keys of modules and optimizers, and missing ones of anything else,
                are errors. ``False`` goes before ``partial``'s ``"error"``; its ``"warn"`` still warns.

        Raises:
            CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: On every rank.
            CheckpointMismatch: Naming all keys that do not fit, and what would make them; or ranks that load
                different checkpoints, or different parts.
            RankFailure: A rank died, or did not answer within the timeout.
        """
        ranks = self._meet_again()
        with _collector_paused():
            return Loading(ranks, self.config, local_path(path), partial, strict).run(state)

    def remove(self, path: PathLike) -> None:
        """Delete a checkpoint, after the save in flight if that is writing it. Call it on one rank."""
        handle = self._in_flight
        if handle is not None and handle.path == local_path(path):
            handle._done.wait()
        lifecycle.remove(path)

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            SaveFailed: The save in flight failed, on every rank; raised once.
        """
        handle, thread = self._in_flight, self._thread
        self._in_flight = self._thread = None
        _unattended.discard(self)
        if thread is not None:
            thread.join()
        if handle is not None:
            handle.wait()

    @property
    def ranks(self) -> Ranks:
        """The group of ranks that save and load together, for a door that has something to agree on. Collective."""
        return self._meet()

    def all_ranks_come_to(self, step: str, within: float) -> bool:
        """Whether every rank calls this, in a situation in which some may not; True for a rank alone.

        False after ``within`` seconds, and at once if the ranks have not met yet or an earlier failure parted them.
        """
        if self._solo:
            return True
        return self._ranks is not None and self._ranks.usable and self._ranks.all_come_to(step, within)

    def close(self) -> None:
        """Finish what is in flight, free the host copy and leave the process group. Saving again is possible.

        Raises:
            SaveFailed: As :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            self._buffers.clear()
            self._exchange = Exchange()
            if self._ranks is not None:
                self._ranks.close()
                self._ranks = None

    def _attend_late(self) -> None:
        """The program ends, and nobody has waited for the save in flight."""
        handle, ranks = self._in_flight, self._ranks
        if handle is not None and not handle.done() and (ranks is None or ranks.rank == 0):
            logger.warning(
                "the program ends while %s is being saved; it goes on until that is on disk. Wait for it, or close "
                "what saves, to be told whether it succeeded.",
                handle.path,
            )
        try:
            self.wait()
        except Exception as error:
            logger.error("%s was NOT saved, and the program ended without asking: %s", handle and handle.path, error)

    def _meet(self) -> Ranks:
        """The group of ranks; made at the first use, and again after a failure or a new default group."""
        if self._solo:
            return Ranks()
        if self._ranks is None or not self._ranks.usable:
            self._ranks = Ranks.of_default_group(self.config.timeout)
        return self._ranks

    def _meet_again(self) -> Ranks:
        """The group of ranks, after the save in flight. Its failure is known to all ranks, but some may have been told
        through their handle: then all raise if any has not."""
        previous = self._in_flight
        told: Exception | None = None
        try:
            self.wait()
        except Exception as error:
            told = error
        ranks = self._meet()
        if previous is not None and previous.exception() is not None:
            ranks.agree("go on after a failed save", lambda: _raise(told))
        return ranks

    def _writer(self, path: Path, step: int | None, views: Views | None, aliases: Aliases | None) -> ShardedWriter:
        config = self.config
        return ShardedWriter(
            path,
            step=step,
            io_threads=config.io_threads,
            direct_io=config.direct_io,
            checksum=config.checksum,
            views=views,
            aliases=aliases,
        )

    def _gather(self, state: Mapping[str, Any], step: int | None, writer: ShardedWriter, began: float) -> _Job:
        """This rank's part of the state, copied if it is written later. A failure is kept until all ranks meet."""
        flat: Flat = {}
        paths: dict[str, KeyPath] = {}
        failure: Exception | None = None
        try:
            parts = parts_of(state, stock_aliases=bool(self.config.stock_aliases))
            leaves, paths = gather_state(parts)
            flat = encode_state(leaves, self.config.allow_pickle)
            writer.facts = {
                "kinds": {part.name: part.kind for part in parts if part.kind in ("module", "optimizer")},
                "layouts": layouts_of(leaves),
            }
            if self.config.async_save:
                flat = self._buffers.copy(flat)
        except Exception as error:
            failure = error
        return _Job(writer.path, step, flat, paths, failure, began, writer)

    @staticmethod
    def _add_files(writer: ShardedWriter, ranks: Ranks, files: Callable[[Path], None]) -> None:
        path = writer.path
        try:
            directory = ranks.from_zero(f"reserve {path}", lambda: writer.reserve(among_other_files=True))
            ranks.agree(f"add files to {path}", lambda: _add(directory, path, files))
        except Exception:
            writer.discard()
            raise

    @staticmethod
    def _run(handle: SaveHandle, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            logger.error("the background save of %s failed: %s", handle.path, error)
            handle._end(error)
        else:
            handle._end(None)

    def _write(self, job: _Job, ranks: Ranks, blocked: float | None) -> None:
        """Plan, write, publish. On every rank, or on none."""
        planner, writer = ShardedSavePlanner(), job.writer

        def hold() -> Holding:
            if job.failure is not None:
                raise job.failure
            planner.set_up_planner(job.state, None, ranks.rank == 0)
            planner.use_paths(job.paths)
            return planner.holding()

        def write() -> Places:
            progress.emit(progress.SaveStarted(job.path, job.step))
            plan = SavePlan(planned.items, storage_data=WhereToWrite(ranks.rank, directory))
            results = writer.write_data(plan, planner).wait()
            locations: dict[MetadataIndex, Location] = {result.index: result.storage_data for result in results}
            return Places.of([locations[item.index] for item in plan.items])

        def publish(results: list[Places]) -> None:
            assert planned.assignment is not None, "rank 0 has made it"
            places = Places.joined(results).take(in_table_order(planned.assignment))
            writer.finish_columns(planned.assignment.table, places, ranks.size)
            if self.config.keep_last is not None:
                try:
                    lifecycle.prune(job.path, self.config.keep_last)
                except (OSError, SaveFailed) as error:  # the new checkpoint is published; old ones that stay do no harm
                    logger.warning("could not delete old checkpoints beside %s: %s", job.path, error)

        try:
            step = f"plan the save of {job.path}"
            planned, directory = self._exchange.plan(step, ranks, hold, writer.reserve)
            ranks.combine(f"write {job.path}", write, publish)
        except Exception as error:
            writer.discard()
            if isinstance(error, CheckpointError):
                raise
            raise SaveFailed(f"cannot save {job.path}: {type(error).__name__}: {error}") from error
        seconds = time.monotonic() - job.began
        waited = seconds if blocked is None else blocked
        try:
            progress.emit(progress.SaveFinished(job.path, job.step, writer.bytes_written, seconds, waited))
        except Exception:
            logger.exception("a subscriber failed after %s was published", job.path)

    def _shows_progress(self, ranks: Ranks) -> bool:
        wanted = sys.stderr.isatty() if self.config.progress == "auto" else self.config.progress
        return wanted and ranks.rank == 0


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Saves and loads make many small objects, none of them garbage: looking for it again and again takes most of
    the time of a checkpoint of small tensors. Not in the background, where training makes garbage meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_unattended: set[Checkpointer] = set()
"""Those whose background save nobody has waited for yet."""


@functools.cache
def _attend_when_the_program_ends() -> None:
    def attend() -> None:
        for checkpointer in tuple(_unattended):
            checkpointer._attend_late()

    before_threads_end(attend)


def _add(directory: Path, path: Path, files: Callable[[Path], None]) -> None:
    wait_until_visible(directory, path)
    files(directory)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
