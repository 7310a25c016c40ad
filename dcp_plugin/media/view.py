"""Files of a checkpoint that are other files, under other names: the base class of such views."""

from __future__ import annotations

from collections.abc import Iterable

from dcp_plugin.media import RangedFile, Readable, ReadCost


class View(Readable):
    """Files of a checkpoint under other names. This base class has those of ``files``, under their names."""

    def __init__(self, files: Readable) -> None:
        self.files = files

    def located(self, name: str) -> tuple[Readable, str]:
        """Return the files that have a file of the view, and its name there."""
        return self.files, name

    @property
    def where(self) -> str:
        return self.files.where

    @property
    def cost(self) -> ReadCost:
        return self.files.cost

    def names(self) -> list[str]:
        return self.files.names()

    def version(self, names: Iterable[str]) -> str:
        return self.files.version(self.located(name)[1] for name in names)

    def size(self, name: str) -> int:
        files, name = self.located(name)
        return files.size(name)

    def modified(self, name: str) -> float:
        files, name = self.located(name)
        return files.modified(name)

    def open(self, name: str) -> RangedFile:
        files, name = self.located(name)
        return files.open(name)

    def leads_elsewhere(self, name: str) -> bool:
        files, name = self.located(name)
        return files.leads_elsewhere(name)

    def pin(self, names: Iterable[str]) -> None:
        for files, name in map(self.located, names):
            files.pin([name])

    def mark_unreliable(self, file: RangedFile) -> bool:
        return self.files.mark_unreliable(file)

    def moved(self) -> bool:
        return self.files.moved()

    def close(self) -> None:
        self.files.close()
