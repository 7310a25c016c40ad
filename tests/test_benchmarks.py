"""Every benchmark runs from its command line, at its smallest size."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import names
from benchmarks.report.figures import tables_of
from tests import launch


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each failed with. One process runs all of them: alone, each would take a second, and four for imports."""
    (found,) = launch.run(_run_all, 1, tmp_path_factory.mktemp("benchmarks"))
    return found  # type: ignore[no-any-return]


def _run_all(root: Path) -> dict[str, str]:
    dist.destroy_process_group()
    os.chdir(root)
    return {name: _run(name, root / f"{name}.json") for name in names()}


def _run(name: str, figures: Path) -> str:
    sys.argv = ["benchmarks", name, "--smallest", "--json", str(figures)]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
        assert tables_of(json.loads(figures.read_text()))
        assert printed.getvalue(), "no table"
    except BaseException:
        return f"{printed.getvalue()}\n{traceback.format_exc()}"
    return ""


@pytest.mark.parametrize("name", names())
def test_it_runs_at_its_smallest(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
