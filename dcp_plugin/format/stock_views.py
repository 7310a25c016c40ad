"""The same bytes under the keys that a framework's own sharded loader looks for, without a second copy of any.

Two forms, for two kinds of frameworks. We never read either ourselves: our own index knows nothing of them.

- Aliases are more keys in the checkpoint's ``.metadata``. Lightning, for one, looks there for ``optimizer_0.…``.
- Views are further tables of contents, in sub-folders. Accelerate, for one, reads the model from
  ``pytorch_model_fsdp_0/.metadata``. DCP's readers follow the relative path of an item, so the view names the
  checkpoint's own data files as ``../__0_0-….distcp``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_plugin.format.index import CheckpointIndex
from dcp_plugin.format.metadata import encode
from dcp_plugin.format.names import METADATA
from dcp_plugin.types import KeyPath

Aliases = Mapping[str, tuple[str, KeyPath]]
"""Key to another name of the same bytes, and where that is in the nested state. Keys that are not stored are passed
over."""

Views = Mapping[str, Mapping[str, str]]
"""Sub-folder to what is in it: the name in the checkpoint to the name in the view."""


def with_aliases(index: CheckpointIndex, aliases: Aliases) -> CheckpointIndex:
    """The index with some keys a second time, under other names."""
    again = {alias: key for key, (alias, _) in aliases.items() if key in index and alias not in index}
    if not again:
        return index
    paths = {**index.table.paths, **dict(aliases.values())}
    return index.selected({**{key: key for key in index}, **again}, paths)


def encoded_views(views: Views, index: CheckpointIndex, storage_meta: StorageMeta | None) -> dict[str, bytes]:
    """The files of the views by name, to be put beside the checkpoint's own."""
    return {f"{folder}/{METADATA}": encode(_view(index, names), storage_meta) for folder, names in views.items()}


def _view(index: CheckpointIndex, names: Mapping[str, str]) -> CheckpointIndex:
    keys: dict[str, str] = {}
    paths: dict[str, KeyPath] = {}
    for key in index:
        name, dot, rest = key.partition(".")
        if name in names:
            new = f"{names[name]}{dot}{rest}"
            keys[new] = key
            paths[new] = (names[name], *index.path_of(key)[1:])
    return index.selected(keys, paths, below="..")
