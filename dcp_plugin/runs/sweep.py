"""No job of a Hydra sweep resumes from the checkpoints of another one.

A sweep (``-m lr=1,2``) starts the same application several times. If all of its jobs have one directory for their
checkpoints, the second would go on from where the first has ended, with other settings. So the first job that looks for
a checkpoint in a directory leaves a note of what it overrides, and any other job of a sweep is refused there. The same
job, started again, is not: how to resume is no part of what a job is.

Hydra is not imported here: where no application runs under it, there is nothing to do.
"""

from __future__ import annotations

import sys

from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.media import WORKSPACE, medium_of
from dcp_plugin.paths import Where

NAME = "sweep.job"
_MOST_BYTES = 1 << 16


def refuse_another_jobs(root: Where) -> None:
    """Note whose directory of checkpoints this is, if a job of a sweep runs here.

    Raises:
        CheckpointMismatch: It is that of another job of a sweep; naming both.
    """
    mine = _job()
    if mine is None:
        return
    file = root / WORKSPACE / NAME
    medium = medium_of(file)
    try:
        with medium.open(file.parent).open(NAME) as noted:
            other = noted.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        medium.note(file, mine.encode())
        return
    if other != mine:
        raise CheckpointMismatch(
            f"this job of a sweep ({mine}) would resume from {root}, where another one has its checkpoints ({other}). "
            f"Give each a directory of its own: add 'dcp_plugin/directory: of_job' to the defaults, or have "
            f"${{hydra:job.override_dirname}} in the path; or say resume=never."
        )


def _job() -> str | None:
    """What this job of a sweep overrides; None if this is no sweep."""
    known = sys.modules.get("hydra.core.hydra_config")
    if known is None or not known.HydraConfig.initialized():
        return None
    config = known.HydraConfig.get()
    if config.mode is None or config.mode.name != "MULTIRUN":
        return None
    overrides = (str(one) for one in config.overrides.task)
    return ", ".join(sorted(one for one in overrides if "resume" not in one.partition("=")[0])) or "nothing"
