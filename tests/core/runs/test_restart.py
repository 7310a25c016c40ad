"""A run starts from its own newest checkpoint, else from a pre-trained one, else from scratch; never from less than
it should without a word."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.media.disk.local_files import LocalFile
from tests import launch
from tests.compare import assert_same
from tests.damage import flip
from tests.dying import die_when_half_is_written
from tests.launch import on_ranks
from tests.layouts import build, train, whole_state
from tests.messages import logged
from tests.places import names_in

CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 0x1000, 0x4000, 1 << 18


def _run(seed: int) -> dict[str, Any]:
    model, optimizer = build("plain", seed)
    return {"model": model, "optim": optimizer, "step": 0}


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    return whole_state(state["model"], state["optim"])


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    state = _run(seed=1)
    train(state["model"], state["optim"], 2)
    dcp.save({**state, "step": 900}, tmp_path / "pretrained", step=900)
    return tmp_path / "pretrained"


def test_one_call_starts_every_life_of_a_run(tmp_path: Path, pretrained: Path) -> None:
    root = tmp_path / "run"

    first = _run(seed=2)
    start = dcp.resume_or_init(first, root, init_from=pretrained)
    assert (start.how, start.path, start.step) == ("warm-started", pretrained, None)
    assert re.fullmatch(f"warm-started: loaded [0-9]+ items from {pretrained}", str(start))
    weights = _run(seed=3)
    dcp.load({"model": weights["model"]}, pretrained)
    assert_same(first["model"].state_dict(), weights["model"].state_dict())
    assert not first["optim"].state, "the optimizer is a new run's"
    assert first["optim"].param_groups[0]["lr"] == 0.01 * 3
    assert first["step"] == 0

    train(first["model"], first["optim"], 1)
    first["step"] = 1
    dcp.save(first, root / "step-1", step=1)
    shutil.rmtree(pretrained)
    second = _run(seed=4)
    start = dcp.resume_or_init(second, root, init_from=pretrained, partial=dcp.PartialLoad(include="no.such.key"))
    assert (start.how, start.path, start.step) == ("resumed", root / "step-1", 1)
    assert re.fullmatch(f"resumed at step 1: loaded [0-9]+ items from {root}/step-1", str(start))
    assert second["step"] == 1
    assert_same(_whole(first), _whole(second))


def test_with_nothing_to_start_from_a_run_starts_fresh(tmp_path: Path) -> None:
    state = _run(seed=1)
    before = _whole(state)
    start = dcp.resume_or_init(state, tmp_path / "run")
    assert (start.how, start.path, start.report) == ("fresh", None, None)
    assert "fresh" in str(start)
    assert_same(before, _whole(state))


def test_a_missing_init_from_is_an_error_when_it_is_needed(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointNotFound, match=r"init_from=.*typo"):
        dcp.resume_or_init(_run(1), tmp_path / "run", init_from=tmp_path / "typo")
    with pytest.raises(dcp.CheckpointNotFound, match="resume=must"):
        dcp.resume_or_init(_run(1), tmp_path / "run", resume="must", init_from=tmp_path / "typo")


def test_never_starts_again_from_the_pretrained_one(tmp_path: Path, pretrained: Path) -> None:
    dcp.save(_run(5), tmp_path / "run" / "step-1", step=1)
    start = dcp.resume_or_init(_run(2), tmp_path / "run", resume="never", init_from=pretrained)
    assert start.path == pretrained
    start = dcp.resume_or_init(_run(2), tmp_path / "run", resume=pretrained)
    assert (start.how, start.step) == ("resumed", 900)


def test_a_run_that_cannot_be_resumed_is_not_started_from_something_else(tmp_path: Path, pretrained: Path) -> None:
    """Neither if its checkpoints are damaged, nor if the newest does not fit."""
    own = tmp_path / "run" / "step-1"
    dcp.save(_run(5), own, step=1)
    other = nn.ModuleDict({"net": build("plain")[0], "adapter": nn.Linear(2, 2)})
    with pytest.raises(dcp.CheckpointMismatch, match=r"(?s)adapter.*strict=False"):
        dcp.resume_or_init({"model": other}, tmp_path / "run", init_from=pretrained)

    data = next(own.glob("__0_0-*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    state = _run(2)
    before = _whole(state)
    with pytest.raises(dcp.CheckpointCorrupt, match=r"none that can be loaded: .*step-1.*truncated.*resume=never"):
        dcp.resume_or_init(state, tmp_path / "run", init_from=pretrained)
    assert_same(before, _whole(state))
    (own / "dcp_plugin.json").write_text("{")
    with pytest.raises(dcp.CheckpointCorrupt, match="none that can be loaded"):
        dcp.resolve_resume("auto", tmp_path / "run")


def test_a_run_that_was_killed_in_its_first_save_starts_again_from_the_pretrained_one(
    tmp_path: Path, pretrained: Path
) -> None:
    launch.run(_die_saving, 1, tmp_path / "run" / "step-1", killed=[0])
    assert [state.committed for state in dcp.list_checkpoints(tmp_path / "run")] == [False]
    assert dcp.resume_or_init(_run(2), tmp_path / "run", init_from=pretrained).how == "warm-started"


def _die_saving(path: Path) -> None:
    dcp.events.subscribe(lambda event: os.kill(os.getpid(), signal.SIGKILL))
    dcp.save(_run(5), path)


def test_only_modules_are_warm_started_wherever_they_are_in_the_state(tmp_path: Path) -> None:
    def state(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        return {"nets": {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "ema": torch.zeros(1)}, "step": seed}

    pretrained = state(1)
    dcp.save(pretrained, tmp_path / "pretrained")
    fresh = state(2)
    dcp.resume_or_init(fresh, tmp_path / "run", init_from=tmp_path / "pretrained")
    for name in "ab":
        assert_same(fresh["nets"][name].state_dict(), pretrained["nets"][name].state_dict())
    assert fresh["step"] == 2


def test_a_partial_load_of_nothing_is_refused_also_where_it_would_not_be_needed(tmp_path: Path) -> None:
    dcp.save(_run(5), tmp_path / "run" / "step-1")
    for root in (tmp_path / "run", tmp_path / "fresh"):
        with pytest.raises(ValueError, match=r"init_from=PATH, or take partial out\. A resumed run takes everything"):
            dcp.resume_or_init(_run(2), root, partial=dcp.PartialLoad(include="model.*"))


def test_a_given_checkpointer_has_its_own_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpointer"):
        dcp.resume_or_init({}, tmp_path, checkpointer=dcp.Checkpointer(), timeout=3.0)


def _killed_in_a_save(path: Path) -> None:
    die_when_half_is_written()
    dcp.save({"weights": torch.ones(1000)}, path)


@pytest.mark.parametrize("with_a_complete_one", [False, True])
def test_an_unfinished_save_is_never_recommended(tmp_path: Path, with_a_complete_one: bool) -> None:
    root = tmp_path / "run"
    if with_a_complete_one:
        dcp.save({"weights": torch.ones(1000)}, root / "step-1")
    launch.run(_killed_in_a_save, 1, root / "step-2", killed=[0])
    for path in (root / sorted(os.listdir(root))[0], root):
        for call in (dcp.inspect, lambda path: dcp.load({"weights": torch.ones(1000)}, path)):
            with pytest.raises(dcp.CheckpointNotFound) as caught:
                call(path)
            assert ".saving" not in str(caught.value) and f"dcp_plugin.latest('{root}')" in str(caught.value)
            is_named = with_a_complete_one and path == root
            assert ("step-1. Name one" if is_named else "no complete checkpoint in it") in str(caught.value)
    assert dcp.resume_or_init({"n": 0, "weights": torch.zeros(1000)}, root, strict=False).how == (
        "resumed" if with_a_complete_one else "fresh"
    )


# Ranks


@on_ranks(2)
def test_ranks_do_what_rank_0_has_seen_and_fail_together(tmp_path: Path, pretrained: Path) -> None:
    """As on a shared file system whose directories are cached: one rank sees a checkpoint, the other does not."""
    rank = dist.get_rank()
    model, optimizer = build("fsdp2", seed=3)
    checkpointer = dcp.Checkpointer(timeout=20.0)
    state = {"model": model, "optim": optimizer}
    with_one, without = tmp_path / "run", tmp_path / "empty"
    checkpointer.save(state, with_one / "step-1", step=1)

    start = dcp.resume_or_init(state, without if rank else with_one, init_from=pretrained, checkpointer=checkpointer)
    assert (start.how, start.step) == ("resumed", 1)
    start = dcp.resume_or_init(state, with_one if rank else without, init_from=pretrained, checkpointer=checkpointer)
    assert start.how == "warm-started"
    with pytest.raises(dcp.CheckpointNotFound, match="init_from"):
        dcp.resume_or_init(state, without, init_from=tmp_path / f"typo-{rank}", checkpointer=checkpointer)
    checkpointer.close()


def test_what_was_on_the_meta_device_and_is_not_filled_is_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    dcp.save({"model": nn.Sequential(nn.Linear(2, 2))}, tmp_path / "pretrained")
    first = dcp.PartialLoad(include="model.0.*")
    with pytest.warns(UserWarning, match=r"model\.1\.weight, model\.1\.bias, which had been on the meta device"):
        dcp.resume_or_init({"model": model}, tmp_path / "run", init_from=tmp_path / "pretrained", partial=first)


def test_a_file_of_another_tool_is_something_to_start_from(tmp_path: Path) -> None:
    pretrained, fresh = _run(seed=1)["model"], _run(seed=2)
    torch.save(pretrained.state_dict(), tmp_path / "weights.pt")
    start = dcp.resume_or_init(fresh, tmp_path / "run", init_from=tmp_path / "weights.pt")
    assert start.how == "warm-started"
    assert_same(fresh["model"].state_dict(), pretrained.state_dict())


# What turns out to be damaged while it is loaded


def _three_saves(root: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The state after each of three steps, of which each was saved."""
    state, saved = _run(seed=1), []
    checkpointer = dcp.Checkpointer(**config)
    for step in (1, 2, 3):
        train(state["model"], state["optim"], 1)
        state["step"] = step
        checkpointer.save(state, root / f"step-{step}", step=step).wait()
        saved.append({"whole": _whole(state)})
    checkpointer.close()
    return saved


def test_a_load_of_what_latest_returned_changes_no_checkpoint(tmp_path: Path) -> None:
    _three_saves(tmp_path, {"reuse": False})
    newest = dcp.latest(tmp_path)
    assert newest == tmp_path / "step-3"
    flip(tmp_path / "step-3", "model.inp.weight")
    before = names_in(newest)
    with pytest.raises(dcp.CheckpointCorrupt, match=r"model\.inp\.weight"):
        dcp.load(_run(2), newest)
    assert names_in(newest) == before and dcp.latest(tmp_path) == newest


@pytest.mark.parametrize("resume", ["resume_or_init", "resolve_resume"])
def test_a_load_after_a_resume_has_ended_changes_no_checkpoint(tmp_path: Path, resume: str) -> None:
    """The bytes may be damaged long after the resume that chose the checkpoint."""
    _three_saves(tmp_path, {"reuse": False})
    if resume == "resume_or_init":
        dcp.resume_or_init(_run(2), tmp_path)
    else:
        dcp.load(_run(2), dcp.resolve_resume("auto", tmp_path) or "")
    newest = tmp_path / "step-3"
    flip(newest, "model.inp.weight")
    before = names_in(newest)
    with pytest.raises(dcp.CheckpointCorrupt, match=r"model\.inp\.weight"):
        dcp.load(_run(2), newest)
    assert names_in(newest) == before and dcp.latest(tmp_path) == newest


def test_the_load_of_what_resolve_resume_chose_quarantines_it(tmp_path: Path) -> None:
    _three_saves(tmp_path, {"reuse": False})
    flip(tmp_path / "step-3", "model.inp.weight")
    with pytest.raises(dcp.CheckpointCorrupt, match=r"model\.inp\.weight"):
        dcp.load(_run(2), dcp.resolve_resume("auto", tmp_path) or "")
    assert dcp.latest(tmp_path) == tmp_path / "step-2"


@pytest.mark.parametrize("key", ["model.inp.weight", "optim.state.out.weight.exp_avg"])
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    saved = _three_saves(tmp_path, {"async_save": True, "reuse": False})
    newest = tmp_path / "step-3"
    flip(newest, key)
    with pytest.raises(dcp.CheckpointCorrupt, match=key):
        dcp.resume_or_init(_run(2), tmp_path, resume="must")
    with pytest.raises(dcp.CheckpointCorrupt, match=key):
        dcp.resume_or_init(_run(2), tmp_path, resume=newest)
    assert dcp.latest(tmp_path) == newest, "neither sets it aside"

    state = _run(seed=2)
    start = dcp.resume_or_init(state, tmp_path)
    assert (start.how, start.step, start.damaged) == ("resumed", 2, (newest,))
    assert str(start).endswith(f"; DAMAGED and quarantined: {newest}")
    assert_same(saved[1]["whole"], _whole(state))
    assert state["step"] == 2
    (said,) = [record.message for record in caplog.records if "DAMAGED" in record.message]
    assert str(newest) in said and key in said and "checksum" in said

    caplog.clear()
    assert dcp.latest(tmp_path) == tmp_path / "step-2"
    assert "passing over" in caplog.text and "dcp_plugin.damaged" in caplog.text
    with pytest.raises(dcp.CheckpointIncomplete, match=r"quarantined.*dcp_plugin\.damaged"):
        dcp.load(_run(2), newest)
    dcp.save(state, tmp_path / "step-4", keep_last=1)
    assert names_in(tmp_path) == ["step-3", "step-4"], "it is neither counted nor deleted"
    dcp.save(state, newest)
    assert dcp.verify(newest).ok and not (newest / "dcp_plugin.damaged").exists(), "a new save is not damaged"


def test_if_all_are_damaged_the_run_never_starts_from_something_else(tmp_path: Path, pretrained: Path) -> None:
    run = tmp_path / "run"
    _three_saves(run, {"reuse": False})
    for step in (1, 2, 3):
        flip(run / f"step-{step}", "model.inp.weight")
    for _ in range(2):  # also when all are set aside
        with pytest.raises(dcp.CheckpointCorrupt, match=r"step-1.*resume=never"):
            dcp.resume_or_init(_run(2), run, init_from=pretrained)
    (run / "step-2" / "dcp_plugin.damaged").unlink()
    flip(run / "step-2", "model.inp.weight")  # repaired
    assert dcp.resume_or_init(_run(2), run, init_from=pretrained).step == 2


def test_what_is_no_damage_moves_nothing(tmp_path: Path) -> None:
    _three_saves(tmp_path, {"reuse": False})
    newest = tmp_path / "step-3"
    before = sorted(os.listdir(newest))
    other = nn.ModuleDict({"net": build("plain")[0], "adapter": nn.Linear(2, 2)})
    with pytest.raises(dcp.CheckpointMismatch):
        dcp.resume_or_init({"model": other}, tmp_path)
    failing = mock.patch.object(LocalFile, "read_into", side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    with failing, pytest.raises(dcp.CheckpointUnreadable, match="Input/output error"):
        dcp.resume_or_init(_run(2), tmp_path)
    assert sorted(os.listdir(newest)) == before
    assert dcp.resume_or_init(_run(2), tmp_path).step == 3


class _LoadsAnother:
    """An object whose load reads another checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dcp.load(_run(0), self.path)


def test_damage_of_another_checkpoint_that_a_load_reads_quarantines_nothing(tmp_path: Path) -> None:
    """The path in the message decides: an error from another rank is a class and a text."""
    dcp.save(_run(1), tmp_path / "base")
    flip(tmp_path / "base", "model.inp.weight")
    state = {**_run(1), "other": _LoadsAnother(tmp_path / "base")}
    dcp.save(state, tmp_path / "run" / "step-1", step=1)
    with pytest.raises(dcp.CheckpointCorrupt, match=r"base.*model\.inp\.weight"):
        dcp.resume_or_init(state, tmp_path / "run")
    assert dcp.latest(tmp_path / "run") == tmp_path / "run" / "step-1"
    assert dcp.latest(tmp_path / "base") == tmp_path / "base"


def test_values_that_the_damaged_one_left_are_no_start(tmp_path: Path) -> None:
    """The older checkpoint does not have what the damaged one had filled."""
    state = _run(1)
    dcp.save({"model": state["model"], "step": 1}, tmp_path / "step-1", step=1)
    dcp.save({**state, "more": torch.ones(3)}, tmp_path / "step-2", step=2, reuse=False)
    flip(tmp_path / "step-2", "model.inp.weight")
    target = {**_run(2), "more": torch.zeros(3)}
    with pytest.raises(dcp.CheckpointCorrupt, match=r"has no .*more.*The next start begins with the older one"):
        dcp.resume_or_init(target, tmp_path, strict=False)
    target["more"].zero_()
    assert dcp.resume_or_init(target, tmp_path, strict=False).step == 1
    assert not target["more"].any()


@on_ranks(2)
def test_ranks_fall_back_together_though_one_of_them_sees_the_damage(tmp_path: Path) -> None:
    root = tmp_path
    model, optimizer = build("fsdp2", seed=3)
    checkpointer = dcp.Checkpointer(timeout=20.0, async_save=True, reuse=False)
    state = {"model": model, "optim": optimizer}
    wholes = []
    for step in (1, 2):
        train(model, optimizer, 1)
        checkpointer.save(state, root / f"step-{step}", step=step).wait()
        wholes.append(whole_state(model, optimizer))
    if dist.get_rank() == 0:  # in what rank 1 alone reads
        flip(root / "step-2", "optim.state.inp.weight.exp_avg", chunk=1)
    dist.barrier()
    train(model, optimizer, 1)
    start = dcp.resume_or_init(state, root, checkpointer=checkpointer)
    assert (start.step, start.damaged) == (1, (root / "step-2",))
    assert_same(wholes[0], whole_state(model, optimizer))
    checkpointer.save(state, root / "step-3", step=3).wait()
    checkpointer.close()
    assert dcp.latest(root) == root / "step-3"


def test_a_damaged_checkpoint_that_cannot_be_marked_is_passed_over_all_the_same(tmp_path: Path) -> None:
    _three_saves(tmp_path, {"reuse": False})
    flip(tmp_path / "step-3", "model.inp.weight")
    (said,) = launch.run(_resume_on_a_read_only_mount, 1, tmp_path)
    if not said:
        pytest.skip("mounting is not permitted here")
    assert "step-3 is DAMAGED" in said and "cannot be marked (Read-only file system)" in said
    assert dcp.latest(tmp_path) == tmp_path / "step-3"


def _resume_on_a_read_only_mount(root: Path) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    where, read_only = os.fsencode(root), MS_BIND | MS_REMOUNT | MS_RDONLY
    private = libc.unshare(CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    if (
        not private
        or libc.mount(where, where, None, MS_BIND, None)
        or libc.mount(b"none", where, None, read_only, None)
    ):
        return ""
    said = logged()
    for _ in range(2):
        assert dcp.resume_or_init(_run(2), root).step == 2
    return "\n".join(said)
