"""Host memory for copies of the local shard: sized once, filled again by every save, given back by ``free``.

One slab holds all tensors that come from the host, another, pinned one those that come from a device; what is copied
at the call and what is copied later lie apart, since the one is copied before the other is even listed. A slab is as
large as what is copied into it and is replaced, the old one first, when that grows, or shrinks by more than a fifth:
never is there more than one copy. Memory is pinned by registering it, because torch's own pinned memory comes in
powers of two and is never given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dcp_plugin.media import IN_PLACE, PAGE

_ALIGNMENT = 64  # of every tensor in a slab; enough for any dtype and for vector instructions
_SLACK = 1.25
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class Place(NamedTuple):
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
    """The host memory of one save at a time."""

    def __init__(self) -> None:
        self._at_the_call, self._later = _Slabs(), _Slabs()

    def places(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """A place for each tensor. All places given out before, by either method, are used again."""
        if sum(tensor.nbytes for tensor in tensors) > self._at_the_call.nbytes:
            self._later.free()  # what comes here now may have been there before
        return self._at_the_call.places(tensors)

    def places_for_later(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """The same for those that are copied after the call."""
        return self._later.places(tensors)

    @property
    def slabs(self) -> list[torch.Tensor]:
        """What the pool holds now."""
        slabs = [slab.memory for both in (self._at_the_call, self._later) for slab in (both.host, both.pinned)]
        return [slab for slab in slabs if slab.nbytes]

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def free(self) -> None:
        self._at_the_call.free()
        self._later.free()


class _Slabs:
    """One slab for what comes from the host, and one for what comes from devices."""

    def __init__(self) -> None:
        self.host = _Slab(pinned=False)
        self.pinned = _Slab(pinned=True)

    def places(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        ends = {False: 0, True: 0}
        starts = []
        for tensor in tensors:
            alignment = PAGE if tensor.nbytes >= IN_PLACE else _ALIGNMENT
            start = ends[tensor.is_cuda] + -ends[tensor.is_cuda] % alignment
            starts.append(start)
            ends[tensor.is_cuda] = start + tensor.nbytes
        slabs = {False: self.host.of_size(ends[False]), True: self.pinned.of_size(ends[True])}
        return [Place(slabs[tensor.is_cuda], start) for tensor, start in zip(tensors, starts, strict=True)]

    @property
    def nbytes(self) -> int:
        return self.host.memory.nbytes + self.pinned.memory.nbytes

    def free(self) -> None:
        self.host.free()
        self.pinned.free()


class _Slab:
    """One piece of host memory, page-locked for a device if ``pinned``."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self.memory = torch.empty(0, dtype=torch.uint8)

    def of_size(self, nbytes: int) -> torch.Tensor:
        if not nbytes <= self.memory.nbytes <= nbytes * _SLACK:
            self.free()
            memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
            memory = memory[-memory.data_ptr() % PAGE :][:nbytes]
            if self._pinned and nbytes:  # to register nothing is an error
                _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
            self.memory = memory
        return self.memory

    def free(self) -> None:
        if self._pinned and self.memory.nbytes:
            _check(torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr()))  # type: ignore[no-untyped-call]
        self.memory = torch.empty(0, dtype=torch.uint8)


def _check(code: int) -> None:
    """Raise what the CUDA runtime says."""
    torch.cuda.check_error(code)
