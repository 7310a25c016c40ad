"""``dcp_plugin.diff``: the differences between two checkpoints, and their amounts.

Stored checksums decide about keys that both checkpoints store in equal chunks; such keys are not read
(:mod:`~dcp_plugin.tools.agreement`). All other keys are read from both checkpoints in step, within bounded memory.
Tensors that differ are read as well, to measure the difference (:mod:`~dcp_plugin.tools.amounts`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any, Literal

from xxhash import xxh3_64, xxh3_64_digest

from dcp_plugin.core.errors import CheckpointMismatch, UnsafeCheckpoint, as_html, warn
from dcp_plugin.core.format.index import StoredTensor
from dcp_plugin.core.paths import PathLike, StorageOptions, Where
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.types import public_class
from dcp_plugin.tools import stream
from dcp_plugin.tools.agreement import VALUE, Signature, paired, signatures
from dcp_plugin.tools.amounts import Amount, difference, differences, equal, short
from dcp_plugin.tools.formats import place_of
from dcp_plugin.tools.stream import Counter, Globs, Part, Progress, Stream

_WINDOW = 32 << 20
"""Size in bytes of each of the two windows of each of the two streams."""
_MOST_LEAVES = 1000
"""Largest number of differing parts of a value that are counted."""


@dataclass(frozen=True)
class Reshaped:
    """A key whose tensors have different shapes."""

    key: str
    old: tuple[int, ...]
    new: tuple[int, ...]


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
    shape: tuple[int, ...]
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


@public_class("dcp_plugin.tools")
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

    _repr_html_ = as_html

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
        for key, number in self.elements.items():
            module = _module(key, depth)
            tensors[module] += 1
            elements[module] += number
        counts: dict[str, int] = defaultdict(int)
        amounts: dict[str, Amount] = defaultdict(Amount)
        for tensor in self.changed:
            module = _module(tensor.key, depth)
            counts[module] += 1
            amounts[module] += tensor.amount or Amount()
        return {
            module: (count, tensors[module], amounts[module] + Amount(elements[module] - amounts[module].elements))
            for module, count in counts.items()
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
    with CheckpointReader(a, **options) as first, CheckpointReader(b, **options) as second:
        for absent in filter(None, (first.open().absent, second.open().absent)):
            warn(f"{absent}. They are not compared.")
        common, removed, added = _selected(first, second, include, exclude, rename or {})
        first.index.require_bounded([*common.values(), *removed])
        second.index.require_bounded([*common, *added])
        alone = _without_aliases(first, removed, common.values()), _without_aliases(second, added, common)
        return _Comparison((first, second), common, alone, checksums, amounts, progress).result()


def _without_aliases(reader: CheckpointReader, alone: list[str], common: Collection[str]) -> list[str]:
    """Leave out tensors with the bytes of a key that both checkpoints have: an export writes tied weights once."""
    index = reader.index
    places = {place_of(entry) for key in common if alone and isinstance(entry := index[key], StoredTensor)}
    return [key for key in alone if not (isinstance(entry := index[key], StoredTensor) and place_of(entry) in places)]


def _selected(
    first: CheckpointReader, second: CheckpointReader, include: Globs, exclude: Globs, rename: Mapping[str, str]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return keys of B with the same keys of A, keys that only A has, and keys that only B has.

    Args:
        include: Globs of keys of B, as ``exclude``.
        rename: Prefixes of keys of A -> prefixes of keys of B.
    """
    names = stream.renamed(first.index, rename, first.path) if rename else {key: key for key in first.index}
    old_keys = {name: key for key, name in names.items()}
    wanted: Collection[str] = dict.fromkeys((*old_keys, *second.index))
    include, exclude = stream.texts(include), stream.texts(exclude)
    if include or exclude:
        wanted = stream.select(wanted, include, exclude, f"neither {first.path} nor {second.path}")
    slots = second.index.slots
    common = {name: old_keys[name] for name in wanted if name in old_keys and name in slots}
    removed = [old_keys[name] for name in wanted if name not in slots]
    added = [name for name in wanted if name not in old_keys]
    return common, removed, added


@dataclass
class _Comparison:
    """Comparison of two open checkpoints. Of each pair, the first is of A, and the second of B."""

    readers: tuple[CheckpointReader, CheckpointReader]
    common: dict[str, str]
    """Keys of B -> keys of A."""
    alone: tuple[list[str], list[str]]
    """Keys that only one of the checkpoints has."""
    checksums: bool
    amounts: bool
    progress: Progress | None
    read: list[str] = field(default_factory=list)

    def result(self) -> CheckpointDiff:
        first, second = self.readers
        old = signatures(first.index, self.common.values())
        new = signatures(second.index, self.common)
        reshaped, retyped, values = list[Reshaped](), list[Retyped](), list[str]()
        tensors: dict[str, bool | None] = {}  # those of one dtype and shape, with the verdict of their checksums
        for name, key in self.common.items():
            before, after = old[key], new[name]
            if VALUE not in (before.dtype, after.dtype) and before.shape != after.shape:
                reshaped.append(Reshaped(name, before.shape, after.shape))
            if before.dtype != after.dtype:
                retyped.append(Retyped(name, before.dtype, after.dtype))
            elif before.shape == after.shape:
                same = before.same_bytes(after) if self.checksums else None
                if after.dtype != VALUE:
                    tensors[name] = same
                elif not same:
                    values.append(name)
        changed = self._tensors(tensors, new)
        changed_values = self._values(values)
        renamed = self._renamed()
        moved = set(renamed.values())
        removed, added = self.alone
        different = {item.key for items in (reshaped, retyped, changed, changed_values) for item in items}
        return CheckpointDiff(
            a=first.path,
            b=second.path,
            added=[key for key in added if key not in moved],
            removed=[key for key in removed if key not in renamed],
            renamed=renamed,
            reshaped=reshaped,
            retyped=retyped,
            changed=changed,
            values=changed_values,
            unchanged=len(self.common) - len(different),
            read=self.read,
            bytes_read=first.bytes_read + second.bytes_read,
            elements={name: prod(new[name].shape) for name in tensors},
        )

    def _tensors(self, verdicts: dict[str, bool | None], new: Mapping[str, Signature]) -> list[ChangedTensor]:
        """Return the tensors that changed: all with the verdict False, and those with None whose bytes differ."""
        self.read += [name for name, same in verdicts.items() if same is None]
        first, second = self.readers
        amounts: dict[str, Amount | None] = {name: None for name, same in verdicts.items() if same is False}
        streamed = []
        for name, same in verdicts.items():
            key = self.common[name]
            if same:
                continue
            if not (stream.is_opaque(first, key) or stream.is_opaque(second, name)):
                if self.amounts or same is None:
                    streamed.append((key, name))
            elif same is None and first.item(key) != second.item(name):
                amounts[name] = None
        amounts |= self._in_step(streamed)
        return [
            ChangedTensor(
                name,
                new[name].shape,
                new[name].dtype,
                stream.nbytes_of(second, name),
                decided="bytes" if verdicts[name] is None else "checksums",
                amount=amounts[name],
            )
            for name in verdicts
            if name in amounts
        ]

    def _in_step(self, pairs: list[tuple[str, str]]) -> dict[str, Amount | None]:
        """Return the tensors whose bytes differ, with the amounts."""
        parts = [[Part.of(reader, pair[side]) for pair in pairs] for side, reader in enumerate(self.readers)]
        streams = [Stream(reader, of_side, _WINDOW) for reader, of_side in zip(self.readers, parts, strict=True)]
        count = Counter(2 * streams[0].nbytes, self.progress)
        differing: set[str] = set()
        amounts: dict[str, Amount] = {}
        for first, second in zip(*streams, strict=True):
            name = pairs[first.part][1]
            same = equal(first.tensor, second.tensor)
            if not same:
                differing.add(name)
            if self.amounts and not (same and first.tensor.nbytes == parts[0][first.part].nbytes):
                amounts[name] = amounts.get(name, Amount()) + difference(first.tensor, second.tensor)
            count.add(2 * first.tensor.nbytes)
        return {name: amounts.get(name) for name in differing}

    def _values(self, undecided: list[str]) -> list[ChangedValue]:
        self.read += undecided
        old = _values_of(self.readers[0], [self.common[name] for name in undecided])
        new = _values_of(self.readers[1], undecided)
        changed = []
        for name in undecided:
            leaves = list(islice(differences(old[self.common[name]], new[name]), _MOST_LEAVES))
            if leaves:
                first = leaves[0]
                text = all(isinstance(leaf.old, str) and isinstance(leaf.new, str) for leaf in leaves)
                changed.append(ChangedValue(name, first.at, short(first.old), short(first.new), len(leaves), text))
        return changed

    def _renamed(self) -> dict[str, str]:
        """Return the keys of A that have the same bytes under another key in B."""
        signed = [signatures(reader.index, keys) for reader, keys in zip(self.readers, self.alone, strict=True)]
        groups = [group for group in _grouped(self.alone, lambda side, key: _kind(signed[side][key])) if all(group)]
        undecided = [group for group in groups if not (self.checksums and _decide(group, signed))]
        hashes = [
            _hashes(reader, [key for group in undecided for key in group[side]])
            for side, reader in enumerate(self.readers)
        ]
        self.read += hashes[1]
        renamed: dict[str, str] = {}
        for group in groups:
            for old, new in _grouped(group, lambda side, key: hashes[side].get(key, signed[side][key].hashes)):
                if old and new:
                    renamed |= paired(old, new, stream.nbytes_of(self.readers[1], new[0]))
        return {key: renamed[key] for key in self.alone[0] if key in renamed}


_Sides = tuple[list[str], list[str]]
"""Keys of A, and keys of B."""


def _grouped(sides: _Sides, fact: Callable[[int, str], object]) -> list[_Sides]:
    """Return the keys of both sides, grouped by a fact about them."""
    groups: dict[object, _Sides] = defaultdict(lambda: ([], []))
    for side, keys in enumerate(sides):
        for key in keys:
            groups[fact(side, key)][side].append(key)
    return list(groups.values())


def _kind(signature: Signature) -> object:
    """Return a value that is equal for keys that may have the same bytes: of values, also their size."""
    return signature.dtype, signature.shape, signature.layout if signature.dtype == VALUE else None


def _decide(group: _Sides, signed: list[dict[str, Signature]]) -> bool:
    """Return whether the hashes of all keys of a group are of the same ranges of bytes."""
    members = [signed[side][key] for side, keys in enumerate(group) for key in keys]
    return len({member.layout for member in members}) == 1 and all(member.hashes is not None for member in members)


def _hashes(reader: CheckpointReader, keys: list[str]) -> dict[str, bytes]:
    """Return a hash of the bytes of each key. A key that cannot be read has a unique hash."""
    is_streamed = {
        key: isinstance(reader.index[key], StoredTensor) and not stream.is_opaque(reader, key) for key in keys
    }
    parts = [Part.of(reader, key) for key in keys if is_streamed[key]]
    running = [xxh3_64() for _ in parts]
    for piece in Stream(reader, parts, _WINDOW):
        running[piece.part].update(piece.data)
    hashes = {part.key: hashed.digest() for part, hashed in zip(parts, running, strict=True)}
    return {key: hashes[key] if is_streamed[key] else _digest_of_item(reader, key) for key in keys}


def _digest_of_item(reader: CheckpointReader, key: str) -> bytes:
    """Return a hash of the bytes that ``torch.save`` wrote for a key; a unique hash if they are not in one item."""
    if key not in reader.index.values_here:
        with suppress(CheckpointMismatch):  # the item is in several parts
            return xxh3_64_digest(reader.item(key))
    return xxh3_64_digest(f"{reader.path} {key}".encode())


@dataclass(frozen=True)
class _NotLoaded:
    """Placeholder for a value that cannot be restored without executing code."""

    digest: bytes

    def __repr__(self) -> str:
        return f"an object that is not loaded (bytes {self.digest.hex()[:8]})"


def _values_of(reader: CheckpointReader, names: list[str]) -> dict[str, Any]:
    try:
        return stream.read_keys(reader, names)
    except UnsafeCheckpoint:
        if len(names) == 1:
            return {names[0]: _NotLoaded(_digest_of_item(reader, names[0]))}
        return {name: _values_of(reader, [name])[name] for name in names}
