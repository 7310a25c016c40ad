"""FSDP1: the only wrapper whose state does not live in the parameters that one sees.

``FullyShardedDataParallel`` keeps flat parameters. Its state dicts are made by communication and hold ShardedTensors
(DTensors with a device mesh), and they must be loaded through it. All of that goes through the public
``torch.distributed.checkpoint.state_dict`` functions; what those get wrong is put right here:

- ``get_optimizer_state_dict`` steps a fresh optimizer to invent its state, on each rank that has none. A save must not
  change anything, so FSDP is asked directly.
- ``set_optimizer_state_dict`` invents ``step`` for parameters that the loaded state does not have; it is removed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.state.names import CleanNames


def gather_fsdp1_module(module: nn.Module) -> dict[str, Any]:
    """The sharded state dict. Collective: FSDP1 gathers each flat parameter to cut it into shards."""
    clean = CleanNames(module)
    with _quiet():
        return {clean(name): value for name, value in get_model_state_dict(module).items()}


def apply_fsdp1_module(module: nn.Module, state: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Load a sharded state dict; the keys that were missing and unexpected. Collective."""
    with _quiet():
        found = set_model_state_dict(module, state, options=StateDictOptions(strict=False))
    clean = CleanNames(module)
    return [clean(key) for key in found.missing_keys], [clean(key) for key in found.unexpected_keys]


def gather_fsdp1_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``{"state": {fqn: {slot: value}}, "param_groups": [...]}``, sharded. Collective.

    Raises:
        CheckpointMismatch: The optimizer has a part of what one FSDP unit trains. FSDP1 gathers by unit.
    """
    clean = CleanNames(module)
    if not _any_rank_has_state(module, optimizer):
        return {"state": {}, "param_groups": _groups_without_state(module, optimizer)}
    sharded = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with _quiet(), FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT, *sharded):
        try:
            gathered: dict[str, Any] = FullyShardedDataParallel.optim_state_dict(module, optimizer)
        except RuntimeError as error:
            if "is not in the optimizer state" not in str(error):
                raise
            raise CheckpointMismatch(
                f"an FSDP1 unit is trained by several optimizers, or in part by none ({str(error).partition('.')[0]}): "
                f"its state can only be gathered as a whole. Wrap what each optimizer trains on its own, or use FSDP2."
            ) from error
    state = {clean(name): slots for name, slots in gathered["state"].items() if slots}
    groups = [{**group, "params": [clean(name) for name in group["params"]]} for group in gathered["param_groups"]]
    return {"state": state, "param_groups": groups}


def apply_fsdp1_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what :func:`gather_fsdp1_optimizer` returned, or the same for another layout, into any optimizer.

    Collective.
    """
    with _quiet():  # not strict: a parameter that never got a gradient has no state, then and now
        set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(strict=False))
    names = flat_parameter_names(module)
    for parameter in list(optimizer.state):
        if not any(name in state["state"] for name in names[id(parameter)]):
            del optimizer.state[parameter]


def _any_rank_has_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """All of a small trainable part may lie on one rank; the others must take part in gathering its state."""
    wrapper = next(child for child in module.modules() if isinstance(child, FullyShardedDataParallel))
    found = torch.tensor(int(any(optimizer.state.values())), device=wrapper.compute_device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=wrapper.process_group)
    return bool(found.item())


def _groups_without_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = flat_parameter_names(module)
    return [
        {
            **{field: value for field, value in group.items() if field != "params"},
            "params": [name for parameter in group["params"] for name in names[id(parameter)]],
        }
        for group in optimizer.param_groups
    ]


def flat_parameter_names(module: nn.Module) -> dict[int, list[str]]:
    """The clean names that each parameter seen by an optimizer stands for; several for a flat parameter."""
    clean = CleanNames(module)
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        inner = getattr(parameter, "_fqns", None)  # a flat parameter lists its originals relative to its module
        if inner is None:
            names.setdefault(id(parameter), [clean(name)])
        else:
            owner = clean(name.removesuffix("_flat_param").removesuffix("."))
            names.setdefault(id(parameter), [f"{owner}.{clean(n)}" if owner else clean(n) for n in inner])
    return names


def same_flat_parameter(module: nn.Module) -> dict[str, str]:
    """The further names of tied weights in flat parameters, and the name under which each is flattened."""
    clean = CleanNames(module)
    same = {}
    for name, parameter in module.named_parameters():
        owner = name.removesuffix("_flat_param")
        for tied in getattr(parameter, "_shared_param_infos", ()):  # relative to the flat parameter's module, too
            again, first = (tied.module_name, tied.param_name), (tied.prim_module_name, tied.prim_param_name)
            same[clean(owner + ".".join(filter(None, again)))] = clean(owner + ".".join(filter(None, first)))
    return same


@contextmanager
def _quiet() -> Iterator[None]:
    """The public functions use FSDP's deprecated context managers and warn about that on every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        yield
