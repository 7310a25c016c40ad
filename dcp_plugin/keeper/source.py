"""The source that the nodes' ``local_dir`` is: each byte from this node, from another one, or from the path."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import CheckpointNotFound, some
from dcp_plugin.keeper.client import settle_before_restart
from dcp_plugin.keeper.inventory import Survey, Surveyor, newest_at, parts_of, path_of
from dcp_plugin.keeper.local_checkpoints import LocalSteps
from dcp_plugin.media import Readable
from dcp_plugin.paths import Where, as_path
from dcp_plugin.ranks import Ranks
from dcp_plugin.sources import Source, SourceFiles
from dcp_plugin.types import CheckpointState

logger = logging.getLogger("dcp_plugin")


class NodesSource(Source):
    """The parts of checkpoints that the nodes of a job have.

    A keeper without ``local_dir`` has none, but may still be about to publish what an earlier training handed over.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config

    def settle(self, root: Where, ranks: Ranks) -> None:
        settle_before_restart(self._config, root, ranks)

    @contextmanager
    def open(self, path: Where, ranks: Ranks, below: Callable[[], Readable]) -> Iterator[SourceFiles | None]:
        if self._config.local_dir is None:
            yield None
            return
        surveyor = Surveyor(ranks, self._config, path.parent)
        survey = Survey([], [])
        try:
            survey = surveyor.look()
            survivor = newest_at(survey, path)
            if ranks.rank == 0 and survey.passed_over:
                logger.warning("%s: passed over: %s", path, _in_short(survey.passed_over))
            yield None if survivor is None else surveyor.files(survivor, path, below, survey.passed_over)
        except CheckpointNotFound as error:
            if survey.passed_over:
                error.add_note(f"In local_dir of the nodes was passed over: {_in_short(survey.passed_over)}")
            raise
        finally:
            surveyor.close()

    def states(self, root: Where, ranks: Ranks | None = None) -> list[CheckpointState]:
        if self._config.local_dir is None:
            return []
        surveyor = Surveyor(ranks or Ranks(), self._config, root)
        try:
            survey = surveyor.look(of_one_node=ranks is None)
        finally:
            surveyor.close()
        if ranks is not None and ranks.rank == 0:
            for problem in survey.passed_over:
                logger.warning("passing over %s", problem)
        records = (survivor.record for survivor in survey.survivors if not survivor.durable)
        options = self._config.storage_options
        return [
            CheckpointState(as_path(each.path, options), True, "", each.step, each.time, "local") for each in records
        ]

    def newest_time(self, path: Where) -> float | None:
        parts = [] if self._config.local_dir is None else parts_of(Path(self._config.local_dir), path)
        return parts[-1].record.time if parts else None

    def quarantine(self, path: Where, ranks: Ranks) -> bool:
        if self._config.local_dir is None:
            return False
        local_dir = Path(self._config.local_dir)

        def quarantine() -> int:
            parts = parts_of(local_dir, path)
            for part in parts:
                part.set_aside()
            return len(parts)

        total: int = ranks.combine(f"set {path} aside", quarantine, lambda counts: sum(counts))
        return total > 0

    def forget(self, path: Where) -> None:
        if self._config.local_dir is not None:
            LocalSteps(Path(self._config.local_dir), path.parent).forget(path_of(path))


def _in_short(problems: list[str]) -> str:
    return some(problems, 5, "; ")
