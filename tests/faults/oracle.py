"""What has to hold after a fault, whatever it was.

- A checkpoint that was reported is there and loads, byte for byte, or a newer one under its name.
- What an error says is true: after ``SaveFailed`` the path is as it was, after ``DurabilityUnknown`` the new
  checkpoint is there.
- ``latest`` gives the newest of what is there. What is listed as committed loads.
- The next save that succeeds leaves nothing behind but checkpoints with the user's files that were in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import dcp_plugin as dcp
from dcp_plugin.core.media.places import WORKSPACE
from dcp_plugin.core.paths import ObjectPath, Where
from dcp_plugin.core.runs import figures
from tests.faults.scenes import NEW, Scene, number_in, resume, save
from tests.faults.victims import Fault, Outcome, Victims

NEXT = 10


@dataclass(frozen=True)
class Facts:
    """What is found below a directory, before and after one more save."""

    numbers: dict[str, int]
    """Committed checkpoints, by name."""
    latest: tuple[str, int] | None
    links: dict[str, int]
    others: dict[str, str]
    """The user's files after one more save."""
    debris: list[str]
    """What is there after one more save besides checkpoints, links and the user's files."""
    lost: list[str]
    """What is not there any more after one more save."""


def find(root: Where, scene: Scene) -> Facts:
    """Look, in a process without faults."""
    numbers = _numbers(root, scene)
    newest = resume(root)
    latest = newest and (_name(root, newest[0]), newest[1])
    links = {name: number_in(root / name) for name in scene.links}
    following = (root / scene.target).with_name(f"step-{NEXT}")
    save(following, NEXT)
    then = _numbers(root, scene)
    others = {name: _text(root / scene.target / name) for name in scene.others}
    assert then.pop(_name(root, following)) == NEXT
    inside = [*then, _name(root, following), *scene.links]
    debris = [
        name
        for name in _files(root)
        if not any(name == one or name.startswith(f"{one}/") or one.startswith(f"{name}/") for one in inside)
    ]
    return Facts(numbers, latest, links, others, debris, sorted(set(numbers) - set(then)))


def _numbers(root: Where, scene: Scene) -> dict[str, int]:
    """In a store, what would be a link is a checkpoint: a copy."""
    committed = {_name(root, state.path): state.path for state in dcp.list_checkpoints(root) if state.committed}
    return {name: number_in(path) for name, path in committed.items() if name not in scene.links}


def _name(root: Where, path: Where) -> str:
    return str(path).removeprefix(f"{root}/")


def _files(root: Where) -> list[str]:
    if isinstance(root, ObjectPath):
        return []  # tests.faults.stores looks at all objects
    stays = (WORKSPACE, figures.NAME)  # what else is in a workspace is listed by its own name
    return [_name(root, path) for path in sorted(root.rglob("*")) if path.name not in stays]


def _text(path: Where) -> str:
    return path.read_text() if isinstance(path, Path) and path.exists() else "(gone)"


def look(victims: Victims, scene: Scene, root: Path, outcome: Outcome, faults: Sequence[Fault] = ()) -> list[str]:
    """:func:`wrong` of what :func:`find` returns in a victim, with faults of the file system itself."""
    return wrong(scene, outcome, victims.run(find, root, scene, below=root, faults=faults))


def wrong(scene: Scene, outcome: Outcome, seen: Outcome) -> list[str]:
    """:func:`problems` of what :func:`find` has returned in another process, or that it has failed there."""
    return [f"looking afterwards: {seen.error!r}"] if seen.error else problems(scene, outcome, seen.result)


def problems(scene: Scene, outcome: Outcome, facts: Facts) -> list[str]:
    """Everything that should not be so."""
    said = type(outcome.error).__name__ if outcome.error else "killed" if outcome.exit_code else "success"
    found: list[str] = []
    if outcome.error is not None and not isinstance(outcome.error, dcp.CheckpointError):
        found.append(f"{said} is no error of ours: {outcome.error}")
    for name in {*scene.before, *scene.after, *facts.numbers}:
        old, new, there = scene.before.get(name), scene.after.get(name), facts.numbers.get(name)
        allowed = {old, new}
        if name == scene.target and said != "killed" and name in scene.after:
            if said in ("success", "DurabilityUnknown"):
                allowed = {new}
            elif said != "CheckpointError":  # which a link or a removal raises, after the save
                allowed = {old}
        if there not in allowed:
            found.append(f"after {said}, {name} is {there}, not one of {allowed}")
    newest = max(facts.numbers.values(), default=None)
    if newest is not None and (facts.latest is None or facts.latest[1] != newest):
        found.append(f"latest is {facts.latest}, of {facts.numbers}")
    if newest is None and facts.latest is not None:
        found.append(f"latest is {facts.latest}, but nothing is listed")
    for name, number in facts.links.items():
        if number not in (scene.before.get(scene.links_before[name]), NEW):
            found.append(f"{name} leads to {number}")
    for name, text in facts.others.items():
        if text != f"the user's {name}":
            found.append(f"{name} of the user's is {text!r}")
    if facts.debris:
        found.append(f"left behind after the next save: {facts.debris}")
    if facts.lost:
        found.append(f"gone with the next save: {facts.lost}")
    return found
