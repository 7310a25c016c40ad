"""Which checkpoint is the newest, which one to resume from, and which ones go."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin import lifecycle
from dcp_plugin.storage import commit
from tests import launch


def _save(path: Path, n: int, **options: object) -> Path:
    dcp.save({"n": n}, path, step=n, **options)
    return path


def test_latest_is_the_one_published_last_wherever_it_lies(tmp_path: Path) -> None:
    _save(tmp_path / "logs" / "version_1" / "checkpoints" / "step=9.ckpt", 9)
    newest = _save(tmp_path / "logs" / "version_0" / "checkpoints" / "step=2.ckpt", 2)
    assert dcp.latest(tmp_path) == newest
    os.utime(tmp_path / "logs" / "version_1" / "checkpoints" / "step=9.ckpt")  # touched or copied: no change
    assert dcp.latest(tmp_path) == newest
    assert dcp.latest(newest) == newest, "a checkpoint is its own latest"
    assert [state.step for state in dcp.list_checkpoints(tmp_path)] == [9, 2]


def test_latest_of_nothing_is_none(tmp_path: Path) -> None:
    assert dcp.latest(tmp_path) is None
    assert dcp.latest(tmp_path / "not there") is None


def test_a_damaged_summary_is_passed_over_with_its_reason(tmp_path: Path) -> None:
    good = _save(tmp_path / "a", 1)
    (_save(tmp_path / "b", 2) / "dcp_plugin.json").write_text("{")
    assert dcp.latest(tmp_path) == good
    assert "damaged" in next(state.reason for state in dcp.list_checkpoints(tmp_path) if not state.committed)


@pytest.mark.parametrize("name", [".metadata", "dcp_plugin.json", "dcp_plugin.index"])
def test_a_copy_that_misses_one_file_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    path = _save(tmp_path / "ck", 1)
    (path / name).unlink()
    assert dcp.latest(tmp_path) is None
    with pytest.raises(dcp.CheckpointIncomplete, match="latest"):
        dcp.load({"n": 0}, path)


def test_resume_modes(tmp_path: Path) -> None:
    assert dcp.resolve_resume("auto", tmp_path) is None
    with pytest.raises(dcp.CheckpointNotFound, match="resume=must"):
        dcp.resolve_resume("must", tmp_path)
    path = _save(tmp_path / "ck", 1)
    assert dcp.resolve_resume("auto", tmp_path) == path
    assert dcp.resolve_resume("must", tmp_path) == path
    assert dcp.resolve_resume("never", tmp_path) is None
    assert dcp.resolve_resume(path, "elsewhere") == path
    with pytest.raises(dcp.CheckpointNotFound, match="does not exist"):
        dcp.resolve_resume(tmp_path / "typo", tmp_path)


def test_must_names_what_was_passed_over(tmp_path: Path) -> None:
    (_save(tmp_path / "ck", 1) / ".metadata").unlink()
    with pytest.raises(dcp.CheckpointNotFound, match=r"Passed over: .*ck"):
        dcp.resolve_resume("must", tmp_path)


def test_a_plain_file_can_be_named_to_resume_from(tmp_path: Path) -> None:
    (tmp_path / "single.ckpt").write_bytes(b"a Lightning file")
    assert dcp.resolve_resume(tmp_path / "single.ckpt", tmp_path) == tmp_path / "single.ckpt"


def test_keep_last_deletes_the_oldest_of_ours_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / ".metadata").write_bytes(b"")
    for n in range(5):
        _save(tmp_path / f"step-{n}", n, keep_last=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["foreign", "notes", "step-3", "step-4"]


def test_remove_takes_directories_files_and_links(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck", 1)
    (tmp_path / "last").symlink_to(path)
    ours = dcp.Checkpointer()
    ours.remove(tmp_path / "last")
    assert path.is_dir()
    ours.remove(path)
    ours.remove(path)
    assert not list(tmp_path.iterdir())


def test_a_save_over_a_file_or_a_link_replaces_just_that(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck", 1)
    (tmp_path / "link").symlink_to(path)
    torch.save({"old": 1}, tmp_path / "single.ckpt")
    _save(tmp_path / "link", 2)
    _save(tmp_path / "single.ckpt", 3)
    assert [dcp.inspect(tmp_path / name).step for name in ("ck", "link", "single.ckpt")] == [1, 2, 3]


def test_no_name_in_the_workspace_repeats_the_checkpoints(tmp_path: Path) -> None:
    reservation = commit.reserve(tmp_path / "hpc_ckpt_7.ckpt")
    assert not any("ckpt" in name for name in os.listdir(tmp_path / commit.WORKSPACE))
    assert json.loads(reservation.record.read_text())["target"] == "hpc_ckpt_7.ckpt"
    commit.discard(reservation)


def test_a_torn_record_is_swept(tmp_path: Path) -> None:
    workspace = tmp_path / commit.WORKSPACE
    (workspace / "0123.saving").mkdir(parents=True)
    (workspace / "0123.json").write_bytes(b'{"targ')
    _save(tmp_path / "ck", 1)
    assert not workspace.exists()


def test_latest_passes_over_a_checkpoint_whose_copy_was_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = _save(tmp_path / "a", 1)
    file = next(_save(tmp_path / "b", 2).glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert dcp.latest(tmp_path) == good
    assert "truncated" in caplog.text


def test_what_is_not_there_is_a_file_not_found(tmp_path: Path) -> None:
    for call in (dcp.inspect, lambda path: dcp.load({}, path), lambda path: dcp.resolve_resume(path, tmp_path)):
        with pytest.raises(FileNotFoundError, match="nowhere") as caught:
            call(tmp_path / "nowhere")
        assert isinstance(caught.value, dcp.CheckpointNotFound)


def test_a_url_is_refused_and_makes_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: dcp.save({"n": 1}, "s3://bucket/ck"), lambda: dcp.latest("s3://bucket")):
        with pytest.raises(ValueError, match="URL"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_clock_that_was_set_back_neither_deletes_the_new_nor_prefers_the_old(tmp_path: Path) -> None:
    old = _save(tmp_path / "step-1", 1)
    summary = json.loads((old / "dcp_plugin.json").read_text())
    (old / "dcp_plugin.json").write_text(json.dumps({**summary, "time": summary["time"] + 3600}))
    new = _save(tmp_path / "step-2", 2)
    assert dcp.latest(tmp_path) == new
    newest = _save(tmp_path / "step-3", 3, keep_last=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-3"]
    assert dcp.latest(tmp_path) == newest


def test_a_flat_state_of_many_keys_has_a_small_summary(tmp_path: Path) -> None:
    dcp.save({f"a.rather.long.name.of.a.parameter.{n}": n for n in range(3000)}, tmp_path / "ck")
    assert (tmp_path / "ck" / "dcp_plugin.json").stat().st_size < 2000
    assert dcp.latest(tmp_path) == tmp_path / "ck"


def test_looking_for_the_latest_does_not_unlock_ones_own_save(tmp_path: Path) -> None:
    reservation = commit.reserve(tmp_path / "mine")
    assert dcp.latest(tmp_path) is None
    assert "mine" in dcp.list_checkpoints(tmp_path)[0].reason
    assert commit.locate(tmp_path / "mine") == tmp_path / "mine"
    launch.run(_save, 1, tmp_path / "other", 1)
    assert reservation.directory.is_dir()
    commit.discard(reservation)


def test_a_file_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(dcp.SaveFailed, match="no checkpoint"):
        _save(tmp_path / "notes.txt", 1)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_link_takes_the_place_of_a_link_and_of_a_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        dcp.save({"x": step}, tmp_path / str(step), step=step)
    for step in (1, 2):
        lifecycle.link(tmp_path / "last", tmp_path / str(step))
        assert dcp.inspect(tmp_path / "last").step == step
    lifecycle.link(tmp_path / "3", tmp_path / "1")
    assert dcp.inspect(tmp_path / "3").step == 1
    assert os.readlink(tmp_path / "3") == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "last"]


@pytest.mark.parametrize("before", ["link", "checkpoint"])
def test_a_process_killed_before_it_has_linked_leaves_what_was_there(tmp_path: Path, before: str) -> None:
    for step in (1, 2):
        dcp.save({"x": step}, tmp_path / str(step), step=step)
    if before == "link":
        lifecycle.link(tmp_path / "last", tmp_path / "1")
    else:
        dcp.save({"x": 1}, tmp_path / "last", step=1)
    (outcome,) = launch.outcomes_of(_link_and_die, 1, tmp_path)
    assert outcome.exit_code == -signal.SIGKILL
    assert dcp.inspect(tmp_path / "last").step == 1
    dcp.save({"x": 3}, tmp_path / "3", step=3)
    assert not (tmp_path / ".dcp_plugin").exists(), "the next save tidies up"


def _link_and_die(root: Path) -> None:
    from dcp_plugin.storage import files

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    files.exchange = die  # type: ignore[assignment]
    os.replace = die  # type: ignore[assignment]
    lifecycle.link(root / "last", root / "2")
