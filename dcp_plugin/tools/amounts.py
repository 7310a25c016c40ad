"""Compare two tensors, or two values that are no tensors.

Tensors are measured piece by piece. Elements are equal if their bytes are equal: a NaN equals itself, and -0.0 is not
0.0. Differences are computed in double precision; 64-bit integers are subtracted before the conversion. An element that
is NaN or infinite on either side has no difference, and is counted instead. Values are compared part by part.
"""

from __future__ import annotations

import reprlib
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import hypot, inf, isfinite
from typing import Any

import numpy as np
import torch

_AT_ONCE = 1 << 20
"""Number of elements that are converted together."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = 2.0**62
"""Bound below which differences of integers do not overflow."""
_MOST_PAIRS = 1_000_000
"""Largest number of pairs of parts to compare: a small file may unfold into more than there is time for."""


@dataclass(frozen=True)
class Amount:
    """The change of one or several tensors from A to B."""

    elements: int = 0
    differ: int = 0
    """Number of elements whose bytes differ."""
    largest: float | None = None
    """The largest absolute difference; None if no two finite numbers differ, or the dtype has no arithmetic."""
    difference: float = 0.0
    """The Euclidean norm of B - A, over elements that are finite in both."""
    norm: float = 0.0
    """The Euclidean norm of the finite elements of A."""
    not_finite: int = 0
    """Number of differing elements that are NaN or infinite on at least one side."""

    @property
    def share(self) -> float:
        """The share of elements that differ, between 0 and 1."""
        return self.differ / self.elements if self.elements else 0.0

    @property
    def relative(self) -> float:
        """The norm of the difference divided by the norm of A; infinite if only the norm of A is zero."""
        if not self.difference:
            return 0.0
        return self.difference / self.norm if self.norm else inf

    def __add__(self, other: Amount) -> Amount:
        bounds = [bound for bound in (self.largest, other.largest) if bound is not None]
        return Amount(
            self.elements + other.elements,
            self.differ + other.differ,
            max(bounds) if bounds else None,
            hypot(self.difference, other.difference),
            hypot(self.norm, other.norm),
            self.not_finite + other.not_finite,
        )


def difference(first: torch.Tensor, second: torch.Tensor) -> Amount:
    """Measure by how much two host tensors of the same dtype and number of elements differ."""
    total = Amount()
    slices = (torch.split(tensor.reshape(-1), _AT_ONCE) for tensor in (first, second))
    for before, after in zip(*slices, strict=True):
        differs = differing(before, after)
        count = int(differs.sum())
        total += Amount(before.numel(), norm=_norm(before))
        if count:  # usually few differ: only these are converted
            total += _of_differing(before[differs], after[differs])
    return total


def _norm(tensor: torch.Tensor) -> float:
    """Return the Euclidean norm of the finite elements."""
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:  # takes half the time of a copy in double precision
        norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
        if isfinite(norm):
            return norm
    numbers = _numbers(tensor)
    return 0.0 if numbers is None else float(torch.linalg.vector_norm(numbers[torch.isfinite(numbers)]))


def _of_differing(before: torch.Tensor, after: torch.Tensor) -> Amount:
    """Measure elements that all differ. The caller has counted them in ``elements``."""
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


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two contiguous tensors of the same dtype and size have the same bytes."""
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def differing(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements of two flat, contiguous tensors that have different bytes."""
    size = first.dtype.itemsize
    if size in _INTEGERS:
        return first.view(_INTEGERS[size]) != second.view(_INTEGERS[size])
    return (first.view(torch.uint8).view(-1, size) != second.view(torch.uint8).view(-1, size)).any(dim=1)


def _numbers(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    except (RuntimeError, TypeError):  # no arithmetic: float4 and other packed dtypes
        return None


def _apart(before: torch.Tensor, after: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences."""
    apart = (new - old).abs()
    if before.dtype in (torch.int64, torch.uint64):  # above 2^53, neighbours are the same double
        exact = (after.view(torch.int64) - before.view(torch.int64)).double().abs()
        return torch.where(apart < _EXACT, exact, apart)
    return apart


def ulps(first: torch.Tensor, second: torch.Tensor) -> int | None:
    """Return the distance between two floats in numbers of their dtype; None for NaN and for other dtypes.

    Args:
        first: A tensor of one element.
        second: Another tensor of one element and the same dtype.
    """
    size = first.dtype.itemsize
    if not first.is_floating_point() or size not in _INTEGERS or _numbers(first) is None:
        return None
    places = []
    for tensor in (first, second):
        if bool(torch.isnan(tensor.to(torch.float64)).any()):
            return None
        bits = int(tensor.reshape(1).view(_INTEGERS[size]).item()) & (1 << 8 * size) - 1
        sign = 1 << (8 * size - 1)
        unsigned = tensor.dtype == torch.float8_e8m0fnu
        places.append(bits if unsigned or bits < sign else sign - bits)
    return abs(places[0] - places[1])


@dataclass(frozen=True)
class Missing:
    """Placeholder for a part that one of the two values lacks."""

    def __repr__(self) -> str:
        return "nothing"


@dataclass(frozen=True)
class Leaf:
    """A part of two values that differs."""

    at: str
    """The place of the part, as Python writes it: ``['lr'][0]``. Empty for the value itself."""
    old: Any
    new: Any


def differences(old: Any, new: Any) -> Iterator[Leaf]:
    """Yield the parts that differ, in order.

    Mappings are compared by key, sequences by position, and tensors by their bytes.
    """
    pairs = deque([Leaf("", old, new)])
    seen: set[tuple[int, int]] = set()
    for _ in range(_MOST_PAIRS):
        if not pairs:
            return
        pair = pairs.popleft()
        inner = _parts(pair)
        if inner is None:
            if not _same(pair.old, pair.new):
                yield pair
        elif (names := (id(pair.old), id(pair.new))) not in seen:  # a list may contain itself
            seen.add(names)
            pairs.extendleft(reversed(inner))
    if pairs:
        yield Leaf(pairs[0].at, "too much to compare", "too much to compare")


def _parts(pair: Leaf) -> list[Leaf] | None:
    """Return the pairs of parts of two containers of a kind; None for other values, which are compared in full."""
    old, new, nothing = pair.old, pair.new, Missing()
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = dict.fromkeys((*old, *new))
        return [Leaf(f"{pair.at}[{short(key)}]", old.get(key, nothing), new.get(key, nothing)) for key in keys]
    if isinstance(old, (list, tuple, deque)) and type(old) is type(new):
        count = max(len(old), len(new))
        padded = [[*items, *[nothing] * (count - len(items))] for items in (old, new)]
        return [Leaf(f"{pair.at}[{at}]", *sides) for at, sides in enumerate(zip(*padded, strict=True))]
    return None


def _same(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    if isinstance(old, torch.Tensor):
        return _same_tensor(old, new)
    if isinstance(old, (np.ndarray, np.generic)):
        same = old.dtype == new.dtype and old.shape == new.shape
        return bool(same and (old.tolist() == new.tolist() if old.dtype.hasobject else old.tobytes() == new.tobytes()))
    if isinstance(old, float):
        return struct.pack("d", old) == struct.pack("d", new) or (old != old and new != new)
    try:
        return bool(old == new)
    except Exception:  # the __eq__ of a class may raise anything
        return False


def _same_tensor(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old.dtype != new.dtype or old.shape != new.shape or old.layout != new.layout:
        return False
    try:
        return equal(old.detach().contiguous(), new.detach().contiguous())
    except (RuntimeError, NotImplementedError):  # sparse or quantized
        return str(old) == str(new)


class _Short(reprlib.Repr):
    """Short representations of values, with dtype and shape in place of a tensor's elements."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60
        self.maxlong = 40

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, torch.Tensor):
            sizes = " x ".join(map(str, x.shape))
            return f"tensor({str(x.dtype).removeprefix('torch.')}{', ' if sizes else ''}{sizes})"
        if isinstance(x, np.ndarray):
            return f"array({x.dtype}, {' x '.join(map(str, x.shape))})"
        return super().repr1(x, level)


_SHORT = _Short()


def short(value: Any) -> str:
    """Return a representation of a value that is shorter than a line."""
    try:
        return _SHORT.repr(value)
    except Exception:  # the __repr__ of a class may raise anything
        return f"a {type(value).__name__}"
