"""``dcp_plugin.read``: tensors and values of a checkpoint, without a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dcp_plugin.core.errors import warn
from dcp_plugin.core.paths import PathLike, StorageOptions
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.tools.stream import Progress, read_keys, select


def read(
    path: PathLike,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    device: str | torch.device = "cpu",
    *,
    allow_pickle: tuple[str, ...] = (),
    io_threads: int = 2,
    storage_options: StorageOptions | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return tensors and values of a checkpoint by key, each tensor in full, without a model or a process group.

    If the checkpoint has lost ``dcp_plugin.json`` or ``dcp_plugin.index``, its bytes are read without a check.

    Args:
        path: A checkpoint of this package, of stock DCP, of a framework, or a safetensors or ``torch.save`` file.
        include: Globs of keys; all if empty. Other keys are not read.
        exclude: Globs of keys to leave out.
        device: The device of the tensors.
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
    options: dict[str, Any] = {"io_threads": io_threads, "storage_options": storage_options}
    with CheckpointReader(path, check_files=False, **options) as reader:  # other keys may be damaged
        reader.salvages = True
        wanted = select(reader.index, include, exclude, reader.path)
        if reader.open().absent:
            warn(f"{reader.open().absent}. They are not read.")
        return read_keys(reader, wanted, torch.device(device), allow_pickle, progress)
