"""Lazy staging with whatever writes weights between two steps: every checkpoint is the state at its call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    Callback,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from dcp_plugin.lightning import DCPCheckpointIO
from tests.compare import same_tree
from tests.lightning import LIGHTNING
from tests.lightning import training as t
from tests.places import names_in
from tests.slowness import at_random, slow_copies

AVERAGES = ["averages"] if LIGHTNING >= (2, 6) else []  # Lightning 2.5 has no EMAWeightAveraging


def _soil(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.5)


class _WritesInHooks(Callback):
    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        _soil(module)

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        _soil(module)


class _Validated(t.Model):
    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.net(batch[0])


class _WritesAfterTheSave(_Validated):
    def on_train_batch_end(self, *args: Any) -> None:
        _soil(self)


class _SavesByItself(Callback):
    """And writes as soon as that returns."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.root / f"own-{trainer.global_step}.ckpt")
        _soil(module)


def _callbacks(writer: str, root: Path) -> list[Any]:
    return {
        "averages": lambda: [callbacks.EMAWeightAveraging(decay=0.5)],
        "swa": lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)],
        "callback": lambda: [_WritesInHooks()],
        "lambda": lambda: [LambdaCallback(on_train_batch_start=lambda trainer, module, *args: _soil(module))],
        "module": list,
        "by hand": lambda: [_SavesByItself(root)],
    }[writer]()  # type: ignore[no-any-return]


def _fit(writer: str, root: Path, **config: Any) -> Any:
    io = DCPCheckpointIO(**config)
    saving = ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=False)
    model = _WritesAfterTheSave() if writer == "module" else _Validated()
    trainer = t.trainer_for(
        "single", [*_callbacks(writer, root), saving], plugin=io, max_steps=-1, max_epochs=2, val_check_interval=1
    )
    trainer.fit(model, t.plain_loader("single"), t.plain_loader("single"))
    return io


@pytest.mark.one_of
@pytest.mark.parametrize("writer", [*AVERAGES, "swa", "callback", "lambda", "module", "by hand"])
def test_a_lazy_checkpoint_is_the_state_at_its_call_whoever_writes_weights(writer: str, tmp_path: Path) -> None:
    expected = _fit(writer, tmp_path / "expected")
    with slow_copies(at_random(0.002)):
        ours = _fit(writer, tmp_path / "lazy", async_save=True, staging="lazy")
    names = names_in(tmp_path / "expected")
    assert len(names) > 5 and names == names_in(tmp_path / "lazy")
    for name in names:
        one = expected.load_checkpoint(tmp_path / "expected" / name)
        other = ours.load_checkpoint(tmp_path / "lazy" / name)
        assert ("current_model_state" in one) == (writer == "averages")
        for part in ("state_dict", "optimizer_states", *(["current_model_state"] if writer == "averages" else [])):
            assert same_tree(one[part], other[part]), part
