"""How much tensors differ, summed up piece by piece.

Elements are equal if their bytes are: a NaN equals itself, and -0.0 is not 0.0. Differences are taken in double
precision, those of integers exactly; what is NaN or infinite on one side has none, and is counted instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import hypot, inf, isfinite

import torch

_AT_ONCE = 1 << 20
"""Elements that are converted together."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = 2.0**62
"""Differences of integers below that do not overflow."""


@dataclass(frozen=True)
class Amount:
    """How much a tensor, or several, have changed from A to B."""

    elements: int = 0
    differ: int = 0
    """Elements whose bytes differ."""
    largest: float | None = None
    """The largest absolute difference; None where no two numbers differ, or the dtype has no arithmetic."""
    difference: float = 0.0
    """The Euclidean norm of B - A."""
    norm: float = 0.0
    """The Euclidean norm of A; without what is NaN or infinite, as :attr:`difference`."""
    not_finite: int = 0
    """Of :attr:`differ`, those that are NaN or infinite on one side at least."""

    @property
    def share(self) -> float:
        """Of the elements that differ, between 0 and 1."""
        return self.differ / self.elements if self.elements else 0.0

    @property
    def relative(self) -> float:
        """The norm of the difference over that of A; infinite where A is all zeros."""
        if not self.difference:
            return 0.0
        return self.difference / self.norm if self.norm else inf

    def __add__(self, other: Amount) -> Amount:
        known = [one for one in (self.largest, other.largest) if one is not None]
        return Amount(
            self.elements + other.elements,
            self.differ + other.differ,
            max(known) if known else None,
            hypot(self.difference, other.difference),
            hypot(self.norm, other.norm),
            self.not_finite + other.not_finite,
        )


def difference(one: torch.Tensor, other: torch.Tensor) -> Amount:
    """How much two tensors on the host differ, which have the same dtype and as many elements."""
    total = Amount()
    for before, after in _slices(one, other):
        differs = differing(before, after)
        count = int(differs.sum())
        total += Amount(before.numel(), norm=_norm(before))
        if count:  # often these are few
            total += _of_differing(before[differs], after[differs])
    return total


def _norm(tensor: torch.Tensor) -> float:
    """Of what is finite."""
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:  # half the time of a copy in double precision
        norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
        if isfinite(norm):
            return norm
    numbers = _numbers(tensor)
    return 0.0 if numbers is None else float(torch.linalg.vector_norm(numbers[torch.isfinite(numbers)]))


def _of_differing(before: torch.Tensor, after: torch.Tensor) -> Amount:
    """Of elements that all differ, without counting them as elements once more."""
    old, new = _numbers(before), _numbers(after)
    if old is None or new is None:
        return Amount(differ=before.numel())
    finite = torch.isfinite(old) & torch.isfinite(new)
    apart = _apart(before, after, old, new)[finite]
    return Amount(
        differ=before.numel(),
        largest=float(apart.max()) if apart.numel() else None,
        difference=float(torch.linalg.vector_norm(apart)),
        not_finite=before.numel() - apart.numel(),
    )


def _slices(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    one, other = one.reshape(-1), other.reshape(-1)
    for start in range(0, one.numel(), _AT_ONCE):
        yield one[start : start + _AT_ONCE], other[start : start + _AT_ONCE]


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors of the same dtype and size have the same bytes."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Which elements of two flat, contiguous tensors have different bytes."""
    size = one.dtype.itemsize
    if size in _INTEGERS:
        return one.view(_INTEGERS[size]) != other.view(_INTEGERS[size])
    return (one.view(torch.uint8).view(-1, size) != other.view(torch.uint8).view(-1, size)).any(dim=1)


def _numbers(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    except (RuntimeError, TypeError):  # no arithmetic: float4 and other packed dtypes
        return None


def _apart(before: torch.Tensor, after: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Absolute differences."""
    apart = (new - old).abs()
    if before.dtype in (torch.int64, torch.uint64):  # above 2^53, neighbours are the same double
        exact = (after.view(torch.int64) - before.view(torch.int64)).double().abs()
        return torch.where(apart < _EXACT, exact, apart)
    return apart


def ulps(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """How many numbers of their dtype two floats are apart; None for what is no float, and for NaN.

    Args:
        one: A tensor of one element.
        other: Another one, of the same dtype.
    """
    size = one.dtype.itemsize
    if not one.is_floating_point() or size not in _INTEGERS or _numbers(one) is None:
        return None
    places = []
    for tensor in (one, other):
        if bool(torch.isnan(tensor.to(torch.float64)).any()):
            return None
        bits = int(tensor.reshape(1).view(_INTEGERS[size]).item()) & (1 << 8 * size) - 1
        sign = 1 << (8 * size - 1)
        unsigned = tensor.dtype == torch.float8_e8m0fnu
        places.append(bits if unsigned or bits < sign else sign - bits)
    return abs(places[0] - places[1])
