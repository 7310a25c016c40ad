"""Opening of checkpoints of other tools: stock DCP, Lightning, Accelerate, safetensors and ``torch.save`` files."""

from __future__ import annotations

from contextlib import suppress

from dcp_plugin.errors import CheckpointNotFound, damage_in
from dcp_plugin.format import INDEX, METADATA, exists, has_traces, is_own, read, stock_metadata
from dcp_plugin.format.foreign import Contents, detect, fingerprint_of, frameworks
from dcp_plugin.format.summary import fingerprint
from dcp_plugin.media import Readable, medium_of, snapshot
from dcp_plugin.paths import Where, is_link
from dcp_plugin.records import OpenCheckpoint
from dcp_plugin.storage.open import open_alone
from dcp_plugin.tensors.host_memory import collector_paused

_MOST_LISTED = 1000
"""Most entries of a directory that are examined for a hint."""


def open_foreign(path: Where, files: Readable, reason: str) -> OpenCheckpoint:
    """Open a checkpoint that another tool has saved.

    Args:
        reason: Why the path is no DCP checkpoint; empty if it is one.

    Raises:
        CheckpointError: As :func:`dcp_plugin.storage.open.open_checkpoint`.
    """
    return _open_other(path, files, reason) if reason else _open_dcp(path, files)


def _open_dcp(path: Where, files: Readable) -> OpenCheckpoint:
    if frameworks.is_of_accelerate(path.name) and exists(medium_of(path).open(path.parent), INDEX):
        files.close()
        return open_alone(path.parent)  # a view of ours: it names the files of the checkpoint in the folder above
    data = read(files, METADATA)
    if frameworks.is_of_lightning(files):
        index, kinds = frameworks.lightning_index(files)
        return OpenCheckpoint(path, files, index, fingerprint(data), "lightning", kinds)
    index = stock_metadata.index_of(stock_metadata.decode(data, f"{files.where}/{METADATA}"), files)
    return OpenCheckpoint(path, files, index, fingerprint(data), "stock")


@collector_paused()
def _open_other(path: Where, files: Readable, reason: str) -> OpenCheckpoint:
    kind = medium_of(path).kind(path)
    is_folder = kind == "folder"
    folders = frameworks.accelerate_folders(files) if is_folder else []
    if folders:
        index, kinds = frameworks.accelerate_index(files, folders)
        digest = fingerprint(b"".join(read(files, f"{folder}/{METADATA}") for folder in folders))
        return OpenCheckpoint(path, files, index, digest, "accelerate", kinds)
    if is_folder:
        try:
            contents = detect.read_directory(files, reason)
        except CheckpointNotFound:
            _refuse_directory_of_checkpoints(path)
            raise
    else:
        files = medium_of(path).open(path.parent)
        contents = _read_one(files, path, kind, reason)
    index = contents.index(files.where)

    def find_fingerprint() -> str:
        with damage_in(path):
            return fingerprint_of(files, contents)

    identity, kinds_by_name = "", contents.kinds
    if files.streams:
        times = [(name, size, files.modified(name)) for name, size in sorted(contents.files.items())]
        identity = fingerprint(repr(times).encode())
    return OpenCheckpoint(
        path, files, index, identity, contents.format, kinds_by_name, None, True, find_fingerprint=find_fingerprint
    )


def _read_one(files: Readable, path: Where, kind: str, reason: str) -> Contents:
    if not kind:
        raise detect.not_found(str(path), reason if is_link(path) else "nothing is there")
    if is_own(path.name) and has_traces(files.names()):
        raise detect.not_found(str(path), f"it is one of the files of {path.parent}. Name that directory")
    return detect.read_file(files, path.name)


def _refuse_directory_of_checkpoints(path: Where) -> None:
    """Raise with a hint if a path is a run directory: users often pass it instead of a checkpoint."""
    medium = snapshot(path)
    for entry in medium.entries(path)[:_MOST_LISTED]:
        names: list[str] = []
        with suppress(OSError):
            names = [] if entry.is_file or entry.path.name.startswith(".") else medium.open(entry.path).names()
        if has_traces(names):
            raise CheckpointNotFound(
                f"{path} is not a checkpoint: it has checkpoints in it, such as {entry.path}. Name one of them; "
                f"dcp_plugin.latest({str(path)!r}) finds the newest."
            )
