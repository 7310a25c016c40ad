"""``make matrix``: tries the wheel with pairs of Python and torch, and writes the table of docs/reference/versions.md.

Each pair gets an empty environment with the wheel, what it needs, and torch; then ``smoke.py`` is run there, outside of
the repository. torch comes without the packages of CUDA: where pip finds a build for CUDA alone, ``hollow.py`` makes
the libraries that it wants to see. A file to run as it is: it needs no torch itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
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
_MINUTES = 10 * 60


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


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Try the wheel with pairs of Python and torch.")
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="versions of Python")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help="versions of torch")
    parser.add_argument("--index", help="an index with CPU builds: https://download.pytorch.org/whl/cpu")
    parser.add_argument("--strict", action="store_true", help="a pair that is not tried counts as failed")
    parser.add_argument("--no-table", action="store_true", help="leave docs/reference/versions.md as it is")
    given = parser.parse_args(None if arguments is None else list(arguments))
    pip = ["--extra-index-url", given.index] if given.index else []
    results = {}
    with tempfile.TemporaryDirectory(prefix="dcp-wheel-") as made:
        wheel = build(Path(made))
        for pair in ((python, torch) for python in given.python for torch in given.torch):
            results[pair] = tried(wheel, *pair, pip)
            print(f"Python {pair[0]}, torch {pair[1]}: {results[pair]}", flush=True)
    if not given.no_table:
        write(results)
    bad = ("failed", "not tried") if given.strict else "failed"
    return int(any(said.startswith(bad) for said in results.values()))


if __name__ == "__main__":
    sys.exit(main())
