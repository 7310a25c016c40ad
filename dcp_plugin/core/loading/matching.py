"""The match between targets and stored keys, complete before a byte is overwritten.

A load executes the match, and ``dcp-plugin load-plan`` prints it. Problems are collected, so that a single error names
all of them. Ranks may hold different keys, as pipeline stages do. Each rank therefore matches its own objects.

Most loads find all keys of the state in the checkpoint, under the same names, and no others. Two modules are imported
only for other loads. :mod:`~dcp_plugin.core.loading.renames` is for keys that have other names.
:mod:`~dcp_plugin.core.loading.differences` is for keys that are on one side only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointMismatch, some
from dcp_plugin.core.format.columns import NO_TENSOR
from dcp_plugin.core.format.keys import join, without_rank
from dcp_plugin.core.loading import KeyMap
from dcp_plugin.core.paths import Where
from dcp_plugin.core.records import LoadReport, Match, OpenCheckpoint, OpenedLoad
from dcp_plugin.core.state.adapters import OptimizerAdapter, StateAdapter, TreeAdapter, ValueAdapter
from dcp_plugin.core.state.module_load import Deferred
from dcp_plugin.core.tensors._torch import is_meta, is_tensor, sharded_value
from dcp_plugin.core.types import ShardedValue, Wanted

if TYPE_CHECKING:
    from dcp_plugin.core.loading.renames import Renames
    from dcp_plugin.core.types import RankEntry


class LoadMode(Enum):
    """Rule for data and Stateful objects whose tensors differ from those of the checkpoint."""

    FILL = "fill"
    """The target determines the loaded keys: its tensors must be in the checkpoint, with its shapes."""
    RESTORE = "restore"
    """The checkpoint determines the loaded keys: an object gets the tensors that it had at the save."""


def _overlapping(adapters: Sequence[StateAdapter]) -> set[str]:
    """Return the objects whose names overlap: one name begins with the other, as ``a.b`` begins with ``a``."""
    outer = {a.name for a in adapters if not (isinstance(a, ValueAdapter) and a.is_leaf)}  # those with keys below
    overlapping: set[str] = set()
    for name in (adapter.name for adapter in adapters if outer):  # one pass: a state may have thousands of names
        if above := outer.intersection(name[:at] for at, letter in enumerate(name) if letter == "."):
            overlapping |= {name, *above}
    return overlapping


class Matching:
    """Comparison of the objects of a state with a checkpoint.

    Args:
        path: The path of the load, for messages.
        load: The objects of the state, and the rules of a partial load. A load of everything converts dtypes.
        strict: If true, missing and unexpected keys are errors, unless ``partial`` sets another policy.
        dry_run: If true, nothing will be read, so targets on the meta device need no memory.
        mode: Rule for tensors of data and Stateful objects.

    The attributes are an unfinished :class:`~dcp_plugin.core.records.Match`, which :meth:`run` begins and
    :class:`~dcp_plugin.core.loading.differences.Differences` continues. :meth:`result` returns the finished one.
    """

    def __init__(
        self,
        path: Where,
        opened: OpenCheckpoint,
        load: OpenedLoad,
        strict: bool,
        dry_run: bool,
        mode: LoadMode,
    ) -> None:
        self.path, self.strict, self.mode, self._dry_run = path, strict, mode, dry_run
        self.adapters: Sequence[StateAdapter] = load.adapters
        self.partial, self.objects = load.selection, load.objects
        self.names_here = [adapter.name for adapter in self.adapters]
        self._opened, self.index, self.summary, self._kinds = opened, opened.index, opened.summary, opened.kinds
        self.renames: Renames | None = None
        """Rules for keys with other names in the checkpoint; None if all names are equal so far."""
        self.key_maps: dict[str, KeyMap] = {}
        self.optimizers: dict[str, list[str]] = {}
        """Optimizers that are not stored under their names -> possible stored names."""
        self.keys: list[str] = []
        """Keys with which the patterns of a partial load are compared; empty for a load of everything."""
        self.lone: list[StateAdapter] = []
        """Stateful objects that are not in the checkpoint."""
        self.absent: list[str] = []
        """A line for each object whose state the checkpoint cannot provide."""
        self.wanted: dict[str, Wanted] = {}
        self.targets: dict[str, ShardedValue | None] = {}
        self.deferred: dict[str, Any] = {}
        self.stored: dict[str, str] = {}
        self.report, self.problems, self.warnings = LoadReport(path), list[str](), list[str]()

    def result(self) -> Match:
        """Return the finished match, after all keys and dtypes are judged."""
        return Match(self.wanted, self.targets, self.deferred, self.stored, self.report, self.problems, self.warnings)

    def run(self) -> bool:
        """Match this rank's objects. Collective if a module contains FSDP1.

        Returns:
            True if findings of this rank depend on the keys of other ranks, or if it has warnings.
        """
        adapters, overlapping = self.adapters, _overlapping(self.adapters)
        if self.partial is not None or overlapping:
            self.renames = self._rules({a.name: frozenset(a.names()) for a in adapters if a.name in overlapping})
        for adapter, name in self._names(adapters):
            if isinstance(adapter, ValueAdapter) and name == adapter.name and self._is_plain(adapter):
                accepted = self.accept(name, adapter.value, None)
                self.wanted[name] = Wanted({"": adapter.value} if accepted else {})
                if accepted:
                    self.stored[name] = name
            else:
                key_map, want = self._want(adapter, name)
                if self.index.left_out:
                    self._keep(adapter, key_map, want)
                if want.unusable:
                    self._leave_optimizer(adapter, want, f"{name!r} {want.unusable}")
                elif isinstance(adapter, OptimizerAdapter) and (want.targets or want.extra_targets or want.unexpected):
                    self._judge_class(adapter, name, want)
                self._select(adapter, key_map, want)
                self.key_maps[adapter.name] = key_map
        if self.index.scaled:
            from dcp_plugin.core.loading.quantized import settle  # only for folders of other tools

            settle(self.wanted, self.stored, self.deferred, self.key_maps, self.index)
        wants = self.wanted.values()
        differs = any(want.missing or want.missing_tensors or want.unexpected or want.extra_targets for want in wants)
        return differs or bool(self.absent or self.warnings or self.idle())

    def idle(self) -> frozenset[str]:
        """Return the globs and renames of the partial load that match no key of this rank's objects."""
        if self.partial is None or self.renames is None:
            return frozenset()
        return frozenset((*self.partial.idle(self.keys), *self.renames.rename.idle(self.keys)))

    def _rules(self, overlapping: Mapping[str, frozenset[str]]) -> Renames:
        from dcp_plugin.core.loading.renames import Renames  # most loads find equal names

        modules = [name for name, kind in self._kinds.items() if kind == "module"]
        return Renames({} if self.partial is None else self.partial.rename, modules, overlapping)

    def _is_plain(self, adapter: ValueAdapter) -> bool:
        """Return whether a tensor is stored under its own name and no partial load changes the match.

        A flat state has thousands of these. Key maps for them would take most of the time of a load.
        """
        slot = self.index.slots.get(adapter.name)
        if self.partial is not None or slot is None or not adapter.is_tensor:
            return False
        return self.index.table.dtype_of(slot) is not None and not self.index.under(f"{adapter.name}.")

    def _names(self, adapters: Sequence[StateAdapter]) -> Iterable[tuple[StateAdapter, str]]:
        """Yield each object with its name in the checkpoint. Per-rank values that stay as they are have none and are
        left out.

        The name is the object's own. If the checkpoint has nothing under it, the name may be that of the only object of
        its kind, of which no rank has another.
        """
        for adapter in adapters:
            name = adapter.name
            if (
                self.mode is not LoadMode.RESTORE  # from a file, stock hands the object's weights to None
                and name in self.objects
                and isinstance(adapter, TreeAdapter)
                and adapter.stands_for_nothing
            ):
                self.wanted[name] = Wanted()  # another rank has a module or an optimizer of this name
                continue
            if adapter.entry is not None and not self._is_about(adapter):
                if (of_rank := self._name_on_rank(adapter.entry)) is not None:
                    yield adapter, of_rank
                continue
            is_absent = (
                adapter.kind in ("module", "optimizer")
                and name not in self._kinds
                and name not in self.index
                and not self.index.under(f"{name}.")
            )
            if is_absent and not self._is_about(adapter):
                others = {*self.objects, *self.names_here}
                alike = [other for other, kind in self._kinds.items() if kind == adapter.kind and other not in others]
                if len(alike) == 1 and list(self.objects.values()).count(adapter.kind) == 1:
                    name = alike[0]
                    self.warn(f"{self.path} has no {adapter.name!r}; its only {adapter.kind}, {name!r}, is loaded.")
                elif adapter.kind == "optimizer":
                    self.optimizers[name] = alike
            yield adapter, name

    def _name_on_rank(self, entry: RankEntry) -> str | None:
        """Return the name in the checkpoint for a value of which each rank has its own; None if the value stays as it
        is."""
        from dcp_plugin.core.state.across_ranks import name_on_rank  # few states have such values

        place = name_on_rank(entry, self.index, self.summary.world_size if self.summary else None)
        if place.note:
            self.warn(f"{self.path}{place.note}.")
        self.keys += place.keys
        if place.about and (self.partial is None or any(map(self.partial.selects, place.keys))):
            if self.mode is LoadMode.RESTORE:
                self.warn(f"{self.path}: {place.about}. To continue exactly, resume on {place.saved_by} ranks.")
            else:
                way_out = f"with strict=False, or in a resume_or_init. Else load on {place.saved_by} ranks"
                self.absent.append(f"{place.about} {way_out}")
            self.report.missing.extend([place.name] if place.is_kept else [])
        if place.is_kept:
            self.wanted[place.name] = Wanted()
            return None
        return place.name

    def _want(self, adapter: StateAdapter, name: str) -> tuple[KeyMap, Wanted]:
        key_map = KeyMap(adapter.kind, name) if self.renames is None else self.renames.of(adapter, name)
        want = self._ask(adapter, key_map)
        if want.targets and key_map.unnamed_groups:
            self.warn(
                f"{self.path} has the param groups of {name!r} as a list without names, which cannot be renamed: "
                f"{adapter.name!r} keeps its own hyper-parameters."
            )
        if want.prefix_candidates and not key_map.is_renamed and not self._is_about(adapter):
            from dcp_plugin.core.loading.renames import find_prefix  # most loads find equal names

            prefix = find_prefix(want.prefix_candidates, key_map.entries(self.index)[0])
            if prefix is not None:
                self.renames = self.renames or self._rules({})
                here, source = f"{adapter.name}.{prefix[0]}", f"{name}.{prefix[1]}"
                self.warn(f"{self.path} has {source}* for {here}*: it is loaded from there.")
                key_map = self.renames.of(adapter, name, prefix)
                want = adapter.want(*key_map.entries(self.index))
        return key_map, want

    def _is_about(self, adapter: StateAdapter) -> bool:
        """Return whether a rename of the user determines the place of an object."""
        return self.renames is not None and self.renames.is_about(adapter)

    def _judge_class(self, adapter: OptimizerAdapter, name: str, want: Wanted) -> None:
        """Warn if the state is that of another optimizer class. If this optimizer cannot use it, nothing is loaded."""
        recorded = self.summary.optimizers.get(name, "") if self.summary else ""
        current = adapter.classes()
        if set(current.split(", ")) <= set(recorded.split(", ")):  # of all ranks and of all optimizers of a list
            return
        lacking = adapter.lacks(recorded)
        if not lacking:
            if recorded and want.targets:
                self.warn(f"{self.path} has {name!r} as the state of {recorded}; it is loaded into {current}.")
            return
        line = (
            f"{name!r} has the state of {recorded or 'another class of optimizers'}, which cannot serve "
            f"{adapter.name!r}, of {current}: it lacks {some(lacking, 4)}"
        )
        self._leave_optimizer(adapter, want, line)

    def _leave_optimizer(self, adapter: StateAdapter, want: Wanted, line: str) -> None:
        """Record that an optimizer loads nothing. ``line`` has the reason."""
        for keys in (want.targets, want.extra_targets, want.missing, want.unexpected, want.lost_per_rank):
            keys.clear()
        if self.strict and (self.partial is None or self.partial.missing == "error"):
            way_out = f'PartialLoad(exclude="{adapter.name}.*"), or strict=False, leaves the optimizer as it is'
            self.problems.append(f"{line}. {way_out}")
        else:
            self.warn(f"{self.path}: {line}. The optimizer stays as it is.")

    def _ask(self, adapter: StateAdapter, key_map: KeyMap) -> Wanted:
        """Return the wants of an object.

        They are empty if no key of the object is selected, because an optimizer allocates memory for its wants. A
        module allocates nothing. It is always asked, since its optimizer follows its place in the checkpoint.
        """
        entries, paths = key_map.entries(self.index)
        if self.partial is not None and adapter.kind != "module":
            stored = (without_rank(key) for key in entries)
            keys = dict.fromkeys((*stored, *(name.removesuffix(".") for name in adapter.names())))
            if not any(self.selects(adapter.name, key) for key in keys):
                self.keys += [join(adapter.name, key) for key in keys]
                self.report.left_out.extend(join(adapter.name, key) for key in entries)
                return Wanted()
        return adapter.want(entries, paths)

    def _select(self, adapter: StateAdapter, key_map: KeyMap, want: Wanted) -> None:
        """Keep the selected targets of an object. Record keys that are left out, and lost per-rank state."""
        report = self.report
        missing_keys = (*want.missing, *want.left_to_hooks, *want.missing_tensors)
        all_keys = (*want.targets, *want.extra_targets, *missing_keys, *want.lost_per_rank, *want.per_rank_of_others)
        self.keys += [] if self.partial is None else [join(adapter.name, key) for key in all_keys]
        if self.mode is LoadMode.FILL and self.strict:
            want.targets |= want.resized
        chosen = {}
        for key, target in want.targets.items():
            full = join(adapter.name, key)
            if not self.selects(adapter.name, key):
                report.left_out.append(full)
            elif self.accept(full, target, want.unfillable.get(key)):
                chosen[key] = target
                self.note_stored(full, key_map.stored(want.stored_as.get(key, key)), key in want.stored_as)
        unselected = (key for key in (*missing_keys, *want.extra_targets) if not self.selects(adapter.name, key))
        report.left_out.extend(join(adapter.name, key) for key in unselected)
        lost = [join(adapter.name, key) for key in want.lost_per_rank if self.selects(adapter.name, key)]
        report.missing.extend(lost)
        if lost:
            self.absent.append(
                f"{some(lost, 3)}: each rank had its own, for its part of the parameter, and none had the part that "
                f"this rank has. It cannot be cut anew: load it on the layout it was saved on, or leave it out"
            )
        if adapter.kind == "stateful" and "" in want.missing:
            self.lone.append(adapter)
        want.targets = chosen
        self.wanted[adapter.name] = want

    def _keep(self, adapter: StateAdapter, key_map: KeyMap, want: Wanted) -> None:
        """Have the object keep the parameters that the checkpoint leaves out, if this process has loaded them."""
        kept = {
            key: stored
            for key in (*want.missing, *want.left_to_hooks, *want.missing_tensors)
            if (stored := key_map.stored(key)) in self.index.left_out and self.selects(adapter.name, key)
        }
        if not kept:
            if key_map.is_data and any(key.startswith(f"{key_map.name}.") for key in self.index.left_out):
                self.warn(f"{self._opened.absent}. They are not loaded.")
            return
        from dcp_plugin.core.loading.origins import not_loaded  # most checkpoints leave nothing out

        live = adapter.present()
        # A mapping keeps its other entries by itself.
        want.kept_frozen = {key: live[key] for key in kept if adapter.kind == "module" or key in want.missing_tensors}
        want.missing = [key for key in want.missing if key not in kept]
        want.left_to_hooks = [key for key in want.left_to_hooks if key not in kept]
        want.missing_tensors = {key: value for key, value in want.missing_tensors.items() if key not in kept}
        want.prefix_candidates = []
        full = {join(adapter.name, key): stored for key, stored in kept.items()}
        targets = {join(adapter.name, key): live[key] for key in kept}
        lines = not_loaded(self._opened, full, targets, adapter.module)
        (self.warnings if self._dry_run else self.problems).extend(lines)
        self.keys += full
        self.report.left_out.extend(full)

    def note_stored(self, key: str, stored: str, is_of_rank: bool = False) -> None:
        self.stored[key] = stored
        if key != stored and not is_of_rank:
            self.report.renamed[key] = stored

    def accept(self, key: str, target: Any, refused: str | None) -> bool:
        """Record a selected target, or the reason why it cannot be filled. Return whether it can be filled."""
        if isinstance(target, Deferred) and refused is None:
            self.deferred[key] = target
            return True
        try:
            if refused is not None:
                raise CheckpointMismatch(refused)
            self.targets[key] = self._described(target) if is_tensor(target) else None
        except CheckpointMismatch as error:
            self.problems.append(f"{key} is {error}")
            return False
        return True

    def _described(self, target: Any) -> ShardedValue:
        return ShardedValue.of_all(target) if self._dry_run and is_meta(target) else sharded_value(target)

    def selects(self, name: str, key: str) -> bool:
        """Return whether the load selects a key of the object ``name``."""
        return self.partial is None or self.partial.selects(join(name, key))

    def judge_dtypes(self) -> None:
        """Record the targets whose dtype differs. Add a problem if a partial load does not allow conversion."""
        differ: dict[tuple[Any, Any], list[str]] = defaultdict(list)
        wanted = {key: target.dtype for key, target in self.targets.items() if target is not None}
        wanted |= {key: deferred.dtype for key, deferred in self.deferred.items() if deferred.dtype is not None}
        table, slots, stored = self.index.table, self.index.slots, self.stored
        numbers = table.columns["dtype"][np.array([slots[stored[key]] for key in wanted], np.int64)].tolist()
        for (key, here), number in zip(wanted.items(), numbers, strict=True):
            dtype = None if number == NO_TENSOR else table.torch_dtypes[number]
            if dtype is not None and dtype != here:
                if torch.can_cast(dtype, here):  # otherwise the planner reports a misfit
                    differ[here, dtype].append(key)
                self.report.cast.append(key)
        if self.partial is None or self.partial.cast:
            return
        for (here, saved), keys in differ.items():
            self.problems.append(
                f"{some(keys, 3)} {'is' if len(keys) == 1 else 'are'} {here} here and {saved} in the checkpoint: "
                f"cast=True converts"
            )

    def warn(self, message: str) -> None:
        self.warnings.append(message)
