"""Private names of torch and of Python that this package uses, each with the reason why no public name suffices.

The rule: other modules name no private part of torch, except :mod:`~dcp_plugin.core.tensors._torch_sharded` and
:mod:`~dcp_plugin.core.tensors._torch_modules`. ``tests/core/tensors/test_torch_canary.py`` fails when a name moves or
changes its meaning.
"""

from __future__ import annotations

import io
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any

import torch
from torch import nn
from torch._utils import IMPORT_MAPPING, NAME_MAPPING  # ``pickle`` has them, but does not export them
from torch.distributed._shard.sharded_tensor.api import (
    ShardedTensor as ShardedTensor,
)  # FSDP1 state dicts consist of these
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension  # no public reader
from torch.distributed.checkpoint.filesystem import _StorageInfo  # what stock readers expect in ``.metadata``
from torch.distributed.distributed_c10d import (
    _get_default_store,  # no public function returns a group's store
    _get_object_coll_device,  # no public function returns a group's device
)
from torch.distributed.tensor import DTensor as DTensor

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.tensors.kinds import CHECKPOINTABLE, EXACTLY_TENSORS, of_full
from dcp_plugin.core.types import Box, ShardedValue

StorageInfo = _StorageInfo


def is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, ShardedTensor))


def sharded_value(value: Any, any_rank: bool = False) -> ShardedValue:
    """Describe a tensor by its chunks on this rank, as views. No other function decides how a tensor is stored.

    Args:
        any_rank: True if each rank holds the same bytes of a plain tensor. For other tensors, the mesh determines it.

    Raises:
        CheckpointMismatch: The tensor has no memory that could be stored or filled. The message lacks the key.
    """
    if type(value) in EXACTLY_TENSORS and not hasattr(value, "global_shape"):
        return of_full(value, any_rank)
    from dcp_plugin.core.tensors import _torch_sharded  # only tensors of other classes need it

    return _torch_sharded.described(value, any_rank)


def laid_out_like(value: Any, parameter: Any) -> Any:
    """Return a tensor of optimizer state with the ``CheckpointableTensor`` fields of its parameter.

    ``detach()`` and ``zeros_like()`` lose these fields. A value that is no such tensor is returned unchanged.
    """
    if not hasattr(parameter, "global_shape") or not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "global_shape") or value.shape != parameter.shape:
        return value
    made: Any = value.detach()
    for name in CHECKPOINTABLE:
        setattr(made, name, getattr(parameter, name))
    return made


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the global shape of a tensor; None if the tensor can neither be stored nor be filled."""
    try:
        return sharded_value(value).shape
    except CheckpointMismatch:
        return None


def is_meta(value: Any) -> bool:
    """Return whether a value is a tensor on the meta device.

    A ShardedTensor never counts: its ``is_meta`` raises unless it has exactly one shard on this rank.
    """
    return not isinstance(value, ShardedTensor) and bool(getattr(value, "is_meta", False))


def with_memory(value: Any) -> Any:
    """Return a tensor to load into: the value itself, or for a tensor on the meta device one with memory.

    Stock DCP does the same.
    """
    if not is_meta(value) or nn.parameter.is_lazy(value):
        return value
    device = value.device_mesh.device_type if isinstance(value, DTensor) else _device_of_process()
    with torch.no_grad():
        return laid_out_like(torch.empty_like(value, device=device), value)


def _device_of_process() -> torch.device | str:
    """Return the device on which stock DCP allocates tensors that were on the meta device.

    The process group communicates on this device; it is the CPU if possible. The public ``get_backend_config`` returns
    text to be parsed.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _get_object_coll_device()
    device = torch.get_default_device()
    return "cpu" if device.type == "meta" else device  # the default is meta inside ``with torch.device("meta")``


def shard_of(value: Any) -> Box | None:
    """Return this rank's part of a tensor that is sharded over several ranks; None for other tensors.

    Offsets and sizes are empty if the rank has no part.
    """
    if not isinstance(value, DTensor):
        return None
    from dcp_plugin.core.tensors import _torch_sharded  # only DTensors need it

    return _torch_sharded.shard_of(value)


def empty_like(like: Any, dtype: torch.dtype) -> Any:
    """Allocate a tensor that is distributed like another, without communication.

    The public ``init_from_local_shards`` gathers metadata from all ranks for every ShardedTensor.
    """
    if not isinstance(like, ShardedTensor):
        return laid_out_like(torch.empty_like(like.detach(), dtype=dtype, requires_grad=False), like)
    shards = [Shard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata) for shard in like.local_shards()]
    metadata = like.metadata()  # replaced below, not changed: the object belongs to ``like``
    if shards:
        metadata = replace(metadata, tensor_properties=replace(metadata.tensor_properties, dtype=dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=like._process_group
    )


class _PickleOnly:
    """Replacement for torch's zip writer that keeps the pickle and the storages, without reading the payload."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.storages: dict[str, torch.UntypedStorage] = {}

    def write_record(self, name: str, data: Any, size: int) -> None:
        if name.startswith("data/"):
            self.storages[name] = data
        else:
            self.records[name] = data.encode() if isinstance(data, str) else bytes(data)


def pickled_parts(tree: Any) -> tuple[dict[str, bytes], dict[str, torch.UntypedStorage]]:
    """Return the records that ``torch.save`` writes for ``tree`` before the payloads, and the storage of each payload.

    The public ``torch.save`` copies and checksums the payloads; ``_save`` takes the writer as an argument. ``_save``
    records the alignment in ``torch.utils.serialization.config``. The archives of this package always have torch's
    default, 64.
    """
    writer = _PickleOnly()
    torch.serialization._save(tree, writer, pickle, 2, False)  # type: ignore[no-untyped-call]
    return writer.records | {".storage_alignment": b"64"}, writer.storages


def transforms_of(descriptors: Sequence[str]) -> list[StreamTransformExtension]:
    """Return the stream transforms, such as zstd, that were applied to a stock item.

    Raises:
        ValueError: torch does not know a transform, or a package that the transform needs is missing.
    """
    extensions = ExtensionRegistry().from_descriptor_list(descriptors)
    return [transform for transform in extensions if isinstance(transform, StreamTransformExtension)]


def undo_transforms(data: bytes | bytearray, descriptors: Sequence[str], limit: int) -> bytes:
    """Return at most ``limit`` bytes of an item as it was before its transforms."""
    stream: IO[bytes] = io.BytesIO(data)
    for transform in transforms_of(descriptors):
        stream = transform.transform_from(stream)
    return stream.read(limit)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return the number of in-place changes of each tensor and its views; None for inference tensors, which count none.

    Autograd uses the counter to detect tensors that changed before backward. The counter is documented in its notes,
    but has no public name.
    """
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


@contextmanager
def rebuilding_on(device: str) -> Iterator[None]:
    """Let the functions of ``TENSOR_GLOBALS`` make tensors on this device.

    Some of them take the device from the pickle, unless ``torch.load`` has noted its ``map_location`` for the thread.
    """
    state = torch.serialization._serialization_tls
    before, state.map_location = state.map_location, device
    try:
        yield
    finally:
        state.map_location = before


def storage_of(content: torch.Tensor, offset: int) -> torch.UntypedStorage:
    """Return the storage of a record of a file, with the note that :func:`record_offset` returns."""
    storage = content.untyped_storage()
    storage._checkpoint_offset = offset
    return storage


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a storage as the functions of ``TENSOR_GLOBALS`` take it. Only the private argument avoids a warning."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _sparse_tensor(layout: torch.layout, data: tuple[Any, ...]) -> torch.Tensor:
    """Rebuild a sparse tensor, with its indices checked.

    Torch's own function accepts indices outside the tensor: the first use of the tensor ends the process. It also keeps
    the tensors of a load that fails.
    """
    checks = not data[0].is_meta
    if layout is not torch.sparse_coo:
        compressed, plain, values, size = data
        return torch.sparse_compressed_tensor(
            compressed,
            plain,
            values,
            size,
            dtype=values.dtype,
            device=values.device,
            layout=layout,
            check_invariants=checks,
        )
    indices, values, size, *noted = data
    was_coalesced = noted[0] if noted else None
    return torch.sparse_coo_tensor(
        indices,
        values,
        size,
        dtype=values.dtype,
        device=values.device,
        check_invariants=checks,
        is_coalesced=was_coalesced,
    )


_REBUILT = (
    *("parameter", "parameter_with_state", "tensor", "tensor_v2", "tensor_v3", "qtensor"),
    *("nested_tensor", "meta_tensor_no_storage", "wrapper_subclass", "device_tensor_from_cpu_tensor"),
)
TENSOR_GLOBALS: dict[str, Any] = {
    **{f"torch._utils._rebuild_{name}": getattr(torch._utils, f"_rebuild_{name}") for name in _REBUILT},
    "torch._utils._rebuild_sparse_tensor": _sparse_tensor,
    "torch._tensor._rebuild_from_type_v2": torch._tensor._rebuild_from_type_v2,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch.storage.UntypedStorage": torch.UntypedStorage,
    **{
        f"torch.{name}": kind
        for name, kind in vars(torch).items()
        if re.fullmatch(r"(?!Typed|Untyped)\w+Storage", name)
    },
    **{str(value): value for value in vars(torch).values() if isinstance(value, (torch.dtype, torch.qscheme))},
}
"""Globals in the pickle of a tensor. Torch's own list, that of its restricted unpickler, also has globals that no
tensor needs."""


def name_of_today(module: str, name: str) -> tuple[str, str]:
    """Return the Python 3 module and name of a global that ``torch.save`` writes under its Python 2 name."""
    module, name = NAME_MAPPING.get((module, name), (module, name))
    return IMPORT_MAPPING.get(module, module), name


def record_offset(tensor: torch.Tensor) -> int | None:
    """Return the position in the file of the record of a loaded tensor's storage: torch's note, which we set too."""
    return tensor.untyped_storage()._checkpoint_offset


def default_store() -> Any:
    """Return the ``Store`` through which the ranks of the default process group have connected."""
    return _get_default_store()


def before_threads_end(work: Callable[[], None]) -> None:
    """Call ``work`` when the program ends, while threads can still be started.

    ``atexit`` runs too late for a background save: thread pools no longer start threads, and the save fails.
    """
    threading._register_atexit(work)  # type: ignore[attr-defined]
