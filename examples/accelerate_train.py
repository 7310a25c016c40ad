"""The training of train.py as an explicit loop with Accelerate: the same model, text and settings.

    python examples/accelerate_train.py                       # one process
    torchrun --standalone --nproc-per-node 2 examples/accelerate_train.py strategy=fsdp2
    torchrun --standalone --nproc-per-node 4 examples/accelerate_train.py strategy=hsdp checkpoint=sync resume=must

Stop it however you like and start it again, on another number of ranks or with another strategy.
`attach(accelerator)` is the one line that was added; everything else is plain Accelerate.
"""

import hydra
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from gpt import GPT, shard, warmup_then_cosine
from hydra.utils import instantiate
from omegaconf import DictConfig
from stdlib_text import Windows, stdlib_source
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from dcp_plugin.accelerate import attach


class Progress:
    """Counters of the loop."""

    step = 0

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]


@hydra.main(version_base=None, config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> None:
    accelerator = Accelerator(
        cpu=cfg.accelerator == "cpu",
        # Batches of all ranks together, in an order that the seed gives, from a loader that knows its position.
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=cfg.seed, use_stateful_dataloader=True
        ),
    )
    keep = cfg.checkpoint.get("keep", -1)
    checkpoints = attach(
        accelerator,
        instantiate(cfg.checkpoint.config),
        keep_last=keep if keep > 0 else None,
        storage_options=cfg.storage_options,
    )

    torch.manual_seed(cfg.seed)  # every rank starts with the same weights
    model, optimizer = prepare(cfg, accelerator, GPT(**cfg.model))
    torch.manual_seed(cfg.seed + 1 + accelerator.process_index)  # and drops out different activations
    schedule = accelerator.prepare(
        LambdaLR(optimizer, lambda step: warmup_then_cosine(step, cfg.optim.warmup, cfg.steps))
    )
    text = Windows(stdlib_source(int(cfg.data.megabytes * 2**20)), cfg.model.context)
    loader = accelerator.prepare(DataLoader(text, batch_size=cfg.data.batch_size, shuffle=True, drop_last=True))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    start = checkpoints.resume_or_init(
        cfg.checkpoints, resume=cfg.resume, init_from=cfg.init_from, partial=instantiate(cfg.partial)
    )
    accelerator.print(start)
    while progress.step < cfg.steps:
        for windows in loader:
            loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % cfg.log_every == 0:
                accelerator.print(f"step {progress.step} loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
            if cfg.checkpoint.enabled and progress.step % cfg.checkpoint.every == 0:
                accelerator.save_state(f"{cfg.checkpoints}/step-{progress.step:06d}")
            if progress.step == cfg.steps:
                break
    checkpoints.wait()


def prepare(cfg: DictConfig, accelerator: Accelerator, gpt: GPT) -> tuple:
    """Return the prepared model and optimizer. Accelerate's FSDP needs a GPU; an explicit fully_shard does not."""
    ranks, shards = accelerator.num_processes, cfg.strategy.name in ("fsdp2", "hsdp")
    if cfg.strategy.name == "single" and ranks > 1:
        raise SystemExit(f"strategy=single is for one process, not {ranks}: take strategy=ddp or fsdp2.")
    if not shards and cfg.strategy.name not in ("single", "ddp"):
        raise SystemExit(f"strategy={cfg.strategy.name} is not one of single, ddp, fsdp2, hsdp")
    if shards:
        replicas = cfg.strategy.get("replicate", 1)
        shape, names = (replicas, ranks // replicas), ("replicate", "shard")
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
        gpt = shard(gpt.to(accelerator.device), mesh if replicas > 1 else mesh["shard"])
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay)
    # evaluation_mode: the model is sharded, and Accelerate must not wrap it in DDP
    model = accelerator.prepare_model(gpt, device_placement=not shards, evaluation_mode=shards)
    return model.train(), accelerator.prepare_optimizer(optimizer, device_placement=not shards)


if __name__ == "__main__":
    main()
