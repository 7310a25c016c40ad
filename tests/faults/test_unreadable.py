"""Entries beside checkpoints that cannot be read: a run never starts afresh because of an error."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dcp_plugin as dcp
from dcp_plugin.checkpointer import Internals
from dcp_plugin.core.errors import unreadable
from dcp_plugin.core.runs import catalog, scan
from dcp_plugin.core.runs import deletion as deletion
from dcp_plugin.tools.cli.app import app
from tests.faults.victims import Fault, Victims, disarm
from tests.launch import on_ranks
from tests.messages import logged
from tests.places import names_in
from tests.users import as_another_user


class Clock:
    """Time that only passes while a caller sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


def _stopped_clock() -> Clock:
    clock = Clock()
    scan.monotonic, scan.sleep = clock.monotonic, clock.sleep
    return clock


def _save(path: Path, step: int, **options: Any) -> Path:
    dcp.save({"w": torch.full((4,), float(step)), "step": step}, path, step=step, **options)
    return path


def _start(root: Path) -> str:
    return str(dcp.resume_or_init({"w": torch.zeros(4), "step": 0}, root))


LOOKS = {
    "latest": dcp.latest,
    "resolve_resume": lambda root: dcp.resolve_resume("auto", root),
    "resume_or_init": _start,
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_run_that_belongs_to_another_user_is_no_fresh_start(shared: Path, look: str) -> None:
    _save(shared / "run" / "step-1", 1)
    (shared / "run").chmod(0o700)
    told = as_another_user(LOOKS[look], shared / "run")
    assert told.startswith(f"CheckpointUnreadable: {shared / 'run'} cannot be read: [Errno {errno.EACCES}]"), told


@pytest.mark.parametrize("look", LOOKS)
def test_a_version_that_cannot_be_read_is_no_fresh_start(shared: Path, look: str) -> None:
    _save(shared / "run" / "version_0" / "step-1", 1)
    (shared / "run" / "version_0").chmod(0o700)
    told = as_another_user(LOOKS[look], shared / "run")
    assert "CheckpointUnreadable" in told and "version_0" in told and "Permission denied" in told
    _save(shared / "run" / "version_1" / "step-2", 2)
    told = as_another_user(LOOKS[look], shared / "run")
    assert "CheckpointUnreadable" in told, "a complete one elsewhere may be an older one"
    _save(shared / "run" / "step-3", 3)
    told = as_another_user(LOOKS[look], shared / "run")
    assert "step-3" in told and "CheckpointUnreadable" not in told


@pytest.mark.parametrize("look", LOOKS)
def test_a_volume_with_lost_and_found_starts(shared: Path, look: str) -> None:
    (shared / "lost+found").mkdir(mode=0o700)
    told = as_another_user(LOOKS[look], shared)
    assert "None" in told or "starts fresh" in told


def test_a_framework_checkpoint_that_cannot_be_read_is_no_fresh_start(shared: Path) -> None:
    torch.save({"pytorch-lightning_version": "2.6.0", "optimizer_states": [{}], "state_dict": {}}, shared / "last.ckpt")
    (shared / "last.ckpt").chmod(0o600)
    told = as_another_user(dcp.latest, shared)
    assert "CheckpointUnreadable" in told and "last.ckpt" in told


def test_what_is_passed_over_is_named_in_one_warning(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    _save(shared / "step-1", 1)
    for name in ("a", "b"):
        (shared / name).mkdir(mode=0o700)
    told = as_another_user(lambda: _warnings_of(dcp.latest, shared))
    assert told.count("\n") == 0 and f"{shared / 'a'} " in told and f"{shared / 'b'} " in told


def _warnings_of(look: Callable[[Path], Any], root: Path) -> str:
    said = logged()
    assert look(root) is not None
    return "\n".join(said)


def test_a_link_to_itself_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for step in range(4):
        dcp.save({"step": step}, tmp_path / f"step-{step}", step=step, keep_last=2)
    assert dcp.latest(tmp_path) == dcp.resume_or_init({}, tmp_path).path == tmp_path / "step-3"
    assert [state.step for state in dcp.list_checkpoints(tmp_path)] == [2, 3]
    assert [pruned.step for pruned in dcp.prune(tmp_path, keep_last=1).deleted] == [2]
    assert caplog.text.count(f"passing over {tmp_path / 'loop'}: Too many levels of symbolic links") == 1
    with pytest.raises(dcp.CheckpointUnreadable, match="loop cannot be read"):
        dcp.latest(tmp_path / "loop")


def test_a_search_waits_ten_seconds_for_all_that_it_cannot_read(shared: Path) -> None:
    _save(shared / "run" / "step-1", 1)
    _save(shared / "run" / "step-2", 2)
    _save(shared / "other" / "step-3", 3)
    for name in ("a", "b"):
        (shared / "run" / name).mkdir(mode=0o700)
    assert as_another_user(_latest_while_step_2_fails, shared) == "step-3 after 10.0 s"


def _latest_while_step_2_fails(root: Path) -> str:
    clock, damage_of = _stopped_clock(), catalog._damage_of

    def fail(path: Path) -> str:
        if path.name == "step-2":
            error = OSError(errno.EIO, os.strerror(errno.EIO))
            raise unreadable(f"{path} cannot be read", error) from error
        return damage_of(path)

    catalog._damage_of = fail  # type: ignore[assignment]
    return f"{Path(str(dcp.latest(root))).name} after {clock.now} s"


ERRORS = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN]


def _look_while_it_fails(root: Path, look: str, ends: bool) -> tuple[str, float]:
    clock = _stopped_clock()
    if ends:
        clock.on_sleep = disarm
    try:
        return str(LOOKS[look](root)), clock.now
    except dcp.CheckpointError as error:
        return f"{type(error).__name__}: {error}", clock.now


@pytest.mark.one_of
@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize("look", LOOKS)
def test_an_error_that_passes_within_ten_seconds_is_waited_for(
    victims: Victims, tmp_path: Path, look: str, code: int
) -> None:
    _save(tmp_path / "step-1", 1)
    for calls in (("list",), ("open",), ("read",), ("stat",)):
        fault = Fault("fail", code, calls=calls)
        outcome = victims.run(_look_while_it_fails, tmp_path, look, True, below=tmp_path, faults=[fault])
        assert outcome.error is None, (calls, outcome.traceback)
        told, waited = outcome.result
        assert "step-1" in told and "Unreadable" not in told, (calls, told)
        assert 0 < waited < 10, calls


@pytest.mark.one_of("code")
@pytest.mark.parametrize("code", ERRORS)
@pytest.mark.parametrize("look", LOOKS)
def test_an_error_that_stays_is_raised_after_ten_seconds(
    victims: Victims, tmp_path: Path, look: str, code: int
) -> None:
    _save(tmp_path / "step-1", 1)
    for calls in (("list",), ("open",), ("read",)):
        fault = Fault("fail", code, calls=calls)
        outcome = victims.run(_look_while_it_fails, tmp_path, look, False, below=tmp_path, faults=[fault])
        assert outcome.error is None, (calls, outcome.traceback)
        told, waited = outcome.result
        assert told.startswith("CheckpointUnreadable") and str(tmp_path) in told, (calls, told)
        assert os.strerror(code) in told
        assert 10 <= waited < 12, calls


def test_a_stale_handle_of_a_deleted_folder_is_a_deletion(victims: Victims, tmp_path: Path) -> None:
    gone = _save(tmp_path / "step-2", 2)
    outcome = victims.run(
        _delete_while_it_is_stale, tmp_path, gone, below=tmp_path, faults=[Fault("fail", errno.ESTALE, calls=("list",))]
    )
    assert outcome.result == "None", outcome.traceback


def _delete_while_it_is_stale(root: Path, gone: Path) -> str:
    def delete() -> None:
        disarm()
        shutil.rmtree(gone, ignore_errors=True)

    _stopped_clock().on_sleep = delete
    return str(dcp.latest(root))


@on_ranks(2)
def test_every_rank_raises_what_rank_0_cannot_read(tmp_path: Path) -> None:
    ours = dcp.Checkpointer()
    (tmp_path / "run").mkdir(exist_ok=True)
    if Internals(ours).ranks.rank == 0:
        scan.Scan._state = _fail  # type: ignore[method-assign]
        _stopped_clock()
    with pytest.raises(dcp.CheckpointUnreadable, match=r"run cannot be read: \[Errno 5\] Input/output error"):
        dcp.resume_or_init({"step": 0}, tmp_path / "run", checkpointer=ours)
    ours.close()


def _fail(self: scan.Scan, directory: Path) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory))


def test_retention_reads_again_after_an_error_that_may_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        _save(tmp_path / f"step-{step}", step)
    clock, failing, read_summary = Clock(), {"step-2"}, deletion.read_summary

    def read(path: Path) -> Any:
        if path.name in failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read_summary(path)

    clock.on_sleep = failing.clear
    monkeypatch.setattr(deletion, "read_summary", read)
    monkeypatch.setattr(scan, "monotonic", clock.monotonic)
    monkeypatch.setattr(scan, "sleep", clock.sleep)
    _save(tmp_path / "step-3", 3, keep_last=1)
    assert names_in(tmp_path) == ["step-3"]


def test_a_copy_of_a_run_names_a_folder_that_it_cannot_read(shared: Path) -> None:
    _save(shared / "run" / "step-1", 1)
    _save(shared / "run" / "old" / "step-0", 0)
    copied = _copy_by_command(shared / "run", shared / "of root")  # which imports what the other user may not read
    assert copied.startswith("0 ")
    (shared / "run" / "old").chmod(0o700)
    told = as_another_user(_copy_by_command, shared / "run", shared / "copy")
    assert told.startswith("3 ") and f"NOT COPIED: {shared / 'run' / 'old'} cannot be read" in told
    assert names_in(shared / "copy") == ["step-1"]


def _copy_by_command(source: Path, target: Path) -> str:
    result = CliRunner().invoke(app, ["copy", str(source), str(target)])
    return f"{result.exit_code} {result.output}"


def test_what_is_newer_than_an_entry_that_cannot_be_read_is_pruned(shared: Path) -> None:
    (shared / "private").mkdir(mode=0o700)
    os.utime(shared / "private", (1.0, 1.0))
    told = as_another_user(lambda: [_save(shared / f"step-{n}", n, keep_last=1) for n in range(3)])
    assert "Error" not in told
    assert names_in(shared) == ["private", "step-2"]
