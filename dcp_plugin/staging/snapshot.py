"""A host copy of the local shard, so that training goes on while it is written.

What may change at any time is copied before :class:`Snapshot` is made. What stays as it is until the next optimizer
step may be copied later, by :meth:`Snapshot.finish` in another thread, while the next forward and backward run; the
step waits for it (see :mod:`dcp_plugin.staging.guard`).

Such a copy is trusted only if the tensor's version is the same before and after: in-place operations count it up.
What they do not count (writes through ``.data``, collectives, replayed CUDA graphs, other languages) nobody can see.

Tied tensors stay tied in the copy. Copies from a device run on a stream of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dcp_plugin._torch import DTensor, version_of
from dcp_plugin.errors import SaveFailed
from dcp_plugin.staging.pool import HostPool, Place
from dcp_plugin.storage.hostmemory import is_plain_memory
from dcp_plugin.types import Flat, LocalChunk, ShardedValue, memory_of


class _Later(NamedTuple):
    """A tensor to copy later."""

    key: str
    leaf: Any
    memory: tuple[torch.Tensor, ...]
    """Its memory on this rank, as it was at the call."""
    versions: tuple[int | None, ...]

    @property
    def changed(self) -> bool:
        return _versions_of(self.leaf, self.memory) != self.versions


class Snapshot:
    """The copy of one save.

    What is copied later is not even described at the call: that would take more time than anything else there.

    Args:
        leaves: What to copy.
        pool: Where to; everything that is in it is overwritten.
        encode: Describes leaves as what this rank has of them.
        still: Whether a leaf, and its memory on this rank, stay as they are until the next optimizer step, so that it
            can be copied later.
    """

    def __init__(
        self,
        leaves: Mapping[str, Any],
        pool: HostPool,
        encode: Callable[[Mapping[str, Any]], Flat],
        still: Callable[[Any, tuple[torch.Tensor, ...]], bool] = lambda leaf, memory: False,
    ) -> None:
        self._keys = list(leaves)
        self._pool, self._encode = pool, encode
        self._constant: dict[str, Any] = {}
        self._later: list[_Later] = []
        now: dict[str, Any] = {}
        with torch.no_grad():  # it takes the memory of a DTensor as it is, and makes no view of it
            for key, leaf in leaves.items():
                if type(leaf) in _CONSTANT:
                    self._constant[key] = leaf
                    continue
                memory = _memory_on_this_rank(leaf)
                if memory and still(leaf, memory) and None not in (versions := _versions_of(leaf, memory)):
                    if type(leaf) in _PLAIN:
                        leaf = leaf.detach()  # is what it is now, whatever the other's .data will be
                        memory = (leaf,)
                    self._later.append(_Later(key, leaf, memory, versions))
                else:
                    now[key] = leaf
        self._streams = _Streams(tensor for one in self._later for tensor in one.memory)
        self._copied = self._copy(encode(now), pool.places, _copy_now)

    @property
    def complete(self) -> bool:
        """Whether :meth:`finish` has nothing to copy."""
        return not self._later

    def finish(self) -> Flat:
        """Copy what is left; the state in host memory.

        Raises:
            SaveFailed: Tensors have changed since the snapshot was made; naming them.
        """
        later, self._later = self._later, []
        described = self._encode({**self._constant, **{one.key: one.leaf for one in later}})
        copied = self._copied | self._copy(described, self._pool.places_for_later, _copy_later, self._streams)
        changed = [one.key for one in later if one.changed]
        if changed:
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise SaveFailed(
                f"{', '.join(changed[:5])}{more} changed while being copied, by something else than a step of an "
                f"optimizer. Save with staging='blocking', or call handle.wait_staged() before changing it."
            )
        return {key: copied[key] for key in self._keys}

    @staticmethod
    def _copy(
        state: Flat,
        places_for: Callable[[list[torch.Tensor]], list[Place]],
        copy_one: Callable[[torch.Tensor, torch.Tensor], None],
        streams: _Streams | None = None,
    ) -> Flat:
        sources: dict[Any, torch.Tensor] = {}
        for key, value in state.items():
            if isinstance(value, ShardedValue):
                for number, chunk in enumerate(value.chunks):
                    sources.setdefault(_identity(key, number, chunk.tensor), chunk.tensor)
        tensors = list(sources.values())
        copies = [place.like(tensor) for place, tensor in zip(places_for(tensors), tensors, strict=True)]
        streams = streams or _Streams(tensors)
        for copy, tensor in zip(copies, tensors, strict=True):
            with streams.of(tensor):
                copy_one(copy, tensor)
        streams.synchronize()
        copy_of = dict(zip(sources, copies, strict=True))
        copied: Flat = {}
        for key, value in state.items():
            if isinstance(value, ShardedValue):
                chunks = (
                    LocalChunk(chunk.offsets, chunk.sizes, copy_of[_identity(key, number, chunk.tensor)])
                    for number, chunk in enumerate(value.chunks)
                )
                value = replace(value, chunks=tuple(chunks), whole=None)  # lets go of the memory on the device
            copied[key] = value
        return copied


def _copy_now(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.numel():
        copy.copy_(tensor, non_blocking=tensor.is_cuda)


def _copy_later(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """In this thread alone. Torch would start a team of threads for it, which compete with those of the training, and
    go on spinning for a while: twice the CPU seconds, and no sooner done."""
    if is_plain_memory(tensor):
        ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    else:
        _copy_now(copy, tensor)


def _identity(key: str, number: int, tensor: torch.Tensor) -> Any:
    """Equal for tied tensors; empty ones have no memory to tell them by."""
    return memory_of(tensor) if tensor.numel() else (key, number)


def _memory_on_this_rank(leaf: Any) -> tuple[torch.Tensor, ...]:
    """That of a kind of tensor that can be copied later; nothing for any other."""
    if type(leaf) in _PLAIN:
        return (leaf,) if leaf.layout is torch.strided else ()
    if isinstance(leaf, ShardedValue):
        return tuple(chunk.tensor for chunk in leaf.chunks)
    if isinstance(leaf, DTensor):
        return (leaf.to_local(),)
    return ()


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CONSTANT = (float, int, bool, str, bytes, type(None))
"""Values of these types cannot change. An optimizer has a dozen for every parameter."""


def _versions_of(leaf: Any, memory: tuple[torch.Tensor, ...]) -> tuple[int | None, ...]:
    """In-place operations on a DTensor are counted on it, and not on its local tensor."""
    if type(leaf) in _PLAIN:
        return (version_of(leaf),)
    if isinstance(leaf, DTensor):
        memory = (*memory, leaf)
    elif isinstance(leaf, ShardedValue) and leaf.whole is not None:
        memory = (*memory, leaf.whole)
    return tuple(map(version_of, memory))


class _Streams:
    """One stream per device for copies from it. They begin when the work that the caller has queued is done."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        devices = {tensor.device for tensor in tensors if tensor.is_cuda} if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        for device in devices:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def of(self, tensor: torch.Tensor) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[tensor.device]) if tensor.is_cuda else nullcontext()

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
