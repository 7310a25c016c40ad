"""Code that the packages for Lightning, Fabric, Accelerate and transformers share.

Enters: a framework's objects and their settings. Leaves: the names under which they are stored
(:mod:`~dcp_plugin.integration.key_names`), each rank's random streams, the positions of samplers, and
:class:`BaseAttachment`, the base of what ``attach`` returns. The rule: what one framework saved, any other can load.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.errors import CheckpointError
from dcp_plugin.runs.interval import SaveInterval


class FrameworkCheckpointer(Checkpointer):
    """The Checkpointer of a framework in which the values of rank 0 count by rule."""

    _compares_ranks = False


class BaseAttachment(ABC):
    """Until :meth:`detach`, a framework's object saves and loads through the core.

    As a context manager it detaches at the end. If the block raises, a failure of the save in flight is a note on
    that exception and does not replace it.
    """

    @property
    @abstractmethod
    def checkpointer(self) -> Checkpointer:
        """What saves and loads."""

    @abstractmethod
    def log(self, figures: dict[str, float], step: int) -> None:
        """Give figures to the loggers of the framework, on whichever rank has some."""

    def due(self, step: int) -> bool:
        """Whether to save now, by ``save_interval``: see :meth:`dcp_plugin.Checkpointer.due`. Collective.

        When a save is due, the loggers get what is known of its interval: ``checkpoint/proposed_interval_seconds``.
        """
        due = self.checkpointer.due(step)
        if due and (proposed := self.proposed_interval()) is not None:
            self.log(proposed.figures(), step)
        return due

    def proposed_interval(self) -> SaveInterval | None:
        """How often to save: see :meth:`dcp_plugin.Checkpointer.proposed_interval`."""
        return self.checkpointer.proposed_interval()

    @abstractmethod
    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            SaveFailed: It failed; on every rank, and once.
        """

    @abstractmethod
    def detach(self) -> None:
        """Finish the save in flight, and have the framework save and load as it did before.

        Raises:
            SaveFailed: As :meth:`wait`.
        """

    def __enter__(self) -> Self:
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
