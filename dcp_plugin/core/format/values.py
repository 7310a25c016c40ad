"""Items that are ``torch.save`` files, as in stock DCP: values, and tensors of a class of their own.

The rule: no code of a file is executed, and the file alone never decides the class of an object. A value may consist of
the objects that ``torch.load(weights_only=True)`` accepts and of those in
:mod:`dcp_plugin.core.format.pickles.rebuild`. A tensor may have the classes of its target, or classes that the user has
declared safe (``torch.serialization.add_safe_globals``).
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import repeat
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointMismatch, UnsafeCheckpoint, first_line, size
from dcp_plugin.core.format.columns import FACTORIES
from dcp_plugin.core.format.payload import framed
from dcp_plugin.core.format.pickles.unpickler import TENSOR, VALUE, load_bytes
from dcp_plugin.core.format.pickles.walk import Refused
from dcp_plugin.core.format.torch_archive import MAGIC
from dcp_plugin.core.paths import public
from dcp_plugin.core.tensors.kinds import classes_of, copied

_MOST_DIGITS = 611
"""Most digits of an integer that a load surely accepts: its pickle gives the length in one byte."""
_SMALL = 4096
"""Largest value in bytes that :func:`decode` caches."""
SIZED = frozenset({str, bytes, bytearray, np.ndarray})
"""Types of values that may be too large for a pickle, see :func:`why_too_large`."""
_MOST_IN_PICKLE = 1 << 32
"""Limit in bytes for one text, bytes or array in a pickle: ``torch.save`` writes its length in 4 bytes."""


def encode(value: Any, allow_pickle: bool = False, notes: list[str] | None = None) -> bytes:
    """Return ``value`` as the bytes of an item.

    Args:
        allow_pickle: Accept a value that only ``torch.load(weights_only=False)`` restores.
        notes: List to which a line is added for each object that a load returns as another type.

    Raises:
        UnsafeCheckpoint: Only unpickling with code execution could restore the value.
        ValueError: The value is, or contains, an integer that no load would accept.
    """
    try:
        data = framed(pickle.dumps(value, 2)) if (plain := is_plain(value)) else _dump(_plain(value, notes, {}))
    except (pickle.PicklingError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise UnsafeCheckpoint(f"a {type(value).__name__} that cannot be pickled ({error})") from error
    # A load of the bytes proves that the value is restored. Text and numbers need no proof, except long integers.
    is_large = type(value) is int and abs(value) >= 10**_MOST_DIGITS
    if not allow_pickle and (is_large or type(value) not in PLAIN) and data.startswith(MAGIC):
        is_array = type(value) is np.ndarray and value.ndim and not value.dtype.hasobject
        try:
            # The dtype of an array decides alone, so an empty part is loaded: a large array would take long.
            _load(_dump(value[:0]) if is_array else data, [])
        except UnsafeCheckpoint as error:
            raise UnsafeCheckpoint(f"a {type(value).__name__} that no load would accept: {error}") from error
        except Exception as error:
            if plain:
                raise ValueError(f"a load takes no integer of more than {_MOST_DIGITS} digits") from error
            raise UnsafeCheckpoint(
                f"a {type(value).__name__} that can only be restored by executing pickled code"
            ) from error
    return data


def why_too_large(value: Any) -> str:
    """Return the reason why no pickle can have a text, bytes or an array, as the end of a sentence; else empty."""
    nbytes = value.nbytes if isinstance(value, np.ndarray) else len(value)
    about = f"a {type(value).__name__} of {size(nbytes)}, more than the {size(_MOST_IN_PICKLE)} that a pickle takes"
    return "" if nbytes < _MOST_IN_PICKLE else f"{about}: make it a tensor"


def decode(key: str, data: bytes, allow_pickle: Iterable[str] = (), notes: list[str] | None = None) -> Any:
    """Return the value of an item.

    Args:
        allow_pickle: Keys (globs) whose values may be loaded by executing pickled code.
        notes: List to which a line is added for each object that becomes a plain value, because its class is not
            imported.

    Raises:
        UnsafeCheckpoint: The value needs code execution, and ``allow_pickle`` does not name the key.
    """
    try:
        if any(fnmatchcase(key, glob) for glob in allow_pickle):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        if len(data) <= _SMALL and data in _decoded:
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
            f"the value of {key} cannot be loaded without executing code from the checkpoint, or is damaged "
            f"({first_line(error)}). If you trust its origin, pass "
            f"allow_pickle=({key!r},)."
        ) from error


def on_devices_of(target: Any, value: Any) -> Any:
    """Return the value with its tensors on the devices of the target's tensors.

    In lists and tuples of equal type and length, the elements are paired.
    """
    if isinstance(value, torch.Tensor) and isinstance(target, torch.Tensor):
        return value if target.is_meta else value.to(target.device)
    if type(value) is type(target) and type(value) in (list, tuple) and len(value) == len(target):
        return type(value)(map(on_devices_of, target, value))
    return value


def mapping_class(mapping: Mapping[Any, Any]) -> str:
    """Return the name in :data:`MAPPING_CLASSES` of the class of a mapping; empty if the class is not listed.

    The state dict of a module is an ``OrderedDict`` for historical reasons, and counts as a plain ``dict``.
    """
    if type(mapping) is defaultdict and (factory := mapping.default_factory) is not None:
        return next(
            (f"defaultdict of {name}" for name, factory_class in FACTORIES.items() if factory_class is factory), ""
        )
    is_known = type(mapping) in (OrderedDict, Counter, defaultdict) and not hasattr(mapping, "_metadata")
    return type(mapping).__name__ if is_known else ""


def is_storable(value: Any) -> bool:
    """Return whether a value can be loaded without executing code."""
    try:
        encode(value)
    except UnsafeCheckpoint:
        return False
    return True


# Types of values that cannot change and contain nothing. An optimizer has a dozen of these values for every parameter.
PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


def is_plain(value: Any) -> bool:
    """Return whether a value is a number or text, or a list or tuple of these that is not in itself."""
    try:
        return _is_plain(value, {})
    except RecursionError:
        return False


def _is_plain(value: Any, results: dict[int, bool]) -> bool:
    """Return :func:`is_plain`. ``results`` has the results for lists and tuples, by ``id``.

    Without it, a value that names a list at every level twice would take exponential time.
    """
    kind = type(value)
    if kind is not tuple and kind is not list:
        return kind in PLAIN
    if id(value) not in results:
        results[id(value)] = False  # for a list that contains itself
        results[id(value)] = PLAIN.issuperset(map(type, value)) or all(map(_is_plain, value, repeat(results)))
    return results[id(value)]


_decoded: dict[bytes, Any] = {}
"""Values by the bytes of the item. The same few values occur for every parameter of an optimizer."""
_MOST_KNOWN = 4096


def _load(data: bytes, notes: list[str]) -> Any:
    """Load a value without executing code."""
    return load_bytes(data, VALUE, notes)


class _Pickling:
    """Replacement for the module ``pickle`` in ``torch.save``."""

    class Pickler(pickle.Pickler):
        """Pickler that writes containers as calls of their classes.

        Python's own form fills a container after it is made, which torch's restricted unpickler allows only for lists
        and dictionaries.
        """

        def reducer_override(self, value: Any) -> Any:
            if type(value) is deque:
                return deque, (list(value), value.maxlen)
            if type(value) is defaultdict:
                return defaultdict, (value.default_factory, dict(value))
            return NotImplemented


def _dump(value: Any, pickle_module: Any = _Pickling) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=pickle_module)
    return buffer.getvalue()


def _plain(value: Any, notes: list[str] | None, made: dict[int, Any]) -> Any:
    """Return a value with text in place of URLs and of other libraries' paths, also inside standard containers.

    Args:
        made: Results for containers, by ``id``: a value can name a container many times.
    """
    if isinstance(value, os.PathLike) and not isinstance(value, PurePath):
        if notes is not None:
            notes.append(f"{type(value).__module__}.{type(value).__qualname__} as text")
        return os.fspath(value)
    if type(value) not in (dict, list, tuple, set):
        return public(value)
    if id(value) not in made:
        parts = [_plain(part, notes, made) for part in value]
        if type(value) is dict:
            parts = list(zip(parts, [_plain(item, notes, made) for item in value.values()], strict=True))
        made[id(value)] = type(value)(parts)
    return made[id(value)]


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
        return cls(tensor, len(_saved(tensor)))

    def encode(self) -> bytes:
        return _saved(self.tensor)


def _saved(tensor: torch.Tensor) -> bytes:
    try:
        return _dump(copied(tensor), pickle)
    except CheckpointMismatch:
        raise
    except Exception as error:  # the class may raise any type
        raise CheckpointMismatch(f"a {type(tensor).__name__} that torch.save cannot write ({error})") from error


_PLAIN_TENSOR = torch.empty(0, dtype=torch.float32, device="cpu")


def decode_tensor(data: bytes | bytearray, target: torch.Tensor = _PLAIN_TENSOR) -> Any:
    """Return the tensor in an item, which may have the classes of the ``target`` that it will be copied into.

    Raises:
        UnsafeCheckpoint: The item has another class. The message lacks the key.
        ValueError: Loading it could harm the process.
    """
    try:
        return load_bytes(data, TENSOR.with_classes(classes_of(target)))
    except Refused as error:
        raise UnsafeCheckpoint(
            f"stored as an object of {error}, but the target is a {type(target).__name__}. Give the target that "
            f"class, or declare that you trust it: torch.serialization.add_safe_globals([...])"
        ) from error
