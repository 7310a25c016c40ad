"""Partial loads under every wrapper: sub-modules by identity, bytes that are read, ranks that disagree."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import dcp_plugin as dcp
from dcp_plugin.core.partial import PartialLoad
from dcp_plugin.core.state import gather_module
from tests import launch
from tests.compare import assert_same, full_state
from tests.core.loading.test_partial import FineTune
from tests.launch import gathered, on_ranks
from tests.layouts import build, train, wrap

LAYOUTS = {"ddp": 2, "fsdp1": 2, "fsdp1_flat": 2, "fsdp2": 2, "fsdp1_flat_hsdp": 4, "fsdp2_hsdp": 4}
"""With the number of ranks."""


def _wrapped(layout: str, module: nn.Module) -> Any:
    return wrap(layout, module, unit="")


def _models(layout: str) -> dict[str, tuple[nn.Module, nn.Module]]:
    """By how the sub-module is sharded: the model, and the sub-module as a user holds it."""
    models: dict[str, tuple[nn.Module, nn.Module]] = {}
    model = FineTune()
    models["not at all"] = model, model.pretrain
    model = FineTune()
    inner = model.pretrain  # held since before it was wrapped
    models["with the whole"] = _wrapped(layout, model), inner
    model = FineTune()
    model.pretrain = _wrapped(layout, model.pretrain)
    models["alone"] = model, model.pretrain
    model = FineTune()
    model.pretrain = _wrapped(layout, model.pretrain)
    models["alone and the rest around it"] = _wrapped(layout, model), model.pretrain
    return models


def _whole(module: nn.Module) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return full_state(gather_module(module))


def _save(path: Path, layout: str) -> None:
    model, optimizer = build(layout)
    train(model, optimizer, 1)
    dcp.save({"model": model, "optim": optimizer}, path)


@pytest.fixture
def of_fsdp1(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    launch.run(_save, 2, tmp_path / "ck", "fsdp1")
    return tmp_path / "ck"


@pytest.mark.one_of
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(of=lambda layout: LAYOUTS[layout])
def test_a_sub_module_is_found_under_every_wrapper_however_it_is_sharded(of_fsdp1: Path, layout: str) -> None:
    expected: dict[str, Any] = {}
    dcp.load({"model": expected}, of_fsdp1)
    torch.manual_seed(1)
    for how, (model, part) in _models(layout).items():
        if layout == "fsdp2_hsdp" and how == "with the whole":
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        before = _whole(model)
        report = dcp.load({"model": model}, of_fsdp1, partial=PartialLoad.submodule(part))
        pretrained = {f"pretrain.{key}": value for key, value in expected.items()}
        assert_same(_whole(model), {**before, **pretrained})
        assert report.renamed == {f"model.{key}": f"model.{key.removeprefix('pretrain.')}" for key in pretrained}
        assert report.left_out == ["model.head.weight", "model.head.bias"], (layout, how)


def test_a_sub_module_is_found_through_compile_and_activation_checkpoints(tmp_path: Path) -> None:
    _save(tmp_path / "ck", "plain")
    saved: dict[str, Any] = {}
    dcp.load({"model": saved}, tmp_path / "ck")
    for around in (checkpoint_wrapper, lambda module: torch.compile(module, backend="eager")):
        model = FineTune()
        inner = model.pretrain
        model.pretrain = around(inner)
        for whole, part in (
            (model, inner),
            (model, model.pretrain),
            (around(model), model.pretrain),
            (inner, around(inner)),
        ):
            with torch.no_grad():
                inner.out.bias.zero_()
            dcp.load({"model": whole}, tmp_path / "ck", partial=PartialLoad.submodule(part))
            assert_same(inner.state_dict(), saved)


class Large(nn.Module):
    """Shapes whose shards do not end where a checksum block does. A backbone of 23 MiB, and as much around it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(1001, 3001, bias=False), nn.Linear(3001, 1001, bias=False))
        self.head = nn.Linear(3001, 2003)


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mine = Large().backbone


def _save_large(path: Path, sharded: bool) -> None:
    torch.manual_seed(0)
    model = Large()
    dcp.save({"model": _wrapped("fsdp2", model) if sharded else model}, path)


def _load_backbone(path: Path, sharded: bool) -> tuple[int, int, list[str]]:
    model = Mine()
    report = dcp.load(
        {"model": _wrapped("fsdp2", model) if sharded else model},
        path,
        PartialLoad(rename={"model.mine.": "model.backbone."}),
    )
    assert report.unchecked_bytes == 0
    return report.bytes_read, sum(p.numel() * 4 for p in model.parameters()), list(report.renamed)


@pytest.mark.one_of
@pytest.mark.parametrize("saved_by", [1, 2])
@pytest.mark.parametrize("loaded_by", [1, 2])
def test_only_the_bytes_of_what_is_selected_are_read(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    """All that all ranks read from data files, checksum blocks at the edges of shards included, by what the selected
    tensors hold. Every byte is verified. A block is a 256th of an item, so small tensors come out alike."""
    launch.run(_save_large, saved_by, tmp_path / "ck", saved_by > 1)
    outcomes = launch.run(_load_backbone, loaded_by, tmp_path / "ck", loaded_by > 1)
    read, selected = sum(read for read, *_ in outcomes), outcomes[0][1]
    assert outcomes[0][2] == ["model.mine.0.weight", "model.mine.1.weight"]
    assert 1.0 <= read / selected <= 1.02


@on_ranks(2)
def test_ranks_that_want_different_parts_raise_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    _save(path, "fsdp2")
    model, _ = build("fsdp1")
    before = _whole(model)
    partial = PartialLoad("model.inp.*" if dist.get_rank() else "model.out.*")
    with pytest.raises(dcp.CheckpointMismatch) as caught:
        dcp.load({"model": model}, path, partial)
    with pytest.raises(dcp.CheckpointMismatch, match="Give all ranks the same"):
        dcp.load({"model": model}, path, partial if dist.get_rank() else None)
    assert_same(before, _whole(model))
    said = gathered(str(caught.value))
    assert said[0] == said[1] and "model.out.*" in said[0] and "model.inp.*" in said[0]


@pytest.mark.one_of
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if LAYOUTS[layout] == 2])
@on_ranks(2)
def test_the_optimizer_of_a_renamed_part_follows_it_under_every_wrapper(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "ck"
    _save(path, "ddp")
    saved: dict[str, Any] = {}
    dcp.load({"optim": saved}, path)
    model = FineTune()
    model.pretrain = _wrapped(layout, model.pretrain)
    model.head = _wrapped(layout, model.head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    state = {"model": model, "optim": optimizer}
    partial = PartialLoad(exclude="model.head.*", rename={"model.pretrain.": "model."}, missing="ignore")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, path, partial)
        dcp.save(state, path.parent / layout)
    again: dict[str, Any] = {}
    dcp.load({"optim": again}, path.parent / layout)
    slots = {key.replace("pretrain.", ""): value for key, value in again.items() if key.startswith("state.")}
    assert_same(slots, {key: value for key, value in saved.items() if key.startswith("state.")})
