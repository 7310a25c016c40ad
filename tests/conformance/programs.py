"""Corpus of programs: user code that is more than one model with one optimizer, each written out.

An entry is one decorated function: of a tool and a trace, or one that builds what is saved and resumed. ``right`` tells
what a resume has to restore.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dcp_plugin
from tests.conformance import differences as known
from tests.conformance.entries import ALL, UNWRAPPED, WHOLE, Entry
from tests.conformance.modules import MODULES, Small
from tests.conformance.moments import evaluate, train
from tests.conformance.steps import inputs, loss_of, step
from tests.conformance.tools import Ours, Tool
from tests.conformance.trace import Trace, note
from tests.conformance.training import WRAP, losses_of

State = dict[str, Any]
Wrap = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class ProgramEntry(Entry):
    code: Callable[[Tool, Trace, Wrap], None]
    variants: tuple[str, ...]


PROGRAMS: dict[str, ProgramEntry] = {}


def program(*layouts: str, **more: Any) -> Any:
    """Add a function to the corpus under its own name.

    Args:
        more: The other fields of its :class:`ProgramEntry`.
    """

    def add(code: Any) -> Any:
        PROGRAMS[code.__name__] = ProgramEntry(code, layouts, **more)
        return code

    return add


def run(entry: ProgramEntry, layout: str, tool: Tool, trace: Trace) -> None:
    entry.code(tool, trace, WRAP[layout])


def _step_of_all(state: State, seed: int) -> float:
    """One step of all optimizers on the sum of the losses of all models."""
    loss = sum(loss_of(value, seed) for value in state.values() if isinstance(value, nn.Module))
    loss.backward()
    for value in state.values():
        if isinstance(value, optim.Optimizer):
            value.step()
            value.zero_grad()
    return float(loss)


def resumed(*layouts: str, go: Callable[[State, int], Any] = _step_of_all, **more: Any) -> Any:
    """Add a function that builds a state, which is saved and resumed.

    Args:
        go: Trains with a state, with the numbers of a seed, and returns what is compared after the resume.
        more: The other fields of its :class:`ProgramEntry`.
    """

    def add(build: Callable[[Wrap], State]) -> Any:
        def code(tool: Tool, trace: Trace, wrap: Wrap) -> None:
            torch.manual_seed(1)
            state = build(wrap)
            go(state, 0)
            trace.before(*state.values())
            tool.save(state)
            trace.saved(*state.values())
            trace.right["losses"] = {"after": repr(go(state, 7))}
            torch.manual_seed(2)
            state = build(wrap)
            tool.load(state)
            trace.resumed(*state.values())
            trace.seen["losses"] = {"after": repr(go(state, 7))}

        PROGRAMS[build.__name__] = ProgramEntry(code, layouts, **more)
        return build

    return add


def _started(wrap: Wrap) -> State:
    torch.manual_seed(1)
    model = wrap(Small())
    state = {"model": model, "optim": optim.AdamW(model.parameters())}
    train(*state.values())
    return state


@program(*ALL)
def TwiceInARow(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """Save, train, save; then load the second, the first, and the first once more."""
    state = _started(wrap)
    tool.save(state, "first")
    trace.saved(*state.values())
    first = trace.seen["what the save left"]
    train(*state.values())
    tool.save(state, "second")
    trace.saved(*state.values())
    tool.load(state, "second")
    trace.resumed(*state.values())
    for name in ("first", "first"):
        train(*state.values())
        tool.load(state, name)
        trace.resumed(*state.values())
    trace.right["resumed state"] = first
    trace.seen["losses"] = losses_of(*state.values())


@program(*ALL)
def SavedTwiceUnderOneName(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    state = _started(wrap)
    tool.save(state)
    train(*state.values())
    tool.save(state)
    trace.saved(*state.values())
    train(*state.values())
    tool.load(state)
    trace.resumed(*state.values())


def _scaled_step(state: State, seed: int) -> float:
    loss = loss_of(state["model"], seed) * state["scale"]
    loss.backward()
    state["optim"].step()
    state["optim"].zero_grad()
    return float(loss)


@resumed("plain", go=_scaled_step, oracle="right")
def LooseParameter(wrap: Wrap) -> State:
    """A temperature that the optimizer trains and no module has."""
    model, scale = wrap(Small()), nn.Parameter(torch.rand(()))
    return {"model": model, "optim": optim.Adam([*model.parameters(), scale]), "scale": scale}


@resumed(*UNWRAPPED, oracle="right")
def OneOptimizerOverTwoModels(wrap: Wrap) -> State:
    one, two = wrap(Small()), wrap(Small())
    return {"one": one, "two": two, "optim": optim.Adam([*one.parameters(), *two.parameters()])}


@resumed(*ALL)
def TwoOptimizersOverOneModel(wrap: Wrap) -> State:
    model = wrap(Small())
    first, *rest = model.parameters()
    return {"model": model, "one": optim.Adam([first]), "two": optim.SGD(rest, lr=0.1, momentum=0.9)}


@resumed(*ALL)
def TwoModelsWithTheirOptimizers(wrap: Wrap) -> State:
    """As a GAN."""
    one, two = wrap(Small()), wrap(Small())
    return {"g": one, "d": two, "opt_g": optim.Adam(one.parameters()), "opt_d": optim.RMSprop(two.parameters())}


@resumed(*UNWRAPPED)
def OptimizerOfAChild(wrap: Wrap) -> State:
    model = wrap(Small())
    return {"model": model, "optim": optim.Adam(model.block.parameters())}


def _backward(state: State, seed: int) -> float:
    loss = loss_of(state["model"], seed)
    loss.backward()
    return float(loss)


@resumed(*UNWRAPPED, go=_backward)
def OptimizerInBackward(wrap: Wrap) -> State:
    """One optimizer for each parameter, which steps as soon as the gradient is there."""

    def act(parameter: torch.Tensor, optimizer: optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    model = wrap(Small())
    each = {name: optim.Adam([parameter]) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(act, optimizer=each[name]))
    return {"model": model, **{f"optim {name.replace('.', '_')}": one for name, one in each.items()}}


def _step_and_average(state: State, seed: int) -> float:
    loss = step(state["model"], state["optim"], seed)
    state["ema"].update_parameters(getattr(state["model"], "module", state["model"]))
    return loss


@resumed(*WHOLE, go=_step_and_average)
def EmaBesideTheModel(wrap: Wrap) -> State:
    model = MODULES["NonPersistentBuffer"].make()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    return {"model": wrap(model), "ema": ema, "optim": optim.Adam(model.parameters())}


@resumed("plain", go=lambda state, seed: step(state["model"], None, seed))
def ModelAndItsChild(wrap: Wrap) -> State:
    """The same parameters under two names of the state."""
    model = wrap(Small())
    return {"model": model, "head": model.block}


def _step_of_two(state: State, seed: int) -> float:
    loss = loss_of(state["models"]["a"], seed) + loss_of(state["models"]["b"], seed)
    loss.backward()
    state["optim"].step()
    state["optim"].zero_grad()
    return float(loss)


@resumed(*UNWRAPPED, go=_step_of_two)
def ModuleDictOfModels(wrap: Wrap) -> State:
    both = nn.ModuleDict({"a": wrap(Small()), "b": wrap(Small())})
    return {"models": both, "optim": optim.Adam(both.parameters())}


class Counter:
    """A Stateful of the user, with the hooks that DCP promises."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> State:
        note("state_dict", self.values.get("name"))
        return dict(self.values)

    def load_state_dict(self, state: State) -> None:
        kinds = {key: type(value).__name__ for key, value in sorted(state.items())}
        note("load_state_dict", state.get("name"), kinds)
        self.values = dict(state)


def _stateful(tool: Tool, trace: Trace, make: Callable[[], State]) -> None:
    torch.manual_seed(1)
    counter = Counter(**make())
    tool.save({"it": counter})
    right = counter.values
    torch.manual_seed(2)
    counter = Counter(**make())
    tool.load({"it": counter})
    trace.see("values", counter.values, right)


@program(*WHOLE)
def StatefulOfPlainValues(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    values = {"int": 3, "float": 0.5, "none": None, "str": "a", "list": [1, "b"], "tuple": (1, (2,)), "bool": True}
    _stateful(tool, trace, lambda: values)


@program(*WHOLE)
def StatefulNested(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    values = {"a": {"b": [{"c": 1}, {"d": torch.ones(2)}], "e": {}}, "f": [], "g": {"1": 1}}
    _stateful(tool, trace, lambda: values)


@program("plain")
def StatefulWithTensors(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    _stateful(tool, trace, lambda: {"t": torch.rand(3), "l": [torch.rand(2), 3], "n": torch.rand(())})


@program(*WHOLE, differs=known.CALLED_IN_ONE_ORDER)
def ObjectsInAnyOrder(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    def state() -> State:
        module = MODULES["StateDictPreHook"].make()
        return {"c": Counter(name="c"), "a": Counter(name="a"), "b": wrap(module)}

    tool.save(state())
    tool.load(state())


@program("plain", differs=known.FLOATS_FOR_INTEGERS)
def FloatsIntoIntegers(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    tool.save({"it": torch.tensor([0.75, 2.0])})
    state = {"it": torch.zeros(2, dtype=torch.int64)}
    tool.load(state)
    trace.see("values", state["it"])


def _replaced(tool: Tool, trace: Trace, saved: State, target: State) -> None:
    tool.save(dict(saved))
    tool.load(target)
    trace.see("values", target, saved)


@program("plain")
def TensorWhereAPlainValueIs(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """As a learning rate that has become a tensor."""
    saved = {"lr": torch.tensor(0.5), "settings": {"lr": torch.tensor(0.25)}}
    _replaced(tool, trace, saved, {"lr": 0.0, "settings": {"lr": 0.0}})


@program("plain")
def MappingWhereAPlainValueIs(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    _replaced(tool, trace, {"best": {"loss": 0.5, "weights": torch.ones(2)}}, {"best": 0.0})


@program("plain")
def RandomGenerator(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """Plain values and a generator's state in the mapping itself."""
    generator = torch.Generator().manual_seed(3)
    saved = {"random": generator.get_state(), "epoch": 3, "best": 0.25, "name": "run", "nothing": None}
    target = {"random": torch.Generator().get_state(), "epoch": 0, "best": 0.0, "name": "", "nothing": 1}
    _replaced(tool, trace, saved, target)


@program("plain", differs=known.UNKNOWN_KIND_OF_URL, must_work=False)
def UnknownKindOfUrl(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    def save(state: State, path: Any) -> None:
        url = "nosuch://bucket/run"
        dcp_plugin.save(state, url) if isinstance(tool, Ours) else dcp.save(state, checkpoint_id=url)

    tool.do("save", save, {"it": 1})


def _scheduled_step(state: State, seed: int) -> list[float]:
    losses = [step(state["model"], state["optim"], seed)]
    state["schedule"].step()
    return [*losses, *state["schedule"].get_last_lr()]


@resumed(*UNWRAPPED, go=_scheduled_step)
def Scheduler(wrap: Wrap) -> State:
    model = wrap(Small())
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    cosine = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    warm = optim.lr_scheduler.LinearLR(optimizer, 0.1)
    both = optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [1])
    return {"model": model, "optim": optimizer, "schedule": both}


@program("ddp", oracle="every rank raises")
def OneRankFailsOnSave(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    counter = Counter(a=1)
    if dist.get_rank() == 1:
        counter.state_dict = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    tool.save({"it": counter})


@program(*WHOLE, must_work=False)
def NothingThere(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    """A load from a path where nothing is."""
    tool.load({"model": wrap(Small())})


@program(*WHOLE, must_work=False)
def FileExistsAtThePath(tool: Tool, trace: Trace, wrap: Wrap) -> None:
    (tool.folder / "checkpoint").write_text("not a directory")
    tool.save({"model": wrap(Small())})


def _evaluate_and_step(state: State, seed: int) -> list[float]:
    evaluate(state["model"], None)
    with torch.no_grad():
        before = float(state["model"](inputs(seed)).sum())
    return [before, step(state["model"], state["optim"], seed)]


@resumed(*UNWRAPPED, go=_evaluate_and_step)
def EvaluatedBetweenLoadAndTraining(wrap: Wrap) -> State:
    model = wrap(Small())
    evaluate(model, None)
    return {"model": model, "optim": optim.Adam(model.parameters())}
