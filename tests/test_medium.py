"""What a save and a load need of a medium, shown by one that has no files: objects in memory, as in an object store."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.api import CheckpointException

import dcp_plugin as dcp
from dcp_plugin.format import uncommitted_reason
from dcp_plugin.media import Listed, Medium, RangedFile, Reservation
from dcp_plugin.storage import open as opening
from dcp_plugin.storage import writer
from tests.compare import assert_same

Objects = dict[str, bytes]


class _Upload:
    """A multipart upload: nothing is there before it is complete."""

    def __init__(self, objects: Objects, name: str, wrote: Callable[[int], None]) -> None:
        self._objects, self._name, self._wrote, self._data = objects, name, wrote, bytearray()

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._objects[self._name] = bytes(self._data)

    def tell(self) -> int:
        return len(self._data)

    def takes_in_place(self, address: int) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._data += data
        self._wrote(len(data))


class _Object(RangedFile):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))  # type: ignore[arg-type]

    def read_into(self, memory: Sequence[memoryview], offset: int) -> int:
        self.seek(offset)
        return sum(self.readinto(piece) for piece in memory)


@dataclass(frozen=True)
class _Prefix:
    where: str
    objects: Objects

    def names(self) -> list[str]:
        return sorted({name[: name.find("/") + 1] or name for name in self.objects})

    def _data(self, name: str) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(2, "No such object", name)
        return self.objects[name]

    def size(self, name: str) -> int:
        return len(self._data(name))

    def modified(self, name: str) -> float:
        return 0.0

    def open(self, name: str) -> _Object:
        return _Object(self._data(name))

    def leads_elsewhere(self, name: str) -> bool:
        return False

    def keep(self, names: Iterable[str]) -> None:
        pass

    def moved(self) -> bool:
        return False

    def close(self) -> None:
        pass


@dataclass
class _Store:
    """Two dictionaries: what is published, and what is being saved."""

    published: dict[Path, Objects] = field(default_factory=dict)
    saving: dict[Path, Objects] = field(default_factory=dict)

    def reserve(self, path: Path, among_other_files: bool = False) -> Reservation:
        directory = path.with_name(f"{path.name}.upload-{len(self.saving)}")
        self.saving[directory] = {}
        return Reservation(path, directory.name, directory)

    def join(self, directory: Path, path: Path) -> None:
        assert directory in self.saving

    def create(self, directory: Path, name: str, size: int, wrote: Callable[[int], None]) -> _Upload:
        return _Upload(self.saving[directory], name, wrote)

    def flush(self, directory: Path) -> None:
        pass

    def publish(self, reservation: Reservation, files: Mapping[str, bytes]) -> None:
        self.published[reservation.final] = {**self.saving.pop(reservation.directory), **files}

    def discard(self, reservation: Reservation) -> None:
        self.saving.pop(reservation.directory, None)

    def locate(self, path: Path) -> Path:
        return path

    def uncommitted_reason(self, path: Path) -> str:
        return uncommitted_reason(self.published.get(path, {}))

    def open(self, path: Path) -> _Prefix:
        return _Prefix(f"store:/{path}", {**self.published, **self.saving}.get(path, {}))

    def hold(self, path: Path) -> _Prefix:
        return self.open(path)

    def entries(self, root: Path) -> list[Listed]:
        return [Listed(path, True, False) for path in sorted(self.published) if path.parent == root]

    def link(self, path: Path, target: Path) -> None:
        self.published[path] = self.published[target]

    def remove(self, path: Path) -> None:
        self.published.pop(path, None)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> _Store:
    store = _Store()
    medium: Medium = store
    monkeypatch.setattr(writer, "LocalDisk", lambda *args: medium)
    monkeypatch.setattr(opening, "_DISK", medium)
    return store


def _state() -> dict[str, Any]:
    return {"w": torch.randn(300, 1000), "half": torch.ones(7, dtype=torch.bfloat16), "empty": torch.ones(0, 3)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_saved_to_and_loaded_from_objects(tmp_path: Path, store: _Store) -> None:
    state, path = _state(), tmp_path / "run" / "step-1"
    stock.save(state, storage_writer=dcp.ShardedWriter(path, step=1))
    stock.save(state, storage_writer=dcp.ShardedWriter(path.with_name("step-2"), step=2))
    assert list(store.published) == [path, path.with_name("step-2")]
    assert not store.saving
    assert list(store.published[path])[-1] == ".metadata", "the object that commits is the last one"
    assert not list(tmp_path.iterdir()), "no file of it is on a disk"

    reader = dcp.ShardedReader(path.with_name("step-2"))
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    stock.load(target, storage_reader=reader)
    assert_same(target, state)
    assert reader.summary is not None
    assert reader.summary.step == 2
    assert reader.summary.time > dcp.ShardedReader(path).summary.time  # type: ignore[union-attr]


def _message(failed: CheckpointException, kind: type[Exception]) -> str:
    ((error, _),) = failed.failures.values()
    assert isinstance(error, kind)
    return str(error)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_that_fails_publishes_no_object(tmp_path: Path, store: _Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: _Upload, data: bytes) -> None:
        raise OSError(5, "the store is gone")

    monkeypatch.setattr(_Upload, "write", fail)
    with pytest.raises(CheckpointException) as raised:
        stock.save(_state(), storage_writer=dcp.ShardedWriter(tmp_path / "step-1"))
    assert "the store is gone" in _message(raised.value, dcp.SaveFailed)
    assert not store.published
    assert not any(store.saving.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_object_is_named(tmp_path: Path, store: _Store) -> None:
    path = tmp_path / "step-1"
    stock.save(_state(), storage_writer=dcp.ShardedWriter(path))
    name = max(store.published[path], key=lambda name: len(store.published[path][name]))  # the one that has w
    data = bytearray(store.published[path][name])
    data[len(data) // 2] ^= 1
    store.published[path][name] = bytes(data)
    with pytest.raises(CheckpointException) as raised:
        stock.load({"w": torch.zeros(300, 1000)}, storage_reader=dcp.ShardedReader(path))
    message = _message(raised.value, dcp.CheckpointCorrupt)
    assert message.startswith(f"store:/{path}: the bytes of w in {name} are not those that were saved")
