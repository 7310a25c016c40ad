"""Corpus of containers: one value is saved and loaded into another one, in a mapping, a list or a ``Stateful``.

The oracle is what stock hands to the target, or that it refuses to. An entry is one line of :data:`CONTAINERS`: the
saved value, the target, and the number of ranks; both values are made on each rank, from its number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from tests.conformance.differences import FILLED_FROM_EMPTY, GROWN_VALUES, HANDED_OVER
from tests.conformance.entries import Entry
from tests.conformance.modules import Small
from tests.conformance.tools import Tool
from tests.conformance.trace import Trace, describe_module


@dataclass(frozen=True)
class ContainerEntry(Entry):
    saved: Callable[[int], Any]
    target: Callable[[int], Any]
    world_size: int = 1
    variants: tuple[str, ...] = ("plain",)


class Box:
    """Keeps what it is handed."""

    def __init__(self, **content: Any) -> None:
        self.content: Any = content

    def state_dict(self) -> dict[str, Any]:
        return dict(self.content)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state


class LayersApp:
    """The ``AppState`` of torch's tutorial, which forgives what its model does not find."""

    def __init__(self, layers: int) -> None:
        self.model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])

    def state_dict(self) -> dict[str, Any]:
        return {"model": get_model_state_dict(self.model)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"], options=StateDictOptions(strict=False))


def _t(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape or (2,), float(value))


def _adam(steps: int) -> dict[str, Any]:
    """The state dict of an optimizer: a fresh one has no state."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer.state_dict()


def _experts(rank: int, fill: float = 0.0) -> dict[str, Any]:
    return {f"expert{number}": _t(fill and fill + number) for number in (2 * rank, 2 * rank + 1)}


E = ContainerEntry

CONTAINERS: dict[str, ContainerEntry] = {
    "mapping_same": E(lambda r: {"a": _t(1), "b": _t(2)}, lambda r: {"a": _t(0), "b": _t(0)}),
    "mapping_part": E(lambda r: {"a": _t(1), "b": _t(2)}, lambda r: {"a": _t(0)}),
    "mapping_more": E(lambda r: {"a": _t(1)}, lambda r: {"a": _t(0), "b": _t(0)}),
    "mapping_other_shape": E(lambda r: {"a": _t(1)}, lambda r: {"a": _t(0, 3)}),
    "nested_part": E(lambda r: {"a": {"x": _t(1), "y": _t(2)}}, lambda r: {"a": {"x": _t(0)}}),
    "nested_more": E(lambda r: {"a": {"x": _t(1)}}, lambda r: {"a": {"x": _t(0), "y": _t(0)}}),
    "mapping_of_fewer_mappings": E(lambda r: {"a": {"x": _t(1)}, "b": {"x": _t(2)}}, lambda r: {"a": {"x": _t(0)}}),
    "list_same": E(lambda r: [_t(1), _t(2)], lambda r: [_t(0), _t(0)]),
    "list_shorter": E(lambda r: [_t(1), _t(2), _t(3)], lambda r: [_t(0), _t(0)]),
    "list_longer": E(lambda r: [_t(1), _t(2)], lambda r: [_t(0), _t(0), _t(0)]),
    "list_other_shape": E(lambda r: [_t(1), _t(2)], lambda r: [_t(0), _t(0, 3)]),
    "list_in_mapping_shorter": E(lambda r: {"l": [_t(1), _t(2), _t(3)]}, lambda r: {"l": [_t(0), _t(0)]}),
    "list_in_mapping_longer": E(lambda r: {"l": [_t(1), _t(2)]}, lambda r: {"l": [_t(0), _t(0), _t(0)]}),
    "stateful_same": E(lambda r: Box(a=_t(1), n=5), lambda r: Box(a=_t(0), n=0)),
    "stateful_more": E(lambda r: Box(a=_t(1)), lambda r: Box(a=_t(0), b=_t(0))),
    "stateful_nested_more": E(lambda r: Box(m={"a": _t(1)}), lambda r: Box(m={"a": _t(0), "b": _t(0)})),
    "stateful_list_longer": E(lambda r: Box(l=[_t(1), _t(2)]), lambda r: Box(l=[_t(0), _t(0), _t(0)])),
    "stateful_other_shape": E(lambda r: Box(a=_t(1)), lambda r: Box(a=_t(0, 3))),
    "stateful_nested_other_shape": E(lambda r: Box(m={"a": _t(1)}), lambda r: Box(m={"a": _t(0, 2, 2)})),
    "stateful_list_other_shape": E(lambda r: Box(l=[_t(1), _t(2)]), lambda r: Box(l=[_t(0), _t(0, 1)])),
    "stateful_fewer": E(lambda r: Box(a=_t(1), b=_t(2)), lambda r: Box(a=_t(0)), differs=HANDED_OVER),
    "stateful_nested_fewer": E(
        lambda r: Box(m={"a": _t(1), "b": _t(2)}), lambda r: Box(m={"a": _t(0)}), differs=HANDED_OVER
    ),
    "app_with_a_layer_more": E(lambda r: LayersApp(2), lambda r: LayersApp(3)),
    "app_with_a_layer_fewer": E(lambda r: LayersApp(3), lambda r: LayersApp(2)),
    "values_in_mapping": E(lambda r: {"n": 1, "s": "x"}, lambda r: {"n": 0, "s": ""}),
    "values_that_grow": E(lambda r: {"n": 1, "s": "x"}, lambda r: {"n": 0}, differs=GROWN_VALUES),
    "values_that_are_missing": E(lambda r: {"n": 1}, lambda r: {"n": 0, "s": ""}),
    "stateful_values_that_grow": E(lambda r: Box(n=1, s="x"), lambda r: Box(n=0), differs=GROWN_VALUES),
    "stateful_values_that_shrink": E(lambda r: Box(n=1), lambda r: Box(n=0, s=""), differs=GROWN_VALUES),
    "empty_mapping": E(lambda r: {"a": _t(1), "n": 1}, lambda r: {}, differs=FILLED_FROM_EMPTY),
    "empty_mapping_inside": E(
        lambda r: {"m": {"a": _t(1)}, "n": 1}, lambda r: {"m": {}, "n": 0}, differs=FILLED_FROM_EMPTY
    ),
    "none": E(lambda r: {"a": _t(1), "n": 1}, lambda r: None, differs=FILLED_FROM_EMPTY),
    "none_inside": E(lambda r: {"m": {"a": _t(1)}}, lambda r: {"m": None}, differs=FILLED_FROM_EMPTY),
    "stateful_empty_inside": E(lambda r: Box(m={"a": _t(1)}), lambda r: Box(m={}), differs=FILLED_FROM_EMPTY),
    "stateful_none_inside": E(lambda r: Box(a=_t(1)), lambda r: Box(a=None), differs=FILLED_FROM_EMPTY),
    "state_of_a_fresh_optimizer": E(lambda r: _adam(2), lambda r: _adam(0), differs=FILLED_FROM_EMPTY),
    "state_of_a_used_optimizer": E(lambda r: _adam(2), lambda r: _adam(1)),
    "experts_of_each_rank": E(lambda r: _experts(r, 1), _experts, 2),
    "experts_of_the_other_rank": E(lambda r: _experts(r, 1), lambda r: _experts(1 - r), 2),
    "experts_of_each_rank_in_a_stateful": E(lambda r: Box(**_experts(r, 1)), lambda r: Box(**_experts(r)), 2),
    "experts_of_one_rank_only": E(
        lambda r: _experts(r, 1), lambda r: {**_experts(r), **({"expert9": _t(0)} if r else {})}, 2
    ),
}


def run(entry: ContainerEntry, variant: str, tool: Tool, trace: Trace) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(1)
    tool.save({"it": entry.saved(rank)})
    torch.manual_seed(2)
    state = {"it": entry.target(rank)}
    try:
        tool.load(state)
    except BaseException:
        assert trace.raised is not None
        trace.raised = None
        trace.see("it", "refused")
    else:
        trace.see("it", _content(state["it"]))


def _content(value: Any) -> Any:
    if isinstance(value, LayersApp):
        return describe_module(value.model)
    return value.content if isinstance(value, Box) else value
