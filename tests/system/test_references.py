"""A save and a load leave no object of the user to the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from tests.objects import Holder


@pytest.fixture(autouse=True)
def _collector_off(tmp_path: Path) -> Iterator[None]:
    _in_background(_state(), tmp_path / "first-use")  # imports and caches
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _state() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer, "loader": Holder({"position": 3})}


def _save_and_load(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, path)
    dcp.load(state, path)


def _resume(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, path / "step-1", step=1)
    assert dcp.resume_or_init(state, path).how == "resumed"


def _in_background(state: dict[str, Any], path: Path, **options: Any) -> None:
    checkpointer = dcp.Checkpointer(async_save=True, **options)
    checkpointer.save(state, path)
    checkpointer.load(state, path)
    checkpointer.close()


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize(
    "use",
    [dcp.save, _save_and_load, _resume, _in_background, partial(_in_background, staging="lazy")],
    ids=["save", "save_and_load", "resume", "in_background", "lazily"],
)
def test_dropped_objects_are_freed_at_once(tmp_path: Path, use: Callable[[dict[str, Any], Path], None]) -> None:
    state = _state()
    use(state, tmp_path / "checkpoint")
    references = {name: weakref.ref(value) for name, value in state.items()}
    references["parameter"] = weakref.ref(state["model"].weight)
    assert state["loader"].state == {"position": 3}
    del state
    assert [name for name, reference in references.items() if reference() is not None] == []
