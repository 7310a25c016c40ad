"""What Lightning has saved without the plugin resumes with it, on any strategy; frozen parameters included."""

from __future__ import annotations

import argparse
import functools
import json
import pickle
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import launch, sampling
from tests.compare import assert_same, weights_of
from tests.launch import on_ranks
from tests.lightning import TRUSTED
from tests.lives import layouts_of, read, write
from tests.training import WORLD_SIZE

SOURCES = ("single", "ddp", "fsdp1", "fsdp2", "fsdp2_full")
TARGETS = ("single", "ddp", "fsdp1", "fsdp2")
EACH_TARGET = pytest.mark.parametrize("target", layouts_of([TARGETS[sampling.number("old formats", 4)]], TARGETS))


def _save(root: Path, layouts: list[str]) -> None:
    """One epoch of stock Lightning, saved; and what a second one would bring."""
    from tests.lightning import stock_training as stock
    from tests.lightning import training as t

    for source in layouts:
        trainer, _ = stock.fit(source, 1, callbacks=[stock.first_checkpoint(root / source)])
        state = t.whole_state(trainer)
        _, straight = stock.fit(source, 2)
        write(root, source, straight.losses, state)


def _resume(root: Path, target: str) -> None:
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as stock
    from tests.lightning import training as t

    for source in SOURCES:
        look = t.AtTrainStart()
        path = root / source / "first.ckpt"
        stock.fit(target, 2, seed=5, ckpt_path=path, callbacks=[look], plugins=[DCPCheckpointIO()])
        write(root, f"{source}-to-{target}", look.progress, look.state)
    _, model = stock.fit(target, 2, seed=5, ckpt_path=root / target / "first.ckpt", plugins=[DCPCheckpointIO()])
    write(root, f"{target}-resumed", model.losses, {})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("old_formats")
    for size in (1, 2):
        launch.run(_save, size, root, [source for source in SOURCES if WORLD_SIZE.get(source, 2) == size])
    return root


@pytest.fixture(scope="module")
def resumed(root: Path) -> Callable[[str], Path]:
    """Resume under a strategy what all have saved, when a test first asks for it; where the results are."""

    @functools.cache
    def resume_under(target: str) -> Path:
        launch.run(_resume, WORLD_SIZE[target], root, target)
        return root

    return resume_under


@EACH_TARGET
@pytest.mark.parametrize("source", SOURCES)
def test_every_strategy_resumes_what_lightning_saved_under_any(
    resumed: Callable[[str], Path], source: str, target: str
) -> None:
    root = resumed(target)
    progress, state = read(root, f"{source}-to-{target}")
    assert_same(read(root, source)[1], state)
    assert progress == {"global_step": 3, "current_epoch": 1, "schedule": 3}


@EACH_TARGET
def test_it_goes_on_as_if_it_had_never_been_interrupted(resumed: Callable[[str], Path], target: str) -> None:
    root = resumed(target)
    assert read(root, f"{target}-resumed")[0] == read(root, target)[0][3:]


def test_the_plugin_alone_reads_them_as_lightnings_dictionary(root: Path) -> None:
    from dcp_plugin.lightning import DCPCheckpointIO

    for source in SOURCES:
        checkpoint = DCPCheckpointIO().load_checkpoint(root / source / "first.ckpt")
        _, saved = read(root, source)
        assert_same(weights_of(saved), checkpoint["state_dict"])
        assert len(checkpoint["optimizer_states"]) == 1
        assert len(checkpoint["optimizer_states"][0]["param_groups"]) == 2
        assert checkpoint["global_step"] == 3


@on_ranks(2)
def test_traps_6_and_7_stock_lightning_does_none_of_that(root: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    from tests.lightning import stock_training as stock
    from tests.lightning import training as t

    look = t.AtTrainStart()
    try:  # trap 6: a file, and a frozen layer
        stock.fit("fsdp2", 2, seed=5, ckpt_path=root / "ddp" / "first.ckpt", callbacks=[look])
    except Exception:
        misaligned = True
    else:
        _, saved = read(root, "ddp")
        misaligned = not all(key in look.state and torch.equal(look.state[key], saved[key]) for key in saved)
    assert misaligned
    # trap 7: directories are for those who saved them
    with pytest.raises((CheckpointException, RuntimeError), match="Missing key"):
        stock.fit("fsdp2", 2, ckpt_path=root / "fsdp1" / "first.ckpt")
    with pytest.raises((CheckpointException, RuntimeError), match="Missing key"):
        stock.fit("fsdp1", 2, ckpt_path=root / "fsdp2" / "first.ckpt")
    with pytest.raises(IsADirectoryError):
        stock.fit("ddp", 2, ckpt_path=root / "fsdp1" / "first.ckpt")
    sys.argv = ["consolidate", str(root / "fsdp2" / "first.ckpt"), "--output_file", str(root / "never")]
    with pytest.raises(KeyError, match="model"):
        runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")


def test_an_optimizer_of_other_parameters_is_refused_before_anything_changes() -> None:
    from torch import nn

    from dcp_plugin import CheckpointMismatch
    from dcp_plugin.lightning.layout import load_optimizer

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    optimizer, turned = (
        torch.optim.AdamW(layers) for layers in (model.parameters(), reversed(list(model.parameters())))
    )
    for one in (optimizer, turned):
        model(torch.ones(1, 3)).sum().backward()
        one.step()
    before = json.dumps(str(optimizer.state_dict()))
    with pytest.raises(CheckpointMismatch, match="that of another parameter"):
        load_optimizer(model, optimizer, turned.state_dict(), strict=True)
    fewer = torch.optim.AdamW(model[0].parameters()).state_dict()
    with pytest.raises(CheckpointMismatch, match="has the state of 2 parameters"):
        load_optimizer(model, optimizer, fewer, strict=True)
    assert json.dumps(str(optimizer.state_dict())) == before


@on_ranks(1)
def test_code_is_executed_only_where_it_is_allowed(tmp_path: Path) -> None:
    """Lightning drops ``fit(weights_only=False)`` where a strategy is sharded; the plugin takes it at construction."""
    from lightning.pytorch.callbacks import Callback

    from dcp_plugin import UnsafeCheckpoint
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as stock

    class Settings(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"settings": argparse.Namespace(depth=2)}

    for layout in ("single", "fsdp2"):
        stock.WORLD_SIZE[layout] = 1
        stock.fit(layout, 1, callbacks=[stock.first_checkpoint(tmp_path / layout), Settings()])
        path = tmp_path / layout / "first.ckpt"
        resume: dict[str, Any] = {"ckpt_path": path, "callbacks": [Settings()]}
        if layout == "fsdp2":  # trap 5: the argument is dropped
            with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
                stock.fit(layout, 2, **TRUSTED, **resume)
        for io in (DCPCheckpointIO(), DCPCheckpointIO(weights_only=True)):
            with pytest.raises(UnsafeCheckpoint, match=r"argparse.Namespace.*DCPCheckpointIO\(weights_only=False\)"):
                stock.fit(layout, 2, plugins=[io], **resume)
        trainer, _ = stock.fit(layout, 2, plugins=[DCPCheckpointIO(weights_only=False)], **resume)
        assert trainer.global_step == 6
