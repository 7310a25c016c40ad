"""Ways to save in the background: the call that training waits for, and the wait for the end.

State dicts are made inside the call, as a training script has to make them.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks._harness import sync_files
from benchmarks._peer import IO_THREADS, OURS


@dataclass(frozen=True)
class Training:
    """What is saved."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def tensors(self) -> list[torch.Tensor]:
        slots = (slot for slots in self.optimizer.state.values() for slot in slots.values())
        return [tensor.detach() for tensor in (*self.model.state_dict().values(), *slots) if tensor.numel() > 1]


class Saver(Protocol):
    """One way to save in the background."""

    name: str

    def save(self, path: Path) -> Callable[[], None]:
        """Begin; the function that waits until the checkpoint is complete and durable."""

    def updating(self) -> AbstractContextManager[Any]:
        """Around an optimizer's step, for those who ask for it."""
        return nullcontext()

    def close(self) -> None:
        """Free what saving needed."""


class Ours(Saver):
    def __init__(self, training: Training, staging: str) -> None:
        import dcp_plugin

        self.name = OURS if staging == "blocking" else f"{OURS}, lazy"
        self._state = {"model": training.model, "optim": training.optimizer}
        self._checkpointer = dcp_plugin.Checkpointer(async_save=True, staging=staging, io={"threads": IO_THREADS})

        self._handle: Any = None

    def save(self, path: Path) -> Callable[[], None]:
        self._handle = self._checkpointer.save(self._state, path)
        return self._handle.wait  # type: ignore[no-any-return]

    def updating(self) -> AbstractContextManager[Any]:
        """The optimizer's step waits by itself; here, so that it can be told from the step."""
        self._handle.wait_staged()
        return nullcontext()

    def close(self) -> None:
        self._checkpointer.close()


class Stock(Saver):
    """``torch.distributed.checkpoint.async_save``, which needs a process group."""

    def __init__(self, training: Training, kind: str) -> None:
        self.name = f"stock async_save, {kind}"
        self._training, self._kind = training, kind

    def save(self, path: Path) -> Callable[[], None]:
        from torch.distributed.checkpoint import async_save
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        model, optimizer = get_state_dict(self._training.model, self._training.optimizer)
        kind = AsyncCheckpointerType(self._kind)
        future = async_save({"model": model, "optim": optimizer}, checkpoint_id=path, async_checkpointer_type=kind)
        return _synced(future, path)


class Meta(Saver):
    """``torch_checkpointing`` with its own asynchronous configuration, which writes in another process."""

    name = "torch_checkpointing"

    def __init__(self, training: Training) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config.with_async_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = config.build()
        self._training = training

    def save(self, path: Path) -> Callable[[], None]:
        state = {"model": self._training.model.state_dict(), "optim": self._training.optimizer.state_dict()}
        future = self._manager.save(str(path), {"state": state})
        assert future is not None
        return _synced(future, path)

    def updating(self) -> AbstractContextManager[Any]:
        """It copies later, too, and holds back what is put into its lock."""
        return self._manager.lock()

    def close(self) -> None:
        self._manager.close()


class Lightning(Saver):
    """Lightning's ``AsyncCheckpointIO`` around its ``TorchCheckpointIO``: one file."""

    name = "Lightning AsyncCheckpointIO"

    def __init__(self, training: Training) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._io = AsyncCheckpointIO(TorchCheckpointIO())
        self._training = training

    def save(self, path: Path) -> Callable[[], None]:
        path.mkdir()
        state = {
            "state_dict": self._training.model.state_dict(),
            "optimizer_states": [self._training.optimizer.state_dict()],
        }
        self._io.save_checkpoint(state, str(path / "checkpoint.ckpt"))

        def wait() -> None:
            self._io.teardown()  # the only wait there is; the next save starts a new thread
            sync_files(path)

        return wait

    def close(self) -> None:
        self._io.teardown()


class Memcpy(Saver):
    """The floor: one copy of the state into warm memory, and nothing else."""

    name = "memcpy"

    def __init__(self, training: Training) -> None:
        self._training = training
        self._copies = [tensor.clone() for tensor in training.tensors()]

    def save(self, path: Path) -> Callable[[], None]:
        for copy, tensor in zip(self._copies, self._training.tensors(), strict=True):
            copy.copy_(tensor)
        return lambda: None

    def close(self) -> None:
        self._copies.clear()


def _synced(future: Future[Any] | Any, path: Path) -> Callable[[], None]:
    def wait() -> None:
        future.result()
        sync_files(path)

    return wait


def all_savers(wanted: list[str] | None) -> dict[str, Callable[[Training], Saver]]:
    """By name; the peers whose package is not installed say so when they are made."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    makers: dict[str, Callable[[Training], Saver]] = {
        OURS: lambda training: Ours(training, "blocking"),
        f"{OURS}, lazy": lambda training: Ours(training, "lazy"),
        "stock async_save, thread": lambda training: Stock(training, "thread"),
        "stock async_save, process": lambda training: Stock(training, "process"),
        Meta.name: Meta,
        Lightning.name: Lightning,
        Memcpy.name: Memcpy,
    }
    return {name: maker for name, maker in makers.items() if wanted is None or name in wanted or OURS in name}
