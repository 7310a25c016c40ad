"""Rebuilding of objects that only executing code would restore otherwise. The rule: no code of a file or user runs.

While a value is walked (:mod:`~dcp_plugin.core.format.pickles.walk`), :func:`rebuilt` makes each such object from its
arguments and its state, which are values by then:

- An object of the classes in ``_MAKERS`` is made from arguments that are checked here.
- An enum, a named tuple or a dataclass of the user is rebuilt if its class is already imported. A member of an enum is
  looked up; the fields of the others are set. No constructor and no other method of the class runs.
- An object whose class is not imported becomes its content (the value of a member, a tuple or a dict), with a note.
- Every other global is refused.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import io
import math
import pathlib
import re
import sys
import types
import uuid
from functools import partial
from typing import Any

import numpy as np

from dcp_plugin.core.format.columns import FACTORIES
from dcp_plugin.core.format.pickles.walk import FEW, Refused, Walk, fill, require_kinds


def factory(of: str) -> type:
    """Return the factory of a defaultdict, a class, by its name. Raises Refused for another global."""
    if of not in FACTORIES:
        raise Refused(of)
    return FACTORIES[of]


def instance(of: str, args: tuple[Any, ...]) -> Any:
    """Return an object of a dataclass, without attributes; None for any other class.

    The object exists before its state is walked, because the state may refer to it.
    """
    cls = None if _today(of) in _MAKERS or args else _imported(of)
    return object.__new__(cls) if cls is not None and _is_plain_dataclass(cls) else None


def rebuilt(walk: Walk, of: str, target: Any, args: tuple[Any, ...], state: tuple[Any, ...]) -> Any:
    """Return an object that was pickled as a call.

    Args:
        of: Name of its class, or of the function that makes it.
        target: Result of :func:`instance`.
        state: A tuple of its state; empty without one.

    Raises:
        Exception: :class:`Refused`, or any error that hostile arguments cause in the checks.
    """
    name = _today(of)
    if name in _MAKERS:
        (maker, *kinds), given = _MAKERS[name], (*args, *state)
        require_kinds(of, given, kinds)
        if name == "builtins.frozenset":
            walk.check_hashes(*args)
        walk.spend(*state or ((),))
        return maker(*given)
    cls = _imported(name)
    if cls is None:
        if state and (args or not isinstance(state[0], dict)):
            raise Refused(f"{of}, which is not imported")
        walk.notes.append(f"{of} is not imported")
        content: tuple[Any, ...] = state or args
        return content[0] if len(content) == 1 else content
    if not _inherits(cls, "__hash__", "__eq__"):  # as a key, the object would run code of the user
        walk.never_hashed.add(cls)
    if target is not None:
        fill(target, *state or (None,))
        return target
    if issubclass(cls, enum.Enum) and len(args) == 1 and not state:
        return _member(cls, args[0], walk.notes)
    fields = next((vars(base)["_fields"] for base in cls.__mro__ if "_fields" in vars(base)), None)
    if not issubclass(cls, tuple) or not isinstance(fields, tuple) or state:
        raise Refused(of)
    if len(fields) == len(args):
        return tuple.__new__(cls, args)
    walk.notes.append(f"{of} has {len(fields)} fields now, and had {len(args)}")
    return args


def _today(of: str) -> str:
    """Return the name of today for a class that Python or numpy has moved."""
    return of.replace("pathlib._local.", "pathlib.").replace("numpy.core.", "numpy._core.")


def _member(cls: type[enum.Enum], value: Any, notes: list[str]) -> Any:
    """Return the member with a value, without calling the class, which would run its ``_missing_``."""
    for member in enum.EnumMeta.__members__.fget(cls).values():  # type: ignore[attr-defined]
        own = object.__getattribute__(member, "_value_")
        if type(own) is type(value) and _inherits(type(value), "__eq__") and own == value:
            return member
    # A combination of flags is no member: ``_missing_`` makes it, which may run only if it is Python's own.
    combines = issubclass(cls, enum.Flag) and type(cls) is enum.EnumMeta and type(value) is int
    if combines and cls._missing_.__func__ is enum.Flag._missing_.__func__:  # type: ignore[attr-defined]
        return cls(value)
    notes.append(f"{cls.__module__}.{cls.__qualname__} has no member {value!r}")
    return value


def _imported(name: str) -> type | None:
    """Return the class of a name; None if its module is not imported. No import and no ``__getattr__`` runs.

    Raises:
        Refused: The name is that of an object that is no class.
    """
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        resolved: Any = sys.modules.get(".".join(parts[:end]))
        if isinstance(resolved, types.ModuleType):
            break
    else:
        return None
    for part in parts[end:]:
        resolved = vars(resolved).get(part) if isinstance(resolved, (types.ModuleType, type)) else None
    if resolved is not None and not isinstance(resolved, type):
        raise Refused(name)
    return resolved


def _inherits(cls: type, *methods: str) -> bool:
    """Return whether a class inherits these methods from Python itself."""
    owners = [next(base for base in cls.__mro__ if method in vars(base)) for method in methods]
    return all(owner.__module__ in ("builtins", "enum", "datetime", "decimal") for owner in owners)


def _is_plain_dataclass(cls: type) -> bool:
    """Return whether objects of a class consist of their fields alone, and no code runs when an object is freed."""
    if type(cls) is not type or not dataclasses.is_dataclass(cls):
        return False
    if hasattr(cls, "__setstate__") or hasattr(cls, "__del__"):
        return False
    return _inherits(cls, "__new__", "__reduce__", "__reduce_ex__", "__getattribute__")


# Makers of the objects of known classes, from the arguments and the state of their pickles


def _namespace(cls: type, state: Any = None) -> Any:
    namespace = cls()
    fill(namespace, state)
    return namespace


def _path(name: str, *args: str) -> pathlib.PurePath:
    try:
        made: pathlib.PurePath = getattr(pathlib, name)(*args)
    except NotImplementedError:  # a path of the other platform
        made = getattr(pathlib, f"Pure{name}")(*args)
    return made


def _bytes_io(state: tuple[Any, ...]) -> io.BytesIO:
    content, position, attributes = state
    buffer = io.BytesIO(content)
    buffer.seek(position)
    vars(buffer).update(attributes or {})
    return buffer


def _dtype(spec: str, align: object, copy: object, state: tuple[Any, ...]) -> np.dtype[Any]:
    """Return a dtype, without numpy's ``__setstate__``: a hostile state makes it take raw bytes for object pointers."""
    order, sub, names, fields, size = state[1:6]
    if not re.fullmatch(r"[?biufcmMSUVO]\d*", spec):
        raise Refused(f"the dtype {spec}")
    dtype: np.dtype[Any]
    if sub is not None:
        dtype = np.dtype((sub[0], sub[1]))
    elif names is not None:
        field_specs = [fields[name] for name in names]
        formats, offsets = (
            [field[0] for field in field_specs],
            [field[1] for field in field_specs],
        )
        aligned = bool(state[7] & _ALIGNED)
        dtype = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size}, align=aligned)
    elif spec[0] in "mM" and len(state) > 8:
        unit, count = state[8][1][:2]
        unit = unit.decode() if isinstance(unit, bytes) else unit
        dtype = np.dtype(spec if unit == "generic" else f"{spec}[{int(count)}{unit}]")
    else:
        dtype = np.dtype(spec)
    if dtype.hasobject and dtype != np.dtype(object):
        raise Refused("a dtype with objects in it")
    ordered = dtype.newbyteorder(order) if names is None else dtype
    return dtype if ordered == dtype else ordered


def _array(cls: type, empty: object, code: object, state: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    if cls is not np.ndarray:
        raise Refused("a class of arrays")
    _, shape, dtype, by_columns, content = state
    order: Any = "F" if by_columns else "C"
    if dtype.hasobject:  # filled one by one: numpy would take nested sequences for more dimensions
        flat = np.empty(len(content), object)
        for number, element in enumerate(content):
            flat[number] = element
        return flat.reshape(shape, order=order)
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise Refused(f"an array whose shape does not fit its {len(content)} bytes")
    array = np.ndarray(shape, dtype, bytearray(content) or b"\0", order=order)
    if array.size > max(len(content), FEW):  # its elements have no bytes
        raise Refused(f"an array of {array.size} elements without bytes")
    return array if dtype.names else array.copy("K")  # a copy would lose the bytes between the fields


def _scalar(dtype: np.dtype[Any], content: Any = b"") -> Any:
    if dtype.hasobject:
        raise Refused("a scalar of objects")
    return np.ndarray((), dtype, content or b"\0").copy()[()]


_ALIGNED = 0x80  # flag of a dtype
_INT = (int, type(None))
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_MAKERS: dict[str, tuple[Any, ...]] = {
    "builtins.bytes": (bytes,),  # b"", in the protocol of torch.save
    "builtins.frozenset": (frozenset, list),
    "builtins.range": (range, int, int, int),
    "builtins.slice": (slice, object, object, object),
    "collections.deque": (collections.deque, list, _INT),
    "collections.defaultdict": (collections.defaultdict, (type, type(None)), dict),
    "datetime.date": (datetime.date, bytes),
    "datetime.datetime": (datetime.datetime, bytes, datetime.tzinfo),
    "datetime.time": (datetime.time, bytes, datetime.tzinfo),
    "datetime.timedelta": (datetime.timedelta, int, int, int),
    "datetime.timezone": (datetime.timezone, datetime.timedelta, str),
    "decimal.Decimal": (decimal.Decimal, str),
    "uuid.UUID": (lambda state: uuid.UUID(int=state["int"]), dict),
    "_io.BytesIO": (_bytes_io, tuple),
    "argparse.Namespace": (partial(_namespace, argparse.Namespace), dict),
    "types.SimpleNamespace": (partial(_namespace, types.SimpleNamespace), dict),
    "numpy.dtype": (_dtype, str, int, int, tuple),
    "numpy._core.multiarray._reconstruct": (_array, type, tuple, bytes, tuple),
    "numpy._core.multiarray.scalar": (_scalar, np.dtype, (bytes, str)),
    **{f"pathlib.{name}": (partial(_path, name), *[str] * 1000) for name in _PATHS},
}
"""By name: the function that makes an object, and the types of its arguments. The state, if any, is the last one."""
