"""A training with all that makes an optimizer's state hard to number, with Lightning alone.

Manual optimization of two optimizers; groups with equal settings; parameters in another order than the model's; a
frozen one in a group; a callback with a state. ``tests/lightning/stock_processes.py`` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from tests.lightning import stock_training as stock


class TwoOptimizers(stock.StockModel):
    """Nothing random, since stock Lightning saves no random state."""

    def __init__(self, layout: str = "single", seed: int = 0) -> None:
        super().__init__(layout, seed)
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        both: Any = self.optimizers()
        for optimizer in both:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in both:
            optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]

    def configure_optimizers(self) -> Any:
        first, second, third = self.net
        groups = [{"params": [third.weight, second.weight]}, {"params": [second.bias]}]
        one = torch.optim.AdamW(groups, lr=0.01)
        other = torch.optim.SGD([third.bias, first.weight, first.bias], lr=0.02, momentum=0.9)
        return [one, other], [torch.optim.lr_scheduler.StepLR(one, 2)]


class Counts(Callback):
    """A callback with a state: a number, and a tensor."""

    def __init__(self) -> None:
        self.batches, self.sums = 0, torch.zeros(2)

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1
        self.sums += 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "sums": self.sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches, self.sums = state_dict["batches"], state_dict["sums"]


def fit(layout: str, epochs: int, callbacks: Sequence[Callback] = (), **options: Any) -> tuple[Any, dict[str, Any]]:
    """Train; the trainer, and what the test compares."""
    counts = Counts()
    trainer, model = stock.fit(layout, epochs, callbacks=[counts, *callbacks], kind=TwoOptimizers, **options)
    return trainer, {"losses": model.losses, "batches": counts.batches, "sums": counts.sums.tolist()}


def outputs(model: TwoOptimizers) -> list[float]:
    with torch.no_grad():
        found: list[float] = model.net(torch.arange(24.0).reshape(4, 6)).flatten().tolist()
    return found


def resume(layout: str, checkpoint: Path) -> dict[str, Any]:
    _, results = fit(layout, 2, seed=5, ckpt_path=checkpoint)
    return {**results, "outputs": outputs(TwoOptimizers.load_from_checkpoint(checkpoint, layout="single"))}
