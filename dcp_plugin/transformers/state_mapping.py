"""What a Trainer's checkpoint is made of, out of the live objects and back into them.

| name                       | what                                                                                |
|----------------------------|-------------------------------------------------------------------------------------|
| ``model.<FQN>``            | the model; of a PEFT model the adapters alone, the base is what the user has loaded |
| ``optim.…``                | the optimizer                                                                       |
| ``extra.lr_scheduler``     | the schedule                                                                        |
| ``extra.scaler``           | the gradient scaler, if there is one                                                |
| ``extra.rng.<rank>``       | the random generators of each rank                                                  |
| ``extra.trainer_state``    | the text of ``trainer_state.json``, so that its bytes have a checksum too           |
| ``extra.samples_per_step`` | over all ranks and accumulated batches: tells whether the position in the data fits |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from dcp_plugin._torch import DTensor, is_tensor
from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM, RNG, plain
from dcp_plugin.state import gather_module, rng
from dcp_plugin.state.names import contains_fsdp1, parameters_by_name
from dcp_plugin.transformers._transformers import is_adapted, unwrapped

if TYPE_CHECKING:
    from transformers import Trainer

SCHEDULER, SCALER, TRAINER_STATE, SAMPLES = "lr_scheduler", "scaler", "trainer_state", "samples_per_step"


def model_of(trainer: Trainer) -> nn.Module:
    """What is stored as the model: the wrapped one, whose wrapper says how it is distributed, or its adapters."""
    wrapped: Any = trainer.model_wrapped
    model: nn.Module = wrapped.module if isinstance(wrapped, nn.DataParallel) else wrapped
    if is_adapted(unwrapped(trainer)) and not contains_fsdp1(model):  # FSDP1 mixes base and adapters in its parameters
        return adapters_of(model, unwrapped(trainer))
    return model


def optimizer_of(trainer: Trainer) -> torch.optim.Optimizer:
    optimizer: Any = trainer.optimizer
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer  # type: ignore[no-any-return]


def schedule_of(trainer: Trainer) -> Any:
    return trainer.lr_scheduler


def scaler_of(trainer: Trainer) -> Any:
    return getattr(trainer.accelerator, "scaler", None)


def to_save(trainer: Trainer, with_rng: bool) -> dict[str, Any]:
    """The named state of a trainer. Collective under FSDP1."""
    extra: dict[str, Any] = {SAMPLES: trainer.get_total_train_batch_size(trainer.args)}
    state: dict[str, Any] = {MODEL: model_of(trainer), EXTRA: extra}
    if trainer.args.save_only_model:
        return state
    state[OPTIM] = optimizer_of(trainer)
    extra[SCHEDULER] = plain(schedule_of(trainer).state_dict())
    if (scaler := scaler_of(trainer)) is not None:
        extra[SCALER] = scaler.state_dict()
    if with_rng:
        extra[RNG] = {str(trainer.args.process_index): {"streams": rng.capture(trainer.args.device)}}
    return state


class ToLoad:
    """What of a checkpoint a trainer takes: the state to load into, and what to do with it afterwards.

    Args:
        names: The names in the checkpoint, see :class:`~dcp_plugin.transformers.checkpoint_dirs.Found`.
    """

    def __init__(self, trainer: Trainer, names: frozenset[str]) -> None:
        self._trainer = trainer
        self._rng = f"{EXTRA}.{RNG}.{trainer.args.process_index}"
        self._new_rank = self._rng not in names
        self.streams_continue = False
        if self._new_rank:
            self._rng = f"{EXTRA}.{RNG}.0"
        self.state: dict[str, Any] = {MODEL: model_of(trainer)}
        if OPTIM in names:
            self.state[OPTIM] = optimizer_of(trainer)
        wanted = [self._rng, f"{EXTRA}.{SCHEDULER}", f"{EXTRA}.{SCALER}"]
        self.state.update({name: {} for name in wanted if name in names})

    def finish(self) -> None:
        """Give schedule and scaler what was read."""
        schedule, scaler = self.state.get(f"{EXTRA}.{SCHEDULER}"), self.state.get(f"{EXTRA}.{SCALER}")
        if schedule:
            schedule_of(self._trainer).load_state_dict(schedule)
        if scaler and scaler_of(self._trainer) is not None:
            scaler_of(self._trainer).load_state_dict(scaler)

    def continue_streams(self) -> None:
        """Set this rank's random generators, at the moment in the loop at which the checkpoint was made."""
        self.streams_continue = True
        saved: Mapping[str, Any] = self.state.get(self._rng, {})
        if not saved:
            return
        if self._new_rank:
            rng.derive(saved["streams"], self._trainer.args.process_index)
        else:
            rng.restore(saved["streams"], self._trainer.args.device)


def random_position() -> tuple[Any, ...]:
    """Where this process is in its random streams: equal if no number was drawn in between."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy[1].tobytes(), numpy[2]


def random_positions_after_iter() -> list[tuple[Any, ...]]:
    """Where the random streams can be when an iterator over a dataloader has been made and data without any random
    numbers has come out of it: the iterator draws a seed for its workers, and a shuffling sampler may draw another."""
    state, positions = torch.get_rng_state(), [random_position()]
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_()
        positions.append(random_position())
    torch.set_rng_state(state)
    return positions


def adapters_of(model: nn.Module, peft_model: nn.Module) -> nn.Module:
    """The adapters as a module of its own: the same parameters and buffers under the same names, nothing else.

    Adapters are what PEFT itself would save, and whatever else is trained.
    """
    tensors = {key: value for key, value in gather_module(model).items() if is_tensor(value)}
    kept = _kept_by_peft(peft_model, tensors)
    parameters, buffers = parameters_by_name(peft_model), dict(peft_model.named_buffers())
    adapters = nn.Module()
    for key, value in tensors.items():
        if key in parameters and (id(value) in kept or parameters[key].requires_grad):
            _place(adapters, key).register_parameter(key.rpartition(".")[2], parameters[key])
        elif key in buffers and id(value) in kept:
            _place(adapters, key).register_buffer(key.rpartition(".")[2], buffers[key])
    return adapters


def whole_adapters(trainer: Trainer) -> dict[str, torch.Tensor] | None:
    """The adapters of a sharded PEFT model under their names there; whole, on rank 0 at least. Collective.

    None for prompts, which PEFT does not take out of a state dict, and under FSDP1, where PEFT asks the modules for
    their state on one rank alone, and waits for the others.
    """
    peft_model: Any = unwrapped(trainer)
    prompts = any(config.is_prompt_learning for config in peft_model.peft_config.values())
    if prompts or contains_fsdp1(trainer.model_wrapped):
        return None
    tensors = {key: value for key, value in gather_module(trainer.model_wrapped).items() if is_tensor(value)}
    kept = _kept_by_peft(peft_model, tensors)
    return {key: _whole(value, trainer.args.device) for key, value in tensors.items() if id(value) in kept}


def _kept_by_peft(peft_model: nn.Module, tensors: Mapping[str, Any]) -> set[int]:
    """Which of them, by identity, PEFT itself would save."""
    from peft import get_peft_model_state_dict

    known: Callable[..., Mapping[str, Any]] = get_peft_model_state_dict
    return {
        id(value)
        for name in peft_model.peft_config  # type: ignore[union-attr]
        for value in known(peft_model, dict(tensors), adapter_name=name, save_embedding_layers=False).values()
    }


def _whole(value: Any, device: torch.device) -> torch.Tensor:
    """On the device first, where the ranks can communicate: offloaded shards are in host memory."""
    if isinstance(value, DTensor):
        return value.detach().to(device).full_tensor().cpu()  # type: ignore[attr-defined, no-any-return]
    return value.detach().cpu()  # type: ignore[no-any-return]


def _place(root: nn.Module, key: str) -> nn.Module:
    """The module of a key, made with all above it if it is not there."""
    for name in key.split(".")[:-1]:
        if name not in dict(root.named_children()):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root
