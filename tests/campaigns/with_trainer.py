"""What the cases of the Trainer share: a model, and a Trainer that resumes by itself."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

from dcp_plugin import latest
from dcp_plugin.transformers import DCPTrainerMixin
from tests.campaigns.parts import inputs, loss, net


class Ours(DCPTrainerMixin, Trainer):
    pass


class Model(nn.Module):
    """A network as the Trainer calls it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = net(dropout)

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        return {"loss": loss(self.net, x)}


def train(out: Path, model: Any = None, kind: type[Trainer] = Ours, data: Any = None, **options: Any) -> None:
    """Train for eight steps, three an epoch, with a checkpoint after each two, from the newest one."""
    warnings.filterwarnings("ignore", module="transformers|accelerate|peft")
    transformers.utils.logging.disable_progress_bar()
    callbacks, eval_data = options.pop("callbacks", []), options.pop("eval_data", None)
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "log_level": "error"}
    sizes = {"per_device_train_batch_size": 8, "max_steps": 8, "save_steps": 2, "logging_steps": 1}
    arguments = TrainingArguments(str(out), **{**quiet, **sizes, "learning_rate": 0.05, **options})
    data = data or [{"x": x, "labels": x.sum()} for step in range(3) for x in inputs(step)]
    parts = {"train_dataset": data, "eval_dataset": eval_data, "callbacks": callbacks}
    trainer = kind(Model() if model is None else model, arguments, **parts)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=latest(out))
