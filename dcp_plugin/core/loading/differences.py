"""Judgement of keys that only the state or only the checkpoint has, with a way out for each misfit.

A load imports this module in three cases: such keys exist, a partial load has a pattern that matches nothing, or other
ranks ask about their keys. Ranks may hold different keys, as pipeline stages do. A key that only the checkpoint has is
unexpected if no rank takes it (:mod:`~dcp_plugin.core.state.across_ranks`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from dcp_plugin.core.errors import first, some
from dcp_plugin.core.format.keys import join
from dcp_plugin.core.loading import KeyMap
from dcp_plugin.core.loading.matching import LoadMode, Matching
from dcp_plugin.core.loading.renames import Rename
from dcp_plugin.core.loading.suggestions import (
    Fit,
    about_excluded,
    about_front,
    about_globs,
    about_missing,
    about_optimizer,
    about_prefix,
    about_unexpected,
    about_unwrapped,
    about_wrapper,
    explained_by,
    fitting_renames,
)
from dcp_plugin.core.partial import PartialLoad, Policy
from dcp_plugin.core.state.across_ranks import Answer, Union
from dcp_plugin.core.state.module_load import Deferred
from dcp_plugin.core.tensors._torch import DTensor, ShardedTensor
from dcp_plugin.core.types import Wanted

if TYPE_CHECKING:
    from dcp_plugin.core.state.adapters import StateAdapter


class Differences:
    """Differences between the keys of a state and those of a checkpoint.

    Args:
        matching: The unfinished match of this rank. :meth:`judge` adds targets, problems and warnings to it.
    """

    def __init__(self, matching: Matching) -> None:
        self._matching = matching
        self._path, self._index = matching.path, matching.index
        self._given = matching.partial
        self._partial = matching.partial or PartialLoad()
        self._rename = Rename() if matching.renames is None else matching.renames.rename
        self._of_submodule = self._partial.of is not None
        self._strict, self._mode, self._warn = matching.strict, matching.mode, matching.warn
        self._keys, self._absent, self._optimizers = matching.keys, matching.absent, matching.optimizers
        self._missing: dict[str, str] = {}
        self._unexpected: list[str] = []
        self._found: set[str] = set()  # stored keys that a proposed rename would take, so they are not unexpected
        self._lacking: list[str] = []  # tensors that only the target has
        self._unread: list[str] = []  # tensors that only the checkpoint has, and that are not loaded

    def questions(self) -> list[str]:
        """Return the selected keys that the checkpoint has under the names of objects that do not have them."""
        keys: list[str] = []
        for name, key_map in self._matching.key_maps.items():
            want = self._matching.wanted[name]
            only_stored = (key for key in (*want.unexpected, *want.extra_targets) if self._matching.selects(name, key))
            keys += map(key_map.stored, only_stored)
        return keys

    def answer(self, asked: list[str]) -> Answer:
        """Return which of the keys this rank takes."""
        stored = self._matching.stored
        taken, owned = set(stored.values()), set[str]()
        for adapter in self._matching.adapters:
            targets = self._matching.wanted[adapter.name].targets
            has_own = adapter.kind in ("module", "optimizer")
            owned.update(
                stored[join(adapter.name, key)]
                for key, target in targets.items()
                if has_own or isinstance(target, (DTensor, ShardedTensor))
            )
            if adapter.kind == "optimizer":  # its names cover all slots that the checkpoint has for a parameter
                key_map = self._matching.key_maps[adapter.name]
                names = [key_map.stored(name.removesuffix(".")) for name in adapter.names()]
                taken.update(names)
                owned.update(names)
        return Answer.of(asked, taken, owned, self._matching.idle())

    def judge(self, union: Union) -> None:
        """Add problems and warnings to the match.

        Args:
            union: The answers of all ranks to the questions of all ranks.
        """
        self._union = union
        for adapter in self._matching.adapters:
            if adapter.name in self._matching.key_maps:
                key_map = self._matching.key_maps[adapter.name]
                self._note_differences(adapter, key_map, self._matching.wanted[adapter.name])
        if self._given is not None:
            self._judge_patterns()
        self._matching.judge_dtypes()
        self._judge_keys()
        if self._matching.problems:
            self._matching.problems.extend(about_excluded(self._matching.summary, self._matching.report.missing))

    def _note_differences(self, adapter: StateAdapter, key_map: KeyMap, want: Wanted) -> None:
        """Record the missing and unexpected keys of an object that are selected."""
        if want.missing_tensors or want.extra_targets:
            self._note_tensors(adapter, key_map, want)
        lacking = want.missing_tensors if self._mode is LoadMode.FILL else ()
        keys = [key for key in (*want.missing, *lacking) if self._matching.selects(adapter.name, key)]
        missing = {join(adapter.name, key): key_map.stored(key) for key in keys}
        stored = (key_map.stored(key) for key in want.unexpected if self._matching.selects(adapter.name, key))
        # Several keys of the target may map to the same stored key.
        unexpected = [key for key in dict.fromkeys(stored) if key not in self._union.taken]
        self._matching.report.missing.extend(missing)
        self._matching.report.unexpected.extend(unexpected)
        if want.tolerated:
            policies = {self._partial.missing if missing else "", self._partial.unexpected if unexpected else ""}
            if policies - {"", "ignore"}:
                differ = some([*missing, *unexpected])
                self._warn(f"{self._path} and {adapter.name!r} differ in {differ}: {want.tolerated}.")
            return
        name = adapter.name
        if missing and name in self._optimizers and not self._index.under(f"{name}."):
            self._absent.append(about_optimizer(name, self._optimizers[name], self._index, self._matching.names_here))
        else:
            self._missing.update(missing)
        self._unexpected.extend(unexpected)

    def _note_tensors(self, adapter: StateAdapter, key_map: KeyMap, want: Wanted) -> None:
        """Record tensors of data or of a Stateful that only the object or only the checkpoint has. Make targets for
        tensors that the object lacks but gets nevertheless."""
        if self._mode is LoadMode.RESTORE:
            lacking = [
                join(adapter.name, key) for key in want.missing_tensors if self._matching.selects(adapter.name, key)
            ]
            self._matching.report.missing.extend(lacking)
            self._lacking.extend(lacking)
        handed = []
        for key, target in want.extra_targets.items():
            stored, full = key_map.stored(key), join(adapter.name, key)
            if not self._matching.selects(adapter.name, key):
                continue
            if self._is_handed(adapter, stored, want.saved_empty or key in want.extra_in_gaps):
                made = target.allocate() if adapter.kind != "module" and isinstance(target, Deferred) else target
                if self._matching.accept(full, made, want.unfillable.get(key)):
                    want.targets[key] = made
                    self._matching.note_stored(full, stored)
                    handed.append(key)
            elif stored not in self._union.taken:
                self._matching.report.unexpected.append(stored)
                if adapter.kind == "stateful" or self._partial.unexpected != "ignore":
                    self._unread.append(stored)
        if handed:  # sorted in the order of the save: an object rebuilt from these keys then has its original order
            order = self._index.slots
            place = {key: order[self._matching.stored[join(adapter.name, key)]] for key in want.targets}
            want.targets = dict(sorted(want.targets.items(), key=lambda item: place[item[0]]))

    def _is_handed(self, adapter: StateAdapter, stored: str, has_room: bool) -> bool:
        """Return whether an object gets an entry that only the checkpoint has under the object's name."""
        if adapter.kind in ("module", "optimizer") or self._mode is LoadMode.RESTORE or has_room:
            # From a file, stock hands all weights to None, and to a module whose own state_dict is empty on this rank.
            # A mapping with modules of other ranks below its name is neither.
            gets_all = has_room and self._mode is LoadMode.RESTORE and adapter.name in self._matching.objects
            return gets_all or stored not in self._union.owned
        judges = adapter.kind == "stateful" and self._strict and self._partial.unexpected == "error"
        return judges and stored not in self._union.taken

    def _judge_patterns(self) -> None:
        """Add a problem for each pattern that matches no key and for each prefix that the checkpoint does not have."""
        problems, keys = self._matching.problems, self._keys
        globs = [glob for glob in self._partial.idle(keys) if glob in self._union.idle]
        problems += about_globs(globs, keys)
        problems += [
            f"rename has {here!r}, which no key of the target starts with or matches{about_front(here, keys)}"
            for here in self._rename.idle(keys)
            if here in self._union.idle
        ]
        for here, source in self._rename.prefixes:
            unmatched = [
                key for key, stored in self._missing.items() if key.startswith(here) and stored.startswith(source)
            ]
            if unmatched and source and not self._index.under(source):
                renames = self._fits(unmatched, self._free())
                self._found |= explained_by(renames, unmatched)
                problems.append(about_prefix(here, source, renames, self._of_submodule))
                for key in unmatched:
                    del self._missing[key]

    def _judge_keys(self) -> None:
        """Add problems or warnings for missing and unexpected keys, according to the policies."""
        if self._lacking:
            self._warn(f"{self._path} lacks tensors that the target has: {some(self._lacking)}: they are not restored.")
        if self._unread:
            self._warn(
                f"{self._path} has tensors that the target does not have: {some(self._unread)}: they are not loaded. "
                "An empty mapping takes all that is stored under its name."
            )
        before = len(self._matching.problems)
        if lines := self._about_wrapper():
            self._missing.clear()
        else:
            lines = list(self._absent)
        free = self._free() if self._missing else []
        renames = self._fits(self._missing, free)
        if self._missing:
            lines += about_missing(self._missing, renames, self._index, self._of_submodule)
        if lines:
            self._apply(self._partial.missing, lines, "they keep their values")
        explained = self._found | explained_by(renames, self._missing)
        if unexpected := [key for key in self._unexpected if key not in explained]:
            self._apply(self._partial.unexpected, about_unexpected(unexpected), "they are not loaded")
        if len(self._matching.problems) > before:
            everything = 'strict=False, or PartialLoad(missing="ignore", unexpected="ignore"), loads what fits'
            a_part = 'missing="ignore" and unexpected="ignore" load what fits'
            self._matching.problems.append(everything if self._given is None else a_part)
        elif self._given is not None and lines and not self._matching.targets and not self._matching.deferred:
            advice = some(lines, 3, "; ")
            self._warn(f"{self._path}: nothing is loaded, because nothing that is selected is in it: {advice}.")

    def _about_wrapper(self) -> list[str]:
        """Return a line if the checkpoint has the complete state under one name more or one name less."""
        names = self._matching.names_here
        if self._partial.rename or self._matching.stored or not names:
            return []
        if any(name in self._index or self._index.under(f"{name}.") for name in names):
            return []
        if len(self._matching.lone) == len(names) == 1:
            line = about_unwrapped(names[0], self._matching.lone[0].names(), self._index)
        else:
            line = about_wrapper(names, self._index)
        return [line] if line else []

    def _apply(self, policy: Policy, lines: list[str], outcome: str) -> None:
        if policy == "warn":
            self._warn(f"{self._path}: {some(lines, separator='; ')}: {outcome}.")
        elif policy == "error" and self._strict:
            self._matching.problems.extend(first(lines))

    def _fits(self, keys: Collection[str], free: Collection[str]) -> list[Fit]:
        """Return the renames that would find missing keys. For a sub-module, only the prefix of its source can change.

        The result is empty if ranks take different keys: a rename that helps one rank would mislead another.
        """
        if self._union.ranks_differ:
            return []
        fits = fitting_renames(keys, free, self._matching.stored)
        if not self._of_submodule:
            return fits
        (prefix,) = self._partial.rename
        return [fit.below(prefix) for fit in fits if prefix.startswith(fit.here)]

    def _free(self) -> list[str]:
        """Return the keys of the checkpoint that no target takes."""
        taken = set(self._matching.stored.values())
        return [key for key in self._index if key not in taken]
