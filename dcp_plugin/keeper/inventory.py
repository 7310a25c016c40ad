"""What survives of a run, and which nodes have it: the ranks of a job tell each other, and rank 0 decides.

World size, mesh and nodes may differ from those of the save: what a node holds is found in its ``local_dir``, and who
needs bytes of it asks a rank of that node while the load runs.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import CheckpointError, some
from dcp_plugin.format.summary import Summary
from dcp_plugin.keeper.local_checkpoints import LocalStep, Record, steps_below
from dcp_plugin.keeper.selection import DurablePlace, NearestFiles, OtherNode, OwnFolder, Place
from dcp_plugin.keeper.wire import Address, Server, new_key, own_address, serve_files
from dcp_plugin.media import Readable, medium_of, workspace_in, workspaces_in
from dcp_plugin.paths import Where, as_path, resolved
from dcp_plugin.ranks import Ranks
from dcp_plugin.storage.published import read_summary

logger = logging.getLogger("dcp_plugin")

RUN = "run"
"""In the workspace of a folder of checkpoints: stands for all that is saved there until the folder is emptied."""


def path_of(path: Where) -> Where:
    """What a record calls the checkpoint at a path: the same for all that name it, whether it is there or not."""
    return resolved(path.parent) / path.name


def run_of(root: Where) -> str | None:
    """What stands for the runs in a folder of checkpoints; None if nothing does. Raises OSError."""
    for workspace in workspaces_in(root):
        with suppress(FileNotFoundError, NotADirectoryError), medium_of(root).open(workspace).open(RUN) as file:
            return file.read(64).decode("ascii", "replace")
    return None


def make_run(root: Where) -> str:
    """:func:`run_of`, made if there is none. Raises OSError."""
    found = run_of(root)
    if found is None:
        fresh = uuid.uuid4().hex
        medium_of(root).note(workspace_in(root) / RUN, fresh.encode(), only_new=True)
        found = run_of(root) or fresh
    return found


@dataclass(frozen=True)
class _Held:
    """Message of one rank."""

    node: str
    host: str
    address: Address | None
    key: bytes
    """Of its server: one rank may ask another before that has heard what is decided."""
    steps: list[tuple[Record, frozenset[str]]]
    problems: list[str]


@dataclass(frozen=True)
class Holder:
    """A node that has something of a save."""

    host: str
    address: Address | None
    """Where a rank of it answers, to who has the key."""
    key: bytes
    files: frozenset[str]


@dataclass(frozen=True)
class Survivor:
    """A save that can be put together."""

    record: Record
    holders: dict[str, Holder]
    """By node."""
    durable: bool
    """Whether it is at its path, too."""


@dataclass(frozen=True)
class Survey:
    """Inventory that the ranks have made together."""

    survivors: list[Survivor]
    """Newest first."""
    passed_over: list[str]
    """What cannot be put together or is not believed, in words."""


@dataclass
class Surveyor:
    """One rank's part of a survey, and what it serves to the others until it is closed.

    Args:
        config: With ``local_dir``.
        root: The folder of checkpoints.
    """

    ranks: Ranks
    config: CheckpointConfig
    root: Where
    _server: Server | None = None
    _key: bytes = field(default_factory=new_key)

    def __post_init__(self) -> None:
        assert self.config.local_dir is not None
        self._local_dir = Path(self.config.local_dir)
        self._steps: dict[str, LocalStep] = {}
        self._runs: dict[str, str | None] = {}
        self._node = node_of(Path(self.config.local_dir))

    def look(self, of_one_node: bool = False) -> Survey:
        """Find what can be put together. Collective.

        Args:
            of_one_node: The other nodes are not asked: what was complete on all is taken to be there.
        """
        return self.ranks.combine(
            f"look for what survives of {self.root}", self._hold, lambda held: self._decide(held, of_one_node)
        )

    def _hold(self) -> _Held:
        found, problems = steps_below(self._local_dir, resolved(self.root))
        self._steps = {step.record.token: step for step in found}
        if self._steps and self.ranks.size > 1 and self._server is None:
            self._server = Server((own_address(), 0), {0: self._key}, lambda channel: serve_files(channel, self._find))
        told = [(step.record, frozenset(step.there())) for step in self._steps.values()]
        address = self._server.address if self._server else None
        return _Held(self._node, socket.gethostname(), address, self._key, told, problems)

    def _find(self, folder: str, name: str) -> Path | None:
        """A file that another rank asks for: only what the record of a save names."""
        step = self._steps.get(folder)
        return step.folder / name if step is not None and name in step.record.files else None

    def _decide(self, held: list[_Held], of_one_node: bool) -> Survey:
        """On rank 0."""
        passed_over = list(dict.fromkeys(problem for one in held for problem in one.problems))
        by_token: dict[str, Survivor] = {}
        for one in held:
            for record, there in one.steps:
                known = by_token.setdefault(record.token, Survivor(record, {}, False))
                if known.record.index_sha256 == record.index_sha256:
                    known.holders.setdefault(one.node, Holder(one.host, one.address, one.key, there))
        survivors = []
        for found in sorted(by_token.values(), key=lambda one: one.record.time, reverse=True):
            record = found.record
            name = f"{record.path} (step {record.step}, saved as {record.token})"
            run = self._run(record, passed_over)
            if run is not None and record.run and record.run != run:
                passed_over.append(f"{name}: it is of another run, whose folder of checkpoints was emptied since")
                continue
            at_path = self._summary_of(record)
            is_durable = at_path is not None and at_path.save_id == record.save_id
            if at_path is not None and not is_durable and at_path.time > record.time:
                passed_over.append(f"{name}: what is at its path is newer")
                continue
            have = frozenset[str]().union(*(holder.files for holder in found.holders.values()))
            lost = sorted(record.files.keys() - have)
            if lost and not is_durable and not (of_one_node and record.complete):
                passed_over.append(f"{name}: no node that is left has {some(lost, 3)}")
            else:
                survivors.append(Survivor(record, found.holders, is_durable))
        return Survey(survivors, passed_over)

    def _summary_of(self, record: Record) -> Summary | None:
        """What is at the path of a save; None if nothing is, or it cannot be read now."""
        if self.config.durable_every is None:
            return None
        with suppress(CheckpointError, OSError):
            return read_summary(self._path(record))
        return None

    def _path(self, record: Record) -> Where:
        return as_path(record.path, self.config.storage_options)

    def _run(self, record: Record, passed_over: list[str]) -> str | None:
        """What stands for the runs in the folder of a save now; None if that cannot be told."""
        if self.config.durable_every is None or not record.run:
            return None
        root = self._path(record).parent
        if str(root) not in self._runs:
            try:
                self._runs[str(root)] = run_of(root) or ""
                if _is_not_mounted(root):
                    raise FileNotFoundError(f"nothing is at {root.parent}: is the storage mounted?")
            except (OSError, CheckpointError) as error:
                passed_over.append(f"{root} cannot be read ({error}): what is local is taken to be of this run")
                self._runs[str(root)] = None
        return self._runs[str(root)]

    def files(
        self, survivor: Survivor, path: Where, below: Callable[[], Readable], passed_over: Sequence[str]
    ) -> NearestFiles:
        """Return the files of a save, for this rank.

        Args:
            below: Opens the files at ``path``.
            passed_over: The first problems of the files.
        """
        record = survivor.record
        places: list[Place] = []
        others: list[OtherNode] = []
        for node, one in survivor.holders.items():
            if node == self._node:
                places.append(OwnFolder(self._steps[record.token].folder, one.files))
            elif one.address is not None:
                others.append(OtherNode(f"node {one.host}", one.files, one.address, one.key, record.token))
        turn = self.ranks.rank % len(others) if others else 0
        places += [*others[turn:], *others[:turn]]  # so that not all ranks ask the same node first
        if survivor.durable:
            places.append(DurablePlace(record.files.keys(), below))
        return NearestFiles(str(path), record.files, places, record.time, survivor.durable, passed_over)

    def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
            self._server = None


def node_of(local_dir: Path) -> str:
    """Stands for this node: a host, by its running system and name, and a directory on it."""
    boot = "?"
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{_namespace()}/{socket.gethostname()}/{local_dir}"


def _namespace() -> str:
    """Tells containers of one host apart, which may have the same names and paths."""
    with suppress(OSError):
        shm = Path("/dev/shm").stat()
        return f"{shm.st_dev}"
    return "?"


def _is_not_mounted(root: Where) -> bool:
    """Whether a folder of checkpoints, if it is not there, was probably not emptied: nothing is around it either."""
    if not isinstance(root, Path) or root.is_dir():
        return False
    return not root.parent.is_dir() or not any(root.parent.iterdir())


def newest_at(survey: Survey, path: Where) -> Survivor | None:
    """The newest save to one path."""
    names = _names_of(path)
    return next((one for one in survey.survivors if one.record.path in names), None)


def parts_of(local_dir: Path, path: Where) -> list[LocalStep]:
    """Return the parts that this node has of the saves to one path, oldest first."""
    parts, _ = steps_below(local_dir, resolved(path.parent))
    names = _names_of(path)
    return [part for part in parts if part.record.path in names]


def _names_of(path: Where) -> set[str]:
    return {str(path_of(path)), str(resolved(path))}
