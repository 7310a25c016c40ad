"""``class MyTrainer(DCPTrainerMixin, Trainer)``: the Trainer's checkpoints go through the core, on all ranks.

The Trainer has no hook for this, so the mixin takes over the methods in which it saves and loads, and leaves what
they decide to it: when to save, what is best, where in the data to go on. The moments, in their order:

- ``train`` finds on rank 0 what to resume from. ``_prepare_for_training`` wraps model and optimizer; then all is
  loaded at once. ``_load_rng_state`` is called by the loop where it has reached the point of the save.
- ``_save_checkpoint`` lets the Trainer write its small files into a folder of their own, and saves them with model
  and optimizer as one checkpoint. What is to come after it (rotation, push) waits until that is published.
- ``_finalize_training`` and the end of ``train``, whichever way it ends, wait for the save in flight.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import TrainingArguments

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.config import CheckpointConfig, PathLike, as_local
from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM
from dcp_plugin.integration.random_streams import SavedStreams
from dcp_plugin.ranks import Ranks
from dcp_plugin.saving.queue import SaveHandle
from dcp_plugin.transformers import checkpoints
from dcp_plugin.transformers._transformers import (
    StockTrainer,
    code_between_steps,
    describe_adapters,
    describe_model,
    is_adapted,
    is_overridden,
    refuse_unsupported,
    saves_shards,
    unwrapped,
)
from dcp_plugin.transformers.checkpoints import SCHEDULER, TRAINER_STATE, Found, ToLoad

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

T = TypeVar("T")

logger = logging.getLogger("dcp_plugin")


class DCPTrainerMixin(Trainer):
    """Sharded, crash-safe checkpoints for any ``Trainer``, put before it: ``class Mine(DCPTrainerMixin, Trainer)``.

    Args:
        checkpoint_config: How to save and load; else the class attribute of that name.
    """

    checkpoint_config = CheckpointConfig()
    """What is used unless the constructor gets another one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Behind the Trainer the mixin would do nothing, without a word."""
        super().__init_subclass__(**kwargs)
        if StockTrainer in cls.__mro__[: cls.__mro__.index(DCPTrainerMixin)]:
            raise TypeError(f"put DCPTrainerMixin before the Trainer: class {cls.__name__}(DCPTrainerMixin, Trainer)")

    def __init__(self, *args: Any, checkpoint_config: CheckpointConfig | None = None, **kwargs: Any) -> None:
        for given in (*args, *kwargs.values()):  # before the Trainer makes a directory called "s3:"
            if isinstance(given, TrainingArguments) and given.output_dir:
                given.output_dir = as_local(given.output_dir)
        super().__init__(*args, **kwargs)
        if checkpoint_config is not None:
            self.checkpoint_config = checkpoint_config
        if self.checkpoint_config.keep_last is not None:
            raise ValueError(
                "keep_last would delete the best checkpoint, too: use save_total_limit of the TrainingArguments."
            )
        self.checkpoint_config.that_waits("the Trainer")
        refuse_unsupported(self)
        self._dcp_checkpointer = Checkpointer(self.checkpoint_config, solo=self.args.world_size == 1)
        self._dcp_resume: Found | None = None
        self._dcp_loaded: ToLoad | None = None
        self._dcp_scratch: str | None = None
        """Where the Trainer's small files go while a checkpoint is made."""
        self._dcp_failure: Exception | None = None
        self._dcp_after_publish: Callable[[], None] | None = None
        self._dcp_said_who_may_write = False

    def train(self, resume_from_checkpoint: PathLike | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. ``resume_from_checkpoint=True`` takes the newest checkpoint that is complete.

        Raises:
            CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt: There is nothing (whole) to resume from.
            SaveFailed: A save in the background failed; raised once.
        """
        found = self._dcp_find(resume_from_checkpoint)
        self._dcp_resume = None if found is None or found.stock else found
        # Without a state of the Trainer there is nothing that it could resume: a new training, with loaded weights.
        resumes = found is not None and (found.stock or found.has_trainer_state)
        path = os.fspath(found.path) if found is not None and resumes else None
        try:
            output = super().train(path, *args, **kwargs)
        except BaseException as error:
            try:
                self._dcp_finish(close=True)
            except Exception as failure:  # what ends the training is the one to raise
                error.add_note(f"Besides, a checkpoint could not be saved: {failure}")
            raise
        finally:
            self._dcp_resume = self._dcp_loaded = None
        self._dcp_finish(close=True)
        return output

    # Save. Between entering and leaving _save_checkpoint, all that the Trainer writes goes into a scratch folder.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._dcp_finish()
        run_dir = super()._get_output_dir(trial)
        final = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        save_small_files = super()._save_checkpoint
        with ExitStack() as cleanup:
            staged = self._dcp_start_staging(os.path.basename(final), cleanup)
            state: dict[str, Any] = {}
            with self._dcp_failing_together():
                state = checkpoints.to_save(self, self.checkpoint_config.rng)
            with self._dcp_failing_together():
                save_small_files(model, trial)
                self._dcp_note_best(final, staged)
                if self.is_world_process_zero():
                    state[EXTRA][TRAINER_STATE] = (staged / TRAINER_STATE_NAME).read_text("utf-8")
            files = self._dcp_files(staged)
            handle = self._dcp_checkpointer.save(state, final, self.state.global_step, files=files)
        self._dcp_complete_copy(handle)
        self._dcp_after_publish = lambda: self._dcp_published(run_dir, final)
        if handle.done():
            self._dcp_finish()

    def _dcp_complete_copy(self, handle: SaveHandle) -> None:
        """With ``staging="lazy"``: nobody may write weights before they are copied."""
        if not handle.staged() and (others := code_between_steps(self)):
            if not self._dcp_said_who_may_write:
                self._dcp_said_who_may_write = True
                logger.warning(
                    "staging='lazy': saves return when the state is copied, since %s may write weights before the "
                    "next step",
                    ", ".join(others),
                )
            handle.wait_staged()

    def _dcp_start_staging(self, name: str, cleanup: ExitStack) -> Path:
        """From now on all that the Trainer writes goes into a folder of its own."""
        self._dcp_scratch = os.devnull  # where nothing can be written
        cleanup.callback(setattr, self, "_dcp_scratch", None)
        with self._dcp_failing_together():
            self._dcp_scratch = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="dcp_plugin-"))
        return Path(self._dcp_scratch, name)

    def _dcp_files(self, staged: Path) -> Callable[[Path], None]:
        """What puts the small files into the checkpoint, or raises what has failed so far."""
        failure, self._dcp_failure = self._dcp_failure, None

        def add(directory: Path) -> None:
            if failure is not None:
                raise failure
            if self.is_world_process_zero():
                shutil.copytree(staged, directory, dirs_exist_ok=True)
            elif self._dcp_has_own_files() and staged.is_dir():
                shutil.copytree(staged, directory, copy_function=_copy_what_is_new, dirs_exist_ok=True)

        return add

    @contextmanager
    def _dcp_failing_together(self) -> Iterator[None]:
        """Keep a failure of this rank until all ranks raise it: the Trainer lets them wait for each other in between,
        and whoever had left would not come."""
        try:
            yield
        except Exception as error:
            self._dcp_failure = self._dcp_failure or error

    def _get_output_dir(self, trial: Any) -> str:
        return self._dcp_scratch or super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._dcp_scratch is None or output_dir is None:
            super().save_model(output_dir, _internal_call)
            return
        save_model = super().save_model
        with self._dcp_failing_together():
            adapted, sharded, own = is_adapted(unwrapped(self)), saves_shards(self), self._dcp_has_own_files()
            if not adapted and (sharded or not own) and self.args.should_save:
                describe_model(self, output_dir)
            if own or (adapted and not self.is_fsdp_enabled):
                os.makedirs(output_dir, exist_ok=True)  # where rank 0 has made it, usually
                save_model(output_dir, _internal_call)
            if adapted and self.is_fsdp_enabled and (sharded or not own):  # without the base
                adapters = checkpoints.whole_adapters(self)
                if self.args.should_save:
                    describe_adapters(self, output_dir, adapters)

    def _dcp_has_own_files(self) -> bool:
        """Whether a subclass has a way of its own to save the model. Then it does, with whatever that costs."""
        replaced = getattr(self.save_model, "__func__", None) is not DCPTrainerMixin.save_model
        return replaced or is_overridden(super().save_model) or is_overridden(self._save)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._dcp_scratch is None:
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        if self._dcp_scratch is None:
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        if self._dcp_scratch is None:
            super()._save_rng_state(output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._dcp_scratch is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _dcp_note_best(self, final: str, staged: Path) -> None:
        """The Trainer looks for the checkpoint of the best step where its files are. If it is this one, say where it
        will be; if it is an earlier one, that was evaluated after its save, where it is."""
        if not self.state.best_global_step:
            return
        best = os.path.join(os.path.dirname(final), f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
        if best == final or os.path.exists(best):
            self.state.best_model_checkpoint = best
            if self.args.should_save:
                self.state.save_to_json(os.fspath(staged / TRAINER_STATE_NAME))

    def _dcp_published(self, run_dir: str, final: str) -> None:
        if self.args.push_to_hub:
            self._push_from_checkpoint(final)
        if self.is_world_process_zero():
            try:
                checkpoints.rotate(run_dir, final, self.state.best_model_checkpoint, self.args.save_total_limit)
            except OSError as error:  # the new checkpoint is published; old ones that stay do no harm
                warnings.warn(f"could not delete old checkpoints in {run_dir}: {error}", stacklevel=2)

    def _dcp_finish(self, close: bool = False) -> None:
        """Wait for the save in flight, then do what was to come after it; nothing if it failed."""
        after, self._dcp_after_publish = self._dcp_after_publish, None
        if close:
            self._dcp_checkpointer.close()
        else:
            self._dcp_checkpointer.wait()
        if after is not None:
            after()

    # Load.

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        prepare: Callable[..., Any] = super()._prepare_for_training
        prepared = prepare(max_steps, train_dataloader, resume_from_checkpoint)
        if self._dcp_resume is not None:
            self._dcp_loaded = ToLoad(self, self._dcp_resume.names)
            self._dcp_checkpointer.load(self._dcp_loaded.state, self._dcp_resume.path)
            self._dcp_loaded.finish()
            if self.is_world_process_zero():
                self._dcp_say_what_differs(self._dcp_resume, self._dcp_loaded.streams)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._dcp_resume is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._dcp_resume is None:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._dcp_resume is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._dcp_loaded is None:
            super()._load_rng_state(checkpoint)
        else:
            self._dcp_loaded.continue_streams()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        if self._dcp_loaded is None or self._dcp_loaded.streams_continue:
            return super().get_batch_samples(*args, **kwargs)
        # In the middle of an epoch, the Trainer sets the random streams when it has these batches. If the data itself
        # has drawn from the streams, the batches are others, and so is what the streams go on with.
        expected = checkpoints.random_positions_after_iter()
        batches = super().get_batch_samples(*args, **kwargs)
        if checkpoints.random_position() not in expected and self.is_world_process_zero():
            warnings.warn(
                "The training resumes in the middle of an epoch, and its data collator or dataset draws random numbers "
                "in the training process: it draws others than without the interruption. To continue exactly, resume "
                "from a checkpoint made at the end of an epoch.",
                stacklevel=2,
            )
        return batches

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None
        found = self._dcp_on_rank_zero(
            "open the best checkpoint", lambda: checkpoints.examine(best, self.checkpoint_config)
        )
        if found.stock:
            super()._load_best_model()
        else:
            self._dcp_checkpointer.load({MODEL: checkpoints.model_of(self)}, found.path)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._dcp_finish()  # the best checkpoint may be on its way, and others are deleted now
        finalize: Callable[..., Any] = super()._finalize_training
        return finalize(*args, **kwargs)

    def _dcp_find(self, resume: PathLike | bool | None) -> Found | None:
        """What to resume from; rank 0 decides for all."""
        if resume is None or resume is False:
            return None
        config = self.checkpoint_config
        if resume is True:
            return self._dcp_on_rank_zero(
                "find a checkpoint", lambda: checkpoints.newest(str(self.args.output_dir), config)
            )
        return self._dcp_on_rank_zero(f"open {resume}", lambda: checkpoints.named(resume, config))

    def _dcp_on_rank_zero(self, step: str, work: Callable[[], T]) -> T:
        ranks = Ranks() if self.args.world_size == 1 else Ranks.of_default_group(self.checkpoint_config.timeout)
        try:
            return ranks.from_zero(step, work)
        finally:
            ranks.close()

    def _dcp_say_what_differs(self, found: Found, streams: SavedStreams) -> None:
        said = []
        if not found.has_trainer_state:
            said.append(f"it has no {TRAINER_STATE_NAME}, so the training starts with step 0 and a new schedule")
        elif f"{EXTRA}.{SCHEDULER}" not in found.names:
            said.append("it has no schedule, which starts anew")
        if OPTIM not in found.names:
            said.append("it has no optimizer, whose state starts anew")
        samples, world_size = self.get_total_train_batch_size(self.args), self.args.world_size
        if found.samples_per_step not in (None, samples):
            said.append(
                f"it was made with {found.samples_per_step} samples per step and this run has {samples}: the position "
                "in the data is that of as many steps, so samples of this epoch are repeated or missed"
            )
        if found.has_trainer_state and streams.about_new_ranks:
            said.append(f"it has {streams.about_new_ranks}")
        elif found.has_trainer_state and not streams.saved_on and self.checkpoint_config.rng:
            said.append("it has no random states")
        elif found.world_size not in (None, world_size):
            said.append(
                f"it was made on {found.world_size} ranks, not {world_size}, so random numbers go on differently"
            )
        if said:
            loaded = "model and optimizer are" if OPTIM in found.names else "the model is"
            warnings.warn(f"{found.path}: {loaded} loaded exactly, but {'; '.join(said)}.", stacklevel=2)


def _copy_what_is_new(source: str, target: str) -> None:
    """Of a rank that is not the first: what all ranks have written is the first one's."""
    if not os.path.exists(target):
        shutil.copy2(source, target)
