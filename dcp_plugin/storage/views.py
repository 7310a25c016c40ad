"""A second table of contents in a sub-folder, under the keys that a framework's own sharded loader looks for.

Accelerate, for one, reads the model from ``pytorch_model_fsdp_0/.metadata`` and the optimizer from
``optimizer_0/.metadata``. Both can be there without a second copy of a byte: DCP's readers follow the relative path
of an item, so the view names the checkpoint's own data files as ``../__0_0.distcp``. We never read views ourselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_plugin.storage import commit, files
from dcp_plugin.storage.index import CheckpointIndex
from dcp_plugin.storage.metadata import encode

Views = Mapping[str, Mapping[str, str]]
"""Sub-folder to what is in it: the name in the checkpoint to the name in the view."""


def write_views(directory: Path, views: Views, index: CheckpointIndex, storage_meta: StorageMeta | None) -> None:
    """Write the views of a checkpoint, and sync them."""
    for folder, names in views.items():
        (directory / folder).mkdir()
        files.write_durably(directory / folder / commit.METADATA, encode(_view(index, names), storage_meta))
        files.sync_directory(directory / folder)


def _view(index: CheckpointIndex, names: Mapping[str, str]) -> CheckpointIndex:
    keys, paths = {}, {}
    for key in index:
        name, dot, rest = key.partition(".")
        if name in names:
            new = f"{names[name]}{dot}{rest}"
            keys[new] = key
            paths[new] = (names[name], *index.path_of(key)[1:])
    return index.selected(keys, paths, below="..")
