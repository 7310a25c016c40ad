"""``torch.save`` files: the structure is loaded without the payload, and each tensor's place in the zip is found.

``torch.load(map_location="meta", weights_only=True)`` gives the structure; it reads the pickle only, and executes
nothing. Torch notes in each storage where its record begins; that has to be a stored record of the zip's directory,
and the tensor has to lie inside of it.
"""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dcp_plugin._torch import load_structure, record_offset
from dcp_plugin.errors import CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint
from dcp_plugin.storage.foreign.contents import Contents, View

_MOST_PICKLE = 1 << 28
"""Bytes of the pickle. That of a million tensors takes half of it."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "module", "model_state", "net", "network", "weights")
_LIGHTNING = "pytorch-lightning_version"
_DEPTH = 3

Tree = Mapping[Any, Any]


def read_file(path: Path) -> Contents:
    """What a ``torch.save`` file has: its state dicts as modules, and its other tensors and plain values.

    Optimizers are left out: their states are numbered, and only the framework that wrote them knows the order.

    Raises:
        CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: The zip lies, cannot be read, or wants code executed.
    """
    records = _records(path)
    tree = _structure(path)
    if isinstance(tree, torch.Tensor) or not isinstance(tree, Mapping):
        raise CheckpointMismatch(f"{path} holds a {type(tree).__name__}, not a state dict or a dictionary with one")
    contents = Contents("torch.save", {path.name: path.stat().st_size}, shares_bytes=True)
    if _LIGHTNING in tree and isinstance(tree.get("state_dict"), Mapping):
        contents.format = "lightning"
        named = {"model": tree["state_dict"]}
    else:
        named = modules_in(tree)
    for name, state in named.items():
        contents.kinds[name] = "module"
        for key, leaf in state.items():
            _put(contents, path, records, f"{name}.{key}", leaf)
    taken = {id(state) for state in named.values()}
    for key, leaf in _other_leaves(tree, taken):
        if key.partition(".")[0] not in named:
            _put(contents, path, records, key, leaf)
    return contents


def modules_in(tree: Tree) -> dict[str, Tree]:
    """The state dicts in a dictionary, by the name in our conventions: ``model``, and others by where they are.

    A state dict has nothing but tensors (and extra state). The only one, or the one with a usual name, is ``model``.
    """
    found = dict(_state_dicts((), tree, _DEPTH)) or {(): tree}
    usual = [path for name in _MODEL_NAMES for path in found if path and path[-1] == name]
    model = next(iter(found)) if len(found) == 1 else usual[0] if usual else None
    return {"model" if path == model else ".".join(path): state for path, state in found.items()}


def _state_dicts(path: tuple[str, ...], node: Tree, depth: int) -> Iterator[tuple[tuple[str, ...], Tree]]:
    if not all(isinstance(key, str) for key in node) or _is_optimizer(node):
        return
    leaves = {key: value for key, value in node.items() if not key.endswith("_extra_state")}
    if leaves and all(isinstance(value, torch.Tensor) for value in leaves.values()):
        yield path, node
        return
    for key, value in node.items():
        if isinstance(value, Mapping) and depth:
            yield from _state_dicts((*path, key), value, depth - 1)


def _is_optimizer(node: Tree) -> bool:
    return "param_groups" in node and "state" in node


def _other_leaves(node: Tree, taken: set[int], prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values outside of the state dicts."""
    if id(node) in taken or _is_optimizer(node) or not depth:
        return
    for key, value in node.items():
        if not isinstance(key, str):
            continue
        if isinstance(value, Mapping):
            yield from _other_leaves(value, taken, f"{prefix}{key}.", depth - 1)
        elif isinstance(value, (torch.Tensor, bool, int, float, str)):
            yield prefix + key, value


def _put(contents: Contents, path: Path, records: dict[int, int], key: str, leaf: Any) -> None:
    if not isinstance(leaf, torch.Tensor):
        contents.values[key] = leaf
        return
    contents.views[key] = _view(path, records, key, leaf)


def _view(path: Path, records: dict[int, int], key: str, tensor: torch.Tensor) -> View:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout == torch.strided
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise CheckpointMismatch(
            f"{path}: {key} is no plain tensor (a {type(tensor).__name__}, layout {tensor.layout}). Load the file with "
            f"torch.load, make it one (to_dense(), dequantize(), resolve_conj()) and save it again."
        )
    begin = record_offset(tensor)
    if begin not in records:
        raise CheckpointCorrupt(
            f"{path}: no record of the zip is where torch would have put the bytes of {key}. If torch.load takes the "
            f"file, save it again with torch.save."
        )
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    first = int(tensor.storage_offset()) * tensor.dtype.itemsize
    view = View(path.name, begin + first, tensor.dtype, tuple(tensor.shape), strides)
    if first + view.span > records[begin] or first < 0 or min(strides or (), default=0) < 0:
        raise CheckpointCorrupt(f"{path}: {key} lies outside of its record")
    return view


def _structure(path: Path) -> Any:
    try:
        return load_structure(path)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), error)
        raise UnsafeCheckpoint(
            f"{path} can only be loaded by executing code that it names; it was not executed ({str(reason).strip()}). "
            f"If you trust its origin, write its weights to a file of their own: "
            f"torch.save(torch.load({path.name!r}, weights_only=False)['state_dict'], 'weights.pt')."
        ) from None
    except Exception as error:
        raise CheckpointCorrupt(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _records(path: Path) -> dict[int, int]:
    """Where the storages' records begin, and how many bytes they have.

    Raises:
        CheckpointCorrupt: The zip's directory contradicts itself or the file.
        CheckpointMismatch: It is a zip of something else, or was written on a machine of the other byte order.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            members = {info.filename: info for info in archive.infolist()}
            root = next((name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl")), None)
            if root is None or f"{root}constants.pkl" in members:
                kind = "no torch.save file" if root is None else "a TorchScript archive; save its state_dict()"
                raise CheckpointMismatch(f"{path} is a zip, but {kind}")
            if members[f"{root}data.pkl"].file_size > _MOST_PICKLE:
                raise CheckpointCorrupt(f"{path}: its data.pkl is larger than {_MOST_PICKLE} bytes")
            order = members.get(f"{root}byteorder")
            if order is not None and (order.file_size > 16 or archive.read(order) != b"little"):
                raise CheckpointMismatch(f"{path} was written in another byte order: load and save it where it is from")
            data = [info for name, info in members.items() if name.startswith(f"{root}data/")]
            return _checked_records(path, file.fileno(), data)
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error) as error:
        raise CheckpointCorrupt(f"{path} is a damaged or truncated zip: {error}") from error


def _checked_records(path: Path, fd: int, data: list[zipfile.ZipInfo]) -> dict[int, int]:
    records: dict[int, int] = {}
    size, end = os.fstat(fd).st_size, 0
    for info in sorted(data, key=lambda info: info.header_offset):
        magic, name, extra = _LOCAL_HEADER.unpack(os.pread(fd, _LOCAL_HEADER.size, info.header_offset))
        begin = info.header_offset + _LOCAL_HEADER.size + name + extra
        stored = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
        if magic != b"PK\3\4" or not stored or info.compress_size != info.file_size:
            raise CheckpointCorrupt(f"{path}: the record {info.filename} is not a stored one")
        if info.header_offset < end or begin + info.file_size > size:
            raise CheckpointCorrupt(f"{path}: the record {info.filename} lies over another one, or outside of the file")
        end = begin + info.file_size
        records[begin] = info.file_size
    return records
