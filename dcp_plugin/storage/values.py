"""Values that are no tensors, as bytes and back, without executing code.

They are ``torch.save`` files, as stock DCP writes them, restricted to what ``torch.load(weights_only=True)`` takes.
"""

from __future__ import annotations

import functools
import io
import os
from typing import Any

import numpy as np
import torch

from dcp_plugin._torch import load_bytes
from dcp_plugin.errors import UnsafeCheckpoint


def encode(value: Any, allow_pickle: bool = False) -> bytes:
    """``value`` as the bytes of an item.

    Raises:
        UnsafeCheckpoint: Only unpickling with code execution could restore it.
    """
    if type(value) in (bool, int, float, str, bytes, type(None)):
        return _encode_plain(type(value).__name__, repr(value) if isinstance(value, float) else value)
    data = _dump(_plain(value))
    if not allow_pickle:
        try:
            load_bytes(data, weights_only=True)
        except Exception as error:
            raise UnsafeCheckpoint(f"a {type(value).__name__} that only executing pickled code restores") from error
    return data


def decode(key: str, data: bytes, allow_pickle: bool = False) -> Any:
    """The value of an item.

    Raises:
        UnsafeCheckpoint: It needs code execution, and ``allow_pickle`` is off.
    """
    try:
        return load_bytes(data, weights_only=not allow_pickle)
    except Exception as error:
        raise UnsafeCheckpoint(
            f"the value of {key} cannot be loaded without executing code from the checkpoint, or is damaged: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__} If you trust its origin: "
            f"allow_pickle=({key!r},)."
        ) from error


@functools.lru_cache(maxsize=4096)
def _encode_plain(kind: str, value: Any) -> bytes:
    """The same few numbers occur for every parameter of an optimizer. Floats come as text, since -0.0 == 0.0; the
    kind is there since True == 1."""
    return _dump(float(value) if kind == "float" else value)


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _plain(value: Any) -> Any:
    """Paths become text and numpy scalars Python numbers, inside the standard containers too."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_plain(item) for item in value)
    return value
