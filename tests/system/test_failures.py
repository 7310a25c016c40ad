"""A failure on one rank is raised on every rank, within the timeout, naming the rank; nothing half-done remains."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load as stock_load
from torch.distributed.checkpoint import save as stock_save

import dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.core.loading import load
from dcp_plugin.core.media.disk import commit, local_disk
from dcp_plugin.core.media.medium import Reservation
from tests import launch
from tests.damage import bad_disk, flip, raising
from tests.launch import gathered, on_ranks
from tests.layouts import build, train
from tests.messages import refusal
from tests.objects import Holder
from tests.places import names_in
from tests.slowness import RankGate, has_ended

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x00020000, 0x4000, 1 << 18


@on_ranks(2)
def test_a_full_disk_on_one_rank_fails_the_save_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    model, optimizer = build("fsdp2")
    state = {"model": model, "optim": optimizer}
    with bad_disk(raising(OSError(28, "No space left on device")), rank=1):
        refusal(dcp.SaveFailed, lambda: dcp.save(state, path), "rank 1", "No space left", str(path))
    dist.barrier()
    assert not list(path.parent.iterdir())
    dcp.save(state, path)  # the group of ranks has survived


@on_ranks(2)
def test_values_that_only_pickle_could_restore_are_all_named_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    value: Any = Path if dist.get_rank() == 1 else 1
    state = {"extra": {"fine": 1, "bad": value, "worse": value}}
    said = refusal(dcp.UnsafeCheckpoint, lambda: dcp.save(state, path), "rank 1", "allow_pickle")
    assert "extra.bad" in said and "extra.worse" in said
    assert not path.exists()


@on_ranks(2)
def test_a_failed_background_save_is_raised_once_on_every_rank(tmp_path: Path) -> None:
    model, optimizer = build("fsdp2")
    state = {"model": model, "optim": optimizer}
    ours = dcp.Checkpointer(async_save=True)
    with bad_disk(raising(OSError("bad disk")), rank=0):
        handle = ours.save(state, tmp_path / "a")
        refusal(dcp.SaveFailed, ours.wait, "rank 0", "bad disk")
        assert handle.done() and isinstance(handle.exception(), dcp.SaveFailed)
        ours.wait()  # raised once
        ours.save(state, tmp_path / "b")
        refusal(dcp.SaveFailed, lambda: ours.save(state, tmp_path / "c"), "bad disk")
    ours.save(state, tmp_path / "d")
    ours.close()
    dist.barrier()  # rank 0 notes the figures of a save after it is published
    assert names_in(tmp_path) == ["d"]


@on_ranks(3)
def test_a_rank_that_hangs_fails_the_others_within_the_timeout(tmp_path: Path) -> None:
    path, rank = tmp_path / "ck", dist.get_rank()
    ended = [RankGate(f"{number} has ended") for number in range(3)]
    local_disk._VISIBLE_SECONDS = 0.5  # what rank 0 has made is gone when rank 1 comes
    model, optimizer = build("fsdp2")

    def hang(event: events.Event) -> None:
        if rank == 1 and isinstance(event, events.SaveStarted):
            ended[0]()
            ended[2]()

    events.subscribe(hang)
    refusal(dcp.CheckpointError, lambda: dcp.save({"model": model, "optim": optimizer}, path, timeout=2), "rank")
    ended[rank].open()
    if rank == 0:  # it hosts the store that the others still need
        ended[1]()
        ended[2]()
    assert not path.exists()


@on_ranks(2, killed=[1])
def test_a_save_that_loses_a_rank_after_it_was_published_says_so(tmp_path: Path) -> None:
    path, pid = tmp_path / "ck", gathered(os.getpid())[1]
    publish = commit.publish

    def and_lose_rank_1(reservation: Reservation) -> None:
        publish(reservation)
        os.kill(pid, signal.SIGKILL)
        has_ended(pid)

    commit.publish = and_lose_rank_1
    refusal(dcp.RankFailure, lambda: dcp.save({"n": 1}, path, timeout=20), str(path), "published", "complete")
    assert dcp.verify(path).ok


def _save_to_unshared_root(root: Path) -> str:
    """Rank 1 sees an empty file system of its own at the root, as on a node where the mount is missing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if dist.get_rank() == 1:
        private = libc.unshare(CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        mounted = private and libc.mount(b"none", os.fsencode(root), b"tmpfs", 0, None) == 0
    else:
        mounted = True
    able = torch.tensor(int(mounted))
    dist.all_reduce(able, op=dist.ReduceOp.MIN)
    if not able.item():
        return "not permitted"
    local_disk._VISIBLE_SECONDS = 0.5
    refusal(dcp.SaveFailed, lambda: dcp.save({"t": torch.ones(3)}, root / "ck"), "rank 1", "share")
    return ""


def test_a_root_that_the_ranks_do_not_share_is_said_so(tmp_path: Path) -> None:
    said = launch.run(_save_to_unshared_root, 2, tmp_path)
    if "not permitted" in said:
        pytest.skip("mounting a private file system is not permitted here")
    assert not (tmp_path / "ck").exists()


@on_ranks(2)
def test_a_flipped_bit_is_raised_on_every_rank_naming_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    model, optimizer = build("fsdp2")
    train(model, optimizer, 1)
    dcp.save({"model": model, "optim": optimizer}, path)
    if dist.get_rank() == 0:
        flip(path, "optim.state.inp.weight.exp_avg", chunk=1)
    dist.barrier()
    refusal(
        dcp.CheckpointCorrupt,
        lambda: dcp.load({"model": model, "optim": optimizer}, path),
        "__1_0-",
        "optim.state.inp.weight.exp_avg",
    )


class _Refusing(Holder):
    def load_state_dict(self, state: Any) -> None:
        raise ValueError("no place")


STAGES: dict[str, tuple[Any, str] | None] = {
    "open": (load.CheckpointReader, "open"),
    "compare": (load.Loading, "_plan"),
    "values": (load, "decoded"),
    "read": (load.CheckpointReader, "read"),
    "apply": None,
}


@pytest.mark.parametrize("asks", [False, True], ids=["no questions", "questions"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_a_load_that_fails_on_one_of_three_ranks_fails_on_all_and_overwrites_nothing_before_it_has_read(
    tmp_path: Path, stage: str, asks: bool
) -> None:
    def begin(number: float, names: str = "ab") -> dict[str, Any]:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        for parameter in model.parameters():
            nn.init.constant_(parameter, number)
        return {"model": model, "t": torch.full((3,), number), "n": number, "x": Holder({"n": number})}

    dcp.save(begin(1), tmp_path / "ck")
    state = begin(0, "a" if asks and dist.get_rank() == 2 else "ab")
    if dist.get_rank() == 1 and (place := STAGES[stage]):
        original = getattr(*place)

        def fail(*arguments: Any) -> Any:
            if stage == "read" and arguments[1].values:  # the values are read before
                return original(*arguments)
            raise OSError(errno.EIO, "Input/output error")

        setattr(*place, fail)
    elif dist.get_rank() == 1:
        state["x"] = _Refusing({"n": 0.0})
    reason = "no place" if stage == "apply" else "Input/output"
    refusal(dcp.CheckpointError, lambda: dcp.load(state, tmp_path / "ck"), "rank 1", reason)
    if stage not in ("read", "apply"):
        assert not any(parameter.any() for parameter in state["model"].parameters())
        assert not state["t"].any() and state["n"] == 0 and state["x"].state == {"n": 0}


@on_ranks(2)
def test_a_load_that_does_not_fit_leaves_a_fresh_optimizer_untouched(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    model, optimizer = build("fsdp2")
    train(model, optimizer, 1)
    dcp.save({"model": model, "optim": optimizer}, path)
    other = torch.nn.Linear(3, 3)
    fresh = torch.optim.AdamW(other.parameters())
    refusal(dcp.CheckpointMismatch, lambda: dcp.load({"model": other, "optim": fresh}, path), "weight", "not in the")
    assert not fresh.state


def test_a_mismatch_names_every_key_and_both_shapes(tmp_path: Path) -> None:
    dcp.save({"model": torch.nn.Linear(3, 4)}, tmp_path / "ck")
    with pytest.raises(dcp.CheckpointMismatch) as caught:
        dcp.load({"model": torch.nn.Linear(5, 6)}, tmp_path / "ck")
    for words in ("model.weight", "(6, 5)", "(4, 3)", "model.bias", "(6,)", "(4,)"):
        assert words in str(caught.value)


def test_a_misspelt_key_is_suggested(tmp_path: Path) -> None:
    dcp.save({"embedding": {"table": torch.ones(2)}}, tmp_path / "ck")
    with pytest.raises(dcp.CheckpointMismatch, match=r"did you mean embedding\.table\?"):
        dcp.load({"embedding": {"tabel": torch.ones(2)}}, tmp_path / "ck")


def test_strict_false_loads_what_fits_and_reports_the_rest(tmp_path: Path) -> None:
    dcp.save({"model": torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})}, tmp_path / "ck")
    target = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)})
    report = dcp.load({"model": target}, tmp_path / "ck", strict=False)
    assert report.missing == ["model.head.weight", "model.head.bias"]
    assert sorted(report.loaded) == ["model.a.bias", "model.a.weight"]


def test_nothing_there_and_typos_in_options_are_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointNotFound, match="nothing is there"):
        dcp.load({"n": 0}, tmp_path / "nowhere")
    with pytest.raises(TypeError, match=r"not None \(dcp_plugin\.latest\(\) returns None"):
        dcp.load({"n": 0}, dcp.latest(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not dict"):
        dcp.load(tmp_path, {"n": 0})  # type: ignore[arg-type]
    dcp.save({"n": 0}, tmp_path / "n")
    with pytest.raises(TypeError, match="PartialLoad, not a dict"):
        dcp.load({"n": 0}, tmp_path / "n", partial={"include": "*"})  # type: ignore[arg-type]
    with pytest.raises(dcp.CheckpointError, match="this is a Linear"):
        dcp.save(torch.nn.Linear(2, 2), tmp_path / "bare")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown setting 'chekcsum'"):
        dcp.Checkpointer(chekcsum=True)
    with pytest.raises(TypeError, match=r"unknown setting 'async_sav' \(did you mean 'async_save'\?\)"):
        dcp.CheckpointConfig(async_sav=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"io\.threads must be at least 1"):
        dcp.CheckpointConfig(io=dcp.IO(threads=0))


def test_a_tilde_is_the_home_directory_wherever_a_path_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    state = {"n": torch.zeros(3)}
    dcp.save(state, "~/run/0")
    dcp.save(state, "~/run/1", events="~/events")
    dcp.save(state, Path("~/run/2"), step=2)
    assert dcp.latest("~/run") == dcp.resolve_resume("must", "~/run") == tmp_path / "run" / "2"
    assert dcp.resolve_resume("~/run/1", "~/run") == tmp_path / "run" / "1"
    assert dcp.verify("~/run/1").ok and dcp.inspect("~/run/2").step == 2
    dcp.load(state, "~/run/1")
    stock_load(state, storage_reader=dcp.ShardedReader("~/run/1"), no_dist=True)
    stock_save(state, storage_writer=dcp.ShardedWriter("~/run/3"), no_dist=True)
    for name in "01":
        dcp.Checkpointer().remove(f"~/run/{name}")
    assert names_in(tmp_path) == ["elsewhere", "events", "run"]
    assert names_in(tmp_path / "run") == ["2", "3"]


@pytest.mark.parametrize("name", [field.name for field in fields(dcp.CheckpointConfig)])
def test_a_setting_of_another_type_is_told(name: str) -> None:
    """As text is, which YAML and the environment give for numbers and flags."""
    for wrong in (1.5j, 30 if name == "events" else "30"):
        # What is in place of storage_options may be a secret.
        shown = f"a {type(wrong).__name__}" if name == "storage_options" else repr(wrong)
        with pytest.raises((TypeError, ValueError), match=rf"^{name} must be .*, got {re.escape(shown)}\.$"):
            dcp.CheckpointConfig(**{name: wrong})  # type: ignore[arg-type]


def test_a_setting_may_be_of_any_type_that_will_do(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "io": {"threads": np.int64(3)},
        "timeout": 30,
        "keep_last": 2,
        "events": tmp_path / "events",
    }
    config = dcp.CheckpointConfig(**given, exclude=(key for key in "ab"))  # type: ignore[arg-type]
    assert config.exclude == ("a", "b") and config.events == str(tmp_path / "events")


def test_a_file_above_a_save_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "astray").symlink_to(tmp_path / "nowhere")
    for name in ("file", "astray"):
        for path in (tmp_path / name / "ck", tmp_path / name / "run" / "ck"):
            said = refusal(
                dcp.SaveFailed, lambda path=path: dcp.save({"n": 0}, path), f"{tmp_path / name} is not a directory"
            )
            assert "full" not in said


@on_ranks(2)
def test_ranks_that_load_different_checkpoints_are_stopped(tmp_path: Path) -> None:
    for name in ("a", "b"):
        dcp.save({"t": torch.full((3,), ord(name))}, tmp_path / name)
    mine = tmp_path / ("a" if dist.get_rank() == 0 else "b")
    target = torch.zeros(3, dtype=torch.int64)
    refusal(dcp.CheckpointMismatch, lambda: dcp.load({"t": target}, mine), "rank 1", "another checkpoint")
    assert not target.any()


@on_ranks(2)
def test_ranks_that_save_to_different_paths_are_stopped(tmp_path: Path) -> None:
    mine = tmp_path / f"run-{dist.get_rank()}"
    with pytest.raises(dcp.CheckpointMismatch, match=r"rank 1 saves .*run-1 and rank 0 .*run-0"):
        dcp.save({"n": 1}, mine)
    assert not mine.exists()
    if dist.get_rank() == 0:
        (tmp_path / "alias").symlink_to(tmp_path)
    dist.barrier()
    dcp.save({"n": 1}, (tmp_path, tmp_path / "alias")[dist.get_rank()] / "same")
    dist.barrier()
    assert dcp.verify(tmp_path / "same").ok


@on_ranks(2)
def test_ranks_that_are_configured_differently_do_not_wait_for_each_other(tmp_path: Path) -> None:
    first = dist.get_rank() == 0
    for options in ({"trainable_only": first}, {"exclude": ["u"] if first else []}, {"async_save": first}):
        ours = dcp.Checkpointer(timeout=600, **options)  # who waits for the others waits longer than the test may
        for _ in range(2):
            with pytest.raises(dcp.CheckpointMismatch, match="configured differently: " + next(iter(options))):
                ours.save({"t": torch.ones(3), "u": 1}, tmp_path / "ck")
    dcp.save({"t": torch.ones(3)}, tmp_path / "ck", progress=first, io={"threads": 1 + first})


@on_ranks(2)
def test_a_failure_that_one_rank_knows_already_stops_the_next_save_on_all(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(async_save=True, timeout=600)  # who waits for the others waits longer than the test may
    with bad_disk(raising(OSError("bad disk"))):
        handle = ours.save({"t": torch.ones(3)}, tmp_path / "a")
        if dist.get_rank() == 0:
            refusal(dcp.SaveFailed, handle.wait, "bad disk")
        handle.wait_done()
    refusal(dcp.CheckpointError, lambda: ours.save({"t": torch.ones(3)}, tmp_path / "b"), "bad disk")
    ours.save({"t": torch.ones(3)}, tmp_path / "c")
    ours.close()


@on_ranks(2)
def test_a_subscriber_that_fails_after_the_commit_fails_no_rank(tmp_path: Path) -> None:
    def fail(event: events.Event) -> None:
        if isinstance(event, events.SaveFinished) and dist.get_rank() == 1:
            raise RuntimeError("a bug of somebody's")

    events.subscribe(fail)
    dcp.save({"t": torch.ones(3)}, tmp_path / "ck")
    assert (tmp_path / "ck").is_dir()
