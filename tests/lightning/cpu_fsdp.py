"""FSDPStrategy on a CPU, for tests: Lightning refuses it, for no reason that concerns checkpoints.

The smallest subclass that lifts the refusal. A subclass passes the check for a GPU; FSDP is told the device itself
(Lightning passes its index, which a CPU has not); a mesh is made of CPU ranks (Lightning has "cuda" written there).
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


class CPUFSDPStrategy(FSDPStrategy):
    def setup_environment(self) -> None:
        mesh = self.kwargs.pop("device_mesh", None)
        super().setup_environment()
        if mesh is not None:
            self.kwargs["device_mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))

    def _setup_model(self, model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {"sharding_strategy": self.sharding_strategy, **self.kwargs}
        return FullyShardedDataParallel(model, device_id=self.root_device, **options)
