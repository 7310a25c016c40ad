"""``dcp_plugin.tools.doctor``: probes of a folder or a bucket, for the features and the speed that a save finds there.

The probes call the functions that a save calls, so a probe that passes says that a save will. The rule: every write is
below one name in the workspace, which no search takes for a checkpoint. That name is deleted, also after an error or
Ctrl-C.
"""

from __future__ import annotations

import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import CheckpointError, size
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.media.medium import PAGE, CannotLink, DataFile, Medium
from dcp_plugin.core.media.objects.client import client_of
from dcp_plugin.core.media.objects.commit import refuses_other_tags
from dcp_plugin.core.media.places import workspace_of
from dcp_plugin.core.options import IO
from dcp_plugin.core.paths import ObjectPath, PathLike, StorageOptions, Where, as_path, on_file_system, place_of
from dcp_plugin.core.ranks.launcher import this_launch
from dcp_plugin.core.types import public_class

_MOST, _FILE = 256 << 20, 8 << 20  # bytes: of all files together, and of one, which a store takes in one request
_SECONDS = 3.0  # after which no further file is written or read
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
    load_seconds: float | None

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
    seconds = [nbytes / rate if (rate := values.get(name)) else None for name in ("write", "read")]
    return DoctorReport(place, probes, _settings(place, probes, nbytes, seconds[0]), nbytes, *seconds)


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
    medium, folder = medium_of(place), on_file_system(place)
    prefix: Any = None
    try:
        if folder is not None and (kind := medium.kind(folder)) != "folder":
            raise OSError(f"{place} is no folder" if kind else f"{place}: nothing is there. Make the folder first")
        beside: list[Any] = []
        with suppress(FileNotFoundError):  # a bucket without objects there
            beside = [entry.path for entry in medium.entries(place)]
        if folder is None and not write:
            yield Probe("list", "note", "it can be listed; writes are not probed (write=True, --write)")
            return
        # Where a save has its workspace: one level higher for the numbered checkpoints of Accelerate.
        numbered = [path for path in beside if path.name.startswith("checkpoint_")]
        prefix = workspace_of([*numbered, place / "checkpoint"][0]) / f"doctor-{uuid.uuid4().hex[:16]}"
        free = shutil.disk_usage(folder).free if folder is not None else 1 << 60
        yield from _probe_bucket(prefix) if folder is None else _probe_folder(prefix, free, nbytes)
        yield from _probe_speed(medium, prefix, min(_MOST, nbytes, free // 8))
    except (OSError, CheckpointError) as error:
        yield Probe("save", "failed", str(error))
    finally:
        if prefix is not None:
            _delete(prefix)


def _delete(prefix: Any) -> None:
    """Delete everything below a prefix, and a workspace that is empty then. Never raises OSError."""
    with suppress(OSError):
        if (folder := on_file_system(prefix)) is None:
            client = client_of(prefix)
            client.delete([item.key for item in client.below(prefix.key)])
        else:
            with posix.OwnFolder(folder.parent) as workspace:
                workspace.delete(folder.name)
                workspace.remove()  # fails while saves are using it


def _probe_folder(prefix: Path, free: int, nbytes: int) -> Iterator[Probe]:
    """Yield the features of a file system, in a new folder. Raises OSError."""
    posix.make_directories(prefix)
    medium, (old, new, file, link) = medium_of(prefix), (prefix / name for name in ("old", "new", "file", "link"))
    with posix.OwnFolder(prefix) as folder:
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
        medium.link_file(DataFile.written(medium.open(prefix), file), link)
        yield Probe("hard links", "ok", "unchanged tensors are not written again")
    except CannotLink as error:
        yield Probe("hard links", "note", f"none, and no shared blocks: unchanged tensors are written again ({error})")
    try:
        with medium_of(prefix, direct_io=True).create(prefix, "direct", PAGE) as direct:
            direct.write(bytes(PAGE))
        yield Probe("O_DIRECT", "ok", "large files bypass the page cache")
    except CheckpointError:
        yield Probe("O_DIRECT", "note", "none: files are written through the page cache; io.direct=True fails")
    os.utime(prefix)
    yield _clock(prefix.stat().st_mtime)


def _has_locks(folder: posix.Folder) -> bool:
    with suppress(OSError), os.fdopen(posix.lock(folder, "lock", create=True) or -1):
        return True
    return False


def _probe_bucket(prefix: ObjectPath) -> Iterator[Probe]:
    """Yield the features of an object store. Raises OSError."""
    client, key = client_of(prefix), f"{prefix.key}/probe"
    client.put(key, b"1")
    entry = client.head(key)
    yield _clock(entry.modified if entry else math.nan)
    nothing = "none: of two saves to one path, the last wins. Let one job save to a path"
    refuses = refuses_other_tags(client, key, b"2")
    yield _feature("conditional requests", refuses, "of two saves to one path, the second fails", nothing)


def _clock(now: float) -> Probe:
    ahead = now - time.time()
    text = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the clock of this host: set both by NTP"
    return _feature("clock", abs(ahead) < _CLOCKS_DIFFER, "it agrees with the clock of this host", text, ahead)


def _probe_speed(medium: Medium, prefix: Where, most: int) -> Iterator[Probe]:
    """Yield the speed of writes and reads of one process. Raises OSError.

    Each round has twice as many files as the round before, so a slow place gets few, and a fast one enough.
    """
    files, length = medium.open(prefix), max(PAGE, min(_FILE, most // 4))
    directory = on_file_system(prefix) or prefix / "save"  # whose objects are next to it
    data, names = os.urandom(length), [str(number) for number in range(max(1, most // length))]

    def write(name: str) -> None:
        with medium.create(directory, name, length) as file:
            file.write(data, kept=True)

    def read(name: str) -> None:
        with files.open(name) as file:
            if place_of(prefix) == "disk":  # read from the device, not from the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.fill([memoryview(bytearray(length))], 0)

    with ThreadPoolExecutor(max(IO().threads, files.cost.at_once)) as pool:
        for title, call in (("write", write), ("read", read)):
            done, began, seconds = 0, time.monotonic(), 0.0
            while done < len(names) and 2 * seconds < _SECONDS:
                done += len(list(pool.map(call, names[done : 2 * done or 1])))
                seconds = max(time.monotonic() - began, 1e-6)
            names, rate = names[:done], done * length / seconds
            yield Probe(title, "ok", f"{size(rate)}/s ({size(done * length)} in {seconds:.1f} s)", rate)
