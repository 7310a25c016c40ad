"""Three lives of the soak; thirty minutes of it with ``python -m tests.faults soak``."""

from __future__ import annotations

from tests.faults.soak import soak


def test_lives_with_kills_on_other_ranks_and_a_reader_beside_them() -> None:
    assert list(soak(minutes=10, seed=3, most_lives=3)) == 4 * [[]]
