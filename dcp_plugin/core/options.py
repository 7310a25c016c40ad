"""Groups of options within a configuration, and the checks that they share with it.

A group is a small frozen dataclass. Where a configuration takes a group, it also takes a mapping of the group's fields.
Each field is documented only here, by the text under its definition.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, TypeVar

from dcp_plugin.core.paths import StoreOptions, absolute, as_local, folder_of_proof
from dcp_plugin.core.types import public_class

C = TypeVar("C", bound=type)


def refusing_typos(cls: C) -> C:
    """Make the constructor of ``cls`` refuse unknown fields, with the nearest field as a suggestion."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **fields: Any) -> None:
        cls._refuse_unknown(fields)  # type: ignore[attr-defined]
        init(self, *args, **fields)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


@dataclass(frozen=True)
class Options:
    """Base of options: values of a wrong type and unknown names are refused with the full name of the option."""

    _prefix: ClassVar[str] = ""
    """Text before the names of these options in messages."""
    _groups: ClassVar[Mapping[str, type[Options]]] = {}
    """The fields that are groups of options."""

    def __post_init__(self) -> None:
        for item in fields(self):
            name, value = self._prefix + item.name, getattr(self, item.name)
            # item.type is the text of the annotation, since this package postpones the evaluation of annotations.
            wanted, fits = _TYPES.get(str(item.type), ("", lambda value: True))
            if not fits(value):
                shown = repr(value) if item.repr else f"a {type(value).__name__}"
                raise TypeError(f"{name} must be {wanted}, got {shown}.")
            wanted, is_in_range = _RANGES.get(item.name, ("", lambda value: True))
            if not is_in_range(value):
                raise ValueError(f"{name} must be {wanted.format(value)}.")

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults, without access to a store."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.repr}
        changed = [f"{name}={value!r}" for name, value in values.items() if value != getattr(type(self), name)]
        return f"{type(self).__name__}({', '.join(changed)})"

    @classmethod
    def _refuse_unknown(cls, names: Iterable[str], besides: tuple[str, ...] = ()) -> None:
        """Refuse names that are not fields.

        Raises:
            TypeError: A name is not a field. The message suggests the nearest field.
        """
        known, kinds = {*besides, *(item.name for item in fields(cls))}, (cls, *cls._groups.values())
        settings = [*besides, *(kind._prefix + item.name for kind in kinds for item in fields(kind))]
        unknown = [cls._prefix + name for name in names if name not in known]
        near = {name: difflib.get_close_matches(name, settings, n=1) for name in unknown}
        if texts := [f"{name!r} (did you mean {close[0]!r}?)" if close else repr(name) for name, close in near.items()]:
            raise TypeError(f"unknown setting {', '.join(texts)}. The settings are {', '.join(settings)}.")


@public_class()
@refusing_typos
@dataclass(frozen=True, repr=False)
class Keeper(Options):
    """Settings of the *keeper*, one helper process per node that writes the saves. The keeper has the host copies in
    shared memory. A save that has returned is published even if the complete training is killed right after. The
    keeper never takes the training's interpreter lock. Linux only.

    Raises:
        ValueError: A value is out of range. The message names the field and the reason.
        TypeError: A value has the wrong type, or a field does not exist.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.CheckpointConfig(async_save=True, keeper=dcp_plugin.Keeper(dir="/dev/shm/me", replicas=1))
        CheckpointConfig(async_save=True, keeper=Keeper(dir='/dev/shm/me', replicas=1))
    """

    _prefix = "keeper."

    dir: str | None = None
    """A directory on each node, on a local disk or in memory (``/dev/shm/...``), that has the newest checkpoints. Each
    node stores the part of its ranks. A restart reads the surviving parts from there, and all other parts from
    ``path``. None: there is no local tier. Ranks on one host with equal ``dir`` form one node."""

    keep: int = 2
    """Number of the newest checkpoints to keep in ``dir``. While a save is written, it needs room for one more."""

    replicas: int = 0
    """Number of other nodes that store a copy of each node's part in their ``dir``. That many nodes may be lost with
    all their data."""

    durable_every: int | None = 1
    """Copy each N-th save of the run from ``dir`` to ``path``, in the background. Saves are counted over restarts.
    ``close`` copies the newest save in any case. ``None``: copy no save, for clusters without storage that all nodes
    share; ``path`` is then only the checkpoint's name."""

    bandwidth: float | None = None
    """Largest rate at which each node reads from ``dir`` to copy to ``path``, in bytes per second. None: no limit."""

    linger: float = 600.0
    """Seconds for which a keeper waits for a dead training to restart, before it frees its memory and ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dir is not None:
            local = as_local(self.dir, "keeper.dir", "Give a directory of each node, and the URL as the path.")
            private = "" if (proof := folder_of_proof()) is None else f"{proof}/local"
            object.__setattr__(self, "dir", private + str(absolute(local)).removeprefix(private))
        elif self.replicas or self.durable_every != 1:
            raise ValueError(
                "keeper.replicas and keeper.durable_every apply to the checkpoints in keeper.dir: set keeper.dir, too."
            )


@public_class()
@refusing_typos
@dataclass(frozen=True, repr=False)
class IO(Options):
    """Settings of reading and writing files.

    Raises:
        ValueError: A value is out of range. The message names the field and the reason.
        TypeError: A value has the wrong type, or a field does not exist.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.CheckpointConfig(io=dcp_plugin.IO(threads=4))
        CheckpointConfig(io=IO(threads=4))
    """

    _prefix = "io."

    threads: int = 2
    """Threads per rank that write or read files. A rank writes at most as many data files per checkpoint, plus files
    for tensors that are not expected to change."""

    direct: bool | Literal["auto"] = "auto"
    """Bypass the page cache when writing data files (``O_DIRECT``). ``"auto"``: only for files above 1/32 of the
    available memory, if a trial shows that the file system supports it. Smaller files stay in the page cache, from
    which a restart on the same host reads them. ``True``: for all files; a file system that refuses is an error."""

    verify: bool = True
    """Compare every block that a load reads with its hash. The exception is a load of narrow columns of a stored
    tensor: a block of which only a part is wanted is not checked. The check would require the columns of all other
    ranks."""

    broadcast: bool | Literal["auto"] = "auto"
    """If several ranks want the same bytes, let one rank read and broadcast them. ``"auto"``: always from an object
    store; from a file system, only bytes that at least 8 hosts want. Sharing never pays on one host, because the page
    cache has the bytes that the first rank has read."""


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _one_of(*choices: object) -> tuple[str, Callable[[Any], bool]]:
    return f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, got {{!r}}", choices.__contains__


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True or False", lambda value: value in (True, False)),
    "int": ("a whole number", _is_int),
    "int | None": ("a whole number or None", lambda value: value is None or _is_int(value)),
    "float": ("a number", _is_number),
    "float | None": ("a number or None", lambda value: value is None or _is_number(value)),
    "Mapping[str, Any] | None": (
        "a mapping or None",
        lambda value: value is None or isinstance(value, (Mapping, StoreOptions)),
    ),
    "str | None": ("a path or None", lambda value: value is None or isinstance(value, (str, os.PathLike))),
    "tuple[str, ...]": (
        "a sequence of keys",
        lambda value: isinstance(value, tuple) and all(isinstance(key, str) for key in value),
    ),
    "int | Retention | None": (
        "a whole number, a Retention or None",
        lambda value: value is None or _is_int(value) or hasattr(value, "select"),
    ),
    "Keeper | None": (
        "a Keeper, a mapping of its fields or None",
        lambda value: value is None or isinstance(value, Keeper),
    ),
    "IO": ("an IO or a mapping of its fields", lambda value: isinstance(value, IO)),
}
"""Description and check of a value's type, by the annotation of its field."""

_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "staging": _one_of("blocking", "lazy"),
    "when_busy": _one_of("wait", "skip"),
    **dict.fromkeys(("direct", "broadcast", "progress", "stock_aliases"), _one_of(True, False, "auto")),
    "threads": ("at least 1, got {}: with 0 no thread would write", lambda value: value >= 1),
    "keep": ("at least 1, got {}", lambda value: value >= 1),
    "replicas": ("at least 0, got {}", lambda value: value >= 0),
    "durable_every": (
        "at least 1, or None for never, got {}: it counts saves",
        lambda value: value is None or value >= 1,
    ),
    "bandwidth": ("positive bytes per second or None, got {}", lambda value: value is None or value > 0),
    "linger": ("0 or more seconds, got {}", lambda value: value >= 0),
    "timeout": ("positive, got {}: with 0 every save would fail", lambda value: value > 0),
    "save_interval": ("positive seconds or None, got {}", lambda value: value is None or value > 0),
    "keep_last": (
        "at least 1 or None, got {}: 0 would delete what was just saved",
        lambda value: value is None or hasattr(value, "select") or value >= 1,
    ),
}
"""Description and check of a value's range, by the name of its field. The checks refuse NaN as well."""
