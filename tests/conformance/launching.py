"""Runs cases on real ranks, all of one tool and world size in one launch, and judges them."""

from __future__ import annotations

import functools
import pickle
import shutil
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import launch
from tests.conformance.cases import Case, find
from tests.conformance.tools import TOOLS
from tests.conformance.trace import Raised, Trace, tracing
from tests.conformance.verdict import Seen, Verdict, judge

_NOT_MET = "the ranks of this case did not meet"
SECONDS_PER_WAIT = 15
"""How long a rank waits for one that has failed alone."""


def verdicts(cases: Iterable[Case]) -> dict[str, Verdict]:
    """The verdict on each case by its name. One launch for each tool and world size, and one more for each crash."""
    cases = list(cases)
    batches: dict[tuple[str, int], list[str]] = defaultdict(list)
    for case in cases:
        batches["ours", case.world_size].append(case.name)
        if case.oracle in TOOLS:
            batches[case.oracle, case.world_size].append(case.of_stock or case.name)
    seen = {batch: run_cases(tuple(dict.fromkeys(names)), *batch) for batch, names in batches.items()}
    return {case.name: _judged(case, seen) for case in cases}


def _judged(case: Case, seen: Mapping[tuple[str, int], Mapping[str, Seen]]) -> Verdict:
    ours = seen["ours", case.world_size][case.name]
    if case.oracle not in TOOLS:
        return judge(ours, ours, case.oracle, case.differs, case.must_work)
    stock = seen[case.oracle, case.world_size][case.of_stock or case.name]
    if case.judge is not None:
        return case.judge(ours, stock)
    return judge(ours, stock, case.oracle, case.differs, case.must_work)


@functools.cache
def run_cases(names: tuple[str, ...], tool: str, world_size: int) -> dict[str, list[Trace] | str]:
    """What each rank sees of each case; or, of a case that killed a process, how."""
    found: dict[str, list[Trace] | str] = {}
    remaining, launches = list(names), 0
    while remaining:
        with tempfile.TemporaryDirectory(prefix="conformance") as folder:
            ends = launch.outcomes_of(_rank, world_size, remaining, tool, Path(folder))
            began = all((Path(folder) / f"traces.{rank}").exists() for rank in range(world_size))
            traces = [_read(Path(folder) / f"traces.{rank}") for rank in range(world_size)]
        finished = min(map(len, traces))
        met = began and not all(_NOT_MET in end.traceback for end in ends)
        _seconds.extend((seen.seconds, tool, name) for name, seen in zip(remaining, traces[0], strict=False))
        found |= {name: list(seen) for name, seen in zip(remaining, zip(*traces, strict=False), strict=False)}
        if not met and launches < 2:  # on a busy machine ranks may fail to meet; that is nobody's case
            launches, remaining = launches + 1, remaining[finished:]
            continue
        if finished < len(remaining):
            said = [end.traceback or f"exit code {end.exit_code}" for end in ends]
            found[remaining[finished]] = "; ".join(f"rank {rank}: {text[-600:]}" for rank, text in enumerate(said))
        remaining = remaining[finished + 1 :]
    return found


def slowest() -> list[tuple[float, str, str]]:
    """Seconds, tool and name of every case that has run."""
    return _seconds


_seconds: list[tuple[float, str, str]] = []


def _rank(names: Sequence[str], tool: str, folder: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    with open(folder / f"traces.{rank}", "ab") as log:
        for number, name in enumerate(names):
            here = folder / str(number)
            here.mkdir(exist_ok=True)
            with _group_of_its_own(here / "meeting", rank, world_size):
                pickle.dump(_traced(find(name).code, tool, here), log)
                log.flush()
            if rank == 0:
                shutil.rmtree(folder / str(number - 1), ignore_errors=True)


@contextmanager
def _group_of_its_own(meeting: Path, rank: int, world_size: int) -> Iterator[None]:
    """A process group for one case: ranks that failed apart are together again in the next one."""
    if world_size == 1:  # what most single processes have: no group at all
        yield
        return
    store = dist.FileStore(str(meeting), world_size)
    store.set_timeout(timedelta(seconds=2 * SECONDS_PER_WAIT))
    waits = timedelta(seconds=SECONDS_PER_WAIT)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=waits)
    except Exception as error:
        raise RuntimeError(_NOT_MET) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _traced(code: Any, tool: str, folder: Path) -> Trace:
    trace, began = Trace(), time.monotonic()
    torch.manual_seed(0)
    with tracing(trace):
        try:
            code(TOOLS[tool](trace, folder), trace)
        except BaseException as error:
            if trace.raised is None:
                after = f"running after the {trace.done[-1]}" if trace.done else "running"
                trace.raised = Raised.of(after if trace.phase == "running" else trace.phase, error)
    trace.seconds = time.monotonic() - began
    return trace


def _read(path: Path) -> list[Trace]:
    traces: list[Trace] = []
    if not path.exists():
        return traces
    with open(path, "rb") as log:
        while True:
            try:
                traces.append(pickle.load(log))
            except EOFError:
                return traces
