"""Jobs of Hydra: each finds its own checkpoints again, and none resumes in silence as another job.

A sweep (``-m lr=1,2``) starts the same application several times. If all of its jobs have one directory for their
checkpoints, the second would go on from where the first has ended, with other settings. So each job leaves a note of
what it overrides where it has its checkpoints, and is refused where another job has left one. The same job, started
again, finds its own: how to resume is no part of what a job is.

Each job has a file of its own, written before the others are looked for: of two that start at the same moment, at least
one sees the other. A job that starts anew leaves a note, too: what it saves is nothing for the others to resume from.

A single run may go on with other settings: more steps, for example. Each start notes its composed configuration beside
the checkpoints, and a resume logs how it differs from the configuration that the checkpoint was saved with.

Hydra is not imported here: where no application runs under it, there is nothing to do.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dcp_plugin.errors import CheckpointMismatch, some, unreadable
from dcp_plugin.media import medium_of, workspace_in, workspaces_in
from dcp_plugin.paths import PathLike, StorageOptions, Where, as_path, resolved

logger = logging.getLogger("dcp_plugin")

SUFFIX = ".job"
_MOST_BYTES = 1 << 16
_CONFIGURATION = "configuration.hydra"
_MOST_OF_CONFIGURATION = 1 << 24


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
    if _only_reads(resume, where, storage_options):
        return
    if looks:
        for workspace in workspaces_in(where):
            _refuse(where, workspace, mine)
    name = f"sweep-{hashlib.blake2b(mine.encode(), digest_size=8).hexdigest()}{SUFFIX}"
    with suppress(OSError):  # who cannot write there has no checkpoints there
        medium_of(where).note(workspace_in(where) / name, mine.encode())
    if looks:
        for workspace in workspaces_in(where):
            _refuse(where, workspace, mine)


def _refuse(root: Where, workspace: Where, mine: str) -> None:
    medium = medium_of(root)
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


def compare(
    root: PathLike, resume: str | PathLike, found: Where | None, storage_options: StorageOptions | None = None
) -> None:
    """Note the composed configuration of this start below ``root``, and log how it differs from that of ``found``.

    Log, too, if nothing was found and no later start would look below ``root``. Does nothing without Hydra.
    """
    hydra = _hydra()
    where = as_path(root, storage_options)
    if hydra is None or _only_reads(resume, where, storage_options):
        return
    omegaconf = sys.modules["omegaconf"].OmegaConf
    composed = omegaconf.select(hydra, "..")
    looks = resume in ("auto", "must")
    if looks and found is None:
        _warn_of_the_time(where, map(str, omegaconf.get_cache(composed)["now"].values()))
    settings = dict(_settings(omegaconf.to_container(composed, resolve=False)))
    medium, workspace = medium_of(where), workspace_in(where)
    noted: dict[str, Any] = {}
    with suppress(OSError, ValueError), medium.open(workspace).open(_CONFIGURATION) as file:
        noted = json.loads(file.read(_MOST_OF_CONFIGURATION))
    # Until the start that left the note has saved, the newest checkpoint is that of a start before it.
    saved = noted.get("of_checkpoint" if noted.get("resumed") == str(found) else "settings")
    changed = [] if saved is None or found is None else _differences(saved, settings)
    if looks and changed:
        logger.warning("resuming from %s, saved with another configuration: %s", found, some(changed))
    note = {"resumed": str(found), "of_checkpoint": saved, "settings": settings}
    with suppress(OSError):  # the checkpoints cannot be there either
        medium.note(workspace / _CONFIGURATION, json.dumps(note).encode())


def _warn_of_the_time(root: Where, times: Iterator[str]) -> None:
    """Warn if the path of a run's checkpoints has the time of this start in it, as Hydra's own directories have."""
    if any(time in str(resolved(root)) for time in times):
        logger.warning(
            "no later start can resume this run: its checkpoints go to %s, a directory that Hydra names by the time of "
            "the start. Add 'dcp_plugin/directory: of_job' to the defaults, after any 'hydra: ...' that sets run.dir, "
            "or set dcp_plugin.resume.root.",
            root,
        )


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a configuration by their dotted names, but for Hydra's, and those of saving and resuming."""
    if isinstance(config, (dict, list)) and config:
        for name, value in config.items() if isinstance(config, dict) else enumerate(config):
            if name != "resume" and f"{prefix}{name}" not in ("hydra", "dcp_plugin"):
                yield from _settings(value, f"{prefix}{name}.")
    else:
        yield prefix[:-1], str(config)


def _differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    absent = "(absent)"
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name} {before.get(name, absent)} -> {now.get(name, absent)}" for name in changed]


def _only_reads(resume: str | PathLike, root: Where, storage_options: StorageOptions | None) -> bool:
    """Return whether a job reads a checkpoint below ``root`` by its name, and has its own checkpoints elsewhere."""
    return resume not in ("auto", "must", "never") and root in as_path(resume, storage_options).parents


def _hydra() -> Any:
    """Return the node ``hydra`` of the composed configuration; None if no application of Hydra runs."""
    known = sys.modules.get("hydra.core.hydra_config")
    return known.HydraConfig.get() if known is not None and known.HydraConfig.initialized() else None


def _job() -> str | None:
    """Return the overrides of this job of a sweep; None if this is no sweep."""
    config = _hydra()
    if config is None or config.mode is None or config.mode.name != "MULTIRUN":
        return None
    besides = set(config.job.config.override_dirname.exclude_keys)
    overrides = [str(one).lstrip("+") for one in config.overrides.task]
    return ", ".join(sorted(one for one in overrides if not _is_beside(one.partition("=")[0], besides))) or "nothing"


def _is_beside(key: str, besides: set[str]) -> bool:
    """Whether an override does not make another job: of how to resume, or what Hydra leaves out of directories, too."""
    return key.partition("@")[0] in besides or "resume" in re.split(r"[./@]", key)
