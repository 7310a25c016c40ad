"""A fine-tuning from its first day to its last: pre-trained weights in a larger model, frozen; killed; restarted.

One model of five layers is pre-trained under FSDP1. Under every layout a larger model takes it in as a frozen part,
trains layers of its own, dies in the middle of a save, and goes on from what it had saved before: under the same
layout with the very numbers of a training that was never killed, under others with every byte in its place.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same
from tests.dying import die_when_half_is_written
from tests.launch import on_ranks
from tests.layouts import train, whole_state, wrap
from tests.memory import extra_peak

LAYOUTS = {2: ["fsdp1", "fsdp2", "ddp"], 4: ["hsdp", "fsdp2@4"], 1: ["plain"]}
"""By world size."""
VARIANTS: dict[str, dict[str, Any]] = {"whole": {"reuse": True}, "trainable": {"trainable_only": True}}
"""What is saved: everything, where what is frozen is written once and linked then; only what trains."""


class Backbone(nn.Module):
    """Five layers, with sizes that no number of ranks divides and worth a link, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [6, 310, 207, 207, 310, 5]
        layers = (nn.Linear(before, after) for before, after in itertools.pairwise(sizes))
        self.layers = nn.Sequential(OrderedDict((f"layer{number}", layer) for number, layer in enumerate(layers)))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x * self.scale


class Larger(nn.Module):
    """What the backbone is in: frozen, before and behind layers that train."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Linear(6, 6)
        self.pretrain = Backbone().requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(5, 9), nn.LayerNorm(9), nn.Linear(9, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pretrain(self.prompt(x)))  # type: ignore[no-any-return]


def _fine_tuning(layout: str, seed: int) -> dict[str, Any]:
    """A fresh training; only what trains is in the optimizer."""
    torch.manual_seed(seed)
    model: Any = wrap(layout, Larger(), "pretrain")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {"model": model, "optim": torch.optim.AdamW(trained, lr=0.01 * (seed + 1)), "step": 0}


def _start(state: dict[str, Any], root: Path, run: str, pretrained: str, **options: Any) -> dcp.Start:
    """The one call with which every life begins."""
    model = state["model"]
    pretrain = model.module.pretrain if isinstance(model, DistributedDataParallel) else model.pretrain
    return dcp.resume_or_init(
        state,
        root / run,
        init_from=root / pretrained,
        partial=dcp.PartialLoad.submodule(pretrain, source="model."),
        **options,
    )


def _go_on(state: dict[str, Any], steps: int) -> list[float]:
    """Each step has data of its own, whatever the life."""
    losses = []
    for _ in range(steps):
        losses += train(state["model"], state["optim"], 1, seed=state["step"])
        state["step"] += 1
    return losses


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    return whole_state(state["model"], state["optim"])


def _frozen(whole: dict[str, Any]) -> dict[str, Any]:
    prefix = "model.pretrain."
    return {key.removeprefix(prefix): value for key, value in whole.items() if key.startswith(prefix)}


def _on_rank_0(value: Any, path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(value, path)


def _written_anew(checkpoint: Path) -> float:
    """The share of a checkpoint that is in files of its own."""
    files = [file.stat() for file in checkpoint.glob("*.distcp")]
    return sum(file.st_size for file in files if file.st_nlink == 1) / sum(file.st_size for file in files)


# The lives


def _pretrain(root: Path) -> None:
    torch.manual_seed(100)
    model = wrap("fsdp1", Backbone(), unit="")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 2)
    dcp.save({"model": model, "optim": optimizer}, root / "pretrained", step=900)
    whole = whole_state(model, optimizer)
    _on_rank_0(
        {key.removeprefix("model."): value for key, value in whole.items() if key.startswith("model.")},
        root / "backbone.pt",
    )


def _first_lives(root: Path, layouts: list[str]) -> None:
    """Warm start, two steps with a checkpoint each, and what three more steps would give."""
    backbone = torch.load(root / "backbone.pt", weights_only=True)
    for layout in layouts:
        for variant, options in VARIANTS.items():
            run = f"{layout}-{variant}"
            state = _fine_tuning(layout, seed=1)
            checkpointer = dcp.Checkpointer(**options)
            start = _start(state, root, run, "pretrained", checkpointer=checkpointer)
            assert (start.how, start.path) == ("warm-started", root / "pretrained"), start
            assert start.report is not None
            assert len(start.report.loaded) == len(backbone)
            assert_same(_frozen(_whole(state)), backbone)
            torch.manual_seed(1)
            fresh = {f"model.{key}": value for key, value in Larger().state_dict().items() if "pretrain" not in key}
            assert_same({key: value for key, value in _whole(state).items() if key in fresh}, fresh)

            for step in (1, 2):
                _go_on(state, 1)
                checkpointer.save(state, root / run / f"step-{step}", step=step)
            if variant == "whole":
                assert _written_anew(root / run / "step-2") < 0.2
            else:
                assert dcp.inspect(root / run / "step-2").nbytes < 0.2 * dcp.inspect(root / "pretrained").nbytes
            saved = _whole(state)
            losses = _go_on(state, 3)
            _on_rank_0((saved, losses, _whole(state)), root / f"{run}.pt")
            assert_same(_frozen(_whole(state)), backbone)
            assert not any(key.startswith("optim.state.pretrain") for key in saved)
            checkpointer.close()


def _lives_that_end_in_a_save(root: Path, layout: str, variant: str) -> None:
    """Resume, one more step, and rank 1 dies when half of its bytes are written. (One kill is one launch.)"""
    state = _fine_tuning(layout, seed=2)
    checkpointer = dcp.Checkpointer(timeout=20.0, **VARIANTS[variant])
    start = _start(state, root, f"{layout}-{variant}", "pretrained", checkpointer=checkpointer)
    assert (start.how, start.step) == ("resumed", 2), start
    _go_on(state, 1)

    if dist.get_rank() == 1:
        die_when_half_is_written()
    with pytest.raises(dcp.RankFailure):
        checkpointer.save(state, root / f"{layout}-{variant}" / "step-3", step=3)


def _last_lives(root: Path, layouts: list[str], runs: list[str]) -> None:
    """Whatever was killed goes on here, and where it was killed with the numbers that it would have had."""
    backbone = torch.load(root / "backbone.pt", weights_only=True)
    for layout in layouts:
        for run in runs:
            saved, losses, final = torch.load(root / f"{run}.pt", weights_only=True)
            state = _fine_tuning(layout, seed=3)
            # Only what leaves out the frozen part reads what it was loaded from, wherever that is now.
            start = _start(state, root, run, "moved" if run.endswith("trainable") else "nowhere")
            assert (start.how, start.path, start.step) == ("resumed", root / run / "step-2", 2), start
            assert state["step"] == 2
            assert_same(_whole(state), saved)
            if run.startswith(f"{layout}-"):
                assert _go_on(state, 3) == losses, run
                assert_same(_whole(state), final)
            assert_same(_frozen(_whole(state)), backbone)


@pytest.mark.long
def test_a_fine_tuning_is_killed_and_goes_on_under_any_layout(tmp_path: Path) -> None:
    launch.run(_pretrain, 2, tmp_path)
    training = {2: LAYOUTS[2], 4: ["hsdp"]}
    for world_size, layouts in training.items():
        launch.run(_first_lives, world_size, tmp_path, layouts)
    runs = [f"{layout}-{variant}" for layouts in training.values() for layout in layouts for variant in VARIANTS]

    for world_size, layouts in training.items():
        for layout, variant in itertools.product(layouts, VARIANTS):
            if variant == "trainable" and layout != "fsdp2":
                continue
            launch.run(_lives_that_end_in_a_save, world_size, tmp_path, layout, variant, killed=[1])

    os.rename(tmp_path / "pretrained", tmp_path / "moved")
    for older in tmp_path.glob("*/step-1"):
        shutil.rmtree(older)
    for world_size, layouts in LAYOUTS.items():
        launch.run(_last_lives, world_size, tmp_path, layouts, runs)


MIB = 2**20


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint of 96 MiB, of which one process has written all."""
    state = {f"{name}.weight": _numbers(rows) for name, rows in (("backbone", 2048), ("decoder", 4096))}
    dcp.save({"model": state}, tmp_path / "pretrained")
    return tmp_path / "pretrained"


def _numbers(rows: int) -> torch.Tensor:
    return torch.arange(rows * 4096, dtype=torch.float32).reshape(rows, 4096)


@on_ranks(2)
def test_a_warm_start_reads_what_it_needs_and_gathers_nothing(large: Path) -> None:
    """32 MiB of 96 are wanted: 16 on each rank. Nobody ever holds the 32, and nobody reads more than the 16."""
    backbone = nn.utils.skip_init(nn.Linear, 4096, 2048, bias=False)
    model: Any = nn.Sequential(OrderedDict(pretrain=backbone, head=nn.Linear(2048, 2)))
    model = wrap("fsdp2", model, "pretrain")
    checkpointer = dcp.Checkpointer()
    partial = dcp.PartialLoad.submodule(model.pretrain, source="model.backbone.")
    dcp.load({"model": model}, large, partial=partial)  # imports and first use are not measured
    nn.init.zeros_(model.pretrain.weight)
    starts: list[dcp.Start] = []
    options: dict[str, Any] = {"init_from": large, "partial": partial, "checkpointer": checkpointer}
    extra = extra_peak(lambda: starts.append(dcp.resume_or_init({"model": model}, large.parent / "run", **options)))
    checkpointer.close()
    report = starts[0].report
    assert report is not None
    assert report.bytes_read <= 1.02 * 16 * MIB
    assert extra < 12 * MIB, "blocks of the reading threads, and no tensor"
    assert torch.equal(model.pretrain.weight.to_local(), _numbers(2048).chunk(2)[dist.get_rank()])
