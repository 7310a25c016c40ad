"""Train a small GPT on the source code of Python's standard library, with checkpoints that survive any crash.

    python examples/train.py                                  # one process
    torchrun --standalone --nproc-per-node 2 examples/train.py strategy=fsdp2
    torchrun --standalone --nproc-per-node 4 examples/train.py strategy=hsdp checkpoint=sync resume=must

Stop it however you like and start it again, on another number of ranks or with another strategy:
`resume=auto` goes on from the newest checkpoint that is complete. `init_from=PATH` starts with the weights of another
model, as long as there is none.
Every setting is in configs/train.yaml; `python examples/train.py --help` prints them.
"""

import hydra
import lightning as L
import torch
from gpt import Block, LitGPT
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from omegaconf import DictConfig, OmegaConf
from stdlib_text import StdlibText

from dcp_plugin import resolve_resume
from dcp_plugin.lightning import DCPCheckpointIO


@hydra.main(version_base=None, config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> None:
    L.seed_everything(cfg.seed, verbose=False)
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values()]
    if cfg.checkpoint.enabled:
        callbacks.append(
            ModelCheckpoint(
                cfg.checkpoints,
                filename="step-{step:06d}",
                auto_insert_metric_name=False,
                every_n_train_steps=cfg.checkpoint.every,
                monitor="step",
                mode="max",
                save_top_k=cfg.checkpoint.keep,
            )
        )
    trainer = L.Trainer(
        plugins=[
            DCPCheckpointIO(
                instantiate(cfg.checkpoint.config),
                init_from=cfg.init_from,
                partial=instantiate(cfg.partial),
                storage_options=cfg.storage_options,
            )
        ],
        accelerator=cfg.accelerator,
        strategy=build_strategy(cfg),
        devices=cfg.devices,
        num_nodes=cfg.nodes,
        max_steps=cfg.steps,
        callbacks=callbacks,
        logger=CSVLogger(cfg.run_dir, name="logs", flush_logs_every_n_steps=cfg.log_every),
        log_every_n_steps=cfg.log_every,
        enable_checkpointing=cfg.checkpoint.enabled,
        enable_model_summary=False,
        use_distributed_sampler=False,  # StdlibText has its own
    )
    settings = OmegaConf.to_container(cfg, resolve=True)
    model = LitGPT(
        model=settings["model"],
        optim=settings["optim"],
        steps=cfg.steps,
        seed=cfg.seed,
        replicate=cfg.strategy.get("replicate", 1),
    )
    data = StdlibText(context=cfg.model.context, seed=cfg.seed, **cfg.data)
    trainer.fit(model, data, ckpt_path=resolve_resume(cfg.resume, cfg.checkpoints, cfg.storage_options))


def build_strategy(cfg: DictConfig) -> Strategy | str:
    ranks = cfg.devices * cfg.nodes
    match cfg.strategy.name:
        case "single":
            if ranks > 1:
                raise SystemExit(f"strategy=single is for one process, not {ranks}: take strategy=ddp or fsdp2.")
            return "auto"
        case "ddp":
            return "ddp"
        case "fsdp1":
            if cfg.accelerator == "cpu" or not torch.cuda.is_available():
                raise SystemExit("strategy=fsdp1 needs a GPU; strategy=fsdp2 shards on CPUs too.")
            return FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="sharded")
        case "fsdp2" | "hsdp":
            return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        case unknown:
            raise SystemExit(f"strategy={unknown} is not one of single, ddp, fsdp1, fsdp2, hsdp")


if __name__ == "__main__":
    main()
