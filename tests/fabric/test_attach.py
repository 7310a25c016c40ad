"""``attach``: what it returns, what it refuses, and the end of a program with a save in flight."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests.launch import on_ranks
from tests.limits import HANG
from tests.messages import warned

PACKAGES = ("lightning.fabric", "lightning_fabric")


@pytest.mark.parametrize("package", PACKAGES)
@on_ranks(1)
def test_attach_can_be_repeated_and_undone(tmp_path: Path, package: str) -> None:
    import importlib

    import torch

    import dcp_plugin as dcp
    from dcp_plugin.fabric import attach

    fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=1)
    stock = type(fabric.strategy)
    attached = attach(fabric, async_save=True)
    assert attach(fabric) is attached
    assert attached.config.async_save
    attach(fabric, async_save=True, io={"threads": 1})
    assert attached.config.io.threads == 1

    state = {"model": fabric.setup(torch.nn.Linear(3, 3)), "step": 1}
    fabric.save(tmp_path / "ours", state)
    assert fabric.load(tmp_path / "ours", dict(state)) == {}  # waits
    attached.wait()
    assert dcp.verify(tmp_path / "ours").ok
    attached.detach()
    assert type(fabric.strategy) is stock
    fabric.save(tmp_path / "stock", state)
    assert (tmp_path / "stock").is_file()
    with attach(fabric):
        fabric.save(tmp_path / "again", state)
        fabric.load(tmp_path / "stock", state)  # a file, in Fabric's own way
    assert type(fabric.strategy) is stock


@on_ranks(1)
def test_strategies_of_ones_own_and_plugins() -> None:
    import lightning_fabric
    from lightning.fabric import Fabric, strategies
    from lightning.pytorch import Trainer

    import dcp_plugin as dcp
    from dcp_plugin import fabric as ours
    from dcp_plugin.lightning import DCPCheckpointIO

    fabric = Fabric(accelerator="cpu", strategy=ours.DCPSingleDeviceStrategy("cpu"), plugins=DCPCheckpointIO(timeout=7))
    assert ours.attach(fabric).config.timeout == 7
    ours.attach(fabric).detach()
    assert type(fabric.strategy) is ours.DCPSingleDeviceStrategy  # as it was made
    explicit = ours.DCPDDPStrategy(checkpoint_config=dcp.CheckpointConfig(timeout=8))
    assert explicit.dcp.config.timeout == 8
    sent = pickle.loads(pickle.dumps(explicit))
    assert type(sent) is ours.DCPDDPStrategy and sent.dcp_adapter.attachment.config.timeout == 8
    for name in ("DDPStrategy", "FSDPStrategy", "ModelParallelStrategy"):
        assert issubclass(getattr(ours, f"DCP{name}"), getattr(strategies, name))
    standalone = ours.dcp_strategy_class(lightning_fabric.strategies.SingleDeviceStrategy)("cpu")
    assert lightning_fabric.Fabric(accelerator="cpu", strategy=standalone).strategy is standalone

    other = lightning_fabric.Fabric(accelerator="cpu", plugins=DCPCheckpointIO(timeout=9))
    assert ours.attach(other).config.timeout == 9
    with pytest.raises(ValueError, match="strategy"):
        Fabric(accelerator="cpu", strategy=standalone)
    with pytest.raises(dcp.CheckpointError, match="not a Trainer"):
        ours.attach(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False))
    with pytest.raises(dcp.CheckpointError, match="XLAStrategy is not supported"):
        ours.dcp_strategy_class(strategies.XLAStrategy)
    with pytest.raises(TypeError, match=r"unknown setting .async_sav. \(did you mean .async_save.\?\)"):
        ours.attach(fabric, async_sav=True)


@pytest.mark.parametrize("package", PACKAGES)
@on_ranks(1)
def test_a_plugin_with_init_from_is_refused(tmp_path: Path, package: str) -> None:
    import importlib

    import torch

    from dcp_plugin import fabric as ours
    from dcp_plugin.lightning import DCPCheckpointIO

    base = importlib.import_module(package)
    plugin = DCPCheckpointIO(init_from=tmp_path / "pretrained")
    for strategy in ("auto", ours.dcp_strategy_class(base.strategies.SingleDeviceStrategy)("cpu")):
        fabric = base.Fabric(accelerator="cpu", devices=1, strategy=strategy, plugins=plugin)
        before = type(fabric.strategy)
        for settings in ({}, {"io": {"threads": 1}}):
            with pytest.raises(ValueError, match=r"attach\(fabric\)\.resume_or_init"):
                ours.attach(fabric, **settings)
        assert type(fabric.strategy) is before
    with pytest.raises(ValueError, match=r"attach\(fabric\)\.resume_or_init"):  # promoted, and never attached
        fabric.save(tmp_path / "ck", {"model": fabric.setup(torch.nn.Linear(2, 2))})


@on_ranks(2)
def test_a_plugin_alone_saves_on_rank_0_and_says_so(tmp_path: Path) -> None:
    from dcp_plugin.fabric import attach
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.fabric import training as t

    fabric = t.fabric_for("ddp", plugins=DCPCheckpointIO(io={"threads": 1}))
    state = t.Training(fabric).state
    with warned("rank 0 alone") as said:
        fabric.save(tmp_path / "rank-0", {"net": state["net"]})
    assert len(said) == (fabric.global_rank == 0)
    assert all("dcp_plugin.fabric.attach(fabric)" in message for message in said)
    assert list(fabric.load(tmp_path / "rank-0")) == ["net"]

    assert attach(fabric).config.io.threads == 1
    fabric.save(tmp_path / "all", {"net": state["net"]})
    assert sorted(file.name.partition("-")[0] for file in (tmp_path / "all").glob("*.distcp")) == ["__0_0", "__1_0"]


@on_ranks(2)
def test_a_failure_on_one_rank_is_raised_on_all_and_nothing_is_lost(tmp_path: Path) -> None:
    import torch

    import dcp_plugin as dcp
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    fabric = t.fabric_for("fsdp2")
    attached = attach(fabric, async_save=True)
    training = t.Training(fabric)
    training.save(tmp_path / "saved")
    attached.wait()
    saved = training.whole_state()

    def refuses_on_rank_1(key: str, value: Any) -> bool:
        if fabric.global_rank == 1:
            raise OSError("nothing goes")
        return True

    fabric.save(tmp_path / "saved", training.state, filter={"net": refuses_on_rank_1})
    with pytest.raises(dcp.CheckpointError, match=r"rank 1.*nothing goes"):
        attached.wait()
    attached.wait()  # told once
    fabric.save(tmp_path / "saved", training.state, filter={"net": refuses_on_rank_1})
    with pytest.raises(RuntimeError, match="stop") as caught, attached:
        raise RuntimeError("stop")
    assert "nothing goes" in caught.value.__notes__[0]

    def broken(state: dict[str, Any]) -> None:
        raise OSError("no such position")

    attach(fabric)
    if fabric.global_rank == 1:
        training.state["loader"]._dataloader.load_state_dict = broken
    with pytest.raises(dcp.CheckpointError, match=r"rank 1.*no such position"):
        training.load(tmp_path / "saved")
    with pytest.raises(dcp.CheckpointNotFound):
        training.load(tmp_path / "nowhere")
    back = t.Training(fabric, seed=5)
    back.load(tmp_path / "saved")
    from tests.compare import assert_same

    assert_same(saved, back.whole_state())
    torch.distributed.barrier()


SPAWN = """
import sys, torch
from lightning.fabric import Fabric
from torch import nn
from dcp_plugin.fabric import attach

def train(fabric):
    net = nn.Linear(3, 3)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    fabric.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    fabric.save(sys.argv[1], {"model": model, "optimizer": optimizer})

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")
    attach(fabric)
    fabric.launch(train)
"""


@pytest.mark.long
def test_ranks_that_launch_spawns_after_attach_save_together(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "ck")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert dcp.inspect(tmp_path / "ck").world_size == 2
