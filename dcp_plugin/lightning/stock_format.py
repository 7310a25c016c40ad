"""Lightning's own checkpoints, read by us.

A directory of its sharded strategies is a DCP checkpoint of model and optimizers, which the core knows by our names
(:mod:`dcp_plugin.storage.foreign`), and ``meta.pt`` with everything else. Loops, callbacks and schedules are
Lightning's business, which continues them as it would by itself.

A file (``.ckpt``) is a ``torch.save`` of one dictionary, with whole tensors; see
:mod:`dcp_plugin.lightning.full_state`.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from dcp_plugin.errors import UnsafeCheckpoint
from dcp_plugin.format.foreign.frameworks import META
from dcp_plugin.storage.open import read_summary

Checkpoint = dict[str, Any]

MODEL_NAMES = {"FSDPStrategy": "model", "ModelParallelStrategy": "state_dict"}
"""Under which name each of the sharded strategies stores the model."""
OPTIMIZER = "optimizer"
"""Optimizers are ``optimizer_0``, ``optimizer_1``, …, also if there is only one."""


def is_directory_of_lightning(path: Path) -> bool:
    """Whether a sharded strategy saved this without us, also over a checkpoint of ours.

    Raises:
        CheckpointCorrupt: It mixes both.
    """
    return (path / META).is_file() and read_summary(path) is None


def read_meta(directory: Path, weights_only: bool | None) -> Checkpoint:
    """What a sharded strategy saved beside model and optimizers; raises as :func:`read` does."""
    return read(directory / META, weights_only)


def read(path: Path, weights_only: bool | None, map_location: Any = "cpu") -> Checkpoint:
    """A file of Lightning's, in host memory unless ``map_location`` says otherwise.

    Args:
        weights_only: Whether to refuse what only executing code from the file restores. None: torch's default, which
            is to refuse.

    Raises:
        UnsafeCheckpoint: It holds such things.
    """
    try:
        mapped = zipfile.is_zipfile(path)
        checkpoint: Checkpoint = torch.load(path, map_location, mmap=mapped, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpoint(
            f"{path} holds something that is not loaded without executing code from the file: "
            f"{_what(error)}. If you trust its origin: DCPCheckpointIO(weights_only=False)."
        ) from error
    return checkpoint


def _what(error: Exception) -> str:
    """The line of torch's long message that names it."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip().partition(" Please ")[0] for line in lines if "rror:" in line), lines[0]).rstrip(".")
