"""The source that reads the nodes' ``keeper.dir``: each byte from this node, another node, or the path.

The ranks of a job exchange which parts of saves their nodes have, and rank 0 decides which saves can be read. World
size, mesh and nodes may differ from those of the save. A rank that needs bytes of another node asks a rank of it, which
serves its files while the load runs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import CheckpointError, CheckpointNotFound, logger, some
from dcp_plugin.core.format.summary import Summary
from dcp_plugin.core.media import Readable
from dcp_plugin.core.media.disk.local_files import LocalFiles
from dcp_plugin.core.paths import Where, as_path, on_file_system, resolved
from dcp_plugin.core.ranks.collectives import Ranks
from dcp_plugin.core.sources import Source, SourceFiles
from dcp_plugin.core.storage.published import read_summary
from dcp_plugin.core.types import CheckpointState
from dcp_plugin.tiers.journal_records import keeper_options
from dcp_plugin.tiers.keeper_client import settle_before_restart
from dcp_plugin.tiers.local_checkpoints import (
    LocalCheckpoint,
    LocalCheckpoints,
    Record,
    checkpoints_below,
    is_at,
    node_of,
    parts_of,
    path_of,
    run_of,
)
from dcp_plugin.tiers.server import Server, send_range
from dcp_plugin.tiers.source_selection import OWN, NearestFiles, Place, RemoteFile
from dcp_plugin.tiers.wire import Address, Channel, new_key, own_address


@dataclass(frozen=True)
class _Part:
    """A node's part of a save."""

    record: Record
    files: frozenset[str]
    node: str
    host: str
    address: Address | None
    """Address of a rank of the node, which serves the files; None if the job has one rank."""
    key: bytes
    """Key of that rank's server."""


@dataclass(frozen=True)
class Survivor:
    """A save that can be read."""

    parts: list[_Part]
    durable: bool
    """True if the path has it as well."""
    has_same_tables: bool
    """True if the index at the path is that of the nodes."""

    @property
    def record(self) -> Record:
        return self.parts[0].record


class Inventory:
    """Parts of saves that the nodes of a job have. This rank serves its own until :meth:`close`.

    Args:
        local_dir: The ``keeper.dir`` of the configuration.
        root: The folder of checkpoints.
    """

    def __init__(self, config: CheckpointConfig, local_dir: str, root: Where, ranks: Ranks) -> None:
        self._config, self._root, self._ranks = config, root, ranks
        self._is_durable = keeper_options(config).durable_every is not None
        self._local_dir = Path(local_dir)
        self._node = node_of(self._local_dir)
        self._key = new_key()
        self._own: dict[str, LocalCheckpoint] = {}
        self._server: Server | None = None
        self._runs: dict[str, str | None] = {}
        self.survivors: list[Survivor] = []
        """Newest first."""
        self.passed_over: list[str] = []
        """Saves that cannot be read, with the reason."""

    def take(self, of_one_node: bool = False) -> None:
        """Find the saves that can be read. Collective.

        Args:
            of_one_node: Do not ask the other nodes: assume that they have all parts of a complete save.
        """
        self.survivors, self.passed_over = self._ranks.combine(
            f"look for what survives of {self._root}", self._own_parts, lambda parts: self._decide(parts, of_one_node)
        )

    def _own_parts(self) -> tuple[list[_Part], list[str]]:
        checkpoints, problems = checkpoints_below(self._local_dir, resolved(self._root))
        self._own = {checkpoint.record.token: checkpoint for checkpoint in checkpoints}
        if self._own and self._ranks.size > 1:
            self._server = Server((own_address(), 0), [self._key], {}, {"read": self._send})
        address = self._server.address if self._server else None
        host = socket.gethostname()
        parts = [
            _Part(each.record, frozenset(each.present_files()), self._node, host, address, self._key)
            for each in checkpoints
        ]
        return parts, problems

    def _send(self, channel: Channel, token: str, name: str, offset: int, count: int) -> None:
        """Send a range of a file to another rank, if the record of the save names the file."""
        checkpoint = self._own.get(token)
        is_named = checkpoint is not None and name in checkpoint.record.files
        send_range(channel, checkpoint.folder / name if checkpoint and is_named else None, offset, count)

    def _decide(
        self, inventories: list[tuple[list[_Part], list[str]]], of_one_node: bool
    ) -> tuple[list[Survivor], list[str]]:
        """Return the saves that can be read, and why others cannot. On rank 0."""
        passed_over = list(dict.fromkeys(problem for _, problems in inventories for problem in problems))
        by_token: dict[str, list[_Part]] = {}
        for part in (part for parts, _ in inventories for part in parts):
            others = by_token.setdefault(part.record.token, [])
            is_same_save = not others or others[0].record.index_sha256 == part.record.index_sha256
            if is_same_save and part.node not in [other.node for other in others]:
                others.append(part)
        survivors = []
        for parts in sorted(by_token.values(), key=lambda parts: parts[0].record.time, reverse=True):
            record = parts[0].record
            name = f"{record.path} (step {record.step}, saved as {record.token})"
            run = self._run(record, passed_over)
            if run is not None and run != record.run:
                passed_over.append(f"{name}: it is of another run, whose folder of checkpoints was emptied since")
                continue
            at_path = self._summary_of(record)
            is_durable = at_path is not None and at_path.save_id == record.save_id
            if at_path is not None and not is_durable and at_path.time > record.time:
                passed_over.append(f"{name}: what is at its path is newer")
                continue
            lost = sorted(record.files.keys() - frozenset[str]().union(*(part.files for part in parts)))
            if lost and not is_durable and not (of_one_node and record.complete):
                passed_over.append(f"{name}: no node that is left has {some(lost, 3)}")
            else:
                has_same_tables = at_path is not None and at_path.index_sha256 == record.index_sha256
                survivors.append(Survivor(parts, is_durable, has_same_tables))
        return survivors, passed_over

    def _summary_of(self, record: Record) -> Summary | None:
        """Return the summary at the path of a save; None if the path has no checkpoint, or cannot be read now."""
        if not self._is_durable:
            return None
        with suppress(CheckpointError, OSError):
            return read_summary(self._path(record))
        return None

    def _path(self, record: Record) -> Where:
        return as_path(record.path, self._config.storage_options)

    def _run(self, record: Record, passed_over: list[str]) -> str | None:
        """Return the run that is now in the folder of a save; None if that is unknown."""
        if not self._is_durable or not record.run:
            return None
        root = self._path(record).parent
        if str(root) not in self._runs:
            try:
                self._runs[str(root)] = run_of(root) or ""
                _refuse_if_not_mounted(root)
            except (OSError, CheckpointError) as error:
                passed_over.append(f"{root} cannot be read ({error}): what is local is taken to be of this run")
                self._runs[str(root)] = None
        return self._runs[str(root)]

    def files(self, survivor: Survivor, path: Where, open_path: Callable[[], Readable]) -> NearestFiles:
        """Return the files of a save, for this rank.

        Args:
            open_path: Opens the files at ``path``.
        """
        record = survivor.record
        places: list[Place] = []
        others: list[Place] = []
        for part in survivor.parts:
            if part.node == self._node:
                places.append(Place(OWN, part.files, LocalFiles(self._own[record.token].folder).open))
            elif part.address is not None:
                open_file = partial(RemoteFile, part.address, part.key, record.token)
                others.append(Place(f"node {part.host}", part.files, open_file))
        turn = self._ranks.rank % len(others) if others else 0
        places += [*others[turn:], *others[:turn]]  # so that not all ranks ask the same node first
        at_path = open_path if survivor.durable else None
        return NearestFiles(
            str(path), record.files, places, record.time, at_path, survivor.has_same_tables, self.passed_over
        )

    def close(self) -> None:
        """Stop serving files."""
        if self._server is not None:
            self._server.close()


def _refuse_if_not_mounted(root: Where) -> None:
    """Raise FileNotFoundError if a folder of checkpoints and all around it is missing: users empty only the folder."""
    folder = on_file_system(root)
    if folder is None or folder.is_dir():
        return
    if not (folder.parent.is_dir() and any(folder.parent.iterdir())):
        raise FileNotFoundError(f"nothing is at {root.parent}: is the storage mounted?")


class NodesSource(Source):
    """The parts of checkpoints that the nodes of a job have.

    A keeper without ``keeper.dir`` has none, but may still be about to publish the saves of an earlier training.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config, self._dir = config, keeper_options(config).dir

    def settle(self, root: Where, ranks: Ranks) -> None:
        settle_before_restart(self._config, root, ranks)

    @contextmanager
    def open(self, path: Where, ranks: Ranks, open_path: Callable[[], Readable]) -> Iterator[SourceFiles | None]:
        if self._dir is None:
            yield None
            return
        with closing(Inventory(self._config, self._dir, path.parent, ranks)) as inventory:
            try:
                inventory.take()
                survivor = next((each for each in inventory.survivors if is_at(each.record, path)), None)
                if ranks.rank == 0 and inventory.passed_over:
                    logger.warning("%s: passed over: %s", path, some(inventory.passed_over, 5, "; "))
                yield None if survivor is None else inventory.files(survivor, path, open_path)
            except CheckpointNotFound as error:
                if inventory.passed_over:
                    passed_over = some(inventory.passed_over, 5, "; ")
                    error.add_note(f"In keeper.dir of the nodes was passed over: {passed_over}")
                raise

    def states(self, root: Where, ranks: Ranks | None = None) -> list[CheckpointState]:
        if self._dir is None:
            return []
        with closing(Inventory(self._config, self._dir, root, ranks or Ranks())) as inventory:
            inventory.take(of_one_node=ranks is None)
        if ranks is not None and ranks.rank == 0:
            for problem in inventory.passed_over:
                logger.warning("passing over %s", problem)
        records = (survivor.record for survivor in inventory.survivors if not survivor.durable)
        options = self._config.storage_options
        return [
            CheckpointState(as_path(each.path, options), True, "", each.step, each.time, "local") for each in records
        ]

    def newest_time(self, path: Where) -> float | None:
        parts = self._own_parts(path)
        return parts[-1].record.time if parts else None

    def quarantine(self, path: Where, ranks: Ranks) -> bool:
        if self._dir is None:
            return False

        def quarantine() -> int:
            parts = self._own_parts(path)
            for part in parts:
                part.quarantine()
            return len(parts)

        return ranks.combine(f"set {path} aside", quarantine, any)

    def _own_parts(self, path: Where) -> list[LocalCheckpoint]:
        return [] if self._dir is None else parts_of(Path(self._dir), path)

    def forget(self, path: Where) -> None:
        if self._dir is not None:
            LocalCheckpoints(Path(self._dir), resolved(path.parent)).forget(path_of(path))
