"""What a tensor is made of: memory that can be read and written, other tensors, or nothing that can be stored.

Almost every tensor has memory, which the other modules read and write through its address. Some have none. A wrapper
subclass (torchao's quantized weights and optimizer states, for one) consists of other tensors, its attributes. A tensor
on the meta device, one of ``torch.compile`` or one whose storage FSDP has freed has no values at all. All of them have
shape, dtype and strides like any other, and reading at their address ends the process. So :func:`require_memory` comes
before the first byte.

A wrapper subclass that says how to take it apart (``__tensor_flatten__``) is stored *whole*, and so are torch's own
quantized tensors, because their scales are not in their memory (:mod:`dcp_plugin.format.whole_tensors`).
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dcp_plugin.errors import CheckpointMismatch

EXACTLY_TENSORS = (torch.Tensor, nn.Parameter)
"""Plain tensors: no subclass of any library."""


OF_ITS_OWN_CLASS = "stored as a tensor subclass with parts of its own"
"""What errors say of a stored tensor that only one of its class can take."""


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same memory seen in the same way: tied weights, for one.

    A tensor without memory of its own is compared by the memory of its parts, or equals no other.
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
    """Whether ``torch.save`` makes the item: a wrapper subclass that can be taken apart, or a quantized tensor."""
    if type(tensor) not in EXACTLY_TENSORS and _is_wrapper(tensor):
        return True
    return tensor.layout is torch.strided and tensor.is_quantized


def _is_wrapper(tensor: torch.Tensor) -> bool:
    if type(tensor) in EXACTLY_TENSORS or not hasattr(tensor, "__tensor_flatten__"):
        return False
    return hasattr(tensor, "__tensor_unflatten__") and not tensor.is_nested and not _storage_address(tensor)


def _storage_address(tensor: torch.Tensor) -> int:
    """The address of the storage, 0 if there is none. ``data_ptr()`` of the tensor itself adds the offset to that."""
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:  # each kind without memory has its own
        return 0


def require_memory(tensor: torch.Tensor) -> None:
    """Raise unless all elements of a tensor are in memory of its own.

    Raises:
        CheckpointMismatch: What it is instead, and the way out; the caller knows the key.
    """
    if is_dense_memory(tensor):
        return
    if not _is_there(tensor):
        raise CheckpointMismatch(_what_instead(tensor))
    if not tensor.is_quantized:
        _require_storable(tensor.dtype)


def is_dense_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what almost every one is: of no subclass, contiguous, not empty, of a dtype that can be
    stored, and in memory.

    One look, of less than a microsecond, that answers :func:`is_stored_whole` (no) and :func:`require_memory` (fine)
    for thousands of tensors; where it says no, these two decide.
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
    except Exception:  # each kind without memory has its own
        return False


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether all elements are in memory; if not, the reason is found by :func:`_what_instead`."""
    try:
        storage = tensor.untyped_storage()
        if type(tensor) not in EXACTLY_TENSORS and storage.device.type == "meta":
            return False  # a FakeTensor, which warns when asked for its address
        if tensor.layout is not torch.strided or tensor.is_nested or storage.nbytes() < _extent(tensor):
            return False
        if storage.data_ptr():
            return True
        local = tensor.is_cpu or tensor.is_cuda  # other devices may have no addresses to tell
        return not tensor.is_meta and (not local or not tensor.numel())
    except Exception:  # each kind without memory has its own
        return False


def _what_instead(tensor: torch.Tensor) -> str:
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
    except Exception:  # each kind without memory has its own
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
    """Raise unless all that a tensor consists of, which is stored whole, is in memory.

    Raises:
        CheckpointMismatch: Which part is not, and the way out; the caller knows the key.
    """
    if not _is_wrapper(tensor):
        require_memory(tensor)
        return
    for name, part in _parts(tensor).items():
        if hasattr(part, "__create_chunk_list__"):
            raise CheckpointMismatch(
                f"{_a(tensor)} of sharded tensors, which is not supported: make it the other way round, a DTensor of it"
            )
        try:
            require_parts(part)
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{_a(tensor)} whose part {name} is {error}") from error


def _extent(tensor: torch.Tensor) -> int:
    """Bytes of the storage up to the tensor's last element."""
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
    """Raise if ``torch.save`` does not know the dtype: those of less than a byte.

    Raises:
        CheckpointMismatch: Without the key.
    """
    try:
        torch.save(torch.empty(1, dtype=dtype), io.BytesIO())
    except Exception as error:
        raise CheckpointMismatch(
            f"of dtype {dtype}, which torch.save cannot write: store its bytes, view(torch.uint8)"
        ) from error


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host of a tensor that is stored whole; it shares no memory with it, and has no more than it needs.

    Raises:
        CheckpointMismatch: Parts of it are not in memory, or its class cannot be put together. Without the key.
    """
    require_parts(tensor)
    try:
        return _copied(tensor)
    except Exception as error:  # whatever the class does
        raise CheckpointMismatch(f"{_a(tensor)} that cannot be copied ({_line(error)})") from error


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if not _is_wrapper(tensor):
            return tensor.detach().cpu().clone()
        moved = tensor if tensor.device.type == "cpu" else tensor.detach().cpu()
        names, context = moved.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: _copied_part(moved, name) for name in names}
        return type(moved).__tensor_unflatten__(inner, context, moved.shape, moved.stride())  # type: ignore[no-any-return, attr-defined]


def _copied_part(tensor: torch.Tensor, name: str) -> Any:
    part = getattr(tensor, name)
    if not isinstance(part, torch.Tensor):
        return part
    return _copied(part) if is_stored_whole(part) else part.detach().clone()


def classes_of(tensor: torch.Tensor) -> list[type]:
    """Return the classes of a tensor that is stored whole, and of its parts; none for a plain tensor."""
    if type(tensor) in EXACTLY_TENSORS:
        return []
    parts = _parts(tensor).values() if _is_wrapper(tensor) else ()
    return [type(tensor), *(cls for part in parts for cls in classes_of(part))]


def _parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: part for name in names if isinstance(part := getattr(tensor, name), torch.Tensor)}


def size_of(tensor: torch.Tensor) -> int:
    """Bytes in memory, of the tensor or of all tensors that it consists of."""
    return sum(map(size_of, _parts(tensor).values())) if _is_wrapper(tensor) else tensor.nbytes


def fill(target: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy what was loaded into the target: part by part where they consist of the same, else as the class does it.

    Into a plain tensor goes what ``copy_`` makes of the other class, as in stock DCP.

    Raises:
        CheckpointMismatch: They are of two classes, or theirs cannot. Without the key.
    """
    if _is_wrapper(loaded) and _is_wrapper(target) and type(loaded) is not type(target):
        raise CheckpointMismatch(f"stored as {_a(loaded)} and is {_a(target)} here")
    with torch.no_grad():
        if _is_wrapper(loaded) and _is_wrapper(target) and _consist_of_the_same(target, loaded):
            for mine, other in zip(_parts(target).values(), _parts(loaded).values(), strict=True):
                fill(mine, other)
            return
        try:
            target.copy_(loaded)
        except Exception as error:
            raise CheckpointMismatch(
                f"{_a(target)} that cannot take what is stored, {_a(loaded)} ({_line(error)})"
            ) from error


def _consist_of_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, theirs = _parts(one), _parts(other)
    if mine.keys() != theirs.keys():
        return False
    pairs = [(mine[name], theirs[name]) for name in mine]
    if any(a.shape != b.shape or a.dtype != b.dtype or is_stored_whole(a) != is_stored_whole(b) for a, b in pairs):
        return False
    try:
        return bool(one.__tensor_flatten__()[1] == other.__tensor_flatten__()[1])  # type: ignore[attr-defined]
    except Exception:  # whatever the class keeps there
        return False


def narrowed(tensor: torch.Tensor, narrow: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A part of a tensor that is stored whole, to be written to.

    Raises:
        CheckpointMismatch: Its class makes none, or one that is a copy. Without the key.
    """
    try:
        part = narrow(tensor)
        if _memory(part) <= _memory(tensor):
            return part
        error: object = "a part of it is a copy"
    except Exception as failure:
        error = _line(failure)
    raise CheckpointMismatch(
        f"{_a(tensor)}, of which no part can be taken ({error}): load it as it was distributed when it was saved"
    )


def _memory(tensor: torch.Tensor) -> set[int]:
    """The addresses of its storages."""
    if _is_wrapper(tensor):
        return set().union(*map(_memory, _parts(tensor).values()))
    return {tensor.untyped_storage().data_ptr()}


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
