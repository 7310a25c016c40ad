"""What cannot be stored is known when the fit starts, not at the first save; hyper-parameters are never a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.launch import on_ranks
from tests.messages import warned


@on_ranks(2)
def test_what_cannot_be_stored_is_named_on_all_ranks_before_the_first_step(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    from dcp_plugin import UnsafeCheckpoint
    from tests.lightning import training as t

    class Settings(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"lock": object(), "count": 3}

    class Scheduled(t.Model):
        def configure_optimizers(self) -> Any:
            configured = super().configure_optimizers()
            configured["lr_scheduler"]["scheduler"].phase = object()
            return configured

    for layout in ("ddp", "fsdp2"):
        model = Scheduled(layout)
        trainer = t.trainer_for(layout, t.checkpoints(tmp_path, layout, "plain"))
        with pytest.raises(UnsafeCheckpoint, match=r"could not be saved: .*extra.lr_schedulers.0.phase "):
            trainer.fit(model, t.plain_loader(layout))
        assert model.losses == []

        model = t.Model(layout)
        trainer = t.trainer_for(layout, [*t.checkpoints(tmp_path, layout, "plain"), Settings()])
        with pytest.raises(UnsafeCheckpoint, match=r"extra.callbacks.*Settings.lock "):  # which only a save can show
            trainer.fit(model, t.plain_loader(layout))
        assert len(model.losses) == 3

        trainer = t.trainer_for(layout, [Settings()], plugin=True, max_steps=1)  # which saves nothing
        trainer.fit(t.Model(layout), t.plain_loader(layout))
        allowing = t.DCPCheckpointIO(allow_pickle=("extra.callbacks.*",))
        callbacks = [*t.checkpoints(tmp_path, f"{layout}-allowed", "plain"), Settings()]
        trainer = t.trainer_for(layout, callbacks, plugin=allowing, max_steps=3)
        trainer.fit(t.Model(layout), t.plain_loader(layout))
        assert (tmp_path / f"{layout}-allowed-plain" / "step=3.ckpt").exists()


@on_ranks(1)
def test_modules_and_functions_among_the_hyper_parameters_cost_nothing_but_a_warning(tmp_path: Path) -> None:
    from dcp_plugin.lightning import load_from_checkpoint
    from tests.lightning import training as t

    class Configured(t.Model):
        def __init__(self, loss: Any, encoder: Any, optimizer: Any, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    given = {
        "loss": nn.functional.mse_loss,
        "encoder": nn.Linear(2, 2),
        "optimizer": {"class": torch.optim.AdamW, "lr": 0.1},
    }

    def fit(io: Any, folder: str) -> list[str]:
        callbacks = t.checkpoints(tmp_path, folder, "plain")
        trainer = t.trainer_for("single", callbacks, plugin=io, max_steps=6)
        with warned("Not stored") as said:
            trainer.fit(Configured(**given), t.plain_loader("single"))  # type: ignore[arg-type]
        return said

    (said,) = fit(t.DCPCheckpointIO(), "without")
    for name in ("hyper_parameters.encoder", "hyper_parameters.loss", "hyper_parameters.optimizer.class"):
        assert name in said
    path = tmp_path / "without-plain" / "step=3.ckpt"
    stored = t.DCPCheckpointIO().load_checkpoint(path)
    assert stored["hyper_parameters"] == {"optimizer": {"lr": 0.1}, "width": 3}
    loaded = load_from_checkpoint(Configured, path, loss=given["loss"], encoder=given["encoder"])
    assert loaded.hparams.width == 3
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'loss' and 'encoder'"):
        load_from_checkpoint(Configured, path)

    (said,) = fit(t.DCPCheckpointIO(allow_pickle=("extra.hyper_parameters.*",)), "with")
    assert "hyper_parameters.loss" not in said
    path = tmp_path / "with-plain" / "step=3.ckpt"
    loaded = load_from_checkpoint(Configured, path, weights_only=False, encoder=given["encoder"])
    assert loaded.hparams.loss is nn.functional.mse_loss
    assert loaded.hparams.optimizer == given["optimizer"]
