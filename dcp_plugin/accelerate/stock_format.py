"""Accelerate's own layout on disk: the numbered directories of a project, and what stock Accelerate loads from one.

What ``save_state`` wrote through this package under FSDP, stock Accelerate resumes: model and optimizer are there a
second time as views (:mod:`dcp_plugin.format.metadata`), its small files beside them. Its single-file formats (DDP,
one process) are not imitated: that would write every byte twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state, save_custom_state
from accelerate.utils import ProjectConfiguration, load_fsdp_model, load_fsdp_optimizer
from torch import nn

from dcp_plugin.accelerate import _accelerate
from dcp_plugin.accelerate.extra_state import Training
from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.errors import CheckpointIncomplete, CheckpointMismatch, CheckpointNotFound, SaveFailed, damage_in
from dcp_plugin.events import SaveFinished
from dcp_plugin.integration import files
from dcp_plugin.integration.files import local_copy
from dcp_plugin.partial import PartialLoad
from dcp_plugin.paths import StorageOptions, Where, as_path
from dcp_plugin.runs import catalog, retention
from dcp_plugin.runs.damage import note_chosen
from dcp_plugin.runs.foreign import RANDOM_STATES
from dcp_plugin.sources import Source

logger = logging.getLogger("dcp_plugin")

_STOCK_MODEL, _STOCK_OPTIMIZER = "model", "optimizer"
_MODEL_DIRECTORY, _OPTIMIZER_DIRECTORY = "pytorch_model_fsdp_{}", "optimizer_{}"
_ONE_FILE = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
_PREFIX = "checkpoint_"
_NUMBERED = re.compile(rf"{_PREFIX}(\d+)")
_CUSTOM = re.compile(r"custom_checkpoint_(\d+)\.pkl")


def views(models: Iterable[str], optimizers: Iterable[str]) -> dict[str, dict[str, str]]:
    """Under which directories and names Accelerate looks for the models and optimizers of these names."""
    found = {_MODEL_DIRECTORY.format(number): {name: _STOCK_MODEL} for number, name in enumerate(models)}
    found.update(
        {_OPTIMIZER_DIRECTORY.format(number): {name: _STOCK_OPTIMIZER} for number, name in enumerate(optimizers)}
    )
    return found


def write_small_files(accelerator: Accelerator, directory: Path, registered: list[Any], step: int) -> None:
    """Everything besides models and optimizers as Accelerate writes it. On every rank."""
    main = accelerator.is_main_process
    save_accelerator_state(
        str(directory),
        [],
        [],
        _accelerate.schedulers(accelerator),
        _accelerate.dataloaders(accelerator) if main else [],  # all ranks write the same file
        accelerator.process_index,
        step,
        accelerator.scaler if main else None,
    )
    for number, one in enumerate(registered):
        save_custom_state(one, str(directory), number)


def is_stock(path: Where) -> bool:
    """Whether a directory is a checkpoint of stock Accelerate, not of this package. Its models may be in files that
    the user's hooks wrote."""
    if files.has_our_files(path):
        return False
    return not files.names_in(path).isdisjoint((*_ONE_FILE, RANDOM_STATES)) or _is_sharded(path)


@dataclass(frozen=True)
class ReadOptions:
    """What ``load_state`` was given for the files of stock Accelerate."""

    strict: bool
    map_location: str | None
    load_kwargs: dict[str, Any] | None


def load(
    accelerator: Accelerator, checkpointer: Checkpointer, path: Where, training: Training, options: ReadOptions
) -> int:
    """Load what Accelerate wrote, without executing code from it. Returns the step, that of rank 0 on all ranks.

    From an object store shards are read as they are; files that only Accelerate reads are fetched first, by each rank.

    Raises:
        CheckpointMismatch: Something does not fit; or another number of objects was registered.
        UnsafeCheckpoint: A registered object was stored as code.
    """
    with ExitStack() as cleanup:
        local = checkpointer.ranks.agree(f"read {path}", lambda: cleanup.enter_context(local_copy(path)))
        return _load(accelerator, checkpointer, path, local, training, options)


def _load(
    accelerator: Accelerator,
    checkpointer: Checkpointer,
    path: Where,
    local: Path,
    training: Training,
    options: ReadOptions,
) -> int:
    models, optimizers = list(training.models.values()), list(training.optimizers.values())
    if checkpointer.ranks.from_zero(f"look at {path}", lambda: _is_sharded(path)):
        _load_sharded(checkpointer, path, training, options.strict)
        models, optimizers = [], []
    elif training.sharded:
        _load_full_state(accelerator, local, models, optimizers)
        models, optimizers = [], []

    def load_the_rest() -> int:
        found = load_accelerator_state(
            str(local),
            models,
            optimizers,
            _accelerate.schedulers(accelerator),
            _accelerate.dataloaders(accelerator),
            accelerator.process_index,
            accelerator.scaler,
            options.map_location,
            options.load_kwargs,
            strict=options.strict,
        )
        _load_registered(path, local, training.registered)
        return int(found.get("step", 0))

    return checkpointer.ranks.combine(f"load {path}", load_the_rest, lambda steps: steps[0])


def _load_sharded(checkpointer: Checkpointer, path: Where, training: Training, strict: bool) -> None:
    for number, model in enumerate(training.models.values()):
        checkpointer.restore({_STOCK_MODEL: model}, path / _MODEL_DIRECTORY.format(number), strict=strict)
    only_optimizer = PartialLoad((f"{_STOCK_OPTIMIZER}.*",), cast=True)
    for number, optimizer in enumerate(training.optimizers.values()):
        owners = {f"of_{name}": model for name, model in training.models.items()}
        checkpointer.restore(
            {**owners, _STOCK_OPTIMIZER: optimizer}, path / _OPTIMIZER_DIRECTORY.format(number), only_optimizer
        )


def _load_full_state(
    accelerator: Accelerator, path: Path, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]
) -> None:
    """``StateDictType.FULL_STATE_DICT``: one file, which only Accelerate's own loader distributes."""
    plugin = accelerator.state.fsdp_plugin
    for number, model in enumerate(models):
        load_fsdp_model(plugin, accelerator, model, str(path), number)
    for number, optimizer in enumerate(optimizers):
        load_fsdp_optimizer(plugin, accelerator, optimizer, models[number], str(path), number)


def _load_registered(path: Where, local: Path, registered: list[Any]) -> None:
    stored = [name for name in local.iterdir() if _CUSTOM.fullmatch(name.name)]
    if len(stored) != len(registered):
        raise CheckpointMismatch(
            f"{path} has {len(stored)} objects given to register_for_checkpointing, this run has {len(registered)}. "
            f"Register the same ones, in the same order."
        )
    for number, one in enumerate(registered):
        name = f"custom_checkpoint_{number}.pkl"
        with damage_in(path / name):
            state = files.load_torch_file(local / name, True, "detach, load it with Accelerate, and save it again")
        one.load_state_dict(state)


def _is_sharded(path: Where) -> bool:
    return files.has_file(path / _MODEL_DIRECTORY.format(0), ".metadata")


@dataclass(frozen=True)
class Project:
    """The checkpoints of automatic naming, ``<project_dir>/checkpoints/checkpoint_<iteration>``.

    Accelerate's own rotation deletes the oldest before the new one is written, and its choice of the newest is the last
    name in the directory, whatever is in it. Here only a committed checkpoint is the newest, and only after the new one
    is committed an old one is deleted.

    Args:
        storage_options: How the store of a project at a URL is reached.

    Raises:
        ValueError: The project is at a URL of something else than an object store.
    """

    config: ProjectConfiguration
    storage_options: StorageOptions | None = field(default=None, repr=False)
    local: tuple[Where, ...] = ()
    """What can be loaded although nothing is there."""

    @classmethod
    def of(cls, accelerator: Accelerator, storage_options: StorageOptions | None) -> Project | None:
        """The project of an accelerator; None without automatic naming."""
        config = accelerator.project_configuration
        return cls(config, storage_options) if config.automatic_checkpoint_naming else None

    def with_local(self, checkpointer: Checkpointer) -> Project:
        """With the saves that survive on the nodes alone. Collective."""
        found = [self.root / state.path.name for state in checkpointer.surviving(self.root)]
        return replace(self, local=tuple(path for path in found if _NUMBERED.fullmatch(path.name)))

    def __post_init__(self) -> None:
        if self.config.project_dir is not None:
            as_path(self.config.project_dir)  # here, not in the first save

    @property
    def current_path(self) -> Where:
        """The path of the next automatic name, whatever is there."""
        return self.root / f"{_PREFIX}{self.config.iteration}"

    def next_path(self, source: Source) -> Where:
        """Return where the next automatic save goes.

        Raises:
            SaveFailed: There is something already, and this run does not continue it.
        """
        path = self.current_path
        if files.is_taken(path) or source.newest_time(path) is not None:
            raise SaveFailed(
                f"cannot save {path}: it exists, and this run has not loaded any checkpoint of the project. Resume "
                f"with accelerator.load_state(), use another project_dir, or set project_configuration.iteration."
            )
        return path

    def newest(self, must: bool = False, without: Collection[Where] = ()) -> Where:
        """The committed checkpoint with the highest number, but for those that turned out to be damaged. On rank 0.

        Args:
            must: It is this one or none: it is not set aside if it is damaged.

        Raises:
            CheckpointNotFound: There is none.
        """
        paths = [path for path in reversed(self._paths()) if path not in without]
        found, refused = catalog.first_usable(paths, self._require_complete)
        for error in refused:
            logger.warning("passing over %s", error)
        if found is None:
            raise CheckpointNotFound(f"there is no committed checkpoint in {self.root}")
        if not must:
            note_chosen(found)
        return found

    def resume_from(self, must: bool, without: Collection[Where] = ()) -> Where | None:
        """The same; None if nothing has ever been saved, unless there ``must`` be something. On rank 0.

        Raises:
            CheckpointNotFound: There is nothing to resume from, and there must be or there are incomplete checkpoints.
        """
        return self.newest(must, without) if must or self._paths() else None

    def continue_numbering(self) -> None:
        """After a load, number the next save after all that are there: also after those of a branch that was left."""
        if paths := self._paths():
            self.config.iteration = _number_of(paths[-1]) + 1

    def rotate(self, event: SaveFinished, delete: Callable[[Where], None] = retention.remove) -> None:
        """Delete the oldest beyond ``total_limit``. On rank 0, when the newest is committed. ``local_keep`` says how
        many stay on the nodes alone."""
        if self.config.total_limit is not None and event.tier == "durable":
            complete: list[Where] = []
            for path in self._paths():
                with suppress(OSError):  # a checkpoint that cannot be read stays, and does not count
                    complete += [] if _why_incomplete(path) else [path]
            retention.rotate(complete, max(1, self.config.total_limit), delete)

    @property
    def root(self) -> Where:
        """The directory of all checkpoints of the project."""
        return as_path(self.config.project_dir, self.storage_options) / "checkpoints"

    def _paths(self) -> list[Where]:
        there = [path for _, path in catalog.numbered(self.root, _PREFIX)]
        return sorted({*there, *self.local}, key=_number_of)

    def _require_complete(self, path: Where) -> Where:
        if path not in self.local and (reason := _why_incomplete(path)):
            raise CheckpointIncomplete(f"{path}: {reason}")
        return path


def _number_of(path: Where) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _why_incomplete(path: Where) -> str:
    """Why a directory cannot be loaded; empty if it can. Accelerate commits nothing: its last file has to do."""
    if files.has_our_files(path):
        return files.uncommitted_reason(path)
    return "" if RANDOM_STATES in files.names_in(path) else "a half-written checkpoint"
