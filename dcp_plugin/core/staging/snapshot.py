"""A host copy of the local shard, which lets training continue while the copy is written.

State that may change at any time is copied when a :class:`Snapshot` is made. Step-stable tensors do not change until
the next optimizer step. :meth:`Snapshot.finish` may copy them later in another thread, during the next forward and
backward pass. The step waits for the copy (:mod:`dcp_plugin.core.staging.guard`).

The rule: a later copy is valid only if nothing wrote to the tensor since the snapshot was made. Two checks detect
writes. In-place operations increment the tensor's version counter. Some writes do not: writes through ``.data``
(averages that are swapped in), collectives, replayed CUDA graphs, other languages. To detect these, a few elements of
every tensor are compared. A write stays undetected only if it avoids the version counter and changes a part of one
tensor without these elements.

Tied tensors stay tied in the copy. Copies from a device run on a separate stream.

The memory comes from a :class:`HostPool`. Every save fills the pool again, and ``free`` releases it. A slab of the pool
is as large as the tensors that are copied into it. It is replaced if they no longer fit, or if they need less than four
fifths of it. The old slab is released first, so memory never holds more than one copy. The pool registers its memory as
pinned, because torch's pinned allocator rounds up to powers of two and never releases memory.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointMismatch, SaveFailed, some
from dcp_plugin.core.format.values import PLAIN
from dcp_plugin.core.media import IN_PLACE, PAGE
from dcp_plugin.core.tensors._torch import DTensor, versions_of
from dcp_plugin.core.tensors.host_memory import address_of, bytes_at, can_be_queued, host_bytes, is_plain_memory
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS, copied, is_dense_memory, memory_of
from dcp_plugin.core.types import Flat, LocalChunk, ShardedValue

_SMALL = 64 << 10  # bytes; a smaller plain host tensor is copied by memmove instead of a torch operator


class Snapshot:
    """The copy of one save.

    The constructor copies tensors that may change, and leaves step-stable tensors to :meth:`finish`. It describes only
    the leaves whose memory it does not know otherwise. :meth:`finish` describes the rest, because describing a thousand
    small tensors takes longer than copying them.

    Args:
        leaves: The leaves of the state, by key.
        pool: The memory for the copy. Its contents are overwritten.
        encode: Describes leaves as the values and chunks on this rank.
        step_stable: Takes leaves and a tensor of each on this rank. Returns for each tensor if it stays unchanged until
            the next optimizer step and so can be copied later.
    """

    def __init__(
        self,
        leaves: Mapping[str, Any],
        pool: HostPool,
        encode: Callable[[Mapping[str, Any]], Flat],
        step_stable: Callable[[Sequence[Any], Sequence[torch.Tensor]], Sequence[bool]] = (
            lambda leaves, memory: [False] * len(leaves)
        ),
    ) -> None:
        self.changed: list[str] = []
        """Keys of the tensors that changed after the snapshot was made, as detected by :meth:`finish`."""
        self._keys = list(leaves)
        self._pool, self._encode = pool, encode
        # Each leaf goes to one of four collections: constants, which nothing changes; _later, for finish(); now, for
        # plain tensors that are copied here; to_describe, where encode() has to find the memory to copy.
        self._constant: dict[str, Any] = {}
        variable: dict[str, Any] = {}
        for key, leaf in leaves.items():
            if type(leaf) in PLAIN:
                self._constant[key] = leaf
            elif type(leaf) in (tuple, list) and PLAIN.issuperset(map(type, leaf)):
                self._constant[key] = leaf[:]  # a copy of a list, and a tuple itself
            else:
                variable[key] = leaf
        # Each question is asked of all tensors in one pass, because a call for each takes longer than its answer.
        with torch.no_grad():  # to_local() then returns the memory of a DTensor itself, without a view
            # Rows of a key and a tensor: a leaf has one for each of its chunks on this rank.
            plain = _plain_memory(variable)
            others = {key: leaf for key, leaf in variable.items() if key not in plain}
            rows = [*plain.items(), *((key, tensor) for key, leaf in others.items() for tensor in _chunks_of(leaf))]
            stable = step_stable([variable[key] for key, _ in rows], [tensor for _, tensor in rows])
            counted = [*rows, *((key, tensor) for key, leaf in others.items() for tensor in _counted_apart(leaf))]
            versions = versions_of([tensor for _, tensor in counted])
            # Without a version counter (inference tensors) a write during the later copy could not be detected.
            at_once = {key for (key, _), version in zip(counted, versions, strict=True) if version is None}
            at_once.update(key for (key, _), is_stable in zip(rows, stable, strict=True) if not is_stable)
            held = others | plain  # detached: it keeps this memory if code assigns other memory to .data
            self._later = {key: held[key] for key, _ in rows if key not in at_once}
            self._counted = [
                (*row, version) for row, version in zip(counted, versions, strict=True) if row[0] in self._later
            ]
            now = {key: tensor for key, tensor in plain.items() if key in at_once and is_dense_memory(tensor)}
            to_describe = {key: held[key] for key in variable if key not in self._later and key not in now}
            self._sample = _Sample([row for row in rows if row[0] in self._later])
        self._streams = _Streams(tensor for _, tensor, _ in self._counted)
        described = encode(to_describe)
        # Tied tensors have one identity, so they become one source with one slice.
        identities = {key: _identity(key, 0, tensor) for key, tensor in now.items()}
        sources = dict(zip(identities.values(), now.values(), strict=True)) | dict(_sources(described))
        slices = dict(zip(sources, pool.slices(list(sources.values())), strict=True))
        # Made before the copy, because the copy evicts these objects from the processor's cache.
        self._now = {key: (slices[identity], now[key]) for key, identity in identities.items()}
        _copy_now([(slices[identity], tensor) for identity, tensor in sources.items()])
        # From here on the sources may be freed: FSDP frees the storage of a gathered parameter.
        copies = {identity: slices[identity].like(tensor) for identity, tensor in _sources(described)}
        copies |= _copies_of_subclasses(described)
        self._copied = {key: _with_copies(key, value, copies) for key, value in described.items()}

    @property
    def complete(self) -> bool:
        """True if :meth:`finish` has nothing to copy."""
        return not self._later

    def finish(self) -> Flat:
        """Copy the remaining tensors and return the state in host memory.

        Raises:
            SaveFailed: Tensors have changed since the snapshot was made. The message names them.
        """
        later, self._later = self._later, {}
        copied = self._copied | self._encode(
            {key: copy_slice.like(tensor) for key, (copy_slice, tensor) in self._now.items()}
        )
        described = self._encode(self._constant | later)
        sources, copies = dict(_sources(described)), {}
        slices = self._pool.slices(list(sources.values()), later=True)
        with self._streams:
            for (identity, tensor), copy_slice in zip(sources.items(), slices, strict=True):
                copies[identity] = copy_slice.like(tensor)
                with self._streams.of(tensor):
                    _copy_later(copies[identity], tensor)
        # Compared after the copy, so that a write during the copy is detected as well.
        written = self._sample.differs(self._streams)
        versions = versions_of([tensor for _, tensor, _ in self._counted])
        written.update(key for (key, _, was), is_ in zip(self._counted, versions, strict=True) if was != is_)
        self.changed += [key for key in later if key in written]
        if self.changed:
            raise SaveFailed(
                f"{some(self.changed, 5)} changed while the save copied it, and not by an optimizer step. Save with "
                f"staging='blocking', or call handle.wait_staged() before the change."
            )
        copied |= {key: _with_copies(key, value, copies) for key, value in described.items()}
        return {key: copied[key] for key in self._keys}


def _sources(state: Flat) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield all memory of a state on this rank. Tied tensors appear several times, with the same identity."""
    for key, value in state.items():
        if isinstance(value, ShardedValue) and not value.stored_whole:
            for number, chunk in enumerate(value.chunks):
                yield _identity(key, number, chunk.tensor), chunk.tensor


def _copies_of_subclasses(state: Flat) -> dict[Any, torch.Tensor]:
    """Copy the tensors that consist of other tensors and have no memory themselves. Return the copies by identity."""
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
    """Return a value of the state with copies in place of its memory. The result does not reference the original."""
    if not isinstance(value, ShardedValue):
        return value
    chunks = (
        LocalChunk(chunk.offsets, chunk.sizes, copies[_identity(key, number, chunk.tensor)])
        for number, chunk in enumerate(value.chunks)
    )
    return replace(value, chunks=tuple(chunks), origin=None)


def _copy_now(copied: list[tuple[HostSlice, torch.Tensor]]) -> None:
    """Copy with torch's threads, since the caller waits. Copy small tensors by ``memmove``, because the call of an
    operator takes longer than copying their bytes."""
    with _Streams(tensor for _, tensor in copied) as streams:
        for copy_slice, tensor in copied:
            if tensor.nbytes < _SMALL and is_plain_memory(tensor):
                ctypes.memmove(copy_slice.address, address_of(tensor), tensor.nbytes)
            else:
                with streams.of(tensor):
                    copy_slice.like(tensor).copy_(tensor, non_blocking=tensor.is_cuda and can_be_queued(tensor))


def _copy_later(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy in this thread alone. Torch would start a team of threads, which compete with the training and spin after
    their work. A team takes twice the CPU seconds and finishes no earlier."""
    if is_plain_memory(tensor):
        ctypes.memmove(copy.data_ptr(), address_of(tensor), tensor.nbytes)
    else:
        copy.copy_(tensor, non_blocking=tensor.is_cuda and can_be_queued(tensor))


def _identity(key: str, number: int, tensor: torch.Tensor) -> Any:
    """Return an identity that is equal for tied tensors. An empty tensor has no memory, so its key identifies it."""
    return memory_of(tensor) if tensor.numel() else (key, number)


def _plain_memory(leaves: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the plain tensors in memory that can be copied later, detached.

    A detached tensor keeps its current memory even if code assigns other memory to ``.data``.
    """
    plain = {
        key: leaf
        for key, leaf in leaves.items()
        if type(leaf) in EXACTLY_TENSORS
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not hasattr(leaf, "global_shape")
    }
    try:
        return {key: leaf.detach() for key, leaf in plain.items()}
    except RuntimeError:  # one belongs to a transform of torch.func that has ended
        each = [_plain_memory({key: leaf}) for key, leaf in plain.items()] if len(plain) > 1 else []
        return {key: tensor for one in each for key, tensor in one.items()}


def _chunks_of(leaf: Any) -> Sequence[torch.Tensor]:
    """Return the memory of a sharded tensor that can be copied later; empty for any other leaf."""
    if isinstance(leaf, ShardedValue):
        return () if leaf.stored_whole else [chunk.tensor for chunk in leaf.chunks]
    if isinstance(leaf, DTensor) and type(local := leaf.to_local()) in EXACTLY_TENSORS:
        return (local,)
    return ()


def _counted_apart(leaf: Any) -> Sequence[torch.Tensor]:
    """Return the tensor whose own version counter counts operations on a leaf in addition to that of its memory. A
    DTensor counts in-place operations on itself."""
    if isinstance(leaf, ShardedValue) and not leaf.stored_whole and leaf.origin is not None:
        return (leaf.origin,)
    return (leaf,) if isinstance(leaf, DTensor) else ()


_SAMPLES = 8
"""Number of elements of a tensor that are compared: the first, the last, and some between them."""


class _Sample:
    """Current values of a few elements of every tensor that is copied later.

    Some writes do not increment the version counter: averages swapped in through ``.data``, updates of target networks,
    broadcasts. They mostly change all elements of all tensors, so a few elements reveal them.
    """

    def __init__(self, rows: Iterable[tuple[str, torch.Tensor]]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
        for row in rows:
            tensor = row[1]
            if (count := tensor.numel()) and (tensor.is_contiguous() or _extent(tensor) == count):  # without gaps
                groups.setdefault((tensor.device, tensor.dtype), []).append(row)
        self._groups = [
            (_OnHost if device.type == "cpu" else _OnDevice)([key for key, _ in group], [tensor for _, tensor in group])
            for (device, _), group in groups.items()
        ]

    def differs(self, streams: _Streams) -> set[str]:
        """Return the keys of the tensors that have changed."""
        return {key for group in self._groups for key in group.differs(streams)}


class _OnHost:
    """A sample of host tensors with one dtype. All elements are read at their addresses by one numpy operation, because
    a torch operator for each tensor would take most of the time of a lazy save."""

    def __init__(self, keys: list[str], tensors: list[torch.Tensor]) -> None:
        self._keys, self._tensors = keys, tensors
        # A row for each tensor: the byte offsets of elements at equal distances, from the first to the last.
        last = np.array([tensor.numel() - 1 for tensor in tensors], np.int64)
        self._elements = np.arange(_SAMPLES) * last[:, None] // (_SAMPLES - 1) * tensors[0].itemsize
        self._addresses = self._now()
        self._before = self._read()

    def _now(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([tensor.data_ptr() for tensor in self._tensors], np.int64)

    def _read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return bytes_at(self._addresses[:, None] + self._elements, self._tensors[0].itemsize)

    def differs(self, streams: _Streams) -> Iterable[str]:
        moved = self._now() != self._addresses
        if moved.any():  # a resized storage: the old addresses must not be read
            return itertools.compress(self._keys, moved)
        return itertools.compress(self._keys, (self._read() != self._before).any(axis=(1, 2)))


class _OnDevice:
    """A sample of tensors with one dtype on one device. One operator gathers the elements of all tensors, and one
    compares them. After a difference, the tensors are compared one by one."""

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
    """Return a view of a few elements, spread over the memory of a tensor without gaps."""
    count = tensor.numel()
    samples = min(count, _SAMPLES)
    if tensor.itemsize == 1:  # torch.cat knows few of the dtypes of one byte on a device
        tensor = tensor.view(torch.uint8)
    return tensor.as_strided((samples,), ((count - 1) // (samples - 1) if samples > 1 else 1,))


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last in memory; it is ``numel()`` if there are no gaps."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes. NaN equals NaN."""
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


class _Streams:
    """Streams for copies from devices, one per device. Copies start after the work that the caller has queued.

    The end of the ``with`` block waits for the copies, also after an error: a copy in flight would write into memory
    that the next save uses.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        devices = {tensor.device for tensor in tensors if tensor.is_cuda} if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        for device in devices:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def of(self, tensor: torch.Tensor) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[tensor.device]) if tensor.is_cuda else nullcontext()

    def __enter__(self) -> _Streams:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self._streams.values():
            stream.synchronize()


_TENSOR_ALIGNMENT = 64  # bytes, for every tensor in a slab; enough for any dtype and for vector instructions
_SLACK = 1.25
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class HostSlice(NamedTuple):
    """Memory of one tensor's copy in a slab."""

    slab: torch.Tensor
    start: int

    @property
    def address(self) -> int:
        return self.slab.data_ptr() + self.start

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice as a contiguous tensor with the dtype and shape of ``tensor``."""
        return self.slab[self.start : self.start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class HostPool:
    """Host memory for one save at a time.

    The pool has four slabs: two for immediate copies and two for later copies, which are listed only after the
    immediate ones are made. One of each two is pinned, for copies from devices. The other is for copies of host
    tensors.

    Args:
        allocate: Returns a number of bytes that start at a page boundary; by default memory private to the process.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] | None = None) -> None:
        self._slabs = {(later, pinned): _Slab(pinned, allocate) for later in (False, True) for pinned in (False, True)}

    def slices(self, tensors: Sequence[torch.Tensor], later: bool = False) -> list[HostSlice]:
        """Return a slice of a slab for each tensor.

        Args:
            later: True for tensors that :meth:`Snapshot.finish` copies. False begins a new save, which invalidates all
                slices that were returned before.
        """
        held = sum(slab.memory.nbytes for (is_later, _), slab in self._slabs.items() if not is_later)
        if not later and sum(tensor.nbytes for tensor in tensors) > held:
            for pinned in (False, True):
                # Tensors that the last save copied later may be copied at once now. Their old slab is freed first, so
                # that it does not add to the peak.
                self._slabs[True, pinned].free()
        ends = {False: 0, True: 0}
        starts = []
        for tensor in tensors:
            # A large copy begins at a page, so that direct I/O writes it from here without a further copy.
            alignment = PAGE if tensor.nbytes >= IN_PLACE else _TENSOR_ALIGNMENT
            start = ends[tensor.is_cuda] + -ends[tensor.is_cuda] % alignment
            starts.append(start)
            ends[tensor.is_cuda] = start + tensor.nbytes
        slabs = {pinned: self._slabs[later, pinned].of_size(end) for pinned, end in ends.items()}
        return [HostSlice(slabs[tensor.is_cuda], start) for tensor, start in zip(tensors, starts, strict=True)]

    @property
    def slabs(self) -> list[torch.Tensor]:
        """The current memory of the pool."""
        return [slab.memory for slab in self._slabs.values() if slab.memory.nbytes]

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def free(self) -> None:
        for slab in self._slabs.values():
            slab.free()


def _of_this_process(nbytes: int) -> torch.Tensor:
    memory = host_bytes(nbytes + PAGE)  # a page more than needed: torch aligns to less than a page
    return memory[-memory.data_ptr() % PAGE :][:nbytes]


class _Slab:
    """A piece of host memory, page-locked for device copies if ``pinned``."""

    def __init__(self, pinned: bool, allocate: Callable[[int], torch.Tensor] | None) -> None:
        self._pinned = pinned
        self._allocate = allocate or _of_this_process
        self._unregister: Callable[[], Any] = lambda: None
        self.memory = host_bytes(0)

    def of_size(self, nbytes: int) -> torch.Tensor:
        if not nbytes <= self.memory.nbytes <= nbytes * _SLACK:
            self.free()
            with torch.inference_mode(False):  # a later save writes to the memory outside of inference mode
                memory = self._allocate(nbytes) if nbytes else host_bytes(0)
            if self._pinned and nbytes:  # cudaHostRegister refuses zero bytes
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
                # No __del__, which would run after free(), too: Python discards a Ctrl-C that is raised in it.
                self._unregister = finalizer = weakref.finalize(self, _unregister, memory)
                finalizer.atexit = False
            self.memory = memory
        return self.memory

    def free(self) -> None:
        self._unregister()
        self.memory = host_bytes(0)


def _unregister(memory: torch.Tensor) -> None:
    # CUDA refuses to register an address again whose memory was released while it was registered.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))  # type: ignore[no-untyped-call]
