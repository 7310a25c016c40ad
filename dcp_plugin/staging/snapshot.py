"""A host copy of the local shard, so that training goes on while it is written.

What may change at any time is copied when :class:`Snapshot` is made. Step-stable tensors, which stay as they are until
the next optimizer step, may be copied later, by :meth:`Snapshot.finish` in another thread, while the next forward and
backward run; the step waits for it (:mod:`dcp_plugin.staging.guard`).

Such a copy is trusted only if the tensor's version is the same before and after: in-place operations count it up. What
they do not count (writes through ``.data``, as averages are swapped in, collectives, replayed CUDA graphs, other
languages) shows in a few elements of every tensor, which are compared as well. Only a write to a part of one tensor
that avoids the version counter and these elements stays unnoticed.

Tied tensors stay tied in the copy. Copies from a device run on a stream of their own.

The memory comes from a :class:`HostPool`, which is sized once, filled again by every save, and given back by ``free``.
Its slabs are as large as what is copied into them. A slab is replaced, the old one first, when that grows, or shrinks
by more than a fifth: there is never more than one copy. Memory is pinned by registering it, because torch's own pinned
memory comes in powers of two and is never given back.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_plugin.errors import CheckpointMismatch, SaveFailed, some
from dcp_plugin.media import IN_PLACE, PAGE
from dcp_plugin.tensors._torch import DTensor, version_of
from dcp_plugin.tensors.host_memory import address_of, bytes_at, is_plain_memory
from dcp_plugin.tensors.kinds import EXACTLY_TENSORS, copied, memory_of, require_memory
from dcp_plugin.types import Flat, LocalChunk, ShardedValue

_SMALL = 64 << 10


class _Later(NamedTuple):
    """A tensor to copy later."""

    key: str
    leaf: Any
    memory: tuple[torch.Tensor, ...]
    """Its memory on this rank, as it was at the call."""
    versions: tuple[int | None, ...]


class Snapshot:
    """The copy of one save.

    During the call plain tensors are only copied, and step-stable ones not even that. They are described later: for a
    thousand small tensors that would take more time than copying them.

    Args:
        leaves: What to copy.
        pool: Where to; everything that is in it is overwritten.
        encode: Describes leaves as what this rank has of them.
        step_stable: Of leaves, and their memory on this rank: which stay as they are until the next optimizer step,
            so that they can be copied later.
    """

    def __init__(
        self,
        leaves: Mapping[str, Any],
        pool: HostPool,
        encode: Callable[[Mapping[str, Any]], Flat],
        step_stable: Callable[[Sequence[Any], Sequence[tuple[torch.Tensor, ...]]], Sequence[bool]] = (
            lambda leaves, memory: [False] * len(leaves)
        ),
    ) -> None:
        self.changed: list[str] = []
        """What :meth:`finish` found changed since this was made."""
        self._keys = list(leaves)
        self._pool, self._encode = pool, encode
        self._constant: dict[str, Any] = {}
        self._later: list[_Later] = []
        now: dict[str, torch.Tensor] = {}
        others: dict[str, Any] = {}
        found: dict[str, tuple[torch.Tensor, ...]] = {}
        with torch.no_grad():  # to_local() then returns the memory of a DTensor itself, without a view
            for key, leaf in leaves.items():
                if type(leaf) in _CONSTANT or (type(leaf) is tuple and _CONSTANT.issuperset(map(type, leaf))):
                    self._constant[key] = leaf
                elif memory := _memory_on_this_rank(leaf):
                    found[key] = memory
                else:
                    others[key] = leaf
            stable = step_stable([leaves[key] for key in found], list(found.values()))
            for (key, memory), is_stable in zip(found.items(), stable, strict=True):
                leaf = leaves[key]
                if plain := type(leaf) in EXACTLY_TENSORS:
                    leaf = memory[0]
                if is_stable and None not in (versions := _versions_of(leaf, memory)):
                    self._later.append(_Later(key, leaf, memory, versions))
                elif plain and _is_memory(leaf):
                    now[key] = leaf
                else:
                    others[key] = leaf
            self._sample = _Sample(self._later)
        self._streams = _Streams(tensor for one in self._later for tensor in one.memory)
        described = encode(others)
        identities = {key: _identity(key, 0, tensor) for key, tensor in now.items()}
        sources = dict(zip(identities.values(), now.values(), strict=True)) | dict(_sources(described))
        places = dict(zip(sources, pool.places(list(sources.values())), strict=True))
        # Before the copy, which takes all this out of the processor's cache.
        self._now = {key: (places[identity], now[key]) for key, identity in identities.items()}
        _copy_now([(places[identity], tensor) for identity, tensor in sources.items()])
        # What was copied may be freed from now on: FSDP frees the storage of a gathered parameter.
        copies = {identity: places[identity].like(tensor) for identity, tensor in _sources(described)}
        copies |= _copies_of_subclasses(described)
        self._copied = {key: _with_copies(key, value, copies) for key, value in described.items()}

    @property
    def complete(self) -> bool:
        """Whether :meth:`finish` has nothing to copy."""
        return not self._later

    def finish(self) -> Flat:
        """Copy what is left, and return the state in host memory.

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
        written.update(one.key for one in later if _versions_of(one.leaf, one.memory) != one.versions)
        self.changed = [one.key for one in later if one.key in written]
        if self.changed:
            raise SaveFailed(
                f"{some(self.changed, 5)} changed while being copied, by something else than a step of an "
                f"optimizer. Save with staging='blocking', or call handle.wait_staged() before changing it."
            )
        copied |= {key: _with_copies(key, value, copies) for key, value in described.items()}
        return {key: copied[key] for key in self._keys}


def _sources(state: Flat) -> Iterator[tuple[Any, torch.Tensor]]:
    """All memory of a state on this rank. Tied tensors come several times, with the same identity."""
    for key, value in state.items():
        if isinstance(value, ShardedValue) and not value.stored_whole:
            for number, chunk in enumerate(value.chunks):
                yield _identity(key, number, chunk.tensor), chunk.tensor


def _copies_of_subclasses(state: Flat) -> dict[Any, torch.Tensor]:
    """Copies of the tensors that consist of other tensors, and have no memory of their own."""
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
    """A value of the state with the copy in place of its memory, which is not referenced any more."""
    if not isinstance(value, ShardedValue):
        return value
    chunks = (
        LocalChunk(chunk.offsets, chunk.sizes, copies[_identity(key, number, chunk.tensor)])
        for number, chunk in enumerate(value.chunks)
    )
    return replace(value, chunks=tuple(chunks), origin=None)


def _copy_now(copied: list[tuple[HostSlice, torch.Tensor]]) -> None:
    """Copy with torch's threads, since the caller waits. Small ones by ``memmove``: an operator costs more than their
    bytes."""
    streams = _Streams(tensor for _, tensor in copied)
    for place, tensor in copied:
        if tensor.nbytes < _SMALL and is_plain_memory(tensor):
            ctypes.memmove(place.address, address_of(tensor), tensor.nbytes)
        else:
            with streams.of(tensor):
                place.like(tensor).copy_(tensor, non_blocking=tensor.is_cuda)
    streams.synchronize()


def _copy_later(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy in this thread alone. Torch would start a team of threads, which compete with those of the training and spin
    for a while: twice the CPU seconds, and no sooner done."""
    if is_plain_memory(tensor):
        ctypes.memmove(copy.data_ptr(), address_of(tensor), tensor.nbytes)
    else:
        copy.copy_(tensor, non_blocking=tensor.is_cuda)


def _identity(key: str, number: int, tensor: torch.Tensor) -> Any:
    """Equal for tied tensors. Empty ones have no memory to compare, and are identified by their key."""
    return memory_of(tensor) if tensor.numel() else (key, number)


def _memory_on_this_rank(leaf: Any) -> tuple[torch.Tensor, ...]:
    """The memory of a tensor whose kind can be copied later; empty for any other.

    A plain tensor is detached: the result keeps the memory of now, also if another is assigned to ``.data``.
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
    if isinstance(leaf, DTensor) and type(local := leaf.to_local()) in EXACTLY_TENSORS:
        return (local,)
    return ()


def _is_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements are in memory; if not, the error is raised where the leaf is described."""
    try:
        require_memory(tensor)
    except CheckpointMismatch:
        return False
    return True


_CONSTANT = frozenset({float, int, bool, str, bytes, type(None)})
"""Values of these types cannot change. An optimizer has a dozen for every parameter."""


def _versions_of(leaf: Any, memory: tuple[torch.Tensor, ...]) -> tuple[int | None, ...]:
    """The version counters of a tensor. Those of a DTensor include its own, where in-place operations are counted."""
    if type(leaf) in EXACTLY_TENSORS:
        return (version_of(leaf),)
    if isinstance(leaf, DTensor):
        memory = (*memory, leaf)
    elif isinstance(leaf, ShardedValue) and leaf.origin is not None:
        memory = (*memory, leaf.origin)
    return tuple(map(version_of, memory))


_SAMPLES = 8
"""Elements of a tensor that are compared: the first, the last, and some between them."""


class _Sample:
    """A few elements of every tensor that is copied later, as they are now.

    Writes that the version counter misses (averages swapped in through ``.data``, updates of target networks,
    broadcasts) are mostly of all elements of a tensor, and of all tensors.
    """

    def __init__(self, later: Iterable[_Later]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
        for one in later:
            for tensor in one.memory:
                if _has_no_gaps(tensor):
                    groups.setdefault((tensor.device, tensor.dtype), []).append((one.key, tensor))
        self._groups = [
            (_OnHost if device.type == "cpu" else _OnDevice)([key for key, _ in group], [tensor for _, tensor in group])
            for (device, _), group in groups.items()
        ]

    def differs(self, streams: _Streams) -> set[str]:
        """The keys of tensors that have changed."""
        return {key for group in self._groups for key in group.differs(streams)}


class _OnHost:
    """A sample of tensors of one dtype in host memory, read at their addresses: an operator of torch for each would
    take most of the time of a lazy save."""

    def __init__(self, keys: list[str], tensors: list[torch.Tensor]) -> None:
        self._keys, self._tensors = keys, tensors
        last = np.fromiter((tensor.numel() - 1 for tensor in tensors), np.int64)
        self._elements = np.arange(_SAMPLES) * last[:, None] // (_SAMPLES - 1) * tensors[0].itemsize
        self._addresses = self._now()
        self._before = self._read()

    def _now(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.fromiter((tensor.data_ptr() for tensor in self._tensors), np.int64)

    def _read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return bytes_at(self._addresses[:, None] + self._elements, self._tensors[0].itemsize)

    def differs(self, streams: _Streams) -> Iterable[str]:
        moved = self._now() != self._addresses
        if moved.any():  # their storages were resized: nothing can be read where they were
            return itertools.compress(self._keys, moved)
        return itertools.compress(self._keys, (self._read() != self._before).any(axis=(1, 2)))


class _OnDevice:
    """A sample of tensors of one dtype on a device."""

    def __init__(self, keys: list[str], tensors: list[torch.Tensor]) -> None:
        self._keys = keys
        self._places = [_samples_of(tensor) for tensor in tensors]
        self._before = torch.cat(self._places)

    def differs(self, streams: _Streams) -> Iterable[str]:
        with torch.no_grad(), streams.of(self._before):
            now = torch.cat(self._places)
            if _same_bytes(self._before, now):
                return []
            lengths = list(map(len, self._places))
            both = zip(torch.split(self._before, lengths), torch.split(now, lengths), strict=True)
            return list(itertools.compress(self._keys, [not _same_bytes(was, is_) for was, is_ in both]))


def _samples_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a few elements all over the memory of a tensor that has no gaps."""
    count = tensor.numel()
    places = min(count, _SAMPLES)
    return tensor.as_strided((places,), ((count - 1) // (places - 1) if places > 1 else 1,))


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    count = tensor.numel()
    return count > 0 and (tensor.is_contiguous() or _extent(tensor) == count)


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory: ``numel()`` if there are no gaps."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes; NaN equals NaN."""
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


_TENSOR_ALIGNMENT = 64  # of every tensor in a slab; enough for any dtype and for vector instructions
_SLACK = 1.25
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class HostSlice(NamedTuple):
    """Where the copy of one tensor goes."""

    slab: torch.Tensor
    start: int

    @property
    def address(self) -> int:
        return self.slab.data_ptr() + self.start

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The place as a contiguous tensor of the same dtype and shape."""
        return self.slab[self.start : self.start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class HostPool:
    """The host memory of one save at a time.

    Four slabs: what comes from the host and what comes from a device (pinned) lie apart, and so do what is copied at
    the call and what is copied later, since the one is copied before the other is even listed.

    Args:
        allocate: Gives so many bytes of memory, beginning at a page; by default it is this process's alone.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] | None = None) -> None:
        self._slabs = {(later, pinned): _Slab(pinned, allocate) for later in (False, True) for pinned in (False, True)}

    def places(self, tensors: Sequence[torch.Tensor]) -> list[HostSlice]:
        """A place for each tensor. All places given out before, by either method, are used again."""
        held = sum(slab.memory.nbytes for (later, _), slab in self._slabs.items() if not later)
        if sum(tensor.nbytes for tensor in tensors) > held:
            for pinned in (False, True):
                self._slabs[True, pinned].free()  # what comes here now may have been there before
        return self._places(tensors, later=False)

    def places_for_later(self, tensors: Sequence[torch.Tensor]) -> list[HostSlice]:
        """The same for those that are copied after the call."""
        return self._places(tensors, later=True)

    def _places(self, tensors: Sequence[torch.Tensor], later: bool) -> list[HostSlice]:
        ends = {False: 0, True: 0}
        starts = []
        for tensor in tensors:
            alignment = PAGE if tensor.nbytes >= IN_PLACE else _TENSOR_ALIGNMENT
            start = ends[tensor.is_cuda] + -ends[tensor.is_cuda] % alignment
            starts.append(start)
            ends[tensor.is_cuda] = start + tensor.nbytes
        slabs = {pinned: self._slabs[later, pinned].of_size(end) for pinned, end in ends.items()}
        return [HostSlice(slabs[tensor.is_cuda], start) for tensor, start in zip(tensors, starts, strict=True)]

    @property
    def slabs(self) -> list[torch.Tensor]:
        """What the pool holds now."""
        return [slab.memory for slab in self._slabs.values() if slab.memory.nbytes]

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def free(self) -> None:
        for slab in self._slabs.values():
            slab.free()


def _of_this_process(nbytes: int) -> torch.Tensor:
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE :][:nbytes]


class _Slab:
    """One piece of host memory, page-locked for a device if ``pinned``."""

    def __init__(self, pinned: bool, allocate: Callable[[int], torch.Tensor] | None) -> None:
        self._pinned = pinned
        self._allocate = allocate or _of_this_process
        self.memory = torch.empty(0, dtype=torch.uint8)

    def of_size(self, nbytes: int) -> torch.Tensor:
        if not nbytes <= self.memory.nbytes <= nbytes * _SLACK:
            self.free()
            memory = self._allocate(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
            if self._pinned and nbytes:  # to register nothing is an error
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
            self.memory = memory
        return self.memory

    def free(self) -> None:
        if self._pinned and self.memory.nbytes:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr()))  # type: ignore[no-untyped-call]
        self.memory = torch.empty(0, dtype=torch.uint8)
