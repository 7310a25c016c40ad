"""What Lightning wrote without this package warm-starts anything: its ``.ckpt``, and its sharded directories."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from dcp_plugin.core.format.foreign.detect import lightning_names
from tests.compare import assert_same, same_bytes, weights_of
from tests.launch import on_ranks


def test_the_weights_of_a_ckpt_are_loaded_and_its_optimizer_is_left(tmp_path: Path) -> None:
    from tests.lightning import training as t

    saved = t.Model()
    trainer = t.trainer_for("single")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(saved, t.plain_loader("single"))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert dcp.latest(tmp_path) == tmp_path / "last.ckpt", "it has the state of the training, and can be resumed"
    model = t.Model(seed=5)
    report = dcp.load({"model": model, "epoch": 0}, tmp_path / "last.ckpt")
    assert_same(saved.state_dict(), model.state_dict())
    assert len(report.loaded) == len(saved.state_dict()) + 1
    info = dcp.inspect(tmp_path / "last.ckpt")
    assert info.format == "lightning"
    assert not [tensor.key for tensor in info.tensors if not tensor.key.startswith("model.")]
    net = t.Model(seed=6).net  # the network alone, found behind its prefix
    with pytest.warns(UserWarning, match="has model.net.* for model"):
        dcp.load({"model": net}, tmp_path / "last.ckpt")
    assert_same(saved.net.state_dict(), net.state_dict())


@on_ranks(2)
def test_a_sharded_directory_is_loaded_under_our_names(tmp_path: Path) -> None:
    from tests.lightning import training as t

    for layout in ("fsdp1", "fsdp2"):
        saved = t.saved(layout, tmp_path / layout, stock=True)
        assert (tmp_path / layout / "meta.pt").exists()
        model = t.Model(seed=5)
        optimizer = model.make_optimizer()
        dcp.load({"model": model, "optim": optimizer}, tmp_path / layout)
        assert_same(weights_of(saved), model.state_dict())
        for name, parameter in model.named_parameters():
            assert same_bytes(saved[f"optim.state.{name}.exp_avg"], optimizer.state[parameter]["exp_avg"])
        assert dcp.inspect(tmp_path / layout).format == "lightning"


def test_a_directory_of_fabric_keeps_the_names_of_its_user(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save({"optimizer_0": {"x": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"step": 1}, tmp_path / "meta.pt")
    info = dcp.inspect(tmp_path)
    assert info.format == "stock" and [tensor.key for tensor in info.tensors] == ["optimizer_0.x"]


def test_the_names_of_lightning_become_ours_and_ours_stay() -> None:
    names = lightning_names(["state_dict", "optimizer_0", "other"])
    assert names == {"state_dict": "model", "optimizer_0": "optim", "other": "other"}
    several = lightning_names(["model", "optimizer_0", "optimizer_1"])
    assert several == {"model": "model", "optimizer_0": "optim_0", "optimizer_1": "optim_1"}
    assert lightning_names(several.values()) == {name: name for name in several.values()}
