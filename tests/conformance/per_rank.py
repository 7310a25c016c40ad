"""Corpus of values that differ between ranks under one key: a stream of data sharded by rank, random states, batches.

What is right is the training that was never interrupted. Each entry runs on two ranks, once with ``load`` and once with
``resume_or_init``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.nodes import Batcher, IterableWrapper, Loader
from torchdata.stateful_dataloader import StatefulDataLoader

import dcp_plugin
from tests.conformance.entries import Entry
from tests.conformance.tools import State, Tool
from tests.conformance.trace import Trace


@dataclass(frozen=True)
class PerRankEntry(Entry):
    make: Callable[[], ShardedStream]
    world_size: int = 2
    variants: tuple[str, ...] = ("load", "resume_or_init")


class Stream(IterableDataset[torch.Tensor]):
    """Samples that only this rank reads; it knows how far it has come."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.read < 64:
            self.read += 1
            yield torch.full((3,), float(self.read * 10 + dist.get_rank()))

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class ShardedStream:
    """Pre-training: ``StatefulDataLoader`` over a stream that is sharded by rank."""

    def __init__(self) -> None:
        self.loader: Any = StatefulDataLoader(Stream(), batch_size=2)
        self.batches: Any = None
        self.state: State = {"loader": self.loader}

    def next_batch(self) -> torch.Tensor:
        self.batches = iter(self.loader) if self.batches is None else self.batches
        return next(self.batches)  # type: ignore[no-any-return]

    def before_save(self) -> None:
        """Bring what is no live object into the state."""

    def after_load(self) -> None:
        """Take it from there."""


class Nodes(ShardedStream):
    """The same with a loader of ``torchdata.nodes``."""

    def __init__(self) -> None:
        super().__init__()
        samples = [torch.full((3,), float(number * 10 + dist.get_rank())) for number in range(64)]
        self.loader = Loader(Batcher(IterableWrapper(samples), 2))
        self.state = {"data": {"loader": self.loader}}

    def next_batch(self) -> torch.Tensor:
        self.batches = iter(self.loader) if self.batches is None else self.batches
        return torch.stack(next(self.batches))


class OwnValues(ShardedStream):
    """nanoGPT: the random state, from which batches are drawn, and the batch that was fetched ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched = torch.rand(2, 3)
        self.state = {"extra": dcp_plugin.PerRank({"rng": torch.get_rng_state(), "batch": (self.fetched, "fetched")})}

    def next_batch(self) -> torch.Tensor:
        batch, self.fetched = self.fetched, torch.rand(2, 3)
        return batch

    def before_save(self) -> None:
        self.state["extra"].value = {"rng": torch.get_rng_state(), "batch": (self.fetched, "fetched")}

    def after_load(self) -> None:
        torch.set_rng_state(self.state["extra"].value["rng"])
        self.fetched, _ = self.state["extra"].value["batch"]


class StreamAndRandomState(ShardedStream):
    """Both: a loop that also draws at random."""

    def __init__(self) -> None:
        super().__init__()
        self.state["rng"] = dcp_plugin.PerRank(torch.get_rng_state())

    def next_batch(self) -> torch.Tensor:
        return super().next_batch() + torch.rand(3)

    def before_save(self) -> None:
        self.state["rng"].value = torch.get_rng_state()

    def after_load(self) -> None:
        torch.set_rng_state(self.state["rng"].value)


ENTRIES: dict[str, PerRankEntry] = {
    made.__name__: PerRankEntry(made, oracle="right")
    for made in (ShardedStream, Nodes, OwnValues, StreamAndRandomState)
}


def run(entry: PerRankEntry, way: str, tool: Tool, trace: Trace) -> None:
    def build(seed: int) -> tuple[nn.Module, ShardedStream]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
        torch.manual_seed(seed + dist.get_rank())
        return model, entry.make()

    def go(model: nn.Module, data: ShardedStream, steps: int) -> dict[str, str]:
        return {f"step {step}": repr(float(model(data.next_batch()).sum())) for step in range(steps)}

    def resume(state: State, path: Path) -> None:
        dcp_plugin.resume_or_init(state, path.parent)

    model, data = build(seed=10)
    go(model, data, 3)
    data.before_save()
    tool.save({"model": model, **data.state})
    trace.right["losses"] = go(model, data, 4)
    model, data = build(seed=20)
    if way == "load":
        tool.load({"model": model, **data.state})
    else:
        tool.do("load", resume, {"model": model, **data.state})
    data.after_load()
    trace.seen["losses"] = go(model, data, 4)
