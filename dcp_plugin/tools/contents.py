"""What is in a checkpoint, for people: modules by size, where the bytes of a tensor are, and what its numbers are like.

The tree folds as ``du`` does. Layers that are alike and follow each other, ``layers.0`` to ``layers.31``, become one
line: a model of a hundred layers is a dozen lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dcp_plugin.format.index import CheckpointIndex, StoredChunk, StoredTensor, StoredValue
from dcp_plugin.paths import PathLike, StorageOptions
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tensors.host_memory import collector_paused
from dcp_plugin.tools import keys
from dcp_plugin.tools.stream import Part, Progress, Stream
from dcp_plugin.types import CheckpointInfo, Shape, TensorInfo

_AT_ONCE = 1 << 20
"""Elements that are looked at together: those of one byte become eight times as many."""
_DEEPEST = 100
"""Modules in each other. What is deeper is shown with its dots."""
_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d{0,8})(?!\d)")


class Node(NamedTuple):
    """A module, or one of its tensors and values, and all below it."""

    name: str
    """The last segments of its key; of several that are folded into one, those of the first."""
    last: str
    """Those of the last of these; empty if it is one."""
    times: int
    """How many are folded into this one. What follows is of each of them."""
    nbytes: int
    tensors: int
    values: int
    tensor: TensorInfo | None = None
    """What it is, if nothing is below it."""
    children: tuple[Node, ...] = ()


_Names = dict[str, Any]
"""What is below a module by the next segment of its keys: such a dict, a tensor, or None for a value."""


def tree(info: CheckpointInfo, fold: bool = True) -> list[Node]:
    """The keys of a checkpoint as a tree, by their dots.

    Args:
        fold: Make one node of neighbours that are alike but for a number in their names: equal names, shapes and
            dtypes below them.

    Returns:
        What is at the top, in the order of the checkpoint.

    Example:
        >>> import torch, dcp_plugin
        >>> layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        >>> dcp_plugin.save({"model": torch.nn.ModuleDict({"layers": layers})}, "run/step-1")
        >>> (model,) = tree(dcp_plugin.inspect("run/step-1"))
        >>> (folded,) = model.children
        >>> model.name, model.nbytes, folded.name, folded.last, folded.times, folded.nbytes
        ('model.layers', 864, '0', '2', 3, 288)
    """
    names: _Names = {}
    modules: dict[str, _Names] = {"": names}
    with collector_paused():
        for tensor in info.tensors:
            _put(modules, tensor.key, tensor)
        for key in info.values:
            _put(modules, key, None)
        return _Tree(fold).nodes(names)


def _put(modules: dict[str, _Names], key: str, what: TensorInfo | None) -> None:
    above, _, name = key.rpartition(".")
    if above.count(".") > _DEEPEST:  # no model is like that
        *first, name = key.split(".", _DEEPEST)
        above = ".".join(first)
    names = modules.get(above)
    if names is None:
        names = _module(modules, above)
    there = names.get(name)
    if isinstance(there, dict):
        there[""] = what
    else:
        names[name] = what


def _module(modules: dict[str, _Names], path: str) -> _Names:
    names = modules[""]
    for name in path.split("."):
        inner = names.get(name)
        if not isinstance(inner, dict):  # a key may be that of a tensor, and the beginning of others
            inner = names[name] = {"": inner} if name in names else {}
        names = inner
    modules[path] = names
    return names


class _Tree:
    """Makes the nodes. What is alike has the same number; of 10 000 layers that are, one becomes a node."""

    def __init__(self, fold: bool) -> None:
        self._fold = fold
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, int] = {}
        """Of the modules, by their identity."""

    def nodes(self, names: _Names) -> list[Node]:
        found: list[Node] = []
        before, last = -1, ("", -1, "")
        for name, what in names.items():
            alike = self._alike(what) if self._fold else -1
            split = _split(name) if alike >= 0 else last
            if alike >= 0 and alike == before and split == (last[0], last[1] + 1, last[2]):
                found[-1] = found[-1]._replace(last=name, times=found[-1].times + 1)
            else:
                found.append(self._node(name, what))
            before, last = alike, split
        return found

    def _alike(self, what: Any) -> int:
        """Equal for what can be folded; negative for a value, of which nothing is known."""
        if what is None:
            return -1
        if not isinstance(what, dict):
            return self._numbers.setdefault((what.shape, what.dtype, None), len(self._numbers))
        if id(what) not in self._known:
            key = tuple((name, self._alike(below)) for name, below in what.items())
            self._known[id(what)] = self._numbers.setdefault(key, len(self._numbers))
        return self._known[id(what)]

    def _node(self, name: str, what: Any) -> Node:
        if what is None:
            return Node(name, "", 1, 0, 0, 1)
        if not isinstance(what, dict):
            return Node(name, "", 1, what.nbytes, 1, 0, what)
        children = self.nodes(what)
        if len(children) == 1 and children[0].times == 1 and children[0].name:  # a module in a module, nothing else
            return children[0]._replace(name=f"{name}.{children[0].name}")
        nbytes = sum(child.times * child.nbytes for child in children)
        tensors = sum(child.times * child.tensors for child in children)
        values = sum(child.times * child.values for child in children)
        return Node(name, "", 1, nbytes, tensors, values, children=tuple(children))


def _split(name: str) -> tuple[str, int, str]:
    found = _NUMBERED.match(name)
    return (found[1], int(found[2]), name[found.end() :]) if found else (name, -2, "")


@dataclass(frozen=True)
class ChunkInfo:
    """Where a part of a tensor, or a value, is."""

    key: str
    offsets: Shape
    """Where it begins in the tensor."""
    sizes: Shape
    file: str
    offset: int
    """Of the item in its file, in bytes."""
    length: int
    """Of the item, in bytes."""
    crc32: str
    """Of the payload, in hexadecimal digits; empty if there is none, as in checkpoints of other tools."""
    xxh3: str
    """The XXH3-128 of the payload, if its writer computed it: of what had not changed since an earlier save."""


def chunks(
    path: PathLike, include: str | Iterable[str] = (), storage_options: StorageOptions | None = None
) -> list[ChunkInfo]:
    """Where the bytes of some keys of a checkpoint are, and their checksums.

    Args:
        include: Globs of keys; all if there is none.

    Raises:
        CheckpointMismatch: A glob matches nothing.
        CheckpointError: The checkpoint cannot be opened.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.zeros(2, 3)}, "run/step-1")
        >>> (chunk,) = chunks("run/step-1", "w")
        >>> chunk.offsets, chunk.sizes, len(chunk.crc32)
        ((0, 0), (2, 3), 8)
    """
    with ShardedReader(path, complete=False, storage_options=storage_options) as reader:
        index = reader.index
        selected = keys.select(index, include, (), reader.path)
        return [_chunk(key, chunk) for key in selected for chunk in _chunks_of(index, key)]


def _chunks_of(index: CheckpointIndex, key: str) -> Sequence[StoredChunk]:
    entry = index[key]
    return [StoredChunk((), (), entry.location)] if isinstance(entry, StoredValue) else entry.chunks


def _chunk(key: str, chunk: StoredChunk) -> ChunkInfo:
    at = chunk.location
    crc = "" if at.checksums is None else f"{int(at.checksums[-1]) if len(at.checksums) else 0:08x}"
    xxh3 = at.hash.hex() if at.hash else ""
    return ChunkInfo(key, tuple(chunk.offsets), tuple(chunk.sizes), at.file, at.offset, at.length, crc, xxh3)


@dataclass(frozen=True)
class TensorStats:
    """What the numbers of a tensor are like. ``low``, ``high``, ``mean`` and ``norm`` are of those that are finite;
    None if there is none, or if nobody can tell."""

    key: str
    shape: Shape
    dtype: str
    low: float | int | None = None
    """The smallest. Of complex numbers, the absolute values are compared."""
    high: float | int | None = None
    mean: float | None = None
    norm: float | None = None
    """The root of the sum of squares."""
    nans: int | None = None
    infs: int | None = None
    why_not: str = ""
    """Why nothing is known."""


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
        if not math.isfinite(total):  # then, and then alone, is a look at each worth its time
            finite = torch.isfinite(numbers)
            nans = int(torch.isnan(numbers).sum())
            self.nans += nans
            self.infs += numbers.numel() - int(finite.sum()) - nans
            numbers, wide = numbers[finite], wide[finite]
            total = float(wide.sum())
        if not numbers.numel():
            return
        low, high = (one.item() for one in torch.aminmax(numbers))
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        self.total += total
        self.squares += float(torch.dot(wide, wide))
        self.count += numbers.numel()

    def stats(self, key: str, stored: StoredTensor, dtype: str) -> TensorStats:
        mean = self.total / self.count if self.count else None
        norm = math.sqrt(self.squares) if self.count else None
        return TensorStats(key, stored.shape, dtype, self.low, self.high, mean, norm, self.nans, self.infs)


def statistics(
    path: PathLike,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    storage_options: StorageOptions | None = None,
    progress: Progress | None = None,
) -> list[TensorStats]:
    """What the numbers of a checkpoint's tensors are like, in memory that does not grow with them.

    Args:
        include: Globs of keys; all if there is none.
        exclude: Globs of keys to leave out.
        progress: Called with bytes read, and bytes in all.

    Raises:
        CheckpointMismatch: A glob matches nothing.
        CheckpointError: The checkpoint cannot be opened, or its bytes are not those that were saved.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.tensor([3.0, -4.0, float("nan")])}, "run/step-1")
        >>> (stats,) = statistics("run/step-1")
        >>> stats.low, stats.high, stats.mean, stats.norm, stats.nans, stats.infs
        (-4.0, 3.0, -0.5, 5.0, 1, 0)
    """
    with ShardedReader(path, complete=False, storage_options=storage_options) as reader:
        selected = keys.select(reader.index, include, exclude, reader.path)
        reader.index.require_bounded(selected)
        entries = {key: reader.index[key] for key in selected}
        stored = {key: one for key, one in entries.items() if isinstance(one, StoredTensor)}
        why_not = {key: _why_not(one, reader.opened.format) for key, one in stored.items()}
        parts = [Part.whole(key, one) for key, one in stored.items() if not why_not[key]]
        stream = Stream(reader, parts)
        running = {part.key: _Running() for part in parts}
        done = 0
        for piece in stream:
            for numbers in _numbers(piece.tensor):
                running[parts[piece.part].key].add(numbers)
            done += piece.tensor.nbytes
            if progress is not None:
                progress(done, stream.nbytes)
    found = []
    for key, one in stored.items():
        dtype = str(one.dtype).removeprefix("torch.")
        unknown = TensorStats(key, one.shape, dtype, why_not=why_not[key])
        found.append(running[key].stats(key, one, dtype) if key in running else unknown)
    return found


def _why_not(stored: StoredTensor, form: str) -> str:
    if stored.stored_whole and form == "dcp_plugin":
        return "it is of a class of its own, without elements"
    try:
        next(_numbers(torch.zeros(1, dtype=stored.dtype)))
    except (RuntimeError, NotImplementedError, TypeError):
        return f"torch computes nothing with {stored.dtype}"
    return ""


def _numbers(piece: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements, some at a time, as what torch computes with: bool as 0 and 1, of complex the absolute values."""
    for some in torch.split(piece.flatten(), _AT_ONCE):
        if some.dtype.is_complex:
            yield some.to(torch.complex128).abs()
        elif some.dtype.is_floating_point:
            yield some.to(torch.float32) if some.dtype.itemsize == 1 else some
        elif some.dtype == torch.uint64:
            yield some.to(torch.float64)
        else:
            yield some.to(torch.int64)
