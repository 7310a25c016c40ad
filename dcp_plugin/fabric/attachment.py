"""What ``attach(fabric)`` returns: the settings of a Fabric's checkpoints, and the way to finish them.

Fabric never tears a strategy down, so nobody but the user knows when the last background save has to be finished:
``wait()``, or the end of the ``with`` block. A program that ends without either is held up until the save is on disk,
and is told so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dcp_plugin.checkpointer import Checkpointer, SaveHandle
from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import CheckpointError
from dcp_plugin.fabric._fabric import plugin_of, when_the_program_ends

logger = logging.getLogger("dcp_plugin")


class Attachment:
    """How a strategy saves and loads, and the save that is in flight. A context manager: ``with attach(fabric):``."""

    def __init__(self, strategy: Any, config: CheckpointConfig | None) -> None:
        self._strategy = strategy
        self._config = config
        self._class_before = type(strategy)
        self._checkpointer: Checkpointer | None = None
        self._last_save: SaveHandle | None = None

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
        self._last_save = None
        self._last_save = self.checkpointer.save(state, path, step)
        if self.config.async_save:
            _nobody_waited_for.add(self)

    def wait(self) -> None:
        """Wait until what was saved is on disk.

        Raises:
            SaveFailed: It failed; on every rank, and once.
        """
        _nobody_waited_for.discard(self)
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self) -> None:
        """Wait, and free what saving needed. Saving again is possible.

        Raises:
            SaveFailed: As :meth:`wait`.
        """
        _nobody_waited_for.discard(self)
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

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.detach()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"Besides, a checkpoint could not be saved: {failure}")

    def _finish_late(self) -> None:
        """The program ends, and nobody has waited."""
        handle = self._last_save
        path = "a checkpoint" if handle is None else handle.path
        if handle is not None and not handle.done() and getattr(self._strategy, "is_global_zero", True):
            logger.warning(
                "the program ends while %s is being saved; it goes on until that is on disk. Call wait() on what "
                "attach() returned to be told whether it succeeded.",
                path,
            )
        try:
            self.wait()
        except Exception as error:
            logger.error("%s was NOT saved, and the program ended without asking: %s", path, error)


_nobody_waited_for: set[Attachment] = set()


def _finish_all() -> None:
    for attachment in list(_nobody_waited_for):
        attachment._finish_late()


when_the_program_ends(_finish_all)
