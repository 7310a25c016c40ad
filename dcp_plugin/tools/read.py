"""``dcp_plugin.read``: tensors and values of a checkpoint, without a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dcp_plugin.errors import UnsafeCheckpoint
from dcp_plugin.format.index import StoredTensor
from dcp_plugin.format.values import decode_tensor
from dcp_plugin.paths import PathLike, StorageOptions
from dcp_plugin.planning.load import ShardedLoadPlanner
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tools import keys
from dcp_plugin.tools.stream import Progress
from dcp_plugin.types import LocalChunk, ShardedValue

_TOGETHER = 256 << 20
"""Bytes that are read between two reports of progress."""


def read(
    path: PathLike,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    device: str | torch.device = "cpu",
    *,
    base: PathLike | None = None,
    allow_pickle: tuple[str, ...] = (),
    io_threads: int = 2,
    storage_options: StorageOptions | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return tensors and values of a checkpoint by key, each tensor in full, without a model or a process group.

    Args:
        path: A checkpoint of this package, of stock DCP, of a framework, or a safetensors or ``torch.save`` file.
        include: Globs of keys; all if empty. Other keys are not read.
        exclude: Globs of keys to leave out.
        device: The device of the tensors.
        base: The new path of the checkpoint's base, if it was moved.
        allow_pickle: Globs of keys whose values may be loaded by executing code from the checkpoint.
        io_threads: Threads that read.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with bytes read, and bytes in all.

    Returns:
        Values by key, in the order in which they were saved. No two tensors share memory.

    Raises:
        CheckpointMismatch: A glob matches nothing.
        UnsafeCheckpoint: A value cannot be loaded without executing code.
        CheckpointError: The checkpoint cannot be opened, or its bytes do not match their checksums.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"model": torch.nn.Linear(2, 3), "epoch": 4}, "run/step-1")
        >>> state = dcp_plugin.read("run/step-1", include=["model.*", "epoch"])
        >>> state["model.weight"].shape, state["epoch"]
        (torch.Size([3, 2]), 4)
    """
    with ShardedReader(path, io_threads=io_threads, base=base, storage_options=storage_options) as reader:
        return read_keys(
            reader,
            keys.select(reader.index, include, exclude, reader.path),
            torch.device(device),
            allow_pickle,
            progress,
        )


def read_keys(
    reader: ShardedReader,
    wanted: list[str],
    device: torch.device,
    allow_pickle: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return tensors and values of an open checkpoint by key, as :func:`read` does."""
    index = reader.index
    index.require_bounded(wanted)
    values: dict[str, Any] = dict.fromkeys(wanted)
    sizes = {key: _nbytes(index[key]) for key in wanted}
    total, done = sum(sizes.values()), 0
    group: list[str] = []
    for number, key in enumerate(wanted, 1):
        group.append(key)
        if number == len(wanted) or sum(map(sizes.__getitem__, group)) >= _TOGETHER:
            values |= _read_group(reader, group, device, allow_pickle)
            done += sum(map(sizes.__getitem__, group))
            group = []
            if progress is not None:
                progress(done, total)
    return values


def _nbytes(entry: Any) -> int:
    return torch.Size(entry.shape).numel() * entry.dtype.itemsize if isinstance(entry, StoredTensor) else 0


def _read_group(
    reader: ShardedReader, group: list[str], device: torch.device, allow_pickle: tuple[str, ...]
) -> dict[str, Any]:
    targets: dict[str, Any] = {}
    loaded: dict[str, Any] = {}
    for key in group:
        entry = reader.index[key]
        if not isinstance(entry, StoredTensor):
            targets[key] = None
        elif entry.stored_whole and reader.opened.format == "dcp_plugin":
            loaded[key] = _object(reader, key, device)
        else:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            chunk = LocalChunk((0,) * len(entry.shape), entry.shape, tensor)
            targets[key] = ShardedValue(entry.shape, entry.dtype, (chunk,))
            loaded[key] = tensor
    planner = ShardedLoadPlanner(allow_pickle=allow_pickle)
    planner.use_index(targets, reader.index, {key: key for key in targets})
    reader.read_data(planner.create_local_plan(), planner).wait()
    return {key: loaded[key] if key in loaded else targets[key] for key in group}


def _object(reader: ShardedReader, key: str, device: torch.device) -> Any:
    """Return a tensor of a custom class, which ``torch.save`` has written."""
    data = reader.item(key)
    try:
        return decode_tensor(data).to(device)
    except Exception as error:
        raise UnsafeCheckpoint(
            f"{reader.path}: {key} is of a class that torch does not load without executing code: "
            f"{str(error).splitlines()[0]} Load it into a model (dcp_plugin.load), or leave it out: exclude={key!r}."
        ) from error
