"""One small training with Accelerate that runs in every way on a CPU, and what can be asked of it."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
)
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.data import DataLoader, TensorDataset

from dcp_plugin.accelerate import attach
from dcp_plugin.paths import Where
from tests import layouts, small_training


class Net(small_training.Net):
    """A model of a seed, with names for its layers, and parameters that never get a gradient."""

    def __init__(self, seed: int = 0, unused: bool = True) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.body = nn.Sequential(OrderedDict(zip(("inp", "drop", "norm"), self.body, strict=True)))
        if unused:
            self.unused = nn.Linear(3, 3)


@dataclass
class Run:
    """One training, and how to go on with it."""

    layout: str
    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    scheduler: Any
    loader: Any
    attached: Any
    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def train(self, steps: int, at: dict[int, Callable[[], Any]] | None = None, loader: Any = None) -> Run:
        """Up to ``steps`` optimizer steps; ``at`` has what to do after some of them, within the loop."""
        done = 0
        while done < steps:
            for batch in loader or self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(batch[0]).square().mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())
                self.samples += batch[1].tolist()
                if self.accelerator.sync_gradients:
                    done += 1
                    if at and done in at:
                        at[done]()
                    if done == steps:
                        break
            loader = None
        return self

    def whole_state(self) -> dict[str, Any]:
        """Model and optimizer by key, every tensor whole. Collective."""
        return layouts.whole_state(self.model, getattr(self.optimizer, "optimizer", self.optimizer))


def start(
    layout: str,
    seed: int = 0,
    *,
    native: bool = False,
    samples: int = 48,
    batch: int = 2,
    accumulate: int = 2,
    stateful: bool = True,
    project: Where | None = None,
    limit: int | None = None,
    data: dict[str, Any] | None = None,
    workers: int = 0,
    late: bool = False,
    unused: bool = True,
    frozen: bool = False,
    shrink: Callable[[nn.Module], nn.Module] | None = None,
    **config: Any,
) -> Run:
    """A prepared training; attached unless ``native``, before ``prepare`` unless ``late``. With a ``frozen`` body."""
    warnings.filterwarnings("ignore", module="accelerate|torchdata|torch.distributed")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    if layout == "single":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not "cpu:0", which FSDP1 takes for another device
    torch.manual_seed(seed + 10 * (dist.get_rank() if dist.is_initialized() else 0))
    automatic = (
        {"project_dir": str(project), "automatic_checkpoint_naming": True, "total_limit": limit} if project else {}
    )
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful, **(data or {})),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        project_config=ProjectConfiguration(**automatic),  # type: ignore[arg-type]
    )
    if layout in ("fsdp1", "fsdp2", "hsdp"):
        _force_fsdp(accelerator, layout)
    attached = None if native or late else attach(accelerator, **config)
    numbered = TensorDataset(*small_training.samples(samples).tensors, torch.arange(samples))
    loader: Any = DataLoader(numbered, batch_size=batch, shuffle=True, num_workers=workers)
    net = Net(seed, unused)
    net = shrink(net) if shrink else net
    net.body.requires_grad_(not frozen)
    model, optimizer, loader, scheduler = _prepare(accelerator, layout, net, loader)
    torch.manual_seed(seed + 100 + (dist.get_rank() if dist.is_initialized() else 0))
    if late and not native:
        attached = attach(accelerator, **config)
    return Run(layout, accelerator, model, optimizer, scheduler, loader, attached)


def schedule(optimizer: Any, accelerator: Accelerator) -> Any:
    """Its horizon is in steps of the schedule, of which Accelerate takes one per process."""
    horizon = 12 * accelerator.num_processes
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.05, 1 - step / horizon))


def _prepare(accelerator: Accelerator, layout: str, model: nn.Module, loader: Any) -> tuple[Any, Any, Any, Any]:
    if not layout.startswith("own"):
        optimizer = _adamw(model)
        prepared: Any = accelerator.prepare(model, optimizer, loader, schedule(optimizer, accelerator))
        return prepared
    model = layouts.wrap(layout.removeprefix("own_"), model, "body")
    optimizer = _adamw(model)
    model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    model.train()
    wrapped = accelerator.prepare_optimizer(optimizer, device_placement=False)
    return model, wrapped, accelerator.prepare(loader), accelerator.prepare_scheduler(schedule(optimizer, accelerator))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def _force_fsdp(accelerator: Accelerator, layout: str) -> None:
    """Accelerate runs its FSDP code on accelerators only, for no reason that concerns checkpoints."""
    version = 1 if layout == "fsdp1" else 2
    options: dict[str, Any] = {"auto_wrap_policy": "NO_WRAP"}
    if version == 1:
        options = {"use_orig_params": True, "sharding_strategy": ShardingStrategy.FULL_SHARD}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT", **options)
    plugin.state_dict_config.offload_to_cpu = False
    plugin.optim_state_dict_config.offload_to_cpu = False
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if layout == "hsdp":
        shape = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        accelerator.state.parallelism_config = shape
        accelerator.state.device_mesh = shape.get_device_mesh("cpu")
