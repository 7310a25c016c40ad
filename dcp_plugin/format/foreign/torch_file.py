"""Reader of ``torch.save`` files: it loads the structure without payloads, and finds each tensor's place in the zip.

The structure has its tensors on the meta device: only the pickle is read, and no code is executed. Torch notes in each
storage where its record begins. That has to be a stored record of the zip's directory, and the tensor has to be inside
it. Objects that only executing code would restore are left out, unless it is then uncertain which tensors are the
model.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import torch

from dcp_plugin.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointUnreadable,
    UnsafeCheckpoint,
    damage_in,
)
from dcp_plugin.format import Files, expect, values
from dcp_plugin.format.foreign import Contents, View
from dcp_plugin.format.pickles.archive import bytes_of, pickle_of
from dcp_plugin.format.pickles.unpickler import FILE, Refused, StandIn, load
from dcp_plugin.format.torch_archive import MAGIC
from dcp_plugin.tensors._torch import record_offset

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "module", "model_state", "net", "network", "weights")
LIGHTNING = "pytorch-lightning_version"
"""Key that all of Lightning's checkpoints have."""
_EXTRA_STATE = "_extra_state"
_DEPTH = 3

Tree = Mapping[Any, Any]


@dataclass(frozen=True)
class _Archive:
    """Open ``torch.save`` file whose zip was checked."""

    file: BinaryIO
    name: str
    size: int
    label: str
    """Name of the file in messages."""
    records: dict[int, int]
    """Sizes of the storages' records in bytes, by the position at which each begins."""


@dataclass(frozen=True)
class RefusedValue:
    """Entry of an index for a value with stand-ins in it. ``of`` is the name of the refused global."""

    of: str


def refused_in(value: Any) -> str:
    """Return the name of the global of the first stand-in in a value; empty if the value has none."""
    for leaf in leaves_of(value):
        if isinstance(leaf, StandIn) or (isinstance(leaf, type) and issubclass(leaf, StandIn)):
            return leaf.of
    return ""


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested containers and the keys of mappings. A pickle can nest containers endlessly, and in
    themselves."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, (Mapping, list, tuple, set, frozenset)):
            if id(node) not in seen:
                seen.add(id(node))
                todo += node
                if isinstance(node, Mapping):
                    todo += node.values()
        else:
            yield node


def read_file(files: Files, name: str) -> Contents:
    """Read a ``torch.save`` file: state dicts as modules, optimizers with numbers for parameters, and other tensors and
    plain values.

    An optimizer is left out if it has anything but plain tensors and plain values, or is in a file of Lightning.

    Raises:
        CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: The zip contradicts itself, cannot be read, or its
            weights need code execution.
    """
    with _opened(files, name) as archive:
        tree, refusal = _structure(archive)
        if not isinstance(tree, Mapping):
            if refusal is not None:
                raise refusal
            held = type(tree).__name__
            raise CheckpointMismatch(
                f"{archive.label} holds a {held}, not a state dict or a dictionary that contains a state dict"
            )
        optimizers = {} if LIGHTNING in tree else dict(_optimizers(tree))
        named = _modules(archive, tree, refusal, bool(optimizers))
        written_by = "lightning" if LIGHTNING in tree else "torch.save"
        contents = Contents(written_by, {name: archive.size}, shares_bytes=True)
        leaves = [(f"{module}.{key}", leaf) for module, state in named.items() for key, leaf in state.items()]
        other_leaves = _other_leaves(tree, {id(state) for state in named.values()})
        leaves += [(key, leaf) for key, leaf in other_leaves if key.partition(".")[0] not in named]
        contents.kinds = {**dict.fromkeys(named, "module"), **dict.fromkeys(optimizers, "optimizer")}
        for optimizer in optimizers.values():
            for path, leaf in optimizer.items():
                key = ".".join(map(str, path))
                contents.paths[key] = path
                leaves.append((key, leaf))
        for key, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                contents.views[key] = _view(archive, key, leaf)
            elif key.endswith(_EXTRA_STATE) or isinstance(leaf, StandIn) or values.is_plain(leaf):
                refused = refused_in(leaf)
                contents.values[key] = RefusedValue(refused) if refused else leaf
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(contents.values)):
            _replace_by_loaded(contents, archive)
    return contents


def _optimizers(node: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[tuple[str | int, ...], Any]]]:
    """Yield the name of each optimizer, and its leaves by their paths."""
    if path and _is_optimizer(node):
        leaves = dict(_leaves_of_optimizer(node, path))
        plain = (_is_plain(x) if isinstance(x, torch.Tensor) else values.is_plain(x) for x in leaves.values())
        if len(node) == 2 and all(plain):
            yield ".".join(path), leaves
        return
    for key, value in node.items():
        if isinstance(key, str) and isinstance(value, Mapping) and len(path) < _DEPTH:
            yield from _optimizers(value, (*path, key))


def _leaves_of_optimizer(node: Tree, path: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    state, groups = node["state"], node["param_groups"]
    for number, slots in state.items() if isinstance(state, Mapping) else ():
        for slot, leaf in slots.items() if isinstance(slots, Mapping) else ():
            yield (*path, "state", str(number), str(slot)), leaf
    for number, group in enumerate(groups) if isinstance(groups, list) else ():
        for field, leaf in group.items() if isinstance(group, Mapping) else ():
            yield (*path, "param_groups", number, str(field)), leaf


def _modules(
    archive: _Archive, tree: Tree, refusal: UnsafeCheckpoint | None, may_be_none: bool = False
) -> dict[str, Tree]:
    if LIGHTNING in tree and isinstance(tree.get("state_dict"), Mapping):
        return {"model": tree["state_dict"]}
    state_dicts = modules_in(tree)
    if refusal is not None and not _is_certain(tree, state_dicts.get("model")):
        raise refusal
    if not state_dicts and not may_be_none:
        raise CheckpointMismatch(
            f"{archive.label} has no state dict in its first {_DEPTH} levels. Its first keys are {list(tree)[:8]}"
        )
    return state_dicts


def modules_in(tree: Tree) -> dict[str, Tree]:
    """Return the state dicts in a dictionary by our names: ``model``, and the others by their path.

    A state dict has only tensors (and extra state). The only one, or the one with a usual name, is ``model``.
    """
    by_path = dict(_state_dicts((), tree, _DEPTH))
    if not by_path and any(isinstance(value, torch.Tensor) for value in tree.values()):
        by_path = {(): tree}
    usual = [path for name in _MODEL_NAMES for path in by_path if path and path[-1] == name]
    model = next(iter(by_path)) if len(by_path) == 1 else usual[0] if usual else None
    return {"model" if path == model else ".".join(path): state for path, state in by_path.items()}


def _is_certain(tree: Tree, model: Tree | None) -> bool:
    """Return whether the model has a usual name, and no other usual name has a refused object.

    Otherwise an average of the weights could be taken for the weights because the module itself was pickled.
    """
    named = [tree[name] for name in _MODEL_NAMES if name in tree]
    return any(state is model for state in named) and not any(
        refused_in(candidate) for candidate in named if candidate is not model
    )


def _state_dicts(path: tuple[str, ...], node: Tree, depth: int) -> Iterator[tuple[tuple[str, ...], Tree]]:
    if not all(isinstance(key, str) for key in node) or _is_optimizer(node):
        return
    leaves = {key: value for key, value in node.items() if not key.endswith(_EXTRA_STATE)}
    if leaves and all(isinstance(value, torch.Tensor) for value in leaves.values()):
        yield path, node
        return
    for key, value in node.items():
        if isinstance(value, Mapping) and depth:
            yield from _state_dicts((*path, key), value, depth - 1)


def _is_optimizer(node: Tree) -> bool:
    return "param_groups" in node and "state" in node


def _other_leaves(node: Tree, taken: set[int], prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values outside the state dicts."""
    if id(node) in taken or _is_optimizer(node) or not depth:
        return
    for key, value in node.items():
        if not isinstance(key, str):
            continue
        if isinstance(value, Mapping):
            yield from _other_leaves(value, taken, f"{prefix}{key}.", depth - 1)
        elif isinstance(value, (torch.Tensor, StandIn)) or values.is_plain(value):
            yield prefix + key, value


def _replace_by_loaded(contents: Contents, archive: _Archive) -> None:
    """Load the tensors of extra states: torch makes them, with their classes, layouts and shared memory.

    No other payload is read.
    """
    tensors = [leaf for leaf in leaves_of(contents.values) if isinstance(leaf, torch.Tensor)]
    in_order = all(tensor.layout is torch.strided for tensor in tensors)
    wanted = {record_offset(tensor) or 0 for tensor in tensors} if in_order else None
    for module, state in _modules(archive, *_structure(archive, "cpu", wanted), may_be_none=True).items():
        for key, leaf in state.items():
            if not isinstance(contents.values.get(f"{module}.{key}", RefusedValue("")), RefusedValue):
                contents.values[f"{module}.{key}"] = leaf


def _view(archive: _Archive, key: str, tensor: torch.Tensor) -> View:
    if not _is_plain(tensor):
        layout = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else f"layout {tensor.layout}"
        raise _not_plain(archive, key, f"a {type(tensor).__name__}, {layout}")
    begin = record_offset(tensor)
    if begin not in archive.records:
        raise CheckpointCorrupt(
            f"{archive.label}: the zip has no record at the position where torch stores the bytes of {key}. If "
            f"torch.load reads the file, save it again with torch.save."
        )
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    first = int(tensor.storage_offset()) * tensor.dtype.itemsize
    view = View(archive.name, begin + first, tensor.dtype, tuple(tensor.shape), strides)
    if first + view.span > archive.records[begin] or first < 0 or min(strides or (), default=0) < 0:
        raise CheckpointCorrupt(f"{archive.label}: {key} lies outside of its record")
    return view


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout == torch.strided
    return plain and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _not_plain(archive: _Archive, key: str, kind: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"{archive.label}: {key} is not a plain tensor ({kind}). Load the file with torch.load, convert the tensor "
        f"(to_dense(), dequantize(), resolve_conj()) and save it again."
    )


def _structure(
    archive: _Archive, device: str = "meta", wanted: Collection[int] | None = None
) -> tuple[Any, UnsafeCheckpoint | None]:
    """Return the content of a file, by default without payloads, and the error to raise if its stand-ins are needed."""
    try:
        tree, names = load(archive.file, archive.size, FILE, device, wanted)
        return tree, _refusal(archive, names[0]) if names else None
    except Refused as error:
        raise _refusal(archive, error) from None
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{archive.label}: {error}") from None
    except Exception as error:
        raise _why_no_structure(archive, error) from error


def _refusal(archive: _Archive, name: object) -> UnsafeCheckpoint:
    return UnsafeCheckpoint(
        f"{archive.label} can only be loaded by executing code that it names ({name}); nothing was executed. If you "
        f"trust its origin, write the weights to a separate file once: held = torch.load({archive.name!r}, "
        f"weights_only=False), then torch.save(held['state_dict'], 'weights.pt'), or held.state_dict() if it is a "
        f"module."
    )


_REBUILD = "torch._utils._rebuild_"
_NOT_ON_META = {f"{_REBUILD}{kind}_tensor": kind for kind in ("nested", "sparse")} | {f"{_REBUILD}qtensor": "quantized"}
_NAMING = replace(FILE, globals={name: value for name, value in FILE.globals.items() if name not in _NOT_ON_META})


def _why_no_structure(archive: _Archive, error: Exception) -> CheckpointError:
    """Return the error for a file that cannot be loaded with its tensors on the meta device.

    Quantized and nested tensors do not exist on that device, and from torch 2.15 on sparse tensors do not either.
    """
    with suppress(Exception):  # a failure here means that the file is damaged
        tree, _ = load(archive.file, archive.size, _NAMING, "meta")
        for key, leaf in _named_leaves("", tree, set()):
            if isinstance(leaf, StandIn) and leaf.of in _NOT_ON_META:
                return _not_plain(archive, key, f"a {_NOT_ON_META[leaf.of]} tensor")
    return CheckpointCorrupt(f"{archive.label} is damaged: {type(error).__name__}: {error}")


def _named_leaves(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested containers, each container once, under their names in the file."""
    if not isinstance(value, (Mapping, list, tuple)):
        yield name, value
    elif id(value) not in seen:
        seen.add(id(value))
        for key, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _named_leaves(f"{name}.{key}" if name else str(key), child, seen)


def check_records(files: Files, name: str) -> None:
    """Check that a file is a complete zip of ``torch.save``.

    Raises:
        CheckpointCorrupt: The zip's directory contradicts itself or the file.
        CheckpointMismatch: The zip is of another kind, or was written on a machine of the other byte order.
    """
    with _opened(files, name):
        pass


@contextmanager
def _opened(files: Files, name: str) -> Iterator[_Archive]:
    """Open a file after the checks of :func:`check_records`."""
    path = f"{files.where}/{name}"
    with ExitStack() as stack:
        with damage_in(path):
            size = files.size(name)
            file = stack.enter_context(files.open(name))
            records = _records(path, file, size)
        yield _Archive(file, name, size, path, records)


def _records(path: str, file: BinaryIO, size: int) -> dict[int, int]:
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
        root = next((name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl")), None)
        if root is None or f"{root}constants.pkl" in members:
            kind = (
                "a zip, but not a torch.save file" if root is None else "a TorchScript archive; save its state_dict()"
            )
            raise CheckpointMismatch(f"{path} is {kind}")
        order = members.get(f"{root}byteorder")
        if order is not None and (order.file_size > 16 or bytes_of(archive, order) != b"little"):
            raise CheckpointMismatch(
                f"{path} was written in another byte order. Load it where it was written, and save it again."
            )
    data = [info for name, info in members.items() if name.startswith(f"{root}data/")]
    records: dict[int, int] = {}
    end = 0
    expect(file, [(info.header_offset, info.header_offset + _LOCAL_HEADER.size) for info in data])
    for info in sorted(data, key=lambda info: info.header_offset):
        file.seek(info.header_offset)
        magic, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        begin = info.header_offset + _LOCAL_HEADER.size + name + extra
        stored = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
        if magic != MAGIC or not stored or info.compress_size != info.file_size:
            raise CheckpointCorrupt(f"{path}: the record {info.filename} is compressed, encrypted or damaged")
        if info.header_offset < end or begin + info.file_size > size:
            raise CheckpointCorrupt(
                f"{path}: the record {info.filename} overlaps another record or lies outside the file"
            )
        end = begin + info.file_size
        records[begin] = info.file_size
    return records


def mentions(files: Files, name: str, text: str) -> bool:
    """Return whether the pickle of a ``torch.save`` file has this text, without loading it."""
    try:
        with damage_in(name), files.open(name) as file, zipfile.ZipFile(file) as archive:
            return text.encode() in bytes_of(archive, pickle_of(archive, files.size(name)))
    except CheckpointUnreadable:
        raise
    except CheckpointCorrupt:
        return False
