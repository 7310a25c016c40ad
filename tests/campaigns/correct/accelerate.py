"""Correct scripts with Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from dcp_plugin.accelerate import attach
from tests.campaigns.parts import STEPS, Average, adam, inputs, loss, net, samples, update
from tests.objects import Holder


def accumulated(out: Path) -> None:
    """Accumulation over two batches, a schedule, dropout, and an epoch that goes on in its middle."""
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    checkpoints = attach(accelerator)
    model = net(dropout=0.5)
    optimizer = adam(model)
    loader = DataLoader(samples(24), batch_size=4)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    progress = Holder({"batch": 0})
    accelerator.register_for_checkpointing(progress)
    checkpoints.resume_or_init(out)
    while progress.state["batch"] < 12:
        for (x,) in accelerator.skip_first_batches(loader, progress.state["batch"] % len(loader)):
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, x))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            progress.state["batch"] += 1
            if progress.state["batch"] % 4 == 0:
                accelerator.save_state(out / f"step_{progress.state['batch']}")
    accelerator.end_training()


def hooks_of_diffusers(out: Path) -> None:
    """Hooks save and load a model on their own, as scripts of diffusers do, and a moving average is registered."""
    accelerator = Accelerator(cpu=True)
    checkpoints = attach(accelerator)
    model: Any = net()
    average = Average(model)
    model, optimizer = accelerator.prepare(model, adam(model))

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        torch.save(models[0].state_dict(), f"{folder}/own.pt")
        weights.pop()

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(f"{folder}/own.pt"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    progress = Holder({"step": 0})
    accelerator.register_for_checkpointing(progress, average)
    checkpoints.resume_or_init(out)
    for step in range(progress.state["step"], STEPS):
        update(model, optimizer, inputs(step))
        average.follow(model)
        progress.state["step"] = step + 1
        accelerator.save_state(out / f"step_{step + 1}")
    accelerator.end_training()
