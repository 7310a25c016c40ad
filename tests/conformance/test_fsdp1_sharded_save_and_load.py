"""FSDP1 with sharded state: save model and Adam, change everything, load it back; the optimizer alone, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dcp_plugin as dcp
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.layouts import build, train, whole_state


def _save_change_load(root: Path, layout: str) -> None:
    model, optimizer = build(layout)
    train(model, optimizer, 3)
    dcp.save({"model": model, "optim": optimizer}, root / layout)
    saved = whole_state(model, optimizer)

    train(model, optimizer, 2, seed=5)
    optimizer.param_groups[0]["lr"] = 0.5
    dcp.load({"model": model, "optim": optimizer}, root / layout)
    assert_same(whole_state(model, optimizer), saved)

    train(model, optimizer, 2, seed=6)
    changed = whole_state(model, optimizer)
    dcp.load({"model": model, "optim": optimizer}, root / layout)
    assert_same(whole_state(model, optimizer), saved)
    assert any(not torch.equal(changed[key], saved[key]) for key in saved if key.startswith("model."))


def _optimizer_alone(root: Path, layout: str) -> None:
    """The model is there for the names of its parameters; nothing of it is loaded."""
    model, optimizer = build(layout)
    train(model, optimizer, 3)
    dcp.save({"model": model, "optim": optimizer}, root / f"{layout}-alone")
    saved = whole_state(model, optimizer)
    train(model, optimizer, 2, seed=5)
    trained = whole_state(model, optimizer)

    state = {"model": model, "optim": optimizer}
    report = dcp.load(state, root / f"{layout}-alone", partial=dcp.PartialLoad(include=("optim.*",)))

    now = whole_state(model, optimizer)
    assert not [key for key in report.loaded if key.startswith("model.")]
    assert_same({k: v for k, v in now.items() if k[0] == "o"}, {k: v for k, v in saved.items() if k[0] == "o"})
    assert_same({k: v for k, v in now.items() if k[0] == "m"}, {k: v for k, v in trained.items() if k[0] == "m"})


def _all(root: Path, layout: str) -> None:
    _save_change_load(root, layout)
    _optimizer_alone(root, layout)


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["fsdp1", "fsdp1_flat"])
@on_ranks(2)
def test_on_a_flat_mesh(tmp_path: Path, layout: str) -> None:
    _all(tmp_path, layout)


@on_ranks(4)
def test_on_a_2x2_mesh(tmp_path: Path) -> None:
    _all(tmp_path, "fsdp1_hsdp")
