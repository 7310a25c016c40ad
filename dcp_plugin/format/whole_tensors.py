"""Tensors that are stored as one item: ``torch.save`` makes it, as in stock DCP.

Such an item is read into a tensor of the same class, or of a class that the user has declared safe
(``torch.serialization.add_safe_globals``). The file alone never decides the class of an object.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import torch

from dcp_plugin.errors import CheckpointMismatch, UnsafeCheckpoint
from dcp_plugin.format.pickles.unpickler import TENSOR, Refused, load_bytes
from dcp_plugin.tensors.kinds import classes_of, copied


@dataclass(frozen=True, eq=False)
class WholeItem:
    """Tensor that is stored as one item, ready to be written.

    Raises:
        CheckpointMismatch: From both methods: ``torch.save`` cannot write it. The message lacks the key.
    """

    tensor: torch.Tensor
    length: int
    """Bytes of the item."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> WholeItem:
        """Return the item of a tensor. Its bytes are counted and discarded, so that a save holds one item at a time."""
        counter = _Counter()
        _save(tensor, counter)
        return cls(tensor, counter.count)

    def encode(self) -> bytes:
        buffer = io.BytesIO()
        _save(self.tensor, buffer)
        return buffer.getvalue()


class _Counter:
    """File that counts the bytes written to it."""

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
    except Exception as error:  # the class may raise any type
        raise CheckpointMismatch(f"a {type(tensor).__name__} that torch.save cannot write ({error})") from error


_PLAIN = torch.empty(0)


def decode(data: bytes | bytearray, target: torch.Tensor = _PLAIN) -> Any:
    """Return the tensor in an item, to be copied into ``target``; it may consist of the classes of the target.

    Raises:
        UnsafeCheckpoint: The item has another class. The message lacks the key.
        ValueError: Loading it could harm the process.
    """
    try:
        return load_bytes(data, TENSOR.with_classes(classes_of(target)))[0]
    except Refused as error:
        raise UnsafeCheckpoint(
            f"stored as an object of {error}, but the target is a {type(target).__name__}. Give the target that "
            f"class, or declare that you trust it: torch.serialization.add_safe_globals([...])"
        ) from error
