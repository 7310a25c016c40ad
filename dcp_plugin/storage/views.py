"""A second table of contents in a sub-folder, under the keys that a framework's own sharded loader looks for.

Accelerate, for one, reads the model from ``pytorch_model_fsdp_0/.metadata`` and the optimizer from
``optimizer_0/.metadata``. Both can be there without a second copy of a byte: DCP's readers follow the relative path
of an item, so the view names the checkpoint's own data files as ``../__0_0.distcp``. We never read views ourselves.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from dcp_plugin._torch import StorageInfo
from dcp_plugin.storage import commit, files

Views = Mapping[str, Mapping[str, str]]
"""Sub-folder to what is in it: the name in the checkpoint to the name in the view."""


def write_views(directory: Path, views: Views, metadata: Metadata) -> None:
    """Write the views of a checkpoint whose ``.metadata`` is ``metadata``, and sync them."""
    for folder, names in views.items():
        (directory / folder).mkdir()
        files.write_durably(directory / folder / commit.METADATA, pickle.dumps(_renamed(metadata, names)))
        files.sync_directory(directory / folder)


def _renamed(metadata: Metadata, names: Mapping[str, str]) -> Metadata:
    keys = {}
    for key in metadata.state_dict_metadata:
        name, dot, rest = key.partition(".")
        if name in names:
            keys[key] = f"{names[name]}{dot}{rest}"
    return replace(
        metadata,
        state_dict_metadata={new: metadata.state_dict_metadata[key] for key, new in keys.items()},
        planner_data={
            new: (names[key.partition(".")[0]], *metadata.planner_data[key][1:]) for key, new in keys.items()
        },
        storage_data={
            replace(index, fqn=keys[index.fqn]): _one_up(where)
            for index, where in metadata.storage_data.items()
            if index.fqn in keys
        },
    )


def _one_up(where: StorageInfo) -> StorageInfo:
    return StorageInfo(f"../{where.relative_path}", where.offset, where.length)
