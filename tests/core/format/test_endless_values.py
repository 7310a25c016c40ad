"""Values of a few bytes that have no end are refused; what is read can be saved, read and compared."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from dcp_plugin.core.format import values
from dcp_plugin.core.format.pickles.walk import DEPTH


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _put(number: int) -> bytes:
    return b"r" + struct.pack("<I", number)


def _get(number: int) -> bytes:
    return b"j" + struct.pack("<I", number)


def _archive(pickled: bytes) -> bytes:
    """A file of ``torch.save`` with this pickle."""
    buffer = io.BytesIO()
    with torch.serialization._open_zipfile_writer(buffer) as file:
        for name, data in {"data.pkl": b"\x80\2" + pickled + b".", "byteorder": b"little", "data/0": bytes(4)}.items():
            file.write_record(name, data, len(data))
    return buffer.getvalue()


def _bytes(data: bytes) -> bytes:
    return b"c_codecs\nencode\n" + _text(data.decode("latin1")) + _text("latin1") + b"\x86R"


def _dtype(spec: str) -> bytes:
    state = b"(K\3" + _text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0t"
    return b"cnumpy\ndtype\n(" + _text(spec) + b"\x89\x88tR" + state + b"b"


def _array(shape: bytes, dtype: bytes) -> bytes:
    made = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85" + _bytes(b"b") + b"tR"
    return made + b"(K\1" + shape + dtype + b"\x89" + _bytes(b"") + b"tb"


def _tensor(size: bytes) -> bytes:
    storage = b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + _text("0") + _text("cpu") + b"K\1tQ"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"K\0"
        + size
        + b"K\0\x85\x89ccollections\nOrderedDict\n)RtR"
    )


LARGE = b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85"
LEVELS = 60


def _twice(open_: bytes, close: bytes, between: bytes = b"") -> bytes:
    """Containers of which each has the one before twice."""
    made = b")" + _put(1000)
    for level in range(LEVELS):
        made += open_ + _get(1000 + level) + between + _get(1000 + level) + close + _put(1001 + level) + b"0"
    return made + _get(1000 + LEVELS)


def _from_outside_in() -> bytes:
    """Lists that are filled after the list around them is complete, each with the next one twice."""
    made = b"".join(b"]" + _put(1000 + level) + b"0" for level in range(LEVELS + 1))
    for level in range(LEVELS):
        made += _get(1000 + level) + b"(" + _get(1001 + level) * 2 + b"e0"
    return made + _get(1000)


ENDLESS: dict[str, bytes] = {
    "array of elements without bytes": _array(LARGE, _dtype("V0")),
    "tuples": _twice(b"(", b"t"),
    "dictionaries": _twice(b"}(K\0", b"u", b"K\1"),
    "lists from the outside in": _from_outside_in(),
    "lists too deep": b"]" * (DEPTH + 1) + b"a" * DEPTH,
    "tuples too deep as a key": b"}" + b")" + b"\x85" * 100_000 + b"Ns",
    "numbers with one hash": b"}("
    + b"".join(b"\x8a\x0a" + (n * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for n in range(1000))
    + b"u",
    "bytes spelled many times": _text("x" * 100_000) + _put(1) + b"0("
    + (b"c_codecs\nencode\n" + _get(1) + _text("latin1") + b"\x86R") * 2000 + b"t",
    "tensor of one element, many times": _tensor(LARGE),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_value_that_does_not_end_is_refused(name: str) -> None:
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"parts|containers in each other|same hash|too often|without bytes"):
        values.decode("it", _archive(ENDLESS[name]))


def _shared(levels: int, kind: Callable[[list[Any]], Any]) -> Any:
    value: Any = "leaf"
    for _ in range(levels):
        value = kind([value, value])
    return value


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_is_within_the_budget_is_saved_read_and_compared(tmp_path: Path, kind: Callable[[list[Any]], Any]) -> None:
    value = _shared(12, kind)
    stock.save({"it": (value,)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    found: dict[str, Any] = {"it": None}
    dcp.load(found, tmp_path / "stock")
    assert found["it"] == (value,) and found["it"][0][0] is found["it"][0][1]
    dcp.save(found, tmp_path / "ours")
    assert dcp.read(tmp_path / "ours") == found
    assert dcp.diff(tmp_path / "stock", tmp_path / "ours").equal


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_no_load_would_read_is_not_stored(kind: Callable[[list[Any]], Any]) -> None:
    for value in (_shared(40, kind), [_shared(40, kind), {1}]):
        with pytest.raises(dcp.UnsafeCheckpoint, match=r"a (list|tuple) that no load would accept"):
            values.encode(value)


def test_a_million_numbers_are_within_the_budget() -> None:
    value = [None] * 1_000_000
    assert values.decode("it", values.encode(value)) == value


def test_a_file_with_values_that_do_not_end_is_refused_by_name(tmp_path: Path) -> None:
    tensor = b"}" + _text("a") + _tensor(b"K\1\x85") + b"s"
    pickled = b"}(" + _text("state_dict") + tensor + _text("note") + ENDLESS["lists from the outside in"] + b"u"
    (tmp_path / "file").write_bytes(_archive(pickled))
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"/file: its values have more than 100000 parts"):
        dcp.load({"model": {"a": torch.zeros(1)}}, tmp_path / "file")


def test_another_planners_note_that_does_not_end_is_refused_by_name(tmp_path: Path) -> None:
    stock.save({"t": torch.ones(1)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = [_shared(40, list)]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"\.metadata its values have more than 100000 parts"):
        dcp.load({"t": torch.zeros(1)}, tmp_path)
