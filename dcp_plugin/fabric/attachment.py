"""What ``attach(fabric)`` returns: the settings of a Fabric's checkpoints, and the way to finish them.

Fabric never tears a strategy down, so nobody but the user knows when the last background save has to be finished:
``wait()``, or the end of the ``with`` block. A program that ends without either is held up until the save is on disk,
and is told so.
"""

from __future__ import annotations

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
from dcp_plugin.runs.resume import Restart, StartOptions, modules_of


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
            resume, init_from, partial, strict: As for :func:`dcp_plugin.resume_or_init`.

        Returns:
            How the run starts, see there; without a report if it resumes.

        Raises:
            CheckpointError: :func:`attach` was given no Fabric; or as :func:`dcp_plugin.resume_or_init`.
            ValueError: As there.
        """
        options = StartOptions(resume, init_from, partial, strict)
        if self.fabric is None:
            raise CheckpointError("which Fabric is this? Call attach(fabric), and resume_or_init of what it returns.")
        return options.start(
            self.checkpointer,
            unwrapped(self.fabric, modules_of(state)),
            # Fabric's own files are those of ``torch.save``, with the names of the state that is to be loaded.
            lambda: options.find(root, (OTHERS,)),
            lambda path: self._load(path, state, strict),
        )

    def _load(self, path: Path, state: dict[str, Any], strict: bool) -> None:
        self.fabric.load(path, state, strict=strict)

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
