"""Fine-tune the GPT that train.py has trained: LoRA on its attention, all other parameters frozen.

    python examples/finetune.py init_from=outputs/train/checkpoints/step-002000.ckpt
    torchrun --standalone --nproc-per-node 2 examples/finetune.py strategy=fsdp2 init_from=...

The same command starts it and, however it was stopped, restarts it. With `checkpoint.config.trainable_only=true` the
checkpoints have only what trains, and each start loads `init_from` first. Every setting is in configs/finetune.yaml.
"""

import hydra
import lightning as L
import torch
import torch.nn.functional as F
from gpt import GPT, LitGPT
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from stdlib_text import StdlibText
from torch import Tensor, nn
from train import build_strategy

from dcp_plugin import resolve_resume
from dcp_plugin.lightning import DCPCheckpointIO


class LoRA(nn.Linear):
    """Linear layer with a trained low-rank part. The names of its own weights do not change."""

    def __init__(self, like: nn.Linear, rank: int) -> None:
        super().__init__(like.in_features, like.out_features)
        self.lora_a = nn.Parameter(torch.randn(rank, like.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(like.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class LitLoRA(LitGPT):
    def __init__(self, *, rank: int, **settings) -> None:
        super().__init__(**settings)
        self.rank = rank

    def build(self) -> GPT:
        gpt = super().build()
        for block in gpt.blocks:
            block.qkv = LoRA(block.qkv, self.rank)
        for name, parameter in gpt.named_parameters():
            parameter.requires_grad_("lora_" in name)
        return gpt


@hydra.main(version_base=None, config_path="../configs", config_name="finetune")
def main(cfg: DictConfig) -> None:
    if cfg.init_from is None:  # `???` has no effect here: the value of train.yaml would stay
        raise SystemExit("init_from=PATH is missing: the checkpoint of the model that is fine-tuned.")
    L.seed_everything(cfg.seed, verbose=False)
    trainer = L.Trainer(
        plugins=[
            DCPCheckpointIO(
                instantiate(cfg.checkpoint.config),
                init_from=cfg.init_from,
                storage_options=cfg.storage_options,
                partial=instantiate(cfg.partial),
            )
        ],
        accelerator=cfg.accelerator,
        strategy=build_strategy(cfg),
        devices=cfg.devices,
        num_nodes=cfg.nodes,
        max_steps=cfg.steps,
        callbacks=[
            ModelCheckpoint(
                cfg.checkpoints,
                filename="step-{step:06d}",
                auto_insert_metric_name=False,
                every_n_train_steps=cfg.checkpoint.every,
                monitor="step",
                mode="max",
                save_top_k=cfg.checkpoint.keep,
            )
        ],
        logger=CSVLogger(cfg.run_dir, name="logs", flush_logs_every_n_steps=cfg.log_every),
        log_every_n_steps=cfg.log_every,
        enable_model_summary=False,
        use_distributed_sampler=False,  # StdlibText has its own
    )
    settings = OmegaConf.to_container(cfg, resolve=True)
    model = LitLoRA(
        rank=cfg.lora.rank,
        model=settings["model"],
        optim=settings["optim"],
        steps=cfg.steps,
        seed=cfg.seed,
        replicate=cfg.strategy.get("replicate", 1),
    )
    data = StdlibText(context=cfg.model.context, seed=cfg.seed, **cfg.data)
    trainer.fit(model, data, ckpt_path=resolve_resume(cfg.resume, cfg.checkpoints, cfg.storage_options))


if __name__ == "__main__":
    main()
