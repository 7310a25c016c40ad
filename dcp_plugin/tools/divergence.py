"""``dcp_plugin.tools.first_divergence``: the first difference between two runs that should be the same.

The checkpoints of the runs are compared step by step, from the first step that both have. A bisection would be wrong:
runs may differ at one step and agree at a later one. Checksums decide without reading if layouts are equal.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dcp_plugin.core.errors import CheckpointError, CheckpointMismatch, CheckpointNotFound, as_html, damage_in, some
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.paths import PathLike, StorageOptions, Where, as_path
from dcp_plugin.core.runs.scan import Scan
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.types import CheckpointState, public_class
from dcp_plugin.tools import amounts
from dcp_plugin.tools.diff import CheckpointDiff, Reshaped, Retyped, diff
from dcp_plugin.tools.stream import Part, Progress, Stream

MODEL, OPTIMIZER, RNG, LOADER, OTHER = "model", "optimizer", "random streams", "data loader", "other state"
KINDS = (MODEL, OPTIMIZER, RNG, LOADER, OTHER)
"""Parts of a training that keys belong to."""
_PATTERNS = {
    OPTIMIZER: re.compile(r"^(optim|optimizer|optimizers)([._]|$)", re.IGNORECASE),
    RNG: re.compile(r"(^|[._])(rng|random|generators?|seed)([._]|$)", re.IGNORECASE),
    LOADER: re.compile(r"(data_?loader|loader|sampler|dataset|samples)", re.IGNORECASE),
    MODEL: re.compile(r"^(model|state_dict|module)(\.|$)"),
}
"""Patterns of the keys of each part, in the order in which they are tried."""


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class Divergence:
    """The first difference between two runs, if there is one. ``verdict`` is a sentence about it."""

    run1: Where
    run2: Where
    compared: list[int]
    """The steps that were compared, in order: those that both runs have, up to the first that differs."""
    only_in_1: list[int]
    """Steps that only the first run has."""
    only_in_2: list[int]
    step: int | None = None
    """The first step that differs; None if none does."""
    key: str = ""
    """The first key that differs at this step, in the order of the save."""
    at: str = ""
    """The first element that differs, as Python writes it: ``[17, 4]``; empty for the complete entry."""
    values: tuple[str, str] | None = None
    """The value of this element in each run."""
    ulps: int | None = None
    """The distance of two floats in numbers of their dtype; None for other values."""
    differ: dict[str, list[str]] = field(default_factory=dict)
    """The keys that differ at this step, by parts of the training: ``"model"``, ``"optimizer"``, ``"random streams"``,
    ``"data loader"``, ``"other state"``."""
    still_equal: list[str] = field(default_factory=list)
    """The parts of the training of which no key differs."""
    texts: list[str] = field(default_factory=list)
    """Values of which only texts differ, up to this step. They do not count: paths, names and dates also differ in runs
    that compute the same."""
    diff: CheckpointDiff | None = field(default=None, repr=False)
    """All differences at this step."""

    _repr_html_ = as_html

    @property
    def identical_through(self) -> int | None:
        """The last step that was compared before the first difference."""
        equal = [step for step in self.compared if step != self.step]
        return equal[-1] if equal else None

    @property
    def deterministic(self) -> bool:
        """True if the runs do not differ at any step that both have."""
        return self.step is None

    @property
    def verdict(self) -> str:
        """A sentence about the result."""
        before = self.identical_through
        count = f"{len(self.compared)} checkpoint{'s' if len(self.compared) > 1 else ''}"
        if self.step is None:
            return f"Bit-identical through step {before}, in all of the {count} that both runs have."
        if before is None:
            same = "Never bit-identical: the runs differ at the first step that both have"
        else:
            same = f"Bit-identical through step {before}"
        difference = f"; first difference at step {self.step} in {self.key}{self.at}"
        if self.values:
            difference += f" ({self.values[0]} -> {self.values[1]}"
            difference += f", {self.ulps} ulp apart)" if self.ulps is not None else ")"
        if not self.still_equal:
            return f"{same}{difference}."
        were = "was" if len(self.still_equal) == 1 else "were"
        return f"{same}{difference}; the {' and the '.join(self.still_equal)} {were} still equal."

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
    """Find the first step, key and element in which two runs differ, to test whether a training is deterministic.

    Values of which only texts differ (paths, names, dates) do not count, and are listed.

    Args:
        run1: The directory or URL of a run, with its checkpoints in it or below it.
        run2: The other run. Checkpoints are matched by step; the newest counts if a step has several.
        include: Globs of keys; all if empty.
        exclude: Globs of keys to leave out, such as those of clocks.
        checksums: Trust stored checksums. Without them every byte is read.
        io_threads: Threads that read each checkpoint.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with the bytes of tensors that were read, and the bytes in all, of each pair of checkpoints.

    Returns:
        The first difference, with a verdict in a sentence.

    Raises:
        CheckpointNotFound: A run has no checkpoint with a step.
        CheckpointMismatch: The runs have no step in common, or a glob matches nothing.
        CheckpointError: A checkpoint cannot be opened, or its bytes do not match their checksums.

    Example:
        >>> import torch, dcp_plugin
        >>> for run, last in (("one", 0.5), ("two", 0.25)):
        ...     dcp_plugin.save({"model": {"w": torch.zeros(2, 2)}}, f"{run}/step-1", step=1)
        ...     dcp_plugin.save({"model": {"w": torch.tensor([[0, 0], [0, last]])}}, f"{run}/step-2", step=2)
        >>> dcp_plugin.tools.first_divergence("one", "two").verdict
        'Bit-identical through step 1; first difference at step 2 in model.w[1, 1] (0.5 -> 0.25, 8388608 ulp apart).'
    """
    runs = as_path(run1, storage_options), as_path(run2, storage_options)
    steps = steps_of(runs[0]), steps_of(runs[1])
    for run, of_run in zip(runs, steps, strict=True):
        if not of_run:
            raise CheckpointNotFound(f"{run}: no complete checkpoint with a step is there or below")
    common = sorted(steps[0].keys() & steps[1].keys())
    if not common:
        lists = [some([str(step) for step in sorted(of_run)]) for of_run in steps]
        raise CheckpointMismatch(
            f"{runs[0]} (steps {lists[0]}) and {runs[1]} (steps {lists[1]}) have no step in common"
        )
    only = sorted(steps[0].keys() - steps[1].keys()), sorted(steps[1].keys() - steps[0].keys())
    options: dict[str, Any] = {"io_threads": io_threads, "storage_options": storage_options}
    texts: dict[str, None] = {}
    for number, step in enumerate(common, 1):
        pair = steps[0][step], steps[1][step]
        found = diff(*pair, include, exclude, amounts=False, checksums=checksums, progress=progress, **options)
        here = divergence_in(found, step, **options)
        texts |= dict.fromkeys(here.texts)
        if not here.deterministic:
            here = replace(here, run1=runs[0], run2=runs[1], only_in_1=only[0], only_in_2=only[1])
            return replace(here, compared=common[:number], texts=list(texts))
    return Divergence(*runs, common, *only, texts=list(texts))


def divergence_in(found: CheckpointDiff, step: int, **options: Any) -> Divergence:
    """Return the first difference between two checkpoints of the same step, as if each of them were a run.

    Args:
        found: All differences of the checkpoints.
        options: Options of :class:`~dcp_plugin.core.storage.reader.CheckpointReader`.
    """
    texts = [value.key for value in found.values if value.text]
    if not (places := differing(found)):
        return Divergence(found.a, found.b, [step], [], [], texts=texts, diff=found)
    with CheckpointReader(found.a, **options) as first, CheckpointReader(found.b, **options) as second:
        key = next(key for key in (*first.index, *second.index) if key in places)
        (at, values), ulps = places[key], None
        if any(tensor.key == key for tensor in found.changed):
            with suppress(CheckpointMismatch):  # a tensor of a custom class, without elements
                at, values, ulps = _element(first, second, key)
        differ, equal = _by_kind(places, texts, first)
    return Divergence(found.a, found.b, [step], [], [], step, key, at, values, ulps, differ, equal, texts, found)


def steps_of(run: Where) -> dict[int, Where]:
    """Return the newest complete checkpoint of each step. The last number of a name stands in for an unknown step."""
    with damage_in(run):
        if medium_of(run).kind(run) != "folder":
            raise CheckpointNotFound(f"{run} is not the directory of a run")
    steps: dict[int, Where] = {}
    for checkpoint in Scan(run, others=True, read_all=True).complete():
        recorded = checkpoint.step if isinstance(checkpoint, CheckpointState) else None
        digits = re.findall(r"\d+", checkpoint.path.name)
        if recorded is None and not digits:
            continue
        steps[int(digits[-1]) if recorded is None else recorded] = checkpoint.path
    return steps


_Place = tuple[str, tuple[str, str] | None]
"""Place and values of a difference, as in :class:`Divergence`."""


def differing(found: CheckpointDiff) -> dict[str, _Place]:
    """Return the keys that differ, with the places. Those of tensors have to be read. Values of which only texts
    differ do not count."""
    places: dict[str, _Place] = {key: ("", None) for pair in found.renamed.items() for key in pair}
    places |= {tensor.key: ("", None) for tensor in found.changed}
    redefined: list[Retyped | Reshaped] = [*found.retyped, *found.reshaped]
    places |= {item.key: ("", (str(item.old), str(item.new))) for item in redefined}
    places |= {value.key: (value.at, (value.old, value.new)) for value in found.values if not value.text}
    places |= dict.fromkeys(found.removed, ("", ("there", "nothing")))
    places |= dict.fromkeys(found.added, ("", ("nothing", "there")))
    return places


def _element(
    first: CheckpointReader, second: CheckpointReader, key: str
) -> tuple[str, tuple[str, str] | None, int | None]:
    """Return the first element in which two stored tensors differ: place, both values and their distance."""
    part = Part.of(first, key)
    streams = [iter(Stream(first, [part])), iter(Stream(second, [Part.of(second, key)]))]
    with closing(streams[0]), closing(streams[1]):  # type: ignore[type-var]
        for old, new in zip(*streams, strict=True):
            if amounts.equal(old.tensor, new.tensor):
                continue
            pair = old.tensor.reshape(-1), new.tensor.reshape(-1)
            at = int(amounts.differing(*pair).int().argmax())
            elements = pair[0][at : at + 1], pair[1][at : at + 1]
            place = ""
            if part.sizes:
                index = np.unravel_index(old.start + at, part.sizes)
                place = f"[{', '.join(str(int(number)) for number in index)}]"
            return place, (_shown(elements[0]), _shown(elements[1])), amounts.ulps(*elements)
    raise CheckpointError(f"{key} of {first.path} and {second.path} was changed while it was compared")


def _shown(element: torch.Tensor) -> str:
    try:
        return repr(element.item())
    except (RuntimeError, TypeError, NotImplementedError):  # a dtype without arithmetic: show the bytes
        return f"0x{bytes(element.view(torch.uint8).tolist()).hex()}"


def _by_kind(
    differing: Collection[str], texts: Collection[str], reader: CheckpointReader
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the keys that differ, by parts of the training; and the parts of which no key differs."""
    differ: dict[str, list[str]] = {kind: [] for kind in KINDS}
    equal: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for key in dict.fromkeys((*reader.index, *sorted(differing))):
        if key in differing or key not in texts:
            (differ if key in differing else equal)[kind_of(key, reader.kinds)].append(key)
    return (
        {kind: keys for kind, keys in differ.items() if keys},
        [kind for kind in KINDS if equal[kind] and not differ[kind]],
    )


def kind_of(key: str, kinds: dict[str, str]) -> str:
    """Return the part of the training that a key belongs to.

    Args:
        kinds: Names in the state -> ``module`` or ``optimizer``, for the names that the checkpoint has kinds of.
    """
    name = max((name for name in kinds if key == name or key.startswith(f"{name}.")), key=len, default="")
    if name:
        return OPTIMIZER if kinds[name] == "optimizer" else MODEL
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(key)), OTHER)
