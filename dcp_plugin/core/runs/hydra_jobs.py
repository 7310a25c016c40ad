"""Jobs of Hydra. The rule: each job finds its own checkpoints again, and is refused the checkpoints of another job.

*A sweep* (``-m lr=1,2``) starts the same application several times. If its jobs shared a directory for their
checkpoints, the second job would resume from the end of the first, with other settings. Each job therefore writes a
note with its overrides to the workspace of its checkpoints. A job is refused where another job has written a note. A
repeated job finds its own note, because overrides of the resume do not distinguish jobs.

Each job writes its note before it reads those of other jobs. If two jobs start at the same moment, at least one sees
the other. A job that starts from scratch writes a note, too: other jobs must not resume from its checkpoints.

*A single run* may resume with other settings, such as more steps. Each start records its composed configuration in the
workspace. A resume logs the differences from the configuration that the checkpoint was saved with.

This module does not import Hydra. Without an application that runs under Hydra, it does nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dcp_plugin.core.errors import CheckpointMismatch, logger, some, unreadable
from dcp_plugin.core.format import json_object
from dcp_plugin.core.media import medium_of, workspace_in, workspaces_in
from dcp_plugin.core.paths import PathLike, Where, as_path, resolved

SUFFIX = ".job"
_MOST_BYTES = 1 << 16
_CONFIGURATION = "configuration.hydra"
_MOST_OF_CONFIGURATION = 1 << 24


def refuse_other_jobs(root: Where, resume: str | PathLike) -> None:
    """Record that this job of a sweep has its checkpoints below ``root``. Without a sweep, do nothing.

    Raises:
        CheckpointMismatch: ``resume`` is ``"auto"`` or ``"must"``, and another job has its checkpoints there. The error
            names both jobs.
        CheckpointUnreadable: The notes of other jobs cannot be read.
    """
    own_job = _job()
    if own_job is None or _only_reads(resume, root):
        return
    resumes_own = resume in ("auto", "must")
    if resumes_own:
        _refuse_notes(root, own_job)
    name = f"sweep-{hashlib.blake2b(own_job.encode(), digest_size=8).hexdigest()}{SUFFIX}"
    with suppress(OSError):  # a job that cannot write there saves no checkpoints there
        medium_of(root).note(workspace_in(root) / name, own_job.encode())
    if resumes_own:
        _refuse_notes(root, own_job)


def _refuse_notes(root: Where, own_job: str) -> None:
    """Refuse the notes of other jobs. Raise the errors of :func:`refuse_other_jobs`."""
    medium = medium_of(root)
    for workspace in workspaces_in(root):
        try:
            names = [entry.path.name for entry in medium.entries(workspace) if entry.path.suffix == SUFFIX]
            files = medium.open(workspace)
            for name in names:
                with files.open(name) as file:
                    other = file.read(_MOST_BYTES).decode(errors="replace")
                if other != own_job:
                    raise CheckpointMismatch(
                        f"this job of a sweep ({own_job}) would resume from {root}, where another one has its "
                        f"checkpoints ({other}). Give each a directory of its own: add 'dcp_plugin/directory: "
                        f"of_job' to the defaults, or have ${{hydra:job.override_dirname}} in the path. To go on from "
                        f"one of these, name it: resume=PATH."
                    )
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise unreadable(f"whose checkpoints are below {root} cannot be read", error) from error


def compare(root: Where, resume: str | PathLike, chosen: Where | None) -> None:
    """Record the composed configuration of this start below ``root``, and log the differences from that of ``chosen``.

    If nothing is resumed, and no later start would search below ``root``, log a warning. Without Hydra, do nothing.
    """
    hydra = _hydra()
    if hydra is None or _only_reads(resume, root):
        return
    omegaconf = sys.modules["omegaconf"].OmegaConf
    composed = omegaconf.select(hydra, "..")
    resumes_own = resume in ("auto", "must")
    if resumes_own and chosen is None:
        times = map(str, omegaconf.get_cache(composed)["now"].values())
        if any(time in str(resolved(root)) for time in times):  # as in Hydra's own directories
            logger.warning(
                "no later start can resume this run: its checkpoints go to %s, a directory that Hydra names by the "
                "time of the start. Add 'dcp_plugin/directory: of_job' to the defaults, after any 'hydra: ...' that "
                "sets run.dir, or set dcp_plugin.resume.root.",
                root,
            )
    settings = dict(_settings(omegaconf.to_container(composed, resolve=False)))
    medium, workspace = medium_of(root), workspace_in(root)
    earlier: dict[str, Any] = {}
    with suppress(OSError, ValueError), medium.open(workspace).open(_CONFIGURATION) as file:
        earlier = json_object(file.read(_MOST_OF_CONFIGURATION + 1), _MOST_OF_CONFIGURATION)
    # The start that wrote the note may have ended before it saved. ``chosen`` is then the checkpoint that it resumed
    # from, and has the configuration of a start before it.
    saved = earlier.get("of_checkpoint" if earlier.get("resumed") == str(chosen) else "settings")
    changed = [] if saved is None or chosen is None else _differences(saved, settings)
    if resumes_own and changed:
        logger.warning("resuming from %s, saved with another configuration: %s", chosen, some(changed))
    note = {"resumed": str(chosen), "of_checkpoint": saved, "settings": settings}
    with suppress(OSError):  # no checkpoint can be written there either
        medium.note(workspace / _CONFIGURATION, json.dumps(note).encode())


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted names and values of a configuration, without settings of Hydra, saves and resumes."""
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


def _only_reads(resume: str | PathLike, root: Where) -> bool:
    """Return whether a job names a checkpoint below ``root``: it only reads there, and saves to another directory."""
    return resume not in ("auto", "must", "never") and root in as_path(resume).parents


def _hydra() -> Any:
    """Return the node ``hydra`` of the composed configuration; None without an application of Hydra."""
    module = sys.modules.get("hydra.core.hydra_config")
    return module.HydraConfig.get() if module is not None and module.HydraConfig.initialized() else None


def _job() -> str | None:
    """Return the overrides of this job of a sweep; None without a sweep."""
    config = _hydra()
    if config is None or config.mode is None or config.mode.name != "MULTIRUN":
        return None
    keys = {text: text.partition("=")[0] for text in (str(override).lstrip("+") for override in config.overrides.task)}
    excluded = config.job.config.override_dirname.exclude_keys  # from the names of directories
    distinct = [
        text
        for text, key in keys.items()
        if key.partition("@")[0] not in excluded and "resume" not in re.split(r"[./@]", key)
    ]
    return ", ".join(sorted(distinct)) or "nothing"
