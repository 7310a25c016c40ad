"""Marks the tests that launch ranks: ``make check`` leaves them out."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "launch" in item.function.__code__.co_names:
            item.add_marker("ranks")
