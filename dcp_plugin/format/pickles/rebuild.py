"""Rebuilding of objects that only executing code would restore, from their pickles and without execution.

While a value is unpickled, a :class:`~dcp_plugin.format.pickles.unpickler.Described` takes the place of each such
object. :func:`rebuilt` makes the objects afterwards, so that the unpickler neither hashes nor fills them:

- an object of the classes in ``_MAKERS`` is made from arguments that are checked here;
- an enum, a named tuple or a dataclass of the user whose class is already imported: a member is looked up, and the
  fields of the others are set. Neither a constructor nor any other method of the class runs;
- an object whose class is not imported becomes its content (the value of a member, a tuple or a dict), with a note;
- every other global is refused.
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
import operator
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from dcp_plugin.format.pickles.unpickler import Described, Refused
from dcp_plugin.format.values import FACTORIES


def rebuilt(value: Any, notes: list[str]) -> Any:
    """Return the value with its objects.

    Args:
        notes: List to which a line is added for each object that became a plain value.

    Raises:
        Exception: :class:`Refused`, or any error that hostile arguments cause in the checks.
    """
    return _Rebuilding(notes).of(value)


class _Rebuilding:
    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self._made: dict[int, Any] = {}
        self._entered: set[int] = set()

    def of(self, value: Any, hashed: bool = False) -> Any:
        """Return the rebuilt value. ``hashed``: it is in a set or in a key, so that methods of its class would run."""
        kind = type(value)
        if isinstance(value, Described):
            return self._object(value, hashed)
        if isinstance(value, type) and issubclass(value, Described):  # a defaultdict's factory is a class as a value
            if value.of not in FACTORIES:
                raise Refused(value.of)
            return FACTORIES[value.of]
        if kind in (tuple, set):
            made = [self.of(child, hashed or kind is set) for child in value]
            return value if all(map(operator.is_, made, value)) else kind(made)
        if kind in (list, dict, collections.OrderedDict, collections.Counter) and id(value) not in self._entered:
            self._entered.add(id(value))
            if kind is list:
                value[:] = [self.of(child) for child in value]
            else:
                items = [(self.of(key, hashed=True), self.of(child)) for key, child in value.items()]
                value.clear()
                for key, child in items:
                    value[key] = child
        return value

    def _object(self, described: Described, hashed: bool) -> Any:
        name = described.of.replace("pathlib._local.", "pathlib.").replace("numpy.core.", "numpy._core.")
        if name in _MAKERS:
            if id(described) not in self._made:
                args, state = self.of(described.args, name == "builtins.frozenset"), self.of(described.state)
                self._made[id(described)] = _MAKERS[name](args, state)
            return self._made[id(described)]
        cls = _imported(name)
        if cls is None:
            return self._plain(described)
        if hashed and not _inherits(cls, "__hash__", "__eq__"):
            raise Refused(f"{name} as a key or in a set")
        if id(described) not in self._made:
            self._made[id(described)] = self._of_user(cls, described)
        return self._made[id(described)]

    def _of_user(self, cls: type, described: Described) -> Any:
        args = self.of(described.args)
        if issubclass(cls, enum.Enum) and len(args) == 1 and described.state is None:
            return self._member(cls, args[0])
        fields = next((vars(base)["_fields"] for base in cls.__mro__ if "_fields" in vars(base)), None)
        if issubclass(cls, tuple) and isinstance(fields, tuple) and described.state is None:
            if len(fields) == len(args):
                return tuple.__new__(cls, args)
            self._notes.append(f"{described.of} has {len(fields)} fields now, and had {len(args)}")
            return args
        if _is_plain_dataclass(cls) and not args:
            rebuilt_object: Any = object.__new__(cls)
            self._made[id(described)] = rebuilt_object  # its state may refer to the object itself
            _fill(rebuilt_object, self.of(described.state))
            return rebuilt_object
        raise Refused(described.of)

    def _member(self, cls: type[enum.Enum], value: Any) -> Any:
        """Return the member with a value, without calling the class, which would run its ``_missing_``."""
        for member in enum.EnumMeta.__members__.fget(cls).values():  # type: ignore[attr-defined]
            own = object.__getattribute__(member, "_value_")
            if type(own) is type(value) and _inherits(type(value), "__eq__") and own == value:
                return member
        combines = issubclass(cls, enum.Flag) and type(cls) is enum.EnumMeta and type(value) is int
        if combines and cls._missing_.__func__ is enum.Flag._missing_.__func__:  # type: ignore[attr-defined]
            return cls(value)
        self._notes.append(f"{cls.__module__}.{cls.__qualname__} has no member {value!r}")
        return value

    def _plain(self, described: Described) -> Any:
        args, state = self.of(described.args), self.of(described.state)
        if state is not None and (args or not isinstance(state, dict)):
            raise Refused(f"{described.of}, which is not imported")
        self._notes.append(f"{described.of} is not imported")
        return state if state is not None else args[0] if len(args) == 1 else args


def _imported(name: str) -> type | None:
    """Return the class of a name if its module is imported. No module is imported, and no ``__getattr__`` called.

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
    """Return whether a class has these methods from Python itself."""
    owners = [next(base for base in cls.__mro__ if method in vars(base)) for method in methods]
    return all(owner.__module__ in ("builtins", "enum", "datetime", "decimal") for owner in owners)


def _is_plain_dataclass(cls: type) -> bool:
    """Return whether objects of a class consist of their fields alone, and no code runs when an object is freed."""
    if type(cls) is not type or not dataclasses.is_dataclass(cls):
        return False
    if hasattr(cls, "__setstate__") or hasattr(cls, "__del__"):
        return False
    return _inherits(cls, "__new__", "__reduce__", "__reduce_ex__", "__getattribute__")


def _fill(instance: Any, state: Any) -> None:
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        vars(instance).update({str(name): value for name, value in attributes.items()})
    for name, value in (slots or {}).items():
        descriptor = next((vars(base)[name] for base in type(instance).__mro__ if name in vars(base)), None)
        if not isinstance(descriptor, types.MemberDescriptorType):
            raise Refused(f"{type(instance).__qualname__}.{name}")
        descriptor.__set__(instance, value)


# Makers of the objects of known classes, from the arguments and the state of their pickles


def _called(function: Callable[..., Any], *kinds: type | tuple[type, ...]) -> Callable[[Any, Any], Any]:
    """Return a maker that calls a function of Python with arguments of these types; trailing ones may be absent."""

    def make(args: tuple[Any, ...], state: Any) -> Any:
        if state is not None or len(args) > len(kinds) or not all(map(isinstance, args, kinds)):
            raise Refused(getattr(function, "__name__", repr(function)))
        return function(*args)

    return make


def _namespace(cls: type) -> Callable[[Any, Any], Any]:
    def make(args: tuple[Any, ...], state: Any) -> Any:
        namespace = cls()
        _fill(namespace, state)
        return namespace

    return make


def _path(name: str) -> Callable[[Any, Any], Any]:
    def make(args: tuple[Any, ...], state: Any) -> Any:
        if not all(isinstance(part, str) for part in args):
            raise Refused(name)
        try:
            return getattr(pathlib, name)(*args)
        except NotImplementedError:  # a path of the other platform
            return getattr(pathlib, f"Pure{name}")(*args)

    return make


def _bytes_io(args: tuple[Any, ...], state: Any) -> io.BytesIO:
    content, position, attributes = state
    buffer = io.BytesIO(content)
    buffer.seek(position)
    vars(buffer).update(attributes or {})
    return buffer


def _uuid(args: tuple[Any, ...], state: Any) -> uuid.UUID:
    return uuid.UUID(int=state["int"])


def _dtype(args: tuple[Any, ...], state: Any) -> np.dtype[Any]:
    """Return a dtype without numpy's ``__setstate__``, which takes raw bytes for object pointers if the state says
    so."""
    spec: str = args[0]
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


def _array(args: tuple[Any, ...], state: Any) -> np.ndarray[Any, Any]:
    if args[0] is not np.ndarray:
        raise Refused("a class of arrays")
    _, shape, dtype, by_columns, content = state
    order: Any = "F" if by_columns else "C"
    if dtype.hasobject:
        flat = np.empty(len(content), object)
        for number, element in enumerate(content):
            flat[number] = element
        return flat.reshape(shape, order=order)
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise Refused(f"an array whose shape does not fit its {len(content)} bytes")
    array = np.ndarray(shape, dtype, bytearray(content) or b"\0", order=order)
    return array if dtype.names else array.copy("K")  # a copy would lose the bytes between the fields


def _scalar(args: tuple[Any, ...], state: Any) -> Any:
    dtype, content = args
    if dtype.hasobject:
        raise Refused("a scalar of objects")
    return np.ndarray((), dtype, content or b"\0").copy()[()]


_ALIGNED = 0x80  # flag of a dtype
_INT = (int, type(None))
_MAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "builtins.bytes": _called(bytes),  # b"", in the protocol of torch.save
    "builtins.frozenset": _called(frozenset, list),
    "builtins.range": _called(range, int, int, int),
    "builtins.slice": _called(slice, object, object, object),
    "collections.deque": _called(collections.deque, list, _INT),
    "collections.defaultdict": _called(collections.defaultdict, (type, type(None)), dict),
    "datetime.date": _called(datetime.date, bytes),
    "datetime.datetime": _called(datetime.datetime, bytes, datetime.tzinfo),
    "datetime.time": _called(datetime.time, bytes, datetime.tzinfo),
    "datetime.timedelta": _called(datetime.timedelta, int, int, int),
    "datetime.timezone": _called(datetime.timezone, datetime.timedelta, str),
    "decimal.Decimal": _called(decimal.Decimal, str),
    "uuid.UUID": _uuid,
    "_io.BytesIO": _bytes_io,
    "argparse.Namespace": _namespace(argparse.Namespace),
    "types.SimpleNamespace": _namespace(types.SimpleNamespace),
    "numpy.dtype": _dtype,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy._core.multiarray.scalar": _scalar,
    **{f"pathlib.{name}": _path(name) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")},
}
