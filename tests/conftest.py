"""Marks the tests that launch ranks: ``make check`` leaves them out. And what several files ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Several test processes share the cores: threads of torch that wait for each other in turns take a fifth of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "launch" in item.function.__code__.co_names:
            item.add_marker("ranks")


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """What is told of each save that ends during the test."""
    from tests.finetune import finished_saves

    with finished_saves() as noted:
        yield noted
