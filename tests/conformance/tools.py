"""The one thing that differs between the runs of a case: who saves and loads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

import dcp_plugin
from tests.conformance.trace import Raised, Trace

State = MutableMapping[str, Any]


class Tool:
    """Saves and loads a state of live objects below ``folder``; what the user's hooks do meanwhile is traced."""

    def __init__(self, trace: Trace, folder: Path) -> None:
        self.trace = trace
        self.folder = folder

    def save(self, state: State, name: str = "checkpoint") -> None:
        self.do("save", self._save, state, name)

    def load(self, state: State, name: str = "checkpoint") -> None:
        self.do("load", self._load, state, name)

    def do(self, phase: str, action: Any, state: State, name: str = "checkpoint") -> None:
        """Save or load by any function of a state and a path."""
        random = torch.get_rng_state()
        with self.trace.during(phase), _warnings_noted(self.trace):
            try:
                action(state, self.folder / name)
            except BaseException as error:
                self.trace.raised = Raised.of(phase, error)
                raise
        unmoved = "unchanged" if torch.equal(random, torch.get_rng_state()) else "advanced"
        self.trace.seen.setdefault("random numbers", {})[phase] = unmoved
        self.trace.right.setdefault("random numbers", {})[phase] = "unchanged"

    def _save(self, state: State, path: Path) -> None:
        raise NotImplementedError

    def _load(self, state: State, path: Path) -> None:
        raise NotImplementedError


@contextmanager
def _warnings_noted(trace: Trace) -> Iterator[None]:
    """Show no warning, and keep those of this package."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            ours = [each for each in caught if {"dcp_plugin", "conformance"} & {*Path(each.filename).parts}]
            trace.said += [str(each.message) for each in ours]


class Ours(Tool):
    def _save(self, state: State, path: Path) -> None:
        dcp_plugin.save(state, path)

    def _load(self, state: State, path: Path) -> None:
        dcp_plugin.load(state, path)


class Stock(Tool):
    """``torch.distributed.checkpoint`` as its documentation uses it: what is Stateful goes in as it is, a model with
    its optimizers, and whatever FSDP1 has wrapped, as the tutorial's ``AppState``."""

    def _save(self, state: State, path: Path) -> None:
        dcp.save(_recipe(state), checkpoint_id=path)

    def _load(self, state: State, path: Path) -> None:
        recipe = _recipe(state)
        dcp.load(recipe, checkpoint_id=path)
        for key, value in state.items():
            if not isinstance(value, (nn.Module, torch.optim.Optimizer)):
                state[key] = recipe[key]  # plain values are replaced


class TorchSave(Tool):
    """``torch.save`` of each rank's own state dicts: the oracle of what DCP cannot do."""

    def _save(self, state: State, path: Path) -> None:
        path.mkdir(exist_ok=True)
        torch.save({key: _state_dict(value) for key, value in state.items()}, self._file(path))

    def _load(self, state: State, path: Path) -> None:
        loaded = torch.load(self._file(path), weights_only=False)
        for key, value in state.items():
            state[key] = _take(value, loaded[key])

    @staticmethod
    def _file(path: Path) -> Path:
        return path / f"{dist.get_rank() if dist.is_initialized() else 0}.pt"


TOOLS: dict[str, type[Tool]] = {"ours": Ours, "stock": Stock, "torch.save": TorchSave}


class AppState:
    """As in https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.model = model
        self.optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        if not self.optimizers:
            return {"model": get_model_state_dict(self.model)}
        model, optim = get_state_dict(self.model, self.optimizers)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.optimizers:
            set_model_state_dict(self.model, state["model"])
        else:
            set_state_dict(
                self.model, self.optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )


def _recipe(state: State) -> dict[str, Any]:
    models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    owned: dict[str, list[torch.optim.Optimizer]] = {key: [] for key in models}
    recipe = {}
    for key, value in state.items():
        if isinstance(value, torch.optim.Optimizer):
            mine = {id(parameter) for group in value.param_groups for parameter in group["params"]}
            owners = [name for name, model in models.items() if mine <= {id(p) for p in model.parameters()}]
            if owners:
                owned[owners[0]].append(value)
            else:
                recipe[key] = value
        elif key not in models:
            recipe[key] = value
    for key, model in models.items():
        wrapped = any(isinstance(child, FullyShardedDataParallel) for child in model.modules())
        recipe[key] = AppState(model, owned[key]) if wrapped or owned[key] else model
    return recipe


def _state_dict(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _take(value: Any, loaded: Any) -> Any:
    if not hasattr(value, "load_state_dict"):
        return loaded
    value.load_state_dict(loaded)
    return value
