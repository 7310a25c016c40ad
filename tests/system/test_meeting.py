"""A rank that is lost before the ranks have met, or after a failure parted them, is named on all others, in time."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin.core.ranks import meeting
from dcp_plugin.core.ranks.meeting import meet
from tests import launch
from tests.damage import bad_disk, raising
from tests.dying import lose
from tests.launch import gathered, on_ranks
from tests.limits import HANG
from tests.slowness import RankGate

STATE = {"n": 1, "t": torch.ones(4)}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    dcp.save(STATE, tmp_path / "there")
    return tmp_path / "there"


@pytest.mark.one_of
@pytest.mark.parametrize("what", ["first save", "async", "load", "after a save"])
@on_ranks(3, killed=[1])
def test_a_rank_that_died_before_the_ranks_met_is_named_on_all_others(tmp_path: Path, there: Path, what: str) -> None:
    rank = dist.get_rank()
    ours = dcp.Checkpointer(timeout=1, async_save=what == "async")
    if what == "after a save":
        ours.save(STATE, tmp_path / "before")
        ours.close()
    lose(1)
    state = dict(STATE)
    with pytest.raises(dcp.RankFailure) as caught:
        ours.load(state, there) if what == "load" else ours.save(state, tmp_path / "ck")
    store = dist.distributed_c10d._get_default_store()
    store.set(f"failed {rank}", "")
    if rank == 0:  # it hosts the store, which the other needs until it has failed, too
        store.wait(["failed 2"], timedelta(seconds=HANG))
    assert f"rank {rank} could not meet the other ranks" in str(caught.value)
    assert "waited 1 s for rank 1. " in str(caught.value)
    assert not (tmp_path / "ck").exists()


@on_ranks(2, killed=[0])
def test_the_loss_of_the_rank_that_hosts_the_store_is_ours_to_say(tmp_path: Path) -> None:
    lose(0)
    with pytest.raises(dcp.RankFailure, match=r"process that hosts the store \(a launcher or rank 0\) has ended"):
        dcp.save(STATE, "nowhere", timeout=1)


@on_ranks(2)
def test_a_host_of_the_store_that_hangs_holds_nobody(tmp_path: Path) -> None:
    host = gathered(os.getpid())[0]
    if dist.get_rank() == 0:
        os.kill(host, signal.SIGSTOP)  # until rank 1 lets it go on
    else:
        while Path(f"/proc/{host}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
            pass
    try:
        with pytest.raises(dcp.RankFailure) as caught:
            dcp.save(STATE, tmp_path / "stopped", timeout=1)
    finally:
        os.kill(host, signal.SIGCONT)
    late, in_time = "rank 0", "within 1 s: the store of the process group does not answer"
    assert (in_time if dist.get_rank() else late) in str(caught.value)


@on_ranks(3)
def test_a_rank_that_comes_too_late_is_told_so_and_all_meet_the_next_time(tmp_path: Path) -> None:
    rank = dist.get_rank()
    gave_up = RankGate("the others gave up")
    ours = dcp.Checkpointer(timeout=20 if rank == 1 else 1)
    if rank == 1:  # something of the user's has raised here, and was caught
        gave_up()
    with pytest.raises(dcp.RankFailure, match=r"waited.*s for rank 1\. "):
        ours.save(STATE, tmp_path / "a")
    gave_up.open()
    dist.barrier()
    dcp.save(STATE, tmp_path / "b", timeout=20)
    dist.barrier()
    assert dcp.verify(tmp_path / "b").ok and not (tmp_path / "a").exists()


@on_ranks(2, killed=[1])
def test_a_lost_rank_does_not_hide_the_failure_of_the_save_before(tmp_path: Path) -> None:
    ours = dcp.Checkpointer(timeout=1, async_save=True)
    with bad_disk(raising(OSError("bad disk")), rank=0):
        ours.save(STATE, tmp_path / "one").wait_done()
    ours._groups.close()  # as a rank that is lost in the background does
    lose(1)
    with pytest.raises(dcp.RankFailure, match=r"for rank 1\. ") as caught:
        ours.save(STATE, tmp_path / "two")
    ours.close()
    assert len(caught.value.__notes__) == 2 and "one: bad disk" in caught.value.__notes__[0]


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


@on_ranks(1)
def test_a_fake_process_group_is_no_crash() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with pytest.raises(dcp.RankFailure, match="the process group has no real ranks"):
        meet(2)
