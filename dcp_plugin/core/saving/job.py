"""Stages of one save, from record to record (:mod:`dcp_plugin.core.records`).

A writer (:mod:`dcp_plugin.core.saving.writers`) makes the process group, and then calls the stages in this order:

1. :meth:`SavePipeline.gather`.
2. :meth:`SavePipeline.stage_in_place` if the caller waits for the save, otherwise the copy of
   :mod:`dcp_plugin.core.staging.host_copy`.
3. :meth:`SavePipeline.plan_write_publish`. The keeper's writer calls :meth:`SavePipeline.leave_out` and
   :meth:`SavePipeline.plan` instead, and hands the plan over.

These are the meetings of the ranks, in this order. Every save has the two that begin with *always*:

- With ``files=``, two before the first stage: to reserve the directory, and to add the files.
- With ``exclude``, one at the first save: to find globs that match no key.
- With ``trainable_only``, one: to agree on the keys to leave out.
- Always, one to plan. Every rank sends its claim. Rank 0 reserves the directory and answers.
- If state that should be equal on all ranks differs, one to compare it. If optimizer state then needs keys of its own,
  another to plan.
- If the plan differs from that of the save before, two: to make it, and to compare the replicas in it.
- If replicas differ, three: to name them, to send new claims, and to make the plan again.
- Always, one to publish, after all ranks have written.

Gathering and staging have no collectives, except those of FSDP1 and of a user's ``state_dict``. A failure of one rank
between two meetings is kept as an :class:`~dcp_plugin.core.ranks.collectives.Attempt`. The next meeting raises it on
all ranks. A save of a keeper has other meetings after its plan (:mod:`dcp_plugin.tiers.keeper_writer`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from dcp_plugin.core import events
from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import CheckpointError, RankFailure, SaveFailed, logger
from dcp_plugin.core.format.index import CheckpointIndex, Places
from dcp_plugin.core.format.keys import encode_state
from dcp_plugin.core.format.summary import plain_metrics
from dcp_plugin.core.paths import Where
from dcp_plugin.core.planning.local_inventory import Holdings, LocalInventory
from dcp_plugin.core.planning.save import PlanAnswer, PlanExchange, in_table_order, items_to_write
from dcp_plugin.core.ranks.collectives import Attempt, Ranks
from dcp_plugin.core.records import (
    GatheredState,
    LiveState,
    LoadReport,
    OpenCheckpoint,
    SavePlan,
    SaveRequest,
    Spent,
    StagedState,
    StateDetails,
    WrittenPart,
)
from dcp_plugin.core.runs import figures
from dcp_plugin.core.state.adapters import StateAdapter
from dcp_plugin.core.state.named_objects import (
    RankAndSize,
    adapters_of,
    gather_state,
    layouts_of,
    optimizers_in,
    replica_keys,
    shared_keys,
)
from dcp_plugin.core.storage.part_writer import Facts, PartWriter, Publication
from dcp_plugin.core.storage.reuse import Reuse
from dcp_plugin.core.tensors._torch import is_tensor
from dcp_plugin.core.types import Flat, ShardedValue, Standing

if TYPE_CHECKING:
    from dcp_plugin.core.saving.selection import KeySelection
    from dcp_plugin.core.state.across_ranks import RankLocal


class SavePipeline:
    """Stages of the saves of one checkpointer, which run one after another.

    The pipeline remembers two things to make the next save cheaper: the plan, and the data that has not changed since
    the last checkpoint.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        # For the whole process; only the first call subscribes. It stands here, since a process that never saves has no
        # figures.
        figures.subscribe()
        self._config = config
        self._prune: Callable[[Where], None] | None = None
        if config.keep_last is not None:
            from dcp_plugin.core.runs import deletion  # imported now: in the background, the disk may be full

            self._prune = partial(deletion.prune, keep_last=config.keep_last)
        self.exchange = PlanExchange()
        self._local: RankLocal | None = None
        """Detector of state that differs between ranks; None for a process alone."""
        self.is_lazy = config.staging == "lazy"
        self._has_compared = False  # whether the first save has compared data between ranks
        self._module_keys: tuple[Collection[str], frozenset[str]] = (), frozenset()
        """The keys of the last state, and those of parameters and optimizer state among them."""
        self.newest_time = 0.0
        """The greatest recorded time of the saves that rank 0 knows, in seconds since the epoch."""
        self.reuse = Reuse() if config.reuse else None
        self.last_loaded: Where | None = None
        """Checkpoint from which the run resumed or started. A keeper that has taken it over sets it to None."""
        self.selection: KeySelection | None = None
        if config.exclude or config.trainable_only:
            from dcp_plugin.core.saving.selection import KeySelection  # only a few configurations need it

            self.selection = KeySelection(config)

    def forget_plan(self) -> None:
        """Forget the plan, because the group of ranks that remembered it no longer exists."""
        self.exchange.forget()
        self._local = None

    def note_loaded(self, state: Mapping[str, Any], report: LoadReport, opened: OpenCheckpoint, ranks: Ranks) -> None:
        """Remember the loaded checkpoint for the next save. Collective with ``trainable_only``."""
        self.last_loaded = opened.path
        if self.reuse is not None:
            self.reuse.note_loaded(opened.path)
        if self._config.trainable_only:
            ranks.agree(f"remember what {opened.path} has", lambda: self._remember(state, report, opened))

    def _remember(self, state: Mapping[str, Any], report: LoadReport, opened: OpenCheckpoint) -> None:
        leaves, _ = gather_state([adapter for adapter in adapters_of(state) if adapter.kind == "module"])
        tensors = {key: leaf for key, leaf in leaves.items() if is_tensor(leaf) or isinstance(leaf, ShardedValue)}
        names = {key: report.renamed.get(key, key) for key in report.loaded if key in tensors}
        from dcp_plugin.core.loading import origins  # only trainable_only needs it

        origins.remember(encode_state(tensors), names, opened, self._config.io.threads)

    def gather(self, live: LiveState, ranks: Ranks) -> GatheredState:
        """Return this rank's part of live objects."""
        if ranks.size > 1 and self._local is None:
            # A process alone has nothing to compare. Imported here, since the thread of a save imports nothing.
            from dcp_plugin.core.planning import replicas  # noqa: F401
            from dcp_plugin.core.state.across_ranks import RankLocal

            self._local = RankLocal()
        this_rank = RankAndSize(ranks.rank, ranks.size)
        adapters = adapters_of(live.state, bool(self._config.stock_aliases), this_rank, live.is_data)
        leaves, paths = gather_state(adapters)
        kinds = {adapter.name: adapter.kind for adapter in adapters if adapter.kind in ("module", "optimizer")}
        kept = leaves if self.selection is None else self.selection.without_excluded(leaves)
        optimizers = optimizers_in(adapters, live.kinds, live.owners)
        shards = {name: optimizer.shards() for name, optimizer in optimizers.items()}
        classes = {name: optimizer.classes() for name, optimizer in optimizers.items()}
        shared = shared_keys(live, adapters, kept) if ranks.size > 1 and not self._has_compared else frozenset()
        details = StateDetails(
            paths,
            {**live.kinds, **kinds},
            classes,
            self._replicas(kept, live, adapters) if ranks.size > 1 else frozenset(),
            frozenset(adapter.entry.above for adapter in adapters if adapter.entry is not None),
            shards,
            plain_metrics(live.metrics),
            shared,
            {} if self._local is None else self._local.loaded(optimizers),
        )
        return GatheredState(kept, details)

    def _replicas(self, leaves: Mapping[str, Any], live: LiveState, adapters: list[StateAdapter]) -> frozenset[str]:
        """Return the keys of parameters and of optimizer state.

        They follow from the keys of all leaves. So the modules are walked only if the keys of all leaves have changed.
        """
        keys, replicas = self._module_keys
        if leaves.keys() != keys:
            replicas = replica_keys(leaves, adapters, live.kinds, live.owners)
            self._module_keys = frozenset(leaves), replicas
        return replicas

    def encode(self, leaves: Mapping[str, Any]) -> Flat:
        """Return tensors as the chunks on this rank, and other values as bytes."""
        return encode_state(leaves, self._config.allow_pickle)

    def stage_in_place(self, gathered: GatheredState) -> StagedState:
        """Return the staged state without a copy, for a save whose caller waits until it is written."""
        return StagedState(self.encode(gathered.leaves), gathered.details, layouts_of(gathered.leaves))

    def plan_write_publish(
        self,
        publication: Publication,
        request: SaveRequest,
        staged: Attempt[StagedState],
        ranks: Ranks,
        reserve_planned: Callable[[], SavePlan] | None = None,
        degraded: str = "",
    ) -> events.SaveFinished:
        """Plan, write and publish. Collective: all ranks call it, or none.

        Args:
            reserve_planned: Reserves the directory of a save that is planned already. Collective.
            degraded: As in :class:`~dcp_plugin.core.events.SaveFinished`.

        Raises:
            CheckpointError: On every rank. The path keeps its earlier content, unless the message says that the
                checkpoint is published.
        """
        began = time.monotonic()
        try:
            if reserve_planned is not None:
                plan = reserve_planned()
            else:
                staged = self.leave_out(request, staged, ranks)
                plan = self.plan(request, staged, partial(_reserve, publication, ranks), ranks)
            part = Attempt.of(lambda: self._write(publication, request, plan, staged.get().copy_seconds))
            published_parts = self._publish(publication, request, staged.get(), plan, part, ranks)
        except Exception as error:
            publication.discard(all_ended=not isinstance(error, RankFailure))
            self.fail(error, request, ranks.rank, publication)
        except BaseException:  # Ctrl-C
            publication.discard(all_ended=ranks.size == 1)
            raise
        if self.reuse is not None:
            self.reuse.published(request.path)
        now = time.monotonic()
        blocked, written = request.blocked_seconds, part.get()
        event = events.SaveFinished(
            request.path,
            request.step,
            written.nbytes,
            seconds=now - request.began,
            blocked_seconds=now - request.began if blocked is None else blocked,
            staging_seconds=staged.get().copy_seconds,
            write_seconds=now - began,
            rank=ranks.rank,
            bytes_reused=written.bytes_reused,
            degraded=degraded,
            record=_record(publication, staged.get().details.metrics, published_parts) if published_parts else None,
        )
        self.emit(event)
        return event

    def leave_out(self, request: SaveRequest, staged: Attempt[StagedState], ranks: Ranks) -> Attempt[StagedState]:
        """Remove the keys that ``trainable_only`` leaves out. Collective, unless nothing can be left out.

        The keys that ``exclude`` names are not in the state: :meth:`gather` has left them out.
        """
        if self.selection is None:
            return staged
        left_out = self.selection.agree(staged.then(lambda before: before.state), ranks, request.path)
        if not left_out.keys:
            return staged

        def without(before: StagedState) -> StagedState:
            state = {key: value for key, value in before.state.items() if key not in left_out.keys}
            return replace(before, state=state, left_out=left_out.keys, rounded=left_out.rounded, base=left_out.base)

        return staged.then(without)

    def plan(
        self, request: SaveRequest, staged: Attempt[StagedState], reserve: Callable[[], Where], ranks: Ranks
    ) -> SavePlan:
        """Plan which items this rank writes, and where. Collective.

        Args:
            reserve: Function that reserves the directory of the save. Rank 0 calls it after all ranks have arrived:
                ranks with different calls are refused before any file is written. If the ranks plan again, rank 0
                calls it again.
        """

        step, path = f"plan the save of {request.path}", request.path

        def ask() -> tuple[Flat, LocalInventory, PlanAnswer, Where]:
            """Describe the state, send the claim, and return the answer of rank 0 with the description. Collective."""
            described = Attempt.of(lambda: self._described(staged.get(), ranks.rank))
            answer, directory = ranks.combine(
                step,
                lambda: self.exchange.claim(path, ranks, *described.get()),
                lambda claims: (self.exchange.answer(claims), reserve()),
            )
            state, inventory, _ = described.get()
            return state, inventory, answer, directory

        state, inventory, answer, directory = ask()
        # If optimizer state differs that did not differ before, its keys now become separate for each rank.
        if answer.state_differs and self._local is not None and self._local.compare(step, ranks):
            state, inventory, answer, directory = ask()
        self._has_compared = True
        plan = self.exchange.plan(step, ranks, inventory, answer)
        if ranks.size > 1 and (drift := self.exchange.compare_replicas(step, path, ranks, plan, state, answer)):
            if drift.ranks:
                self.emit(events.ReplicasDiffer(path, request.step, drift.ranks, drift.difference, ranks.rank))
            state, inventory, answer, directory = ask()  # now the lowest rank that holds a box writes it
            plan = self.exchange.plan(step, ranks, inventory, answer)
        return SavePlan(ranks.rank, directory, state, plan)

    def _described(self, staged: StagedState, rank: int) -> tuple[Flat, LocalInventory, bytes]:
        """Return the state under the keys of the plan, its inventory, and the digest of values that may differ between
        ranks."""
        state, details, doubtful = staged.state, staged.details, b""
        paths, standing = dict(details.paths), dict[str, Standing]()
        if self._local is not None:
            state, standing = self._local.with_rank_keys(state, paths, details, rank)
            doubtful = self._local.digest(rank)
        objects = {name: (kind, details.optimizers.get(name, "")) for name, kind in details.kinds.items()}
        holds = Holdings(objects, details.per_rank, standing, details.replicas, self.exchange.drift is not None)
        return state, LocalInventory.of_state(state, paths, holds), doubtful

    def _write(
        self, publication: Publication, request: SaveRequest, plan: SavePlan, staging_seconds: float
    ) -> WrittenPart:
        events.emit(events.SaveStarted(request.path, request.step))
        config = self._config
        # On two cores, a second thread makes a save a tenth faster. A step of a Python loop beside it then takes 2.2 in
        # place of 1.7 times as long.
        spare_cores = max(1, len(os.sched_getaffinity(0)) - 1) if config.async_save else config.io.threads
        writer = PartWriter(request.path, publication.medium, min(config.io.threads, spare_cores), self.reuse)
        began = time.monotonic()
        written = writer.write(items_to_write(plan.rank_plan, plan.state), plan.rank, plan.directory, plan.frozen)
        return replace(written, spent=Spent(request.blocked_seconds, staging_seconds, time.monotonic() - began))

    def _publish(
        self,
        publication: Publication,
        request: SaveRequest,
        staged: StagedState,
        plan: SavePlan,
        part: Attempt[WrittenPart],
        ranks: Ranks,
    ) -> list[WrittenPart]:
        """Publish the parts that all ranks have written. Collective.

        Returns:
            On rank 0 the parts of all ranks, in the order of ranks; on other ranks an empty list.
        """
        published: list[WrittenPart] = []

        def combine_parts(parts: list[WrittenPart]) -> None:
            global_plan = plan.rank_plan.global_plan
            assert global_plan is not None, "rank 0 has made it"
            places = Places.merged([part.places for part in parts], in_table_order(global_plan))
            index = CheckpointIndex.of(global_plan.table, places, publication.file_sizes())
            index.left_out, index.rounded = dict(staged.left_out), dict(staged.rounded)
            index.empty = [key for key in global_plan.empty if key in index]
            facts = self.facts(request, staged, len(parts), global_plan.objects)
            summary = publication.compose_and_commit(
                index, replace(facts, reused=self._reused(parts)), self.newest_time
            )
            self.newest_time = max(self.newest_time, summary.time)
            published.extend(parts)
            self._delete_old(request.path)

        ranks.combine(f"write {request.path}", part.get, combine_parts)
        return published

    def _delete_old(self, path: Where) -> None:
        if self._prune is not None:
            try:
                self._prune(path)
            except (OSError, CheckpointError) as error:  # the new checkpoint is published all the same
                logger.warning("could not delete older checkpoints after the save of %s: %s", path, error)

    def facts(
        self, request: SaveRequest, staged: StagedState, world_size: int, objects: Mapping[str, tuple[str, str]]
    ) -> Facts:
        """Return the facts that the checkpoint records about itself. Rank 0 alone calls it.

        Args:
            objects: The modules and optimizers of all ranks, see
                :class:`~dcp_plugin.core.planning.global_plan.GlobalPlan`.
        """
        return Facts(
            step=request.step,
            world_size=world_size,
            views=request.views,
            aliases=request.aliases,
            kinds={name: kind for name, (kind, _) in objects.items()},
            optimizers={name: classes for name, (_, classes) in objects.items() if classes},
            layouts=staged.layouts,
            exclude=self._config.exclude,
            base=staged.base,
            metrics=staged.details.metrics,
            differing=drift.ranks if (drift := self.exchange.drift) is not None else {},
        )

    def _reused(self, parts: list[WrittenPart]) -> dict[str, Any]:
        """Return the reuse counts for the summary; log a warning with the reason that prevented more."""
        if self.reuse is None:
            return {}
        self.reuse.warn(next((part.why_not_reused for part in parts if part.why_not_reused), ""))
        items, nbytes = sum(part.items_reused for part in parts), sum(part.bytes_reused for part in parts)
        return {"bytes": nbytes, "items": items, "from": str(self.reuse.previous)} if items else {}

    def fail(
        self, error: Exception, request: SaveRequest, rank: int, publication: Publication | None = None
    ) -> NoReturn:
        """Emit the event that the save failed, and raise the error.

        Args:
            publication: The unpublished checkpoint; None for the save of a keeper, which notes figures itself.
        """
        record = None
        if publication is not None:
            if publication.published:  # a rank was lost before all ranks heard of it
                error = RankFailure(
                    f"{error} The checkpoint {request.path} was published before that, and is complete."
                )
            record = _record(publication, {}) if rank == 0 else None
        self.emit(events.SaveAborted(request.path, request.step, rank, f"{type(error).__name__}: {error}", record))
        raise_as_failed_save(error, request.path)

    def emit(self, event: events.Event) -> None:
        """Emit an event of a save."""
        events.emit(event, self._config.events)


def raise_as_failed_save(error: Exception, path: Where) -> NoReturn:
    """Raise the error of a save that failed before publication, as an error of this package."""
    if type(error) is CheckpointError:  # some rank raised another type of error, and all ranks got this one
        raise SaveFailed(str(error)) from (error.__cause__ or error)
    if isinstance(error, CheckpointError):
        raise error
    raise SaveFailed(f"cannot save {path}: {type(error).__name__}: {error}") from error


def _reserve(publication: Publication, ranks: Ranks) -> Where:
    """Reserve the directory in which a checkpoint is made. Rank 0 alone calls it."""
    directory = publication.reserve()
    # Afterwards: if two processes reserve at the same time, at least one sees the other.
    if ranks.launch is not None:
        from dcp_plugin.core.runs import launches  # only processes without a process group need it

        launches.refuse_other_ranks(publication.path.parent, ranks.launch)
    return directory


def _record(
    publication: Publication, metrics: Mapping[str, float], parts: Sequence[WrittenPart] = ()
) -> events.SaveRecord:
    return events.SaveRecord(publication.save_id, figures.this_run(), metrics, figures.costs_of(parts))
