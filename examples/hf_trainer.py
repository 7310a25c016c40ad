"""Train a small GPT-2 of transformers on the source code of Python's standard library, with checkpoints that survive
anything.

    python examples/hf_trainer.py                             # one process
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py strategy=ddp
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py strategy=fsdp2 checkpoint=sync resume=must

Stop it however you like and start it again, on another number of ranks or with another strategy:
`resume=auto` goes on from the newest checkpoint that is complete. Settings are those of configs/train.yaml.
"""

from pathlib import Path

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from stdlib_text import stdlib_source
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from dcp_plugin import resolve_resume
from dcp_plugin.transformers import DCPTrainerMixin


class MyTrainer(DCPTrainerMixin, Trainer):
    """Trainer of transformers that saves and resumes with dcp_plugin; the only addition."""


class Bytes(Dataset[dict]):
    """Text in windows of `context` bytes, each byte a token."""

    def __init__(self, *, megabytes: float, context: int) -> None:
        self.windows = stdlib_source(int(megabytes * 2**20)).unfold(0, context, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}


@hydra.main(version_base=None, config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> None:
    set_seed(cfg.seed)
    output_dir = Path(cfg.run_dir, "transformers")
    trainer = MyTrainer(
        build_model(**cfg.model),
        TrainingArguments(
            str(output_dir),
            per_device_train_batch_size=cfg.data.batch_size // (cfg.devices * cfg.nodes),
            max_steps=cfg.steps,
            learning_rate=cfg.optim.lr,
            weight_decay=cfg.optim.weight_decay,
            warmup_steps=cfg.optim.warmup,
            lr_scheduler_type="cosine",
            logging_steps=cfg.log_every,
            save_strategy="steps" if cfg.checkpoint.enabled else "no",
            save_steps=cfg.checkpoint.get("every", 1),
            save_total_limit=cfg.checkpoint.get("keep"),
            seed=cfg.seed,
            use_cpu=cfg.accelerator == "cpu",
            report_to="none",
            **choose_strategy(cfg),
        ),
        train_dataset=Bytes(megabytes=cfg.data.megabytes, context=cfg.model.context),
        checkpoint_config=instantiate(cfg.checkpoint.config),
    )
    trainer.train(resume_from_checkpoint=resolve_resume(cfg.resume, output_dir))


def build_model(*, dim: int, depth: int, heads: int, context: int, dropout: float) -> GPT2LMHeadModel:
    sizes = {"vocab_size": 256, "n_positions": context, "n_embd": dim, "n_layer": depth, "n_head": heads}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


def choose_strategy(cfg: DictConfig) -> dict:
    """Return the TrainingArguments for a kind of parallelism. torchrun sets the number of ranks."""
    match cfg.strategy.name:
        case "single" if cfg.devices * cfg.nodes > 1:
            raise SystemExit("strategy=single is for one process: take strategy=ddp or fsdp2.")
        case "single" | "ddp":
            return {}
        case "fsdp2":
            if cfg.accelerator == "cpu" or not torch.cuda.is_available():
                raise SystemExit("strategy=fsdp2 needs a GPU in transformers; strategy=ddp runs on CPUs too.")
            return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}
        case other:
            raise SystemExit(f"strategy={other} is not one of single, ddp, fsdp2")


if __name__ == "__main__":
    main()
