"""The plugin as the bare ``CheckpointIO`` that it is, too: called by one process, without a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.paths import Where
from tests.compare import assert_same
from tests.launch import on_ranks


@on_ranks(1)
def test_a_bare_plugin_saves_and_loads_any_dictionary(place: Where) -> None:
    from tests.lightning import training as t

    io = t.DCPCheckpointIO(async_save=True)
    weights = t.Model().state_dict()  # what ddp_spawn saves to bring the weights home
    io.save_checkpoint(weights, place / "weights")
    assert_same(weights, io.load_checkpoint(place / "weights"))
    io.remove_checkpoint(place / "weights")
    assert not medium_of(place).kind(place / "weights")
    io.save_checkpoint({"state_dict": weights}, place / "model")
    other = t.Model(seed=1)
    with pytest.warns(UserWarning, match="its only module, 'model', is loaded"):
        dcp.load({"mine": other}, place / "model")
    assert_same(weights, other.state_dict())
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint(weights, place / "weights", storage_options={})


@on_ranks(1)
def test_a_small_file_of_lightnings_own_may_shrink_once_it_is_read(tmp_path: Path) -> None:
    from tests.lightning import training as t

    weights = t.Model().state_dict()
    torch.save({"state_dict": weights}, tmp_path / "stock.ckpt")
    checkpoint = t.DCPCheckpointIO().load_checkpoint(tmp_path / "stock.ckpt")
    (tmp_path / "stock.ckpt").write_bytes(b"")
    assert_same(weights, checkpoint["state_dict"])


@on_ranks(2)
def test_on_two_ranks_rank_0_alone_may_save(tmp_path: Path) -> None:
    from tests.lightning import training as t

    if torch.distributed.get_rank() == 0:
        io = t.DCPCheckpointIO()
        with pytest.warns(UserWarning, match="rank 0 alone"):
            io.save_checkpoint({"weight": torch.ones(2)}, tmp_path / "weights")
        assert_same({"weight": torch.ones(2)}, io.load_checkpoint(tmp_path / "weights"))


@on_ranks(2)
def test_a_bare_plugin_reads_what_all_ranks_saved(tmp_path: Path) -> None:
    from dcp_plugin.core.state import flatten_optimizer
    from tests.lightning import training as t

    trainer = t.trainer_for("fsdp2", t.checkpoints(tmp_path, "fsdp2", "stateful"), max_steps=3)
    trainer.fit(t.Model("fsdp2"), t.stateful_loader("fsdp2"))
    saved = t.whole_state(trainer)
    checkpoint = t.DCPCheckpointIO().load_checkpoint(tmp_path / "fsdp2-stateful" / "step=3.ckpt")
    assert checkpoint["global_step"] == 3
    assert checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert checkpoint["lr_schedulers"][0]["last_epoch"] == 3
    loaded = {f"model.{key}": value for key, value in checkpoint["state_dict"].items()}
    flat = flatten_optimizer(checkpoint["optimizer_states"][0])
    assert_same(saved, {**loaded, **{f"optim.{key}": value for key, value in flat.items()}})


@on_ranks(1)
def test_the_plugin_resumes_a_file_of_lightnings_own(place: Where) -> None:
    from tests.lightning import training as t

    straight, model = t.trainer_for("single"), t.Model()
    straight.fit(model, t.plain_loader("single"))
    first = t.trainer_for("single", max_epochs=1)
    first.fit(t.Model(), t.plain_loader("single"))
    first.save_checkpoint(place / "stock.ckpt")
    saved = t.whole_state(first)
    assert_same(saved, t.resumed("single", str(place / "stock.ckpt")).state)
    io = t.DCPCheckpointIO()
    io.remove_checkpoint(place / "stock.ckpt")
    assert not medium_of(place).kind(place / "stock.ckpt")
