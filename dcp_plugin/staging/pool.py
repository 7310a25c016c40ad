"""Host memory for copies of the local shard: sized once, filled again by every save, given back by ``free``.

One slab holds all tensors that come from the host, another, pinned one those that come from a device. A slab is as
large as what is copied into it and is replaced, the old one first, when that grows, or shrinks by more than a fifth:
never is there more than one copy. Memory is pinned by registering it, because torch's own pinned memory comes in
powers of two and is never given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_ALIGNMENT = 64  # of every tensor in a slab; enough for any dtype and for vector instructions
_SLACK = 1.25
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class Place(NamedTuple):
    """Where the copy of one tensor goes."""

    slab: torch.Tensor
    start: int

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The place as a contiguous tensor of the same dtype and shape."""
        return self.slab[self.start : self.start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class HostPool:
    """The host memory of one save at a time."""

    def __init__(self) -> None:
        self._host = _Slab(pinned=False)
        self._pinned = _Slab(pinned=True)

    def places(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """A place for each tensor. All places given out before are used again."""
        ends = {False: 0, True: 0}
        starts = []
        for tensor in tensors:
            start = ends[tensor.is_cuda]
            starts.append(start)
            ends[tensor.is_cuda] = start + tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        slabs = {False: self._host.of_size(ends[False]), True: self._pinned.of_size(ends[True])}
        return [Place(slabs[tensor.is_cuda], start) for tensor, start in zip(tensors, starts, strict=True)]

    @property
    def nbytes(self) -> int:
        """What the pool holds now."""
        return self._host.memory.nbytes + self._pinned.memory.nbytes

    def free(self) -> None:
        self._host.free()
        self._pinned.free()


class _Slab:
    """One piece of host memory, page-locked for a device if ``pinned``."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self.memory = torch.empty(0, dtype=torch.uint8)

    def of_size(self, nbytes: int) -> torch.Tensor:
        if not nbytes <= self.memory.nbytes <= nbytes * _SLACK:
            self.free()
            memory = torch.empty(nbytes, dtype=torch.uint8)
            if self._pinned:
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
