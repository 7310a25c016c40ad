"""Yields the extra files of a checkpoint in a local directory, for code of frameworks and users that opens files.

A checkpoint in a directory is that directory. Files in an object store are fetched, on the rank that asks; files that
were copied from there to a disk get their usual names. Files that only a source has are fetched from it, and compared
with the checksums of the save.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dcp_plugin.errors import CheckpointCorrupt, damage_in
from dcp_plugin.format import DATA_SUFFIX, PACKED, is_own
from dcp_plugin.media import Readable, files_below, medium_of
from dcp_plugin.media.packed import PackedFiles, unpacked
from dcp_plugin.paths import Where
from dcp_plugin.sources import SourceFiles
from dcp_plugin.storage.check_rest import told_of
from dcp_plugin.storage.open import open_files
from dcp_plugin.storage.published import in_one_view

_AT_ONCE = 8 << 20
"""Bytes that are asked for in one request."""


@contextmanager
def local_copy(
    path: Where, wanted: Callable[[str], bool] = lambda name: True, files: SourceFiles | None = None
) -> Iterator[Path]:
    """Yield a directory with the files of a checkpoint, those of tensors left out, as long as the block runs.

    Args:
        wanted: Selects the files by their names in the checkpoint, with ``/`` between folders.
        files: Of :meth:`dcp_plugin.Checkpointer.shown`.

    Raises:
        CheckpointNotFound, CheckpointCorrupt, CheckpointUnreadable: They cannot be fetched.
    """
    if files is None and isinstance(path, Path) and not _is_packed(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="dcp-plugin-") as home:
        with damage_in(path):
            if files is not None:
                _verify(files, path, wanted)
                copied = _fetched(files, filter(_is_extra, files.all_names()), wanted, Path(home))
            else:
                copied = in_one_view(path, lambda _, held: _fetched(held, _names(held, path), wanted, Path(home)))
        yield copied


def _is_packed(path: Path) -> bool:
    with suppress(OSError):
        return isinstance(unpacked(medium_of(path).open(path)), PackedFiles)
    return False


def _verify(files: SourceFiles, path: Where, wanted: Callable[[str], bool]) -> None:
    """Have each file come from a node that has what was saved. Raises CheckpointCorrupt if none has."""
    for name, saved in open_files(path, files, complete=False).index.beside.items():
        while wanted(name) and told_of(files, name) != saved:
            with files.open(name) as file:
                file.peek(1)  # which tells where it comes from
                if not files.distrust(file):
                    raise CheckpointCorrupt(f"{files.where}/{name} is not what was saved with the checkpoint")


def _fetched(files: Readable, names: Iterable[str], wanted: Callable[[str], bool], home: Path) -> Path:
    copy = Path(tempfile.mkdtemp(dir=home))  # another look may follow
    for name in names:
        if wanted(name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            with files.open(name) as source, open(copy / name, "wb") as target:
                shutil.copyfileobj(source, target, _AT_ONCE)
    return copy


def _names(files: Readable, path: Where) -> list[str]:
    """The files that belong to nobody but whoever has put them there."""
    medium = medium_of(path).snapshot(path)
    names = {name for name, _ in files_below(medium, path) if _is_extra(name)}
    if isinstance(files, PackedFiles):
        names |= {name for name, _ in files_below(medium, path / f"{PACKED}{files.token}") if _is_extra(name)}
    return sorted(names)


def _is_extra(name: str) -> bool:
    return not is_own(name.partition("/")[0]) and not name.endswith(DATA_SUFFIX)
