"""A fine-tuning: the model of ``training.py`` with its body frozen or not, and maybe an adapter that it had not before.

Like ``training.py`` imported by ranks only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lightning import training as t


class FineTune(t.Model):
    """Only what trains is in the optimizer."""

    def __init__(
        self, layout: str = "single", seed: int = 0, *, frozen: bool = True, adapter: bool = False, meta: bool = False
    ) -> None:
        super().__init__(layout, seed)
        if adapter:
            self.net.adapter = nn.Linear(1, 1)
        self.net.body.requires_grad_(not frozen)
        if meta:
            self.net = self.net.to("meta")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("validated", self.net(batch[0]).square().mean(), sync_dist=True)


class Looks(t.AtTrainStart):
    """Also at the weights with which the sanity check runs."""

    def __init__(self, *, stop: bool = True) -> None:
        super().__init__()
        self.at_sanity_check: dict[str, Any] = {}
        self._stop = stop

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self.at_sanity_check = t.whole_state(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        trainer.should_stop = self._stop


def model_part(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.startswith("model.")}
