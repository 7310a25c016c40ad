"""The training of train.py as an explicit loop over Lightning Fabric: the same model, text and settings.

    python examples/fabric_train.py                           # one process
    torchrun --standalone --nproc-per-node 2 examples/fabric_train.py strategy=fsdp2
    torchrun --standalone --nproc-per-node 4 examples/fabric_train.py strategy=hsdp checkpoint=sync resume=must

Stop it however you like and start it again, on another number of ranks or with another strategy.
`attach(fabric)` is the one line that has all ranks save and load; everything else is plain Fabric.
"""

from functools import partial

import hydra
import torch
import torch.nn.functional as F
from gpt import GPT, Block, shard, warmup_then_cosine
from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from omegaconf import DictConfig
from stdlib_text import StdlibText
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LambdaLR
from torchdata.stateful_dataloader import StatefulDataLoader

from dcp_plugin.fabric import attach


@hydra.main(version_base=None, config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> None:
    fabric = Fabric(accelerator=cfg.accelerator, strategy=build_strategy(cfg), devices=cfg.devices, num_nodes=cfg.nodes)
    keep = cfg.checkpoint.get("keep", -1)
    checkpoints = attach(
        fabric,
        instantiate(cfg.checkpoint.config),
        keep_last=keep if keep > 0 else None,
        storage_options=cfg.storage_options,
    )
    fabric.launch()

    torch.manual_seed(cfg.seed)  # every rank starts with the same weights
    model = fabric.setup_module(GPT(**cfg.model))
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay)
    )
    torch.manual_seed(cfg.seed + 1 + fabric.global_rank)  # and drops out different activations
    schedule = LambdaLR(optimizer, lambda step: warmup_then_cosine(step, cfg.optim.warmup, cfg.steps))
    text = StdlibText(context=cfg.model.context, seed=cfg.seed, **cfg.data)
    loader = text.share(fabric.global_rank, fabric.world_size)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "text": Position(loader), "step": 0}

    start = checkpoints.resume_or_init(  # before the loop over the data
        state, cfg.checkpoints, resume=cfg.resume, init_from=cfg.init_from, partial=instantiate(cfg.partial)
    )
    fabric.print(start)
    while state["step"] < cfg.steps:
        for windows in loader:
            windows = fabric.to_device(windows)
            loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state["step"] += 1
            if state["step"] % cfg.log_every == 0:
                fabric.print(f"step {state['step']} loss {fabric.all_reduce(loss.detach()).item():.6f}")
            if cfg.checkpoint.enabled and state["step"] % cfg.checkpoint.every == 0:
                fabric.save(f"{cfg.checkpoints}/step-{state['step']:06d}", state)
            if state["step"] == cfg.steps:
                break
        else:
            loader.sampler.set_epoch(loader.sampler.epoch + 1)
    checkpoints.wait()  # Fabric has no hook for the end of a training


class Position:
    """Position of the training in the text: a number of global batches, which is valid on any number of ranks.

    A dataloader whose position is each rank's own goes into the state as it is.
    """

    def __init__(self, loader: StatefulDataLoader) -> None:
        self.loader = loader

    def state_dict(self) -> dict:
        return {"epoch": self.loader.sampler.epoch, "batches": self.loader.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.loader.sampler.set_epoch(state["epoch"])
        self.loader.load_state_dict(state["batches"])
        self.loader.state_dict()  # creates the iterator, which draws random numbers, before their state is restored


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
            parallelize = partial(shard_over, replicas=cfg.strategy.get("replicate", 1))
            return ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
        case unknown:
            raise SystemExit(f"strategy={unknown} is not one of single, ddp, fsdp1, fsdp2, hsdp")


def shard_over(gpt: GPT, ranks: DeviceMesh, replicas: int) -> GPT:
    mesh = ranks["data_parallel"]
    if replicas > 1:
        shape = (replicas, ranks.size() // replicas)
        mesh = init_device_mesh(ranks.device_type, shape, mesh_dim_names=("replicate", "shard"))
    return shard(gpt, mesh)


if __name__ == "__main__":
    main()
