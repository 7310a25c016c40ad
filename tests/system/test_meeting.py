"""A rank that is lost before the ranks have met, or after a failure parted them, is named on all others, in time."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin import events, meeting
from dcp_plugin.meeting import meet
from tests import launch
from tests.launch import on_ranks
from tests.limits import HANG
from tests.slowness import RankGate, has_ended

STATE = {"n": 1, "t": torch.ones(4)}


def _pids() -> list[int]:
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def _lose(lost: int) -> None:
    """Rank ``lost`` dies here; the others go on when it is dead."""
    pid = _pids()[lost]
    if dist.get_rank() == lost:
        os.kill(pid, signal.SIGKILL)
    has_ended(pid)


def _outlive_each_other() -> None:
    """Rank 0 hosts the store: the others need it until they have failed, too."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"failed {dist.get_rank()}", "")
    if dist.get_rank() == 0:
        store.wait(["failed 2"], timedelta(seconds=HANG))


def _refused(call: Any) -> dcp.RankFailure:
    with pytest.raises(dcp.RankFailure) as caught:
        call()
    return caught.value


def _call_without_rank_1(root: Path, what: str) -> str:
    ours = dcp.Checkpointer(timeout=1, async_save=what == "async")
    if what == "after a save":
        ours.save(STATE, root / "before")
        ours.close()
    _lose(1)
    state = dict(STATE)
    error = _refused(lambda: ours.load(state, root / "there") if what == "load" else ours.save(state, root / "ck"))
    _outlive_each_other()
    return str(error)


@pytest.mark.one_of
@pytest.mark.parametrize("what", ["first save", "async", "load", "after a save"])
def test_a_rank_that_died_before_the_ranks_met_is_named_on_all_others(tmp_path: Path, what: str) -> None:
    dcp.save(STATE, tmp_path / "there")
    outcomes = launch.outcomes_of(_call_without_rank_1, 3, tmp_path, what)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert not outcomes[rank].traceback, outcomes[rank].traceback
        assert f"rank {rank} could not meet the other ranks" in outcomes[rank].result
        assert "waited 1 s for rank 1. " in outcomes[rank].result
    assert not (tmp_path / "ck").exists()


def _call_without_the_host() -> str:
    _lose(0)
    return str(_refused(lambda: dcp.save(STATE, "nowhere", timeout=1)))


def test_the_loss_of_the_rank_that_hosts_the_store_is_ours_to_say(tmp_path: Path) -> None:
    outcomes = launch.outcomes_of(_call_without_the_host, 2)
    assert not outcomes[1].traceback, outcomes[1].traceback
    assert "process that hosts the store (a launcher or rank 0) has ended" in outcomes[1].result


def _call_while_the_host_stands_still(root: Path) -> str:
    host = _pids()[0]
    path = root / "stopped"
    if dist.get_rank() == 0:
        os.kill(host, signal.SIGSTOP)  # until rank 1 lets it go on
    else:
        _stopped(host)
    try:
        return str(_refused(lambda: dcp.save(STATE, path, timeout=1)))
    finally:
        os.kill(host, signal.SIGCONT)


def _stopped(pid: int) -> None:
    """Wait until a process stands still."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
        pass


def test_a_host_of_the_store_that_hangs_holds_nobody(tmp_path: Path) -> None:
    outcomes = launch.outcomes_of(_call_while_the_host_stands_still, 2, tmp_path)
    assert not outcomes[1].traceback, outcomes[1].traceback
    assert "within 1 s: the store of the process group does not answer" in outcomes[1].result
    assert not outcomes[0].traceback, outcomes[0].traceback
    assert "rank 0" in outcomes[0].result, "it came too late, and is told so, too"


@on_ranks(3)
def test_a_rank_that_comes_too_late_is_told_so_and_all_meet_the_next_time(tmp_path: Path) -> None:
    rank = dist.get_rank()
    gave_up = RankGate("the others gave up")
    ours = dcp.Checkpointer(timeout=20 if rank == 1 else 1)
    if rank == 1:  # something of the user's has raised here, and was caught
        gave_up()
    error = _refused(lambda: ours.save(STATE, tmp_path / "a"))
    assert "waited" in str(error) and "s for rank 1. " in str(error)
    gave_up.open()
    dist.barrier()
    dcp.save(STATE, tmp_path / "b", timeout=20)
    dist.barrier()
    assert dcp.verify(tmp_path / "b").ok and not (tmp_path / "a").exists()


def _lose_a_rank_after_a_failed_background_save(root: Path) -> tuple[str, list[str]]:
    def fail(event: events.Event) -> None:
        if dist.get_rank() == 0 and isinstance(event, events.BytesWritten):
            raise OSError("bad disk")

    events.subscribe(fail)
    ours = dcp.Checkpointer(timeout=1, async_save=True)
    ours.save(STATE, root / "one").wait_done()
    ours._groups.close()  # as a rank that is lost in the background does
    _lose(1)
    error = _refused(lambda: ours.save(STATE, root / "two"))
    ours.close()
    return str(error), error.__notes__


def test_a_lost_rank_does_not_hide_the_failure_of_the_save_before(tmp_path: Path) -> None:
    outcomes = launch.outcomes_of(_lose_a_rank_after_a_failed_background_save, 2, tmp_path)
    assert not outcomes[0].traceback, outcomes[0].traceback
    said, notes = outcomes[0].result
    assert "for rank 1. " in said
    assert len(notes) == 2 and "one: bad disk" in notes[0]


@pytest.mark.parametrize("missing", [[], [0], [57], [1, 2, 3], [3, 999], list(range(100, 400))])
def test_few_questions_find_who_is_missing_among_a_thousand(missing: list[int]) -> None:
    asked: list[int] = []

    def has(first: int, last: int) -> bool:
        asked.append(last - first)
        return not any(first <= rank < last for rank in missing)

    assert meeting._absent(has, 0, 1000) == missing[: meeting._MOST_NAMED]
    assert len(asked) <= 1 + 20 * min(len(missing), meeting._MOST_NAMED)
    assert sum(asked) <= 1000 + 3000 * min(len(missing), meeting._MOST_NAMED)


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_any_store_will_do(tmp_path: Path, kind: str) -> None:
    """The ranks are threads, each with its connection to the store."""

    def store(rank: int) -> dist.Store:
        if kind == "tcp":
            return dist.PrefixStore("p", dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False))
        return dist.FileStore(str(tmp_path / "store"), 4) if kind == "file" else shared

    port, shared = launch.free_port(), dist.HashStore()
    stores = [store(rank) for rank in range(4)]
    assert _attend(stores, "all", [0, 1, 2, 3]) == {}
    said = _attend(stores, "some", [0, 3])
    assert said.keys() == {0, 3} and all("for rank 1, rank 2. " in one for one in said.values())
    assert _attend(stores, "some", [1]).keys() == {1}, "who comes later is told at once"


def _attend(stores: list[dist.Store], key: str, who: list[int]) -> dict[int, str]:
    """What the ranks are refused with."""
    refused: dict[int, str] = {}

    def attend(rank: int) -> None:
        try:
            meeting._Meeting(stores[rank], key, rank, len(stores), 0.3).attend()
        except dcp.RankFailure as error:
            refused[rank] = str(error)

    threads = [Thread(target=attend, args=(rank,)) for rank in who]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return refused


def _meet_in_a_fake_group() -> str:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return str(_refused(lambda: meet(2)))


def test_a_fake_process_group_is_no_crash() -> None:
    (said,) = launch.run(_meet_in_a_fake_group, 1)
    assert "the process group has no real ranks" in said
