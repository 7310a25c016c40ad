"""Where a part of the state is found in a checkpoint: under its own name, or under another.

A module may have been saved as a part of a larger one (the ``LightningModule`` around it, say), or the other way
round. Then its FQNs differ from the stored ones by one prefix, and so do those in its optimizer's keys.

Where the keys of a part are in a checkpoint if somebody has renamed them.

The rule: a key has exactly one place. A regular expression decides before prefixes, and of the prefixes the longest.
Each part has one prefix more, its own name, so that keys nobody renamed are found by the same rule.

The other direction, from what is stored to our keys, is needed too: for what is loaded as the checkpoint has it (data,
the slots of an optimizer), and to tell what of the checkpoint has no target.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from dcp_plugin.format.columns import default_path
from dcp_plugin.format.index import CheckpointIndex, Entry
from dcp_plugin.loading.partial import PATTERN
from dcp_plugin.planning.flatten import join
from dcp_plugin.state.adapters import StateAdapter
from dcp_plugin.types import KeyPath


@dataclass(frozen=True)
class Prefix:
    """What the checkpoint's FQNs have in front of ours (``added``), or ours in front of the checkpoint's."""

    added: str = ""
    dropped: str = ""

    def stored(self, fqn: str) -> str:
        return self.added + fqn.removeprefix(self.dropped)

    def here(self, stored: str) -> str | None:
        """Our name of a stored FQN; None if it is outside of what we load."""
        return self.dropped + stored.removeprefix(self.added) if stored.startswith(self.added) else None


@dataclass(frozen=True)
class Source:
    """The name of a part in the checkpoint, and how its keys are called there."""

    name: str
    kind: str
    prefix: Prefix = Prefix()

    def stored(self, key: str) -> str:
        """The full key in the checkpoint of a key relative to the part."""
        head, fqn = self._split(key)
        return join(self.name, head + self.prefix.stored(fqn))

    def entries(self, index: CheckpointIndex) -> tuple[dict[str, Entry], dict[str, KeyPath]]:
        """What is stored for the part, and the path of each key, by our keys relative to the part.

        The name itself, if it is a key, is the relative key ``""``.
        """
        entries: dict[str, Entry] = {}
        paths: dict[str, KeyPath] = {}
        for full in ([self.name] if self.name in index else []) + index.under(f"{self.name}."):
            head, fqn = self._split(full[len(self.name) + 1 :])
            here = self.prefix.here(fqn)
            if here is not None:
                entries[head + here] = index[full]
                paths[head + here] = _below(self.name, index.path_of(full), head + here)
        return entries, paths

    def _split(self, key: str) -> tuple[str, str]:
        """An optimizer's keys have ``state.`` or ``param_groups.`` before the FQN."""
        if self.kind != "optimizer":
            return "", key
        head, dot, rest = key.partition(".")
        return head + dot, rest


def _below(name: str, path: KeyPath, key: str) -> KeyPath:
    """The path of a key below a part. In the checkpoint the two may be one step: it was saved as a flat dictionary."""
    if path[0] == name:
        return path[1:]
    for depth in range(2, len(path) + 1):
        if ".".join(str(part[1] if isinstance(part, tuple) else part) for part in path[:depth]) == name:
            return path[depth:]
    return default_path(key)


def find_prefix(targets: Collection[str], stored: Iterable[str]) -> Prefix | None:
    """The one prefix by which all of ``targets`` and ``stored`` names, of which none agree, fit together.

    Either every target is stored behind the prefix, or every stored name is a target behind it.
    """
    there, here = dict.fromkeys(stored), dict.fromkeys(targets)
    outer = _prefixes(here, there)
    if len(outer) == 1:
        return Prefix(added=outer[0])
    inner = _prefixes(there, here)
    return Prefix(dropped=inner[0]) if not outer and len(inner) == 1 else None


def _prefixes(part: dict[str, None], whole: dict[str, None]) -> list[str]:
    """Every prefix that makes all names of ``part`` names of ``whole``."""
    if not part:
        return []
    first = next(iter(part))
    candidates = [name.removesuffix(first) for name in whole if name.endswith(f".{first}")]
    return [prefix for prefix in candidates if all(prefix + name in whole for name in part)]


@dataclass(frozen=True)
class Rename:
    """``PartialLoad.rename``, read: prefixes longest first, patterns in the order given."""

    prefixes: tuple[tuple[str, str], ...] = ()
    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Rename:
        plain = [(here, there) for here, there in given.items() if not here.startswith(PATTERN)]
        patterns = [(re.compile(h.removeprefix(PATTERN)), t) for h, t in given.items() if h.startswith(PATTERN)]
        return cls(tuple(sorted(plain, key=lambda rule: -len(rule[0]))), tuple(patterns))

    def by_pattern(self, key: str) -> str | None:
        """What the first regular expression that matches the whole key makes of it."""
        for pattern, template in self.patterns:
            if found := pattern.fullmatch(key):
                return found.expand(template)
        return None

    @property
    def without_empty(self) -> Rename:
        """For optimizers: the prefix ``""`` is about modules and data."""
        return Rename(tuple((here, there) for here, there in self.prefixes if here), self.patterns)

    def idle(self, keys: Collection[str]) -> list[str]:
        """The renames, as they were given, that match none of these keys."""
        idle = [here for here, _ in self.prefixes if not any(key.startswith(here) for key in keys)]
        return idle + [
            PATTERN + pattern.pattern for pattern, _ in self.patterns if not any(pattern.fullmatch(key) for key in keys)
        ]


Prefixes = tuple[tuple[str, str], ...]
"""Prefix of our keys relative to a part -> prefix of full keys in the checkpoint. Longest first; the last is ``""``."""


def prefixes_of(name: str, source: str, rename: Rename) -> Prefixes:
    """The prefixes of a part: those that were given for it, and its own name for all other keys.

    Args:
        source: The name of the part in the checkpoint.
    """
    front = f"{name}."
    rules: dict[str, str] = {}
    for here, there in rename.prefixes:
        if here.startswith(front):
            rules[here.removeprefix(front)] = there
        elif front.startswith(here):
            rules.setdefault("", there + front.removeprefix(here))
    rules.setdefault("", f"{source}.")
    return tuple(sorted(rules.items(), key=lambda rule: -len(rule[0])))


def prefixes_of_optimizer(name: str, source: str, rename: Rename, module: Prefixes, names: Iterable[str]) -> Prefixes:
    """The prefixes of an optimizer: its own if there are any, else those of its module.

    Args:
        module: The prefixes of its module.
        names: The modules in the checkpoint, whose names are no part of an FQN.
    """
    rules = prefixes_of(name, source, rename.without_empty)
    if len(rules) > 1:
        return rules
    ((_, front),) = rules
    for here, there in module:
        fqn = _without_name(there, names)
        if here or fqn:
            rules += tuple((f"{kind}.{here}", f"{front}{kind}.{fqn}") for kind in ("state", "param_groups"))
    return tuple(sorted(rules, key=lambda rule: -len(rule[0])))


def _without_name(key: str, names: Iterable[str]) -> str:
    """A key of a module, or a prefix of keys, without the module's name."""
    known = [f"{name}." for name in names if name and key.startswith(f"{name}.")]
    return key.removeprefix(max(known, key=len)) if known else key


class RenamedSource:
    """A part whose keys have other names in the checkpoint; used like :class:`~dcp_plugin.loading.key_map.Source`.

    Args:
        names: The adapter's keys (:meth:`StateAdapter.names`).
        rules: The prefixes of the part.
        special: The keys whose place a regular expression decides: ours -> the full key in the checkpoint. An
            optimizer gives prefixes up to the dot on both sides.
        paths: Where data has its keys, since the text does not say.
    """

    def __init__(
        self,
        kind: str,
        source: str,
        names: Iterable[str],
        rules: Prefixes,
        special: Mapping[str, str],
        paths: Mapping[str, KeyPath],
    ) -> None:
        self.name = source
        self.unnamed_groups = False
        """Whether a stock optimizer's param groups are left out: their keys have no FQN that could be renamed."""
        self._optimizer = kind == "optimizer"
        self._takes_all = kind not in ("module", "optimizer")
        self._names = frozenset(names)
        self._rules = rules
        self._special = special
        self._paths = paths
        self._stored: dict[str, str] = {}

    def stored(self, key: str) -> str:
        """The full key in the checkpoint of a key relative to the part."""
        if key in self._stored:
            return self._stored[key]
        dotted = f"{key}." if self._optimizer else key  # a parameter as a whole
        found = self._special.get(dotted) or self._by_prefix(dotted)
        return found.removesuffix(".") if dotted != key or not key else found

    def entries(self, index: CheckpointIndex) -> tuple[dict[str, Entry], dict[str, KeyPath]]:
        """What is stored for the part, and the path of each key, by our keys relative to the part."""
        paths: dict[str, KeyPath] = {}
        for here, there in self._rules_in_use():
            depth = there.count(".")
            for full in _under(index, there):
                key, path = here + full.removeprefix(there), index.path_of(full)
                if not key or self._by_prefix(key) != full or _belongs(key, self._special):
                    continue
                if self._optimizer and here and any(isinstance(step, int) for step in path):
                    self.unnamed_groups = True
                    continue
                self._stored[key] = full
                paths[key] = _path(here, path[depth:]) if _whole_segments(there, path) else self._own_path(key)
        bare = self._by_prefix("").removesuffix(".")
        if bare in index:
            self._stored[""], paths[""] = bare, ()
        for key, full in self._special.items():
            for stored in _under(index, full) if self._optimizer else [full]:
                if stored in index:
                    mine = key + stored.removeprefix(full)
                    self._stored[mine], paths[mine] = stored, self._own_path(mine)
        self._drop_second_names()
        self.unnamed_groups &= not any(key.startswith("param_groups.") for key in self._stored)
        return {key: index[full] for key, full in self._stored.items()}, {key: paths[key] for key in self._stored}

    def _rules_in_use(self) -> Prefixes:
        """A module or an optimizer has nothing to do with what lies where none of its keys is looked for. Data takes
        what is there."""
        if self._takes_all:
            return self._rules
        used = {next(rule for rule in self._rules if name.startswith(rule[0])) for name in self._names}
        return tuple(rule for rule in self._rules if rule in used)

    def _own_path(self, key: str) -> KeyPath:
        return self._paths.get(key) or tuple(key.split("."))

    def _by_prefix(self, key: str) -> str:
        return next(there + key.removeprefix(here) for here, there in self._rules if key.startswith(here))

    def _drop_second_names(self) -> None:
        """What is stored once may be found under several of our names. Those that exist keep it; else only what it was
        renamed to does."""
        existing = {key for key in self._stored if _belongs(key, self._names)}
        claimed = {self._stored[key] for key in existing}
        renamed = {full for key, full in self._stored.items() if full != join(self.name, key)}
        self._stored = {
            key: full
            for key, full in self._stored.items()
            if key in existing or (full not in claimed and not (full in renamed and full == join(self.name, key)))
        }


def _belongs(key: str, names: Collection[str]) -> bool:
    """Whether a key is one of the names, or lies under one that ends with a dot."""
    return key in names or any(key[: at + 1] in names for at, letter in enumerate(key) if letter == ".")


def _under(index: CheckpointIndex, prefix: str) -> Iterable[str]:
    return index.under(prefix) if prefix else index


def _whole_segments(prefix: str, path: KeyPath) -> bool:
    """Whether a prefix is a number of whole steps of a path."""
    steps = [step[1] if isinstance(step, tuple) else step for step in path[: prefix.count(".")]]
    return ".".join(map(str, steps)) + "." == prefix if prefix else True


def _path(here: str, rest: KeyPath) -> KeyPath:
    return (*here.removesuffix(".").split("."), *rest) if here else rest


class Renaming:
    """The places of the parts of one load. Modules come before their optimizers, which follow them.

    Args:
        modules: The names of the modules in the checkpoint, as far as it says; a stock one does not.
    """

    def __init__(self, rename: Rename, modules: Iterable[str]) -> None:
        self._rename = rename
        self._modules = list(modules)
        self._followed: dict[nn.Module, tuple[str, Prefixes]] = {}

    def is_about(self, part: StateAdapter) -> bool:
        """Whether a prefix is about keys of this part, so that it says where the part is."""
        rename = self._rename.without_empty if part.kind == "optimizer" else self._rename
        front = f"{part.name}."
        return any(here.startswith(front) or front.startswith(here) for here, _ in rename.prefixes)

    def place(self, part: StateAdapter, source: str) -> RenamedSource | None:
        """Where the part is if some of its keys are renamed; None if none are. Collective if it contains FSDP1.

        Args:
            source: The name of the part in the checkpoint.
        """
        if self._rename == Rename():
            return None
        names = part.names()
        if part.kind == "optimizer":
            rules, special = self._of_optimizer(part, source, names)
        else:
            rules = prefixes_of(part.name, source, self._rename)
            places = {key: self._rename.by_pattern(join(part.name, key)) for key in names}
            special = {key: place for key, place in places.items() if place is not None}
            if part.kind == "module" and part.module is not None:
                self._followed[part.module] = (part.name, rules)
        if rules == (("", f"{source}."),) and not special and not self.is_about(part):
            return None
        paths = part.gather()[1] if part.kind not in ("module", "optimizer") else {}
        return RenamedSource(part.kind, source, names, rules, special, paths)

    def _of_optimizer(self, part: StateAdapter, source: str, names: list[str]) -> tuple[Prefixes, dict[str, str]]:
        if part.module not in self._followed:
            return prefixes_of(part.name, source, self._rename.without_empty), {}
        module, followed = self._followed[part.module]
        known = [module, *self._modules]
        if not self._modules:  # keys of a stock checkpoint have one name in front
            known += [there.partition(".")[0] for _, there in followed]
        rules = prefixes_of_optimizer(part.name, source, self._rename, followed, known)
        special = {}
        for key in names:
            kind, _, fqn = key.removesuffix(".").partition(".")
            place = self._rename.by_pattern(join(module, fqn))
            if place is not None:
                special[key] = f"{rules[-1][1]}{kind}.{_without_name(place, known)}."
        return rules, special
