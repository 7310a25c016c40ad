"""One small training that the Trainer can run on a CPU in any layout, and what can be asked of it.

Functions here run on ranks that ``tests.launch`` has made; to the Trainer they look like ranks of torchrun.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import random
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from dcp_plugin.transformers import DCPTrainerMixin
from tests import layouts
from tests.accelerate.training import use_fsdp
from tests.training import as_one_process
from tests.transformers.trainer import WORLD_SIZE, Ran


class OnCPU(Trainer):
    """The Trainer with FSDP on a CPU, where Accelerate takes DDP."""

    layout = "single"

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.layout in ("fsdp1", "fsdp2", "hsdp"):
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=1 if self.layout == "fsdp1" else 2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["GPT2Block"],
            )
            use_fsdp(self.accelerator, self.layout, plugin)
            self.is_fsdp_enabled = True


class Ours(DCPTrainerMixin, OnCPU):
    pass


class Watch(TrainerCallback):
    """Notes the loss of every step, and random numbers of this rank, which are its own."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.numbers: dict[int, tuple[float, ...]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            transformers.set_seed(args.seed + args.process_index)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.numbers[state.global_step] = (torch.rand(()).item(), np.random.rand(), random.random())


def run(trainer: Any, resume: bool | str | os.PathLike[str] | None = None) -> Ran:
    """Train to the end."""
    trainer.add_callback(watch := Watch())
    trainer.train(resume_from_checkpoint=os.fspath(resume) if isinstance(resume, os.PathLike) else resume)
    return Ran(whole_state(trainer), watch.losses, watch.numbers)


class AtTrainBegin(TrainerCallback):
    """Looks at what a training starts with, and ends it before its first step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.step, self.state = trainer, -1, dict[str, Any]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        self.state = whole_state(self.trainer)
        raise Stop


class Stop(Exception):
    """The training was only begun."""


class Text(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, samples: int) -> None:
        self.ids = torch.randint(0, 32, (samples, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def model(seed: int = 0) -> PreTrainedModel:
    """Dropout (random numbers), tied weights."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))  # dropout is 0.1 by default


def trainer(
    output_dir: Path,
    layout: str = "single",
    *,
    kind: type[Trainer] = Ours,
    net: nn.Module | None = None,
    data: Any = None,
    config: Any = None,
    eval_dataset: Any = None,
    data_collator: Any = None,
    callbacks: Any = (),
    **options: Any,
) -> Any:
    """A quiet trainer of six steps, two batches each, four steps an epoch; it saves every three steps."""
    if layout == "single" and dist.is_initialized():  # as a script that torchrun has not started
        dist.destroy_process_group()
        as_one_process()
    warnings.filterwarnings("ignore", module="transformers|accelerate|peft")
    transformers.utils.logging.disable_progress_bar()
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not "cpu:0", which FSDP1 does not take
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_steps": 3,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        **options,
    }
    per_epoch = 4 * arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    own = {} if config is None else {"checkpoint_config": config}
    kind = type(kind.__name__, (kind,), {"layout": layout})
    made = kind(
        model() if net is None else net,
        TrainingArguments(str(output_dir), **arguments),
        train_dataset=data or Text(per_epoch * WORLD_SIZE[layout]),
        eval_dataset=eval_dataset,
        data_collator=data_collator,
        callbacks=list(callbacks),
        **own,
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def whole_state(trainer: Any) -> dict[str, Any]:
    """Model, optimizer and schedule by key, every tensor whole. Collective."""
    state = layouts.whole_state(trainer.model_wrapped, trainer.optimizer.optimizer)
    state |= {f"schedule.{key}": value for key, value in trainer.lr_scheduler.state_dict().items()}
    return {key: portable(value) for key, value in state.items()}


def portable(value: Any) -> Any:
    """A tensor as what can be compared, and sent to the test by a rank that ends."""
    if not isinstance(value, torch.Tensor):
        return value
    return str(value.dtype), tuple(value.shape), bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy())


def begin(trainer: Any, resume: bool | str | os.PathLike[str]) -> AtTrainBegin:
    """What a resumed training would start with. Collective."""
    trainer.add_callback(seen := AtTrainBegin(trainer))
    with suppress(Stop):
        trainer.train(resume_from_checkpoint=resume if isinstance(resume, bool) else str(resume))
    return seen
