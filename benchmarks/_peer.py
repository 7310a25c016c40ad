"""What a way to save and load is, for a benchmark. Each file of ``peers/`` lists its own in ``PEERS``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

State = dict[str, torch.Tensor]
OURS = "dcp_plugin"
IO_THREADS = 2
"""Of everybody who can be told."""


def _nothing(state: State) -> None:
    pass


@dataclass(frozen=True)
class Peer:
    """One way to save and load a flat state. ``load`` fills the tensors of the state that it is given."""

    name: str
    save: Callable[[State, Path], None]
    load: Callable[[State, Path], None]
    sharded: bool = True
    """Whether it knows DTensors on several ranks."""
    only: str = ""
    """The one benchmark in which it says something of its own; empty: all."""
    prepare: Callable[[State], None] = _nothing
    """Called before the clock starts."""


def find(benchmark: str, world: int, wanted: list[str] | None) -> list[Peer]:
    """The peers that can take part; those whose package is not installed are left out, and said to be."""
    import benchmarks.peers

    found: list[Peer] = []
    for module in pkgutil.iter_modules(benchmarks.peers.__path__):
        try:
            found += importlib.import_module(f"benchmarks.peers.{module.name}").PEERS
        except ImportError as error:
            print(f"left out: {module.name} ({error})")
    found = [peer for peer in found if peer.only in ("", benchmark) and (world == 1 or peer.sharded)]
    return [peer for peer in found if wanted is None or peer.name in wanted or peer.name == OURS]
