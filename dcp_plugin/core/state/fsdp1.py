"""State of modules with FSDP1, and of their optimizers. Imported only where a module contains FSDP1.

FSDP1 is the only wrapper whose visible parameters do not hold the state: it keeps flat parameters. Its state dicts are
made by communication and hold ShardedTensors (DTensors with a device mesh). Loads go through such state dicts as well.
Both directions use the public functions of ``torch.distributed.checkpoint.state_dict``, with two corrections:

- ``get_optimizer_state_dict`` steps an optimizer on each rank where it has no state, to create the state. A save must
  not change any state, so FSDP is called directly.
- ``set_optimizer_state_dict`` invents ``step`` for parameters that the loaded state does not have; it is removed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
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

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.state.names import CleanNames, parameter_names
from dcp_plugin.core.tensors._torch_modules import Incompatible, unpatched


def gather_module(module: nn.Module) -> dict[str, Any]:
    """Return the sharded state dict. Collective: FSDP1 gathers each flat parameter to cut it into shards."""
    clean = CleanNames(module)
    with _quiet():
        return {clean(name): value for name, value in get_model_state_dict(module).items()}


def apply_module(module: nn.Module, state: dict[str, Any]) -> Incompatible:
    """Load a state dict by clean FQN; return the missing and the unexpected keys. Collective."""
    with _quiet():
        keys = set_model_state_dict(module, state, options=StateDictOptions(strict=False))
    return Incompatible(keys.missing_keys, keys.unexpected_keys)


def gather_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return ``{"state": {fqn: {slot: value}}, "param_groups": [...]}``, sharded. Collective.

    Args:
        own: The state dict in torch's layout that the optimizer's own code returned. If None, torch asks for one.

    Raises:
        CheckpointMismatch: The optimizer trains only a part of an FSDP unit. FSDP1 gathers by unit.
    """
    clean = CleanNames(module)
    if not _any_rank_has_state(module, optimizer.state if own is None else own["state"]):
        return {"state": {}, "param_groups": _groups_without_state(module, optimizer)}
    sharded = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with _quiet(), FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT, *sharded):
        try:
            local = (
                unpatched(optimizer, "state_dict")()
                if own is None
                else {"state": dict(own["state"]), "param_groups": own["param_groups"]}
            )
            gathered: dict[str, Any] = FullyShardedDataParallel.optim_state_dict(module, optimizer, local)
        except RuntimeError as error:
            # Torch's message for a unit of which the optimizer has only a part.
            if "is not in the optimizer state" not in str(error):
                raise
            raise CheckpointMismatch(
                f"several optimizers train one FSDP1 unit, or none trains a part of it "
                f"({str(error).partition('.')[0]}). The state of a unit can only be gathered as a whole. Wrap the "
                f"parameters of each optimizer separately, or use FSDP2."
            ) from error
    state = {clean(name): slots for name, slots in gathered["state"].items() if slots}
    groups = [
        {**group, "params": _in_module_order(module, [clean(name) for name in group["params"]])}
        for group in gathered["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _in_module_order(module: nn.Module, names: list[str]) -> list[str]:
    """Return the names in the order in which an optimizer of the unwrapped module has them.

    Flat parameters change the order: they join the parameters of a unit, which are not neighbours in the module.
    Exports number the parameters by this order.
    """
    if not any(hasattr(parameter, "_fqns") for parameter in module.parameters()):
        return names
    clean = CleanNames(module)
    order: dict[str, int] = {}
    for name, _ in module.named_modules():
        order.setdefault(clean(name), len(order))
    return sorted(names, key=lambda name: order[name.rpartition(".")[0]])


def apply_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], extras: Mapping[str, Any]
) -> None:
    """Load what :func:`gather_optimizer` returned, or the same for another layout, into any optimizer.

    Collective.

    Args:
        extras: Entries that the optimizer's own ``load_state_dict`` takes in addition to ``state`` and
            ``param_groups``.
    """
    with _quiet(), _loading_too(optimizer, extras):  # not strict: parameters without a gradient have no state
        set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(strict=False))
    names = parameter_names(module)
    # Torch has invented a step for parameters that the loaded state does not have.
    for parameter in list(optimizer.state):
        if isinstance(parameter, torch.Tensor) and not any(name in state["state"] for name in names[id(parameter)]):
            del optimizer.state[parameter]


@contextmanager
def _loading_too(optimizer: torch.optim.Optimizer, extras: Mapping[str, Any]) -> Iterator[None]:
    """Have an optimizer's ``load_state_dict`` get extra entries, which torch's conversion for FSDP1 leaves out."""
    if not extras:
        yield
        return
    load, on_instance = unpatched(optimizer, "load_state_dict"), vars(optimizer).get("load_state_dict")
    optimizer.load_state_dict = lambda state_dict: load({**state_dict, **extras})  # type: ignore[method-assign]
    try:
        yield
    finally:
        if on_instance is None:
            del vars(optimizer)["load_state_dict"]
        else:
            vars(optimizer)["load_state_dict"] = on_instance


def _any_rank_has_state(module: nn.Module, state: Mapping[Any, Any]) -> bool:
    """Return whether any rank has state. Ranks without state must take part in the gathering, too, or it hangs."""
    wrapper = next(child for child in module.modules() if isinstance(child, FullyShardedDataParallel))
    has_state = torch.tensor(any(state.values()), dtype=torch.int64, device=wrapper.compute_device)
    dist.all_reduce(has_state, op=dist.ReduceOp.MAX, group=wrapper.process_group)
    return bool(has_state.item())


def _groups_without_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = parameter_names(module)
    return [
        {
            **{field: value for field, value in group.items() if field != "params"},
            "params": _in_module_order(
                module, [name for parameter in group["params"] for name in names[id(parameter)]]
            ),
        }
        for group in optimizer.param_groups
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the public functions, which warn on every call about FSDP's deprecated context managers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        yield
