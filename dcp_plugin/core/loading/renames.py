"""Keys of a state that are stored under other names. A load imports this module only if it has such keys.

A rename comes from the user (:class:`~dcp_plugin.core.partial.PartialLoad`) or from :func:`find_prefix`. That function
finds a module that was saved as a part of a larger module, or the reverse. An optimizer follows its module. For objects
whose names overlap (``a`` and ``a.b``), this module decides to which of them a stored key belongs.

Every key has exactly one place. Regular expressions take precedence over prefixes, and longer prefixes over shorter
ones. The object's own name is an additional prefix, so the same rule finds keys without a rename.

The reverse mapping, from stored keys to keys of the state, serves two purposes: objects that load the keys that the
checkpoint has (data, the slots of an optimizer), and the search for stored keys without a target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from dcp_plugin.core.errors import CheckpointMismatch, some
from dcp_plugin.core.format.index import CheckpointIndex, Entry, KeyPath
from dcp_plugin.core.format.keys import join
from dcp_plugin.core.loading import KeyMap, path_below
from dcp_plugin.core.partial import PATTERN, PartialLoad
from dcp_plugin.core.state.adapters import StateAdapter
from dcp_plugin.core.state.names import CleanNames, unwrapped

Prefixes = tuple[tuple[str, str], ...]
"""Pairs of prefixes: of keys relative to an object, and of full keys in the checkpoint. Longest first; the last pair
has ``""`` for the object."""


def find_prefix(targets: Collection[str], stored: Iterable[str]) -> tuple[str, str] | None:
    """Return the prefix that makes ``targets`` and ``stored`` agree, as a rule for :data:`Prefixes`.

    The result is ``("", prefix)`` if every target is stored with the prefix, or ``(prefix, "")`` if every stored name
    with the prefix is a target. It is None if there is no such prefix, or more than one.
    """
    stored_names, target_names = dict.fromkeys(stored), dict.fromkeys(targets)
    outer = _prefixes(target_names, stored_names)
    if len(outer) == 1:
        return "", outer[0]
    inner = _prefixes(stored_names, target_names)
    return (inner[0], "") if not outer and len(inner) == 1 else None


def _prefixes(inner: dict[str, None], outer: dict[str, None]) -> list[str]:
    """Return every prefix that turns all names of ``inner`` into names of ``outer``."""
    if not inner:
        return []
    first = next(iter(inner))
    candidates = (name.removesuffix(first) for name in outer if name.endswith(f".{first}"))
    return [prefix for prefix in candidates if all(prefix + name in outer for name in inner)]


@dataclass(frozen=True)
class Rename:
    """Parsed ``PartialLoad.rename``: prefixes, longest first, and patterns in the user's order."""

    prefixes: tuple[tuple[str, str], ...] = ()
    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()

    @classmethod
    def of(cls, renames: Mapping[str, str]) -> Rename:
        plain = {target: source for target, source in renames.items() if not target.startswith(PATTERN)}
        patterns = [(re.compile(h.removeprefix(PATTERN)), t) for h, t in renames.items() if h not in plain]
        return cls(_longest_first(plain), tuple(patterns))

    def by_pattern(self, key: str) -> str | None:
        """Return the stored key according to the first regular expression that matches the complete key, or None."""
        matches = ((pattern.fullmatch(key), template) for pattern, template in self.patterns)
        return next((match.expand(template) for match, template in matches if match), None)

    @property
    def without_empty(self) -> Rename:
        """The renames for optimizers: the prefix ``""`` applies only to modules and data."""
        return Rename(
            tuple((prefix, stored_prefix) for prefix, stored_prefix in self.prefixes if prefix), self.patterns
        )

    def idle(self, keys: Collection[str]) -> list[str]:
        """Return the renames that match none of these keys, as the user wrote them."""
        patterns = [pattern for pattern, _ in self.patterns if not any(map(pattern.fullmatch, keys))]
        idle = [prefix for prefix, _ in self.prefixes if not any(key.startswith(prefix) for key in keys)]
        return idle + [PATTERN + pattern.pattern for pattern in patterns]


def prefixes_of(name: str, source: str, rename: Rename) -> Prefixes:
    """Return the prefixes of an object: the user's renames for it, and its own name for all other keys.

    Args:
        source: The name of the object in the checkpoint.
    """
    front = f"{name}."
    rules: dict[str, str] = {}
    for prefix, stored_prefix in rename.prefixes:
        if prefix.startswith(front):
            rules[prefix.removeprefix(front)] = stored_prefix
        elif front.startswith(prefix):
            rules.setdefault("", stored_prefix + front.removeprefix(prefix))
    rules.setdefault("", f"{source}.")
    return _longest_first(rules)


def _longest_first(rules: Mapping[str, str]) -> Prefixes:
    return tuple(sorted(rules.items(), key=lambda rule: -len(rule[0])))


class RenamedKeys(KeyMap):
    """The place of each key of an object of which any key may be stored under another name.

    Args:
        kind: As in :class:`KeyMap`.
        source: The name of the object in the checkpoint.
        rules: The prefixes of the object.
        special: Keys whose place a regular expression decides: relative key -> full key in the checkpoint. For an
            optimizer, both are prefixes that end with a dot.
        names: The keys of the object (:meth:`StateAdapter.names`). For a module or an optimizer, only prefixes that
            apply to one of these names are searched; for data, all prefixes are.
        is_of_another: Returns whether a relative key belongs to another object; None if no name overlaps.
    """

    def __init__(
        self,
        kind: str,
        source: str,
        rules: Prefixes,
        special: Mapping[str, str] | None = None,
        names: Iterable[str] = (),
        is_of_another: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(kind, source)
        self._rules = rules
        self._special = special or {}
        self._names = frozenset(names)
        self._is_of_another = is_of_another
        self._optimizer = kind == "optimizer"
        self._stored: dict[str, str] = {}
        self.is_renamed = rules != (("", f"{source}."),) or bool(special)

    def stored(self, key: str) -> str:
        if key in self._stored:
            return self._stored[key]
        dotted = f"{key}." if self._optimizer else key  # a prefix of all keys of the parameter
        place = self._special.get(dotted) or self._by_prefix(dotted)
        return place.removesuffix(".") if dotted != key or not key else place

    def entries(self, index: CheckpointIndex) -> tuple[dict[str, Entry], dict[str, KeyPath]]:
        full_keys: dict[str, str] = {}
        paths: dict[str, KeyPath | None] = {}
        bare = self._by_prefix("").removesuffix(".")
        if bare in index:
            full_keys[""], paths[""] = bare, ()
        renamed = self.is_renamed
        for prefix, stored_prefix in self._rules_in_use():
            for full in _under(index, stored_prefix):
                key, path = prefix + full.removeprefix(stored_prefix), index.path_of(full)
                if not key or (renamed and (self._by_prefix(key) != full or _belongs(key, self._special))):
                    continue
                if self._optimizer and prefix and any(isinstance(step, int) for step in path):
                    self.unnamed_groups = True
                    continue
                full_keys[key], paths[key] = full, path_below(prefix, stored_prefix, path)
        for key, full in self._special.items():
            for stored in _under(index, full) if self._optimizer else [full]:
                if stored in index:
                    relative = key + stored.removeprefix(full)
                    full_keys[relative], paths[relative] = stored, None
        if self._is_of_another is not None:
            full_keys = {key: full for key, full in full_keys.items() if not self._is_of_another(key)}
        self._stored = self._without_second_names(full_keys) if len(self._rules) > 1 or self._special else full_keys
        self.unnamed_groups &= not any(key.startswith("param_groups.") for key in self._stored)
        return self.entries_at(index, self._stored, paths)

    def own_path(self, key: str) -> KeyPath | None:
        path = super().own_path(key)
        return tuple(key.split(".")) if path and self.is_renamed else path

    def _rules_in_use(self) -> Prefixes:
        if self.is_data or not self.is_renamed:
            return self._rules
        used = {next(rule for rule in self._rules if name.startswith(rule[0])) for name in self._names}
        return tuple(rule for rule in self._rules if rule in used)

    def _by_prefix(self, key: str) -> str:
        return next(
            stored_prefix + key.removeprefix(prefix) for prefix, stored_prefix in self._rules if key.startswith(prefix)
        )

    def _without_second_names(self, full_keys: Mapping[str, str]) -> dict[str, str]:
        """Assign each stored key to a single relative key. Keys that the object has take precedence, and a renamed key
        takes precedence over the key of the same name."""
        existing = {key for key in full_keys if _belongs(key, self._names)}
        claimed = {full_keys[key] for key in existing}
        renamed = {full for key, full in full_keys.items() if full != join(self.name, key)}
        return {
            key: full
            for key, full in full_keys.items()
            if key in existing or (full not in claimed and not (full in renamed and full == join(self.name, key)))
        }


def _belongs(key: str, names: Collection[str]) -> bool:
    """Return whether a key is one of the names, or starts with a name that ends with a dot."""
    return key in names or any(key[: at + 1] in names for at, letter in enumerate(key) if letter == ".")


def _under(index: CheckpointIndex, prefix: str) -> Iterable[str]:
    return index.under(prefix) if prefix else index


class Renames:
    """The renamed keys of one load. Modules must precede their optimizers, which follow their prefixes.

    Args:
        renames: ``rename`` of the partial load.
        modules: Names of the modules in the checkpoint, where recorded; a stock checkpoint records none.
        overlapping: Keys of the objects whose names overlap: one name begins with the other, as ``a.b`` begins with
            ``a``.
    """

    def __init__(
        self, renames: Mapping[str, str], modules: Iterable[str], overlapping: Mapping[str, frozenset[str]]
    ) -> None:
        self.rename = Rename.of(renames)
        self._modules = list(modules)
        self._followed: dict[nn.Module | None, tuple[str, Prefixes]] = {}
        self._overlapping = overlapping

    def _is_of_another(self, name: str, key: str) -> bool:
        """Return whether a key, given relative to the object ``name``, belongs to another object.

        A key of the checkpoint belongs to the objects that have it now. If no object has it, it belongs to the object
        with the longest name that the key begins with.
        """
        if _belongs(key, self._overlapping[name]):
            return False
        full = join(name, key)
        rivals = [other for other in self._overlapping if other != name and f"{full}.".startswith(f"{other}.")]
        return any(len(o) > len(name) or _belongs(full[len(o) + 1 :], self._overlapping[o]) for o in rivals)

    def is_about(self, adapter: StateAdapter) -> bool:
        """Return whether a renamed prefix covers keys of this object and so determines its place."""
        rename = self.rename.without_empty if adapter.kind == "optimizer" else self.rename
        front = f"{adapter.name}."
        return any(prefix.startswith(front) or front.startswith(prefix) for prefix, _ in rename.prefixes)

    def of(self, adapter: StateAdapter, source: str, prefix: tuple[str, str] | None = None) -> KeyMap:
        """Return the key map of an object. Collective if the object contains FSDP1.

        Args:
            source: The name of the object in the checkpoint.
            prefix: Result of :func:`find_prefix` for the object.
        """
        is_optimizer, overlaps = adapter.kind == "optimizer", adapter.name in self._overlapping
        follows = is_optimizer and adapter.module in self._followed
        if prefix is None and not follows and self.rename == Rename() and not overlaps:
            return KeyMap(adapter.kind, source)
        names = adapter.names()
        special: dict[str, str] = {}
        if is_optimizer:
            rules = prefixes_of(adapter.name, source, self.rename.without_empty)
            if follows:
                rules, special = self._following(adapter.module, rules, names)
        else:
            rules = prefixes_of(adapter.name, source, self.rename)
            places = ((key, self.rename.by_pattern(join(adapter.name, key))) for key in names)
            special = {key: place for key, place in places if place is not None}
            if prefix is not None:
                here, stored_prefix = prefix
                rules = _longest_first({"": f"{source}.", here: f"{source}.{stored_prefix}"})
            if adapter.kind == "module":
                self._followed[adapter.module] = (adapter.name, rules)
        is_of_another = partial(self._is_of_another, adapter.name) if overlaps else None
        return RenamedKeys(adapter.kind, source, rules, special, names, is_of_another)

    def _following(
        self, module: nn.Module | None, own: Prefixes, names: Iterable[str]
    ) -> tuple[Prefixes, dict[str, str]]:
        """Return the prefixes of an optimizer and its keys with places from regular expressions, derived from its
        module.

        Prefixes for the optimizer's own keys take precedence over those of the module.
        """
        name, followed = self._followed[module]
        # A stock checkpoint records no names of modules; the first step of a prefix is the name.
        module_names = [name, *(self._modules or (stored_prefix.partition(".")[0] for _, stored_prefix in followed))]
        rules, (_, front) = dict(own), own[-1]
        if len(own) == 1:
            for prefix, stored_prefix in followed:
                fqn = _without_name(stored_prefix, module_names)
                if prefix or fqn:
                    rules |= {f"{kind}.{prefix}": f"{front}{kind}.{fqn}" for kind in ("state", "param_groups")}
        special = {}
        for key in names:
            kind, _, fqn = key.removesuffix(".").partition(".")
            if (place := self.rename.by_pattern(join(name, fqn))) is not None:
                special[key] = f"{front}{kind}.{_without_name(place, module_names)}."
        return _longest_first(rules), special


def _without_name(key: str, names: Iterable[str]) -> str:
    """Return a key or prefix without the name of its module, which is the longest of ``names`` that it starts with."""
    fronts = [f"{name}." for name in names if name and key.startswith(f"{name}.")]
    return key.removeprefix(max(fronts, key=len)) if fronts else key


def locate(partial: PartialLoad, adapters: list[StateAdapter]) -> PartialLoad:
    """Find the sub-module of a partial load, if it has one. No communication.

    Raises:
        TypeError: ``partial`` is no PartialLoad. Settings from a file may have any type, whatever the annotation is.
        CheckpointMismatch: The sub-module is in no module of the state.
    """
    if not isinstance(partial, PartialLoad):
        raise TypeError(f"partial must be a dcp_plugin.PartialLoad, not a {type(partial).__name__}")
    if partial.of is None:
        return partial
    of_modules = (adapter for adapter in adapters if adapter.kind == "module")
    modules = {adapter.name: adapter.module for adapter in of_modules if adapter.module is not None}
    for candidate in unwrapped(partial.of.module):
        for prefix, module in modules.items():
            for name, child in module.named_modules(remove_duplicate=False):
                if child is candidate:
                    inner = CleanNames(module)(name)
                    return partial.located(f"{prefix}.{inner}." if inner else f"{prefix}.")
    kind = type(unwrapped(partial.of.module)[-1]).__name__
    labels = [
        f"{prefix!r}, a {type(unwrapped(module)[-1]).__name__}{_inside(module)}" for prefix, module in modules.items()
    ]
    raise CheckpointMismatch(
        f"PartialLoad.submodule: this {kind} is in no module of the state, which has "
        f"{'; '.join(labels) or 'no module at all'}. Give the object that is a part of the model itself, not a copy "
        f"or a rebuilt model."
    )


def _inside(module: nn.Module) -> str:
    clean = CleanNames(module)
    names = dict.fromkeys(clean(name) for name, _ in module.named_modules())
    children = [name for name in names if name and "." not in name]
    return f" with {some(children)}" if children else ""
