"""Opens checkpoints of other tools: stock DCP, Lightning, Accelerate, safetensors and ``torch.save`` files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from dcp_plugin.core.errors import CheckpointNotFound, damage_in, some
from dcp_plugin.core.format import INDEX, METADATA, exists, has_traces, is_own, read, stock_metadata, uncommitted_reason
from dcp_plugin.core.format.foreign import Contents, detect, fingerprint_of, scales
from dcp_plugin.core.format.summary import fingerprint
from dcp_plugin.core.interrupts import collector_paused
from dcp_plugin.core.media import Medium, Readable, is_workspace, medium_of, snapshot
from dcp_plugin.core.paths import Where, is_link
from dcp_plugin.core.records import OpenCheckpoint

_DEPTH = 3
"""Levels below a directory that are searched for checkpoints: frameworks nest theirs (``version_0/checkpoints/…``)."""
_MOST_LISTED = 1000
"""Entries of a directory that are searched."""


def is_view_of_ours(path: Where) -> bool:
    """Return whether a path is that of a folder with a view for Accelerate, which names the files of the checkpoint of
    ours above it. Raises OSError."""
    return detect.is_of_accelerate(path.name) and exists(medium_of(path).open(path.parent), INDEX)


def open_foreign(path: Where, files: Readable, reason: str) -> OpenCheckpoint:
    """Open what another tool has saved.

    Args:
        reason: Why the path is no DCP checkpoint; empty if it is one.

    Raises:
        CheckpointError: As :func:`dcp_plugin.core.storage.open.open_checkpoint`.
    """
    return _open_other(path, files, reason) if reason else _open_dcp(path, files)


def _open_dcp(path: Where, files: Readable) -> OpenCheckpoint:
    data = read(files, METADATA)
    if detect.is_of_lightning(files):
        index, kinds = detect.lightning_index(files)
        return OpenCheckpoint(path, files, index, fingerprint(data), "lightning", kinds)
    index = stock_metadata.index_of(stock_metadata.decode(data, f"{files.where}/{METADATA}"), files)
    return OpenCheckpoint(path, files, index, fingerprint(data), "stock")


@collector_paused()
def _open_other(path: Where, files: Readable, reason: str) -> OpenCheckpoint:
    kind = medium_of(path).kind(path)
    is_folder = kind == "folder"
    folders = detect.accelerate_folders(files) if is_folder else []
    if folders:
        index, kinds = detect.accelerate_index(files, folders)
        digest = fingerprint(b"".join(read(files, f"{folder}/{METADATA}") for folder in folders))
        return OpenCheckpoint(path, files, index, digest, "accelerate", kinds)
    if is_folder:
        try:
            contents = detect.read_directory(files, reason)
        except CheckpointNotFound:
            _refuse_run(path, [])
            raise
        _refuse_run(path, _names_of(files, contents))
    else:
        files = medium_of(path).open(path.parent)
        contents = _read_one(files, path, kind, reason)
    index = scales.with_scaled(contents.index(files.where), files)

    def find_fingerprint() -> str:
        with damage_in(path):
            return fingerprint_of(files, contents)

    version, kinds = files.version(contents.files), contents.kinds
    return OpenCheckpoint(
        path, files, index, version, contents.format, kinds, None, True, find_fingerprint=find_fingerprint
    )


def _read_one(files: Readable, path: Where, kind: str, reason: str) -> Contents:
    if not kind:
        raise detect.not_found(str(path), reason if is_link(path) else "nothing is there")
    if is_own(path.name) and has_traces(files.names()):
        raise detect.not_found(str(path), f"it is one of the files of {path.parent}. Name that directory")
    return detect.read_file(files, path.name)


def weights_in(run: Where) -> list[str]:
    """Return the names of the files that another tool left directly in a directory of checkpoints, such as the weights
    of a finished training. Each name can be opened by itself."""
    files = medium_of(run).open(run)
    try:
        return _names_of(files, detect.read_directory(files, ""))
    except CheckpointNotFound:
        return []


def _names_of(files: Readable, contents: Contents) -> list[str]:
    return [name for name in files.names() if name.endswith(detect.INDEX)][:1] or list(contents.files)


def _refuse_run(path: Where, weights: list[str]) -> None:
    """Refuse a directory with checkpoints in it. Users often pass the run directory instead of a checkpoint.

    Args:
        weights: Files of another tool directly in it, which could be meant as well.

    Raises:
        CheckpointNotFound: The message names the newest complete checkpoint, and the files; or it says that there is no
            complete one.
    """
    checkpoints = list(_checkpoints_below(snapshot(medium_of(path), path), path, _DEPTH))
    below = next((checkpoint for checkpoint, is_complete in checkpoints if is_complete), None)
    if below is None and (weights or not checkpoints):
        return
    if below is None:
        root = path.parent if is_workspace(path.name) else path
        raise CheckpointNotFound(
            f"{path} is not a checkpoint, and there is no complete checkpoint in it: a save has not ended. Start "
            f"afresh, or resume from dcp_plugin.latest({str(root)!r}) unless that is None."
        )
    newest = f"dcp_plugin.latest({str(path)!r}) finds the newest"
    if weights:
        raise CheckpointNotFound(
            f"{path} is not a checkpoint: it has {some(weights)} in it, and {below}. Name the one that you mean; "
            f"{newest} checkpoint."
        )
    raise CheckpointNotFound(
        f"{path} is not a checkpoint, but a directory with checkpoints, such as {below}. Name one of them; {newest}."
    )


def _checkpoints_below(medium: Medium, folder: Where, depth: int) -> Iterator[tuple[Where, bool]]:
    """Yield the checkpoints and unfinished saves below a directory, in the order of falling numbers in their names, and
    whether each is complete. Those in a workspace are not: they have no name yet, or none any more."""
    with suppress(OSError):
        entries = [entry for entry in medium.entries(folder)[:_MOST_LISTED] if not entry.is_file]
        named = [entry.path for entry in entries if not entry.path.name.startswith(".")]
        named.sort(key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)], reverse=True)
        for path in named:
            with suppress(OSError):
                names = [name.rstrip("/") for name in medium.open(path).names()]
                if has_traces(names):
                    yield path, not (uncommitted_reason(names) or is_workspace(folder.name))
        for path in named if depth > 1 else ():
            yield from _checkpoints_below(medium, path, depth - 1)
        for entry in entries:
            if is_workspace(entry.path.name):
                yield from _checkpoints_below(medium, entry.path, 1)
