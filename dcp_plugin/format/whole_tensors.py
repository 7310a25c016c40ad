"""Tensors that are stored whole: as one item that ``torch.save`` makes, which is also what stock DCP does.

Such an item is read into a tensor of the same class, or of a class that the user has declared safe
(``torch.serialization.add_safe_globals``). The file alone never decides of which class an object is made.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import torch

from dcp_plugin.errors import CheckpointMismatch, UnsafeCheckpoint
from dcp_plugin.format.pickles.unpickler import Refused, load_bytes
from dcp_plugin.format.pickles.uses import TENSOR
from dcp_plugin.tensors.kinds import classes_of, copied


@dataclass(frozen=True, eq=False)
class WholeItem:
    """A tensor that is stored whole, ready to be written.

    Raises:
        CheckpointMismatch: From both methods: it cannot be written. Without the key.
    """

    tensor: torch.Tensor
    length: int
    """Bytes of the item."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> WholeItem:
        """Return the item of a tensor. Its bytes are counted and not kept, so that a save holds one item at a time."""
        counter = _Counter()
        _save(tensor, counter)
        return cls(tensor, counter.count)

    def encode(self) -> bytes:
        buffer = io.BytesIO()
        _save(self.tensor, buffer)
        return buffer.getvalue()


class _Counter:
    """A file that counts the bytes written to it."""

    count = 0

    def write(self, data: Any) -> int:
        self.count += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""


def _save(tensor: torch.Tensor, file: Any) -> None:
    try:
        torch.save(copied(tensor), file)
    except CheckpointMismatch:
        raise
    except Exception as error:  # anything that the class does
        raise CheckpointMismatch(f"a {type(tensor).__name__} that torch.save cannot write ({error})") from error


_PLAIN = torch.empty(0)


def decode(data: bytes | bytearray, target: torch.Tensor = _PLAIN) -> Any:
    """Return the tensor in an item, for ``target`` to be filled with; it may consist of the classes of the target.

    Raises:
        UnsafeCheckpoint: Another class is in it. Without the key.
        ValueError: Loading it could harm the process.
    """
    try:
        return load_bytes(data, TENSOR.with_classes(classes_of(target)))[0]
    except Refused as error:
        raise UnsafeCheckpoint(
            f"stored as an object of {error}, and the target is a {type(target).__name__}. Give the target that class, "
            f"or declare that you trust it: torch.serialization.add_safe_globals([...])"
        ) from error
