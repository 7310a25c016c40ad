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
from dcp_plugin.core.paths import Where
from tests import layouts, training
from tests.training import as_one_process


class Net(training.Net):
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

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    scheduler: Any
    loader: Any
    attached: Any
    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def train(self, steps: int, at: dict[int, Callable[[], Any]] | None = None) -> Run:
        """Up to ``steps`` optimizer steps; ``at`` has what to do after some of them, within the loop."""
        done = 0
        while done < steps:
            for batch in self.loader:
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
        return self

    def whole_state(self) -> dict[str, Any]:
        """Model and optimizer by key, every tensor whole. Collective."""
        return layouts.whole_state(self.model, self.optimizer.optimizer)


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
        as_one_process()
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not "cpu:0", which FSDP1 takes for another device
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(seed + 10 * rank)
    naming: Any = {"project_dir": str(project), "automatic_checkpoint_naming": True, "total_limit": limit}
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful, **(data or {})),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        project_config=ProjectConfiguration(**naming if project else {}),
    )
    if layout in ("fsdp1", "fsdp2", "hsdp"):
        _force_fsdp(accelerator, layout)
    attached = None if native or late else attach(accelerator, **config)
    numbered = TensorDataset(*training.samples(samples).tensors, torch.arange(samples))
    loader: Any = DataLoader(numbered, batch_size=batch, shuffle=True, num_workers=workers)
    net = Net(seed, unused)
    net = shrink(net) if shrink else net
    net.body.requires_grad_(not frozen)
    prepared = _prepare(accelerator, layout, net, loader)
    torch.manual_seed(seed + 100 + rank)
    if late and not native:
        attached = attach(accelerator, **config)
    return Run(accelerator, *prepared, attached)


def _prepare(accelerator: Accelerator, layout: str, model: nn.Module, loader: Any) -> Any:
    """The model, its optimizer, the schedule and the dataloader, sharded by Accelerate or by the user."""
    is_own = layout.startswith("own_")
    if is_own:
        model = layouts.wrap(layout.removeprefix("own_"), model, "body")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    horizon = 12 * accelerator.num_processes  # in steps of the schedule, of which Accelerate takes one per process
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.05, 1 - step / horizon))
    if not is_own:
        return accelerator.prepare(model, optimizer, schedule, loader)
    model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    model.train()
    wrapped = accelerator.prepare_optimizer(optimizer, device_placement=False)
    return model, wrapped, accelerator.prepare_scheduler(schedule), accelerator.prepare(loader)


def _force_fsdp(accelerator: Accelerator, layout: str) -> None:
    options: dict[str, Any] = {"fsdp_version": 2, "auto_wrap_policy": "NO_WRAP"}
    if layout == "fsdp1":
        options = {"fsdp_version": 1, "use_orig_params": True, "sharding_strategy": ShardingStrategy.FULL_SHARD}
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT", **options)
    plugin.state_dict_config.offload_to_cpu = False
    plugin.optim_state_dict_config.offload_to_cpu = False
    use_fsdp(accelerator, layout, plugin)


def use_fsdp(accelerator: Accelerator, layout: str, plugin: FullyShardedDataParallelPlugin) -> None:
    """Train with FSDP on a CPU, where Accelerate takes DDP, for no reason that concerns checkpoints."""
    state: Any = accelerator.state
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = plugin
    if layout == "hsdp":
        state.parallelism_config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        state.device_mesh = state.parallelism_config.get_device_mesh("cpu")
