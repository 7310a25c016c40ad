"""What a checkpoint has beside its tensors, in a local directory: for code of frameworks and users that opens files.

A checkpoint in a directory is that directory. Of one in an object store the files are fetched, on the rank that asks;
of one that was copied from there to a disk they get their usual names. Of one that only nodes have in ``local_dir``
they are fetched from these, and compared with what was saved.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dcp_plugin.errors import CheckpointCorrupt, damage_in
from dcp_plugin.format import DATA_SUFFIX, PACKED, is_own
from dcp_plugin.media import Medium, Readable, medium_of
from dcp_plugin.media.elsewhere import Elsewhere
from dcp_plugin.media.packed import PackedFiles, unpacked
from dcp_plugin.paths import Where
from dcp_plugin.storage.check_rest import told_of
from dcp_plugin.storage.published import in_one_view

_AT_ONCE = 8 << 20
"""Bytes that are asked for in one request."""


@contextmanager
def local_copy(path: Where, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Path]:
    """A directory with the files of a checkpoint, those of tensors left out, as long as the block runs.

    Args:
        wanted: Which of them are fetched, by their names in the checkpoint, with ``/`` between folders.

    Raises:
        CheckpointNotFound, CheckpointCorrupt, CheckpointUnreadable: They cannot be fetched.
    """
    medium = medium_of(path)
    if isinstance(path, Path) and not isinstance(medium, Elsewhere) and not _is_packed(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="dcp-plugin-") as home:
        with damage_in(path):
            if isinstance(medium, Elsewhere):
                _verify(medium, wanted)
            copied = in_one_view(path, lambda _, files: _fetched(files, path, wanted, Path(home)))
        yield copied


def _is_packed(path: Path) -> bool:
    with suppress(OSError):
        return isinstance(unpacked(medium_of(path).open(path)), PackedFiles)
    return False


def _verify(nodes: Elsewhere, wanted: Callable[[str], bool]) -> None:
    """Have files come from nodes that have what was saved. Raises CheckpointCorrupt if none has."""
    for name, told in nodes.beside.items():
        while wanted(name) and told_of(nodes.files, name) != told:
            with nodes.files.open(name) as file:
                file.peek(1)  # which tells where it comes from
                if not nodes.files.distrust(file):
                    raise CheckpointCorrupt(f"{nodes.files.where}/{name} is not what was saved with the checkpoint")


def _fetched(files: Readable, path: Where, wanted: Callable[[str], bool], home: Path) -> Path:
    copy = Path(tempfile.mkdtemp(dir=home))  # another look may follow
    for name in _names(files, path):
        if wanted(name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            with files.open(name) as source, open(copy / name, "wb") as target:
                shutil.copyfileobj(source, target, _AT_ONCE)
    return copy


def _names(files: Readable, path: Where) -> list[str]:
    """The files that belong to nobody but whoever has put them there."""
    medium = medium_of(path).snapshot(path)
    if isinstance(medium, Elsewhere):
        return [name for name in medium.names if not is_own(name.partition("/")[0]) and not name.endswith(DATA_SUFFIX)]
    names = {name for name in _below(medium, path) if not is_own(name.partition("/")[0])}
    if isinstance(files, PackedFiles):
        names |= {name for name in _below(medium, path / f"{PACKED}{files.token}") if not is_own(name)}
    return sorted(name for name in names if not name.endswith(DATA_SUFFIX))


def _below(medium: Medium, folder: Where, before: str = "") -> Iterator[str]:
    for one in medium.entries(folder):
        if one.path.parent != folder:  # a key with ".." in it, which is to lead out of the local directory
            continue
        if one.is_folder:
            yield from _below(medium, one.path, f"{before}{one.path.name}/")
        else:
            yield before + one.path.name
