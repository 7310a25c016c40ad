"""One scene under one kind of fault, at every call, or at every so many."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.faults import power
from tests.faults.oracle import look
from tests.faults.scenes import NEW, SCENES, Scene, prepare
from tests.faults.victims import Fault, Outcome, Victims


def act(victims: Victims, scene: Scene, root: Path, faults: Sequence[Fault] = (), log: Path | None = None) -> Outcome:
    """Do in a victim what a scene does."""
    return victims.run(scene.act, root / scene.target, NEW, below=root, faults=faults, log=log)


@contextmanager
def prepared(victims: Victims, scene: Scene) -> Iterator[Path]:
    """A directory with what is there before a scene, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="dcp-faults-") as folder:
        root = Path(folder) / "prepared"
        root.mkdir()
        assert victims.run(prepare, scene, root, below=root).error is None
        yield root


def sweep(
    victims: Victims, scene_name: str, fault: Fault, always: Sequence[Fault] = (), every: int = 1, start: int = 1
) -> Iterator[str | None]:
    """Inject the fault at each call of the scene in turn; what was wrong, or None, for each.

    Args:
        always: Faults of the file system itself, which are there at every call.
        every: Take every so many calls only, from ``start`` on.
    """
    scene = SCENES[scene_name]
    counting = Fault("count", calls=fault.calls, containing=fault.containing)
    with prepared(victims, scene) as template:
        root, number, total = template.with_name("run"), start, None
        while total is None or number <= total:
            hit = [] if total is None else [fault.nth(number)]
            shutil.copytree(template, root, symlinks=True)
            outcome = act(victims, scene, root, [counting, *hit, *always])
            problems = look(victims, scene, root, outcome, always)
            place = (
                f"{scene_name}, {fault.action} {fault.calls} at call {number if hit else 0} ({outcome.error!r:.200})"
            )
            yield f"{place}: {'; '.join(problems)}" if problems else None
            shutil.rmtree(root)
            number, total = (number + every, total) if hit else (number, outcome.calls)


def after_power_loss(victims: Victims, scene_name: str, every: int = 1) -> Iterator[str | None]:
    """What is wrong, or None, in each state that a loss of power during a scene may leave.

    Args:
        every: Take every so many states only.
    """
    scene = SCENES[scene_name]
    with prepared(victims, scene) as root:
        log, begun = root.with_name("log"), power.tree(root)
        assert act(victims, scene, root, log=log).error is None
        for number, (said, disk, finished) in enumerate(power.recording(begun, root, log).states()):
            if number % every == 0:
                shutil.rmtree(root)
                disk.put_at(root)
                problems = look(victims, scene, root, Outcome(0 if finished else -9))
                yield f"{scene_name}, power lost {said}: {'; '.join(problems)}" if problems else None
