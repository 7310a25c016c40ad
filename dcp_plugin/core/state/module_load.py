"""One load into one module: directly into its memory, or through torch's own steps if its code takes part.

Most submodules have no code that takes part in a load, and are filled in place. Others have: ``nn.Module`` passes the
state dict to each submodule, whose pre-hooks and ``_load_from_state_dict`` may rename keys or resize tensors, and whose
post-hooks compute values from the loaded weights. The state of such a submodule is read into separate tensors, handed
over as torch does it, and freed before the next is read.

The rule: hooks are called in the order of ``nn.Module.load_state_dict``, and as often.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dcp_plugin.core.format.index import Entry, KeyPath, StoredTensor, places_of
from dcp_plugin.core.format.keys import flatten, name_of, unflatten, with_types_of
from dcp_plugin.core.state.module import (
    ModuleState,
    apply_module,
    call_load_state_dict,
    own_tensors,
    same_memory,
    same_parameter,
)
from dcp_plugin.core.state.names import contains_fsdp1
from dcp_plugin.core.tensors._torch import DTensor, ShardedTensor, empty_like, is_meta, is_tensor
from dcp_plugin.core.tensors._torch_modules import (
    Incompatible,
    call_post_load_hooks,
    has_extra_state,
    has_post_load_hooks,
    load_from_state_dict,
    overrides_load_state_dict,
    own_modules,
    own_state,
    restore_quantization,
    takes_state_dict,
)
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS, is_stored_whole
from dcp_plugin.core.types import Wanted

Read = Callable[[dict[str, Any]], None]
"""Function that fills tensors, given by key relative to the module, from the checkpoint."""

_EXTRA_STATE = "_extra_state"
_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."
"""Segment of the activation checkpointing wrapper. It is in the paths of modules, but not in the keys of a state
dict."""


@dataclass(frozen=True)
class Deferred:
    """Target that gets memory of the stored shape and dtype when its submodule is loaded."""

    entry: StoredTensor
    like: Any = None
    """Tensor of the module whose distribution and device the target gets; None if the module has no such tensor."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype in the module; None if no tensor of the module is replaced."""
        return self.like.dtype if is_tensor(self.like) else None

    def allocate(self) -> Any:
        shape, dtype, like = self.entry.shape, self.entry.dtype, self.like
        if isinstance(like, ShardedTensor) or (isinstance(like, DTensor) and tuple(like.shape) == shape):
            return empty_like(like, dtype)
        if isinstance(like, DTensor):
            mesh, placements = like.device_mesh, like.placements
            return torch.distributed.tensor.empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
        on_device = is_tensor(like) and not is_meta(like)
        return self.entry.empty(like.device if on_device else "cpu", dtype)


class ModuleLoad:
    """One load into one module.

    Args:
        apply: True to load the module. If false, all state that is stored for it is read into :attr:`unapplied`.

    Construction is collective if the module contains FSDP1. :meth:`want` and :meth:`take` are called once, in this
    order.
    """

    def __init__(self, module: nn.Module, apply: bool = True) -> None:
        self._module = module
        self._apply = apply
        self.state = ModuleState.of(module)
        self._fsdp1 = contains_fsdp1(module)
        self._overridden = not self._fsdp1 and overrides_load_state_dict(module)
        # Prefixes of the submodules to which a state dict is handed over, in the names of the wrapped module.
        self._hooked: set[str] = set()
        if not apply or self._overridden:
            self._hooked = {""}
        elif not self._fsdp1:  # FSDP1 is loaded through load_state_dict
            self._hooked = set(_prefixes(module, takes_state_dict, topmost=True))
        values, clean = self.state.values, self.state.clean_prefix
        # The keys of values that are no tensors, and of extra state. The checkpoint may have each as a tree of leaves.
        self._free = {k for k, value in values.items() if not is_tensor(value) or k.rpartition(".")[2] == _EXTRA_STATE}
        self._below = set(map(clean, self._hooked))
        """Clean prefixes of the submodules to which a state dict is handed over."""
        sharded = {
            parent
            for key, value in values.items()
            if isinstance(value, (DTensor, ShardedTensor))
            for parent in _parents(key)
        }
        # The prefixes in ``_below`` whose code also gets stored keys that the module lacks, and judges missing ones.
        # Hooks in a sharded submodule get only the keys that the module has, sharded as they are. The distribution of
        # other stored keys is unknown, so these stay unread.
        self._judging = {below for below in self._below if not apply or below not in sharded}
        # The prefixes of submodules with hooks after the load, which may take keys off the list of missing ones.
        forgiving = _prefixes(module, has_post_load_hooks, topmost=False) if apply and not self._fsdp1 else ()
        self._forgiving = set(map(clean, forgiving))
        self._own = own_tensors(module)
        self._same = same_parameter(module, self._own)
        self._apart = self._tied_to_hooked()  # keys that are read into separate memory, although no hook sees them
        self._paths: Mapping[str, KeyPath] = {}
        self._parts: dict[str, list[str]] = {}  # key in ``_free`` -> the stored names of its leaves
        self._tied: dict[str, str] = {}  # tied weight -> its other name, under which the checkpoint has it
        self._wanted: set[str] = set()
        self._left_to_hooks: set[str] = set()
        self.unapplied: dict[str, Any] = {}
        """State that was read and not applied, by clean FQN."""

    def want(self, stored: Mapping[str, Entry], paths: Mapping[str, KeyPath]) -> Wanted:
        """Decide what to read, given the stored entries.

        Missing keys that the module's own code may provide are ``left_to_hooks``.
        """
        self._paths, values = paths, self.state.values
        self._parts = defaultdict(list)
        for name in stored:
            tree = next((p[:-1] for p in _parents(name) if p[:-1] in self._free), "") if name not in values else ""
            if tree:  # the outermost tree that the name may be a part of
                self._parts[tree].append(name)
        targets: dict[str, Any] = {}
        received: set[str] = set()
        absent: list[str] = []
        refused = self._refused_ties(stored)
        for key, value in values.items():
            names = [key] if key in stored else []
            if key in self._free:  # the stored entries decide whether it is a value or a tree
                names = names or self._parts.get(key, [])
                inner = {} if is_tensor(value) else flatten({key: value})[0]
                targets |= {name: _target_for(stored[name], inner.get(name)) for name in names}
                received.update({*names} - inner.keys())
            elif names and (key in self._apart or _is_below(key, self._below)):
                targets[key] = _target_for(stored[key], value)
            elif names:
                targets[key] = value
            is_empty = isinstance(value, (dict, list, tuple)) and not value
            if not names and not is_empty:  # stock DCP stores no key for an empty container
                absent.append(key)
        extra = {
            key: _target_for(entry, None)
            for key, entry in stored.items()
            if key not in targets and _is_below(key, self._judging)
        }
        self._tied = self._filled_under_another_name(absent, targets)
        for key, other in self._tied.items():  # else the weight's old values would be handed to hooks
            values[key] = values[other]
        self._wanted = set(targets)
        absent = [key for key in absent if key not in self._tied]
        self._left_to_hooks = {key for key in absent if _is_below(key, self._judging | self._forgiving)}
        is_unmatched = not any(key in stored for key in values)
        return Wanted(
            targets,
            missing=[key for key in absent if key not in self._left_to_hooks],
            unexpected=[key for key in stored if key not in targets and key not in extra],
            extra_targets=extra,
            prefix_candidates=([key for key in values if key not in self._free] or list(values))
            if is_unmatched
            else [],
            left_to_hooks=[key for key in absent if key in self._left_to_hooks],
            received=received,
            unfillable=refused,
            saved_empty=self._overridden and not values,
        )

    def take(self, filled: Mapping[str, Any], read: Read, strict: bool) -> Incompatible:
        """Load the targets of :meth:`want`, or some of them. Collective if the module contains FSDP1.

        Args:
            strict: The argument for a ``load_state_dict`` of the module's own.

        Returns:
            The keys that the module's own code reports as missing and unexpected.
        """
        self._filled, self._read = filled, read
        self._sort_out()
        report = Incompatible()
        if not self._apply:
            self.unapplied = self._values_below("")
        elif self._fsdp1:
            apply_module(self._module, {**self.state.values, **self._values_below("")}, strict=False)
        elif self._overridden:
            silent_report = Incompatible([] if strict else [self.state.raw[key] for key in self._left_to_hooks])
            state: OrderedDict[str, Any] = self._handed_to("")
            state._metadata = self.state.metadata  # type: ignore[attr-defined]
            report = call_load_state_dict(self._module, state, self.state.raw.values(), strict) or silent_report
        else:
            self._walk(self._module, "", None, report)
            report.unexpected += self._lost()
        clean = self.state.clean
        # Keys that are in no state dict of the module are never saved, so they are not missing.
        unknown = self._missing_in_place - self._left_to_hooks
        missing = [key for key in dict.fromkeys(map(clean, report.missing)) if key not in self._tied.keys() | unknown]
        return Incompatible(missing, list(dict.fromkeys(map(clean, report.unexpected))), report.errors)

    def _lost(self) -> list[str]:
        """Return the keys of ``state_dict()`` whose loaded values the module does not have afterwards.

        Such a key is no parameter or buffer, and no code of the module takes it, so torch reports it as unexpected. A
        key may also be another name of filled memory, or a value that follows from loaded ones: then the module has the
        loaded value.
        """
        if not self._made:
            return []
        restore_quantization(self._module, {self.state.raw[key]: self._filled[key] for key in self._made})
        now = ModuleState.of(self._module).values
        return [
            self.state.raw[key]
            for key in self._made
            if key not in now
            or not (same_memory(now[key], self._filled[key]) or torch.equal(now[key], self._filled[key]))
        ]

    def _tied_to_hooked(self) -> set[str]:
        """Return the keys to fill in place only after a submodule with hooks has filled the same parameter."""
        if not self._below or "" in self._below:
            return set()
        hooked = {first for key, first in self._same.items() if _is_below(key, self._below)}
        return {key for key, first in self._same.items() if first in hooked and not _is_below(key, self._below)}

    def _refused_ties(self, stored: Mapping[str, Entry]) -> dict[str, str]:
        """Return the names of tied weights that have another value in the checkpoint than their first name, with the
        reason.

        If it is unknown whether the values are equal, the names are read one after the other, as torch loads them.
        """
        refused = {}
        for key, first in self._same.items():
            if key != first and {key, first} <= stored.keys() and places_of(stored[key]) != places_of(stored[first]):
                self._apart.add(key)
                of_key, of_first = (_hashes(stored[name]) for name in (key, first))
                if of_key is not None and of_first is not None and of_key != of_first:
                    refused[key] = (
                        f"here the same parameter as {first}, and has another value in the checkpoint, where the two "
                        f'were not tied. PartialLoad(exclude="*.{key}") loads the weight and the optimizer state of '
                        f"{first}"
                    )
        return refused

    def _filled_under_another_name(self, absent: list[str], targets: Iterable[str]) -> dict[str, str]:
        """Return the tied weights that the checkpoint has only under another name, as checkpoints of Hugging Face have,
        and that name."""
        same = self._same
        filled = {same[key]: key for key in targets if key in same} if absent and same else {}
        return {key: filled[same[key]] for key in absent if same.get(key) in filled}

    def _sort_out(self) -> None:
        """Assign the filled leaves to the modules that take them.

        A leaf below a submodule with hooks becomes a part of the state dict that is handed over. Any other leaf is in
        the module's memory already, or is copied into it.
        """
        complete = self._filled.keys() >= self._wanted
        self._touched = None if complete else {parent for name in self._filled for parent in _parents(name)}
        self._missing_in_place: set[str] = set()
        """Clean keys that torch would report as missing in submodules that were filled in place."""
        self._copies: dict[str, dict[str, str]] = defaultdict(dict)
        self._keys_below: dict[str, list[str]] = defaultdict(list)
        self._names_below: dict[str, list[str]] = defaultdict(list)
        if self._fsdp1 and self._apply:  # one call loads everything
            self._keys_below[""], self._names_below[""] = list(self.state.values), list(self._filled)
            return
        own = self._own
        self._made: list[str] = []  # keys of tensors that are no parameters or buffers, as far as they are filled
        for key, value in self.state.values.items():
            below = _topmost(key, self._below)
            if below is not None:
                self._keys_below[below].append(key)
                continue
            free = key in self._free
            here = self._is_filled(key) or (free and any(name in self._filled for name in self._parts[key]))
            if key in self._filled and key not in own and not free:
                self._made.append(key)
            got = self._filled.get(key, value)  # may be memory of another module, if the object is a list of modules
            apart = free or key in self._apart or key not in own or isinstance(got, Deferred)
            if here and (apart or not same_memory(own[key], got)):
                self._copies[_above(key)][key.rpartition(".")[2]] = key
        for name in self._filled:
            if (below := _topmost(name, self._below)) is not None:
                self._names_below[below].append(name)

    def _walk(self, module: nn.Module, prefix: str, state: dict[str, Any] | None, report: Incompatible) -> None:
        """Load a module and its children, in the recursion of ``nn.Module.load_state_dict``.

        Args:
            state: The state dict that a module above was handed; None if all state below it was filled in place.
        """
        clean = self.state.clean_prefix(prefix)
        if state is None and self._touched is not None and clean not in self._touched:
            return  # a partial load has filled nothing in this module or below it
        metadata = self.state.metadata.get(prefix.removesuffix("."), {})
        if state is None and prefix in self._hooked:
            state = self._handed_to(prefix)
        handed = state
        if state is None:
            # Filled in place: torch's step runs only for values to copy, and the missing keys are listed for hooks.
            handed = self._of_one(module, prefix, self._copies.get(clean, {}))
            absent = [name for name in own_state(module) if not self._is_filled(f"{clean}{name}")]
            report.missing += [f"{prefix}{name}" for name in absent]
            self._missing_in_place.update(f"{clean}{name}" for name in absent)
        if handed is not None:
            load_from_state_dict(module, handed, prefix, metadata, report)
        for name, child in own_modules(module):
            below = f"{prefix}{name}."
            part = None if state is None else {key: value for key, value in state.items() if key.startswith(below)}
            self._walk(child, below, part, report)
        call_post_load_hooks(module, report, of_torch_too=state is not None)

    def _values_below(self, below: str) -> dict[str, Any]:
        """Read all state below a clean prefix, by clean FQN."""
        keys, filled = self._keys_below[below], self._read_now(self._names_below[below])
        ordered = {key: value for key in keys if (value := self._assembled(key, filled)) is not _NOTHING}
        # Names that are no part of a value above are entries that only the checkpoint has.
        inside = {*ordered, *(name for key in ordered if key in self._free for name in self._parts[key])}
        ordered |= {name: value for name, value in filled.items() if name not in inside}
        tied = {key: self._tied[key] for key in keys if key in self._tied}
        return ordered | {key: filled.get(other, self.state.values[other]) for key, other in tied.items()}

    def _is_filled(self, key: str) -> bool:
        return key in self._filled or key in self._tied

    def _handed_to(self, prefix: str) -> OrderedDict[str, Any]:
        """Return the state dict that torch would hand to a submodule, under the keys of ``state_dict()``."""
        # Three kinds of names meet here: clean FQNs, keys of state_dict(), and paths of modules. The paths alone have
        # the segment of activation checkpointing.
        below = self.state.clean_prefix(prefix)
        above = prefix.replace(_CHECKPOINT_WRAPPER, "")
        raw = self.state.raw
        owners = {_above(key): _above(raw[key]) for key in self._keys_below[below] if key in raw}
        handed: OrderedDict[str, Any] = OrderedDict()
        for key, value in self._values_below(below).items():
            # A key that only the checkpoint has belongs to the nearest owner.
            owner = next((parent for parent in reversed(list(_parents(key))) if parent in owners), None)
            name = raw.get(key) or (owners[owner] + key[len(owner) :] if owner is not None else "")
            handed[prefix + (name[len(above) :] if name.startswith(above) and name else key[len(below) :])] = value
        return handed

    def _of_one(self, module: nn.Module, prefix: str, copies: Mapping[str, str]) -> dict[str, Any] | None:
        """Return a state dict for one module without its children, or None if all of its state was filled in place.

        The dict also has the tensors that were filled in place. Copying a tensor onto itself has no effect.
        """
        own = own_state(module)
        taken = own.keys() | ({_EXTRA_STATE} if has_extra_state(module) else set())
        copied = {name: key for name, key in copies.items() if name in taken}
        if not copied:
            return None
        trees = [name for key in copied.values() if key in self._free for name in self._parts[key]]
        filled = self._read_now([name for name in (*copied.values(), *trees) if name in self._filled])
        read = {name: value for name, key in copied.items() if (value := self._assembled(key, filled)) is not _NOTHING}
        return {f"{prefix}{name}": value for name, value in {**own, **read}.items()}

    def _read_now(self, names: list[str]) -> dict[str, Any]:
        """Return the values of some names; deferred targets are allocated and read now."""
        later = {name: value.allocate() for name in names if isinstance(value := self._filled[name], Deferred)}
        if later:
            self._read(later)
        return {name: later.get(name, self._filled[name]) for name in names}

    def _assembled(self, key: str, filled: Mapping[str, Any]) -> Any:
        """Return the value of a key: the leaf read for it, or the tree of the leaves read below it."""
        value = self.state.values[key]
        if key in filled:
            return with_types_of(value, filled[key])
        if key in self._tied and key not in self._free:  # the memory that was filled under the other name
            return value
        parts = [name for name in self._parts[key] if name in filled] if key in self._free else []
        if not parts:
            return _NOTHING
        paths = {name: ("it", *_tail(self._paths[name], name[len(key) + 1 :])) for name in parts}
        return with_types_of(value, unflatten({name: filled[name] for name in parts}, paths)["it"])


_NOTHING = object()


def _hashes(entry: Entry) -> list[Any] | None:
    """Return the hashes of a tensor's chunks; None if they are unknown, as in a stock checkpoint."""
    rows = [chunk.location.hashes for chunk in getattr(entry, "chunks", ())]
    return None if any(row is None for row in rows) else [row.tolist() for row in rows if row is not None]


def _prefixes(module: nn.Module, has: Callable[[nn.Module], bool], topmost: bool, prefix: str = "") -> Iterator[str]:
    """Yield the prefixes of the submodules for which ``has`` is true. With ``topmost``, leave out those below
    another."""
    if is_match := has(module):
        yield prefix
    for name, child in () if is_match and topmost else own_modules(module):
        yield from _prefixes(child, has, topmost, f"{prefix}{name}.")


def _target_for(entry: Entry, like: Any) -> Any:
    """Return a target in separate memory for a stored entry. The module's own tensor is the target if its class has no
    other memory."""
    if not isinstance(entry, StoredTensor):
        return None
    if not is_tensor(like) or is_lazy(like):
        return Deferred(entry)
    plain = type(like) in EXACTLY_TENSORS and like.layout is torch.strided and not is_stored_whole(like)
    return Deferred(entry, like) if plain or isinstance(like, (DTensor, ShardedTensor)) else like


def _parents(key: str) -> Iterator[str]:
    """Yield the prefixes that a key is below: of the root and of each module around it, the outermost first."""
    yield ""
    at = key.find(".")
    while at >= 0:
        yield key[: at + 1]
        at = key.find(".", at + 1)


def _above(key: str) -> str:
    return key[: key.rfind(".") + 1]


def _topmost(key: str, prefixes: Collection[str]) -> str | None:
    return next((parent for parent in _parents(key) if parent in prefixes), None) if prefixes else None


def _is_below(key: str, prefixes: Collection[str]) -> bool:
    return _topmost(key, prefixes) is not None


def _tail(path: KeyPath, name: str) -> KeyPath:
    """Return the end of a path that has the name ``name``."""
    tails = (path[at:] for at in range(len(path) - 1, -1, -1))
    return next((tail for tail in tails if name_of(tail) == name), tuple(name.split(".")))
