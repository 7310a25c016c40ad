"""Values that are no tensors, as bytes and back, without executing code.

They are ``torch.save`` files, as stock DCP writes them and reads them, restricted to what
``torch.load(weights_only=True)`` takes and to the objects of :mod:`dcp_plugin.format.pickles.rebuild`.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import repeat
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from dcp_plugin.errors import UnsafeCheckpoint
from dcp_plugin.format.pickles.rebuild import FACTORIES, rebuilt
from dcp_plugin.format.pickles.unpickler import load_bytes
from dcp_plugin.format.pickles.uses import VALUE
from dcp_plugin.format.torch_archive import MAGIC
from dcp_plugin.paths import ObjectPath

MAPPING_CLASSES: dict[str, Callable[[], dict[Any, Any]]] = {
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
    **{f"defaultdict of {name}": partial(defaultdict, factory) for name, factory in FACTORIES.items()},
}
"""The classes of mappings that come back when the items of a mapping are stored one by one, by name."""

_SMALL = 4096
"""Bytes up to which the values of items are remembered."""


def encode(value: Any, allow_pickle: bool = False, notes: list[str] | None = None) -> bytes:
    """``value`` as the bytes of an item.

    Args:
        notes: Where a line is added for what will come back as another type.

    Raises:
        UnsafeCheckpoint: Only unpickling with code execution could restore it.
    """
    if is_plain(value):
        return _encode_plain(value)
    try:
        data = _dump(_plain(value, notes))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnsafeCheckpoint(f"a {type(value).__name__} that cannot even be pickled ({error})") from error
    if not allow_pickle:
        try:
            _load(data, [])
        except Exception as error:
            raise UnsafeCheckpoint(f"a {type(value).__name__} that only executing pickled code restores") from error
    return data


def decode(key: str, data: bytes, allow_pickle: bool = False, notes: list[str] | None = None) -> Any:
    """The value of an item.

    Args:
        notes: Where a line is added for what comes back as a plain value, because its class is not there.

    Raises:
        UnsafeCheckpoint: It needs code execution, and ``allow_pickle`` is off.
    """
    try:
        if allow_pickle:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        if data in _decoded:
            return copy.deepcopy(_decoded[data])
        lossy: list[str] = []
        value = _load(data, lossy)
        if notes is not None:
            notes += [f"{key} ({line})" for line in lossy]
        if not lossy and len(data) <= _SMALL and (is_plain(value) or isinstance(value, np.generic)):
            if len(_decoded) >= _MOST_KNOWN:
                _decoded.clear()
            _decoded[bytes(data)] = copy.deepcopy(value)
        return value
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


def mapping_class(mapping: Mapping[Any, Any]) -> str:
    """Return the name in :data:`MAPPING_CLASSES` of the class of a mapping; empty if it has none of these classes.

    The state dict of a module is an ``OrderedDict`` for reasons of history, and counts as a plain ``dict``.
    """
    if type(mapping) is defaultdict and (factory := mapping.default_factory) is not None:
        return next((f"defaultdict of {name}" for name, known in FACTORIES.items() if known is factory), "")
    is_known = type(mapping) in (OrderedDict, Counter, defaultdict) and not hasattr(mapping, "_metadata")
    return type(mapping).__name__ if is_known else ""


def is_storable(value: Any) -> bool:
    """Whether it comes back without executing code."""
    try:
        encode(value)
    except UnsafeCheckpoint:
        return False
    return True


_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


def is_plain(value: Any, known: dict[int, bool] | None = None) -> bool:
    """Whether the value is a number or text, or a list or tuple of such: of which ``repr`` tells all.

    Args:
        known: What is known of lists and tuples, by ``id``. A file can name one list many times, or put it in itself.
    """
    kind = type(value)
    if kind is not tuple and kind is not list:
        return kind in _PLAIN
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = False  # for a list in itself
        known[id(value)] = all(map(is_plain, value, repeat(known)))
    return known[id(value)]


_encoded: dict[str, bytes] = {}
"""By ``repr``, which tells ``1`` from ``True`` and ``0.0`` from ``-0.0``. The same few values occur for every parameter
of an optimizer, and torch takes a tenth of a millisecond for each."""
_decoded: dict[bytes, Any] = {}
"""By the bytes of the item."""
_MOST_KNOWN = 4096


def _encode_plain(value: Any) -> bytes:
    written = repr(value)
    data = _encoded.get(written)
    if data is None:
        data = _dump(value)
        if len(_encoded) >= _MOST_KNOWN:
            _encoded.clear()
        if data.startswith(MAGIC):  # what a mock of torch.save gives to a test is not for those after it
            _encoded[written] = data
    return data


def _load(data: bytes, notes: list[str]) -> Any:
    """Load a value without executing code. Most values consist of what torch loads itself."""
    value, stand_ins = load_bytes(data, VALUE)
    return rebuilt(value, notes) if stand_ins else value


class _Pickling:
    """What ``torch.save`` takes for the module ``pickle``."""

    class Pickler(pickle.Pickler):
        """Containers as calls of their classes. Python's way, to fill them after they are made, is one that torch's
        restricted unpickler has for lists and dictionaries only."""

        def reducer_override(self, value: Any) -> Any:
            if type(value) is deque:
                return deque, (list(value), value.maxlen)
            if type(value) is defaultdict:
                return defaultdict, (value.default_factory, dict(value))
            return NotImplemented


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_Pickling)
    return buffer.getvalue()


def _plain(value: Any, notes: list[str] | None) -> Any:
    """Paths of other libraries, and URLs, become text, inside the standard containers too."""
    if isinstance(value, os.PathLike) and not isinstance(value, PurePath):
        if notes is not None:
            notes.append(f"{type(value).__module__}.{type(value).__qualname__} as text")
        return os.fspath(value)
    if isinstance(value, ObjectPath):
        return str(value)
    if type(value) is dict:
        return {_plain(key, notes): _plain(item, notes) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_plain(item, notes) for item in value)
    return value
