"""One load into one module: straight into its memory, or through torch's own steps where its code takes part.

``nn.Module.load_state_dict`` hands each submodule the state dict: pre-hooks and ``_load_from_state_dict`` may rename
keys in it or resize what is about to be loaded, and post-hooks compute what follows from the weights. Most submodules
have nothing of that, and are filled in place. What lies below one that has is read into tensors of its own, handed over
as torch does it, and freed before the next is read: a submodule with a hook does not cost the model its fast path.

Hooks are called in the order of ``nn.Module.load_state_dict``, and as often.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dcp_plugin._torch import (
    DTensor,
    ShardedTensor,
    call_post_load_hooks,
    is_tensor,
    load_from_state_dict,
    overrides_load_state_dict,
    own_modules,
    own_state,
    sharded_like,
    takes_state_dict,
)
from dcp_plugin.planning.flatten import flatten, unflatten
from dcp_plugin.state import fsdp1
from dcp_plugin.state.module import ModuleState, apply_module, clean_keys, own_tensors, same_memory, same_parameter
from dcp_plugin.storage.index import Entry, StoredTensor
from dcp_plugin.types import KeyPath

Read = Callable[[dict[str, Any]], None]
"""Fills tensors, given by key relative to the module, from the checkpoint."""

_EXTRA_STATE = "_extra_state"
_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."
"""The one wrapper whose segment is in the paths of modules, and not in the keys of a state dict."""


@dataclass(frozen=True)
class Deferred:
    """A target that gets its memory when its submodule is loaded: with the stored shape and dtype."""

    entry: StoredTensor
    like: Any = None
    """The tensor of the module that it is for, whose distribution and device it gets; None if there is none."""

    @property
    def dtype(self) -> torch.dtype | None:
        """That of the module."""
        return self.like.dtype if is_tensor(self.like) else None

    def allocate(self) -> Any:
        shape, dtype, like = self.entry.shape, self.entry.dtype, self.like
        if isinstance(like, ShardedTensor):
            return sharded_like(like, [torch.empty_like(one.tensor, dtype=dtype) for one in like.local_shards()])
        if isinstance(like, DTensor):
            mesh, placements = like.device_mesh, like.placements
            if tuple(like.shape) == shape:
                return torch.empty_like(like.detach(), dtype=dtype, requires_grad=False)
            return torch.distributed.tensor.empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
        on_device = is_tensor(like) and not like.is_meta
        return torch.empty(shape, dtype=dtype, device=like.device if on_device else None)


@dataclass
class Incompatible:
    """What a load has noted: keys that were missing and unexpected, and errors in words."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class ModuleLoad:
    """One load into one module.

    Args:
        apply: Whether to load the module. If not, everything that is stored for it is read into :attr:`unapplied`.

    Making one is collective if the module contains FSDP1.
    """

    def __init__(self, module: nn.Module, apply: bool = True) -> None:
        self._module = module
        self._apply = apply
        self.state = ModuleState.of(module)
        self._fsdp1 = fsdp1.contains_fsdp1(module)
        self._overridden = not self._fsdp1 and overrides_load_state_dict(module)
        self._hooked: set[str] = set()
        if not apply or self._overridden:
            self._hooked = {""}
        elif not self._fsdp1:  # whose load goes through load_state_dict as a whole
            self._hooked = set(_topmost_that_take_a_state_dict(module, ""))
        self._below = [self.state.clean_prefix(prefix) for prefix in self._hooked]
        self._judging = [below for below in self._below if not apply or not self._is_sharded(below)]
        self._free = {key for key, value in self.state.values.items() if not is_tensor(value) or _is_extra(key)}
        self._paths: Mapping[str, KeyPath] = {}
        self._tied: dict[str, str] = {}
        self._wanted: set[str] = set()
        self.unapplied: dict[str, Any] = {}
        """What was read and not applied, by clean FQN."""

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> tuple[dict[str, Any], list[str]]:
        """What to read: a tensor to fill, :class:`Deferred`, or None for a value; and the keys that are missing.

        What is missing where the module's own code may know a way out is not listed; :meth:`take` returns it.
        """
        self._paths, values = paths, self.state.values
        targets: dict[str, Any] = {}
        absent: list[str] = []
        for key, value in values.items():
            names = [key] if key in stored else []
            if key in self._free:  # what is stored says what it is, and it may be a tree
                names = names or [name for name in stored if name.startswith(f"{key}.")]
                inner = {} if is_tensor(value) else flatten({key: value})[0]
                targets |= {name: _room(stored[name], inner.get(name)) for name in names}
            elif names and self._is_hooked(key):
                targets[key] = _room(stored[key], value)
            elif names:
                targets[key] = value
            if not names and not _is_empty(value):  # stock DCP stores nothing for an empty container
                absent.append(key)
        judged = [key for key in stored if key not in targets and _is_below(key, self._judging)]
        targets |= {key: _room(stored[key], None) for key in judged}
        self._tied = self._filled_under_another_name(absent, targets)
        for key, other in self._tied.items():  # else it would be applied with the old values
            values[key] = values[other]
        self._wanted = set(targets)
        return targets, [key for key in absent if key not in self._tied and not _is_below(key, self._judging)]

    def alien_to(self, stored: Mapping[str, Entry]) -> list[str]:
        """The tensors of the module, if nothing of it is stored under its own names."""
        values = self.state.values
        if any(key in stored for key in values):
            return []
        return [key for key in values if key not in self._free] or list(values)

    def take(self, filled: Mapping[str, Any], read: Read, strict: bool) -> Incompatible:
        """Load what :meth:`want` has asked for, or a part of it. Collective if the module contains FSDP1.

        Args:
            strict: What to say to a ``load_state_dict`` of the module's own.

        Returns:
            What the module's own code has left missing and unexpected.
        """
        load = _Taking(self, dict(filled), read)
        found = Incompatible()
        if not self._apply:
            self.unapplied = load.values_below("")
        elif self._fsdp1:
            apply_module(self._module, {**self.state.values, **load.values_below("")}, strict=False)
        elif self._overridden:
            result = self._module.load_state_dict(load.whole(), **({} if strict else {"strict": False}))
            found.missing, found.unexpected = clean_keys(self.state.clean, result)
        else:
            load.walk(self._module, "", None, found)
        clean = self.state.clean
        missing = [key for key in dict.fromkeys(map(clean, found.missing)) if key not in self._tied]
        return Incompatible(missing, list(dict.fromkeys(map(clean, found.unexpected))), found.errors)

    def _is_hooked(self, key: str) -> bool:
        return _is_below(key, self._below)

    def _is_sharded(self, below: str) -> bool:
        """Then its hooks get what the module has, sharded as it is, and what else is stored stays unread: nobody
        could tell how to distribute it."""
        sharded = (key for key, value in self.state.values.items() if isinstance(value, (DTensor, ShardedTensor)))
        return any(key.startswith(below) for key in sharded)

    def _filled_under_another_name(self, absent: list[str], targets: Iterable[str]) -> dict[str, str]:
        """Tied weights that the checkpoint has under one of their names only, as Hugging Face's have; and that name."""
        if not absent:
            return {}
        same = same_parameter(self._module)
        filled = {same[key]: key for key in targets if key in same}
        return {key: filled[same[key]] for key in absent if same.get(key) in filled}


class _Taking:
    """The second half of a load: what was read, on its way into the module."""

    def __init__(self, load: ModuleLoad, filled: dict[str, Any], read: Read) -> None:
        self._load, self._filled, self._read = load, filled, read
        complete = filled.keys() == load._wanted
        self._touched = None if complete else {name[: name.rfind(".") + 1] for name in _with_parents(filled)}
        self._copies: dict[str, dict[str, str]] = defaultdict(dict)
        own = own_tensors(load._module)
        for key, value in load.state.values.items():
            free = key in load._free
            here = key in filled or key in load._tied or (free and bool(self._parts(key, filled)))
            if here and not load._is_hooked(key) and (free or key not in own or not same_memory(own[key], value)):
                self._copies[key[: key.rfind(".") + 1]][key.rpartition(".")[2]] = key

    def walk(self, module: nn.Module, prefix: str, state: dict[str, Any] | None, found: Incompatible) -> None:
        """The recursion of ``nn.Module.load_state_dict``.

        Args:
            state: What a module above has been handed; None if all that is below it was filled in place.
        """
        clean = self._load.state.clean_prefix(prefix)
        if state is None and self._touched is not None and clean not in self._touched:
            return
        metadata = self._load.state.metadata.get(prefix.removesuffix("."), {})
        if state is None and prefix in self._load._hooked:
            state = self._handed_to(prefix)
        handed = state if state is not None else self._of_one(module, prefix, self._copies.get(clean, {}))
        if handed is not None:
            load_from_state_dict(module, handed, prefix, metadata, found.missing, found.unexpected, found.errors)
        for name, child in own_modules(module):
            below = f"{prefix}{name}."
            part = None if state is None else {key: value for key, value in state.items() if key.startswith(below)}
            self.walk(child, below, part, found)
        call_post_load_hooks(module, found.missing, found.unexpected, of_torch_too=state is not None)

    def whole(self) -> OrderedDict[str, Any]:
        """The state dict of the whole module, for a ``load_state_dict`` of its own."""
        state: OrderedDict[str, Any] = self._handed_to("")
        state._metadata = self._load.state.metadata  # type: ignore[attr-defined]
        return state

    def values_below(self, below: str) -> dict[str, Any]:
        """Everything below a clean prefix, read, by clean FQN."""
        values = self._load.state.values
        found = self._read_now([name for name in self._filled if name.startswith(below)])
        mine = (key for key in values if key.startswith(below))
        ordered = {key: value for key in mine if (value := self._assembled(key, found)) is not _NOTHING}
        inside = {*ordered, *(name for key in self._load._free for name in self._parts(key, found))}
        ordered |= {name: value for name, value in found.items() if name not in inside}
        tied = {key: other for key, other in self._load._tied.items() if key.startswith(below)}
        return ordered | {key: found.get(other, values[other]) for key, other in tied.items()}

    def _handed_to(self, prefix: str) -> OrderedDict[str, Any]:
        """What torch would hand to a submodule: its part of the state dict, under the keys of ``state_dict()``."""
        below = self._load.state.clean_prefix(prefix)
        above = prefix.replace(_CHECKPOINT_WRAPPER, "")
        handed: OrderedDict[str, Any] = OrderedDict()
        for key, value in self.values_below(below).items():
            raw = self._load.state.raw.get(key, "")
            rest = raw.removeprefix(above) if raw.startswith(above) and raw else key.removeprefix(below)
            handed[prefix + rest] = value
        return handed

    def _of_one(self, module: nn.Module, prefix: str, copies: Mapping[str, str]) -> dict[str, Any] | None:
        """A state dict for one module without its children, if something of it was not filled in place. What was, is
        in it as itself, and copying it onto itself does nothing."""
        own = own_state(module)
        mine = {name: key for name, key in copies.items() if name in own or name == _EXTRA_STATE}
        if not mine:
            return None
        trees = [name for key in mine.values() if key in self._load._free for name in self._parts(key, self._filled)]
        found = self._read_now([name for name in (*mine.values(), *trees) if name in self._filled])
        values = {name: self._assembled(key, found) for name, key in mine.items()}
        values = {name: value for name, value in values.items() if value is not _NOTHING}
        return {f"{prefix}{name}": value for name, value in {**own, **values}.items()}

    def _read_now(self, names: list[str]) -> dict[str, Any]:
        """What was read before, and what is read now."""
        later = {name: value.allocate() for name in names if isinstance(value := self._filled[name], Deferred)}
        if later:
            self._read(later)
        return {name: later.get(name, self._filled[name]) for name in names}

    @staticmethod
    def _parts(key: str, found: Iterable[str]) -> list[str]:
        return [name for name in found if name.startswith(f"{key}.")]

    def _assembled(self, key: str, found: Mapping[str, Any]) -> Any:
        """The value of a key: what was read for it, or the tree of what was read below it."""
        if key in found:
            return found[key]
        if key in self._load._tied and key not in self._load._free:
            return self._load.state.values[key]
        parts = self._parts(key, found) if key in self._load._free else []
        if not parts:
            return _NOTHING
        paths = {name: ("it", *_tail(self._load._paths[name], name[len(key) + 1 :])) for name in parts}
        return unflatten({name: found[name] for name in parts}, paths)["it"]


_NOTHING = object()


def _topmost_that_take_a_state_dict(module: nn.Module, prefix: str) -> Iterator[str]:
    if takes_state_dict(module):
        yield prefix
        return
    for name, child in own_modules(module):
        yield from _topmost_that_take_a_state_dict(child, f"{prefix}{name}.")


def _room(entry: Entry, like: Any) -> Any:
    """A target for what is stored that is not the module's own memory, if it can have other memory."""
    if not isinstance(entry, StoredTensor):
        return None
    if not is_tensor(like) or is_lazy(like):
        return Deferred(entry)
    has_memory = type(like) in (torch.Tensor, nn.Parameter, nn.Buffer) or isinstance(like, (DTensor, ShardedTensor))
    return Deferred(entry, like) if has_memory else like


def _is_empty(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple)) and not value


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE


def _is_below(key: str, prefixes: Iterable[str]) -> bool:
    return any(key.startswith(prefix) for prefix in prefixes)


def _with_parents(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        while name:
            yield name
            name = name.rpartition(".")[0]


def _tail(path: KeyPath, name: str) -> KeyPath:
    """The end of a path that is called ``name``."""
    steps = [str(part[1] if isinstance(part, tuple) else part) for part in path]
    for count in range(1, len(path) + 1):
        if ".".join(steps[-count:]) == name:
            return path[-count:]
    return tuple(name.split("."))
