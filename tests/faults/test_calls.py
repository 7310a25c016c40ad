"""A fault at a file-system call of a save, a removal or a link: a sample here, all with ``python -m tests.faults``."""

from __future__ import annotations

import errno

import pytest

from tests.faults.scenes import SCENES
from tests.faults.sweep import sweep
from tests.faults.victims import NO_EXCHANGE, NO_LINKS, Fault, Victims

FAULTS = {
    "killed": Fault("kill"),
    "input/output error": Fault("fail", errno.EIO),
    "disk full": Fault("fail", errno.ENOSPC, calls=("create", "write", "mkdir", "allocate", "rename", "link")),
    "deleting fails": Fault("fail", errno.EBUSY, calls=("remove",)),
}


@pytest.mark.one_of(count=3)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scene", SCENES)
def test_whatever_fails_the_newest_checkpoint_is_whole(victims: Victims, scene: str, fault: str) -> None:
    """At three calls of each pair of a scene and a fault."""
    start = 1 + (list(SCENES).index(scene) * 5 + list(FAULTS).index(fault) * 3) % 17
    found = list(sweep(victims, scene, FAULTS[fault], every=23, start=start))
    assert found
    assert [str(one) for one in found if one is not None] == []


@pytest.mark.one_of
@pytest.mark.parametrize("fault", ["killed", "input/output error"])
def test_a_file_system_without_exchange_and_links(victims: Victims, fault: str) -> None:
    found = list(sweep(victims, "overwrite", FAULTS[fault], always=(NO_EXCHANGE, NO_LINKS), every=11, start=60))
    assert found
    assert [str(one) for one in found if one is not None] == []
