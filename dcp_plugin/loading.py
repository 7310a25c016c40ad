"""One load, step by step: open, want, plan, read, take.

Everything that can be checked is checked before the first byte of a target is overwritten, and what does not fit is
raised in one error that names all of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from dcp_plugin._torch import is_tensor, sharded_value
from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.partial import PartialLoad
from dcp_plugin.planning.load import ShardedLoadPlanner, nearest, some
from dcp_plugin.planning.sharing import SharedReading
from dcp_plugin.ranks import Ranks
from dcp_plugin.state.app import Part, Wanted, parts_of
from dcp_plugin.state.source import Prefix, Source, find_prefix, join
from dcp_plugin.storage.index import CheckpointIndex
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.types import LoadReport


class Loading:
    """One load. Its steps are the lines of :meth:`run`."""

    def __init__(self, ranks: Ranks, config: CheckpointConfig, path: Path, partial: PartialLoad, strict: bool) -> None:
        self._ranks = ranks
        self._config = config
        self._partial = partial
        self._strict = strict
        self._path = path
        self._reader = ShardedReader(
            path, io_threads=config.io_threads, verify=config.verify_on_load, check_files=ranks.rank == 0
        )
        self._report = LoadReport(path)
        self._said: list[str] = []

    def run(self, state: Mapping[str, Any]) -> LoadReport:
        parts: list[Part] = []
        self._ranks.combine(f"open {self._path}", lambda: self._open(state, parts), self._all_the_same)
        index = self._reader.index
        sources = {part.name: source for part, source in self._sources(parts)}
        wanted = self._ranks.agree(f"compare {self._path} with the state", lambda: self._want(parts, sources, index))
        self._ranks.agree(f"read the values of {self._path}", lambda: self._read_values(parts, wanted, sources))
        self._read_tensors()
        filled = self._filled(wanted, sources)
        self._ranks.agree(f"apply {self._path}", lambda: self._take(parts, filled))
        if self._ranks.rank == 0:
            for message in self._said:  # last: a warning that is an error stops nobody half-way
                warnings.warn(message, stacklevel=3)
        reader = self._reader
        return replace(self._report, bytes_read=reader.bytes_read, unchecked_bytes=reader.unchecked_bytes)

    def _open(self, state: Mapping[str, Any], parts: list[Part]) -> tuple[str, str]:
        parts.extend(parts_of(state))
        return str(self._reader.path), self._reader.fingerprint

    @staticmethod
    def _all_the_same(opened: list[tuple[str, str]]) -> None:
        first = opened[0]
        for rank, other in enumerate(opened):
            if other[1] != first[1]:
                raise CheckpointMismatch(
                    f"rank 0 loads {first[0]} and rank {rank} {other[0]}, which is another checkpoint. Decide "
                    f"on rank 0 what to load, and broadcast it."
                )

    def _sources(self, parts: list[Part]) -> Iterator[tuple[Part, Source]]:
        """The name in the checkpoint for each part: its own, or that of the only one of its kind."""
        kinds = self._reader.kinds
        names = {part.name for part in parts}
        for part in parts:
            name = part.name
            if part.kind in ("module", "optimizer") and name not in kinds:
                alike = [other for other, kind in kinds.items() if kind == part.kind and other not in names]
                if len(alike) == 1 and sum(other.kind == part.kind for other in parts) == 1:
                    name = alike[0]
                    self._said.append(f"{self._path} has no {part.name!r}; its only {part.kind}, {name!r}, is loaded.")
            yield part, Source(name, part.kind)

    def _want(self, parts: list[Part], sources: dict[str, Source], index: CheckpointIndex) -> dict[str, Wanted]:
        wanted = {}
        prefixes: dict[nn.Module | None, Prefix] = {}
        problems: list[str] = []
        keys: list[str] = []
        for part in parts:
            source = replace(sources[part.name], prefix=prefixes.get(part.module, Prefix()))
            want = part.want(*source.entries(index))
            if part.kind == "module" and want.missing and not want.targets:
                prefix = find_prefix(want.missing, want.unexpected)
                if prefix is not None:
                    self._say_prefix(part, source, prefix)
                    source = replace(source, prefix=prefix)
                    prefixes[part.module] = prefix
                    want = part.want(*source.entries(index))
            sources[part.name], wanted[part.name] = source, want
            keys += [join(part.name, key) for key in (*want.targets, *want.missing)]
            want.targets = {key: target for key, target in want.targets.items() if self._selected(part, key)}
            missing = [source.stored(key) for key in want.missing if self._selected(part, key)]
            unexpected = [source.stored(key) for key in want.unexpected if self._selected(part, key)]
            self._report.missing.extend(missing)
            self._report.unexpected.extend(unexpected)
            if want.tolerated and (missing or unexpected):
                differ = some(missing + unexpected)
                self._said.append(f"{self._path} and {part.name!r} differ in {differ}: {want.tolerated}.")
            elif self._strict:
                problems += [f"{key} is not in the checkpoint{nearest(key, index)}" for key in missing]
                problems += [f"{key} is only in the checkpoint" for key in unexpected]
        if self._partial != PartialLoad():
            self._partial.check(keys)
        self._plan(wanted, sources, index, problems)
        return wanted

    def _say_prefix(self, part: Part, source: Source, prefix: Prefix) -> None:
        here, there = join(part.name, prefix.dropped), join(source.name, prefix.added)
        self._said.append(f"{self._path} has {there}* for {here}*: it is loaded from there.")

    def _selected(self, part: Part, key: str) -> bool:
        return self._partial.selects(join(part.name, key))

    def _plan(
        self, wanted: dict[str, Wanted], sources: dict[str, Source], index: CheckpointIndex, problems: list[str]
    ) -> None:
        """Plan the reads and raise everything that does not fit, in one error."""
        self._targets = {
            sources[name].stored(key): sharded_value(target) if is_tensor(target) else None
            for name, want in wanted.items()
            for key, target in want.targets.items()
        }
        self._planner = ShardedLoadPlanner(strict=False, allow_pickle=self._config.allow_pickle)
        self._planner.use_index(self._targets, index)
        try:
            self._items = self._planner.create_local_plan()
        except CheckpointMismatch as error:
            problems = [str(error), *problems]
        if problems:
            raise CheckpointMismatch(
                f"{self._path} does not fit the state: {some(problems, 50, '; ')}. strict=False loads what fits."
            )
        self._reader.check_files(self._items)
        self._report.cast.extend(self._planner.cast)

    def _read_values(self, parts: list[Part], wanted: dict[str, Wanted], sources: dict[str, Source]) -> None:
        """Values first: they are small, and what does not fit is found before a tensor is overwritten."""
        self._reader.read_data(self._only(LoadItemType.BYTE_IO), self._planner).wait()
        for part in parts:
            targets = wanted[part.name].targets
            keys = [key for key, target in targets.items() if not is_tensor(target)]
            part.check({key: self._targets[sources[part.name].stored(key)] for key in keys})

    def _only(self, kind: LoadItemType) -> LoadPlan:
        return replace(self._items, items=[item for item in self._items.items if item.type == kind])

    def _read_tensors(self) -> None:
        """Into the targets. What others read for this rank is passed on when all have read, and nobody has failed."""
        plan, policy = self._only(LoadItemType.TENSOR), self._config.read_broadcast
        shared = SharedReading(self._ranks, self._planner, policy)
        plan = shared.meet(f"share the reading of {self._path}", plan)
        self._ranks.agree(f"read {self._path}", lambda: self._reader.read_data(plan, self._planner).wait())
        shared.pass_on(f"pass on what was read of {self._path}")
        self._report.loaded.extend(self._targets)

    def _filled(self, wanted: dict[str, Wanted], sources: dict[str, Source]) -> dict[str, dict[str, Any]]:
        return {
            name: {
                key: target if is_tensor(target) else self._targets[sources[name].stored(key)]
                for key, target in want.targets.items()
            }
            for name, want in wanted.items()
        }

    @staticmethod
    def _take(parts: list[Part], filled: dict[str, dict[str, Any]]) -> None:
        for part in parts:
            if filled[part.name]:
                part.take(filled[part.name])
