"""What Lightning, Accelerate and transformers saved without us: which of it a training can go on from.

The contents decide, never the name of what was saved. A checkpoint to resume from has the state of a training: an
optimizer, a schedule, random streams. Weights alone, pre-trained or exported, have none, and are no resume.

==============  ====================================================  ==================================================
by              is there                                              is complete with
==============  ====================================================  ==================================================
Lightning       a ``torch.save`` file with its version in it          ``optimizer_states``
Accelerate      ``random_states_0.pkl``, ``optimizer.bin``, …         ``random_states_0.pkl``, which rank 0 writes last
transformers    ``trainer_state.json``, ``optimizer.pt``, …           ``trainer_state.json``, which rank 0 writes last
others          a ``torch.save`` file with the state of an optimizer
==============  ====================================================  ==================================================

Nothing is unpickled for that: names of files, the first record's name of a zip, and text in a pickle tell it.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

from dcp_plugin.errors import CheckpointCorrupt, CheckpointError
from dcp_plugin.format.foreign import dcp_folder, detect, safetensors, torch_file
from dcp_plugin.media.disk import LocalDisk

LIGHTNING, ACCELERATE, TRANSFORMERS, OTHERS = "Lightning", "Accelerate", "transformers", "torch.save"
RESUMABLE = (LIGHTNING, ACCELERATE, TRANSFORMERS)
"""Whose checkpoints are resumed from; ``OTHERS`` only by who knows the names in them."""

TRAINER_STATE = "trainer_state.json"
RANDOM_STATES = "random_states_0.pkl"
_UNFINISHED = "checkpoint-is-incomplete.txt"
"""What transformers puts beside a checkpoint that it makes just before a job is ended, until it is done."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")
_OF_THE_TRAINER = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth"}
_OF_ACCELERATE = {"optimizer.bin", "scheduler.bin", "optimizer_0"}

_NO_OPTIMIZER = "it has weights, and no optimizer to go on with"

_PICKLED = re.compile(rb"[^\0]+/data\.pkl")
_FIRST_RECORD = struct.Struct("<4s22xHH")
_USUAL = (".ckpt", ".pt", ".pth", ".bin", ".tar", "")
_MOST_OPENED = 1_000
"""Files of a directory whose beginning is looked at, whatever their names."""


@dataclass(frozen=True)
class Saved:
    """Something that another tool than ours may have saved for a resume."""

    path: Path
    time: float
    """When it was completed, as far as the file system tells; see :func:`in_order`."""
    tool: str = ""
    """Empty for a file that was not looked into."""
    reason: str = ""
    """Why it cannot be resumed from, as far as names of files tell that."""
    export: bool = False
    """It has weights and no state of a training. What is below it may be something else."""

    def examined(self) -> Saved | None:
        """After a look into it. None for a file that has nothing to do with a training."""
        if not self.tool:
            return _examined_file(self.path, self.time)
        return self if self.reason else Saved(self.path, self.time, self.tool, _damage(self.path))


def saved_as_folder(path: Path, names: Iterable[str]) -> Saved | None:
    """What a directory with these entries was saved by; None if it is no checkpoint of these tools."""
    names = set(names)
    of_trainer, of_accelerate = names & _OF_THE_TRAINER, names & _OF_ACCELERATE
    if not (of_trainer or of_accelerate or names & {TRAINER_STATE, RANDOM_STATES}):
        return None
    has_weights = any(fnmatchcase(name, pattern) for pattern in _WEIGHTS for name in names)
    if TRAINER_STATE in names and (of_trainer or of_accelerate):
        return _folder(path, TRANSFORMERS, TRAINER_STATE, "its save was interrupted" if _UNFINISHED in names else "")
    if TRAINER_STATE in names and has_weights:
        return _folder(path, TRANSFORMERS, TRAINER_STATE, _NO_OPTIMIZER, export=True)
    if RANDOM_STATES in names:
        return _folder(path, ACCELERATE, RANDOM_STATES)
    if has_weights and (of_trainer or of_accelerate):
        tool, last = (TRANSFORMERS, TRAINER_STATE) if of_trainer else (ACCELERATE, RANDOM_STATES)
        return _folder(path, tool, "", f"it has no {last}: its save has not ended, or another tool has made it")
    return None


def saved_as_files(entries: Iterable[os.DirEntry[str]]) -> Iterator[Saved]:
    """The files among them that ``torch.save`` wrote. Of very many, those with a usual name are looked at."""
    for number, entry in enumerate(entries):
        if number >= _MOST_OPENED and os.path.splitext(entry.name)[1] not in _USUAL:
            continue
        with suppress(OSError):
            if entry.is_file(follow_symlinks=False) and _begins_like_torch_save(entry.path):
                yield Saved(Path(entry.path), entry.stat(follow_symlinks=False).st_mtime)


def in_order(found: Iterable[Saved]) -> list[Saved]:
    """The same, each at its time.

    A copy of a run may have the times of the copying. Accelerate and transformers go by the numbers in the names, so
    what is numbered beside each other gets the times of all of it in the order of the numbers.
    """
    ordered = [one for one in found if _group(one) is None]
    numbered = sorted((one for one in found if _group(one)), key=lambda one: (str(_group(one)), _number(one)))
    for _, group in groupby(numbered, key=_group):
        members = list(group)
        times = sorted(one.time for one in members)
        ordered += [
            Saved(one.path, time, one.tool, one.reason, one.export) for one, time in zip(members, times, strict=True)
        ]
    return ordered


def _group(one: Saved) -> tuple[str, str, str] | None:
    number = _number(one)
    return None if number < 0 or not one.tool else (one.tool, str(one.path.parent), one.path.name[: -len(str(number))])


def _number(one: Saved) -> int:
    match = re.search(r"(?:0|[1-9][0-9]{0,17})$", one.path.name)
    return int(match[0]) if match else -1


def _folder(path: Path, tool: str, last: str, reason: str = "", export: bool = False) -> Saved | None:
    try:
        return Saved(path, (path / last).stat().st_mtime, tool, reason, export)
    except OSError:  # deleted while we looked
        return None


def _begins_like_torch_save(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(1 << 10)
    if len(head) < _FIRST_RECORD.size:
        return False
    magic, length, _ = _FIRST_RECORD.unpack_from(head)
    name = head[_FIRST_RECORD.size : _FIRST_RECORD.size + length]
    return magic == b"PK\3\4" and _PICKLED.fullmatch(name) is not None


def _examined_file(path: Path, time: float) -> Saved | None:
    try:
        torch_file.check_records(path)
    except CheckpointCorrupt as error:
        return Saved(path, time, OTHERS, str(error).removeprefix(f"{path} ").removeprefix(f"{path}: "))
    except CheckpointError:  # a module of TorchScript, or from a machine of another kind
        return None
    if torch_file.mentions(path, torch_file.LIGHTNING):
        whole = torch_file.mentions(path, "optimizer_states")
        return Saved(path, time, LIGHTNING, "" if whole else _NO_OPTIMIZER, not whole)
    return Saved(path, time, OTHERS) if torch_file.mentions(path, "param_groups") else None


def _damage(folder: Path) -> str:
    """What is cut or lost of a checkpoint that is a directory; empty if nothing is."""
    try:
        for file in sorted(folder.iterdir()):
            kind = detect.kind_of_file(file) if file.suffix in (".safetensors", ".bin", ".pt", ".pth") else ""
            if kind == "safetensors":
                safetensors.read_file(file)
            elif kind == "torch.save":
                torch_file.check_records(file)
            elif file.suffix == ".safetensors":
                return f"{file.name} is no safetensors file"
        if folders := dcp_folder.accelerate_folders(files := LocalDisk().open(folder)):
            dcp_folder.accelerate_index(files, folders)
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""
