"""Find the places at which two values of a checkpoint differ. The values themselves are no tensors."""

from __future__ import annotations

import reprlib
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dcp_plugin.tools import amounts

_MOST_PAIRS = 1_000_000
"""Largest number of pairs of parts to compare: a small file may unfold into more than there is time for."""


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
    yield Leaf(pairs[0].at if pairs else "", "too much to compare", "too much to compare")


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
        return amounts.equal(old.detach().contiguous(), new.detach().contiguous())
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
