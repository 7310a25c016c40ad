"""The local checkpoints of NVIDIA's resiliency extension: a file of ``torch.save`` per rank, here on a tmpfs.

On CPU it runs in part (0.4.1): saves that are not asynchronous, without replicas. ``is_async`` calls
``torch.cuda.synchronize()``, what another rank sends is moved to CUDA, and its own state dict takes only CUDA tensors.
"""

from __future__ import annotations

import logging

import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

from benchmarks._peer import State
from benchmarks._restarts import Place, Way, fill


class OnCPU(BasicTensorAwareStateDict):  # type: ignore[misc]
    """Its state dict, without the check and the copy that need CUDA."""

    def __init__(self, state: State) -> None:
        self.state_dict = dict(state)
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


def _start(place: Place) -> None:
    """It needs a process group, be it of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _manager(place: Place) -> LocalCheckpointManager:
    logging.getLogger("nvidia_resiliency_ext").setLevel(logging.ERROR)
    return LocalCheckpointManager(place.memory / "nvrx")


def _save(state: State, place: Place) -> None:
    _manager(place).save(OnCPU(state), place.step)


def _load(state: State, place: Place) -> None:
    manager = _manager(place)
    assert manager.find_latest() == place.step
    loaded, _ = manager.load()
    fill(state, loaded.state_dict)


WAYS = [Way("NVIDIA resiliency-ext local, /dev/shm", _save, _load, start=_start)]
