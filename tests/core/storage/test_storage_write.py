"""Data files: the same bytes whichever way they are written, in blocks, with little memory."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch.distributed.checkpoint import load as stock_load

import dcp_plugin as dcp
from dcp_plugin import events
from dcp_plugin.core.format import values
from dcp_plugin.core.format.index import StoredTensor
from dcp_plugin.core.format.payload import SMALLEST_BLOCK, BlockHashes, block_counts, block_size, hashes_in
from dcp_plugin.core.media.disk import local_disk, posix
from dcp_plugin.core.media.disk.local_disk import BUFFER, BlockFile
from dcp_plugin.core.media.medium import IN_PLACE, PAGE
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.core.tensors import host_memory
from tests.compare import assert_same, same_bytes
from tests.memory import extra_peak

MIB = 1 << 20


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk and one on tmpfs."""
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
            yield Path(shared)


def _takes_direct(directory: Path) -> bool:
    try:
        with BlockFile(directory / "probe", BUFFER, True) as file:
            file.write(bytes(BUFFER))
    except dcp.SaveFailed:
        return False
    finally:
        (directory / "probe").unlink()
    return True


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("direct_io", [True, False, "auto"])
def test_a_file_holds_what_was_appended_in_pieces_of_any_size(directory: Path, direct_io: Any) -> None:
    if direct_io is True and not _takes_direct(directory):
        pytest.skip("this file system has no O_DIRECT")
    chance = random.Random(0)
    for number in range(6):
        sizes = [chance.choice([0, 1, 63, 4096, 65535, 65536, MIB, BUFFER - 1, BUFFER, BUFFER + 1]) for _ in range(8)]
        pieces = [chance.randbytes(size) for size in sizes]
        written: list[int] = []
        with BlockFile(directory / str(number), sum(sizes), direct_io, written.append) as file:
            for piece in pieces:
                file.write(piece)
            assert file.tell() == sum(sizes)
        assert (directory / str(number)).read_bytes() == b"".join(pieces)
        assert sum(written) == sum(sizes)


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "large": torch.randn(5 * MIB // 4 + 3),
        "rows of a larger one": torch.randn(4096, 512)[1000:3000],
        "columns": torch.randn(3000, 700)[:, 5:400],
        "turned": torch.randn(1500, 900).t(),
        "one long row": torch.randn(2, 3 * MIB // 2).t()[:, 1:].t(),
        "conjugated": torch.randn(3, 70000, dtype=torch.complex64).conj(),
        "negative": torch.randn(80000, dtype=torch.complex64).conj().imag,
        "expanded": torch.randn(1, 700).expand(500, 700),
        **{f"small {n}": torch.full((n,), float(n)) for n in range(50)},
    }


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("direct_io", [True, False, "auto"])
def test_every_way_to_write_gives_the_same_files(directory: Path, direct_io: Any) -> None:
    state = _state()
    if direct_io is True and not _takes_direct(directory):
        with pytest.raises(dcp.SaveFailed, match=r"io\.direct='auto'"):
            dcp.save({"t": state}, directory / "ck", io={"direct": True})
        return
    dcp.save({"t": state}, directory / "ck", io={"direct": direct_io})
    dcp.save({"t": state}, directory / "reference", io={"direct": False})
    assert len(_contents(directory / "ck")) == 2
    assert _contents(directory / "ck") == _contents(directory / "reference")
    assert dcp.verify(directory / "ck").ok
    target = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
    dcp.load({"t": target}, directory / "ck")
    assert_same(target, {key: value.resolve_conj().resolve_neg() for key, value in state.items()})


def _contents(checkpoint: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(checkpoint.glob("*.distcp"))]


@pytest.mark.parametrize(
    ("before", "by", "in_place"), [(0, 0, True), (4096, 0, True), (BUFFER, 0, True), (64, 0, False), (0, 64, False)]
)
def test_aligned_memory_is_written_from_where_it_is(tmp_path: Path, before: int, by: int, in_place: bool) -> None:
    if not _takes_direct(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    size = 5 * BUFFER + 100
    memory = torch.randint(256, (size + 2 * PAGE,), dtype=torch.uint8)
    head, body = random.Random(0).randbytes(before), memory[-memory.data_ptr() % PAGE + by :][:size]
    written: list[int] = []
    with BlockFile(tmp_path / "file", before + body.nbytes + 7, True, written.append) as file:
        file.write(head)
        assert file.takes_in_place(body.data_ptr()) == in_place
        file.write(host_memory.memory_view(body))
        file.write(b"the end")
    assert (5 * BUFFER in written) == in_place, "as a whole, and not through the buffer"
    assert (tmp_path / "file").read_bytes() == head + body.numpy().tobytes() + b"the end"


@pytest.mark.parametrize("async_save", [True, False])
def test_large_payloads_begin_at_pages_of_the_file(tmp_path: Path, async_save: bool) -> None:
    sizes = [3, MIB, 70_001, MIB // 4, 2 * MIB + 1, MIB // 4 - 1]  # fp32
    state = {str(number): torch.randn(size) for number, size in enumerate(sizes)}
    finished: list[int] = []
    unsubscribe = events.subscribe(
        lambda event: finished.append(event.bytes) if isinstance(event, events.SaveFinished) else None
    )
    with closing(dcp.Checkpointer(async_save=async_save)) as ours:
        ours.save(state, tmp_path / "ck").wait()
    unsubscribe()
    index = CheckpointReader(tmp_path / "ck").index
    for key, tensor in state.items():
        entry = index[key]
        assert isinstance(entry, StoredTensor)
        (chunk,) = entry.chunks
        if tensor.nbytes >= IN_PLACE:
            assert (chunk.location.offset + chunk.location.payload_offset) % PAGE == 0
    assert dcp.verify(tmp_path / "ck").ok
    assert finished == [sum(index.files.values())]
    there = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    stock_load(there, checkpoint_id=tmp_path / "ck")
    assert_same(there, state)


def _refuse_when_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def control(fd: int, command: int, argument: int = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", control)


def _refuse_at_the_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def write(fd: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(local_disk.os, "pwrite", write)


@pytest.mark.parametrize("refuse", [_refuse_when_switched_on, _refuse_at_the_first_write])
def test_where_direct_io_is_refused_the_page_cache_is_used_unless_the_user_insists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Any
) -> None:
    if not _takes_direct(tmp_path):
        pytest.skip("this file system has no O_DIRECT to refuse")
    state = {"t": torch.randn(2 * MIB)}
    dcp.save(state, tmp_path / "reference")
    monkeypatch.setattr(posix, "available_memory", lambda: 0)  # where the page cache is not the first choice
    refuse(monkeypatch)
    dcp.save(state, tmp_path / "ck")
    assert _contents(tmp_path / "ck") == _contents(tmp_path / "reference")
    with pytest.raises(dcp.SaveFailed, match="refuses O_DIRECT"):
        dcp.save(state, tmp_path / "forced", io={"direct": True})
    assert not (tmp_path / "forced").exists()


@pytest.mark.parametrize("size", [BUFFER // 2, BUFFER, 4 * BUFFER])
@pytest.mark.parametrize("room", [0, 31, 33])
def test_only_what_is_large_for_the_memory_there_is_goes_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, room: int
) -> None:
    if not _takes_direct(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    assert posix.available_memory() > 0
    monkeypatch.setattr(posix, "available_memory", lambda: room * size)
    data = random.Random(0).randbytes(size)
    with BlockFile(tmp_path / "file", size, "auto") as file:
        assert file.direct == (size >= BUFFER and room < 32)
        file.write(data)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("direct", [True, False])
def test_what_fails_behind_ends_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not _takes_direct(tmp_path):
        pytest.skip("this file system has no O_DIRECT")

    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_disk.os, "pwrite", full)
    with (
        pytest.raises(OSError, match="No space left"),
        BlockFile(tmp_path / "file", 4 * BUFFER, direct) as file,
    ):
        file.write(bytes(4 * BUFFER))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._fd)


def test_direct_io_is_one_of_three() -> None:
    with pytest.raises(ValueError, match=r"io\.direct must be"):
        dcp.CheckpointConfig(io=dcp.IO(direct="yes"))  # type: ignore[arg-type]


def test_the_pieces_of_a_tensor_are_its_bytes_in_order() -> None:
    rings = host_memory.Rings()
    for key, tensor in _state().items():
        expected = bytes(tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy())
        assert b"".join(bytes(piece) for piece in rings.pieces(tensor)) == expected, key


def test_the_hashes_of_blocks_do_not_depend_on_the_pieces() -> None:
    data = memoryview(random.Random(0).randbytes(10 * SMALLEST_BLOCK + 77))
    for piece in (1000, SMALLEST_BLOCK - 1, SMALLEST_BLOCK, 3 * SMALLEST_BLOCK, len(data)):
        hashes = BlockHashes(SMALLEST_BLOCK)
        for at in range(0, len(data), piece):
            hashes.add(data[at : at + piece])
        assert hashes.row == hashes_in(data)
    blocks = [data[at : at + SMALLEST_BLOCK] for at in range(0, len(data), SMALLEST_BLOCK)]
    assert hashes_in(data) == [xxhash.xxh3_64_intdigest(block) for block in blocks]


LENGTHS = [0, 1, SMALLEST_BLOCK, SMALLEST_BLOCK + 1, MIB, 16 * MIB, 16 * MIB + 1, 256 * MIB, 256 * MIB + 1, 1024 * MIB]


@pytest.mark.parametrize("length", LENGTHS)
def test_an_item_has_few_hashes_and_small_blocks(length: int) -> None:
    block = block_size(length)
    assert block & (block - 1) == 0
    assert SMALLEST_BLOCK <= block <= MIB
    assert block in (SMALLEST_BLOCK, MIB) or length / 512 < block <= length / 128
    assert block_counts(np.array([length])).tolist() == [-(-length // block)]


@pytest.mark.one_of
@pytest.mark.parametrize("how", ["contiguous", "turned"])
def test_a_save_needs_memory_for_blocks_only(tmp_path: Path, how: str) -> None:
    tensor = torch.randn(6000, 6000) if how == "contiguous" else torch.randn(6000, 6000).t()
    dcp.save({"warm": torch.randn(100)}, tmp_path / "warm")
    assert extra_peak(lambda: dcp.save({"t": tensor}, tmp_path / "ck")) < 32 * MIB


def test_values_that_are_written_alike_but_differ_stay_different() -> None:
    odd = [True, 1, 1.0, 0.0, -0.0, (1, True), (1.0, 1), "1", b"1", None, (None, ("a", 2))]
    back = [values.decode("k", values.encode(value)) for value in odd]
    assert list(map(repr, back)) == list(map(repr, odd))


def test_a_loaded_list_belongs_to_the_one_who_loaded_it() -> None:
    data = values.encode([1, {"a": torch.ones(2)}])
    first, second = values.decode("k", data), values.decode("k", data)
    first[1]["a"].zero_()
    assert same_bytes(second[1]["a"], torch.ones(2))
