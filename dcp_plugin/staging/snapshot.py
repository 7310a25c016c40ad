"""A host copy of the local shard, so that training goes on while it is written.

What may change at any time is copied before :class:`Snapshot` is made. What stays as it is until the next optimizer
step may be copied later, by :meth:`Snapshot.finish` in another thread, while the next forward and backward run; the
step waits for it (see :mod:`dcp_plugin.staging.guard`).

Such a copy is trusted only if the tensor's version is the same before and after: in-place operations count it up. What
they do not count (writes through ``.data``, as averages are swapped in, collectives, replayed CUDA graphs, other
languages) shows in a few elements of every tensor, which are compared, too. Only what is written to a part of one
tensor, past all of these, is not noticed.

Tied tensors stay tied in the copy. Copies from a device run on a stream of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dcp_plugin._torch import DTensor, version_of
from dcp_plugin.errors import CheckpointMismatch, SaveFailed
from dcp_plugin.host_memory import address_of, is_plain_memory
from dcp_plugin.staging.pool import HostPool, Place
from dcp_plugin.tensors import EXACTLY_TENSORS, copied, require_memory
from dcp_plugin.types import Flat, LocalChunk, ShardedValue, memory_of

_SMALL = 64 << 10


class _Later(NamedTuple):
    """A tensor to copy later."""

    key: str
    leaf: Any
    memory: tuple[torch.Tensor, ...]
    """Its memory on this rank, as it was at the call."""
    versions: tuple[int | None, ...]

    @property
    def counted_up(self) -> bool:
        return _versions_of(self.leaf, self.memory) != self.versions


class Snapshot:
    """The copy of one save.

    At the call plain tensors are only copied, and what is still not even that. What they are is described later: for a
    thousand small ones that would take more time than copying them.

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
        self.changed: list[str] = []
        """What :meth:`finish` found changed since this was made."""
        self._keys = list(leaves)
        self._pool, self._encode = pool, encode
        self._constant: dict[str, Any] = {}
        self._later: list[_Later] = []
        now: dict[str, torch.Tensor] = {}
        others: dict[str, Any] = {}
        with torch.no_grad():  # it takes the memory of a DTensor as it is, and makes no view of it
            for key, leaf in leaves.items():
                if type(leaf) in _CONSTANT:
                    self._constant[key] = leaf
                    continue
                memory = _memory_on_this_rank(leaf)
                later = memory and still(leaf, memory)
                versions = _versions_of(leaf, memory) if later else ()
                plain = bool(memory) and type(leaf) in EXACTLY_TENSORS
                if plain:
                    leaf = memory[0]
                if later and None not in versions:
                    self._later.append(_Later(key, leaf, memory, versions))
                elif plain and _is_memory(leaf):
                    now[key] = leaf
                else:
                    others[key] = leaf
            self._sample = _Sample(self._later)
        self._streams = _Streams(tensor for one in self._later for tensor in one.memory)
        described = encode(others)
        sources = {_identity(key, 0, tensor): tensor for key, tensor in now.items()} | dict(_sources(described))
        places = dict(zip(sources, pool.places(list(sources.values())), strict=True))
        _copy_now([(places[identity], tensor) for identity, tensor in sources.items()])
        # From now on what was copied may be freed: FSDP takes the memory of a gathered parameter away, and not it.
        self._now = {key: (places[_identity(key, 0, tensor)], tensor) for key, tensor in now.items()}
        copies = {identity: places[identity].like(tensor) for identity, tensor in _sources(described)}
        copies |= _copies_of_wholes(described)
        self._copied = {key: _with_copies(key, value, copies) for key, value in described.items()}

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
        copied = self._copied | self._encode({key: place.like(tensor) for key, (place, tensor) in self._now.items()})
        described = self._encode({**self._constant, **{one.key: one.leaf for one in later}})
        sources, copies = dict(_sources(described)), {}
        places = self._pool.places_for_later(list(sources.values()))
        for (identity, tensor), place in zip(sources.items(), places, strict=True):
            copies[identity] = place.like(tensor)
            with self._streams.of(tensor):
                _copy_later(copies[identity], tensor)
        self._streams.synchronize()
        written = self._sample.differs(self._streams)
        self.changed = [one.key for one in later if one.counted_up or one.key in written]
        if self.changed:
            changed, more = self.changed, f" and {len(self.changed) - 5} more" if len(self.changed) > 5 else ""
            raise SaveFailed(
                f"{', '.join(changed[:5])}{more} changed while being copied, by something else than a step of an "
                f"optimizer. Save with staging='blocking', or call handle.wait_staged() before changing it."
            )
        copied |= {key: _with_copies(key, value, copies) for key, value in described.items()}
        return {key: copied[key] for key in self._keys}


def _sources(state: Flat) -> Iterator[tuple[Any, torch.Tensor]]:
    """All memory of a state on this rank. What is tied comes several times, with the same identity."""
    for key, value in state.items():
        if isinstance(value, ShardedValue) and not value.stored_whole:
            for number, chunk in enumerate(value.chunks):
                yield _identity(key, number, chunk.tensor), chunk.tensor


def _copies_of_wholes(state: Flat) -> dict[Any, torch.Tensor]:
    """Copies of the tensors that have no memory of their own to be copied, but parts that have."""
    copies: dict[Any, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, ShardedValue) and value.stored_whole:
            for number, chunk in enumerate(value.chunks):
                identity = _identity(key, number, chunk.tensor)
                try:
                    copies[identity] = copies[identity] if identity in copies else copied(chunk.tensor)
                except CheckpointMismatch as error:
                    raise CheckpointMismatch(f"{key} is {error}") from error
    return copies


def _with_copies(key: str, value: Any, copies: Mapping[Any, torch.Tensor]) -> Any:
    """A value of the state with its copy in place of its memory, which it lets go of."""
    if not isinstance(value, ShardedValue):
        return value
    chunks = (
        LocalChunk(chunk.offsets, chunk.sizes, copies[_identity(key, number, chunk.tensor)])
        for number, chunk in enumerate(value.chunks)
    )
    return replace(value, chunks=tuple(chunks), whole=None)


def _copy_now(copied: list[tuple[Place, torch.Tensor]]) -> None:
    """With the threads of the caller, who waits; but for small ones, for which a tensor costs more than its bytes."""
    streams = _Streams(tensor for _, tensor in copied)
    for place, tensor in copied:
        if tensor.nbytes < _SMALL and is_plain_memory(tensor):
            ctypes.memmove(place.address, address_of(tensor), tensor.nbytes)
        else:
            with streams.of(tensor):
                place.like(tensor).copy_(tensor, non_blocking=tensor.is_cuda)
    streams.synchronize()


def _copy_later(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """In this thread alone. Torch would start a team of threads for it, which compete with those of the training, and
    go on spinning for a while: twice the CPU seconds, and no sooner done."""
    if is_plain_memory(tensor):
        ctypes.memmove(copy.data_ptr(), address_of(tensor), tensor.nbytes)
    else:
        copy.copy_(tensor, non_blocking=tensor.is_cuda)


def _identity(key: str, number: int, tensor: torch.Tensor) -> Any:
    """Equal for tied tensors; empty ones have no memory to tell them by."""
    return memory_of(tensor) if tensor.numel() else (key, number)


def _memory_on_this_rank(leaf: Any) -> tuple[torch.Tensor, ...]:
    """That of a kind of tensor that can be copied later; nothing for any other.

    That of a plain tensor is detached: it is what it is now, whatever the other's ``.data`` will be.
    """
    if type(leaf) in EXACTLY_TENSORS:
        if leaf.layout is not torch.strided or leaf.is_quantized or hasattr(leaf, "global_shape"):
            return ()
        try:
            return (leaf.detach(),)
        except RuntimeError:  # of an inner transform of torch.func that has ended
            return ()
    if isinstance(leaf, ShardedValue):
        return () if leaf.stored_whole else tuple(chunk.tensor for chunk in leaf.chunks)
    if isinstance(leaf, DTensor):
        local = leaf.to_local()
        return (local,) if type(local) in EXACTLY_TENSORS else ()
    return ()


def _is_memory(tensor: torch.Tensor) -> bool:
    """What is not is told with all others, by who describes them."""
    try:
        require_memory(tensor)
    except CheckpointMismatch:
        return False
    return True


_CONSTANT = (float, int, bool, str, bytes, type(None))
"""Values of these types cannot change. An optimizer has a dozen for every parameter."""


def _versions_of(leaf: Any, memory: tuple[torch.Tensor, ...]) -> tuple[int | None, ...]:
    """In-place operations on a DTensor are counted on it, and not on its local tensor."""
    if type(leaf) in EXACTLY_TENSORS:
        return (version_of(leaf),)
    if isinstance(leaf, DTensor):
        memory = (*memory, leaf)
    elif isinstance(leaf, ShardedValue) and leaf.whole is not None:
        memory = (*memory, leaf.whole)
    return tuple(map(version_of, memory))


_PLACES = 8
"""Elements of a tensor that are compared: the first, the last, and some between them."""


class _Sample:
    """A few elements of every tensor that is copied later, as they are now.

    What writes weights behind the back of the version counter (averages swapped in through ``.data``, updates of
    target networks, broadcasts) writes whole tensors, and most often all of them.
    """

    def __init__(self, later: Iterable[_Later]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
        for one in later:
            for tensor in one.memory:
                places = _places_in(tensor)
                if places is not None:
                    groups.setdefault((tensor.device, tensor.dtype), []).append((one.key, places))
        self._groups = [(group, torch.cat([places for _, places in group])) for group in groups.values()]

    def differs(self, streams: _Streams) -> set[str]:
        """The keys of tensors that are not as they were."""
        found: set[str] = set()
        for group, before in self._groups:
            with torch.no_grad(), streams.of(before):
                now = torch.cat([places for _, places in group])
                if not _same_bytes(before, now):
                    lengths = [len(places) for _, places in group]
                    pairs = zip(group, torch.split(before, lengths), torch.split(now, lengths), strict=True)
                    found.update(key for (key, _), was, is_ in pairs if not _same_bytes(was, is_))
        return found


def _places_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view of a few elements all over the memory of a tensor; None if that has gaps."""
    count = tensor.numel()
    if not count or not (tensor.is_contiguous() or _extent(tensor) == count):
        return None
    places = min(count, _PLACES)
    step = (count - 1) // (places - 1) if places > 1 else 1
    return tensor.as_strided((places,), (step,))


def _extent(tensor: torch.Tensor) -> int:
    """From the first to the last element in memory; as many as there are if no gap is between them."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN is what it is."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


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
