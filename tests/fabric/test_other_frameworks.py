"""Checkpoints of another framework, or of Fabric without this package, and the other way round."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests import launch
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.messages import logged
from tests.training import WORLD_SIZE, two_groups


@on_ranks(2)
def test_fabric_and_the_trainer_load_what_the_other_saved(tmp_path: Path) -> None:
    from dcp_plugin.fabric import attach
    from tests.fabric import training as fabric_runs
    from tests.lightning import training as trainer_runs

    def in_fabric(layout: str, seed: int) -> tuple[Any, Any, Any]:
        fabric = fabric_runs.fabric_for(layout)
        attach(fabric)
        module = trainer_runs.Model(seed=seed)
        if layout == "fsdp2":
            fabric.strategy._parallelize_fn = lambda model, mesh: fully_shard(model)
        model = fabric.setup_module(module)
        return fabric, model, fabric.setup_optimizers(two_groups(model.net))

    for layout, other in (("ddp", "fsdp2"), ("fsdp2", "ddp")):
        trainer = trainer_runs.trainer_for(layout, plugin=True, max_steps=2)
        trainer.fit(trainer_runs.Model(layout), trainer_runs.plain_loader(layout))
        path = tmp_path / f"trainer-{layout}"
        trainer.save_checkpoint(path)
        fabric, model, optimizer = in_fabric(other, seed=5)
        rest = fabric.load(path, {"model": model, "optimizer": optimizer})
        assert rest["global_step"] == 2
        assert_same(trainer_runs.whole_state(trainer), fabric_runs.whole_state(model, optimizer))

        back = tmp_path / f"fabric-{other}"
        for loops in ({}, {name: value for name, value in rest.items() if name != "callbacks"}):
            fabric.save(back, {"model": model, "optimizer": optimizer, **loops})
            look = trainer_runs.resumed(layout, str(back))
            assert_same(fabric_runs.whole_state(model, optimizer), look.state)
            assert look.progress["global_step"] == (2 if loops else 0)


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp1", "fsdp2"])
def test_sharded_checkpoints_of_fabric_itself_load_under_any_strategy(tmp_path: Path, layout: str) -> None:
    launch.run(_save_with_fabric_itself, 2, tmp_path)
    launch.run(_load_from_fabric_itself, WORLD_SIZE[layout], tmp_path, layout)


def _save_with_fabric_itself(root: Path) -> None:
    """Two sharded directories, and a file; what they hold, by strategy."""
    from tests.fabric import training as t

    states = {}
    for layout in ("fsdp1", "fsdp2", "ddp"):
        training = t.Training(t.fabric_for(layout))
        training.run(2)
        del training.state["loader"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training.save(root / layout)
        states[layout] = training.whole_state()
    if torch.distributed.get_rank() == 0:
        torch.save(states, root / "states")
        (root / "run").mkdir()
        (root / "run" / "any name").hardlink_to(root / "ddp")


def _load_from_fabric_itself(root: Path, layout: str) -> None:
    import dcp_plugin as dcp
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    for source, state in torch.load(root / "states", weights_only=True).items():
        if source == "ddp" and layout not in ("single", "ddp"):
            continue  # Fabric itself loads its files only with the optimizers of those
        fabric = t.fabric_for(layout)
        attached = attach(fabric)
        training = t.Training(fabric, seed=5)
        del training.state["loader"], training.state["history"]
        if source == "ddp":
            start = attached.resume_or_init(training.state, root / "run")
            assert (start.how, start.path) == ("resumed", root / "run" / "any name")
            assert_same(state, training.whole_state())
        assert training.load(root / source) == {"history": [1, 2]}
        assert_same(state, training.whole_state())
        assert (training.state["step"], training.state["schedule"].last_epoch) == (2, 2)
        if source != "ddp":
            with pytest.raises(dcp.CheckpointMismatch, match="has no 'absent'"):
                fabric.load(root / source, {"net": training.state["net"], "absent": 0})


def test_more_ranks_get_streams_of_their_own_and_the_same_each_time(tmp_path: Path) -> None:
    launch.run(_save_alone, 1, tmp_path)
    outcomes = [launch.run(_load_on_two, 2, tmp_path) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    (losses_0, said_0), (losses_1, said_1) = outcomes[0]
    assert losses_0 != losses_1
    assert "position of 'loader' was saved on 1 data-parallel ranks and this run has 2" in said_0[0]
    assert "random states for 1 of 2 ranks" in said_0[1]
    assert all(str(tmp_path / "saved") in message for message in said_0)
    assert said_1 == []


def _save_alone(root: Path) -> None:
    from tests.fabric import training as t

    fabric = t.attached("single")
    training = t.Training(fabric)
    training.run(3)
    training.save(root / "saved")


@on_ranks(1)
def test_a_position_that_another_kind_of_sampler_made_starts_again_and_it_is_said(tmp_path: Path) -> None:
    """Fabric wraps the sampler for DDP, also on one rank."""
    from dcp_plugin.fabric import attach
    from tests.fabric import training as t

    _save_alone(tmp_path)
    said = logged()
    fabric = t.fabric_for("single", t.strategy_for("ddp"))
    attach(fabric)
    training = t.Training(fabric, seed=5)
    training.load(tmp_path / "saved")
    assert len(said) == 1
    assert f"{tmp_path / 'saved'}: it has a position of a dataloader with RandomSampler" in said[0]
    training.run(5)
    assert training.state["step"] == 5


def _load_on_two(root: Path) -> tuple[list[float], list[str]]:
    from tests.fabric import training as t

    said = logged()
    fabric = t.attached("ddp")
    training = t.Training(fabric, seed=torch.distributed.get_rank())
    training.load(root / "saved")
    training.run(5)
    return training.losses, said


@on_ranks(2)
def test_later_epochs_continue_in_their_order_with_every_kind_of_sampler(tmp_path: Path) -> None:
    """Resumed in the middle of the second epoch and at its end, over the epoch after it."""
    from torch.utils.data import RandomSampler, WeightedRandomSampler
    from torch.utils.data.distributed import DistributedSampler
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    from tests.fabric import training as t

    rank = torch.distributed.get_rank()

    def loader(fabric: Any, kind: str, seed: int) -> Any:
        torch.manual_seed(seed)
        data = t.samples(16)
        generator = torch.Generator().manual_seed(seed)
        sampler = {
            "shuffle": lambda: None,
            "random": lambda: RandomSampler(data),
            "weighted": lambda: WeightedRandomSampler([1.0] * 16, 16, generator=generator),
            "distributed": lambda: DistributedSampler(data, num_replicas=2, rank=rank),
            "stateful": lambda: StatefulDistributedSampler(data, num_replicas=2, rank=rank),
        }[kind]()
        made = t.StatefulDataLoader(
            data, batch_size=2, sampler=sampler, shuffle=True if sampler is None else None, generator=generator
        )
        return fabric.setup_dataloaders(made)

    for kind in ("shuffle", "random", "weighted", "distributed", "stateful"):
        fabric = t.attached("ddp")
        model = fabric.setup_module(torch.nn.Linear(1, 1))
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters()))
        live = {"model": model, "optimizer": optimizer}
        straight = loader(fabric, kind, seed=1)
        orders = []
        for epoch in range(4):
            orders.append([])
            for number, (batch,) in enumerate(straight):
                orders[-1].append(batch.tolist())
                if (epoch, number) == (1, 1):
                    fabric.save(tmp_path / f"{kind}-middle", {**live, "loader": straight})
            if epoch == 1:
                fabric.save(tmp_path / f"{kind}-end", {**live, "loader": straight})
        assert orders[0] != orders[1]
        for moment, expected in (("middle", [orders[1][2:], *orders[2:]]), ("end", orders[2:])):
            if (kind, moment) == ("stateful", "end"):
                continue  # torchdata 0.11 by itself then gives an empty epoch
            resumed = loader(fabric, kind, seed=5)
            fabric.load(tmp_path / f"{kind}-{moment}", {**live, "loader": resumed})
            seen = [[batch.tolist() for (batch,) in resumed] for _ in expected]
            assert seen == expected, f"{kind}, {moment}"
