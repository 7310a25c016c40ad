"""Readers beside a writer: a sample here, all with ``python -m tests.faults beside``."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan

import dcp_plugin as dcp
from dcp_plugin.checkpointer import Internals
from dcp_plugin.core.loading.forecast import plan_load
from dcp_plugin.core.loading.load import Loading
from dcp_plugin.core.runs import deletion
from dcp_plugin.core.storage.open import check_files
from tests.faults.beside import FILE_SYSTEMS, READERS, WRITERS, by_chance, windows, wrong_in
from tests.faults.scenes import number_in, save, state_of
from tests.faults.victims import NO_EXCHANGE, Fault, Victims
from tests.launch import on_ranks
from tests.slowness import RankGate

_BETWEEN_RENAMES = Fault("kill", calls=("rename",), at=2)


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_reader_beside_a_writer_gets_the_old_or_the_new_one(victims: Victims, writer: str, file_system: str) -> None:
    """Stopped at a few calls of two of the readers, other ones for each writer."""
    number = 2 * list(WRITERS).index(writer) + list(FILE_SYSTEMS).index(file_system)
    readers = [list(READERS)[(number + more) % len(READERS)] for more in (0, 2)]
    always, start = FILE_SYSTEMS[file_system], 9 + number
    found = [one for reader in readers for one in windows(victims, writer, reader, always, every=29, start=start)]
    assert found
    assert [one for one in found if one is not None] == []


def test_readers_and_a_writer_that_do_not_wait(victims: Victims) -> None:
    """Nothing is wrong, and something was saved meanwhile."""
    for name, results in by_chance(victims, 8 * 6):
        assert wrong_in(results) == {}, name
        assert results["saves"] > 0


class _Then:
    """Has rank 0 do something at a step of its first load, before or after it; rank 1 comes to that step later."""

    def __init__(self, step: str, act: Callable[[], Any], rank: int, name: str, first: bool) -> None:
        self._step, self._act, self._rank, self._first = getattr(Loading, step), act, rank, first
        self._gate = RankGate(name)
        self._done = False
        setattr(Loading, step, lambda loading, *args: self(loading, *args))

    def __call__(self, loading: Loading, *args: Any) -> Any:
        if self._done:
            return self._step(loading, *args)
        self._done = True
        if self._rank == 1:
            self._gate()
            return self._step(loading, *args)
        if self._first:
            self._act()
        result = self._step(loading, *args)
        if not self._first:
            self._act()
        self._gate.open()
        return result


@on_ranks(2)
def test_two_ranks_load_one_save_whatever_happens_beside_them(tmp_path: Path) -> None:
    rank = dist.get_rank()
    path = tmp_path / "last"
    checkpointer, alone = dcp.Checkpointer(), dcp.Checkpointer(solo=True)

    def replaced() -> None:
        alone.save(state_of(2), path).wait()

    def deleted() -> None:
        deletion.remove(path)

    cases = [
        ("checkpoint", replaced, False, 2),  # after rank 0 has opened it, before rank 1 does
        ("_plan", replaced, False, 2),  # after rank 0 has its data files open, before rank 1 has
        ("_read_values", replaced, True, 1),  # all have what they read open
        ("_read_values", deleted, True, 1),
        ("_plan", deleted, False, None),
    ]
    for number, (step, act, first, expected) in enumerate(cases):
        original = getattr(Loading, step)
        if rank == 0:
            alone.save(state_of(1), path).wait()
        Internals(checkpointer).ranks.agree("begin", lambda: None)
        _Then(step, act, rank, f"case {number}", first)
        target = state_of(-1)
        try:
            if expected is None:
                with pytest.raises(dcp.CheckpointNotFound, match="deleted"):
                    checkpointer.load(target, path)
                assert target["number"] == -1
            else:
                checkpointer.load(target, path)
                assert target["number"] == expected, step
                assert target["w"].unique().tolist() == [expected]
        finally:
            setattr(Loading, step, original)
        Internals(checkpointer).ranks.agree("end", lambda: None)


def test_a_file_that_is_missing_where_nothing_was_replaced_is_damage(tmp_path: Path) -> None:
    save(tmp_path / "ck", 1)
    next((tmp_path / "ck").glob("*.distcp")).unlink()
    with pytest.raises(dcp.CheckpointCorrupt, match="missing"):
        number_in(tmp_path / "ck")


def test_a_checkpoint_that_is_deleted_after_it_was_opened_is_not_found(tmp_path: Path) -> None:
    save(tmp_path / "ck", 1)
    with dcp.ShardedReader(tmp_path / "ck") as reader:
        assert len(reader.index) == 4
        deletion.remove(tmp_path / "ck")
        with pytest.raises(dcp.CheckpointNotFound, match="deleted or replaced"):
            check_files(reader.open())


def test_ranks_of_a_stock_load_that_opened_different_saves_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "ck", 1)
    with dcp.ShardedReader(tmp_path / "ck") as first, dcp.ShardedReader(tmp_path / "ck") as second:
        plans = [first.prepare_local_plan(LoadPlan([]))]
        save(tmp_path / "ck", 1)  # the same contents, and another save all the same
        plans.append(second.prepare_local_plan(LoadPlan([])))
        with pytest.raises(dcp.CheckpointMismatch, match="rank 1 and rank 0 opened different checkpoints"):
            first.prepare_global_plan(plans)


def test_a_checkpoint_that_is_set_aside_is_its_own_latest(victims: Victims, tmp_path: Path) -> None:
    save(tmp_path / "ck", 1)
    outcome = victims.run(save, tmp_path / "ck", 2, below=tmp_path, faults=[NO_EXCHANGE, _BETWEEN_RENAMES])
    assert outcome.exit_code == -9
    assert not (tmp_path / "ck").exists()
    found = dcp.latest(tmp_path / "ck")
    assert found is not None
    assert number_in(found) == 1


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    """Without the collector of garbage, which would close what was forgotten."""
    for number in range(3):
        save(tmp_path / f"step-{number}", number)
    torn = tmp_path / "torn"
    save(torn, 1)
    next(torn.glob("*.distcp")).unlink()
    target = state_of(-1)
    gc.collect()
    gc.disable()
    try:
        before = _descriptors()
        for _ in range(20):
            path = dcp.latest(tmp_path)
            assert path is not None
            dcp.load(target, path)
            assert dcp.verify(path).ok
            assert dcp.inspect(path).tensors
            assert len(dcp.list_checkpoints(tmp_path)) == 4
            assert plan_load(target, path).items
            with pytest.raises(dcp.CheckpointCorrupt):
                dcp.load(target, torn)
        assert _descriptors() == before
    finally:
        gc.enable()


def _look_with_few_descriptors(root: Path) -> Path | None:
    most = _descriptors() + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    path = dcp.latest(root)
    assert path is not None
    assert number_in(path) == 39
    return path


def test_looking_at_many_checkpoints_takes_few_descriptors(victims: Victims, tmp_path: Path) -> None:
    for number in range(40):
        save(tmp_path / f"step-{number}", number)
    outcome = victims.run(_look_with_few_descriptors, tmp_path, below=tmp_path)
    assert outcome.error is None, outcome.traceback
    assert outcome.result == tmp_path / "step-39"
