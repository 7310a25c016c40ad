"""Bugs of scripts with Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

from dcp_plugin.accelerate import attach
from tests.campaigns.parts import STEPS, adam, loss, net, samples, update
from tests.objects import Holder


def data_repeated(out: Path) -> None:
    """A resume in the middle of an epoch begins the epoch again, since no batch is skipped.

    https://github.com/huggingface/accelerate/issues/1130, https://github.com/hiyouga/EasyR1/issues/57
    """
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    checkpoints = attach(accelerator)
    model = net()
    loader = DataLoader(samples(18), batch_size=6)
    model, optimizer, loader = accelerator.prepare(model, adam(model), loader)
    progress = Holder({"step": 0})
    accelerator.register_for_checkpointing(progress)
    checkpoints.resume_or_init(out)
    while progress.state["step"] < STEPS:
        for (x,) in loader:  # the bug: accelerator.skip_first_batches(loader, step % len(loader))
            update(model, optimizer, x)
            progress.state["step"] += 1
            if progress.state["step"] % 2 == 0:
                accelerator.save_state(out / f"step_{progress.state['step']}")
            if progress.state["step"] == STEPS:
                break


def batches_skipped_in_each_epoch(out: Path) -> None:
    """The batches before the checkpoint are skipped in the epochs after it, too.

    https://github.com/allenai/open-instruct/pull/681, https://github.com/huggingface/accelerate/issues/1451
    """
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    checkpoints = attach(accelerator)
    model = net()
    loader = DataLoader(samples(18), batch_size=6)
    model, optimizer, loader = accelerator.prepare(model, adam(model), loader)
    progress = Holder({"step": 0})
    accelerator.register_for_checkpointing(progress)
    checkpoints.resume_or_init(out)
    loader = accelerator.skip_first_batches(loader, progress.state["step"] % 3)  # the bug: for all epochs
    while progress.state["step"] < STEPS:
        for (x,) in loader:
            update(model, optimizer, x)
            progress.state["step"] += 1
            if progress.state["step"] % 2 == 0:
                accelerator.save_state(out / f"step_{progress.state['step']}")
            if progress.state["step"] == STEPS:
                break


def adapter_not_saved(out: Path) -> None:
    """The adapter is not prepared, so a checkpoint has the weights that it was trained with, but not its own.

    https://github.com/huggingface/diffusers/issues/12689
    """
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    checkpoints = attach(accelerator)
    base = net()
    adapter: Any = nn.Linear(4, 4)
    torch.nn.init.eye_(adapter.weight)
    optimizer = torch.optim.SGD([*base.parameters(), *adapter.parameters()], 0.05)
    base = accelerator.prepare(base)  # the bug: neither the adapter nor its optimizer
    progress = Holder({"step": 0})
    accelerator.register_for_checkpointing(progress)
    checkpoints.resume_or_init(out)
    for step in range(progress.state["step"], STEPS):
        optimizer.zero_grad()
        accelerator.backward(loss(nn.Sequential(adapter, base), samples()[step : step + 6][0]))
        optimizer.step()
        progress.state["step"] += 1
        if progress.state["step"] % 2 == 0:
            accelerator.save_state(out / f"step_{progress.state['step']}")
