"""Checkpoints of a Trainer: their state, saved from the objects and loaded into them, and their directories.

| name                       | value                                                                               |
|----------------------------|-------------------------------------------------------------------------------------|
| ``model.<FQN>``            | the model; of a PEFT model the adapters alone, since the user loads the base        |
| ``optim.…``                | the optimizer                                                                       |
| ``extra.lr_scheduler``     | the schedule                                                                        |
| ``extra.scaler``           | the gradient scaler, if there is one                                                |
| ``extra.rng.<rank>``       | the random generators of each rank                                                  |
| ``extra.trainer_state``    | the text of ``trainer_state.json``, so that its bytes have a checksum too           |
| ``extra.samples_per_step`` | over all ranks and accumulated batches; compared at a resume                        |

The second half chooses among the ``checkpoint-N`` directories: the directory to resume from, and those to delete. It
considers directories of this package and of stock transformers.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME, Trainer
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dcp_plugin.checkpointer import Checkpointer, Internals
from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointNotFound,
    CheckpointUnreadable,
    damage_in,
)
from dcp_plugin.core.paths import PathLike, Where, absolute, as_path, local_path, on_file_system
from dcp_plugin.core.runs import catalog, deletion
from dcp_plugin.core.runs.damage import note_chosen
from dcp_plugin.core.runs.scan import state_of
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.state import contains_fsdp1, unwrapped_optimizer
from dcp_plugin.core.types import CheckpointState
from dcp_plugin.integration import (
    EXTRA,
    MODEL,
    OPTIM,
    RNG,
    Callbacks,
    SavedStreams,
    inspect_files,
    is_quarantined,
    kind_of,
    of_rank,
    plain,
    read_file,
)
from dcp_plugin.transformers._transformers import adapters_of, is_adapted, unwrapped

_OF_THE_WORK = re.compile("^checkpoint/|_runtime$|_per_second$|_flos$")
SCHEDULER, SCALER, TRAINER_STATE, SAMPLES = "lr_scheduler", "scaler", "trainer_state", "samples_per_step"


def model_of(trainer: Trainer) -> nn.Module:
    """Return the module to store: the model in the wrapper that distributes it, or the model's adapters."""
    wrapped: Any = trainer.model_wrapped
    model: nn.Module = wrapped.module if isinstance(wrapped, nn.DataParallel) else wrapped
    if is_adapted(unwrapped(trainer)) and not contains_fsdp1(model):  # FSDP1 mixes base and adapters in its parameters
        return adapters_of(model, unwrapped(trainer))
    return model


def to_save(trainer: Trainer, with_rng: bool) -> dict[str, Any]:
    """Return the named state of a trainer. Collective under FSDP1."""
    extra: dict[str, Any] = {SAMPLES: trainer.get_total_train_batch_size(trainer.args)}
    state: dict[str, Any] = {MODEL: model_of(trainer), EXTRA: extra}
    if trainer.args.save_only_model:
        return state
    state[OPTIM] = unwrapped_optimizer(trainer.optimizer)
    for name, value in _plain_parts(trainer).items():
        extra[name] = plain(value.state_dict())
    if with_rng:
        extra[RNG] = of_rank(trainer.args.process_index, trainer.args.device)
    return state


def _plain_parts(trainer: Trainer) -> dict[str, Any]:
    """Return the schedule, and the gradient scaler if there is one."""
    parts = {SCHEDULER: trainer.lr_scheduler, SCALER: getattr(trainer.accelerator, "scaler", None)}
    return {name: part for name, part in parts.items() if part is not None}


def to_load(trainer: Trainer, names: frozenset[str], streams: SavedStreams) -> dict[str, Any]:
    """Return the targets of a load into a trainer, by name.

    Args:
        names: The names in the checkpoint, see :class:`Found`.
        streams: Random streams that are loaded, and not yet restored.
    """
    state: dict[str, Any] = {MODEL: model_of(trainer), OPTIM: unwrapped_optimizer(trainer.optimizer)}
    if streams.name is not None:
        state[f"{EXTRA}.{streams.name}"] = streams.loaded
    for name, part in _plain_parts(trainer).items():
        state[f"{EXTRA}.{name}"] = Callbacks(part.state_dict, part.load_state_dict)
    return {name: target for name, target in state.items() if name in names}


def random_position() -> tuple[Any, ...]:
    """Return the position of this process in its random streams, which changes with each draw."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy[1].tobytes(), numpy[2]


def random_positions_after_iter() -> list[tuple[Any, ...]]:
    """Return the possible positions after a dataloader without random data has yielded a batch: the iterator draws a
    seed for its workers, and a shuffling sampler may draw another."""
    state, positions = torch.get_rng_state(), [random_position()]
    for _ in range(2):
        torch.empty((), dtype=torch.int64, device=torch.get_default_device()).random_()
        positions.append(random_position())
    torch.set_rng_state(state)
    return positions


_COPY_IT = (
    "The Trainer itself reads it. Copy it to a directory, and resume from that; or load its weights alone: "
    'dcp_plugin.load({"model": model}, URL).'
)
_PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"
_STOCK_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "adapter_model.*", "*/adapter_model.*")


@dataclass(frozen=True)
class Found:
    """Checkpoint to resume from."""

    path: Where
    stock: bool = True  # True if transformers wrote it without this package
    names: frozenset[str] = frozenset()
    """The names in the checkpoint: ``model``, ``optim``, ``extra.lr_scheduler``, ``extra.rng.0``."""
    world_size: int | None = None
    samples_per_step: int | None = None
    has_trainer_state: bool = True


def newest(root: PathLike, config: CheckpointConfig, local: Collection[CheckpointState]) -> Where:
    """Return the complete checkpoint of the highest step in a Trainer's output directory. Called on rank 0.

    Args:
        local: Checkpoints that only the local tier of nodes has.

    Raises:
        CheckpointNotFound: The directory has no complete checkpoint.
    """
    by_step = sorted(_candidates(Path(root)), reverse=True)
    steps = [step for step, path in by_step if not path.name.endswith(".aside")]
    newest_local = max(local, key=lambda state: state.step or 0, default=None)
    if newest_local is not None and (newest_local.step or 0) >= max(steps, default=0):
        return newest_local.path
    candidates = [path for _, path in by_step]
    newest_usable, refused = catalog.first_usable(candidates, lambda path: examine(path, config).path)
    for path, error in zip(candidates, refused, strict=False):
        warnings.warn(f"resume_from_checkpoint=True passes over {path}: {error}", stacklevel=2)
    if newest_usable is not None:
        note_chosen(newest_usable)
        return newest_usable
    torn = f" Passed over: {'; '.join(map(str, refused))}." if refused else ""
    # The message begins like stock's, for programs that compare it.
    raise CheckpointNotFound(
        f"No valid checkpoint found in output directory ({root}): resume_from_checkpoint=True, but there is no "
        f"complete checkpoint.{torn}"
    )


def examine_named(path: PathLike, config: CheckpointConfig, files: SourceFiles | None) -> Found:
    """Return :func:`examine` of a path from the user. Its errors advise how to resume."""
    try:
        return examine(path, config, files)
    except (CheckpointNotFound, CheckpointIncomplete) as error:
        raise type(error)(
            f"Can't find a valid checkpoint at {error}. "
            "resume_from_checkpoint=True takes the newest complete checkpoint."
        ) from None


def examine(path: PathLike, config: CheckpointConfig, files: SourceFiles | None = None) -> Found:
    """Return the description of a checkpoint to resume from.

    Args:
        files: Of :meth:`dcp_plugin.checkpointer.Internals.shown`.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt: The path has no complete checkpoint.
    """
    path = as_path(path, config.storage_options)
    if files is None:
        state = state_of(path)
        if state is None:
            return _examine_stock(path)
        if not state.committed:
            raise CheckpointIncomplete(f"{path}: {state.reason}")
    info = inspect_files(path, files)
    names = frozenset(_name_of(key) for key in (*(tensor.key for tensor in info.tensors), *info.values))
    wanted = (f"{EXTRA}.{TRAINER_STATE}", f"{EXTRA}.{SAMPLES}")
    extra: dict[str, Any] = {name: None for name in wanted if name in names}
    Internals(Checkpointer(config, solo=True)).restore(extra, path, files=files)
    saved = extra.get(f"{EXTRA}.{TRAINER_STATE}") if config.io.verify else None
    trainer_state = read_file(path, TRAINER_STATE_NAME, files)
    if saved is not None and trainer_state != saved.encode():
        raise CheckpointCorrupt(
            f"{path / TRAINER_STATE_NAME} is not what was saved. If you have changed it on purpose, resume with "
            f"CheckpointConfig(io=IO(verify=False))."
        )
    samples = extra.get(f"{EXTRA}.{SAMPLES}")
    return Found(path, False, names, info.world_size, samples, bool(trainer_state))


def _examine_stock(path: Where) -> Found:
    with damage_in(path):
        kind = kind_of(path)
    if not kind:
        raise CheckpointNotFound(f"{path}: nothing is there")
    directory = local_path(path, "what transformers has saved without this package", _COPY_IT)
    if reason := _incomplete_reason(directory):
        raise CheckpointIncomplete(f"{directory}: {reason}")
    return Found(directory)


def logged_now(state: TrainerState) -> dict[str, float]:
    """Return the numbers that the Trainer has logged at this step, such as an evaluation's loss, but not its speed.

    An evaluation at an earlier step does not describe the state that is saved now.
    """
    logged: dict[str, Any] = {}
    for entry in reversed(state.log_history):
        if entry.get("step") != state.global_step:
            break
        logged = entry | logged
    return {
        name: float(value)
        for name, value in logged.items()
        if isinstance(value, (int, float)) and name not in ("step", "epoch") and not _OF_THE_WORK.search(name)
    }


def rotate(
    directory: PathLike,
    newest: PathLike,
    best: PathLike | None,
    limit: int | None,
    delete: Callable[[Where], None],
) -> None:
    """Delete the oldest checkpoints until ``limit`` remain: incomplete checkpoints first, never the newest or the best.
    Quarantined and unreadable checkpoints stay and do not count.

    Args:
        newest: Path of a complete checkpoint.
    """
    if limit is None or limit <= 0:
        return
    present = [path for _, path in catalog.numbered(absolute(directory), _PREFIX)]
    protected = {absolute(path) for path in (newest, best) if path is not None}.intersection(present)
    ages: dict[Path, tuple[bool, float]] = {}
    for path in present:
        with suppress(OSError, CheckpointUnreadable):  # an unreadable checkpoint stays, and does not count
            if path not in protected and not is_quarantined(path):
                state = state_of(path)
                is_complete = not _incomplete_reason(path) if state is None else state.committed
                ages[path] = is_complete, path.stat().st_mtime
    oldest_first = sorted(ages, key=ages.__getitem__)
    deletion.rotate([*oldest_first, *protected], max(limit, len(protected)), delete)


def _candidates(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield the checkpoints with their steps, including checkpoints that an interrupted overwrite has renamed."""
    yield from catalog.numbered(root, _PREFIX)
    for state in catalog.list_checkpoints(root):
        path, step = on_file_system(state.path), state.step
        if path is not None and path.suffix == ".aside" and path.parent.parent == root and step is not None:
            yield step, path


def _incomplete_reason(path: Path) -> str:
    """Return the reason why a directory is not a complete checkpoint of stock transformers; an empty string if it is.
    Rank 0 writes the Trainer's state last."""
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
