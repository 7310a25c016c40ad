"""``dcp_plugin.diff``: the differences between two checkpoints, and their amounts.

Stored checksums decide about keys that both checkpoints store in equal chunks; such keys are not read
(:mod:`~dcp_plugin.tools.agreement`). All other keys are read from both checkpoints in step, within bounded memory.
Tensors that differ are read as well, to measure the difference (:mod:`~dcp_plugin.tools.amounts`).
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
"""Size in bytes of each of the two windows of each of the two streams."""
_MOST_LEAVES = 1000
"""Largest number of differing parts of a value that are counted."""
_VALUE = "value"
"""Stand-in for the dtype of a key that is no tensor."""


@dataclass(frozen=True)
class Reshaped:
    """A key whose tensors have different shapes."""

    key: str
    old: Shape
    new: Shape


@dataclass(frozen=True)
class Retyped:
    """A key whose entries have different dtypes; ``"value"`` is the dtype of an entry that is no tensor."""

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
    """The evidence: ``"checksums"``, without reading the tensor, or ``"bytes"``, by reading both tensors."""
    amount: Amount | None = None
    """The amount of the change; None if the caller did not ask for it, or the tensor is of a custom class."""


@dataclass(frozen=True)
class ChangedValue:
    """A value that differs and is no tensor."""

    key: str
    at: str
    """The first part that differs, as Python writes it: ``['lr'][0]``; empty for the complete value."""
    old: str
    """A short representation of this part in A."""
    new: str
    parts: int
    """The number of parts that differ; at most 1000 are counted."""
    text: bool
    """True if all parts that differ are texts, such as paths, names and dates."""


@dataclass(frozen=True)
class CheckpointDiff:
    """Differences between two checkpoints. Keys are those of B, except for entries that only A has."""

    a: Where
    b: Where
    added: list[str]
    """Keys that only B has."""
    removed: list[str]
    """Keys that only A has."""
    renamed: dict[str, str]
    """Keys of A -> keys of B that have the same dtype, shape and bytes."""
    reshaped: list[Reshaped]
    retyped: list[Retyped]
    changed: list[ChangedTensor]
    values: list[ChangedValue]
    unchanged: int
    """The number of keys, values included, with the same bytes in both."""
    read: list[str]
    """Keys that were read to compare them. The checksums decided about all others."""
    bytes_read: int
    """Bytes read from both checkpoints, including those read to measure differences."""
    elements: dict[str, int] = field(repr=False)
    """The number of elements of each tensor that has the same dtype and shape in both."""

    @property
    def equal(self) -> bool:
        """True if no key differs."""
        return not any((self.added, self.removed, self.renamed, self.reshaped, self.retyped, self.changed, self.values))

    def modules(self, depth: int = 3) -> dict[str, tuple[int, int, Amount]]:
        """Return for each module with changed tensors their number, the number of all its tensors, and the amount.

        Args:
            depth: The number of parts of a key that name a module. The last part names the tensor, and never counts.
        """
        tensors: dict[str, int] = defaultdict(int)
        elements: dict[str, int] = defaultdict(int)
        for key, count in self.elements.items():
            tensors[module := _module(key, depth)] += 1
            elements[module] += count
        changes: dict[str, tuple[int, Amount]] = {}
        for tensor in self.changed:
            count, amount = changes.get(module := _module(tensor.key, depth), (0, Amount()))
            changes[module] = count + 1, amount + (tensor.amount or Amount())
        return {
            module: (count, tensors[module], amount + Amount(elements[module] - amount.elements))
            for module, (count, amount) in changes.items()
        }

    def __str__(self) -> str:
        if self.equal:
            return f"{self.a} and {self.b} are equal: {self.unchanged} keys"
        counts = [
            (len(self.changed), "changed"),
            *((len(getattr(self, name)), name) for name in ("added", "removed", "renamed", "reshaped", "retyped")),
            (len(self.values), "values differ"),
        ]
        listed = ", ".join(f"{count} {name}" for count, name in counts if count)
        return f"{self.a} and {self.b} differ: {listed}, {self.unchanged} unchanged"


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
    """Compare two checkpoints of any writers and layouts.

    Args:
        a: The first checkpoint.
        b: The checkpoint to compare it with.
        include: Globs of keys of B; all if empty.
        exclude: Globs of keys to leave out.
        rename: Prefixes of A's keys -> prefixes of B's keys.
        amounts: Read the tensors that differ, and measure the difference.
        checksums: Trust stored checksums. Without them every byte is read.
        io_threads: Threads that read each checkpoint.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with the bytes of tensors that were read, and the bytes in all.

    Returns:
        The differences; ``equal`` is true if there are none. NaNs of the same bytes are equal.

    Raises:
        CheckpointMismatch: A glob matches nothing, no key of A has a prefix, or a tensor of a custom class is stored in
            ways that cannot be compared.
        CheckpointError: A checkpoint cannot be opened, or its bytes do not match their checksums.

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
    with ShardedReader(a, **options) as first, ShardedReader(b, **options) as second:
        selected = _Selected.of(first, second, include, exclude, rename or {})
        first.index.require_bounded([*selected.common.values(), *selected.removed])
        second.index.require_bounded([*selected.common, *selected.added])
        return _Comparison(first, second, selected, checksums, amounts, progress).result()


@dataclass(frozen=True)
class _Selected:
    """Keys to compare."""

    common: dict[str, str]
    """Keys of B -> keys of A."""
    removed: list[str]
    added: list[str]

    @classmethod
    def of(
        cls,
        first: ShardedReader,
        second: ShardedReader,
        include: str | Iterable[str],
        exclude: str | Iterable[str],
        rename: Mapping[str, str],
    ) -> _Selected:
        names = keys.renamed(first.index, rename, first.path) if rename else {key: key for key in first.index}
        old_keys = {name: key for key, name in names.items()}
        include, exclude = keys.texts(include), keys.texts(exclude)
        wanted = dict.fromkeys((*old_keys, *second.index))
        if include or exclude:
            wanted = dict.fromkeys(keys.select(wanted, include, exclude, f"neither {first.path} nor {second.path}"))
        slots = second.index.slots
        return cls(
            {name: old_keys[name] for name in wanted if name in old_keys and name in slots},
            [old_keys[name] for name in wanted if name not in slots],
            [name for name in wanted if name not in old_keys],
        )


class _Comparison:
    """Comparison of two open checkpoints."""

    def __init__(
        self,
        first: ShardedReader,
        second: ShardedReader,
        selected: _Selected,
        checksums: bool,
        amounts: bool,
        progress: Progress | None,
    ) -> None:
        self._one, self._other, self._selected = first, second, selected
        self._amounts, self._progress = amounts, progress
        self._checksums = checksums
        self._names = list(selected.common)
        slots = list(map(first.index.slots.__getitem__, selected.common.values()))
        theirs = list(map(second.index.slots.__getitem__, self._names))
        self._agree = Agreement(first.index, np.array(slots, np.int64), second.index, np.array(theirs, np.int64))
        self._read: list[str] = []

    def result(self) -> CheckpointDiff:
        agree = self._agree
        alike = agree.same_dtype & agree.same_shape
        decided = agree.known & self._checksums
        equal_already = decided & agree.equal
        changed = self._tensors(
            self._at(alike & agree.tensors & decided & ~agree.equal), self._at(alike & agree.tensors & ~decided)
        )
        values = self._values(self._at(agree.same_dtype & ~agree.tensors & ~equal_already))
        both = np.flatnonzero(alike & agree.tensors)
        counts = self._element_counts(both)
        renamed = self._renamed()
        moved = set(renamed.values())
        reshaped, retyped = self._redefined()
        redefined = {item.key for item in reshaped} | {item.key for item in retyped}
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
        """Return the tensors that changed: all in ``differ``, and those in ``undecided`` whose bytes differ."""
        settled = set(differ)
        self._read += undecided
        wanted = [name for name in self._names if name in settled.union(undecided)] if differ or undecided else []
        objects = {name for name in wanted if self._is_object(name)}
        streamed = [name for name in wanted if name not in objects and (self._amounts or name not in settled)]
        amounts: dict[str, Amount | None] = dict.fromkeys(differ)
        amounts |= self._in_step([(self._selected.common[name], name) for name in streamed])
        amounts |= {name: None for name in objects - settled if self._items_differ(name)}
        changed = []
        for name in wanted:
            if name in amounts:
                stored = self._other.index[name]
                assert isinstance(stored, StoredTensor)
                nbytes = prod(stored.shape) * stored.dtype.itemsize
                decided: Literal["checksums", "bytes"] = "checksums" if name in settled else "bytes"
                changed.append(ChangedTensor(name, stored.shape, _dtype(stored), nbytes, decided, amounts[name]))
        return changed

    def _in_step(self, pairs: list[tuple[str, str]]) -> dict[str, Amount | None]:
        """Return the tensors whose bytes differ, with the amounts."""
        parts = [
            (Part.whole(key, _tensor(self._one, key)), Part.whole(name, _tensor(self._other, name)))
            for key, name in pairs
        ]
        total, done = 2 * sum(first.nbytes for first, _ in parts), 0
        differing: dict[str, Amount | None] = {}
        norms: dict[str, Amount] = {}
        streams = (
            Stream(self._one, [first for first, _ in parts], _WINDOW),
            Stream(self._other, [second for _, second in parts], _WINDOW),
        )
        for first, second in zip(*streams, strict=True):
            name = pairs[first.part][1]
            same = equal(first.tensor, second.tensor)
            if self._amounts and not (same and first.tensor.nbytes == parts[first.part][0].nbytes):
                norms[name] = norms.get(name, Amount()) + difference(first.tensor, second.tensor)
            if not same:
                differing[name] = None
            done += 2 * first.tensor.nbytes
            if self._progress is not None:
                self._progress(done, total)
        return {name: norms.get(name) for name in differing}

    def _is_object(self, name: str) -> bool:
        return any(
            reader.opened.format == "dcp_plugin" and _tensor(reader, key).stored_whole
            for reader, key in ((self._one, self._selected.common[name]), (self._other, name))
        )

    def _items_differ(self, name: str) -> bool:
        """Return whether the bytes that torch wrote for a tensor of a custom class differ."""
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
        """Return the keys of A that have the same bytes under another key in B."""
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
            for old, new in same.values():
                if old and new:
                    renamed |= paired(old, new, _nbytes(self._other, new[0]))
        order = {key: at for at, key in enumerate(self._selected.removed)}
        return dict(sorted(renamed.items(), key=lambda pair: order[pair[0]]))

    def _bytes_of(self, groups: dict[Any, tuple[list[str], list[str]]]) -> dict[Any, tuple[dict[str, bytes], ...]]:
        """Return for each group and side the checksums of its keys; hashes of the bytes if checksums cannot decide."""
        bytes_of: dict[Any, tuple[dict[str, bytes], ...]] = {}
        to_read: list[Any] = []
        for kind, group in groups.items():
            signed = [signatures(reader.index, names) for reader, names in zip(self._readers, group, strict=True)]
            layouts = {None if signature is None else signature[0] for side in signed for signature in side.values()}
            if self._checksums and len(layouts) == 1 and None not in layouts:
                bytes_of[kind] = tuple(
                    {key: signature[1] for key, signature in side.items() if signature} for side in signed
                )
            else:
                to_read.append(kind)
        hashes = [
            _hashes(reader, [name for kind in to_read for name in groups[kind][side]])
            for side, reader in enumerate(self._readers)
        ]
        for kind in to_read:
            self._read += groups[kind][1]
            bytes_of[kind] = tuple({name: hashes[side][name] for name in groups[kind][side]} for side in range(2))
        return bytes_of

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
    """Return dtype and shape of a tensor, or the size of a value: equal for keys that may have the same bytes."""
    index = reader.index
    slot = index.slots[key]
    dtype = index.table.dtype_of(slot)
    if dtype is not None:
        return dtype, index.table.shape_of(slot)
    return _VALUE, int(index.columns["place"][index.table.chunk_starts[slot], 3])


def _nbytes(reader: ShardedReader, key: str) -> int:
    """Return the bytes of a tensor. Return 0 for a value: equal bytes of small values are often a coincidence."""
    stored = reader.index[key]
    return prod(stored.shape) * stored.dtype.itemsize if isinstance(stored, StoredTensor) else 0


def _hashes(reader: ShardedReader, names: list[str]) -> dict[str, bytes]:
    """Return a hash of the bytes of each key. A key that cannot be read has a unique hash."""
    tensors = [key for key in names if isinstance(reader.index[key], StoredTensor)]
    objects = {key for key in tensors if reader.opened.format == "dcp_plugin" and _tensor(reader, key).stored_whole}
    tensors = [key for key in tensors if key not in objects]
    running = {key: xxh3_128() for key in tensors}
    for piece in Stream(reader, [Part.whole(key, _tensor(reader, key)) for key in tensors], _WINDOW):
        running[tensors[piece.part]].update(piece.data)
    hashes = {key: hashed.digest() for key, hashed in running.items()}
    for key in names:
        if key not in hashes:
            hashes[key] = _digest_of_name(reader, key)
            if key not in reader.index.values_here:
                with suppress(CheckpointMismatch):  # the item is in several parts
                    hashes[key] = xxh3_128_digest(reader.item(key))
    return hashes


@dataclass(frozen=True)
class _NotLoaded:
    """Placeholder for a value that cannot be restored without executing code."""

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
        if name in reader.index.values_here:  # without bytes, a value equals only itself
            return _NotLoaded(_digest_of_name(reader, name))
        return _NotLoaded(xxh3_128_digest(reader.item(name)))


def _digest_of_name(reader: ShardedReader, name: str) -> bytes:
    return xxh3_128_digest(f"{reader.path} {name}".encode())
