"""Correct loops with Fabric."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.fabric import Fabric
from torchdata.stateful_dataloader import StatefulDataLoader

from dcp_plugin.fabric import attach
from tests.campaigns.parts import STEPS, adam, loss, net, samples


def loop(out: Path) -> None:
    """A loop with dropout, a schedule and a stateful loader."""
    fabric = Fabric(accelerator="cpu", devices=1)
    checkpoints = attach(fabric)
    fabric.seed_everything(0, verbose=False)
    model = net(dropout=0.5)
    model, optimizer = fabric.setup(model, adam(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = fabric.setup_dataloaders(StatefulDataLoader(samples(24), batch_size=4, shuffle=True))
    state = {"model": model, "optim": optimizer, "schedule": schedule, "loader": loader, "step": 0}
    checkpoints.resume_or_init(state, out)
    for (x,) in loader:
        optimizer.zero_grad()
        fabric.backward(loss(model, x))
        optimizer.step()
        schedule.step()
        state["step"] += 1
        if state["step"] % 2 == 0:
            fabric.save(out / f"step-{state['step']}", state)
        if state["step"] == STEPS:
            break
    checkpoints.wait()
