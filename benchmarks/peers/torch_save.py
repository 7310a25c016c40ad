"""``torch.save`` and ``torch.load(mmap=True)``: one file, one rank."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks._peer import Peer, State


def save(state: State, path: Path) -> None:
    path.mkdir()
    torch.save(state, path / "state.pt")


def load(state: State, path: Path) -> None:
    for key, tensor in torch.load(path / "state.pt", mmap=True, weights_only=True).items():
        state[key].copy_(tensor)


PEERS = [Peer("torch.save, load(mmap)", save, load, sharded=False)]
