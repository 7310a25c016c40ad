from collections.abc import Iterator

import pytest

from tests.faults.victims import Victims


@pytest.fixture(scope="session")
def victims() -> Iterator[Victims]:
    """Processes to which faults happen, forked from one that has imported torch."""
    with Victims() as made:
        yield made
