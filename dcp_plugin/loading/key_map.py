"""Which key of a checkpoint holds a key of the state.

An object of the state is stored under its own name, unless a rename says otherwise: one that the user has given
(:class:`~dcp_plugin.partial.PartialLoad`), or the prefix by which a module that was saved as a part of a larger
one, or the other way round, is found (:func:`find_prefix`). An optimizer follows its module.

Every key has exactly one place. A regular expression decides before prefixes, and of the prefixes the longest. Each
object has one prefix more, its own name, so keys without a rename are found by the same rule.

The other direction, from stored keys to ours, is needed for what is loaded as the checkpoint has it (data, the slots of
an optimizer), and to tell which stored keys have no target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from dcp_plugin.format.columns import default_path
from dcp_plugin.format.index import CheckpointIndex, Entry
from dcp_plugin.format.keys import join
from dcp_plugin.partial import PATTERN
from dcp_plugin.state.adapters import StateAdapter, ValueAdapter
from dcp_plugin.types import KeyPath

Prefixes = tuple[tuple[str, str], ...]
"""Prefix of our keys relative to an object -> prefix of full keys in the checkpoint. Longest first; the last is ``""``
on our side."""


def find_prefix(targets: Collection[str], stored: Iterable[str]) -> tuple[str, str] | None:
    """The one prefix by which all of ``targets`` and ``stored`` names, of which none agree, fit together.

    Either every target is stored behind the prefix, ``("", prefix)``; or every stored name is a target behind it,
    ``(prefix, "")``. None if there is no such prefix, or several.
    """
    there, here = dict.fromkeys(stored), dict.fromkeys(targets)
    outer = _prefixes(here, there)
    if len(outer) == 1:
        return "", outer[0]
    inner = _prefixes(there, here)
    return (inner[0], "") if not outer and len(inner) == 1 else None


def _prefixes(inner: dict[str, None], outer: dict[str, None]) -> list[str]:
    """Every prefix that makes all names of ``inner`` names of ``outer``."""
    if not inner:
        return []
    first = next(iter(inner))
    candidates = (name.removesuffix(first) for name in outer if name.endswith(f".{first}"))
    return [prefix for prefix in candidates if all(prefix + name in outer for name in inner)]


@dataclass(frozen=True)
class Rename:
    """``PartialLoad.rename``, parsed: prefixes longest first, patterns in the order given."""

    prefixes: tuple[tuple[str, str], ...] = ()
    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Rename:
        plain = {here: there for here, there in given.items() if not here.startswith(PATTERN)}
        patterns = [(re.compile(h.removeprefix(PATTERN)), t) for h, t in given.items() if h not in plain]
        return cls(_longest_first(plain), tuple(patterns))

    def by_pattern(self, key: str) -> str | None:
        """What the first regular expression that matches the whole key makes of it."""
        found = ((pattern.fullmatch(key), template) for pattern, template in self.patterns)
        return next((match.expand(template) for match, template in found if match), None)

    @property
    def without_empty(self) -> Rename:
        """For optimizers: the prefix ``""`` is about modules and data."""
        return Rename(tuple((here, there) for here, there in self.prefixes if here), self.patterns)

    def idle(self, keys: Collection[str]) -> list[str]:
        """The renames, as they were given, that match none of these keys."""
        patterns = [pattern for pattern, _ in self.patterns if not any(map(pattern.fullmatch, keys))]
        idle = [here for here, _ in self.prefixes if not any(key.startswith(here) for key in keys)]
        return idle + [PATTERN + pattern.pattern for pattern in patterns]


def prefixes_of(name: str, source: str, rename: Rename) -> Prefixes:
    """The prefixes of an object: those that were given for it, and its own name for all other keys.

    Args:
        source: The name of the object in the checkpoint.
    """
    front = f"{name}."
    rules: dict[str, str] = {}
    for here, there in rename.prefixes:
        if here.startswith(front):
            rules[here.removeprefix(front)] = there
        elif front.startswith(here):
            rules.setdefault("", there + front.removeprefix(here))
    rules.setdefault("", f"{source}.")
    return _longest_first(rules)


def _longest_first(rules: Mapping[str, str]) -> Prefixes:
    return tuple(sorted(rules.items(), key=lambda rule: -len(rule[0])))


class KeyMap:
    """The place of each key of one object.

    Args:
        kind: ``"module"``, ``"optimizer"``, or what data is called.
        source: The name of the object in the checkpoint.
        rules: The prefixes of the object.
        special: The keys whose place a regular expression decides: ours -> the full key in the checkpoint. An
            optimizer gives prefixes up to the dot on both sides.
        names: The keys that the object has (:meth:`StateAdapter.names`), needed if any is renamed. A stored key belongs
            to a module or an optimizer only where one of these is looked for; to data, everywhere.
    """

    def __init__(
        self,
        kind: str,
        source: str,
        rules: Prefixes,
        special: Mapping[str, str] | None = None,
        names: Iterable[str] = (),
    ) -> None:
        self.name = source
        self.unnamed_groups = False
        """Whether a stock optimizer's param groups are left out: their keys have no FQN that could be renamed."""
        self._rules = rules
        self._special = special or {}
        self._names = frozenset(names)
        self.is_of_another: Callable[[str], bool] | None = None
        """Whether a key, relative to the object, belongs to another object. None if its name overlaps with no other."""
        self._optimizer = kind == "optimizer"
        self._is_data = kind not in ("module", "optimizer")
        self._stored: dict[str, str] = {}

    @property
    def is_renamed(self) -> bool:
        """Whether any key is found elsewhere than under the object's name."""
        return self._rules != (("", f"{self.name}."),) or bool(self._special)

    def stored(self, key: str) -> str:
        """The full key in the checkpoint of a key relative to the object."""
        if key in self._stored:
            return self._stored[key]
        dotted = f"{key}." if self._optimizer else key  # all keys of a parameter
        found = self._special.get(dotted) or self._by_prefix(dotted)
        return found.removesuffix(".") if dotted != key or not key else found

    def entries(self, index: CheckpointIndex) -> tuple[dict[str, Entry], dict[str, KeyPath]]:
        """What is stored for the object, by our keys relative to it; and the path of each key, as far as it is known.

        The object's name itself, if it is a key, is the relative key ``""``.
        """
        found: dict[str, str] = {}
        paths: dict[str, KeyPath | None] = {}
        bare = self._by_prefix("").removesuffix(".")
        if bare in index:
            found[""], paths[""] = bare, ()
        renamed = self.is_renamed
        for here, there in self._rules_in_use():
            for full in _under(index, there):
                key, path = here + full.removeprefix(there), index.path_of(full)
                if not key or (renamed and (self._by_prefix(key) != full or _belongs(key, self._special))):
                    continue
                if self._optimizer and here and any(isinstance(step, int) for step in path):
                    self.unnamed_groups = True
                    continue
                found[key], paths[key] = full, _below(here, there, path)
        for key, full in self._special.items():
            for stored in _under(index, full) if self._optimizer else [full]:
                if stored in index:
                    mine = key + stored.removeprefix(full)
                    found[mine], paths[mine] = stored, None
        if self.is_of_another is not None:
            found = {key: full for key, full in found.items() if not self.is_of_another(key)}
        self._stored = self._without_second_names(found) if len(self._rules) > 1 or self._special else found
        self.unnamed_groups &= not any(key.startswith("param_groups.") for key in self._stored)
        at = {key: paths[key] or self._own_path(key) for key in self._stored}
        return (
            {key: index[full] for key, full in self._stored.items()},
            {key: path for key, path in at.items() if path is not None},
        )

    def _own_path(self, key: str) -> KeyPath | None:
        """The path of a key if the stored one does not tell; data knows its own paths."""
        if not key or self._is_data:
            return None if key else ()
        return tuple(key.split(".")) if self.is_renamed else default_path(key)

    def _rules_in_use(self) -> Prefixes:
        if self._is_data or not self.is_renamed:
            return self._rules
        used = {next(rule for rule in self._rules if name.startswith(rule[0])) for name in self._names}
        return tuple(rule for rule in self._rules if rule in used)

    def _by_prefix(self, key: str) -> str:
        return next(there + key.removeprefix(here) for here, there in self._rules if key.startswith(here))

    def _without_second_names(self, found: Mapping[str, str]) -> dict[str, str]:
        """What is stored once may be found under several of our names. Those that exist keep it; else only what it was
        renamed to does."""
        existing = {key for key in found if _belongs(key, self._names)}
        claimed = {found[key] for key in existing}
        renamed = {full for key, full in found.items() if full != join(self.name, key)}
        return {
            key: full
            for key, full in found.items()
            if key in existing or (full not in claimed and not (full in renamed and full == join(self.name, key)))
        }


def _belongs(key: str, names: Collection[str]) -> bool:
    """Return whether a key is one of the names, or lies under one that ends with a dot."""
    return key in names or any(key[: at + 1] in names for at, letter in enumerate(key) if letter == ".")


def _under(index: CheckpointIndex, prefix: str) -> Iterable[str]:
    return index.under(prefix) if prefix else index


def _below(here: str, there: str, path: KeyPath) -> KeyPath | None:
    """The path of our key, given that of the stored one, below the prefixes that the two have; None if the stored
    prefix ends inside of a step. Several names may be one step: in a flat dictionary that was saved."""
    front = tuple(here.removesuffix(".").split(".")) if here else ()
    text = ""
    for depth, step in enumerate(path):
        if text == there:
            return front + path[depth:]
        text += f"{step[1] if isinstance(step, tuple) else step}."
    return None


class OverlappingNames:
    """Objects whose names overlap: one name begins with the other, as ``a.b`` begins with ``a``.

    A key of the checkpoint belongs to the objects that have it now. If no object has it, it belongs to the object with
    the longest name that the key begins with. Making one is collective if a module among the objects contains FSDP1.
    """

    def __init__(self, adapters: Iterable[StateAdapter]) -> None:
        adapters = list(adapters)
        outer = {a.name for a in adapters if not (isinstance(a, ValueAdapter) and a.is_leaf)}  # those with keys below
        overlapping: set[str] = set()
        for name in (adapter.name for adapter in adapters if outer):  # there may be thousands
            if above := outer.intersection(name[:at] for at, letter in enumerate(name) if letter == "."):
                overlapping |= {name, *above}
        self._names = {a.name: frozenset(a.names()) for a in adapters if a.name in overlapping}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def is_of_another(self, name: str, key: str) -> bool:
        """Return whether a key, given relative to the object ``name``, belongs to another object."""
        if _belongs(key, self._names[name]):
            return False
        full = join(name, key)
        rivals = [other for other in self._names if other != name and f"{full}.".startswith(f"{other}.")]
        return any(len(o) > len(name) or _belongs(full[len(o) + 1 :], self._names[o]) for o in rivals)


class KeyMaps:
    """The key maps of one load. Modules come before their optimizers, which follow them.

    Args:
        modules: The names of the modules in the checkpoint, as far as it says; a stock one does not.
    """

    def __init__(self, rename: Rename, modules: Iterable[str]) -> None:
        self._rename, self._renames = rename, rename != Rename()
        self._modules = list(modules)
        self._followed: dict[nn.Module | None, tuple[str, Prefixes]] = {}
        self._overlapping = OverlappingNames(())

    def tell_apart(self, adapters: Iterable[StateAdapter]) -> None:
        """Note which objects have names that overlap. Collective if one of these contains FSDP1."""
        self._overlapping = OverlappingNames(adapters)

    def is_about(self, adapter: StateAdapter) -> bool:
        """Whether a prefix is about keys of this object, so that it says where the object is."""
        rename = self._rename.without_empty if adapter.kind == "optimizer" else self._rename
        front = f"{adapter.name}."
        return any(here.startswith(front) or front.startswith(here) for here, _ in rename.prefixes)

    def of(self, adapter: StateAdapter, source: str, prefix: tuple[str, str] | None = None) -> KeyMap:
        """Return where the keys of an object are. Collective if it contains FSDP1.

        Args:
            source: The name of the object in the checkpoint.
            prefix: What :func:`find_prefix` has found for it.
        """
        key_map = self._of(adapter, source, prefix)
        if adapter.name in self._overlapping:
            key_map.is_of_another = partial(self._overlapping.is_of_another, adapter.name)
        return key_map

    def _of(self, adapter: StateAdapter, source: str, prefix: tuple[str, str] | None) -> KeyMap:
        is_optimizer = adapter.kind == "optimizer"
        follows = is_optimizer and adapter.module in self._followed
        if prefix is None and not follows and not self._renames:
            return KeyMap(adapter.kind, source, (("", f"{source}."),))
        names = adapter.names()
        special: dict[str, str] = {}
        if is_optimizer:
            rename = self._rename.without_empty
            rules = prefixes_of(adapter.name, source, rename)
            if follows:
                rules, special = self._following(adapter.module, rules, names)
        else:
            rules = prefixes_of(adapter.name, source, self._rename)
            places = ((key, self._rename.by_pattern(join(adapter.name, key))) for key in names)
            special = {key: place for key, place in places if place is not None}
            if prefix is not None:
                here, there = prefix
                rules = _longest_first({"": f"{source}.", here: f"{source}.{there}"})
            if adapter.kind == "module":
                self._followed[adapter.module] = (adapter.name, rules)
        return KeyMap(adapter.kind, source, rules, special, names)

    def _following(
        self, module: nn.Module | None, own: Prefixes, names: Iterable[str]
    ) -> tuple[Prefixes, dict[str, str]]:
        """The prefixes of an optimizer, and the places that a regular expression decides: as those of its module.

        Prefixes that are about the optimizer's own keys go before those of the module.
        """
        name, followed = self._followed[module]
        # Keys of a stock checkpoint have one name in front.
        known = [name, *(self._modules or (there.partition(".")[0] for _, there in followed))]
        rules, (_, front) = dict(own), own[-1]
        if len(own) == 1:
            for here, there in followed:
                fqn = _without_name(there, known)
                if here or fqn:
                    rules |= {f"{kind}.{here}": f"{front}{kind}.{fqn}" for kind in ("state", "param_groups")}
        special = {}
        for key in names:
            kind, _, fqn = key.removesuffix(".").partition(".")
            if (place := self._rename.by_pattern(join(name, fqn))) is not None:
                special[key] = f"{front}{kind}.{_without_name(place, known)}."
        return _longest_first(rules), special


def _without_name(key: str, names: Iterable[str]) -> str:
    """A key of a module, or a prefix of keys, without the module's name: the longest of ``names`` in front of it."""
    known = [f"{name}." for name in names if name and key.startswith(f"{name}.")]
    return key.removeprefix(max(known, key=len)) if known else key
