"""``dcp_plugin.resume_or_init``: start of a run from its newest checkpoint, a pre-trained checkpoint, or no
checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import CheckpointMismatch
from dcp_plugin.media import medium_of
from dcp_plugin.partial import PartialLoad
from dcp_plugin.paths import PathLike, Where, as_path
from dcp_plugin.records import LoadReport
from dcp_plugin.runs.catalog import sibling_parts
from dcp_plugin.runs.launches import refuse_other_ranks
from dcp_plugin.runs.resume import Restart, StartOptions, modules_of
from dcp_plugin.storage.published import read_summary


def resume_or_init(
    state: Mapping[str, Any],
    root: PathLike,
    *,
    resume: str | PathLike = "auto",
    init_from: PathLike | None = None,
    partial: PartialLoad | None = None,
    strict: bool = True,
    checkpointer: Checkpointer | None = None,
    config: CheckpointConfig | None = None,
    **overrides: Any,
) -> Restart:
    """Load the run's newest checkpoint into ``state``, or else the pre-trained weights ``init_from``. Collective.

    A resume restores: mappings, lists and ``Stateful`` objects get the tensors that they had at the save, of any shape
    and number. A warning names the tensors that the target has and the checkpoint lacks.

    Args:
        state: The state to fill, see :meth:`Checkpointer.load`. A resume loads all of it, a warm start only its
            modules.
        root: Directory of this run's checkpoints; it need not exist yet. Only rank 0 reads it.
        resume: ``"auto"``, ``"must"``, ``"never"`` or the path of a checkpoint, see :func:`~dcp_plugin.resolve_resume`.
            If the newest checkpoint proves to be damaged during the load, ``"auto"`` quarantines it and loads the
            checkpoint before it; ``"must"`` and a path raise.
        init_from: A checkpoint with the model's weights, used if the run has no checkpoint.
        partial: Rules for the modules' keys that ``init_from`` fills; all keys by default. Not used for a resume.
        strict: If true, keys that do not fit are errors.
        checkpointer: The checkpointer that saves, whose settings and process group the load uses. Without it, a
            temporary checkpointer is made from ``config`` and ``overrides``.

    Returns:
        The start of the run: ``"resumed"``, ``"warm-started"`` or ``"fresh"``, the source, and the report of the load.

    Raises:
        ValueError: ``partial`` is given without ``init_from``, or a checkpointer together with settings.
        CheckpointNotFound: ``resume="must"`` and the run has no checkpoint; or ``init_from`` is needed and is not
            there.
        CheckpointError: The chosen checkpoint cannot be loaded; raised on every rank. No other checkpoint is tried,
            except that ``"auto"`` tries an older checkpoint of the run if the newest is damaged.
        RankFailure: A rank died, or did not answer within the timeout.

    Example:
        >>> import torch, dcp_plugin
        >>> state = {"model": torch.nn.Linear(2, 2), "step": 0}
        >>> dcp_plugin.resume_or_init(state, "run").how
        'fresh'
        >>> dcp_plugin.save(state, "run/step-1", step=1)
        >>> str(dcp_plugin.resume_or_init(state, "run"))  # doctest: +ELLIPSIS
        'resumed at step 1: loaded 3 items from ...run/step-1'
    """
    StartOptions(resume, init_from, partial, strict)  # raises errors in the arguments before any other work
    if checkpointer is not None and (config is not None or overrides):
        raise ValueError("give either a checkpointer or settings: a checkpointer has its own settings.")
    besides = ("resume", "init_from", "partial", "strict", "checkpointer")
    used = checkpointer or Checkpointer(CheckpointConfig.merge(config, besides, **overrides))
    try:
        local = used.surviving(root) if resume != "never" else ()
        options = StartOptions(resume, init_from, partial, strict, used.config.storage_options, local)

        def find(damaged: Collection[Where]) -> Where | None:
            if resume != "never":
                refuse_other_ranks(as_path(root, used.config.storage_options), used.ranks.launch)
            return options.find(root, without=damaged)

        return options.start(
            used,
            modules_of(state),
            find,
            lambda path: _resume(used, state, path, strict),
        )
    finally:
        if checkpointer is None:
            used.close()


def _resume(checkpointer: Checkpointer, state: Mapping[str, Any], path: Where, strict: bool) -> LoadReport:
    try:
        return checkpointer.restore(state, path, strict=strict)
    except CheckpointMismatch as error:
        if len(parts := sibling_parts(path)) > 1:
            error.add_note(
                f"{path} is one of {len(parts)} parts of {path.parent}, each a checkpoint of its own: "
                f"{', '.join(part.name for part in parts)}. Load each into what it was saved from: "
                + ", ".join(f"dcp_plugin.load({{...}}, {str(part)!r})" for part in parts)
                + "."
            )
        elif medium_of(path).kind(path) == "file" or read_summary(path) is None:
            error.add_note(
                f"Another tool has saved {path}. What only that tool restores, such as an optimizer whose "
                "parameters have numbers, is resumed there. To take the weights alone: "
                "resume_or_init(..., resume='never', init_from=PATH)."
            )
        raise
