"""What a door's ``attach`` returns: it detaches at the end of a ``with`` block, and masks no error of the block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from dcp_plugin.errors import CheckpointError


class Attached(ABC):
    """Until :meth:`detach`, a framework's object saves and loads through the core."""

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
