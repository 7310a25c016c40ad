"""Reader of rank files: one ``torch.save`` file per rank, which has the shards of this rank.

======================================================  ==================================================
name                                                    origin
======================================================  ==================================================
``model_world_size_N_rank_R.pt``, ``optim_…``,          verl
``extra_state_…``
``pytorch_model_fsdp_M_rankR.bin``, ``optimizer_M_…``   Accelerate, with ``use_dcp=False``
======================================================  ==================================================

A shard is a DTensor or a ShardedTensor, which notes where the shard begins in its tensor. The rule: no distributed
object is made from a file. Inert objects take the place of meshes and placements, and the notes are checked: a shard
has the shape that its mesh and its placements imply, and the shards of all ranks fill the tensor.

A plain tensor has no such note. It counts as a copy if all ranks have the same bytes. Otherwise it is refused when a
load asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointMismatch, some, warn
from dcp_plugin.core.format import Files, values
from dcp_plugin.core.format.foreign import Contents, View, torch_file
from dcp_plugin.core.format.foreign.torch_file import RefusedValue, refused_in
from dcp_plugin.core.tensors._torch import TENSOR_GLOBALS, record_offset

_OUR_NAMES = {"pytorch_model_fsdp": "model", "optimizer": "optim"}
_KINDS = {"model": "module", "optim": "optimizer"}


class Inert:
    """Object in place of one of ``torch.distributed``, with its arguments and its state."""

    of: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Inert:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Shards(torch.Tensor):
    """Tensor in place of a DTensor or ShardedTensor. ``made_of`` is its state, and ``of`` the name of its class."""

    of: str
    made_of: Any


def _rebuilt(function: Any, cls: type, args: tuple[Any, ...], state: Any) -> Any:
    if not issubclass(cls, Inert):
        return TENSOR_GLOBALS[_REBUILT](function, cls, args, state)
    made = torch.empty(0, dtype=torch.uint8, device="meta").as_subclass(Shards)
    made.of, made.made_of = cls.of, state
    return made


_REBUILT = "torch._tensor._rebuild_from_type_v2"
_INERT = (
    *("tensor.DTensor", "tensor._dtensor_spec.DTensorSpec", "tensor._dtensor_spec.TensorMeta"),
    *("tensor._dtensor_spec.ShardOrderEntry", "device_mesh.DeviceMesh"),
    *(f"tensor.placement_types.{name}" for name in ("Shard", "_StridedShard", "Replicate")),
    *(f"_mesh_layout.{name}" for name in ("_MeshLayout", "_FlatLayout")),
    *("_shard.sharded_tensor.api.ShardedTensor", "_shard.sharded_tensor.metadata.ShardedTensorMetadata"),
    *("_shard.sharded_tensor.shard.Shard", "_shard.metadata.ShardMetadata", "remote_device._remote_device"),
)
"""Classes of ``torch.distributed`` in the pickles of shards, as torch 2.13 names them."""
_USE = replace(
    torch_file.ON_META,
    globals={
        **torch_file.ON_META.globals,
        _REBUILT: _rebuilt,
        **{f"torch.distributed.{name}": type("Inert", (Inert,), {"of": name.rpartition(".")[2]}) for name in _INERT},
    },
)


class _Entry(NamedTuple):
    """Value or tensor of a rank."""

    file: str
    value: Any
    views: list[View]
    """Shards of the rank; of a plain tensor the tensor itself."""
    shape: tuple[int, ...] | None = None
    """Shape of the tensor that the shards are of; None if it is plain."""
    checksum: int = 0
    """CRC32 of the record that a plain tensor is in, or that has a shard of a DTensor and nothing else; else 0."""
    world_size: int = 0


def read_files(files: Files, names: list[str]) -> Contents:
    """Return the joint contents of the rank files in a directory: the full tensors of models and optimizers.

    A value of ``extra_state`` that differs between ranks becomes ``<name>.<rank>``, as with ``PerRank``.

    Raises:
        CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: A file cannot be read
            (:func:`dcp_plugin.core.format.foreign.torch_file.read_file`), the file of a rank is missing, or two ranks
            contradict each other.
    """
    contents = Contents("torch.save", {}, shares_bytes=True)
    for name, by_rank in _names_by_rank(files, names).items():
        entries: dict[str, dict[int, _Entry]] = {}
        for rank, file in sorted(by_rank.items()):
            contents.files[file] = files.size(file)
            contents.format = "accelerate" if file.endswith(".bin") else contents.format
            for key, path, entry in _entries(files, file, name):
                entries.setdefault(key, {})[rank] = entry
                contents.paths |= {key: path} if path else {}
        on_meshes = max((entry.world_size for of_key in entries.values() for entry in of_key.values()), default=0)
        _require_ranks(files, by_rank, max(on_meshes, len(by_rank)))
        if kind := _KINDS.get(name.partition("_")[0]):
            contents.kinds[name] = kind
        for key, of_key in entries.items():
            _add(contents, files, key, of_key, len(by_rank))
        if drifted := [key for key, of_key in entries.items() if _have_drifted(of_key.values())]:
            warn(
                f"{files.where}: copies of shards differ between ranks, and those of the lowest rank count: "
                f"{some(drifted)}"
            )
    return contents


def _names_by_rank(files: Files, names: list[str]) -> dict[str, dict[int, str]]:
    """Return the files of each rank, by our name for the model, the optimizer or the other state in them."""
    found: dict[str, dict[int, str]] = {}
    of_size: dict[int, str] = {}
    for match in filter(None, map(torch_file.RANK_FILE.fullmatch, names)):
        if match[1]:
            found.setdefault(match[1], {})[int(match[3])] = match[0]
            of_size.setdefault(int(match[2]), match[0])
        else:
            found.setdefault(f"{_OUR_NAMES[match[4]]}_{match[5] or 0}", {})[int(match[6])] = match[0]
    if len(of_size) > 1:
        first, second = list(of_size.values())[:2]
        raise CheckpointMismatch(
            f"{files.where} has files of ranks of two world sizes: {first} and {second}. Move those of one world size "
            f"to a folder of their own."
        )
    for by_rank in found.values():
        _require_ranks(files, by_rank, next(iter(of_size), max(by_rank) + 1))
    kinds = [name.partition("_")[0] for name in found]
    return {
        kind if name.endswith("_0") and kinds.count(kind) == 1 else name: by_rank
        for kind, (name, by_rank) in zip(kinds, found.items(), strict=True)
    }


def _require_ranks(files: Files, by_rank: dict[int, str], world_size: int) -> None:
    """Raise CheckpointCorrupt unless there is a file of each rank."""
    for rank in range(world_size):
        if rank not in by_rank:
            known = next(iter(by_rank.values()))
            raise CheckpointCorrupt(
                f"{files.where}: the file of rank {rank} is missing beside {known}; {world_size} ranks have written "
                f"this checkpoint. Copy the files of all ranks into one folder."
            )


def _entries(files: Files, name: str, of: str) -> Iterator[tuple[str, tuple[str | int, ...] | None, _Entry]]:
    """Yield the key, the path (None for the default) and the entry of each tensor and value in a file."""
    with torch_file.opened(files, name) as file:
        tree, refusal = torch_file.structure(file, use=_USE)
        if not isinstance(tree, Mapping):
            raise refusal or CheckpointMismatch(f"{file.label} holds a {type(tree).__name__}, not a state dict")
        if of.startswith("model"):
            for key, leaf in tree.items():
                yield f"{of}.{key}", None, _entry(file, f"{of}.{key}", leaf)
        elif torch_file.is_optimizer(tree):
            for path, leaf in torch_file.leaves_of_optimizer(tree, (of,)):
                key = ".".join(map(str, path))
                yield key, path, _entry(file, key, leaf)
        else:
            for key, leaf in torch_file.other_leaves(tree, set()):
                yield key, None, _entry(file, key, leaf)


def _entry(file: torch_file.OpenFile, key: str, leaf: Any) -> _Entry:
    if isinstance(leaf, Shards):
        try:
            return (_of_sharded_tensor if leaf.of == "ShardedTensor" else _of_dtensor)(file, key, leaf)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointCorrupt(
                f"{file.label}: {key} is a {leaf.of} that is damaged, or of another kind than torch's FSDP and tensor "
                f"parallelism make: {error!r}"
            ) from error
    if isinstance(leaf, torch.Tensor):
        view = torch_file.view_of(file, key, leaf)
        return _Entry(file.name, None, [view], checksum=file.checksum_of(leaf))
    if refused := refused_in(leaf):
        return _Entry(file.name, RefusedValue(refused), [])
    if not values.is_plain(leaf):
        return _Entry(file.name, RefusedValue(reason=f"is a {type(leaf).__name__}, which is not read from files"), [])
    return _Entry(file.name, leaf, [])


def _of_dtensor(file: torch_file.OpenFile, key: str, leaf: Shards) -> _Entry:
    held = _attributes(leaf.made_of)
    spec = _attributes(held["_spec"].state)
    mesh = _attributes(spec["mesh"].state)
    shape = tuple(map(int, spec["tensor_meta"].args[0]))
    sizes, at = tuple(map(int, _mesh_sizes(mesh))), mesh["_coordinate_on_dim"]
    states = [(type(placement).of, _attributes(placement.state)) for placement in spec["placements"]]
    placements = [(kind, int(state.get("dim", -1)), int(state.get("split_factor", 1))) for kind, state in states]
    if at is None:  # the rank is not part of the mesh
        return _Entry(file.name, None, [], shape, world_size=prod(sizes))
    local = held["_local_tensor"]
    view = torch_file.view_of(file, key, local)
    offsets, implied = _box(shape, sizes, at, placements)
    if view.shape != implied:
        raise ValueError(f"a shard of shape {view.shape} by {placements} on a mesh of {sizes}, which imply {implied}")
    # A shard may share its record with padding, which differs between ranks without a meaning.
    is_alone = file.sizes.get(record_offset(local) or 0) == local.numel() * local.itemsize
    checksum = file.checksum_of(local) if is_alone else 0
    return _Entry(file.name, None, [view._replace(offsets=offsets)], shape, checksum, prod(sizes))


def _of_sharded_tensor(file: torch_file.OpenFile, key: str, leaf: Shards) -> _Entry:
    shards, metadata, *_ = leaf.made_of
    metadata = _attributes(metadata.state)
    shape = tuple(map(int, metadata["size"]))
    views = []
    for shard in map(_attributes, (shard.state for shard in shards)):
        place = _attributes(shard["metadata"].state)
        view, begin = torch_file.view_of(file, key, shard["tensor"]), tuple(place["shard_offsets"])
        if not all(0 <= at <= size - rows for at, rows, size in zip(begin, view.shape, shape, strict=True)):
            raise ValueError(f"a shard of shape {view.shape} at {begin} of a tensor of shape {shape}")
        views.append(view._replace(offsets=begin))
    return _Entry(file.name, None, views, shape, world_size=len(metadata["shards_metadata"]))


def _attributes(state: Any) -> dict[str, Any]:
    """Return the attributes in a state. Those of a class with slots come in pairs of dictionaries."""
    parts = state if isinstance(state, tuple) else (state,)
    return {name: value for part in parts if part for name, value in part.items()}


def _mesh_sizes(mesh: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of a mesh. Versions of torch before 2.9 keep it as a tensor, later ones as a layout."""
    if "_layout" not in mesh:
        return tuple(mesh["mesh"].shape)
    layout = _attributes(mesh["_layout"].state)
    axes = [_attributes(axis.state)["shape"] for axis in layout["axes"]] if "axes" in layout else layout["shape"]
    axes = (axes,) if isinstance(axes, int) else axes
    return tuple(axis if isinstance(axis, int) else prod(axis) for axis in axes)


def _box(
    shape: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...], placements: list[tuple[str, int, int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and the sizes of a shard. Raises ValueError if a rank has something else than one box.

    Args:
        at: Position of the rank in the mesh.
        placements: Class, dimension and split factor for each dimension of the mesh.
    """
    order: list[tuple[int, int, int]] = []
    for (kind, dim, split), size, number in reversed(list(zip(placements, mesh, at, strict=True))):
        if kind == "Shard":
            order.insert(0, (dim, size, number))
        elif kind == "_StridedShard":  # this cut comes after those of later dimensions of the mesh
            if split != prod(other for within, other, _ in order if within == dim):
                raise ValueError("several boxes on each rank")
            order.append((dim, size, number))
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, count, number in order:
        if not 0 <= number < count:
            raise ValueError(f"position {number} of {count} in the mesh")
        rows = -(-sizes[dim] // count)
        start = min(number * rows, sizes[dim])
        offsets[dim], sizes[dim] = offsets[dim] + start, min(rows, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def _add(contents: Contents, files: Files, key: str, of_rank: dict[int, _Entry], count: int) -> None:
    """Add a key with the entries of all ranks that have it. ``count`` is the number of ranks.

    Raises:
        CheckpointCorrupt: The shards do not fill the tensor.
    """
    first = next(iter(of_rank.values()))
    if first.shape is not None:
        _add_shards(contents, files, key, first.shape, list(of_rank.values()))
    elif differing := next((entry for entry in of_rank.values() if not _is_same(first, entry)), None):
        _add_differing(contents, key, of_rank, f"differs between {first.file} and {differing.file}")
    elif first.views and len(of_rank) < count:
        _add_differing(contents, key, of_rank, f"is in {len(of_rank)} of {count} rank files alone")
    else:
        _add_plain(contents, key, first)


def _add_differing(contents: Contents, key: str, of_rank: dict[int, _Entry], reason: str) -> None:
    name, *below = key.split(".")
    if name in contents.kinds:
        pattern = f"{name}.*" if contents.kinds[name] == "optimizer" else key
        contents.values[key] = RefusedValue(
            reason=f"{reason}, without a note of its place in a tensor, as flat shards of FSDP1. To load the rest, "
            f"leave it out with exclude={pattern!r}; or load it with the tool that saved it, and save it with "
            f"dcp_plugin."
        )
        return
    for rank, entry in of_rank.items():
        path = (name, str(rank), *below)
        contents.paths[".".join(path)] = path
        _add_plain(contents, ".".join(path), entry)


def _have_drifted(entries: Iterable[_Entry]) -> bool:
    """Return whether ranks have different bytes for the same shard of a DTensor."""
    known: dict[Any, int] = {}
    shards = [entry for entry in entries if entry.shape is not None and entry.checksum]
    return any(entry.checksum != known.setdefault(entry.views[0].offsets, entry.checksum) for entry in shards)


def _is_same(entry: _Entry, other: _Entry) -> bool:
    """Return whether plain tensors have the same bytes, or values are the same."""
    layouts = [[view[2:] for view in views] for views in (entry.views, other.views)]
    return layouts[0] == layouts[1] and (entry.checksum, repr(entry.value)) == (other.checksum, repr(other.value))


def _add_plain(contents: Contents, key: str, entry: _Entry) -> None:
    if entry.views:
        contents.views[key] = entry.views[0]
    else:
        contents.values[key] = entry.value


def _add_shards(contents: Contents, files: Files, key: str, shape: tuple[int, ...], entries: list[_Entry]) -> None:
    parts: dict[Any, View] = {}
    for view in (view for entry in entries for view in entry.views):
        if 0 not in view.shape or 0 in shape:
            parts.setdefault(view.offsets, view)  # of copies, that of the first rank counts
    kinds = {(entry.shape, view.dtype) for entry in entries for view in entry.views}
    if sum(prod(part.shape) for part in parts.values()) != prod(shape) or len(kinds) != 1:
        raise CheckpointCorrupt(
            f"{files.where}: the shards of {key} in {entries[0].file}, … do not fill its shape {shape}. Copy the files "
            f"of all ranks, from one save."
        )
    if len(parts) == 1:
        contents.views[key] = next(iter(parts.values()))._replace(offsets=None)
    else:
        contents.parts[key] = list(parts.values())
