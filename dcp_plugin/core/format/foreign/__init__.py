"""Checkpoints of other tools: their files become an index, and a load continues as with our own.

========================  ==========================================================================================
format                    how it is recognised
========================  ==========================================================================================
safetensors               8 bytes of length and a JSON header; a directory with one, or with an index of shards
``torch.save``            a zip with a ``data.pkl``; also ``pytorch_model.bin``, alone or as an index of shards
Lightning's ``.ckpt``     a ``torch.save`` file with ``pytorch-lightning_version``
Accelerate's folder       ``pytorch_model_fsdp_0/``, ``pytorch_model_fsdp.bin``, or ``model.safetensors``
rank files                ``model_world_size_2_rank_0.pt``, …; ``pytorch_model_fsdp_0_rank0.bin``, …
DeepSpeed's folder        ``mp_rank_00_model_states.pt``, …; or the folder with it, and a file ``latest``
Lightning's directory     ``.metadata``, and a ``meta.pt`` with ``pytorch-lightning_version``
========================  ==========================================================================================

The rule: no code is executed, and no payload is read before a load asks for it. The contents decide, never a suffix.
The keys of the model begin with ``model.`` as in our own checkpoints; those of several with ``model_0.``, ``model_1.``.
Files may be links to files outside the directory, as in a snapshot of the Hugging Face cache. An index inside a
directory may only name plain files in that directory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from operator import add, attrgetter, mul
from typing import Any, NamedTuple

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointMismatch
from dcp_plugin.core.format import Files, expect
from dcp_plugin.core.format.index import NO_TENSOR, CheckpointIndex, Column, KeyColumns, KeyPath, Places, unusual_paths

_SAMPLES = 8
_SAMPLE = 512
_PLACE = 128


class View(NamedTuple):
    """Tensor in a file: its elements begin at ``start`` bytes and are ``strides`` elements apart.

    A tuple, because a file may have a million views: a frozen dataclass takes five times as long to make.
    """

    file: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """Strides in elements; None if row-major."""
    offsets: tuple[int, ...] | None = None
    """Offsets of this part in its tensor; None if it is the complete tensor."""

    @property
    def span(self) -> int:
        """Bytes from the first element to the last."""
        if 0 in self.shape:
            return 0
        if self.strides is None:
            return prod(self.shape) * self.dtype.itemsize
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (1 + last) * self.dtype.itemsize


@dataclass
class Contents:
    """Views and plain values by key, and the files with their sizes in bytes."""

    format: str
    files: dict[str, int]
    views: dict[str, View] = field(default_factory=dict)
    parts: dict[str, list[View]] = field(default_factory=dict)
    """Parts of tensors that are split over several files."""
    paths: dict[str, KeyPath] = field(default_factory=dict)
    """Paths of the keys that do not follow the default."""
    values: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    shares_bytes: bool = False
    """True if tensors may be views of the same bytes."""

    def add(self, other: Contents) -> Contents:
        """Add the contents of another file of the same checkpoint, and return this object.

        Raises:
            CheckpointMismatch: Both have a key.
        """
        twice = (self.views.keys() | self.values.keys()) & (other.views.keys() | other.values.keys())
        if twice:
            raise CheckpointMismatch(
                f"{min(twice)} is stored twice: in {', '.join(self.files)} and in {', '.join(other.files)}"
            )
        self.files.update(other.files)
        self.views.update(other.views)
        self.paths.update(other.paths)
        self.values.update(other.values)
        self.kinds.update(other.kinds)
        self.shares_bytes |= other.shares_bytes
        return self

    def index(self, label: str) -> CheckpointIndex:
        """Return the index, validated against the sizes of the files. ``label`` is the checkpoint's name in messages.

        Raises:
            CheckpointCorrupt: A tensor is outside its file, or at an offset that its format forbids.
        """
        chunks = [*self.views.values(), *chain.from_iterable(self.parts.values())]
        table, places = self._table(chunks), self._places(chunks)
        index = CheckpointIndex.of(table, places, self.files)
        try:
            index.validate(label, shares_bytes=self.shares_bytes)
        except CheckpointCorrupt as error:
            raise CheckpointCorrupt(f"{error}. Is a file missing?" if self.parts else str(error)) from error
        index.strides = {
            key: {(view.file, view.start): view.strides} for key, view in self.views.items() if view.strides is not None
        }
        for key, parts in self.parts.items():
            if any(part.strides is not None for part in parts):
                index.strides[key] = {(p.file, p.start): p.strides or _row_major(p.shape) for p in parts}
        index.values_here = self.values
        return index

    def _table(self, chunks: list[View]) -> KeyColumns:
        """Return the columns of the keys: those of views, of tensors in parts, of values."""
        # map() and chain() over attributes: no loop in Python runs over the views, of which a file may have a million.
        tensors = [*self.views.values(), *map(_joined, self.parts.values())] if self.parts else chunks
        dtypes, shapes = list(map(_DTYPE, tensors)), list(map(_SHAPE, tensors))
        names = {dtype: str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes)}
        numbers = {dtype: number for number, dtype in enumerate(names)}
        placeholders = [0] * len(self.values)
        counts = [1] * len(self.views) + [len(parts) for parts in self.parts.values()] + [1] * len(placeholders)
        begins = [offsets or (0,) * len(sizes) for _, _, _, sizes, _, offsets in chunks]
        boxes = chain.from_iterable(zip(begins, map(_SHAPE, chunks), strict=True))
        columns: dict[str, Column] = {
            "dtype": np.array([*map(numbers.__getitem__, dtypes), *(NO_TENSOR for _ in placeholders)], np.uint8),
            "ndim": np.array([*map(len, shapes), *placeholders], np.uint8),
            "shape": np.array(list(chain.from_iterable(shapes)), np.int64),
            "box_ends": np.cumsum(counts, dtype=np.int64),
            "box_count": np.ones(sum(counts), np.int32),
            "box": np.array(list(chain.from_iterable(boxes)), np.int64),
        }
        keys = [*self.views, *self.parts, *self.values]
        return KeyColumns(keys, list(names.values()), unusual_paths(self.paths), columns)

    def _places(self, chunks: list[View]) -> Places:
        """Return the places of chunks. A value has no place, and a row of zeros."""
        numbers = {name: number for number, name in enumerate(self.files)}
        count = len(chunks)
        place = np.zeros((count + len(self.values), 4), np.int64)
        file = np.zeros(len(place), np.int32)
        file[:count] = list(map(numbers.__getitem__, map(_FILE, chunks)))
        place[:count, 0] = list(map(_START, chunks))
        itemsizes = map({dtype: dtype.itemsize for dtype in set(map(_DTYPE, chunks))}.__getitem__, map(_DTYPE, chunks))
        strided = [number for number, strides in enumerate(map(_STRIDES, chunks)) if strides is not None]
        spans = list(map(mul, map(prod, map(_SHAPE, chunks)), itemsizes))
        for number in strided:
            spans[number] = chunks[number].span
        place[:count, 1] = place[:count, 3] = spans
        # Tensors that are not row-major, and values, count as items of unknown layout.
        place[[*strided, *range(count, len(place))], 2:] = -1, 0
        return Places.without_hashes(list(self.files), file, place)


_FILE, _START, _DTYPE, _SHAPE, _STRIDES = map(attrgetter, ("file", "start", "dtype", "shape", "strides"))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides in elements of a tensor whose rows follow each other."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _joined(parts: list[View]) -> View:
    """Return the tensor that consists of these parts, without its place."""
    ends = [map(add, part.offsets or (), part.shape) for part in parts]
    return View("", 0, parts[0].dtype, tuple(map(max, zip(*ends, strict=True))))


def fingerprint_of(files: Files, contents: Contents) -> str:
    """Return a digest of the files: their sizes, the names and places of all tensors, and a few bytes of each.

    The files have no checksums to compare, and reading every byte would cost as much as the load. A training changes a
    tensor nearly everywhere, so samples show it. A single flipped bit goes unnoticed. Optimizers do not count, because
    no save leaves out their state for a base; earlier checkpoints identify their base without them.
    """
    digest = hashlib.sha256()
    optimizers = tuple(f"{name}." for name, kind in contents.kinds.items() if kind == "optimizer")
    views = sorted((key, view) for key, view in contents.views.items() if not key.startswith(optimizers))
    views += [(key, part) for key, parts in sorted(contents.parts.items()) for part in parts]
    for name, size in sorted(contents.files.items()):
        digest.update(size.to_bytes(8, "little"))
        samples = [(b"", max(0, size - _SAMPLE) * number // (_SAMPLES - 1), _SAMPLE) for number in range(_SAMPLES)]
        for key, view in views:
            if view.file == name:
                layout = key, view.start, view.dtype, view.shape, view.strides
                description = repr(layout if view.offsets is None else (*layout, view.offsets)).encode()
                span = view.span
                # A sample at the begin, in the middle and at the end; the description is hashed once, with the first.
                for start in (0, (span - _PLACE) // 2, span - _PLACE):
                    samples.append((description, view.start + max(0, start), min(_PLACE, span)))
                    description = b""
        with files.open(name) as file:
            expect(file, [(start, min(start + count, size)) for _, start, count in samples if count])
            for description, start, count in samples:
                digest.update(description)
                if count:
                    file.seek(start)
                    digest.update(file.read(count))
    return digest.hexdigest()
