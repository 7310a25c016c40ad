"""The only module that uses Lightning's private names; each function gives the reason why no public name serves.

``tests/lightning/test_canaries.py`` fails loudly when such a name moves or changes its meaning.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, cast

from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn

from dcp_plugin.core.paths import PathLike
from dcp_plugin.integration.lightning_packages import Package, has_base, package_behind, package_of

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

FitLoopState = dict[str, Any]
"""Counters of the training by attribute path: ``checkpoint["loops"]["fit_loop"]``."""


def unwrapped(io: Any) -> Any:
    """Return the plugin inside ``AsyncCheckpointIO`` and other wrappers. Lightning does not export their base class."""
    while has_base(type(io), "_WrappingCheckpointIO"):
        io = io.checkpoint_io
    return io


def trainer_under_construction() -> Trainer | None:
    """Return the Trainer that is asking for callbacks; None if the stack does not show it.

    Lightning calls a callbacks factory without arguments, so only the stack has the Trainer: factory <- entry point <-
    ``_load_external_callbacks`` <- ``_CallbackConnector``.
    """
    for frame, _ in islice(walk_stack(sys._getframe(1)), 7):
        if frame.f_code.co_name == "on_trainer_init":
            return getattr(frame.f_locals.get("self"), "trainer", None)
    return None


def take_out(trainer: Any, callback: Callback) -> None:
    """Remove a callback; no public method does. The list is new because Lightning is iterating over the old one."""
    trainer.callbacks = [other for other in trainer.callbacks if other is not callback]


def put_first(trainer: Any, callback: Callback) -> None:
    """Have Lightning call the callback's hooks before those of all other callbacks; no public method does."""
    take_out(trainer, callback)
    trainer.callbacks = [callback, *trainer.callbacks]


def begins_stage(*args: Any, **kwargs: Any) -> bool:
    """Return whether these are the arguments of the barrier after all restoring and before the sanity check.

    Lightning calls no hook at this point. Earlier hooks cannot find out yet whether the training is resumed.
    """
    return "run-stage" in (*args, *kwargs.values())


def train_dataloaders(trainer: Trainer) -> list[Any]:
    """Return the training's loaders as Lightning iterates over them: flat, with Lightning's sampler in place.
    ``trainer.train_dataloader`` has the user's nesting instead."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def set_epoch(trainer: Any, dataloader: Any) -> None:
    """Set the epoch of a resumed loader's sampler before anything iterates over the loader.

    Lightning sets it later, too late for ``StatefulDataLoader``, which asks the sampler for its order at once: the
    loader would repeat the order of epoch 0.
    """
    epoch = trainer.fit_loop.epoch_progress.current.processed
    package_behind(trainer).fabric("utilities.data")._set_sampler_epoch(dataloader, epoch)


def postpone_iteration(trainer: Any) -> None:
    """Delay the train loop's first iteration over its dataloaders until the next epoch begins.

    ``setup_data`` begins an iteration only to count the batches. Between two epochs Lightning drops this iteration for
    a new one, and a stream loses the samples that its workers have read. Lightning calls no public hook between the
    request for the loaders and that iteration, but it calls ``_load_combined_loader_states``.
    """
    fit_loop = trainer.fit_loop

    def load_states() -> None:
        del fit_loop._load_combined_loader_states
        fit_loop._load_combined_loader_states()
        loader = fit_loop._combined_loader
        kind: Any = type(loader)
        loader.__class__ = _first_iteration_reads_nothing(kind)

    fit_loop._load_combined_loader_states = load_states


@functools.cache
def _first_iteration_reads_nothing(base: type[Any]) -> type[Any]:
    modes = package_of(base).module("utilities.combined_loader")._SUPPORTED_MODES  # type: ignore[union-attr]

    class CombinedLoader(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            self.__class__ = base
            self._iterator = modes[self._mode]["iterator"](self.flattened, self.limits)  # len() reads the iterator
            return iter(())

    return CombinedLoader


def take_dataloader_states(state: FitLoopState) -> list[Any]:
    """Remove and return the states of the train dataloaders. Lightning would store rank 0's for all ranks."""
    return cast(list[Any], state["state_dict"].pop("combined_loader", []))


def put_dataloader_states(state: FitLoopState, states: list[Any]) -> None:
    state["state_dict"]["combined_loader"] = states


@dataclass(frozen=True)
class Moment:
    """Point of the training loop at which a checkpoint was made."""

    batches_done: int
    """Number of batches of the current epoch that were trained on."""
    between_epochs: bool
    """True after the last batch of an epoch and before the first batch of the next; False if ``in_last_validation``."""
    in_last_validation: bool
    """True after the last batch of an epoch, up to the end of the validation that follows. Lightning can continue at
    this point: it repeats an interrupted validation and calls the hooks of the epoch's end."""
    before_validation: bool
    """True between epochs if the validation after the old epoch's last batch had not run yet."""
    before_plateau_schedules: bool
    """True between epochs, in the hooks of the epoch's end. Lightning steps schedules on a metric after these hooks."""

    @property
    def after_last_batch(self) -> bool:
        """True if the next batch is the first batch of an epoch."""
        return self.between_epochs or self.in_last_validation


def moment_of(state: FitLoopState) -> Moment:
    """Return the point of the training loop at which these counters were saved."""
    batch, epoch = state["epoch_loop.batch_progress"], state["epoch_progress"]["current"]
    done = batch["current"]["processed"]
    started = epoch["started"]
    has_begun = started > 0 and epoch["ready"] - started <= 1  # in the hooks of its start, the next epoch is "ready"
    after_last_batch = batch["is_last_batch"] and batch["current"]["ready"] == done and has_begun
    hooks_done = batch["current"]["completed"] == done
    in_last_validation = after_last_batch and hooks_done and epoch["processed"] < epoch["ready"] == started
    between_epochs = after_last_batch and not in_last_validation
    return Moment(
        batches_done=done,
        between_epochs=between_epochs,
        in_last_validation=in_last_validation,
        before_validation=between_epochs and not hooks_done,
        before_plateau_schedules=between_epochs and epoch["completed"] < epoch["processed"] == epoch["ready"],
    )


def complete_epoch(state: FitLoopState) -> None:
    """Count the old epoch of a checkpoint between two epochs as completed, so that Lightning starts a plain new epoch.

    Without this, Lightning 2.6 silently takes such a checkpoint for an unfinished epoch in four cases. With
    ``max_steps`` it trains one batch too many. After a save by ``every_n_train_steps`` at the last batch, with a
    stateful dataloader, it skips the next epoch. After a save in ``on_train_epoch_start`` it skips that epoch. A
    stateful dataloader's own shuffling starts over.
    """
    epoch, batch = state["epoch_progress"], state["epoch_loop.batch_progress"]
    for progress in (epoch["current"], epoch["total"]):
        progress["ready"] = progress["started"]  # Lightning calls the hooks of the next epoch's start again
    if epoch["current"]["processed"] < epoch["current"]["ready"]:  # saved before Lightning counted the last step
        state["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    for progress in (epoch["current"], epoch["total"], batch["current"], batch["total"]):
        progress.update(started=progress["ready"], processed=progress["ready"], completed=progress["ready"])


def plateau_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return the metrics for stepping the schedules on a metric (``ReduceLROnPlateau``), by the schedule's number: of
    those that step for the present batch after the hooks, and of those that would step if the epoch ended now."""
    epoch_loop = trainer.fit_loop.epoch_loop
    batch: Any = epoch_loop.batch_progress.current
    in_hooks = batch.completed < batch.processed or trainer.validating
    done = {"epoch": trainer.current_epoch + 1}
    if in_hooks and not epoch_loop._should_accumulate():
        done["step"] = epoch_loop.batch_idx + 1
    return {
        str(number): trainer.callback_metrics[config.monitor]
        for number, config in enumerate(trainer.lr_scheduler_configs)
        if config.reduce_on_plateau
        and config.interval in done
        and done[config.interval] % config.frequency == 0
        and config.monitor in trainer.callback_metrics
    }


def step_plateau_schedules(trainer: Trainer, metrics: dict[str, Any], intervals: set[str]) -> None:
    """Restore the metrics of the schedules on a metric, and step these schedules as the interrupted batch or epoch
    would have. Lightning saves no metrics. It makes the steps after a validation itself, and omits all others."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if epoch_loop.restarted_on_last or epoch_loop.val_loop.restarted_mid_evaluation:
        intervals = intervals - {"step"}
    for number, metric in metrics.items():
        config = trainer.lr_scheduler_configs[int(number)]
        trainer.callback_metrics[str(config.monitor)] = metric
        if config.interval not in intervals:
            continue
        trainer.fit_loop.epoch_loop.scheduler_progress.increment_ready()
        trainer.lightning_module.lr_scheduler_step(config.scheduler, metric)
        trainer.fit_loop.epoch_loop.scheduler_progress.increment_completed()


def skip_due_validation(trainer: Trainer) -> None:
    """Count the validation at the end of the completed epoch as done, if a validation was due.

    Lightning does not run it after the resume. It only creates the iterators, which draw from the random generators as
    the validation itself did.
    """
    epoch_loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None, "the training has started"
    trainer.fit_loop.epoch_progress.current.completed -= 1  # _should_check_val_fx must see the epoch that has ended
    due = epoch_loop._should_check_val_fx(fetcher)
    trainer.fit_loop.epoch_progress.current.completed += 1
    if due:
        epoch_loop.val_loop.increment_progress_to_evaluation_end()


def loaders_made_in(trainer: Trainer) -> float:
    """Return the epoch in which the train loaders were made; ``reload_dataloaders_every_n_epochs`` counts from it."""
    return trainer.fit_loop._last_train_dl_reload_epoch


def count_loaders_from(trainer: Trainer, epoch: float) -> None:
    """Have Lightning make new loaders in the same epochs as in an uninterrupted run. Lightning counts from the resume.
    If new loaders are due now, Lightning uses those it has just made, with other draws from the random generators."""
    trainer.fit_loop._last_train_dl_reload_epoch = epoch


def resume_within_epoch(trainer: Any) -> None:
    """Have the callbacks that set up the training at an epoch's start do so for the resumed epoch.

    Lightning calls no hooks of an epoch's start in the middle of the epoch. Until the next epoch
    ``GradientAccumulationScheduler`` would accumulate nothing, and after ``StochasticWeightAveraging`` the replaced
    schedule would be in force again.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    restored = [dict(group) for group in groups]
    for callback in trainer.callbacks:
        if has_base(type(callback), "GradientAccumulationScheduler", "StochasticWeightAveraging"):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
    for group, values in zip(groups, restored, strict=True):
        group.update(values)  # making a schedule steps it, which changes the groups


def end_restart(trainer: Trainer) -> None:
    """Have the loops continue as in an uninterrupted run: they call every hook of the new epoch and create the
    iterators over the dataloaders at its start."""
    fit_loop = trainer.fit_loop
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        loop.on_iteration_done()


def replace_link(cls: type[Any], link: Callable[..., None]) -> None:
    """Replace the method of a subclass of ``ModelCheckpoint`` that links. Lightning has no public hook for it."""
    cls._link_checkpoint = staticmethod(functools.partial(link, original=cls._link_checkpoint))


def forget_listings(callback: Any) -> None:
    """Clear the listings that a ``ModelCheckpoint``'s file system has cached. The callback lists the folder at setup to
    warn of existing files; the file system would answer later questions from that listing."""
    callback._fs.invalidate_cache()


def folder_of(callback: Any, trainer: Trainer) -> str:
    """Return the folder in which a ``ModelCheckpoint`` saves, also before its setup."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))


_HPC = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


@functools.cache
def _connector_class(base: type[Any]) -> type[Any]:
    class CheckpointConnector(base):  # type: ignore[misc]
        choice: Any  # dcp_plugin.lightning.model_checkpoint.CheckpointChoice

        def _parse_ckpt_path(self, state_fn: Any, ckpt_path: Any, **options: Any) -> Any:
            callbacks = [item for item in self.trainer.callbacks if has_base(type(item), "OnExceptionCheckpoint")]
            if ckpt_path is None and callbacks and self.trainer.state.fn == "fit" and not self._is_requeued():
                rank_zero_warn(
                    "fit(ckpt_path=None) with an OnExceptionCheckpoint: The last model of the previous `fit` call will "
                    'be used. ckpt_path="last" silences this.'
                )
                ckpt_path = "last"
            if ckpt_path == "last":
                return self.choice.last(self.trainer, [callback.ckpt_path for callback in callbacks])
            return super()._parse_ckpt_path(state_fn, ckpt_path, **options)

        def _is_requeued(self) -> bool:
            slurm = package_behind(self.trainer).fabric("plugins.environments").SLURMEnvironment
            return slurm.detect() and self._hpc_resume_path is not None

        @property
        def _hpc_resume_path(self) -> str | None:
            root = str(self.trainer.default_root_dir)
            numbers = self.choice.numbers(root, _HPC, usable=True)
            return f"{root.rstrip('/')}/hpc_ckpt_{max(numbers)}.ckpt" if numbers else None

        def hpc_save_path(self, folderpath: PathLike) -> str:
            number = max(self.choice.numbers(str(folderpath), _HPC), default=0) + 1
            return f"{str(folderpath).rstrip('/')}/hpc_ckpt_{number}.ckpt"

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Pickle the connector as an object of Lightning's class."""
            attributes = {name: value for name, value in self.__dict__.items() if name != "choice"}
            return object.__new__, (base,), attributes

    return CheckpointConnector


def replace_choice_of_checkpoint(trainer: Any, choice: Any) -> None:
    """Have ``ckpt_path="last"`` and ``"hpc"`` find checkpoints of any kind anywhere; Lightning has no public hook.

    Lightning compares modification times, which a folder in a store does not have. It takes a path without its scheme
    for a local path, and an interrupted save for a checkpoint.

    Args:
        choice: The :class:`~dcp_plugin.lightning.model_checkpoint.CheckpointChoice` of the trainer's plugin.
    """
    connector = trainer._checkpoint_connector
    if not hasattr(connector, "choice"):
        kind: Any = type(connector)
        connector.__class__ = _connector_class(kind)
    connector.choice = choice


SETTINGS_LOGGED = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "_every_n_train_steps")
"""Attributes of a ``ModelCheckpoint`` that loggers store with a checkpoint."""


def replace_scan(logger: Any, scan: Callable[[Any], None]) -> None:
    """Replace the method by which a logger finds uploads. The logger's own method is private and finds only files."""
    logger._scan_and_log_checkpoints = scan


def logged_times(logger: Any, callback: Any) -> dict[str, float]:
    """Have the logger upload new files in its own way; return its live mapping of uploaded paths to their times."""
    type(logger)._scan_and_log_checkpoints(logger, callback)
    return cast(dict[str, float], logger._logged_model_time)


def scored_paths(callback: Any) -> dict[str, Any]:
    """Return the paths that a callback has saved, with their scores, from the attributes that the loggers read."""
    last, best = (getattr(callback, name, "") for name in ("last_model_path", "best_model_path"))
    scores = {last: getattr(callback, "current_score", None), best: getattr(callback, "best_model_score", None)}
    return {**scores, **getattr(callback, "best_k_models", {})}


def artifact_name(logger: Any) -> str:
    """Return the name under which ``WandbLogger`` logs all checkpoints of a run."""
    logger._checkpoint_name = logger._checkpoint_name or f"model-{logger.experiment.id}"
    return str(logger._checkpoint_name)


def step_of_loggers(trainer: Trainer) -> int:
    """Return the current step of the loggers' axis: the number of batches that were stepped on. ``global_step`` counts
    every step of every optimizer. Lightning's own monitors read the same attribute."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def hooks_into_load(trainer: Any, pytorch: Any) -> bool:
    """Return whether the module or a callback has an ``on_load_checkpoint`` of its own."""
    owners = [(trainer.lightning_module, pytorch.LightningModule)]
    owners += [(callback, pytorch.Callback) for callback in trainer.callbacks]
    return any(is_overridden("on_load_checkpoint", owner, kind) for owner, kind in owners)


def restore_groups(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Give the optimizers the groups that ``BaseFinetuning`` callbacks had added when the checkpoint was made.

    The callbacks add them in ``on_fit_start``. With a sharded model Lightning calls that hook before it loads the
    checkpoint, so stock Lightning cannot resume. ``load_state_dict`` sets ``_restarting``, which asks ``on_fit_start``
    to add the groups.
    """
    for callback in trainer.callbacks:
        state = checkpoint.get("callbacks", {}).get(callback.state_key)
        if state is not None and has_base(type(callback), "BaseFinetuning"):
            callback.load_state_dict(state)
            callback.on_fit_start(trainer, trainer.lightning_module)


def unfreeze_restored_groups(trainer: Any, groups_made: list[int]) -> None:
    """Unfreeze the parameters in the restored groups of ``BaseFinetuning``, and have it add them to no later fit.

    The callback's ``setup`` has frozen all modules, even those that it had unfrozen before the checkpoint was made.

    Args:
        groups_made: Number of groups that each optimizer had when it was made.
    """
    for callback in trainer.callbacks:
        if has_base(type(callback), "BaseFinetuning"):
            callback._restarting = False
            for optimizer, count in zip(trainer.optimizers, groups_made, strict=True):
                unfrozen = {id(value) for group in optimizer.param_groups[count:] for value in group["params"]}
                modules = trainer.lightning_module.modules()
                callback.make_trainable([m for m in modules if unfrozen & set(map(id, m._parameters.values()))])


def load_from_checkpoint(package: Package, cls: type, path: Any, **options: Any) -> Any:
    """Call Lightning's function behind ``cls.load_from_checkpoint``, which users may override."""
    return package.module("core.saving")._load_from_checkpoint(cls, path, **options)


def replace_reading(
    package: Package, find: Callable[[Any], Any], read: Callable[[Package, Any, Any, Any, Any], dict[str, Any]]
) -> None:
    """Have ``load_from_checkpoint`` of modules and datamodules open what Lightning cannot open.

    Both methods open a path through ``pl_load`` of their module; Lightning has no public hook. The function is not told
    the class, which only the frame of its caller has. Do nothing if the package is not imported, or has it replaced.

    Args:
        find: Function that returns what ``read`` can read at a path, or None: Lightning's error is raised.
        read: Function of the package, the class, that result, ``map_location`` and ``weights_only``.
    """
    saving: Any = sys.modules.get(f"{package.name}.core.saving")
    original = getattr(saving, "pl_load", None)
    if original is None or hasattr(original, "opens_directories"):
        return

    @functools.wraps(original)
    def pl_load(path: Any, map_location: Any = None, **options: Any) -> Any:  # Lightning 2.5 gives no weights_only
        try:
            return original(path, map_location=map_location, **options)
        except (AttributeError, OSError, EOFError):
            if (found := find(path)) is None:
                raise
        return read(package, sys._getframe(1).f_locals["cls"], found, map_location, options.get("weights_only"))

    pl_load.opens_directories = True  # type: ignore[attr-defined]
    saving.pl_load = pl_load


def instantiators(package: Package) -> set[str]:
    """Return the functions that a checkpoint may name to make the object from hyper-parameters.

    This is Lightning's own list, to which users add their functions. Lightning before 2.6.6 has no such list: it
    imports and calls any function that a checkpoint names.
    """
    defaults = {f"{name}.cli.instantiate_module" for name in ("lightning.pytorch", "pytorch_lightning")}
    return cast(set[str], getattr(package.module("core.saving"), "_ALLOWED_INSTANTIATORS", defaults))


def hyper_parameters_of(package: Package, cls: Any, checkpoint: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return all values that ``load_from_checkpoint`` takes for hyper-parameters, also those under earlier keys."""
    past = package.module("core.saving").CHECKPOINT_PAST_HPARAMS_KEYS
    values = (checkpoint.get(key) for key in (*past, cls.CHECKPOINT_HYPER_PARAMS_KEY))
    return (value for value in values if isinstance(value, Mapping))


def place_in_configuration(config: Any) -> tuple[Any, list[Any]]:
    """Return the root of an OmegaConf configuration, and the keys that lead from the root to ``config``. OmegaConf
    resolves interpolations from the root, which has no public name."""
    keys: list[Any] = []
    while (parent := config._get_parent()) is not None:
        keys.insert(0, config._key())
        config = parent
    return config, keys
