"""Hostile files: those that once did harm, and a sample of the campaign, ``python -m tests.faults fuzz``."""

from __future__ import annotations

import io
import json
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_tensors
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import dcp_plugin as dcp
from tests.faults.fuzz import KINDS, cases, look
from tests.faults.victims import Victims
from tests.forge import change_summary

NESTED = b")" + b"\x85" * 200_000
COLLIDING = b"".join(b"\x8a\x0a" + (n * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for n in range(1, 40_000))
NOTED = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n"
_KEYS = [b"X\4\0\0\0%04d" % number for number in range(1_800)]
SHARED = (  # one that is in another 1800 times, and filled then
    b"}(X\1\0\0\0b}q\1X\1\0\0\0a}("
    + b"".join(key + b"h\1" for key in _KEYS)
    + b"uX\1\0\0\0ch\1("
    + b"".join(key + b"K\1" for key in _KEYS)
    + b"uu"
)
COPIED = b"c_codecs\nencode\nh\1h\2\x86R"
DISTINCT = "".join(map(chr, range(0x4E00, 0x9E00))).encode() * 2
METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(X\x0c\0\0\0planner_data%sub."
PATCH = b"cpathlib\nPurePosixPath\n}(X\x0b\0\0\0is_absoluteNub"


def _metadata(content: bytes, before: bytes = b"") -> dict[str, bytes]:
    return {".metadata": b"\x80\2" + before + METADATA.replace(b"%s", content)}


def _archive(content: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("archive/data.pkl", b"\x80\2" + content + b".")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def _torch_file(content: bytes, method: int = zipfile.ZIP_STORED) -> dict[str, bytes]:
    return {"pytorch_model.bin": _archive(b"}X\5\0\0\0model" + content + b"s", method)}


def _safetensors(header: bytes) -> dict[str, bytes]:
    return {"model.safetensors": struct.pack("<Q", len(header)) + header + bytes(64)}


FILES: dict[str, dict[str, bytes]] = {
    "a class is built": _metadata(PATCH),
    "a class is built with slots": _metadata(b"cpathlib\nPosixPath\nN}X\6\0\0\0is_dirNs\x86b"),
    "nested keys": _metadata(b"}" + NESTED + b"Ns"),
    "nested keys of a state": _metadata(NOTED + b")\x81}" + NESTED + b"Nsb"),
    "nested lists": _metadata(b"]" * 200_000 + b"a" * 199_999),
    "a large number of the memo": _metadata(b"N", before=b"Nr\0\0\0\x200"),
    "a dotted name": {".metadata": b"\x80\4\x8c\7pathlib\x8c\7os.pathX\5\0\0\0mkdir\x93."},
    "colliding numbers": _metadata(b"}(" + COLLIDING + b"u"),
    "one list named again and again": _metadata(b"](" + b"N" * 100_000 + b"eq\1}(" + b"h\1h\1" * 50_000 + b"u"),
    "torch: nested keys": _torch_file(b"}" + NESTED + b"Ns"),
    "torch: a set of nested tuples": _torch_file(b"c__builtin__\nset\n]" + NESTED + b"a\x85R"),
    "torch: colliding numbers": _torch_file(b"}(" + COLLIDING + b"u"),
    "torch: bytes of any size": _torch_file(b"c__builtin__\nbytearray\n\x8a\5\0\0\0\0\2\x85R"),
    "torch: one text copied again and again": _torch_file(
        b"](X\xa0\x86\1\0" + b"x" * 100_000 + b"q\1X\6\0\0\0latin1q\2" + COPIED * 20_000 + b"e"
    ),
    "torch: a codec of quadratic cost": _torch_file(
        b"c_codecs\nencode\nX" + struct.pack("<I", len(DISTINCT)) + DISTINCT + b"X\x08\0\0\0punycode\x86R"
    ),
    "torch: a codec of quadratic cost, from a list": _torch_file(
        b"c_codecs\nencode\n](X" + struct.pack("<I", len(DISTINCT)) + DISTINCT + b"X\x08\0\0\0punycodeX\4\0\0\0utf8eR"
    ),
    "torch: the same dictionaries in each other": _torch_file(SHARED),
    "torch: compressed": _torch_file(b"](" + b"]" * 50_000_000 + b"e", zipfile.ZIP_DEFLATED),
    "safetensors: nested": _safetensors(b'{"a":' * 100_000),
    "safetensors: large numbers": _safetensors(
        json.dumps({"w": {"dtype": "U8", "shape": [64, 1 << 64, 0], "data_offsets": [0, 64]}}).encode()
    ),
    "safetensors: text that is none": _safetensors(
        json.dumps({"\ud800": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    ),
}  # fmt: skip


@pytest.mark.one_of(count=7)
@pytest.mark.parametrize("name", FILES)
def test_what_once_did_harm_is_an_error_of_ours(victims: Victims, tmp_path: Path, name: str) -> None:
    """No signal, no other exception, no class changed, no more than 512 MiB and 5 s; and ``latest`` passes over it."""
    path = tmp_path / "run" / "ck"
    path.mkdir(parents=True)
    for file, data in FILES[name].items():
        (path / file).write_bytes(data)
    outcome = victims.run(look, path, sum(map(len, FILES[name].values())), below=path)
    assert (outcome.exit_code, outcome.error) == (0, None), outcome.traceback
    ends, wrong = outcome.result
    assert wrong == []
    assert "latest: success" in ends
    assert not {"inspect: success", "load: success"} & set(ends)


@pytest.mark.parametrize(
    "change", [{"time": 10**400}, {"time": "1"}, {"step": "7"}, {"save_id": "\ud800"}],
    ids=["huge time", "time as text", "step as text", "id that is no text"],
)  # fmt: skip
def test_a_summary_that_lies_is_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    dcp.save({"a": torch.ones(2)}, tmp_path / "old", step=1)
    dcp.save({"a": torch.ones(2)}, tmp_path / "new", step=2)
    change_summary(tmp_path / "new", **change)
    assert dcp.latest(tmp_path) == dcp.resolve_resume("auto", tmp_path) == tmp_path / "old"
    assert [state.committed for state in dcp.list_checkpoints(tmp_path) if state.path.name == "new"] == [False]


def test_a_sample_of_hostile_files(victims: Victims) -> None:
    found = [one for kind in KINDS for one in islice(cases(victims, 0, kind), 2)]
    assert [str(one) for one in found if one.wrong] == []


def _stock_of(count: int) -> dict[str, bytes]:
    keys = [f"model.layers.{number}.weight" for number in range(count)]
    properties, size = TensorProperties(dtype=torch.uint8), torch.Size([1])
    chunks = [ChunkStorageMetadata(torch.Size([0]), size)]
    state = {key: TensorStorageMetadata(properties, size, chunks) for key in keys}
    places = {MetadataIndex(key, torch.Size([0])): _StorageInfo("__0_0.distcp", at, 1) for at, key in enumerate(keys)}
    paths = {key: tuple(key.split(".", 1)) for key in keys}
    return {
        ".metadata": pickle.dumps(Metadata(state, planner_data=paths, storage_data=places)),  # type: ignore[arg-type]
        "__0_0.distcp": bytes(count),
    }


def _safetensors_of(count: int) -> dict[str, bytes]:
    return {"model.safetensors": save_tensors({f"layers.{n}.weight": torch.zeros(1) for n in range(count)})}


def _open(path: Path, seconds: int) -> int:
    """Ends with SIGXCPU if it takes longer, since the process began."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    return len(dcp.ShardedReader(path).index)


@pytest.mark.parametrize(("count", "seconds"), [(5_000, 20), pytest.param(1_000_000, 120, marks=pytest.mark.long)])
@pytest.mark.parametrize("make", [_stock_of, _safetensors_of])
def test_a_million_keys_open_in_a_minute_or_two(
    victims: Victims, tmp_path: Path, make: Callable[[int], dict[str, bytes]], count: int, seconds: int
) -> None:
    """Of processor time, on a slow machine."""
    for file, data in make(count).items():
        (tmp_path / file).write_bytes(data)
    assert victims.run(_open, tmp_path, seconds, below=tmp_path).result == count
