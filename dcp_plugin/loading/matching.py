"""The match between targets and stored keys, and the list of misfits, both complete before a byte is overwritten.

A load executes the match, and ``dcp-plugin load-plan`` prints it. Problems are collected, so that a single error names
all of them. Ranks may hold different keys, as pipeline stages do. Each rank therefore matches its own objects. Keys
that only the checkpoint has are judged after the ranks have exchanged the keys that they take
(:mod:`~dcp_plugin.loading.union`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from dcp_plugin.errors import CheckpointMismatch, first, some
from dcp_plugin.format.columns import NO_TENSOR
from dcp_plugin.format.keys import join, without_rank
from dcp_plugin.loading.key_map import KeyMap, KeyMaps, Rename, find_prefix
from dcp_plugin.loading.suggestions import (
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
    fitting_renames,
    taken_by,
)
from dcp_plugin.loading.union import Answer, Union
from dcp_plugin.partial import PartialLoad, Policy
from dcp_plugin.paths import Where
from dcp_plugin.records import LoadReport, Match, OpenCheckpoint
from dcp_plugin.state.adapters import OptimizerAdapter, StateAdapter, ValueAdapter
from dcp_plugin.state.module_load import Deferred
from dcp_plugin.state.names import CleanNames, unwrapped
from dcp_plugin.state.optimizer import class_name
from dcp_plugin.state.per_rank import RankEntry
from dcp_plugin.tensors._torch import DTensor, ShardedTensor, is_meta, is_tensor, sharded_value
from dcp_plugin.types import LocalChunk, ShardedValue, Wanted


class LoadMode(Enum):
    """Rule for data and Stateful objects whose tensors differ from those of the checkpoint."""

    FILL = "fill"
    """The target determines the loaded keys: its tensors must be in the checkpoint, with its shapes."""
    RESTORE = "restore"
    """The checkpoint determines the loaded keys: an object gets the tensors that it had at the save."""


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
    modules = [adapter for adapter in adapters if adapter.kind == "module" and adapter.module is not None]
    for candidate in unwrapped(partial.of.module):
        for adapter in modules:
            assert adapter.module is not None
            for name, child in adapter.module.named_modules(remove_duplicate=False):
                if child is candidate:
                    inner = CleanNames(adapter.module)(name)
                    return partial.located(f"{adapter.name}.{inner}." if inner else f"{adapter.name}.")
    kind = type(unwrapped(partial.of.module)[-1]).__name__
    labels = [
        f"{adapter.name!r}, a {type(unwrapped(adapter.module)[-1]).__name__}{_inside(adapter.module)}"
        for adapter in modules
        if adapter.module
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


class Matching:
    """Comparison of the objects of a state with a checkpoint.

    Args:
        path: The path of the load, for messages.
        partial: The rules of a partial load; None for a load of everything, which converts dtypes.
        strict: If true, missing and unexpected keys are errors, unless ``partial`` sets another policy.
        dry_run: If true, nothing will be read, so targets on the meta device need no memory.
        mode: Rule for tensors of data and Stateful objects.

    :meth:`run` matches, :meth:`judge` adds problems and warnings.
    """

    def __init__(
        self,
        path: Where,
        opened: OpenCheckpoint,
        partial: PartialLoad | None,
        strict: bool,
        dry_run: bool,
        mode: LoadMode,
    ) -> None:
        self._path, self._dry_run, self._mode = path, dry_run, mode
        self._index, self._kinds, self._summary = opened.index, opened.kinds, opened.summary
        self._given = partial
        self._partial = partial or PartialLoad()
        self._of_submodule = self._partial.of is not None
        self._rename = Rename.of(self._partial.rename)
        self._key_maps = KeyMaps(self._rename, [name for name, kind in self._kinds.items() if kind == "module"])
        self._strict = strict
        self._keys: list[str] = []
        self._adapters: list[StateAdapter] = []
        self._at: dict[str, KeyMap] = {}
        self._optimizers: dict[str, list[str]] = {}  # optimizers not stored under their names -> possible stored names
        self._names_here: list[str] = []
        self._lacking: list[str] = []  # tensors that only the target has
        self._unread: list[str] = []  # tensors that only the checkpoint has, and that are not loaded
        self._lone: list[StateAdapter] = []  # Stateful objects that are not in the checkpoint
        self._absent: list[str] = []  # a line for each object whose state the checkpoint cannot provide
        self._missing: dict[str, str] = {}
        self._unexpected: list[str] = []
        self._found: set[str] = set()  # stored keys that a proposed rename would take, so they are not unexpected
        self._union = Union()
        self.match = Match({}, {}, {}, {}, LoadReport(path))
        """The result of :meth:`run` and :meth:`judge`."""

    def run(self, adapters: list[StateAdapter]) -> None:
        """Match this rank's objects. Collective if a module contains FSDP1."""
        self._adapters, self._names_here = adapters, [adapter.name for adapter in adapters]
        self._key_maps.distinguish(adapters)
        for adapter, name in self._names(adapters):
            if isinstance(adapter, ValueAdapter) and self._is_plain(adapter):
                self._take_plain(adapter)
            else:
                key_map, want = self._want(adapter, name)
                if want.unfit:
                    self._leave_optimizer(adapter, want, f"{name!r} {want.unfit}")
                elif isinstance(adapter, OptimizerAdapter) and (want.targets or want.extra or want.unexpected):
                    self._judge_class(adapter, name, want)
                self._select(adapter, key_map, want)
                self._at[adapter.name] = key_map

    @property
    def questions(self) -> list[str] | None:
        """Stored keys that only count as unexpected if no other rank takes them. An empty list means that other
        findings of this rank depend on the keys of other ranks; None means that no finding does."""
        wants = self.match.wanted.values()
        differs = any(want.missing or want.lacking or want.unexpected or want.extra for want in wants)
        if not differs and not self._absent and not self._idle():
            return None
        return [key for adapter in self._adapters for key in self._only_stored(adapter)]

    def answer(self, asked: list[str]) -> Answer:
        """Return which of the keys this rank takes. Called after :meth:`run`, and before :meth:`judge`."""
        stored = self.match.stored
        taken, owned = set(stored.values()), set[str]()
        for adapter in self._adapters:
            targets = self.match.wanted[adapter.name].targets
            has_own = adapter.kind in ("module", "optimizer")
            owned.update(
                stored[join(adapter.name, key)]
                for key, target in targets.items()
                if has_own or isinstance(target, (DTensor, ShardedTensor))
            )
            if adapter.kind == "optimizer":  # its names cover all slots that the checkpoint has for a parameter
                names = [self._at[adapter.name].stored(name.removesuffix(".")) for name in adapter.names()]
                taken.update(names)
                owned.update(names)
        return Answer.of(asked, taken, owned, self._idle())

    def judge(self, union: Union) -> None:
        """Add problems and warnings to the match.

        Args:
            union: The answers of all ranks to the :attr:`questions` of all ranks.
        """
        self._union = union
        for adapter in self._adapters:
            if adapter.name in self._at:
                self._note_differences(adapter, self._at[adapter.name], self.match.wanted[adapter.name])
        self._judge_patterns()
        self._judge_dtypes()
        self._judge_keys()
        if self.match.problems:
            self.match.problems.extend(about_excluded(self._summary, self.match.report.missing))

    def _only_stored(self, adapter: StateAdapter) -> list[str]:
        """Return the selected keys that the checkpoint has under an object's name and that the object does not have."""
        if adapter.name not in self._at:
            return []
        want, at = self.match.wanted[adapter.name], self._at[adapter.name]
        return [at.stored(key) for key in (*want.unexpected, *want.extra) if self._selected(adapter, key)]

    def _idle(self) -> frozenset[str]:
        """Return the globs and renames that match no key of this rank's objects."""
        if self._given is None:
            return frozenset()
        return frozenset((*self._partial.idle(self._keys), *self._rename.idle(self._keys)))

    def _is_plain(self, adapter: ValueAdapter) -> bool:
        """Return whether a value is a tensor, the checkpoint has a tensor under its name, and no partial load changes
        the match. A flat state has thousands of these; key maps for them would take most of the time of a load."""
        slot = self._index.slots.get(adapter.name)
        if self._given is not None or slot is None or not adapter.is_tensor:
            return False
        return self._index.table.dtype_of(slot) is not None and not self._index.under(f"{adapter.name}.")

    def _take_plain(self, adapter: ValueAdapter) -> None:
        name, tensor = adapter.name, adapter.value
        accepted = self._accept(name, tensor, None)
        self.match.wanted[name] = Wanted({"": tensor} if accepted else {})
        if accepted:
            self.match.stored[name] = name

    def _names(self, adapters: list[StateAdapter]) -> Iterable[tuple[StateAdapter, str]]:
        """Yield each object with its name in the checkpoint: its own name, or that of the only object of its kind.
        Per-rank values that stay as they are get no name and are left out."""
        for adapter in adapters:
            name, here = adapter.name, self._names_here
            if adapter.entry is not None and not self._key_maps.is_about(adapter):
                if (of_rank := self._name_on_rank(adapter.entry)) is not None:
                    yield adapter, of_rank
                continue
            named = adapter.kind in ("module", "optimizer") and name not in self._kinds
            if named and not self._key_maps.is_about(adapter):
                alike = [other for other, kind in self._kinds.items() if kind == adapter.kind and other not in here]
                if len(alike) == 1 and sum(other.kind == adapter.kind for other in adapters) == 1:
                    name = alike[0]
                    self._warn(f"{self._path} has no {adapter.name!r}; its only {adapter.kind}, {name!r}, is loaded.")
                elif adapter.kind == "optimizer":
                    self._optimizers[name] = alike
            yield adapter, name

    def _name_on_rank(self, entry: RankEntry) -> str | None:
        """Return the name in the checkpoint for a per-rank value; None if the value stays as it is."""
        own, entries = entry.name_on(entry.rank), self._entries(entry)
        if not entries:
            shared = entry.shared_name
            is_shared = shared in self._index or bool(self._index.under(f"{shared}."))
            if is_shared and entry.world_size > 1:
                self._warn(f"{self._path} has one value of {shared!r} for all ranks: each rank takes it.")
            return shared if is_shared else own
        saved_by = (self._summary and self._summary.world_size) or max(entries) + 1
        if saved_by == entry.world_size or (saved_by > entry.world_size and not entry.is_position):
            return own
        keys = [own + key for key in entries[min(entries)]]
        self._keys += keys
        is_kept = entry.is_position or entry.rank not in entries
        if self._given is None or any(map(self._partial.selects, keys)):
            line = _about_ranks(entry, saved_by)
            if self._mode is LoadMode.RESTORE:
                self._warn(f"{self._path}: {line}. To continue exactly, resume on {saved_by} ranks.")
            else:
                self._absent.append(f"{line} with strict=False, or in a resume_or_init. Else load on {saved_by} ranks")
            self.match.report.missing.extend([own] if is_kept else [])
        if is_kept:
            self.match.wanted[own] = Wanted()
            return None
        return own

    def _entries(self, entry: RankEntry) -> dict[int, list[str]]:
        """Return the stored keys of a per-rank value by rank, without the value's name in front."""
        entries: dict[int, list[str]] = defaultdict(list)
        steps = entry.above.count(".") + 1
        for key in self._index.under(f"{entry.above}."):
            rank = key.removeprefix(f"{entry.above}.").partition(".")[0]
            # The step is text. An integer step would be the index of a list.
            if rank.isdecimal() and self._index.path_of(key)[steps : steps + 1] == (rank,):
                name = entry.name_on(int(rank))
                if f"{key}.".startswith(f"{name}."):
                    entries[int(rank)].append(key.removeprefix(name))
        return entries

    def _want(self, adapter: StateAdapter, name: str) -> tuple[KeyMap, Wanted]:
        key_map = self._key_maps.of(adapter, name)
        want = self._ask(adapter, key_map)
        if want.targets and key_map.unnamed_groups:
            self._warn(
                f"{self._path} has the param groups of {name!r} as a list without names, which cannot be renamed: "
                f"{adapter.name!r} keeps its own hyper-parameters."
            )
        if want.unmatched and not key_map.is_renamed and not self._key_maps.is_about(adapter):
            prefix = find_prefix(want.unmatched, key_map.entries(self._index)[0])
            if prefix is not None:
                here, source = f"{adapter.name}.{prefix[0]}", f"{name}.{prefix[1]}"
                self._warn(f"{self._path} has {source}* for {here}*: it is loaded from there.")
                key_map = self._key_maps.of(adapter, name, prefix)
                want = adapter.want(*key_map.entries(self._index))
        return key_map, want

    def _judge_class(self, adapter: OptimizerAdapter, name: str, want: Wanted) -> None:
        """Warn if the state is that of another optimizer class. If this optimizer cannot use it, nothing is loaded."""
        recorded = self._summary.optimizers.get(name, "") if self._summary else ""
        current = class_name(type(adapter.optimizer))
        if recorded == current:
            return
        lacking = adapter.lacks(recorded)
        if not lacking:
            if recorded and want.targets:
                self._warn(f"{self._path} has {name!r} as the state of {recorded}; it is loaded into {current}.")
            return
        line = (
            f"{name!r} has the state of {recorded or 'another class of optimizers'}, which cannot serve "
            f"{adapter.name!r}, of {current}: it lacks {some(lacking, 4)}"
        )
        self._leave_optimizer(adapter, want, line)

    def _leave_optimizer(self, adapter: StateAdapter, want: Wanted, line: str) -> None:
        """Record that an optimizer loads nothing. ``line`` has the reason."""
        for keys in (want.targets, want.extra, want.missing, want.unexpected, want.lost):
            keys.clear()
        if self._strict and self._partial.missing == "error":
            way_out = f'PartialLoad(exclude="{adapter.name}.*"), or strict=False, leaves the optimizer as it is'
            self.match.problems.append(f"{line}. {way_out}")
        else:
            self._warn(f"{self._path}: {line}. The optimizer stays as it is.")

    def _ask(self, adapter: StateAdapter, key_map: KeyMap) -> Wanted:
        """Return the wants of an object. They are empty if no key of the object is selected, because an optimizer
        allocates memory for its wants. A module allocates nothing and is always asked, since its optimizer follows its
        place in the checkpoint."""
        entries, paths = key_map.entries(self._index)
        if self._given is not None and adapter.kind != "module":
            stored = (without_rank(key) for key in entries)
            keys = dict.fromkeys((*stored, *(name.removesuffix(".") for name in adapter.names())))
            if not any(self._selected(adapter, key) for key in keys):
                self._keys += [join(adapter.name, key) for key in keys]
                self.match.report.left_out.extend(join(adapter.name, key) for key in entries)
                return Wanted()
        return adapter.want(entries, paths)

    def _select(self, adapter: StateAdapter, key_map: KeyMap, want: Wanted) -> None:
        """Keep the selected targets of an object. Record keys that are left out, and lost per-rank state."""
        report, match = self.match.report, self.match
        missing_keys = (*want.missing, *want.undecided, *want.lacking)
        all_keys = (*want.targets, *want.extra, *missing_keys, *want.lost, *want.for_other_ranks)
        self._keys += [join(adapter.name, key) for key in all_keys]
        if self._mode is LoadMode.FILL and self._strict:
            want.targets |= want.resized
        chosen = {}
        for key, target in want.targets.items():
            full = join(adapter.name, key)
            if not self._selected(adapter, key):
                report.left_out.append(full)
            elif self._accept(full, target, want.refused.get(key)):
                chosen[key] = target
                self._note_stored(full, key_map.stored(want.stored_as.get(key, key)), key in want.stored_as)
        unselected = (key for key in (*missing_keys, *want.extra) if not self._selected(adapter, key))
        report.left_out.extend(join(adapter.name, key) for key in unselected)
        lost = [join(adapter.name, key) for key in want.lost if self._selected(adapter, key)]
        report.missing.extend(lost)
        if lost:
            self._absent.append(
                f"{some(lost, 3)}: each rank had its own, for its part of the parameter, and none had the part that "
                f"this rank has. It cannot be cut anew: load it on the layout it was saved on, or leave it out"
            )
        if adapter.kind == "stateful" and "" in want.missing:
            self._lone.append(adapter)
        want.targets = chosen
        match.wanted[adapter.name] = want

    def _note_stored(self, key: str, stored: str, is_of_rank: bool = False) -> None:
        self.match.stored[key] = stored
        if key != stored and not is_of_rank:
            self.match.report.renamed[key] = stored

    def _accept(self, key: str, target: Any, refused: str | None) -> bool:
        """Record a selected target, or the reason why it cannot be filled. Return whether it can be filled."""
        if isinstance(target, Deferred) and refused is None:
            self.match.deferred[key] = target
            return True
        try:
            if refused is not None:
                raise CheckpointMismatch(refused)
            self.match.targets[key] = self._described(target) if is_tensor(target) else None
        except CheckpointMismatch as error:
            self.match.problems.append(f"{key} is {error}")
            return False
        return True

    def _note_differences(self, adapter: StateAdapter, key_map: KeyMap, want: Wanted) -> None:
        """Record the missing and unexpected keys of an object that are selected."""
        if want.lacking or want.extra:
            self._note_tensors(adapter, key_map, want)
        lacking = want.lacking if self._mode is LoadMode.FILL else ()
        keys = [key for key in (*want.missing, *lacking) if self._selected(adapter, key)]
        missing = {join(adapter.name, key): key_map.stored(key) for key in keys}
        stored = (key_map.stored(key) for key in want.unexpected if self._selected(adapter, key))
        # Several keys of the target may map to the same stored key.
        unexpected = [key for key in dict.fromkeys(stored) if key not in self._union.taken]
        self.match.report.missing.extend(missing)
        self.match.report.unexpected.extend(unexpected)
        if want.tolerated:
            policies = {self._partial.missing if missing else "", self._partial.unexpected if unexpected else ""}
            if policies - {"", "ignore"}:
                differ = some([*missing, *unexpected])
                self._warn(f"{self._path} and {adapter.name!r} differ in {differ}: {want.tolerated}.")
            return
        name = adapter.name
        if missing and name in self._optimizers and not self._index.under(f"{name}."):
            self._absent.append(about_optimizer(name, self._optimizers[name], self._index, self._names_here))
        else:
            self._missing.update(missing)
        self._unexpected.extend(unexpected)

    def _note_tensors(self, adapter: StateAdapter, key_map: KeyMap, want: Wanted) -> None:
        """Record tensors of data or of a Stateful that only the object or only the checkpoint has. Make targets for
        tensors that the object lacks but gets nevertheless."""
        if self._mode is LoadMode.RESTORE:
            lacking = [join(adapter.name, key) for key in want.lacking if self._selected(adapter, key)]
            self.match.report.missing.extend(lacking)
            self._lacking.extend(lacking)
        handed = []
        for key, target in want.extra.items():
            stored, full = key_map.stored(key), join(adapter.name, key)
            if not self._selected(adapter, key):
                continue
            if self._is_handed(adapter, stored, key in want.in_room):
                made = target.allocate() if adapter.kind != "module" and isinstance(target, Deferred) else target
                if self._accept(full, made, want.refused.get(key)):
                    want.targets[key] = made
                    self._note_stored(full, stored)
                    handed.append(key)
            elif stored not in self._union.taken:
                self.match.report.unexpected.append(stored)
                if adapter.kind == "stateful" or self._partial.unexpected != "ignore":
                    self._unread.append(stored)
        if handed:  # sorted in the order of the save: an object rebuilt from these keys then has its original order
            order = self._index.slots
            place = {key: order[self.match.stored[join(adapter.name, key)]] for key in want.targets}
            want.targets = dict(sorted(want.targets.items(), key=lambda item: place[item[0]]))

    def _is_handed(self, adapter: StateAdapter, stored: str, has_room: bool) -> bool:
        """Return whether an object gets an entry that only the checkpoint has under the object's name."""
        if adapter.kind in ("module", "optimizer") or self._mode is LoadMode.RESTORE or has_room:
            return stored not in self._union.owned
        judges = adapter.kind == "stateful" and self._strict and self._partial.unexpected == "error"
        return judges and stored not in self._union.taken

    def _described(self, target: Any) -> ShardedValue:
        if not self._dry_run or not is_meta(target):
            return sharded_value(target)
        shape = tuple(target.shape)
        return ShardedValue(shape, target.dtype, (LocalChunk((0,) * len(shape), shape, target),))

    def _selected(self, adapter: StateAdapter, key: str) -> bool:
        return self._given is None or self._partial.selects(join(adapter.name, key))

    def _judge_patterns(self) -> None:
        """Add a problem for each pattern that matches no key and for each prefix that the checkpoint does not have."""
        if self._given is None:
            return
        problems = self.match.problems
        idle = self._idle() if self._union.idle is None else self._union.idle
        globs = [glob for glob in self._partial.idle(self._keys) if glob in idle]
        problems += about_globs(globs, self._keys, self._index)
        problems += [
            f"rename has {here!r}, which no key of the target starts with or matches{about_front(here, self._keys)}"
            for here in self._rename.idle(self._keys)
            if here in idle
        ]
        for here, source in self._rename.prefixes:
            unmatched = [
                key for key, stored in self._missing.items() if key.startswith(here) and stored.startswith(source)
            ]
            if unmatched and source and not self._index.under(source):
                free = self._free()
                renames = self._fits(unmatched, free)
                self._found |= taken_by(renames, unmatched)
                problems.append(about_prefix(here, source, renames, free, self._of_submodule))
                for key in unmatched:
                    del self._missing[key]

    def _judge_dtypes(self) -> None:
        """Record the targets whose dtype differs. Add a problem if a partial load does not allow conversion."""
        differ: dict[tuple[Any, Any], list[str]] = defaultdict(list)
        wanted = {key: target.dtype for key, target in self.match.targets.items() if target is not None}
        wanted |= {key: deferred.dtype for key, deferred in self.match.deferred.items() if deferred.dtype is not None}
        table, slots, stored = self._index.table, self._index.slots, self.match.stored
        numbers = table.columns["dtype"][np.array([slots[stored[key]] for key in wanted], np.int64)].tolist()
        for (key, here), number in zip(wanted.items(), numbers, strict=True):
            dtype = None if number == NO_TENSOR else table.torch_dtypes[number]
            if dtype is not None and dtype != here:
                if torch.can_cast(dtype, here):  # otherwise the planner reports a misfit
                    differ[here, dtype].append(key)
                self.match.report.cast.append(key)
        if self._given is None or self._given.cast:
            return
        for (here, saved), keys in differ.items():
            self.match.problems.append(
                f"{some(keys, 3)} {'is' if len(keys) == 1 else 'are'} {here} here and {saved} in the checkpoint: "
                f"cast=True converts"
            )

    def _judge_keys(self) -> None:
        """Add problems or warnings for missing and unexpected keys, according to the policies."""
        if self._lacking:
            self._warn(f"{self._path} lacks tensors that the target has: {some(self._lacking)}: they are not restored.")
        if self._unread:
            self._warn(
                f"{self._path} has tensors that the target does not have: {some(self._unread)}: they are not loaded. "
                "An empty mapping takes all that is stored under its name."
            )
        before = len(self.match.problems)
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
        explained = self._found | taken_by(renames, self._missing)
        if unexpected := [key for key in self._unexpected if key not in explained]:
            self._apply(self._partial.unexpected, about_unexpected(unexpected), "they are not loaded")
        if len(self.match.problems) > before:
            everything = 'strict=False, or PartialLoad(missing="ignore", unexpected="ignore"), loads what fits'
            a_part = 'missing="ignore" and unexpected="ignore" load what fits'
            self.match.problems.append(everything if self._given is None else a_part)
        elif self._given is not None and lines and not self.match.targets and not self.match.deferred:
            advice = some(lines, 3, "; ")
            self._warn(f"{self._path}: nothing is loaded, because nothing that is selected is in it: {advice}.")

    def _about_wrapper(self) -> list[str]:
        """Return a line if the checkpoint has the complete state under one name more or one name less."""
        names = self._names_here
        if self._partial.rename or self.match.stored or not names:
            return []
        if any(name in self._index or self._index.under(f"{name}.") for name in names):
            return []
        if len(self._lone) == len(names) == 1:
            line = about_unwrapped(names[0], self._lone[0].names(), self._index)
        else:
            line = about_wrapper(names, self._index)
        return [line] if line else []

    def _apply(self, policy: Policy, lines: list[str], outcome: str) -> None:
        if policy == "warn":
            self._warn(f"{self._path}: {some(lines, separator='; ')}: {outcome}.")
        elif policy == "error" and self._strict:
            self.match.problems.extend(first(lines))

    def _fits(self, keys: Collection[str], free: Collection[str]) -> list[Fit]:
        """Return the renames that would find missing keys. For a sub-module, only the prefix of its source can change.
        If ranks take different keys the result is empty, since a rename that helps one rank would mislead another."""
        if self._union.ranks_differ:
            return []
        fits = fitting_renames(keys, free, self.match.stored)
        if not self._of_submodule:
            return fits
        (prefix,) = self._partial.rename
        return [fit.below(prefix) for fit in fits if prefix.startswith(fit.here)]

    def _free(self) -> list[str]:
        """Return the keys of the checkpoint that no target takes."""
        taken = set(self.match.stored.values())
        return [key for key in self._index if key not in taken]

    def _warn(self, message: str) -> None:
        self.match.warnings.append(message)


def _about_ranks(entry: RankEntry, saved_by: int) -> str:
    """Return a line about a per-rank value in a checkpoint that another number of ranks saved."""
    name, world_size = entry.shared_name, entry.world_size
    if entry.is_position:
        return (
            f"{name!r} has the positions of {saved_by} ranks in the data, which {world_size} ranks divide otherwise: "
            f"the data starts at the beginning"
        )
    to_last = "" if world_size == saved_by + 1 else f" to {world_size - 1}"
    return f"{name!r} has the values of {saved_by} ranks, and none for rank {saved_by}{to_last}: these keep their own"
