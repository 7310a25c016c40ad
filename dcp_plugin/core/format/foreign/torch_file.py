"""Reader of ``torch.save`` files: it loads the structure without payloads, and finds each tensor's place in the zip.

The rule: no code is executed, and no payload is read except those of extra states. The structure has its tensors on the
meta device. Each storage has a note of the position where its record begins. A stored record of the zip's directory
must begin there, and the tensor must be inside it.

Objects that only executing code would restore are left out. The file is refused if it is then uncertain which tensors
are the model.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint, damage_in
from dcp_plugin.core.format import Files, values
from dcp_plugin.core.format.foreign import Contents, View
from dcp_plugin.core.format.pickles.unpickler import FILE, StandIn, Use, load
from dcp_plugin.core.format.pickles.walk import Refused
from dcp_plugin.core.format.torch_archive import PICKLE, Archive
from dcp_plugin.core.tensors._torch import record_offset

_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "module", "model_state", "net", "network", "weights")
LIGHTNING = "pytorch-lightning_version"
"""Key that all of Lightning's checkpoints have."""
RANK_FILE = re.compile(
    r"(model|optim|extra_state)_world_size_([1-9]\d{0,5})_rank_(0|[1-9]\d{0,5})\.pt|"
    r"(pytorch_model_fsdp|optimizer)(?:_(\d{1,6}))?_rank(0|[1-9]\d{0,5})\.bin"
)
"""Names of files with the shards of one rank (:mod:`~dcp_plugin.core.format.foreign.rank_files`)."""
FILE_OF_DEEPSPEED = re.compile(r"(?:(?:bf16_)?zero_pp_rank_(\d{1,6})_)?mp_rank_\d{2,3}_(?:model|optim)_states\.pt")
"""Names of DeepSpeed's files (:mod:`~dcp_plugin.core.format.foreign.zero`), with the rank if each rank has one."""
OF_DEEPSPEED = (
    *("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    *("zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
)
"""Files of which every checkpoint of DeepSpeed has one, if that of rank 0 was copied."""
_EXTRA_STATE = "_extra_state"
_DEPTH = 3

Tree = Mapping[Any, Any]


@dataclass(frozen=True)
class OpenFile:
    """Open ``torch.save`` file whose zip was checked."""

    name: str
    size: int
    label: str
    """Name of the file in messages."""
    archive: Archive

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Sizes of the records in bytes, by the position at which each begins."""
        return dict(self.archive.records.values())

    def checksum_of(self, tensor: torch.Tensor) -> int:
        """Return the CRC32 of the record that a tensor is in. It is computed if the writer left it out of the zip."""
        begin, checksums = record_offset(tensor) or 0, self.archive.checksums
        if not checksums[begin]:  # noted for the next tensor in the record: many may share a large one
            name = next(name for name, (at, _) in self.archive.records.items() if at == begin)
            checksums[begin] = zlib.crc32(self.archive.read(name).data) or 1
        return checksums[begin]


@dataclass(frozen=True)
class RefusedValue:
    """Entry of an index for a value with stand-ins in it. ``of`` is the name of the refused global."""

    of: str = ""
    reason: str = ""
    """Reason in words, where no code is at stake."""


def refused_in(value: Any) -> str:
    """Return the name of the global of the first stand-in in a value; empty if the value has none."""
    for leaf in leaves_of(value):
        if isinstance(leaf, StandIn) or (isinstance(leaf, type) and issubclass(leaf, StandIn)):
            return leaf.of
    return ""


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested containers and the keys of mappings.

    Each container is walked once, without recursion: it may contain itself.
    """
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
    """Read a ``torch.save`` file: its state dicts as modules, its optimizers, and its other tensors and plain values.

    The parameters of an optimizer have numbers. An optimizer is left out if it has other objects than plain tensors and
    plain values. Optimizers in a file of Lightning are left out.

    Raises:
        CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: The zip contradicts itself, cannot be read, or its
            weights need code execution.
    """
    with opened(files, name) as file:
        tree, refusal = structure(file)
        if not isinstance(tree, Mapping):
            if refusal is not None:
                raise refusal
            held = type(tree).__name__
            raise CheckpointMismatch(
                f"{file.label} holds a {held}, not a state dict or a dictionary that contains a state dict"
            )
        optimizers = {} if LIGHTNING in tree else dict(_optimizers(tree))
        named = _modules(file, tree, refusal, bool(optimizers))
        written_by = "lightning" if LIGHTNING in tree else "torch.save"
        contents = Contents(written_by, {name: file.size}, shares_bytes=True)
        leaves = [(f"{module}.{key}", leaf) for module, state in named.items() for key, leaf in state.items()]
        others = other_leaves(tree, {id(state) for state in named.values()})
        leaves += [(key, leaf) for key, leaf in others if key.partition(".")[0] not in named]
        contents.kinds = {**dict.fromkeys(named, "module"), **dict.fromkeys(optimizers, "optimizer")}
        for optimizer in optimizers.values():
            for path, leaf in optimizer.items():
                key = ".".join(map(str, path))
                contents.paths[key] = path
                leaves.append((key, leaf))
        for key, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                contents.views[key] = view_of(file, key, leaf)
            elif key.endswith(_EXTRA_STATE) or isinstance(leaf, StandIn) or values.is_plain(leaf):
                refused = refused_in(leaf)
                contents.values[key] = RefusedValue(refused) if refused else leaf
        # Tensors in extra states were loaded without memory, and an extra state is a value, which is not read later.
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(contents.values)):
            _replace_by_loaded(contents, file)
    return contents


def _optimizers(node: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[tuple[str | int, ...], Any]]]:
    """Yield the name of each optimizer, and its leaves by their paths."""
    if path and is_optimizer(node):
        leaves = dict(leaves_of_optimizer(node, path))
        plain = (_is_plain(x) if isinstance(x, torch.Tensor) else values.is_plain(x) for x in leaves.values())
        if len(node) == 2 and all(plain):
            yield ".".join(path), leaves
        return
    for key, value in node.items():
        if isinstance(key, str) and isinstance(value, Mapping) and len(path) < _DEPTH:
            yield from _optimizers(value, (*path, key))


def leaves_of_optimizer(node: Tree, path: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    state, groups = node["state"], node["param_groups"]
    for number, slots in state.items() if isinstance(state, Mapping) else ():
        for slot, leaf in slots.items() if isinstance(slots, Mapping) else ():
            yield (*path, "state", str(number), str(slot)), leaf
    for number, group in enumerate(groups) if isinstance(groups, list) else ():
        for field, leaf in group.items() if isinstance(group, Mapping) else ():
            yield (*path, "param_groups", number, str(field)), leaf


def _modules(
    file: OpenFile, tree: Tree, refusal: UnsafeCheckpoint | None, may_be_none: bool = False
) -> dict[str, Tree]:
    if LIGHTNING in tree and isinstance(tree.get("state_dict"), Mapping):
        return {"model": tree["state_dict"]}
    state_dicts = modules_in(tree)
    if refusal is not None and not _is_certain(tree, state_dicts.get("model")):
        raise refusal
    if not state_dicts and not may_be_none:
        raise CheckpointMismatch(
            f"{file.label} has no state dict in its first {_DEPTH} levels. Its first keys are {list(tree)[:8]}"
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

    Otherwise, where the module itself was pickled, an average of the weights could be taken for the weights.
    """
    named = [tree[name] for name in _MODEL_NAMES if name in tree]
    return any(state is model for state in named) and not any(
        refused_in(candidate) for candidate in named if candidate is not model
    )


def _state_dicts(path: tuple[str, ...], node: Tree, depth: int) -> Iterator[tuple[tuple[str, ...], Tree]]:
    if not all(isinstance(key, str) for key in node) or is_optimizer(node):
        return
    leaves = {key: value for key, value in node.items() if not key.endswith(_EXTRA_STATE)}
    if leaves and all(isinstance(value, torch.Tensor) for value in leaves.values()):
        yield path, node
        return
    for key, value in node.items():
        if isinstance(value, Mapping) and depth:
            yield from _state_dicts((*path, key), value, depth - 1)


def is_optimizer(node: Tree) -> bool:
    return "param_groups" in node and "state" in node


def other_leaves(node: Tree, taken: set[int], prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values outside the state dicts."""
    if id(node) in taken or is_optimizer(node) or not depth:
        return
    for key, value in node.items():
        if not isinstance(key, str):
            continue
        if isinstance(value, Mapping):
            yield from other_leaves(value, taken, f"{prefix}{key}.", depth - 1)
        elif isinstance(value, (torch.Tensor, StandIn)) or values.is_plain(value):
            yield prefix + key, value


def _replace_by_loaded(contents: Contents, file: OpenFile) -> None:
    """Replace the tensors of extra states, which are on the meta device, by loaded tensors.

    Torch makes them, with their classes, layouts and shared memory. No other payload is read.
    """
    # A stand-in for a tensor that cannot be on the meta device has no record: then all records are read.
    tensors = [leaf for leaf in leaves_of(contents.values) if isinstance(leaf, torch.Tensor)]
    needs_all = any(isinstance(tensor, _NotOnMeta) for tensor in tensors)
    wanted = None if needs_all else {record_offset(tensor) or 0 for tensor in tensors}
    for module, state in _modules(file, *structure(file, wanted), may_be_none=True).items():
        for key, leaf in state.items():
            if not isinstance(contents.values.get(f"{module}.{key}", RefusedValue("")), RefusedValue):
                contents.values[f"{module}.{key}"] = leaf


def view_of(file: OpenFile, key: str, tensor: torch.Tensor) -> View:
    if not _is_plain(tensor):
        raise CheckpointMismatch(
            f"{file.label}: {key} is not a plain tensor (a {type(tensor).__name__}). Load the file with torch.load, "
            f"convert the tensor (to_dense(), dequantize(), resolve_conj()) and save it again."
        )
    # The position is a note in the storage, and the file decides about offset, shape and strides: both are checked.
    begin = record_offset(tensor)
    if begin not in file.sizes:
        raise CheckpointCorrupt(
            f"{file.label}: the zip has no record at the position where torch stores the bytes of {key}. If "
            f"torch.load reads the file, save it again with torch.save."
        )
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    first = int(tensor.storage_offset()) * tensor.dtype.itemsize
    view = View(file.name, begin + first, tensor.dtype, tuple(tensor.shape), strides)
    if first + view.span > file.sizes[begin] or first < 0 or min(strides or (), default=0) < 0:
        raise CheckpointCorrupt(f"{file.label}: {key} lies outside of its record")
    return view


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout == torch.strided
    return plain and not (tensor.is_conj() or tensor.is_neg())


def structure(
    file: OpenFile, wanted: Collection[int] | None = (), use: Use | None = None
) -> tuple[Any, UnsafeCheckpoint | None]:
    """Return the content of a file, by default without payloads, and the error to raise if a stand-in is needed."""
    try:
        tree, names = load(file.archive, use or (FILE if wanted is None or wanted else ON_META), wanted)
        return tree, _refusal(file, names[0]) if names else None
    except Refused as error:
        raise _refusal(file, error) from None
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{file.label}: {error}") from None
    except Exception as error:
        raise CheckpointCorrupt(f"{file.label} is damaged: {type(error).__name__}: {error}") from error


def _refusal(file: OpenFile, name: object) -> UnsafeCheckpoint:
    return UnsafeCheckpoint(
        f"{file.label} can only be loaded by executing code that it names ({name}); nothing was executed. If you "
        f"trust its origin, write the weights to a separate file once: held = torch.load({file.name!r}, "
        f"weights_only=False), then torch.save(held['state_dict'], 'weights.pt'), or held.state_dict() if it is a "
        f"module."
    )


class _NotOnMeta(torch.Tensor):
    """Tensor in place of a tensor that cannot be on the meta device. Each such kind has a subclass."""


def _not_on_meta(kind: str) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device="meta").as_subclass(type(f"{kind} tensor", (_NotOnMeta,), {}))


_REBUILD = "torch._utils._rebuild_"
ON_META = replace(
    FILE,
    globals={
        **FILE.globals,
        f"{_REBUILD}nested_tensor": lambda *args: _not_on_meta("nested"),
        f"{_REBUILD}qtensor": lambda *args: _not_on_meta("quantized"),
        f"{_REBUILD}sparse_tensor": lambda layout, data: _not_on_meta(str(layout)),  # from torch 2.15 on
    },
)


def pickle_of(files: Files, name: str) -> bytes:
    """Return the pickle of a file, after a check that the file is a complete zip of ``torch.save``.

    Raises:
        CheckpointCorrupt: The zip's directory contradicts itself or the file.
        CheckpointMismatch: The zip is of another kind, or was written on a machine of the other byte order.
    """
    with opened(files, name) as file, damage_in(file.label):
        return file.archive.read(PICKLE).tobytes()


@contextmanager
def opened(files: Files, name: str) -> Iterator[OpenFile]:
    """Open a file after the checks of :func:`pickle_of`."""
    path = f"{files.where}/{name}"
    with ExitStack() as stack:
        with damage_in(path):
            size = files.size(name)
            archive = Archive(stack.enter_context(files.open(name)), size)
        if not archive.is_of_torch:
            raise CheckpointMismatch(f"{path} is a zip, but not a torch.save file")
        if "constants.pkl" in archive.records:
            raise CheckpointMismatch(f"{path} is a TorchScript archive; save its state_dict()")
        if archive.is_swapped:
            raise CheckpointMismatch(
                f"{path} was written in another byte order. Load it where it was written, and save it again."
            )
        yield OpenFile(name, size, path, archive)
