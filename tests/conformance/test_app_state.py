"""The ``AppState`` of the DCP tutorial: one Stateful with model and optimizer, saved by N ranks, loaded by M."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same
from tests.conformance.tools import AppState
from tests.layouts import WORLD_SIZE, build, train, whole_state


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def _save(root: Path, layout: str) -> None:
    warnings.simplefilter("ignore")  # of torch, about its own functions
    model, optimizer = build(layout)
    train(model, optimizer, 3)
    dcp.save({"app": AppState(model, [optimizer])}, root / layout)
    state = whole_state(model, optimizer)
    if torch.distributed.get_rank() == 0:
        torch.save(state, root / f"{layout}.pt")


def _load(root: Path, source: str, layout: str) -> None:
    warnings.simplefilter("ignore")
    saved = _tensors(torch.load(root / f"{source}.pt", weights_only=True))
    model, optimizer = build(layout, seed=1)
    dcp.load({"app": AppState(model, [optimizer])}, root / source)
    assert_same(_tensors(whole_state(model, optimizer)), saved)

    model, optimizer = build(layout, seed=2)
    state = {"app": AppState(model, [optimizer])}
    stock.load(state, checkpoint_id=root / source)
    assert_same(_tensors(whole_state(model, optimizer)), saved)


@pytest.mark.one_of
@pytest.mark.parametrize(("source", "target"), [("fsdp2", "fsdp2@4"), ("fsdp2@4", "fsdp2@3"), ("fsdp2@3", "ddp")])
def test_saved_by_n_ranks_loaded_by_m(tmp_path: Path, source: str, target: str) -> None:
    launch.run(_save, WORLD_SIZE[source], tmp_path, source)
    launch.run(_load, WORLD_SIZE[target], tmp_path, source, target)
