"""The directory in memory that a rank and its keeper share, and what is in it.

``/dev/shm/dcp_plugin-<uid>/<key>/``, for this user alone:

==========================  ===========================================================================================
``root``                    the folder of checkpoints
``format``                  the version of all this: :data:`FORMAT_VERSION`
``keeper.lock``             locked by the keeper that is alive; its pid is in it
``keeper.sock``             where it answers ranks of this node
``keeper.address``          where it answered other nodes, so that its successor does, too
``keeper.log``              what it says
``<client>.client``         locked by a rank as long as it may put something here; holds the name of its training.
                            A rank that ends as it should deletes it
``slab-<client>-…``         the host copy of one rank, mapped by that rank and by the keeper
``<token>.<rank>.job``      what a rank hands over: a :class:`RankJob`
``<token>.<rank>.files/``   files that a framework puts beside the tensors
``<token>.go``              on the node of rank 0: all ranks have handed over; a :class:`Go`
``<token>.<rank>.part``     this node has written what the rank handed over
``<token>.free``            all nodes have: host copies may have other bytes by now
``<token>.tries``           how many keepers have begun with it
``<token>.reserved``        the token of its reservation at the path
``<token>.revoked``         the ranks write it themselves: no keeper publishes it any more
``<token>.end``             how a save has ended
==========================  ===========================================================================================

All names appear whole (written aside and renamed). Pickles in it are of this user's own processes. A journal of another
format is neither read nor deleted: its saves are those of a training that another version of this package can resume.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import NoSharedMemory, SaveFailed
from dcp_plugin.format.columns import Column, KeyColumns
from dcp_plugin.format.values import WholeItem
from dcp_plugin.keeper.local_checkpoints import key_of
from dcp_plugin.keeper.wire import Address
from dcp_plugin.paths import ObjectPath, StoreOptions, Where
from dcp_plugin.planning.global_plan import Share
from dcp_plugin.planning.local_inventory import LocalInventory
from dcp_plugin.planning.save import RankPlan
from dcp_plugin.records import NewItem, Spent, WrittenPart
from dcp_plugin.storage.stock_save import items_of
from dcp_plugin.storage.writer import Facts
from dcp_plugin.types import VERSION, EncodedValue, Flat, Shape, ShardedValue

try:
    import fcntl
except ImportError:  # not on Linux: whoever wants a keeper is told
    fcntl = None  # type: ignore[assignment]

FORMAT_VERSION = 3
"""The version of a journal, and of the messages of ranks and keepers. A change to a message, or to a class in
a pickle (:class:`RankJob`, :class:`Go`, :class:`Part`, :class:`End` and all that they hold), raises it."""
_WITHOUT_NUMBER = 1
"""The version of a journal that has no number."""
_FORMAT = "format"
_MEMORY = Path("/dev/shm")
_MOST_SOCKET_NAME = 100
"""Bytes of the path of a Unix socket."""
SLAB = "slab-"
_SOCKET = "keeper.sock"
_CLIENT = ".client"
_PAUSE = 0.02
"""Seconds between two attempts to lock."""
_LOCK_SECONDS = 10.0
"""Seconds in which the holder of the lock of the folders has to give it up: it has a few files to make."""


def base_directory() -> Path:
    """Where the spools of this user are, made if there is none.

    Raises:
        NoSharedMemory: It cannot be made, or others can write to it.
    """
    if fcntl is None or not hasattr(os, "posix_fallocate") or not hasattr(socket, "SO_PEERCRED"):
        raise NoSharedMemory(
            f"a keeper needs Linux: this platform ({sys.platform}) lacks POSIX file locks, posix_fallocate "
            f"or SO_PEERCRED"
        )
    parent = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    path = parent / f"dcp_plugin-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise NoSharedMemory(f"{path} cannot be made: {error}") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or path.is_symlink():
        raise NoSharedMemory(f"{path} is not this user's alone: remove it, or make it so (chmod 700)")
    return path


@dataclass(frozen=True)
class Slab:
    """A piece of shared memory, by the name of its file."""

    name: str
    memory: torch.Tensor
    """Its bytes."""


@dataclass
class Spool:
    """One spool. Both sides make such an object of the same folder."""

    folder: Path
    slabs: list[Slab] = field(default_factory=list)
    client: str = ""
    """Stands for this side of it, if it is a rank's; see :meth:`enter`."""
    _held: int | None = None

    @classmethod
    def of(cls, root: Where, local_dir: str | None) -> Spool:
        """The spool of a folder of checkpoints (:func:`~dcp_plugin.paths.resolved`) on this node, made if need be."""
        folder = base_directory() / key_of(f"{root}|{local_dir or ''}|{VERSION}|{torch.__version__}")
        if len(str(folder / _SOCKET).encode()) > _MOST_SOCKET_NAME:
            raise NoSharedMemory(f"the name of {folder} is too long for a socket in it: set TMPDIR to a shorter one")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise NoSharedMemory(f"{folder} cannot be made: {error}") from error
        return cls(folder)

    def enter(self) -> None:
        """Have no keeper remove the folder, or a host copy of this rank, until :meth:`leave` or the end of the process.

        A POSIX lock: processes that are forked from this one do not inherit it, and may live on.

        Raises:
            NoSharedMemory: The folder cannot be used, or another version of this package made it.
        """
        self.client = uuid.uuid4().hex[:12]
        try:
            with _lock(self.folder.parent):
                self.folder.mkdir(mode=0o700, exist_ok=True)
                if self.get(_FORMAT) is None and self.get("root") is None:  # it is new
                    self.put(_FORMAT, str(FORMAT_VERSION).encode())
                self.refuse_other_format()
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._held = os.open(self.folder / f"{self.client}{_CLIENT}", flags, 0o600)
                _own_clients.add(self.client)
                fcntl.lockf(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise NoSharedMemory(f"{self.folder} cannot be used: {error}") from error

    def claim(self, training: str) -> None:
        """Take this run on this node for a training.

        Raises:
            SaveFailed: Another training has it.
            NoSharedMemory: The lock of the folder is not free.
        """
        assert self._held is not None, "the rank has entered"
        with _lock(self.folder.parent):
            for name in self.names(_CLIENT):
                client = name.removesuffix(_CLIENT)
                # To open a file of this process would give up its lock.
                pid = None if client in _own_clients else locked_by(self.folder / name)
                if pid is not None and (self.get(name) or b"").decode() not in ("", training):
                    raise SaveFailed(
                        f"another training on {socket.gethostname()} (pid {pid}) saves to the same folder of "
                        f"checkpoints with the same local_dir: give one of them another"
                    )
            os.pwrite(self._held, training.encode(), 0)

    def refuse_other_format(self) -> None:
        """Raise NoSharedMemory, which names both versions, if another version of this package made the folder."""
        found = (self.get(_FORMAT) or str(_WITHOUT_NUMBER).encode()).decode("ascii", "replace")
        if found != str(FORMAT_VERSION):
            raise NoSharedMemory(
                f"{self.folder} is the journal of another version of dcp_plugin (format {found}; this one has format "
                f"{FORMAT_VERSION}): the saves in it are neither published nor deleted. Resume once with that version, "
                f"or delete the folder"
            )

    def leave(self) -> None:
        """Give up the lock: this rank needs no keeper any more."""
        if self._held is not None:
            self.drop(f"{self.client}{_CLIENT}")
            os.close(self._held)
            self._held = None

    def is_used_by(self, client: str) -> bool:
        """Return whether the rank of a host copy or of a job is alive, and has not left."""
        return locked_by(self.folder / f"{client}{_CLIENT}") is not None

    def clients(self) -> tuple[list[str], bool]:
        """Return the ranks that are alive, and whether one has died since the last call. In the keeper."""
        alive, has_death = [], False
        for name in self.names(_CLIENT):
            if locked_by(self.folder / name) is not None:
                alive.append(name.removesuffix(_CLIENT))
            elif self.get(name):  # an empty file is of a rank that is about to lock it
                self.drop(name)
                has_death = True
        return alive, has_death

    def drop_host_copies(self, needed: Collection[str]) -> None:
        """In the keeper: delete the host copies of ranks that are gone, but of the clients in ``needed``."""
        for name in self.names(""):
            client = name.split("-")[1] if name.startswith(SLAB) else None
            if client is not None and client not in needed and not self.is_used_by(client):
                self.drop(name)

    def take_away(self) -> Path | None:
        """In the keeper: where the folder is from now on, to be deleted; None if a rank uses it, or is about to."""
        gone = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.gone")
        with _lock(self.folder.parent):
            if any(self.is_used_by(name.removesuffix(_CLIENT)) for name in self.names(_CLIENT)):
                return None
            with suppress(FileNotFoundError):
                os.rename(self.folder, gone)
        return gone

    @classmethod
    def below(cls, root: Where) -> list[Spool]:
        """The spools of folders of checkpoints at or below ``root``."""
        start, found = str(root).rstrip("/"), []
        try:
            folders = sorted(one for one in base_directory().iterdir() if one.name[0] != ".")
        except (NoSharedMemory, OSError):
            return []
        for folder in folders:
            said = (cls(folder).get("root") or b"").decode("utf-8", "replace")
            if said == start or said.startswith(f"{start}/"):
                found.append(cls(folder))
        return found

    @property
    def socket(self) -> str:
        return str(self.folder / _SOCKET)

    def put(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all. Raises OSError."""
        half = self.folder / f".{uuid.uuid4().hex}"
        try:
            with open(half, "xb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(data)
            os.rename(half, self.folder / name)
        except BaseException:
            with suppress(OSError):
                half.unlink()
            raise

    def get(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            return (self.folder / name).read_bytes()
        return None

    def drop(self, *names: str) -> None:
        for name in names:
            path = self.folder / name
            with suppress(FileNotFoundError):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()

    def names(self, suffix: str) -> list[str]:
        """What is there with this end of the name, sorted: oldest save first."""
        with suppress(FileNotFoundError):
            return sorted(name for name in os.listdir(self.folder) if name.endswith(suffix) and name[0] != ".")
        return []

    def lock(self) -> int | None:
        """Become the keeper: the descriptor to hold as long as it lives. None: there is one."""
        descriptor = os.open(self.folder / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        if not self.has_lock(descriptor):  # the one before has just removed it, with the folder
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return descriptor

    def has_lock(self, descriptor: int) -> bool:
        """Whether what :meth:`lock` has given is what others find: not if the folder was deleted by somebody."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self.folder / "keeper.lock"))
        return False

    def is_kept(self) -> bool:
        """Return True if a keeper is alive."""
        return self.pid() is not None

    def pid(self) -> int | None:
        """Of the keeper that is alive."""
        return locked_by(self.folder / "keeper.lock")

    # Host copies

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        """Shared memory for a host copy, all of it really there: tmpfs has no more to give later than now.

        Raises:
            NoSharedMemory: There is not that much.
        """
        name = f"{SLAB}{self.client}-{rank}-{uuid.uuid4().hex[:8]}"
        path = self.folder / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
                memory = _mapped(descriptor, nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            raise NoSharedMemory(
                f"rank {rank} cannot have {nbytes:,} bytes of shared memory in {self.folder} ({error.strerror}): give "
                f"/dev/shm more (in a container: --shm-size, or an emptyDir with medium: Memory), or writer='thread'"
            ) from error
        self.slabs.append(Slab(name, memory))
        return memory

    def release(self, kept: Sequence[torch.Tensor]) -> None:
        """Give back all slabs of this rank but those of these tensors."""
        addresses = {tensor.data_ptr() for tensor in kept}
        gone = [slab for slab in self.slabs if slab.memory.data_ptr() not in addresses]
        self.slabs = [slab for slab in self.slabs if slab.memory.data_ptr() in addresses]
        self.drop(*(slab.name for slab in gone))

    def is_there(self, memory: torch.Tensor) -> bool:
        """Whether a keeper would find a host copy: not if somebody has deleted it, as systemd's ``RemoveIPC`` does."""
        place = self.place_of(memory)
        return place is not None and (self.folder / self.slabs[place[0]].name).exists()

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The number of the slab that a tensor is in, and from which byte on."""
        address = tensor.data_ptr()
        for number, slab in enumerate(self.slabs):
            start = address - slab.memory.data_ptr()
            if start >= 0 and start + tensor.nbytes <= slab.memory.nbytes:
                return number, start
        return None

    def map(self, name: str) -> torch.Tensor:
        """A slab of any rank of the node, in the keeper. Raises OSError if it is gone."""
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _mapped(descriptor, os.fstat(descriptor).st_size, populate=False)
        finally:
            os.close(descriptor)


_own_clients: set[str] = set()
"""The clients of this process."""
_locking = threading.Lock()
"""POSIX locks do not exclude the threads of one process."""


@contextmanager
def _lock(base: Path) -> Iterator[None]:
    """Serialise creation and removal of journals.

    Raises:
        NoSharedMemory: The lock is not free within :data:`_LOCK_SECONDS`; names the process that holds it.
        OSError: The file system failed.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    if not _locking.acquire(timeout=_LOCK_SECONDS):
        raise NoSharedMemory(f"another thread of this process holds the lock of {base}")
    descriptor = -1
    try:
        (base / ".door").mkdir(mode=0o700, exist_ok=True)
        path = base / ".door" / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                holder = described(_holder(descriptor))
                raise NoSharedMemory(f"{path} is held by {holder} for {_LOCK_SECONDS:.0f} s")
            time.sleep(_PAUSE)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        _locking.release()


def _locked(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except PermissionError:  # POSIX lets a system answer this way, too
        return False
    return True


def described(pid: int | None) -> str:
    """Return a process and its state, in words."""
    if not pid:
        return "a process that cannot be seen from here"
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return f"process {pid}, which has ended"
    state = next((line.partition(":")[2].strip() for line in status.splitlines() if line.startswith("State:")), "?")
    return f"process {pid}, whose state is {state}"


_FLOCK = struct.Struct("hhqqi4x")
"""The kernel's ``struct flock``: type, whence, start, length, pid."""


def locked_by(path: Path) -> int | None:
    """Return the process that has locked a file; None if none has, or if it is this process.

    The file is not locked to find out: that would keep the lock from a process that wants it at this moment, and a
    process forked meanwhile would hold it.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _holder(descriptor)
        finally:
            os.close(descriptor)
    return None


def _holder(descriptor: int) -> int | None:
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(pid)


def _mapped(descriptor: int, nbytes: int, populate: bool = True) -> torch.Tensor:
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    return torch.frombuffer(mmap.mmap(descriptor, nbytes, flags), dtype=torch.uint8)


@dataclass(frozen=True)
class _EncodedItem(WholeItem):
    """A tensor that ``torch.save`` has written, since its class need not be known to the keeper."""

    data: bytes = b""

    @classmethod
    def of_item(cls, item: WholeItem) -> _EncodedItem:
        data = item.encode()
        return cls(torch.empty(0), len(data), data)

    def encode(self) -> bytes:
        return self.data


@dataclass(frozen=True)
class Items:
    """What a rank writes, without the bytes that are in shared memory: a few columns for any number of items."""

    share: Share
    inventory: LocalInventory
    """What the items are follows from these two, as in :func:`dcp_plugin.storage.stock_save.items_of`."""
    slabs: list[str]
    slab: Column
    """By item, the number of the slab where its bytes are, one after the other; -1 if they are in ``others``."""
    offset: Column
    """By item, where in the slab they begin."""
    others: dict[int, Any]
    """By number of the item: the bytes of a value, a tensor that is elsewhere, or one that ``torch.save`` has
    written."""

    @classmethod
    def of(cls, plan: RankPlan, state: Flat, spool: Spool) -> Items:
        names, items = [slab.name for slab in spool.slabs], plan.items(state)
        slab, offset = np.full(len(items), -1, np.int32), np.zeros(len(items), np.int64)
        others: dict[int, Any] = {}
        for number, (key, held, _, sizes) in enumerate(items):
            data: Any = held
            place = None
            if isinstance(data, WholeItem):
                data = _EncodedItem.of_item(data)
            elif isinstance(data, torch.Tensor):
                if type(data) is not torch.Tensor:  # its class need not be known to the keeper
                    data = data.as_subclass(torch.Tensor)
                if data.numel() and data.is_contiguous() and _is_box(data, state[key], sizes):
                    place = spool.place_of(data)
            if place is None:
                others[number] = data
            else:
                slab[number], offset[number] = place
        return cls(plan.share, plan.inventory, names, slab, offset, others)

    def decoded(self, spool: Spool) -> Iterator[NewItem]:
        """The items, in the keeper. Raises OSError if a host copy is gone."""
        slabs = {number: spool.map(self.slabs[number]) for number in set(self.slab.tolist()) - {-1}}
        places = zip(self.slab.tolist(), self.offset.tolist(), strict=True)
        for number, (item, (slab, offset)) in enumerate(zip(items_of(self.share, self.inventory), places, strict=True)):
            data: Any = self.others.get(number)
            if slab >= 0:
                assert item.tensor_data is not None, "values are not in slabs"
                dtype, shape = item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes
                data = slabs[slab][offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            box = (tuple(said.chunk.offsets), tuple(said.chunk.sizes)) if (said := item.tensor_data) else ()
            yield NewItem(item.index.fqn, data, *box)


def _is_box(tensor: torch.Tensor, value: ShardedValue | EncodedValue, sizes: Shape) -> bool:
    """Whether a tensor is what the plan says of it."""
    return isinstance(value, ShardedValue) and value.dtype == tensor.dtype and sizes == tuple(tensor.shape)


@dataclass(frozen=True)
class Head:
    """What rank 0 adds: all that is needed to make the checkpoint of what the ranks write."""

    table: KeyColumns
    """The items of all ranks."""
    order: Column
    """The items of all ranks, in the order of ranks, in the order of the table."""
    left_out: dict[str, str]
    empty: list[str]
    facts: Facts
    save_id: str
    among_other_files: bool
    """Whether the path may be a directory with other things in it, which stay."""
    run: str
    """Stands for the run, among figures."""
    durable: bool
    """Whether it goes on to its path whatever ``durable_every`` says."""


@dataclass(frozen=True)
class RankJob:
    """Part of a save that one rank hands over."""

    token: str
    rank: int
    path: Where
    step: int | None
    config: CheckpointConfig
    items: Items
    frozen: frozenset[str]
    """Keys of tensors that the training does not mean to change."""
    loaded: str | None
    """A checkpoint that was loaded since the last save: what the next one may link from."""
    options: dict[str, Any] | None
    """How the store of the path is reached: a pickle of the others has nothing of it."""
    client: str = ""
    """Of the spool: who has staged it."""
    began: float = 0.0
    """When the call began: seconds of this node's monotonic clock."""
    spent: Spent = field(default_factory=Spent)
    """Until it was handed over."""
    beside_rank_zero: bool = True
    """Whether rank 0 is on this node, and with it who leads the save."""
    head: Head | None = None

    @property
    def where(self) -> Where:
        """The path, with how it is reached."""
        return reached(self.path, self.options)

    def encode(self) -> bytes:
        buffer = io.BytesIO()
        pickle.dump(self, buffer, protocol=5)
        return buffer.getvalue()


def reached(path: Where, options: dict[str, Any] | None) -> Where:
    return ObjectPath(str(path), StoreOptions(options or {})) if isinstance(path, ObjectPath) else path


@dataclass(frozen=True)
class Peer:
    """Address of the keeper of a rank."""

    rank: int
    node: str
    host: str
    address: Address
    local_dir: str = ""


@dataclass(frozen=True)
class Go:
    """All ranks have handed a save over."""

    token: str
    peers: list[Peer]
    key: bytes
    """Of the job: what its keepers prove to each other that they know."""

    def encode(self) -> bytes:
        return pickle.dumps(self)

    def nodes(self) -> list[list[Peer]]:
        """The ranks of each node, in the order of the first of them."""
        by_node: dict[str, list[Peer]] = {}
        for peer in self.peers:
            by_node.setdefault(peer.node, []).append(peer)
        return list(by_node.values())


@dataclass(frozen=True)
class Part:
    """Files that one rank has written for a save."""

    written: WrittenPart
    files: dict[str, int]
    """Data file -> its size in bytes."""
    attached: dict[str, str]
    """Comparisons of extra files, see :func:`dcp_plugin.storage.published.comparisons_below`."""
    attached_sizes: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class End:
    """End of a save."""

    published: bool
    """True if the checkpoint is at its path."""
    local: bool
    """True if the save is complete in ``local_dir``."""
    error: Exception | None = None
    seconds: float = 0.0
    """Seconds since the save was handed over."""
    path: str = ""
    bytes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By rank: bytes written, and bytes linked instead."""
    time: float = 0.0
    """The recorded time of the checkpoint at its path, in seconds since the epoch; 0 if it is not there."""
    copies: int = 0
    degraded: str = ""
    """Both as in :class:`~dcp_plugin.events.SaveFinished`."""

    @property
    def has_failed(self) -> bool:
        """True if neither the path nor ``local_dir`` has the save."""
        return self.error is not None and not self.published and not self.local
