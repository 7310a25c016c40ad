"""``dcp_plugin.tools.doctor``: probes of a folder or a bucket, for the features and the speed that a save finds there.

The probes begin a save, write with the functions that a save calls, and discard it. So a probe that passes says that a
save will. The rule: every write is below the directory of the discarded save, which no search takes for a checkpoint.
The files of a probe that was killed are garbage for the next save, as those of any save are.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dcp_plugin.core.config import IO, CheckpointConfig
from dcp_plugin.core.errors import CheckpointError, size
from dcp_plugin.core.format import DATA_SUFFIX
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.media.medium import PAGE, CannotLink, DataFile, Medium
from dcp_plugin.core.media.objects.commit import has_conditions
from dcp_plugin.core.paths import PathLike, StorageOptions, Where, as_path, on_file_system, place_of
from dcp_plugin.core.ranks.launcher import this_launch
from dcp_plugin.core.types import public_class

_MOST, _FILE = 256 << 20, 8 << 20  # bytes: of all files together, and of one, which a store takes in one request
_SECONDS = 3.0  # after which no further file is written
_CLOCKS_DIFFER = 2.0  # seconds; a store counts full seconds
_SCHEDULERS = {"SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"}


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class Probe:
    """The result of one probe."""

    name: str
    state: Literal["ok", "note", "failed"]
    """``"note"``: a save works, and ``text`` says what it does without. ``"failed"``: a save would fail."""
    text: str
    value: float | None = None
    """The measured number, if there is one: free bytes, bytes per second, or seconds that the clock is ahead."""


@public_class("dcp_plugin.tools")
@dataclass(frozen=True)
class DoctorReport:
    """The result of :func:`doctor`."""

    path: Where
    probes: list[Probe]
    settings: CheckpointConfig
    """The settings to begin with."""
    nbytes: int
    save_seconds: float | None
    """The time that one process takes to write ``nbytes``; None if no speed was measured."""

    @property
    def failed(self) -> list[Probe]:
        """The probes that say that a save would fail."""
        return [probe for probe in self.probes if probe.state == "failed"]


def doctor(
    path: PathLike,
    *,
    write: bool = False,
    nbytes: int = 10 << 30,
    storage_options: StorageOptions | None = None,
) -> DoctorReport:
    """Probe a folder or a bucket for what a save will find there: features, speed, space and clock.

    This takes about ten seconds. It writes at most 256 MiB, ``nbytes`` or an eighth of the free space, and deletes
    them.

    Args:
        path: A folder of checkpoints that exists, or a URL.
        write: Also write to an object store. A folder is always written to.
        nbytes: The size of a save, for its duration and the space that it needs.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.

    Returns:
        A report. A place that no save can use is a failed probe in it, and no exception.

    Raises:
        ValueError: ``path`` is a URL that no client takes, or ``nbytes`` is not positive.

    Example:
        >>> import dcp_plugin.tools
        >>> dcp_plugin.tools.doctor(".", nbytes=1 << 20).failed
        []
    """
    if nbytes < 1:
        raise ValueError(f"nbytes must be positive, got {nbytes}.")
    place = as_path(path, storage_options)
    probes = [*_probe_host(nbytes), *_probe(place, nbytes, write)]
    values = {probe.name: probe.value for probe in probes}
    seconds = nbytes / rate if (rate := values.get("write")) else None
    return DoctorReport(place, probes, _settings(place, probes, nbytes, seconds), nbytes, seconds)


def _settings(place: Where, probes: list[Probe], nbytes: int, seconds: float | None) -> CheckpointConfig:
    """Return the preset of a place, with the fields that the probes call for."""
    by_name = {probe.name: probe for probe in probes}
    notes = [probe.name for probe in probes if probe.state == "note"]
    fields: dict[str, Any] = {"reuse": False} if "hard links" in notes else {}
    is_cluster = this_launch() is not None or not _SCHEDULERS.isdisjoint(os.environ)
    preset: Any = "bucket" if place_of(place) == "store" else "cluster" if is_cluster else "local"
    if preset == "bucket" and "shared memory" in notes:
        fields["keeper"] = None
    if "space" in by_name and (free := by_name["space"].value or 0) < 4 * nbytes:
        fields["keep_last"] = max(2, int(free // nbytes) - 1)
    if seconds and 4 * seconds > CheckpointConfig.timeout:
        fields["timeout"] = float(math.ceil(4 * seconds))
    return CheckpointConfig.preset(preset, **fields)


def _probe_host(nbytes: int) -> Iterator[Probe]:
    """Yield the results that depend on this process and its host alone."""
    launch = this_launch()
    started = f"rank {launch.rank} of {launch.world_size}, by {launch.launcher}" if launch else "this process is alone"
    yield Probe("launcher", "ok", started)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    text = f"{size(free)} of /dev/shm are free"
    yield _feature("shared memory", free >= nbytes, text, f"{text}: a keeper needs the size of this host's state", free)


def _feature(name: str, works: bool, text: str, otherwise: str, value: float | None = None) -> Probe:
    return Probe(name, "ok", text, value) if works else Probe(name, "note", otherwise, value)


def _probe(place: Any, nbytes: int, write: bool) -> Iterator[Probe]:
    """Yield the results of the probes of a place, up to an error, and delete the files that they have written."""
    medium, folder, reservation = medium_of(place), on_file_system(place), None
    try:
        if folder is not None and (kind := medium.kind(folder)) != "folder":
            raise OSError(f"{place} is no folder" if kind else f"{place}: nothing is there. Make the folder first")
        names: list[str] = []
        with suppress(FileNotFoundError):  # a bucket without objects there
            names = [entry.path.name for entry in medium.entries(place)]
        if folder is None and not write:
            yield Probe("list", "note", "it can be listed; writes are not probed (write=True, --write)")
            return
        # The numbered checkpoints of Accelerate have their workspace one level higher.
        name = next((name for name in names if name.startswith("checkpoint_")), "doctor")
        reservation = medium.reserve(place / name, among_other_files=True)
        free = shutil.disk_usage(folder).free if folder is not None else 1 << 60
        if folder is None:
            yield _clock(reservation.time or math.nan)
            nothing = "none: of two saves to one path, the last wins. Let one job save to a path"
            works = has_conditions(reservation.final)
            yield _feature("conditional requests", works, "of two saves to one path, the second fails", nothing)
        else:
            yield from _probe_folder(reservation.directory, free, nbytes)
        yield from _probe_speed(medium, reservation.directory, min(_MOST, nbytes, free // 8))
    except (OSError, CheckpointError) as error:
        yield Probe("save", "failed", str(error))
    finally:
        if reservation is not None:
            medium.discard(reservation)


def _probe_folder(directory: Path, free: int, nbytes: int) -> Iterator[Probe]:
    """Yield the features of a file system, in a new folder. Raises OSError."""
    medium, (old, new, file, link) = medium_of(directory), (directory / name for name in ("old", "new", "file", "link"))
    with posix.OwnFolder(directory) as folder:
        in_memory = ", in memory: a reboot deletes them" if posix.is_in_memory(folder.descriptor) else ""
        text, too_small = f"{size(free)} are free{in_memory}", f": a save of {size(nbytes)} does not fit"
        yield _feature("space", free >= nbytes and not in_memory, text, text + too_small * (free < nbytes), free)
        nothing = "none that processes share: files of a crash may stay for 15 minutes"
        yield _feature("locks", _has_locks(folder), "processes of this host share them", nothing)
        old.mkdir()
        new.mkdir()
        nothing = "none: while a checkpoint is replaced, its name is free for a moment"
        exchanged = posix.exchange(folder, new.name, old)
        yield _feature("exchange of names", exchanged, "a checkpoint is replaced in one step", nothing)
    file.write_bytes(b"1")
    try:
        medium.link_file(DataFile.written(medium.open(directory), file), link)
        yield Probe("hard links", "ok", "unchanged tensors are not written again")
    except CannotLink as error:
        yield Probe("hard links", "note", f"none, and no shared blocks: unchanged tensors are written again ({error})")
    try:
        with medium_of(directory, direct_io=True).create(directory, "direct", PAGE) as direct:
            direct.write(bytes(PAGE))
        yield Probe("O_DIRECT", "ok", "large files bypass the page cache")
    except CheckpointError:
        yield Probe("O_DIRECT", "note", "none: files are written through the page cache; io.direct=True fails")
    os.utime(directory)
    yield _clock(directory.stat().st_mtime)


def _has_locks(folder: posix.Folder) -> bool:
    with suppress(OSError), os.fdopen(posix.lock(folder, "lock", create=True) or -1):
        return True
    return False


def _clock(now: float) -> Probe:
    ahead = now - time.time()
    text = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the clock of this host: set both by NTP"
    return _feature("clock", abs(ahead) < _CLOCKS_DIFFER, "it agrees with the clock of this host", text, ahead)


def _probe_speed(medium: Medium, directory: Where, most: int) -> Iterator[Probe]:
    """Yield the speed of writes of one process. Raises OSError.

    Each round has twice as many files as the round before, so a slow place gets few, and a fast one enough.
    """
    length = max(PAGE, min(_FILE, most // 4))
    data, numbers = os.urandom(length), range(max(1, most // length))

    def write(number: int) -> None:
        name = f"__0_{number}-{directory.stem}{DATA_SUFFIX}"  # in a store, it says to which save the object belongs
        with medium.create(directory, name, length) as file:
            file.write(data, kept=True)

    with ThreadPoolExecutor(max(IO().threads, medium.open(directory).cost.at_once)) as pool:
        done, began, seconds = 0, time.monotonic(), 0.0
        while done < len(numbers) and 2 * seconds < _SECONDS:
            done += len(list(pool.map(write, numbers[done : 2 * done or 1])))
            seconds = max(time.monotonic() - began, 1e-6)
    rate = done * length / seconds
    yield Probe("write", "ok", f"{size(rate)}/s ({size(done * length)} in {seconds:.1f} s)", rate)
