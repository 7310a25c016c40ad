"""What sharded strategies saved through the plugin, stock Lightning resumes with the package uninstalled."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same, weights_of
from tests.launch import on_ranks
from tests.lightning.stock_processes import resume_with_stock
from tests.lives import read, write
from tests.training import WORLD_SIZE

SHARDED = ("fsdp1", "fsdp2", "hsdp")


def _save(root: Path, layouts: list[str], **options: Any) -> None:
    """Two epochs in one go without the plugin; one with it, and a checkpoint."""
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as stock
    from tests.lightning import training as t

    for layout in layouts:
        _, straight = stock.fit(layout, 2)
        keep = stock.first_checkpoint(root / layout)
        trainer, first = stock.fit(layout, 1, callbacks=[keep], plugins=[DCPCheckpointIO(**options)])
        assert first.losses == straight.losses[:3]
        write(root, layout, straight.losses, t.whole_state(trainer))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("no_lock_in")
    for size in (2, 4):
        launch.run(_save, size, root, [name for name in SHARDED if WORLD_SIZE[name] == size])
    return root


def test_stock_lightning_resumes_as_if_it_had_never_been_interrupted(root: Path) -> None:
    layouts = [layout for layout in SHARDED if WORLD_SIZE[layout] == 2]
    jobs = [(layout, root / layout / "first.ckpt", root / f"{layout}-resumed.json") for layout in layouts]
    resume_with_stock("stock_training", 2, jobs)
    for layout, _, losses in jobs:
        assert json.loads(losses.read_text()) == read(root, layout)[0][3:]


@on_ranks(4)
def test_stock_lightning_resumes_a_mesh_of_replicas_and_shards(root: Path) -> None:
    """On ranks that have imported this package: starting four processes takes too long."""
    from tests.lightning import stock_training as stock

    losses = stock.resume("hsdp", root / "hsdp" / "first.ckpt")
    assert losses == read(root, "hsdp", torch.distributed.get_rank())[0][3:]


@on_ranks(2)
def test_within_an_epoch_stock_goes_on_as_from_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """That is not where the run was: with ``shuffle=True`` on several ranks, stock draws another order."""
    from tests.lightning import training as t

    for layout in ("ddp", "fsdp2"):
        losses = []
        for stock in (True, False):
            root, path = tmp_path / str(stock), tmp_path / str(stock) / f"{layout}-stateful" / "step=3.ckpt"
            trainer = t.trainer_for(layout, t.checkpoints(root, layout, "stateful"), stock=stock, max_steps=3)
            trainer.fit(t.Model(layout), t.stateful_loader(layout))
            if layout == "ddp" and not stock:
                dcp.export(path, tmp_path / "exported.ckpt", "lightning")
                path = tmp_path / "exported.ckpt"
            torch.distributed.barrier()
            model = t.Model(layout)
            t.trainer_for(layout, stock=True).fit(model, t.stateful_loader(layout), ckpt_path=path)
            losses.append(model.losses)
        of_stock, of_ours = losses
        assert of_ours == of_stock and len(of_stock) == 3


@on_ranks(1)
def test_lightnings_own_tools_make_one_file_of_it(root: Path, tmp_path: Path) -> None:
    for layout in SHARDED:  # as on the command line, but without starting Python for each
        for package in ("fabric", "pytorch"):
            out = tmp_path / f"{layout}-{package}"
            sys.argv = ["consolidate", str(root / layout / "first.ckpt"), "--output_file", str(out)]
            name = f"lightning.{package}.utilities.consolidate_checkpoint"
            sys.modules.pop(name, None)
            runpy.run_module(name, run_name="__main__")
    for layout in SHARDED:
        assert torch.load(tmp_path / f"{layout}-fabric", weights_only=True)["global_step"] == 3
        consolidated = torch.load(tmp_path / f"{layout}-pytorch", weights_only=True)
        _, saved = read(root, layout)
        assert_same(weights_of(saved), consolidated["state_dict"])
        assert consolidated["hyper_parameters"] == {"layout": layout, "seed": 0, "width": 7}
        (optimizer,) = consolidated["optimizer_states"]
        assert [len(group["params"]) for group in optimizer["param_groups"]] == [2, 2]
        assert optimizer["param_groups"][1]["weight_decay"] == 0.0
        saved_state = {key: value for key, value in saved.items() if key.startswith("optim.state.")}
        for fqn, slots in optimizer["state"].items():
            for slot, value in slots.items():
                assert_same({"it": saved_state.pop(f"optim.state.{fqn}.{slot}")}, {"it": value})
        assert not saved_state


@pytest.mark.parametrize("layout", SHARDED)
def test_we_see_nothing_of_it(root: Path, layout: str) -> None:
    """Each key is there once, and so is each byte."""
    path = root / layout / "first.ckpt"
    info = dcp.inspect(path)
    keys = [*(tensor.key for tensor in info.tensors), *info.values]
    assert {key.partition(".")[0] for key in keys} == {"model", "optim", "extra"}
    stored = sum(file.stat().st_size for file in path.glob("*.distcp"))
    metadata = torch.distributed.checkpoint.FileSystemReader(path).read_metadata()
    items = {(where.relative_path, where.offset): where.length for where in metadata.storage_data.values()}
    assert len(metadata.storage_data) > len(items)  # the aliases
    assert stored < sum(items.values()) + 4096 * (len(items) + 8)  # padding


@on_ranks(2)
def test_it_can_be_left_out(tmp_path: Path) -> None:
    _save(tmp_path, ["fsdp2"], stock_aliases=False)
    path = tmp_path / "fsdp2" / "first.ckpt"
    assert not (path / "meta.pt").exists()
    metadata = torch.distributed.checkpoint.FileSystemReader(path).read_metadata()
    assert {key.partition(".")[0] for key in metadata.state_dict_metadata} == {"model", "optim", "extra"}
