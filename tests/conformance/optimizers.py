"""Corpus of optimizers, each over one model of its own; what needs more than that is in :mod:`~.programs`.

An entry is one line: a function of the model. ``note`` is for hooks, as in the corpus of modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.conformance import differences as known
from tests.conformance.entries import ALL, UNWRAPPED, WHOLE, Entry
from tests.conformance.modules import SavedInBFloat16LoadedInFloat, Small
from tests.conformance.steps import step
from tests.conformance.trace import note


@dataclass(frozen=True)
class OptimizerEntry(Entry):
    make: Callable[[nn.Module], optim.Optimizer]
    variants: tuple[str, ...] = UNWRAPPED
    module: Callable[[], nn.Module] = Small


def over_all(kind: Callable[..., optim.Optimizer], **options: Any) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **options)


class SmallSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words((x.abs() * 3).long().clamp(max=6)).sum(1)


class SmallMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 5, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class SmallWithUnused(Small):
    """A parameter that never gets a gradient, and one without a row."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.rand(3))


def groups(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    """Weights, and biases with other settings."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "lr": 0.5, **second},
    ]


def with_scheduler(model: nn.Module) -> optim.Optimizer:
    """A scheduler adds a field to the groups."""
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # type: ignore[attr-defined]
    optimizer.register_step_post_hook(lambda o, *_: o.scheduler.step() if hasattr(o, "scheduler") else None)
    return optimizer


def added_later(model: nn.Module) -> optim.Optimizer:
    first, *rest = model.parameters()
    optimizer = optim.Adam([first], lr=0.1)
    optimizer.add_param_group({"params": rest, "lr": 0.2, "weight_decay": 0.1})
    return optimizer


def some_frozen_after(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.AdamW(model.parameters())
    next(model.parameters()).requires_grad_(False)
    return optimizer


def hooked(model: nn.Module) -> optim.Optimizer:
    """Every hook of state_dict and load_state_dict that an optimizer has."""
    optimizer = optim.Adam(model.parameters())
    optimizer.register_state_dict_pre_hook(lambda o: note("state_dict pre-hook"))
    optimizer.register_state_dict_post_hook(lambda o, state: note("state_dict post-hook", sorted(state)))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: note("load pre-hook", sorted(state)))
    optimizer.register_load_state_dict_post_hook(lambda o: note("load post-hook"))
    return optimizer


def hook_changes_what_is_saved(model: nn.Module) -> optim.Optimizer:
    """Second moments are saved as their roots."""

    def root(o: Any, state: dict[str, Any]) -> dict[str, Any]:
        note("root")
        rooted = {k: {**s, "exp_avg_sq": s["exp_avg_sq"].sqrt()} for k, s in state["state"].items()}
        return {**state, "state": rooted}

    def square(o: Any, state: dict[str, Any]) -> dict[str, Any]:
        note("square")
        squared = {k: {**s, "exp_avg_sq": s["exp_avg_sq"].square()} for k, s in state["state"].items()}
        return {**state, "state": squared}

    optimizer = optim.Adam(model.parameters())
    optimizer.register_state_dict_post_hook(root)
    optimizer.register_load_state_dict_pre_hook(square)
    return optimizer


def load_hook_rebuilds(model: nn.Module) -> optim.Optimizer:
    def rebuild(o: Any) -> None:
        note("rebuild")
        o.param_groups[0]["rebuilt"] = sum(float(s.get("step", 0)) for s in o.state.values())

    optimizer = optim.Adam(model.parameters())
    optimizer.param_groups[0]["rebuilt"] = 0.0
    optimizer.register_load_state_dict_post_hook(rebuild)
    return optimizer


class OverridesBoth(optim.SGD):
    """As wrappers do: more in the state dict than the base has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        note("state_dict")
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        note("load_state_dict", sorted(state_dict))
        self.steps = state_dict.get("steps", -1)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Custom(optim.Optimizer):
    """Keeps for each parameter what :meth:`slots` gives, and moves it by that."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    slots = self.state[parameter]
                    slots |= self.slots(slots.get("step", 0) + 1, place, parameter)
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.factor(slots))
        return loss

    def slots(self, step: int, place: int, parameter: torch.Tensor) -> dict[str, Any]:
        raise NotImplementedError

    def factor(self, slots: dict[str, Any]) -> float:
        return 1.0 / slots["step"]


class PlainValues(Custom):
    def slots(self, step: int, place: int, parameter: torch.Tensor) -> dict[str, Any]:
        return {
            "step": step, "name": f"p{place}", "mean": step / 7, "history": [step, None, "x"], "pair": (step, 2),
            "nested": {"a": {"b": step}}, "flag": True, "none": None, "tensors": [torch.full((2,), float(step))],
            "dtype": torch.float16, "dotted.name": step,
        }  # fmt: skip


class SlotsOfTensors(Custom):
    """As AggMo: a slot with a moment for each decay; and one with a list of them."""

    def slots(self, step: int, place: int, parameter: torch.Tensor) -> dict[str, Any]:
        decays = {name: torch.full_like(parameter, step / 8 + place) for name in ("slow", "fast")}
        return {"step": step, "moments": decays, "past": [parameter.detach() * step, parameter.detach() + step]}

    def factor(self, slots: dict[str, Any]) -> float:
        return 1.0 / (slots["step"] + len(slots["moments"]) + len(slots["past"]))


class NoTensors(Custom):
    def slots(self, step: int, place: int, parameter: torch.Tensor) -> dict[str, Any]:
        return {"step": step}


class Grows(Custom):
    """As L-BFGS and Shampoo: as much state as there have been steps."""

    def slots(self, step: int, place: int, parameter: torch.Tensor) -> dict[str, Any]:
        return {"step": step, "past": torch.full((step, 3), float(step)), f"slot {step}": torch.tensor(step)}


class PerRank(Custom):
    """As 8-bit optimizers under FSDP2: plain tensors about the local shard, which each rank has for itself."""

    def slots(self, step: int, place: int, parameter: torch.Tensor) -> dict[str, Any]:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        rank = dist.get_rank() if dist.is_initialized() else 0
        quantized = (local.detach() * 100 + rank).to(torch.int8)
        return {"step": step, "quantized": quantized, "absmax": torch.tensor([float(rank + 1), float(step)])}

    def factor(self, slots: dict[str, Any]) -> float:
        return 1.0 if dist.is_initialized() else float(slots["absmax"][0]) / slots["step"]


class PerRankOfOneShape(PerRank):
    def slots(self, step: int, place: int, parameter: torch.Tensor) -> dict[str, Any]:
        slots = super().slots(step, place, parameter)
        del slots["quantized"]
        return slots


class KeepsGlobalState(NoTensors):
    """State under a name and not under a parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["global"] = {"steps": self.state.get("global", {}).get("steps", 0) + 1}
        return super().step(closure)


class Lookahead(optim.Optimizer):
    """A wrapper that shares the groups and the state of another."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {"alpha": 0.5})
        self.param_groups = inner.param_groups
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["slow"] = parameter.detach().clone()

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class SharedSlots(Custom):
    """One tensor in the state of all parameters."""

    def slots(self, step: int, place: int, parameter: torch.Tensor) -> dict[str, Any]:
        if place == 0:
            self.shared = torch.full((3,), float(step))
        return {"step": step, "shared": self.shared}


class HoldsParameter(Custom):
    """The parameter itself, and a copy of it, in the state."""

    def slots(self, step: int, place: int, parameter: torch.Tensor) -> dict[str, Any]:
        return {"step": step, "anchor": parameter.detach().clone(), "number": torch.tensor(step)}


class Several(optim.Optimizer):
    """Two optimizers in one, as hybrids of Muon and AdamW are. It has no groups and no state of its own."""

    def __init__(self, model: nn.Module) -> None:
        first, *rest = model.parameters()
        self.inner = [optim.SGD([first], lr=0.1, momentum=0.9), optim.AdamW(rest, lr=0.1)]

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for inner in self.inner:
            inner.step()
        return loss

    def state_dict(self) -> Any:
        return {"momentum": self.inner[0].state_dict(), "adam": self.inner[1].state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner[0].load_state_dict(state_dict["momentum"])
        self.inner[1].load_state_dict(state_dict["adam"])


class ListOfStateDicts(Several):
    def state_dict(self) -> Any:
        return [inner.state_dict() for inner in self.inner]

    def load_state_dict(self, state_dict: Any) -> None:
        for inner, state in zip(self.inner, state_dict, strict=True):
            inner.load_state_dict(state)


class MergedGroups(Several):
    """The groups of both in one list. Both count parameters from 0."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.param_groups = [group for inner in self.inner for group in inner.param_groups]

    def state_dict(self) -> Any:
        first, second = (inner.state_dict() for inner in self.inner)
        return {
            "state": {"first": first["state"], "second": second["state"]},
            "param_groups": first["param_groups"] + second["param_groups"],
        }

    def load_state_dict(self, state_dict: Any) -> None:
        for inner, name, group in zip(self.inner, ("first", "second"), state_dict["param_groups"], strict=True):
            inner.load_state_dict({"state": state_dict["state"].get(name, {}), "param_groups": [group]})


class FlatNames(Several):
    """As torchtitan's ``OptimizersContainer``: names of parameters, flat, and state from the first call on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model = model
        optim.Optimizer.__init__(self, list(model.parameters()), {})

    def state_dict(self) -> Any:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        states = [get_optimizer_state_dict(self.model, inner, options=flat) for inner in self.inner]
        return {key: value for state in states for key, value in state.items()}

    def load_state_dict(self, state_dict: Any) -> None:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        for inner in self.inner:
            set_optimizer_state_dict(self.model, inner, state_dict, options=flat)


class SlowWeights(optim.SGD):
    """As Lookahead: slow weights, a counter and a Counter beside the state, all of which it wants back."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.slow: dict[int, torch.Tensor] = {}
        self.steps, self.seen = 0, Counter[str]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.steps += 1
        self.seen["steps"] += 1
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            slow = self.slow.setdefault(number, parameter.detach().clone())
            parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss

    def state_dict(self) -> Any:
        return {**super().state_dict(), "slow": dict(self.slow), "steps": self.steps, "seen": self.seen}

    def load_state_dict(self, state_dict: Any) -> None:
        state = dict(state_dict)
        self.slow = {number: tensor.clone() for number, tensor in state.pop("slow").items()}
        self.steps, self.seen = state.pop("steps"), state.pop("seen")
        assert isinstance(self.seen, Counter)
        super().load_state_dict(state)


class Hybrid(ListOfStateDicts):
    """With groups for schedules, and a counter that it pops: what a framework can train with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        optim.Optimizer.__init__(self, list(model.parameters()), {"lr": 0.1})
        self.param_groups = [group for inner in self.inner for group in inner.param_groups]
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def state_dict(self) -> Any:
        return {"inner": super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        state = dict(state_dict)
        self.steps = state.pop("steps")
        super().load_state_dict(state.pop("inner"))
        self.param_groups = [group for inner in self.inner for group in inner.param_groups]


def stepped(make: Callable[[nn.Module], optim.Optimizer]) -> Callable[[nn.Module], optim.Optimizer]:
    """Make an optimizer that has taken a step: its shards tell how those of the checkpoint are to be cut."""

    def made(model: nn.Module) -> optim.Optimizer:
        optimizer = make(model)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step(model, optimizer)
        model.zero_grad()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        return optimizer

    return made


OWN = partial(OptimizerEntry, oracle="torch.save")
"""Stock's recipe has none of these, because ``get_optimizer_state_dict`` takes each for a plain optimizer."""

SPARSE = partial(OptimizerEntry, module=SmallSparse, variants=("plain",))

OPTIMIZERS: dict[str, OptimizerEntry] = {
    "Adadelta": OptimizerEntry(over_all(optim.Adadelta)),
    "Adafactor": OptimizerEntry(over_all(optim.Adafactor), ("plain",)),
    "Adagrad": OptimizerEntry(over_all(optim.Adagrad, initial_accumulator_value=0.5)),
    "Adam": OptimizerEntry(over_all(optim.Adam), ("plain", "ddp", "fsdp2", "fsdp2@3", "fsdp1")),
    "AdamAmsgrad": OptimizerEntry(over_all(optim.Adam, amsgrad=True)),
    "AdamForeach": OptimizerEntry(over_all(optim.Adam, foreach=True)),
    "AdamSavedInBFloat16": OptimizerEntry(over_all(optim.Adam), ("plain",), SavedInBFloat16LoadedInFloat),
    "AdamFused": OptimizerEntry(over_all(optim.Adam, fused=True)),
    "AdamMaximize": OptimizerEntry(over_all(optim.Adam, maximize=True)),
    "AdamTensorLr": OptimizerEntry(over_all(optim.Adam, lr=torch.tensor(0.1), foreach=False)),
    "AdamTensorLrFused": OptimizerEntry(over_all(optim.Adam, lr=torch.tensor(0.1), fused=True)),
    "AdamTensorBetas": OptimizerEntry(over_all(optim.Adam, betas=(torch.tensor(0.9), torch.tensor(0.99))), ("plain",)),
    "AdamDifferentiable": OptimizerEntry(over_all(optim.Adam, differentiable=False, foreach=False)),
    "AdamW": OptimizerEntry(over_all(optim.AdamW), ("plain", "ddp", "fsdp2", "fsdp1")),
    "AdamWCapturable": OptimizerEntry(over_all(optim.AdamW, capturable=False, foreach=False), ("plain",)),
    "Adamax": OptimizerEntry(over_all(optim.Adamax)),
    "ASGD": OptimizerEntry(over_all(optim.ASGD)),
    "LBFGS": OptimizerEntry(over_all(optim.LBFGS, max_iter=3, history_size=2), ("plain",)),
    "LBFGSFirst": OptimizerEntry(over_all(optim.LBFGS, max_iter=1, line_search_fn="strong_wolfe"), ("plain",)),
    "Muon": OptimizerEntry(over_all(optim.Muon), ("plain",), SmallMatrices),
    "NAdam": OptimizerEntry(over_all(optim.NAdam)),
    "RAdam": OptimizerEntry(over_all(optim.RAdam)),
    "RMSprop": OptimizerEntry(over_all(optim.RMSprop, momentum=0.5, centered=True)),
    "Rprop": OptimizerEntry(over_all(optim.Rprop), ("plain",)),
    "SGD": OptimizerEntry(over_all(optim.SGD), ALL),
    "SGDMomentum": OptimizerEntry(over_all(optim.SGD, momentum=0.9), ALL),
    "SGDNesterov": OptimizerEntry(over_all(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "SparseAdam": SPARSE(over_all(optim.SparseAdam)),
    "SparseSGD": SPARSE(over_all(optim.SGD, momentum=0.9), must_work=False),
    "Groups": OptimizerEntry(lambda m: optim.AdamW(groups(m, weight_decay=0.0, betas=(0.5, 0.6))), ALL),
    "GroupsWithOwnFields": OptimizerEntry(lambda m: optim.AdamW(groups(m, name="biases", tags=["a", 1], unit=None))),
    "GroupsWithNestedFields": OptimizerEntry(
        lambda m: optim.AdamW(groups(m, conf={"a": {"b": 1}, "t": torch.ones(2)}))
    ),
    "EmptyGroup": OptimizerEntry(lambda m: optim.Adam([{"params": list(m.parameters())}, {"params": [], "lr": 0.5}])),
    "AddedLater": OptimizerEntry(added_later),
    "NamedParameters": OptimizerEntry(lambda m: optim.Adam(m.named_parameters()), ALL),
    "NamedParametersInGroups": OptimizerEntry(
        lambda m: optim.Adam([{"params": list(m.named_parameters())[:2]}, {"params": list(m.named_parameters())[2:]}])
    ),
    "PartOfTheParameters": OptimizerEntry(lambda m: optim.Adam(list(m.parameters())[1:3])),
    "ReversedParameters": OptimizerEntry(lambda m: optim.Adam(list(m.parameters())[::-1])),
    "NeverAGradient": OptimizerEntry(over_all(optim.Adam), module=SmallWithUnused),
    "FrozenAfterwards": OptimizerEntry(some_frozen_after),
    "WithScheduler": OptimizerEntry(with_scheduler),
    "Hooked": OptimizerEntry(hooked, ALL),
    "HookChangesWhatIsSaved": OptimizerEntry(hook_changes_what_is_saved),
    "LoadHookRebuilds": OptimizerEntry(load_hook_rebuilds),
    "OverridesBoth": OptimizerEntry(over_all(OverridesBoth, lr=0.1, momentum=0.9), differs=known.EXTRAS_TRAVEL),
    "PlainValues": OptimizerEntry(over_all(PlainValues), differs=known.UNCAST_SLOTS),
    "NoTensors": OptimizerEntry(over_all(NoTensors)),
    "SlotsOfTensors": OptimizerEntry(over_all(SlotsOfTensors), ("plain", "fsdp2", "fsdp2@3")),
    "Grows": OptimizerEntry(over_all(Grows)),
    # Not under DDP, where rank 0's state is that of all. Stock mixes the tensors of the ranks, see
    # core/state/test_rank_local.py.
    "PerRank": OptimizerEntry(over_all(PerRank), oracle="right"),
    "PerRankOfOneShape": OptimizerEntry(over_all(PerRankOfOneShape), oracle="right"),
    "KeepsGlobalState": OptimizerEntry(over_all(KeepsGlobalState), ("plain",), oracle="right"),
    "Lookahead": OptimizerEntry(lambda m: Lookahead(optim.SGD(m.parameters(), lr=0.1, momentum=0.9)), ("plain",)),
    "SharedSlots": OptimizerEntry(over_all(SharedSlots)),
    "Several": OWN(Several, WHOLE),
    "SeveralStepped": OWN(stepped(Several), ("fsdp2",)),
    "ListOfStateDicts": OWN(ListOfStateDicts, WHOLE),
    "ListOfStateDictsStepped": OWN(stepped(ListOfStateDicts), ("fsdp2",)),
    "MergedGroups": OWN(MergedGroups, WHOLE),
    "MergedGroupsStepped": OWN(stepped(MergedGroups), ("fsdp2",)),
    "Hybrid": OWN(Hybrid, WHOLE),
    "FlatNames": OWN(FlatNames, ("plain", "ddp", "fsdp2", "fsdp2@3")),
    "SlowWeights": OWN(over_all(SlowWeights), WHOLE),
    "SlowWeightsStepped": OWN(stepped(over_all(SlowWeights)), ("fsdp2",)),
    "HoldsParameter": OptimizerEntry(over_all(HoldsParameter), ALL, differs=known.UNCAST_SLOTS),
}
