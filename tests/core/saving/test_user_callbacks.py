"""Whatever a user's own code raises inside of a save: what the save says of it is true, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin import events
from tests.launch import on_ranks
from tests.messages import logged
from tests.objects import Holder
from tests.places import names_in
from tests.slowness import Gate, slow_writes

OLD, NEW = {"n": 1}, {"n": 2}


def _raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any) -> None:
        raise error

    return fail


def _untouched(root: Path) -> bool:
    there = {"n": 0}
    dcp.load(there, root / "ck")
    return there == OLD and names_in(root) == ["ck"]


@pytest.mark.parametrize("error", [OSError("no room"), ValueError("odd"), MemoryError(), dcp.CheckpointError("mine")])
@pytest.mark.parametrize("background", [False, True])
def test_a_failing_files_callback_is_a_failed_save(tmp_path: Path, error: Exception, background: bool) -> None:
    dcp.save(OLD, tmp_path / "ck")
    ours = dcp.Checkpointer(async_save=background)
    with pytest.raises(dcp.SaveFailed, match=str(error) or "MemoryError") as caught:
        ours.save(NEW, tmp_path / "ck", files=_raiser(error))
    assert error in (caught.value.__cause__, caught.value)
    ours.close()
    assert _untouched(tmp_path)


@on_ranks(2)
def test_a_files_callback_that_fails_on_one_rank_is_a_failed_save_on_all(tmp_path: Path) -> None:
    dcp.save(OLD, tmp_path / "ck")
    fail = _raiser(OSError("no room")) if dist.get_rank() else lambda directory: None
    with pytest.raises(dcp.SaveFailed, match="rank 1: OSError: no room"):
        dcp.Checkpointer().save(NEW, tmp_path / "ck", files=fail)
    dist.barrier()
    assert _untouched(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("where", ["files", "state_dict"])
def test_an_end_of_the_program_in_a_callback_leaves_nothing(
    tmp_path: Path, error: BaseException, background: bool, where: str
) -> None:
    dcp.save(OLD, tmp_path / "ck")
    ours = dcp.Checkpointer(async_save=background)
    files = _raiser(error) if where == "files" else lambda directory: (directory / "note").write_text("hello")
    stateful = Holder({})
    stateful.state_dict = _raiser(error)  # type: ignore[method-assign]
    state = {**NEW, "it": stateful} if where == "state_dict" else NEW
    with pytest.raises(type(error)):
        ours.save(state, tmp_path / "ck", files=files)
    assert _untouched(tmp_path)
    ours.save(NEW, tmp_path / "ck").wait()
    ours.close()


@pytest.mark.parametrize("error", [OSError("no room"), SystemExit(3)])
def test_what_is_raised_after_a_save_was_published_does_not_make_it_a_failed_one(
    tmp_path: Path, error: BaseException
) -> None:
    def at_end(event: events.Event) -> None:
        if isinstance(event, events.SaveFinished):
            raise error

    ours = dcp.Checkpointer(async_save=True, events=str(tmp_path / "saves.jsonl"))
    unsubscribe = events.subscribe(at_end)
    try:
        handle = ours.save(NEW, tmp_path / "a")
        handle.wait()
        unsubscribe()
        gate = Gate()
        gate.close()
        with slow_writes(gate):
            handle = ours.save(NEW, tmp_path / "b")
            handle.on_published(_raiser(error))
            gate.open()
            handle.wait()
        ours.close()
    finally:
        unsubscribe()
    assert dcp.verify(tmp_path / "a").ok and dcp.verify(tmp_path / "b").ok
    lines = (tmp_path / "saves.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["saved", "saved"]


@on_ranks(2)
def test_a_subscriber_that_would_end_its_thread_ends_no_save(tmp_path: Path) -> None:
    def leave(event: events.Event) -> None:
        if isinstance(event, events.SaveStarted) and dist.get_rank() == 1:
            raise SystemExit(3)

    events.subscribe(leave)
    lines = logged()
    ours = dcp.Checkpointer(async_save=True, timeout=60)
    ours.save(NEW, tmp_path / "ck").wait()
    ours.close()
    assert dcp.verify(tmp_path / "ck").ok
    assert ["a callback for SaveStarted" in line for line in lines] == [True] * dist.get_rank()
