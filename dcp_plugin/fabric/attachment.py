"""What ``attach(fabric)`` returns: the settings of a Fabric's checkpoints, and the way to finish them.

Fabric never tears a strategy down, so nobody but the user knows when the last background save has to be finished:
``wait()``, or the end of the ``with`` block. A program that ends without either is held up until the save is on disk,
and is told so.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.config import CheckpointConfig, PathLike
from dcp_plugin.errors import CheckpointError
from dcp_plugin.fabric._fabric import plugin_of, unwrapped
from dcp_plugin.format.foreign.training import OTHERS
from dcp_plugin.integration import Attached
from dcp_plugin.loading.partial import PartialLoad
from dcp_plugin.runs.catalog import resolve
from dcp_plugin.runs.resume import Restart, decide, load_from, modules_of, refuse_partial_of_nothing


class Attachment(Attached):
    """How a strategy saves and loads, and the save that is in flight. A context manager: ``with attach(fabric):``."""

    def __init__(self, strategy: Any, config: CheckpointConfig | None) -> None:
        self._strategy = strategy
        self._config = config
        self._class_before = type(strategy)
        self._checkpointer: Checkpointer | None = None
        self.fabric: Any = None
        """What :func:`attach` was given; None for a strategy that its user has made."""

    @property
    def config(self) -> CheckpointConfig:
        """What :func:`attach` was given, else what the plugin among ``Fabric(plugins=...)`` was, else the defaults.

        Raises:
            ValueError: The plugin has an ``init_from``.
        """
        if self._config is None:
            refuse_init_from(self._strategy)
            config = getattr(plugin_of(self._strategy), "config", None)
            self._config = config if isinstance(config, CheckpointConfig) else CheckpointConfig()
        return self._config

    def reconfigure(self, config: CheckpointConfig) -> None:
        """Use other settings from now on. What is in flight is finished first."""
        self.close()
        self._config = config

    @property
    def checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            alone = getattr(self._strategy, "world_size", 1) == 1
            self._checkpointer = Checkpointer(self.config, solo=alone)
        return self._checkpointer

    def save(self, state: Mapping[str, Any], path: Path, step: int | None) -> None:
        self.checkpointer.save(state, path, step)

    def resume_or_init(
        self,
        state: dict[str, Any],
        root: PathLike,
        *,
        resume: str | PathLike = "auto",
        init_from: PathLike | None = None,
        partial: PartialLoad | None = None,
        strict: bool = True,
    ) -> Restart:
        """``fabric.load`` of the run's own newest checkpoint; else its modules' weights from ``init_from``. Collective.

        Call it when everything is set up, before the loop over the data.

        Args:
            state: As for ``fabric.load``.
            root: Where this run's checkpoints are.
            resume: ``"auto"``, ``"must"``, ``"never"`` or the path of a checkpoint.
            init_from: A checkpoint to take the modules' weights from if there is none of this run.
            partial: Which of the modules' keys ``init_from`` fills, and from where; all if omitted.
            strict: Whether keys that do not fit are errors.

        Raises:
            ValueError: ``partial`` without ``init_from``.
            CheckpointNotFound: ``"must"`` and there is nothing to resume from; or ``init_from`` is needed and not
                there.
            CheckpointError: What there is to start from cannot be loaded; on every rank. Nothing else is tried.
        """
        refuse_partial_of_nothing(partial, init_from)
        if self.fabric is None:
            raise CheckpointError("which Fabric is this? Call attach(fabric), and resume_or_init of what it returns.")
        # Fabric's own files are those of ``torch.save``, with the names of the state that is to be loaded.
        own = functools.partial(resolve, resume, root, (OTHERS,), init_from)
        start = decide(self.checkpointer.ranks, own, init_from)
        if start.how == "resumed":
            self.fabric.load(start.path, state, strict=strict)
        elif start.how == "warm-started":
            modules = unwrapped(self.fabric, modules_of(state))
            start = load_from(start, self.checkpointer, modules, partial, strict)
        return start

    def wait(self) -> None:
        """Wait until what was saved is on disk.

        Raises:
            SaveFailed: It failed; on every rank, and once.
        """
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self) -> None:
        """Wait, and free what saving needed. Saving again is possible.

        Raises:
            SaveFailed: As :meth:`wait`.
        """
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def detach(self) -> None:
        """Finish, and have the Fabric save and load as it did before :func:`attach`.

        Raises:
            SaveFailed: As :meth:`wait`.
        """
        self._strategy.__class__ = self._class_before
        self.close()


def refuse_init_from(strategy: Any) -> None:
    """Raises ValueError for a plugin with ``init_from``: a Fabric has no ``fit`` that would heed it."""
    if getattr(plugin_of(strategy), "init_from", None) is not None:
        raise ValueError(
            "DCPCheckpointIO(init_from=...) among Fabric(plugins=...): a Fabric takes only the settings of it, and "
            "would start without the pre-trained weights. Give init_from, and partial, to "
            "attach(fabric).resume_or_init(state, root, init_from=...)."
        )
