"""Sources: places other than its path where a checkpoint may be. The core knows the keeper only through this module.

A load, the catalogue and the integrations first ask a :class:`Source`. They read only the bytes from the path that the
source lacks. :func:`keeper_of` imports the package of the keeper only if the configuration has one, so a plain save and
load import no part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from dcp_plugin import core
from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.media import Readable
from dcp_plugin.core.paths import Where
from dcp_plugin.core.types import CheckpointState

if TYPE_CHECKING:
    from dcp_plugin.core.ranks.collectives import Ranks


class SourceFiles(Readable, Protocol):
    """Files of one checkpoint of this package in a source. Bytes that the source lacks are read from the path.

    The files can be read again after :meth:`close`, until the source's block ends.
    """

    bytes_from: Counter[str]
    """Bytes read so far, by the name of the place."""
    problems: list[str]
    """Parts that are unreliable or cannot be read, with the reason."""
    is_at_path: bool
    """True if the path has the complete checkpoint as well."""

    def all_names(self) -> list[str]:
        """Return every file, with ``/`` between folders."""


class Source:
    """A place other than the path where a checkpoint may be. This base class has none: all checkpoints are at their
    paths."""

    def settle(self, root: Where, ranks: Ranks) -> None:
        """Wait until the saves that an earlier training handed over are complete. Collective."""

    @contextmanager
    def open(self, path: Where, ranks: Ranks, open_path: Callable[[], Readable]) -> Iterator[SourceFiles | None]:
        """Open the newest save to ``path``; None if only the path has it. Collective; ranks agree on the save.

        This rank serves other ranks until the block ends, so all ranks leave it together.

        Args:
            open_path: Opens the files at the path, from which byte ranges that the source lacks are read.
        """
        yield None

    def states(self, root: Where, ranks: Ranks | None = None) -> list[CheckpointState]:
        """Return the saves at or below ``root`` that are complete, but not at their paths.

        Args:
            ranks: All ranks that load together; the call is then collective. None if this host decides alone.
        """
        return []

    def newest_time(self, path: Where) -> float | None:
        """Return the time of the newest save to ``path`` of which this node has a part; None if there is none."""
        return None

    def quarantine(self, path: Where, ranks: Ranks) -> bool:
        """Exclude the saves to ``path`` from all later starts; return whether any node has one. Collective."""
        return False

    def forget(self, path: Where) -> None:
        """Delete the parts that this node has of the saves to ``path``."""


@dataclass(frozen=True)
class KeeperFactories:
    """Constructors that the package of the keeper provides."""

    source: Callable[[CheckpointConfig], Source]
    writer: Callable[..., Any]
    """A ``WriterFactory`` of :mod:`dcp_plugin.core.saving.writers`, which this module cannot import. mypy checks the
    type where the package of the keeper makes this record."""


def keeper_of(config: CheckpointConfig) -> KeeperFactories | None:
    """Return the keeper that a configuration requires; None if this process writes its saves itself."""
    if config.keeper is None:
        return None
    assert core.keeper is not None, "the package has registered it"
    return cast(KeeperFactories, core.keeper())


def source_of(config: CheckpointConfig) -> Source:
    """Return the source of a configuration."""
    keeper = keeper_of(config)
    return Source() if keeper is None else keeper.source(config)
