"""The one place for private names of transformers and PEFT, each with the reason why no public one does.

What :class:`~dcp_plugin.transformers.mixin.DCPTrainerMixin` overrides is private too, since the Trainer
has no public hook for any of it: ``OVERRIDDEN`` lists that, with the parameters it expects.
``tests/transformers_trainer/test_canaries.py`` fails loudly when one of them moves or changes its meaning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer import Trainer as _Trainer
from transformers.trainer_utils import _is_peft_model
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

from dcp_plugin.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import Trainer

StockTrainer = _Trainer
"""The Trainer of transformers itself: scripts put their own into the place of ``transformers.Trainer``."""

OVERRIDDEN = {
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "save_model": ("output_dir", "_internal_call"),
    "_get_output_dir": ("trial",),
    "_save_checkpoint": ("model", "trial"),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_save_scaler": ("output_dir",),
    "_save_rng_state": ("output_dir",),
    "_push_from_checkpoint": ("checkpoint_folder",),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_scaler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "_load_best_model": (),
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
}
"""The methods of Trainer that the mixin takes over, with their parameters."""


def refuse_unsupported(trainer: Trainer) -> None:
    """Raise CheckpointError for backends that keep and write their state in a way of their own, and where Accelerate
    has silently made something else of what was asked for."""
    backends = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "XLA": is_torch_xla_available(),
        "SageMaker's model parallelism": is_sagemaker_mp_enabled(),
    }
    for name, used in backends.items():
        if used:
            raise CheckpointError(
                f"DCPTrainerMixin does not support {name}: it keeps or writes its state in a way of its own. "
                "Train on one device, with DDP or FSDP, or take the mixin out."
            )
    if trainer.args.fsdp and not trainer.is_fsdp_enabled:
        raise CheckpointError(
            f"The TrainingArguments ask for FSDP, but Accelerate trains with {trainer.accelerator.distributed_type}, "
            "where every rank holds everything: it shards on accelerators only. Take fsdp= out, or train on those."
        )


def unwrapped(trainer: Trainer) -> nn.Module:
    """The model as the user knows it."""
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return model


def is_adapted(model: nn.Module) -> bool:
    """Whether this is a PEFT model: a base that somebody else keeps, and adapters. No public name tells it without
    importing PEFT, which need not be installed."""
    is_peft_model: Callable[[nn.Module], bool] = _is_peft_model
    return is_peft_model(model)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    logging: Any = transformers_logging  # untyped
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def is_overridden(method: Any) -> bool:
    """Whether a method of a Trainer is not that of ``transformers.Trainer``: a subclass's, or put in its place."""
    return getattr(method, "__module__", None) != StockTrainer.__module__


def code_between_steps(trainer: Trainer) -> list[str]:
    """Callbacks and methods that are not the Trainer's own and run between two steps of the optimizer, where they may
    write weights: averages, or those for an evaluation."""
    callbacks = [type(callback) for callback in trainer.callback_handler.callbacks]
    methods = ("evaluate", "evaluation_loop", "prediction_step", "training_step")
    return [
        *(kind.__name__ for kind in callbacks if not kind.__module__.startswith("transformers.")),
        *(name for name in methods if is_overridden(getattr(trainer, name))),
    ]


def saves_shards(trainer: Trainer) -> bool:
    """Whether the Trainer's ``save_model`` writes nothing, because no rank has the whole model."""
    if not trainer.is_fsdp_enabled:
        return False
    plugin: Any = trainer.accelerator.state.fsdp_plugin
    return "FULL_STATE_DICT" not in str(plugin.state_dict_type)


def describe_model(trainer: Trainer, directory: str) -> None:
    """Write what transformers keeps beside a model's weights, without the weights: configurations, the tokenizer,
    the training arguments. Call it on the ranks that write."""
    # ``_save`` of the Trainer rather than its parts, which are not to be had alone.
    with _without_progress_bar():  # of weights, of which there are none here
        StockTrainer._save(trainer, directory, state_dict={})
    for name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME):
        if os.path.exists(empty := os.path.join(directory, name)):
            os.remove(empty)


def describe_adapters(trainer: Trainer, directory: str, adapters: dict[str, torch.Tensor] | None) -> None:
    """The same of a sharded PEFT model, with its adapters: they are small, and PEFT reads nothing else.

    Args:
        adapters: Whole; None where PEFT itself would have to gather them.
    """
    if adapters is not None:
        trainer._save(directory, state_dict=adapters)
        return
    os.makedirs(directory, exist_ok=True)
    for name, config in unwrapped(trainer).peft_config.items():  # type: ignore[operator, union-attr]
        config.save_pretrained(directory if name == "default" else os.path.join(directory, name))
    tokenizer: Any = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    torch.save(trainer.args, os.path.join(directory, TRAINING_ARGS_NAME))
