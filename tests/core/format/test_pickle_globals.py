"""Each use of the unpickler accepts the globals that it needs, and refuses any other by name."""

from __future__ import annotations

import argparse
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from dcp_plugin.core.format import stock_metadata, values
from dcp_plugin.core.format.columns import FACTORIES
from dcp_plugin.core.format.pickles.rebuild import _MAKERS
from dcp_plugin.core.format.pickles.unpickler import FILE, TENSOR, VALUE
from tests.objects import WithExtra

DTYPES = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
DCP = "torch.distributed.checkpoint"
METADATA = {
    f"{DCP}.metadata.Metadata",
    f"{DCP}.metadata.TensorStorageMetadata",
    f"{DCP}.metadata.BytesStorageMetadata",
    f"{DCP}.metadata.TensorProperties",
    f"{DCP}.metadata.ChunkStorageMetadata",
    f"{DCP}.metadata.MetadataIndex",
    f"{DCP}.metadata.StorageMeta",
    f"{DCP}.metadata._MEM_FORMAT_ENCODING",
    f"{DCP}.filesystem._StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.Size",
    "torch.serialization._get_layout",
    "torch._utils._get_layout",
    "collections.OrderedDict",
    *(
        f"{module}.{kind}"
        for module in ("pathlib", "pathlib._local")
        for kind in ("Path", "PosixPath", "PurePosixPath")
    ),
}
STORED = (
    "Bool Byte Char Short Int Long Half Float Double BFloat16 ComplexFloat ComplexDouble "
    "QInt8 QUInt8 QInt32 QUInt4x2 QUInt2x4"
)
TENSORS = {
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_wrapper_subclass",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    "torch._tensor._rebuild_from_type_v2",
    "torch.serialization._get_layout",
    "torch.storage.UntypedStorage",
    *(f"torch.{kind}Storage" for kind in STORED.split()),
    *(f"torch.per_{kind}" for kind in ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric")),
    "torch.per_channel_affine_float_qparams",
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "collections.OrderedDict",
    "_codecs.encode",
    "builtins.bytearray",
    "builtins.complex",
    "builtins.set",
}
REBUILT = {
    *(f"builtins.{kind}" for kind in ("bytes", "frozenset", "range", "slice")),
    *(f"collections.{kind}" for kind in ("deque", "defaultdict")),
    *(f"datetime.{kind}" for kind in ("date", "datetime", "time", "timedelta", "timezone")),
    *(f"numpy.{name}" for name in ("dtype", "_core.multiarray._reconstruct", "_core.multiarray.scalar")),
    *(f"pathlib.{kind}Path" for kind in ("Posix", "Windows", "PurePosix", "PureWindows")),
    *("decimal.Decimal", "uuid.UUID", "_io.BytesIO", "argparse.Namespace", "types.SimpleNamespace"),
}
AS_FACTORIES = {*(f"builtins.{kind}" for kind in ("int", "float", "bool", "str", "list", "dict", "set", "tuple"))}


def test_each_use_accepts_these_globals_and_no_other() -> None:
    assert stock_metadata.STOCK_METADATA.globals.keys() == METADATA | DTYPES
    assert TENSOR.globals.keys() == TENSORS | DTYPES
    assert VALUE.globals.keys() == FILE.globals.keys() == TENSORS | DTYPES | {"collections.Counter"}
    assert _MAKERS.keys() == REBUILT and FACTORIES.keys() == AS_FACTORIES | {"numpy.ndarray"}


def _calling(module: str, name: str) -> bytes:
    """A pickle that calls a global with a text."""
    return b"\x80\2" + f"c{module}\n{name}\n".encode() + b"X\1\0\0\0x\x85R."


def _archive(pickled: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """A file of ``torch.save`` with this pickle, and more records."""
    records = {"byteorder": b"little"} if records is None else records
    buffer = io.BytesIO()
    with torch.serialization._open_zipfile_writer(buffer) as file:
        file.write_record("data.pkl", pickled, len(pickled))
        for name, data in records.items():
            file.write_record(name, data, len(data))
    return buffer.getvalue()


OTHERS = [
    ("builtins", "eval"),
    ("torch", "load"),
    ("subprocess", "call"),
    ("posix", "system"),
    ("torch", "FloatTensor"),
]
READERS: dict[str, Callable[[bytes], Any]] = {
    "metadata": lambda pickled: stock_metadata.decode(pickled, "it"),
    "tensor": lambda pickled: values.decode_tensor(_archive(pickled)),
    "value": lambda pickled: values.decode("it", _archive(pickled)),
}


@pytest.mark.parametrize(("module", "name"), OTHERS)
@pytest.mark.parametrize("use", READERS)
def test_any_other_global_is_refused_by_name(use: str, module: str, name: str) -> None:
    with pytest.raises(dcp.UnsafeCheckpoint, match=rf"{module}\.{name}"):
        READERS[use](_calling(module, name))


@pytest.mark.parametrize(("module", "name"), OTHERS)
def test_of_a_file_the_load_that_asks_for_another_global_is_refused_by_name(
    tmp_path: Path, module: str, name: str
) -> None:
    (tmp_path / "file").write_bytes(_archive(_calling(module, name)))
    with pytest.raises(dcp.UnsafeCheckpoint, match=rf"{module}\.{name}"):
        dcp.load({"model": {"a": torch.ones(1)}}, tmp_path / "file")


def test_metadata_does_not_accept_what_the_user_has_declared_safe_for_tensors() -> None:
    with torch.serialization.safe_globals([WithExtra]), pytest.raises(dcp.UnsafeCheckpoint, match="WithExtra"):
        stock_metadata.decode(_calling(WithExtra.__module__, "WithExtra"), "it")


SHARED = argparse.Namespace(limit=1)


def shared() -> argparse.Namespace:
    return SHARED


def test_what_a_declared_function_returns_is_not_changed() -> None:
    pickled = b"\x80\2" + f"c{__name__}\nshared\n".encode() + b")R}X\5\0\0\0limitK\x63sb."
    with torch.serialization.safe_globals([shared]), pytest.raises(dcp.UnsafeCheckpoint, match="takes no state"):
        values.decode("it", _archive(pickled))
    assert SHARED.limit == 1


NUMPY = [np.ndarray(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.int64))]
OBJECTS = b"cnumpy\ndtype\n(X\1\0\0\0O\x89\x88tR"
DTYPE_STATE = b"(K\3X\1\0\0\0|NX\1\0\0\0a\x85}X\1\0\0\0a" + OBJECTS + b"K\0\x86sK\x08K\1K\0t"
DTYPE = b"cnumpy\ndtype\n(X\2\0\0\0V8\x89\x88tR" + DTYPE_STATE + b"b"
BYTES = b"c_codecs\nencode\nX\x08\0\0\0AAAAAAAAX\6\0\0\0latin1\x86R"
MADE = {
    "class": b"cnumpy\nndarray\nK\0\x85\x85R",
    "function": b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85X\1\0\0\0btR",
}


@pytest.mark.parametrize("made", MADE)
def test_bytes_are_never_pointers_of_an_array_even_if_numpy_is_declared_safe(made: str) -> None:
    pickled = b"\x80\2]" + MADE[made] + b"(K\1K\1\x85" + DTYPE + b"\x89" + BYTES + b"tba."
    with torch.serialization.safe_globals(NUMPY), pytest.raises(dcp.UnsafeCheckpoint):
        values.decode("it", _archive(pickled))


def test_an_array_is_rebuilt_also_if_numpy_is_declared_safe() -> None:
    buffer = io.BytesIO()
    torch.save(np.arange(3), buffer)
    with torch.serialization.safe_globals(NUMPY):
        assert values.decode("it", buffer.getvalue()).tolist() == [0, 1, 2]


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _tensor(name: str) -> bytes:
    """The opcodes of a tensor of four numbers."""
    storage = b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + _text(name) + _text("cpu") + b"K\4tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0K\4\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR"


TWO = {"data/0": bytes(16), "data/1": bytes(16)}
STATE_OF_TWO = b"}(" + _text("a") + _tensor("0") + _text("b") + _tensor("1") + b"u"


def test_offsets_are_not_calculated_from_what_the_file_says(tmp_path: Path) -> None:
    lying = {".format_version": b"1", ".storage_alignment": b"0", **TWO}
    (tmp_path / "file").write_bytes(_archive(b"\x80\2" + STATE_OF_TWO + b".", lying))
    target = {"a": torch.ones(4), "b": torch.ones(4)}
    dcp.load({"model": target}, tmp_path / "file")
    assert not target["a"].any() and not target["b"].any()


def test_no_record_takes_the_place_of_one_in_another_case(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(_archive(b"\x80\2" + STATE_OF_TWO + b".", {"BYTEORDER": b"big", **TWO}))
    target = {"a": torch.ones(4)}
    dcp.load({"model": target}, tmp_path / "file", dcp.PartialLoad(unexpected="ignore"))
    assert not target["a"].any()


def test_names_of_records_are_exact() -> None:
    pickled = b"\x80\2](" + b"".join(map(_tensor, "aA")) + b"e."
    with pytest.raises(dcp.UnsafeCheckpoint, match="data/A"):
        values.decode("it", _archive(pickled, {"data/a": bytes(16)}))


def test_a_sparse_tensor_whose_indices_are_outside_of_it_is_refused() -> None:
    outside = torch.sparse_coo_tensor(torch.tensor([[10**9]]), torch.ones(1), (2,), check_invariants=False)
    buffer = io.BytesIO()
    torch.save([outside], buffer)
    with pytest.raises(dcp.UnsafeCheckpoint, match="size is inconsistent with indices"):
        values.decode("it", buffer.getvalue())


def test_the_name_of_a_storage_is_text() -> None:
    number = _tensor("0").replace(_text("0"), b"K\0")
    with pytest.raises(dcp.UnsafeCheckpoint, match="something else than a storage"):
        values.decode("it", _archive(b"\x80\2](" + _tensor("0") + number + b"e.", TWO))


def test_lists_that_are_shared_or_in_themselves_are_looked_at_once() -> None:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    assert values.is_plain(value)
    value.append(value)
    assert not values.is_plain(value)


ORDERED = b"ccollections\nOrderedDict\n)R"
ARRAY = b"cbuiltins\nbytearray\n"
MANY = b"J\0\0\0\1"
FROM_TYPE = b"ctorch._tensor\n_rebuild_from_type_v2\n"
HIDDEN_CALLS = {
    "a method in a state": ORDERED + b"}" + _text("__setstate__") + ARRAY + b"sb" + MANY + b"b",
    "the same in an ordered state": ORDERED + ORDERED + _text("__setstate__") + b"ctorch\ndevice\nsb",
    "the same from pairs": b"ccollections\nOrderedDict\n]" + _text("__setstate__") + b"ctorch\ndevice\n\x86a\x85R",
    "a bytearray of a tensor": ARRAY + _tensor("0") + b"\x85R",
    "a bytearray of a number": ARRAY + MANY + b"\x85R",
    "a function with the class": FROM_TYPE + b"(" + ARRAY + b"ctorch\nTensor\n" + _tensor("0") + b"\x85NtR",
}


@pytest.mark.parametrize("call", HIDDEN_CALLS)
def test_a_bytearray_is_made_of_bytes_and_no_attribute_is_called(call: str) -> None:
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"bytearray|__setstate__|calls collections\.OrderedDict"):
        values.decode("it", _archive(b"\x80\2" + HIDDEN_CALLS[call] + b".", TWO))


@pytest.mark.parametrize("value", [bytearray(), bytearray(b"a"), bytearray(range(256)), {"of": [bytearray(b"\xff")]}])
def test_a_bytearray_comes_back(value: Any) -> None:
    assert values.decode("it", values.encode(value)) == value


def test_a_load_that_is_refused_leaves_nothing_in_torch(tmp_path: Path) -> None:
    layout = b"ctorch.serialization\n_get_layout\n" + _text("torch.sparse_coo") + b"\x85R"
    parts = b"(" + _tensor("0") + _tensor("1") + b"K\4\x85t"
    sparse = b"ctorch._utils\n_rebuild_sparse_tensor\n" + layout + parts + b"\x86R"
    with pytest.raises(dcp.UnsafeCheckpoint):
        values.decode("it", _archive(b"\x80\2](" + sparse + b"ctorch\nSize\nN\x85Re.", TWO))
    assert not torch._utils._sparse_tensors_to_validate
    (tmp_path / "file").write_bytes(_archive(b"\x80\2](ctorch\nTensor\n" + _text("x") + b"\x85Re."))
    with pytest.raises(dcp.CheckpointError):
        dcp.load({"model": {"a": torch.ones(1)}}, tmp_path / "file")
    assert torch.serialization._serialization_tls.map_location is None


def test_no_tensor_of_a_file_is_remembered() -> None:
    data = values.encode(torch.ones(3))
    assert values.decode("it", data).tolist() == [1, 1, 1]
    assert data not in values._decoded


@pytest.mark.parametrize(
    "changes",
    [
        b"ctorch\nTensor\n}X\1\0\0\0xK\1sb.",  # sets an attribute of a class
        b"ctorch\nTensor\nN}X\1\0\0\0xK\1s\x86b.",
        b"ccollections\nOrderedDict\nX\1\0\0\0xK\1s.",
        b"ctorch\nTensor\n)R}X\1\0\0\0xK\1sb.",  # sets attributes of a tensor
        b"ctorch\nSize\n]\x85RK\1a.",  # appends to an object
        b"}K\1a.",
        b"]K\1K\1s.",
        b"ctorch\nSize\n]\x85R)R.",  # calls an object
        b"])R.",
        b"Nr\xff\xff\xff\x7f.",  # has the unpickler allocate a table
    ],
)
def test_a_pickle_fills_and_calls_nothing_but_what_torch_save_asks_for(changes: bytes) -> None:
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"its (pickle|opcode)|state is not a dictionary"):
        values.decode("it", _archive(b"\x80\2" + changes))


def test_a_codec_is_not_called_through_another_function() -> None:
    encodes = b"ctorch._tensor\n_rebuild_from_type_v2\n(c_codecs\nencode\nNX\1\0\0\0xX\x08\0\0\0punycode\x86NtR."
    with pytest.raises(dcp.UnsafeCheckpoint, match=r"_codecs\.encode as a value"):
        values.decode("it", _archive(b"\x80\2" + encodes))


@pytest.mark.parametrize("sparse", [False, True], ids=["strided", "sparse"])
def test_tensors_in_an_extra_state_come_back_with_their_layout_and_their_shared_memory(
    tmp_path: Path, sparse: bool
) -> None:
    shared = torch.arange(6.0)
    expected = {"all": shared, "some": shared[2:4], "sparse": torch.eye(3).to_sparse() if sparse else 0}
    torch.save({"state_dict": WithExtra(expected).state_dict()}, tmp_path / "file")
    model = WithExtra(None)
    dcp.load({"model": model}, tmp_path / "file")
    loaded = model.extra
    assert loaded["all"].tolist() == expected["all"].tolist() and loaded["some"].tolist() == [2.0, 3.0]
    assert loaded["some"].untyped_storage().data_ptr() == loaded["all"].untyped_storage().data_ptr()
    if sparse:
        assert loaded["sparse"].layout is torch.sparse_coo and loaded["sparse"].to_dense().equal(torch.eye(3))


def test_a_file_is_never_mapped_since_another_job_may_cut_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"state_dict": WithExtra({"tensor": torch.arange(6.0)}).state_dict()}, tmp_path / "file")
    monkeypatch.setattr(torch.UntypedStorage, "from_file", lambda *args, **kwargs: pytest.fail("mapped"))
    assert dcp.load({"model": WithExtra(None)}, tmp_path / "file").loaded


def test_a_stock_checkpoint_from_before_has_no_global_that_is_refused(tmp_path: Path) -> None:
    stock.save({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.uint16), "n": {1, 2}}, checkpoint_id=tmp_path)
    assert struct.unpack("<2B", (tmp_path / ".metadata").read_bytes()[:2])[0] == 0x80
    target = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.uint16), "n": set()}
    dcp.load(target, tmp_path)
    assert target["n"] == {1, 2} and target["a"].tolist() == [1, 1] and target["b"].tolist() == [1, 1]
