"""What a rank can hold, and the programs that save it: plain, and with each framework. For the corpus *ranks*."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dcp_plugin
from tests.conformance.runs import forget_process
from tests.conformance.tools import Ours, State, Tool
from tests.conformance.trace import describe
from tests.objects import Holder

ABSENT, EMPTY, NONE = "absent", "empty", "None"
Fill = int | str
"""A number that all parts of a value have, or one of the three above."""

MODES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "asynchronous": {"async_save": True},
    "lazy": {"async_save": True, "staging": "lazy"},
}


# What is held


class Average(nn.Module):
    """A moving average that has weights on some ranks only, as an EMA on rank 0 has."""

    def __init__(self, has_weights: bool) -> None:
        super().__init__()
        self.shadow = nn.Linear(2, 3) if has_weights else nn.Identity()


class Task(nn.Module):
    """A module that has all weights in its ``state_dict`` on some ranks, and nothing on the others, as with torch's
    ``StateDictOptions(full_state_dict=True, cpu_offload=True)``."""

    def __init__(self, is_empty: bool) -> None:
        super().__init__()
        self.net = nn.Linear(2, 3)
        self.is_empty = is_empty

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {} if self.is_empty else super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(state_dict) if state_dict else None


class NestedTask(Task):
    """The same below a key of its own, as open_clip's ``TrainingTask``."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"state_dict": super().state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(state_dict["state_dict"])


def _filled(module: nn.Module, number: int) -> nn.Module:
    for parameter in module.parameters():
        nn.init.constant_(parameter, number)
    return module


def _module(fill: Fill) -> nn.Module:
    return _filled(Average(fill != EMPTY), fill if isinstance(fill, int) else 0)


def _task(fill: Fill, kind: type[Task] = Task) -> nn.Module:
    return _filled(kind(fill == EMPTY), fill if isinstance(fill, int) else 0)


def _optimizer(fill: Fill) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([parameter], lr=0.125)
    return optimizer if fill == EMPTY else _stepped(optimizer, fill)


def _stepped(optimizer: torch.optim.Optimizer, number: Any) -> torch.optim.Optimizer:
    """State as after steps with gradients of this number; the parameter does not move."""
    (parameter,) = optimizer.param_groups[0]["params"]
    moments = {"exp_avg": torch.full((4,), float(number)), "exp_avg_sq": torch.full((4,), number + 0.5)}
    optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    return optimizer


def _shadow(number: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(number)), "n": f"number {number}"}


@dataclass(frozen=True)
class Held:
    """A kind of things that a rank can hold."""

    make: Callable[[int], Any]
    empty: Callable[[], Any]
    is_object: bool = True
    """Has ``state_dict`` and ``load_state_dict``."""

    def of(self, fill: Fill) -> Any:
        return None if fill == NONE else self.empty() if fill == EMPTY else self.make(int(fill))


HELD: dict[str, Held] = {
    "tensor": Held(lambda n: torch.full((3,), float(n)), lambda: torch.zeros(0), False),
    "number": Held(lambda n: n, list, False),
    "value": Held(lambda n: [f"number {n}"], list, False),
    "mapping": Held(_shadow, dict, False),
    "stateful": Held(lambda n: Holder({"shadow": _shadow(n)}), lambda: Holder({"shadow": {}})),
    "module": Held(_module, lambda: _module(EMPTY)),
    "own state_dict": Held(_task, lambda: _task(EMPTY)),
    "nested state_dict": Held(partial(_task, kind=NestedTask), lambda: _task(EMPTY, NestedTask)),
    "optimizer": Held(_optimizer, lambda: _optimizer(EMPTY)),
}


OBJECTS_OF_TORCH = ("module", "own state_dict", "nested state_dict", "optimizer")


def look(held: Any) -> str:
    """Return in words what is held, of any kind."""
    if isinstance(held, nn.Module):
        return describe({name: parameter.detach() for name, parameter in held.named_parameters()})
    if isinstance(held, torch.optim.Optimizer):
        return describe([{**slots} for slots in held.state.values()])
    plain = held.state if isinstance(held, Holder) else held
    match plain:  # what a state dict of one of these says, where there is no object for it
        case {"state_dict": weights}:
            return describe(weights)
        case {"state": slots, "param_groups": _}:
            return describe([*slots.values()])
    return describe(plain)


def changed(held: Any, kind: str, number: int) -> Any:
    """Return the same object, or another value, with this number in it."""
    if isinstance(held, nn.Module):
        return _filled(held, number)
    if isinstance(held, torch.optim.Optimizer):
        return _stepped(held, number)
    if kind == "stateful" and isinstance(held, Holder):
        held.state = {"shadow": _shadow(number)}
        return held
    return HELD[kind].make(number)


# Who saves it


class Program:
    """The user's program around the held object: it is begun anew for each load."""

    def __init__(self, tool: Tool, kind: str, fill: Fill, mode: str) -> None:
        self.tool = tool
        self.kind = kind
        self.is_ours = isinstance(tool, Ours)
        self.mode, self.options = mode, MODES[mode]
        self.holds = fill != ABSENT
        self.x: Any = HELD[kind].of(fill) if self.holds else None

    def run(self, act: Callable[[], None], resume: str | None) -> None:
        """Load what is named, if anything, then act."""
        if resume is not None:
            self.load(resume)
        act()

    def save(self, name: str) -> None:
        raise NotImplementedError

    def load(self, name: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End the program."""

    def changed(self, number: int) -> Any:
        """Return what is held with this number in it: the same object, or another value."""
        return changed(self.x, self.kind, number)


def save_plain(tool: Tool, state: State, name: str, mode: str) -> None:
    if not isinstance(tool, Ours):
        tool.save(state, name)
    else:
        with closing(dcp_plugin.Checkpointer(**MODES[mode])) as checkpointer:
            tool.do("save", lambda state, path: checkpointer.save(state, path).wait(), state, name)


class Plain(Program):
    @property
    def _state(self) -> State:
        state: State = {"x": self.x} if self.holds else {}
        if self.kind == "optimizer":
            net = nn.Module()
            net.weight = self.x.param_groups[0]["params"][0] if self.x is not None else nn.Parameter(torch.zeros(4))
            state["net"] = net
        return {**state, "other": torch.ones(2)}

    def save(self, name: str) -> None:
        save_plain(self.tool, self._state, name, self.mode)

    def load(self, name: str) -> None:
        state = self._state
        self.tool.load(state, name)
        if self.holds:
            self.x = state["x"]


class WithAccelerate(Program):
    def __init__(self, tool: Tool, kind: str, fill: Fill, mode: str) -> None:
        from accelerate import Accelerator

        super().__init__(tool, kind, fill, mode)
        forget_process()
        self.accelerator = Accelerator(cpu=True)
        self.attached = None
        if self.is_ours:
            from dcp_plugin.accelerate import attach

            self.attached = attach(self.accelerator, **self.options)
        self.accelerator.prepare(nn.Linear(2, 1))
        if not HELD[kind].is_object or self.x is None:
            self.x = Holder(None if HELD[kind].is_object else {"x": self.x})
        if self.holds:
            self.accelerator.register_for_checkpointing(self.x)

    def save(self, name: str) -> None:
        def save(state: State, path: Path) -> None:
            self.accelerator.save_state(str(path))
            if self.attached is not None:
                self.attached.wait()

        self.tool.do("save", save, {}, name)

    def load(self, name: str) -> None:
        self.tool.do("load", lambda state, path: self.accelerator.load_state(str(path)), {}, name)

    def close(self) -> None:
        if self.attached is not None:
            self.attached.close()

    def changed(self, number: int) -> Any:
        if HELD[self.kind].is_object:
            return super().changed(number)
        self.x.state = {"x": HELD[self.kind].make(number)}
        return self.x


class WithFabric(Program):
    def __init__(self, tool: Tool, kind: str, fill: Fill, mode: str) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy

        from tests.training import as_torchrun_starts_it

        super().__init__(tool, kind, fill, mode)
        as_torchrun_starts_it("ddp")
        self.fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=DDPStrategy())
        self.fabric.launch()
        self.attached = None
        if self.is_ours:
            from dcp_plugin.fabric import attach

            self.attached = attach(self.fabric, **self.options)
        self.model = self.fabric.setup(nn.Linear(2, 1))

    @property
    def _state(self) -> State:
        return {"model": self.model, **({"x": self.x} if self.holds else {})}

    def save(self, name: str) -> None:
        def save(state: State, path: Path) -> None:
            self.fabric.save(path, state)
            if self.attached is not None:
                self.attached.wait()

        self.tool.do("save", save, self._state, name)

    def load(self, name: str) -> None:
        state = self._state
        self.tool.do("load", lambda state, path: self.fabric.load(path, state), state, name)
        if self.holds:
            self.x = state["x"]

    def close(self) -> None:
        if self.attached is not None:
            self.attached.close()


class WithLightning(Program):
    """The object is a callback's. The training takes no step: it resumes, and saves as it begins."""

    def __init__(self, tool: Tool, kind: str, fill: Fill, mode: str) -> None:
        super().__init__(tool, kind, fill, mode)
        if HELD[kind].is_object and self.x is None:
            self.x = Holder(None)

    def run(self, act: Callable[[], None], resume: str | None) -> None:
        import lightning.pytorch as pl
        from lightning.pytorch.demos.boring_classes import BoringModel
        from lightning.pytorch.strategies import DDPStrategy

        from tests.lightning import TRUSTED
        from tests.training import QUIET, as_torchrun_starts_it

        program = self

        class Keeper(pl.Callback):
            """Has what is held in its state."""

            def state_dict(self) -> dict[str, Any]:
                return {"x": program.x.state_dict() if HELD[program.kind].is_object else program.x}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                if HELD[program.kind].is_object:
                    program.x.load_state_dict(state_dict["x"])
                else:
                    program.x = state_dict["x"]

        class Act(pl.Callback):
            def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
                trainer.should_stop = True
                act()

        as_torchrun_starts_it("ddp")
        plugins = []
        if self.is_ours:
            from dcp_plugin.lightning import DCPCheckpointIO

            plugins.append(DCPCheckpointIO(**self.options))
        self.trainer = pl.Trainer(
            devices=dist.get_world_size(), strategy=DDPStrategy(), max_steps=1, plugins=plugins, limit_val_batches=0,
            enable_checkpointing=False, callbacks=[*([Keeper()] if self.holds else []), Act()], **QUIET,
        )  # fmt: skip
        module = BoringModel()

        def fit(state: State, path: Path) -> None:
            self.trainer.fit(module, ckpt_path=path if resume else None, **TRUSTED)

        self.tool.do("load", fit, {}, resume or "")

    def save(self, name: str) -> None:
        def save(state: State, path: Path) -> None:
            self.trainer.save_checkpoint(path)
            if self.is_ours:
                self.trainer.strategy.checkpoint_io.wait()

        self.tool.do("save", save, {}, name)


WAYS: dict[str, type[Program]] = {
    "plain": Plain,
    "Accelerate": WithAccelerate,
    "Lightning": WithLightning,
    "Fabric": WithFabric,
}
