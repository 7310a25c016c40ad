"""Tensors of a checkpoint that a model of a framework reads: their keys, dtype and shapes, before any value is read.

Input: a path and the keys of a model. Output: the prefix of these keys in the checkpoint, and the differences. The
rule: a comparison needs no process group, and reads only the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.format.index import CheckpointIndex, StoredTensor
from dcp_plugin.core.loading.model_prefix import ModelPrefix as ModelPrefix
from dcp_plugin.core.loading.model_prefix import find_model_prefix
from dcp_plugin.core.paths import PathLike, StorageOptions, Where
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.storage.reader import CheckpointReader


@dataclass(frozen=True)
class StoredWeights:
    """Tensors of an open checkpoint, compared with the keys of a model."""

    path: Where
    files: SourceFiles | None
    _index: CheckpointIndex

    def __contains__(self, key: str) -> bool:
        return key in self._index

    def leaves_out(self, keys: Iterable[str]) -> bool:
        """Return whether the checkpoint leaves out one of these keys, because it was frozen."""
        return not self._index.left_out.keys().isdisjoint(keys)

    def prefix_of(self, keys: Sequence[str], model: str, base: str = "", requested: str | None = None) -> ModelPrefix:
        """Return the prefix of a model's keys; see :func:`~dcp_plugin.core.loading.model_prefix.find_model_prefix`.

        Args:
            requested: The prefix, if the user gives it.

        Raises:
            CheckpointMismatch: No key has the requested prefix; or several prefixes fit, or none.
        """
        if requested is None:
            return find_model_prefix(keys, self._index, self.path, model, base)
        prefix = f"{requested}." if requested and not requested.endswith(".") else requested
        if not any(prefix + key in self for key in keys):
            raise CheckpointMismatch(
                f"{self.path} has no key of {model} behind prefix={requested!r}; without it, it is looked for."
            )
        return ModelPrefix(prefix)

    def dtype_of(self, keys: Sequence[str]) -> torch.dtype | None:
        """Return the dtype of the first floating-point tensor whose key in the checkpoint ends in a key of the model;
        None if there is none. The first hundred keys of the model are tried."""
        tails = tuple(keys[:100])
        for key in self._index:
            if key.endswith(tails) and (entry := self._tensor(key)) is not None and entry.dtype.is_floating_point:
                return entry.dtype
        return None

    def unexpected(self, stored: Mapping[str, str], prefix: str) -> list[str]:
        """Return the tensors of the checkpoint below ``prefix`` that the model lacks. Without a prefix, only tensors
        below the modules of loaded ones count.

        Args:
            stored: Keys of the model -> their keys in the checkpoint.
        """
        taken = set(stored.values())
        fronts = {key.partition(".")[0] for key in taken}
        candidates = (
            self._index.under(prefix) if prefix else [key for key in self._index if key.partition(".")[0] in fronts]
        )
        return [key for key in candidates if key not in taken and self._tensor(key) is not None]

    def other_shapes(self, stored: Mapping[str, str], tensors: Mapping[str, Any]) -> list[str]:
        """Return a line for each tensor of the model whose shape in the checkpoint differs."""
        shapes = {key: tuple(tensors[key].shape) for key in stored if isinstance(tensors[key], torch.Tensor)}
        entries = {key: self._tensor(stored[key]) for key in shapes if stored[key] in self}
        return [
            f"{key} has shape {shapes[key]}, and {entry.shape} in the checkpoint"
            for key, entry in entries.items()
            if entry is not None and entry.shape != shapes[key]
        ]

    def _tensor(self, key: str) -> StoredTensor | None:
        entry = self._index[key]
        return entry if isinstance(entry, StoredTensor) else None


@contextmanager
def open_weights(
    path: PathLike,
    storage_options: StorageOptions | None,
    files: SourceFiles | None = None,
) -> Iterator[StoredWeights]:
    """Open a checkpoint of this package, of stock DCP or of another tool. See :class:`~dcp_plugin.ShardedReader`."""
    with CheckpointReader(path, storage_options=storage_options, files=files) as reader:
        yield StoredWeights(reader.path, reader.files, reader.index)
