"""``DCPCheckpointIO(init_from=...)``: a fit without a checkpoint of its own starts with another's weights.

And what was frozen when a checkpoint was made may be trained now, and the other way round.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_plugin.core.paths import Where, as_path
from tests import launch
from tests.compare import assert_same, weights_of
from tests.launch import on_ranks
from tests.lives import read, write
from tests.messages import logged, warned
from tests.object_server import Bucket
from tests.places import copy_folder
from tests.training import WORLD_SIZE

ON_TWO_RANKS = ("ddp", "fsdp1", "fsdp2")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and beside it the weights that are in it."""
    root = tmp_path_factory.mktemp("pretrained")
    launch.run(_pretrain, 1, root)
    return root / "checkpoint"


def _pretrain(root: Path) -> None:
    from tests.lightning import training as t

    state = t.saved("single", root / "checkpoint", t.Model(seed=3), max_steps=2)
    torch.save(weights_of(state), root / "weights.pt")


def _weights(pretrained: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = torch.load(pretrained.with_name("weights.pt"), weights_only=True)
    return weights


@pytest.mark.one_of
@pytest.mark.parametrize("layout", WORLD_SIZE)
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_a_fit_starts_with_the_weights_of_init_from_or_with_its_own_checkpoint(
    tmp_path: Path, pretrained: Path, layout: str
) -> None:
    _start(tmp_path, pretrained, _weights(pretrained), layout)


@pytest.mark.parametrize("layout", ["single", *(pytest.param(name, marks=pytest.mark.long) for name in ON_TWO_RANKS)])
def test_a_fit_on_a_bucket_starts_like_one_on_a_disk(pretrained: Path, bucket: Bucket, layout: str) -> None:
    place = as_path(bucket.url) / "run"
    copy_folder(pretrained, place / "pretrained")
    launch.run(_start, WORLD_SIZE[layout], place, place / "pretrained", _weights(pretrained), layout)


def _start(root: Where, pretrained: Where, weights: dict[str, torch.Tensor], layout: str) -> None:
    from dcp_plugin import PartialLoad
    from tests.lightning import training as t

    io = t.DCPCheckpointIO(init_from=pretrained)
    look, loader = t.AtTrainStart(), t.plain_loader(layout)
    trainer = t.trainer_for(layout, [look], plugin=io)
    trainer.fit(t.FineTune(layout, seed=5), loader, t.plain_loader(layout))
    assert_same(weights_of(look.at_sanity_check), weights)
    assert_same(weights_of(look.state), weights)
    assert not any(key.startswith("optim.state") for key in look.state)
    assert look.progress["global_step"] == 0
    assert io.started is not None and io.started.report is not None
    assert (io.started.how, io.started.path) == ("warm-started", pretrained)

    # The weights that are asked for, and no others.
    model, look, initial = t.FineTune(layout, seed=5), t.AtTrainStart(), t.FineTune("single", seed=5).state_dict()
    body = PartialLoad.submodule(model.net.body, source="model.net.body.")
    io = t.DCPCheckpointIO(init_from=pretrained, partial=body)
    trainer = t.trainer_for(layout, [look, *t.checkpoints(root, layout, "plain")], plugin=io, max_steps=3)
    trainer.fit(model, loader)
    expected = {**initial, **{key: value for key, value in weights.items() if ".body." in key}}
    assert_same(weights_of(look.state), expected)

    # Its own checkpoint wins, and then nobody looks for the other.
    trainer.should_stop = False
    trainer.save_checkpoint(root / layout)
    saved = t.whole_state(trainer)
    io = t.DCPCheckpointIO(init_from=root / "gone", partial=body)
    assert_same(t.resumed(layout, str(root / layout), t.FineTune(layout, seed=6), plugin=io).state, saved)
    assert io.started is not None and io.started.report is not None
    assert (io.started.how, io.started.path) == ("resumed", root / layout)


@on_ranks(1)
def test_moments_and_messages_of_a_warm_start(tmp_path: Path, pretrained: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    import dcp_plugin as dcp
    from tests.lightning import training as t

    def fit(trainer: Any, path: str | None = None) -> None:
        trainer.fit(t.FineTune(seed=5), t.plain_loader("single"), ckpt_path=path)

    # "last": nothing yet, then something.
    name = "lightning.pytorch.utilities.rank_zero"
    said = logged(name)
    for how in ("warm-started", "resumed"):
        io = t.DCPCheckpointIO(init_from=pretrained)
        last = ModelCheckpoint(tmp_path / "run", save_last=True, every_n_train_steps=1)
        trainer = t.trainer_for("single", [last], plugin=io, max_steps=2 if how == "warm-started" else 4)
        logging.getLogger(name).setLevel(logging.INFO)
        fit(trainer, "last")
        assert io.started is not None and io.started.how == how
        assert str(io.started) in said

    # A second fit of the same trainer goes on with what it has.
    trained = t.whole_state(trainer)
    look = t.AtTrainStart()
    trainer.callbacks.append(look)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(trainer.lightning_module, t.plain_loader("single"))
    assert_same(weights_of(look.state), weights_of(trained))
    assert io.started is None

    # Without anything it is an ordinary start, and an evaluation starts from nothing at all.
    io = t.DCPCheckpointIO()
    trainer = t.trainer_for("single", [t.AtTrainStart()], plugin=io)
    fit(trainer)
    assert io.started is not None and io.started.how == "fresh"
    io = t.DCPCheckpointIO(init_from=tmp_path / "typo")
    trainer = t.trainer_for("single", plugin=io)
    trainer.validate(t.FineTune(seed=5), t.plain_loader("single"), verbose=False)
    assert io.started is None
    with pytest.raises(dcp.CheckpointNotFound, match="init_from"):
        fit(trainer)

    # A model that the pre-trained one does not fill: an error with the way out, unless it is allowed.
    def with_adapter(**options: Any) -> t.FineTune:
        trainer = t.trainer_for("single", [t.AtTrainStart()], plugin=t.DCPCheckpointIO(init_from=pretrained))
        model = t.FineTune(seed=5, adapter=True)
        for name, value in options.items():
            setattr(model, name, value)
        trainer.fit(model, t.plain_loader("single"))
        return model

    with pytest.raises(dcp.CheckpointMismatch, match=r"net\.adapter\.weight is not in the checkpoint"):
        with_adapter()
    with_adapter(strict_loading=False)


@on_ranks(2)
def test_a_model_on_the_meta_device_is_warm_started(pretrained: Path) -> None:
    """What ModelParallelStrategy materialises and no key of the checkpoint fills has its initial values."""
    from dcp_plugin import PartialLoad
    from tests.lightning import training as t

    io = t.DCPCheckpointIO(init_from=pretrained, partial=PartialLoad(exclude="*.head.*"))
    look = t.AtTrainStart()
    trainer = t.trainer_for("fsdp2", [look], plugin=io)
    trainer.fit(t.FineTune("fsdp2", seed=5, meta=True), t.plain_loader("fsdp2"))
    expected = {key: value for key, value in _weights(pretrained).items() if ".head." not in key}
    loaded = weights_of(look.state)
    assert_same({key: loaded[key] for key in expected}, expected)
    assert loaded["net.head.weight"].abs().max() <= 7**-0.5  # as Linear initialises it


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp1", "fsdp2"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_what_is_trained_may_change_between_two_runs(tmp_path: Path, layout: str) -> None:
    import dcp_plugin as dcp
    from tests.lightning import training as t

    def fit(
        layout: str, model: t.FineTune, steps: int, path: Path | None = None
    ) -> tuple[Any, t.AtTrainStart, list[str]]:
        look = t.AtTrainStart(stop=False)
        trainer = t.trainer_for(layout, [look], plugin=True, max_steps=steps)
        with warned("fresh optimizer state") as said:
            trainer.fit(model, t.plain_loader(layout), ckpt_path=path and str(path))
        return trainer, look, said

    for before in (True, False):
        path = tmp_path / f"{layout}-{before}"
        first, _, said = fit(layout, t.FineTune(layout, frozen=before), 3)
        assert said == []
        first.save_checkpoint(path)
        saved = t.whole_state(first)

        second, look, said = fit(layout, t.FineTune(layout, seed=5, frozen=not before), 6, path)
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
        fit(layout, t.FineTune(layout, adapter=True), 6, path)
    model = t.FineTune(layout, adapter=True)
    model.strict_loading = False
    trainer, _, _ = fit(layout, model, 6, path)
    assert trainer.global_step == 6


@pytest.mark.one_of("trainable_only")
@pytest.mark.parametrize("trainable_only", [False, True], ids=["whole", "trainable only"])
def test_a_resumed_fine_tuning_equals_one_that_was_not_interrupted(
    tmp_path: Path, pretrained: Path, trainable_only: bool
) -> None:
    for layout in ("ddp", "fsdp2"):
        launch.run(_fine_tune, 2, tmp_path, pretrained, layout, trainable_only)
        # A complete checkpoint never reads it.
        launch.run(_resume, 2, tmp_path, pretrained if trainable_only else tmp_path / "gone", layout, trainable_only)


def _fine_tune(root: Path, pretrained: Path, layout: str, trainable_only: bool) -> None:
    from tests.lightning import training as t

    for steps in (6, 3):  # in one go, and as far as the interruption
        model = t.FineTune(layout, seed=5)
        io = t.DCPCheckpointIO(init_from=pretrained, trainable_only=trainable_only)
        saving = t.checkpoints(root / f"run-{layout}", layout, "stateful") if steps == 3 else []
        trainer = t.trainer_for(layout, saving, plugin=io, max_steps=steps)
        trainer.fit(model, t.stateful_loader(layout))
        if steps == 6:
            final, losses = t.whole_state(trainer), model.losses
        assert model.losses == losses[:steps]
    frozen = {key: value for key, value in weights_of(final).items() if key.startswith("net.body.")}
    assert_same(frozen, {key: value for key, value in _weights(pretrained).items() if key in frozen})
    write(root, f"straight-{layout}", losses, final)


def _resume(root: Path, pretrained: Path, layout: str, trainable_only: bool) -> None:
    import dcp_plugin as dcp
    from tests.lightning import training as t

    losses, final = read(root, f"straight-{layout}", torch.distributed.get_rank())
    model = t.FineTune(layout, seed=6)
    trainer = t.trainer_for(layout, plugin=t.DCPCheckpointIO(init_from=pretrained, trainable_only=trainable_only))
    newest = dcp.resolve_resume("auto", root / f"run-{layout}")
    assert newest is not None
    assert bool(json.loads((newest / "dcp_plugin.json").read_text())["base"]) is trainable_only
    trainer.fit(model, t.stateful_loader(layout), ckpt_path=newest)
    assert model.losses == losses[3:]
    assert_same(t.whole_state(trainer), final)
