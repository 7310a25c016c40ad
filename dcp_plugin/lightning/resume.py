"""Exact continuation of a training from its checkpoint: random streams, dataloaders, loop counters.

Creating an iterator over a dataloader draws from the random generators, and hooks may draw from them, too. The order of
events in a resumed ``fit`` therefore matters:

1. ``Strategy.load_checkpoint``: :meth:`Resume.from_checkpoint` takes this rank's part out of the checkpoint.
2. ``Strategy.process_dataloader``, the last public moment before Lightning creates the train iterators:
   :meth:`Resume.prepare` gives each loader its epoch and its saved position.
3. ``Strategy.on_train_start``, after all other hooks and before the first batch: :meth:`Resume.start` sets the
   random generators. Between two epochs it also lets Lightning begin the new epoch in its ordinary way, which creates
   new iterators with the same draws as in an uninterrupted run. No iterator is created earlier: it would read from a
   stream.

Random streams are stored by global rank, and the states of loaders by data-parallel rank, so that ranks with the same
data (tensor parallelism) share the state.

:func:`preflight` checks at the start of a fit, and not hours later, whether its checkpoints can be saved.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from dcp_plugin.core.state import without_sampler
from dcp_plugin.integration import EXTRA, RNG, SavedStreams, of_rank, refuse_unstorable
from dcp_plugin.integration.lightning_packages import data_rank, inside_distributed_sampler, made_by, package_behind
from dcp_plugin.lightning import _lightning, layout
from dcp_plugin.lightning._lightning import Moment
from dcp_plugin.lightning.layout import DATALOADERS, MADE_BY, MADE_IN, PLATEAU, Checkpoint

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def has_fit_loop(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has the counters of a training."""
    return "fit_loop" in checkpoint.get("loops", ())


def add_own_state(checkpoint: Checkpoint, trainer: Trainer, with_rng: bool) -> None:
    """Add this rank's random streams and dataloader states to a checkpoint of Lightning's, before it is saved."""
    fit_loop = checkpoint["loops"]["fit_loop"]
    loaders = _lightning.train_dataloaders(trainer)
    if states := _lightning.take_dataloader_states(fit_loop):
        checkpoint[DATALOADERS] = {str(data_rank(trainer)[0]): states}
        checkpoint[MADE_BY] = [made_by(loader) for loader in loaders if hasattr(loader, "load_state_dict")]
    if metrics := _lightning.plateau_metrics(trainer):
        checkpoint[PLATEAU] = metrics
    if cast(Any, trainer).reload_dataloaders_every_n_epochs:
        checkpoint[MADE_IN] = _lightning.loaders_made_in(trainer)
    if with_rng:
        of_loaders = [[generator.get_state() for generator in _generators(loader)] for loader in loaders]
        checkpoint[RNG] = of_rank(trainer.global_rank, trainer.strategy.root_device, loaders=of_loaders)


@dataclass
class Resume:
    """This rank's state from a checkpoint, to be restored when the training reaches the point of the checkpoint."""

    streams: SavedStreams
    positions: list[tuple[Any, str | None]]
    """The saved states that no stateful loader has received yet, in order, with the properties (:func:`made_by`) of the
    saved loaders, if the checkpoint has them."""
    saved_on: int
    """Number of data-parallel ranks when the checkpoint was made; 0 if no loader had a state."""
    moment: Moment
    counters: dict[str, Any]
    """The counters of the checkpoint, from which the moment follows."""
    plateau_metrics: dict[str, Any]
    made_in: float | None
    """The epoch in which the loaders were made, with ``reload_dataloaders_every_n_epochs``."""
    placed: list[tuple[Any, Any]] = field(default_factory=list)
    """The stateful loaders that received a state, with this state."""
    without_position: list[str] = field(default_factory=list)
    """Descriptions of the loaders that start with their first batch."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, trainer: Trainer) -> Resume:
        """Remove this rank's state from ``checkpoint``, which then has the contents that Lightning expects."""
        rng_states: dict[str, Any] = checkpoint.pop(RNG, {})
        loader_states: dict[str, Any] = checkpoint.pop(DATALOADERS, {})
        fit_loop = checkpoint["loops"]["fit_loop"]
        rank, data_ranks = data_rank(trainer)
        positions = loader_states.get(str(rank), []) if len(loader_states) == data_ranks else []
        names, device = [f"{RNG}.{saved}" for saved in rng_states], trainer.strategy.root_device
        streams = SavedStreams.among(names, trainer.global_rank, trainer.world_size, device)
        streams.loaded.update(rng_states.get(str(streams.source), {}))
        if streams.about_new_ranks:
            rank_zero_info(f"The checkpoint has {streams.about_new_ranks}.")
        return cls(
            streams=streams,
            positions=list(zip(positions, checkpoint.pop(MADE_BY, [None] * len(positions)), strict=False)),
            saved_on=len(loader_states),
            moment=_lightning.moment_of(fit_loop),
            counters=copy.deepcopy(_counters_in(fit_loop)),
            plateau_metrics=checkpoint.pop(PLATEAU, {}),
            made_in=checkpoint.pop(MADE_IN, None),
        )

    def continues(self, checkpoint: Checkpoint, trainer: Trainer) -> bool:
        """Return whether the training continues at the moment of the checkpoint, after hooks have seen the checkpoint.

        If a hook has changed the counters or removed them, the loops go on as Lightning restores them. The positions of
        the dataloaders are then those that Lightning itself would have saved. Otherwise complete an epoch that was
        interrupted at its end.
        """
        fit_loop = copy.deepcopy(checkpoint.get("loops", {}).get("fit_loop", {}))
        continues = _counters_in(fit_loop) == self.counters
        if continues and self.moment.between_epochs:
            _lightning.complete_epoch(fit_loop)
        elif fit_loop and not continues and self.positions:
            _lightning.put_dataloader_states(fit_loop, without_sampler([position for position, _ in self.positions]))
        else:
            return continues
        trainer.fit_loop.load_state_dict(fit_loop)
        return continues

    def prepare(self, trainer: Trainer, dataloader: Any) -> None:
        """Give a train dataloader its epoch and position, before anything iterates over it."""
        _lightning.set_epoch(trainer, dataloader)
        if self.moment.after_last_batch:
            _lightning.postpone_iteration(trainer)
        if self.positions and hasattr(dataloader, "load_state_dict"):
            (position, saved), current = self.positions.pop(0), made_by(dataloader)
            if saved in (None, current):
                self.placed.append((dataloader, position))
                dataloader.load_state_dict(position)
            else:
                name = type(dataloader).__name__
                self.without_position.append(f"{name} with {current} (it has that of one with {saved})")
        else:
            self.without_position.append(type(dataloader).__name__)

    def start(self, trainer: Trainer) -> None:
        """Restore the random streams and the state of the epoch, right before the loops take their first batch."""
        moment = self.moment
        if not moment.between_epochs and moment.batches_done:
            _lightning.resume_within_epoch(trainer)
            if not moment.in_last_validation:  # in the last validation, all batches of the epoch are done
                self._warn_of_lost_gradients(trainer)
                if not _keeps_its_own_position(trainer):
                    self._warn_of_lost_positions(trainer)
        if moment.after_last_batch:
            for loader, position in self.placed:
                _take_position(loader, position)
        self._restore_streams(trainer)
        if moment.before_validation:
            _lightning.skip_due_validation(trainer)
        intervals = {"step", "epoch"} if moment.before_plateau_schedules else {"step"}
        _lightning.step_plateau_schedules(trainer, self.plateau_metrics, intervals)
        if self.made_in is not None:
            _lightning.count_loaders_from(trainer, self.made_in)
        if moment.between_epochs:
            _lightning.end_restart(trainer)

    def _restore_streams(self, trainer: Trainer) -> None:
        self.streams.restore()
        if not self.streams.is_new_rank:
            of_loaders = self.streams.loaded.get("loaders", ())
            for loader, saved in zip(_lightning.train_dataloaders(trainer), of_loaders, strict=False):
                for generator, generator_state in zip(_generators(loader), saved, strict=False):
                    generator.set_state(generator_state)

    def _warn_of_lost_gradients(self, trainer: Trainer) -> None:
        window = trainer.accumulate_grad_batches
        if within := self.moment.batches_done % window:
            rank_zero_warn(
                f"The checkpoint was made in the middle of gradient accumulation, after {within} of {window} batches. "
                f"Gradients are in no checkpoint: the next step is made with those of the other {window - within} "
                "alone. To continue exactly, save when a window is complete."
            )

    def _warn_of_lost_positions(self, trainer: Trainer) -> None:
        _, data_ranks = data_rank(trainer)
        place = f"The checkpoint was made after batch {self.moment.batches_done} of an epoch, but "
        lost = (
            ", so the rest of this epoch repeats some samples and misses others; model, optimizer and counters are "
            "exact. "
        )
        if self.saved_on and self.saved_on != data_ranks:
            rank_zero_warn(
                f"{place}the positions of the dataloaders are those of {self.saved_on} data-parallel ranks and this "
                f"run has {data_ranks}: the dataloaders start again with their first batch{lost}To continue "
                f"exactly, resume on {self.saved_on} ranks or from a checkpoint made at the end of an epoch."
            )
        elif self.without_position:
            rank_zero_warn(
                f"{place}it has no position of {' and '.join(sorted(set(self.without_position)))}, which starts again "
                f"with its first batch{lost}To be able to continue exactly, train with torchdata's "
                "StatefulDataLoader (same arguments) or resume from a checkpoint made at the end of an epoch."
            )
        elif trainer.num_training_batches == float("inf"):
            rank_zero_warn(
                f"{place}Lightning reads one batch ahead from a dataset without a length, so the saved position is "
                "one batch late: each rank misses one batch; all else is exact. To continue exactly, give the dataset "
                "a __len__ or the Trainer an integer limit_train_batches."
            )


def _counters_in(fit_loop: Mapping[str, Any]) -> dict[str, Any]:
    return {key: fit_loop.get(key) for key in ("epoch_progress", "epoch_loop.batch_progress")}


def _take_position(loader: Any, position: dict[str, Any]) -> None:
    """Have a ``StatefulDataLoader`` make the iterator of the completed epoch, so that its next iterator begins a
    new epoch.

    ``iter()`` replaces a finished iterator at once, so ``state_dict`` makes the iterator in this case.
    """
    finished = position.get("_iterator_finished")
    if finished is not None:
        (loader.state_dict if finished else loader.__iter__)()


def _keeps_its_own_position(trainer: Trainer) -> bool:
    """Return whether the datamodule saves and loads state of its own, and so its own position in the data."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    kind = package_behind(trainer).pytorch.LightningDataModule
    return datamodule is not None and is_overridden("state_dict", datamodule, kind)


def _generators(dataloader: Any) -> list[torch.Generator]:
    """Return the random generators of a loader and of its samplers."""
    inner = inside_distributed_sampler(getattr(getattr(dataloader, "batch_sampler", None), "sampler", None))
    owners = (dataloader, getattr(dataloader, "sampler", None), inner)
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(each): each for each in generators if isinstance(each, torch.Generator)}.values())


def preflight(trainer: Trainer, allow_pickle: tuple[str, ...]) -> None:
    """Check that the values of a checkpoint, except tensors, can be stored. Write nothing.

    The check calls no code of the user's: hooks and ``state_dict`` methods may count, log or write, and stock Lightning
    only calls them for checkpoints. It covers hyper-parameters and schedules whose ``state_dict`` is torch's. The
    first save checks all other values.

    Raises:
        UnsafeCheckpoint: Values cannot be stored; the message names all of them.
    """
    state = layout.to_state(_extra_of(trainer), allow_pickle)
    refuse_unstorable({EXTRA: state[EXTRA]} if state[EXTRA] else {}, allow_pickle)


def _extra_of(trainer: Any) -> Checkpoint:
    """Return Lightning's part of a checkpoint without model and optimizers, without calling code of the user's."""
    extra: Checkpoint = {}
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is not None and owner.hparams:
            extra[owner.CHECKPOINT_HYPER_PARAMS_KEY] = owner.hparams
    if not all(getattr(callback, "save_weights_only", False) for callback in trainer.checkpoint_callbacks):
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        extra["lr_schedulers"] = [each.state_dict() if _is_torch_alone(each) else {} for each in schedules]
    return extra


def _is_torch_alone(schedule: Any) -> bool:
    """Return whether a schedule's ``state_dict`` is torch's own, and the schedule contains no other schedules."""
    return str(schedule.state_dict.__module__).startswith("torch.") and not hasattr(schedule, "_schedulers")
