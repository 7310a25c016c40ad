"""What victims do: each scene prepares a directory, and then acts once, at whose calls faults are injected.

A checkpoint says its own number in every element, so what is loaded tells by itself whether it is of one save only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where, as_path
from dcp_plugin.core.runs import deletion

LARGE = 1 << 19
"""Elements of a tensor that is worth a hard link."""


def state_of(number: int) -> dict[str, object]:
    return {
        "w": torch.full((257, 3), float(number)),
        "frozen": torch.arange(LARGE, dtype=torch.int16),
        "number": number,
        "text": f"of {number}",
    }


def save(path: Where, number: int) -> None:
    dcp.save(state_of(number), path, step=number)


def save_and_keep_two(path: Where, number: int) -> None:
    dcp.save(state_of(number), path, step=number, keep_last=2)


def save_in_background(path: Where, number: int) -> None:
    with_links = dcp.Checkpointer(async_save=True)
    try:
        with_links.load(state_of(0), path.parent / "step-1")
        with_links.save(state_of(number), path, step=number).wait()
    finally:
        with_links.close()


def save_and_link(path: Where, number: int) -> None:
    dcp.save(state_of(number), path, step=number)
    deletion.link(path.parent / "last", path)


def save_among_other_files(path: Where, number: int) -> None:
    checkpointer = dcp.Checkpointer()
    checkpointer.save(state_of(number), path, step=number, files=lambda directory: _note(directory, number))
    checkpointer.close()


def _note(directory: Path, number: int) -> None:
    (directory / "loop.txt").write_text(str(number))


def remove(path: Where, number: int) -> None:
    deletion.remove(path)


def number_in(path: Where) -> int:
    """Load a checkpoint; the number of its save, once all of it says the same."""
    target = state_of(-1)
    dcp.load(target, path)
    number = target["number"]
    expected = state_of(number)
    assert target["text"] == expected["text"]
    for key in ("w", "frozen"):
        assert torch.equal(target[key], expected[key]), f"{key} of {path} is not that of save {number}"
    return number


def resume(root: Where) -> tuple[Where, int] | None:
    """What a training that starts again finds."""
    path = dcp.latest(root)
    return None if path is None else (as_path(path), number_in(as_path(path)))


@dataclass(frozen=True)
class Scene:
    """One thing that is done while faults come.

    Args:
        before: Checkpoints that are there, name to number.
        act: Called with the path ``target`` and the number 9.
        after: Checkpoints that are there when it has succeeded.
        links: Links, name to name, that are there then.
        others: Files of the user's in the checkpoint that is replaced; they have to survive.
    """

    act: Callable[[Where, int], None]
    target: str
    before: Mapping[str, int]
    after: Mapping[str, int]
    links_before: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()


NEW = 9
SCENES = {
    "new": Scene(save, "step-9", {"step-1": 1}, {"step-1": 1, "step-9": NEW}),
    "first": Scene(save, "run/step-9", {}, {"run/step-9": NEW}),
    "overwrite": Scene(save, "last", {"last": 1}, {"last": NEW}),
    "overwrite with files of the user": Scene(
        save_among_other_files, "last", {"last": 1}, {"last": NEW}, others=("notes.txt", "plots/loss.png")
    ),
    "prune": Scene(save_and_keep_two, "step-9", {"step-1": 1, "step-2": 2}, {"step-2": 2, "step-9": NEW}),
    "hard links": Scene(save_in_background, "step-9", {"step-1": 1}, {"step-1": 1, "step-9": NEW}),
    "link": Scene(
        save_and_link, "step-9", {"step-1": 1}, {"step-1": 1, "step-9": NEW}, {"last": "step-1"}, {"last": "step-9"}
    ),
    "remove": Scene(remove, "step-2", {"step-1": 1, "step-2": 2}, {"step-1": 1}),
}


def prepare(scene: Scene, root: Where) -> None:
    for name, number in scene.before.items():
        save(root / name, number)
    for name, target in scene.links_before.items():
        deletion.link(root / name, root / target)
    for name in scene.others:
        file = root / scene.target / name
        assert isinstance(file, Path)
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"the user's {name}")
