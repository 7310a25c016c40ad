"""``dcp_plugin.inspect``: keys, shapes and sizes of a checkpoint, without reading a tensor."""

from __future__ import annotations

from math import prod
from operator import mul

import numpy as np

from dcp_plugin.format.columns import NO_TENSOR, KeyColumns
from dcp_plugin.format.summary import Base
from dcp_plugin.paths import PathLike, StorageOptions
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tensors.host_memory import collector_paused
from dcp_plugin.types import CheckpointInfo, TensorInfo


def inspect(path: PathLike, storage_options: StorageOptions | None = None) -> CheckpointInfo:
    """Return the contents of a checkpoint, without the tensors that only its base has. Read no tensor.

    Args:
        path: A checkpoint of this package, of stock DCP or of another tool: a path or a URL.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.

    Returns:
        Keys, shapes, dtypes and sizes in bytes; ``str()`` of it is one line.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: The checkpoint cannot be opened,
            or the path is that of a run.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.zeros(2, 3), "step": 1}, "run/step-1")
        >>> info = dcp_plugin.inspect("run/step-1")
        >>> info.tensors[0].key, info.tensors[0].shape, info.values
        ('w', (2, 3), ['step'])
    """
    with ShardedReader(path, complete=False, storage_options=storage_options) as reader:
        return info_of(reader)


def info_of(reader: ShardedReader) -> CheckpointInfo:
    """Return the result of :func:`inspect` for an open checkpoint."""
    index, summary = reader.index, reader.summary
    with collector_paused():
        tensors, values = _listed(index.table)
    return CheckpointInfo(
        path=reader.path,
        format=reader.opened.format,
        step=summary.step if summary else None,
        time=summary.time if summary else None,
        world_size=summary.world_size if summary else None,
        tensors=tensors,
        values=values,
        nbytes=summary.payload_bytes if summary else sum(tensor.nbytes for tensor in tensors),
        versions=dict(summary.versions) if summary else {},
        bytes_reused=int(summary.reused.get("bytes", 0)) if summary else 0,
        base=Base.of_summary(summary.base, reader.path).path if summary and index.left_out else None,
        left_out=list(index.left_out),
        metrics=dict(summary.metrics) if summary else {},
    )


def _listed(table: KeyColumns) -> tuple[list[TensorInfo], list[str]]:
    """Return the tensors of a checkpoint, and the keys of its values.

    The loop over columns is three times as fast as one over entries of the index.
    """
    is_value = table.columns["dtype"] == NO_TENSOR
    slots = np.flatnonzero(~is_value)
    keys = [table.keys[slot] for slot in slots.tolist()] if is_value.any() else table.keys
    numbers, shapes = table.columns["dtype"][slots].tolist(), table.shapes_of(slots)
    itemsizes = [dtype.itemsize for dtype in table.torch_dtypes]
    nbytes = map(mul, map(prod, shapes), map(itemsizes.__getitem__, numbers))
    chunks = np.diff(table.chunk_starts)[slots].tolist()
    tensors = list(map(TensorInfo, keys, shapes, map(table.dtypes.__getitem__, numbers), chunks, nbytes))
    return tensors, [table.keys[slot] for slot in np.flatnonzero(is_value).tolist()]
