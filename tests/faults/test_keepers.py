"""What a training with keepers lives through, at moments that are the same in each run; more by the campaign."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.faults import keepers
from tests.host_process import why_no_namespaces

pytestmark = pytest.mark.ranks
apart = pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())


def _nothing_wrong(found: Iterable[list[str]], times: int) -> None:
    results = list(found)
    assert len(results) == times
    assert [wrong for wrong in results if wrong] == []


def test_ranks_that_are_killed_resume_from_memory(tmp_path: Path) -> None:
    _nothing_wrong(keepers.killed(tmp_path, 3, seed=2, replicas=1, durable_every=5), 4)


@pytest.mark.parametrize(
    "local", [pytest.param(True, id="local"), pytest.param(False, id="process", marks=pytest.mark.long)]
)
def test_what_save_has_returned_for_is_published_without_the_training(tmp_path: Path, local: bool) -> None:
    keeper = {} if local else {"dir": None}
    _nothing_wrong(keepers.after_save(tmp_path, 1, **keeper), 2)


@pytest.mark.long
@pytest.mark.parametrize("losses", [[1], [1, 2]])
def test_a_neighbour_has_what_a_lost_host_had_and_the_durable_storage_what_two_had(
    tmp_path: Path, losses: list[int]
) -> None:
    _nothing_wrong(keepers.lost(tmp_path, losses, seed=1), len(losses))


@pytest.mark.long
def test_a_host_fewer_and_other_layouts_load_every_byte(tmp_path: Path) -> None:
    _nothing_wrong(keepers.reshaped(tmp_path, keepers.LAYOUTS), 5)


@pytest.mark.long
def test_a_training_goes_on_when_its_keepers_are_killed(tmp_path: Path) -> None:
    _nothing_wrong(keepers.without_keepers(tmp_path, 1, seed=5, replicas=1, durable_every=3), 2)


@apart
@pytest.mark.long
@pytest.mark.parametrize("what", ["memory", "disk"])
def test_a_training_goes_on_when_a_host_has_no_room(tmp_path: Path, what: str) -> None:
    assert keepers.full(tmp_path, what) == []


@apart
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(keepers.slow, id="slow link", marks=pytest.mark.long),
        pytest.param(lambda folder: keepers.cut(folder, "at once"), id="cut link", marks=pytest.mark.long),
        pytest.param(keepers.store_down, id="store down"),
    ],
)
def test_what_fails_for_a_while_is_caught_up_with(tmp_path: Path, fault: Callable[[Path], list[str]]) -> None:
    assert fault(tmp_path) == []


@apart
@pytest.mark.long
def test_a_cut_that_is_noticed_is_caught_up_with(tmp_path: Path) -> None:
    assert keepers.cut(tmp_path, "noticed") == []


@pytest.mark.one_of("what")
@pytest.mark.parametrize("what", ["run", "user"])
def test_memory_of_something_else_is_passed_over_and_told(tmp_path: Path, what: str) -> None:
    assert keepers.stale(tmp_path, what) == []


@apart
@pytest.mark.one_of("tier")
@pytest.mark.parametrize("tier", keepers.TIERS)
def test_the_newest_save_returns_whichever_host_has_its_clock_set_back(tmp_path: Path, tier: str) -> None:
    assert keepers.clocks(tmp_path, tier) == []


@apart
def test_local_saves_of_a_branch_that_was_abandoned_stay_older(tmp_path: Path) -> None:
    assert keepers.abandoned(tmp_path) == []


@apart
@pytest.mark.long
def test_a_training_goes_on_beside_a_stopped_keeper_and_what_it_has_saved_stays(tmp_path: Path) -> None:
    _nothing_wrong(keepers.stopped(tmp_path, 4, seed=46), 4)


@apart
@pytest.mark.long
def test_nothing_is_left_after_many_lives(tmp_path: Path) -> None:
    assert keepers.leaks(tmp_path, 11, seed=1) == []
