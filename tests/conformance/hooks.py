"""Corpus of hooks: code of a LightningModule that changes a part of a checkpoint when it is saved or loaded.

An entry is an action on a part, in one of the two hooks. It runs on a plain module, on one with a compiled part, and on
one that is sharded by FSDP2. The run trains two epochs, and resumes from the checkpoint of the first in a new module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.conformance.differences import (
    GROWN_GROUPS,
    HOOKS_CHANGE_GROUPS,
    HOOKS_CHANGE_SHARDS,
    HOOKS_SEE_SHARDS,
    Differs,
)
from tests.conformance.entries import Entry
from tests.conformance.runs import quiet
from tests.conformance.tools import Ours, Tool
from tests.conformance.trace import Trace, note

Change = Callable[[dict[str, Any]], object]

LAYOUTS = {"plain": "single", "compiled": "single", "fsdp2": "fsdp2"}
"""The variants, and their layouts in the tests of Lightning."""

_DIFFERS: dict[tuple[str, str, str], Differs] = {
    ("save", "add", "optimizer_states"): GROWN_GROUPS,
    ("load", "add", "state_dict"): HOOKS_SEE_SHARDS,
    ("load", "reset", "optimizer_states"): HOOKS_SEE_SHARDS,
    ("load", "add", "optimizer_states"): HOOKS_CHANGE_GROUPS,
    ("load", "rename", "optimizer_states"): HOOKS_CHANGE_GROUPS,
    ("load", "drop", "optimizer_states"): HOOKS_CHANGE_SHARDS,
    ("load", "replace", "optimizer_states"): HOOKS_CHANGE_SHARDS,
    **{("load", action, "state_dict"): HOOKS_CHANGE_SHARDS for action in ("drop", "rename", "reset", "replace")},
}
"""What differs under FSDP2, by hook, action and part."""


@dataclass(frozen=True)
class HookEntry(Entry):
    hook: str
    """``"save"`` or ``"load"``."""
    part: str
    change: Change
    variants: tuple[str, ...] = tuple(LAYOUTS)

    def differs_in(self, variant: str) -> Mapping[str, str]:
        return self.differs if variant == "fsdp2" else {}


def _name_in(state: Mapping[str, Any]) -> str:
    return next(name for name in state if name.endswith("body.0.weight") or "body._orig_mod.0.weight" in name)


def _renamed(mapping: dict[str, Any], old: str, new: str) -> None:
    mapping[new] = mapping.pop(old)


def _replace_slot(optimizer: dict[str, Any]) -> None:
    last = list(optimizer["state"])[-1]
    slots = optimizer["state"][last]  # of the live optimizer
    optimizer["state"][last] = {**slots, "exp_avg": torch.zeros_like(slots["exp_avg"])}


def _reset_counters(loops: dict[str, Any]) -> None:
    progress = loops["fit_loop"]["epoch_progress"]
    for counts in (progress["current"], progress["total"]):
        counts.update(dict.fromkeys(counts, 0))


def _of_state_dict(action: Callable[[dict[str, Any], str], object]) -> Change:
    return lambda checkpoint: action(checkpoint["state_dict"], _name_in(checkpoint["state_dict"]))


def _of_optimizer(action: Callable[[dict[str, Any]], object]) -> Change:
    return lambda checkpoint: action(checkpoint["optimizer_states"][0])


CHANGES: dict[str, dict[str, Change]] = {
    "state_dict": {
        "drop": _of_state_dict(lambda state, name: state.pop(name)),
        "add": _of_state_dict(lambda state, name: state.update(added=torch.ones(2))),
        "rename": _of_state_dict(lambda state, name: _renamed(state, name, "renamed")),
        "reset": lambda checkpoint: checkpoint.update(
            state_dict={name: torch.zeros_like(value) for name, value in checkpoint["state_dict"].items()}
        ),
        "replace": _of_state_dict(lambda state, name: state.update({name: torch.full_like(state[name], 0.25)})),
    },
    "optimizer_states": {
        "drop": _of_optimizer(lambda state: state["state"].pop(list(state["state"])[-1])),
        "add": _of_optimizer(lambda state: state["param_groups"][0].update(added=1.5)),
        "rename": _of_optimizer(lambda state: _renamed(state["param_groups"][0], "weight_decay", "decay")),
        "reset": lambda checkpoint: checkpoint.update(optimizer_states=[]),
        "replace": _of_optimizer(_replace_slot),
    },
    "lr_schedulers": {
        "drop": lambda checkpoint: checkpoint["lr_schedulers"].clear(),
        "add": lambda checkpoint: checkpoint["lr_schedulers"].append({"added": 1}),
        "rename": lambda checkpoint: _renamed(checkpoint["lr_schedulers"][0], "_step_count", "steps"),
        "reset": lambda checkpoint: checkpoint.update(lr_schedulers=[]),
        "replace": lambda checkpoint: checkpoint["lr_schedulers"][0].update(last_epoch=0, base_lrs=[0.5]),
    },
    "loops": {
        "drop": lambda checkpoint: checkpoint.pop("loops"),
        "add": lambda checkpoint: checkpoint["loops"].update(mine={"count": 1}),
        "rename": lambda checkpoint: _renamed(checkpoint["loops"], "fit_loop", "train_loop"),
        "reset": lambda checkpoint: _reset_counters(checkpoint["loops"]),
        "replace": lambda checkpoint: checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"].update(
            _batches_that_stepped=100
        ),
    },
    "callbacks": {
        "drop": lambda checkpoint: checkpoint["callbacks"].pop("Counter"),
        "add": lambda checkpoint: checkpoint["callbacks"].update(Other={"count": 1}),
        "rename": lambda checkpoint: _renamed(checkpoint["callbacks"], "Counter", "Renamed"),
        "reset": lambda checkpoint: checkpoint["callbacks"].clear(),
        "replace": lambda checkpoint: checkpoint["callbacks"].update(Counter={"count": 40}),
    },
    "hyper-parameters": {
        "drop": lambda checkpoint: checkpoint["hyper_parameters"].pop("scale"),
        "add": lambda checkpoint: checkpoint["hyper_parameters"].update(added=[1, (2, None)]),
        "rename": lambda checkpoint: _renamed(checkpoint["hyper_parameters"], "scale", "factor"),
        "reset": lambda checkpoint: checkpoint.update(hyper_parameters={}),
        "replace": lambda checkpoint: checkpoint["hyper_parameters"].update(scale=3.0),
    },
}

HOOKS: dict[str, HookEntry] = {
    f"{hook}: {action} {part}": HookEntry(
        hook,
        part,
        change,
        differs=_DIFFERS.get((hook, action, part), {}),
        must_work=False,
    )
    for hook in ("save", "load")
    for part, changes in CHANGES.items()
    for action, change in changes.items()
}


@functools.cache
def _classes() -> tuple[type[Any], type[Any]]:
    from lightning.pytorch.callbacks import Callback

    from tests.lightning.stock_training import Trained

    class Model(Trained):
        entry: HookEntry | None = None
        strict_loading = False

        def __init__(self, layout: str = "single", compiled: bool = False, seed: int = 0, scale: float = 1.0) -> None:
            super().__init__(layout, seed)
            self.save_hyperparameters()
            self.rates: list[float] = []
            body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
            self.net = nn.Sequential()
            self.net.add_module("body", torch.compile(body, backend="eager") if compiled else body)
            self.net.add_module("head", nn.Linear(6, 1))

        def make_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=0.05)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self._change("save", checkpoint)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self._change("load", checkpoint)

        def _change(self, hook: str, checkpoint: dict[str, Any]) -> None:
            if self.entry is not None and self.entry.hook == hook:
                part = self.entry.part.replace("-", "_")
                note(hook, _shown(checkpoint[part]) if part in checkpoint else "nothing")
                if part in checkpoint:
                    self.entry.change(checkpoint)

    class Counter(Callback):
        count = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.count += 1

        @property
        def state_key(self) -> str:
            return "Counter"

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    return Model, Counter


def _shown(value: Any) -> Any:
    """The keys and types that a hook sees, without the values."""
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in sorted(value.items(), key=str)}
    return [_shown(item) for item in value] if isinstance(value, list) else type(value).__name__


def run(entry: HookEntry, variant: str, tool: Tool, trace: Trace) -> None:
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning.stock_training import fit

    quiet()
    model_class, counter_class = _classes()
    kind: Any = type("Hooked", (model_class,), {"entry": entry})
    layout, path = LAYOUTS[variant], tool.folder / "first.ckpt"

    def train(epochs: int, seed: int, resumed: Any = None) -> tuple[Any, Any, Any]:
        plugins, counter = [DCPCheckpointIO()] if isinstance(tool, Ours) else None, counter_class()

        def make(layout: str, seed: int) -> Any:
            return kind(layout, variant == "compiled", seed)

        trainer, module = fit(layout, epochs, seed, resumed, [counter], plugins, make)
        return trainer, module, counter

    with trace.during("save"):
        trainer, module, _ = train(1, 0)
        trainer.save_checkpoint(path)
    trace.saved(module, *trainer.optimizers)
    trace.right.clear()  # what a hook has changed is not what was saved
    with trace.during("load"):
        trainer, module, counter = train(2, 5, path)
    trace.resumed(module, *trainer.optimizers)
    trace.see("losses", module.losses)
    trace.see("rates", module.rates)
    trace.see("progress", [trainer.current_epoch, trainer.global_step, counter.count])
    if variant != "fsdp2":  # of which stock opens no checkpoint
        loaded = (kind if entry.part == "hyper-parameters" else model_class).load_from_checkpoint(path)
        trace.see("hyper-parameters", dict(loaded.hparams))
        trace.see("loaded", dict(loaded.state_dict()))
