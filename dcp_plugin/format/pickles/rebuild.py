"""Objects that only executing code would restore, rebuilt from their pickles without that.

While a value is unpickled, a :class:`Described` takes the place of each such object and keeps name, arguments and
state. :func:`rebuilt` makes objects of these afterwards, so that the unpickler neither hashes nor fills them:

- an object of the classes in ``_MAKERS`` is made from arguments that are checked here;
- an enum, a named tuple or a dataclass of the user's whose class is imported already: a member is looked up, the fields
  of the others are put in place. No constructor and no other method of the class runs;
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_plugin.format.pickles.unpickler import Refused, StandIn


@dataclass(frozen=True)
class RefusedValue:
    """The entry of an index for a value with stand-ins in it. ``of`` is the name of the global that is refused."""

    of: str


def refused_in(value: Any) -> str:
    """What the first stand-in in a value stands for; empty if there is none."""
    for leaf in leaves_of(value):
        if isinstance(leaf, StandIn) or (isinstance(leaf, type) and issubclass(leaf, StandIn)):
            return leaf.of
    return ""


def leaves_of(value: Any) -> Iterator[Any]:
    """What is in nested containers, keys of mappings too. A pickle can nest them without end, and in themselves."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, (Mapping, list, tuple, set, frozenset)):
            if id(one) not in seen:
                seen.add(id(one))
                todo += one
                if isinstance(one, Mapping):
                    todo += one.values()
        else:
            yield one


class Described(StandIn):
    """An object that is to be rebuilt."""

    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Described:
        made = super().__new__(cls)
        made.args = args  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]

    def __setstate__(self, state: Any) -> None:
        self.state = state


def rebuilt(value: Any, notes: list[str]) -> Any:
    """The value with its objects.

    Args:
        notes: Where what came back as a plain value is added.

    Raises:
        Exception: :class:`Refused`, or whatever the checks of hostile arguments run into.
    """
    return _Rebuilding(notes).of(value)


class _Rebuilding:
    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self._made: dict[int, Any] = {}
        self._entered: set[int] = set()

    def of(self, value: Any, hashed: bool = False) -> Any:
        """``hashed``: it is in a set or in a key, so that methods of its class would run."""
        kind = type(value)
        if isinstance(value, Described):
            return self._object(value, hashed)
        if isinstance(value, type) and issubclass(value, Described):  # a class is a value as a defaultdict's factory
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
        fields = next((vars(one)["_fields"] for one in cls.__mro__ if "_fields" in vars(one)), None)
        if issubclass(cls, tuple) and isinstance(fields, tuple) and described.state is None:
            if len(fields) == len(args):
                return tuple.__new__(cls, args)
            self._notes.append(f"{described.of} has {len(fields)} fields now, and had {len(args)}")
            return args
        if _is_plain_dataclass(cls) and not args:
            made: Any = object.__new__(cls)
            self._made[id(described)] = made  # its state may lead back to it
            _fill(made, self.of(described.state))
            return made
        raise Refused(described.of)

    def _member(self, cls: type[enum.Enum], value: Any) -> Any:
        """Looked up by hand: calling the class would run its ``_missing_``."""
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
    """The class of a name, if its module is imported; nothing is imported for it, and no ``__getattr__`` called.

    Raises:
        Refused: The name is that of something else.
    """
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:end]))
        if isinstance(found, types.ModuleType):
            break
    else:
        return None
    for part in parts[end:]:
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    if found is not None and not isinstance(found, type):
        raise Refused(name)
    return found


def _inherits(cls: type, *methods: str) -> bool:
    """Whether a class has these from Python itself."""
    owners = [next(one for one in cls.__mro__ if method in vars(one)) for method in methods]
    return all(owner.__module__ in ("builtins", "enum", "datetime", "decimal") for owner in owners)


def _is_plain_dataclass(cls: type) -> bool:
    """Whether objects of it are made of their fields alone, and nothing runs when one goes."""
    if type(cls) is not type or not dataclasses.is_dataclass(cls):
        return False
    if hasattr(cls, "__setstate__") or hasattr(cls, "__del__"):
        return False
    return _inherits(cls, "__new__", "__reduce__", "__reduce_ex__", "__getattribute__")


def _fill(made: Any, state: Any) -> None:
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        vars(made).update({str(name): value for name, value in attributes.items()})
    for name, value in (slots or {}).items():
        descriptor = next((vars(one)[name] for one in type(made).__mro__ if name in vars(one)), None)
        if not isinstance(descriptor, types.MemberDescriptorType):
            raise Refused(f"{type(made).__qualname__}.{name}")
        descriptor.__set__(made, value)


# What objects of known classes are made of: the arguments and the state of their pickles


def _called(function: Callable[..., Any], *kinds: type | tuple[type, ...]) -> Callable[[Any, Any], Any]:
    """Calls a function of Python's own with arguments of these types, or with fewer."""

    def make(args: tuple[Any, ...], state: Any) -> Any:
        if state is not None or len(args) > len(kinds) or not all(map(isinstance, args, kinds)):
            raise Refused(getattr(function, "__name__", repr(function)))
        return function(*args)

    return make


def _namespace(cls: type) -> Callable[[Any, Any], Any]:
    def make(args: tuple[Any, ...], state: Any) -> Any:
        made = cls()
        _fill(made, state)
        return made

    return make


def _path(name: str) -> Callable[[Any, Any], Any]:
    def make(args: tuple[Any, ...], state: Any) -> Any:
        if not all(isinstance(part, str) for part in args):
            raise Refused(name)
        try:
            return getattr(pathlib, name)(*args)
        except NotImplementedError:  # of the other platform
            return getattr(pathlib, f"Pure{name}")(*args)

    return make


def _bytes_io(args: tuple[Any, ...], state: Any) -> io.BytesIO:
    content, position, attributes = state
    made = io.BytesIO(content)
    made.seek(position)
    vars(made).update(attributes or {})
    return made


def _uuid(args: tuple[Any, ...], state: Any) -> uuid.UUID:
    return uuid.UUID(int=state["int"])


def _dtype(args: tuple[Any, ...], state: Any) -> np.dtype[Any]:
    """Numpy's own ``__setstate__`` would take raw bytes for pointers to objects, if the state says so."""
    spec: str = args[0]
    order, sub, names, fields, size = state[1:6]
    if not re.fullmatch(r"[?biufcmMSUVO]\d*", spec):
        raise Refused(f"the dtype {spec}")
    made: np.dtype[Any]
    if sub is not None:
        made = np.dtype((sub[0], sub[1]))
    elif names is not None:
        said = [fields[name] for name in names]
        formats, offsets = [one[0] for one in said], [one[1] for one in said]
        aligned = bool(state[7] & _ALIGNED)
        made = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size}, align=aligned)
    elif spec[0] in "mM" and len(state) > 8:
        unit, count = state[8][1][:2]
        unit = unit.decode() if isinstance(unit, bytes) else unit
        made = np.dtype(spec if unit == "generic" else f"{spec}[{int(count)}{unit}]")
    else:
        made = np.dtype(spec)
    if made.hasobject and made != np.dtype(object):
        raise Refused("a dtype with objects in it")
    ordered = made.newbyteorder(order) if names is None else made
    return made if ordered == made else ordered


def _array(args: tuple[Any, ...], state: Any) -> np.ndarray[Any, Any]:
    if args[0] is not np.ndarray:
        raise Refused("a class of arrays")
    _, shape, dtype, by_columns, content = state
    order: Any = "F" if by_columns else "C"
    if dtype.hasobject:
        flat = np.empty(len(content), object)
        for number, one in enumerate(content):
            flat[number] = one
        return flat.reshape(shape, order=order)
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise Refused(f"an array of another size than its {len(content)} bytes")
    made = np.ndarray(shape, dtype, bytearray(content) or b"\0", order=order)
    return made if dtype.names else made.copy("K")  # a copy would not have what lies between the fields


def _scalar(args: tuple[Any, ...], state: Any) -> Any:
    dtype, content = args
    if dtype.hasobject:
        raise Refused("a scalar of objects")
    return np.ndarray((), dtype, content or b"\0").copy()[()]


_ALIGNED = 0x80  # of a dtype's flags
_INT = (int, type(None))
FACTORIES: dict[str, type] = {f"builtins.{kind.__name__}": kind for kind in (int, float, bool, str, list, dict, set)}
FACTORIES |= {"builtins.tuple": tuple, "numpy.ndarray": np.ndarray}
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
