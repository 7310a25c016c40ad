"""Correct scripts with the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from tests.campaigns.parts import inputs
from tests.campaigns.with_trainer import Model, train


def language_model(out: Path) -> None:
    """A GPT-2 with tied weights and dropout, accumulation, warm-up and a cosine."""
    more: dict[str, Any] = {"gradient_accumulation_steps": 2, "warmup_steps": 2, "lr_scheduler_type": "cosine"}
    train(out, _gpt2(), data=_text(), per_device_train_batch_size=2, callbacks=[_Evaluates()], **more)


def adapters(out: Path) -> None:
    """LoRA on a frozen model: a checkpoint has the adapters alone."""
    model = get_peft_model(_gpt2(), LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))
    train(out, model, data=_text(), per_device_train_batch_size=4, label_names=["labels"])


def best_model_at_the_end(out: Path) -> None:
    """Evaluations beside the checkpoints, of which the best is loaded at the end, and a plateau lowers the rate."""
    follows: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    schedule: dict[str, Any] = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}}
    train(out, Model(dropout=0.5), eval_data=[{"x": x, "labels": x.sum()} for x in inputs(9)], **follows, **schedule)


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def _text() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 32, (12, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": line, "labels": line} for line in ids]


class _Evaluates(TrainerCallback):
    """Looks at the model before the training begins, as a generation of samples does."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"].eval()
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.int64))
        model.train()
