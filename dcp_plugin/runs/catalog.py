"""The checkpoints of a run: find the newest, keep the last few, remove one.

Nothing here needs torch. How a checkpoint becomes real, and how a crash is recovered from, is
told in :mod:`dcp_plugin.media.disk.commit`.
"""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointUnreadable,
    SaveFailed,
    some,
)
from dcp_plugin.format import METADATA, SUMMARY, exists, has_traces
from dcp_plugin.format.summary import Base, NewerFormat, Summary
from dcp_plugin.launcher import Launch
from dcp_plugin.media import Listed, Medium, is_workspace, medium_of, workspaces_in
from dcp_plugin.paths import ObjectPath, PathLike, StorageOptions, Where, as_path, resolved
from dcp_plugin.runs.damage import note_chosen
from dcp_plugin.runs.foreign import RESUMABLE, Saved, in_order, is_checkpoint_folder
from dcp_plugin.runs.scan import LOST_AND_FOUND, Patience, Scan, cannot_read, may_pass
from dcp_plugin.sources import source_of
from dcp_plugin.storage.published import check_complete, read_summary, said_base
from dcp_plugin.types import CheckpointState

T = TypeVar("T")
W = TypeVar("W", bound=Where)

logger = logging.getLogger("dcp_plugin")

_OF_ANOTHER_TOOL = "it has the state of a training, which only a program that knows its form ({}) can load"
MOST_LOOKS = 50
"""How often is looked again because others have deleted or replaced meanwhile what was found."""


def latest(
    root: PathLike, storage_options: StorageOptions | None = None, local_dir: PathLike | None = None
) -> Path | str | None:
    """The newest checkpoint at or below ``root`` that a training can go on from; never a torn one.

    A committed one whose files have been cut or lost since, by a copy that was interrupted for one, is passed over with
    a warning in the log. What Lightning (a ``.ckpt`` file), Accelerate or ``transformers.Trainer`` saved without this
    package counts, under any name, if it has the state of a training; weights alone do not.

    Args:
        root: Where to look, up to six directories deep: a directory, or the URL of a prefix.
        storage_options: How the store of a URL is reached, see :class:`~dcp_plugin.CheckpointConfig`.
        local_dir: As the runs have it. Then what this host has there counts, too, by the path that it would have; a
            load with the same ``local_dir`` finds it. What a keeper has not completed yet does not.

    Returns:
        Its path, or its URL as a ``str``; None if there is none. If only what cannot be resumed from is there, a
        ``UserWarning`` names it.

    Raises:
        CheckpointUnreadable: ``root`` cannot be read; or an entry below it cannot, and no complete checkpoint is beside
            or above that entry. Errors that may pass are raised after 10 s. Or a newer version of this package has
            saved the newest.

    Example:
        >>> import dcp_plugin
        >>> dcp_plugin.save({"step": 1}, "run/step-1")
        >>> dcp_plugin.latest("run").name
        'step-1'
    """
    where = as_path(root, storage_options)
    found = find_newest(where, local=local_below(where, local_dir, storage_options))
    found.warn(root)
    if found.path is not None:
        note_chosen(found.path)
    return str(found.path) if isinstance(found.path, ObjectPath) else found.path


def reason_to_pass_over(path: PathLike) -> str:
    """Why a directory cannot be resumed from: torn, or its files are not all there. Empty if it can."""
    try:
        return _damage_of(as_path(path))
    except (CheckpointNotFound, CheckpointUnreadable) as error:
        return str(error)


def _damage_of(path: Where) -> str:
    """Return why a checkpoint cannot be resumed from.

    Raises:
        CheckpointNotFound: It is not there, or not any more.
        NewerFormat: It is good, and only a newer version of this package can tell what is in it.
        CheckpointUnreadable: The file system fails to read it.
    """
    try:
        check_complete(path)
    except NewerFormat as error:
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
    """Every directory at or below ``root`` that is a checkpoint or pretends to be one, oldest first.

    Args:
        root: Where to look, up to six directories deep: a directory, or the URL of a prefix. Links are not followed.
        storage_options: How the store of a URL is reached, see :class:`~dcp_plugin.CheckpointConfig`.
        local_dir: As the runs have it: then what is in this host's alone is listed, too, with ``tier="local"``.

    Returns:
        Their states. What a crash left in flight is listed as not committed, with the reason.

    Raises:
        CheckpointUnreadable: ``root`` cannot be read. What cannot be read below it is named in the log.

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
    return sorted(states, key=lambda state: (state.time, state.step or -1))


def local_below(
    root: Where, local_dir: PathLike | None, storage_options: StorageOptions | None
) -> list[CheckpointState]:
    """Return the saves that this host has in ``local_dir`` and that are not at their paths."""
    if local_dir is None:
        return []
    return source_of(CheckpointConfig(local_dir=str(local_dir), storage_options=storage_options)).states(root)


def numbered(root: W, prefix: str) -> list[tuple[int, W]]:
    """The directories in ``root`` that are called ``<prefix><number>``, lowest number first, with their numbers."""
    medium = medium_of(root)
    children = Patience().read(lambda: medium.entries(root) if medium.kind(root) == "folder" else [])
    named = [(re.fullmatch(rf"{re.escape(prefix)}(\d+)", one.path.name), one) for one in children]
    return sorted(
        (int(name[1]), one.path)
        for name, one in named
        if name is not None and (one.is_folder or (not one.is_file and medium.kind(one.path) == "folder"))
    )


_STEP_IN_NAME = re.compile(r"(?:global_?)?(?:step|checkpoint|ckpt|iter|iteration)[-_=]?(\d{1,18})")


def step_in_name(path: Where) -> int | None:
    """Return the step in the name of a folder, such as ``step-100`` or ``checkpoint_100``; None if it has none."""
    match = _STEP_IN_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def parts_beside(path: Where) -> list[Where]:
    """Return the parts of a checkpoint that was saved in several calls: ``checkpoint-100/model``, ``…/optimizer``.

    Parts are checkpoints without a step of their own, directly below a folder whose name has one.

    Returns:
        The parts in the folder of ``path``, sorted; empty if ``path`` is no part.
    """
    if step_in_name(path.parent) is None:
        return []
    states = Scan(path.parent, read_all=True).states.values()
    parts = [one.path for one in states if one.committed and one.step is None and one.path.parent == path.parent]
    return sorted(parts, key=str) if path in parts else []


def first_usable(paths: Iterable[W], examine: Callable[[W], T]) -> tuple[T | None, list[CheckpointError]]:
    """What ``examine`` returns for the first path that it accepts; None if it accepts none.

    Returns:
        That, and the errors with which it refused the paths before.

    Raises:
        NewerFormat: Of ``examine``: an older checkpoint is not what a run is to go on from.
    """
    refused: list[CheckpointError] = []
    patience = Patience()
    for path in paths:
        try:
            return patience.read(functools.partial(examine, path)), refused
        except NewerFormat:
            raise
        except CheckpointError as error:
            refused.append(error)
        except OSError as error:
            refused.append(cannot_read(path, error))
    return None, refused


def prune(newest: Where, keep: int) -> None:
    """Delete all but the newest ``keep`` committed checkpoints among the siblings of ``newest``.

    Only checkpoints of this package are candidates: what others wrote, over one of ours too, is not ours to delete.
    """
    times: dict[Where, float] = {}
    medium = medium_of(newest).snapshot(newest.parent)
    for one in medium.entries(newest.parent):
        if one.path != newest and one.is_folder:
            with suppress(CheckpointCorrupt, OSError):
                if not medium.uncommitted_reason(one.path) and (time := _time_if_ours(one.path, medium)) is not None:
                    times[one.path] = time
    remove_oldest(sorted(times, key=times.__getitem__), keep - 1)


def _time_if_ours(path: Where, medium: Medium) -> float | None:
    if (time := medium.time_from_names(path)) is not None:
        return time
    summary = read_summary(path)
    return summary.time if summary is not None else None


def remove_oldest(paths: Sequence[Where], keep: int, delete: Callable[[Where], None] | None = None) -> None:
    """Delete all but the last ``keep`` of ``paths``, which are sorted from old to new.

    What cannot be deleted is logged: the checkpoint that replaces it is published, and an old one does no harm.
    """
    # The newest of them first: a base can go only after the checkpoints that it completes.
    for path in reversed(paths[: max(0, len(paths) - keep)]):
        try:
            (delete or remove)(path)
        except (OSError, CheckpointError) as error:
            logger.warning("could not delete the old checkpoint %s: %s", path, error)


def remove(path: PathLike) -> None:
    """Delete a checkpoint, so that at no moment something half-deleted can be taken for one.

    One that completes another beside it (``trainable_only``), or may complete one that cannot be read, is kept, with a
    warning in the log.

    Raises:
        CheckpointError: The file system failed, and it is there as it was.
    """
    path = as_path(path)
    try:
        completed, unreadable = _completed_by(path)
    except OSError as error:
        raise CheckpointError(f"cannot delete {path}: {error}. It is there as it was.") from error
    if completed is not None:
        _warn_once(f"{path} is not deleted: it has the frozen parameters that checkpoints beside it leave out")
    elif unreadable:
        _warn_once(f"{path} is not deleted: {next(iter(unreadable))} cannot be read, and may leave out what it has")
    else:
        medium_of(path).remove(path)


def refuse_to_remove_other_things(path: Where) -> None:
    """Refuse to delete anything but a checkpoint of this package or another tool, complete or torn, or a link to one.

    Raises:
        CheckpointError: The path is something else.
        CheckpointUnreadable: The file system fails to read it.
    """
    medium = medium_of(path)
    try:
        kind = medium.kind(path)
        if kind == "folder":
            names = [name.rstrip("/") for name in medium.open(path).names()]
            is_ours = has_traces(names) or is_workspace(path.parent.name)
            is_checkpoint = is_ours or is_checkpoint_folder(medium.open(path), path.name)
        else:
            is_checkpoint = not kind or Saved(medium.open(path.parent), path.name, 0.0).examined() is not None
    except OSError as error:
        raise cannot_read(path, error) from error
    if not is_checkpoint:
        raise CheckpointError(
            f"{path} is no checkpoint, and is not deleted. Name a checkpoint: dcp_plugin.list_checkpoints(root) has "
            f"those below a directory."
        )


@functools.cache  # ``keep_last`` comes by after every save
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _completed_by(base: Where) -> tuple[Where | None, dict[Where, Exception]]:
    """Return a checkpoint in the same directory that cannot be loaded without this one; and the entries there that may
    be one, and cannot be read. Symlinks are ignored."""
    medium = medium_of(base)
    if (isinstance(base, Path) and base.is_symlink()) or not exists(medium.open(base), METADATA):
        return None, {}
    summary: Summary | None = None
    with suppress(CheckpointCorrupt):
        summary = read_summary(base)
    own = summary.index_sha256 if summary else ""
    medium = medium.snapshot(base.parent)
    unreadable: dict[Where, Exception] = {}
    for one in medium.entries(base.parent):
        checkpoint: Where = one.path
        is_none = one.is_file or checkpoint.name == LOST_AND_FOUND or is_workspace(checkpoint.name)
        if is_none or not medium.may_have_base(checkpoint):
            continue
        try:
            said = said_base(checkpoint, medium)
            needed = said and _is_base(base, own, Base.of_summary(said, checkpoint), checkpoint)
            if needed and not _is_replaced(checkpoint):
                return checkpoint, {}
        except FileNotFoundError:  # deleted meanwhile
            continue
        except (CheckpointUnreadable, OSError) as error:
            if summary is None or (not summary.base and may_need(checkpoint, summary.time, medium)):
                unreadable[checkpoint] = error
        except (CheckpointCorrupt, ValueError):
            continue
    return None, unreadable


def may_need(unreadable: Where, saved: float, medium: Medium) -> bool:
    """Return whether an entry that cannot be read may need a checkpoint saved at this time as its base: a base is older
    than the checkpoints that need it."""
    with suppress(OSError):
        return medium.open(unreadable.parent).modified(unreadable.name) >= saved
    return True


def refuse_to_replace_a_base(path: Where) -> None:
    """Refuse to replace a checkpoint that completes another one, which could not be loaded any more.

    Raises:
        SaveFailed: It does, or a failing disk hides whether it does.
    """
    dependent, unreadable = _completed_by(path)
    if error := next(filter(may_pass, unreadable.values()), None):
        raise SaveFailed(f"cannot save {path}: {error}. It may leave out what the checkpoint there has.") from error
    if dependent is not None:
        raise SaveFailed(
            f"cannot save {path}: the checkpoint there has the frozen parameters that {dependent} leaves "
            f"out. Save to a new name, or delete {dependent} first."
        )


def refuse_other_ranks(root: Where, launch: Launch | None) -> None:
    """Refuse a root that another rank of the same launch saves to on its own.

    Args:
        launch: :attr:`Ranks.launch` of this process; None to refuse nothing.

    Raises:
        CheckpointMismatch: The root has a checkpoint of that rank, or a save in flight.
    """
    if launch is None:
        return
    medium = medium_of(root)
    entries: list[Listed[Any]] = []
    for folder in (root, *workspaces_in(root)):
        with suppress(OSError):
            entries += medium.entries(folder)
    for entry in entries:
        in_flight = medium.in_flight(entry.path) if is_workspace(entry.path.parent.name) else None
        if in_flight is not None and (rank := launch.rank_in(in_flight.launch)) is not None:
            raise _without_group(root / in_flight.target, rank, launch)
        if entry.is_folder:
            refuse_another_rank(entry.path, launch)


def refuse_another_rank(path: Where, launch: Launch | None) -> None:
    """Refuse a checkpoint that another rank of the same launch has saved on its own.

    Args:
        launch: :attr:`Ranks.launch` of this process; None to refuse nothing.

    Raises:
        CheckpointMismatch: That rank has no process group, as this one.
    """
    summary = None
    with suppress(CheckpointError, OSError):
        summary = read_summary(path) if launch is not None else None
    if launch is None or summary is None or summary.world_size > 1:
        return
    if (rank := launch.rank_in(summary.launch)) is not None:
        raise _without_group(path, rank, launch)


def _without_group(path: Where, rank: int, launch: Launch) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"{path} is of rank {rank} of the same launch by {launch.launcher}, and this is rank {launch.rank} of "
        f"{launch.world_size}, without a process group: the ranks would resume from each other's checkpoints, or "
        f"replace them. Call torch.distributed.init_process_group() before the first save or load. Ranks that are to "
        f"train by themselves need a root each; Checkpointer(solo=True) accepts any checkpoint."
    )


def _is_replaced(checkpoint: Where) -> bool:
    """Whether stock has saved over a checkpoint of ours. One that is damaged may be repaired, and needs its base."""
    try:
        return read_summary(checkpoint) is None
    except CheckpointCorrupt:
        return False


def _is_base(path: Where, fingerprint: str, said: Base, checkpoint: Where) -> bool:
    """Whether a load of the checkpoint would find its base at this path."""
    places = map(resolved, (said.path, checkpoint / said.relative))
    return resolved(path) in places and fingerprint in ("", said.fingerprint)


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint that can be resumed from, and what is newer and cannot, newest first."""

    path: Where | None
    passed_over: list[CheckpointState | Saved]
    unreadable: Mapping[Where, CheckpointUnreadable] = field(default_factory=dict)

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
    without: Collection[Where] = (),
    local: Collection[CheckpointState] = (),
) -> Newest:
    """What :func:`latest` returns, and why not something newer.

    Args:
        tools: Whose checkpoints count besides ours.
        init_from: What is there, or below, counts only if it is ours.
        without: What does not count.
        local: What can be loaded although nothing is at its path.

    Raises:
        CheckpointUnreadable: As :func:`latest`.
    """
    patience = Patience()
    for _ in range(MOST_LOOKS):
        scan = Scan(as_path(root), others=True, patience=patience)
        candidates = _candidates(scan, None if init_from is None else as_path(init_from), without, local)
        found, complete = newest_among(candidates, tools, patience)
        if complete and (found.path is not None or scan.is_current()):  # else something newer may have come meanwhile
            break
    unreadable = {**scan.unreadable, **found.unreadable}
    refuse_unreadable(unreadable, candidates, tools)
    passed_over = [one for one in found.passed_over if one.path not in unreadable]
    ours = [one for one in passed_over if isinstance(one, CheckpointState) and was_published(one)]
    others = [one for one in passed_over if isinstance(one, Saved) and not one.export]
    for one in ours:
        logger.warning("passing over %s: %s", one.path, one.reason)
    if found.path is not None and others:
        logger.warning("passing over what other tools have saved: %s", Newest(None, [*others]).said())
    return found


def _candidates(
    scan: Scan, source: Where | None, without: Collection[Where], local: Collection[CheckpointState]
) -> list[CheckpointState | Saved]:
    of_others = [one for one in scan.of_others if source is None or source not in (one.path, *one.path.parents)]
    ours = [state for state in (*scan.states.values(), *local) if state.path not in without]
    return [*ours, *in_order(of_others)]


def newest_among(
    candidates: Iterable[CheckpointState | Saved],
    tools: Collection[str] = RESUMABLE,
    patience: Patience | None = None,
) -> tuple[Newest, bool]:
    """The newest of these that can be resumed from; and whether all of them were still there to be examined."""
    patience = patience or Patience()
    passed_over: list[CheckpointState | Saved] = []
    unreadable: dict[Where, CheckpointUnreadable] = {}
    complete = True
    for one in sorted(candidates, key=_age, reverse=True):
        try:
            examined = patience.read(functools.partial(_examined, one, tools))
        except CheckpointNotFound:  # deleted since; something newer may have been published before
            complete = False
            continue
        except NewerFormat:  # no start goes on with an older one
            raise
        except CheckpointUnreadable as error:
            unreadable[one.path] = error
            continue
        if examined is not None and not examined.reason:
            return Newest(examined.path, passed_over, unreadable), complete
        passed_over += [] if examined is None else [examined]
    return Newest(None, passed_over, unreadable), complete


def refuse_unreadable(
    unreadable: Mapping[Where, CheckpointUnreadable],
    candidates: Collection[CheckpointState | Saved],
    tools: Collection[str] = RESUMABLE,
) -> None:
    """Refuse to pass over an entry that cannot be read, unless a complete checkpoint is beside or above it.

    Logs one warning for the entries that are passed over.

    Raises:
        CheckpointUnreadable: The entry may hold the newest checkpoint, or the only one.
    """
    for path, error in unreadable.items():
        near = [one for one in candidates if one.path not in unreadable and one.path.parent in path.parents]
        if newest_among(near, tools)[0].path is None:
            raise CheckpointUnreadable(
                f"{error}. {path} may hold the newest checkpoint, and no complete one is beside or above it. Make it "
                f"readable, or move it away; resume=never starts without looking."
            ) from error
    warn_of_unreadable(unreadable)


def warn_of_unreadable(unreadable: Mapping[Where, CheckpointUnreadable]) -> None:
    """Name all entries that cannot be read in one warning."""
    if unreadable:
        logger.warning(
            "passing over what cannot be read: %s", some(list(map(str, unreadable.values())), separator="; ")
        )


def _examined(one: CheckpointState | Saved, tools: Collection[str]) -> CheckpointState | Saved | None:
    """With the reason why it cannot be resumed from, if there is one.

    Raises:
        CheckpointNotFound: It is not there any more.
        CheckpointUnreadable: The file system fails to read it.
    """
    if isinstance(one, CheckpointState):
        return one if one.reason or one.tier == "local" else replace(one, reason=_damage_of(one.path))
    saved = one.examined()
    if saved is None or saved.reason or saved.tool in tools:
        return saved
    return replace(saved, reason=_OF_ANOTHER_TOOL.format(saved.tool))


def _age(one: CheckpointState | Saved) -> tuple[float, int, list[int]]:
    """A store tells full seconds: what other tools' files have in the same one, the numbers in their names tell."""
    if isinstance(one, Saved):
        return one.time, -1, [int(digits) for digits in re.findall(r"\d+", one.path.name)]
    return one.time, one.step or -1, []


def was_published(state: CheckpointState | Saved) -> bool:
    """Whether this was a checkpoint once, and not only a save that was interrupted or an export of weights."""
    if isinstance(state, Saved):
        return not (state.interrupted or state.export)
    in_flight = is_workspace(state.path.parent.name) and state.path.suffix != ".aside"
    if state.committed or in_flight:
        return state.committed
    return exists(medium_of(state.path).open(state.path), SUMMARY)


def link(path: PathLike, target: PathLike) -> None:
    """Make ``path`` a link to a checkpoint, in place of the link or the checkpoint that is there."""
    where = as_path(path)
    medium_of(where).link(where, as_path(target))


def checkpoints_below(path: Where) -> list[Where]:
    """Return the checkpoints of a run, in the order of their names; none if ``path`` is a checkpoint itself."""
    if medium_of(path).kind(path) != "folder":
        return []
    scan = Scan(path, others=True)
    below = [*scan.states, *(saved.path for saved in scan.of_others)] if scan.states else []
    return [] if path in below else sorted(below, key=str)
