"""Formats of an export: files, each written front to back from a stream of tensors.

Enters: an open checkpoint, and its selected keys with their new names. Leaves: complete files, which
:mod:`dcp_plugin.tools.export` creates and publishes. The rule: the layout and the size of a file follow from the index
before a byte is read, and every tensor is read once, in pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.format.index import StoredTensor
from dcp_plugin.core.media import NewFile
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.tensors.host_memory import host_bytes
from dcp_plugin.tools.stream import Part, Stream


@dataclass(frozen=True)
class Selected:
    """The keys of an open checkpoint that an export writes."""

    reader: CheckpointReader
    names: Mapping[str, str]
    """Keys of the checkpoint -> names in the output."""
    dtype: torch.dtype | None = None
    """The dtype that floating-point tensors are converted to."""

    @property
    def tensors(self) -> list[str]:
        return [key for key in self.names if isinstance(self.reader.index[key], StoredTensor)]

    def stored(self, key: str) -> StoredTensor:
        entry = self.reader.index[key]
        assert isinstance(entry, StoredTensor)
        return entry

    def part(self, key: str) -> Part:
        """Return a complete tensor as a part, with the dtype of the output.

        Raises:
            CheckpointMismatch: The elements cannot be read one by one, or not be converted.
        """
        part = Part.of(self.reader, key)
        if self.dtype is None or not part.dtype.is_floating_point:
            return part
        if not _converts(part.dtype, self.dtype):
            raise CheckpointMismatch(
                f"{self.reader.path}: {key} is {part.dtype}, which torch does not convert to {self.dtype}. Leave it "
                f"out, or name another dtype."
            )
        return replace(part, dtype=self.dtype)


@functools.cache
def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether torch copies elements of one dtype into another. It does not for dtypes of half a byte."""
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(host_bytes(source.itemsize).zero_().view(source))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def place_of(stored: StoredTensor) -> object:
    """Return a value that is equal for tensors with the same bytes in the checkpoint."""
    places = ((chunk.location.file, chunk.location.offset, chunk.offsets, chunk.sizes) for chunk in stored.chunks)
    return stored.dtype, stored.shape, *places


class OutFile(Protocol):
    """A file of the output."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int:
        """The size in bytes."""

    @property
    def parts(self) -> list[Part]:
        """The tensors of the file, in order."""

    def write(self, file: NewFile, stream: Stream) -> None:
        """Write the complete file. ``stream`` reads :attr:`parts`."""


@dataclass(frozen=True)
class Layout:
    """The files of an output."""

    selected: Selected
    """The keys that the files have, with their final names."""
    files: list[OutFile]
    last: dict[str, bytes] = field(default_factory=dict)
    """Small files that are written when the others are complete."""
    notes: list[str] = field(default_factory=list)
    """Notes for readers of the output, a line each."""
