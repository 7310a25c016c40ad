"""Values that are no tensors, as bytes and back, without executing code.

They are ``torch.save`` files, as stock DCP writes them, restricted to what ``torch.load(weights_only=True)`` takes.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import threading
from typing import Any

import numpy as np
import torch

from dcp_plugin._torch import load_bytes
from dcp_plugin.errors import UnsafeCheckpoint

_SMALL = 4096
"""Bytes up to which the values of items are remembered."""


def encode(value: Any, allow_pickle: bool = False) -> bytes:
    """``value`` as the bytes of an item.

    Raises:
        UnsafeCheckpoint: Only unpickling with code execution could restore it.
    """
    if is_plain(value):
        return _encode_plain(value)
    try:
        data = _dump(_plain(value))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnsafeCheckpoint(f"a {type(value).__name__} that cannot even be pickled ({error})") from error
    if not allow_pickle:
        try:
            _load(data)
        except Exception as error:
            raise UnsafeCheckpoint(f"a {type(value).__name__} that only executing pickled code restores") from error
    return data


def decode(key: str, data: bytes, allow_pickle: bool = False) -> Any:
    """The value of an item.

    Raises:
        UnsafeCheckpoint: It needs code execution, and ``allow_pickle`` is off.
    """
    try:
        if allow_pickle or len(data) > _SMALL:
            return load_bytes(data, weights_only=False) if allow_pickle else _load(data)
        return copy.deepcopy(_decode_small(data))
    except Exception as error:
        raise UnsafeCheckpoint(
            f"the value of {key} cannot be loaded without executing code from the checkpoint, or is damaged: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__} If you trust its origin: "
            f"allow_pickle=({key!r},)."
        ) from error


def on_devices_of(target: Any, value: Any) -> Any:
    """The value with its tensors where those of the target are, as far as both have the same lists and tuples."""
    if isinstance(value, torch.Tensor) and isinstance(target, torch.Tensor):
        return value if target.is_meta else value.to(target.device)
    if type(value) is type(target) and type(value) in (list, tuple) and len(value) == len(target):
        return type(value)(map(on_devices_of, target, value))
    return value


_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


def is_plain(value: Any) -> bool:
    """Whether the value is a number or text, or a list or tuple of such: of which ``repr`` tells all."""
    kind = type(value)
    return kind in _PLAIN or ((kind is tuple or kind is list) and all(map(is_plain, value)))


_encoded: dict[str, bytes] = {}
"""By ``repr``, which tells ``1`` from ``True`` and ``0.0`` from ``-0.0``. The same few values occur for every parameter
of an optimizer, and torch takes a tenth of a millisecond for each."""
_MOST_ENCODED = 4096


def _encode_plain(value: Any) -> bytes:
    written = repr(value)
    data = _encoded.get(written)
    if data is None:
        if len(_encoded) >= _MOST_ENCODED:
            _encoded.clear()
        data = _encoded[written] = _dump(value)
    return data


@functools.lru_cache(maxsize=4096)
def _decode_small(data: bytes) -> Any:
    return _load(data)


_allowing = threading.RLock()


def _load(data: bytes) -> Any:
    """Without executing code. An ``io.BytesIO`` is made of bytes, a position and a dict of its attributes and runs
    none, but torch does not count it among what is safe; and torch's list of that is one for all threads."""
    if b"_io\nBytesIO\n" not in data:
        return load_bytes(data, weights_only=True)
    with _allowing:
        added: list[Any] = [] if io.BytesIO in torch.serialization.get_safe_globals() else [io.BytesIO]
        with torch.serialization.safe_globals(added):  # takes them out again, who ever has put them in
            return load_bytes(data, weights_only=True)


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
