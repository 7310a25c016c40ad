"""What is at a path, whoever wrote it: the index, and what else a load needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dcp_plugin.errors import CheckpointIncomplete
from dcp_plugin.storage import commit, stock
from dcp_plugin.storage.foreign import dcp_folder, detect
from dcp_plugin.storage.foreign.contents import fingerprint_of
from dcp_plugin.storage.index import CheckpointIndex
from dcp_plugin.storage.summary import Summary, fingerprint


@dataclass(frozen=True)
class Opened:
    """An open checkpoint."""

    path: Path
    """Where it is: a directory, or a file of another tool."""
    directory: Path
    """What the files of the index are relative to."""
    index: CheckpointIndex
    fingerprint: str
    """Equal for the same checkpoint, wherever it is."""
    format: str
    """As :class:`~dcp_plugin.types.CheckpointInfo` has it."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Which names are a ``module`` and which an ``optimizer``, as far as the checkpoint tells."""
    summary: Summary | None = None
    """Of our own checkpoints only."""
    links: bool = False
    """Whether its files may be links that lead elsewhere: only among those that no index of ours lists."""


def open_checkpoint(path: Path) -> Opened:
    """Read and validate the table of contents.

    Raises:
        CheckpointNotFound: There is nothing that we know; the message lists what was looked for.
        CheckpointIncomplete, CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: It cannot be read.
    """
    path = commit.locate(path)
    reason = commit.uncommitted_reason(path)
    if reason and commit.looks_like_checkpoint(path):
        raise CheckpointIncomplete(
            f"{path} is not a checkpoint: {reason}. dcp_plugin.latest(root) finds the newest good one."
        )
    if reason:
        return _open_foreign(path, reason)
    if (path / commit.INDEX).exists():
        summary = Summary.read(path / commit.SUMMARY)
        index = CheckpointIndex.read(path / commit.INDEX, summary.index_sha256)
        return Opened(path, path, index, summary.index_sha256, "dcp_plugin", summary.kinds, summary)
    if dcp_folder.is_of_accelerate(path) and (path.parent / commit.INDEX).exists():
        return open_checkpoint(path.parent)  # a view of ours, which names the files of the checkpoint above it
    said = fingerprint((path / commit.METADATA).read_bytes())
    if dcp_folder.is_of_lightning(path):
        index, kinds = dcp_folder.lightning_index(path)
        return Opened(path, path, index, said, "lightning", kinds)
    return Opened(path, path, stock.read_index(path), said, "stock")


def _open_foreign(path: Path, reason: str) -> Opened:
    folders = dcp_folder.accelerate_folders(path) if path.is_dir() else []
    if folders:
        index, kinds = dcp_folder.accelerate_index(path, folders)
        said = fingerprint(b"".join((path / folder / commit.METADATA).read_bytes() for folder in folders))
        return Opened(path, path, index, said, "accelerate", kinds)
    directory, contents = detect.read(path, reason)
    index = contents.index(directory)
    said = fingerprint_of(directory, contents.files)
    return Opened(path, directory, index, said, contents.format, contents.kinds, links=True)
