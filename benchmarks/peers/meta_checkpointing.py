"""``torch_checkpointing`` from PyPI, with its configuration for the CPU: synchronous saves, no pinned staging.

Without ``use_direct_io=False`` version 0.1.1 cannot save to ext4: it opens its files with ``O_DIRECT`` and then writes
what is not aligned ("OSError: [Errno 22] Invalid argument", then "unexpected pos 64 vs 0").
"""

from __future__ import annotations

from pathlib import Path

from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks._peer import Peer, State


def _manager() -> CheckpointManager:
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return config.build()


def save(state: State, path: Path) -> None:
    manager = _manager()
    manager.save(str(path), {"state": state})
    manager.close()


def load(state: State, path: Path) -> None:
    manager = _manager()
    loaded = manager.load(str(path), into={"state": state})["state"]
    for key, tensor in state.items():
        if loaded[key] is not tensor:
            tensor.copy_(loaded[key])
    manager.close()


PEERS = [Peer("torch_checkpointing", save, load, sharded=False)]
