"""Reader of DeepSpeed's checkpoints: the files of ZeRO 1 to 3, and universal checkpoints.

==================================================  ==================================================================
file                                                content
==================================================  ==================================================================
``mp_rank_00_model_states.pt``                      ZeRO 1 and 2: the module in the dtype of the training, and shapes
``zero_pp_rank_R_mp_rank_00_model_states.pt``       ZeRO 3: buffers, shapes, and the rank's parts of frozen parameters
``[bf16_]zero_pp_rank_R_mp_rank_00_optim_…``        the rank's parts of the weights and of the optimizer's state
``zero/<parameter>/fp32.pt``, ``exp_avg.pt``, …     a universal checkpoint, of which each file has a complete tensor
==================================================  ==================================================================

An optimizer of ZeRO has flat tensors, each of several parameters. ZeRO 1 and 2 lay the parameters of a group end to end
and cut the result into one part per rank. ZeRO 3 cuts each parameter into one part per rank, and lays the parts end to
end. Parts begin anywhere in a row, so a part of a parameter becomes several boxes: the rest of a row, complete rows,
and the begin of a row.

The rule: the weights are those that the optimizer updates, in its dtype. Other tensors have the dtype of the
training. No class of DeepSpeed is imported, and no flat tensor is read here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, takewhile
from math import prod
from typing import Any, NamedTuple

import torch

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from dcp_plugin.core.format import Files, exists, values
from dcp_plugin.core.format.foreign import Contents, View, torch_file
from dcp_plugin.core.format.foreign.torch_file import OpenFile, RefusedValue, refused_in
from dcp_plugin.core.format.pickles.unpickler import StandIn

_MODEL, _MODEL_OF_RANK = "mp_rank_{mp:02d}_model_states.pt", "zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt"
_OPTIMIZER = "zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
_UNIVERSAL = "zero/optimizer_state.pt"
_OF_EXPERTS = ("expp_rank_0_mp_rank_00_optim_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt")
_LAYOUT = (
    *("module", "optimizer", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes"),
    *("frozen_param_fragments", "ds_config", "ds_version", "dp_world_size", "mp_world_size", "model", "optim"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_autoep_layers"),
)
"""Entries of the model states that describe the checkpoint itself."""
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 1 << 60
_LIES = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)
"""Errors of code that reads a tree with other contents than DeepSpeed writes."""

Shapes = dict[str, tuple[int, ...]]
Pieces = list[tuple[int, int, int, int]]
"""Parts of a parameter: the rank, the first element in the rank's flat tensor, and begin and end in the parameter."""
Cut = Callable[[Sequence[int], Sequence[int], Sequence[int]], Iterator[Pieces]]


class _Group(NamedTuple):
    """State of one rank for a group of parameters."""

    flats: dict[str, View]
    """Flat tensors by slot; the weights have the slot ``""``."""
    shared: dict[str, tuple[Any, str]]
    """Values that all parameters share, such as the step and the learning rate, each with a text to compare it by."""


class _Folder(NamedTuple):
    """Folder that is being read. Its name relative to the checkpoint is the ``prefix`` of its files' names."""

    files: Files
    prefix: str
    contents: Contents

    @property
    def where(self) -> str:
        return f"{self.files.where}/{self.prefix}".rstrip("/")

    def has(self, name: str) -> bool:
        return exists(self.files, self.prefix + name)

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[OpenFile, Any]]:
        """Open a file, and load its structure without payloads. Raise CheckpointCorrupt if the file is missing."""
        if not self.has(name):
            raise CheckpointCorrupt(f"{self.where}: {name} is missing. Copy the files of all ranks into one folder.")
        with torch_file.opened(self.files, self.prefix + name) as file:
            self.contents.files[file.name] = file.size
            tree, refusal = torch_file.structure(file)
            if isinstance(tree, StandIn) and refusal:
                raise refusal
            yield file, tree

    def put(self, key: str, stored: Any) -> None:
        if isinstance(stored, (int, float)) and key.startswith("optim.state.") and key.endswith(".step"):
            stored = torch.tensor(float(stored), dtype=torch.float32, device="cpu")  # as in optimizers of torch
        self.contents.kinds |= {"optim": "optimizer"} if key.startswith("optim.") else {}
        held: dict[str, Any] = self.contents.views if isinstance(stored, View) else self.contents.values
        held[key] = stored

    def put_group(self, key: str, shapes: Shapes, flats: list[View], paddings: Sequence[int], cut: Cut) -> None:
        """Add tensors that one flat tensor of each rank contains. ``key`` has braces in place of their names."""
        pieces = list(cut(list(map(prod, shapes.values())), paddings, [flat.shape[0] for flat in flats]))
        (dtype,) = {flat.dtype for flat in flats}
        for (name, shape), of_name in zip(shapes.items(), pieces, strict=True):
            parts = [
                View(flats[rank].file, flats[rank].start + (at + first) * dtype.itemsize, dtype, sizes, None, offsets)
                for rank, at, begin, end in of_name
                for offsets, sizes, first in _boxes(shape, begin, end)
            ]
            if len(parts) > 1:
                self.contents.parts[key.replace("{}", name)] = parts
            else:  # a tensor without elements has no part
                self.put(key.replace("{}", name), (parts or flats)[0]._replace(shape=shape, offsets=None))

    def put_shared(self, names: Iterable[str], shared: dict[str, tuple[Any, str]]) -> None:
        """Add what parameters have in common, to each of them."""
        for name in names:
            for key, (stored, _) in shared.items():
                self.put(f"optim.{key.replace('{}', name)}", stored)


def read_folder(files: Files, prefix: str) -> Contents:
    """Return the full tensors of the model and of the optimizer, and the plain values of the engine and its client.

    Args:
        prefix: Folder with the files of the ranks, relative to ``files``: ``""``, or a name that ends in ``/``.

    Raises:
        CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: A file cannot be read, the file of a rank is missing,
            two ranks contradict each other, or the ranks have parts that only DeepSpeed puts together.
    """
    folder = _Folder(files, prefix, Contents("deepspeed", {}, kinds={"model": "module"}, shares_bytes=True))
    try:
        return _read(folder)
    except CheckpointError:
        raise
    except _LIES as error:
        name = next(reversed(folder.contents.files))
        raise CheckpointCorrupt(
            f"{files.where}/{name} is damaged, or of an unknown version of DeepSpeed: {error!r}"
        ) from error


def _read(folder: _Folder) -> Contents:
    name = _MODEL if folder.has(_MODEL.format(mp=0)) else _MODEL_OF_RANK
    is_universal = folder.has(_UNIVERSAL)
    parallel = (name.format(rank=0, mp=mp) for mp in range(1, 1000))
    others = list(takewhile(folder.has, parallel)) if is_universal else []
    with folder.opened(name.format(rank=0, mp=0)) as (file, tree):
        if not is_universal:
            _refuse_parallel(folder, tree, name)
            if not tree.get("param_shapes"):  # no ZeRO
                return torch_file.read_file(folder.files, file.name)
        groups, world_size = list(map(_shapes, tree["param_shapes"])), max(1, int(tree["dp_world_size"]))
        trained = {key for shapes in groups for key in shapes}
        shared = {alias: source for alias, source in (tree.get("shared_params") or {}).items() if source in trained}
        # The module of ZeRO 3 has no elements of parameters, and that of one tensor parallel rank has only its own.
        module = tree["module"] or {}
        known = module.keys() if name == _MODEL and not others else module.keys() & tree["buffer_names"]
        leaves = {f"model.{key}": module[key] for key in module if key in known - trained - shared.keys()}
        leaves |= torch_file.other_leaves({key: value for key, value in tree.items() if key not in _LAYOUT}, set())
        for key, leaf in leaves.items():
            folder.put(key, _stored(file, key, leaf))
        frozen, step = _shapes(tree.get("frozen_param_shapes") or {}), tree.get("global_steps")
    if name == _MODEL_OF_RANK and not others:
        _add_frozen(folder, frozen, world_size, (groups, step))
    for other in others:
        with folder.opened(other) as (_, tree):
            for shapes, more in zip(groups, tree["param_shapes"], strict=True):
                shapes |= _shapes(more)
    if is_universal:
        _add_universal(folder, groups)
    else:
        _add_partitions(folder, groups, world_size)
    for alias, source in shared.items():
        held: dict[str, Any] = (
            folder.contents.views if f"model.{source}" in folder.contents.views else folder.contents.parts
        )
        held[f"model.{alias}"] = held[f"model.{source}"]
    return folder.contents


def _refuse_parallel(folder: _Folder, tree: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointMismatch if ranks have other parts of the model than those of ZeRO."""
    has_experts = any(map(folder.has, _OF_EXPERTS)) or tree.get("ds_autoep_layers")
    is_pipeline = tree.get("param_shapes") and tree["module"] is None
    if has_experts or is_pipeline or tree.get("mp_world_size", 1) != 1 or folder.has(name.format(rank=0, mp=1)):
        kind = "experts on single ranks" if has_experts else "tensor or pipeline parallel ranks"
        raise CheckpointMismatch(
            f"{folder.where} is a checkpoint of DeepSpeed with {kind}. Convert it where DeepSpeed is installed, and "
            f"name the result: python -m deepspeed.checkpoint.ds_to_universal --input_folder {folder.where} "
            f"--output_folder {folder.where}_universal"
        )


def _shapes(shapes: Mapping[str, Sequence[int]]) -> Shapes:
    """Return the shapes of parameters by name, checked."""
    for key, shape in shapes.items():
        is_valid = isinstance(key, str) and len(shape) <= _MOST_DIMENSIONS and all(type(size) is int for size in shape)
        if not is_valid or min(shape, default=0) < 0 or prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
            raise ValueError(f"the parameter {key!r:.99} has an invalid shape")
    return {key: tuple(shape) for key, shape in shapes.items()}


def _stored(file: OpenFile, key: str, leaf: Any) -> Any:
    """Return the view of a tensor, a plain value, or the reason why a value is not read."""
    if isinstance(leaf, torch.Tensor):
        return torch_file.view_of(file, key, leaf)
    if refused := refused_in(leaf):
        return RefusedValue(refused)
    return leaf if values.is_plain(leaf) else RefusedValue(reason=f"is a {type(leaf).__name__}, which is not read")


def _flat(file: OpenFile, key: str, tensor: torch.Tensor) -> View:
    view = torch_file.view_of(file, key, tensor)
    if len(view.shape) != 1 or view.strides is not None:
        raise ValueError(f"{key} has the shape {view.shape}, and a part of ZeRO is flat")
    return view


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield the boxes that elements ``begin`` to ``end`` of a row-major tensor consist of.

    Each has its offsets, its sizes, and the number of elements before it in the range. There are at most two for each
    dimension.
    """
    if not shape:
        yield (), (), 0
    at, row = begin, prod(shape[1:])
    while shape and at < end:
        number, within = divmod(at, row)
        rows = 0 if within else (end - at) // row
        if rows:
            yield (number, *(0 for _ in shape[1:])), (rows, *shape[1:]), at - begin
        else:
            for offsets, sizes, first in _boxes(shape[1:], within, min(end - number * row, row)):
                yield (number, *offsets), (1, *sizes), at - begin + first
        at = min(end, (number + max(rows, 1)) * row)


def _end_to_end(sizes: Sequence[int], paddings: Sequence[int], lengths: Sequence[int]) -> Iterator[Pieces]:
    """Yield the pieces of each parameter in ZeRO 1 and 2.

    Args:
        paddings: Elements after each parameter.
        lengths: Elements of the flat tensor of each rank.
    """
    starts, at = [0, *accumulate(lengths)], 0
    for size, padding in zip(sizes, paddings, strict=True):
        pieces, begin, rank = [], 0, bisect_right(starts, at) - 1
        while begin < size:
            end = min(size, starts[rank + 1] - at)
            pieces.append((rank, at + begin - starts[rank], begin, end))
            begin, rank = end, rank + 1
        yield pieces
        at += size + padding
    alignment = 2 * len(lengths)  # as in zero_to_fp32: a padding at the end is shorter
    if -(-at // alignment) != -(-starts[-1] // alignment):
        raise ValueError(f"the ranks have {starts[-1]} elements, and the parameters {at}")


def _each_cut(sizes: Sequence[int], paddings: Sequence[int], lengths: Sequence[int]) -> Iterator[Pieces]:
    """Yield the pieces of each parameter in ZeRO 3; the arguments are those of :func:`_end_to_end`."""
    at = 0
    for size in sizes:
        part = -(-size // len(lengths))
        pieces = [(rank, at, rank * part, min(size, (rank + 1) * part)) for rank in range(len(lengths))]
        yield [piece for piece in pieces if piece[2] < piece[3]]
        at += part
    if set(lengths) != {at}:
        raise ValueError(f"the ranks have {sorted(set(lengths))} elements, and parts of the parameters {at}")


def _add_frozen(folder: _Folder, shapes: Shapes, world_size: int, described: tuple[list[Shapes], Any]) -> None:
    """Add the parameters that ZeRO 3 does not train. Each rank has a part of them in its model states.

    Args:
        described: Shapes of the trained parameters and the step, as rank 0 has them.

    Raises:
        CheckpointMismatch: The file of a rank is of another step, or of another model.
    """
    of_ranks = []
    for rank in range(world_size):
        with folder.opened(name := _MODEL_OF_RANK.format(rank=rank, mp=0)) as (file, tree):
            if (list(map(_shapes, tree["param_shapes"])), tree.get("global_steps")) != described:
                raise CheckpointMismatch(
                    f"{folder.where}: {name} has another step, or other parameters, than the file of rank 0, which is "
                    f"of step {described[1]}. Are these files of one save?"
                )
            of_ranks.append({key: _flat(file, key, tree["frozen_param_fragments"][key]) for key in shapes})
    for key, shape in shapes.items():
        flats = [of_rank[key] for of_rank in of_ranks]
        folder.put_group(f"model.{key}", {key: shape}, flats, [0], _each_cut)


def _add_partitions(folder: _Folder, groups: list[Shapes], world_size: int) -> None:
    """Add the weights and the optimizer's state from the files of all ranks."""
    prefix, *others = [kind for kind in ("bf16_", "") if folder.has(kind + _OPTIMIZER.format(rank=0))] or [""]
    if others:
        raise CheckpointMismatch(
            f"{folder.where}: it has the files of two trainings, {prefix + _OPTIMIZER.format(rank=0)} and "
            f"{_OPTIMIZER.format(rank=0)}. Move those of one of them to another folder."
        )
    of_ranks: list[list[_Group]] = []
    for rank in range(world_size):
        with folder.opened(prefix + _OPTIMIZER.format(rank=rank)) as (file, tree):
            state = tree["optimizer_state_dict"]
            counts = state["partition_count"]
            if set(counts if isinstance(counts, list) else [counts]) != {world_size}:
                raise ValueError(f"it has parts of {counts} ranks, and the checkpoint is of {world_size}")
            of_ranks.append(list(_groups_of(file, state, len(groups))))
            _require_agreement(folder, of_ranks[0], of_ranks[-1])
            paddings = state.get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
            cut = _each_cut if "fp32_flat_groups" in state else _end_to_end
    for shapes, padding, *of_group in zip(groups, paddings, *of_ranks, strict=True):
        for slot in of_group[0].flats:
            key, flats = f"optim.state.{{}}.{slot}" if slot else "model.{}", [group.flats[slot] for group in of_group]
            try:
                folder.put_group(key, shapes, flats, padding, cut)
            except (IndexError, ValueError) as error:
                if not slot:
                    raise
                # Quantized optimizers, for example, have one number for many elements.
                refused = RefusedValue(reason=f"is not stored in parts like those of the weights: {error}")
                folder.put_shared(shapes, {f"state.{{}}.{slot}": (refused, "")})
        folder.put_shared(shapes, of_group[0].shared)


def _groups_of(file: OpenFile, state: Mapping[str, Any], count: int) -> Iterator[_Group]:
    """Yield the state of a rank for each group of parameters."""
    of_zero_3 = "fp32_flat_groups" in state
    weights = state["fp32_flat_groups" if of_zero_3 else "single_partition_of_fp32_groups"]
    optimizer = state["optimizer_state_dict" if of_zero_3 else "base_optimizer_state"]
    if len(weights) != count:
        raise ValueError(f"it has {len(weights)} groups of parameters, and the model states have {count}")
    if isinstance(optimizer, list):  # with elastic_checkpoint, which stores no hyper-parameters
        optimizer = {"state": dict(enumerate(optimizer)), "param_groups": []}
    for number, weight in enumerate(weights):
        slots = {"": weight, **optimizer["state"].get(number, {})}
        flats = {slot: _flat(file, slot, x) for slot, x in slots.items() if isinstance(x, torch.Tensor) and x.dim()}
        scalars = {slot: leaf for slot, leaf in slots.items() if slot not in flats}
        yield _Group(flats, _shared(file, scalars, optimizer["param_groups"], number))


def _shared(
    file: OpenFile, scalars: Mapping[str, Any], groups: list[Mapping[str, Any]], number: int
) -> dict[str, tuple[Any, str]]:
    """Return the slots and hyper-parameters of all parameters in the flat tensor that an optimizer gives a number."""
    fields = next((group for group in groups if number in group["params"]), {})
    # FusedAdam of earlier versions counts the steps of a group.
    scalars = {**{slot: leaf for slot, leaf in fields.items() if slot == "step"}, **scalars}
    leaves = {f"state.{{}}.{slot}": leaf for slot, leaf in scalars.items()}
    leaves |= {f"param_groups.{{}}.{field}": leaf for field, leaf in fields.items() if field != "params"}
    return {
        key: (_stored(file, key, x), str(file.checksum_of(x)) if isinstance(x, torch.Tensor) else repr(x))
        for key, x in leaves.items()
    }


def _require_agreement(folder: _Folder, first: list[_Group], other: list[_Group]) -> None:
    """Raise CheckpointMismatch if two ranks have other slots, steps or hyper-parameters."""
    for one, another in zip(first, other, strict=True):
        texts = [
            {f"optim.{key}": text for key, (_, text) in group.shared.items()}
            | {f"optim.state.{{}}.{slot}" if slot else "model.{}": str(x.dtype) for slot, x in group.flats.items()}
            for group in (one, another)
        ]
        if differing := texts[0].items() ^ texts[1].items():
            raise CheckpointMismatch(
                f"{folder.where}: {min(differing)[0].replace('{}', '*')} differs between {one.flats[''].file} and "
                f"{another.flats[''].file}. Are these files of one save?"
            )


def _add_universal(folder: _Folder, groups: list[Shapes]) -> None:
    """Add the weights and the optimizer's state from the folders of the parameters."""
    with folder.opened(_UNIVERSAL) as (file, tree):
        states = tree.get("optimizer_state_dict", {}).get("state", {})  # of a rank of ZeRO 3, with the step
        for number, shapes in enumerate(groups):
            slots = states.get(number, {})
            scalars = {slot: x for slot, x in slots.items() if not isinstance(x, torch.Tensor) or not x.dim()}
            folder.put_shared(shapes, _shared(file, scalars, tree["param_groups"], number))
    for name, shape in (pair for shapes in groups for pair in shapes.items()):
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not the name of a folder")
        for slot in ("fp32", "exp_avg", "exp_avg_sq", "step"):
            path = f"zero/{name}/{slot}.pt"
            if slot != "fp32" and not folder.has(path):
                continue
            with folder.opened(path) as (file, leaf):
                key = f"model.{name}" if slot == "fp32" else f"optim.state.{name}.{slot}"
                if isinstance(leaf, torch.Tensor) and leaf.dim():  # of ZeRO 3, flat
                    flats = [_flat(file, key, leaf)]
                    folder.put_group(key, {name: shape}, flats, [0], _each_cut)
                else:
                    folder.put(key, _stored(file, key, leaf["param"] if isinstance(leaf, Mapping) else leaf))
