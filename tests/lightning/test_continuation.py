"""Random streams and dataloaders: what continues, what cannot, and what is said about it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import launch
from tests.launch import on_ranks
from tests.messages import warned


@on_ranks(1)
def test_random_streams_continue() -> None:
    from dcp_plugin.core.state import random_streams

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.normal()), torch.rand(()).item()]

    cpu = torch.device("cpu")
    draw()  # leaves half of a pair of normal numbers in two generators
    state = random_streams.capture(cpu)
    expected = draw()
    random_streams.restore(state, cpu)
    assert draw() == expected
    random_streams.derive(state, rank=3)
    once = draw()
    random_streams.derive(state, rank=3)
    assert draw() == once
    random_streams.derive(state, rank=4)
    assert draw() != once


@on_ranks(1)
def test_random_streams_stay_out_if_they_are_not_wanted(tmp_path: Path) -> None:
    import dcp_plugin as dcp
    from tests.lightning import training as t

    for wanted in (True, False):
        trainer = t.trainer_for("single", plugin=t.DCPCheckpointIO(rng=wanted), max_steps=1)
        trainer.fit(t.Model(), t.plain_loader("single"))
        trainer.save_checkpoint(tmp_path / str(wanted))
        keys = [tensor.key for tensor in dcp.inspect(tmp_path / str(wanted)).tensors]
        assert any(key.startswith("extra.rng.0.") for key in keys) == wanted


def _messages(trainer: Any, model: Any, loader: Any, path: Path) -> list[str]:
    with warned("continue exactly") as said:
        trainer.fit(model, loader, ckpt_path=str(path))
    return said


@on_ranks(1)
def test_in_the_middle_of_an_epoch_a_plain_dataloader_is_warned_about(tmp_path: Path) -> None:
    from tests.lightning import training as t

    saving = t.checkpoints(tmp_path, "single", "stateful")
    t.trainer_for("single", saving, max_steps=3).fit(t.Model(), t.plain_loader("single", 4))
    path = tmp_path / "single-stateful" / "step=3.ckpt"
    (said,) = _messages(t.trainer_for("single", plugin=True), t.Model(), t.plain_loader("single", 4), path)
    assert "after batch 3 of an epoch" in said
    assert "DataLoader" in said
    assert "repeats some samples and misses others" in said
    assert "StatefulDataLoader" in said


@on_ranks(1)
def test_gradients_that_are_not_in_the_checkpoint_are_warned_about(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    from tests.lightning import training as t

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint(tmp_path / str(batch_idx))

    def train(*callbacks: Any, **fit: Any) -> None:
        trainer = t.trainer_for("single", callbacks, plugin=True, max_steps=2, accumulate_grad_batches=3)
        trainer.fit(t.Model(), t.stateful_loader("single", 6), **fit)

    train(Save())
    said: dict[int, list[str]] = {}
    for batch in (1, 2):
        with warned("gradient accumulation") as said[batch]:
            train(ckpt_path=tmp_path / str(batch))
    assert len(said[1]) == 1 and "after 2 of 3 batches" in said[1][0]
    assert said[2] == []


@on_ranks(1)
def test_a_position_that_another_kind_of_sampler_made_starts_again_and_it_is_said(tmp_path: Path) -> None:
    """Lightning wraps the sampler for DDP, also on one rank."""
    from tests.lightning import training as t

    saving = t.checkpoints(tmp_path, "single", "stateful")
    t.trainer_for("single", saving, max_steps=3).fit(t.Model(), t.stateful_loader("single"))
    path = tmp_path / "single-stateful" / "step=3.ckpt"
    trainer = t.trainer_for("single", plugin=True, strategy=t.strategy_for("ddp"))
    (said,) = _messages(trainer, t.Model(), t.stateful_loader("single"), path)
    assert "after batch 3 of an epoch" in said
    assert "with ResumableSampler" in said and "with RandomSampler" in said


@on_ranks(2)
def test_the_middle_of_a_later_epoch_continues_in_the_order_of_that_epoch(tmp_path: Path) -> None:
    """With every kind of sampler that Lightning puts into a stateful dataloader on several ranks."""
    from torch.utils.data import RandomSampler, WeightedRandomSampler

    from tests.lightning import training as t

    def loader(kind: str) -> Any:
        samples = t.data(16)
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        sampler = {
            "shuffle": None,
            "random": RandomSampler(samples),
            "weighted": WeightedRandomSampler([1.0] * 16, 16, generator=generator),
        }[kind]
        return t.StatefulDataLoader(samples, batch_size=2, sampler=sampler, shuffle=True if sampler is None else None)

    for kind in ("shuffle", "random", "weighted"):
        path = tmp_path / kind
        straight = t.Model("ddp")
        t.trainer_for("ddp", t.checkpoints(path, "ddp", "stateful"), max_steps=9).fit(straight, loader(kind))
        resumed = t.Model("ddp", seed=5)
        second = t.trainer_for("ddp", plugin=True, max_steps=9)
        second.fit(resumed, loader(kind), ckpt_path=str(path / "ddp-stateful" / "step=6.ckpt"))
        assert resumed.losses == straight.losses[6:], kind


def test_more_ranks_get_streams_of_their_own_and_the_same_each_time(tmp_path: Path) -> None:
    launch.run(_save_alone, 1, tmp_path)
    outcomes = [launch.run(_resume_on_two, 2, tmp_path) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    (losses_0, said_0), (losses_1, said_1) = outcomes[0]
    assert losses_0 != losses_1
    assert len(said_0) == 1
    assert "those of 1 data-parallel ranks and this run has 2" in said_0[0]
    assert said_1 == []


def _save_alone(root: Path) -> None:
    from tests.lightning import training as t

    saving = t.checkpoints(root, "single", "stateful")
    t.trainer_for("single", saving, max_steps=3).fit(t.Model(), t.stateful_loader("single"))


def _resume_on_two(root: Path) -> tuple[list[float], list[str]]:
    from tests.lightning import training as t

    trainer, model = t.trainer_for("ddp", plugin=True), t.Model("ddp", seed=torch.distributed.get_rank())
    path = root / "single-stateful" / "step=3.ckpt"
    said = _messages(trainer, model, t.stateful_loader("ddp"), path)
    return model.losses, said
