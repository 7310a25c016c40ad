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

The ``checkpoint-N`` directories of a Trainer: which one to resume from, and which to delete.

The rule: only a complete checkpoint is resumed from, and none is deleted before a newer one is complete. Both kinds
count, ours and those that transformers alone has written.
"""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dcp_plugin._torch import DTensor, is_tensor
from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.config import CheckpointConfig, PathLike, local_path
from dcp_plugin.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete, CheckpointNotFound
from dcp_plugin.integration.key_names import EXTRA, MODEL, OPTIM, RNG, plain
from dcp_plugin.integration.random_streams import SavedStreams, of_rank
from dcp_plugin.runs import catalog
from dcp_plugin.runs.inspect import inspect
from dcp_plugin.state import gather_module
from dcp_plugin.state.fsdp1 import contains_fsdp1
from dcp_plugin.state.names import parameters_by_name
from dcp_plugin.transformers._transformers import is_adapted, unwrapped
from dcp_plugin.types import CheckpointState

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
        extra[RNG] = of_rank(trainer.args.process_index, trainer.args.device)
    return state


class ToLoad:
    """What of a checkpoint a trainer takes: the state to load into, and what to do with it afterwards.

    Args:
        names: The names in the checkpoint, see :class:`~dcp_plugin.transformers.checkpoints.Found`.
    """

    def __init__(self, trainer: Trainer, names: frozenset[str]) -> None:
        self._trainer = trainer
        extra = (name.removeprefix(f"{EXTRA}.") for name in names)
        args = trainer.args
        self.streams = SavedStreams.among(extra, args.process_index, args.world_size, args.device)
        self.streams_continue = False
        self.state: dict[str, Any] = {MODEL: model_of(trainer)}
        if OPTIM in names:
            self.state[OPTIM] = optimizer_of(trainer)
        wanted = [f"{EXTRA}.{name}" for name in (self.streams.name, SCHEDULER, SCALER)]
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
        if self.streams.name is not None:
            self.streams.restore(self.state[f"{EXTRA}.{self.streams.name}"])


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


_NUMBERED = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
_STOCK_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "adapter_model.*", "*/adapter_model.*")


@dataclass(frozen=True)
class Found:
    """A checkpoint to resume from."""

    path: Path
    stock: bool = True
    """transformers alone has written it."""
    names: frozenset[str] = frozenset()
    """What is in it, by name: ``model``, ``optim``, ``extra.lr_scheduler``, ``extra.rng.0``."""
    world_size: int | None = None
    samples_per_step: int | None = None
    has_trainer_state: bool = True


def newest(root: PathLike, config: CheckpointConfig) -> Found:
    """The complete checkpoint of the highest step in a Trainer's output directory.

    Raises:
        CheckpointNotFound: There is none.
    """
    passed_over = []
    for _, path in sorted(_candidates(Path(root)), reverse=True):
        try:
            return examine(path, config)
        except CheckpointError as error:
            passed_over.append(str(error))
            warnings.warn(f"resume_from_checkpoint=True passes over {path}: {error}", stacklevel=2)
    torn = f" Passed over: {'; '.join(passed_over)}." if passed_over else ""
    # Begins as stock's message does, for those who look into it.
    raise CheckpointNotFound(
        f"No valid checkpoint found in output directory ({root}): resume_from_checkpoint=True, but there is no "
        f"complete checkpoint.{torn}"
    )


def named(path: PathLike, config: CheckpointConfig) -> Found:
    """:func:`examine` of a path that the user has named; what is wrong with it comes with a way out."""
    try:
        return examine(path, config)
    except (CheckpointNotFound, CheckpointIncomplete) as error:
        raise type(error)(
            f"Can't find a valid checkpoint at {error}. "
            "resume_from_checkpoint=True takes the newest complete checkpoint."
        ) from None


def examine(path: PathLike, config: CheckpointConfig) -> Found:
    """What there is to resume from at a path.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt: Nothing is, or nothing whole.
    """
    path = local_path(path)
    state = _state_of(path)
    if state is None:
        if reason := _incomplete_reason(path):
            raise (CheckpointIncomplete if path.exists() else CheckpointNotFound)(f"{path}: {reason}")
        return Found(path)
    if not state.committed:
        raise CheckpointIncomplete(f"{path}: {state.reason}")
    info = inspect(path)
    names = frozenset(_name_of(key) for key in (*(tensor.key for tensor in info.tensors), *info.values))
    wanted = [name for name in (TRAINER_STATE, SAMPLES) if f"{EXTRA}.{name}" in names]
    extra = {f"{EXTRA}.{name}": None for name in wanted}
    Checkpointer(config, solo=True).load(extra, path)
    if config.verify_on_load:
        _compare_trainer_state(path, extra.get(f"{EXTRA}.{TRAINER_STATE}"))
    samples = extra.get(f"{EXTRA}.{SAMPLES}")
    return Found(path, False, names, info.world_size, samples, (path / TRAINER_STATE_NAME).exists())


def rotate(directory: PathLike, newest: PathLike, best: PathLike | None, limit: int | None) -> None:
    """Delete the oldest checkpoints until ``limit`` are left; torn ones first, never the newest or the best.

    Args:
        newest: Which is complete.
    """
    if limit is None or limit <= 0:
        return
    present = [path for _, path in _numbered(Path(os.path.abspath(directory)))]
    protected = {Path(os.path.abspath(path)) for path in (newest, best) if path is not None}.intersection(present)
    deletable = sorted(
        (path for path in present if path not in protected), key=lambda path: (_is_complete(path), path.stat().st_mtime)
    )
    for path in deletable[: max(0, len(present) - max(limit, len(protected)))]:
        catalog.remove(path)


def _numbered(root: Path) -> Iterator[tuple[int, Path]]:
    if root.is_dir():
        for path in root.iterdir():
            if (match := _NUMBERED.fullmatch(path.name)) and path.is_dir():
                yield int(match[1]), path


def _candidates(root: Path) -> Iterator[tuple[int, Path]]:
    """By step. Among them is what an interrupted overwrite has moved aside."""
    yield from _numbered(root)
    for state in catalog.list_checkpoints(root):
        if state.path.suffix == ".aside" and state.path.parent.parent == root and state.step is not None:
            yield state.step, state.path


def _state_of(path: Path) -> CheckpointState | None:
    """None if this is no DCP checkpoint and does not pretend to be one."""
    return next((state for state in catalog.list_checkpoints(path) if state.path == path), None)


def _is_complete(path: Path) -> bool:
    state = _state_of(path)
    return state.committed if state is not None else not _incomplete_reason(path)


def _incomplete_reason(path: Path) -> str:
    """Why a directory is no whole checkpoint of transformers' own; empty if it is. The Trainer's state is the last
    thing that rank 0 writes."""
    if not path.is_dir():
        return "it does not exist"
    if not (path / TRAINER_STATE_NAME).exists():
        return f"it has no {TRAINER_STATE_NAME}, so its save has not ended"
    if torn := [state for state in catalog.list_checkpoints(path) if not state.committed]:
        return f"{torn[0].path.name}: {torn[0].reason}"
    return "" if any(any(path.glob(pattern)) for pattern in _STOCK_WEIGHTS) else "there are no weights in it"


def _name_of(key: str) -> str:
    parts = key.split(".")
    return ".".join(parts[: 1 if parts[0] != EXTRA else 3 if parts[1:2] == [RNG] else 2])


def _compare_trainer_state(path: Path, saved: str | None) -> None:
    file = path / TRAINER_STATE_NAME
    if saved is not None and (not file.exists() or file.read_text("utf-8") != saved):
        raise CheckpointCorrupt(
            f"{file} is not what was saved. If you have changed it on purpose, resume with "
            f"CheckpointConfig(verify_on_load=False)."
        )
