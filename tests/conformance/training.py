"""The loop of a user: build, train, save, build again with other numbers, load, train on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.conformance.moments import MOMENTS, Moment
from tests.conformance.steps import step
from tests.conformance.tools import Tool
from tests.conformance.trace import Trace
from tests.layouts import wrap

MakeModule = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer | None]

WORLD_SIZE = {
    "plain": 1, "compiled": 1, "ddp": 2, "fsdp1": 2, "fsdp2": 2, "fsdp2_keep": 2, "fsdp2_reshard": 2, "fsdp2@3": 3,
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


WRAP: dict[str, Callable[[nn.Module], nn.Module]] = {
    **{layout: partial(wrap, layout) for layout in ("plain", "ddp", "fsdp1", "fsdp2", "fsdp2@3")},
    "fsdp2_keep": partial(wrap, "fsdp2", reshard_after_forward=False),
    "fsdp2_reshard": partial(wrap, "fsdp2", reshard_after_forward=True),
}
