"""The frame of all campaigns: a command line, parts in which faults are injected, and their count.

A part yields once for each fault: what was wrong, or something empty.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Parts = Iterator[tuple[str, Iterable[object]]]

OPTIONS = {
    "count": "how many faults at moments or places by chance, in all parts",
    "every": "only every so many of the moments that are counted; for readers and stores 0: none",
    "minutes": "for how long",
    "races": "races of two and of four writers",
    "seed": "of what is by chance",
    "partly": "stop the writer at each of its calls, too",
    "case": "one case only, as it was printed",
}


@dataclass(frozen=True)
class Campaign:
    """
    Args:
        about: What ``--help`` says of it.
        parts: From the arguments, the name of each part and what it has found.
        defaults: The options that it has, of all in :data:`OPTIONS`.
    """

    about: str
    parts: Callable[[Any], Parts]
    defaults: Mapping[str, Any]

    def run(self, name: str, arguments: Sequence[str]) -> int:
        """Print everything that is wrong as it is found, and how often in each part; return the exit status."""
        parser = argparse.ArgumentParser(prog=f"python -m tests.faults {name}".strip(), description=self.about)
        for option, default in self.defaults.items():
            how = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
            parser.add_argument(f"--{option}", help=OPTIONS[option], **how)
        parser.add_argument("--only", default="", metavar="TEXT", help="parts with this in their names")
        chosen = parser.parse_args(arguments)
        total = wrong = 0
        for part, found in self.parts(chosen):
            if chosen.only in part:
                times, bad = counted(part, found)
                total, wrong = total + times, wrong + bad
        print(f"{total} faults, {wrong} wrong")
        return bool(wrong)


def counted(name: str, found: Iterable[object]) -> tuple[int, int]:
    """Print what was wrong in a part; return the number of faults, and of those after which something was wrong."""
    times = wrong = 0
    for problem in found:
        times += 1
        if problem:
            wrong += 1
            print(problem, flush=True)
    print(f"{name}: {times} times, {wrong} wrong", flush=True)
    return times, wrong
