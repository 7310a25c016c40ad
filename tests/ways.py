"""Every way to save a state and to load it: ours, stock's, and stock's with our planner, our storage, or both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as stock

import dcp_plugin as dcp

Way = Callable[[dict[str, Any], Path], Any]

SAVES: dict[str, Way] = {
    "ours": lambda state, path: dcp.save(state, path),
    "our planner, stock writer": lambda state, path: stock.save(
        state, storage_writer=stock.FileSystemWriter(path), planner=dcp.ShardedSavePlanner()
    ),
    "our planner, our writer": lambda state, path: stock.save(
        state, storage_writer=dcp.ShardedWriter(path), planner=dcp.ShardedSavePlanner()
    ),
    "stock planner, our writer": lambda state, path: stock.save(state, storage_writer=dcp.ShardedWriter(path)),
    "stock": lambda state, path: stock.save(state, checkpoint_id=path),
}
LOADS: dict[str, Way] = {
    "ours": lambda state, path: dcp.load(state, path),
    "our planner, our reader": lambda state, path: stock.load(
        state, storage_reader=dcp.ShardedReader(path), planner=dcp.ShardedLoadPlanner()
    ),
    "our planner, stock reader": lambda state, path: stock.load(
        state, storage_reader=stock.FileSystemReader(path), planner=dcp.ShardedLoadPlanner()
    ),
    "stock planner, our reader": lambda state, path: stock.load(state, storage_reader=dcp.ShardedReader(path)),
    "stock": lambda state, path: stock.load(state, checkpoint_id=path),
}
