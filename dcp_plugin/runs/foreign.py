"""Checkpoints that Lightning, Accelerate and transformers saved without this package, and which can be resumed from.

A checkpoint to resume from has the state of a training: an optimizer, a schedule, random streams. Weights alone do not
count. The contents decide, never the name.

==============  ====================================================  ==================================================
by              is there                                              is complete with
==============  ====================================================  ==================================================
Lightning       a ``torch.save`` file with its version in it          ``optimizer_states``
Accelerate      ``random_states_0.pkl``, ``optimizer.bin``, …         ``random_states_0.pkl``, which rank 0 writes last
transformers    ``trainer_state.json``, ``optimizer.pt``, …           ``trainer_state.json``, which rank 0 writes last
others          a ``torch.save`` file with the state of an optimizer
==============  ====================================================  ==================================================

Nothing is unpickled to find out: names of files, the first record's name of a zip and text in a pickle are enough.
"""

from __future__ import annotations

import posixpath
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby

from dcp_plugin.errors import CheckpointCorrupt, CheckpointError, CheckpointUnreadable, damage_in
from dcp_plugin.format import NUMBERED, Files, is_of_other_tool
from dcp_plugin.format.torch_archive import MAGIC
from dcp_plugin.paths import Where, as_path

LIGHTNING, ACCELERATE, TRANSFORMERS, OTHERS = "Lightning", "Accelerate", "transformers", "torch.save"
RESUMABLE = (LIGHTNING, ACCELERATE, TRANSFORMERS)
"""Whose checkpoints are resumed from; ``OTHERS`` only by who knows the names in them."""

TRAINER_STATE = "trainer_state.json"
RANDOM_STATES = "random_states_0.pkl"
_UNFINISHED = "checkpoint-is-incomplete.txt"
"""What transformers puts beside a checkpoint that it makes just before a job is ended, until it is done."""
_WITH_TENSORS = (".safetensors", ".bin", ".pt", ".pth")
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

    files: Files
    name: str
    """Of the file among ``files``; empty for all of them."""
    time: float
    """When it was completed, as far as the file system tells; see :func:`in_order`."""
    tool: str = ""
    """Empty for a file that was not looked into."""
    reason: str = ""
    """Why it cannot be resumed from, as far as names of files tell that."""
    export: bool = False
    """It has weights and no state of a training. What is below it may be something else."""
    interrupted: bool = False
    """Its save has not ended."""

    @property
    def path(self) -> Where:
        where = as_path(self.files.where)
        return where / self.name if self.name else where

    def examined(self) -> Saved | None:
        """After a look into it. None for a file that has nothing to do with a training.

        Raises:
            CheckpointUnreadable: The file system fails to read it.
        """
        if not self.tool:
            return _examined_file(self)
        return self if self.reason else replace(self, reason=_damage(self.files))


def saved_as_folder(files: Files, names: Iterable[str]) -> Saved | None:
    """What a directory with these entries was saved by; None if it is no checkpoint of these tools."""
    names = set(names)
    of_trainer, of_accelerate = names & _OF_THE_TRAINER, names & _OF_ACCELERATE
    if not (of_trainer or of_accelerate or names & {TRAINER_STATE, RANDOM_STATES}):
        return None
    has_weights = any(fnmatchcase(name, pattern) for pattern in _WEIGHTS for name in names)
    if TRAINER_STATE in names and (of_trainer or of_accelerate):
        return _folder(files, TRANSFORMERS, TRAINER_STATE, "its save was interrupted" if _UNFINISHED in names else "")
    if TRAINER_STATE in names and has_weights:
        return _folder(files, TRANSFORMERS, TRAINER_STATE, _NO_OPTIMIZER, export=True)
    if RANDOM_STATES in names:
        return _folder(files, ACCELERATE, RANDOM_STATES)
    if has_weights and (of_trainer or of_accelerate):
        tool, last = (TRANSFORMERS, TRAINER_STATE) if of_trainer else (ACCELERATE, RANDOM_STATES)
        return _folder(files, tool, "", f"it has no {last}: its save has not ended, or another tool has made it")
    return None


def is_checkpoint_folder(files: Files, folder: str) -> bool:
    """Return whether a directory is a checkpoint of these tools, complete or not, and no folder of checkpoints.

    Args:
        folder: What the directory is called.
    """
    names = files.names()
    plain = [name.rstrip("/") for name in names]
    if NUMBERED.fullmatch(folder):  # the save may have been interrupted after any of its files
        return not names or any(map(is_of_other_tool, plain))
    saved = saved_as_folder(files, plain)
    below = [name for name in names if name.endswith("/") and NUMBERED.fullmatch(name.rstrip("/"))]
    return saved is not None and not (saved.export and below)


def saved_as_files(files: Files, names: Iterable[str], look: bool = True) -> Iterator[Saved]:
    """Those of the named files that ``torch.save`` wrote. Of very many, those with a usual name are looked at.

    Args:
        look: False: all that have a usual name are taken for such files, for now.
    """
    for number, name in enumerate(names):
        if (number >= _MOST_OPENED or not look) and posixpath.splitext(name)[1] not in _USUAL:
            continue
        with suppress(FileNotFoundError):
            if not look or _may_be_torch_save(files, name):
                yield Saved(files, name, files.modified(name))


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
        ordered += [replace(one, time=time) for one, time in zip(members, times, strict=True)]
    return ordered


def _group(one: Saved) -> tuple[str, str, str] | None:
    number = _number(one)
    return None if number < 0 or not one.tool else (one.tool, str(one.path.parent), one.path.name[: -len(str(number))])


def _number(one: Saved) -> int:
    match = re.search(r"(?:0|[1-9][0-9]{0,17})$", one.path.name)
    return int(match[0]) if match else -1


def _folder(files: Files, tool: str, last: str, reason: str = "", export: bool = False) -> Saved | None:
    try:
        return Saved(files, "", files.modified(last), tool, reason, export, bool(reason) and not export)
    except FileNotFoundError:  # deleted while we looked
        return None


def _may_be_torch_save(files: Files, name: str) -> bool:
    """Return whether :meth:`Saved.examined` has to look into a file: also if it cannot be read, which that raises."""
    try:
        return _begins_like_torch_save(files, name)
    except FileNotFoundError:
        raise
    except OSError:
        return True


def _begins_like_torch_save(files: Files, name: str) -> bool:
    with files.open(name) as file:
        head = file.read(1 << 10)
    if len(head) < _FIRST_RECORD.size:
        return False
    magic, length, _ = _FIRST_RECORD.unpack_from(head)
    record = head[_FIRST_RECORD.size : _FIRST_RECORD.size + length]
    return magic == MAGIC and _PICKLED.fullmatch(record) is not None


def _examined_file(one: Saved) -> Saved | None:
    from dcp_plugin.format.foreign import torch_file  # needs torch, which a look at names does not

    files, name = one.files, one.name
    with suppress(OSError):  # the check says what is wrong
        if not _begins_like_torch_save(files, name):
            return None
    try:
        torch_file.check_records(files, name)
    except CheckpointUnreadable:
        raise
    except CheckpointCorrupt as error:
        return replace(one, tool=OTHERS, reason=str(error).removeprefix(f"{one.path} ").removeprefix(f"{one.path}: "))
    except CheckpointError:  # a module of TorchScript, or from a machine of another kind
        return None
    if torch_file.mentions(files, name, torch_file.LIGHTNING):
        resumable = torch_file.mentions(files, name, "optimizer_states")
        return replace(one, tool=LIGHTNING, reason="" if resumable else _NO_OPTIMIZER, export=not resumable)
    return replace(one, tool=OTHERS) if torch_file.mentions(files, name, "param_groups") else None


def _damage(files: Files) -> str:
    """Return which file of a directory is cut or lost; empty if none is."""
    from dcp_plugin.format.foreign import detect, frameworks, safetensors, torch_file  # as above

    try:
        with damage_in(files.where):
            for name in files.names():
                suffix = posixpath.splitext(name)[1]
                if suffix in (*_WITH_TENSORS, ".pkl", ".json"):
                    files.open(name).close()  # whoever resumes would wait for a named pipe
                kind = detect.kind_of_file(files, name) if suffix in _WITH_TENSORS else ""
                if kind == "safetensors":
                    safetensors.read_file(files, name)
                elif kind == "torch.save":
                    torch_file.check_records(files, name)
                elif suffix == ".safetensors":
                    return f"{name} is no safetensors file"
            if folders := frameworks.accelerate_folders(files):
                frameworks.accelerate_index(files, folders)
    except CheckpointUnreadable:
        raise
    except CheckpointError as error:
        return str(error)
    return ""
