"""Names that all integrations give to objects in a checkpoint, so that every other integration finds them.

The names are ``model`` and ``optim``, or ``model_0``, ``model_1``, … and ``optim_0``, … for several objects. All other
state has names in ``extra.<name>``: schedulers, loops, samplers, and ``extra.rng.<rank>.streams`` for the random
generators.
"""

from __future__ import annotations

from collections.abc import Iterable

from dcp_plugin.paths import PathLike
from dcp_plugin.sources import SourceFiles
from dcp_plugin.storage.reader import ShardedReader
from dcp_plugin.tools.contents import info_of
from dcp_plugin.types import CheckpointInfo

MODEL, OPTIM, EXTRA, RNG = "model", "optim", "extra", "rng"


def numbered(name: str, count: int) -> list[str]:
    """Return the names of ``count`` objects of a kind: ``model``, or ``model_0``, ``model_1``, …"""
    return [name] if count == 1 else [f"{name}_{number}" for number in range(count)]


def among(name: str, names: Iterable[str]) -> list[str]:
    """Return the names of a kind that occur in ``names``, in the order of the objects."""
    of_kind = [other for other in names if other == name or other.removeprefix(f"{name}_").isdecimal()]
    return sorted(of_kind, key=lambda other: int(other.removeprefix(name).removeprefix("_") or 0))


def keys_by_name(checkpoint: PathLike | CheckpointInfo, files: SourceFiles | None = None) -> dict[str, list[str]]:
    """Return the keys of a checkpoint by their first part, the name, and without it.

    Args:
        files: The files from :meth:`dcp_plugin.Checkpointer.shown`.
    """
    info = checkpoint if isinstance(checkpoint, CheckpointInfo) else inspect_files(checkpoint, files)
    keys: dict[str, list[str]] = {}
    for key in (*(tensor.key for tensor in info.tensors), *info.values):
        name, _, below = key.partition(".")
        keys.setdefault(name, []).append(below)
    return keys


def inspect_files(path: PathLike, files: SourceFiles | None) -> CheckpointInfo:
    """Return the result of :func:`dcp_plugin.inspect` for a checkpoint at its path, or for its files in a source."""
    with ShardedReader(path, complete=False, files=files) as reader:
        return info_of(reader)
