"""A host copy of the local shard, so that training goes on while it is written.

The copy lives in buffers that the next save uses again: at most one copy of the local shard, however often one
saves. Tied tensors stay tied in the copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dcp_plugin.types import EncodedValue, Flat, LocalChunk, memory_of


class HostBuffers:
    """The buffers of one checkpointer, by key and chunk."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def copy(self, state: Flat) -> Flat:
        """The state with every tensor copied to host memory. The previous copy is overwritten."""
        previous, self._buffers = self._buffers, {}
        copies: dict[Any, torch.Tensor] = {}
        snapshot: Flat = {}
        for key, value in state.items():
            if isinstance(value, EncodedValue):
                snapshot[key] = value
                continue
            chunks = []
            for number, chunk in enumerate(value.chunks):
                source = chunk.tensor
                identity = memory_of(source)
                if source.numel() == 0 or identity not in copies:
                    copies[identity] = self._fill(previous.get((key, number)), source)
                    self._buffers[key, number] = copies[identity]
                chunks.append(LocalChunk(chunk.offsets, chunk.sizes, copies[identity]))
            snapshot[key] = replace(value, chunks=tuple(chunks))
        return snapshot

    def clear(self) -> None:
        self._buffers = {}

    @staticmethod
    def _fill(buffer: torch.Tensor | None, source: torch.Tensor) -> torch.Tensor:
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        return buffer.copy_(source)
