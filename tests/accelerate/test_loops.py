"""Corpus of loops: a resumed loop over a loader reads and draws what the loop without an interruption does.

A script that has left its loop (``break``) begins its next loop with a new epoch, so a save after the loop has no
position in it. Stock Accelerate is the second oracle: it continues exactly in the cases of :func:`_stock_is_exact`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.accelerate import WORLD_SIZE
from tests.launch import on_ranks
from tests.training import Stream

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"shuffle": True},
    "seedable": {"shuffle": True},
    "in order": {},
    "stateful": {"shuffle": True},
    "iterable": {},
    "stream": {},
}
SAMPLES, CUT, INSIDE = 48, 4, 3
"""Samples, the batch after which a loop breaks, and the batch after which a save within the loop is made."""


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def _build(layout: str, kind: str, native: bool, seed: int) -> tuple[Any, ...]:
    from tests.accelerate import training as t

    options = {"use_seedable_sampler": kind == "seedable", "data_seed": 7, "dispatch_batches": False}
    stateful = kind in ("stateful", "stream")
    accelerator = t.start(layout, seed, native=native, stateful=stateful, data=options).accelerator
    accelerator.free_memory()
    dataset: Any = {"iterable": Numbers(), "stream": Stream(SAMPLES, lambda number: number)}.get(kind, range(SAMPLES))
    return accelerator, accelerator.prepare(DataLoader(dataset, batch_size=2, **KINDS[kind])), kind


def _save(accelerator: Any, path: Path) -> None:
    accelerator.save_state(str(path))
    accelerator.wait_for_everyone()  # Accelerate alone does not wait for rank 0


def _train(
    built: tuple[Any, ...],
    epochs: Iterable[int],
    breaks: bool,
    skip: int = 0,
    saves: Mapping[tuple[int, int], Path] = MappingProxyType({}),
) -> list[Any]:
    """Train as a user's script does. ``saves`` has the paths by epoch and batch; batch 0 is after the loop."""
    accelerator, loader, kind = built
    seen: list[Any] = []
    for epoch in epochs:
        by_itself = loader.use_stateful_dataloader
        batches = accelerator.skip_first_batches(loader, skip) if skip and not by_itself else loader
        if kind == "seedable":
            batches.set_epoch(epoch)
        for number, batch in enumerate(batches, skip + 1):
            seen.append((epoch, batch.tolist(), torch.rand(()).item()))
            if (epoch, number) in saves:
                _save(accelerator, saves[epoch, number])
            if breaks and number == CUT:
                break
        skip = 0
        if (epoch, 0) in saves:
            _save(accelerator, saves[epoch, 0])
    return seen


def _resumed(root: Path, layout: str, kind: str, breaks: bool, when: str, native: bool) -> list[Any]:
    """Return what a run sees that is interrupted in its second epoch or after it, and perhaps once more."""
    following, skip = (1, INSIDE) if when == "inside" else (2, 0)
    first = _build(layout, kind, native, 0)
    seen = _train(first, range(2), breaks, saves={(1, skip): root / "1"})
    if when == "inside":  # what came after the save is lost
        seen = seen[: sum(epoch == 0 for epoch, *_ in seen) + INSIDE]
    if when == "twice":
        second = _build(layout, kind, native, 5)
        second[0].load_state(str(root / "1"))
        seen += _train(second, range(2, 3), breaks, saves={(2, 0): root / "2"})
        following = 3
    last = _build(layout, kind, native, 9)
    last[0].load_state(str(root / ("2" if when == "twice" else "1")))
    return seen + _train(last, range(following, 5), breaks, skip)


def _stock_is_exact(layout: str, kind: str, when: str) -> bool:
    """Stock keeps no position of a loader, and no generator of a sampler, which DDP has."""
    ordered_without = kind in ("in order", "iterable", "seedable") or (kind == "plain" and layout == "single")
    return when != "inside" and ordered_without


NOT_EXACT = ("ddp", "stream", True, "inside")
"""On several ranks Accelerate hides the state of a dataset, whose epoch here begins where the last one was left."""


@pytest.mark.one_of("kind", "breaks", "when", count=6)
@pytest.mark.parametrize("when", ["inside", "after", "twice"])
@pytest.mark.parametrize("breaks", [True, False], ids=["break", "full"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["single", "ddp"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_a_resumed_loop_is_the_loop_without_an_interruption(
    tmp_path: Path, layout: str, kind: str, breaks: bool, when: str
) -> None:
    straight = _train(_build(layout, kind, True, 0), range(5), breaks)
    stock = _resumed(tmp_path / "stock", layout, kind, breaks, when, native=True)
    ours = _resumed(tmp_path / "ours", layout, kind, breaks, when, native=False)
    assert (ours == straight) == ((layout, kind, breaks, when) != NOT_EXACT)
    assert (stock == straight) == _stock_is_exact(layout, kind, when)
