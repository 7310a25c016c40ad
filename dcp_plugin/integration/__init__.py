"""Code that the packages for Lightning, Fabric, Accelerate and transformers share.

The rule: any framework can load a checkpoint of any other. All of them store state under the same names and in the same
form (:mod:`~dcp_plugin.integration.stored`), including each rank's random streams and the positions of samplers.
:class:`Saver` is the base of all classes that save and load for an object of a framework. The names of ``stored.py``
and ``extra_files.py`` that these packages use are names of this module as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from dcp_plugin.checkpointer import Checkpointer, Internals
from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.paths import PathLike, Where, as_path
from dcp_plugin.core.records import LoadReport
from dcp_plugin.integration.extra_files import (
    META,
    is_of_stock_lightning,
    is_quarantined,
    is_regular_file,
    is_taken,
    kind_of,
    load_torch_file,
    local_copy,
    names_in,
    paths_in,
    read_file,
    read_summary,
    saved_at,
    summary_if_readable,
)
from dcp_plugin.integration.stored import (
    EXTRA,
    MODEL,
    OPTIM,
    RNG,
    Callbacks,
    RandomStreams,
    SavedStreams,
    among,
    encode,
    entries_of,
    holds_sharded,
    inspect_files,
    is_storable,
    keys_by_name,
    like,
    names_for,
    numbered,
    of_rank,
    optimizer_from_stored,
    plain,
    refuse_unstorable,
)

__all__ = [
    "EXTRA",
    "META",
    "MODEL",
    "OPTIM",
    "RNG",
    "BaseAttachment",
    "Callbacks",
    "FrameworkCheckpointer",
    "RandomStreams",
    "SavedStreams",
    "Saver",
    "among",
    "encode",
    "entries_of",
    "holds_sharded",
    "inspect_files",
    "is_of_stock_lightning",
    "is_quarantined",
    "is_regular_file",
    "is_storable",
    "is_taken",
    "keys_by_name",
    "kind_of",
    "like",
    "load_torch_file",
    "local_copy",
    "names_for",
    "names_in",
    "numbered",
    "of_rank",
    "optimizer_from_stored",
    "paths_in",
    "plain",
    "read_file",
    "read_summary",
    "refuse_unstorable",
    "saved_at",
    "summary_if_readable",
    "that_waits",
]


def that_waits(config: CheckpointConfig, integration: str) -> CheckpointConfig:
    """Return ``config``, for an integration that deletes and records checkpoints after each save.

    Args:
        integration: Name of the integration, for the message.

    Raises:
        ValueError: ``when_busy`` skips saves.
    """
    if config.when_busy != "wait":
        raise ValueError(
            f"when_busy={config.when_busy!r} is for the plain API and Fabric. Here {integration} decides after each "
            f"save which checkpoints to delete, and would take a skipped save for the newest checkpoint."
        )
    return config


class FrameworkCheckpointer(Checkpointer):
    """Checkpointer of a framework that stores the values of rank 0 by rule. It compares only the user's own data
    between ranks: the state of Lightning's callbacks, and of objects that are registered with Accelerate."""

    _compared = ("extra.callbacks.", "extra.registered.")


class Saver(ABC):
    """Settings and Checkpointer of one object of a framework.

    Args:
        config: Settings of saves and loads. None: those of the framework's object if it has some, else the defaults.
    """

    _kind: type[Checkpointer] = FrameworkCheckpointer
    last_load: LoadReport | None = None
    """The report of the last load; None if the framework has loaded files of its own."""
    check_options: tuple[Any, Sequence[str]] = ("auto", ())
    """``verify_resume`` and ``expect_changed``, see :func:`dcp_plugin.resume_or_init`."""

    def __init__(self, config: CheckpointConfig | None) -> None:
        self._config = config
        self._checkpointer: Checkpointer | None = None

    @property
    def config(self) -> CheckpointConfig:
        """The settings of saves and loads."""
        if self._config is None:
            self._config = self._find_config()
        return self._config

    def _find_config(self) -> CheckpointConfig:
        """Return the settings for an object whose user gave none."""
        return CheckpointConfig()

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks that save and load together."""

    @property
    def checkpointer(self) -> Checkpointer:
        """The Checkpointer that saves and loads, made at its first use."""
        if self._checkpointer is None:
            self._checkpointer = self._kind(self.config, solo=self.world_size == 1)
        return self._checkpointer

    @property
    def internals(self) -> Internals:
        """Calls of the Checkpointer for this integration."""
        return Internals(self.checkpointer)

    def where(self, path: PathLike) -> Where:
        """Return a path, or a URL with the options of its store."""
        return as_path(path, self.config.storage_options)

    def due(self, step: int) -> bool:
        """Return whether a save is due by ``save_interval``, see :meth:`dcp_plugin.Checkpointer.due`. Collective."""
        return self.checkpointer.due(step)

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            SaveFailed: A save failed; raised once, on every rank that took part in the save.
        """
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self) -> None:
        """Wait for the save in flight, and free the resources of saving. Later saves are possible.

        Raises:
            SaveFailed: A save failed, as in :meth:`wait`.
        """
        if self._checkpointer is not None:
            self._checkpointer.close()


class BaseAttachment(Saver):
    """Attachment by which a framework's object saves and loads through the core, until :meth:`detach`.

    The end of its ``with`` block detaches. If the block has raised an exception, a failure of the save in flight
    becomes a note on the exception and does not replace it.
    """

    @abstractmethod
    def detach(self) -> None:
        """Finish the save in flight, and have the framework save and load as before the attachment.

        Raises:
            SaveFailed: A save failed, as in :meth:`wait`.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.detach()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Besides, a checkpoint could not be saved: {failure}")
