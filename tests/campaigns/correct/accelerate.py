"""Correct scripts with Accelerate."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from dcp_plugin.accelerate import attach
from tests.campaigns.parts import adam, loss, net, samples
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
