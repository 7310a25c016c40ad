"""Corpus of stock interchange: what one tool saves the other one loads, through every integration that DCP has.

A state is one line, a function that makes it with a number; objects of a user (modules, optimizers, schedulers) may be
in it. A planner is one line, too. Each goes each of ``WAYS``, and the user sees what they see if stock does both.
"""

from __future__ import annotations

import copy
import functools
import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from tests.conformance.reasons import EXACT_KEYS
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


@dataclass(frozen=True)
class PlannerEntry:
    make: Make = lambda at: {**flat(at), "nested": {"l": [tensor(at), at]}}
    load: Make | None = None
    """What is loaded into, if it is another state."""
    save_planner: Callable[[], Any] = dcp.DefaultSavePlanner
    load_planner: Callable[[], Any] = dcp.DefaultLoadPlanner


PLANNERS: dict[str, PlannerEntry] = {
    "renames": PlannerEntry(flat, save_planner=RenamingSavePlanner, load_planner=RenamingLoadPlanner),
    "halves": PlannerEntry(flat, save_planner=HalvingSavePlanner),
    "has_planner_data_of_its_own": PlannerEntry(flat, save_planner=SavePlannerWithMore),
    "materializes": PlannerEntry(load_planner=MaterializingLoadPlanner),
    "caches_plans": PlannerEntry(save_planner=lambda: dcp.DefaultSavePlanner(enable_plan_caching=True)),
    "does_not_flatten": PlannerEntry(
        flat,
        save_planner=lambda: dcp.DefaultSavePlanner(flatten_state_dict=False),
        load_planner=lambda: dcp.DefaultLoadPlanner(flatten_state_dict=False),
    ),
    "takes_a_part": PlannerEntry(
        load=lambda at: {"bias": tensor(at), "new": at},
        load_planner=lambda: dcp.DefaultLoadPlanner(allow_partial_load=True),
    ),
    "wants_what_is_not_there": PlannerEntry(load=lambda at: {"bias": tensor(at), "new": at}),
    "wants_another_shape": PlannerEntry(load=lambda at: {"bias": torch.zeros(4)}),
    "wants_another_dtype": PlannerEntry(load=lambda at: {"bias": torch.zeros(3)}),
    "takes_everything": PlannerEntry(load=lambda at: {}, load_planner=_EmptyStateDictLoadPlanner),
    "takes_everything_under_other_keys_than_text": PlannerEntry(
        lambda at: {"s": {0: {"m": tensor(at)}, (0, "a"): at, None: [{1: at}]}, "c": Counter({3: at})},
        load=lambda at: {},
        load_planner=_EmptyStateDictLoadPlanner,
    ),
    "takes_some_keys": PlannerEntry(
        load=lambda at: {}, load_planner=lambda: _EmptyStateDictLoadPlanner(keys={"bias", "nested"})
    ),
}


@dataclass(frozen=True)
class Way:
    """Who saves and who loads. Without planners of the user's the tool's own are used."""

    save: Callable[..., Any]
    load: Callable[..., Any]


def _stock_save(state: State, path: Path, **how: Any) -> None:
    dcp.save(_as_stock_takes_it(state), **how if "storage_writer" in how else {**how, "checkpoint_id": path})


def _stock_load(state: State, path: Path, **how: Any) -> None:
    taken = _as_stock_takes_it(state)
    dcp.load(taken, **how if "storage_reader" in how else {**how, "checkpoint_id": path})
    model, optimizer = state.get("model"), state.get("optim")
    if isinstance(model, nn.Module):
        set_model_state_dict(model, taken["model"])
        set_optimizer_state_dict(model, optimizer, taken["optim"])
    state.update({key: value for key, value in taken.items() if key not in ("model", "optim")})


def _as_stock_takes_it(state: State) -> State:
    model, optimizer = state.get("model"), state.get("optim")
    if not isinstance(model, nn.Module):
        return dict(state)
    return {**state, "model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def _writer_save(state: State, path: Path, **how: Any) -> None:
    _stock_save(state, path, storage_writer=dcp_plugin.ShardedWriter(path), **how)


def _reader_load(state: State, path: Path, **how: Any) -> None:
    _stock_load(state, path, storage_reader=dcp_plugin.ShardedReader(path), **how)


def _planner_save(state: State, path: Path) -> None:
    _writer_save(state, path, planner=dcp_plugin.ShardedSavePlanner())


def _planner_load(state: State, path: Path) -> None:
    _reader_load(state, path, planner=dcp_plugin.ShardedLoadPlanner())


def _planner_alone_save(state: State, path: Path) -> None:
    _stock_save(state, path, planner=dcp_plugin.ShardedSavePlanner())


def _planner_alone_load(state: State, path: Path) -> None:
    _stock_load(state, path, planner=dcp_plugin.ShardedLoadPlanner())


WAYS: dict[str, Way] = {
    "stock_to_ours": Way(_stock_save, dcp_plugin.load),
    "ours_to_stock": Way(dcp_plugin.save, _stock_load),
    "writer_to_stock": Way(_writer_save, _stock_load),
    "stock_to_reader": Way(_stock_save, _reader_load),
    "planner_to_stock": Way(_planner_save, _stock_load),
    "stock_to_planner": Way(_stock_save, _planner_load),
    "planner_alone": Way(_planner_alone_save, _planner_alone_load),
    "writer_to_reader": Way(_writer_save, _reader_load),
}
ONE_RANK = tuple(way for way in WAYS if way != "writer_to_reader")
TWO_RANKS = ("stock_to_ours", "ours_to_stock", "writer_to_stock", "stock_to_reader", "planner_alone")
PLANNERS_OF_USERS = ("writer_to_stock", "stock_to_reader", "writer_to_reader")


@dataclass(frozen=True)
class Entry:
    entry: PlannerEntry
    world_size: int
    ways: tuple[str, ...]
    planners: bool = False


ENTRIES: dict[str, Entry] = {
    **{name: Entry(PlannerEntry(make), 1, ONE_RANK) for name, make in STATES.items()},
    **{name: Entry(PlannerEntry(*makes), 1, ONE_RANK) for name, makes in INTO_ANOTHER.items()},
    **{f"{name}_on_two_ranks": Entry(PlannerEntry(make), 2, TWO_RANKS) for name, make in ON_TWO_RANKS.items()},
    **{f"planner_that_{name}": Entry(each, 1, PLANNERS_OF_USERS, True) for name, each in PLANNERS.items()},
}
"""Each with the ways that it goes."""


def differs(name: str, way: str) -> Mapping[str, str]:
    if name == "multi_step_lr" and WAYS[way].load not in (_stock_load, _reader_load):
        return {"resumed state": EXACT_KEYS}
    return {}


def run(entry: Entry, way: str, tool: Tool, trace: Trace) -> None:
    """Save one state and load it into another; with stock, in both by stock."""
    chosen = WAYS[way] if isinstance(tool, Ours) else Way(_stock_save, _stock_load)
    planners: tuple[State, State] = {}, {}
    if entry.planners:
        planners = {"planner": entry.entry.save_planner()}, {"planner": entry.entry.load_planner()}
    state = entry.entry.make(1)
    tool.do("save", functools.partial(chosen.save, **planners[0]), state)
    state = (entry.entry.load or entry.entry.make)(0)
    tool.do("load", functools.partial(chosen.load, **planners[1]), state)
    trace.resumed(*state.values())
    trace.see("keys", list(state))
