"""Real text on every machine: the source code of its Python standard library.

The rule: the text of global batch k depends on the seed, the epoch and k, never on the number of ranks. So
a run that is resumed on another number of ranks goes on with the text that would have come next: its position
is a number of global batches, which is right for every rank, however many there are.
"""

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

SKIPPED = {"site-packages", "test", "tests", "encodings", "pydoc_data"}  # the last two are tables, not code


@cache
def stdlib_source(max_bytes: int) -> Tensor:
    """Return the first `max_bytes` of the standard library's modules, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    text = bytearray()
    for file in sorted(files, key=Path.as_posix):
        if SKIPPED.isdisjoint(file.parts):
            text += (root / file).read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


class Windows(Dataset[Tensor]):
    """Windows of `context` bytes of a text, each with the byte after it. Reads return complete batches."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.windows = text.unfold(0, context + 1, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, batch: list[int]) -> Tensor:
        return self.windows[batch].long()


class ShareOfBatches(Sampler[list[int]]):
    """One rank's share of every global batch. Lightning sets the epoch."""

    def __init__(self, windows: int, batch_size: int, rank: int, ranks: int, seed: int) -> None:
        if batch_size % ranks:
            raise ValueError(f"{ranks} ranks cannot share data.batch_size={batch_size} evenly")
        self.batches, self.batch_size = windows // batch_size, batch_size
        self.rank, self.ranks, self.seed, self.epoch = rank, ranks, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        shuffle = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.batches * self.batch_size, generator=shuffle)
        yield from order.view(self.batches, self.batch_size)[:, self.rank :: self.ranks].tolist()


class StdlibText(L.LightningDataModule):
    def __init__(self, *, context: int, batch_size: int, megabytes: float, seed: int) -> None:
        super().__init__()
        self.context, self.batch_size, self.megabytes, self.seed = context, batch_size, megabytes, seed
        self.loader: StatefulDataLoader | None = None
        self.position: dict | None = None

    def train_dataloader(self) -> StatefulDataLoader:
        self.loader = self.share(self.trainer.global_rank, self.trainer.world_size)
        if self.position is not None:
            self.loader.load_state_dict(self.position)
        return self.loader

    def share(self, rank: int, ranks: int) -> StatefulDataLoader:
        windows = Windows(stdlib_source(int(self.megabytes * 2**20)), self.context)
        sampler = ShareOfBatches(len(windows), self.batch_size, rank, ranks, self.seed)
        return StatefulDataLoader(windows, batch_size=None, sampler=sampler)

    # Lightning saves the state of the loader too, but that state is valid only for the same number of ranks.

    def state_dict(self) -> dict:
        return {"position": self.loader.state_dict() if self.loader else self.position}

    def load_state_dict(self, state_dict: dict) -> None:
        self.position = state_dict["position"]
