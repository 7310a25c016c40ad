"""The kinds of tensors: with memory that can be read and written, made of other tensors, or impossible to store.

The rule: callers call :func:`require_memory` before they access the first byte of a tensor. Almost every tensor has
memory, which the other modules access through its address. A tensor without memory has shape, dtype and strides like
any other, but reading at its address kills the process. These have none:

- A wrapper subclass, such as torchao's quantized weights and optimizer states. It consists of other tensors, which are
  its attributes.
- A tensor on the meta device, a tensor of ``torch.compile``, and a tensor whose storage FSDP has freed. They have no
  values at all.

Two kinds are stored *whole*, as one item made by ``torch.save`` (:mod:`dcp_plugin.core.format.values`): a wrapper
subclass that can be taken apart (``__tensor_flatten__``), and torch's quantized tensors. The memory of the latter does
not include the scales.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dcp_plugin.core.errors import CheckpointMismatch, first_line
from dcp_plugin.core.types import LocalChunk, ShardedValue

EXACTLY_TENSORS = (torch.Tensor, nn.Parameter)
"""The classes of plain tensors, without subclasses."""

CHECKPOINTABLE = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""The fields of the protocol ``CheckpointableTensor``. They may be set on a tensor of any class."""

OF_ITS_OWN_CLASS = "stored as a tensor subclass with parts of its own"
"""Text in errors about a stored tensor that only a tensor of the same class can take."""


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return an identity that is equal for two tensors with the same memory and the same view of it: tied weights.

    The identity of a tensor made of other tensors consists of the memory of its parts. A tensor of another kind without
    memory equals no other tensor.
    """
    address: Any
    view = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    if not hasattr(tensor, "__tensor_flatten__"):
        address = tensor.data_ptr()
    else:
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        address = (type(tensor), *(memory_of(part) if hasattr(part, "data_ptr") else id(part) for part in parts))
    return (tensor.device, address or (id(tensor) if tensor.numel() else 0), *view)


def is_stored_whole(tensor: torch.Tensor) -> bool:
    """Return whether ``torch.save`` makes the tensor's item.

    It does for a wrapper subclass that can be taken apart, and for a quantized tensor.
    """
    if type(tensor) not in EXACTLY_TENSORS and _is_wrapper(tensor):
        return True
    return tensor.layout is torch.strided and tensor.is_quantized


def _is_wrapper(tensor: torch.Tensor) -> bool:
    if type(tensor) in EXACTLY_TENSORS or not hasattr(tensor, "__tensor_flatten__"):
        return False
    return hasattr(tensor, "__tensor_unflatten__") and not tensor.is_nested and not _storage_address(tensor)


def _storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the storage; 0 without one. The tensor's own ``data_ptr()`` would add an offset to 0."""
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:  # each kind of tensor without memory raises another exception
        return 0


def require_memory(tensor: torch.Tensor) -> None:
    """Check that all elements of a tensor are in its memory.

    Raises:
        CheckpointMismatch: They are not. The message has the tensor's kind and the remedy; the caller adds the key.
    """
    if is_dense_memory(tensor):
        return
    if reason := _reason_without_memory(tensor):
        raise CheckpointMismatch(reason)
    if not tensor.is_quantized:
        _require_storable(tensor.dtype)


def is_dense_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of the common kind: plain, contiguous, not empty, of a storable dtype, and in memory.

    This check takes less than a microsecond, and saves the slower checks for thousands of tensors. For a tensor of the
    common kind, :func:`is_stored_whole` is false and :func:`require_memory` passes. For others, these two decide.
    """
    try:
        if type(tensor) not in EXACTLY_TENSORS or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        storage, length = tensor.untyped_storage(), tensor.nbytes
        _require_storable(tensor.dtype)
        return (
            length > 0
            and not tensor.is_quantized
            and tensor.is_contiguous()
            and storage.nbytes() >= tensor.storage_offset() * tensor.itemsize + length
            and storage.data_ptr() != 0
        )
    except Exception:  # each kind of tensor without memory raises another exception
        return False


def _reason_without_memory(tensor: torch.Tensor) -> str:
    """Return the reason why a tensor has elements that are not in memory, with the way out; empty if all are."""
    if nn.parameter.is_lazy(tensor):
        return "a parameter of a lazy module that has no shape yet: run a batch through it first"
    if tensor.is_nested:
        return "a nested tensor, which is not supported: keep its values() and offsets() instead"
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        return f"a {kind} tensor, which is not supported: densify it (to_dense())"
    if tensor.is_meta:
        return "on the meta device, where there are no values: give it memory first (to_empty())"
    try:
        storage = tensor.untyped_storage()
        held, needed = storage.nbytes(), _extent(tensor)
        if storage.device.type == "meta":
            return f"{_a(tensor)}, which has no values"
        if held < needed:
            return f"{_a(tensor)} whose storage has {held} bytes and should have {needed}: its memory has been freed"
        has_address = tensor.is_cpu or tensor.is_cuda  # on other devices data_ptr() may be 0 for tensors with memory
        if not has_address or not tensor.numel() or storage.data_ptr():
            return ""
    except Exception:  # each kind of tensor without memory raises another exception
        pass
    if type(tensor) in EXACTLY_TENSORS:
        way_out = " (a leftover of torch.func, torch.compile or the like): store a clone() that was made outside of it"
    else:
        way_out = (
            " that cannot be taken apart (it has no __tensor_flatten__ and __tensor_unflatten__): store the tensors "
            "that it consists of"
        )
    return f"{_a(tensor)} without memory of its own{way_out}"


def require_parts(tensor: torch.Tensor) -> None:
    """Check that all parts of a tensor that is stored whole are in memory.

    Raises:
        CheckpointMismatch: A part is not. The message names the part and the remedy; the caller adds the key.
    """
    if not _is_wrapper(tensor):
        require_memory(tensor)
        return
    for name, part in _parts(tensor).items():
        if hasattr(part, "__create_chunk_list__"):
            raise CheckpointMismatch(
                f"{_a(tensor)} of sharded tensors, which is not supported: make a DTensor of it instead"
            )
        try:
            require_parts(part)
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{_a(tensor)} whose part {name} is {error}") from error


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes of the storage up to the end of the tensor's last element."""
    if tensor.is_contiguous():
        return int(tensor.storage_offset()) * tensor.itemsize + tensor.nbytes if tensor.nbytes else 0
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + int(last) + 1) * tensor.itemsize


def _a(tensor: torch.Tensor) -> str:
    return f"a {type(tensor).__name__}"


@functools.lru_cache(maxsize=256)
def _require_storable(dtype: torch.dtype) -> None:
    """Check that ``torch.save`` supports the dtype. It does not support dtypes of less than a byte.

    Raises:
        CheckpointMismatch: It does not. The message lacks the key.
    """
    try:
        torch.save(torch.empty(1, dtype=dtype, device="cpu"), io.BytesIO())
    except Exception as error:
        raise CheckpointMismatch(
            f"of dtype {dtype}, which torch.save cannot write: store its bytes, view(torch.uint8)"
        ) from error


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host copy of a tensor that is stored whole.

    The copy shares no memory with the tensor. Its storages have no unused bytes, which ``torch.save`` would write.

    Raises:
        CheckpointMismatch: Parts of the tensor are not in memory, or its class cannot be rebuilt from copied parts. The
            message lacks the key.
    """
    require_parts(tensor)
    try:
        return _copied(tensor)
    except Exception as error:  # code of the subclass, which may raise anything
        raise CheckpointMismatch(f"{_a(tensor)} that cannot be copied ({first_line(error)})") from error


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if not _is_wrapper(tensor):
            return tensor.detach().cpu().clone()
        moved = tensor if tensor.device.type == "cpu" else tensor.detach().cpu()
        names, context = moved.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: getattr(moved, name) for name in names}
        inner = {name: _copied(part) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
        return type(moved).__tensor_unflatten__(inner, context, moved.shape, moved.stride())  # type: ignore[no-any-return, attr-defined]


def classes_of(tensor: torch.Tensor) -> list[type]:
    """Return the classes of a tensor that is stored whole and of its parts; an empty list for a plain tensor."""
    if type(tensor) in EXACTLY_TENSORS:
        return []
    parts = _parts(tensor).values() if _is_wrapper(tensor) else ()
    return [type(tensor), *(cls for part in parts for cls in classes_of(part))]


def _parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: part for name in names if isinstance(part := getattr(tensor, name), torch.Tensor)}


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of memory of a tensor, or of all tensors that it consists of."""
    return sum(map(size_of, _parts(tensor).values())) if _is_wrapper(tensor) else tensor.nbytes


def fill(target: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy a loaded tensor into the target: part by part if both have the same parts, otherwise with ``copy_``.

    A plain target gets the values that ``copy_`` makes of a subclass, as in stock DCP.

    Raises:
        CheckpointMismatch: The tensors are of two wrapper classes, or ``copy_`` fails. The message lacks the key.
    """
    if _is_wrapper(loaded) and _is_wrapper(target) and type(loaded) is not type(target):
        raise CheckpointMismatch(f"stored as {_a(loaded)} and is {_a(target)} here")
    with torch.no_grad():
        if _is_wrapper(loaded) and _is_wrapper(target) and _consist_of_the_same(target, loaded):
            for part, loaded_part in zip(_parts(target).values(), _parts(loaded).values(), strict=True):
                fill(part, loaded_part)
            return
        try:
            target.copy_(loaded)
        except Exception as error:
            raise CheckpointMismatch(
                f"{_a(target)} that cannot take the stored value, {_a(loaded)} ({first_line(error)})"
            ) from error


def _consist_of_the_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    parts, parts_of_other = _parts(tensor), _parts(other)
    if parts.keys() != parts_of_other.keys():
        return False
    pairs = [(parts[name], parts_of_other[name]) for name in parts]
    if any(a.shape != b.shape or a.dtype != b.dtype or is_stored_whole(a) != is_stored_whole(b) for a, b in pairs):
        return False
    try:
        return bool(tensor.__tensor_flatten__()[1] == other.__tensor_flatten__()[1])  # type: ignore[attr-defined]
    except Exception:  # the subclass chooses the type of the context, whose comparison may raise anything
        return False


def narrowed(tensor: torch.Tensor, narrow: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a writable part of a tensor that is stored whole.

    Raises:
        CheckpointMismatch: The tensor's class cannot be narrowed, or narrowing makes a copy. The message lacks the key.
    """
    try:
        part = narrow(tensor)
        # A part with memory of its own is a copy: values loaded into it would be lost.
        if _memory(part) <= _memory(tensor):
            return part
        error: object = "a part of it is a copy"
    except Exception as failure:
        error = first_line(failure)
    raise CheckpointMismatch(
        f"{_a(tensor)}, of which no part can be taken ({error}). Load it with the sharding that it had when it was "
        f"saved"
    )


def part_of(
    key: str, chunk: LocalChunk, offsets: tuple[int, ...], sizes: tuple[int, ...], stored_whole: bool
) -> torch.Tensor:
    """Return the part of a chunk inside a box; for a complete chunk its tensor, because not every class can narrow.

    Args:
        offsets: Offsets of the box in the tensor.
        stored_whole: :attr:`~dcp_plugin.core.types.ShardedValue.stored_whole` of the tensor.

    Raises:
        CheckpointMismatch: The tensor's class cannot be narrowed.
    """

    def cut(view: torch.Tensor) -> torch.Tensor:
        for dim, (at, size, origin) in enumerate(zip(offsets, sizes, chunk.offsets, strict=True)):
            if size < view.shape[dim]:
                view = view.narrow(dim, at - origin, size)
        return view

    if sizes == chunk.sizes:
        return chunk.tensor
    try:
        return narrowed(chunk.tensor, cut) if stored_whole else cut(chunk.tensor)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{key} is {error}") from error


def _memory(tensor: torch.Tensor) -> set[int]:
    """Return the addresses of the tensor's storages."""
    if _is_wrapper(tensor):
        return set().union(*map(_memory, _parts(tensor).values()))
    return {tensor.untyped_storage().data_ptr()}


def of_full(value: torch.Tensor, any_rank: bool) -> ShardedValue:
    """Describe a tensor that is complete on each rank."""
    if is_dense_memory(value):
        plain = type(value) is torch.Tensor and not value.requires_grad
        return ShardedValue.of_all(value if plain else value.detach(), any_rank)
    if is_stored_whole(value):
        require_parts(value)
        shape = tuple(value.shape)
        return ShardedValue(shape, value.dtype, (LocalChunk((0,) * len(shape), shape, value),), stored_whole=True)
    try:
        tensor = value.detach()
    except Exception:  # an uninitialized parameter, or a tensor of a torch.func transform that has ended
        tensor = value
    require_memory(tensor)
    return ShardedValue.of_all(tensor, any_rank)
