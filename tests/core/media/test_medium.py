"""What every medium keeps, called as a save and a load call it: a disk, a bucket, and fsspec's memory."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from dcp_plugin.core.format import METADATA, read
from dcp_plugin.core.media import medium_of, uncommitted_reason
from dcp_plugin.core.media.medium import CannotLink, DataFile, Medium
from dcp_plugin.core.media.places import WORKSPACE, snapshot, unpacked
from dcp_plugin.core.paths import Where, as_path

_MEGABYTES = bytes(range(256)) * (80 << 10)


@pytest.fixture(params=["disk", "s3", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    if request.param == "disk":
        return tmp_path / "run"
    url = request.getfixturevalue("bucket").url if request.param == "s3" else f"memory://{uuid.uuid4().hex}"
    return as_path(url) / "run"


@pytest.fixture
def medium(root: Where) -> Medium:
    return medium_of(root)


def _write(medium: Medium, directory: Where, data: bytes, rank: int = 0) -> str:
    name = f"__{rank}_0-{directory.stem}.distcp"
    noted: list[int] = []
    with medium.create(directory, name, len(data), noted.append) as file:
        memory = bytearray(data[: len(data) // 2])
        file.write(memory)
        memory[:] = bytes(len(memory))  # it may change as soon as that has returned
        assert file.tell() == len(memory)
        file.write(memoryview(data)[len(memory) :], kept=True)
    assert sum(noted) == len(data)
    return name


def _save(medium: Medium, path: Where, data: bytes = b"data" * 16) -> str:
    """As a save does, with tables of contents that a medium need not understand. The name of the data file."""
    reservation = medium.reserve(path)
    medium.join(reservation.directory, path)
    name = _write(medium, reservation.directory, data)
    medium.flush(reservation.directory)
    medium.publish(reservation, _tables(medium, path))
    return name


def _tables(medium: Medium, path: Where) -> dict[str, bytes]:
    """Tables of contents of some save."""
    other = path.parent.parent / "tables"
    dcp.save({"n": 1}, other)
    files = unpacked(medium.open(other, pin=True))
    return {one: read(files, one) for one in ("dcp_plugin.index", "dcp_plugin.json", METADATA)}


_OF_OURS = [METADATA, "dcp_plugin.index", "dcp_plugin.json"]


def test_nothing_is_there_before_it_is_published_and_then_all_of_it(medium: Medium, root: Where) -> None:
    path = root / "step-1"
    reservation = medium.reserve(path)
    assert reservation.directory.stem == reservation.token
    name = _write(medium, reservation.directory, _MEGABYTES)
    assert medium.open(reservation.directory).size(name) == len(_MEGABYTES)
    assert uncommitted_reason(path)
    assert dcp.latest(root) is None
    medium.discard(reservation)
    medium.discard(reservation)
    assert not medium.kind(path)

    name = _save(medium, path, _MEGABYTES)
    assert uncommitted_reason(path) == ""
    assert medium.kind(path) == "folder"
    names = unpacked(medium.open(path, pin=True)).names()
    assert [one for one in names if not one.endswith(".distcp")] == _OF_OURS
    files = medium.open(path, pin=True)
    assert medium.kind(path / name) == "file"
    with files.open(name) as file:
        memory = bytearray(7), bytearray(10 << 20)
        done = file.read_into([memoryview(one) for one in memory], 3)
        while done < 7 + len(memory[1]):
            done += file.read_into([memoryview(memory[1])[done - 7 :]], 3 + done)
        assert bytes(memory[0] + memory[1]) == _MEGABYTES[3 : 10 + (10 << 20)]
        assert file.read_into([memoryview(bytearray(9))], len(_MEGABYTES)) == 0
        file.seek(-5, 2)
        assert file.read() == _MEGABYTES[-5:]


def test_who_holds_the_old_checkpoint_reads_it_while_the_new_one_takes_its_place(medium: Medium, root: Where) -> None:
    path = root / "last"
    old = _save(medium, path, b"old " * 16)
    held = medium.open(path, pin=True)
    assert not unpacked(held).moved()
    held.pin([old])
    new = _save(medium, path, b"new " * 16)
    assert held.moved()
    with held.open(old) as file:
        memory = bytearray(64)
        assert file.read_into([memoryview(memory)], 0) == 64
    assert memory == b"old " * 16
    held.close()
    assert read(medium.open(path), new) == b"new " * 16
    assert unpacked(medium.open(path, pin=True)).names() == sorted([*_OF_OURS, new])


def test_what_frameworks_add_is_published_with_it_and_goes_with_it(medium: Medium, root: Where, tmp_path: Path) -> None:
    def put(directory: Path) -> None:
        (directory / "hooks" / "deep").mkdir(parents=True)
        (directory / "hooks" / "deep" / "lora.bin").write_bytes(b"lora")
        (directory / "state.pkl").write_bytes(b"state")

    ours = dcp.Checkpointer()
    for _ in range(2):
        ours.save({"n": 1}, root / "ck", files=put)
        files = unpacked(medium.open(root / "ck", pin=True))
        assert read(files, "hooks/deep/lora.bin") == b"lora"
        assert read(files, "state.pkl") == b"state"
        assert {"hooks", "state.pkl"} <= {name.rstrip("/") for name in files.names()}
        assert dcp.verify(root / "ck").ok
    ours.remove(root / "ck")
    assert not medium.kind(root / "ck")
    ours.close()


def test_entries_links_marks_and_removals(medium: Medium, root: Where) -> None:
    _save(medium, root / "step-1")
    _save(medium, root / "step-2")
    there = [one for one in medium.entries(root) if one.path.name != WORKSPACE]
    assert [(one.path, one.is_folder, one.is_file) for one in there] == [
        (root / "step-1", True, False), (root / "step-2", True, False)
    ]  # fmt: skip
    for target in ("step-1", "step-2"):
        medium.link(root / "last", root / target)
        last, linked = (unpacked(medium.open(root / name, pin=True)) for name in ("last", target))
        assert last.names() == linked.names()
    medium.remove(root / "last")
    assert not medium.kind(root / "last")
    assert uncommitted_reason(root / "step-2", medium) == ""
    assert medium.note(root / "step-2" / "note", b"seen", only_new=True)
    assert not medium.note(root / "step-2" / "note", b"seen again", only_new=True)
    assert read(medium.open(root / "step-2"), "note") == b"seen"
    medium.remove(root / "step-2")
    medium.remove(root / "step-2")
    listed = snapshot(medium, root)
    assert [one.path for one in listed.entries(root) if one.path.name != WORKSPACE] == [root / "step-1"]
    assert uncommitted_reason(root / "step-1", listed) == ""


def test_a_data_file_gets_into_a_later_checkpoint_under_any_name_that_is_left(medium: Medium, root: Where) -> None:
    homes: list[Any] = []
    for number in (1, 2):
        path = root / f"step-{number}"
        reservation = medium.reserve(path)
        name = _write(medium, reservation.directory, _MEGABYTES)
        file = (
            homes[-1] if homes else DataFile.written(medium.open(reservation.directory), reservation.directory / name)
        )
        if homes:
            file = medium.link_file(file, reservation.directory / f"__1_0-{reservation.token}.distcp")
            name = f"__1_0-{reservation.token}.distcp"
        assert file.identity is not None and file.size == len(_MEGABYTES)
        medium.publish(reservation, _tables(medium, path))
        homes.append(file.published(path / name))
        assert read(medium.open(path), name) == _MEGABYTES
    medium.remove(root / "step-2")
    reservation = medium.reserve(root / "step-3")
    medium.link_file(homes[-1], reservation.directory / f"__0_0-{reservation.token}.distcp")
    medium.remove(root / "step-1")
    assert read(medium.open(reservation.directory), f"__0_0-{reservation.token}.distcp") == _MEGABYTES
    with pytest.raises(CannotLink):
        medium.link_file(homes[-1], reservation.directory / f"__2_0-{reservation.token}.distcp")
    medium.discard(reservation)
