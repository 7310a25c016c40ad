"""``class MyTrainer(DCPTrainerMixin, Trainer)`` saves and loads the Trainer's checkpoints by the core, on all ranks.

The Trainer has no hook for this, so the mixin overrides the methods in which it saves and loads. The Trainer still
decides when to save, which checkpoint is best, and where in the data to continue. :class:`TrainerAdapter` does the
work. The methods are called in this order:

- ``train`` finds the checkpoint to resume from, on rank 0. ``_prepare_for_training`` wraps model and optimizer, then
  loads all state at once. The loop calls ``_load_rng_state`` when it reaches the point of the save.
- ``_save_checkpoint`` has the Trainer write its files through a link into the checkpoint that is made, and saves model
  and optimizer with them. Rotation and push wait until the checkpoint is published.
- ``_finalize_training`` and the end of ``train``, even by an exception, wait for the save in flight.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import TrainingArguments

from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import logger
from dcp_plugin.core.events import SaveFinished
from dcp_plugin.core.partial import PartialLoad
from dcp_plugin.core.paths import PathLike, as_local, resolved
from dcp_plugin.core.records import LoadReport
from dcp_plugin.core.runs.scan import state_of
from dcp_plugin.core.saving.queue import RunningSave
from dcp_plugin.core.types import public_class
from dcp_plugin.integration import EXTRA, MODEL, OPTIM, BaseAttachment, SavedStreams, local_copy, that_waits
from dcp_plugin.start import begin_check, watching
from dcp_plugin.transformers import checkpoints
from dcp_plugin.transformers._transformers import (
    StockTrainer,
    accepting_sharded_models,
    code_between_steps,
    full_adapters,
    is_adapted,
    is_sharded_at_load,
    logging_as,
    push,
    refuse_stock_resume,
    refuse_unsupported,
    saves_model_itself,
    saves_shards,
    unwrapped,
    users_of_folder,
    write_model_files,
)
from dcp_plugin.transformers.checkpoints import SCHEDULER, TRAINER_STATE, Found

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

_COPY_THEM = (
    "It writes more there than checkpoints. Give it a directory, and copy checkpoints to the bucket when they are "
    "complete: a copy is a checkpoint there, and train(resume_from_checkpoint=URL) goes on from one."
)


def _unless(busy: str, name: str) -> Any:
    """Return a method of the Trainer that does nothing while the core does its work.

    Args:
        busy: The attribute of :class:`TrainerAdapter` that is not None during this work.
        name: Name of the method.
    """

    def method(self: DCPTrainerMixin, *args: Any, **kwargs: Any) -> None:
        if getattr(self._dcp, busy) is None:
            getattr(super(DCPTrainerMixin, self), name)(*args, **kwargs)

    return method


@public_class("dcp_plugin.transformers")
class DCPTrainerMixin(Trainer):
    """Sharded, crash-safe checkpoints for any ``Trainer``, put before it: ``class Mine(DCPTrainerMixin, Trainer)``.

    Args:
        checkpoint_config: Settings of saves and loads; by default the class attribute of the same name.

    Raises:
        CheckpointError: The training runs on a backend that is not supported.
        ValueError: ``keep_last`` is set, which ``save_total_limit`` replaces; or ``output_dir`` is a URL.

    Example:
        >>> from transformers import Trainer
        >>> from dcp_plugin import CheckpointConfig
        >>> from dcp_plugin.transformers import DCPTrainerMixin
        >>> class MyTrainer(DCPTrainerMixin, Trainer):
        ...     checkpoint_config = CheckpointConfig(async_save=True)
    """

    checkpoint_config = CheckpointConfig()
    """Settings of a trainer whose constructor gets none."""

    stock_weights = True
    """Whether a checkpoint also has ``model.safetensors`` where the Trainer writes it (one process, DDP), for
    ``from_pretrained``. It costs the time and the space of the weights once more, also with ``async_save``."""

    verify_resume: Literal["auto", "error", False] = "auto"
    """Compare the live state with the loaded one before ``on_train_begin`` of a resumed training: ``"auto"`` warns of a
    difference, ``"error"`` raises it on all ranks, False compares nothing."""

    expect_changed: Sequence[str] = ()
    """Globs of keys, or of their last segments, that the program changes before that, such as ``"lr"``."""

    resume_report: LoadReport | None = None
    """The report of the last resume, with ``exact`` as soon as the training has begun."""

    strict_resume = False
    """Whether keys that only the model or only the checkpoint has fail a resume. By default a warning names them, and
    the rest is loaded, as in the Trainer."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a mixin after the Trainer in the bases, where it would silently do nothing."""
        super().__init_subclass__(**kwargs)
        if StockTrainer in cls.__mro__[: cls.__mro__.index(DCPTrainerMixin)]:
            raise TypeError(f"put DCPTrainerMixin before the Trainer: class {cls.__name__}(DCPTrainerMixin, Trainer)")

    def __init__(self, *args: Any, checkpoint_config: CheckpointConfig | None = None, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):  # before the Trainer makes a directory called "s3:"
            if isinstance(value, TrainingArguments) and value.output_dir:
                value.output_dir = as_local(value.output_dir, "the output_dir of a Trainer", _COPY_THEM)
        with accepting_sharded_models((*args, *kwargs.values())):
            super().__init__(*args, **kwargs)
        if checkpoint_config is not None:
            self.checkpoint_config = checkpoint_config
        if self.checkpoint_config.keep_last is not None:
            raise ValueError(
                "keep_last would delete the best checkpoint, too: use save_total_limit of the TrainingArguments."
            )
        that_waits(self.checkpoint_config, "the Trainer")
        refuse_unsupported(self)
        self._dcp = TrainerAdapter(self)
        if self.checkpoint_config.save_interval is not None:
            self.add_callback(SaveWhenDue(self._dcp))

    def train(self, resume_from_checkpoint: PathLike | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer.train`` does. ``resume_from_checkpoint=True`` takes the newest complete checkpoint.

        If a load finds damage, this method raises, and the next start takes the previous checkpoint. A URL of a
        checkpoint of this package is accepted too; new checkpoints go to ``output_dir``.

        Raises:
            ValueError: The URL is of a checkpoint that transformers saved without this package.
            CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt: No complete checkpoint can be resumed from.
            SaveFailed: A save in the background failed. The error is raised once.
        """
        with self._dcp:
            return super().train(self._dcp.find(resume_from_checkpoint), *args, **kwargs)

    # Save. During _save_checkpoint the Trainer writes all its files where the checkpoint is made.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._dcp.save(super()._get_output_dir(trial), partial(super()._save_checkpoint, model, trial))

    def _get_output_dir(self, trial: Any) -> str:
        return self._dcp.scratch or super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._dcp.scratch is None or output_dir is None:
            super().save_model(output_dir, _internal_call)
        else:
            self._dcp.save_model_files(output_dir, partial(super().save_model, output_dir, _internal_call))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._dcp.scratch is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            self._dcp.refuse_stock_resume(output_dir)

    _save_scaler = _unless("scratch", "_save_scaler")
    _save_rng_state = _unless("scratch", "_save_rng_state")
    _push_from_checkpoint = _unless("scratch", "_push_from_checkpoint")

    # Load.

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._dcp.load()
        return prepared

    _load_optimizer_and_scheduler = _unless("found", "_load_optimizer_and_scheduler")
    _load_scaler = _unless("found", "_load_scaler")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._dcp.found is None and not self._dcp.load_model(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._dcp.found is None:
            super()._load_rng_state(checkpoint)
        else:
            self._dcp.continue_streams()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        return self._dcp.get_batches(partial(super().get_batch_samples, *args, **kwargs))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not self._dcp.load_model(best):
            super()._load_best_model()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._dcp.finish()  # the save of the best checkpoint may be in flight, and others are deleted now
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]


class SaveWhenDue(TrainerCallback):
    """Callback that has the Trainer save by ``save_interval``, in addition to ``save_strategy``."""

    def __init__(self, adapter: TrainerAdapter) -> None:
        self._adapter = adapter

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self._adapter.due(state.global_step):
            control.should_save = True
        return control


class TrainerAdapter(BaseAttachment):
    """Saves and loads of one trainer, called by :class:`DCPTrainerMixin`.

    The trainer refers to this object, which refers to the trainer weakly. A trainer without other references is
    therefore freed at once, with its model and optimizer.
    """

    def __init__(self, trainer: DCPTrainerMixin) -> None:
        super().__init__(trainer.checkpoint_config)
        self._reference = weakref.ref(trainer)
        self.found: Found | None = None  # the checkpoint of this package that the training resumes from
        self.streams: SavedStreams | None = None  # of the loaded checkpoint, until the training continues them
        self.scratch: str | None = None  # directory in which the Trainer's checkpoint-N leads into the one being made
        self._at_end = ExitStack()
        """Owner of a comparison that has not begun, and of the local copy of the files in an object store from which
        the Trainer reads its position."""
        self._failure: Exception | None = None
        self._unpushed: RunningSave | None = None
        self._has_named_writers = False
        self._has_logged_wait = False
        self._saved: set[str] = set()

    @property
    def _trainer(self) -> DCPTrainerMixin:
        trainer = self._reference()
        assert trainer is not None
        return trainer

    @property
    def world_size(self) -> int:
        return int(self._trainer.args.world_size)

    def detach(self) -> None:
        """Finish the save in flight, at the end of a training."""
        try:
            self.close()
            self._push_finished()
        finally:
            self.found = self.streams = None
            self._at_end.close()

    def find(self, resume: PathLike | bool | None) -> str | None:
        """Return the path from which the Trainer resumes, or None. Rank 0 decides for all ranks."""
        if resume is None or resume is False:
            return None
        config, ranks, output_dir = self.config, self.internals.ranks, str(self._trainer.args.output_dir)
        if resume is True:
            root = resolved(Path(output_dir))
            local = [state for state in self.internals.surviving(output_dir) if state.path.parent == root]
            resume = ranks.from_zero("find a checkpoint", lambda: checkpoints.newest(output_dir, config, local))
        path = self.where(resume)
        with self.internals.shown(path) as files:
            checkpoint = ranks.from_zero(f"open {path}", lambda: checkpoints.examine_named(path, config, files))
            self.found = None if checkpoint.stock else checkpoint
            if not checkpoint.has_trainer_state:  # a new training, with loaded weights
                return None
            copy = local_copy(self.where(checkpoint.path), lambda name: name == TRAINER_STATE_NAME, files)
            return os.fspath(ranks.agree(f"read {path}", lambda: self._at_end.enter_context(copy)))

    def finish(self) -> None:
        """Wait for the save in flight. If it succeeded and ``push_to_hub`` is set, push its checkpoint to the hub."""
        self.wait()
        self._push_finished()

    def _push_finished(self) -> None:
        unpushed, self._unpushed = self._unpushed, None
        if unpushed is not None and unpushed.finished is not None and unpushed.finished.tier == "durable":
            push(self._trainer, os.fspath(unpushed.path))

    # Save

    def save(self, run_dir: str, save_files: Callable[[], None]) -> None:
        """Save the training as ``checkpoint-N`` in ``run_dir``.

        Args:
            save_files: The Trainer's own save, which writes below :attr:`scratch`.
        """
        trainer = self._trainer
        if trainer.args.push_to_hub:
            self.finish()
        else:
            self.internals.wait_until_kept()
        users = self._users_of_folder()
        step, limit = trainer.state.global_step, trainer.args.save_total_limit
        final = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        state: dict[str, Any] = {}
        with self._failing_together():
            state |= checkpoints.to_save(trainer, self.config.rng)

        def add(directory: Path) -> None:
            with self._failing_together(), self._leading_to(directory, final):
                save_files()
                self._note_best(final, directory)
                if trainer.is_world_process_zero():
                    state[EXTRA][TRAINER_STATE] = (directory / TRAINER_STATE_NAME).read_text("utf-8")
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

        # Any checkpoint may turn out to be the best, which is loaded at the end.
        durable = bool(users) or trainer.args.metric_for_best_model is not None
        metrics = checkpoints.logged_now(trainer.state)
        handle = self.internals.save(state, final, step, files=add, durable=durable, metrics=metrics)
        self._saved.add(final)
        self._complete_copy(handle)
        if trainer.is_world_process_zero():
            best, delete = trainer.state.best_model_checkpoint, self.checkpointer.remove

            def rotate(event: SaveFinished) -> None:
                if event.tier == "durable":  # keeper.keep limits checkpoints on nodes alone
                    checkpoints.rotate(run_dir, final, best, limit, delete)

            handle.on_published(rotate)
        self._unpushed = handle if trainer.args.push_to_hub else None
        if users and not handle.done():
            self._wait_for_folder(handle, users)
        if handle.done() or not trainer.is_in_train:  # nothing later would wait
            self.finish()

    def save_model_files(self, output_dir: str, save_model: Callable[[], None]) -> None:
        """Write the files of a model, with its weights only if a subclass saves these itself.

        Args:
            save_model: The Trainer's own method.
        """
        trainer = self._trainer
        with self._failing_together():
            adapted, own, complete = is_adapted(unwrapped(trainer)), self._has_own_files(), self._writes_weights()
            if not complete and trainer.args.should_save:
                write_model_files(trainer, output_dir)
            if own or complete:
                os.makedirs(output_dir, exist_ok=True)  # rank 0 may have made it
                save_model()
            if adapted and not complete and trainer.is_fsdp_enabled:  # they are small, and PEFT reads them alone
                adapters = full_adapters(trainer)
                if adapters is not None and trainer.args.should_save:
                    trainer._save(output_dir, state_dict=adapters)

    def refuse_stock_resume(self, output_dir: str) -> None:
        """Make a resume by stock Trainer fail if the checkpoint's folder has weights, but no optimizer."""
        with self._failing_together():
            has_weights = is_adapted(unwrapped(self._trainer)) or self._has_own_files() or self._writes_weights()
            if has_weights and self._trainer.args.should_save:
                refuse_stock_resume(self._trainer, output_dir)

    def _writes_weights(self) -> bool:
        """Return whether the Trainer's own ``save_model`` writes weights into the checkpoints."""
        trainer = self._trainer
        if self._has_own_files():
            return not saves_shards(trainer)
        has_wish = trainer.stock_weights and not is_sharded_at_load(trainer)
        return not trainer.is_fsdp_enabled and (has_wish or is_adapted(unwrapped(trainer)))

    def _has_own_files(self) -> bool:
        """Return whether a subclass overrides the methods that save the model, and therefore saves it as well."""
        return saves_model_itself(self._trainer, DCPTrainerMixin)

    @contextmanager
    def _leading_to(self, directory: Path, final: str) -> Iterator[None]:
        """Have the Trainer write what it writes for ``final`` into a directory."""
        with tempfile.TemporaryDirectory(prefix="dcp_plugin-") as self.scratch, logging_as(self.scratch, final):
            os.symlink(directory, os.path.join(self.scratch, os.path.basename(final)))
            try:
                yield
            finally:
                self.scratch = None

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Store a failure of this rank until all ranks raise it. Before that, the Trainer has ranks wait for each
        other, and a rank that had raised would be missing."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    def _note_best(self, final: str, directory: Path) -> None:
        """Set the path of the best checkpoint, which the Trainer would look for in the scratch directory. It is the
        current checkpoint, or an earlier checkpoint that was evaluated after its save."""
        state = self._trainer.state
        if not state.best_global_step:
            return
        best = os.path.join(os.path.dirname(final), f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if best == final or best in self._saved or os.path.exists(best):
            state.best_model_checkpoint = best
            if self._trainer.args.should_save:
                state.save_to_json(os.fspath(directory / TRAINER_STATE_NAME))

    def _complete_copy(self, handle: RunningSave) -> None:
        """With ``staging="lazy"``, wait for the copy if code that may write weights runs before the next step."""
        if not handle.copy_ended.is_set() and (writers := code_between_steps(self._trainer)):
            if not self._has_named_writers:
                self._has_named_writers = True
                logger.warning(
                    "staging='lazy': saves return when the state is copied, since %s may write weights before the "
                    "next step",
                    ", ".join(writers),
                )
            handle.wait_staged()

    def _users_of_folder(self) -> list[str]:
        """Return :func:`users_of_folder` of all ranks: a script may give a callback to rank 0 alone. Collective."""
        return self.internals.ranks.combine(
            "name the callbacks that use the folder",
            lambda: users_of_folder(self._trainer, DCPTrainerMixin),
            lambda named: sorted(set[str]().union(*named)),
        )

    def _wait_for_folder(self, handle: RunningSave, users: list[str]) -> None:
        """Wait until the folder exists, for the code that uses it."""
        began = time.monotonic()
        handle.wait_done()
        if not self._has_logged_wait and self._trainer.is_world_process_zero():
            self._has_logged_wait = True
            logger.warning(
                "%s may use the folder of a checkpoint as soon as it is saved: the training waits for each save until "
                "it is published (%.1f s for %s)",
                *(", ".join(users), time.monotonic() - began, handle.path.name),
            )

    # Load

    def load(self) -> None:
        """Load the checkpoint of :meth:`find`, after the Trainer has wrapped model and optimizer."""
        if self.found is None:
            return
        trainer, args = self._trainer, self._trainer.args
        extra = (name.removeprefix(f"{EXTRA}.") for name in self.found.names)
        streams = SavedStreams.among(extra, args.process_index, args.world_size, args.device)
        state = checkpoints.to_load(trainer, self.found.names, streams)
        resumes = self.found.has_trainer_state
        check = begin_check(trainer.verify_resume, trainer.expect_changed) if resumes else None
        with watching(check):
            self.last_load = self.internals.restore(state, self.found.path, self._partial())
        if check is not None:
            handler, ranks = trainer.callback_handler, self.internals.ranks
            end = check.compare_before(handler, "on_train_begin", state, ranks, self.last_load, self._note)
            self._at_end.callback(end)  # the training may not begin
        self.streams = streams if self.found.has_trainer_state else None  # else the training starts with step 0
        if self._trainer.is_world_process_zero():
            self._warn_of_differences(self.found, streams)

    def _note(self, report: LoadReport) -> None:
        self.last_load = self._trainer.resume_report = report

    def continue_streams(self) -> None:
        """Set this rank's random generators, when the loop has reached the point of the checkpoint."""
        streams, self.streams = self.streams, None
        assert streams is not None, "the loop reaches this point once"
        streams.restore()

    def load_model(self, path: str) -> bool:
        """Load the model of a checkpoint. If stock transformers has saved it, return False and load nothing."""
        where = self.where(path)
        with self.internals.shown(where) as files:
            is_ours = self.internals.ranks.from_zero(
                f"open {path}", lambda: files is not None or state_of(where) is not None
            )
            if is_ours:
                self.internals.restore({MODEL: checkpoints.model_of(self._trainer)}, where, self._partial())
        return is_ours

    def _partial(self) -> PartialLoad | None:
        return None if self._trainer.strict_resume else PartialLoad(missing="warn", unexpected="warn")

    def get_batches(self, get: Callable[[], Any]) -> Any:
        """Return the result of ``get``, and warn if it draws random numbers before the streams are restored.

        In the middle of an epoch, the Trainer restores the random streams after it has fetched these batches. If the
        data itself draws from the streams, the batches and later draws differ from those of an uninterrupted training.
        """
        if self.streams is None:
            return get()
        expected = checkpoints.random_positions_after_iter()
        batches = get()
        if checkpoints.random_position() not in expected and self._trainer.is_world_process_zero():
            warnings.warn(
                "The training resumes in the middle of an epoch, and its data collator or dataset draws random numbers "
                "in the training process: it draws others than without the interruption. To continue exactly, resume "
                "from a checkpoint made at the end of an epoch.",
                stacklevel=2,
            )
        return batches

    def _warn_of_differences(self, checkpoint: Found, streams: SavedStreams) -> None:
        trainer, differences = self._trainer, []
        if not checkpoint.has_trainer_state:
            differences.append(f"it has no {TRAINER_STATE_NAME}, so the training starts with step 0 and a new schedule")
        elif f"{EXTRA}.{SCHEDULER}" not in checkpoint.names:
            differences.append("it has no schedule, which starts anew")
        if OPTIM not in checkpoint.names:
            differences.append("it has no optimizer, whose state starts anew")
        samples, world_size = trainer.get_total_train_batch_size(trainer.args), trainer.args.world_size
        if checkpoint.samples_per_step not in (None, samples):
            differences.append(
                f"it was made with {checkpoint.samples_per_step} samples per step and this run has {samples}: the "
                "position in the data is that of as many steps, so samples of this epoch are repeated or missed"
            )
        if checkpoint.has_trainer_state and streams.about_new_ranks:
            differences.append(f"it has {streams.about_new_ranks}")
        elif checkpoint.has_trainer_state and not streams.saved_on and self.config.rng:
            differences.append("it has no random states")
        elif checkpoint.world_size not in (None, world_size):
            differences.append(
                f"it was made on {checkpoint.world_size} ranks, not {world_size}, so random numbers go on differently"
            )
        if differences:
            loaded = "model and optimizer are" if OPTIM in checkpoint.names else "the model is"
            warnings.warn(f"{checkpoint.path}: {loaded} loaded exactly, but {'; '.join(differences)}.", stacklevel=2)
