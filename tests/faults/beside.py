"""Readers beside a writer: stopped at each of their calls, while a writer goes on; and by chance, very often.

A reader gets the old checkpoint or the new one, whole. It finds one as long as there is one; it never calls one damaged
that is not; and what it misses was deleted meanwhile.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.api import CheckpointException

import dcp_plugin as dcp
from dcp_plugin.core.runs import deletion
from tests.faults.campaign import Campaign, Parts
from tests.faults.scenes import NEW, number_in, save, save_and_keep_two
from tests.faults.victims import NO_EXCHANGE, Beside, Fault, Victims

READS = Fault("stop", calls=("open", "read", "list", "stat"))
RENAMES = Fault("stop", calls=("rename", "exchange", "remove", "symlink", "mkdir", "create"))
GONE = -1
FILE_SYSTEMS: dict[str, tuple[Fault, ...]] = {"": (), ", names cannot be exchanged": (NO_EXCHANGE,)}
_WRONG = "WRONG"
_FAST = "/dev/shm" if os.path.isdir("/dev/shm") else None


@dataclass(frozen=True)
class Writer:
    """What happens beside a reader.

    Args:
        write: Called with the root and a number that grows.
        read: The checkpoint that readers name.
        deletes: Whether it is deleted, and not only replaced.
        before: Checkpoints that are there, name to number.
    """

    write: Callable[[Path, int], None]
    read: str
    deletes: bool
    before: dict[str, int]


def overwrite(root: Path, number: int) -> None:
    save(root / "last", number)


def add_and_keep_two(root: Path, number: int) -> None:
    for one in (number, number + 1):
        save_and_keep_two(root / f"step-{one}", one)


def link_to_a_new_one(root: Path, number: int) -> None:
    before = (root / "last").resolve()
    save(root / f"step-{number}", number)
    deletion.link(root / "last", root / f"step-{number}")
    deletion.remove(before)


WRITERS = {
    "overwrite": Writer(overwrite, "last", False, {"last": 1}),
    "overwrite beside an older one": Writer(overwrite, "last", False, {"a": 0, "last": 1}),
    "new names": Writer(add_and_keep_two, "step-2", True, {"step-1": 1, "step-2": 2}),
    "link": Writer(link_to_a_new_one, "last", False, {"step-1": 1, "last": 1}),
}


def prepare(writer: Writer, root: Path) -> None:
    for name, number in writer.before.items():
        if name == "last" and "step-1" in writer.before:
            deletion.link(root / name, root / "step-1")
        else:
            save(root / name, number)


def _number_in(path: Path) -> int:
    try:
        return number_in(path)
    except dcp.CheckpointNotFound:
        assert not path.exists() or path.suffix == ".aside", f"{path} is there"
        return GONE


def latest(root: Path, name: str) -> int:
    """The number of the newest checkpoint."""
    path = dcp.latest(root)
    assert path is not None, "latest found nothing"
    return _number_in(path)


def listed(root: Path, name: str) -> int:
    states = dcp.list_checkpoints(root)
    assert all(state.committed for state in states if state.path.suffix != ".saving"), states
    committed = [state.step for state in states if state.committed]
    assert committed, "nothing is listed"
    return max(step or 0 for step in committed)


def load(root: Path, name: str) -> int:
    return _number_in(root / name)


def verify(root: Path, name: str) -> int:
    try:
        report = dcp.verify(root / name)
        assert report.ok, report
        return dcp.inspect(root / name).step or 0
    except dcp.CheckpointNotFound:
        return GONE


def stock_load(root: Path, name: str) -> int:
    target: dict[str, object] = {"w": torch.zeros(257, 3), "number": -1}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stock.load(target, storage_reader=dcp.ShardedReader(root / name))
    except CheckpointException as failed:
        if "was deleted" in str(failed) or "nothing is there" in str(failed):
            return GONE
        raise
    number = target["number"]
    assert isinstance(number, int)
    assert torch.equal(cast(torch.Tensor, target["w"]), torch.full((257, 3), float(number)))
    return number


READERS = {"latest": latest, "list_checkpoints": listed, "load": load, "verify": verify, "stock load": stock_load}


def wrong(writer: Writer, reader: str, number: object) -> str:
    """What is wrong with the number that a reader has got."""
    numbers = {*writer.before.values(), NEW, NEW + 1}
    if number == GONE:
        expected = writer.deletes or reader in ("latest", "stock load")
        return "" if expected else "it says that there is none"
    if reader == "latest" and "a" in writer.before and number == 0:
        return "the older one"
    return "" if number in numbers else f"it has got {number}"


def windows(
    victims: Victims, writer_name: str, reader: str, lacks: Sequence[Fault] = (), every: int = 1, start: int = 1,
    partly: bool = False,
) -> Iterator[str | None]:  # fmt: skip
    """Stop a reader at each of its calls in turn, and let the writer write; what is wrong, or None, for each.

    Args:
        lacks: Faults of the file system itself.
        every: Only every so many calls, from ``start`` on.
        partly: Stop the writer at each of its own calls in turn, until the reader has ended.
    """
    writer = WRITERS[writer_name]
    with tempfile.TemporaryDirectory(prefix="dcp-beside-") as made:
        template, root = Path(made) / "template", Path(made) / "run"
        template.mkdir()
        assert victims.run(prepare, writer, template, below=template).error is None

        def once(stop: Sequence[Fault], beside: Beside | None) -> tuple[int, str]:
            shutil.copytree(template, root, symlinks=True)
            counting = replace(READS, action="count")
            faults = [counting, *stop, *lacks]
            outcome = victims.run(READERS[reader], root, writer.read, below=root, faults=faults, beside=beside)
            calls = outcome.calls
            said = f"{outcome.error!r}" if outcome.error else wrong(writer, reader, outcome.result)
            if outcome.beside is not None and outcome.beside.error is not None:
                said = f"{said} the writer: {outcome.beside.error!r}"
            shutil.rmtree(root)
            return calls, said

        total, said = once([], None)
        assert not said, said
        steps = [0]
        if partly:
            shutil.copytree(template, root, symlinks=True)
            counting = replace(RENAMES, action="count")
            calls = victims.run(writer.write, root, NEW, below=root, faults=[counting, *lacks]).calls
            shutil.rmtree(root)
            steps = list(range(1, calls + 1))
        numbers = [(at, step) for at in range(1, total + 1) for step in steps]
        for at, step in numbers[start - 1 :: every]:
            halts = (replace(RENAMES, action="count"), RENAMES.nth(step)) if step else ()
            _, said = once([READS.nth(at)], Beside(writer.write, (root, NEW), (*halts, *lacks)))
            place = f"{reader} stopped at call {at}" + (f", {writer_name} at call {step}" if step else "")
            yield f"{writer_name}, {place}: {said}" if said else None


def campaign(root: Path, writer_name: str, count: int) -> Counter[str]:
    """Let one process write without a pause, and look and load ``count`` times meanwhile, or until something was saved:
    how often what came of it."""
    writer = WRITERS[writer_name]
    pid = os.fork()
    if pid == 0:
        try:
            for number in range(NEW, 1 << 22, 2):  # every one of them is exact in float32
                writer.write(root, number)
        finally:
            os._exit(1)
    results: Counter[str] = Counter()
    newest = {True: -1, False: -1}  # a link is set after the new checkpoint is there
    turn, is_writing = 0, True
    try:
        while is_writing and (turn < count or newest[False] < NEW):
            by_name = turn % 4 == 3 and not writer.deletes
            turn += 1
            is_writing = os.waitpid(pid, os.WNOHANG) == (0, 0)
            try:
                number = _look(root, writer, by_name)
                said = "loaded" if number >= newest[by_name] else f"{_WRONG}: an older one than before"
                results[said] += number != GONE
                results["deleted meanwhile"] += number == GONE
                newest[by_name] = max(newest[by_name], number)
            except Exception as error:
                results[f"{_WRONG}: {type(error).__name__}: {str(error)[:150]}"] += 1
        results[f"{_WRONG}: the writer has ended"] += not is_writing
    finally:
        if is_writing:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    results["saves"] = newest[False] // 2
    return +results


def _look(root: Path, writer: Writer, by_name: bool) -> int:
    if by_name:
        return number_in(root / writer.read)
    path = dcp.latest(root)
    assert path is not None, "latest found nothing"
    try:
        return number_in(path)
    except dcp.CheckpointNotFound:
        if path == root / writer.read and not writer.deletes:
            raise
        return GONE


def by_chance(victims: Victims, count: int) -> Iterator[tuple[str, Counter[str]]]:
    """:func:`campaign` of each writer, with and without the exchange of names, ``count`` looks in all."""
    each = -(-count // (len(FILE_SYSTEMS) * len(WRITERS)))
    for kind, lacks in FILE_SYSTEMS.items():
        for name, writer in WRITERS.items():
            with tempfile.TemporaryDirectory(prefix="dcp-beside-", dir=_FAST) as root:
                assert victims.run(prepare, writer, Path(root), below=Path(root)).error is None
                outcome = victims.run(campaign, Path(root), name, each, below=Path(root), faults=lacks)
                assert outcome.error is None, outcome.traceback
                yield name + kind, outcome.result


def wrong_in(results: Counter[str]) -> dict[str, int]:
    return {said: number for said, number in results.items() if said.startswith(_WRONG)}


def _parts(chosen: Any) -> Parts:
    with Victims() as victims:
        for kind, lacks in FILE_SYSTEMS.items() if chosen.every else ():
            for writer in WRITERS:
                for reader in READERS:
                    found = windows(victims, writer, reader, lacks, chosen.every, partly=chosen.partly)
                    yield f"{writer}{kind}, {reader}", found
        for name, results in by_chance(victims, chosen.count) if chosen.count else ():
            print(f"{name}: {dict(results)}")
            results.pop("saves", None)
            yield f"{name}, by chance", (said if said.startswith(_WRONG) else "" for said in results.elements())


CAMPAIGN = Campaign(__doc__, _parts, {"count": 10_000, "every": 1, "partly": False})
