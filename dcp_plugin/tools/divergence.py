"""``dcp_plugin.first_divergence``: where two runs that ought to be the same part ways.

Their checkpoints are compared step by step, from the first step that both have. All of them, and not by halving: runs
may differ in one step and agree in a later one; and where layouts are equal, checksums tell of each without reading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcp_plugin.errors import CheckpointError, CheckpointMismatch, CheckpointNotFound, damage_in, some
from dcp_plugin.media import medium_of
from dcp_plugin.paths import PathLike, StorageOptions, Where, as_path
from dcp_plugin.runs.scan import Scan
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tools import amounts
from dcp_plugin.tools.diff import CheckpointDiff, Reshaped, Retyped, diff
from dcp_plugin.tools.stream import Part, Progress, Stream, require_elements

MODEL, OPTIMIZER, RNG, LOADER, OTHER = "model", "optimizer", "random streams", "data loader", "other state"
KINDS = (MODEL, OPTIMIZER, RNG, LOADER, OTHER)
"""What the keys of a training belong to."""
_RNG = re.compile(r"(^|[._])(rng|random|generators?|seed)([._]|$)", re.IGNORECASE)
_LOADER = re.compile(r"(data_?loader|loader|sampler|dataset|samples)", re.IGNORECASE)
_OPTIMIZER = re.compile(r"^(optim|optimizer|optimizers)([._]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Divergence:
    """Where two runs part ways, if they do; ``verdict`` says it in a sentence."""

    run1: Where
    run2: Where
    compared: list[int]
    """The steps that were compared, in order: all that both have, up to the first that differs."""
    only_in_1: list[int]
    """Steps that only the first run has."""
    only_in_2: list[int]
    step: int | None = None
    """The first step that differs; None if none does."""
    key: str = ""
    """The first key that differs there, in the order in which they were saved."""
    at: str = ""
    """The first element of it that differs, as Python writes it: ``[17, 4]``; empty if that is all of it."""
    values: tuple[str, str] | None = None
    """What each run has there."""
    ulps: int | None = None
    """Of floats, how many numbers of their dtype these are apart."""
    differ: dict[str, list[str]] = field(default_factory=dict)
    """The keys that differ at that step, by what they belong to: ``"model"``, ``"optimizer"``, ``"random streams"``,
    ``"data loader"``, ``"other state"``."""
    still_equal: list[str] = field(default_factory=list)
    """Of these, what does not differ."""
    texts: list[str] = field(default_factory=list)
    """Values of which only texts differ, up to that step: paths, names and dates, which do in runs that compute the
    same. They do not count."""
    diff: CheckpointDiff | None = field(default=None, repr=False)
    """All that differs at that step."""

    @property
    def identical_through(self) -> int | None:
        """The last step that was compared before anything differed."""
        equal = [step for step in self.compared if step != self.step]
        return equal[-1] if equal else None

    @property
    def deterministic(self) -> bool:
        """Whether nothing differs at any step that both have."""
        return self.step is None

    @property
    def verdict(self) -> str:
        """One sentence."""
        before = self.identical_through
        count = f"{len(self.compared)} checkpoint{'s' if len(self.compared) > 1 else ''}"
        if self.step is None:
            return f"Bit-identical through step {before}, in all of the {count} that both runs have."
        if before is None:
            same = "Never bit-identical: the runs differ at the first step that both have"
        else:
            same = f"Bit-identical through step {before}"
        found = f"; first difference at step {self.step} in {self.key}{self.at}"
        if self.values:
            found += f" ({self.values[0]} -> {self.values[1]}"
            found += f", {self.ulps} ulp apart)" if self.ulps is not None else ")"
        if not self.still_equal:
            return f"{same}{found}."
        were = "was" if len(self.still_equal) == 1 else "were"
        return f"{same}{found}; the {' and the '.join(self.still_equal)} {were} still equal."

    def __str__(self) -> str:
        return self.verdict


def first_divergence(
    run1: PathLike,
    run2: PathLike,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    *,
    checksums: bool = True,
    io_threads: int = 2,
    storage_options: StorageOptions | None = None,
    progress: Progress | None = None,
) -> Divergence:
    """The first step, key and element in which two runs differ: whether a training is deterministic.

    Values of which only texts differ (paths, names, dates) do not count, and are listed.

    Args:
        run1: The directory or URL of a run: its checkpoints are there, or below.
        run2: The other one. Checkpoints are matched by their steps; of several of a step, the newest counts.
        include: Globs of keys; all if there is none.
        exclude: Globs of keys to leave out: of clocks, for one.
        checksums: Whether stored checksums may tell what is equal. Otherwise every byte is read.
        io_threads: Threads that read, of each.
        storage_options: How the store of a URL is reached, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with bytes read of tensors, and bytes in all, of the two checkpoints that are being compared.

    Returns:
        Where they part, and a verdict in a sentence.

    Raises:
        CheckpointNotFound: There is no checkpoint in one of them.
        CheckpointMismatch: They have no step in common, or a glob matches nothing.
        CheckpointError: A checkpoint cannot be opened, or its bytes are not those that were saved.

    Example:
        >>> import torch, dcp_plugin
        >>> for run, last in (("one", 0.5), ("two", 0.25)):
        ...     dcp_plugin.save({"model": {"w": torch.zeros(2, 2)}}, f"{run}/step-1", step=1)
        ...     dcp_plugin.save({"model": {"w": torch.tensor([[0, 0], [0, last]])}}, f"{run}/step-2", step=2)
        >>> dcp_plugin.first_divergence("one", "two").verdict
        'Bit-identical through step 1; first difference at step 2 in model.w[1, 1] (0.5 -> 0.25, 8388608 ulp apart).'
    """
    runs = as_path(run1, storage_options), as_path(run2, storage_options)
    steps = _steps_of(runs[0]), _steps_of(runs[1])
    common = sorted(steps[0].keys() & steps[1].keys())
    if not common:
        told = [some([str(step) for step in sorted(one)]) for one in steps]
        raise CheckpointMismatch(f"{runs[0]} (steps {told[0]}) and {runs[1]} (steps {told[1]}) have no step in common")
    only = sorted(steps[0].keys() - steps[1].keys()), sorted(steps[1].keys() - steps[0].keys())
    options: dict[str, Any] = {"io_threads": io_threads, "storage_options": storage_options}
    texts: dict[str, None] = {}
    for number, step in enumerate(common, 1):
        pair = steps[0][step], steps[1][step]
        found = diff(*pair, include, exclude, amounts=False, checksums=checksums, progress=progress, **options)
        texts |= dict.fromkeys(value.key for value in found.values if value.text)
        if _differing(found):
            key, at, values, ulps = _first(found, options)
            differ, equal = _by_kind(found, options)
            compared = common[:number]
            return Divergence(*runs, compared, *only, step, key, at, values, ulps, differ, equal, list(texts), found)
    return Divergence(*runs, common, *only, texts=list(texts))


def _steps_of(run: Where) -> dict[int, Where]:
    """The newest whole checkpoint of each step. A step that was not noted is the last number in the name."""
    with damage_in(run):
        if medium_of(run).kind(run) != "folder":
            raise CheckpointNotFound(f"{run}: no run is there")
    scan = Scan(run, others=True, read_all=True)
    found = [(state.time, state.path, state.step) for state in scan.states.values() if state.committed]
    found += [(saved.time, saved.path, None) for saved in scan.of_others]
    steps: dict[int, Where] = {}
    for _, path, noted in sorted(found, key=lambda one: (one[0], str(one[1]))):
        digits = re.findall(r"\d+", path.name)
        if noted is None and not digits:
            continue
        steps[int(digits[-1]) if noted is None else noted] = path
    if not steps:
        raise CheckpointNotFound(f"{run}: there is no whole checkpoint with a step, at or below")
    return steps


def _differing(found: CheckpointDiff) -> set[str]:
    """The keys that differ and count."""
    keys = {*found.added, *found.removed, *found.renamed, *found.renamed.values()}
    keys |= (
        {one.key for one in found.reshaped} | {one.key for one in found.retyped} | {one.key for one in found.changed}
    )
    return keys | {value.key for value in found.values if not value.text}


def _first(found: CheckpointDiff, options: dict[str, Any]) -> tuple[str, str, tuple[str, str] | None, int | None]:
    """Key, place, both values and their distance, of what differs first in the order of the first checkpoint."""
    differing = _differing(found)
    with ShardedReader(found.a, **options) as one, ShardedReader(found.b, **options) as other:
        order = dict.fromkeys((*one.index, *other.index))
        key = next(key for key in order if key in differing)
        if any(tensor.key == key for tensor in found.changed):
            with suppress(CheckpointMismatch):  # of a class of its own, without elements
                return key, *_element(one, other, key)
    for value in found.values:
        if value.key == key:
            return key, value.at, (value.old, value.new), None
    redefined: list[Reshaped | Retyped] = [*found.reshaped, *found.retyped]
    for told in redefined:
        if told.key == key:
            return key, "", (str(told.old), str(told.new)), None
    if key in found.removed or key in found.added:
        return key, "", ("there", "nothing") if key in found.removed else ("nothing", "there"), None
    return key, "", None, None


def _element(one: ShardedReader, other: ShardedReader, key: str) -> tuple[str, tuple[str, str] | None, int | None]:
    """The first element in which two stored tensors of the same dtype and shape differ."""
    stored = one.index[key]
    for reader in (one, other):
        require_elements(reader, key, stored)  # type: ignore[arg-type]
    part = Part.whole(key, stored)  # type: ignore[arg-type]
    streams = [iter(Stream(reader, [part])) for reader in (one, other)]
    with closing(streams[0]), closing(streams[1]):  # type: ignore[type-var]
        for mine, its in zip(*streams, strict=True):
            if not amounts.equal(mine.tensor, its.tensor):
                pair = mine.tensor.reshape(-1), its.tensor.reshape(-1)
                at = int(amounts.differing(*pair).int().argmax())
                elements = pair[0][at : at + 1], pair[1][at : at + 1]
                index = np.unravel_index(mine.start + at, part.sizes) if part.sizes else ()
                place = f"[{', '.join(str(int(number)) for number in index)}]" if part.sizes else ""
                return place, (_told(elements[0]), _told(elements[1])), amounts.ulps(*elements)
    raise CheckpointError(f"{key} of {one.path} and {other.path} was changed while it was compared")


def _told(element: Any) -> str:
    try:
        return repr(element.item())
    except (RuntimeError, TypeError, NotImplementedError):  # no arithmetic: its bytes
        return f"0x{bytes(element.view(-1).view(dtype=_bytes()).tolist()).hex()}"


def _bytes() -> Any:
    import torch

    return torch.uint8


def _by_kind(found: CheckpointDiff, options: dict[str, Any]) -> tuple[dict[str, list[str]], list[str]]:
    """What differs by what it belongs to; and what does not differ."""
    with ShardedReader(found.a, **options) as one:
        kinds, keys = one.kinds, list(one.index)
    differing = _differing(found)
    by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    there = set()
    texts = {value.key for value in found.values if value.text}
    for key in dict.fromkeys((*keys, *sorted(differing))):
        kind = kind_of(key, kinds)
        if key in differing:
            by_kind[kind].append(key)
        elif key not in texts:
            there.add(kind)
    return {k: v for k, v in by_kind.items() if v}, [kind for kind in KINDS if kind in there and not by_kind[kind]]


def kind_of(key: str, kinds: dict[str, str]) -> str:
    """What a key belongs to.

    Args:
        kinds: Which names are a ``module`` and which an ``optimizer``, as far as the checkpoint tells.
    """
    name = max((name for name in kinds if key == name or key.startswith(f"{name}.")), key=len, default="")
    if name:
        return OPTIMIZER if kinds[name] == "optimizer" else MODEL
    if _OPTIMIZER.search(key):
        return OPTIMIZER
    if _RNG.search(key):
        return RNG
    if _LOADER.search(key):
        return LOADER
    return MODEL if key.split(".")[0] in ("model", "state_dict", "module") else OTHER
