"""The loop of a user: build, train, save, build again with other numbers, load, train on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.conformance.moments import MOMENTS, Moment
from tests.conformance.steps import step
from tests.conformance.tools import Tool
from tests.conformance.trace import Trace

MakeModule = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer | None]

WORLD_SIZE = {
    "plain": 1, "ddp": 2, "fsdp1": 2, "fsdp2": 2, "fsdp2_keep": 2, "fsdp2_reshard": 2, "fsdp2@3": 3,
}  # fmt: skip


def resume(
    tool: Tool,
    trace: Trace,
    layout: str,
    module: MakeModule,
    optimizer: MakeOptimizer | None = None,
    moment: Moment = MOMENTS["trained"],
) -> None:
    """Save and resume one model, with its optimizer if one is given; and train on, resumed and not."""
    in_state = optimizer is not None

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer | None, dict[str, Any]]:
        torch.manual_seed(seed)
        model = WRAP[layout](module())
        trains = (optimizer or plain_sgd)(model)
        return model, trains, {"model": model, "optim": trains} if in_state else {"model": model}

    model, trains, state = build(seed=1)
    for action in moment.before_save:
        action(model, trains)
    trace.before(*state.values())
    with moment.around():
        tool.save(state)
    trace.saved(*state.values())
    trace.right["losses"] = losses_of(model, trains)

    model, trains, state = build(seed=2)
    for action in moment.before_load:
        action(model, trains)
    mine = list(model.parameters())
    with moment.around():
        tool.load(state)
    trace.seen["same parameters"] = {"all": str(_are_the_same(mine, model.parameters()))}
    trace.resumed(*state.values())
    trace.seen["losses"] = losses_of(model, trains)


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    model.zero_grad()
    return {f"step {number}": repr(step(model, optimizer, number)) for number in (7, 8)}


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer | None:
    """It has no state, so that a module can be looked at alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.125) if trained else None


def _are_the_same(before: list[nn.Parameter], after: Iterable[nn.Parameter]) -> bool:
    return [id(parameter) for parameter in before] == [id(parameter) for parameter in after]


def _fsdp1(module: nn.Module) -> nn.Module:
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    for name, child in _units(module):
        setattr(module, name, FullyShardedDataParallel(child, **options))
    return FullyShardedDataParallel(module, **options)


def _fsdp2(module: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for _, child in _units(module):
        fully_shard(child, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def _units(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The one child called ``block``, if there is one, is a unit of its own."""
    return [(name, child) for name, child in module.named_children() if name == "block"]


WRAP: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "ddp": DistributedDataParallel,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "fsdp2_keep": lambda module: _fsdp2(module, reshard_after_forward=False),
    "fsdp2_reshard": lambda module: _fsdp2(module, reshard_after_forward=True),
    "fsdp2@3": _fsdp2,
}
