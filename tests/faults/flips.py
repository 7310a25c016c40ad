"""Damage to the files of checkpoints: flipped bits, files cut, longer, swapped or of another save, zeroed blocks.

Every file of a save is ours, also what a framework put beside: whatever is done to one, but for items in a linked file
that its checkpoint does not have, ``verify`` does not say intact, ``load`` raises an error of ours or gives the right
bytes, and ``latest`` raises nothing, and passes over a checkpoint whose table of contents or summary is damaged. What
stock reads of a damaged checkpoint is stock's: it has no checksums.

``python -m tests.faults flips`` does this many times and prints what was noticed, by checkpoint, file and damage.
"""

from __future__ import annotations

import logging
import random
import re
import shutil
import tempfile
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import torch

import dcp_plugin as dcp
from dcp_plugin.core.format import INDEX, METADATA, SUMMARY
from dcp_plugin.core.media.places import WORKSPACE
from dcp_plugin.integration.stored import keys_by_name
from tests import launch
from tests.compare import same_tree
from tests.faults.campaign import Campaign, Parts

BLOCK = 4096


def plain(root: Path) -> None:
    """A checkpoint of one process, with values, and an earlier one beside it."""
    generator = torch.Generator().manual_seed(1)
    for step in (1, 2):
        model = torch.nn.Sequential(torch.nn.Linear(70, 50), torch.nn.Linear(50, 3))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, generator=generator)
        more = {"large": torch.randn(300_000, generator=generator), "step": step, "text": "a" * step}
        dcp.save({"model": model, "t": more}, root / str(step), step=step, reuse=False)


def linked(root: Path) -> None:
    """One with a file of an earlier save, of which a ninth belongs to nobody any more."""
    tensors = {f"w{number}": torch.full((20_000,), float(number)) for number in range(9)}
    ours = dcp.Checkpointer()
    for step in range(4):
        ours.save({"t": {**tensors, "trained": torch.full((9,), float(step))}}, root / str(step), step=step)
    tensors["w4"] = tensors["w4"] + 1
    ours.save({"t": {**tensors, "trained": torch.ones(9)}}, root / "4", step=4)
    ours.close()
    for step in range(3):
        shutil.rmtree(root / str(step))


def of_two_ranks(root: Path) -> None:
    """FSDP2 on two ranks."""
    launch.run(_save_on_ranks, 2, root)


def _save_on_ranks(root: Path) -> None:
    from tests.layouts import build, train

    model, optimizer = build("fsdp2")
    train(model, optimizer, 1)
    dcp.save({"model": model, "optim": optimizer}, root / "ck")


def of_accelerate(root: Path) -> None:
    """One with views for stock loaders, and files that Accelerate has put beside."""
    launch.run(_save_by_accelerate, 2, root)


def _save_by_accelerate(root: Path) -> None:
    from tests.accelerate import training

    run = training.start("fsdp2", stateful=False, unused=False)
    run.train(1)
    run.accelerator.save_state(str(root / "ck"))


def copied(root: Path) -> None:
    """A copy of what was saved to an object store, with files that a framework has put beside."""
    store = f"memory://{uuid.uuid4().hex}"
    ours = dcp.Checkpointer()
    for step in (1, 2):
        state = {"t": {"w": torch.full((60_000,), float(step)), "n": step}}
        ours.save(state, f"{store}/{step}", step=step, files=lambda at: (at / "beside.bin").write_bytes(b"beside"))
    ours.close()
    fsspec.filesystem("memory").get(f"{store.removeprefix('memory:/')}/", f"{root}/", recursive=True)
    shutil.rmtree(root / ".dcp_plugin", ignore_errors=True)


SCENES: dict[str, Callable[[Path], None]] = {
    "plain": plain, "hard links": linked, "two ranks": of_two_ranks, "Accelerate": of_accelerate,
    "copied": copied,
}  # fmt: skip


def _flip(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _zero(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    start = rng.randrange(len(data)) // BLOCK * BLOCK
    length = len(data[start : start + BLOCK])
    return data[:start] + bytes(length) + data[start + length :]


def _shuffle(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Two blocks in each other's place."""
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    one, other = rng.randrange(len(blocks)), rng.randrange(len(blocks))
    blocks[one], blocks[other] = blocks[other], blocks[one]
    return b"".join(blocks)


DAMAGE: dict[str, Callable[[bytes, list[bytes], random.Random], bytes]] = {
    "bit": _flip,
    "cut": lambda data, others, rng: data[: rng.choice((0, len(data) - 1, rng.randrange(len(data))))],
    "longer": lambda data, others, rng: data + rng.choice((bytes(rng.randrange(1, 100)), rng.randbytes(BLOCK), data)),
    "zeroed": _zero,
    "of another": lambda data, others, rng: rng.choice(others) if others else b"",
    "shuffled": _shuffle,
}
SWAPPED = "swapped"
"""Two files of a checkpoint have each other's bytes."""
WEIGHTS = (6, 1, 1, 1, 1, 1, 1)


@dataclass
class Damaged:
    """What was damaged, and what came of it."""

    scene: str
    name: str
    damage: str
    wrong: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The file's, without numbers."""
        return (
            re.sub(r"-[0-9a-f]{16}", "", re.sub(r"\d+", "0", self.name)) if ".distcp" not in self.name else "*.distcp"
        )

    def __str__(self) -> str:
        return f"{self.scene}: {self.name}, {self.damage}: {'; '.join(self.wrong)}"


class Subject:
    """The checkpoints of one scene, and what they hold."""

    def __init__(self, scene: str, root: Path) -> None:
        self.scene, self.root = scene, root
        made = root.with_name(f"{root.name}-made")
        made.mkdir()
        SCENES[scene](made)
        shutil.move(made, root)  # a copy of each file: hard links would damage two
        for file in self._files():
            data = file.read_bytes()
            file.unlink()
            file.write_bytes(data)
        self.files = {file: file.read_bytes() for file in self._files()}
        self.states = {path: _loaded(path) for path in sorted(self.root.iterdir()) if path.name != WORKSPACE}
        self.items = {path / name: items for path in self.states for name, items in _items_in_linked_files(path)}
        assert all(dcp.verify(path).ok for path in self.states)
        assert dcp.latest(root) in self.states

    def _files(self) -> list[Path]:
        found = (path for path in self.root.rglob("*") if path.is_file())
        return sorted(path for path in found if WORKSPACE not in path.parts)

    def damage(self, rng: random.Random) -> Damaged:
        """Damage a file, or two, look, and mend it."""
        while True:
            file = rng.choice(list(self.files))
            kind = rng.choices([*DAMAGE, SWAPPED], WEIGHTS)[0]
            checkpoint = self.root / file.relative_to(self.root).parts[0]
            if kind == SWAPPED:
                other = rng.choice([path for path in self.files if checkpoint in path.parents])
                changed = {other: self.files[file], file: self.files[other]}
            else:
                changed = {file: DAMAGE[kind](self.files[file], list(self.files.values()), rng)}
            if any(self._is_noticeable(path, data) for path, data in changed.items()):
                break
        try:
            for path, data in changed.items():
                path.write_bytes(data)
            name = file.relative_to(checkpoint).as_posix()
            return Damaged(self.scene, name, kind, self._wrong(checkpoint, name))
        finally:
            for path in changed:
                path.write_bytes(self.files[path])

    def _is_noticeable(self, file: Path, data: bytes) -> bool:
        """Whether other bytes than those of dead items have changed: those in a linked file that its checkpoint does
        not have, which no hash covers."""
        saved, end = self.files[file], 0
        if len(data) != len(saved) or file not in self.items:
            return data != saved
        for begin, next_end in [*self.items[file], (len(saved), len(saved))]:
            if begin - end < 1024 and data[end:begin] != saved[end:begin]:
                return True
            if data[begin:next_end] != saved[begin:next_end]:
                return True
            end = next_end
        return False

    def _wrong(self, checkpoint: Path, name: str) -> list[str]:
        wrong = []
        try:
            if dcp.verify(checkpoint).ok:
                wrong.append("verify says intact")
        except Exception as error:
            wrong += _foreign("verify", error)
        try:
            if not same_tree(_loaded(checkpoint, self.states[checkpoint]), self.states[checkpoint]):
                wrong.append("other bytes are loaded")
        except Exception as error:
            wrong += _foreign("load", error)
        try:
            if dcp.latest(self.root) == checkpoint and name in (METADATA, INDEX, SUMMARY):
                wrong.append("latest gives it")
        except Exception as error:
            wrong.append(f"latest raises {error!r}")
        return wrong


def _items_in_linked_files(path: Path) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """The files of a checkpoint that are meant to be linked, and where each of their items begins and ends."""
    index = dcp.ShardedReader(path).index
    for name in index.linkable:
        _, found = index.places.items_in(index.file_names.index(name))
        rows = index.columns["place"][found, :2].tolist()
        yield name, sorted({(offset, offset + length) for offset, length in rows})


def _foreign(what: str, error: Exception) -> list[str]:
    return [] if isinstance(error, dcp.CheckpointError) else [f"{what} raises {error!r}"]


def _loaded(path: Path, names: Iterable[str] | None = None) -> dict[str, Any]:
    """All that a checkpoint holds; its names may be known."""
    state: dict[str, Any] = {name: {} for name in names or keys_by_name(path)}
    dcp.load(state, path)
    return state


def damaged(seed: int, count: int, scene: str) -> Iterator[Damaged]:
    """Damage the checkpoints of a scene so many times."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="dcp-flips-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = Subject(scene, Path(folder) / "checkpoints")
        for _ in range(count):
            yield subject.damage(rng)


def _parts(chosen: Any) -> Parts:
    logging.getLogger("dcp_plugin").setLevel(logging.ERROR)  # what is passed over, each time
    done: Counter[tuple[str, str, str]] = Counter()

    def found(scene: str) -> Iterator[str]:
        for one in damaged(chosen.seed, -(-chosen.count // len(SCENES)), scene):
            done[one.scene, one.kind, one.damage] += 1
            yield str(one) if one.wrong else ""

    for scene in SCENES:
        yield scene, found(scene)
    for (scene, kind, damage), times in sorted(done.items()):
        print(f"{scene:12} {kind:36} {damage:12} {times}")


CAMPAIGN = Campaign(__doc__, _parts, {"count": 5000, "seed": 0})
