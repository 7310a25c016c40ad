"""Checkpoints that Lightning, Accelerate and transformers saved without this package, and that can be resumed from.

The rule: detection unpickles nothing. It reads names of files, the name of a zip's first record, and text in a pickle.

A checkpoint to resume from has the state of a training: an optimizer, a schedule, random streams. Weights alone do not
count. The contents decide, never the name.

==============  ====================================================  ==================================================
tool            files                                                 complete with
==============  ====================================================  ==================================================
Lightning       a ``torch.save`` file with its version in it          ``optimizer_states``
Accelerate      ``random_states_0.pkl``, ``optimizer.bin``, …         ``random_states_0.pkl``, which rank 0 writes last
transformers    ``trainer_state.json``, ``optimizer.pt``, …           ``trainer_state.json``, which rank 0 writes last
others          a ``torch.save`` file with the state of an optimizer
==============  ====================================================  ==================================================
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointError, CheckpointUnreadable, damage_in
from dcp_plugin.core.format import NUMBERED, Files, is_of_other_tool
from dcp_plugin.core.format.torch_archive import LOCAL_HEADER, MAGIC
from dcp_plugin.core.paths import Where, as_path

LIGHTNING, ACCELERATE, TRANSFORMERS, OTHERS = "Lightning", "Accelerate", "transformers", "torch.save"
RESUMABLE = (LIGHTNING, ACCELERATE, TRANSFORMERS)
"""Tools whose checkpoints an automatic resume takes. ``OTHERS`` needs a caller that knows the names in the file."""

TRAINER_STATE = "trainer_state.json"
RANDOM_STATES = "random_states_0.pkl"
_UNFINISHED = "checkpoint-is-incomplete.txt"
"""Marker file that transformers keeps in a checkpoint until its save ends, if it saves just before the end of a job."""
_WITH_TENSORS = (".safetensors", ".bin", ".pt", ".pth")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")
_OF_THE_TRAINER = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth"}
_OF_ACCELERATE = {"optimizer.bin", "scheduler.bin", "optimizer_0"}

_NO_OPTIMIZER = "it has weights, and no optimizer to go on with"

_PICKLED = re.compile(rb"[^\0]+/data\.pkl")
_USUAL = (".ckpt", ".pt", ".pth", ".bin", ".tar", "")
_MOST_OPENED = 1_000
"""Number of files in a directory that are opened under any name; further files need a usual suffix."""


@dataclass(frozen=True)
class Saved:
    """Possible checkpoint of another tool."""

    files: Files
    name: str
    """Name of the file among ``files``; empty for all files."""
    time: float
    """Time of completion according to the file system; see :func:`in_order`."""
    tool: str = ""
    """Name of the tool; empty for a file that was not examined."""
    reason: str = ""
    """Reason why it cannot be resumed from; empty if the names of files show none."""
    export: bool = False
    """True for weights without the state of a training. Directories below may be checkpoints."""
    interrupted: bool = False
    """True if the save has not ended."""

    @property
    def path(self) -> Where:
        directory = as_path(self.files.where)
        return directory / self.name if self.name else directory

    def examined(self) -> Saved | None:
        """Return this candidate with the results of an examination; None for a file that is no checkpoint.

        Raises:
            CheckpointUnreadable: The file system fails to read it.
        """
        if not self.tool:
            return _examined_file(self)
        return self if self.reason else replace(self, reason=_damage(self.files))


def saved_as_folder(files: Files, names: Iterable[str]) -> Saved | None:
    """Return a directory with these entries as a candidate; None if it is no checkpoint of these tools."""
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
        folder: The name of the directory.
    """
    names = files.names()
    plain = [name.rstrip("/") for name in names]
    if NUMBERED.fullmatch(folder):  # the save may have been interrupted after any of its files
        return not names or any(map(is_of_other_tool, plain))
    saved = saved_as_folder(files, plain)
    below = [name for name in names if name.endswith("/") and NUMBERED.fullmatch(name.rstrip("/"))]
    return saved is not None and not (saved.export and below)


def saved_as_files(files: Files, names: Iterable[str], look: bool = True) -> Iterator[Saved]:
    """Yield the files that ``torch.save`` wrote.

    The first :data:`_MOST_OPENED` files are opened under any name, further files only with a usual suffix.

    Args:
        look: True to open the files. If False, yield all files with a usual suffix, and open none.
    """
    for number, name in enumerate(names):
        if (number >= _MOST_OPENED or not look) and posixpath.splitext(name)[1] not in _USUAL:
            continue
        with suppress(FileNotFoundError):
            if not look or _may_be_torch_save(files, name):
                yield Saved(files, name, files.modified(name))


def in_order(candidates: Collection[Saved]) -> list[Saved]:
    """Return the candidates with times that agree with the numbers in their names.

    A copy of a run may have the times of the copy, and Accelerate and transformers rely on the numbers. The times of a
    tool's numbered checkpoints in a directory are therefore assigned in the order of the numbers.
    """
    ordered = [saved for saved in candidates if _group(saved) is None]
    numbered = sorted(
        (saved for saved in candidates if _group(saved)), key=lambda saved: (str(_group(saved)), _number(saved))
    )
    for _, group in groupby(numbered, key=_group):
        members = list(group)
        times = sorted(saved.time for saved in members)
        ordered += [replace(saved, time=time) for saved, time in zip(members, times, strict=True)]
    return ordered


def _group(saved: Saved) -> tuple[str, str, str] | None:
    number = _number(saved)
    return (
        None
        if number < 0 or not saved.tool
        else (saved.tool, str(saved.path.parent), saved.path.name[: -len(str(number))])
    )


def _number(saved: Saved) -> int:
    match = re.search(r"(?:0|[1-9][0-9]{0,17})$", saved.path.name)
    return int(match[0]) if match else -1


def _folder(files: Files, tool: str, last: str, reason: str = "", export: bool = False) -> Saved | None:
    try:
        return Saved(files, "", files.modified(last), tool, reason, export, bool(reason) and not export)
    except FileNotFoundError:  # another process deleted it
        return None


def _may_be_torch_save(files: Files, name: str) -> bool:
    """Return whether :meth:`Saved.examined` has to read a file.

    True for an unreadable file: the examination raises its error.
    """
    try:
        return _begins_like_torch_save(files, name)
    except FileNotFoundError:
        raise
    except OSError:
        return True


def _begins_like_torch_save(files: Files, name: str) -> bool:
    with files.open(name) as file:
        head = file.read(1 << 10)
    if len(head) < LOCAL_HEADER.size:
        return False
    magic, *_, length, _ = LOCAL_HEADER.unpack_from(head)
    record = head[LOCAL_HEADER.size : LOCAL_HEADER.size + length]
    return magic == MAGIC and _PICKLED.fullmatch(record) is not None


def _examined_file(saved: Saved) -> Saved | None:
    from dcp_plugin.core.format.foreign import torch_file  # imports torch, which a check of names does not need

    files, name = saved.files, saved.name
    with suppress(OSError):  # pickle_of() raises a better error
        if not _begins_like_torch_save(files, name):
            return None
    try:
        pickled = torch_file.pickle_of(files, name)
    except CheckpointUnreadable:
        raise
    except CheckpointCorrupt as error:
        return replace(
            saved, tool=OTHERS, reason=str(error).removeprefix(f"{saved.path} ").removeprefix(f"{saved.path}: ")
        )
    except CheckpointError:  # a TorchScript module, or a file of another byte order
        return None
    if torch_file.LIGHTNING.encode() in pickled:
        resumable = b"optimizer_states" in pickled
        return replace(saved, tool=LIGHTNING, reason="" if resumable else _NO_OPTIMIZER, export=not resumable)
    return replace(saved, tool=OTHERS) if b"param_groups" in pickled else None


def _damage(files: Files) -> str:
    """Return the text of an error that names a truncated or lost file of a directory; empty without such a file."""
    from dcp_plugin.core.format.foreign import detect, safetensors, torch_file  # imports torch

    try:
        with damage_in(files.where):
            for name in files.names():
                suffix = posixpath.splitext(name)[1]
                if suffix in (*_WITH_TENSORS, ".pkl", ".json"):
                    files.open(name).close()  # refuses a named pipe, for which a resume would wait
                kind = detect.kind_of_file(files, name) if suffix in _WITH_TENSORS else ""
                if kind == "safetensors":
                    safetensors.read_file(files, name)
                elif kind == "torch.save":
                    torch_file.pickle_of(files, name)
                elif suffix == ".safetensors":
                    return f"{name} is no safetensors file"
            if folders := detect.accelerate_folders(files):
                detect.accelerate_index(files, folders)
    except CheckpointUnreadable:
        raise
    except CheckpointError as error:
        return str(error)
    return ""
