"""Corpus of states: ``fabric.load`` gives back what ``fabric.save`` got, in the shape in which stock Fabric does.

A state is saved and loaded by stock Fabric and by this package; what is compared is all that the script then has. An
optimizer's state dict from a saved optimizer has names in the place of numbers, so it is compared in an optimizer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compare import same_tree
from tests.launch import on_ranks
from tests.lightning import TRUSTED
from tests.training import WORLD_SIZE


class Objects:
    """A model and its optimizer, trained for one step from a seed, as Fabric sets them up."""

    def __init__(self, fabric: Any, seed: int) -> None:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.model, self.optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1 + seed))
        fabric.backward(self.model(torch.randn(4, 3)).sum())
        self.optimizer.step()


STATES: dict[str, Callable[[Objects, int], dict[Any, Any]]] = {
    "objects": lambda o, n: {"model": o.model, "optimizer": o.optimizer, "step": n},
    "state dicts": lambda o, n: {"model": o.model.state_dict(), "optimizer": o.optimizer.state_dict(), "step": n},
    "model state dict": lambda o, n: o.model.state_dict(),
    "optimizer state dict": lambda o, n: o.optimizer.state_dict(),
    "with extra state": lambda o, n: {**o.model.state_dict(), "0._extra_state": {"count": n}},
    "tensors": lambda o, n: {"prompt": torch.full((2,), n), "logits": torch.full((1, 3), n / 2)},
    "tensor and value": lambda o, n: {"prompt": torch.full((2,), n), "step": n},
    "tensors below each other": lambda o, n: {"a": torch.full((2,), n), "a.b": torch.full((3,), n)},
    "nested": lambda o, n: {"run": {"epoch": n, "best": {"loss": n / 3, "at": torch.full((2,), n)}, "seen": [n, n]}},
    "dotted": lambda o, n: {"best.val": n / 2, "best": {"train": n}, "best%2Eval": "text", "a.b.c": [n]},
    "dotted below": lambda o, n: {"best": {"val.loss": n, "val": {"acc": 2 * n}, "val.at": torch.full((1,), n)}},
    "integers": lambda o, n: {0: n, 1: {"loss": n}, "1": "text"},
    "integers below": lambda o, n: {"bins": {0: n, 7: torch.full((2,), n)}, "steps": {1: n, 2: 2 * n}},
    "tensors by number": lambda o, n: {0: torch.full((2,), n), 1: torch.full((3,), n)},
    "classes": lambda o, n: {
        "seen": Counter(a=n, b=2),
        "order": OrderedDict(z=n, a=1),
        "lists": defaultdict(list, {"a": [n]}),
        "below": {"seen": Counter(c=n), "tensors": OrderedDict(z=torch.full((2,), n), a=n)},
        "empty": Counter(),
    },
    "reserved": lambda o, n: {"rng": torch.full((2,), n), "fabric_names": {"model": n}, "extra": n, "%rng": "text"},
    "lists": lambda o, n: {"history": [1, 2, n], "tensors": [torch.full((2,), n)], "pair": (n, "text"), "none": None},
    "empty values": lambda o, n: {"list": [], "dict": {}, "step": n},
}
WAYS = [
    "without a state", "into the same", "into objects", "into state dicts", "raw", "raw optimizer", "not strict",
    "strict",
]  # fmt: skip


MORE = {("objects", "raw"), ("objects", "raw optimizer")}
"""Loads that stock refuses: ``load_raw`` takes the only module, or optimizer, of a checkpoint."""


def _load(fabric: Any, path: Path, shape: str, way: str, fresh: Objects) -> Any:
    """Return what the script has after a load; None if the state does not fit."""
    state: Any = STATES[shape](fresh, 99)
    if way == "into objects":
        state = {"model": fresh.model, "optimizer": fresh.optimizer}
    if way == "into state dicts":
        state = {"model": fresh.model.state_dict(), "optimizer": fresh.optimizer.state_dict()}
    if way == "not strict":
        state = {**dict(list(state.items())[:1]), "absent": 5}
    if way == "strict":
        state = {**state, "absent": 5}
    options: dict[str, Any] = {"strict": way != "not strict", **TRUSTED}
    try:
        if way == "without a state":
            rest = fabric.load(path, **TRUSTED)
        elif way.startswith("raw"):
            rest = fabric.load_raw(path, fresh.optimizer if way == "raw optimizer" else fresh.model, **options)
        else:
            rest = fabric.load(path, state, **options)
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError):
        return None
    live = {"model": fresh.model.state_dict(), "optimizer": fresh.optimizer.state_dict()}
    return {name: _comparable(tree, fresh) for name, tree in {"live": live, "rest": rest or {}, "state": state}.items()}


def _comparable(tree: dict[Any, Any], fresh: Objects) -> dict[Any, Any]:
    """Return a state in the order of its names, with an optimizer's state by number, and without live objects."""

    def value_of(value: Any) -> Any:
        if isinstance(value, dict) and value.keys() == {"state", "param_groups"}:
            fresh.optimizer.load_state_dict(value)
            return fresh.optimizer.state_dict()
        return dict(value) if hasattr(value, "_metadata") else value

    live = (id(fresh.model), id(fresh.optimizer))
    return {key: value_of(tree[key]) for key in sorted(tree, key=repr) if id(tree[key]) not in live}


@pytest.mark.one_of("shape", count=4)
@pytest.mark.parametrize("shape", STATES)
@pytest.mark.parametrize("layout", ["single", "ddp"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_a_load_gives_back_what_was_saved_as_stock_does(tmp_path: Path, layout: str, shape: str) -> None:
    from tests.fabric import training as t

    found: dict[str, dict[str, Any]] = {}
    for fabric in (t.fabric_for(layout), t.attached(layout)):
        path = tmp_path / type(fabric.strategy).__name__
        fabric.save(path, STATES[shape](Objects(fabric, 1), 7))
        fabric.barrier()
        found[path.name] = {way: _load(fabric, path, shape, way, Objects(fabric, 2)) for way in WAYS}
    stock, ours = found.values()
    assert [way for way in WAYS if not same_tree(ours[way], stock[way]) and (shape, way) not in MORE] == []
    assert all(ours[way] is not None and stock[way] is None for name, way in MORE if name == shape)
