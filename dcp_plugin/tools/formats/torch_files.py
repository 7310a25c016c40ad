"""A ``torch.save`` file of any size: torch writes its pickle, and the tensors are streamed from the checkpoint.

``torch.load(weights_only=True)`` reads it, and with ``mmap=True`` without reading the tensors.

The file may be a ``.ckpt`` in the form of stock Lightning's single device and DDP, for ``load_from_checkpoint`` and
``ckpt_path``. The Lightning package of dcp_plugin stores Lightning's own entries under ``extra``. An export moves them
back to the top and removes the entries of dcp_plugin. Optimizers get numbers for the names of parameters, in the order
of the groups that are stored as a list. A checkpoint without the list has the parameters in the order of the optimizer;
successive parameters with equal settings become one group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from zlib import crc32

import torch

from dcp_plugin.core.errors import CheckpointMismatch, some
from dcp_plugin.core.format import torch_archive
from dcp_plugin.core.format.columns import KeyPath
from dcp_plugin.core.format.keys import flatten, name_of, step_of, unflatten
from dcp_plugin.core.format.torch_archive import BEHIND, Record
from dcp_plugin.core.media import NewFile
from dcp_plugin.core.state import without_sampler
from dcp_plugin.core.state.optimizer import GROUPS, nested_of, with_numbers
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.tensors import _torch
from dcp_plugin.core.tensors.host_memory import host_bytes, memory_view
from dcp_plugin.tools.formats import Layout, Selected
from dcp_plugin.tools.stream import Part, Stream, is_opaque, read_keys

_MODEL, _OPTIM, _EXTRA = "model", "optim", "extra"
_LOADERS, _OF_HOOKS = "dataloaders", "of_hooks"
_OURS = (
    "rng", _LOADERS, "dataloaders_made_by", "plateau_metrics", "dataloaders_made_in", "hyper_parameter_types",
    "own_names", "full_tensors", "number_of_optimizers",
)  # fmt: skip
"""Entries of dcp_plugin's Lightning package among Lightning's own. Hooks of a user may use these names as well."""
_VERSION = "pytorch-lightning_version"
_WRITTEN_AS = "2.6.0"
"""The version of the form for a checkpoint without one. Lightning converts older forms."""


@dataclass(frozen=True)
class TorchFile:
    """A file of ``torch.save``."""

    name: str
    parts: list[Part]
    records: list[Record]
    small: dict[str, bytes]
    """Records that are not streamed: name -> content."""

    @classmethod
    def of(cls, name: str, tree: Any, parts: dict[int, Part]) -> TorchFile:
        """Lay out the file of ``tree``.

        Args:
            parts: Addresses of tensors in the tree -> stored parts with their elements. All other tensors are written
                from memory.
        """
        before, storages = _torch.pickled_parts(tree)
        sizes = [(name, len(data)) for name, data in before.items()]
        in_order: list[Part] = []
        small = {**before, **BEHIND}
        for record, storage in storages.items():
            if (part := parts.get(storage.data_ptr())) is not None:
                in_order.append(part)
            elif storage.nbytes():
                small[record] = bytes(memory_view(host_bytes(0).set_(storage)))
            sizes.append((record, storage.nbytes()))
        sizes += [(name, len(data)) for name, data in BEHIND.items()]
        return cls(name, in_order, torch_archive.records(sizes), small)

    @property
    def size(self) -> int:
        return self.records[-1].end + len(torch_archive.directory(self.records, [0] * len(self.records)))

    def write(self, file: NewFile, stream: Stream) -> None:
        pieces = groupby(stream, key=lambda piece: piece.part)
        crcs = []
        for record in self.records:
            file.write(record.header)
            crc = 0
            if record.name in self.small:
                crc = crc32(self.small[record.name])
                file.write(self.small[record.name])
            elif record.size:
                for piece in next(pieces)[1]:
                    crc = crc32(piece.data, crc)
                    file.write(piece.data)
            file.write(record.descriptor(crc))
            crcs.append(crc)
        file.write(torch_archive.directory(self.records, crcs))


def layout(
    selected: Selected, name: str, allow_pickle: tuple[str, ...], shaped: Callable[[dict[str, Any]], Any] | None = None
) -> Layout:
    """Lay out one file with the nested state.

    Args:
        shaped: Function from the nested state, whose tensors have no elements yet, to the object of the file. The
            default gives optimizers the form of their ``state_dict()``.

    Raises:
        UnsafeCheckpoint: A value cannot be loaded without executing code.
    """
    index = selected.reader.index
    leaves: dict[str, Any] = {}
    parts: dict[int, Part] = {}
    tensors = set(selected.tensors)
    values = read_keys(
        selected.reader, [key for key in selected.names if key not in tensors], allow_pickle=allow_pickle
    )
    for key in selected.names:
        if key in values:
            leaves[key] = values[key]
        elif is_opaque(selected.reader, key):
            leaves[key] = read_keys(selected.reader, [key])[key]
        else:
            part = selected.part(key)
            # takes no memory, as no element is read or written
            leaves[key] = torch.empty(part.sizes, dtype=part.dtype, device="cpu")
            if part.nbytes:
                parts[leaves[key].data_ptr()] = part
    named = {selected.names[key]: leaf for key, leaf in leaves.items()}
    paths = {new: _path(index.path_of(key), key, new) for key, new in selected.names.items()}
    tree, notes = unflatten(named, paths), list[str]()
    tree = shaped(tree) if shaped else _with_numbers(tree, selected, notes)
    return Layout(selected, [TorchFile.of(name, tree, parts)], notes=notes)


def _with_numbers(tree: dict[str, Any], selected: Selected, notes: list[str]) -> dict[str, Any]:
    """Convert the optimizers of a checkpoint of this package to the form that their ``load_state_dict`` takes."""
    root = {"": tree}
    for optimizer in (name for name, kind in selected.reader.kinds.items() if kind == "optimizer"):
        key = next((key for key in selected.names if key.startswith(f"{optimizer}.{GROUPS}.")), "")
        below = key.removeprefix(optimizer)
        steps = f".{selected.names.get(key, '')}".removesuffix(below).split(".")
        holder: Any = root
        for step in steps[:-1]:
            holder = holder.get(step) if isinstance(holder, dict) else None
        node = holder.get(steps[-1]) if isinstance(holder, dict) else None
        if key and isinstance(node, dict) and any(name.startswith(f"{GROUPS}.") for name in node):
            nested, is_certain = nested_of(node)
            if is_certain:
                holder[steps[-1]] = with_numbers(nested)
            else:
                notes.append(
                    f"{optimizer!r} has names in place of numbers: the checkpoint does not have the order of its "
                    f"parameters, or has state of single ranks."
                )
    return root[""]


def _path(path: KeyPath, key: str, new: str) -> KeyPath:
    """Return the nesting of a key under its new name. The parts below the renamed prefix stay nested as before."""
    if key == new:
        return path
    for begin in range(1, len(path)):
        below = name_of(path[begin:])
        if new == below:
            return (str(step_of(path[begin])), *path[begin + 1 :])
        if new.endswith(f".{below}"):
            return (*new.removesuffix(f".{below}").split("."), *path[begin:])
    return tuple(new.split(".", 1))


def lightning_layout(selected: Selected, name: str, allow_pickle: tuple[str, ...]) -> Layout:
    """Lay out one file with Lightning's dictionary.

    Raises:
        CheckpointMismatch: The checkpoint has no module, or several of which none is called ``model``.
        UnsafeCheckpoint: A value cannot be loaded without executing code.
    """
    return layout(selected, name, allow_pickle, functools.partial(_as_lightning, selected.reader))


def _as_lightning(reader: CheckpointReader, tree: dict[str, Any]) -> dict[str, Any]:
    step = reader.summary.step if reader.summary else None
    defaults = {"epoch": 0, "global_step": step or 0, _VERSION: _WRITTEN_AS}
    checkpoint = defaults | _without_ours(tree.get(_EXTRA, {}))
    module = tree[_module(tree, reader)]
    checkpoint["state_dict"], _ = flatten(module, lambda _, value: isinstance(value, dict) and bool(value))
    dicts = [name for name, value in tree.items() if isinstance(value, dict)]
    named = [name for name in dicts if name == _OPTIM or name.removeprefix(f"{_OPTIM}_").isdecimal()]
    optimizers = sorted(named, key=lambda name: int(name.removeprefix(_OPTIM)[1:] or 0))
    if optimizers:
        checkpoint["optimizer_states"] = [with_numbers(nested_of(tree[name])[0]) for name in optimizers]
        checkpoint.setdefault("lr_schedulers", [])
    return checkpoint


def _without_ours(extra: Any) -> dict[str, Any]:
    """Return the entries of Lightning and of the user's hooks, in their original places."""
    entries: dict[str, Any] = dict(extra) if isinstance(extra, dict) else {}
    loops = entries.get("loops")
    if isinstance(states := entries.get(_LOADERS), dict) and isinstance(loops, dict) and "0" in states:
        with suppress(KeyError, TypeError):  # an untrusted checkpoint may have any structure here
            loops["fit_loop"]["state_dict"]["combined_loader"] = without_sampler(states["0"])
    of_hooks = entries.pop(_OF_HOOKS, {})
    kept = {key: value for key, value in entries.items() if key not in _OURS}
    return {**kept, **of_hooks} if isinstance(of_hooks, dict) else kept


def _module(tree: Mapping[str, Any], reader: CheckpointReader) -> str:
    modules = [name for name in tree if reader.kinds.get(name) == "module"]
    if _MODEL in modules or (_MODEL in tree and not modules):
        return _MODEL
    if len(modules) == 1:
        return modules[0]
    reason = f"it has {some(modules)}: select one with include" if modules else "it has none"
    raise CheckpointMismatch(f"{reader.path}: Lightning's checkpoints are of one module, and {reason}")
