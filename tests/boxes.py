"""Reads of boxes of stored tensors, as a plan of DCP asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

import dcp_plugin as dcp

Box = tuple[str, tuple[int, ...], torch.Tensor]
"""The key of a tensor that is stored in one chunk, offsets in it, and a target of the box's shape."""


class Boxes(LoadPlanner):
    """Has each box read into its target."""

    def __init__(self, *boxes: Box) -> None:
        self.boxes = boxes

    def plan(self) -> LoadPlan:
        items = []
        for number, (key, offsets, target) in enumerate(self.boxes):
            corner = torch.Size([0] * target.dim())
            where = MetadataIndex(key, corner, 0)
            into = MetadataIndex(str(number), corner)
            items.append(ReadItem(LoadItemType.TENSOR, into, corner, where, torch.Size(offsets), target.shape))
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.boxes[int(read_item.dest_index.fqn)][2]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert tensor.data_ptr() == self.boxes[int(read_item.dest_index.fqn)][2].data_ptr()

    set_up_planner = create_local_plan = create_global_plan = finish_plan = load_bytes = None  # type: ignore[assignment]


Boxes.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def read_boxes(path: Path, *boxes: Box, **options: Any) -> dcp.ShardedReader:
    """Read boxes of a checkpoint. ``options`` are those of the reader, which is returned."""
    reader = dcp.ShardedReader(path, **options)
    planner = Boxes(*boxes)
    reader.read_data(planner.plan(), planner).wait()
    return reader
