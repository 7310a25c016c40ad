"""``list_runs``: which runs there are, what their checkpoints take, and which of them are whole."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import dcp_plugin as dcp
from dcp_plugin.core.format.summary import Summary
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.media.medium import Readable
from dcp_plugin.core.media.places import WORKSPACE
from dcp_plugin.core.media.usage import usage
from dcp_plugin.core.paths import Where
from dcp_plugin.core.runs import scan
from dcp_plugin.tools import listing
from tests import programs
from tests.foreign import LIGHTNING, LIGHTNING_WEIGHTS, OPTIMIZER, WEIGHTS
from tests.limits import HANG
from tests.object_server import Bucket
from tests.places import delete_file, save_file, stock_writer

INTERRUPTED = """
import os, sys
import dcp_plugin as dcp
from dcp_plugin.core.media.disk.local_disk import LocalDisk
from dcp_plugin.core.media.objects.object_store import ObjectStore

LocalDisk.publish = ObjectStore.publish = lambda *_: os._exit(1)
dcp.save({"n": 1}, sys.argv[1])
"""
"""A save whose process dies when its data files are written."""


def interrupt_a_save_to(path: Where) -> None:
    assert programs.run("-c", INTERRUPTED, path).returncode == 1


def _states(root: Where) -> dict[str, tuple[str, str]]:
    return {one.path.name: (one.format, one.state) for run in dcp.tools.list_runs(root) for one in run.checkpoints}


def test_each_folder_is_a_run_with_its_newest_to_resume_from(place: Where) -> None:
    for run in ("a", "b"):
        for step in (1, 2):
            dcp.save({"model": torch.nn.Linear(4, 4)}, place / run / f"step-{step}", step=step)
    dcp.save({"n": 1}, place / "a" / "step-1", step=3)
    runs = dcp.tools.list_runs(place)
    assert [run.folder for run in runs] == [place / "a", place / "b"]
    a, b = runs
    assert [(one.path.name, one.step, one.state) for one in a.checkpoints] == [
        ("step-2", 2, "whole"), ("step-1", 3, "whole")
    ]  # fmt: skip
    assert a.resumes is not None and a.resumes.path == dcp.latest(place / "a") == place / "a" / "step-1"
    assert b.resumes is not None and b.resumes.path == dcp.latest(place / "b") == place / "b" / "step-2"
    one = b.checkpoints[0]
    assert (one.world_size, one.layouts, one.tier, one.reason) == (1, ["replicated or single"], "durable", "")
    assert one.nbytes == one.own_bytes == usage(medium_of(place), one.path).nbytes > 4 * 4 * 4
    assert b.nbytes == sum(one.nbytes for one in b.checkpoints)
    assert [run.folder for run in dcp.tools.list_runs(place / "a" / "step-1")] == [place / "a"]


def test_what_checkpoints_share_is_counted_once(tmp_path: Path) -> None:
    state: dict[str, Any] = {"frozen": torch.nn.Parameter(torch.ones(1 << 19), requires_grad=False), "n": 1}
    with closing(dcp.Checkpointer()) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(state | {"n": step}, tmp_path / f"step-{step}", step=step)
    (run,) = dcp.tools.list_runs(tmp_path)
    everything = {(found.st_dev, found.st_ino): found.st_size for file in tmp_path.glob("step-*/*")
                  for found in [file.stat()]}  # fmt: skip
    assert run.nbytes == sum(everything.values())
    assert run.nbytes < 3 << 21 < 4 << 21 < sum(one.nbytes for one in run.checkpoints)
    assert all(one.own_bytes < 1 << 20 for one in run.checkpoints[1:])
    for step in (1, 2, 3):
        shutil.rmtree(tmp_path / f"step-{step}")
    (run,) = dcp.tools.list_runs(tmp_path)
    assert run.nbytes == run.checkpoints[0].own_bytes == run.checkpoints[0].nbytes


def test_what_is_torn_damaged_or_of_others_is_told(place: Where) -> None:
    for name in ("whole", "no metadata", "lost", "set aside"):
        dcp.save({"n": 1}, place / name)
    delete_file(place / "no metadata" / ".metadata")
    for one in medium_of(place).entries(place / "lost"):
        if one.path.suffix == ".distcp":
            delete_file(one.path)
    medium_of(place).note(place / "set aside" / "dcp_plugin.damaged", b"found damaged", only_new=True)
    stock.save(WEIGHTS, storage_writer=stock_writer(place / "stock"))
    save_file(LIGHTNING, place / "epoch=1.ckpt")
    save_file(LIGHTNING_WEIGHTS, place / "weights.ckpt")
    for name, value in (("optimizer.pt", OPTIMIZER), ("pytorch_model.bin", WEIGHTS), ("trainer_state.json", 1)):
        save_file(value, place / "checkpoint-5" / name)
    save_file(OPTIMIZER, place / "half" / "optimizer.pt")
    save_file(WEIGHTS, place / "half" / "pytorch_model.bin")
    found = _states(place)
    assert found.pop("no metadata")[1] == "torn"
    assert found == {
        "whole": ("dcp_plugin", "whole"),
        "lost": ("dcp_plugin", "damaged"),
        "set aside": ("dcp_plugin", "damaged"),
        "stock": ("stock", "foreign"),
        "epoch=1.ckpt": ("Lightning", "foreign"),
        "weights.ckpt": ("Lightning", "foreign"),
        "checkpoint-5": ("transformers", "foreign"),
        "half": ("transformers", "torn"),
    }
    reasons = {one.path.name: one.reason for run in dcp.tools.list_runs(place) for one in run.checkpoints}
    assert "is missing" in reasons["lost"] and "quarantined" in reasons["set aside"]
    assert "no optimizer" in reasons["weights.ckpt"] and not reasons["checkpoint-5"]


def test_a_file_that_was_cut_is_told_without_reading_it(tmp_path: Path) -> None:
    dcp.save({"model": torch.nn.Linear(8, 8)}, tmp_path / "ck")
    os.truncate(next((tmp_path / "ck").glob("*.distcp")), 100)
    ((_, state),) = _states(tmp_path).values()
    assert state == "damaged"
    assert dcp.tools.list_runs(tmp_path)[0].resumes is None


@pytest.mark.parametrize("damage", ["truncated", "with a hole"])
def test_an_index_that_is_not_the_saved_one_is_damage(tmp_path: Path, damage: str) -> None:
    dcp.save({"model": torch.nn.Linear(8, 8)}, tmp_path / "ck")
    index = tmp_path / "ck" / "dcp_plugin.index"
    size = index.stat().st_size
    os.truncate(index, size - 32)
    if damage == "with a hole":
        os.truncate(index, size)
    ((_, state),) = _states(tmp_path).values()
    assert state == "damaged"


def test_a_save_that_was_interrupted_is_torn(place: Where) -> None:
    dcp.save({"n": 1}, place / "step-1")
    interrupt_a_save_to(place / "step-1")
    (run,) = dcp.tools.list_runs(place)
    assert run.folder == place and [one.path.name for one in run.checkpoints if one.state == "whole"] == ["step-1"]
    (torn,) = (one for one in run.checkpoints if one.state == "torn")
    assert torn.path.parent == place / WORKSPACE and "a save of step-1" in torn.reason
    assert run.resumes is not None and run.resumes.path == place / "step-1"


def test_files_in_numbered_folders_are_one_run_with_the_steps_that_they_have(tmp_path: Path) -> None:
    for step in (5, 10):
        (tmp_path / f"step-{step:08d}").mkdir()
        state = {"model": WEIGHTS, "optimizer": OPTIMIZER, "iter_num": 4 * step, "step_count": step}
        torch.save(state, tmp_path / f"step-{step:08d}" / "lit_model.pth")
    (run,) = dcp.tools.list_runs(tmp_path)
    assert run.folder == tmp_path
    assert [(one.path.parent.name, one.step, one.state) for one in run.checkpoints] == [
        ("step-00000005", 5, "foreign"), ("step-00000010", 10, "foreign")
    ]  # fmt: skip


def test_parts_of_a_checkpoint_are_listed_together_and_the_resume_that_finds_one_names_all(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (10, 20):
        dcp.save(get_model_state_dict(model), tmp_path / f"checkpoint-{step}" / "model")
        dcp.save(get_optimizer_state_dict(model, optimizer), tmp_path / f"checkpoint-{step}" / "optimizer")
    (run,) = dcp.tools.list_runs(tmp_path)
    parts = [(f"checkpoint-{step}/{part}", step) for step in (10, 20) for part in ("model", "optimizer")]
    assert [(str(one.path.relative_to(tmp_path)), one.step) for one in run.checkpoints] == parts
    assert run.resumes is not None and run.resumes.path == dcp.latest(tmp_path) == tmp_path / "checkpoint-20/optimizer"
    with pytest.raises(dcp.CheckpointMismatch) as raised:
        dcp.resume_or_init({"model": model, "optimizer": optimizer}, tmp_path)
    said = raised.value.__notes__[0]
    assert f"2 parts of {tmp_path}/checkpoint-20, each a checkpoint of its own: model, optimizer" in said
    for part in ("model", "optimizer"):
        assert f"dcp_plugin.load({{...}}, '{tmp_path}/checkpoint-20/{part}')" in said
    assert not any(one.deleted for one in dcp.prune(tmp_path, keep_last=1).checkpoints)


def test_a_checkpoint_says_which_parameters_it_leaves_out(place: Where) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    with closing(dcp.Checkpointer(trainable_only=True)) as checkpointer:
        dcp.save({"model": model}, place / "base")
        checkpointer.load({"model": model}, place / "base")
        for name in ("run/step-1", "step-2"):
            checkpointer.save({"model": model}, place / name)
    found = {one.path.name: one.base for run in dcp.tools.list_runs(place) for one in run.checkpoints}
    assert found == {"base": None, "step-1": str(place / "base"), "step-2": None}


def test_a_summary_is_read_once_and_that_of_the_newest_again(place: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        dcp.save({"n": step}, place / f"step-{step}", step=step)
    reads, decode = Counter[str](), Summary.decode

    def counted(data: bytes, label: str) -> Summary:
        reads[Path(label).parent.name] += 1
        return decode(data, label)

    monkeypatch.setattr(Summary, "decode", counted)
    (run,) = dcp.tools.list_runs(place)
    assert [one.step for one in run.checkpoints] == [1, 2, 3]
    assert reads == {"step-1": 1, "step-2": 1, "step-3": 2}, "of the newest, a load would check all files"


def test_checkpoints_in_a_store_are_read_at_the_same_time(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        dcp.save({"n": step}, f"{bucket.url}/step-{step}", step=step)
    both, summary_in = threading.Barrier(2), scan.summary_in

    def meet(files: Readable) -> Summary | None:
        both.wait(HANG)
        return summary_in(files)

    monkeypatch.setattr(scan, "summary_in", meet)
    assert [state.step for state in dcp.list_checkpoints(bucket.url)] == [1, 2]


def test_a_checkpoint_that_cannot_be_read_stays_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    dcp.save({"n": 1}, tmp_path / "step-1", step=1)
    monkeypatch.setattr(listing, "summary_in", refused)
    ((one,),) = (run.checkpoints for run in dcp.tools.list_runs(tmp_path))
    assert (one.path.name, one.state, one.resumes) == ("step-1", "damaged", False)
    assert "Permission denied" in one.reason and "passing over what cannot be read" in caplog.text


def test_nothing_and_what_cannot_be_listed(tmp_path: Path) -> None:
    assert dcp.tools.list_runs(tmp_path) == dcp.tools.list_runs(tmp_path / "nowhere") == []
    (tmp_path / "file").touch()
    assert dcp.tools.list_runs(tmp_path / "file") == []
