"""The ``checkpoint-N`` directories of a Trainer: which one to resume from, and which to delete.

The rule: only a complete checkpoint is resumed from, and none is deleted before a newer one is complete. Both kinds
count, ours and those that transformers alone has written.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.config import CheckpointConfig, PathLike, local_path
from dcp_plugin.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete, CheckpointNotFound
from dcp_plugin.integration.key_names import EXTRA, RNG
from dcp_plugin.runs import catalog
from dcp_plugin.runs.inspect import inspect
from dcp_plugin.transformers.state_mapping import SAMPLES, TRAINER_STATE
from dcp_plugin.types import CheckpointState

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
