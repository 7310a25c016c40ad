"""The checkpoints of a run: find the newest, keep the last few, remove one; look into one and check its bytes.

Nothing here needs a model or torch.distributed. How a checkpoint becomes real, and how a crash is recovered from, is
told in :mod:`dcp_plugin.media.disk.commit`.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeVar

from dcp_plugin.config import PathLike, local_path
from dcp_plugin.errors import CheckpointCorrupt, CheckpointError, some
from dcp_plugin.format import METADATA, SUMMARY
from dcp_plugin.format.foreign.frameworks import RESUMABLE, Saved, in_order, saved_as_files, saved_as_folder
from dcp_plugin.format.index import Location, StoredTensor, StoredValue
from dcp_plugin.format.summary import Base
from dcp_plugin.media.disk import LocalDisk, commit
from dcp_plugin.runs.damage import note_chosen
from dcp_plugin.storage.open import read_summary, summary_of
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.types import CheckpointInfo, CheckpointState, TensorInfo, VerifyReport

T = TypeVar("T")

logger = logging.getLogger("dcp_plugin")

_OF_ANOTHER_TOOL = "it has the state of a training, which only a program that knows its form ({}) can load"
_DEPTH = 6
"""How deep below a root checkpoints are looked for: frameworks nest theirs (``logs/version_0/checkpoints/…``)."""


def latest(root: PathLike) -> Path | None:
    """The newest checkpoint at or below ``root`` that a training can go on from; never a torn one.

    A committed one whose files have been cut or lost since, by a copy that was interrupted for one, is passed over with
    a warning in the log. What Lightning (a ``.ckpt`` file), Accelerate or ``transformers.Trainer`` saved without this
    package counts, under any name, if it has the state of a training; weights alone do not.

    Args:
        root: Where to look, up to six directories deep.

    Returns:
        Its path; None if there is none. If only what cannot be resumed from is there, a ``UserWarning`` names it.

    Raises:
        ValueError: ``root`` is a URL.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.save({"step": 1}, "run/step-1")
        >>> dcp_plugin.latest("run").name
        'step-1'
    """
    found = find_newest(root)
    found.warn(root)
    if found.path is not None:
        note_chosen(found.path)
    return found.path


def reason_to_pass_over(path: PathLike) -> str:
    """Why a directory cannot be resumed from: torn, or its files are not all there. Empty if it can."""
    try:
        ShardedReader(path, complete=False).index  # noqa: B018 - opening it compares all files with their sizes
    except CheckpointError as error:
        return str(error)
    return ""


def list_checkpoints(root: PathLike) -> list[CheckpointState]:
    """Every directory at or below ``root`` that is a checkpoint or pretends to be one, oldest first.

    Args:
        root: Where to look, up to six directories deep. Links are not followed.

    Returns:
        Their states. What a crash left in flight is listed as not committed, with the reason.

    Raises:
        ValueError: ``root`` is a URL.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.save({"step": 1}, "run/step-1", step=1)
        >>> [(state.step, state.committed) for state in dcp_plugin.list_checkpoints("run")]
        [(1, True)]
    """
    return sorted(_scan(local_path(root), _DEPTH), key=lambda state: (state.time, state.step or -1))


def numbered(root: Path, prefix: str) -> list[tuple[int, Path]]:
    """The directories in ``root`` that are called ``<prefix><number>``, lowest number first, with their numbers."""
    children = root.iterdir() if root.is_dir() else ()
    named = [(re.fullmatch(rf"{re.escape(prefix)}(\d+)", path.name), path) for path in children]
    return sorted((int(name[1]), path) for name, path in named if name is not None and path.is_dir())


def first_usable(paths: Iterable[Path], examine: Callable[[Path], T]) -> tuple[T | None, list[CheckpointError]]:
    """What ``examine`` returns for the first path that it accepts; None if it accepts none.

    Returns:
        That, and the errors with which it refused the paths before.
    """
    refused: list[CheckpointError] = []
    for path in paths:
        try:
            return examine(path), refused
        except CheckpointError as error:
            refused.append(error)
    return None, refused


def prune(newest: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` committed checkpoints among the siblings of ``newest``.

    Only checkpoints of this package are candidates: what others wrote, over one of ours too, is not ours to delete.
    """
    times: dict[Path, float] = {}
    for path in newest.parent.iterdir():
        if path != newest and path.is_dir() and not path.is_symlink():
            with suppress(CheckpointCorrupt, OSError):
                if not commit.uncommitted_reason(path) and (summary := read_summary(path)) is not None:
                    times[path] = summary.time
    remove_oldest(sorted(times, key=times.__getitem__), keep - 1)


def remove_oldest(paths: Sequence[Path], keep: int) -> None:
    """Delete all but the last ``keep`` of ``paths``, which are sorted from old to new.

    What cannot be deleted is logged: the checkpoint that replaces it is published, and an old one does no harm.
    """
    # The newest of them first: a base can go only after the checkpoints that it completes.
    for path in reversed(paths[: max(0, len(paths) - keep)]):
        try:
            remove(path)
        except (OSError, CheckpointError) as error:
            logger.warning("could not delete the old checkpoint %s: %s", path, error)


def remove(path: PathLike) -> None:
    """Delete a checkpoint, so that at no moment something half-deleted can be taken for one.

    One that completes another beside it (``trainable_only``) is kept, with a warning in the log.

    Raises:
        CheckpointError: The file system failed, and it is there as it was.
    """
    path = local_path(path)
    try:
        completes = completed_by(path)
    except OSError as error:
        raise CheckpointError(f"cannot delete {path}: {error}. It is there as it was.") from error
    if completes is not None:
        _say_kept(path)
    else:
        commit.remove(path)


@functools.cache  # once: ``keep_last`` comes by after every save
def _say_kept(base: Path) -> None:
    logger.warning("%s is not deleted: it has the frozen parameters that checkpoints beside it leave out", base)


def completed_by(base: Path) -> Path | None:
    """A checkpoint in the same directory that cannot be loaded without this one. Symlinks are ignored."""
    if base.is_symlink() or not (base / METADATA).exists():
        return None
    own = ""
    with suppress(CheckpointCorrupt):
        summary = read_summary(base)
        own = summary.index_sha256 if summary else ""
    for file in base.parent.glob(f"*/{SUMMARY}"):
        with suppress(CheckpointCorrupt, ValueError):
            checkpoint = file.parent
            said = summary_of(LocalDisk().open(checkpoint)).base
            needed = said and _is_base(base, own, Base.of_summary(said, checkpoint), checkpoint)
            if needed and not _is_replaced(checkpoint):
                return checkpoint
    return None


def _is_replaced(checkpoint: Path) -> bool:
    """Whether stock has saved over a checkpoint of ours. One that is damaged may be repaired, and needs its base."""
    try:
        return read_summary(checkpoint) is None
    except CheckpointCorrupt:
        return False


def _is_base(path: Path, fingerprint: str, said: Base, checkpoint: Path) -> bool:
    """Whether a load of the checkpoint would find its base at this path."""
    places = map(os.path.realpath, (said.path, checkpoint / said.relative))
    return os.path.realpath(path) in places and fingerprint in ("", said.fingerprint)


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint that can be resumed from, and what is newer and cannot, newest first."""

    path: Path | None
    passed_over: list[CheckpointState | Saved]

    def said(self) -> str:
        ours_first = sorted(self.passed_over, key=lambda one: isinstance(one, Saved))
        return some([f"{one.path} ({one.reason})" for one in ours_first], separator="; ")

    def warn(self, root: PathLike) -> None:
        """Name what other tools have saved, where a training starts anew beside it."""
        if self.path is None and any(isinstance(one, Saved) for one in self.passed_over):
            warnings.warn(
                f"nothing below {root} can be resumed from, so the training starts anew beside what is there: "
                f"{self.said()}. To start with the weights of one, name it as init_from.",
                stacklevel=4,
            )


def find_newest(
    root: PathLike,
    tools: Collection[str] = RESUMABLE,
    init_from: PathLike | None = None,
    without: Collection[Path] = (),
) -> Newest:
    of_others: list[Saved] = []
    states = [state for state in _scan(local_path(root), _DEPTH, of_others) if state.path not in without]
    if init_from is not None:
        source = local_path(init_from)
        of_others = [one for one in of_others if source not in (one.path, *one.path.parents)]
    found = Newest(None, [])
    for one in _examined([*states, *in_order(of_others)], tools):
        if not one.reason:
            found = replace(found, path=one.path)
            break
        found.passed_over.append(one)
    for one in found.passed_over:  # not a save in flight, nor an export of weights
        if found.path is not None and not one.export if isinstance(one, Saved) else was_published(one):
            logger.warning("passing over %s: %s", one.path, one.reason)
    return found


def _examined(
    candidates: Iterable[CheckpointState | Saved], tools: Collection[str]
) -> Iterator[CheckpointState | Saved]:
    """The candidates from new to old, each with the reason why it cannot be resumed from, if there is one."""
    for one in sorted(candidates, key=_age, reverse=True):
        if isinstance(one, CheckpointState):
            yield replace(one, reason=one.reason or reason_to_pass_over(one.path))
        elif (saved := one.examined()) is not None:
            unknown = not saved.reason and saved.tool not in tools
            yield replace(saved, reason=_OF_ANOTHER_TOOL.format(saved.tool)) if unknown else saved


def _age(one: CheckpointState | Saved) -> tuple[float, int]:
    return (one.time, -1) if isinstance(one, Saved) else (one.time, one.step or -1)


def was_published(state: CheckpointState | Saved) -> bool:
    """Whether this was a checkpoint of ours once, and not only a save that was interrupted."""
    if isinstance(state, Saved):
        return False
    return state.committed or (state.path.suffix != ".saving" and (state.path / SUMMARY).exists())


def link(path: PathLike, target: PathLike) -> None:
    """Make ``path`` a link to a checkpoint, in place of the link or the checkpoint that is there."""
    commit.link(local_path(path), local_path(target))


def _scan(directory: Path, depth: int, of_others: list[Saved] | None = None) -> Iterator[CheckpointState]:
    """
    Args:
        of_others: Gets what other tools have saved for a resume. What is inside of that is no checkpoint of its own.
    """
    state = state_of(directory)
    if state is not None:
        yield state
        return
    try:
        with os.scandir(directory) as entries:
            children = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return
    if of_others is not None:
        saved = saved_as_folder(LocalDisk().open(directory), (entry.name for entry in children))
        of_others += [] if saved is None else [saved]
        if saved is not None and not saved.export:
            return
        of_others += saved_as_files(
            LocalDisk().open(directory), [entry.name for entry in children if entry.is_file(follow_symlinks=False)]
        )
    for entry in children:
        child = directory / entry.name
        if not entry.is_dir(follow_symlinks=False):
            continue
        if child.name == commit.WORKSPACE:
            yield from _in_flight(child)
        elif depth > 0:
            yield from _scan(child, depth - 1, of_others)


def state_of(path: Path) -> CheckpointState | None:
    """The state of one directory; None if it is no DCP checkpoint and does not pretend to be one."""
    try:
        if not commit.looks_like_checkpoint(path):
            return None
        reason = commit.uncommitted_reason(path)
        written = path.stat().st_mtime
        step = None
        if not reason and (summary := read_summary(path)) is not None:
            written, step = summary.time, summary.step
    except CheckpointCorrupt as error:
        return CheckpointState(path, False, str(error), None, written)
    except OSError:  # deleted while we looked
        return None
    return CheckpointState(path, not reason, reason, step, written)


def _in_flight(workspace: Path) -> Iterator[CheckpointState]:
    for path in sorted(workspace.iterdir()):
        with suppress(OSError):
            if path.suffix == ".saving":
                target = commit.target_of(path.with_suffix(".json")) or "?"
                reason = f"a save of {target} that is in flight or was interrupted"
                yield CheckpointState(path, False, reason, None, path.stat().st_mtime)
            elif path.suffix == ".aside" and (state := state_of(path)) is not None:
                yield state


def inspect(path: PathLike) -> CheckpointInfo:
    """What is in a checkpoint; without what it leaves out because its base has it. No tensor is read.

    Args:
        path: A checkpoint of this package or of stock DCP, or what another tool saved.

    Returns:
        Keys, shapes, dtypes and sizes in bytes; ``str()`` of it is one line.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: It cannot be opened.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.zeros(2, 3), "step": 1}, "run/step-1")
        >>> info = dcp_plugin.inspect("run/step-1")
        >>> info.tensors[0].key, info.tensors[0].shape, info.values
        ('w', (2, 3), ['step'])
    """
    reader = ShardedReader(path, complete=False)
    index, summary = reader.index, reader.summary
    tensors, values = [], []
    for key, entry in index.items():
        if isinstance(entry, StoredTensor):
            nbytes = prod(entry.shape) * entry.dtype.itemsize
            name = str(entry.dtype).removeprefix("torch.")
            tensors.append(TensorInfo(key, entry.shape, name, len(entry.chunks), nbytes))
        else:
            values.append(key)
    return CheckpointInfo(
        path=reader.path,
        format=reader.opened.format,
        step=summary.step if summary else None,
        time=summary.time if summary else None,
        world_size=summary.world_size if summary else None,
        tensors=tensors,
        values=values,
        nbytes=summary.payload_bytes if summary else sum(tensor.nbytes for tensor in tensors),
        versions=dict(summary.versions) if summary else {},
        bytes_reused=int(summary.reused.get("bytes", 0)) if summary else 0,
        base=Base.of_summary(summary.base, reader.path).path if summary and index.left_out else None,
        left_out=list(index.left_out),
    )


def verify(path: PathLike, io_threads: int = 2, base: PathLike | None = None) -> VerifyReport:
    """Read every byte of a checkpoint and compare it with its checksum; what a base completes it with, too.

    Args:
        path: The checkpoint.
        io_threads: Threads that read.
        base: Where its base is now, if that was moved.

    Returns:
        What was read, in items and bytes, and what is damaged, which is not raised. Items without checksums (another
        tool's) are only read, and listed.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: It cannot be opened.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.zeros(2, 3)}, "run/step-1")
        >>> dcp_plugin.verify("run/step-1").ok
        True
    """
    reader = ShardedReader(path, io_threads=io_threads, base=base)
    items: dict[tuple[str, int], tuple[str, Location]] = {}
    unverified = []
    for key, entry in reader.index.items():
        places = [entry.location] if isinstance(entry, StoredValue) else [chunk.location for chunk in entry.chunks]
        for place in places:
            items.setdefault((place.file, place.offset), (key, place))
        if any(place.checksums is None for place in places):
            unverified.append(key)
    with ThreadPoolExecutor(io_threads, thread_name_prefix="dcp-verify") as pool:
        errors = [said for said in pool.map(lambda item: reader.check(*item), items.values()) if said]
    nbytes = sum(place.length for _, place in items.values())
    return VerifyReport(reader.path, len(items), nbytes, errors, unverified)
