"""What needs a GPU runs on a CPU, with no packages but those that a compute node has."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.cuda import SECTIONS

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "numpy", "safetensors", "pytest", "xxhash")
NO_CUDA_CALLS = """
import torch
def refuse(*args): raise AssertionError("a call of CUDA at import")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse
import tests.system.test_cuda
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with links to these packages, and to what they require."""
    folder = tmp_path_factory.mktemp("bare") / "environment"
    venv.create(folder, symlinks=True)
    place = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for name in _required(set(PACKAGES)):
        package = distribution(name)
        for entry in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (place / entry).exists():
                (place / entry).symlink_to(Path(str(package.locate_file(entry))))
    return folder / "bin" / "python"


def _required(names: set[str]) -> set[str]:
    """Return installed packages and all installed ones that they require."""
    required: set[str] = set()
    while missing := names - required:
        required |= missing
        for name in missing:
            try:
                wanted = list(map(Requirement, distribution(name).requires or ()))
            except PackageNotFoundError:
                required.discard(name)
                names = names - {name}
                continue
            names = names | {each.name for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})}
    return required


def _run(python: Path, *arguments: object, **environment: str) -> str:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "TEST_SEED") if name in os.environ}
    run = subprocess.run(
        [python, *map(str, arguments)], cwd=ROOT, env=kept | environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    return run.stdout


def test_the_environment_has_no_other_package(python: Path) -> None:
    names = _run(
        python,
        "-c",
        "import importlib.util as u; print([n for n in ('pytest_timeout', 'xdist', 'accelerate') if u.find_spec(n)])",
    )
    assert names.strip() == "[]"


def test_its_tests_run_all_bodies_on_a_cpu(python: Path) -> None:
    summary = _run(
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/system/test_cuda.py",
        TEST_DEVICE="cpu", TEST_SECONDS="2",
    ).splitlines()[-1]  # fmt: skip
    assert "passed" in summary and "skipped" not in summary


def test_its_tests_can_be_imported_before_a_fork(python: Path) -> None:
    assert _run(python, "-c", NO_CUDA_CALLS) == ""


def test_its_benchmark_writes_figures_of_all_sections(python: Path, tmp_path: Path) -> None:
    where = ("--where", tmp_path / "checkpoints", "--json", tmp_path / "figures.json")
    _run(python, "-m", "benchmarks", "cuda", "--smallest", *where)
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [table["title"] for table in written["tables"] if table["figures"]] == list(SECTIONS)
    table = (tmp_path / "figures.md").read_text()
    assert all(f"| {section} |" in table for section in SECTIONS)


def test_its_benchmark_says_what_a_time_limit_has_left_out(python: Path, tmp_path: Path) -> None:
    where = ("--where", tmp_path / "checkpoints", "--json", tmp_path / "figures.json")
    _run(python, "-m", "benchmarks", "cuda", "--smallest", "--seconds", "0", *where)
    assert "left out: loads, 1 rank(s): no time was left" in (tmp_path / "figures.md").read_text()
