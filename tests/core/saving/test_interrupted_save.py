"""A killed save: the torn directory is never chosen, the earlier checkpoint is whole, the next save cleans up."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin.core.media import lease, medium_of
from dcp_plugin.core.media.disk import commit, posix
from dcp_plugin.core.media.places import WORKSPACE
from dcp_plugin.core.paths import Where
from tests import launch
from tests.compare import assert_same
from tests.dying import die_at, die_when_half_is_written
from tests.layouts import build, train, whole_state
from tests.limits import HANG
from tests.places import is_tidy, save_file
from tests.programs import Program


def _save(path: Path, seed: int, steps: int) -> None:
    model, optimizer = build("fsdp2", seed)
    train(model, optimizer, steps)
    dcp.save({"model": model, "optim": optimizer}, path, step=steps)
    state = whole_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, path.with_suffix(".pt"))


def _save_and_die(path: Path, victims: list[int]) -> None:
    """The victims die when half of their bytes are written, and the other rank is told."""
    model, optimizer = build("fsdp2", seed=5)
    train(model, optimizer, 2)
    if dist.get_rank() in victims:
        die_when_half_is_written()
    with pytest.raises(dcp.RankFailure):
        dcp.save({"model": model, "optim": optimizer}, path, step=99, timeout=20)


def _check(path: Path) -> None:
    model, optimizer = build("fsdp2", seed=7)
    dcp.load({"model": model, "optim": optimizer}, path)
    assert_same(torch.load(path.with_suffix(".pt"), weights_only=True), whole_state(model, optimizer))


@pytest.mark.one_of
@pytest.mark.parametrize("victims", [[0, 1], [0], [1]], ids=["all ranks", "coordinator", "another rank"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new name", "overwrite"])
def test_killed_save_leaves_the_earlier_checkpoint_whole(tmp_path: Path, victims: list[int], overwrite: bool) -> None:
    good = tmp_path / "run" / "step-3"
    launch.run(_save, 2, good, 0, 3)
    torn = good if overwrite else good.with_name("step-99")

    launch.run(_save_and_die, 2, torn, victims, killed=victims)

    assert dcp.latest(tmp_path) == good
    assert dcp.resolve_resume("auto", tmp_path) == good
    launch.run(_check, 2, good)

    if victims != [1]:  # a coordinator that lives has cleaned up itself
        in_flight = [state for state in dcp.list_checkpoints(tmp_path) if not state.committed]
        assert [state.path.suffix for state in in_flight] == [".saving"]
        assert torn.name in in_flight[0].reason
    launch.run(_save, 2, tmp_path / "run" / "step-4", 1, 4)
    assert is_tidy(tmp_path / "run")
    assert [state.committed for state in dcp.list_checkpoints(tmp_path)] == [True, True]
    assert dcp.latest(tmp_path) == tmp_path / "run" / "step-4"


def _die_inside(call: str, path: Path) -> None:
    """Die at a point of the commit itself: just before or just after the rename."""
    model, optimizer = build("plain", seed=5)
    if call == "between two renames":  # as on a file system without exchange
        posix.exchange = lambda *names: False
        die_at(os, "rename", after=True)
    else:
        die_at(posix, "exchange", after=call == "after the exchange")
    dcp.save({"model": model, "optim": optimizer}, path, step=99)


@pytest.mark.parametrize("moment", ["before the exchange", "after the exchange", "between two renames"])
def test_a_commit_that_is_killed_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "last"
    model, optimizer = build("plain")
    dcp.save({"model": model, "optim": optimizer}, path, step=3)

    launch.run(_die_inside, 1, moment, path, killed=[0])

    found = dcp.latest(tmp_path)
    assert found is not None
    step = 99 if moment == "after the exchange" else 3
    assert dcp.inspect(found).step == step
    assert dcp.inspect(path).step == step, "the name that scripts use finds it too"
    assert dcp.verify(found).ok
    dcp.save({"model": model, "optim": optimizer}, tmp_path / "next", step=4)
    assert dcp.inspect(path).step == step
    assert is_tidy(tmp_path)


@pytest.mark.parametrize("replace", ["with a save", "with a link", "a link with a save"])
def test_a_file_system_that_fails_between_two_renames_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: str
) -> None:
    """Where names cannot be exchanged, as on NFS, the old checkpoint is moved aside first."""
    path, other = tmp_path / "last", tmp_path / "other"
    is_link = replace == "a link with a save"
    dcp.save({"n": 3}, tmp_path / "three" if is_link else path, step=3)
    if is_link:
        commit.link(path, tmp_path / "three")
    dcp.save({"n": 4}, other, step=4)
    real_rename = os.rename

    def rename(one: Any, to: Any, **folders: int) -> None:
        if to == path and str(one).endswith(".saving"):
            raise OSError(errno.ESTALE, "Stale file handle")
        real_rename(one, to, **folders)

    monkeypatch.setattr(posix, "exchange", lambda *names: False)
    monkeypatch.setattr(os, "rename", rename)
    attempt = {"with a link": lambda: commit.link(path, other)}
    with pytest.raises(dcp.CheckpointError, match="Stale file handle"):
        attempt.get(replace, lambda: dcp.save({"n": 99}, path, step=99))()
    monkeypatch.undo()
    assert dcp.inspect(path).step == 3 and dcp.verify(path).ok and path.is_symlink() == is_link
    assert is_tidy(tmp_path)


def test_a_directory_that_the_script_makes_anew_does_not_hide_what_a_kill_moved_aside(tmp_path: Path) -> None:
    """``os.makedirs(output_dir, exist_ok=True)`` is what many training scripts begin with."""
    path = tmp_path / "last"
    model, optimizer = build("plain")
    dcp.save({"model": model, "optim": optimizer}, path, step=3)
    launch.run(_die_inside, 1, "between two renames", path, killed=[0])
    path.mkdir()
    (path / "args.json").write_text("{}")
    assert dcp.inspect(path).step == 3
    dcp.save({"n": 1}, tmp_path / "next")
    assert dcp.inspect(path).step == 3
    assert dcp.verify(path).ok
    assert (path / "args.json").exists()


def test_damage_of_what_a_kill_moved_aside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "last"
    dcp.save({"t": torch.ones(1000)}, path)
    launch.run(_die_inside, 1, "between two renames", path, killed=[0])
    for file in (tmp_path / WORKSPACE).glob("*.aside/*.distcp"):
        os.truncate(file, 1)
    with pytest.raises(dcp.CheckpointCorrupt, match="truncated"):
        dcp.load({"t": torch.zeros(1000)}, path)


def test_the_working_directory_is_not_replaced_under_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dcp.SaveFailed, match="working directory"):
        dcp.save({"n": 1}, ".")


def test_a_living_save_is_not_swept_by_another(tmp_path: Path) -> None:
    reservation = commit.reserve(tmp_path / "mine")
    launch.run(dcp.save, 1, {"n": 1}, tmp_path / "other")
    assert reservation.directory.is_dir()
    commit.discard(reservation)
    assert is_tidy(tmp_path)


def test_saving_over_something_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("three years")
    with pytest.raises(dcp.SaveFailed, match="other things"):
        dcp.save({"n": 1}, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "three years"


def test_both_ways_out_that_the_refusal_names_keep_the_files(place: Where) -> None:
    save_file({"position": 3}, place / "step-1" / "dataloader" / "rank_0.pt")
    with pytest.raises(dcp.SaveFailed, match=r"\(dataloader\).* Save first .* such as .*/step-1/checkpoint\."):
        dcp.save({"n": 1}, place / "step-1")
    dcp.save({"n": 1}, place / "step-1" / "checkpoint")
    for n in (1, 2):
        dcp.save({"n": n}, place / "step-2")
        save_file({"position": n}, place / "step-2" / "dataloader" / f"rank_{n}.pt")
    dcp.save({"n": 3}, place / "step-2")
    for checkpoint, names in (("step-1", ["rank_0.pt"]), ("step-2", ["rank_1.pt", "rank_2.pt"])):
        assert [one.path.name for one in medium_of(place).entries(place / checkpoint / "dataloader")] == names


def test_files_that_somebody_added_to_a_checkpoint_survive_an_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "last"
    dcp.save({"n": 1}, path)
    (path / "notes.txt").write_text("keep me")
    dcp.save({"n": 2}, path)
    assert (path / "notes.txt").read_text() == "keep me"
    state = {"n": 0}
    dcp.load(state, path)
    assert state["n"] == 2


def test_a_torn_stock_directory_is_listed_but_never_latest(tmp_path: Path) -> None:
    dcp.save({"n": 1}, tmp_path / "good")
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    assert dcp.latest(tmp_path) == tmp_path / "good"
    assert {state.path: state.committed for state in dcp.list_checkpoints(tmp_path)} == {
        torn: False,
        tmp_path / "good": True,
    }
    with pytest.raises(dcp.CheckpointIncomplete, match="never committed"):
        dcp.load({"n": 0}, torn)
    with pytest.raises(dcp.CheckpointIncomplete, match="resume=auto"):
        dcp.resolve_resume(torn, tmp_path)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_save_that_another_node_takes_for_dead_fails_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """The other node shares no locks with this one, and is itself stopped in the middle of the deletion."""
    path = tmp_path / "ck"
    dcp.save({"w": torch.zeros(1000)}, path, step=1)
    publish, sync = commit.publish, posix.Folder.sync

    def be_swept_and_publish(reservation: Any) -> None:
        def sweep_once(folder: posix.Folder) -> None:  # when the directory is known to be there
            monkeypatch.setattr(posix.Folder, "sync", sync)
            sync(folder)
            pid = os.fork()
            if pid == 0:
                _sweep_as_another_node(folder.path.parent)
            os.waitpid(pid, 0)

        monkeypatch.setattr(posix.Folder, "sync", sweep_once)
        publish(reservation)

    monkeypatch.setattr(commit, "publish", be_swept_and_publish)
    if not exchange:
        monkeypatch.setattr(posix, "exchange", lambda *names: False)
    with pytest.raises(dcp.SaveFailed, match="No such file or directory"):
        dcp.save({"w": torch.ones(1000)}, path, step=2)
    assert dcp.verify(path).ok and dcp.inspect(path).step == 1
    assert is_tidy(tmp_path)


def _sweep_as_another_node(workspace: Path) -> None:
    def delete_the_data(folder: posix.Folder, name: str) -> bool:
        for file in (folder.path / name).glob("*.distcp"):
            file.unlink()
        return False

    try:
        commit._held.clear()
        posix.lock = lambda folder, name, create=True: folder.open(name, os.O_RDWR)
        posix.Folder.delete = delete_the_data  # type: ignore[method-assign]
        commit.sweep(workspace)
    finally:
        os._exit(0)


@pytest.mark.parametrize("other", ["boot", "mount"])
def test_a_suspended_save_whose_locks_are_not_shared_is_kept_for_its_lease_and_then_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Lustre with ``localflock``, NFS with ``nolock``, or a mount for each container: all locks succeed."""
    program = """
        import sys, torch, dcp_plugin as dcp
        from dcp_plugin.core.media.disk import commit

        publish = commit.publish

        def wait_and_publish(reservation):
            print("ready", flush=True)
            open(sys.argv[2]).read()
            publish(reservation)

        commit.publish = wait_and_publish
        dcp.save({"w": torch.ones(1000)}, sys.argv[1], step=2)
    """
    path, gate = tmp_path / "run" / "ck", tmp_path / "gate"
    dcp.save({"w": torch.zeros(1000)}, path, step=1)
    os.mkfifo(gate)
    owner = Program("-c", program, path, gate)
    assert owner.stdout.readline() == "ready\n"
    owner.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(fcntl, "lockf", lambda *args: None)
    monkeypatch.setattr(posix, "mount_of", lambda fd: "another")
    if other == "boot":
        monkeypatch.setattr(posix, "machine", lambda: "another")
    (record,) = path.parent.glob(".dcp_plugin/*.json")

    dcp.save({"n": 1}, path.with_name("beside"))
    assert record.exists() and record.with_suffix(".saving").is_dir()
    os.utime(record, (0, 0))  # the lease is over
    dcp.save({"n": 2}, path.with_name("beside"))
    assert is_tidy(path.parent)

    owner.send_signal(signal.SIGCONT)
    gate.write_text("open")
    assert "SaveFailed" in owner.communicate()[1]
    assert dcp.verify(path).ok and dcp.inspect(path).step == 1
    assert is_tidy(path.parent)


def test_the_record_of_a_save_in_flight_is_touched_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utime, touches = os.utime, threading.Semaphore(0)

    def touch(*args: Any, **options: Any) -> None:
        utime(*args, **options)
        touches.release()

    monkeypatch.setattr(lease, "_BEAT", 0.001)
    monkeypatch.setattr(os, "utime", touch)
    reservation = commit.reserve(tmp_path / "ck")
    record = reservation.directory.with_suffix(".json")
    utime(record, (0, 0))
    while record.stat().st_mtime == 0:
        assert touches.acquire(timeout=HANG)
    commit.discard(reservation)
