"""The one place for Lightning's private names, each with the reason why no public one does.

``tests/lightning/test_canaries.py`` fails loudly when one of them moves or changes its meaning.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, Protocol, cast

from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn

from dcp_plugin.integration.lightning_packages import Package, has_base, package_behind, package_of
from dcp_plugin.paths import PathLike

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

FitLoopState = dict[str, Any]
"""``checkpoint["loops"]["fit_loop"]``: the counters of the training, by attribute path."""


def unwrapped(io: Any) -> Any:
    """What is inside ``AsyncCheckpointIO`` and its like; their base class is not exported."""
    while has_base(type(io), "_WrappingCheckpointIO"):
        io = io.checkpoint_io
    return io


def trainer_under_construction() -> Trainer | None:
    """The Trainer that asks for callbacks right now. Lightning calls a callbacks factory without arguments, so only
    the stack knows: factory <- entry point <- ``_load_external_callbacks`` <- ``_CallbackConnector``.
    """
    for frame, _ in islice(walk_stack(sys._getframe(1)), 7):
        if frame.f_code.co_name == "on_trainer_init":
            return getattr(frame.f_locals.get("self"), "trainer", None)
    return None


def take_out(trainer: Any, callback: Callback) -> None:
    """There is no public way. A new list, since Lightning is iterating over the old one."""
    trainer.callbacks = [other for other in trainer.callbacks if other is not callback]


def put_first(trainer: Any, callback: Callback) -> None:
    """The callback's hooks are called before those of all others. There is no public way."""
    take_out(trainer, callback)
    trainer.callbacks = [callback, *trainer.callbacks]


def begins_stage(*args: Any, **kwargs: Any) -> bool:
    """Whether a barrier with these arguments is the one between all that is restored and all that runs, a sanity
    check first. No hook is called there, and those before it do not know yet whether the training is resumed."""
    return "run-stage" in (*args, *kwargs.values())


def train_dataloaders(trainer: Trainer) -> list[Any]:
    """The loaders of the training as Lightning iterates over them: flat, with its own sampler in place.
    ``trainer.train_dataloader`` shows the user's nesting instead."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def set_epoch(trainer: Any, dataloader: Any) -> None:
    """Tell a resumed loader's sampler the epoch before it is iterated. Lightning does it later, too late for
    ``StatefulDataLoader``, which asks the sampler for its order at once: it would repeat the order of epoch 0."""
    epoch = trainer.fit_loop.epoch_progress.current.processed
    package_behind(trainer).fabric("utilities.data")._set_sampler_epoch(dataloader, epoch)


def postpone_iteration(trainer: Any) -> None:
    """Have the train loop iterate over its dataloaders when the next epoch begins, and not before.

    ``setup_data`` begins an iteration only to learn the number of batches. Between two epochs it is dropped for another
    one, and a stream has lost what its workers read for it. There is no public hook between the request for the loaders
    and that iteration; this method of the loop's is called there.
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
            self._iterator = modes[self._mode]["iterator"](self.flattened, self.limits)  # len() asks it
            return iter(())

    return CombinedLoader


def take_dataloader_states(state: FitLoopState) -> list[Any]:
    """Remove the states of the train dataloaders, so that Lightning neither stores nor loads rank 0's for all."""
    return cast(list[Any], state["state_dict"].pop("combined_loader", []))


def put_dataloader_states(state: FitLoopState, states: list[Any]) -> None:
    state["state_dict"]["combined_loader"] = states


@dataclass(frozen=True)
class Moment:
    """Where in the training loop a checkpoint was made."""

    batches_done: int
    """Batches of the current epoch that were trained on."""
    between_epochs: bool
    """The last batch of an epoch was done and nothing of the next one had begun."""
    in_last_validation: bool
    """Not between epochs: after the last batch of one, up to the end of the validation that follows it. Lightning
    continues there by itself: it runs a validation again that was cut short, and calls the hooks of the epoch's end."""
    before_validation: bool
    """Between epochs, but what belongs to the old one after its last batch had not happened yet: a validation."""
    before_plateau_schedules: bool
    """Between epochs, in the hooks of the epoch's end. Schedules on a metric are stepped after them."""

    @property
    def after_last_batch(self) -> bool:
        """The next batch is the first one of an epoch."""
        return self.between_epochs or self.in_last_validation


def moment_of(state: FitLoopState) -> Moment:
    batch, epoch = state["epoch_loop.batch_progress"], state["epoch_progress"]["current"]
    done = batch["current"]["processed"]
    started = epoch["started"]
    begun = started > 0 and epoch["ready"] - started <= 1  # the hooks of the next one's start count that as ready
    after_last_batch = batch["is_last_batch"] and batch["current"]["ready"] == done and begun
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
    """Between two epochs, count the old one as completed, so that Lightning resumes with a plain new one.

    Left to itself, Lightning 2.6 takes such a checkpoint for an unfinished epoch in four cases, all without a word:
    with ``max_steps`` it trains one batch too many; saved after the last batch by ``every_n_train_steps`` with a
    stateful dataloader it skips the next epoch; saved in ``on_train_epoch_start`` it skips that epoch; and a stateful
    dataloader's own shuffling starts over.
    """
    epoch, batch = state["epoch_progress"], state["epoch_loop.batch_progress"]
    for progress in (epoch["current"], epoch["total"]):
        progress["ready"] = progress["started"]  # the hooks of the next epoch's start are called again
    if epoch["current"]["processed"] < epoch["current"]["ready"]:  # saved before this last step was counted
        state["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    for progress in (epoch["current"], epoch["total"], batch["current"], batch["total"]):
        progress.update(started=progress["ready"], processed=progress["ready"], completed=progress["ready"])


def plateau_metrics(trainer: Trainer) -> dict[str, Any]:
    """What schedules on a metric (``ReduceLROnPlateau``) would be stepped with if the epoch ended now, by number."""
    return {
        str(number): trainer.callback_metrics[config.monitor]
        for number, config in enumerate(trainer.lr_scheduler_configs)
        if config.reduce_on_plateau
        and config.interval == "epoch"
        and (trainer.current_epoch + 1) % config.frequency == 0
        and config.monitor in trainer.callback_metrics
    }


def step_plateau_schedules(trainer: Trainer, metrics: dict[str, Any]) -> None:
    """The steps that an interrupted epoch owed to them. Lightning does not save the metrics, so it leaves them out."""
    for number, metric in metrics.items():
        trainer.fit_loop.epoch_loop.scheduler_progress.increment_ready()
        trainer.lightning_module.lr_scheduler_step(trainer.lr_scheduler_configs[int(number)].scheduler, metric)
        trainer.fit_loop.epoch_loop.scheduler_progress.increment_completed()


def skip_due_validation(trainer: Trainer) -> None:
    """Count the validation at the end of the completed epoch as done, if there was to be one. Lightning does not make
    up for it, but creates its iterators, which draw from the random generators as the validation itself did."""
    epoch_loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None, "the training has started"
    trainer.fit_loop.epoch_progress.current.completed -= 1  # the question is about the epoch that has just ended
    due = epoch_loop._should_check_val_fx(fetcher)
    trainer.fit_loop.epoch_progress.current.completed += 1
    if due:
        epoch_loop.val_loop.increment_progress_to_evaluation_end()


def loaders_made_in(trainer: Trainer) -> float:
    """The epoch in which the train dataloaders were made, which ``reload_dataloaders_every_n_epochs`` counts from."""
    return trainer.fit_loop._last_train_dl_reload_epoch


def count_loaders_from(trainer: Trainer, epoch: float) -> None:
    """Have the loaders made anew in the epochs in which they would have been. Lightning counts from the resume; and
    where it would make them now, it takes those that it has just made, with other draws from the random generators."""
    trainer.fit_loop._last_train_dl_reload_epoch = epoch


def resume_within_epoch(trainer: Any) -> None:
    """Tell the callbacks that set up the training anew for an epoch of the one that goes on. Lightning calls no hooks
    of an epoch's start in its middle, so that until the next one ``GradientAccumulationScheduler`` would accumulate
    nothing, and ``StochasticWeightAveraging`` leave the schedule to the one that it had replaced."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    restored = [dict(group) for group in groups]
    for callback in trainer.callbacks:
        if has_base(type(callback), "GradientAccumulationScheduler", "StochasticWeightAveraging"):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
    for group, values in zip(groups, restored, strict=True):
        group.update(values)  # to make a schedule is to step it


def end_restart(trainer: Trainer) -> None:
    """Have the loops go on as in a run that was never interrupted: they call every hook of the new epoch and create
    the iterators over the dataloaders at its start."""
    fit_loop = trainer.fit_loop
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        loop.on_iteration_done()


def replace_link_and_search(
    cls: type[Any], link: Callable[..., None], find: Callable[[Any, Trainer, Callable[..., set[str]]], set[str]]
) -> None:
    """Give a subclass of ``ModelCheckpoint`` another way to link, and to find what it takes for ``last``. It has no
    public hook for either."""
    search = cls._find_last_checkpoints
    cls._link_checkpoint = staticmethod(functools.partial(link, original=cls._link_checkpoint))
    cls._find_last_checkpoints = lambda self, trainer: find(self, trainer, search)


@dataclass(frozen=True)
class _Names:
    """What a ``ModelCheckpoint`` asks of a file system when it looks for ``last``."""

    paths: list[str]

    def exists(self, path: str) -> bool:
        return True

    def ls(self, path: str, detail: bool) -> list[str]:
        return self.paths


def search_among(callback: Any, paths: list[str], search: Callable[[], set[str]]) -> set[str]:
    """What Lightning takes for ``last`` if these are what is in the folder. Its file systems name what is in a bucket
    without the bucket's scheme, and remember what they have listed."""
    seen, callback._fs = callback._fs, _Names(paths)
    try:
        return search()
    finally:
        callback._fs = seen


def forget_listings(callback: Any) -> None:
    """Have the file system through which a ``ModelCheckpoint`` looks at a store look again: it has listed the folder to
    warn if there is something, and would answer from that."""
    callback._fs.invalidate_cache()


def folder_of(callback: Any, trainer: Trainer) -> str:
    """Where a ``ModelCheckpoint`` saves, also before it is set up."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))


class LooksAtStores(Protocol):
    """What is asked where checkpoints are in an object store."""

    def concerns(self, path: str) -> bool:
        """Whether this is a URL."""

    def newest(self, paths: set[str]) -> str | None:
        """The one that was made last; None if none is there."""

    def numbers(self, folder: str, name: re.Pattern[str], committed: bool) -> list[int]:
        """What the first group of ``name`` is for what is in a folder; of checkpoints alone if ``committed``."""


_HPC = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


@functools.cache
def _connector_class(base: type[Any]) -> type[Any]:
    class CheckpointConnector(base):  # type: ignore[misc]
        stores: LooksAtStores

        def _parse_ckpt_path(self, state_fn: Any, ckpt_path: Any, **given: Any) -> Any:
            own = [one for one in self.trainer.callbacks if has_base(type(one), "OnExceptionCheckpoint")]
            after_exception = ckpt_path is None and own and self.trainer.state.fn == "fit"
            if ckpt_path != "last" and not (after_exception and not self._requeued()):
                return super()._parse_ckpt_path(state_fn, ckpt_path, **given)
            callbacks = [one for one in self.trainer.checkpoint_callbacks if has_base(type(one), "ModelCheckpoint")]
            folders = [folder_of(one, self.trainer) for one in callbacks]
            if not any(map(self.stores.concerns, [*folders, *(one.ckpt_path for one in own)])):
                return super()._parse_ckpt_path(state_fn, ckpt_path, **given)
            found = {one.ckpt_path for one in own}.union(
                *(one._find_last_checkpoints(self.trainer) for one in callbacks)
            )
            newest = self.stores.newest(found)
            if newest is None:
                rank_zero_warn(f'fit(ckpt_path="last"): there is none in {" or ".join(folders)}. None is loaded.')
            return newest

        def _requeued(self) -> bool:
            slurm = package_behind(self.trainer).fabric("plugins.environments").SLURMEnvironment
            return slurm.detect() and self._hpc_resume_path is not None

        @property
        def _hpc_resume_path(self) -> str | None:
            root = str(self.trainer.default_root_dir)
            if not self.stores.concerns(root):
                return cast("str | None", super()._hpc_resume_path)
            numbers = self.stores.numbers(root, _HPC, committed=True)
            return f"{root.rstrip('/')}/hpc_ckpt_{max(numbers)}.ckpt" if numbers else None

        def hpc_save_path(self, folderpath: PathLike) -> str:
            root = str(folderpath)
            if not self.stores.concerns(root):
                return cast(str, super().hpc_save_path(folderpath))
            number = max(self.stores.numbers(root, _HPC, committed=False), default=0) + 1
            return f"{root.rstrip('/')}/hpc_ckpt_{number}.ckpt"

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Pickled as an object of Lightning's class."""
            there = {name: value for name, value in self.__dict__.items() if name != "stores"}
            return object.__new__, (base,), there

    return CheckpointConnector


def replace_choice_of_checkpoint(trainer: Any, stores: LooksAtStores) -> None:
    """Have ``ckpt_path="last"`` and ``"hpc"`` find what is in an object store. Lightning asks for the time at which a
    path was modified, which a folder there does not have; takes a path without its scheme for a local one; and a save
    that was interrupted for a checkpoint. There is no public way in."""
    connector = trainer._checkpoint_connector
    if not hasattr(connector, "stores"):
        kind: Any = type(connector)
        connector.__class__ = _connector_class(kind)
    connector.stores = stores


SETTINGS_LOGGED = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "_every_n_train_steps")
"""Of a ``ModelCheckpoint``: what loggers note beside a checkpoint."""


def replace_scan(logger: Any, scan: Callable[[Any], None]) -> None:
    """Give a logger another way to find what it uploads: its own looks for files, and there is no public way in."""
    logger._scan_and_log_checkpoints = scan


def logged_times(logger: Any, callback: Any) -> dict[str, float]:
    """When each path that the logger has uploaded was made; after it has uploaded the files that it finds itself."""
    type(logger)._scan_and_log_checkpoints(logger, callback)
    return cast(dict[str, float], logger._logged_model_time)


def scored_paths(callback: Any) -> dict[str, Any]:
    """What a callback has saved, with the scores, read from the attributes that the loggers read."""
    last, best = (getattr(callback, name, "") for name in ("last_model_path", "best_model_path"))
    scores = {last: getattr(callback, "current_score", None), best: getattr(callback, "best_model_score", None)}
    return {**scores, **getattr(callback, "best_k_models", {})}


def artifact_name(logger: Any) -> str:
    """Under which ``WandbLogger`` logs all checkpoints of a run."""
    logger._checkpoint_name = logger._checkpoint_name or f"model-{logger.experiment.id}"
    return str(logger._checkpoint_name)


def step_of_loggers(trainer: Trainer) -> int:
    """Where on their axis loggers are now. It counts batches that were stepped on, ``global_step`` every step of every
    optimizer; Lightning's own monitors read it from here, too."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def hooks_into_load(trainer: Any, pytorch: Any) -> bool:
    """Whether the module or a callback looks at a checkpoint that is loaded."""
    owners = [(trainer.lightning_module, pytorch.LightningModule)]
    owners += [(callback, pytorch.Callback) for callback in trainer.callbacks]
    return any(is_overridden("on_load_checkpoint", owner, kind) for owner, kind in owners)


def restore_groups(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Give the optimizers the groups that ``BaseFinetuning`` callbacks had added when the checkpoint was made.

    They do it themselves in ``on_fit_start``, which comes before the checkpoint where the model is sharded, so that
    Lightning cannot resume there. ``_restarting`` is how they know that they have not done it yet.
    """
    for callback in trainer.callbacks:
        state = checkpoint.get("callbacks", {}).get(callback.state_key)
        if state is not None and has_base(type(callback), "BaseFinetuning"):
            callback.load_state_dict(state)
            callback.on_fit_start(trainer, trainer.lightning_module)


def groups_are_restored(trainer: Any, groups_made: list[int]) -> None:
    """What ``BaseFinetuning`` leaves undone: its ``setup`` has frozen everything, also what it had unfrozen, and given
    groups of its own, before the checkpoint was made. And it would add these groups to the next fit's optimizers.

    Args:
        groups_made: The groups that each optimizer had when it was made.
    """
    for callback in trainer.callbacks:
        if has_base(type(callback), "BaseFinetuning"):
            callback._restarting = False
            for optimizer, count in zip(trainer.optimizers, groups_made, strict=True):
                unfrozen = {id(one) for group in optimizer.param_groups[count:] for one in group["params"]}
                modules = trainer.lightning_module.modules()
                callback.make_trainable([one for one in modules if unfrozen & set(map(id, one._parameters.values()))])


def from_dictionary(package: Package, cls: type, checkpoint: dict[str, Any], options: dict[str, Any]) -> Any:
    """What ``cls.load_from_checkpoint`` does once it has read the file; there is no public way in at that point."""
    return package.module("core.saving")._load_state(cls, checkpoint, **options)


def add_notes_to_reading(package: Package, note: Callable[[Any, Exception], str]) -> None:
    """Have ``load_from_checkpoint`` of either kind raise what it raises with a note, where ``note`` has one to add.

    It opens what it is given through a function of its own module; there is no public way in. What it does and what it
    raises stay as they are. Does nothing if the package is not imported, or has been told before.
    """
    saving: Any = sys.modules.get(f"{package.name}.core.saving")
    read = getattr(saving, "pl_load", None)
    if read is None or hasattr(read, "adds_notes"):
        return

    @functools.wraps(read)
    def pl_load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(path_or_url, *args, **kwargs)
        except (OSError, EOFError) as error:
            if text := note(path_or_url, error):
                error.add_note(text)
            raise

    pl_load.adds_notes = True  # type: ignore[attr-defined]
    saving.pl_load = pl_load


def instantiators(package: Package) -> set[str]:
    """The functions that a checkpoint may name to make the object from hyper-parameters; Lightning's own list, to which
    users add theirs. Before 2.6.6 it has none, and imports and calls whatever is named."""
    known = {f"{one}.cli.instantiate_module" for one in ("lightning.pytorch", "pytorch_lightning")}
    return cast(set[str], getattr(package.module("core.saving"), "_ALLOWED_INSTANTIATORS", known))


def hyper_parameters_of(package: Package, cls: Any, checkpoint: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All that ``load_from_checkpoint`` takes for hyper-parameters, under names of the past, too."""
    past = package.module("core.saving").CHECKPOINT_PAST_HPARAMS_KEYS
    found = (checkpoint.get(key) for key in (*past, cls.CHECKPOINT_HYPER_PARAMS_KEY))
    return (one for one in found if isinstance(one, Mapping))


def migrated(package: Package, checkpoint: dict[str, Any], path: PathLike) -> dict[str, Any]:
    """A checkpoint of an older Lightning as this one would have made it; Lightning does it to every one it reads."""
    migration = package.module("utilities.migration.utils")
    return cast(dict[str, Any], migration._pl_migrate_checkpoint(checkpoint, checkpoint_path=path))


def place_in_configuration(config: Any) -> tuple[Any, list[Any]]:
    """The root of an OmegaConf configuration, and the keys that lead from there to ``config``. OmegaConf itself
    looks there for what an interpolation means, and has no public way."""
    keys: list[Any] = []
    while (parent := config._get_parent()) is not None:
        keys.insert(0, config._key())
        config = parent
    return config, keys


def hyper_parameters_in(package: Package, path: PathLike) -> dict[str, Any]:
    """What ``load_from_checkpoint(hparams_file=...)`` reads; the functions are not documented."""
    suffix, saving = Path(path).suffix.lower(), package.module("core.saving")
    if suffix not in (".csv", ".yml", ".yaml"):
        raise ValueError(f"hparams_file must be a .csv, .yml or .yaml file, got {os.fspath(path)}")
    read = saving.load_hparams_from_tags_csv if suffix == ".csv" else saving.load_hparams_from_yaml
    return dict(read(path))
