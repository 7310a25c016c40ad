"""Unpickler of untrusted files, its uses, and the loading of ``torch.save`` files with it.

==================  ==============================================  ================================================
use                 is for                                          another global
==================  ==============================================  ================================================
``STOCK_METADATA``  ``.metadata``                                   is refused
``TENSOR``          a tensor stored as one item of its own class    is refused
``VALUE``           a value, or the note of another planner         is described, and rebuilt or refused afterwards
``FILE``            a file of another tool                          has a stand-in that keeps nothing
==================  ==============================================  ================================================

``STOCK_METADATA`` is in :mod:`~dcp_plugin.format.stock_metadata`, with the records that replace its classes.
"""

from __future__ import annotations

import codecs
import io
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, ClassVar

import torch

from dcp_plugin.format.pickles.follow import check_pickle
from dcp_plugin.format.torch_archive import MAGIC
from dcp_plugin.tensors._torch import TENSOR_GLOBALS, load_archive, name_of_today

_SMALL = 4096
"""Size in bytes of an archive that is too small to hide a compressed record of consequence."""
_COMPRESSED = re.compile(rb"PK\x01\x02.{6}(?!\0\0)", re.DOTALL)
"""Entry of a compressed record in the directory of a zip."""
_MOST_STAND_INS = 1000
"""Most unknown globals in one file."""
_BLOCKED_MODULES = frozenset({"sys", "os", "posix", "nt"})
"""Modules whose globals get no stand-in; torch blocks them too, even if the user declares one of them safe."""

_NUMPY = re.compile(r"numpy\.(dtype|ndarray|_?core\.multiarray\.(_reconstruct|scalar))")
"""Globals that stay refused even if declared safe: numpy takes bytes for object pointers if a dtype's state says so."""


class Refused(Exception):
    """Error for a global that only executing code would restore. The message is its name."""


class StandIn:
    """Object that is not restored. Each class of such objects has a subclass of this class; the object keeps no
    state."""

    of: ClassVar[str] = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class Described(StandIn):
    """Object of a value that is to be rebuilt: it keeps its arguments and its state.

    :mod:`dcp_plugin.format.pickles.rebuild` makes the object afterwards, or refuses it.
    """

    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Described:
        described = super().__new__(cls)
        described.args = args  # type: ignore[attr-defined]
        return described  # type: ignore[return-value]

    def __setstate__(self, state: Any) -> None:
        self.state = state


@dataclass(frozen=True)
class Use:
    """Purpose of unpickling, and the globals that it needs.

    ``globals`` maps each global, by module and name with a dot between, to the object that takes its place.
    ``stand_in`` is the class whose subclasses take the place of every other global; if None, every other global is
    refused. ``allows_user`` adds the classes that the user has declared safe
    (``torch.serialization.add_safe_globals``). ``prepare`` checks all opcodes of a pickle, and returns the pickle to
    load in its place.
    """

    globals: Mapping[str, Any]
    stand_in: type[StandIn] | None = None
    allows_user: bool = True
    prepare: Callable[[bytes, Callable[[str, str], Any]], bytes] = check_pickle

    def with_classes(self, classes: Collection[type]) -> Use:
        """Return a copy of this use that also accepts some classes."""
        return replace(
            self, globals={**self.globals, **{f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}}
        )


_TENSORS: dict[str, Any] = {
    **TENSOR_GLOBALS,
    "torch.Size": torch.Size,
    "torch.Tensor": torch.Tensor,
    "torch.device": torch.device,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "collections.OrderedDict": OrderedDict,
    "_codecs.encode": codecs.encode,  # for bytes
    "builtins.bytearray": bytearray,
    "builtins.complex": complex,
    "builtins.set": set,
}
"""Globals of tensors, and of their attributes that are plain values."""

TENSOR = Use(_TENSORS)
FILE = Use({**_TENSORS, "collections.Counter": Counter}, StandIn)
VALUE = replace(FILE, stand_in=Described)


class Accepted:
    """Globals of one pickle: those that its use accepts, and the stand-ins made for others."""

    def __init__(self, use: Use) -> None:
        self.use = use
        self.stand_ins: dict[str, type[StandIn]] = {}
        self._users = dict(map(_named, torch.serialization.get_safe_globals())) if use.allows_user else {}

    def get(self, module: str, name: str) -> Any:
        """Return the object in place of a global. Raises Refused for a global that the use does not accept."""
        module, name = name_of_today(module, name)
        full = f"{module}.{name}"
        if full in self.use.globals:
            return self.use.globals[full]
        if module in _BLOCKED_MODULES:
            raise Refused(full)
        if full in self._users and not _NUMPY.fullmatch(full):
            return self._users[full]
        if self.use.stand_in is None:
            raise Refused(full)
        if full not in self.stand_ins:
            if len(self.stand_ins) >= _MOST_STAND_INS:
                raise ValueError(f"it names more than {_MOST_STAND_INS} unknown globals")
            self.stand_ins[full] = type("StandIn", (self.use.stand_in,), {"of": full})
        return self.stand_ins[full]


def _named(entry: Any) -> tuple[str, Any]:
    """Return the name and the object of an entry in torch's list."""
    return (entry[1], entry[0]) if isinstance(entry, tuple) else (f"{entry.__module__}.{entry.__qualname__}", entry)


class Unpickler(pickle.Unpickler):
    """Unpickler of one use. Python's own unpickler in C does the work, after every opcode is checked."""

    def __init__(self, file: BinaryIO, accepted: Accepted) -> None:
        super().__init__(io.BytesIO(accepted.use.prepare(file.read(), accepted.get)), encoding="utf-8")
        self._accepted = accepted

    def find_class(self, module: str, name: str) -> Any:
        return self._accepted.get(module, name)


def load(
    file: BinaryIO, size: int, use: Use, device: str = "cpu", wanted: Collection[int] | None = None
) -> tuple[Any, list[str]]:
    """Load a ``torch.save`` file.

    Args:
        size: Bytes of the file.
        device: Device of its tensors. On ``"meta"`` no payload is read.
        wanted: Offsets of the records of storages to read; None for all. The others stay on the meta device.

    Returns:
        The content of the file, and the names of the globals that have stand-ins in it.

    Raises:
        Refused: The file needs a global that the use does not accept.
        Exception: The file is damaged, or would take more memory or time than a file of its size needs.
    """
    from dcp_plugin.format.pickles.archive import check  # values are mostly small, and are checked in load_bytes

    check(file, size)
    return _load(file, use, device, wanted)


def load_bytes(data: bytes | bytearray, use: Use) -> tuple[Any, list[str]]:
    """Load a file in memory as :func:`load` does. The check of a small archive takes a few microseconds."""
    file = io.BytesIO(data)
    if len(data) > _SMALL or data[:4] != MAGIC or _COMPRESSED.search(data):
        return load(file, len(data), use)
    return _load(file, use, "cpu", None)


def _load(file: BinaryIO, use: Use, device: str, wanted: Collection[int] | None) -> tuple[Any, list[str]]:
    accepted = Accepted(use)
    file.seek(0)
    try:
        return load_archive(file, Unpickler, accepted, device, wanted), list(accepted.stand_ins)
    except Refused:
        raise
    except Exception as error:
        if accepted.stand_ins:  # probably the pickle does something with a stand-in that only the real object supports
            raise Refused(next(iter(accepted.stand_ins))) from error
        raise
