"""What each format of an export is made of: files, written front to back from a stream of tensors.

Enters: an open checkpoint, and which of its keys go out under which names. Leaves: complete files in a
:class:`~dcp_plugin.tools.formats.place.Place`. The rule: a file's layout, and so its size, follows from the index
before a byte is read; every tensor passes once, in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.format.index import StoredTensor
from dcp_plugin.media import NewFile
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tools.stream import Part, Stream, require_elements


@dataclass(frozen=True)
class Selected:
    """What of an open checkpoint goes out."""

    reader: ShardedReader
    names: Mapping[str, str]
    """Keys of the checkpoint, and what they are called in the output."""
    dtype: torch.dtype | None = None
    """To which floating-point tensors are converted."""

    @property
    def tensors(self) -> list[str]:
        return [key for key in self.names if isinstance(self.reader.index[key], StoredTensor)]

    @property
    def values(self) -> list[str]:
        return [key for key in self.names if not isinstance(self.reader.index[key], StoredTensor)]

    def stored(self, key: str) -> StoredTensor:
        entry = self.reader.index[key]
        assert isinstance(entry, StoredTensor)
        return entry

    def part(self, key: str) -> Part:
        """All of a tensor, as it goes out.

        Raises:
            CheckpointMismatch: It has no elements that can be read one by one.
        """
        stored = self.stored(key)
        require_elements(self.reader, key, stored)
        return Part.whole(key, stored, self.dtype if self.dtype and stored.dtype.is_floating_point else None)


class OutFile(Protocol):
    """A file of the output."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def parts(self) -> list[Part]:
        """The tensors in it, in their order."""

    def write(self, file: NewFile, stream: Stream) -> None:
        """Write all of it. ``stream`` has :attr:`parts`."""


@dataclass(frozen=True)
class Layout:
    """The files of an output."""

    files: list[OutFile]
    last: dict[str, bytes] = field(default_factory=dict)
    """Small files that are written when the others are complete."""
    notes: list[str] = field(default_factory=list)
    """What whoever reads the output should know, a line each."""


def require_tensors(selected: Selected, what: str) -> None:
    """Raises CheckpointMismatch if nothing that is selected is a tensor."""
    if not selected.tensors:
        raise CheckpointMismatch(f"{selected.reader.path}: no tensor is selected, and {what} has nothing else")
