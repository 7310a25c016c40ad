"""Corpus of programs: user code that is more than one model with one optimizer, each written out.

An entry is one decorated function of a tool and a trace. ``right`` tells what a resume has to restore.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dcp_plugin
from tests.conformance import differences as known
from tests.conformance.modules import NonPersistent, Small, StateDictPreHook
from tests.conformance.moments import evaluate, train
from tests.conformance.steps import inputs, loss_of, step
from tests.conformance.tools import Ours, Tool
from tests.conformance.trace import Trace, note
from tests.conformance.training import WRAP, losses_of

ALL = ("plain", "ddp", "fsdp2")
Wrap = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class ProgramEntry:
    code: Callable[[Tool, Trace, Wrap], None]
    layouts: tuple[str, ...] = ("plain", "fsdp2")
    oracle: str = "stock"
    differs: Mapping[str, str] = field(default_factory=dict)
    must_work: bool = True


PROGRAMS: dict[str, ProgramEntry] = {}


def program(
    *layouts: str, oracle: str = "stock", differs: Mapping[str, str] | None = None, must_work: bool = True
) -> Any:
    """Adds a function to the corpus under its own name."""

    def add(code: Any) -> Any:
        PROGRAMS[code.__name__] = ProgramEntry(code, layouts or ("plain", "fsdp2"), oracle, differs or {}, must_work)
        return code

    return add


def run(entry: ProgramEntry, layout: str, tool: Tool, trace: Trace) -> None:
    entry.code(tool, trace, WRAP[layout])


def saved_and_resumed(
    tool: Tool, trace: Trace, build: Callable[[], dict[str, Any]], go: Callable[[dict[str, Any], int], Any]
) -> None:
    """``build`` makes a state, ``go`` trains with it; both with the numbers of a seed."""
    torch.manual_seed(1)
    state = build()
    go(state, 0)
    trace.before(*state.values())
    tool.save(state)
    trace.saved(*state.values())
    trace.right["losses"] = {"after": repr(go(state, 7))}
    torch.manual_seed(2)
    state = build()
    tool.load(state)
    trace.resumed(*state.values())
    trace.seen["losses"] = {"after": repr(go(state, 7))}


@program(*ALL)
def TwiceInARow(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """Save, train, save; then load the second, the first, and the first once more."""
    torch.manual_seed(1)
    model = wrap(Small())
    optimizer = optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}
    train(model, optimizer)
    tool.save(state, "first")
    trace.saved(model, optimizer)
    first = trace.seen["what the save left"]
    train(model, optimizer)
    tool.save(state, "second")
    trace.saved(model, optimizer)
    tool.load(state, "second")
    trace.resumed(model, optimizer)
    for name in ("first", "first"):
        train(model, optimizer)
        tool.load(state, name)
        trace.resumed(model, optimizer)
    trace.right["resumed state"] = first
    trace.seen["losses"] = losses_of(model, optimizer)


@program(*ALL)
def SavedTwiceUnderOneName(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    torch.manual_seed(1)
    model = wrap(Small())
    optimizer = optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}
    train(model, optimizer)
    tool.save(state)
    train(model, optimizer)
    tool.save(state)
    trace.saved(model, optimizer)
    train(model, optimizer)
    tool.load(state)
    trace.resumed(model, optimizer)


@program("plain", oracle="right")
def LooseParameter(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """A temperature that the optimizer trains and no module has."""

    def build() -> dict[str, Any]:
        model, scale = wrap(Small()), nn.Parameter(torch.rand(()))
        return {"model": model, "optim": optim.Adam([*model.parameters(), scale]), "scale": scale}

    def go(state: dict[str, Any], seed: int) -> float:
        loss = loss_of(state["model"], seed) * state["scale"]
        loss.backward()
        state["optim"].step()
        state["optim"].zero_grad()
        return float(loss)

    saved_and_resumed(tool, trace, build, go)


def _both(state: dict[str, Any], seed: int) -> float:
    """One step of all optimizers on the sum of the losses of all models."""
    loss = sum(loss_of(value, seed) for value in state.values() if isinstance(value, nn.Module))
    loss.backward()
    for value in state.values():
        if isinstance(value, optim.Optimizer):
            value.step()
            value.zero_grad()
    return float(loss)


@program("plain", "fsdp2", oracle="right")
def OneOptimizerOverTwoModels(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    def build() -> dict[str, Any]:
        one, two = wrap(Small()), wrap(Small())
        return {"one": one, "two": two, "optim": optim.Adam([*one.parameters(), *two.parameters()])}

    saved_and_resumed(tool, trace, build, _both)


@program(*ALL)
def TwoOptimizersOverOneModel(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    def build() -> dict[str, Any]:
        model = wrap(Small())
        first, *rest = model.parameters()
        return {"model": model, "one": optim.Adam([first]), "two": optim.SGD(rest, lr=0.1, momentum=0.9)}

    saved_and_resumed(tool, trace, build, _both)


@program(*ALL)
def TwoModelsWithTheirOptimizers(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """As a GAN."""

    def build() -> dict[str, Any]:
        one, two = wrap(Small()), wrap(Small())
        return {"g": one, "d": two, "opt_g": optim.Adam(one.parameters()), "opt_d": optim.RMSprop(two.parameters())}

    saved_and_resumed(tool, trace, build, _both)


@program("plain", "fsdp2")
def OptimizerOfAChild(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    def build() -> dict[str, Any]:
        model = wrap(Small())
        return {"model": model, "optim": optim.Adam(model.block.parameters())}

    saved_and_resumed(tool, trace, build, _both)


@program("plain", "fsdp2")
def OptimizerInBackward(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """One optimizer for each parameter, which steps as soon as the gradient is there."""

    def build() -> dict[str, Any]:
        model = wrap(Small())
        each = {name: optim.Adam([parameter]) for name, parameter in model.named_parameters()}

        def act(parameter: torch.Tensor, optimizer: optim.Optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(functools.partial(act, optimizer=each[name]))
        return {"model": model, **{f"optim {name.replace('.', '_')}": one for name, one in each.items()}}

    def go(state: dict[str, Any], seed: int) -> float:
        loss = loss_of(state["model"], seed)
        loss.backward()
        return float(loss)

    saved_and_resumed(tool, trace, build, go)


@program("plain", "ddp")
def EmaBesideTheModel(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    def build() -> dict[str, Any]:
        model = Small(NonPersistent())
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        return {"model": wrap(model), "ema": ema, "optim": optim.Adam(model.parameters())}

    def go(state: dict[str, Any], seed: int) -> float:
        loss = step(state["model"], state["optim"], seed)
        state["ema"].update_parameters(getattr(state["model"], "module", state["model"]))
        return loss

    saved_and_resumed(tool, trace, build, go)


@program("plain")
def ModelAndItsChild(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """The same parameters under two names of the state."""

    def build() -> dict[str, Any]:
        model = wrap(Small())
        return {"model": model, "head": model.block}

    saved_and_resumed(tool, trace, build, lambda state, seed: step(state["model"], None, seed))


@program("plain", "fsdp2")
def ModuleDictOfModels(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    def build() -> dict[str, Any]:
        both = nn.ModuleDict({"a": wrap(Small()), "b": wrap(Small())})
        return {"models": both, "optim": optim.Adam(both.parameters())}

    def go(state: dict[str, Any], seed: int) -> float:
        loss = loss_of(state["models"]["a"], seed) + loss_of(state["models"]["b"], seed)
        loss.backward()
        state["optim"].step()
        state["optim"].zero_grad()
        return float(loss)

    saved_and_resumed(tool, trace, build, go)


class Counter:
    """A Stateful of the user, with the hooks that DCP promises."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        note("state_dict")
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        note("load_state_dict", {key: type(value).__name__ for key, value in sorted(state.items())})
        self.values = dict(state)


def _stateful(tool: Tool, trace: Trace, make: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    counter = Counter(**make())
    tool.save({"it": counter})
    right = counter.values
    torch.manual_seed(2)
    counter = Counter(**make())
    tool.load({"it": counter})
    trace.see("values", counter.values, right)


@program("plain", "ddp")
def StatefulOfPlainValues(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    values = {"int": 3, "float": 0.5, "none": None, "str": "a", "list": [1, "b"], "tuple": (1, (2,)), "bool": True}
    _stateful(tool, trace, lambda: dict(values))


@program("plain", "ddp")
def StatefulNested(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    make = {"a": {"b": [{"c": 1}, {"d": torch.ones(2)}], "e": {}}, "f": [], "g": {"1": 1}}
    _stateful(tool, trace, lambda: make)


@program("plain")
def StatefulWithTensors(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    _stateful(tool, trace, lambda: {"t": torch.rand(3), "l": [torch.rand(2), 3], "n": torch.rand(())})


class NamedCounter(Counter):
    """Tells its name when it is called."""

    def state_dict(self) -> dict[str, Any]:
        note(self.values["name"])
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        note(state["name"])
        super().load_state_dict(state)


@program("plain", "ddp", differs=known.CALLED_IN_ONE_ORDER)
def ObjectsInAnyOrder(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    def state() -> dict[str, Any]:
        return {"c": NamedCounter(name="c"), "a": NamedCounter(name="a"), "b": wrap(StateDictPreHook())}

    tool.save(state())
    tool.load(state())


@program("plain", differs=known.FLOATS_FOR_INTEGERS)
def FloatsIntoIntegers(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    tool.save({"it": torch.tensor([0.75, 2.0])})
    state = {"it": torch.zeros(2, dtype=torch.int64)}
    tool.load(state)
    trace.see("values", state["it"])


@program("plain")
def TensorWhereAPlainValueIs(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """As a learning rate that has become a tensor."""
    saved = {"lr": torch.tensor(0.5), "settings": {"lr": torch.tensor(0.25)}}
    tool.save(dict(saved))
    state = {"lr": 0.0, "settings": {"lr": 0.0}}
    tool.load(state)
    trace.see("values", state, saved)


@program("plain")
def MappingWhereAPlainValueIs(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    saved = {"best": {"loss": 0.5, "weights": torch.ones(2)}}
    tool.save(dict(saved))
    state = {"best": 0.0}
    tool.load(state)
    trace.see("values", state, saved)


@program("plain", differs=known.UNKNOWN_KIND_OF_URL, must_work=False)
def UnknownKindOfUrl(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    def save(state: dict[str, Any], path: Any) -> None:
        url = "nosuch://bucket/run"
        dcp_plugin.save(state, url) if isinstance(tool, Ours) else dcp.save(state, checkpoint_id=url)

    tool.do("save", save, {"it": 1})


@program("plain", "fsdp2")
def Scheduler(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    def build() -> dict[str, Any]:
        model = wrap(Small())
        optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        cosine = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        warm = optim.lr_scheduler.LinearLR(optimizer, 0.1)
        both = optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [1])
        return {"model": model, "optim": optimizer, "schedule": both}

    def go(state: dict[str, Any], seed: int) -> list[float]:
        losses = [step(state["model"], state["optim"], seed)]
        state["schedule"].step()
        return [*losses, *state["schedule"].get_last_lr()]

    saved_and_resumed(tool, trace, build, go)


@program("plain")
def RandomGenerator(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """Plain values and a generator's state in the mapping itself."""
    generator = torch.Generator().manual_seed(3)
    state = {"random": generator.get_state(), "epoch": 3, "best": 0.25, "name": "run", "nothing": None}
    tool.save(state)
    right = dict(state)
    state = {"random": torch.Generator().get_state(), "epoch": 0, "best": 0.0, "name": "", "nothing": 1}
    tool.load(state)
    for key in right:
        trace.see(key, state[key], right[key])


@program("ddp", oracle="every rank raises")
def OneRankFailsOnSave(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    counter = Counter(a=1)
    if dist.get_rank() == 1:
        counter.state_dict = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    tool.save({"it": counter})


@program("plain", "ddp", must_work=False)
def NothingThere(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """A load from a path where nothing is."""
    tool.load({"model": wrap(Small())})


@program("plain", "ddp", must_work=False)
def FileExistsAtThePath(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    (tool.folder / "checkpoint").write_text("not a directory")
    tool.save({"model": wrap(Small())})


@program("plain", "fsdp2")
def EvaluatedBetweenLoadAndTraining(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    def go(state: dict[str, Any], seed: int) -> list[float]:
        evaluate(state["model"], None)
        with torch.no_grad():
            before = float(state["model"](inputs(seed)).sum())
        return [before, step(state["model"], state["optim"], seed)]

    def build() -> dict[str, Any]:
        model = wrap(Small())
        evaluate(model, None)
        return {"model": model, "optim": optim.Adam(model.parameters())}

    saved_and_resumed(tool, trace, build, go)
