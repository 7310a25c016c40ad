"""One small model and its optimizer, wrapped and distributed in every way that a test can ask for by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dcp_plugin.core.state import flatten_optimizer, gather_module, gather_optimizer, unflatten_optimizer
from dcp_plugin.core.tensors._torch import sharded_value
from tests.compare import full_state

WORLD_SIZE = {
    "plain": 1,
    "ddp": 2,
    "fsdp1": 2,
    "fsdp1_flat": 2,
    "fsdp1_hsdp": 4,
    "fsdp2": 2,
    "fsdp2@3": 3,
    "fsdp2@4": 4,
    "fsdp2_hsdp": 4,
    "tp": 2,
    "fsdp2_tp": 4,
}


class Net(nn.Module):
    """Uneven sizes (5 and 10 rows over 2 to 4 ranks), a tensor with fewer rows than ranks, a buffer, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 10)
        self.block = nn.Sequential(nn.Linear(10, 5), nn.LayerNorm(5))
        self.out = nn.Linear(5, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.out(self.block(torch.relu(self.inp(x))))  # type: ignore[no-any-return]


def build(layout: str, seed: int = 0, net: Callable[[], nn.Module] = Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in a layout of :data:`WORLD_SIZE`, and AdamW over it.

    Args:
        net: Makes the model, which has the submodules of :class:`Net`.
    """
    torch.manual_seed(seed)
    model = wrap(layout, net())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1), weight_decay=0.1)


def wrap(layout: str, module: nn.Module, unit: str = "block", **options: Any) -> nn.Module:
    """A module in a layout. For FSDP, which gets the options, its submodule ``unit``, if any, is a unit of its own."""
    return _WRAP[layout.partition("@")[0]](module, unit, **options)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 1,
    seed: int = 0,
    inputs: tuple[int, ...] = (8, 6),
) -> list[float]:
    """Train on the same data on every rank, whatever the world size; the losses."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(inputs, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizers by key, every tensor whole. Collective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {f"model.{key}": value for key, value in gather_module(model).items()}
        for optimizer in optimizers:
            flat = flatten_optimizer(gather_optimizer(model, optimizer))
            state |= {f"optim.{key}": value for key, value in flat.items()}
        return full_state(state)


def put_in_memory(layout: str, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give a fresh model and optimizer a whole state without any checkpoint: the reference for a load. Collective."""
    weights = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    slots = {key.removeprefix("optim."): value for key, value in state.items() if key.startswith("optim.")}
    if layout == "fsdp2_tp":  # stock refuses to cut 5 rows for _StridedShard
        _copy_boxes(model, optimizer, weights, slots)
        return
    options = StateDictOptions(full_state_dict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_model_state_dict(model, weights, options=options)
        set_optimizer_state_dict(model, optimizer, unflatten_optimizer(slots), options=options)


def _copy_boxes(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Any], slots: dict[str, Any]
) -> None:
    def fill(target: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        for chunk in sharded_value(target).chunks:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            chunk.tensor.copy_(whole[box])
        return target

    for name, value in model.state_dict().items():
        fill(value, weights[name])
    names = dict(model.named_parameters())
    for name, saved in unflatten_optimizer(slots)["state"].items():
        like = names[name].detach()
        optimizer.state[names[name]] = {
            slot: fill(torch.empty_like(like), value) if value.shape == like.shape else value.clone()
            for slot, value in saved.items()
        }
    fields = {
        field: value for field, value in unflatten_optimizer(slots)["param_groups"][0].items() if field != "params"
    }
    optimizer.param_groups[0].update(fields)


def _fsdp1(module: nn.Module, unit: str, **options: Any) -> nn.Module:
    options = {"device_id": torch.device("cpu"), "use_orig_params": True, **options}
    if hasattr(module, unit):
        setattr(module, unit, FullyShardedDataParallel(getattr(module, unit), **options))
    return FullyShardedDataParallel(module, **options)


def _fsdp1_hsdp(module: nn.Module, unit: str, **options: Any) -> nn.Module:
    options |= {"device_mesh": _mesh_of_two_replicas(), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    return _fsdp1(module, unit, **options)


def _fsdp2(module: nn.Module, unit: str, mesh: Any = None, **options: Any) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    if hasattr(module, unit):
        fully_shard(getattr(module, unit), mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)
    return module


def _hsdp(module: nn.Module, unit: str) -> nn.Module:
    return _fsdp2(module, unit, _mesh_of_two_replicas())


def _tp(module: nn.Module, unit: str, mesh: Any = None) -> nn.Module:
    """Column-wise, then row-wise: a weight sharded by rows, one by columns, a replicated bias, plain norms."""
    mesh = mesh or init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(module, mesh["tp"], {"inp": ColwiseParallel(), f"{unit}.0": RowwiseParallel()})


def _fsdp2_tp(module: nn.Module, unit: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return _fsdp2(_tp(module, unit, mesh), unit, mesh["dp"])


def _mesh_of_two_replicas() -> Any:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


_WRAP: dict[str, Callable[..., nn.Module]] = {
    "plain": lambda module, unit: module,
    "ddp": lambda module, unit: DistributedDataParallel(module),
    "fsdp1": _fsdp1,
    "fsdp1_flat": lambda module, unit: _fsdp1(module, unit, use_orig_params=False),
    "fsdp1_hsdp": _fsdp1_hsdp,
    "fsdp1_flat_hsdp": lambda module, unit: _fsdp1_hsdp(module, unit, use_orig_params=False),
    "fsdp2": _fsdp2,
    "fsdp2_hsdp": _hsdp,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp2_tp": _fsdp2_tp,
}
