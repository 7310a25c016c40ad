"""What users' hooks do to a checkpoint has its effect, on one rank and on sharded models alike."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.compare import assert_same, full, same_bytes
from tests.launch import on_ranks
from tests.training import WORLD_SIZE

on_its_ranks = on_ranks(of=lambda layout: WORLD_SIZE[layout])


def on_one_rank_or_sharded(test: Callable[..., None]) -> Callable[..., None]:
    layouts = pytest.mark.parametrize("layout", ["single", "fsdp1", "fsdp2"])
    return pytest.mark.one_of(layouts(on_its_ranks(test)))  # type: ignore[no-any-return]


@on_one_rank_or_sharded
def test_on_load_checkpoint_may_remove_rename_and_replace(tmp_path: Path, layout: str) -> None:
    from tests.lightning import training as t

    class Editing(t.Model):
        strict_loading = False

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            state["old.name"] = state.pop("net.body.0.bias")

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            assert "net.body.0.bias" not in state
            state["net.body.0.bias"] = state.pop("old.name")
            state["net.head.bias"] = torch.full((1,), 7.0)
            del state["net.head.weight"]

    path = tmp_path / "checkpoint"
    saved = t.saved(layout, path, Editing(layout))
    model = Editing(layout, seed=5)
    fresh = {f"model.{key}": value.clone() for key, value in model.state_dict().items()}
    loaded = t.resumed(layout, path, model).state
    expected = {
        **saved,
        "model.net.head.bias": torch.full((1,), 7.0),
        "model.net.head.weight": fresh["model.net.head.weight"],
    }
    assert_same(expected, loaded)


@on_one_rank_or_sharded
def test_a_callback_may_change_the_optimizer_state(tmp_path: Path, layout: str) -> None:
    from lightning.pytorch.callbacks import Callback

    from tests.lightning import training as t

    class Warmer(Callback):
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            for group in checkpoint["optimizer_states"][0]["param_groups"]:
                group["weight_decay"] = 0.5

    path = tmp_path / "checkpoint"
    saved = t.saved(layout, path)
    loaded = t.resumed(layout, path, t.Model(layout, seed=5), Warmer()).state
    assert_same({key: 0.5 if key.endswith(".weight_decay") else value for key, value in saved.items()}, loaded)


def test_what_a_hook_has_taken_out_is_named_within_bounds(tmp_path: Path) -> None:
    from dcp_plugin.errors import CheckpointMismatch
    from dcp_plugin.lightning.live_load import Loaded, apply_model

    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(50)))
    loaded = Loaded(tmp_path, {}, model=None)
    with pytest.raises(
        CheckpointMismatch, match=r"missing 0\.weight, .* and 92 more; unexpected none\. Set strict_load"
    ):
        apply_model(model, loaded, {}, strict=True)


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp2"])
@on_its_ranks
def test_a_module_gets_what_its_own_state_dict_gave(tmp_path: Path, layout: str) -> None:
    from tests.lightning import training as t

    class Owning(t.Model):
        handed: Any = None

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            state = super().state_dict(*args, **kwargs)
            bias = state.pop("net.body.0.bias")
            return {**state, "renamed": bias, "count": {"of": 3}, "average": torch.arange(3)}

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            self.handed = list(state), state["count"], state["average"]
            mine = {key: value for key, value in state.items() if not key.startswith("net.head.")}
            return super().load_state_dict({**mine, "net.body.0.bias": state["renamed"]}, strict=False)

    class Hooked(Owning):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["average"] += 1

    path = tmp_path / "checkpoint"
    saved = t.saved(layout, path, Owning(layout))
    for kind, added in ((Owning, 0), (Hooked, 1)):
        model = kind(layout, seed=5)
        loaded = t.resumed(layout, path, model).state
        assert same_bytes(loaded["model.renamed"], saved["model.renamed"])
        names, count, average = model.handed
        assert set(names) == set(model.state_dict()) and count == {"of": 3}
        assert same_bytes(full(average), torch.arange(3) + added)


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp2"])
@on_its_ranks
def test_a_module_that_saves_nothing_resumes(tmp_path: Path, layout: str) -> None:
    from tests.lightning import training as t

    class Stateless(t.Model):
        handed: Any = None

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {}

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            self.handed = dict(state)
            return super().load_state_dict(state, strict=False)

    class Hooked(Stateless):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["state_dict"] == {}

    path = tmp_path / "checkpoint"
    saved = t.saved(layout, path, Stateless(layout))
    for kind in (Stateless, Hooked):
        model = kind(layout, seed=5)
        assert_same(saved, t.resumed(layout, path, model).state)
        assert model.handed == {}
    assert t.DCPCheckpointIO().load_checkpoint(path)["state_dict"] == {}


@on_one_rank_or_sharded
def test_strict_loading_decides_about_a_new_parameter(tmp_path: Path, layout: str) -> None:
    from dcp_plugin import CheckpointMismatch
    from tests.lightning import training as t

    class Adapted(t.Model):
        def __init__(self, layout: str, seed: int) -> None:
            super().__init__(layout, seed)
            self.net.head.adapter = torch.nn.Linear(1, 1)

    path = tmp_path / "checkpoint"
    saved = t.saved(layout, path)
    with pytest.raises(CheckpointMismatch, match="adapter"):
        t.resumed(layout, path, Adapted(layout, seed=5))
    model = Adapted(layout, seed=5)
    model.strict_loading = False
    loaded = t.resumed(layout, path, model).state
    assert all(same_bytes(value, loaded[key]) for key, value in saved.items())
    assert "model.net.head.adapter.weight" in loaded


@on_one_rank_or_sharded
def test_tensors_that_hooks_add_come_back_whole(tmp_path: Path, layout: str) -> None:
    from tests.lightning import training as t

    class Averaging(t.Model):
        average: Any = None
        handed: Any = None
        rng: Any = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            weights = checkpoint["state_dict"]["net.body.0.weight"]  # sharded, if the model is
            checkpoint["averages"] = {"of": {"weight": weights}, "count": 3, "plain": torch.arange(3)}
            checkpoint["rng"] = {"mine": 7}  # a name that we use, too
            self.handed = checkpoint, list(checkpoint)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.average, self.rng = checkpoint["averages"], checkpoint["rng"]

    trainer = t.trainer_for(layout, t.checkpoints(tmp_path, layout, "plain"), max_steps=3)
    model = Averaging(layout)
    trainer.fit(model, t.plain_loader(layout))
    checkpoint, keys = model.handed
    assert list(checkpoint) == keys, "what we store is added to the mapping that the hook had"
    assert checkpoint["rng"] == {"mine": 7}
    saved = t.whole_state(trainer)
    path = str(tmp_path / f"{layout}-plain" / "step=3.ckpt")
    model = Averaging(layout, seed=5)
    t.resumed(layout, path, model)
    assert model.rng == {"mine": 7}
    assert same_bytes(full(model.average["of"]["weight"]), saved["model.net.body.0.weight"])
    assert model.average["count"] == 3
    assert same_bytes(model.average["plain"], torch.arange(3))


@on_one_rank_or_sharded
def test_an_object_that_a_hook_adds_comes_back_as_itself_or_is_refused(tmp_path: Path, layout: str) -> None:
    from torchmetrics.aggregation import SumMetric

    from dcp_plugin import UnsafeCheckpoint
    from tests.lightning import training as t

    encoder = torch.nn.Linear(2, 2)
    added = {
        "loss": torch.nn.MSELoss(),
        "encoder": encoder,
        "metrics": {"sum": SumMetric(), "all": [SumMetric(), torch.nn.L1Loss()]},
        "optimizer": torch.optim.SGD(encoder.parameters(), lr=0.5),
    }

    class Keeping(t.Model):
        handed: Any = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint.update(added)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.handed = {name: checkpoint[name] for name in added}

    saving = t.checkpoints(tmp_path, layout, "plain")
    keys = "extra.loss .*extra.encoder .*extra.metrics.sum .*extra.metrics.all .*extra.optimizer "
    with pytest.raises(UnsafeCheckpoint, match=keys):
        t.trainer_for(layout, saving).fit(Keeping(layout), t.plain_loader(layout))
    assert not (tmp_path / f"{layout}-plain" / "step=3.ckpt").exists()

    allowing = ("extra.loss", "extra.encoder", "extra.metrics.*", "extra.optimizer")
    for async_save in (False, True):
        folder, model = f"{layout}-{async_save}", Keeping(layout, seed=5)
        io = t.DCPCheckpointIO(allow_pickle=allowing, async_save=async_save)
        saving = t.checkpoints(tmp_path, folder, "plain")
        t.trainer_for(layout, saving, plugin=io, max_steps=3).fit(Keeping(layout), t.plain_loader(layout))
        path = tmp_path / f"{folder}-plain" / "step=3.ckpt"
        resumed = t.trainer_for(layout, [t.AtTrainStart()], plugin=t.DCPCheckpointIO(allow_pickle=allowing))
        resumed.fit(model, t.plain_loader(layout), ckpt_path=path)
        assert isinstance(model.handed["loss"], torch.nn.MSELoss)
        assert_same(model.handed["encoder"].state_dict(), encoder.state_dict())
        assert list(map(type, model.handed["metrics"]["all"])) == [SumMetric, torch.nn.L1Loss]
        assert model.handed["optimizer"].param_groups[0]["lr"] == 0.5
        with pytest.raises(UnsafeCheckpoint, match=r"extra\.loss"):
            t.trainer_for(layout, plugin=True).fit(Keeping(layout), t.plain_loader(layout), ckpt_path=path)


class Mode(Enum):
    FAST = "fast"


@dataclass
class Options:
    depth: int
    mode: Mode


@on_ranks(1)
def test_hyper_parameters_of_hydra_and_other_settings_are_saved(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    from tests.lightning import training as t

    class Configured(t.Model):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)

    plain = {"width": 7, "betas": [0.9, 0.95]}
    hydra = OmegaConf.create(plain)
    odd = {
        "optimizer": hydra,
        "where": Path("/data"),
        "mode": Mode.FAST,
        "every": timedelta(minutes=2),
        "weights": np.arange(3),
        "options": Options(3, Mode.FAST),
        "args": Namespace(depth=2),
        "sizes": (1, [2, Mode.FAST]),
    }
    for config, expected in ((hydra, plain), (odd, {**odd, "optimizer": plain})):
        trainer = t.trainer_for("single", plugin=True, max_steps=1)
        trainer.fit(Configured(config), t.plain_loader("single"))
        trainer.save_checkpoint(tmp_path / "checkpoint")
        found = t.DCPCheckpointIO().load_checkpoint(tmp_path / "checkpoint")["hyper_parameters"]
        assert repr(found) == repr(expected)


@on_one_rank_or_sharded
def test_weights_only_is_enough_to_validate_and_not_to_resume(tmp_path: Path, layout: str) -> None:
    from tests.lightning import training as t

    class Validated(t.Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(batch[0]).square().mean(), sync_dist=True)

    callbacks = t.checkpoints(tmp_path, layout, "plain")
    callbacks[0].save_weights_only = True
    trainer = t.trainer_for(layout, callbacks, max_steps=3)
    trainer.fit(Validated(layout), t.plain_loader(layout))
    path = str(tmp_path / f"{layout}-plain" / "step=3.ckpt")
    in_order = t.DataLoader(t.data(12), batch_size=2)  # the mean of a loss depends on the order of its batches
    measured = [
        t.trainer_for(layout, plugin=True).validate(Validated(layout, seed), in_order, ckpt_path=path)
        for seed in (5, 6)
    ]
    assert measured[0] == measured[1]
    with pytest.raises(KeyError, match="save_weights_only"):
        t.resumed(layout, path, t.Model(layout, seed=5))
