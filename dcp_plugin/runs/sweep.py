"""No job of a Hydra sweep resumes from the checkpoints of another one.

A sweep (``-m lr=1,2``) starts the same application several times. If all of its jobs have one directory for their
checkpoints, the second would go on from where the first has ended, with other settings. So each job leaves a note of
what it overrides where it has its checkpoints, and is refused where another job has left one. The same job, started
again, finds its own: how to resume is no part of what a job is.

Each job has a file of its own, written before the others are looked for: of two that start at the same moment, at least
one sees the other. A job that starts anew leaves a note, too: what it saves is nothing for the others to resume from.

Hydra is not imported here: where no application runs under it, there is nothing to do.
"""

from __future__ import annotations

import hashlib
import re
import sys
from contextlib import suppress

from dcp_plugin.errors import CheckpointMismatch, unreadable
from dcp_plugin.media import WORKSPACE, medium_of
from dcp_plugin.paths import PathLike, StorageOptions, Where, as_path

SUFFIX = ".job"
_MOST_BYTES = 1 << 16


def keep_apart(root: PathLike, resume: str | PathLike, storage_options: StorageOptions | None = None) -> None:
    """Note that this job of a sweep has its checkpoints below ``root``. Does nothing where no sweep runs.

    Raises:
        CheckpointMismatch: ``"auto"`` or ``"must"``, and another job has its checkpoints there; naming both.
        CheckpointUnreadable: Whose they are cannot be read.
    """
    mine = _job()
    if mine is None:
        return
    where = as_path(root, storage_options)
    looks = resume in ("auto", "must")
    if not looks and resume != "never" and where in as_path(resume, storage_options).parents:
        return  # one that reads what is there, by its name
    if looks:
        _refuse(where, mine)
    name = f"sweep-{hashlib.blake2b(mine.encode(), digest_size=8).hexdigest()}{SUFFIX}"
    with suppress(OSError):  # who cannot write there has no checkpoints there
        medium_of(where).note(where / WORKSPACE / name, mine.encode())
    if looks:
        _refuse(where, mine)


def _refuse(root: Where, mine: str) -> None:
    medium, workspace = medium_of(root), root / WORKSPACE
    try:
        names = [one.path.name for one in medium.entries(workspace) if one.path.suffix == SUFFIX]
        files = medium.open(workspace)
        for name in names:
            with files.open(name) as noted:
                other = noted.read(_MOST_BYTES).decode(errors="replace")
            if other != mine:
                raise CheckpointMismatch(
                    f"this job of a sweep ({mine}) would resume from {root}, where another one has its checkpoints "
                    f"({other}). Give each a directory of its own: add 'dcp_plugin/directory: of_job' to the defaults, "
                    f"or have ${{hydra:job.override_dirname}} in the path. To go on from one of these, name it: "
                    f"resume=PATH."
                )
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise unreadable(f"whose checkpoints are below {root} cannot be read", error) from error


def _job() -> str | None:
    """What this job of a sweep overrides; None if this is no sweep."""
    known = sys.modules.get("hydra.core.hydra_config")
    if known is None or not known.HydraConfig.initialized():
        return None
    config = known.HydraConfig.get()
    if config.mode is None or config.mode.name != "MULTIRUN":
        return None
    besides = set(config.job.config.override_dirname.exclude_keys)
    overrides = [str(one).lstrip("+") for one in config.overrides.task]
    return ", ".join(sorted(one for one in overrides if not _is_beside(one.partition("=")[0], besides))) or "nothing"


def _is_beside(key: str, besides: set[str]) -> bool:
    """Whether an override does not make another job: of how to resume, or what Hydra leaves out of directories, too."""
    return key.partition("@")[0] in besides or "resume" in re.split(r"[./@]", key)
