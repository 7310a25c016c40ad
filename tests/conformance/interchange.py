"""Corpus of stock interchange: what one tool saves the other one loads, through every integration that DCP has.

A state is one line, a function that makes it with a number; objects of a user (modules, optimizers, schedulers) may be
in it. A planner is one line, too. Each goes each of ``WAYS``, and the user sees what they see if stock does both.
"""

from __future__ import annotations

import copy
import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_plugin
from tests.conformance.differences import EXACT_KEYS
from tests.conformance.entries import Entry
from tests.conformance.steps import step
from tests.conformance.tools import Ours, Tool
from tests.conformance.trace import Trace

State = dict[str, Any]
Make = Callable[[int], State]


def tensor(at: int) -> torch.Tensor:
    return torch.full((3,), at, dtype=torch.bfloat16)


def file_in_memory(at: int) -> io.BytesIO:
    file = io.BytesIO(b"abc" * (at + 1))
    file.seek(at)
    return file


class Saved:
    """A Stateful that keeps what it is given, and hands out copies: stock writes into what it gets."""

    def __init__(self, state: Any) -> None:
        self.state, self.given = state, None

    def state_dict(self) -> Any:
        return copy.deepcopy(self.state)

    def load_state_dict(self, given: Any) -> None:
        self.given = given


def trained(at: int, make: Callable[[nn.Module], optim.Optimizer], schedule: Any = None, shard: bool = False) -> State:
    torch.manual_seed(at)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state: State = {"model": model, "optim": make(model)}
    if schedule is not None:
        state["schedule"] = schedule(state["optim"])
    for _ in range(at + 1):
        step(model, state["optim"])
        if schedule is not None:
            state["schedule"].step()
    return state


def of_optimizer(make: Callable[[Any], optim.Optimizer], **more: Any) -> Make:
    return lambda at: trained(at, lambda model: make(model.parameters()), **more)


def scheduled(schedule: Callable[[optim.Optimizer], Any]) -> Make:
    return of_optimizer(lambda parameters: optim.SGD(parameters, lr=0.125), schedule=schedule)


def two_groups(model: Any) -> optim.Optimizer:
    return optim.AdamW([{"params": [*model[0].parameters()], "lr": 0.5}, {"params": [*model[2].parameters()]}])


STATES: dict[str, Make] = {
    "tuple": lambda at: {"t": (tensor(at), at)},
    "tuple_in_a_list": lambda at: {"l": [(tensor(at), at), tensor(at)]},
    "list_of_tuples": lambda at: {"l": [(tensor(at), at)]},
    "tuples_in_tuples": lambda at: {"d": {"t": ((tensor(at),), at), "l": [at, (at, tensor(at))]}},
    "lists": lambda at: {"l": [[{"a": at}], at], "m": [[at, at], [at]], "n": [tensor(at), at, [tensor(at)]]},
    "nothing": lambda at: {"a": tensor(at), "e": {}, "cfg": {"lr": at}, "l": [], "t": (), "d": {"e": {}, "b": at}},
    "list_of_nothing": lambda at: {"a": at, "l": [{}]},
    "only_an_empty_dict": lambda at: {"e": {}, "a": at},
    "classes": lambda at: {"o": OrderedDict(a=at, b=tensor(at)), "d": defaultdict(list, x=at)},
    "counter": lambda at: {"c": Counter(a=at), "d": {"lr": at}},
    "number_keys": lambda at: {"s": {0: {"m": tensor(at)}, 1: {"m": tensor(at)}}},
    "number_keys_and_text": lambda at: {"s": {0: at, "b": at, 10: {2: at}}, "l": [{0: tensor(at)}]},
    "keys_with_dots": lambda at: {"a.b": at, "c": {"d.e": at, "f": tensor(at)}, "layer.0.weight": tensor(at)},
    "file_in_memory": lambda at: {"f": file_in_memory(at), "d": {"f": file_in_memory(at)}},
    "plain_values": lambda at: {
        "b": bool(at), "i": at, "f": at / 3, "c": complex(0, at), "s": "ab" * at, "y": b"\0" * at, "n": None,
    },
    "values_of_torch": lambda at: {
        "size": torch.Size([at, 2]), "dtype": (torch.float16, torch.int8)[at], "device": torch.device("cpu", at),
    },
    "sets": lambda at: {"s": {at, "x"}, "d": {"s": {at}}},
    "tensors": lambda at: {
        "scalar": torch.tensor(at), "empty": torch.empty(0, at + 1)[:, :0], "transposed": torch.full((2, 3), at).T,
        "grad": torch.full((2,), 1.0 * at, requires_grad=True), "parameter": nn.Parameter(torch.full((2,), 1.0 * at)),
    },
    "the_same_tensor_twice": lambda at: dict.fromkeys(("a", "b"), tensor(at)),
    "stateful": lambda at: {"one": Saved({"a": tensor(at), "b": [at, (at, tensor(at))], "c": {0: at}}), "n": at},
    "stateful_of_nothing": lambda at: {"one": Saved({}), "two": Saved({"e": {}, "a": at}), "n": at},
    "sgd": of_optimizer(lambda parameters: optim.SGD(parameters, lr=0.1)),
    "sgd_with_momentum": of_optimizer(lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9)),
    "adamw": of_optimizer(lambda parameters: optim.AdamW(parameters, amsgrad=True)),
    "adamw_with_two_groups": lambda at: trained(at, two_groups),
    "multi_step_lr": scheduled(lambda optimizer: optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2, 30])),
    "one_cycle_lr": scheduled(lambda optimizer: optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)),
    "sequential_lr": scheduled(
        lambda optimizer: optim.lr_scheduler.SequentialLR(
            optimizer,
            [optim.lr_scheduler.ConstantLR(optimizer), optim.lr_scheduler.ExponentialLR(optimizer, 0.5)],
            [1],
        )
    ),
    "reduce_lr_on_plateau_without_steps": lambda at: {
        "schedule": optim.lr_scheduler.ReduceLROnPlateau(optim.SGD([nn.Parameter(tensor(0))], lr=0.1 + at)),
    },
}  # fmt: skip


INTO_ANOTHER: dict[str, tuple[Make, Make]] = {
    "flat_into_nested": (
        lambda at: {"m.w": tensor(at), "m.n": at, "m.d.e": at},
        lambda at: {"m": {"w": tensor(at), "n": at, "d": {"e": at}}},
    ),
    "flat_into_stateful": (
        lambda at: {"m.w": tensor(at), "m.n": at, "m.d.e": at},
        lambda at: {"m": Saved({"w": tensor(at), "n": at, "d.e": at})},
    ),
    "nested_into_flat": (
        lambda at: {"m": {"w": tensor(at), "n": at, "d": {"e": at}}},
        lambda at: {"m.w": tensor(at), "m.n": at, "m.d.e": at},
    ),
    "nested_into_dots": (
        lambda at: {"m": {"w": tensor(at), "d": {"e.f": at, "g": {"h": at}}}},
        lambda at: {"m": {"w": tensor(at), "d.e": {"f": at}, "d.g": {"h": at}}},
    ),
}


def sharded(at: int) -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = torch.arange(15.0).reshape(5, 3) * at
    return {
        "rows": distribute_tensor(value, mesh, [Shard(0)]),
        "l": [distribute_tensor(value, mesh, [Shard(1)]), tensor(at)],
        "one": {"row": distribute_tensor(value[:1].contiguous(), mesh, [Shard(0)]), "step": at},
    }


ON_TWO_RANKS: dict[str, Make] = {
    "sharded": sharded,
    "counter_and_tuples": lambda at: {"t": (tensor(at), at), "e": {}, "s": {0: tensor(at)}, "n": at},
    "fsdp2_with_adamw": of_optimizer(optim.AdamW, shard=True),
    "fsdp2_with_sgd": of_optimizer(lambda parameters: optim.SGD(parameters, lr=0.1), shard=True),
}


# Planners as the docstrings of torch.distributed.checkpoint.planner have them.


class RenamingSavePlanner(dcp.DefaultSavePlanner):
    def set_up_planner(self, state_dict: State, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"foo_{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator)


class HalvingSavePlanner(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found if write_item.tensor_data is None else found.to(torch.float16)


class SavePlannerWithMore(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        return replace(super().create_local_plan(), planner_data="per-rank-data")

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=[plan.planner_data for plan in all_plans])


class RenamingLoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: State, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.original_state_dict = state_dict
        super().set_up_planner({f"foo_{key}": value for key, value in state_dict.items()}, metadata, is_coordinator)
        self.flatten_state_dict = False

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)


class MaterializingLoadPlanner(dcp.DefaultLoadPlanner):
    """Reads into a copy, and hands it on when it is complete."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).detach().copy_(tensor)


def flat(at: int) -> State:
    return {"weight": torch.full((2, 3), 1.0 * at), "bias": tensor(at), "step": at}


def flat_and_nested(at: int) -> State:
    return {**flat(at), "nested": {"l": [tensor(at), at]}}


ONE_RANK = (
    "stock_to_ours", "ours_to_stock", "writer_to_stock", "stock_to_reader", "planner_to_stock", "stock_to_planner",
    "planner_alone",
)  # fmt: skip
TWO_RANKS = ("stock_to_ours", "ours_to_stock", "writer_to_stock", "stock_to_reader", "planner_alone")
PLANNERS_OF_USERS = ("writer_to_stock", "stock_to_reader", "writer_to_reader")


@dataclass(frozen=True)
class InterchangeEntry(Entry):
    make: Make = flat_and_nested
    load: Make | None = None
    """What is loaded into, if it is another state."""
    world_size: int = 1
    variants: tuple[str, ...] = ONE_RANK
    save_planner: Callable[[], Any] | None = None
    load_planner: Callable[[], Any] | None = None

    def differs_in(self, variant: str) -> Mapping[str, str]:
        """Declared differences are those of our planner for loads."""
        return self.differs if variant in ("stock_to_ours", "stock_to_planner", "planner_alone") else {}


Planned = partial(
    InterchangeEntry,
    variants=PLANNERS_OF_USERS,
    save_planner=dcp.DefaultSavePlanner,
    load_planner=dcp.DefaultLoadPlanner,
)

PLANNERS: dict[str, InterchangeEntry] = {
    "renames": Planned(flat, save_planner=RenamingSavePlanner, load_planner=RenamingLoadPlanner),
    "halves": Planned(flat, save_planner=HalvingSavePlanner),
    "has_planner_data_of_its_own": Planned(flat, save_planner=SavePlannerWithMore),
    "materializes": Planned(load_planner=MaterializingLoadPlanner),
    "caches_plans": Planned(save_planner=lambda: dcp.DefaultSavePlanner(enable_plan_caching=True)),
    "does_not_flatten": Planned(
        flat,
        save_planner=lambda: dcp.DefaultSavePlanner(flatten_state_dict=False),
        load_planner=lambda: dcp.DefaultLoadPlanner(flatten_state_dict=False),
    ),
    "takes_a_part": Planned(
        load=lambda at: {"bias": tensor(at), "new": at},
        load_planner=lambda: dcp.DefaultLoadPlanner(allow_partial_load=True),
    ),
    "wants_what_is_not_there": Planned(load=lambda at: {"bias": tensor(at), "new": at}),
    "wants_another_shape": Planned(load=lambda at: {"bias": torch.zeros(4)}),
    "wants_another_dtype": Planned(load=lambda at: {"bias": torch.zeros(3)}),
    "takes_everything": Planned(load=lambda at: {}, load_planner=_EmptyStateDictLoadPlanner),
    "takes_everything_under_other_keys_than_text": Planned(
        lambda at: {"s": {0: {"m": tensor(at)}, (0, "a"): at, None: [{1: at}]}, "c": Counter({3: at})},
        load=lambda at: {},
        load_planner=_EmptyStateDictLoadPlanner,
    ),
    "takes_some_keys": Planned(
        load=lambda at: {}, load_planner=lambda: _EmptyStateDictLoadPlanner(keys={"bias", "nested"})
    ),
}


def _as_stock_takes_it(state: State) -> State:
    model, optimizer = state.get("model"), state.get("optim")
    if not isinstance(model, nn.Module):
        return dict(state)
    return {**state, "model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def _save(writer: Any = None, planner: Any = None) -> Callable[..., None]:
    """Save as stock does, to its own writer or to another one, with its own planner or with another one."""

    def save(state: State, path: Path, planner: Any = planner) -> None:
        place = {"checkpoint_id": path} if writer is None else {"storage_writer": writer(path)}
        dcp.save(_as_stock_takes_it(state), planner=planner and planner(), **place)

    return save


def _load(reader: Any = None, planner: Any = None) -> Callable[..., None]:
    """Load as stock does, in the same way."""

    def load(state: State, path: Path, planner: Any = planner) -> None:
        taken = _as_stock_takes_it(state)
        place = {"checkpoint_id": path} if reader is None else {"storage_reader": reader(path)}
        dcp.load(taken, planner=planner and planner(), **place)
        model, optimizer = state.get("model"), state.get("optim")
        if isinstance(model, nn.Module):
            set_model_state_dict(model, taken["model"])
            set_optimizer_state_dict(model, optimizer, taken["optim"])
        state.update({key: value for key, value in taken.items() if key not in ("model", "optim")})

    return load


STOCK = _save(), _load()
WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "stock_to_ours": (_save(), dcp_plugin.load),
    "ours_to_stock": (dcp_plugin.save, _load()),
    "writer_to_stock": (_save(dcp_plugin.ShardedWriter), _load()),
    "stock_to_reader": (_save(), _load(dcp_plugin.ShardedReader)),
    "planner_to_stock": (_save(dcp_plugin.ShardedWriter, dcp_plugin.ShardedSavePlanner), _load()),
    "stock_to_planner": (_save(), _load(dcp_plugin.ShardedReader, dcp_plugin.ShardedLoadPlanner)),
    "planner_alone": (
        _save(planner=dcp_plugin.ShardedSavePlanner), _load(planner=dcp_plugin.ShardedLoadPlanner),
    ),
    "writer_to_reader": (_save(dcp_plugin.ShardedWriter), _load(dcp_plugin.ShardedReader)),
}  # fmt: skip
"""Who saves and who loads."""

ENTRIES: dict[str, InterchangeEntry] = {
    **{
        name: InterchangeEntry(make, differs=EXACT_KEYS if name == "multi_step_lr" else {})
        for name, make in STATES.items()
    },
    **{name: InterchangeEntry(*makes) for name, makes in INTO_ANOTHER.items()},
    **{
        f"{name}_on_two_ranks": InterchangeEntry(make, world_size=2, variants=TWO_RANKS)
        for name, make in ON_TWO_RANKS.items()
    },
    **{f"planner_that_{name}": entry for name, entry in PLANNERS.items()},
}


def run(entry: InterchangeEntry, way: str, tool: Tool, trace: Trace) -> None:
    """Save one state and load it into another; with stock, in both by stock."""
    save, load = WAYS[way] if isinstance(tool, Ours) else STOCK
    if entry.save_planner is not None:
        save, load = partial(save, planner=entry.save_planner), partial(load, planner=entry.load_planner)
    state = entry.make(1)
    tool.do("save", save, state)
    state = (entry.load or entry.make)(0)
    tool.do("load", load, state)
    trace.resumed(*state.values())
    trace.see("keys", list(state))
