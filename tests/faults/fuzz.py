"""Hostile files, made from a grammar: pickles, indexes, summaries, safetensors, zips, and what torch saved long ago.

Each case is a real file with something hostile in it, at the places that its format has: opcodes of a pickle, nodes of
a JSON text, columns of an index whose hash fits. It is looked at in every way in a process of its own. What may come of
it is success or an error of ours: no signal, no other exception, no code executed, no class changed, and no more memory
and time than a file of that size is worth. ``python -m tests.faults fuzz --minutes 30 --seed 0``.
"""

from __future__ import annotations

import collections
import hashlib
import io
import itertools
import json
import logging
import os
import pathlib
import pickle
import pickletools
import random
import resource
import shutil
import struct
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as stock
from safetensors import safe_open
from safetensors.numpy import save as save_columns
from safetensors.torch import save as save_tensors
from torch.distributed.checkpoint import metadata as stock_metadata

import dcp_plugin as dcp
from dcp_plugin.core.format.summary import OtherFormat, with_hash
from tests.faults.campaign import Campaign, Parts
from tests.faults.victims import Victims
from tests.forge import change_summary

_COLLIDES = (1 << 61) - 1
"""Multiples of it have the same hash."""
CPU_SECONDS = 5
MOST_MEMORY = 512 << 20
PROOF = "executed"
"""What a pickle makes in its directory if it is executed."""

STATE = {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, "note": {"n": 1, "text": ["a", (1, 2)]}}
_TENSORS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
_WATCHED = (
    pathlib.Path, pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PurePath, collections.OrderedDict, torch.Size,
    torch.Tensor, torch.nn.Parameter, *(one for one in vars(stock_metadata).values() if isinstance(one, type)),
)  # fmt: skip


# What is hostile


def _nested(rng: random.Random) -> bytes:
    """Tuples, or lists, in each other, some thousand or some hundred thousand deep."""
    depth = rng.choice([900, 5_000, 200_000])
    return rng.choice([b")" + b"\x85" * depth, b"]" * depth + b"a" * (depth - 1), b"(" * depth + b"t" * depth])


def _name(rng: random.Random) -> bytes:
    module, name = rng.choice(
        [
            ("posix", "mkdir"), ("builtins", "eval"), ("builtins", "getattr"), ("builtins", "bytearray"),
            ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("torch", "Size"), ("torch", "float32"),
            ("collections", "OrderedDict"), ("builtins", "set"), ("_codecs", "encode"), ("torch.load", "x"),
            ("torch._utils", "_rebuild_tensor_v2"), ("torch._tensor", "_rebuild_from_type_v2"),
            *((f"{stock_metadata.__name__}", one) for one in ("Metadata", "MetadataIndex", "StorageMeta")),
            (stock_metadata.__name__, "os.mkdir"), ("torch.nn.parameter", "Parameter"), ("builtins", "frozenset"),
        ]
    )  # fmt: skip
    if rng.random() < 0.3:
        short = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)]
        return b"".join(short) + b"\x93"
    return f"c{module}\n{name}\n".encode()


def _text(rng: random.Random) -> bytes:
    text = rng.choice([PROOF, "a", "..", "/etc/passwd", "w", "latin-1", "\0", "x" * 5_000, "is_absolute"]).encode()
    return b"X" + len(text).to_bytes(4, "little") + text


def _number(rng: random.Random) -> bytes:
    size = rng.choice([1, 8, 9, 255])
    return rng.choice(
        [b"K\1", b"J\xff\xff\xff\xff", b"\x8a" + bytes([size]) + rng.randbytes(size), b"J\0\0\0\x7f", b"G" + bytes(8)]
    )


def _huge(rng: random.Random) -> bytes:
    """A few bytes that say how many come."""
    size = rng.choice([1 << 20, 1 << 28, (1 << 31) - 1])
    four, eight = size.to_bytes(4, "little"), (size << rng.choice([0, 20])).to_bytes(8, "little")
    return rng.choice(
        [b"Nr" + four, b"j" + four, b"X" + four, b"B" + four, b"\x8b" + four, b"\x8d" + eight, b"\x8e" + eight,
         b"\x95" + eight, b"\x96" + eight, b"T" + four, b"\x82\1", b"\x84" + four]
    )  # fmt: skip


def _endless(rng: random.Random) -> bytes:
    """Containers of which each has another one twice, filled from the inside out or from the outside in; an array of
    elements without bytes."""
    levels = rng.choice([3, 12, 20, 60])
    put, get = ([code + (9_000 + n).to_bytes(4, "little") for n in range(levels + 1)] for code in (b"r", b"j"))
    start, end = rng.choice(
        [(b"(", b"t"), (b"](", b"e"), (b"}(K\0", b"K\1Nu"), (b"cbuiltins\nfrozenset\n](", b"e\x85R")]
    )
    inside = b")" + put[0] + b"".join(b"0" + start + get[n] * 2 + end + put[n + 1] for n in range(levels))
    outside = b"".join(b"]" + one + b"0" for one in put)
    outside += b"".join(get[n] + b"(" + get[n + 1] * 2 + b"e0" for n in range(levels)) + get[0]
    dtype = b"cnumpy\ndtype\n(X\2\0\0\0V0\x89\x88tR(K\3X\1\0\0\0|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    empty = b"c_codecs\nencode\nX\0\0\0\0X\6\0\0\0latin1\x86R"
    array = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85" + empty + b"tR"
    array += (
        b"(K\1\x8a\6" + rng.choice([b"\5", b"\0\0\0\0\0\1"]).ljust(6, b"\0") + b"\x85" + dtype + b"\x89" + empty + b"tb"
    )
    return rng.choice([inside, outside, array])


def _attack(rng: random.Random) -> bytes:
    """Something complete that leaves one object."""
    text, name, number, nested = _text(rng), _name(rng), _number(rng), rng.choice([_nested, _endless])(rng)
    many = rng.choice([1_000, 20_000])
    return rng.choice(
        [
            name + text + b"\x85R", name + number + b"\x85R", name + b")\x81" + b"}(" + text + number + b"ub",
            name + b"}(" + text + number + b"ub", name + b"N}" + text + number + b"s\x86b", text + b"Q",
            b"}" + nested + b"Ns", b"}(" + nested + b"N" + text + b"Nu", b"\x8f(" + nested + b"\x90",
            b"}(" + b"".join(b"\x8a\x0a" + (n * _COLLIDES).to_bytes(10, "little") + b"N" for n in range(many)) + b"u",
            name + b"(" + number * many + b"tR", name + nested + b"R", name + b"]" + b"\x85R", nested, text, number,
            b"X" + (100_000).to_bytes(4, "little") + b"x" * 100_000 + b"q\xf0" + (name + b"h\xf0\x85R0") * many + b"N",
            b"(" + b"N" * many + b"tq\xf0" + (name + b"h\xf0\x85R0") * many + b"N",
        ]
    )  # fmt: skip


def hostile_pickle(rng: random.Random, honest: bytes) -> bytes:
    """An honest pickle with attacks and losses at the borders of its opcodes."""
    starts = [place for _, _, place in pickletools.genops(honest) if place is not None]
    tokens = [honest[begin:end] for begin, end in zip(starts, [*starts[1:], len(honest)], strict=True)]
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(1, len(tokens))
        match rng.randrange(7):
            case 0:
                tokens.insert(at, _attack(rng))
            case 1:
                tokens[at] = _attack(rng)
            case 2:
                tokens.insert(at, rng.choice([_huge, _name, _text, _number, _nested, _endless])(rng))
            case 3:
                del tokens[at]
            case 4:
                tokens.insert(at, rng.choice(tokens))
            case 5:
                tokens.insert(at, _attack(rng) + b"0")
            case 6:
                values = [n for n, token in enumerate(tokens) if token[:1] in b"KMJX\x8ch"] or [at]
                tokens[rng.choice(values)] = _attack(rng)
    return b"".join(tokens)


def _node(rng: random.Random) -> Any:
    return rng.choice(
        [None, -1, 1 << 62, 1 << 64, 10**400, 1.5, float("nan"), float("inf"), "", "\0", "\ud800", "../w",
         "/etc/passwd", [], {}, [[]] * 3, [1] * 70, "x" * 5_000, True, [None], {"": 0}, -(1 << 63), "9" * 5_000]
    )  # fmt: skip


def hostile_json(rng: random.Random, said: Any) -> bytes:
    """A JSON text with other values at some of its nodes, or nested without end."""
    said = json.loads(json.dumps(said))
    for _ in range(rng.choice([1, 1, 3])):
        places: list[tuple[Any, Any]] = []
        todo = [said]
        while todo:
            one = todo.pop()
            if isinstance(one, (dict, list)):
                places += [(one, key) for key in (one if isinstance(one, dict) else range(len(one)))]
                todo += one.values() if isinstance(one, dict) else one
        if places:
            owner, key = rng.choice(places)
            owner[key] = _node(rng)
    text = json.dumps(said).encode()
    match rng.randrange(12):
        case 0:
            return b"[" * 200_000
        case 1:
            return text.replace(b":", b":" + b'{"a":' * 5_000, 1)
        case 2:
            return text[: rng.randrange(len(text))]
        case 3:
            return text.replace(b"0", b"9" * 5_000, 1)
    return text


# Files with it


def _stock(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save(STATE, checkpoint_id=path, no_dist=True)


def _stock_metadata(rng: random.Random, path: Path) -> None:
    _stock(path)
    file = path / ".metadata"
    file.write_bytes(hostile_pickle(rng, file.read_bytes()))


def _metadata_of_ours(rng: random.Random, path: Path) -> None:
    """It is no save of ours any more, so it is read."""
    dcp.save(STATE, path)
    file = path / ".metadata"
    save_id = _said(path)["save_id"].encode()
    file.write_bytes(hostile_pickle(rng, file.read_bytes().replace(save_id, save_id[::-1])))


def _said(path: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((path / "dcp_plugin.json").read_text())
    return said


def _sign(path: Path) -> None:
    """Have the summary fit the index."""
    change_summary(path, index_sha256=hashlib.sha256((path / "dcp_plugin.index").read_bytes()).hexdigest())


def _index(rng: random.Random, path: Path) -> None:
    dcp.save(STATE, path)
    file = path / "dcp_plugin.index"
    with safe_open(str(file), framework="numpy") as opened:
        about = dict(opened.metadata())
        columns = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    kind = rng.randrange(5)
    if kind == 0:
        name = rng.choice(["dtypes", "files", "paths"])
        about[name] = hostile_json(rng, json.loads(about[name])).decode(errors="replace")
    elif kind == 1:
        about[rng.choice(list(about))] = str(_node(rng)).encode(errors="replace").decode()
    elif kind == 2:
        data = _archive(rng, {"planner": 1})
        columns["planner_data"] = np.frombuffer(data, np.uint8)
    elif kind == 3:  # a row that stands for many chunks, which may have hashes
        row, count = rng.randrange(len(columns["box_count"])), rng.choice([2, 3, 1000, 1 << 30])
        columns["box_count"][row] = columns["item_count"][row] = count
        columns["file_step"][row] = rng.choice([0, 1])
        columns["hash"] = np.resize(columns["hash"], rng.choice([len(columns["hash"]) + count % 10_000 - 1, 5000]))
    for _ in range(rng.choice([1, 2])):
        column = columns[rng.choice(list(columns))]
        if column.size and kind != 2:
            limit = (1 << (8 * column.itemsize - 1)) - 1
            column.reshape(-1)[rng.randrange(column.size)] = rng.choice([0, 1, 255 & limit, limit, limit // 2])
    file.write_bytes(save_columns(columns, metadata=about))
    _sign(path)


def _summary(rng: random.Random, path: Path) -> None:
    dcp.save(STATE, path)
    said = _said(path)
    del said["sha256"]
    data = hostile_json(rng, said)
    with suppress(ValueError, TypeError, AttributeError, RecursionError):  # else nothing that could be signed
        data = with_hash(json.loads(data))
    (path / "dcp_plugin.json").write_bytes(data)


def _archive(rng: random.Random, value: Any) -> bytes:
    """A ``torch.save`` file with a hostile pickle, or a zip that lies."""
    buffer, made = io.BytesIO(), io.BytesIO()
    torch.save(value, buffer)
    how = rng.randrange(5)
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(made, "w") as out:
        for info in archive.infolist():
            data = archive.read(info)
            if info.filename.endswith("data.pkl") and how != 4:
                data = hostile_pickle(rng, data)
            method = zipfile.ZIP_DEFLATED if how == 3 else zipfile.ZIP_STORED
            if how == 3 and info.filename.endswith("data.pkl"):
                data = data[:-1] + b")" * 50_000_000 + b"."
            out.writestr(info.filename, data, method)
    data = bytearray(made.getvalue())
    if how == 4:
        for _ in range(rng.choice([1, 4])):
            entry = data.rfind(rng.choice([b"PK\1\2", b"PK\3\4", b"PK\5\6"]), 0, rng.randrange(len(data)) + 4)
            at = min(max(entry, 0) + rng.randrange(50), len(data) - 5)
            data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", rng.randbytes(4), b"\xff\xff\xff\x7f"])
    return bytes(data)


def _torch_file(rng: random.Random, path: Path) -> None:
    path.mkdir()
    state = {"state_dict": _TENSORS, "step": 1, "extra": {"x": (1, 2)}}
    (path / "model.ckpt").write_bytes(_archive(rng, state))


def _value(rng: random.Random, path: Path) -> None:
    """A value of a stock checkpoint, as an item of its own."""
    _stock(path)
    data = _archive(rng, {"n": [1, (2, 3)]}) if rng.random() < 0.8 else hostile_pickle(rng, pickle.dumps({"n": 1}, 2))
    (path / "value").write_bytes(data)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for item in metadata.storage_data:
        if item.fqn == "note.n":
            metadata.storage_data[item] = type(metadata.storage_data[item])("value", 0, len(data))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _safetensors(rng: random.Random, path: Path) -> None:
    path.mkdir()
    data = save_tensors(_TENSORS)
    length = int.from_bytes(data[:8], "little")
    header = hostile_json(rng, json.loads(data[8 : 8 + length]))
    size = rng.choice([len(header)] * 8 + [1 << 62, len(header) + 1, 99_999_999])
    (path / "model.safetensors").write_bytes(struct.pack("<Q", size) + header + data[8 + length :])


def _shards(rng: random.Random, path: Path) -> None:
    path.mkdir()
    (path / "part-1.safetensors").write_bytes(save_tensors(_TENSORS))
    said = {"metadata": {"total_size": 40}, "weight_map": dict.fromkeys(_TENSORS, "part-1.safetensors")}
    (path / "model.safetensors.index.json").write_bytes(hostile_json(rng, said))


def _deepspeed(rng: random.Random, path: Path) -> None:
    """Files of ZeRO 2 or 3 of two ranks, or a universal checkpoint: one of them is hostile."""
    stage, flat = rng.choice([2, 3]), torch.arange(5.0)
    shapes, frozen = [{"w": torch.Size((2, 3)), "b": torch.Size((4,))}], {"f": torch.Size((3,))}
    model: dict[str, Any] = {"module": _TENSORS, "param_shapes": shapes, "buffer_names": ["b"], "dp_world_size": 2}
    model |= {"shared_params": {"tied": "w"}, "frozen_param_shapes": frozen, "global_steps": 1}
    model["frozen_param_fragments"] = {"f": torch.ones(2)}
    adam = {"state": {0: {"step": 1, "exp_avg": flat}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    keys = ("optimizer_state_dict", "fp32_flat_groups") if stage == 3 else _OF_ZERO_2
    optimizer = {"optimizer_state_dict": {"partition_count": 2, keys[0]: adam, keys[1]: [flat]}}
    names: dict[str, Any] = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": optimizer for rank in range(2)}
    prefixes = [f"zero_pp_rank_{rank}_" for rank in range(2)] if stage == 3 else [""]
    names |= {f"{prefix}mp_rank_00_model_states.pt": model for prefix in prefixes}
    if rng.random() < 0.3:
        names["zero/optimizer_state.pt"] = adam
        names |= {f"zero/{key}/fp32.pt": {"param": value} for key, value in _TENSORS.items()}
        names["zero/w/step.pt"] = 1
    hostile = rng.choice(list(names))
    for name, value in names.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        if name == hostile:
            (path / name).write_bytes(_archive(rng, value))
        else:
            torch.save(value, path / name)
    if rng.random() < 0.1:
        (path / "latest").write_bytes(_text(rng)[5:])


_OF_ZERO_2 = ("base_optimizer_state", "single_partition_of_fp32_groups")


def _legacy(rng: random.Random, path: Path) -> None:
    path.mkdir()
    buffer = io.BytesIO()
    torch.save({"state_dict": _TENSORS}, buffer, _use_new_zipfile_serialization=False)
    data = bytearray(buffer.getvalue())
    at = rng.randrange(len(data))
    data[at : at + 1] = _attack(rng)
    (path / "pytorch_model.bin").write_bytes(data)


KINDS: dict[str, Callable[[random.Random, Path], None]] = {
    "stock metadata": _stock_metadata, "metadata of ours": _metadata_of_ours, "index": _index, "summary": _summary,
    "torch file": _torch_file, "value": _value, "safetensors": _safetensors, "shards": _shards, "legacy": _legacy,
    "deepspeed": _deepspeed,
}  # fmt: skip


# Looking at it


def _load(path: Path) -> None:
    state = {"model": {name: torch.zeros_like(one) for name, one in _TENSORS.items()}, "note": {"n": 0, "text": None}}
    dcp.load(state, path, dcp.PartialLoad(missing="ignore"), strict=False)


def _again(path: Path) -> None:
    """What is read can be saved, and compared."""
    with tempfile.TemporaryDirectory() as made:
        dcp.save(dcp.read(path), Path(made, "ck"))
        dcp.read(Path(made, "ck"))
        dcp.diff(path, Path(made, "ck"))


WAYS: dict[str, Callable[[Path], Any]] = {
    "latest": lambda path: dcp.latest(path.parent),
    "list": lambda path: dcp.list_checkpoints(path.parent),
    "resume": lambda path: dcp.resolve_resume("auto", path.parent),
    "inspect": dcp.inspect,
    "verify": dcp.verify,
    "load": _load,
    "again": _again,
}
_NEVER_RAISE = ("latest", "list")
"""Except that ``latest`` refuses to pass over the checkpoint of another version: a start would replace it."""


def look(path: Path, size: int) -> tuple[list[str], list[str]]:
    """Look at a checkpoint in every way: how each ended, and what should not have been."""
    warnings.simplefilter("ignore")
    logging.disable()
    os.chdir(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent.parent) as made:  # what the first load imports, it changes
        dcp.save(STATE, Path(made, "ck"))
        _load(Path(made, "ck"))
    used = _memory()
    limit = _address_space() + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = {cls: dict(vars(cls)) for cls in _WATCHED}
    ends, wrong = [], []
    for name, way in WAYS.items():
        begun = time.process_time()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        targets = [path, *sorted(path.glob("model.ckpt"))] if name in ("inspect", "load") else [path]
        for target in targets:
            end = "success"
            try:
                way(target)
            except dcp.CheckpointError as error:
                end = type(error).__name__
                if name in _NEVER_RAISE and not (name == "latest" and isinstance(error, OtherFormat)):
                    wrong.append(f"{name} raises {error!r}")
            except BaseException as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                wrong.append(f"{name}: {error!r:.200} at {place.filename}:{place.lineno}")
                end = "another error"
            ends.append(f"{name}: {end}")
        if (took := time.process_time() - begun) > CPU_SECONDS:
            wrong.append(f"{name} takes {took:.1f} s")
        if (more := _memory() - used) > max(MOST_MEMORY, 40 * size):
            wrong.append(f"{name} takes {more >> 20} MiB")
    changed = [cls.__name__ for cls, was in before.items() if dict(vars(cls)) != was]
    if changed:
        wrong.append(f"changed classes: {changed}")
    return ends, wrong


def _memory() -> int:
    """The most that this process has used."""
    said = Path("/proc/self/status").read_text()
    return int(said.partition("VmHWM:")[2].split()[0]) << 10


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@dataclass(frozen=True)
class Found:
    """How a case ended."""

    kind: str
    case: str
    ends: list[str]
    wrong: list[str]

    def __str__(self) -> str:
        return f"{self.kind}, case {self.case}: {'; '.join(self.wrong)}"


def cases(victims: Victims, seed: int, kind: str) -> Iterator[Found]:
    """Cases without end. The same seed makes the same ones."""
    return (one_case(victims, kind, f"{seed}-{number}") for number in itertools.count())


def one_case(victims: Victims, kind: str, case: str) -> Found:
    root = Path(tempfile.mkdtemp(prefix="dcp-fuzz-"))
    try:
        path = root / "run" / "ck"
        path.parent.mkdir()
        KINDS[kind](random.Random(f"{kind}-{case}"), path)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        outcome = victims.run(look, path, size, below=path)
        ends, wrong = outcome.result or ([], [])
        if outcome.error is not None or outcome.exit_code:
            wrong = [*wrong, f"ended with {outcome.exit_code} {outcome.error!r}"]
        if (root / "run" / PROOF).exists():
            wrong = [*wrong, "executed code"]
        return Found(kind, case, ends, wrong)
    finally:
        shutil.rmtree(root)


def _parts(chosen: Any) -> Parts:
    kinds = [kind for kind in KINDS if chosen.only in kind]
    ends: collections.Counter[str] = collections.Counter()

    def found(victims: Victims, kind: str) -> Iterator[str]:
        until = time.monotonic() + 60 * chosen.minutes / len(kinds)
        for one in [one_case(victims, kind, chosen.case)] if chosen.case else cases(victims, chosen.seed, kind):
            ends.update(one.ends)
            yield str(one) if one.wrong else ""
            if time.monotonic() > until:
                return

    with Victims() as victims:
        for kind in kinds:
            yield kind, found(victims, kind)
    for name, count in sorted(ends.items()):
        print(f"{name}: {count}")


CAMPAIGN = Campaign(__doc__, _parts, {"minutes": 30.0, "seed": 0, "case": ""})
