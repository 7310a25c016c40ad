"""Private names of transformers and PEFT that the mixin needs, each with its reason; :mod:`._models` has the others.

The methods that :class:`~dcp_plugin.transformers.mixin.DCPTrainerMixin` overrides are private too, since the Trainer
has no public hook for them. ``tests/transformers/trainer/test_canaries.py`` lists them with their parameters, and fails
loudly when such a name moves or changes its meaning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME, Trainer
from transformers.trainer_utils import _is_peft_model
from transformers.training_args import TrainingArguments
from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

from dcp_plugin.core.errors import CheckpointError
from dcp_plugin.core.state import contains_fsdp1, gather_module, parameters_by_name
from dcp_plugin.core.tensors._torch import DTensor, is_tensor

StockTrainer = Trainer
"""The Trainer of transformers itself: scripts may replace ``transformers.Trainer`` by their own class."""


def refuse_unsupported(trainer: Trainer) -> None:
    """Refuse backends with a state and formats of their own, a training whose requested way Accelerate has silently
    replaced, and a Trainer in whose training the mixin would load nothing.

    Raises:
        CheckpointError: The training is refused.
    """
    if not hasattr(StockTrainer, "_prepare_for_training"):
        raise CheckpointError(
            f"DCPTrainerMixin needs transformers 5.3 or newer, and {transformers.__version__} is installed: a resume "
            'would start with new weights. pip install "dcp-plugin[hf]" installs it.'
        )
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


@contextmanager
def accepting_sharded_models(values: Collection[Any]) -> Iterator[None]:
    """Have a Trainer under construction accept a model that ``from_pretrained(distributed_config=...)`` has sharded.

    The Trainer refuses such a model unless ``save_only_model`` is set, since its own checkpoints cannot store the
    optimizer. This package can store it, and the constructor has no other setting that permits the model.

    Args:
        values: The arguments of the constructor.
    """
    is_sharded = any(getattr(value, "is_distributed_loading_by_transformers", False) for value in values)
    arguments_in = [value for value in values if isinstance(value, TrainingArguments)]
    changed = [arguments for arguments in arguments_in if is_sharded and not arguments.save_only_model]
    for arguments in changed:
        arguments.save_only_model = True
    try:
        yield
    finally:
        for arguments in changed:
            arguments.save_only_model = False


def is_sharded_at_load(trainer: Trainer) -> bool:
    """Return whether ``from_pretrained(distributed_config=...)`` has sharded the model, unknown to Accelerate."""
    # An older Trainer lacks the attribute, and takes no sharded model.
    return bool(getattr(trainer, "is_distributed_loading_by_transformers", False))


def unwrapped(trainer: Trainer) -> nn.Module:
    """Return the user's model, without the wrappers of Accelerate."""
    return cast(nn.Module, trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))


def is_adapted(model: nn.Module) -> bool:
    """Return whether this is a PEFT model: adapters on a base that other checkpoints have. The public names for this
    check are in PEFT, which need not be installed."""
    return bool(_is_peft_model(model))  # type: ignore[no-untyped-call]


def is_overridden(method: Any) -> bool:
    """Return whether a subclass or the instance overrides a method of ``transformers.Trainer``."""
    return getattr(method, "__module__", None) != StockTrainer.__module__


def saves_model_itself(trainer: Trainer, mixin: Any) -> bool:
    """Return whether a subclass, before or after the mixin, or the model overrides the methods that save the model."""
    saves = getattr(type(unwrapped(trainer)), "save_pretrained", PreTrainedModel.save_pretrained)
    if saves is not PreTrainedModel.save_pretrained and not is_adapted(unwrapped(trainer)):
        return True
    replaced = getattr(trainer.save_model, "__func__", None) is not vars(mixin)["save_model"]
    return replaced or is_overridden(super(mixin, trainer).save_model) or is_overridden(trainer._save)


@contextmanager
def logging_as(written: str, final: str) -> Iterator[None]:
    """Have the log name the path of a checkpoint, in place of the path where the Trainer writes it."""
    make = logging.getLogRecordFactory()

    def renamed(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg = record.msg.replace(written, os.path.dirname(final)) if isinstance(record.msg, str) else record.msg
        return record

    logging.setLogRecordFactory(renamed)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


def push(trainer: Trainer, directory: str) -> None:
    """Push a checkpoint to the hub, as the Trainer does at the end of its own save."""
    trainer._push_from_checkpoint(directory)


def code_between_steps(trainer: Trainer) -> list[str]:
    """Return the names of the users' callbacks and methods that run between two steps of the optimizer. They may write
    weights: averages, or those for an evaluation."""
    callbacks = [type(callback) for callback in trainer.callback_handler.callbacks]
    methods = ("evaluate", "evaluation_loop", "prediction_step", "training_step")
    return [
        *(kind.__name__ for kind in callbacks if not kind.__module__.startswith(("transformers.", "dcp_plugin."))),
        *(name for name in methods if is_overridden(getattr(trainer, name))),
    ]


USES_FOLDER: dict[str, Callable[[Any], Any]] = {
    "TrainerCallback": lambda callback: False,
    "ClearMLCallback": lambda callback: callback._log_model,
    "DVCLiveCallback": lambda callback: callback._log_model == "all",
    "FlyteCallback": lambda callback: callback.sync_checkpoints,
    "MLflowCallback": lambda callback: callback._log_artifacts,
    "NeptuneCallback": lambda callback: callback._should_upload_checkpoint,
    "SwanLabCallback": lambda callback: False,
    "TrackioCallback": lambda callback: False,
    "WandbCallback": lambda callback: callback._log_model == "checkpoint",
}
"""Condition under which ``on_save`` of each class of transformers uses the checkpoint's folder: its upload is on."""


def users_of_folder(trainer: Trainer, mixin: Any) -> list[str]:
    """Return the names of the code that may use a checkpoint's folder as soon as the Trainer has saved it.

    This code is an ``on_save`` of the user's callbacks or of integrations that upload the folder, and a
    ``_save_checkpoint`` of a subclass of the mixin.
    """
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks if _uses_folder(callback)]
    replaced = getattr(trainer._save_checkpoint, "__func__", None) is not vars(mixin)["_save_checkpoint"]
    return [*names, f"{type(trainer).__name__}._save_checkpoint"] if replaced else names


def _uses_folder(callback: Any) -> bool:
    if not getattr(callback.on_save, "__module__", "").startswith("transformers."):
        return True
    kind = callback.on_save.__qualname__.partition(".")[0]
    return kind not in USES_FOLDER or bool(USES_FOLDER[kind](callback))


def saves_shards(trainer: Trainer) -> bool:
    """Return whether the Trainer's ``save_model`` writes nothing, because no rank has the full model."""
    state: Any = trainer.accelerator.state
    return trainer.is_fsdp_enabled and "FULL_STATE_DICT" not in str(state.fsdp_plugin.state_dict_type)


def write_model_files(trainer: Trainer, directory: str) -> None:
    """Write the files of a model without its weights: configurations, the tokenizer, the training arguments. Called on
    the ranks that write."""
    model: Any = unwrapped(trainer)
    os.makedirs(directory, exist_ok=True)
    if isinstance(model, PreTrainedModel):  # its ``save_pretrained`` may be the user's, or gather the weights
        config: Any = model.config
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = str(model.dtype).removeprefix("torch.")
        if model.is_remote_code():
            custom_object_save(model, directory, config=config)
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
    for name, adapter in model.peft_config.items() if is_adapted(model) else ():
        adapter.save_pretrained(directory if name == "default" else os.path.join(directory, name))
    tokenizer: Any = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    torch.save(trainer.args, os.path.join(directory, TRAINING_ARGS_NAME))


def refuse_stock_resume(trainer: Trainer, directory: str) -> None:
    """Make stock Trainer fail to resume from a checkpoint. It would silently load the weights in the folder, and start
    with a new optimizer and schedule.

    Stock Trainer loads an optimizer if it finds a schedule and a folder with "optimizer" in its name. It then raises,
    because ``optimizer.pt`` or, under FSDP, ``optimizer_0`` is missing.
    """
    schedule: Any = trainer.lr_scheduler
    torch.save(schedule.state_dict(), os.path.join(directory, SCHEDULER_NAME))
    os.makedirs(folder := os.path.join(directory, OPTIMIZER_NAME.partition(".")[0]))
    with open(os.path.join(folder, "README.txt"), "w", encoding="utf-8") as file:
        file.write("The optimizer's state is in the checkpoint around this folder. DCPTrainerMixin resumes it.\n")


def adapters_of(model: nn.Module, peft_model: nn.Module) -> nn.Module:
    """Return the adapters as a separate module with the same parameters and buffers under the same names.

    The adapters are the tensors that PEFT itself would save, and all other trained parameters.
    """
    tensors = {key: value for key, value in gather_module(model).items() if is_tensor(value)}
    kept = _kept_by_peft(peft_model, tensors)
    parameters = parameters_by_name(peft_model)
    buffers = dict(peft_model.named_buffers(remove_duplicate=False))  # PEFT saves one of several names
    adapters = nn.Module()
    for key, value in tensors.items():
        if key in parameters and (id(value) in kept or parameters[key].requires_grad):
            _place(adapters, key).register_parameter(key.rpartition(".")[2], parameters[key])
        elif key in buffers and id(value) in kept:
            _place(adapters, key).register_buffer(key.rpartition(".")[2], buffers[key])
    return adapters


def full_adapters(trainer: Trainer) -> dict[str, torch.Tensor] | None:
    """Return the full tensors of the adapters of a sharded PEFT model by name, at least on rank 0. Collective.

    Return None for prompts, which PEFT does not select from a state dict, and under FSDP1, where PEFT asks the modules
    for their state on one rank alone, and would wait for the others.
    """
    peft_model: Any = unwrapped(trainer)
    prompts = any(config.is_prompt_learning for config in peft_model.peft_config.values())
    if prompts or contains_fsdp1(trainer.model_wrapped):
        return None
    tensors = {key: value for key, value in gather_module(trainer.model_wrapped).items() if is_tensor(value)}
    kept = _kept_by_peft(peft_model, tensors)
    return {key: _full_tensor(value, trainer.args.device) for key, value in tensors.items() if id(value) in kept}


def _kept_by_peft(peft_model: nn.Module, tensors: Mapping[str, Any]) -> set[int]:
    """Return the identities of the tensors that PEFT itself would save."""
    from peft import get_peft_model_state_dict

    select: Callable[..., Mapping[str, Any]] = get_peft_model_state_dict
    return {
        id(value)
        for name in peft_model.peft_config  # type: ignore[union-attr]
        for value in select(peft_model, dict(tensors), adapter_name=name, save_embedding_layers=False).values()
    }


def _full_tensor(value: Any, device: torch.device) -> torch.Tensor:
    """Return a full tensor on the CPU. Offloaded shards go to the device first, where the ranks can communicate."""
    if isinstance(value, DTensor):
        return value.detach().to(device).full_tensor().cpu()  # type: ignore[attr-defined, no-any-return]
    return value.detach().cpu()  # type: ignore[no-any-return]


def _place(root: nn.Module, key: str) -> nn.Module:
    """Return the module that owns a key. Make it, and the modules above, if they do not exist."""
    for name in key.split(".")[:-1]:
        if name not in dict(root.named_children()):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root
