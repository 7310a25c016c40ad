"""Accelerate's own layout on disk: the numbered directories of a project, and their files for stock Accelerate.

Stock Accelerate resumes a checkpoint that ``save_state`` wrote through this package under FSDP. Such a checkpoint has
views of model and optimizer (:mod:`dcp_plugin.core.format.metadata`), and Accelerate's small files. Checkpoints in
Accelerate's single-file formats (DDP, one process) are not written: every byte would be written twice.
"""

from __future__ import annotations

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
from dcp_plugin.checkpointer import Internals
from dcp_plugin.core.errors import CheckpointIncomplete, CheckpointNotFound, SaveFailed, damage_in, logger
from dcp_plugin.core.events import SaveFinished
from dcp_plugin.core.partial import PartialLoad
from dcp_plugin.core.paths import StorageOptions, Where, as_path
from dcp_plugin.core.runs import catalog, deletion
from dcp_plugin.core.runs.damage import note_chosen
from dcp_plugin.core.runs.foreign import RANDOM_STATES
from dcp_plugin.core.sources import Source
from dcp_plugin.core.types import CheckpointState
from dcp_plugin.integration import extra_files, local_copy

_STOCK_MODEL, _STOCK_OPTIMIZER = "model", "optimizer"
_MODEL_DIRECTORY, _OPTIMIZER_DIRECTORY = "pytorch_model_fsdp_{}", "optimizer_{}"
_ONE_FILE = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
_PREFIX = "checkpoint_"
_NUMBERED = re.compile(rf"{_PREFIX}(\d+)")


def views(models: Iterable[str], optimizers: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the directories in which Accelerate looks for these models and optimizers, with the name in each."""
    of_models = {_MODEL_DIRECTORY.format(number): {name: _STOCK_MODEL} for number, name in enumerate(models)}
    of_optimizers = {
        _OPTIMIZER_DIRECTORY.format(number): {name: _STOCK_OPTIMIZER} for number, name in enumerate(optimizers)
    }
    return of_models | of_optimizers


def write_small_files(accelerator: Accelerator, directory: Path, registered: list[Any], step: int) -> None:
    """Write all state except models and optimizers as Accelerate does. Called on every rank."""
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
    for number, value in enumerate(registered):
        save_custom_state(value, str(directory), number)


def is_stock(path: Where) -> bool:
    """Return whether a directory is a checkpoint of stock Accelerate, and not of this package. The models may be in
    files of the user's hooks alone."""
    if extra_files.has_our_files(path):
        return False
    return not extra_files.names_in(path).isdisjoint((*_ONE_FILE, RANDOM_STATES)) or _is_sharded(path)


def load(
    accelerator: Accelerator,
    internals: Internals,
    path: Where,
    training: Training,
    strict: bool,
    map_location: str | None,
    load_kwargs: dict[str, Any] | None,
) -> int:
    """Load a checkpoint of stock Accelerate without executing code from it. Return the step of rank 0, on all ranks.

    Shards are read in place from an object store; each rank first fetches the files that only Accelerate reads.

    Raises:
        CheckpointMismatch: The checkpoint does not fit.
        UnsafeCheckpoint: A registered object was stored as code.
    """
    ranks = internals.ranks
    models, optimizers = list(training.models.values()), list(training.optimizers.values())
    with ExitStack() as cleanup:
        local = ranks.agree(f"read {path}", lambda: cleanup.enter_context(local_copy(path)))
        if ranks.from_zero(f"look at {path}", lambda: _is_sharded(path)):
            _load_sharded(internals, path, training, strict)
            models, optimizers = [], []
        elif training.sharded:
            _load_full_state(accelerator, local, models, optimizers)
            models, optimizers = [], []

        def load_the_rest() -> int:
            values = load_accelerator_state(
                str(local),
                models,
                optimizers,
                _accelerate.schedulers(accelerator),
                _accelerate.dataloaders(accelerator),
                accelerator.process_index,
                accelerator.scaler,
                map_location,
                load_kwargs,
                strict=strict,
            )
            _load_registered(path, local, training.registered)
            return int(values.get("step", 0))

        return ranks.combine(f"load {path}", load_the_rest, lambda steps: steps[0])


def _load_sharded(internals: Internals, path: Where, training: Training, strict: bool) -> None:
    for number, model in enumerate(training.models.values()):
        internals.restore({_STOCK_MODEL: model}, path / _MODEL_DIRECTORY.format(number), strict=strict)
    owners = {f"of_{name}": model for name, model in training.models.items()}
    only_optimizer = PartialLoad((f"{_STOCK_OPTIMIZER}.*",), cast=True)
    for number, optimizer in enumerate(training.optimizers.values()):
        state = {**owners, _STOCK_OPTIMIZER: optimizer}
        internals.restore(state, path / _OPTIMIZER_DIRECTORY.format(number), only_optimizer)


def _load_full_state(
    accelerator: Accelerator, path: Path, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]
) -> None:
    """Load files of ``StateDictType.FULL_STATE_DICT``, which only Accelerate's own loader distributes."""
    plugin = accelerator.state.fsdp_plugin
    for number, model in enumerate(models):
        load_fsdp_model(plugin, accelerator, model, str(path), number)
    for number, optimizer in enumerate(optimizers):
        load_fsdp_optimizer(plugin, accelerator, optimizer, models[number], str(path), number)


def _load_registered(path: Where, local: Path, registered: list[Any]) -> None:
    for number, value in enumerate(registered):
        name = f"custom_checkpoint_{number}.pkl"
        with damage_in(path / name):
            state = extra_files.load_torch_file(
                local / name, True, "detach, load it with Accelerate, and save it again"
            )
        value.load_state_dict(state)


def _is_sharded(path: Where) -> bool:
    return ".metadata" in extra_files.names_in(path / _MODEL_DIRECTORY.format(0))


@dataclass(frozen=True)
class Project:
    """Checkpoints of automatic naming, ``<project_dir>/checkpoints/checkpoint_<iteration>``.

    Accelerate's own rotation deletes the oldest checkpoint before it writes the new one, and takes the last name in the
    directory for the newest. Here only a committed checkpoint counts as the newest, and an old checkpoint is deleted
    only after the new one is committed.

    Args:
        storage_options: Options of the store of a project at a URL.

    Raises:
        ValueError: The project is at a URL, but not of an object store.
    """

    config: ProjectConfiguration
    storage_options: StorageOptions | None = field(default=None, repr=False)
    local: tuple[Where, ...] = ()
    """Paths of checkpoints that only the local tier of nodes has."""

    @classmethod
    def of(cls, accelerator: Accelerator, storage_options: StorageOptions | None) -> Project | None:
        """Return the project of an accelerator; None without automatic naming."""
        config = accelerator.project_configuration
        return cls(config, storage_options) if config.automatic_checkpoint_naming else None

    def with_local(self, states: Iterable[CheckpointState]) -> Project:
        """Return the project with the checkpoints among ``states`` that only the local tier of nodes has."""
        paths = [self.root / state.path.name for state in states]
        return replace(self, local=tuple(path for path in paths if _NUMBERED.fullmatch(path.name)))

    def __post_init__(self) -> None:
        if self.config.project_dir is not None:
            as_path(self.config.project_dir)  # raises now, not in the first save

    @property
    def current_path(self) -> Where:
        """Path of the next automatic name, which may be taken."""
        return self.root / f"{_PREFIX}{self.config.iteration}"

    def next_path(self, source: Source) -> Where:
        """Return the path of the next automatic save.

        Raises:
            SaveFailed: The path is taken by a checkpoint that this run does not continue.
        """
        path = self.current_path
        if extra_files.is_taken(path) or source.newest_time(path) is not None:
            raise SaveFailed(
                f"cannot save {path}: it exists, and this run has not loaded any checkpoint of the project. Resume "
                f"with accelerator.load_state(), use another project_dir, or set project_configuration.iteration."
            )
        return path

    def newest(self, must: bool = False, without: Collection[Where] = ()) -> Where:
        """Return the committed checkpoint with the highest number. Called on rank 0.

        Args:
            must: Treat a damaged checkpoint as an error, and do not quarantine it.
            without: Damaged checkpoints to skip.

        Raises:
            CheckpointNotFound: The project has no committed checkpoint.
        """
        paths = [path for path in reversed(self.paths()) if path not in without]
        newest, refused = catalog.first_usable(paths, self._require_complete)
        for error in refused:
            logger.warning("passing over %s", error)
        if newest is None:
            raise CheckpointNotFound(f"there is no committed checkpoint in {self.root}")
        if not must:
            note_chosen(newest)
        return newest

    def continue_numbering(self) -> None:
        """Number the next save after a load above all checkpoints of the project, even those of another branch."""
        if paths := self.paths():
            self.config.iteration = _number_of(paths[-1]) + 1

    def rotate(self, event: SaveFinished, delete: Callable[[Where], None]) -> None:
        """Delete the oldest checkpoints beyond ``total_limit``. Called on rank 0 when the newest is committed.
        ``keeper.keep`` limits the checkpoints in the local tier."""
        if self.config.total_limit is not None and event.tier == "durable":
            complete: list[Where] = []
            for path in self.paths():
                with suppress(OSError):  # a checkpoint that cannot be read stays, and does not count
                    complete += [] if _why_incomplete(path) else [path]
            deletion.rotate(complete, max(1, self.config.total_limit), delete)

    @property
    def root(self) -> Where:
        """Directory of all checkpoints of the project."""
        return as_path(self.config.project_dir, self.storage_options) / "checkpoints"

    def paths(self) -> list[Where]:
        """Return the checkpoints of the project, lowest number first; they may be incomplete."""
        paths = [path for _, path in catalog.numbered(self.root, _PREFIX)]
        return sorted({*paths, *self.local}, key=_number_of)

    def _require_complete(self, path: Where) -> Where:
        if path not in self.local and (reason := _why_incomplete(path)):
            raise CheckpointIncomplete(f"{path}: {reason}")
        return path


def _number_of(path: Where) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _why_incomplete(path: Where) -> str:
    """Return the reason why a directory cannot be loaded; an empty string if it can. Stock Accelerate commits no
    checkpoint, but writes a known file last."""
    if extra_files.has_our_files(path):
        return extra_files.uncommitted_reason(path)
    return "" if RANDOM_STATES in extra_files.names_in(path) else "a half-written checkpoint"
