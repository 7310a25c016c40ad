"""A training with all that makes an optimizer's state hard to number, without this package.

Manual optimization of two optimizers; groups with equal settings; parameters in another order than the model's; a
frozen one in a group; a callback with a state. Run as a module on each rank, it resumes with stock Lightning, in a
process that cannot import this package: ``python -m tests.lightning.two_optimizers LAYOUT CHECKPOINT OUT …``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.lightning import stock_training as stock


class TwoOptimizers(pl.LightningModule):
    """Nothing random, since stock Lightning saves no random state."""

    def __init__(self, layout: str = "single", seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        torch.manual_seed(seed)
        self.layout = layout
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 7), nn.Linear(7, 1))
        self.net[0].requires_grad_(False)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.layout == "fsdp2":
            fully_shard(self.net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        loss = self.net(batch[0]).square().mean()
        both: Any = self.optimizers()
        for optimizer in both:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in both:
            optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        self.losses.append(loss.item())

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


def fit(
    layout: str, epochs: int, seed: int = 0, ckpt_path: Any = None, callbacks: Any = (), plugins: Any = None
) -> Any:
    """Train; the trainer, the model and the callback."""
    counts = Counts()
    trainer, model = stock.fit(layout, epochs, seed, ckpt_path, [counts, *callbacks], plugins, TwoOptimizers)
    return trainer, model, counts


def outputs(model: TwoOptimizers) -> list[float]:
    with torch.no_grad():
        found: list[float] = model.net(torch.arange(24.0).reshape(4, 6)).flatten().tolist()
    return found


def resume(layout: str, checkpoint: Path, out: Path) -> None:
    _, model, counts = fit(layout, 2, seed=5, ckpt_path=checkpoint)
    said = {"losses": model.losses, "batches": counts.batches, "sums": counts.sums.tolist()}
    if dist.get_rank() == 0:
        loaded = TwoOptimizers.load_from_checkpoint(checkpoint, layout="single")
        out.write_text(json.dumps({**said, "outputs": outputs(loaded)}))


if __name__ == "__main__":
    stock.main(resume)
