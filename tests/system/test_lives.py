"""Whatever happens in the life of a run, each of its checkpoints is what was saved: random lives, a few of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where
from tests.compare import assert_same

_PARTS = [
    None,
    dcp.PartialLoad(include="model.1.*"),
    dcp.PartialLoad(include="model.0.*", rename={"model.0.": "model.2."}),
]


def _net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(150, 150) for _ in range(5)])
    model[:4].requires_grad_(False)
    return model


class _Life:
    """One run: saves that link or leave out, changes of frozen weights, loads, overwrites, deletions, resumes."""

    def __init__(self, root: Where, seed: int) -> None:
        self.root, self.dice = root, random.Random(seed)
        self.model = _net(seed)
        dcp.save({"model": self.model}, root / "base")
        self.saved: dict[str, Any] = {"run/0": self._values()}
        dcp.save({"model": self.model}, root / "run" / "0")
        self.ours = dcp.Checkpointer()
        self.resume()

    def _values(self) -> dict[str, torch.Tensor]:
        return {key: value.clone() for key, value in self.model.state_dict().items()}

    def resume(self) -> None:
        self.model = _net(self.dice.randrange(99))
        options: dict[str, Any] = {"trainable_only": self.dice.random() < 0.5, "async_save": self.dice.random() < 0.4}
        self.ours.close()
        self.ours = dcp.Checkpointer(io={"threads": self.dice.choice([1, 2])}, **options)
        self.ours.load({"model": self.model}, self.root / "base")
        self.ours.load({"model": self.model}, self.root / self.dice.choice(list(self.saved)))

    def load_a_part(self) -> None:
        part = self.dice.choice(_PARTS)
        self.ours.load({"model": self.model}, self.root / "base", part)
        self.ours.load({"model": self.model}, self.root / self.dice.choice(list(self.saved)), part)

    def change(self) -> None:
        with torch.no_grad():
            self.dice.choice(list(self.model.parameters())).view(-1)[self.dice.randrange(150)] += 1

    def swap(self) -> None:
        one, other = (self.model[number].weight for number in self.dice.sample(range(4), 2))
        one.data, other.data = other.data, one.data

    def remove(self) -> None:
        name = self.dice.choice(list(self.saved))
        self.ours.wait()
        self.ours.remove(self.root / name)
        del self.saved[name]

    def save(self) -> None:
        with torch.no_grad():
            self.model[4].weight += 1
        name = f"run/{self.dice.randrange(6)}"
        values = self._values()
        self.ours.save({"model": self.model}, self.root / name)
        self.ours.wait()
        self.saved[name] = values


@pytest.mark.one_of
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
def test_every_checkpoint_of_a_run_is_what_was_saved(place: Where, seed: int) -> None:
    life = _Life(place, seed)
    for _ in range(14):
        if life.dice.random() < 0.6 and len(life.saved) > 1:
            life.dice.choice([life.resume, life.load_a_part, life.change, life.swap, life.remove])()
        life.save()
    life.ours.close()
    for name, values in life.saved.items():
        model = _net(1234)
        dcp.load({"model": model}, place / "base")
        dcp.load({"model": model}, place / name)
        assert_same(dict(model.state_dict()), values)
        assert dcp.verify(place / name).ok
