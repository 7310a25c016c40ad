"""``dcp_plugin.verify``: every byte of a checkpoint is read and compared with its checksum."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from dcp_plugin.core.errors import CheckpointError, CheckpointNotFound, CheckpointUnreadable, as_html, size, some
from dcp_plugin.core.paths import PathLike, StorageOptions, Where, as_path
from dcp_plugin.core.ranks.collectives import name_of
from dcp_plugin.core.runs.catalog import MOST_LOOKS, checkpoints_below
from dcp_plugin.core.storage.open_foreign import weights_in
from dcp_plugin.core.storage.published import sizes_only
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.storage.stream_copy import verify_files
from dcp_plugin.core.types import public_class
from dcp_plugin.tools.stream import Counter, Progress


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class VerifyReport:
    """The outcome of reading every byte of a checkpoint."""

    path: Where
    items: int
    nbytes: int
    errors: list[str]
    """One line per damaged item, naming file and key."""
    unverified: list[str] = field(default_factory=list)
    """Keys without a checksum."""
    differing: dict[str, list[int]] = field(default_factory=dict)
    """Parameters and optimizer state that differed between ranks at this save or before, with the ranks: the checkpoint
    has those of the lowest rank."""
    absent: list[str] = field(default_factory=list)
    """One line per checkpoint that is not complete, with the parameters that it leaves out (``trainable_only``)."""

    _repr_html_ = as_html

    @property
    def ok(self) -> bool:
        return not self.errors

    def __str__(self) -> str:
        state = "intact" if self.ok else f"DAMAGED, {len(self.errors)} item(s): " + "; ".join(self.errors[:5])
        unverified = f"; {len(self.unverified)} key(s) have no checksum and were only read" if self.unverified else ""
        keys = [f"{key} ({name_of(ranks)})" for key, ranks in self.differing.items()]
        differing = f"; ranks that trained it differed in {some(keys)}" if keys else ""
        absent = "".join(f"; {line}" for line in self.absent)
        return f"{self.path}: {self.items} items, {size(self.nbytes)}, {state}{unverified}{differing}{absent}"


def verify(
    path: PathLike,
    io_threads: int = 2,
    storage_options: StorageOptions | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Read every byte of a checkpoint, or of all in a run, and compare it with its checksum.

    In a checkpoint of this package, the tables of contents for other tools and the files that a framework added are
    compared, too. Items that only earlier checkpoints used, in a linked file, are not, and files that were added to the
    directory after the save are not read.

    Args:
        path: The checkpoint; or a directory with checkpoints below it, and perhaps another tool's file in it.
        io_threads: Threads that read.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        progress: Called with the bytes of data files read, and the bytes of all data files.

    Returns:
        The items and bytes that were read, and the damage, which is not raised. Items of other tools have no checksums:
        they are read and listed. For a run, the sums; a checkpoint that cannot be opened is one of the errors.

    Raises:
        CheckpointNotFound, CheckpointIncomplete, CheckpointCorrupt, UnsafeCheckpoint: The checkpoint cannot be opened.
        CheckpointUnreadable: The file system failed; also for a run.

    Example:
        >>> import torch, dcp_plugin
        >>> dcp_plugin.save({"w": torch.zeros(2, 3)}, "run/step-1")
        >>> dcp_plugin.verify("run/step-1").ok
        True
    """
    location = as_path(path, storage_options)
    verify_one = functools.partial(_verify_checkpoint, io_threads=io_threads, progress=progress)
    below = checkpoints_below(location)
    return _verify_run(location, below, verify_one) if below else verify_one(location)


def _verify_run(run: Where, below: list[Where], verify_one: Callable[[Where], VerifyReport]) -> VerifyReport:
    """Verify the checkpoints of a run, and the weights of another tool in its directory."""
    reports: list[VerifyReport] = []
    try:
        weights = weights_in(run)
    except CheckpointUnreadable:
        raise
    except CheckpointError as error:
        weights, reports = [], [VerifyReport(run, 0, 0, [str(error)])]
    for path in (*(run / name for name in weights), *below):
        try:
            reports.append(verify_one(path))
        except CheckpointNotFound:  # the training deleted it meanwhile
            continue
        except CheckpointUnreadable:
            raise
        except CheckpointError as error:
            reports.append(VerifyReport(path, 0, 0, [str(error)]))
    return VerifyReport(
        run,
        sum(report.items for report in reports),
        sum(report.nbytes for report in reports),
        [error for report in reports for error in report.errors],
        [name for report in reports for name in report.unverified],
        {key: ranks for report in reports for key, ranks in report.differing.items()},
        [line for report in reports for line in report.absent],
    )


def _verify_checkpoint(path: Where, io_threads: int, progress: Progress | None) -> VerifyReport:
    for _ in range(MOST_LOOKS):
        with CheckpointReader(path, io_threads=io_threads) as reader:
            report = _verified(reader, io_threads, progress)
            if not report.errors or not reader.open().files.moved():
                return report
    raise CheckpointNotFound(f"{path} was replaced each of {MOST_LOOKS} times that it was verified.")


def _verified(reader: CheckpointReader, io_threads: int, progress: Progress | None) -> VerifyReport:
    lengths: dict[tuple[str, int], int] = {}
    unverified = []
    for key, entry in reader.index.items():
        places = [chunk.location for chunk in entry.chunks]
        for place in places:
            lengths.setdefault((place.file, place.offset), place.length)
        if any(place.hashes is None for place in places):
            unverified.append(key)
    with suppress(OSError):  # pinned files outlive a deletion of the checkpoint
        reader.open().files.pin(reader.index.files)
    count = Counter(sum(reader.index.files.values()), progress)
    errors = verify_files(reader.open(), io_threads, count.add)
    unverified += sizes_only(reader.index.extra_files)
    summary = reader.open().summary
    differing = {} if summary is None else summary.differing
    absent = [reader.open().absent] if reader.open().absent else []
    return VerifyReport(reader.path, len(lengths), sum(lengths.values()), errors, unverified, differing, absent)
