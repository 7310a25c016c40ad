"""Objects that one rank has and another does not: the names in the checkpoint follow from all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.conformance.held import EMPTY, HELD
from tests.launch import on_ranks


def _values(held: Any) -> set[float]:
    tensors = held.values() if isinstance(held, dict) else held.parameters()
    return {number for tensor in tensors for number in tensor.flatten().tolist()}


@pytest.mark.one_of("stock")
@pytest.mark.parametrize("kind", ["module", "own state_dict"])
@pytest.mark.parametrize(("owner", "stock"), [(0, False), (0, True), (1, False)])
@on_ranks(2)
def test_a_module_beside_none_comes_back_on_every_rank(tmp_path: Path, owner: int, stock: bool, kind: str) -> None:
    """A rank with None gets the state dict, as ``Strategy.load_checkpoint`` of Fabric hands it over (``stock``)."""
    from tests.fabric import training as t

    fabric = (t.fabric_for if stock else t.attached)("ddp")
    model = fabric.setup(nn.Linear(2, 1))

    def state(number: int) -> dict[str, Any]:
        return {"model": model, "x": HELD[kind].of(number) if dist.get_rank() == owner else None}

    fabric.save(tmp_path / "c", state(7))
    target = state(0)
    fabric.load(tmp_path / "c", target)
    assert _values(target["x"]) == {7.0}


@pytest.mark.one_of("stock")
@pytest.mark.parametrize("stock", [False, True])
@on_ranks(2)
def test_a_module_that_is_empty_on_a_rank_gets_the_weights_of_another(tmp_path: Path, stock: bool) -> None:
    from tests.fabric import training as t

    fabric, task = (t.fabric_for if stock else t.attached)("ddp"), HELD["own state_dict"]
    model = fabric.setup(nn.Linear(2, 1))
    state = {"model": model, "x": task.of(7 if dist.get_rank() == 0 else EMPTY)}
    fabric.save(tmp_path / "c", state)
    state["x"] = task.of(1 if dist.get_rank() == 0 else EMPTY)
    fabric.load(tmp_path / "c", state)
    assert _values(state["x"]) == {7.0}
