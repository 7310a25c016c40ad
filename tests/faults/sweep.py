"""One scene under one kind of fault, at every call, or at every so many."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults import power
from tests.faults.oracle import find, wrong
from tests.faults.scenes import NEW, SCENES, prepare
from tests.faults.victims import Fault, Outcome, Victims


@dataclass(frozen=True)
class Found:
    """What went wrong, and how to see it again."""

    scene: str
    fault: Fault
    number: int
    said: str
    problems: list[str]

    def __str__(self) -> str:
        return (
            f"{self.scene}, {self.fault.action} {self.fault.calls} at call {self.number} ({self.said}): "
            + "; ".join(self.problems)
        )


def sweep(
    victims: Victims, scene_name: str, fault: Fault, always: Sequence[Fault] = (), every: int = 1, start: int = 1
) -> Iterator[Found | None]:
    """Inject the fault at each call of the scene in turn; what was wrong, or None, for each.

    Args:
        always: Faults of the file system itself, which are there at every call.
        every: Take every so many calls only, from ``start`` on.
    """
    scene = SCENES[scene_name]
    with tempfile.TemporaryDirectory(prefix="dcp-faults-") as made:
        template = Path(made) / "template"
        template.mkdir()
        assert victims.run(prepare, scene, template, below=template).error is None
        number, total = start, None
        while total is None or number <= total:
            root = Path(made) / "run"
            shutil.copytree(template, root, symlinks=True)
            counting = [Fault("count", calls=fault.calls, containing=fault.containing)]
            if total is None:
                outcome = victims.run(scene.act, root / scene.target, NEW, below=root, faults=[*counting, *always])
                total = outcome.calls
            else:
                faults = [*counting, fault.nth(number), *always]
                outcome = victims.run(scene.act, root / scene.target, NEW, below=root, faults=faults)
                number += every
            seen = victims.run(find, root, scene, below=root, faults=always)
            found = wrong(scene, outcome, seen)
            yield Found(scene_name, fault, number - every, repr(outcome.error)[:200], found) if found else None
            shutil.rmtree(root)


def after_power_loss(victims: Victims, scene_name: str, every: int = 1) -> Iterator[str | None]:
    """What is wrong, or None, in each state that a loss of power during a scene may leave.

    Args:
        every: Take every so many states only.
    """
    scene = SCENES[scene_name]
    with tempfile.TemporaryDirectory(prefix="dcp-faults-") as made:
        root, log = Path(made) / "run", Path(made) / "log"
        root.mkdir()
        assert victims.run(prepare, scene, root, below=root).error is None
        begun = power.tree(root)
        assert victims.run(scene.act, root / scene.target, NEW, below=root, log=log).error is None
        for number, (said, disk, finished) in enumerate(power.recording(begun, root, log).states()):
            if number % every == 0:
                shutil.rmtree(root)
                disk.put_at(root)
                seen = victims.run(find, root, scene, below=root)
                outcome = Outcome(0 if finished else -9)
                found = wrong(scene, outcome, seen)
                yield f"{scene_name}, power lost {said}: {'; '.join(found)}" if found else None
