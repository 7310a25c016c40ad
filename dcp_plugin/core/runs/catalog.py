"""Catalogue of the checkpoints of a run: list them, and find the newest.

The rule: a search changes no checkpoint, and needs no torch. An unreadable path never counts as absent, because it may
hold the newest checkpoint. :mod:`dcp_plugin.core.media.disk.commit` explains how a checkpoint becomes complete, and how
a crash is recovered from.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import CheckpointError, CheckpointNotFound, CheckpointUnreadable, logger, some, warn
from dcp_plugin.core.format import SUMMARY, exists
from dcp_plugin.core.format.summary import OtherFormat
from dcp_plugin.core.media import is_workspace, medium_of, refuse_real_run
from dcp_plugin.core.paths import PathLike, StorageOptions, Where, as_path, public
from dcp_plugin.core.runs.foreign import RESUMABLE, Saved
from dcp_plugin.core.runs.scan import Patience, Scan, age_of, cannot_read
from dcp_plugin.core.sources import source_of
from dcp_plugin.core.storage.published import check_if_ours
from dcp_plugin.core.types import CheckpointState

T = TypeVar("T")
W = TypeVar("W", bound=Where)


MOST_LOOKS = 50
"""Largest number of scans in a search while other processes delete or replace checkpoints."""


def latest(
    root: PathLike, storage_options: StorageOptions | None = None, local_dir: PathLike | None = None
) -> Path | str | None:
    """Return the newest checkpoint at or below ``root`` that a training can resume from; never a torn one.

    A committed checkpoint with lost or truncated files, as an interrupted copy leaves it, is passed over with a warning
    in the log. Checkpoints that Lightning (a ``.ckpt`` file), Accelerate or
    ``transformers.Trainer`` saved without this package count under any name, if they have the state of a training.
    Weights alone do not count.

    Args:
        root: The directory, or the URL of a prefix, to search up to six directories deep.
        storage_options: Access to the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        local_dir: The ``keeper.dir`` of the runs. Complete saves in it on this host then count, too, by the path that
            they would have. A load with the same ``keeper.dir`` finds them.

    Returns:
        The checkpoint's path, or its URL as a ``str``; None if no checkpoint can be resumed from. A ``UserWarning``
        names checkpoints of other tools if these are the only ones, and none can be resumed from.

    Raises:
        CheckpointUnreadable: ``root`` cannot be read. Or an entry below it cannot be read, and no complete checkpoint
            is in the same directory as that entry or above it. Or another version of this package has saved the newest
            checkpoint, in a format that this one does not read. Transient errors are raised after 10 s.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.save({"step": 1}, "run/step-1")
        >>> dcp_plugin.latest("run").name
        'step-1'
    """
    where = as_path(root, storage_options)
    newest = find_newest(where, local=local_below(where, local_dir, storage_options))
    newest.warn(root)
    return public(newest.path)


def reason_to_pass_over(path: PathLike) -> str:
    """Return the reason why a directory cannot be resumed from, such as a lost file; empty if it can."""
    refuse_real_run(as_path(path).parent, medium_of(as_path(path)))
    try:
        return _damage_of(as_path(path))
    except (CheckpointNotFound, CheckpointUnreadable) as error:
        return str(error)


def _damage_of(path: Where) -> str:
    """Return the reason why a checkpoint cannot be resumed from; empty if it can.

    Raises:
        CheckpointNotFound: The path does not exist, or another process deleted it during the check.
        OtherFormat: Another version of this package saved it, and is needed to load it.
        CheckpointUnreadable: The file system fails to read it.
    """
    try:
        if not check_if_ours(path):
            from dcp_plugin.core.storage.open import open_checkpoint  # other tools' tables of contents need torch

            open_checkpoint(path, check=True).close()
    except OtherFormat as error:
        error.add_note("To go on from an older checkpoint all the same, name it: resume=PATH.")
        raise
    except (CheckpointNotFound, CheckpointUnreadable):
        raise
    except CheckpointError as error:
        return str(error)
    return ""


def list_checkpoints(
    root: PathLike, storage_options: StorageOptions | None = None, local_dir: PathLike | None = None
) -> list[CheckpointState]:
    """Return every directory at or below ``root`` that is a checkpoint, complete or not, oldest first.

    Args:
        root: The directory, or the URL of a prefix, to search up to six directories deep. Links are not followed.
        storage_options: Access to the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        local_dir: The ``keeper.dir`` of the runs. Saves that only this host has in it are then listed, too, with
            ``tier="local"``.

    Returns:
        The states of the checkpoints. A save that a crash interrupted is listed as not committed, with the reason.

    Raises:
        CheckpointUnreadable: ``root`` cannot be read. The log names entries below it that cannot be read.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.save({"step": 1}, "run/step-1", step=1)
        >>> [(state.step, state.committed) for state in dcp_plugin.list_checkpoints("run")]
        [(1, True)]
    """
    where = as_path(root, storage_options)
    scan = Scan(where, read_all=True)
    states = [*scan.states.values(), *local_below(where, local_dir, storage_options)]
    warn_of_unreadable(scan.unreadable)
    return sorted(states, key=age_of)


def local_below(
    root: Where, local_dir: PathLike | None, storage_options: StorageOptions | None
) -> list[CheckpointState]:
    """Return the saves that this host has in ``local_dir`` and that are not at their paths."""
    if local_dir is None:
        return []
    config = CheckpointConfig.merge(None, keeper={"dir": local_dir}, storage_options=storage_options)
    return source_of(config).states(root)


def numbered(root: W, prefix: str) -> list[tuple[int, W]]:
    """Return the directories in ``root`` named ``<prefix><number>``, lowest number first, with their numbers."""
    medium = medium_of(root)
    children = Patience().read(lambda: medium.entries(root) if medium.kind(root) == "folder" else [])
    named = [(re.fullmatch(rf"{re.escape(prefix)}(\d+)", child.path.name), child) for child in children]
    return sorted(
        (int(name[1]), child.path)
        for name, child in named
        if name is not None and (child.is_folder or (not child.is_file and medium.kind(child.path) == "folder"))
    )


_STEP_IN_NAME = re.compile(r"(?:global_?)?(?:step|checkpoint|ckpt|iter|iteration)[-_=]?(\d{1,18})")


def step_in_name(path: Where) -> int | None:
    """Return the step in the name of a folder, such as ``step-100`` or ``checkpoint_100``; None if it has none."""
    match = _STEP_IN_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def sibling_parts(path: Where) -> list[Where]:
    """Return the parts of a checkpoint that was saved in several calls: ``checkpoint-100/model``, ``…/optimizer``.

    A part is a checkpoint without a step, directly below a folder with a step in its name.

    Returns:
        The parts in the folder of ``path``, sorted; empty if ``path`` is no part.
    """
    if step_in_name(path.parent) is None:
        return []
    states = Scan(path.parent, read_all=True).states.values()
    parts = [
        state.path for state in states if state.committed and state.step is None and state.path.parent == path.parent
    ]
    return sorted(parts, key=str) if path in parts else []


def first_usable(paths: Iterable[W], examine: Callable[[W], T]) -> tuple[T | None, list[CheckpointError]]:
    """Return the result of ``examine`` for the first path that it accepts, and its errors for the paths before.

    Returns:
        The result and the errors. The result is None if ``examine`` accepts no path.

    Raises:
        OtherFormat: ``examine`` has raised it. The run must not resume from an older checkpoint instead.
    """
    refused: list[CheckpointError] = []
    patience = Patience()
    for path in paths:
        refuse_real_run(path.parent, medium_of(path))
        try:
            return patience.read(functools.partial(examine, path)), refused
        except OtherFormat:
            raise
        except CheckpointError as error:
            refused.append(error)
        except OSError as error:
            refused.append(cannot_read(path, error))
    return None, refused


@dataclass(frozen=True)
class Newest:
    """Newest checkpoint that can be resumed from, and the newer ones that are passed over, newest first."""

    path: Where | None
    passed_over: list[CheckpointState | Saved]
    unreadable: Mapping[Where, CheckpointUnreadable] = field(default_factory=dict)

    def reasons(self) -> str:
        """Return the checkpoints that are passed over, and the reasons, for a message."""
        ours_first = sorted(self.passed_over, key=lambda candidate: isinstance(candidate, Saved))
        return some([f"{candidate.path} ({candidate.reason})" for candidate in ours_first], separator="; ")

    def warn(self, root: PathLike) -> None:
        """Warn of checkpoints of other tools if a training starts from scratch in their directory."""
        if self.path is None and any(isinstance(candidate, Saved) for candidate in self.passed_over):
            warn(
                f"the training starts fresh: nothing below {root} can be resumed from ({self.reasons()}). To start "
                f"with the weights of one, name it as init_from.",
                stacklevel=4,
            )


def find_newest(
    root: PathLike,
    tools: Collection[str] = RESUMABLE,
    init_from: PathLike | None = None,
    without: Collection[Where] = (),
    local: Collection[CheckpointState] = (),
) -> Newest:
    """Return the result of :func:`latest`, and the reasons against newer checkpoints.

    Args:
        tools: The other tools: the search includes their checkpoints.
        init_from: A path. At or below it only checkpoints of this package count.
        without: Checkpoints to ignore.
        local: Saves that only the nodes have, in ``keeper.dir``.

    Raises:
        CheckpointUnreadable: As :func:`latest`.
    """
    refuse_real_run(as_path(root), medium_of(as_path(root)))
    patience = Patience()
    source = None if init_from is None else as_path(init_from)
    for _ in range(MOST_LOOKS):
        scan = Scan(as_path(root), others=True, patience=patience)
        candidates = [
            candidate
            for candidate in (*scan.checkpoints(), *local)
            if candidate.path not in without
            and not (isinstance(candidate, Saved) and source in (candidate.path, *candidate.path.parents))
        ]
        newest, complete = newest_among(candidates, tools, patience)
        # Otherwise another process has deleted or replaced a checkpoint, and the scan may have missed a newer one.
        if complete and (newest.path is not None or scan.is_stable):
            break
    unreadable = {**scan.unreadable, **newest.unreadable}
    refuse_unreadable(unreadable, candidates, tools, patience)
    passed_over = [candidate for candidate in newest.passed_over if candidate.path not in unreadable]
    ours = [
        candidate for candidate in passed_over if isinstance(candidate, CheckpointState) and was_published(candidate)
    ]
    others = [candidate for candidate in passed_over if isinstance(candidate, Saved) and not candidate.export]
    for candidate in ours:
        logger.warning("passing over %s: %s", candidate.path, candidate.reason)
    if newest.path is not None and others:
        logger.warning("passing over what other tools have saved: %s", replace(newest, passed_over=[*others]).reasons())
    return newest


def newest_among(
    candidates: Iterable[CheckpointState | Saved],
    tools: Collection[str] = RESUMABLE,
    patience: Patience | None = None,
) -> tuple[Newest, bool]:
    """Return the newest candidate that can be resumed from, and True if no candidate was deleted before its check."""
    patience = patience or Patience()
    passed_over: list[CheckpointState | Saved] = []
    unreadable: dict[Where, CheckpointUnreadable] = {}
    complete = True
    for candidate in sorted(candidates, key=age_of, reverse=True):
        try:
            examined = patience.read(functools.partial(_examined, candidate, tools))
        except CheckpointNotFound:  # deleted after the scan; the scan may have missed its successor
            complete = False
            continue
        except OtherFormat:  # a run must not resume from an older checkpoint
            raise
        except CheckpointUnreadable as error:
            unreadable[candidate.path] = error
            continue
        if examined is not None and not examined.reason:
            return Newest(examined.path, passed_over, unreadable), complete
        passed_over += [] if examined is None else [examined]
    return Newest(None, passed_over, unreadable), complete


def refuse_unreadable(
    unreadable: Mapping[Where, CheckpointUnreadable],
    candidates: Collection[CheckpointState | Saved],
    tools: Collection[str],
    patience: Patience,
) -> None:
    """Raise the error of an unreadable entry, unless a complete checkpoint is in its directory or above it.

    Log one warning for the entries that are passed over.

    Raises:
        CheckpointUnreadable: The entry may hold the newest checkpoint, or the only one.
    """
    for path, error in unreadable.items():
        neighbours = [
            candidate
            for candidate in candidates
            if candidate.path not in unreadable and candidate.path.parent in path.parents
        ]
        if newest_among(neighbours, tools, patience)[0].path is None:
            raise CheckpointUnreadable(
                f"{error}. {path} may hold the newest checkpoint, and no complete one is next to it or above it. Make "
                f"it readable, or move it away; resume=never starts without looking."
            ) from error
    warn_of_unreadable(unreadable)


def warn_of_unreadable(unreadable: Mapping[Where, CheckpointUnreadable]) -> None:
    """Log one warning that names all unreadable entries."""
    if unreadable:
        logger.warning(
            "passing over what cannot be read: %s", some(list(map(str, unreadable.values())), separator="; ")
        )


def _examined(candidate: CheckpointState | Saved, tools: Collection[str]) -> CheckpointState | Saved | None:
    """Return a candidate, with the reason if it cannot be resumed from. Return None for a file without a training.

    Raises:
        CheckpointNotFound: Another process deleted the candidate during the check.
        CheckpointUnreadable: The file system fails to read it.
    """
    if isinstance(candidate, CheckpointState):
        return (
            candidate
            if candidate.reason or candidate.tier == "local"
            else replace(candidate, reason=_damage_of(candidate.path))
        )
    saved = candidate.examined()
    if saved is None or saved.reason or saved.tool in tools:
        return saved
    why = f"it has the state of a training, which only a program that knows its form ({saved.tool}) can load"
    return replace(saved, reason=why)


def was_published(state: CheckpointState | Saved) -> bool:
    """Return whether ``state`` is a published checkpoint. An interrupted save is none, and no export of weights."""
    if isinstance(state, Saved):
        return not (state.interrupted or state.export)
    in_flight = is_workspace(state.path.parent.name) and state.path.suffix != ".aside"
    return state.committed or (not in_flight and exists(medium_of(state.path).open(state.path), SUMMARY))


def checkpoints_below(path: Where) -> list[Where]:
    """Return the checkpoints of a run, in the order of their names; empty if ``path`` is a checkpoint itself."""
    if medium_of(path).kind(path) != "folder":
        return []
    scan = Scan(path, others=True)
    below = [checkpoint.path for checkpoint in scan.checkpoints()] if scan.states else []
    return [] if path in below else sorted(below, key=str)
