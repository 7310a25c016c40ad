"""The second half of a save: plan, write, publish. On every rank, or on none.

Ranks meet twice: to plan (a second time if the plan is not the last one's), and when all have written, to learn that
it is published. Before, if some of it may be left out, to decide what.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from dcp_plugin import events
from dcp_plugin.config import CheckpointConfig, local_path
from dcp_plugin.errors import CheckpointError, CheckpointMismatch, RankFailure, SaveFailed
from dcp_plugin.format.columns import Location, Places
from dcp_plugin.planning.local_inventory import Holding
from dcp_plugin.planning.plan_exchange import Exchange, in_table_order
from dcp_plugin.planning.rank_local import RankLocal
from dcp_plugin.planning.save import ShardedSavePlanner
from dcp_plugin.ranks import Ranks
from dcp_plugin.runs import catalog
from dcp_plugin.saving.base import LeftOut, Omission
from dcp_plugin.saving.gather import Gathered
from dcp_plugin.storage.reuse import Reuse
from dcp_plugin.storage.writer import Assignment as WhereToWrite
from dcp_plugin.storage.writer import ShardedWriter
from dcp_plugin.types import EncodedValue, Flat

logger = logging.getLogger("dcp_plugin")


@dataclass(frozen=True)
class _Written:
    """What one rank tells rank 0 when it has written its part."""

    places: Places
    items_reused: int
    bytes_reused: int
    why_not: str


class Saving:
    """Writes one save after another, and remembers what makes the next one cheaper: the plan, what has not changed
    since the last checkpoint, what another checkpoint has."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self.exchange = Exchange()
        self._local = RankLocal()
        self.reuse = Reuse() if config.reuse else None
        if self.reuse is not None and config.base is not None:
            self.reuse.loaded(local_path(config.base))
        self.omission = Omission(config)

    def forget_plan(self) -> None:
        """The group of ranks that remember it together is no more."""
        self.exchange = Exchange()
        self._local = RankLocal()

    def write(self, job: Gathered, ranks: Ranks) -> events.SaveFinished:
        """Plan, write, publish. On every rank, or on none."""
        began = time.monotonic()
        planner, writer = ShardedSavePlanner(), job.writer
        publishing = published = False

        def hold() -> Holding:
            if job.failure is not None:
                raise job.failure
            paths = dict(job.paths)
            state = self._leave_out(job.state, left_out, writer)
            mine = self._local.sorted_out(state, paths, job.shards, ranks.rank)
            writer.empty = [key for key, one in mine.items() if isinstance(one, EncodedValue) and one.is_empty_mapping]
            planner.take(mine, paths)
            return planner.holding()

        def write() -> _Written:
            _refuse_another_path(job.path, path, ranks.rank)
            events.emit(events.SaveStarted(job.path, job.step))
            plan = SavePlan(planned.items, storage_data=WhereToWrite(ranks.rank, directory))
            results = writer.write_data(plan, planner).wait()
            locations: dict[MetadataIndex, Location] = {result.index: result.storage_data for result in results}
            found = writer.findings
            places = Places.of([locations[item.index] for item in plan.items])
            return _Written(places, found.items, found.bytes, found.why_not)

        def publish(results: list[_Written]) -> None:
            nonlocal publishing, published
            publishing = True
            assert planned.assignment is not None, "rank 0 has made it"
            places = Places.joined([result.places for result in results]).take(in_table_order(planned.assignment))
            self._note_reuse(writer, results)
            writer.finish_columns(planned.assignment.table, places, ranks.size)
            published = True
            if self._config.keep_last is not None:
                try:
                    catalog.prune(job.path, self._config.keep_last)
                except (OSError, SaveFailed) as error:  # the new checkpoint is published; old ones that stay do no harm
                    logger.warning("could not delete old checkpoints beside %s: %s", job.path, error)

        try:
            left_out = self.omission.agree(job.state, ranks, job.path, job.failure)
            step = f"plan the save of {job.path}"
            planned, (path, directory) = self.exchange.plan(step, ranks, hold, lambda: _reserve(writer), self._local)
            ranks.combine(f"write {job.path}", write, publish)
        except Exception as error:
            writer.discard()
            if published:  # and a rank was lost before all had heard of it
                error = RankFailure(f"{error} {job.path} had been published by then, and is complete.")
            self._tell(events.SaveAborted(job.path, job.step, ranks.rank, f"{type(error).__name__}: {error}"))
            if type(error) is CheckpointError:  # not one of ours on some rank, told to all
                raise SaveFailed(str(error)) from (error.__cause__ or error)
            if isinstance(error, CheckpointError):
                raise error
            raise SaveFailed(f"cannot save {job.path}: {type(error).__name__}: {error}") from error
        except BaseException:  # Ctrl-C. In the middle of publishing nothing is deleted: what was there may be aside
            if not publishing:
                writer.discard()
            raise
        if self.reuse is not None:
            self.reuse.published(job.path)
        now = time.monotonic()
        event = events.SaveFinished(
            job.path,
            job.step,
            writer.bytes_written,
            seconds=now - job.began,
            blocked_seconds=now - job.began if job.blocked is None else job.blocked,
            staging_seconds=job.copied,
            write_seconds=now - began,
            rank=ranks.rank,
            bytes_reused=writer.findings.bytes,
        )
        self._tell(event)
        return event

    def _tell(self, event: events.SaveFinished | events.SaveAborted) -> None:
        """How a save has ended. What goes wrong with telling it is not the save's failure."""
        try:
            events.emit(event)
            if self._config.events is not None and event.rank == 0:
                events.append_json(Path(self._config.events), event)
        except Exception:
            logger.exception("a subscriber failed after the save of %s had ended", event.path)

    def _leave_out(self, state: Flat, left_out: LeftOut, writer: ShardedWriter) -> Flat:
        if self._config.exclude:
            writer.facts["exclude"] = list(self._config.exclude)
        if not left_out.keys:
            return state
        writer.left_out = left_out.keys
        writer.facts["base"] = left_out.base_of(writer.path)
        return {key: value for key, value in state.items() if key not in left_out.keys}

    def _note_reuse(self, writer: ShardedWriter, results: list[_Written]) -> None:
        """For the summary, on rank 0; and say what stood in the way of more."""
        if self.reuse is None:
            return
        items = sum(one.items_reused for one in results)
        saved = sum(one.bytes_reused for one in results)
        if items:
            writer.facts["reused"] = {"bytes": saved, "items": items, "from": str(self.reuse.base)}
        self.reuse.say(next((one.why_not for one in results if one.why_not), ""))


def _refuse_another_path(mine: Path, path: Path, rank: int) -> None:
    if mine != path and os.path.realpath(mine) != os.path.realpath(path):
        raise CheckpointMismatch(
            f"rank {rank} saves {mine} and rank 0 {path}: all ranks save one checkpoint together. Have rank 0 choose "
            f"the name, and tell the others, if there is a time or a random part in it."
        )


def _reserve(writer: ShardedWriter) -> tuple[Path, Path]:
    """The path of the checkpoint, and the directory in which it is made."""
    dependent = catalog.completed_by(writer.path)
    if dependent is not None:
        raise SaveFailed(
            f"cannot save {writer.path}: the checkpoint there has the frozen parameters that {dependent} leaves out. "
            f"Save to a new name, or delete {dependent} first."
        )
    return writer.path, writer.reserve()
