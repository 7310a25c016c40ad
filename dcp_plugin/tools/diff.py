"""``dcp_plugin.diff``: what differs between two checkpoints, and how much.

What is stored in equal chunks with checksums on both sides is decided by these, and not read
(:mod:`~dcp_plugin.tools.agreement`). The rest is read from both, in step, within bounded memory; and so are the tensors
that differ, to tell how much (:mod:`~dcp_plugin.tools.amounts`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from xxhash import xxh3_128, xxh3_128_digest

from dcp_plugin.errors import CheckpointMismatch, UnsafeCheckpoint
from dcp_plugin.format.index import StoredTensor, StoredValue
from dcp_plugin.paths import PathLike, StorageOptions, Where
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tools import keys
from dcp_plugin.tools.agreement import Agreement, paired, signatures
from dcp_plugin.tools.amounts import Amount, difference, equal
from dcp_plugin.tools.leaves import differences, short
from dcp_plugin.tools.read import read_keys
from dcp_plugin.tools.stream import Part, Progress, Stream
from dcp_plugin.types import Shape

_WINDOW = 32 << 20
"""Bytes of each of the two windows of each of the two streams."""
_MOST_LEAVES = 1000
"""Parts of a value that differ, which are counted."""
_VALUE = "value"
"""What a key has in place of a dtype if it is no tensor."""


@dataclass(frozen=True)
class Reshaped:
    """A key whose tensors have different shapes."""

    key: str
    old: Shape
    new: Shape


@dataclass(frozen=True)
class Retyped:
    """A key whose tensors have different dtypes; ``"value"`` stands for what is no tensor."""

    key: str
    old: str
    new: str


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor whose bytes differ; dtype and shape are the same."""

    key: str
    shape: Shape
    dtype: str
    nbytes: int
    decided: Literal["checksums", "bytes"]
    """How that was found: ``"checksums"`` without reading it, ``"bytes"`` by reading both."""
    amount: Amount | None = None
    """How much; None where that was not asked for, or the tensor is of a class of its own."""


@dataclass(frozen=True)
class ChangedValue:
    """What is no tensor, and differs."""

    key: str
    at: str
    """The first part of it that differs, as Python writes it: ``['lr'][0]``; empty if that is all of it."""
    old: str
    """That part in A, in short."""
    new: str
    parts: int
    """How many parts differ; at most 1000 are counted."""
    text: bool
    """Whether all of these are texts, as paths, names and dates are."""


@dataclass(frozen=True)
class CheckpointDiff:
    """What differs between two checkpoints. Keys are those of B; of what only A has, those of A."""

    a: Where
    b: Where
    added: list[str]
    """Keys that only B has."""
    removed: list[str]
    """Keys that only A has."""
    renamed: dict[str, str]
    """Keys of A that are under another key in B: same dtype, shape and bytes."""
    reshaped: list[Reshaped]
    retyped: list[Retyped]
    changed: list[ChangedTensor]
    values: list[ChangedValue]
    unchanged: int
    """Keys, values included, of the same bytes in both."""
    read: list[str]
    """Keys that were read to find whether they differ. The checksums have told of all others."""
    bytes_read: int
    """Of both together; to tell how much the tensors have changed, too."""
    elements: dict[str, int] = field(repr=False)
    """Of each tensor that both have in one dtype and shape, how many elements it has."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not any((self.added, self.removed, self.renamed, self.reshaped, self.retyped, self.changed, self.values))

    def modules(self, depth: int = 3) -> dict[str, tuple[int, int, Amount]]:
        """The modules with changed tensors: of each how many have changed, of how many, and how much together.

        Args:
            depth: Parts of a name that make a module. The last part, which is the tensor's own, is none of them.
        """
        tensors: dict[str, int] = defaultdict(int)
        elements: dict[str, int] = defaultdict(int)
        for key, count in self.elements.items():
            tensors[module := _module(key, depth)] += 1
            elements[module] += count
        found: dict[str, tuple[int, Amount]] = {}
        for tensor in self.changed:
            count, amount = found.get(module := _module(tensor.key, depth), (0, Amount()))
            found[module] = count + 1, amount + (tensor.amount or Amount())
        return {
            module: (count, tensors[module], amount + Amount(elements[module] - amount.elements))
            for module, (count, amount) in found.items()
        }

    def __str__(self) -> str:
        if self.equal:
            return f"{self.a} and {self.b} are equal: {self.unchanged} keys"
        counts = [
            (len(self.changed), "changed"),
            *((len(getattr(self, name)), name) for name in ("added", "removed", "renamed", "reshaped", "retyped")),
            (len(self.values), "values differ"),
        ]
        said = ", ".join(f"{count} {name}" for count, name in counts if count)
        return f"{self.a} and {self.b} differ: {said}, {self.unchanged} unchanged"


def _module(key: str, depth: int) -> str:
    parts = key.split(".")
    return ".".join(parts[: max(1, min(depth, len(parts) - 1))])


def diff(
    a: PathLike,
    b: PathLike,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    *,
    rename: Mapping[str, str] | None = None,
    amounts: bool = True,
    checksums: bool = True,
    io_threads: int = 2,
    storage_options: StorageOptions | None = None,
    progress: Progress | None = None,
) -> CheckpointDiff:
    """What differs between two checkpoints, whoever wrote them and however they are distributed.

    Args:
        a: The one that comes first.
        b: The one that it is compared with.
        include: Globs of keys, as B has them; all if there is none.
        exclude: Globs of keys to leave out.
        rename: Prefixes of A's keys -> what B has in their place.
        amounts: Whether to read the tensors that differ, and tell how much.
        checksums: Whether stored checksums may tell what is equal. Otherwise every byte is read.
        io_threads: Threads that read, of each.
        storage_options: How the store of a URL is reached, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with bytes read of tensors, and bytes in all.

    Returns:
        What differs; ``equal`` says whether nothing does. NaNs of the same bytes are equal.

    Raises:
        CheckpointMismatch: A glob matches nothing, a prefix is none of A's, or a tensor of a class of its own is stored
            in ways that cannot be compared.
        CheckpointError: One cannot be opened, or its bytes are not those that were saved.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.zeros(4), "step": 1}, "run/step-1")
        >>> dcp_plugin.save({"w": torch.tensor([0.0, 0.0, 0.5, 0.0]), "step": 2}, "run/step-2")
        >>> found = dcp_plugin.diff("run/step-1", "run/step-2")
        >>> found.changed[0].key, found.changed[0].amount.largest, found.changed[0].amount.share
        ('w', 0.5, 0.25)
        >>> found.values[0].old, found.values[0].new
        ('1', '2')
    """
    options: dict[str, Any] = {"io_threads": io_threads, "storage_options": storage_options}
    with ShardedReader(a, **options) as one, ShardedReader(b, **options) as other:
        selected = _Selected.of(one, other, include, exclude, rename or {})
        one.index.require_bounded([*selected.common.values(), *selected.removed])
        other.index.require_bounded([*selected.common, *selected.added])
        return _Comparison(one, other, selected, checksums, amounts, progress).result()


@dataclass(frozen=True)
class _Selected:
    """The keys that are compared."""

    common: dict[str, str]
    """B's name -> A's key."""
    removed: list[str]
    added: list[str]

    @classmethod
    def of(
        cls,
        one: ShardedReader,
        other: ShardedReader,
        include: str | Iterable[str],
        exclude: str | Iterable[str],
        rename: Mapping[str, str],
    ) -> _Selected:
        names = keys.renamed(one.index, rename, one.path) if rename else {key: key for key in one.index}
        theirs = {name: key for key, name in names.items()}
        include, exclude = keys.texts(include), keys.texts(exclude)
        wanted = dict.fromkeys((*theirs, *other.index))
        if include or exclude:
            wanted = dict.fromkeys(keys.select(wanted, include, exclude, f"neither {one.path} nor {other.path}"))
        there = other.index.slots
        return cls(
            {name: theirs[name] for name in wanted if name in theirs and name in there},
            [theirs[name] for name in wanted if name not in there],
            [name for name in wanted if name not in theirs],
        )


class _Comparison:
    """Of two open checkpoints. Its parts fill the lists of the result."""

    def __init__(
        self,
        one: ShardedReader,
        other: ShardedReader,
        selected: _Selected,
        checksums: bool,
        amounts: bool,
        progress: Progress | None,
    ) -> None:
        self._one, self._other, self._selected = one, other, selected
        self._amounts, self._progress = amounts, progress
        self._checksums = checksums
        self._names = list(selected.common)
        slots = list(map(one.index.slots.__getitem__, selected.common.values()))
        theirs = list(map(other.index.slots.__getitem__, self._names))
        self._agree = Agreement(one.index, np.array(slots, np.int64), other.index, np.array(theirs, np.int64))
        self._read: list[str] = []

    def result(self) -> CheckpointDiff:
        agree = self._agree
        alike = agree.same_dtype & agree.same_shape
        known = agree.known & self._checksums
        equal_already = known & agree.equal
        changed = self._tensors(
            self._at(alike & agree.tensors & known & ~agree.equal), self._at(alike & agree.tensors & ~known)
        )
        values = self._values(self._at(agree.same_dtype & ~agree.tensors & ~equal_already))
        both = np.flatnonzero(alike & agree.tensors)
        counts = self._element_counts(both)
        renamed = self._renamed()
        moved = set(renamed.values())
        reshaped, retyped = self._redefined()
        redefined = {one.key for one in reshaped} | {one.key for one in retyped}
        return CheckpointDiff(
            self._one.path,
            self._other.path,
            [key for key in self._selected.added if key not in moved],
            [key for key in self._selected.removed if key not in renamed],
            renamed,
            reshaped,
            retyped,
            changed,
            values,
            len(self._names) - len(changed) - len(values) - len(redefined),
            self._read,
            self._one.bytes_read + self._other.bytes_read,
            {self._names[at]: count for at, count in zip(both.tolist(), counts, strict=True)},
        )

    def _at(self, flags: Any) -> list[str]:
        return [self._names[at] for at in np.flatnonzero(flags).tolist()]

    def _element_counts(self, pairs: Any) -> list[int]:
        table = self._other.index.table
        numbers = self._other.index.slots
        slots = np.array([numbers[self._names[at]] for at in pairs.tolist()], np.int64)
        counts = np.ones(len(slots), np.int64)
        for dim in range(int(table.columns["ndim"].max(initial=0))):
            has = table.columns["ndim"][slots] > dim
            counts[has] *= table.columns["shape"][table.shape_starts[slots[has]] + dim]
        return counts.tolist()

    def _redefined(self) -> tuple[list[Reshaped], list[Retyped]]:
        reshaped = [
            Reshaped(name, *(index[key].shape for index, key in self._entries(name)))
            for name in self._at(self._agree.tensors & ~self._agree.same_shape)
        ]
        retyped = [
            Retyped(name, *(_dtype(index[key]) for index, key in self._entries(name)))
            for name in self._at(~self._agree.same_dtype)
        ]
        return reshaped, retyped

    def _entries(self, name: str) -> tuple[Any, Any]:
        return (self._one.index, self._selected.common[name]), (self._other.index, name)

    def _tensors(self, differ: list[str], undecided: list[str]) -> list[ChangedTensor]:
        """Those that have changed, of the ones whose checksums differ and the ones that have to be read."""
        told = set(differ)
        self._read += undecided
        wanted = [name for name in self._names if name in told.union(undecided)] if differ or undecided else []
        objects = {name for name in wanted if self._is_object(name)}
        streamed = [name for name in wanted if name not in objects and (self._amounts or name not in told)]
        found: dict[str, Amount | None] = dict.fromkeys(differ)
        found |= self._in_step([(self._selected.common[name], name) for name in streamed])
        found |= {name: None for name in objects - told if self._items_differ(name)}
        changed = []
        for name in wanted:
            if name in found:
                stored = self._other.index[name]
                assert isinstance(stored, StoredTensor)
                nbytes = prod(stored.shape) * stored.dtype.itemsize
                decided: Literal["checksums", "bytes"] = "checksums" if name in told else "bytes"
                changed.append(ChangedTensor(name, stored.shape, _dtype(stored), nbytes, decided, found[name]))
        return changed

    def _in_step(self, pairs: list[tuple[str, str]]) -> dict[str, Amount | None]:
        """The tensors whose bytes differ, and how much."""
        parts = [
            (Part.whole(key, _tensor(self._one, key)), Part.whole(name, _tensor(self._other, name)))
            for key, name in pairs
        ]
        total, done = 2 * sum(mine.nbytes for mine, _ in parts), 0
        found: dict[str, Amount | None] = {}
        norms: dict[str, Amount] = {}
        streams = (
            Stream(self._one, [mine for mine, _ in parts], _WINDOW),
            Stream(self._other, [its for _, its in parts], _WINDOW),
        )
        for mine, its in zip(*streams, strict=True):
            name = pairs[mine.part][1]
            same = equal(mine.tensor, its.tensor)
            if self._amounts and not (same and mine.tensor.nbytes == parts[mine.part][0].nbytes):
                norms[name] = norms.get(name, Amount()) + difference(mine.tensor, its.tensor)
            if not same:
                found[name] = None
            done += 2 * mine.tensor.nbytes
            if self._progress is not None:
                self._progress(done, total)
        return {name: norms.get(name) for name in found}

    def _is_object(self, name: str) -> bool:
        return any(
            reader.opened.format == "dcp_plugin" and _tensor(reader, key).stored_whole
            for reader, key in ((self._one, self._selected.common[name]), (self._other, name))
        )

    def _items_differ(self, name: str) -> bool:
        """Of tensors of classes of their own, which only torch can read: whether what torch has written differs."""
        return self._one.item(self._selected.common[name]) != self._other.item(name)

    def _values(self, undecided: list[str]) -> list[ChangedValue]:
        self._read += undecided
        old = _values_of(self._one, [self._selected.common[name] for name in undecided])
        new = _values_of(self._other, undecided)
        changed = []
        for name in undecided:
            leaves = list(islice(differences(old[self._selected.common[name]], new[name]), _MOST_LEAVES))
            if leaves:
                first = leaves[0]
                text = all(isinstance(leaf.old, str) and isinstance(leaf.new, str) for leaf in leaves)
                changed.append(ChangedValue(name, first.at, short(first.old), short(first.new), len(leaves), text))
        return changed

    def _renamed(self) -> dict[str, str]:
        """Which of the keys that one of the two has are the same under another name."""
        groups: dict[Any, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for side, (reader, names) in enumerate(
            ((self._one, self._selected.removed), (self._other, self._selected.added))
        ):
            for name in names:
                groups[_kind(reader, name)][side].append(name)
        groups = {kind: group for kind, group in groups.items() if all(group)}
        renamed: dict[str, str] = {}
        for kind, bytes_of in self._bytes_of(groups).items():
            removed, added = groups[kind]
            same: dict[bytes, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
            for side, names in enumerate((removed, added)):
                for name in names:
                    same[bytes_of[side][name]][side].append(name)
            for one, other in same.values():
                if one and other:
                    renamed |= paired(one, other, _nbytes(self._other, other[0]))
        order = {key: at for at, key in enumerate(self._selected.removed)}
        return dict(sorted(renamed.items(), key=lambda pair: order[pair[0]]))

    def _bytes_of(self, groups: dict[Any, tuple[list[str], list[str]]]) -> dict[Any, tuple[dict[str, bytes], ...]]:
        """For each group and side what stands for the bytes of each key: checksums, if all have them of one layout."""
        found: dict[Any, tuple[dict[str, bytes], ...]] = {}
        to_read: list[Any] = []
        for kind, group in groups.items():
            signed = [signatures(reader.index, names) for reader, names in zip(self._readers, group, strict=True)]
            layouts = {None if known is None else known[0] for side in signed for known in side.values()}
            if self._checksums and len(layouts) == 1 and None not in layouts:
                found[kind] = tuple({key: known[1] for key, known in side.items() if known} for side in signed)
            else:
                to_read.append(kind)
        hashes = [
            _hashes(reader, [name for kind in to_read for name in groups[kind][side]])
            for side, reader in enumerate(self._readers)
        ]
        for kind in to_read:
            self._read += groups[kind][1]
            found[kind] = tuple({name: hashes[side][name] for name in groups[kind][side]} for side in range(2))
        return found

    @property
    def _readers(self) -> tuple[ShardedReader, ShardedReader]:
        return self._one, self._other


def _tensor(reader: ShardedReader, key: str) -> StoredTensor:
    stored = reader.index[key]
    assert isinstance(stored, StoredTensor)
    return stored


def _dtype(entry: StoredTensor | StoredValue) -> str:
    return str(entry.dtype).removeprefix("torch.") if isinstance(entry, StoredTensor) else _VALUE


def _kind(reader: ShardedReader, key: str) -> tuple[Any, ...]:
    """Equal for keys that may be the same under another name."""
    index = reader.index
    slot = index.slots[key]
    dtype = index.table.dtype_of(slot)
    if dtype is not None:
        return dtype, index.table.shape_of(slot)
    return _VALUE, int(index.columns["place"][index.table.chunk_starts[slot], 3])


def _nbytes(reader: ShardedReader, key: str) -> int:
    """Zero for a value: its bytes say little about what it is."""
    stored = reader.index[key]
    return prod(stored.shape) * stored.dtype.itemsize if isinstance(stored, StoredTensor) else 0


def _hashes(reader: ShardedReader, names: list[str]) -> dict[str, bytes]:
    """A hash of the bytes of each key; one of its own for what cannot be read."""
    tensors = [key for key in names if isinstance(reader.index[key], StoredTensor)]
    objects = {key for key in tensors if reader.opened.format == "dcp_plugin" and _tensor(reader, key).stored_whole}
    tensors = [key for key in tensors if key not in objects]
    running = {key: xxh3_128() for key in tensors}
    for piece in Stream(reader, [Part.whole(key, _tensor(reader, key)) for key in tensors], _WINDOW):
        running[tensors[piece.part]].update(piece.data)
    found = {key: hashed.digest() for key, hashed in running.items()}
    for key in names:
        if key not in found:
            found[key] = _digest_of_name(reader, key)
            if key not in reader.index.values_here:
                with suppress(CheckpointMismatch):  # it is in several parts
                    found[key] = xxh3_128_digest(reader.item(key))
    return found


@dataclass(frozen=True)
class _NotLoaded:
    """In place of a value that only executing code would restore."""

    digest: bytes

    def __repr__(self) -> str:
        return f"an object that is not loaded (bytes {self.digest.hex()[:8]})"


def _values_of(reader: ShardedReader, names: list[str]) -> dict[str, Any]:
    try:
        return read_keys(reader, names, torch.device("cpu"))
    except UnsafeCheckpoint:
        return {name: _value_of(reader, name) for name in names}


def _value_of(reader: ShardedReader, name: str) -> Any:
    try:
        return read_keys(reader, [name], torch.device("cpu"))[name]
    except UnsafeCheckpoint:
        if name in reader.index.values_here:  # of which no bytes are known: it equals itself
            return _NotLoaded(_digest_of_name(reader, name))
        return _NotLoaded(xxh3_128_digest(reader.item(name)))


def _digest_of_name(reader: ShardedReader, name: str) -> bytes:
    return xxh3_128_digest(f"{reader.path} {name}".encode())
