"""``dcp_plugin.inspect``, and contents of a checkpoint for people: modules by size, places of bytes, statistics.

:func:`inspect`, :func:`tree` and :func:`chunks` read no tensor. The inspection of a checkpoint of this package imports
no torch, since that takes longer than all else. The tree folds as ``du`` does. Layers that are alike
and follow each other, ``layers.0`` to ``layers.31``, become one line: a model of a hundred layers is a dozen lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_64_hexdigest

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointIncomplete, as_html, size, some
from dcp_plugin.core.format.index import NO_TENSOR, Entry, KeyColumns, StoredChunk, StoredTensor, StoredValue
from dcp_plugin.core.interrupts import collector_paused
from dcp_plugin.core.paths import PathLike, StorageOptions, Where, as_path
from dcp_plugin.core.records import OpenCheckpoint
from dcp_plugin.core.storage.open import check_files, open_checkpoint
from dcp_plugin.core.types import public_class

if TYPE_CHECKING:
    import torch

    from dcp_plugin.core.storage.reader import CheckpointReader
    from dcp_plugin.tools.stream import Globs, Progress

_AT_ONCE = 1 << 20
"""Number of elements converted together. Elements of one byte take eight times their memory."""
_DEEPEST = 100
"""The most levels of modules. Deeper keys are shown with their dots."""
_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d{0,8})(?!\d)")


class TensorInfo(NamedTuple):
    """A tensor of a checkpoint, as :func:`dcp_plugin.inspect` lists it. A checkpoint may have a million."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: int
    nbytes: int


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class CheckpointInfo:
    """Facts about a checkpoint, read without a model and without torch.distributed."""

    path: Where
    format: str
    """``"dcp_plugin"``, ``"stock"`` (any other writer of DCP checkpoints), ``"safetensors"``, ``"torch.save"``,
    ``"lightning"`` or ``"accelerate"``."""
    step: int | None
    time: float | None
    """Seconds since the epoch at which the checkpoint was published."""
    world_size: int | None
    tensors: list[TensorInfo]
    values: list[str]
    """Keys that hold no tensor."""
    nbytes: int
    """Unique payload bytes; aliases count once."""
    versions: dict[str, str]
    bytes_reused: int = 0
    """Bytes on disk that were linked from an earlier checkpoint instead of written."""
    base: str | None = None
    """Path of the checkpoint from which the tensors in ``left_out`` were loaded."""
    left_out: list[str] = field(default_factory=list)
    """Keys of frozen tensors that are not in the checkpoint (``trainable_only``)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics passed to the save, such as the validation loss. Some may not be finite."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Keys in data files that are missing or do not have the size of the save -> the reason. ``read`` reads others."""
    lacks: str = ""
    """The reason why ``read`` compares no checksums: ``dcp_plugin.json`` or ``dcp_plugin.index`` is lost."""

    _repr_html_ = as_html

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        writer = "" if self.world_size is None else f", written by {self.world_size} rank(s)"
        reused = f" ({size(self.bytes_reused)} linked)" if self.bytes_reused else ""
        metrics = "".join(f", {name} {value:g}" for name, value in list(self.metrics.items())[:4])
        base = f"; it leaves out {len(self.left_out)} tensors of {self.base}" if self.base else ""
        damaged = f"; {len(self.damaged)} keys are DAMAGED ({some(list(self.damaged), 3)})" if self.damaged else ""
        lacks = "; INCOMPLETE, so without checksums" if self.lacks else ""
        return (
            f"{self.path}: {self.format} checkpoint{step}{writer}, {len(self.tensors)} tensors and "
            f"{len(self.values)} values, {size(self.nbytes)}{reused}{metrics}{base}{damaged}{lacks}"
        )


@collector_paused()
def inspect(path: PathLike, storage_options: StorageOptions | None = None) -> CheckpointInfo:
    """Return the contents of a checkpoint. Read no tensor.

    Args:
        path: A checkpoint of this package, of stock DCP or of another tool: a path or a URL.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.

    Returns:
        Keys, shapes, dtypes and sizes in bytes; ``str()`` of it is one line.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: The checkpoint cannot be opened,
            or the path is that of a run.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.zeros(2, 3), "step": 1}, "run/step-1")
        >>> info = dcp_plugin.inspect("run/step-1")
        >>> info.tensors[0].key, info.tensors[0].shape, info.values
        ('w', (2, 3), ['step'])
    """
    location = as_path(path, storage_options)
    try:
        with closing(open_checkpoint(location, check=True)) as opened:
            return info_of(opened)
    except (CheckpointCorrupt, CheckpointIncomplete) as error:
        with closing(open_checkpoint(location, salvage=True)) as opened:
            lacks = str(error) if isinstance(error, CheckpointIncomplete) else ""
            if (damaged := _damaged(opened)) or lacks:
                return replace(info_of(opened), damaged=damaged, lacks=lacks)
        raise  # the damage is not in a data file


def _damaged(opened: OpenCheckpoint) -> dict[str, str]:
    """Return the keys whose data files are not as the save has left them, with the reason."""
    reasons: dict[str, str] = {}
    for name in opened.index.files:
        try:
            check_files(opened, [name])
        except CheckpointCorrupt as error:
            reasons[name] = str(error)
    return {
        key: reasons[place.location.file]
        for key in (opened.index if reasons else ())
        for place in _places(opened.index[key])
        if place.location.file in reasons
    }


def _places(entry: Entry) -> Sequence[StoredChunk]:
    return [StoredChunk((), (), entry.location)] if isinstance(entry, StoredValue) else entry.chunks


@collector_paused()
def info_of(opened: OpenCheckpoint) -> CheckpointInfo:
    """Return the result of :func:`inspect` for an open checkpoint."""
    index, summary = opened.index, opened.summary
    tensors, values = _listed(index.table)
    return CheckpointInfo(
        path=opened.path,
        format=opened.format,
        step=summary.step if summary else None,
        time=summary.time if summary else None,
        world_size=summary.world_size if summary else None,
        tensors=tensors,
        values=values,
        nbytes=summary.payload_bytes if summary else sum(tensor.nbytes for tensor in tensors),
        versions=dict(summary.versions) if summary else {},
        bytes_reused=int(summary.reused.get("bytes", 0)) if summary else 0,
        base=summary.base.get("path") if summary and index.left_out else None,
        left_out=list(index.left_out),
        metrics=dict(summary.metrics) if summary else {},
    )


def _listed(table: KeyColumns) -> tuple[list[TensorInfo], list[str]]:
    """Return the tensors of a checkpoint, and the keys of its values.

    The loop over columns is three times as fast as one over entries of the index.
    """
    is_value = table.columns["dtype"] == NO_TENSOR
    slots = np.flatnonzero(~is_value)
    keys = [table.keys[slot] for slot in slots.tolist()] if is_value.any() else table.keys
    numbers, shapes = table.columns["dtype"][slots].tolist(), table.shapes_of(slots)
    nbytes = map(mul, map(math.prod, shapes), table.itemsizes[numbers].tolist())
    chunks = np.diff(table.chunk_starts)[slots].tolist()
    columns = zip(keys, shapes, map(table.dtypes.__getitem__, numbers), chunks, nbytes, strict=True)
    tensors = list(map(TensorInfo._make, columns))
    return tensors, [table.keys[slot] for slot in np.flatnonzero(is_value).tolist()]


class TensorKind(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Node(NamedTuple):
    """A module, tensor or value, and everything below it."""

    name: str
    """The last segments of its key; of folded nodes, those of the first."""
    last: str
    """The last segments of the last folded node; empty if nothing is folded."""
    times: int
    """The number of folded nodes. The next fields are those of each of them."""
    nbytes: int
    tensors: int
    values: int
    tensor: TensorKind | None = None
    """The tensor, if nothing is below it."""
    children: tuple[Node, ...] = ()


_VALUE = -1
"""Placeholder for the number of a kind: the key is a value."""


@collector_paused()
def tree(info: CheckpointInfo) -> list[Node]:
    """Return the keys of a checkpoint as a tree, by their dots.

    Neighbours that are alike but for a number in their names become one node: those with equal names, shapes and dtypes
    below them.

    Returns:
        The nodes at the top, in the order of the checkpoint.

    Example:
        >>> import torch, dcp_plugin
        >>> layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        >>> dcp_plugin.save({"model": torch.nn.ModuleDict({"layers": layers})}, "run/step-1")
        >>> (model,) = tree(dcp_plugin.inspect("run/step-1"))
        >>> (folded,) = model.children
        >>> model.name, model.nbytes, folded.name, folded.last, folded.times, folded.nbytes
        ('model.layers', 864, '0', '2', 3, 288)
    """
    numbers: dict[tuple[tuple[int, ...], str, int], int] = {}
    kinds = [numbers.setdefault((t.shape, t.dtype, t.nbytes), len(numbers)) for t in info.tensors]
    kinds += [_VALUE] * len(info.values)
    keys = [*(tensor.key for tensor in info.tensors), *info.values]
    return _nodes(list(map(TensorKind._make, numbers)), keys, kinds)


def _nodes(all_kinds: list[TensorKind], keys: list[str], kinds: list[int], depth: int = 0) -> list[Node]:
    """Return the nodes of keys with these numbers of kinds.

    A module like the module before it gets no nodes: a checkpoint may have a million keys, and an object for each of
    them takes seconds.
    """
    nodes: list[Node] = []
    before: tuple[list[str], list[int]] | None = None
    split_before = ("", -1, "")
    for name, below in _grouped(keys, kinds, depth).items():
        split = _split(name)
        is_next = split == (split_before[0], split_before[1] + 1, split_before[2])
        if is_next and below == before and below != ([""], [_VALUE]):
            nodes[-1] = nodes[-1]._replace(last=name, times=nodes[-1].times + 1)
        else:
            nodes.append(_node(all_kinds, name, *below, depth))
        before, split_before = below, split
    return nodes


def _node(all_kinds: list[TensorKind], name: str, keys: list[str], kinds: list[int], depth: int) -> Node:
    if keys == [""] and kinds == [_VALUE]:
        return Node(name, "", 1, 0, 0, 1)
    if keys == [""]:
        tensor = all_kinds[kinds[0]]
        return Node(name, "", 1, tensor.nbytes, 1, 0, tensor)
    children = _nodes(all_kinds, keys, kinds, depth + 1)
    if len(children) == 1 and children[0].times == 1 and children[0].name:  # a module with a single entry
        return children[0]._replace(name=f"{name}.{children[0].name}")
    nbytes = sum(child.times * child.nbytes for child in children)
    tensors = sum(child.times * child.tensors for child in children)
    values = sum(child.times * child.values for child in children)
    return Node(name, "", 1, nbytes, tensors, values, children=tuple(children))


def _grouped(keys: list[str], kinds: list[int], depth: int) -> dict[str, tuple[list[str], list[int]]]:
    """Group keys by their first segment. The group has the rest of each key; empty for a key of one segment."""
    if depth >= _DEEPEST:
        return {key: ([""], [kind]) for key, kind in zip(keys, kinds, strict=True)}
    first = keys[0].partition(".")[0] if keys else ""
    if all(map(str.startswith, keys, repeat(f"{first}."))):  # 10 times as fast as the loop
        return {first: ([key[len(first) + 1 :] for key in keys], kinds)} if keys else {}
    groups: dict[str, tuple[list[str], list[int]]] = {}
    for key, kind in zip(keys, kinds, strict=True):
        name, _, below = key.partition(".")
        group = groups.get(name)
        if group is None:
            group = groups[name] = ([], [])
        group[0].append(below)
        group[1].append(kind)
    return groups


def _split(name: str) -> tuple[str, int, str]:
    match = _NUMBERED.match(name)
    return (match[1], int(match[2]), name[match.end() :]) if match else (name, -2, "")


@dataclass(frozen=True)
class ChunkInfo:
    """The place of a part of a tensor, or of a value, in a file."""

    key: str
    offsets: tuple[int, ...]
    """The first element of the part, in each dimension of the tensor."""
    sizes: tuple[int, ...]
    file: str
    offset: int
    """The first byte of the item in its file."""
    length: int
    """Bytes of the item."""
    xxh3: str
    """The XXH3-64 of the payload in hexadecimal digits, if it is one block (at most 64 KiB). Otherwise the XXH3-64 of
    the hashes of its blocks, each as 8 bytes, little-endian. Empty in checkpoints of other tools."""


def chunks(path: PathLike, include: Globs = (), storage_options: StorageOptions | None = None) -> list[ChunkInfo]:
    """Return the places and checksums of the bytes of some keys of a checkpoint.

    Args:
        include: Globs of keys; all if empty.

    Raises:
        CheckpointMismatch: A glob matches nothing.
        CheckpointError: The checkpoint cannot be opened.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.zeros(2, 3)}, "run/step-1")
        >>> (chunk,) = chunks("run/step-1", "w")
        >>> chunk.offsets, chunk.sizes, len(chunk.xxh3)
        ((0, 0), (2, 3), 16)
    """
    from dcp_plugin.tools.stream import select  # late, since it imports torch

    with closing(open_checkpoint(as_path(path, storage_options), check=True)) as opened:
        listed = []
        for key in select(opened.index, include, (), opened.path):
            listed += [_chunk(key, chunk) for chunk in _places(opened.index[key])]
    return listed


def _chunk(key: str, chunk: StoredChunk) -> ChunkInfo:
    at = chunk.location
    xxh3 = ""
    if at.hashes is not None:
        xxh3 = f"{at.hashes[0]:016x}" if len(at.hashes) == 1 else xxh3_64_hexdigest(at.hashes.tobytes())
    return ChunkInfo(key, tuple(chunk.offsets), tuple(chunk.sizes), at.file, at.offset, at.length, xxh3)


@dataclass(frozen=True)
class TensorStats:
    """Statistics of a tensor. ``low``, ``high``, ``mean`` and ``norm`` are those of its finite numbers; None if it has
    none, or if torch cannot compute them."""

    key: str
    shape: tuple[int, ...]
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
        wide = numbers.double()
        total = float(wide.sum())
        if not math.isfinite(total):  # NaN, infinity or overflow: only then examine each number
            finite = numbers.isfinite()
            nans = int(numbers.isnan().sum())
            self.nans += nans
            self.infs += numbers.numel() - int(finite.sum()) - nans
            numbers, wide = numbers[finite], wide[finite]
            total = float(wide.sum())
        if not numbers.numel():
            return
        low, high = (bound.item() for bound in numbers.aminmax())
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        self.total += total
        self.squares += float(wide.dot(wide))
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
    from dcp_plugin.core.storage.reader import CheckpointReader  # late, since they import torch
    from dcp_plugin.tools.stream import Counter, Part, Stream, select

    with CheckpointReader(path, storage_options=storage_options) as reader:
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


def _why_not(reader: CheckpointReader, key: str, dtype: torch.dtype) -> str:
    import torch

    from dcp_plugin.tools.stream import is_opaque

    if is_opaque(reader, key):
        return "it is of a class of its own, without elements"
    try:
        next(_numbers(torch.zeros(1, dtype=dtype, device="cpu")))
    except (RuntimeError, NotImplementedError, TypeError):
        return f"torch computes nothing with {dtype}"
    return ""


def _numbers(piece: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements as numbers that torch computes with: bools as 0 and 1, complex numbers as absolute values."""
    for part in piece.flatten().split(_AT_ONCE):  # type: ignore[no-untyped-call]
        if part.dtype.is_complex:
            yield part.cdouble().abs()
        elif part.dtype.is_floating_point:
            yield part.float() if part.dtype.itemsize == 1 else part
        elif part.dtype.itemsize == 8 and not part.dtype.is_signed:
            yield part.double()
        else:
            yield part.long()
