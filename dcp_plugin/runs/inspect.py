"""Look into a checkpoint and check its bytes: without a model, without torch.distributed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import prod

from dcp_plugin.config import PathLike
from dcp_plugin.format.index import Location, StoredTensor, StoredValue
from dcp_plugin.format.summary import Base
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.types import CheckpointInfo, TensorInfo, VerifyReport


def inspect(path: PathLike) -> CheckpointInfo:
    """What is in a checkpoint; without what it leaves out because its base has it. No tensor is read.

    Args:
        path: A checkpoint of this package or of stock DCP, or what another tool saved.

    Returns:
        Keys, shapes, dtypes and sizes in bytes; ``str()`` of it is one line.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: It cannot be opened.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.zeros(2, 3), "step": 1}, "run/step-1")
        >>> info = dcp_plugin.inspect("run/step-1")
        >>> info.tensors[0].key, info.tensors[0].shape, info.values
        ('w', (2, 3), ['step'])
    """
    reader = ShardedReader(path, complete=False)
    index, summary = reader.index, reader.summary
    tensors, values = [], []
    for key, entry in index.items():
        if isinstance(entry, StoredTensor):
            nbytes = prod(entry.shape) * entry.dtype.itemsize
            name = str(entry.dtype).removeprefix("torch.")
            tensors.append(TensorInfo(key, entry.shape, name, len(entry.chunks), nbytes))
        else:
            values.append(key)
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
    )


def verify(path: PathLike, io_threads: int = 2, base: PathLike | None = None) -> VerifyReport:
    """Read every byte of a checkpoint and compare it with its checksum; what a base completes it with, too.

    Args:
        path: The checkpoint.
        io_threads: Threads that read.
        base: Where its base is now, if that was moved.

    Returns:
        What was read, in items and bytes, and what is damaged, which is not raised. Items without checksums (another
        tool's) are only read, and listed.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: It cannot be opened.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.zeros(2, 3)}, "run/step-1")
        >>> dcp_plugin.verify("run/step-1").ok
        True
    """
    reader = ShardedReader(path, io_threads=io_threads, base=base)
    items: dict[tuple[str, int], tuple[str, Location]] = {}
    unverified = []
    for key, entry in reader.index.items():
        places = [entry.location] if isinstance(entry, StoredValue) else [chunk.location for chunk in entry.chunks]
        for place in places:
            items.setdefault((place.file, place.offset), (key, place))
        if any(place.checksums is None for place in places):
            unverified.append(key)
    with ThreadPoolExecutor(io_threads, thread_name_prefix="dcp-verify") as pool:
        errors = [said for said in pool.map(lambda item: reader.check(*item), items.values()) if said]
    nbytes = sum(place.length for _, place in items.values())
    return VerifyReport(reader.path, len(items), nbytes, errors, unverified)
