"""Values that are no tensors come back as what they were, without executing code from the checkpoint."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import io
import pathlib
import pickle
import random
import re
import sys
import types
import uuid
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from dcp_plugin.core.format import values
from dcp_plugin.core.format.payload import framed
from tests.objects import PickledAs


class Phase(enum.Enum):
    WARM_UP = "warm up"
    MAIN = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Parts(enum.Flag):
    HEAD = 1
    TAIL = 2


class Name(str, enum.Enum):  # noqa: UP042 - what people have
    ADAM = "adam"


class Point(NamedTuple):
    x: int
    y: Any = None


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    phase: Phase = Phase.MAIN
    out: Path = Path("out")
    seen: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int = 1


VALUES: dict[str, Any] = {
    "path": Path("a/b"), "windows path": pathlib.PureWindowsPath("c:/x"), "tuple": (1, ("b", [2.0])), "no tuple": (),
    "set": {1, "a"}, "frozenset": frozenset({1, (2, 3)}), "set of enums": {Phase.MAIN, Phase.WARM_UP}, "bytes": b"",
    "bytearray": bytearray(b"ab"), "range": range(1, 9, 2), "slice": slice(1, None), "complex": 1 + 2j,
    "datetime": datetime.datetime(2020, 1, 2, 3, 4, 5, 6, datetime.timezone(datetime.timedelta(hours=2))),
    "date": datetime.date(2020, 1, 2), "time": datetime.time(1, 2), "delta": datetime.timedelta(1, 2, 3),
    "decimal": decimal.Decimal("1.50"), "uuid": uuid.UUID(int=5), "deque": collections.deque([1, 2], maxlen=5),
    "defaultdict in a tuple": (collections.defaultdict(list, a=[1]),), "size": torch.Size([1, 2]),
    "dtype": torch.bfloat16, "device": torch.device("cuda:1"), "namespace": argparse.Namespace(lr=0.1, out=Path("x")),
    "simple namespace": types.SimpleNamespace(a=1), "python random": random.getstate(),
    "enum": Phase.MAIN, "int enum": Level.LOW, "flag": Parts.HEAD, "flags": Parts.HEAD | Parts.TAIL, "str": Name.ADAM,
    "named tuple": Point(1, Path("a")), "in a named tuple": Point(Phase.MAIN, (Point(2),)),
    "config": Config(seen=[{"a": Phase.MAIN}]),
    "frozen": Frozen(2), "enum keys": {Phase.MAIN: 1, (2, Level.LOW): Path("x")},
    "deep": [[{"a": (Path("b"), {Phase.MAIN})}]],
}  # fmt: skip
ARRAYS: dict[str, Any] = {
    **{name: np.arange(6).reshape(2, 3).astype(name)
       for name in ("?", "i1", "u2", "i8", "f2", "f4", "f8", "g", "c8", "S3", "U2")},
    "by columns": np.asfortranarray(np.ones((2, 3))), "strided": np.arange(12)[::2],
    "other byte order": np.arange(3, dtype=">i4"), "empty": np.zeros((0, 3), np.float32),
    "no dimensions": np.array(3.5),
    "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "deltas": np.array([3], "m8[25us]"), "records": np.array([(1, [2.0, 3.0])], [("a", "<i4"), ("b", "<f8", (2,))]),
    "aligned": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "objects": np.array([1, "a", None, Path("x")], object),
    "float32": np.float32(0.1), "int64": np.int64(3), "bool": np.bool_(True), "str": np.str_("a"),
    "no str": np.str_(""),
    "bytes": np.bytes_(b"a"), "date": np.datetime64("2020-01-01T01"), "complex": np.complex64(1j),
    "dtype": np.dtype("f4"),
    "record": np.array((1, 2.0), [("a", "i4"), ("b", "f8")])[()],
}  # fmt: skip


FILLED = {"deque", "defaultdict in a tuple"}
"""Stock's pickles fill them after they are made, which torch's restricted unpickler has for lists and dictionaries."""


def _assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, (np.ndarray, np.generic)):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tolist() == other.tolist() if one.dtype.hasobject else one.tobytes() == other.tobytes()
        assert not isinstance(one, np.ndarray) or other.flags.writeable
    else:
        assert one == other and (isinstance(one, set) or repr(one) == repr(other))


def test_each_value_comes_back_as_itself_through_us_and_through_stock_in_both_directions(tmp_path: Path) -> None:
    saved = VALUES | ARRAYS
    as_one = {name: (value,) for name, value in saved.items()}  # stock walks mappings
    dcp.save({"each": saved, "one": as_one}, tmp_path / "ours")
    by_stock = {name: value for name, value in as_one.items() if name not in FILLED}
    stock.save({"one": by_stock}, checkpoint_id=tmp_path / "stock", no_dist=True)
    found: dict[str, Any] = {"each": {}, "one": {}}
    dcp.load(found, tmp_path / "ours")
    for name, value in saved.items():
        assert found["one"].keys() == saved.keys()
        _assert_same(value, found["one"][name][0])
        if not isinstance(value, dict):
            _assert_same(value, found["each"][name])
    read_by_stock: dict[str, Any] = {"one": dict.fromkeys(saved)}
    stock.load(read_by_stock, checkpoint_id=tmp_path / "ours", no_dist=True)
    of_stock: dict[str, Any] = {"one": {}}
    dcp.load(of_stock, tmp_path / "stock")
    for name, value in saved.items():
        if name != "other byte order":  # which stock does not keep
            _assert_same(value, read_by_stock["one"][name][0])
        if name in by_stock:
            _assert_same(value, of_stock["one"][name][0])


def test_shared_and_circular_objects_stay_so() -> None:
    config = Config()
    config.seen = [config, np.arange(2)]
    config.out = config.seen  # type: ignore[assignment]
    found = values.decode("it", values.encode((config, config)))
    assert found[0] is found[1] is found[0].seen[0] and found[0].out is found[0].seen


def test_the_state_of_numpys_generator_goes_on_as_it_would_have(tmp_path: Path) -> None:
    legacy, generator = np.random.RandomState(3), np.random.default_rng(3)
    extra = {"legacy": legacy.get_state(), "generator": generator.bit_generator.state}
    dcp.save({"rng": extra}, tmp_path / "ck")
    expected = legacy.rand(3), generator.random(3)
    found: dict[str, Any] = {"rng": {}}
    dcp.load(found, tmp_path / "ck")
    legacy.set_state(found["rng"]["legacy"])
    generator.bit_generator.state = found["rng"]["generator"]
    assert np.array_equal(expected, (legacy.rand(3), generator.random(3)))


def test_a_class_that_is_not_there_gives_the_plain_value_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = sys.modules[__name__]
    extra = {"phase": Phase.MAIN, "nested": [Level.LOW, (Point(1),)], "fine": Name.ADAM}
    dcp.save({"extra": extra}, tmp_path / "ck")
    dcp.save({"extra": {"config": Config()}}, tmp_path / "config")
    monkeypatch.delattr(here, "Phase")
    monkeypatch.delattr(here, "Level")
    monkeypatch.delattr(here, "Point")
    found: dict[str, Any] = {}
    with pytest.warns(UserWarning, match=r"extra.phase \(.*Phase is not imported\); extra.nested") as said:
        dcp.load({"extra": found}, tmp_path / "ck")
    assert len(said) == 1
    assert found == {"phase": (1, 2), "nested": [1, ((1, None),)], "fine": Name.ADAM}
    target: dict[str, Any] = {"extra": {"phase": None}}
    with pytest.warns(UserWarning, match="Phase is not imported"):
        stock.load(target, planner=dcp.ShardedLoadPlanner(), checkpoint_id=tmp_path / "ck", no_dist=True)
    found.clear()
    monkeypatch.delattr(here, "Config")
    with pytest.warns(UserWarning, match=r"extra.config \(.*Config is not imported\)"):
        dcp.load({"extra": found}, tmp_path / "config")
    assert found == {"config": {"lr": 0.1, "phase": (1, 2), "out": Path("out"), "seen": []}}


def test_members_and_fields_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    data = values.encode([Phase.MAIN, Point(1), Parts.HEAD])
    monkeypatch.setattr(sys.modules[__name__], "Phase", enum.Enum("Phase", {"OTHER": 7}, module=__name__))
    monkeypatch.setattr(
        sys.modules[__name__], "Point", type("Point", (collections.namedtuple("Point", "x"),), {"__module__": __name__})
    )
    notes: list[str] = []
    assert values.decode("it", data, notes=notes) == [(1, 2), (1, None), Parts.HEAD]
    assert len(notes) == 2 and "has no member (1, 2)" in notes[0] and "has 1 fields now" in notes[1]


def test_what_would_have_to_be_executed_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    for value in ([torch.nn.ReLU], torch.nn.ReLU, np.random.RandomState(1), Careful(1), np.ma.array([1])):
        wanted = r"extra.it is a .* can only be restored by executing pickled code"
        with pytest.raises(dcp.UnsafeCheckpoint, match=wanted):
            dcp.save({"extra": {"it": value}}, tmp_path / "ck")


PLAIN: list[Any] = [
    *(1, -7, True, None, 0.1, -0.0, float("nan"), 10**600, "", "a", "\ud800", b"ab", [], (), [1, (2, ["x"])]),
    *("x" * length for length in range(1, 140)), [0.5] * 70_000,
]  # fmt: skip


def test_a_plain_value_is_stored_as_torch_save_would_without_checksums() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        for value in PLAIN:
            by_torch = _pickled(value)
            assert values.encode(value) == re.sub(rb"\d{40}", b"0" * 40, by_torch)  # the identity of the archive
            assert repr(torch.load(io.BytesIO(values.encode(value)), weights_only=True)) == repr(value)
            assert repr(values.decode("it", by_torch)) == repr(values.decode("it", values.encode(value))) == repr(value)
    finally:
        torch.serialization.set_crc32_options(True)


def test_thousands_of_numbers_need_no_call_of_torch(tmp_path: Path) -> None:
    state = {"values": {f"n{number}": number / 3 for number in range(5000)}}
    target = {"values": dict.fromkeys(state["values"], 0.0)}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("save", "load"):
            patch.setattr(torch, name, lambda *args, **kwargs: pytest.fail("torch takes 100 us for each value"))
        dcp.save(state, tmp_path / "ck")
        dcp.load(target, tmp_path / "ck")
    assert target == state


def test_the_frame_of_a_plain_value_does_not_make_its_pickle_trusted() -> None:
    shared = (1,) * 200_000
    for value in ([shared] * 200_000, PickledAs(eval, ("1",)), [[[1]] * 1000] * 1000):
        with pytest.raises(dcp.UnsafeCheckpoint):
            values.decode("it", framed(pickle.dumps(value, 2)))
    with pytest.raises(dcp.UnsafeCheckpoint):  # a storage: the frame has none
        values.decode(
            "it",
            framed(
                b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ."
            ),
        )


def test_a_path_of_another_library_is_text_and_the_save_says_so(tmp_path: Path) -> None:
    class Elsewhere:
        def __fspath__(self) -> str:
            return "else"

    with pytest.warns(UserWarning, match=r"stored as another type: extra.it \(.*Elsewhere as text\)"):
        dcp.save({"extra": {"it": [Elsewhere()]}}, tmp_path / "ck")
    found: dict[str, Any] = {}
    dcp.load({"extra": found}, tmp_path / "ck")
    assert found == {"it": ["else"]}


@dataclasses.dataclass
class Careful:
    """Each of its methods tells that it ran."""

    a: int

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("ran")


class Telling(enum.Enum):
    ONE = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise AssertionError("ran")

    def __hash__(self) -> int:
        return _ran(0)


@dataclasses.dataclass
class Started:
    a: int = 0

    def __post_init__(self) -> None:
        _ran(0)

    def __hash__(self) -> int:
        return _ran(0)


class Made(NamedTuple("Made", [("a", int)])):  # type: ignore[misc]
    def __new__(cls, *args: Any) -> Made:
        return _ran(super().__new__(cls, *args))


class Gone:
    """Not a dataclass."""

    def __del__(self) -> None:
        _ran(0)


_runs: list[Any] = []


def _ran(value: Any) -> Any:
    _runs.append(value)
    return value


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


RECONSTRUCT = np.arange(2).__reduce__()[0]


@pytest.mark.parametrize(
    "value",
    [
        lambda: PickledAs(Started, (7,)), lambda: PickledAs(Gone, ()), lambda: PickledAs(_ran, (1,)),
        lambda: {PickledAs(Telling, (1,)): 1},
        lambda: PickledAs(types.SimpleNamespace, (), {"__class__": Started}), lambda: PickledAs(frozenset, (5,)),
        lambda: PickledAs(Path, (1,)), lambda: PickledAs(collections.deque, (range(9), 10**9)),
        lambda: PickledAs(Careful, (), {"a": 1}),
        lambda: PickledAs(np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)),
        lambda: PickledAs(np.dtype, ("O8,i4", False, True)), lambda: PickledAs(type(np.arange(2)), (9,)),
        lambda: PickledAs(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (10**9,), np.dtype("f8"), False, b"1")),
        lambda: PickledAs(RECONSTRUCT, (np.matrix, (0,), b"b"), np.arange(2).__reduce__()[2]),
        lambda: PickledAs(np.float32(1).__reduce__()[0], (np.dtype("f8"), b"1")),
        lambda: PickledAs(eval, ("1",)), lambda: PickledAs(getattr, (Path, "cwd")),
        lambda: PickledAs(dcp.load, ({}, "x")),
    ],
)  # fmt: skip
def test_hostile_values_run_nothing_and_are_refused(value: Any) -> None:
    data = _pickled(value())
    _runs.clear()
    with pytest.raises(dcp.UnsafeCheckpoint):
        values.decode("it", data)
    assert not _runs


def test_no_method_of_a_class_runs_when_its_objects_are_made() -> None:
    saved = (Started(3), Telling.ONE, Made(4))
    data = values.encode(saved)
    hostile = _pickled([PickledAs(Telling, (99,)), PickledAs(Made, (1, 2, 3))])
    _runs.clear()
    notes: list[str] = []
    found = values.decode("it", data)
    assert values.decode("it", hostile, notes=notes) == [99, (1, 2, 3)] and len(notes) == 2
    assert not _runs
    assert found == saved and type(found[2]) is Made


def test_no_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    module = types.ModuleType("not_there")
    module.Kind = enum.Enum("Kind", "A", module="not_there")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "not_there", module)
    data = values.encode([module.Kind.A])
    monkeypatch.delitem(sys.modules, "not_there")
    with warnings.catch_warnings(record=True):
        assert values.decode("it", data) == [1]
    assert "not_there" not in sys.modules


LARGE: dict[str, Any] = {
    "the indices of a shuffled data set": lambda: np.arange(40 << 20, dtype=np.int64)[::-1],
    "an array of bytes": lambda: np.full(280 << 20, 0xE9, np.uint8),
    "text": lambda: "x" * (300 << 20),
    "bytes": lambda: b"x" * (300 << 20),
    "an array in a tuple": lambda: (1, np.zeros(280 << 20, np.uint8)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_a_pickle_above_256_MiB_is_saved_and_loaded(tmp_path: Path, name: str) -> None:
    value = LARGE[name]()
    dcp.save({"v": value}, tmp_path / "ck")
    target = {"v": None}
    dcp.load(target, tmp_path / "ck")
    assert type(target["v"]) is type(value) and bool(np.all(target["v"][-1] == value[-1]))
    assert np.array_equal(target["v"], value) if isinstance(value, np.ndarray) else len(target["v"]) == len(value)
    assert dcp.verify(tmp_path / "ck").ok


@pytest.mark.parametrize("value", [np.broadcast_to(np.uint8(0), 1 << 32), np.broadcast_to(0, (1 << 30, 1))], ids=len)
def test_what_no_pickle_can_have_is_refused_at_once_with_its_size(tmp_path: Path, value: Any) -> None:
    with pytest.raises(dcp.CheckpointMismatch, match=r"^v is a ndarray of \d.0 GiB, more than the 4.0 GiB"):
        dcp.save({"v": value}, tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


def test_opcodes_without_end_are_refused_however_much_text_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_plugin.core.format.pickles.nodes.MOST_PICKLE", 1000)
    values.encode({"text": "x" * 100_000, "array": np.zeros(100_000)})
    with pytest.raises(dcp.UnsafeCheckpoint) as refused:
        values.encode({"text": "x" * 100_000, "numbers": dict.fromkeys(range(1000))})
    assert "more than 1000 bytes besides long texts" in str(refused.value.__cause__)
