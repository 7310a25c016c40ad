"""Who gets the callback, whose strategy is promoted, and what is said if neither happens."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import on_ranks
from tests.messages import warned


def test_the_entry_point_imports_nothing_and_gives_nothing_to_others() -> None:
    code = (
        "import sys, dcp_plugin._entry_points as e;"
        "assert e.lightning_callbacks() == e.pytorch_lightning_callbacks() == [];"
        "assert not {'torch', 'lightning', 'dcp_plugin.lightning'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@on_ranks(1)
def test_a_trainer_without_the_plugin_is_untouched() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors import callback_connector

    from tests.lightning import training as t

    original = callback_connector._load_external_callbacks
    callback_connector._load_external_callbacks = lambda group: []
    untouched = [type(callback) for callback in pl.Trainer(accelerator="cpu").callbacks]
    callback_connector._load_external_callbacks = original

    in_another_trainer = t.DCPCheckpointIO()
    pl.Trainer(accelerator="cpu", plugins=[in_another_trainer])
    assert [type(callback) for callback in pl.Trainer(accelerator="cpu").callbacks] == untouched
    trainer = t.trainer_for("single", max_steps=1)
    trainer.fit(t.Model(), t.plain_loader("single"))
    assert type(trainer.strategy) is SingleDeviceStrategy


@on_ranks(1)
def test_a_callback_that_does_not_know_its_trainer_takes_itself_out() -> None:
    from dcp_plugin.lightning import DCPCallback, _lightning
    from tests.lightning import training as t

    in_another_trainer = t.DCPCheckpointIO()
    _lightning.trainer_under_construction = lambda: None
    trainer = t.trainer_for("single", max_steps=1)
    assert any(isinstance(one, DCPCallback) for one in trainer.callbacks), in_another_trainer
    trainer.fit(t.Model(), t.plain_loader("single"))
    assert not any(isinstance(one, DCPCallback) for one in trainer.callbacks)


@on_ranks(1)
def test_the_plugin_promotes_the_strategy_to_a_subclass_of_its_own_class() -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from dcp_plugin.lightning import DCPCallback, DCPSingleDeviceStrategy
    from tests.lightning import training as t

    trainer = t.trainer_for("single", [DCPCallback()], plugin=True, max_steps=1)  # on top of the entry point's
    strategy = trainer.strategy
    trainer.fit(t.Model(), t.plain_loader("single"))
    assert trainer.strategy is strategy
    assert type(strategy).__mro__[:2] == (DCPSingleDeviceStrategy, SingleDeviceStrategy)
    trainer.fit(t.Model(), t.plain_loader("single"))  # a second fit finds it promoted
    assert pickle.loads(pickle.dumps(DCPSingleDeviceStrategy)) is DCPSingleDeviceStrategy


@on_ranks(1)
def test_a_strategy_built_by_hand_needs_neither_callback_nor_plugin(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    import dcp_plugin as dcp
    from dcp_plugin.lightning import DCPSingleDeviceStrategy
    from tests.lightning import training as t

    strategy = DCPSingleDeviceStrategy("cpu")
    trainer = pl.Trainer(
        strategy=strategy, max_steps=1, callbacks=t.checkpoints(tmp_path, "single", "plain"), logger=False
    )
    trainer.fit(t.Model(), t.plain_loader("single"))
    assert dcp.inspect(tmp_path / "single-plain" / "step=1.ckpt").step == 1


@on_ranks(2)
def test_without_its_callback_the_plugin_says_that_rank_0_is_alone(tmp_path: Path) -> None:
    from dcp_plugin.lightning import DCPCallback
    from tests.lightning import training as t

    trainer = t.trainer_for("ddp", t.checkpoints(tmp_path, "ddp", "plain"))
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, DCPCallback)]
    with warned("DCPCheckpointIO") as said:
        trainer.fit(t.Model("ddp"), t.plain_loader("ddp"))
    assert len(said) == (trainer.global_rank == 0)
    assert all("callbacks=[DCPCallback()]" in message for message in said)


@on_ranks(1)
def test_a_wrapper_around_the_plugin_is_said_to_be_of_no_use(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from tests.lightning import training as t

    io = AsyncCheckpointIO(t.DCPCheckpointIO())
    trainer = pl.Trainer(accelerator="cpu", plugins=[io], max_steps=1, logger=False, default_root_dir=tmp_path)
    with warned("AsyncCheckpointIO") as said:
        trainer.fit(t.Model(), t.plain_loader("single"))
    assert len(said) == 1
    assert "async_save=True" in said[0]


@on_ranks(1)
def test_strategies_with_a_format_of_their_own_are_refused() -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from dcp_plugin import CheckpointError
    from dcp_plugin.lightning import dcp_strategy_class

    with pytest.raises(CheckpointError, match="does not support DeepSpeedStrategy"):
        dcp_strategy_class(DeepSpeedStrategy)
