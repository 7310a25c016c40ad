"""Items of a checkpoint: ``dcp_plugin.read``, and for the tools a stream of tensors and values within bounded memory.

A tool that needs complete tensors and values in memory calls :func:`read_keys`. All other tools read a :class:`Stream`:
tensors are cut into pieces of consecutive elements, and successive pieces fill a window of memory together. While the
caller uses one window, a thread fills the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch

from dcp_plugin.core.errors import CheckpointMismatch, UnsafeCheckpoint, first_line, nearest, some, warn
from dcp_plugin.core.format.index import StoredTensor
from dcp_plugin.core.format.payload import padded
from dcp_plugin.core.format.values import decode_tensor
from dcp_plugin.core.media import PAGE
from dcp_plugin.core.partial import matches
from dcp_plugin.core.paths import PathLike, StorageOptions
from dcp_plugin.core.planning.load_balance import BoxPart
from dcp_plugin.core.planning.reads import ReadPlanner, decoded
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.tensors.host_memory import host_bytes, memory_view
from dcp_plugin.core.types import LocalChunk, ShardedValue

WINDOW = 64 << 20
"""Size of each of the two windows, in bytes."""
_MOST_PIECES = 4096
_TOGETHER = 256 << 20
"""Bytes that :func:`read_keys` reads between two reports of progress."""

Globs = str | Iterable[str]
Progress = Callable[[int, int], None]
"""Callback that takes the bytes done, and the bytes in all."""


class Counter:
    """Counter of bytes that reports to a callback. Several threads may use it."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(min(self._done, self.total), self.total)


def texts(globs: Globs) -> tuple[str, ...]:
    """Return one or several globs as a tuple."""
    return (globs,) if isinstance(globs, str) else tuple(globs)


def select(keys: Collection[str], include: Globs, exclude: Globs, path: object) -> list[str]:
    """Return, in their order, the keys that match a glob of ``include`` (all if it is empty) and none of ``exclude``.

    Raises:
        CheckpointMismatch: A glob matches no key, or no key remains.
    """
    chosen, left_out = texts(include), texts(exclude)
    for glob in (*chosen, *left_out):
        if glob not in keys and not any(fnmatchcase(key, glob) for key in keys):
            raise CheckpointMismatch(f"{path} has no key that {glob!r} matches{nearest(glob, keys)}")
    selected = [key for key in keys if not chosen or matches(key, chosen)]
    selected = [key for key in selected if not matches(key, left_out)] if left_out else selected
    if not selected:
        raise CheckpointMismatch(f"{path}: exclude={some(list(left_out))} leaves none of its {len(keys)} keys")
    return selected


def renamed(keys: Iterable[str], rename: Mapping[str, str], path: object) -> dict[str, str]:
    """Return the name of each key outside of the checkpoint, in the order of the keys.

    Args:
        rename: Prefixes in the checkpoint -> their replacements. The longest prefix that fits a key is replaced.

    Raises:
        CheckpointMismatch: No key has a prefix, two keys would get the same name, or a name would be empty.
    """
    prefixes = sorted(rename, key=len, reverse=True)
    prefix_of = {key: next((prefix for prefix in prefixes if key.startswith(prefix)), None) for key in keys}
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for key, prefix in prefix_of.items():
        names[key] = name = key if prefix is None else rename[prefix] + key.removeprefix(prefix)
        if not name:
            raise CheckpointMismatch(f"{path}: the rename leaves an empty name for {key}. Give it a name")
        if (other := taken.setdefault(name, key)) != key:
            raise CheckpointMismatch(f"{path}: {other} and {key} would both be called {name!r}")
    if unused := [repr(prefix) for prefix in rename if prefix not in set(prefix_of.values())]:
        raise CheckpointMismatch(f"{path}: no selected key starts with {some(unused)}")
    return names


def is_opaque(reader: CheckpointReader, key: str) -> bool:
    """Return whether a key is a tensor of a custom class, which ``torch.save`` has written as one object."""
    entry = reader.index[key]
    return isinstance(entry, StoredTensor) and entry.stored_whole and reader.open().format == "dcp_plugin"


def nbytes_of(reader: CheckpointReader, key: str) -> int:
    """Return the bytes of a tensor in memory, and 0 for a value."""
    entry = reader.index[key]
    return prod(entry.shape) * entry.dtype.itemsize if isinstance(entry, StoredTensor) else 0


def read(
    path: PathLike,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    device: str | torch.device = "cpu",
    *,
    allow_pickle: tuple[str, ...] = (),
    io_threads: int = 2,
    storage_options: StorageOptions | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return tensors and values of a checkpoint by key, each tensor in full, without a model or a process group.

    If the checkpoint has lost ``dcp_plugin.json`` or ``dcp_plugin.index``, its bytes are read without a check.

    Args:
        path: A checkpoint of this package, of stock DCP, of a framework, or a safetensors or ``torch.save`` file.
        include: Globs of keys; all if empty. Other keys are not read.
        exclude: Globs of keys to leave out.
        device: The device of the tensors.
        allow_pickle: Globs of keys whose values may be loaded by executing code from the checkpoint.
        io_threads: Threads that read.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with bytes read, and bytes in all.

    Returns:
        Values by key, in the order in which they were saved. No two tensors share memory.

    Raises:
        CheckpointMismatch: A glob matches nothing.
        UnsafeCheckpoint: A value cannot be loaded without executing code.
        CheckpointError: The checkpoint cannot be opened, or its bytes do not match their checksums.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"model": torch.nn.Linear(2, 3), "epoch": 4}, "run/step-1")
        >>> state = dcp_plugin.read("run/step-1", include=["model.*", "epoch"])
        >>> state["model.weight"].shape, state["epoch"]
        (torch.Size([3, 2]), 4)
    """
    options: dict[str, Any] = {"io_threads": io_threads, "storage_options": storage_options}
    with CheckpointReader(path, check_files=False, **options) as reader:  # other keys may be damaged
        reader.salvages = True
        wanted = select(reader.index, include, exclude, reader.path)
        if reader.open().absent:
            warn(f"{reader.open().absent}. They are not read.")
        return read_keys(reader, wanted, torch.device(device), allow_pickle, progress)


def read_keys(
    reader: CheckpointReader,
    wanted: list[str],
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
    allow_pickle: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return complete tensors and values by key. See :func:`dcp_plugin.read` for arguments and errors."""
    reader.index.require_bounded(wanted)
    sizes = {key: nbytes_of(reader, key) for key in wanted}
    count = Counter(sum(sizes.values()), progress)
    values: dict[str, Any] = dict.fromkeys(wanted)
    group: list[str] = []
    nbytes = 0
    for number, key in enumerate(wanted, 1):
        group.append(key)
        nbytes += sizes[key]
        if number == len(wanted) or nbytes >= _TOGETHER:
            values |= _read_group(reader, group, device, allow_pickle)
            count.add(nbytes)
            group, nbytes = [], 0
    return values


def _read_group(
    reader: CheckpointReader, group: list[str], device: torch.device, allow_pickle: tuple[str, ...]
) -> dict[str, Any]:
    targets: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for key in group:
        entry = reader.index[key]
        if is_opaque(reader, key):
            tensors[key] = _read_opaque(reader, key, device)
        elif isinstance(entry, StoredTensor):
            tensors[key] = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            chunk = LocalChunk((0,) * len(entry.shape), entry.shape, tensors[key])
            targets[key] = ShardedValue(entry.shape, entry.dtype, (chunk,))
        else:
            targets[key] = None
    _fill(reader, targets, {key: key for key in targets}, allow_pickle)
    return targets | tensors


def _read_opaque(reader: CheckpointReader, key: str, device: torch.device) -> Any:
    data = reader.item(key)
    try:
        return decode_tensor(data).to(device)
    except Exception as error:
        raise UnsafeCheckpoint(
            f"{reader.path}: {key} is of a class that torch does not load without executing code: "
            f"{first_line(error)} Load it into a model (dcp_plugin.load), or leave it out: exclude={key!r}."
        ) from error


def _fill(
    reader: CheckpointReader, targets: dict[str, Any], keys: Mapping[str, str], allow_pickle: tuple[str, ...] = ()
) -> None:
    """Read the stored keys of targets into them. A target that is None is replaced by the value of its key."""
    plan = ReadPlanner(targets, reader.index, keys).plan()
    targets.update(decoded(plan, reader.read(plan), allow_pickle))


@dataclass(frozen=True)
class Part:
    """A box of a stored tensor to be read, and the dtype that its elements are converted to."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, reader: CheckpointReader, key: str, dtype: torch.dtype | None = None) -> Part:
        """Return a complete tensor as a part.

        Raises:
            CheckpointMismatch: The key is no tensor, or its elements cannot be read one by one.
        """
        stored = reader.index[key]
        if not isinstance(stored, StoredTensor):
            raise CheckpointMismatch(f"{reader.path}: {key} is no tensor")
        if is_opaque(reader, key):
            raise CheckpointMismatch(
                f"{reader.path}: {key} is of a class of its own (quantized, or a wrapper of other tensors), which "
                f"torch.save has written as a whole: dcp_plugin.read returns it. To leave it out: exclude={key!r}."
            )
        return cls(key, (0,) * len(stored.shape), stored.shape, dtype or stored.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a part. They stay in memory until the caller takes a piece of the next window."""

    part: int
    """The number of the part in the stream."""
    tensor: torch.Tensor
    """A contiguous tensor on the host."""
    start: int
    """The position of the first element within the part."""

    @property
    def data(self) -> memoryview:
        return memory_view(self.tensor)


_Window = list[tuple[int, BoxPart, int]]
"""Pieces that are read together: number of the part, box, and position of its first element in the part."""


class Stream:
    """Pieces of parts, in the order of the parts. An empty part has no piece.

    Args:
        reader: The reader of the checkpoint.
        parts: The parts to read.
        window: Size of a window in bytes. Two windows are used.

    Raises:
        CheckpointError: The checkpoint cannot be read, or its bytes do not match their checksums.
    """

    def __init__(self, reader: CheckpointReader, parts: Sequence[Part], window: int = WINDOW) -> None:
        self._reader = reader
        self._parts = parts
        self._window = window
        self._memory = [host_bytes(0)] * 2
        self.nbytes = sum(part.nbytes for part in parts)
        """Bytes of all parts."""

    def __iter__(self) -> Iterator[Piece]:
        ready: Future[list[Piece]] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="dcp-stream") as pool:
            for number, window in enumerate(self._windows()):
                reading = pool.submit(self._read, window, number % 2)
                if ready is not None:
                    yield from ready.result()
                ready = reading
            if ready is not None:
                yield from ready.result()

    def _windows(self) -> Iterator[_Window]:
        window: _Window = []
        filled = 0
        for number, part in enumerate(self._parts):
            start = 0
            if not part.nbytes:
                continue
            for box in BoxPart(part.offsets, part.sizes, part.dtype.itemsize).at_most(self._window):
                size = padded(box.nbytes)
                if window and (filled + size > self._window or len(window) >= _MOST_PIECES):
                    yield window
                    window, filled = [], 0
                window.append((number, box, start))
                filled += size
                start += prod(box.sizes)
        if window:
            yield window

    def _read(self, window: _Window, turn: int) -> list[Piece]:
        size = sum(padded(box.nbytes) for _, box, _ in window)
        if size > len(self._memory[turn]):
            memory = host_bytes(size + PAGE)
            # A file can be written without a copy from memory that begins at a page.
            self._memory[turn] = memory[-memory.data_ptr() % PAGE :][:size]
        pieces: list[Piece] = []
        targets: dict[str, Any] = {}
        keys: dict[str, str] = {}
        at = 0
        for number, box, start in window:
            part = self._parts[number]
            tensor = self._memory[turn][at : at + box.nbytes].view(part.dtype).view(box.sizes)
            at += padded(box.nbytes)
            name = str(len(pieces))
            pieces.append(Piece(number, tensor, start))
            chunk = LocalChunk(box.offsets, box.sizes, tensor)
            targets[name] = ShardedValue(self._reader.index[part.key].shape, part.dtype, (chunk,))  # type: ignore[union-attr]
            keys[name] = part.key
        _fill(self._reader, targets, keys)
        return pieces
