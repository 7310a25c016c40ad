"""``prune``: what it keeps whatever the rules say, what goes, and what others do meanwhile."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.media.objects.client import PART, client_of
from dcp_plugin.core.paths import ObjectPath, Where, as_path
from dcp_plugin.core.retention import NEWEST
from dcp_plugin.core.runs import figures
from tests.core.runs.test_listing import interrupt_a_save_to
from tests.foreign import LIGHTNING
from tests.object_server import Bucket
from tests.places import delete_file, save_file, stock_writer


def _save(root: Where, *steps: int) -> None:
    for step in steps:
        dcp.save({"n": step, "w": torch.full((4,), float(step))}, root / f"step-{step}", step=step)


def _there(root: Where) -> list[str]:
    return [one.path.name for one in medium_of(root).entries(root) if one.path.name.startswith("step")]


def test_rules_keep_and_the_rest_goes_in_each_run_for_itself(place: Where) -> None:
    _save(place / "a", 1, 2, 3, 4, 5)
    _save(place / "b", 7)
    planned = dcp.prune(place, keep_last=1, keep_every=2, dry_run=True)
    assert _there(place / "a") == ["step-1", "step-2", "step-3", "step-4", "step-5"]
    told: list[tuple[int, int]] = []
    report = dcp.prune(place, keep_last=1, keep_every=2, progress=lambda *done: told.append(done))
    assert (planned.checkpoints, planned.bytes_freed) == (report.checkpoints, report.bytes_freed)
    assert [one.path for one in report.deleted] == [place / "a" / "step-1", place / "a" / "step-3"]
    assert report.bytes_freed == sum(one.nbytes for one in report.deleted) == told[-1][0] == told[-1][1]
    assert {one.path.name: one.reasons for one in report.kept} == {
        "step-2": ["step 2 is a multiple of 2"],
        "step-4": ["step 4 is a multiple of 2"],
        "step-5": ["among the last 1", "the newest of its run"],
        "step-7": ["among the last 1", "the newest of its run"],
    }
    assert _there(place / "a") == ["step-2", "step-4", "step-5"] and _there(place / "b") == ["step-7"]
    assert "deleted 2 of 6 checkpoint(s)" in str(report) and "would delete 2 of 6" in str(planned)
    assert not dcp.prune(place, keep_last=3).deleted and not dcp.prune(place, younger_than=1e6).deleted
    assert [one.path.name for one in dcp.prune(place, younger_than=1e-9).deleted] == ["step-2", "step-4"]


def _listed(name: str, step: int | None, **metrics: float) -> dcp.tools.CheckpointState:
    return dcp.tools.CheckpointState(Path(name), True, step=step, metrics=metrics)


def test_the_best_are_kept_and_what_no_rule_can_judge() -> None:
    listed = [_listed("a", 1, loss=0.5, accuracy=0.1), _listed("b", 2, loss=0.3, accuracy=0.2), _listed("c", None)]
    listed += [_listed("d", 4, loss=0.3), _listed("e", 5, loss=float("nan"))]

    def kept(**rules: Any) -> str:
        why = dcp.Retention(**rules).reasons(listed)
        return "".join(path.name for path, reasons in why.items() if reasons not in ([], [NEWEST]))

    assert kept(best=("loss", "min", 1)) == "cd", "of two that are as good, the newer"
    assert kept(best=("loss", "min", 9)) == "abcd", "what is no number is never the best"
    assert kept(best=("loss", "max", 1)) == "ac"
    assert kept(best=("accuracy", "max", 1)) == "bcde"
    assert kept(every_steps=2) == "bcd"
    assert kept(every_steps=2, best=("loss", "max", 1)) == "abcd"
    assert kept(newest=1, best=("loss", "min", 1)) == "de", "newest judges what has no metric"
    assert kept(younger_than=1e12) == "abcde" and kept(younger_than=1) == ""


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({}, "say what to keep"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"keep_every": -5}, "keep_every=-5"),
        ({"best": "loss", "keep_best": 0}, "keep_best=0"),
        ({"keep_last": 1, "mode": "lowest"}, "mode='lowest'"),
        ({"keep_last": 1, "best": "los"}, "no checkpoint below .* has a metric 'los'"),
    ],
)
def test_rules_that_make_no_sense_delete_nothing(tmp_path: Path, rules: dict[str, Any], said: str) -> None:
    _save(tmp_path, 1, 2)
    with pytest.raises(ValueError, match=said):
        dcp.prune(tmp_path, **rules)
    assert _there(tmp_path) == ["step-1", "step-2"]


def test_what_is_damaged_torn_or_of_others_stays_and_is_told(place: Where) -> None:
    _save(place, 1, 2, 3, 4, 5)
    delete_file(place / "step-1" / ".metadata")
    medium_of(place).note(place / "step-2" / "dcp_plugin.damaged", b"found damaged", only_new=True)
    stock.save({"w": torch.ones(3)}, storage_writer=stock_writer(place / "step-stock"))
    save_file(LIGHTNING, place / "epoch=1.ckpt")
    report = dcp.prune(place, keep_last=1)
    assert [one.path.name for one in report.deleted] == ["step-3", "step-4"]
    why = {one.path.name: one.reasons[0] for one in report.kept}
    assert why["step-stock"] == "saved by stock DCP, not by this package"
    assert why["epoch=1.ckpt"] == "saved by Lightning, not by this package"
    assert why["step-1"].startswith("it is being saved, or its save was interrupted")
    assert why["step-2"].startswith("damaged: it is quarantined")
    report = dcp.prune(place, keep_last=1, damaged=True)
    assert [one.path.name for one in report.deleted] == ["step-2"]
    assert _there(place) == ["step-1", "step-5", "step-stock"]
    if isinstance(place, Path):
        os.truncate(next((place / "step-5").glob("*.distcp")), 10)
    else:
        medium_of(place).note(place / "step-5" / "dcp_plugin.damaged", b"found damaged", only_new=True)
    assert not dcp.prune(place, keep_last=1).deleted


def test_the_newest_whole_one_stays_although_a_damaged_one_is_newer(tmp_path: Path) -> None:
    _save(tmp_path, 10, 15, 20)
    os.truncate(next((tmp_path / "step-20").glob("*.distcp")), 10)
    report = dcp.prune(tmp_path, keep_every=10)
    assert not report.deleted
    assert {one.path.name: one.reasons[0].partition(":")[0] for one in report.kept} == {
        "step-10": "step 10 is a multiple of 10", "step-15": "the newest of its run", "step-20": "damaged"
    }  # fmt: skip


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    _save(tmp_path / "run" / "checkpoints", 1, 2, 3, 4, 5)
    (tmp_path / "run" / "checkpoints" / "last").symlink_to("step-1")
    (tmp_path / "run" / "best").symlink_to("checkpoints/step-2")
    (tmp_path / "run" / "index").symlink_to(tmp_path / "run" / "checkpoints" / "step-3" / "dcp_plugin.index")
    (tmp_path / "run" / "loop").symlink_to("loop")
    dcp.prune(tmp_path / "run" / "checkpoints", keep_last=1)
    assert _there(tmp_path / "run" / "checkpoints") == ["step-1", "step-2", "step-3", "step-5"]


def test_what_is_freed_is_what_nothing_else_shares(tmp_path: Path) -> None:
    state: dict[str, Any] = {"frozen": torch.nn.Parameter(torch.ones(1 << 19), requires_grad=False)}
    with closing(dcp.Checkpointer()) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(state | {"n": step}, tmp_path / f"step-{step}", step=step)
    before = _on_disk(tmp_path)
    report = dcp.prune(tmp_path, keep_last=1)
    assert report.bytes_freed == before - _on_disk(tmp_path)
    assert report.bytes_freed < (1 << 22) < sum(one.nbytes for one in report.deleted)


def _on_disk(root: Path) -> int:
    found = [file.stat() for file in root.glob("step-*/*")]
    return sum({(one.st_dev, one.st_ino): one.st_size for one in found}.values())


def test_what_interrupted_saves_have_left_goes_and_what_lives_stays(place: Where) -> None:
    _save(place, 1)
    alive = medium_of(place).reserve(place / "step-3")
    interrupt_a_save_to(place / "step-2")
    planned = dcp.prune(place, keep_last=1, dry_run=True)
    report = dcp.prune(place, keep_last=1)
    (left,) = report.leftovers
    assert planned.leftovers == [left]
    assert left.deleted and left.what == f"an interrupted save of {place / 'step-2'}"
    assert left.nbytes and report.bytes_freed == left.nbytes == planned.bytes_freed
    assert [one.path for one in medium_of(place).entries(place) if one.path.name == "step-2"] == []
    names = [one.path.name for one in medium_of(place).entries(place / ".dcp_plugin")]
    assert {name.partition(".")[0] for name in names if not name.endswith(figures.SUFFIX)} == {alive.token}
    medium_of(place).discard(alive)
    assert not dcp.prune(place, keep_last=1).leftovers


def test_a_checkpoint_that_was_moved_aside_gets_its_name_back(tmp_path: Path) -> None:
    """Its save died between two renames, where names cannot be exchanged."""
    _save(tmp_path, 1, 2)
    (tmp_path / "step-2").rename(tmp_path / ".dcp_plugin.aside")
    (tmp_path / ".dcp_plugin").mkdir(exist_ok=True)
    (tmp_path / ".dcp_plugin.aside").rename(tmp_path / ".dcp_plugin" / "0123456789abcdef.aside")
    (tmp_path / ".dcp_plugin" / "0123456789abcdef.json").write_text('{"target": "step-2"}')
    planned = dcp.prune(tmp_path, keep_last=9, dry_run=True)
    assert [one.what.partition(": ")[2] for one in planned.leftovers] == ["it gets its name back"]
    assert not (tmp_path / "step-2").exists()
    report = dcp.prune(tmp_path, keep_last=9)
    assert report.leftovers == planned.leftovers and report.bytes_freed == 0
    assert dcp.latest(tmp_path) == tmp_path / "step-2"


def test_uploads_that_nobody_will_complete_go_and_others_stay(bucket: Bucket) -> None:
    root = as_path(bucket.url)
    assert isinstance(root, ObjectPath)
    run = root / "run"
    _save(run, 1)
    alive = medium_of(run).reserve(run / "step-2")
    tokens = {"dead": f"{'0' * 12}deadbeef", "alive": alive.token}
    keys = {name: f"run/step-2/__0_0-{token}.distcp" for name, token in tokens.items()} | {"other": "run/data.bin"}
    for key in keys.values():
        upload = client_of(root).create(key, 2 * PART, 1)
        upload.write(bytes(PART))
        upload.write(bytes(PART))
    while len(bucket.unfinished_uploads()) < 3:
        pass
    planned = dcp.prune(run, keep_last=1, dry_run=True)
    assert [(str(one.path), one.nbytes) for one in planned.leftovers] == [(f"{bucket.url}/{keys['dead']}", None)]
    assert dcp.prune(run, keep_last=1).leftovers == planned.leftovers
    assert sorted(bucket.unfinished_uploads()) == sorted([keys["alive"], keys["other"]])
    medium_of(run).discard(alive)


def test_what_is_saved_again_meanwhile_stays(place: Where) -> None:
    """As by a run that saves under the same names."""
    _save(place, 1, 2, 3)

    def save_again(done: int, total: int) -> None:
        if dcp.inspect(place / "step-1").step == 1:
            dcp.save({"n": 9}, place / "step-1", step=9)

    report = dcp.prune(place, keep_last=1, progress=save_again)
    assert [one.path.name for one in report.deleted] == ["step-2"]
    assert report.kept[0].reasons == ["it was saved again meanwhile"] and not report.failed
    assert dcp.latest(place) == place / "step-1"
    assert dcp.verify(place / "step-1").ok


def test_what_cannot_be_deleted_is_told_and_the_rest_goes(tmp_path: Path) -> None:
    _save(tmp_path / "run", 4, 5)
    _save(tmp_path / "sealed", 6, 7)
    shutil.rmtree(tmp_path / "sealed" / ".dcp_plugin")
    (tmp_path / "sealed" / ".dcp_plugin").write_text("in the way of what is to be deleted")
    report = dcp.prune(tmp_path, keep_last=1)
    (failed,) = report.failed
    assert failed.path == tmp_path / "sealed" / "step-6" and not failed.deleted and "cannot delete" in failed.reasons[0]
    assert [one.path.name for one in report.deleted] == ["step-4"]
    assert report.bytes_freed == report.deleted[0].nbytes and "1 could not be deleted" in str(report)
    assert dcp.verify(failed.path).ok


def test_a_run_saves_and_deletes_while_others_prune(tmp_path: Path) -> None:
    """Every save succeeds, the newest is always there, and nothing half-deleted is taken for a checkpoint."""
    state = {"w": torch.ones(1 << 10)}
    with closing(dcp.Checkpointer(async_save=True, keep_last=4)) as checkpointer:
        for step in range(12):
            handle = checkpointer.save(state, tmp_path / f"step-{step}", step=step)
            report = dcp.prune(tmp_path, keep_last=2)
            assert not report.failed
            handle.wait()
            assert dcp.latest(tmp_path) == tmp_path / f"step-{step}"
    assert dcp.prune(tmp_path, keep_last=2).kept
    assert _there(tmp_path) == ["step-10", "step-11"]
    assert all(dcp.verify(tmp_path / name).ok for name in _there(tmp_path))
