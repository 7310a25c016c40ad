"""Unpickler of untrusted files, its uses, and the loading of ``torch.save`` files with it.

==================  ==============================================  ================================================
use                 is for                                          another global
==================  ==============================================  ================================================
``STOCK_METADATA``  ``.metadata``                                   is refused
``TENSOR``          a tensor stored as one item of its own class    is refused
``VALUE``           a value                                         is rebuilt or refused
``FILE``            a file of another tool                          has a stand-in that keeps nothing
==================  ==============================================  ================================================

``STOCK_METADATA`` is in :mod:`~dcp_plugin.core.format.stock_metadata`, which reads the nodes themselves.
"""

from __future__ import annotations

import codecs
import io
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import torch

from dcp_plugin.core.errors import UnsafeCheckpoint
from dcp_plugin.core.format.payload import pickle_in
from dcp_plugin.core.format.pickles.nodes import Name, nodes_of
from dcp_plugin.core.format.pickles.walk import LEAVES, Refused, Walk, fill, require_kinds
from dcp_plugin.core.format.torch_archive import PICKLE, Archive
from dcp_plugin.core.interrupts import collector_paused
from dcp_plugin.core.tensors._torch import TENSOR_GLOBALS, name_of_today, rebuilding_on, storage_of, typed_storage

_MOST_UNKNOWN = 1000
"""Most unknown globals in one file."""
_BLOCKED_MODULES = frozenset({"sys", "os", "posix", "nt"})
"""Modules whose globals get no stand-in; torch blocks them too, even if the user declares one of them safe."""

_NUMPY = re.compile(r"numpy\.(dtype|ndarray|_?core\.multiarray\.(_reconstruct|scalar))")
"""Globals that stay refused even if declared safe: numpy takes bytes for object pointers if a dtype's state says so."""


class StandIn:
    """Object that is not restored. Each class of such objects has a subclass of this class."""

    of: ClassVar[str] = ""


@dataclass(frozen=True)
class Use:
    """Purpose of unpickling, and the globals that it needs.

    ``globals`` maps the dotted name of each global to the object that takes its place. ``unknown`` returns the object
    in place of any other global; if it is None, other globals are refused. ``allows_user`` adds the classes that the
    user has declared safe (``torch.serialization.add_safe_globals``).
    """

    globals: Mapping[str, Any]
    unknown: Callable[[str], Any] | None = None
    allows_user: bool = True

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
FILE = Use({**_TENSORS, "collections.Counter": Counter}, lambda of: type("StandIn", (StandIn,), {"of": of}))
VALUE = replace(FILE, unknown=lambda of: None)


class Accepted:
    """Globals of one pickle: those that its use accepts, and the objects in place of others."""

    def __init__(self, use: Use) -> None:
        self.use = use
        self.unknown: list[str] = []
        self._names: dict[str, Any] = {}

    def get(self, module: str, name: str) -> Any:
        """Return the :class:`Name` of a global, or the dtype that it names. Raises Refused if the use refuses it."""
        module, name = name_of_today(module, name)
        full = f"{module}.{name}"
        if full not in self._names:
            value = self._value(module, full)
            self._names[full] = value if isinstance(value, (torch.dtype, torch.qscheme)) else Name(full, value)
        return self._names[full]

    def _value(self, module: str, full: str) -> Any:
        if full in self.use.globals:
            return self.use.globals[full]
        users = dict(map(_named, torch.serialization.get_safe_globals())) if self.use.allows_user else {}
        if full in users and module not in _BLOCKED_MODULES and not _NUMPY.fullmatch(full):
            return users[full]
        if self.use.unknown is None or module in _BLOCKED_MODULES:
            raise Refused(full)
        if len(self.unknown) >= _MOST_UNKNOWN:
            raise ValueError(f"it names more than {_MOST_UNKNOWN} unknown globals")
        self.unknown.append(full)
        return self.use.unknown(full)


def _named(entry: Any) -> tuple[str, Any]:
    """Return the name and the object of an entry in torch's list."""
    return (entry[1], entry[0]) if isinstance(entry, tuple) else (f"{entry.__module__}.{entry.__qualname__}", entry)


class Unpickler(Walk):
    """Walk over the pickle of a ``torch.save`` file that makes tensors, and the values that a use accepts.

    Args:
        archive: None if the pickle may refer to no storage.
        nbytes: Bytes of the pickle.
        wanted: Positions of the records to read; None for all. Other storages are on the meta device.
    """

    def __init__(
        self, archive: Archive | None, nbytes: int, notes: list[str] | None, wanted: Collection[int] | None
    ) -> None:
        super().__init__(nbytes, notes)
        self._archive, self._wanted = archive, wanted
        self._storages: dict[str, torch.UntypedStorage] = {}

    def persistent_load(self, identifier: Any) -> Any:
        entry, kind, key, _, _ = identifier
        if entry != "storage" or type(key) is not str or self._archive is None:
            raise ValueError("its pickle refers to something else than a storage of its archive")
        dtype = getattr(kind, "_dtype", torch.uint8)
        if key not in self._storages:
            self._storages[key] = self._storage(self._archive, f"data/{key}", dtype)
        return typed_storage(self._storages[key], dtype)

    def _storage(self, archive: Archive, name: str, dtype: torch.dtype) -> torch.UntypedStorage:
        begin, size = archive.records[name]
        if self._wanted is not None and begin not in self._wanted:
            return storage_of(torch.empty(size, dtype=torch.uint8, device="meta"), begin)
        # Memory of numpy: unlike torch's own, no tensor of the pickle can enlarge it.
        storage = storage_of(torch.from_numpy(archive.read(name)), begin)
        if archive.is_swapped:
            storage.byteswap(dtype)  # type: ignore[no-untyped-call]
        return storage

    def named(self, name: Name) -> Any:
        if name.value in (bytearray, codecs.encode):  # a function that gets it could call it, with unchecked arguments
            raise ValueError(f"its pickle has {name.of} as a value")
        return _rebuild().factory(name.of) if name.value is None else name.value

    def called_object(self, target: Any) -> Any:
        return target if isinstance(target, StandIn) else super().called_object(target)

    def called(self, name: Name, args: Any, is_new: bool) -> Any:
        require_kinds(name.of, args, _ARGUMENTS.get(name.of))
        self.spend(args)
        function = name.value
        if function is None:
            return _rebuild().instance(name.of, args)
        if isinstance(function, type) and issubclass(function, StandIn):
            return function()
        if function in (bytearray, codecs.encode) and not _CODECS.fullmatch("".join(args[1:])):
            raise ValueError("its pickle encodes text with a codec other than UTF-8, Latin-1 and ASCII")
        if function is set:
            self.check_hashes(*args)
        made = function.__new__(function, *args) if is_new else function(*args)
        # A view of a small storage may be a large tensor, by strides of 0. Each copy of it takes its full size.
        if type(made) is torch.Tensor and made.layout is torch.strided and not (made.is_meta or made.is_nested):
            self.spend((), made.nbytes - made.untyped_storage().nbytes())
        return made

    def filled(self, target: Any, name: Name, args: Any, items: list[Any], state: tuple[Any, ...]) -> Any:
        if items and type(target) not in (OrderedDict, Counter):
            raise ValueError(f"its pickle fills an object of {name.of} as if it were a dictionary")
        if items:
            self.put(target, items[::2], items[1::2])
        if name.value is None:
            return _rebuild().rebuilt(self, name.of, target, args, state)
        if state and not isinstance(target, StandIn):
            if not isinstance(name.value, type) or name.value in _WITHOUT_STATE:
                raise ValueError(f"its pickle changes an object of {name.of}, which takes no state")
            getattr(target, "__setstate__", partial(fill, target))(*state)
        return target


def _rebuild() -> ModuleType:
    from dcp_plugin.core.format.pickles import rebuild  # few values need it

    return rebuild


_WITHOUT_STATE = (Counter, set, complex, bytearray, torch.Tensor, torch.nn.Parameter, torch.Size, torch.UntypedStorage)
_CODECS = re.compile("utf[-_]?8|latin[-_]?1|ascii|", re.IGNORECASE)
"""Names of fast codecs. Others, such as punycode, take quadratic time."""
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "_codecs.encode": (str, str),
    "builtins.bytearray": ((bytes, str), str),
    "builtins.complex": ((int, float), (int, float)),
    "builtins.set": (list,),
    "collections.Counter": (dict,),
    "collections.OrderedDict": (),
    "torch._tensor._rebuild_from_type_v2": (FunctionType, type, tuple, object),
    **dict.fromkeys(("torch.Tensor", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage"), ()),
}
"""Types of arguments by global. With other arguments, these globals could allocate memory of any size, for example."""


def load(
    source: Archive | bytes, use: Use, wanted: Collection[int] | None = None, notes: list[str] | None = None
) -> tuple[Any, list[str]]:
    """Load a ``torch.save`` file.

    Args:
        source: The file; or its pickle, if the file has no storages.
        wanted: Positions of the records of storages to read; None for all. Tensors of other storages are on the meta
            device. If it is empty, all tensors are on the meta device.
        notes: List to which a line is added for each object that became a plain value.

    Returns:
        The content of the file, and the names of globals in it that the use does not know.

    Raises:
        Refused: The file needs a global that the use does not accept.
        UnsafeCheckpoint: Its values exceed the budget of :mod:`~dcp_plugin.core.format.pickles.walk`.
        Exception: The file is damaged, or would take more memory or time than a file of its size needs.
    """
    accepted = Accepted(use)
    archive, pickled = (None, source) if isinstance(source, bytes) else (source, source.read(PICKLE).tobytes())
    try:
        with collector_paused():
            root = nodes_of(pickled, accepted.get)
            if type(root) in LEAVES:  # a state may have thousands of numbers and texts, which need no walk
                return root, accepted.unknown
            with rebuilding_on("cpu" if wanted is None or wanted else "meta"):
                return Unpickler(archive, len(pickled), notes, wanted).of(root), accepted.unknown
    except (Refused, UnsafeCheckpoint):
        raise
    except Exception as error:
        if use is not VALUE and accepted.unknown:  # the pickle does something that only the real object supports
            raise Refused(accepted.unknown[0]) from error
        raise


def load_bytes(data: bytes | bytearray, use: Use, notes: list[str] | None = None) -> Any:
    """Return the content of a file in memory, as :func:`load`."""
    return load(pickle_in(data) or Archive(io.BytesIO(data), len(data)), use, notes=notes)[0]
