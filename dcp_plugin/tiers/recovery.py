"""A load from what survives: the files of a checkpoint from this node, from others, and from its path."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType

from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import CheckpointError, CheckpointNotFound
from dcp_plugin.media import medium_of
from dcp_plugin.media.elsewhere import Elsewhere, shown_at
from dcp_plugin.paths import Where, as_path
from dcp_plugin.ranks import Ranks
from dcp_plugin.storage.open import Opened, open_files
from dcp_plugin.tiers.nearest import NearestFiles
from dcp_plugin.tiers.survey import Survey, Surveyor, Survivor, newest_at, said
from dcp_plugin.types import LoadReport

logger = logging.getLogger("dcp_plugin")


class Recovery:
    """Finds where a checkpoint is when a load begins, and serves other ranks until it ends.

    Without ``local_dir`` it does nothing.
    """

    def __init__(self, ranks: Ranks, config: CheckpointConfig, path: Where) -> None:
        self._ranks, self._config, self._path = ranks, config, path
        self._surveyor: Surveyor | None = None
        self._survey: Survey | None = None
        self._files: NearestFiles | None = None
        self._began = time.monotonic()

    def __enter__(self) -> Recovery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._surveyor is not None:
            self._surveyor.close()
        if isinstance(error, CheckpointNotFound) and self._survey is not None and self._survey.passed_over:
            error.add_note(f"In local_dir of the nodes was passed over: {said(self._survey.passed_over)}")

    def find(self) -> Callable[[], Opened] | None:
        """What opens the checkpoint on this rank; None if it is at its path alone. Collective."""
        if self._config.local_dir is None:
            return None
        self._surveyor = Surveyor(self._ranks, self._config, self._path.parent)
        survey = self._survey = self._surveyor.look()
        survivor = newest_at(survey, self._path)
        if self._ranks.rank == 0 and survey.passed_over:
            logger.warning("%s: passed over: %s", self._path, said(survey.passed_over))
        if survivor is None:
            return None
        chosen: Survivor = survivor
        surveyor = self._surveyor

        def open_nearest() -> Opened:
            self._files = surveyor.files(chosen, self._path)
            return open_files(self._path, self._files, self._base)

        return open_nearest

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While the block runs, what looks at the path finds what survives, if nothing of that save is there.
        Collective."""
        self.find()
        survivor = newest_at(self._survey, self._path) if self._survey is not None else None
        if survivor is None or survivor.durable:
            yield
            return
        assert self._survey is not None and self._surveyor is not None
        files = self._surveyor.files(survivor, self._path)
        beside: dict[str, str] = {}
        with suppress(CheckpointError):  # whoever reads it will say so
            beside = open_files(self._path, files, self._base).index.beside
        with shown_at(self._path, Elsewhere(files, tuple(files.all_names()), beside, medium_of(self._path))):
            yield
            self._ranks.agree(f"end to look at {self._path}", lambda: None)  # nobody needs this node's files any more

    @property
    def _base(self) -> Where | None:
        return None if self._config.base is None else as_path(self._config.base, self._config.storage_options)

    def told(self, report: LoadReport) -> LoadReport:
        """With where the bytes of this rank came from."""
        if self._files is None:
            return report
        passed_over = [*(self._survey.passed_over if self._survey else []), *self._files.problems]
        seconds = time.monotonic() - self._began
        report = replace(report, sources=dict(self._files.bytes_from), passed_over=passed_over, seconds=seconds)
        if self._ranks.rank == 0:
            told = ", ".join(f"{count / 2**20:,.1f} MiB from {name}" for name, count in report.sources.items())
            logger.info("%s: rank 0 has read %s in %.2f s", self._path, told or "nothing", seconds)
        return report
