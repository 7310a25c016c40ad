"""Sharded checkpoints that Lightning and Accelerate saved without this package, as one index with our names."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from dcp_plugin.format import METADATA, Files, exists, stock_metadata
from dcp_plugin.format.foreign import torch_file
from dcp_plugin.format.index import CheckpointIndex

_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)")
_LIGHTNING_OPTIMIZER = re.compile(r"optimizer_(\d+)")

META = "meta.pt"
"""File that Lightning and Fabric add to a sharded checkpoint: all state but modules and optimizers."""

Kinds = dict[str, str]


def lightning_names(names: Iterable[str]) -> dict[str, str]:
    """Return our names for the first segments of the keys in Lightning's sharded directory.

    FSDP1 writes ``model``, ModelParallel ``state_dict``, both ``optimizer_0``, ``optimizer_1``, …: they become
    ``model`` and ``optim``, or ``optim_0``, ``optim_1``, … All other names stay, and so do names that are already ours.
    """
    names = list(dict.fromkeys(names))
    optimizers = [name for name in names if _LIGHTNING_OPTIMIZER.fullmatch(name)]
    renamed = {name: name.replace("optimizer", "optim") if len(optimizers) > 1 else "optim" for name in optimizers}
    return {name: renamed.get(name, "model" if name == "state_dict" else name) for name in names}


def is_of_lightning(files: Files) -> bool:
    """Return whether Lightning wrote it. Fabric's checkpoints have such a file too, but with the user's own names."""
    return torch_file.mentions(files, META, torch_file.LIGHTNING)


def lightning_index(files: Files) -> tuple[CheckpointIndex, Kinds]:
    """Return the index of a sharded directory of Lightning (``.metadata`` and ``meta.pt``), with our names."""
    index = stock_metadata.read_index(files)
    names = lightning_names(key.partition(".")[0] for key in index)
    renamed = index.renamed(names)
    renamed.validate(files.where)
    return renamed, _kinds(names.values())


def is_of_accelerate(folder: str) -> bool:
    """Return whether a folder has the name of a folder in Accelerate's checkpoints."""
    return _ACCELERATE.fullmatch(folder) is not None


def accelerate_folders(files: Files) -> list[str]:
    """Return the DCP checkpoints in a folder of ``Accelerator.save_state`` under FSDP: models, then optimizers."""
    named = [name.rstrip("/") for name in files.names() if name.endswith("/")]
    folders = [name for name in named if is_of_accelerate(name) and exists(files, f"{name}/{METADATA}")]
    models = [name for name in folders if not name.startswith("optimizer")]
    return sorted(folders, key=lambda name: (name.startswith("optimizer"), len(name), name)) if models else []


def accelerate_index(files: Files, folders: list[str]) -> tuple[CheckpointIndex, Kinds]:
    """Return one index of these checkpoints: ``model`` and ``optim``, or ``model_0``, … if there are several."""
    names = [_accelerate_name(folder, folders) for folder in folders]
    parts = []
    for folder, name in zip(folders, names, strict=True):
        index = stock_metadata.read_index(files, f"{folder}/")
        parts.append(index.renamed({key.partition(".")[0]: name for key in index}, below=folder))
    joined = functools.reduce(CheckpointIndex.with_added, parts)
    joined.validate(files.where)
    return joined, _kinds(names)


def _accelerate_name(folder: str, folders: list[str]) -> str:
    match = _ACCELERATE.fullmatch(folder)
    assert match
    several = sum(other.startswith(match[1]) for other in folders) > 1
    name = "optim" if match[1] == "optimizer" else "model"
    return f"{name}_{match[2]}" if several else name


def _kinds(names: Iterable[str]) -> Kinds:
    kinds = {"model": "module", "optim": "optimizer"}
    return {name: kinds[name.partition("_")[0]] for name in names if name.partition("_")[0] in kinds}
