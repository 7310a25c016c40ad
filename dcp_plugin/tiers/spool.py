"""Shared directory: files in memory that a rank and its keeper share.

``/dev/shm/dcp_plugin-<uid>/<key>/``, for this user alone:

==========================  ===========================================================================================
``root``                    the folder of checkpoints
``format``                  the version of these files: :data:`FORMAT_VERSION`
``keeper.lock``             locked by the keeper that is alive; contains its pid
``keeper.sock``             the socket for ranks of this node
``keeper.log``              its log
``<client>.client``         locked by a rank while it may hand saves over; contains the name of its training.
                            A rank that ends normally deletes it
``slab-<client>-…``         the host copy of one rank, mapped by that rank and by the keeper
``<token>.…``               records of a save, and ``keeper.address``: the journal (:mod:`~dcp_plugin.tiers.journal`)
==========================  ===========================================================================================

A rename makes each file appear complete. A directory of another format is not read and not deleted, because the version
of this package that made it can resume the training and publish its saves.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dcp_plugin.core.errors import NoSharedMemory, SaveFailed
from dcp_plugin.core.media.disk import posix
from dcp_plugin.core.paths import Where, folder_of_proof
from dcp_plugin.core.types import VERSION
from dcp_plugin.tiers.local_checkpoints import key_of, put_file
from dcp_plugin.tiers.locks import KEEPER, exclusive, lock, locked_by

FORMAT_VERSION = 11
"""The version of a journal, and of the messages of ranks and keepers. A change to a message, or to a class that travels
(:mod:`~dcp_plugin.tiers.journal_records`), raises it."""
_FORMAT = "format"
_MEMORY = Path("/dev/shm")
_MOST_SOCKET_NAME = 100
"""Bytes of the path of a Unix socket."""
SLAB = "slab-"
_SOCKET = "keeper.sock"
_CLIENT = ".client"
_own_clients: set[str] = set()
"""The clients of this process."""


def base_directory() -> Path:
    """Return the directory of this user's shared directories; make it if it does not exist.

    Raises:
        NoSharedMemory: The directory cannot be made, or other users can write to it.
    """
    parent = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    private = "" if (proof := folder_of_proof()) is None else f"-{proof.name}"
    path = parent / f"dcp_plugin-{os.geteuid()}{private}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        with posix.Folder(path) as folder:
            mode = posix.refuse_other_user(folder.descriptor, path).st_mode
    except OSError as error:
        raise NoSharedMemory(f"{path} cannot be used: {error}") from error
    if mode & 0o077:
        raise NoSharedMemory(f"{path} is not this user's alone: remove it, or make it so (chmod 700)")
    return path


@dataclass(frozen=True)
class Slab:
    """Shared memory of one file."""

    name: str
    memory: torch.Tensor
    """The bytes of the slab."""


@dataclass
class Spool:
    """Shared directory. A rank and the keeper each make an object for the same folder."""

    folder: Path
    slabs: list[Slab] = field(default_factory=list)
    client: str = ""
    """Identifier of this rank in the names of its files, made by :meth:`enter`; empty in the keeper."""
    _held: int | None = None
    """The descriptor of the file that this rank has locked."""

    @classmethod
    def of(cls, root: Where, local_dir: str | None) -> Spool:
        """Return the shared directory on this node for a folder of checkpoints.

        Args:
            root: The folder, from :func:`~dcp_plugin.core.paths.resolved`.

        Raises:
            NoSharedMemory: This node has no place for the directory.
        """
        folder = base_directory() / key_of(f"{root}|{local_dir or ''}|{VERSION}|{torch.__version__}")
        if len(str(folder / _SOCKET).encode()) > _MOST_SOCKET_NAME:
            raise NoSharedMemory(f"the name of {folder} is too long for a socket in it: set TMPDIR to a shorter one")
        return cls(folder)

    def enter(self, root: Where) -> None:
        """Lock the folder and the host copy of this rank, so that no keeper removes them. Make the folder if it does
        not exist. The lock ends with :meth:`leave`, or with the process.

        It is a POSIX lock, which forked processes do not inherit: one may outlive this process.

        Raises:
            NoSharedMemory: The folder cannot be used, or another version of this package made it.
        """
        self.client = uuid.uuid4().hex[:12]
        try:
            with exclusive(self.folder.parent):
                self.folder.mkdir(mode=0o700, exist_ok=True)
                if self.get(_FORMAT) is None and self.get("root") is None:  # the folder is new
                    self.put(_FORMAT, str(FORMAT_VERSION).encode())
                self.refuse_other_format()
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._held = os.open(self.folder / f"{self.client}{_CLIENT}", flags, 0o600)
                self.put("root", str(root).encode())
                _own_clients.add(self.client)
                lock(self._held)
        except OSError as error:
            raise NoSharedMemory(f"{self.folder} cannot be used: {error}") from error

    def claim(self, training: str) -> None:
        """Claim this run on this node for a training.

        Raises:
            SaveFailed: Another training has claimed it.
            NoSharedMemory: Another process holds the lock of the folders for too long.
        """
        assert self._held is not None, "the rank has entered"
        with exclusive(self.folder.parent):
            for name in self.names(_CLIENT):
                client = name.removesuffix(_CLIENT)
                # A file of this process is not opened: closing any descriptor of it gives up its POSIX lock.
                pid = None if client in _own_clients else locked_by(self.folder / name)
                if pid is not None and (self.get(name) or b"").decode() not in ("", training):
                    raise SaveFailed(
                        f"another training on {socket.gethostname()} (pid {pid}) saves to the same folder of "
                        f"checkpoints with the same keeper.dir. Give one of them another folder or keeper.dir"
                    )
            os.pwrite(self._held, training.encode(), 0)

    def refuse_other_format(self) -> None:
        """Raise NoSharedMemory if another version of this package made the folder. The message names both versions."""
        version = (self.get(_FORMAT) or b"unknown").decode("ascii", "replace")
        if version != str(FORMAT_VERSION):
            raise NoSharedMemory(
                f"{self.folder} is the journal of another version of dcp_plugin (format {version}; this one has format "
                f"{FORMAT_VERSION}): the saves in it are neither published nor deleted. Resume once with that version, "
                f"or delete the folder"
            )

    def leave(self) -> None:
        """Give up the lock, because this rank needs no keeper any more."""
        if self._held is not None:
            self.drop(f"{self.client}{_CLIENT}")
            os.close(self._held)
            self._held = None

    def is_used_by(self, client: str) -> bool:
        """Return whether the rank of a host copy or of a job is alive, and has not left."""
        return locked_by(self.folder / f"{client}{_CLIENT}") is not None

    def clients(self) -> tuple[list[str], bool]:
        """Return the ranks that are alive, and whether a rank has died since the last call. Called in the keeper."""
        alive, has_death = [], False
        for name in self.names(_CLIENT):
            if locked_by(self.folder / name) is not None:
                alive.append(name.removesuffix(_CLIENT))
            elif self.get(name):  # an empty file has no lock yet: its rank is about to enter
                self.drop(name)
                has_death = True
        return alive, has_death

    def drop_host_copies(self, needed: Collection[str]) -> None:
        """Delete the host copies of dead ranks, except those of the clients in ``needed``. Called in the keeper."""
        for name in self.names(""):
            client = name.split("-")[1] if name.startswith(SLAB) else None
            if client is not None and client not in needed and not self.is_used_by(client):
                self.drop(name)

    def require_folder(self) -> None:
        """Raise NoSharedMemory if the folder is gone or replaced, since no keeper would find this rank."""
        if self._held is not None and not (self.folder / f"{self.client}{_CLIENT}").exists():
            raise NoSharedMemory(
                f"{self.folder} is gone: something has removed it, or files in it, during the training. A new training "
                f"makes it again"
            )

    def take_away(self) -> bool:
        """Rename the folder in order to delete it. Return False if a rank uses it. Called in the keeper."""
        with exclusive(self.folder.parent):
            if any(self.is_used_by(name.removesuffix(_CLIENT)) for name in self.names(_CLIENT)):
                return False
            gone = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.gone")
            with suppress(FileNotFoundError), posix.OwnFolder(self.folder.parent) as base:
                base.rename(self.folder.name, gone.name)
            self.folder = gone
        return True

    @classmethod
    def below(cls, root: Where) -> list[Spool]:
        """Return the shared directories of folders of checkpoints at or below ``root``."""
        start, spools = str(root).rstrip("/"), []
        try:
            folders = sorted(folder for folder in base_directory().iterdir() if folder.name[0] != ".")
        except (NoSharedMemory, OSError):
            return []
        for spool in map(cls, folders):
            spool_root = (spool.get("root") or b"").decode("utf-8", "replace")
            if spool_root == start or spool_root.startswith(f"{start}/"):
                spools.append(spool)
        return spools

    @property
    def socket(self) -> str:
        return str(self.folder / _SOCKET)

    def put(self, name: str, data: bytes) -> None:
        """Write a file. Readers see the complete file or none. Raises OSError."""
        put_file(self.folder, name, data)

    def get(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            return (self.folder / name).read_bytes()
        return None

    def drop(self, *names: str) -> None:
        with suppress(FileNotFoundError), posix.OwnFolder(self.folder) as folder:
            for name in names:
                folder.delete(name)

    def names(self, suffix: str) -> list[str]:
        """Return the names of files with this ending, sorted: oldest save first."""
        with suppress(FileNotFoundError):
            return sorted(name for name in os.listdir(self.folder) if name.endswith(suffix) and name[0] != ".")
        return []

    def is_kept(self) -> bool:
        """Return True if a keeper is alive."""
        return self.pid() is not None

    def pid(self) -> int | None:
        """Return the process ID of the keeper that is alive."""
        return locked_by(self.folder / KEEPER)

    # Host copies

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        """Return shared memory for a host copy. The kernel reserves it now, since tmpfs may be full later.

        Raises:
            NoSharedMemory: Too little memory is free.
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
            self.require_folder()
            raise NoSharedMemory(
                f"rank {rank} cannot have {nbytes:,} bytes of shared memory in {self.folder} ({error.strerror}): give "
                f"/dev/shm more (in a container: --shm-size, or an emptyDir with medium: Memory), or keeper=None"
            ) from error
        self.slabs.append(Slab(name, memory))
        return memory

    def release(self, kept: Sequence[torch.Tensor]) -> None:
        """Give back the slabs of this rank, except the slabs of these tensors."""
        addresses = {tensor.data_ptr() for tensor in kept}
        gone = [slab for slab in self.slabs if slab.memory.data_ptr() not in addresses]
        self.slabs = [slab for slab in self.slabs if slab.memory.data_ptr() in addresses]
        self.drop(*(slab.name for slab in gone))

    def is_there(self, memory: torch.Tensor) -> bool:
        """Return whether the file of a host copy still exists. For example, systemd's ``RemoveIPC`` deletes it."""
        place = self.place_of(memory)
        return place is not None and (self.folder / self.slabs[place[0]].name).exists()

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the number of the slab that has a tensor, and the offset of the tensor in it."""
        address = tensor.data_ptr()
        for number, slab in enumerate(self.slabs):
            start = address - slab.memory.data_ptr()
            if start >= 0 and start + tensor.nbytes <= slab.memory.nbytes:
                return number, start
        return None

    def map(self, name: str) -> torch.Tensor:
        """Map a slab of any rank of the node. Called in the keeper. Raises OSError if the slab is gone."""
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _mapped(descriptor, os.fstat(descriptor).st_size, populate=False)
        finally:
            os.close(descriptor)


def _mapped(descriptor: int, nbytes: int, populate: bool = True) -> torch.Tensor:
    # Populated at once in the rank, so that its first copy does not wait for page faults.
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    return torch.frombuffer(mmap.mmap(descriptor, nbytes, flags), dtype=torch.uint8)
