"""``doctor``: what a save will find in a folder or a bucket. It leaves nothing, and no save sees it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin.core.media.disk import local_disk, local_files, posix
from dcp_plugin.core.media.objects.client import client_of
from dcp_plugin.core.paths import ObjectPath, Where
from dcp_plugin.tools import doctor, probes
from tests import programs
from tests.commands import invoke, json_of
from tests.faults import mounts
from tests.faults.proxy import Proxy
from tests.limits import HANG
from tests.object_server import Bucket
from tests.users import as_another_user

FEATURES = ["space", "locks", "exchange of names", "hard links", "O_DIRECT", "clock", "write"]
SMALL = 1 << 20


def _states(place: Where) -> dict[str, str]:
    """Return the states of the probes of a place, made in this process."""
    return {probe.name: probe.state for probe in probes._probe(place, SMALL, write=True)}


def test_a_folder_has_every_feature_and_a_speed_and_nothing_is_left(tmp_path: Path) -> None:
    report = json_of("doctor", tmp_path, "--gb", "0.001")["doctor"]
    assert [probe["name"] for probe in report["probes"]] == ["launcher", "shared memory", *FEATURES]
    assert report["save_seconds"] > 0
    assert os.listdir(tmp_path) == []


def test_settings_follow_from_the_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in probes._SCHEDULERS:
        monkeypatch.delenv(name, raising=False)
    assert str(doctor(tmp_path, nbytes=1).settings) == "CheckpointConfig(async_save=True, keep_last=3)"
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    large = doctor(tmp_path, nbytes=1 << 60)
    assert large.settings.finish_on_sigterm and large.settings.keep_last == 2 and large.settings.timeout > 1800
    assert not large.failed and "does not fit" in str(large.probes)


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_place_that_is_no_folder_is_a_line_and_a_status(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    result = invoke("doctor", tmp_path / name)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert f"a save would fail: {tmp_path / name}" in result.stderr
    assert os.listdir(tmp_path) == ["file"]


@contextmanager
def _tmpfs(folder: Path, options: str) -> Iterator[None]:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", folder], capture_output=True).returncode:
        pytest.skip("needs to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(("options", "reason"), [("ro", "Read-only file system"), ("size=8k", "No space left")])
def test_a_read_only_and_a_full_folder_are_a_line_and_a_status(tmp_path: Path, options: str, reason: str) -> None:
    with _tmpfs(tmp_path, options):
        result = invoke("doctor", tmp_path)
        assert result.exit_code == 1 and reason in result.stderr and result.stderr.count("\n") == 1
        assert os.listdir(tmp_path) == []


def test_a_folder_of_another_user_cannot_be_written(tmp_path: Path) -> None:
    assert "'failed'" in as_another_user(_states, tmp_path)
    assert os.listdir(tmp_path) == []


def _fail(code: int) -> Any:
    def fail(*args: object, **more: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "locks": (posix, "lock", _fail(errno.ENOLCK)),
    "exchange of names": (posix, "exchange", lambda *args: False),
    "hard links": (os, "link", _fail(errno.EPERM)),
    "O_DIRECT": (local_disk.BlockFile, "_switch", _fail(errno.EINVAL)),
}


@pytest.mark.parametrize("feature", FAULTS)
def test_a_feature_that_a_save_does_without_is_a_note(
    tmp_path: Path, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "_reflink", lambda *paths: False)
    monkeypatch.setattr(*FAULTS[feature])
    states = _states(tmp_path)
    assert states[feature] == "note" and "failed" not in states.values()
    assert list(states) == FEATURES and os.listdir(tmp_path) == []


@pytest.mark.skipif(bool(mounts.why_no_fuse()), reason=mounts.why_no_fuse())
def test_a_mount_like_nfs_lacks_what_a_save_does_without() -> None:
    with mounts.like_nfs() as root:
        before = os.listdir(root)
        states = _states(root)
        assert {states[name] for name in ("locks", "exchange of names", "hard links")} == {"note"}
        assert "failed" not in states.values() and os.listdir(root) == before


def test_a_bucket_is_only_read_unless_writes_are_wanted(bucket: Bucket, proxy: Proxy) -> None:
    report = json_of("doctor", f"{bucket.url}/run")["doctor"]
    assert [probe["name"] for probe in report["probes"]][2:] == ["list"]
    assert {request.method for request in proxy.requests} == {"GET"}
    assert "bucket" in str(report["path"]) and report["save_seconds"] is None


def test_a_bucket_has_conditions_and_a_speed_and_nothing_is_left(bucket: Bucket) -> None:
    report = json_of("doctor", f"{bucket.url}/run", "--write", "--gb", "0.02")["doctor"]
    assert [probe["name"] for probe in report["probes"]][2:] == ["clock", "conditional requests", "write"]
    assert {probe["state"] for probe in report["probes"][2:]} == {"ok"}
    assert list(client_of(ObjectPath(bucket.url)).below("")) == [] == bucket.unfinished_uploads()


def test_a_bucket_that_does_not_exist_is_a_line_and_a_status(bucket: Bucket) -> None:
    result = invoke("doctor", f"{bucket.url}-other", "--write")
    assert result.exit_code == 1 and "There is no such bucket" in result.stderr and result.stderr.count("\n") == 1


def test_a_save_in_flight_is_untouched(place: Where) -> None:
    dcp.save({"w": torch.zeros(3)}, place / "step-1", step=1)
    reports = []
    dcp.Checkpointer().save(
        {"w": torch.ones(3)},
        place / "step-2",
        step=2,
        files=lambda folder: reports.append(doctor(place, write=True, nbytes=SMALL)),
    )
    assert reports[0].failed == [] and dcp.verify(place / "step-2").ok
    assert [run.path.name for run in dcp.list_checkpoints(place)] == ["step-1", "step-2"]


def test_the_files_of_the_probes_are_taken_for_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/checkpoint_0").mkdir(parents=True)
    results = probes._probe(tmp_path / "checkpoints", SMALL, write=True)
    next(results)
    assert list(tmp_path.glob(".dcp_plugin/*.saving")), "accelerate takes each entry of its folder for a checkpoint"
    assert dcp.latest(tmp_path) is None
    assert list(results) and os.listdir(tmp_path) == ["checkpoints"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_command_leaves_nothing_and_a_killed_one_what_the_next_deletes(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [programs.PYTHON, "-m", "dcp_plugin", "doctor", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=programs.ROOT) as process:
        while process.poll() is None and not list(tmp_path.glob(".dcp_plugin/*.saving/*")):
            pass
        process.send_signal(number)
        _, errors = process.communicate(timeout=HANG)
    if number == signal.SIGINT:
        assert (process.returncode, errors) == (130, b"interrupted\n")
    else:
        doctor(tmp_path, nbytes=SMALL)
    assert os.listdir(tmp_path) == []
