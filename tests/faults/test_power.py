"""A loss of power during a save: a sample of the states that it may leave; all with ``python -m tests.faults``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.power import Disk, Node, recording, tree
from tests.faults.scenes import NEW, SCENES, prepare
from tests.faults.sweep import after_power_loss
from tests.faults.victims import Victims


@pytest.mark.one_of
@pytest.mark.parametrize("scene", ["overwrite with files of the user", "prune"])
def test_a_loss_of_power_leaves_the_old_or_the_new_checkpoint(victims: Victims, scene: str) -> None:
    found = list(after_power_loss(victims, scene, every=10))
    assert len(found) >= 8
    assert [one for one in found if one is not None] == []


def test_the_model_replays_what_the_disk_did(victims: Victims, tmp_path: Path) -> None:
    scene, root = SCENES["overwrite with files of the user"], tmp_path / "run"
    root.mkdir()
    victims.run(prepare, scene, root, below=root)
    begun = tree(root)
    assert victims.run(scene.act, root / scene.target, NEW, below=root, log=tmp_path / "log").error is None
    told = recording(begun, root, tmp_path / "log")
    assert Disk(begun, told.changes).fingerprint() == Disk(tree(root)).fingerprint()


def test_what_is_not_synced_may_be_lost_in_the_model(tmp_path: Path) -> None:
    def last_states(*calls: str) -> set[object]:
        """The states after these calls: a file is created, and three bytes are written into it."""
        log = tmp_path / f"log-{len(calls)}"
        log.with_name(f"{log.name}.data").write_bytes(b"abc")
        log.write_text("".join(f"{call.format(root=tmp_path)}\t0\t3\n" for call in calls))
        told = recording(Node(entries={}), tmp_path, log)
        return {disk.fingerprint() for _, disk, finished in told.states() if finished}

    create, write = "create\t{root}/a\t", "write\t{root}/a\t"
    sync_file, sync_directory = "sync\t{root}/a\t", "sync\t{root}\t"
    assert len(last_states(create, write)) == 3, "no file, an empty one, or all of it"
    assert len(last_states(create, write, sync_file)) == 2, "no file, or all of it"
    assert len(last_states(create, write, sync_file, sync_directory)) == 1
