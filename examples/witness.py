"""Lightning callbacks of the demonstration: a record of saves and restores, and two that end a life.

The witness does not trust the library it watches: it asks the live model and optimizer for their whole
tensors, when a checkpoint is written and again after one was restored, and keeps a SHA-256 of each in a file
of its own.
"""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcp_plugin import events


class Witness(L.Callback):
    """Callback that writes `saved-STEP.json` with every save and `restored-STEP.json` after every restore."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict) -> None:
        self.testify(trainer, "saved")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path:
            self.testify(trainer, "restored")

    def testify(self, trainer: L.Trainer, event: str) -> None:
        tensors = {name: digest(whole(tensor)) for name, tensor in sorted(live_tensors(trainer))}
        if trainer.is_global_zero:
            statement = {"step": trainer.global_step, "ranks": trainer.world_size, "tensors": tensors}
            self.folder.mkdir(parents=True, exist_ok=True)
            Path(self.folder, f"{event}-{trainer.global_step:06d}.json").write_text(json.dumps(statement))


def live_tensors(trainer: L.Trainer) -> Iterator[tuple[str, Tensor]]:
    module = trainer.lightning_module
    names = {parameter: name for name, parameter in module.named_parameters()}
    yield from ((f"model.{name}", parameter) for parameter, name in names.items())
    yield from ((f"model.{name}", buffer) for name, buffer in module.named_buffers())
    for optimizer in trainer.optimizers:
        for parameter, slots in optimizer.state.items():
            yield from ((f"optim.{names[parameter]}.{slot}", value) for slot, value in slots.items())


def whole(tensor: Tensor) -> Tensor:
    """Return the complete tensor on this rank. For a sharded tensor this is collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def digest(tensor: Tensor) -> dict[str, str | int]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    sha256 = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    sha256.update(data)
    return {"sha256": sha256.hexdigest(), "bytes": data.nbytes}


class PowerCut(L.Callback):
    """Callback that sends SIGKILL, which no process can catch, when half of the checkpoint of `step` is written."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.target: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        events.subscribe(self.watch)

    def watch(self, event: events.Event) -> None:
        match event:
            case events.SaveStarted(path=path, step=self.step):
                self.target = path
            case events.BytesWritten(path=self.target) if 2 * event.written >= event.total:
                os.kill(os.getpid(), signal.SIGKILL)


class StopAt(L.Callback):
    """Callback that ends the training after `step`, as the time limit of a job queue does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        trainer.should_stop = trainer.global_step >= self.step
