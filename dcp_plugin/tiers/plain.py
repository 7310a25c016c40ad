"""The encoding of messages and journals: a header in JSON, then raw bytes. Decoding runs no code from the data.

The header has numbers, text and tuples as they are. Any other value is an object with one entry, from its kind to what
it is made of. Bytes, columns and tensors follow the header, in its order. Only the classes in :data:`CLASSES` travel.
"""

from __future__ import annotations

import errno
import json
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from dcp_plugin.core import errors
from dcp_plugin.core.errors import CheckpointError, SaveFailed, logger
from dcp_plugin.core.format.columns import dtype_named
from dcp_plugin.core.paths import Where, as_path
from dcp_plugin.tiers.local_checkpoints import shown

_LENGTH = struct.Struct("!I")
_AS_THEY_ARE = frozenset({type(None), bool, int, float, str})
CLASSES: dict[str, type] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, CheckpointError)
}
"""Dataclasses and exceptions, by name. :mod:`~dcp_plugin.tiers.journal_records` adds its own."""


def encode(value: Any) -> bytes:
    """Return the bytes of a value. Raises TypeError for a class that does not travel."""
    pieces: list[bytes] = []
    header = json.dumps(_plain(value, pieces)).encode()
    return b"".join((_LENGTH.pack(len(header)), header, *pieces))


def decode(data: bytes | bytearray) -> Any:
    """Return the value that :func:`encode` was given. Raises ValueError for other data."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        end = _LENGTH.size + length
        return _Decoder(memoryview(data)[end:]).value(json.loads(data[_LENGTH.size : end]))
    except Exception as error:
        raise ValueError(f"it is damaged, or of another version ({type(error).__name__}: {error})") from error


def _plain(value: Any, pieces: list[bytes]) -> Any:
    """Return the form of a value in the header; add its bytes to ``pieces``."""
    for kinds, form in _FORMS:
        if isinstance(value, kinds):
            return form(value, pieces)
    kind = type(value)
    if is_dataclass(value) and kind is CLASSES.get(kind.__name__):
        return {kind.__name__: _all_plain((getattr(value, field.name) for field in fields(value)), pieces)}
    raise TypeError(f"a {kind.__qualname__} cannot be handed to another process")


def _all_plain(values: Iterable[Any], pieces: list[bytes]) -> list[Any]:
    # Most of the time of a large job goes into the texts of key paths: they are spared a call each.
    return [value if type(value) in _AS_THEY_ARE else _plain(value, pieces) for value in values]


def _plain_bytes(value: bytes, pieces: list[bytes]) -> dict[str, int]:
    pieces.append(value)
    return {"bytes": len(value)}


def _plain_column(value: np.ndarray[Any, Any], pieces: list[bytes]) -> dict[str, list[Any]]:
    pieces.append(value.tobytes())
    return {"column": [value.dtype.str, list(value.shape)]}


def _plain_tensor(value: torch.Tensor, pieces: list[bytes]) -> dict[str, list[Any]]:
    memory = value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
    return {"tensor": _all_plain((value.dtype, list(value.shape), memory), pieces)}


def _plain_error(value: Exception, _: list[bytes]) -> dict[str, list[Any]]:
    error = sendable(value)
    if isinstance(error, CheckpointError):
        return {type(error).__name__: [str(error)]}
    return {"OSError": [error.errno, error.strerror, error.filename]}


_FORMS: tuple[tuple[Any, Callable[[Any, list[bytes]], Any]], ...] = (
    (tuple, _all_plain),
    (list, lambda value, pieces: {"list": _all_plain(value, pieces)}),
    ((frozenset, set), lambda value, pieces: {"set": _all_plain(value, pieces)}),
    (Mapping, lambda value, pieces: {"mapping": [_all_plain(pair, pieces) for pair in value.items()]}),
    (Where, lambda value, _: {"path": str(value)}),
    (bytes, _plain_bytes),
    (np.ndarray, _plain_column),
    (torch.Tensor, _plain_tensor),
    (torch.dtype, lambda value, _: {"dtype": str(value).removeprefix("torch.")}),
    (timedelta, lambda value, _: {"seconds": value.total_seconds()}),
    (Exception, _plain_error),
    ((int, float, str, type(None)), lambda value, _: value),
)
"""Classes of values, with functions that return the form in the header and add bytes. ``_Decoder`` has the inverse."""


def sendable(error: Exception) -> CheckpointError | OSError:
    """Return an exception for another process: of a class that it knows, and without paths through descriptors."""
    if isinstance(error, CheckpointError) and type(error) is CLASSES.get(type(error).__name__):
        return type(error)(shown(str(error)))
    if isinstance(error, OSError):
        name = None if error.filename is None else shown(str(error.filename))
        return OSError(error.errno or errno.EIO, error.strerror or str(error), name)
    logger.error("a request has failed", exc_info=error)
    return SaveFailed(
        f"a request to the keeper on {socket.gethostname()} has failed: {type(error).__name__}: {shown(str(error))}"
    )


class _Decoder:
    """Decoder of the values in a header.

    Args:
        data: The bytes after the header.
    """

    def __init__(self, data: memoryview) -> None:
        self._left = data
        self._kinds: dict[str, Callable[[Any], Any]] = {
            "path": as_path,
            "list": self._all,
            "set": lambda parts: frozenset(self._all(parts)),
            "mapping": lambda pairs: dict(map(self._all, pairs)),
            "bytes": lambda count: bytes(self._next(count)),
            "column": self._column,
            "tensor": self._tensor,
            "dtype": dtype_named,
            "seconds": lambda seconds: timedelta(seconds=seconds),
            "OSError": lambda parts: OSError(*parts),
        }

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return tuple(self._all(plain))
        if not isinstance(plain, dict):
            return plain
        ((kind, parts),) = plain.items()
        return self._kinds[kind](parts) if kind in self._kinds else CLASSES[kind](*self._all(parts))

    def _all(self, parts: list[Any]) -> list[Any]:
        return [part if type(part) in _AS_THEY_ARE else self.value(part) for part in parts]

    def _next(self, count: int) -> memoryview:
        piece, self._left = self._left[:count], self._left[count:]
        if len(piece) < count:
            raise ValueError("it is cut off")
        return piece

    def _column(self, parts: list[Any]) -> Any:
        dtype, shape = np.dtype(parts[0]), parts[1]
        return np.frombuffer(self._next(dtype.itemsize * int(np.prod(shape))), dtype).reshape(shape)

    def _tensor(self, parts: list[Any]) -> torch.Tensor:
        dtype, shape, memory = self._all(parts)
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        tensor.view(-1).view(torch.uint8).numpy()[:] = memory
        return tensor
