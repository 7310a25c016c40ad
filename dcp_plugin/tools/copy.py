"""``dcp_plugin.copy``: copies of checkpoints between disks and buckets, in all directions.

Each checkpoint appears at the target complete or not at all (:mod:`dcp_plugin.tools.transfer`). Checkpoints that share
files by hard links share them at the target as well, also with checkpoints of an earlier copy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from dcp_plugin.core.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    SaveFailed,
    UnsafeCheckpoint,
    as_html,
    damage_in,
    size,
    some,
)
from dcp_plugin.core.format import has_traces
from dcp_plugin.core.media import is_workspace, locate, medium_of, refuse_real_run, tree
from dcp_plugin.core.media.copies import copy_target
from dcp_plugin.core.paths import (
    PathLike,
    StorageOptions,
    Where,
    as_path,
    is_link,
    name_below,
    on_file_system,
    resolved,
)
from dcp_plugin.core.runs.foreign import Saved
from dcp_plugin.core.runs.scan import Scan
from dcp_plugin.core.storage.open import open_checkpoint
from dcp_plugin.core.storage.open_foreign import weights_in
from dcp_plugin.core.types import public_class
from dcp_plugin.tools.stream import Counter, Progress
from dcp_plugin.tools.transfer import CopyState, Source, Transfer, is_same, open_source


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class CopyReport:
    """The result of a copy. ``str()`` of it is one line."""

    source: Where
    target: Where
    copied: list[Where] = field(default_factory=list)
    """The new paths of the checkpoints that were copied."""
    skipped: list[Where] = field(default_factory=list)
    """The paths of checkpoints of the same save that the target had already."""
    links: list[Where] = field(default_factory=list)
    """Symbolic links that were made, such as ``last``."""
    bytes_copied: int = 0
    """Bytes that passed through this process."""
    bytes_linked: int = 0
    """Bytes that were linked at the target, or copied by the store without passing through here."""
    bytes_reused: int = 0
    """Bytes that an interrupted run of the same copy had written."""
    seconds: float = 0.0
    unverified: list[str] = field(default_factory=list)
    """Files and keys without checksums in the source, or whose bytes did not pass through this process. The copy
    compared their sizes alone."""
    passed_over: list[str] = field(default_factory=list)
    """Interrupted saves and links that were not copied, with the reasons."""
    unreadable: list[str] = field(default_factory=list)
    """Entries below the source that cannot be read, with the reason: the copy lacks the checkpoints in them."""
    needs: list[str] = field(default_factory=list)
    """Copies that are not complete, with the checkpoint that a load needs besides (``trainable_only``)."""

    _repr_html_ = as_html

    def __str__(self) -> str:
        parts = [
            f"{self.target}: {len(self.copied)} checkpoint(s) copied",
            f"{len(self.skipped)} were there" if self.skipped else "",
            f"{size(self.bytes_copied)} copied in {self.seconds:.1f} s",
            f"{size(self.bytes_linked)} linked" if self.bytes_linked else "",
            f"{size(self.bytes_reused)} were there of an interrupted try" if self.bytes_reused else "",
            f"{len(self.unverified)} file(s) or key(s) could not be verified" if self.unverified else "",
            f"{len(self.passed_over)} passed over" if self.passed_over else "",
            f"{len(self.unreadable)} cannot be read, and may hold more checkpoints" if self.unreadable else "",
        ]
        return "; ".join(filter(None, parts))


def copy(
    src: PathLike,
    dst: PathLike,
    *,
    overwrite: bool = False,
    io_threads: int = 4,
    storage_options: StorageOptions | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy a checkpoint, or all checkpoints below a directory, between disks and buckets.

    Each appears at its new path complete or not at all. Bytes are compared with their checksums while they are copied.
    The same call after an interrupted copy keeps its complete files. After a finished copy it copies new checkpoints.

    Args:
        src: A checkpoint of this package, of stock DCP or of another tool: a directory, a file or a URL. Or a directory
            or URL with checkpoints below it.
        dst: The new path of the checkpoint; for several, the directory or URL for all.
        overwrite: Replace other checkpoints at the target. A checkpoint of the same save stays.
        io_threads: Files that are copied at the same time.
        storage_options: Options of the stores of URLs, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with bytes done, and bytes in all, by the threads that copy, one at a time.

    Returns:
        The checkpoints that were copied, linked and skipped, and the files that could not be verified.

    Raises:
        CheckpointNotFound: ``src`` has no checkpoint, was deleted meanwhile, or is a run whose directory also has
            weights of another tool, so that the call is ambiguous.
        CheckpointCorrupt: A checkpoint is damaged; the message names file and key. It is not at ``dst``.
        SaveFailed: ``dst`` cannot be written, or has other contents, which stay.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.zeros(2, 3)}, "run/step-1")
        >>> report = dcp_plugin.copy("run/step-1", "archive/step-1")
        >>> report.copied[0].name, report.unverified, dcp_plugin.verify("archive/step-1").ok
        ('step-1', [], True)
    """
    began = time.monotonic()
    source, target = as_path(src, storage_options), as_path(dst, storage_options)
    old, new = resolved(source), resolved(target)
    if old == new or old in new.parents:
        raise SaveFailed(f"cannot copy {source} to {target}: that is the same place, or within it.")
    report = CopyReport(source, target)
    state = CopyState(io_threads, Counter(0, progress))
    _copy_all(report, _find(source, report), overwrite, state)
    return replace(
        report,
        bytes_copied=state.nbytes["copied"],
        bytes_linked=state.nbytes["linked"],
        bytes_reused=state.nbytes["reused"],
        seconds=time.monotonic() - began,
        unverified=state.unverified,
    )


def _find(source: Where, report: CopyReport) -> dict[Where, bool]:
    """Return the checkpoints at a path or below it, oldest first, and whether each is of another tool.

    Add to the report what cannot be copied.
    """
    with damage_in(source):
        kind = medium_of(source).kind(locate(source))
    if not kind:
        raise CheckpointNotFound(f"{source}: nothing is there.")
    if kind == "file":
        _refuse_other_file(source)
        return {source: True}
    try:
        open_checkpoint(source).close()
        return {source: False}
    except CheckpointNotFound as error:
        if weights_in(source):
            raise
        reason = error
    except CheckpointError:
        scan = Scan(source, others=True)
        if any(saved.path == source for saved in scan.of_others):  # opening it would execute code
            return {source: True}
        raise
    scan = Scan(source, others=True, read_all=True)
    checkpoints = {checkpoint.path: isinstance(checkpoint, Saved) for checkpoint in scan.complete()}
    if not checkpoints:
        raise reason
    left_out = (checkpoint for checkpoint in scan.checkpoints() if checkpoint.path not in checkpoints)
    report.passed_over.extend(f"{checkpoint.path}: {checkpoint.reason}" for checkpoint in left_out)
    report.unreadable.extend(map(str, scan.unreadable.values()))
    return checkpoints


def _refuse_other_file(path: Where) -> None:
    """Refuse a file that no known tool wrote, a damaged file, and a file that is only the index of other files.

    Raises:
        CheckpointError: The file is refused. The message names it.
    """
    with suppress(UnsafeCheckpoint):  # a file of a known tool, which the copy does not load
        opened = open_checkpoint(path)
        opened.close()
        if path.name not in opened.index.files:
            raise CheckpointMismatch(f"{path} is the index of {some(list(opened.index.files))}: copy {path.parent}")


def _copy_all(report: CopyReport, paths: dict[Where, bool], overwrite: bool, state: CopyState) -> None:
    """Compare all checkpoints with the target before the first is copied. Then copy one after the other.

    Args:
        report: The report, whose lists grow.
        paths: The result of :func:`_find`.
    """
    replaces: dict[Where, bool] = {}
    for path, of_others in paths.items():
        with closing(open_source(path, of_others)) as source:
            report.passed_over.extend(source.left_out)
            new_path = _new_path_of(path, report)
            refuse_real_run(new_path.parent, medium_of(new_path))
            existing = _existing(source, new_path)
            if existing.is_same:
                report.skipped.append(new_path)
                Transfer(source, new_path, state).learn_homes(verified=False)
                continue
            if existing.what and not (overwrite and existing.replaceable):
                way = "overwrite=True (--overwrite) replaces it" if existing.replaceable else "copy to a new name"
                raise SaveFailed(f"cannot copy {path} to {new_path}: {existing.what}; {way}.")
            replaces[path] = bool(existing.what)
            state.count.total += sum(source.sizes.values())
    for path, replaces_other in replaces.items():
        with closing(open_source(path, paths[path])) as source:
            transfer = Transfer(source, _new_path_of(path, report), state)
            if replaces_other and transfer.place.would_overwrite(transfer.target):
                # A checkpoint was opened there, perhaps of weights alone.
                medium_of(transfer.target).remove(transfer.target)
            transfer.run()
            report.copied.append(transfer.target)
            transfer.learn_homes(verified=True)
            if source.opened is not None and source.opened.absent:
                report.needs.append(source.opened.absent)
    root = on_file_system(report.source)
    if root is not None and paths.get(root) is not False:
        _copy_links(root, set(paths), report)


def _new_path_of(path: Where, report: CopyReport) -> Where:
    """Return the new path of a checkpoint of the source."""
    return report.target / name_below(report.source, path)


class _Existing(NamedTuple):
    """The contents of a target before a copy."""

    what: str = ""
    """Empty if the target has at most files of an interrupted copy of the same save."""
    replaceable: bool = False
    is_same: bool = False
    """True if it is a checkpoint of the same save."""


def _existing(source: Source, new_path: Where) -> _Existing:
    medium = medium_of(new_path)
    with damage_in(new_path):
        kind = medium.kind(new_path)
        names = tree(medium, new_path) if kind == "folder" else []
    if not names and kind != "file":  # an absent or empty folder
        return _Existing()
    try:
        if kind == "file":
            _refuse_other_file(new_path)
        existing = open_source(new_path)
    except CheckpointError as error:
        place = copy_target(new_path, source.token, source.summary is not None)
        if not isinstance(error, CheckpointMismatch) and place.may_be_begun(names, source.sizes):
            return _Existing()
        return _Existing(f"what is there is no checkpoint that can be read ({error})", has_traces(names))
    with closing(existing):
        return _Existing("another checkpoint is there", True, is_same(source, existing))


def _copy_links(root: Path, checkpoints: set[Where], report: CopyReport) -> None:
    """Make the symbolic links to checkpoints of the root again at the target."""
    for link, leads_to in _links_below(root, checkpoints):
        new_link, new_target = _new_path_of(link, report), _new_path_of(leads_to, report)
        if on_file_system(new_link) is None:
            report.passed_over.append(f"{link}: a link to {leads_to.name}; a bucket has none")
        elif os.path.lexists(new_link) and not is_link(new_link):
            report.passed_over.append(f"{link}: a link, and {new_link} is none")
        elif not (is_link(new_link) and resolved(new_link) == resolved(new_target)):
            medium_of(new_link).link(new_link, new_target)
            report.links.append(new_link)


def _links_below(root: Path, checkpoints: set[Where]) -> Iterator[tuple[Path, Path]]:
    """Yield each symbolic link below the root that leads to a checkpoint, and the checkpoint."""
    by_place = {Path(resolved(path)): Path(path) for path in checkpoints}
    for parent, folders, names in os.walk(root):
        for name in sorted([*folders, *names]):
            path = Path(parent, name)
            if path.is_symlink() and (checkpoint := by_place.get(Path(resolved(path)))) is not None:
                yield path, checkpoint
        folders[:] = [name for name in folders if not is_workspace(name) and Path(parent, name) not in checkpoints]
