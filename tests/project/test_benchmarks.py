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

SMOKE = ("comparing", "load", "plan", "save")
"""One benchmark of each family runs in ``make test``: of tools, loads, planning and saves. The others are long."""
NAMES = [name if name in SMOKE else pytest.param(name, marks=pytest.mark.long) for name in names()]


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Errors of the selected benchmarks by name. One process runs all of them, since the imports take four seconds."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    selected = [test.callspec.params["name"] for test in tests if test.function is test_it_runs_at_its_smallest]
    [errors] = launch.run(_run_all, 1, tmp_path_factory.mktemp("benchmarks"), selected)
    return errors  # type: ignore[no-any-return]


def _run_all(root: Path, selected: list[str]) -> dict[str, str]:
    dist.destroy_process_group()
    os.chdir(root)
    return {name: _run(name, root / f"{name}.json") for name in selected}


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


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_at_its_smallest(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
