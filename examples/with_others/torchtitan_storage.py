"""torchtitan's `CheckpointManager` with checkpoints written and read by `ShardedWriter` and `ShardedReader`.

The lines that are added are the class `Manager`: it saves at once, whatever `async_mode` says, and takes no Hugging
Face files. When to save, what, where and what to delete stays with torchtitan, and so do its optimizers and its
schedulers. In torchtitan's own `train.py` it would stand for `CheckpointManager`; here a few lines stand for that file.

    pip install torchtitan triton
    python examples/with_others/torchtitan_storage.py out          # stop it however you like, and run it again
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import MODEL, CheckpointManager
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Checkpoint

from dcp_plugin import ShardedReader, ShardedWriter


class Manager(CheckpointManager):  # added
    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *_: Any, **how: Any) -> None:
        assert not how.get("to_hf")
        dcp.save(state_dict, storage_writer=ShardedWriter(checkpoint_id))

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        assert not from_hf
        dcp.load(state_dict, storage_reader=ShardedReader(checkpoint_id))
        self.states[MODEL].load_state_dict(state_dict)


class Progress:
    """Train state, and state of the dataloader, because the data depend on it."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(1337)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 1e-2})
lr_schedulers = LRSchedulersContainer(optimizers, lambda step: 1 / (1 + step))
progress = Progress()
settings = Checkpoint(
    enable=True, enable_ft_dataloader_checkpoints=False, interval=2, last_save_model_only=False, keep_latest_k=0
)
parts = (progress, [model], optimizers, lr_schedulers, {"train_state": progress})
checkpointer = Manager(*parts, checkpoint_config=settings, sd_adapter=None, base_folder=sys.argv[1])
checkpointer.load()
while progress.step < 10:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(progress.step))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizers.zero_grad()
    loss.backward()
    optimizers.step()
    lr_schedulers.step()
    progress.step += 1
    print(f"step {progress.step}: loss {loss.item()!r}")
    checkpointer.save(progress.step, last_step=progress.step == 10)
checkpointer.close()
dist.destroy_process_group()
