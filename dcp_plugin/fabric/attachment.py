"""What ``attach(fabric)`` returns: the settings of a Fabric's checkpoints, and the way to finish them.

Fabric never tears a strategy down, so nobody but the user knows when the last background save has to be finished:
``wait()``, or the end of the ``with`` block. A program that ends without either is held up until the save is on disk,
and is told so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcp_plugin.attached import Attached
from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.config import CheckpointConfig
from dcp_plugin.fabric._fabric import plugin_of


class Attachment(Attached):
    """How a strategy saves and loads, and the save that is in flight. A context manager: ``with attach(fabric):``."""

    def __init__(self, strategy: Any, config: CheckpointConfig | None) -> None:
        self._strategy = strategy
        self._config = config
        self._class_before = type(strategy)
        self._checkpointer: Checkpointer | None = None

    @property
    def config(self) -> CheckpointConfig:
        """What :func:`attach` was given, else what the plugin among ``Fabric(plugins=...)`` was, else the defaults."""
        if self._config is None:
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
