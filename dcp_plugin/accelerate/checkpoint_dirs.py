"""The numbered checkpoints of an Accelerate project: which comes next, which is the newest, which have to go.

Accelerate keeps them in ``<project_dir>/checkpoints/checkpoint_<iteration>``. Its own rotation deletes the oldest
before the new one is written, and its choice of the newest is the last name in the folder, whatever is in it. Here
only a committed checkpoint is the newest, and only after the new one is committed an old one is deleted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from accelerate import Accelerator

from dcp_plugin.accelerate import stock_format
from dcp_plugin.config import local_path
from dcp_plugin.errors import CheckpointNotFound, SaveFailed
from dcp_plugin.runs import catalog

logger = logging.getLogger("dcp_plugin")


def is_automatic(accelerator: Accelerator) -> bool:
    return bool(accelerator.project_configuration.automatic_checkpoint_naming)


def require_local(accelerator: Accelerator) -> None:
    """Raises ValueError for a project at a URL, which the first save would find out otherwise."""
    if is_automatic(accelerator) and accelerator.project_dir is not None:
        _folder(accelerator)


def next_path(accelerator: Accelerator) -> Path:
    """Where the next automatic save goes.

    Raises:
        SaveFailed: There is something already, and this run does not continue it.
    """
    path = _folder(accelerator) / f"checkpoint_{accelerator.save_iteration}"
    if path.exists():
        raise SaveFailed(
            f"cannot save {path}: it exists, and this run has not loaded any checkpoint of the project. Resume with "
            f"accelerator.load_state(), use another project_dir, or set project_configuration.iteration."
        )
    return path


def newest(accelerator: Accelerator) -> Path:
    """The committed checkpoint with the highest number. On rank 0.

    Raises:
        CheckpointNotFound: There is none.
    """
    folder = _folder(accelerator)
    for _, path in sorted(_numbered(folder), reverse=True):
        reason = stock_format.why_incomplete(path)
        if not reason:
            return path
        logger.warning("passing over %s: %s", path, reason)
    raise CheckpointNotFound(f"there is no committed checkpoint in {folder}")


def resume_from(accelerator: Accelerator, must: bool) -> Path | None:
    """The same; None if nothing has ever been saved, unless there ``must`` be something. On rank 0.

    Raises:
        CheckpointNotFound: There is nothing to resume from, and there must be or there are incomplete checkpoints.
    """
    return newest(accelerator) if must or any(_numbered(_folder(accelerator))) else None


def continue_numbering(accelerator: Accelerator) -> None:
    """After a load, number the next save after all that are there: also after those of a branch that was left."""
    numbers = [number for number, _ in _numbered(_folder(accelerator))]
    if numbers:
        accelerator.project_configuration.iteration = max(numbers) + 1


def rotate(accelerator: Accelerator) -> None:
    """Delete the oldest beyond ``total_limit``. On rank 0, when the newest is committed."""
    limit = accelerator.project_configuration.total_limit
    if limit is None:
        return
    complete = [path for _, path in sorted(_numbered(_folder(accelerator))) if not stock_format.why_incomplete(path)]
    for path in complete[: -max(1, limit)]:
        try:
            catalog.remove(path)
        except (OSError, SaveFailed) as error:  # this rank alone would raise; the new checkpoint is published
            logger.warning("could not delete the old checkpoint %s: %s", path, error)


def _folder(accelerator: Accelerator) -> Path:
    return local_path(accelerator.project_dir) / "checkpoints"


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("checkpoint_*"):
        name = re.fullmatch(r"checkpoint_(\d+)", path.name)
        if name and path.is_dir():
            yield int(name[1]), path
