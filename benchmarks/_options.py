"""The command line that the benchmarks share."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks._machine import file_system_of

SMALLEST = ["--mib", "1", "--where", "outputs", "--repeats", "1"]
"""Of what :func:`parser` knows, for a run of a second or two."""


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    assert about is not None
    made = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=about.splitlines()[0])
    made.add_argument("--mib", type=int, default=1024, help="size of the mixed state, MiB (default %(default)s)")
    made.add_argument("--repeats", type=int, default=5, help="timed repetitions (default %(default)s)")
    places = [Path("outputs"), Path("/dev/shm")]
    made.add_argument("--where", nargs="+", type=Path, default=places, help="directories (default %(default)s)")
    made.add_argument("--peers", nargs="+", help="only these, and ours (default all)")
    made.add_argument("--json", type=Path, help="where the figures go (default outputs/benchmark-NAME.json)")
    return made


def with_state(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    about = "mixed: 200 tensors of 4 KiB to 32 MiB; a number: so many of 4 KiB (default %(default)s)"
    made.add_argument("--state", nargs="+", default=["mixed", "4000"], help=about)
    made.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="(default %(default)s)")
    return made


@contextmanager
def scratch(where: Path) -> Iterator[Path]:
    """A directory there that is gone afterwards."""
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=where) as directory:
        yield Path(directory)


class LoadCase(NamedTuple):
    """One table of a benchmark that loads."""

    state: str
    world: int
    cold: bool
    root: Path
    """Empty, and gone after the case."""
    title: str


def load_cases(options: argparse.Namespace) -> Iterator[LoadCase]:
    """Every combination that was asked for. A file system in memory has no cold files, small states need none."""
    for where in options.where:
        for state in options.state:
            for world in options.ranks:
                for cold in (False, True):
                    with scratch(where) as root:
                        kept = file_system_of(root)
                        if cold and (kept.startswith("tmpfs") or state != "mixed"):
                            continue
                        size = f"{options.mib} MiB in 200 tensors" if state == "mixed" else f"{state} tensors of 4 KiB"
                        title = f"{'cold' if cold else 'warm'}, {size}, {world} rank(s), {where} ({kept})"
                        yield LoadCase(state, world, cold, root, title)
