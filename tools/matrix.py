"""``make matrix``: tries pairs of Python and torch, and the oldest frameworks, and writes docs/reference/versions.md.

Each pair gets an empty environment with the wheel, what it needs, and torch; then ``smoke.py`` is run there, outside of
the repository. torch comes without the packages of CUDA: where pip finds a build for CUDA alone, ``hollow.py`` makes
the libraries that it wants to see. For the pairs, a file to run as it is: it needs no torch itself.

The oldest version of a framework is the one in ``pyproject.toml``. It is installed into a folder in front of the
environment that runs this file, and the tests of that integration run with it: that environment has to be the one of
``make test``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

if __package__:
    from tools import hollow
else:
    import hollow

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "versions.md"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")
NEEDS_OF_TORCH = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")
PASSED, PASSED_HOLLOW = "passed", "passed (CUDA build)"
NO_PYTHON = "not tried: no such interpreter"
NO_CPU_BUILD = "not tried: no build for the CPU, no compiler"
NO_TORCH = "not tried: no such build of torch"
_BEGIN, _END = "<!-- matrix: written by make matrix -->", "<!-- end of matrix -->"
_BEGIN_BOUNDS, _END_BOUNDS = "<!-- bounds: written by make matrix -->", "<!-- end of bounds -->"
_MINUTES = 10 * 60


@dataclass(frozen=True)
class Framework:
    """A framework whose oldest version ``make matrix`` tries."""

    extra: str
    """Extra of ``pyproject.toml`` that has the lower bound."""
    tests: tuple[str, ...]
    """Folders of the tests that run with it."""
    packages: tuple[str, ...] = ()
    """More packages of the same version."""
    needs: tuple[str, ...] = ()
    """Requirements of the oldest version that the versions of ``constraints.txt`` are too new for."""


FRAMEWORKS = {
    "accelerate": Framework("accelerate", ("tests/accelerate",)),
    "lightning": Framework("lightning", ("tests/lightning", "tests/fabric"), packages=("pytorch-lightning",)),
    "transformers": Framework("hf", ("tests/transformers",), needs=("huggingface-hub<2", "tokenizers<=0.23.0")),
}


def interpreter(version: str) -> str | None:
    """A Python of this version that runs: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    for python in filter(None, found):
        asked = subprocess.run(
            [python, "-c", "import sys, venv; print(*sys.version_info[:2], sep='.')"], capture_output=True, text=True
        )
        if asked.returncode == 0 and asked.stdout.strip() == version:
            return python
    return None


def _pip(python: str) -> list[str]:
    return [python, "-m", "pip", "--disable-pip-version-check"]


def build(into: Path) -> Path:
    """The wheel of what is checked out."""
    command = [*_pip(sys.executable), "wheel", "-q", "--no-deps", "--wheel-dir", str(into), str(ROOT)]
    subprocess.run(command, check=True, timeout=_MINUTES)
    return next(into.glob("*.whl"))


def tried(wheel: Path, version: str, torch: str, pip: list[str]) -> str:
    """What came of one pair, in a few words."""
    python = interpreter(version)
    if python is None:
        return NO_PYTHON
    with tempfile.TemporaryDirectory(prefix="dcp-matrix-") as made:
        folder = Path(made)
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True, timeout=_MINUTES)
        python = str(folder / "venv/bin/python")
        shutil.copy(ROOT / "tools/smoke.py", folder)
        # Not the checkout, but what is installed: its egg-info would tell pip that there is nothing to install.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

        def run(*command: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_MINUTES
            )

        for asked in (["--no-deps", f"torch=={torch}"], NEEDS_OF_TORCH, [f"{wheel}[cli]"]):
            step = run(*_pip(python), "install", "-q", *pip, *asked)
            if step.returncode:
                absent = "No matching distribution found for torch" in step.stderr
                return NO_TORCH if absent else f"failed: {_last_line(step.stderr)}"
        installed = next((folder / "venv/lib").glob("python*/site-packages/torch"))
        is_hollow = (installed / "lib/libtorch_cuda.so").exists()
        if is_hollow:
            if not hollow.can_be_made():
                return NO_CPU_BUILD
            (folder / "cuda").mkdir()
            hollow.make(installed, folder / "cuda")
            environment["LD_LIBRARY_PATH"] = str(folder / "cuda")
        smoke = run(python, "smoke.py")
        if smoke.returncode or not smoke.stdout.endswith("ok\n"):
            sys.stderr.write(smoke.stderr)
            return f"failed: {_last_line(smoke.stderr)}"
        return PASSED_HOLLOW if is_hollow else PASSED


def oldest(framework: str) -> str:
    """Return the lower bound of a framework in ``pyproject.toml``."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bounds = (re.fullmatch(rf"{framework}>=([\d.]+)", need) for need in extras[FRAMEWORKS[framework].extra])
    return next(match[1] for match in bounds if match)


def tried_oldest(framework: str, pip: list[str]) -> str:
    """Return the result of the integration's tests with the oldest version of a framework."""
    wanted, version = FRAMEWORKS[framework], oldest(framework)
    with tempfile.TemporaryDirectory(prefix="dcp-oldest-") as folder:
        packages = [f"{name}=={version}" for name in (framework, *wanted.packages)]
        install = [*_pip(sys.executable), "install", "-q", "--no-deps", "--target", folder, *pip]
        step = subprocess.run([*install, *packages, *wanted.needs], capture_output=True, text=True, timeout=_MINUTES)
        if step.returncode:
            return f"failed: {_last_line(step.stderr)}"
        tests = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--no-header", *wanted.tests],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join((folder, str(ROOT)))},
            stdout=subprocess.PIPE,
            text=True,
        )
        counts = re.sub(r"( in |, \d+ (warning|deselected)).*", "", _last_line(tests.stdout).strip("= "))
        if tests.returncode:
            sys.stderr.write(tests.stdout)
        return f"failed: {counts}" if tests.returncode else counts


def _last_line(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
    return lines[-1].strip().replace("|", "/")[:120]


def known() -> dict[tuple[str, str], str]:
    """The table as it is: what cannot be tried on this machine may have been tried on another."""
    text = PAGE.read_text()
    block = text[text.index(_BEGIN) : text.index(_END)] if _BEGIN in text else ""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]
    if len(rows) < 3:
        return {}
    return {
        (row[0].removeprefix("Python "), head.removeprefix("torch ")): cell
        for row in rows[2:]
        for head, cell in zip(rows[0][1:], row[1:], strict=True)
    }


def write(results: dict[tuple[str, str], str]) -> None:
    """The table anew. A pair that was tried before keeps its result where this machine cannot try it."""
    merged = known()
    for pair, said in results.items():
        if not (said.startswith("not tried") and not merged.get(pair, "not tried").startswith("not tried")):
            merged[pair] = said
    head = "| | " + " | ".join(f"torch {torch}" for torch in TORCHES) + " |"
    lines = [_BEGIN, head, "|---" * (len(TORCHES) + 1) + "|"]
    for python in PYTHONS:
        cells = [merged.get((python, torch), "not tried") for torch in TORCHES]
        lines.append(f"| Python {python} | " + " | ".join(cells) + " |")
    lines += ["", f"Last run: {datetime.now(UTC):%Y-%m-%d}.", ""]
    text = PAGE.read_text()
    before, _, rest = text.partition(_BEGIN)
    PAGE.write_text(before + "\n".join(lines) + _END + rest.partition(_END)[2])


def known_oldest() -> dict[str, tuple[str, str]]:
    """Return the version and the result of each framework in the table of oldest versions."""
    block = PAGE.read_text().partition(_BEGIN_BOUNDS)[2].partition(_END_BOUNDS)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]
    return {row[0]: (row[1], row[2]) for row in rows[2:]}


def write_oldest(results: dict[str, str]) -> None:
    """Write the table of oldest versions anew, with the results of this run in place of earlier ones."""
    merged = known_oldest() | {name: (oldest(name), result) for name, result in results.items()}
    rows = [f"| {name} | {version} | {result} |" for name, (version, result) in sorted(merged.items())]
    text = PAGE.read_text()
    before, _, rest = text.partition(_BEGIN_BOUNDS)
    table = [_BEGIN_BOUNDS, "| package | oldest version | tests |", "|---|---|---|", *rows, ""]
    PAGE.write_text(before + "\n".join(table) + _END_BOUNDS + rest.partition(_END_BOUNDS)[2])


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Try pairs of Python and torch, and the oldest frameworks.")
    parser.add_argument("--python", nargs="+", help="versions of Python")
    parser.add_argument("--torch", nargs="+", help="versions of torch")
    parser.add_argument(
        "--oldest", nargs="+", choices=FRAMEWORKS, help="frameworks; leaves out pairs that are not given"
    )
    parser.add_argument("--index", help="an index with CPU builds: https://download.pytorch.org/whl/cpu")
    parser.add_argument("--strict", action="store_true", help="a pair that is not tried counts as failed")
    parser.add_argument("--no-table", action="store_true", help="leave docs/reference/versions.md as it is")
    given = parser.parse_args(None if arguments is None else list(arguments))
    pip = ["--extra-index-url", given.index] if given.index else []
    has_pairs = given.python or given.torch
    pairs = [(python, torch) for python in given.python or PYTHONS for torch in given.torch or TORCHES]
    results = _try_pairs(pairs, pip) if has_pairs or not given.oldest else {}
    frameworks = given.oldest or ([] if has_pairs else FRAMEWORKS)
    results_of_oldest = {}
    for framework in frameworks:
        results_of_oldest[framework] = tried_oldest(framework, pip)
        print(f"{framework} {oldest(framework)}: {results_of_oldest[framework]}", flush=True)
    if results and not given.no_table:
        write(results)
    if results_of_oldest and not given.no_table:
        write_oldest(results_of_oldest)
    bad = ("failed", "not tried") if given.strict else "failed"
    return int(any(said.startswith(bad) for said in (*results.values(), *results_of_oldest.values())))


def _try_pairs(pairs: list[tuple[str, str]], pip: list[str]) -> dict[tuple[str, str], str]:
    results = {}
    with tempfile.TemporaryDirectory(prefix="dcp-wheel-") as made:
        wheel = build(Path(made))
        for python, torch in pairs:
            results[python, torch] = tried(wheel, python, torch, pip)
            print(f"Python {python}, torch {torch}: {results[python, torch]}", flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
