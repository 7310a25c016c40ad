"""Places on a medium: the workspace beside checkpoints, and the files at a path.

A save reserves its place in the workspace (:func:`workspace_of`) and refuses a path with other things in it. A reader
sees the files of a checkpoint under their usual names (:func:`unpacked`).
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from dcp_plugin.core.errors import CheckpointError, SaveFailed, some
from dcp_plugin.core.format import PACKED, SUMMARY, read
from dcp_plugin.core.format.summary import MAX_SIZE, OtherFormat, Summary
from dcp_plugin.core.media.medium import Listed, Medium, P, Readable
from dcp_plugin.core.paths import KILLED_AFTER, ObjectPath, Where, folder_of_proof, resolved

WORKSPACE = ".dcp_plugin"
"""The directory in a folder of checkpoints that has the saves in flight, or their records. If it belongs to another
user, the workspace of this user has the number of the user at the end of its name."""

_OF_A_USER = re.compile(rf"{re.escape(WORKSPACE)}(-\d+)?")
_ACCELERATE_NUMBERED = re.compile(r"checkpoints/checkpoint_\d+")


def workspace_of(final: P) -> P:
    """Return the directory in which a checkpoint is made and deleted. It is in the parent of the checkpoint. For the
    numbered checkpoints of an Accelerate project it is one level higher: Accelerate takes every entry of their folder
    for a checkpoint."""
    return cast(P, workspace_in(_folder_of(final)))


def workspaces_of(final: P) -> list[P]:
    """Return the workspaces of all users in which a checkpoint may be made, or kept while it is replaced."""
    return cast(list[P], workspaces_in(_folder_of(final)))


def _folder_of(final: Where) -> Where:
    numbered = _ACCELERATE_NUMBERED.fullmatch(f"{final.parent.name}/{final.name}")
    return final.parent.parent if numbered else final.parent


def is_workspace(name: str) -> bool:
    """Return whether a directory of this name is a workspace."""
    return _OF_A_USER.fullmatch(name) is not None


def workspace_in(folder: Where) -> Where:
    """Return the workspace of this user in a folder of checkpoints, whether it exists or not."""
    usual = folder / WORKSPACE
    if isinstance(usual, Path):
        from dcp_plugin.core.media.disk import posix

        with suppress(OSError):
            if os.lstat(usual).st_uid != (user := posix.user_in(usual.parent)):
                return folder / f"{WORKSPACE}-{user}"
    return usual


def workspaces_in(folder: Where) -> list[Where]:
    """Return the workspaces of all users in a folder of checkpoints, and the usual one whether it exists or not."""
    names: list[str] = []
    if isinstance(folder, Path):
        with suppress(OSError):
            names = sorted(name for name in os.listdir(folder) if is_workspace(name) and name != WORKSPACE)
    return [folder / name for name in (WORKSPACE, *names)]


def refuse_real_run(folder: Where, medium: Medium, save: str = "") -> None:
    """Refuse a folder of checkpoints that is neither new nor made by this run of ``dcp-plugin prove``.

    Outside of ``prove``, do nothing. A new folder is absent or empty; its name is recorded.

    Args:
        save: Name of the checkpoint in the folder that is about to be saved. It is recorded. If ``prove`` has the
            training killed before this save, this process ends by SIGKILL, and ``prove`` ends all others.

    Raises:
        CheckpointError: The folder has other files. Nothing has changed.
    """
    if (proof := folder_of_proof()) is None:
        return
    import fcntl  # Linux alone has it, and this module is imported on all systems

    folder = resolved(folder)
    with open(proof / "folders", "a+") as file:
        # Ranks look at the same time: without the lock, one sees the files that another has just made.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if {str(proof), *file.read().splitlines()}.isdisjoint(map(str, (folder, *folder.parents))):
            if medium.kind(folder) == "folder" and medium.entries(folder):
                raise CheckpointError(
                    f"{folder} is not new, and dcp-plugin prove has not made it: nothing is saved, resumed or deleted "
                    f"there. In the command that is proved, write {{run}} in place of the folder of the run."
                )
            file.write(f"{folder}\n")
    if save:
        with open(proof / "saves", "a+") as file:
            file.write(f"{folder / save}\n")
            file.seek(0)
            begun = len(file.readlines())
        if begun > int(os.environ.get(KILLED_AFTER) or begun):
            os.kill(os.getpid(), signal.SIGKILL)


def refuse_workspace(final: Where) -> None:
    """Raise SaveFailed for a path that is a workspace or is in one: no search would find a checkpoint there."""
    if is_workspace(final.name) or is_workspace(final.parent.name):
        raise SaveFailed(
            f"cannot save to {final}: a directory called {WORKSPACE} or {WORKSPACE}-<number> is for saves in flight, "
            f"and no search looks for checkpoints in it. Save to another name."
        )


def other_things(final: Where, names: Iterable[str]) -> SaveFailed:
    """Return the error for a save to a directory with these entries, none of which is of a checkpoint."""
    return SaveFailed(
        f"cannot save to {final}: it has other things in it than a checkpoint ({some(sorted(names))}), and a "
        f"checkpoint is replaced and deleted as a whole. Save first and write these afterwards: then they stay, also "
        f"when a later save replaces the checkpoint. Or save to a folder below, such as {final / 'checkpoint'}."
    )


def is_target(name: object) -> bool:
    """Return whether a value is the name of a checkpoint, relative to the parent of its workspace."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return "/" not in name or _ACCELERATE_NUMBERED.fullmatch(name) is not None


def files_below(medium: Medium, folder: Where, before: str = "") -> Iterator[tuple[str, Listed[Any]]]:
    """Yield the entries below a folder that are no folders themselves, and their names. A name has ``/`` between
    folders. Raises OSError."""
    for entry in medium.entries(folder):
        if entry.path.parent != folder:  # a key with ".." in it, which is to lead out of the folder
            continue
        if entry.is_folder:
            yield from files_below(medium, entry.path, f"{before}{entry.path.name}/")
        else:
            yield before + entry.path.name, entry


def tree(medium: Medium, folder: Where) -> list[str]:
    """Return the names of all files below a folder, sorted. Links to folders are left out. Raises OSError."""
    medium = snapshot(medium, folder)
    below = files_below(medium, folder)
    return sorted(name for name, entry in below if entry.is_file or medium.kind(entry.path) != "folder")


def add_files(medium: Medium, directory: Where, put: Callable[[Path], None]) -> None:
    """Add the files to a save in flight that ``put`` writes into the local directory that it is given."""
    if isinstance(directory, Path):
        put(directory)
        return
    with tempfile.TemporaryDirectory(prefix="dcp-plugin-") as local:
        put(Path(local))
        for path in filter(Path.is_file, Path(local).rglob("*")):
            name = f"{PACKED}{directory.stem}/{path.relative_to(local).as_posix()}"
            with open(path, "rb") as file, medium.create(directory, name, path.stat().st_size) as to:
                while data := file.read(_PIECE):
                    to.write(data, kept=True)


_PIECE = 8 << 20


def snapshot(medium: Medium, root: Where) -> Medium:
    """Return a medium as it is now below ``root``, if one listing has all of that. Then a question about a folder there
    takes no request. Raises OSError.

    Args:
        medium: One that may be a snapshot already.
    """
    return medium.snapshot(root) if isinstance(root, ObjectPath) else medium  # type: ignore[attr-defined]


def unpacked(files: Readable) -> Readable:
    """Return the files of a checkpoint under their usual names, also if it was saved in place
    (:mod:`dcp_plugin.core.format.packed`). Raises OSError."""
    names = files.names()
    if not any(name.startswith(PACKED) for name in names):
        return files
    from dcp_plugin.core.media.packed_view import packed_view  # for object stores and copies of their checkpoints

    return packed_view(files, names)


def other_format_at(path: Where, files: Readable) -> OtherFormat | None:
    """Return the error of a read of ``path`` if another version of this package saved the checkpoint there.

    Args:
        files: Those at the path.
    """
    try:
        Summary.decode(read(unpacked(files), SUMMARY, MAX_SIZE + 1), f"{path}/{SUMMARY}")
    except OtherFormat as error:
        return error
    except (CheckpointError, OSError):
        pass
    return None


def refuse_to_replace_other_format(path: Where, files: Readable) -> None:
    """Refuse to replace a checkpoint of another version of this package. Raises SaveFailed.

    Args:
        files: Those at the path.
    """
    if error := other_format_at(path, files):
        raise SaveFailed(f"cannot replace {path}: {error} Choose a new name, or move that checkpoint away.") from error
