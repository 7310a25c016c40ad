"""Real file systems for the tests, where root may mount: an ext4 that loses power, a full one, and one like NFS.

The last is a FUSE mount (the distribution's ``libfuse3`` and ``pip install mfusepy``) without what such mounts may
lack: no exchange of names, hard links, locks, or sync of directories; entries in another order; and what is deleted
while it is open stays as a hidden file, so that its directory cannot be removed yet. More tests run on it by::

    python -m tests.faults.mounts tests/core/runs/test_lifecycle.py tests/core/storage/test_reuse.py
"""

from __future__ import annotations

import ctypes.util
import errno
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults.oracle import look
from tests.faults.scenes import SCENES, Scene, prepare
from tests.faults.sweep import act
from tests.faults.victims import Fault, Outcome, Victims

_SIZE = 48 << 20
"""Bytes of an ext4: a few checkpoints of the scenes and the journal."""


@functools.cache
def why_no_ext4() -> str:
    """Why nothing can be mounted here; empty if it can."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        return "needs root and mkfs.ext4"
    with tempfile.TemporaryDirectory() as place:
        try:
            with _mounted(_new_image(Path(place))):
                return ""
        except subprocess.CalledProcessError as error:
            return f"cannot mount an ext4 here: {error.stderr.decode().strip()}"


@functools.cache
def why_no_fuse() -> str:
    """Why there can be no FUSE mount here; empty if there can."""
    if not importlib.util.find_spec("mfusepy") or not ctypes.util.find_library("fuse3"):
        return "needs libfuse3 and mfusepy"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) and os.geteuid() == 0 else "needs root and /dev/fuse"


def after_cuts(victims: Victims, scene_name: str, every: int = 1, start: int = 1) -> Iterator[str | None]:
    """What is wrong, or None, each time that an ext4 loses power at a call of a scene, and is mounted again.

    Args:
        every: Take every so many calls only, from ``start`` on.
    """
    scene = SCENES[scene_name]
    with _prepared(victims, scene) as template:
        number, outcome = start, Outcome(-9)
        while outcome.exit_code:
            image = _copy(template)
            with _mounted(image) as root:
                outcome = act(victims, scene, root, [Fault("cut").nth(number)])
            with _mounted(_copy(image, "afterwards")) as root:
                problems = look(victims, scene, root, outcome)
            yield f"{scene_name}, power cut at call {number}: {'; '.join(problems)}" if problems else None
            number += every


def on_full_disks(victims: Victims, scene_name: str, every: int = 1) -> Iterator[str | None]:
    """What is wrong, or None, with each amount of free space, from nothing until the scene succeeds.

    Args:
        every: How many blocks of 16 KiB there are more each time.
    """
    scene = SCENES[scene_name]
    with _prepared(victims, scene) as template:
        free, outcome = 0, Outcome(-9)
        while outcome.exit_code or outcome.error is not None:
            with _mounted(_copy(template)) as root:
                filler = _fill(root, free)
                outcome = act(victims, scene, root)
                filler.unlink()
                problems = look(victims, scene, root, outcome)
            place = f"{scene_name}, {free} bytes free ({outcome.error!r:.200})"
            yield f"{place}: {'; '.join(problems)}" if problems else None
            free += every << 14


@contextmanager
def _prepared(victims: Victims, scene: Scene) -> Iterator[Path]:
    """The image of a file system with what is there before a scene, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="dcp-faults-") as folder:
        template = _new_image(Path(folder))
        with _mounted(template) as root:
            assert victims.run(prepare, scene, root, below=root).error is None
            _run("sync", "-f", root)  # where another process still has the mount, umount writes nothing
        yield template


def _fill(root: Path, free: int) -> Path:
    """A file that leaves so many bytes of the file system, and some blocks that ext4 may need for the file itself."""
    filler = root.parent / "filler"
    there = os.statvfs(root)
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, there.f_bavail * there.f_frsize - free - (1 << 14))
    return filler


def _new_image(place: Path) -> Path:
    image = place / "template"
    with open(image, "wb") as file:
        file.truncate(_SIZE)
    _run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0", image)
    return image


def _copy(image: Path, name: str = "image") -> Path:
    """Copy an image to a new file, so that the next mount is a new file system.

    The kernel may write to an unmounted image for a moment longer. And while another process has its own copy of the
    table of mounts (``unshare -m``), a second mount of the same file is the old file system, which may have no power.
    """
    copied = image.with_name(name)
    copied.unlink(missing_ok=True)
    return Path(shutil.copy(image, copied))


@contextmanager
def _mounted(image: Path) -> Iterator[Path]:
    """A directory on the file system of an image."""
    mount = image.with_name("mount")
    mount.mkdir(exist_ok=True)
    _run("mount", "-o", "loop", image, mount)
    try:
        root = mount / "run"
        root.mkdir(exist_ok=True)
        yield root
    finally:
        _run("umount", mount)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def like_nfs() -> Iterator[Path]:
    """A directory on a FUSE mount that lacks what an NFS mount may lack."""
    with tempfile.TemporaryDirectory(prefix="dcp-faults-") as made:
        stored, mount = Path(made) / "stored", Path(made) / "mount"
        stored.mkdir()
        mount.mkdir()
        command = [sys.executable, "-c", "from tests.faults import mounts; mounts._serve()", stored, mount]
        server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        try:
            while not mount.is_mount():
                assert server.poll() is None, "the FUSE server has ended"
            yield mount
        finally:
            _run("umount", mount)
            server.wait()


def _serve() -> None:
    import mfusepy

    class Fuse(mfusepy.FUSE):  # type: ignore[misc]
        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
            return -errno.EINVAL if flags else super().rename_fuse_3(old, new, flags)

    class Poor(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def __init__(self, stored: str) -> None:
            self._stored = stored

        def _of(self, path: str) -> str:
            return self._stored + path

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = os.lstat(self._of(path)) if fh is None else os.fstat(fh)
            names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size")
            times = {f"st_{one}": getattr(found, f"st_{one}_ns") for one in ("atime", "mtime", "ctime")}
            return {name: getattr(found, name) for name in names} | times

        def open(self, path: str, flags: int) -> int:
            return os.open(self._of(path), flags & ~os.O_DIRECT)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return os.open(self._of(path), os.O_RDWR | os.O_CREAT, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(self._of(path), length)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            os.fsync(fh)
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            raise mfusepy.FuseOSError(errno.EINVAL)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def readdir(self, path: str, fh: int) -> Any:
            return [".", "..", *sorted(os.listdir(self._of(path)), reverse=True)]

        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(self._of(path), mode)
            return 0

        def rmdir(self, path: str) -> int:
            os.rmdir(self._of(path))
            return 0

        def unlink(self, path: str) -> int:
            os.unlink(self._of(path))
            return 0

        def rename(self, old: str, new: str) -> int:
            os.rename(self._of(old), self._of(new))
            return 0

        def symlink(self, target: str, source: str) -> int:
            os.symlink(source, self._of(target))
            return 0

        def readlink(self, path: str) -> str:
            return os.readlink(self._of(path))

        def link(self, target: str, source: str) -> int:
            raise mfusepy.FuseOSError(errno.EPERM)

        def lock(self, path: str, fh: int, cmd: int, lock: Any) -> int:
            raise mfusepy.FuseOSError(errno.ENOLCK)

        def chmod(self, path: str, mode: int) -> int:
            os.chmod(self._of(path), mode)
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            os.utime(self._of(path), ns=times)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(self._of(path))
            return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    Fuse(Poor(sys.argv[1]), sys.argv[2], foreground=True, nothreads=True)


def main() -> int:
    import pytest

    if said := why_no_fuse():
        print(said)
        return 1
    with like_nfs() as mount:
        return pytest.main(["-p", "no:cacheprovider", f"--basetemp={mount / 'tests'}", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
