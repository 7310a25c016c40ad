"""A few of the faults that only a real file system has; all with ``python -m tests.faults``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import dcp_plugin as dcp
from dcp_plugin.core.media.disk import posix
from tests import launch
from tests.faults import mounts
from tests.faults.oracle import look
from tests.faults.scenes import SCENES, prepare, save
from tests.faults.sweep import act
from tests.faults.victims import Victims
from tests.places import names_in

ext4 = pytest.mark.skipif(bool(mounts.why_no_ext4()), reason=mounts.why_no_ext4())


@ext4
@pytest.mark.one_of("scene", "start")
@pytest.mark.parametrize(("scene", "start"), [("overwrite", 70), ("overwrite", 76), ("first", 61)])
def test_what_an_ext4_has_after_its_power_was_cut(victims: Victims, scene: str, start: int) -> None:
    found = list(mounts.after_cuts(victims, scene, every=7, start=start))
    assert found
    assert [one for one in found if one is not None] == []


@ext4
def test_a_disk_that_is_full_has_what_was_there(victims: Victims) -> None:
    found = list(mounts.on_full_disks(victims, "overwrite", every=40))
    assert len(found) > 2
    assert [one for one in found if one is not None] == []


@pytest.mark.long
@pytest.mark.skipif(bool(mounts.why_no_fuse()), reason=mounts.why_no_fuse())
@pytest.mark.parametrize("scene", SCENES)
def test_a_mount_like_nfs(victims: Victims, scene: str) -> None:
    with mounts.like_nfs() as root:
        prepare(SCENES[scene], root)
        outcome = act(victims, SCENES[scene], root)
        assert look(victims, SCENES[scene], root, outcome) == []


def _end_within_a_save(path: Path) -> None:
    dcp.Checkpointer().save({"n": 1}, path, files=lambda directory: os.kill(os.getpid(), signal.SIGKILL))


def test_without_locks_what_a_process_of_this_machine_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(folder: posix.Folder, name: str, create: bool = True) -> int:
        raise OSError(37, "No locks available")

    launch.outcomes_of(_end_within_a_save, 1, tmp_path / "step-1")
    assert list(tmp_path.glob(".dcp_plugin/*.saving")), "it has left something"
    monkeypatch.setattr(posix, "lock", without)
    save(tmp_path / "step-2", 2)
    assert names_in(tmp_path) == ["step-2"]


def test_whether_a_process_has_ended_is_known_on_its_machine_only() -> None:
    here, gone = posix.machine(), 1 << 30  # more than the kernel has numbers for
    assert here
    assert posix.has_ended(here, gone)
    assert not posix.has_ended(here, os.getpid())
    for machine, pid in [("", gone), (None, gone), ("another", gone), (here, 0), (here, -1), (here, "1"), (here, None)]:
        assert not posix.has_ended(machine, pid)
