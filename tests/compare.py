"""The one comparison for bytes that only moved: dtype, shape and every byte.

``torch.equal`` would pass -0.0 for 0.0 and fail NaN for NaN.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

import dcp_plugin


def full(value: Any) -> Any:
    """The whole tensor on the host; collective for sharded ones. Anything else as it is."""
    if isinstance(value, DTensor):
        return value.detach().full_tensor().cpu().clone()
    if isinstance(value, ShardedTensor):
        return _full_of_sharded(value)
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _full_of_sharded(value: ShardedTensor) -> torch.Tensor:
    """All ranks get the whole; ``ShardedTensor.gather`` gives it to one."""
    whole = torch.zeros(value.size(), dtype=value.dtype)
    for shard in value.local_shards():
        where = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        box = tuple(slice(offset, offset + size) for offset, size in where)
        whole[box] = shard.tensor.cpu()
    torch.distributed.all_reduce(whole, group=value._process_group)
    return whole


def full_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: full(value) for key, value in state.items()}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name the leaves of nested dicts by the path to them."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def only_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a flat state, without the other values."""
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def same_bytes(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)
    return type(one) is type(other) and bool(one == other)


def same_tree(one: Any, other: Any) -> bool:
    """Two nested states have the same values, bytes, classes, and keys in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same_tree(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_tree, one, other))
    if isinstance(one, io.BytesIO):
        return (one.getvalue(), one.tell()) == (other.getvalue(), other.tell())
    return same_bytes(full(one), full(other))


def weights_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a whole state that is of the model, under the names that the model has for it."""
    return {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Two flat states are the same, byte for byte. Names the keys that differ."""
    assert set(one) == set(other), f"only in one of them: {sorted(set(one) ^ set(other))}"
    different = [key for key in one if not same_bytes(one[key], other[key])]
    assert not different, f"{len(different)} of {len(one)} differ: {different[:5]}"


def assert_saved(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """A checkpoint has these tensors, and nothing else."""
    found = {key: (~value.view(torch.uint8)).view(value.dtype) for key, value in state.items()}  # all bytes are others
    dcp_plugin.load(found, path)
    assert_same(found, state)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, in the order of its elements."""
    return bytes(tensor.detach().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
