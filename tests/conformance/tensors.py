"""Corpus of tensors: one line each, a function that makes one with random values.

Each is saved and loaded as a value of the state, as a buffer, as a parameter (frozen), in a Stateful, and as a slot of
an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.testing._internal.two_tensor import TwoTensor

from tests.conformance.differences import UNCAST_SLOT
from tests.conformance.entries import Entry
from tests.conformance.tools import Tool
from tests.conformance.trace import Trace, describe_module

PLACES = ("value", "buffer", "parameter", "stateful", "slot")


@dataclass(frozen=True)
class TensorEntry(Entry):
    make: Callable[[], torch.Tensor]
    world_size: int = 1
    variants: tuple[str, ...] = PLACES
    is_cast_in_slots: bool = False
    """Stock casts it to the dtype of the parameter, which is float32."""

    def differs_in(self, variant: str) -> Mapping[str, str]:
        return UNCAST_SLOT if variant == "slot" and self.is_cast_in_slots else self.differs


def whole() -> torch.Tensor:
    return torch.rand(5, 6)


def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


def dtensor(*placements: Any, shape: tuple[int, ...] = (), size: tuple[int, ...] = (5, 6)) -> torch.Tensor:
    return distribute_tensor(torch.rand(*size), mesh(*shape), placements)


def partial_sum() -> torch.Tensor:
    return DTensor.from_local(whole(), mesh(), [Partial()])


def local_shards(columns: int = 2) -> torch.Tensor:
    """What torchrec has: some columns of a table on each rank."""
    width = 8 // dist.get_world_size() // columns
    start = dist.get_rank() * width * columns
    parts = [torch.rand(5, width) + dist.get_rank() for _ in range(columns)]
    return LocalShardsWrapper(parts, [(0, start + number * width) for number in range(columns)])


def dtensor_of_local_shards() -> torch.Tensor:
    parts = local_shards()
    return DTensor.from_local(parts, mesh(), [Shard(1)], run_check=False, shape=torch.Size([5, 8]), stride=(8, 1))


def rows_of_local_shards() -> torch.Tensor:
    rank = dist.get_rank()
    parts = LocalShardsWrapper([torch.rand(2 + rank, 6)], [(2 * rank, 0)])
    return DTensor.from_local(parts, mesh(), [Shard(0)], run_check=False, shape=torch.Size([5, 6]), stride=(6, 1))


def two() -> torch.Tensor:
    return TwoTensor(torch.rand(3, 2), torch.rand(3, 2))


def bits(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2, (4, 8 * dtype.itemsize), dtype=torch.uint8).view(dtype)


DTYPES = [
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "int8", "int16", "int32", "int64", "uint8", "uint16",
    "uint32", "uint64", "bool",
]  # fmt: skip

VALUE = ("value",)

TENSORS: dict[str, TensorEntry] = {
    **{
        name: TensorEntry(
            lambda name=name: bits(getattr(torch, name)),
            variants=("value", "slot"),
            is_cast_in_slots=name != "float32",
        )
        for name in DTYPES
    },
    "scalar": TensorEntry(lambda: torch.rand(())),
    "empty": TensorEntry(lambda: torch.rand(0)),
    "empty_rows": TensorEntry(lambda: torch.rand(3, 0, 2)),
    "nan": TensorEntry(lambda: torch.rand(4) / 0 - torch.inf),
    "negative_zero": TensorEntry(lambda: -torch.zeros(4)),
    "seven_dimensions": TensorEntry(lambda: torch.rand(1, 2, 1, 2, 1, 2, 1)),
    "view": TensorEntry(lambda: whole()[1:4, 2:]),
    "transposed": TensorEntry(lambda: whole().T),
    "every_other": TensorEntry(lambda: torch.rand(10)[::2]),
    "expanded": TensorEntry(lambda: torch.rand(1, 3).expand(4, 3), variants=("value", "buffer")),
    "channels_last": TensorEntry(lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "conjugated": TensorEntry(lambda: torch.rand(3, dtype=torch.complex64).conj(), is_cast_in_slots=True),
    "negated": TensorEntry(lambda: torch.rand(3, dtype=torch.complex64).conj().imag),
    "imaginary_part": TensorEntry(lambda: torch.rand(3, dtype=torch.complex64).imag),
    "requires_grad": TensorEntry(lambda: torch.rand(3, requires_grad=True), variants=("value", "stateful")),
    "result_of_autograd": TensorEntry(lambda: torch.rand(3, requires_grad=True) * 2, variants=("value", "stateful")),
    "inference": TensorEntry(lambda: torch.inference_mode()(whole)(), variants=("value", "buffer", "stateful")),
    "shared_memory": TensorEntry(lambda: whole().share_memory_()),
    "from_numpy": TensorEntry(lambda: torch.from_numpy(whole().double().numpy()), is_cast_in_slots=True),
    "parameter_itself": TensorEntry(lambda: nn.Parameter(whole()), variants=("value", "stateful")),
    "sparse_coo": TensorEntry(lambda: (whole() * (whole() > 0.5)).to_sparse(), variants=("value", "buffer")),
    "sparse_csr": TensorEntry(lambda: torch.eye(3).to_sparse_csr(), variants=VALUE),
    "quantized": TensorEntry(
        lambda: torch.quantize_per_tensor(whole(), 0.1, 3, torch.qint8), variants=("value", "buffer")
    ),
    "nested": TensorEntry(lambda: torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)]), variants=VALUE),
    "jagged": TensorEntry(
        lambda: torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged), variants=VALUE
    ),
    "meta": TensorEntry(lambda: torch.empty(3, device="meta"), variants=VALUE),
    "two_tensors": TensorEntry(two),
    "shard_0": TensorEntry(lambda: dtensor(Shard(0)), 2),
    "shard_1": TensorEntry(lambda: dtensor(Shard(1)), 2),
    "shard_of_one_row": TensorEntry(lambda: dtensor(Shard(0), size=(1, 3)), 2),
    "shard_of_nothing": TensorEntry(lambda: dtensor(Shard(0), size=(0, 3)), 2),
    "replicate": TensorEntry(lambda: dtensor(Replicate()), 2),
    "partial": TensorEntry(partial_sum, 2, ("value", "buffer")),
    "mesh_1x2": TensorEntry(lambda: dtensor(Replicate(), Shard(0), shape=(1, 2)), 2),
    "mesh_2x1": TensorEntry(lambda: dtensor(Shard(0), Shard(0), shape=(2, 1)), 2),
    "mesh_2x1_of_two_dimensions": TensorEntry(lambda: dtensor(Shard(1), Shard(0), shape=(2, 1)), 2),
    "dtensor_of_bfloat16": TensorEntry(
        lambda: distribute_tensor(whole().bfloat16(), mesh(), [Shard(0)]), 2, is_cast_in_slots=True
    ),
    "plain_on_two_ranks": TensorEntry(whole, 2),
    "local_shards": TensorEntry(local_shards, 2, ("value", "parameter", "stateful", "slot")),
    "one_local_shard": TensorEntry(lambda: local_shards(1), 2, ("value", "parameter", "stateful", "slot")),
    "dtensor_of_local_shards": TensorEntry(dtensor_of_local_shards, 2),
    "rows_of_local_shards": TensorEntry(rows_of_local_shards, 2),
    "dtensor_of_two_tensors": TensorEntry(
        lambda: DTensor.from_local(two(), mesh(), [Shard(0)], run_check=False), 2, ("value", "parameter")
    ),
}


class Holder:
    """A Stateful with one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def run(entry: TensorEntry, place: str, tool: Tool, trace: Trace) -> None:
    """Save one, load it into another, and look at it there."""
    for seed, act in ((1, tool.save), (2, tool.load)):
        torch.manual_seed(seed)
        tensor = entry.make()
        state, look = put(place, tensor)
        if seed == 1:
            trace.see("tensor", look(), look())
            right = trace.right["values"]
        act(state)
        trace.seen["values"], trace.right["values"] = {}, right
        trace.see("tensor", look())


def put(place: str, tensor: torch.Tensor) -> tuple[dict[str, Any], Callable[[], Any]]:
    if place == "value":
        state: dict[str, Any] = {"it": tensor}
        return state, lambda: state["it"]
    if place == "stateful":
        holder = Holder(tensor)
        return {"it": holder}, lambda: holder.tensor
    module = nn.Module()
    if place == "slot":
        module.p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.state[module.p] = {"slot": tensor}
        return {"model": module, "optim": optimizer}, lambda: optimizer.state[module.p].get("slot")
    if place == "buffer":
        module.register_buffer("it", tensor)
    else:
        module.it = nn.Parameter(tensor, requires_grad=False)
    return {"model": module}, lambda: describe_module(module)
