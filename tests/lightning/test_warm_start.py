"""``DCPCheckpointIO(init_from=...)``: a fit without a checkpoint of its own starts with another's weights.

And what was frozen when a checkpoint was made may be trained now, and the other way round.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_plugin.paths import Where, as_path
from tests import launch
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.lightning import WORLD_SIZE
from tests.messages import logged
from tests.object_server import Bucket

ON_TWO_RANKS = ("ddp", "fsdp1", "fsdp2")


@pytest.mark.one_of
@pytest.mark.parametrize("layout", WORLD_SIZE)
def test_a_fit_starts_with_the_weights_of_init_from_or_with_its_own_checkpoint(tmp_path: Path, layout: str) -> None:
    launch.run(_pretrain, 1, tmp_path, tmp_path)
    launch.run(_start, WORLD_SIZE[layout], tmp_path, tmp_path, layout)


@pytest.mark.parametrize("layout", ["single", *(pytest.param(name, marks=pytest.mark.long) for name in ON_TWO_RANKS)])
def test_a_fit_on_a_bucket_starts_like_one_on_a_disk(tmp_path: Path, bucket: Bucket, layout: str) -> None:
    place = as_path(bucket.url) / "run"
    launch.run(_pretrain, 1, place, tmp_path)
    launch.run(_start, WORLD_SIZE[layout], place, tmp_path, layout)


def _pretrain(root: Where, disk: Path) -> None:
    from tests.lightning import training as t

    trainer, model = t.trainer_for("single", plugin=True, max_steps=2), t.Model(seed=3)
    trainer.fit(model, t.plain_loader("single"))
    trainer.save_checkpoint(root / "pretrained")
    torch.save({key: value for key, value in t.whole_state(trainer).items() if key[:5] == "model"}, disk / "whole.pt")


def _start(root: Where, disk: Path, layout: str) -> None:
    from dcp_plugin import PartialLoad
    from tests.lightning import fine_tuning as ft
    from tests.lightning import training as t

    pretrained = torch.load(disk / "whole.pt", weights_only=True)
    io = t.DCPCheckpointIO(init_from=root / "pretrained")
    look, loader = ft.Looks(), t.plain_loader(layout)
    trainer = t.trainer_for(layout, [look], plugin=io)
    trainer.fit(ft.FineTune(layout, seed=5), loader, t.plain_loader(layout))
    assert_same(ft.model_part(look.at_sanity_check), pretrained)
    assert_same(ft.model_part(look.state), pretrained)
    assert not any(key.startswith("optim.state") for key in look.state)
    assert look.progress["global_step"] == 0
    assert io.restart is not None and io.restart.report is not None
    assert (io.restart.how, io.restart.path) == ("warm-started", root / "pretrained")

    # The weights that are asked for, and no others.
    model, look, initial = ft.FineTune(layout, seed=5), ft.Looks(), ft.FineTune("single", seed=5).state_dict()
    body = PartialLoad.submodule(model.net.body, source="model.net.body.")
    io = t.DCPCheckpointIO(init_from=root / "pretrained", partial=body)
    trainer = t.trainer_for(layout, [look, *t.checkpoints(root, layout, "plain")], plugin=io, max_steps=3)
    trainer.fit(model, loader)
    expected = {f"model.{key}": value for key, value in initial.items()}
    expected.update({key: value for key, value in pretrained.items() if ".body." in key})
    assert_same(ft.model_part(look.state), expected)

    # Its own checkpoint wins, and then nobody looks for the other.
    trainer.should_stop = False
    trainer.save_checkpoint(root / layout)
    saved = t.whole_state(trainer)
    io = t.DCPCheckpointIO(init_from=root / "gone", partial=body)
    look = ft.Looks()
    trainer = t.trainer_for(layout, [look], plugin=io)
    trainer.fit(ft.FineTune(layout, seed=6), loader, ckpt_path=str(root / layout))
    assert_same(look.state, saved)
    assert io.restart is not None and io.restart.report is not None
    assert (io.restart.how, io.restart.path) == ("resumed", root / layout)


def test_moments_and_messages_of_a_warm_start(tmp_path: Path) -> None:
    launch.run(_pretrain, 1, tmp_path, tmp_path)
    launch.run(_moments, 1, tmp_path)


def _moments(root: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    import dcp_plugin as dcp
    from tests.lightning import fine_tuning as ft
    from tests.lightning import training as t

    def fit(trainer: Any, path: str | None = None) -> None:
        trainer.fit(ft.FineTune(seed=5), t.plain_loader("single"), ckpt_path=path)

    # "last": nothing yet, then something.
    name = "lightning.pytorch.utilities.rank_zero"
    said = logged(name)
    for how in ("warm-started", "resumed"):
        io = t.DCPCheckpointIO(init_from=root / "pretrained")
        last = ModelCheckpoint(root / "run", save_last=True, every_n_train_steps=1)
        trainer = t.trainer_for("single", [last], plugin=io, max_steps=2 if how == "warm-started" else 4)
        logging.getLogger(name).setLevel(logging.INFO)
        fit(trainer, "last")
        assert io.restart is not None and io.restart.how == how
        assert str(io.restart) in said

    # A second fit of the same trainer goes on with what it has.
    trained = t.whole_state(trainer)
    look = ft.Looks()
    trainer.callbacks.append(look)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(trainer.lightning_module, t.plain_loader("single"))
    assert_same(ft.model_part(look.state), ft.model_part(trained))
    assert io.restart is None

    # Without anything it is an ordinary start, and an evaluation starts from nothing at all.
    io = t.DCPCheckpointIO()
    trainer = t.trainer_for("single", [ft.Looks()], plugin=io)
    fit(trainer)
    assert io.restart is not None and io.restart.how == "fresh"
    io = t.DCPCheckpointIO(init_from=root / "typo")
    trainer = t.trainer_for("single", plugin=io)
    trainer.validate(ft.FineTune(seed=5), t.plain_loader("single"), verbose=False)
    assert io.restart is None
    with pytest.raises(dcp.CheckpointNotFound, match="init_from"):
        fit(trainer)

    # A model that the pre-trained one does not fill: an error with the way out, unless it is allowed.
    def with_adapter(**options: Any) -> ft.FineTune:
        trainer = t.trainer_for("single", [ft.Looks()], plugin=t.DCPCheckpointIO(init_from=root / "pretrained"))
        model = ft.FineTune(seed=5, adapter=True)
        for name, value in options.items():
            setattr(model, name, value)
        trainer.fit(model, t.plain_loader("single"))
        return model

    with pytest.raises(dcp.CheckpointMismatch, match=r"net\.adapter\.weight is not in the checkpoint"):
        with_adapter()
    with_adapter(strict_loading=False)


def test_a_model_on_the_meta_device_is_warm_started(tmp_path: Path) -> None:
    """What ModelParallelStrategy materialises and no key of the checkpoint fills has its initial values."""
    launch.run(_pretrain, 1, tmp_path, tmp_path)
    launch.run(_meta, 2, tmp_path)


def _meta(root: Path) -> None:
    from dcp_plugin import PartialLoad
    from tests.lightning import fine_tuning as ft
    from tests.lightning import training as t

    pretrained = torch.load(root / "whole.pt", weights_only=True)
    io = t.DCPCheckpointIO(init_from=root / "pretrained", partial=PartialLoad(exclude="*.head.*"))
    look = ft.Looks()
    trainer = t.trainer_for("fsdp2", [look], plugin=io)
    trainer.fit(ft.FineTune("fsdp2", seed=5, meta=True), t.plain_loader("fsdp2"))
    loaded = {key: value for key, value in look.state.items() if key in pretrained and ".head." not in key}
    assert_same(loaded, {key: value for key, value in pretrained.items() if ".head." not in key})
    assert look.state["model.net.head.weight"].abs().max() <= 7**-0.5  # as Linear initialises it


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp1", "fsdp2"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_what_is_trained_may_change_between_two_runs(tmp_path: Path, layout: str) -> None:
    import dcp_plugin as dcp
    from tests.lightning import fine_tuning as ft
    from tests.lightning import training as t

    def fit(layout: str, model: ft.FineTune, steps: int, path: Path | None = None) -> tuple[Any, ft.Looks, list[str]]:
        look = ft.Looks(stop=False)
        trainer = t.trainer_for(layout, [look], plugin=True, max_steps=steps)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, t.plain_loader(layout), ckpt_path=path and str(path))
        said = [str(warning.message) for warning in caught if "fresh optimizer state" in str(warning.message)]
        return trainer, look, said

    for before in (True, False):
        path = tmp_path / f"{layout}-{before}"
        first, _, said = fit(layout, ft.FineTune(layout, frozen=before), 3)
        assert said == []
        first.save_checkpoint(path)
        saved = t.whole_state(first)

        second, look, said = fit(layout, ft.FineTune(layout, seed=5, frozen=not before), 6, path)
        rank_0 = torch.distributed.get_rank() == 0
        assert len(said) == (1 if rank_0 else 0)
        assert not rank_0 or ("param_groups.net.body.inp" in said[0] or "param_groups.net.body.0" in said[0])
        body = {key for key in saved if key.startswith("optim.") and ".body." in key}
        assert bool(body) is not before
        kept = {key: value for key, value in saved.items() if key not in body}
        assert_same({key: look.state[key] for key in kept}, kept)
        assert not any(key.startswith("optim.state.net.body") for key in look.state)
        assert second.global_step == 6
        trained = any(key.startswith("optim.state.net.body") for key in t.whole_state(second))
        assert trained is before, "what is trained now got optimizer state, what is not has none"

    # A parameter that the checkpoint has not at all is another thing.
    with pytest.raises(dcp.CheckpointMismatch, match=r"net\.adapter"):
        fit(layout, ft.FineTune(layout, adapter=True), 6, path)
    model = ft.FineTune(layout, adapter=True)
    model.strict_loading = False
    trainer, _, _ = fit(layout, model, 6, path)
    assert trainer.global_step == 6


@pytest.mark.one_of("trainable_only")
@pytest.mark.parametrize("trainable_only", [False, True], ids=["whole", "trainable only"])
def test_a_resumed_fine_tuning_equals_one_that_was_not_interrupted(tmp_path: Path, trainable_only: bool) -> None:
    launch.run(_pretrain, 1, tmp_path, tmp_path)
    for layout in ("ddp", "fsdp2"):
        launch.run(_fine_tune, 2, tmp_path, layout, trainable_only)
        if not trainable_only:
            shutil.move(tmp_path / "pretrained", tmp_path / "moved")
        launch.run(_resume, 2, tmp_path, layout, trainable_only)
        if not trainable_only:
            shutil.move(tmp_path / "moved", tmp_path / "pretrained")


def _fine_tune(root: Path, layout: str, trainable_only: bool) -> None:
    from tests.lightning import fine_tuning as ft
    from tests.lightning import training as t

    pretrained = torch.load(root / "whole.pt", weights_only=True)
    for steps in (6, 3):  # in one go, and as far as the interruption
        model = ft.FineTune(layout, seed=5)
        io = t.DCPCheckpointIO(init_from=root / "pretrained", trainable_only=trainable_only)
        saving = t.checkpoints(root / f"run-{layout}", layout, "stateful") if steps == 3 else []
        trainer = t.trainer_for(layout, saving, plugin=io, max_steps=steps)
        trainer.fit(model, t.stateful_loader(layout))
        if steps == 6:
            final, losses = t.whole_state(trainer), model.losses
        assert model.losses == losses[:steps]
    frozen = {key: value for key, value in final.items() if key.startswith("model.net.body.")}
    assert_same(frozen, {key: value for key, value in pretrained.items() if key in frozen})
    torch.save((losses, final), root / f"straight-{torch.distributed.get_rank()}.pt")


def _resume(root: Path, layout: str, trainable_only: bool) -> None:
    import dcp_plugin as dcp
    from tests.lightning import fine_tuning as ft
    from tests.lightning import training as t

    losses, final = torch.load(root / f"straight-{torch.distributed.get_rank()}.pt", weights_only=True)
    model = ft.FineTune(layout, seed=6)
    io = t.DCPCheckpointIO(init_from=root / "pretrained", trainable_only=trainable_only)
    trainer = t.trainer_for(layout, plugin=io)
    newest = dcp.resolve_resume("auto", root / f"run-{layout}")
    assert newest is not None
    assert bool(json.loads((newest / "dcp_plugin.json").read_text())["base"]) is trainable_only
    trainer.fit(model, t.stateful_loader(layout), ckpt_path=newest)
    assert model.losses == losses[3:]
    assert_same(t.whole_state(trainer), final)
