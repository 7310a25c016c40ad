"""Statistics of a checkpoint's tensors: smallest and largest number, mean, norm, and counts of NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from dcp_plugin.format.index import StoredTensor
from dcp_plugin.paths import PathLike, StorageOptions
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tools.stream import Counter, Globs, Part, Progress, Stream, is_opaque, select
from dcp_plugin.types import Shape

_AT_ONCE = 1 << 20
"""Number of elements converted together. Elements of one byte take eight times their memory."""


@dataclass(frozen=True)
class TensorStats:
    """Statistics of a tensor. ``low``, ``high``, ``mean`` and ``norm`` are those of its finite numbers; None if it has
    none, or if torch cannot compute them."""

    key: str
    shape: Shape
    dtype: str
    low: float | int | None = None
    """The smallest number; for complex numbers, the smallest absolute value."""
    high: float | int | None = None
    mean: float | None = None
    norm: float | None = None
    """The root of the sum of squares."""
    nans: int | None = None
    infs: int | None = None
    why_not: str = ""
    """The reason if torch cannot compute them."""


@dataclass
class _Running:
    low: float | int | None = None
    high: float | int | None = None
    total: float = 0.0
    squares: float = 0.0
    count: int = 0
    nans: int = 0
    infs: int = 0

    def add(self, numbers: torch.Tensor) -> None:
        wide = numbers.to(torch.float64)
        total = float(wide.sum())
        if not math.isfinite(total):  # NaN, infinity or overflow: only then examine each number
            finite = torch.isfinite(numbers)
            nans = int(torch.isnan(numbers).sum())
            self.nans += nans
            self.infs += numbers.numel() - int(finite.sum()) - nans
            numbers, wide = numbers[finite], wide[finite]
            total = float(wide.sum())
        if not numbers.numel():
            return
        low, high = (bound.item() for bound in torch.aminmax(numbers))
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        self.total += total
        self.squares += float(torch.dot(wide, wide))
        self.count += numbers.numel()

    def added_to(self, stats: TensorStats) -> TensorStats:
        """Return the statistics with these numbers."""
        mean = self.total / self.count if self.count else None
        norm = math.sqrt(self.squares) if self.count else None
        return replace(stats, low=self.low, high=self.high, mean=mean, norm=norm, nans=self.nans, infs=self.infs)


def statistics(
    path: PathLike,
    include: Globs = (),
    exclude: Globs = (),
    storage_options: StorageOptions | None = None,
    progress: Progress | None = None,
) -> list[TensorStats]:
    """Return statistics of a checkpoint's tensors. Memory does not grow with the checkpoint.

    Args:
        include: Globs of keys; all if empty.
        exclude: Globs of keys to leave out.
        progress: Called with bytes read, and bytes in all.

    Raises:
        CheckpointMismatch: A glob matches nothing.
        CheckpointError: The checkpoint cannot be opened, or its bytes do not match their checksums.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.tensor([3.0, -4.0, float("nan")])}, "run/step-1")
        >>> (stats,) = statistics("run/step-1")
        >>> stats.low, stats.high, stats.mean, stats.norm, stats.nans, stats.infs
        (-4.0, 3.0, -0.5, 5.0, 1, 0)
    """
    with ShardedReader(path, complete=False, storage_options=storage_options) as reader:
        selected = select(reader.index, include, exclude, reader.path)
        reader.index.require_bounded(selected)
        stored = {key: entry for key in selected if isinstance(entry := reader.index[key], StoredTensor)}
        why_not = {key: _why_not(reader, key, tensor.dtype) for key, tensor in stored.items()}
        parts = [Part.of(reader, key) for key in stored if not why_not[key]]
        stream = Stream(reader, parts)
        running = {part.key: _Running() for part in parts}
        count = Counter(stream.nbytes, progress)
        for piece in stream:
            for numbers in _numbers(piece.tensor):
                running[parts[piece.part].key].add(numbers)
            count.add(piece.tensor.nbytes)
    result = []
    for key, tensor in stored.items():
        stats = TensorStats(key, tensor.shape, str(tensor.dtype).removeprefix("torch."), why_not=why_not[key])
        result.append(running[key].added_to(stats) if key in running else stats)
    return result


def _why_not(reader: ShardedReader, key: str, dtype: torch.dtype) -> str:
    if is_opaque(reader, key):
        return "it is of a class of its own, without elements"
    try:
        next(_numbers(torch.zeros(1, dtype=dtype, device="cpu")))
    except (RuntimeError, NotImplementedError, TypeError):
        return f"torch computes nothing with {dtype}"
    return ""


def _numbers(piece: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements as numbers that torch computes with: bools as 0 and 1, complex numbers as absolute values."""
    for part in torch.split(piece.flatten(), _AT_ONCE):
        if part.dtype.is_complex:
            yield part.to(torch.complex128).abs()
        elif part.dtype.is_floating_point:
            yield part.to(torch.float32) if part.dtype.itemsize == 1 else part
        elif part.dtype == torch.uint64:
            yield part.to(torch.float64)
        else:
            yield part.to(torch.int64)
