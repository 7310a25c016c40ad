"""What is at a path that is no DCP checkpoint: decided by the first bytes of files, and by which files are there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dcp_plugin.errors import CheckpointCorrupt, CheckpointNotFound
from dcp_plugin.format.foreign import safetensors, torch_file
from dcp_plugin.format.foreign.contents import Contents
from dcp_plugin.format.names import is_own
from dcp_plugin.media.disk import commit

_LOOKED_FOR = (
    "Looked for a directory with .metadata (dcp_plugin, torch.distributed.checkpoint), *.safetensors.index.json, "
    "*.bin.index.json, model.safetensors, pytorch_model.bin, pytorch_model_fsdp.bin, pytorch_model_fsdp_0/.metadata, "
    "shard-*-model-*.safetensors, or one file that is a safetensors or torch.save file; or such a file itself"
)

_MOST_LISTED = 1000
"""Files of a directory whose beginnings are looked at."""

_INDEX = ".index.json"
_NAMED = re.compile(r"(model|pytorch_model|pytorch_model_fsdp)(?:_(\d+))?\.(safetensors|bin)")
_LEGACY = b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # torch's magic number, as its pickles before 1.6 begin with it
_LFS = b"version https://git-lfs"
_RANDOM_STATES = "random_states_0.pkl"


def read(path: Path, reason: str) -> tuple[Path, Contents]:
    """What a file or directory has, with keys under the names of our conventions, and the directory of its files.

    Args:
        reason: Why it is no DCP checkpoint.

    Raises:
        CheckpointNotFound: It is nothing that can be read; the message says why, or lists what was looked for.
        CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: It is known, and cannot be read.
    """
    if path.is_dir():
        return path, _read_directory(path, reason)
    if not path.exists():
        raise _not_found(path, reason)
    if is_own(path.name) and path.is_file() and commit.looks_like_checkpoint(path.parent):
        raise _not_found(path, f"it is one of the files of {path.parent}. Name that directory")
    kind = kind_of_file(path)
    if kind not in _READ:
        raise _not_found(path, kind or f"the file begins like nothing that is known. {_LOOKED_FOR}")
    if kind == "safetensors" and (rank := safetensors.rank_of(path)) is not None:
        raise _not_found(path, f"it has what rank {rank} had of each tensor. Name the directory, {path.parent}")
    return path.parent, _as_model(_READ[kind](path))


def kind_of_file(path: Path) -> str:
    """``"safetensors"``, ``"torch.save"``, or what else it is in words; empty if that is not known."""
    if not path.is_file():
        return "it is no regular file"
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if head.startswith(b"PK\3\4"):
        return "torch.save"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= safetensors.MOST_HEADER:
        return "safetensors"
    if head.startswith(_LFS):
        return "it is a pointer of Git LFS; `git lfs pull` fetches the file itself"
    if _LEGACY in head:
        return (
            "it is a torch.save file from before torch 1.6; torch.save(torch.load(old, weights_only=True), new) makes "
            "one of today"
        )
    return ""


_READ = {"safetensors": safetensors.read_file, "torch.save": torch_file.read_file}


def _read_directory(path: Path, reason: str) -> Contents:
    indexes = sorted(filter(Path.is_file, path.glob(f"*{_INDEX}")), key=lambda index: "safetensors" not in index.name)
    named = _named(path)
    if indexes:
        contents = _read_shards(indexes[0])
    elif named:
        contents = _read_models(path, named)
    else:
        found = dict(_known_files(path))
        parts = _with_parts(path) if "safetensors" in found.values() else []
        if parts:
            return _as_model(safetensors.read_parts(parts))
        if len(found) != 1:
            names = ", ".join(sorted(found)[:8])
            several = f"it has {len(found)} files that could be meant, name one: {names}"
            raise _not_found(path, several if found else f"{reason}. {_LOOKED_FOR}")
        ((name, kind),) = found.items()
        contents = _as_model(_READ[kind](path / name))
    if (path / _RANDOM_STATES).exists():
        contents.format = "accelerate"
    return contents


def _named(path: Path) -> dict[int, str]:
    """The files of models by number, of the first format that is there."""
    found: dict[tuple[int, str], dict[int, str]] = {}
    order = ("model.safetensors", "pytorch_model_fsdp.bin", "pytorch_model.bin", "model.bin")
    for file in path.iterdir():
        match = _NAMED.fullmatch(file.name)
        family = f"{match[1]}.{match[3]}" if match else ""
        if match and family in order:
            found.setdefault((order.index(family), family), {})[int(match[2] or 0)] = file.name
    return found[min(found)] if found else {}


def _read_models(path: Path, named: dict[int, str]) -> Contents:
    """``model.safetensors``, ``model_1.safetensors``, …: Accelerate numbers them if there are several."""
    contents: Contents | None = None
    for number, name in sorted(named.items()):
        kind = kind_of_file(path / name)
        if kind not in _READ:
            raise CheckpointCorrupt(f"{path / name} is not what its name says: {kind or 'its contents are unknown'}")
        one = _as_model(_READ[kind](path / name))
        if len(named) > 1:
            one = _renamed(one, "model", f"model_{number}")
        if contents is None:
            contents = one
        else:
            contents.add(one)
    assert contents is not None
    return contents


def _with_parts(path: Path) -> list[Path]:
    """The safetensors files, if each of them has parts of the same tensors."""
    files = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    return files if all(map(safetensors.has_parts, files)) else []


def _known_files(path: Path) -> Iterator[tuple[str, str]]:
    """Files that begin like a known format, and which; those of ``torch.save`` only if there is no other."""
    files = [file for file in sorted(path.iterdir())[:_MOST_LISTED] if file.is_file()]
    kinds = {file.name: kind for file in files if (kind := kind_of_file(file)) in _READ}
    wanted = "safetensors" if "safetensors" in kinds.values() else "torch.save"
    yield from ((name, kind) for name, kind in kinds.items() if kind == wanted)


def _read_shards(index: Path) -> Contents:
    """The files that an index of Hugging Face's names, each of them once.

    Raises:
        CheckpointCorrupt: It names a file outside of its directory, one that is not there, or a key that is not in it.
    """
    try:
        with open(index, "rb") as file:
            data = file.read(safetensors.MOST_HEADER + 1)
        weights = json.loads(data)["weight_map"]
        if len(data) > safetensors.MOST_HEADER or not weights:
            raise ValueError("too large, or empty")
        if not all(isinstance(text, str) for pair in weights.items() for text in pair):
            raise TypeError("weight_map is not text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{index} is damaged: {error!r}") from error
    contents: Contents | None = None
    for name in dict.fromkeys(weights.values()):
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CheckpointCorrupt(f"{index} names {name!r}, which is no file beside it")
        shard = index.parent / name
        if not shard.is_file():
            raise CheckpointCorrupt(
                f"{index.parent}: {name} is missing, which {index.name} names: is the copy complete?"
            )
        kind = kind_of_file(shard)
        if kind not in _READ:
            raise CheckpointCorrupt(f"{shard} is no safetensors or torch.save file{kind and f': {kind}'}")
        read = _as_model(_READ[kind](shard))
        lost = [key for key, of in weights.items() if of == name and f"model.{key}" not in read.views]
        if lost:
            raise CheckpointCorrupt(f"{shard} has no {lost[0]}, which {index.name} says it has")
        read.views = {key: view for key, view in read.views.items() if weights.get(key.removeprefix("model.")) == name}
        if contents is None:
            contents = read
        else:
            contents.add(read)
    assert contents is not None
    return contents


def _as_model(contents: Contents) -> Contents:
    """A safetensors file has no names but those of one model."""
    if contents.format != "safetensors":
        return contents
    contents.views = {f"model.{key}": view for key, view in contents.views.items()}
    contents.parts = {f"model.{key}": parts for key, parts in contents.parts.items()}
    contents.kinds = {"model": "module"}
    return contents


def _renamed(contents: Contents, old: str, new: str) -> Contents:
    """The module and nothing else under another name: what is beside it would occur once for every model."""
    contents.views = {
        new + key.removeprefix(old): view for key, view in contents.views.items() if key.startswith(f"{old}.")
    }
    contents.values = {}
    contents.kinds = {new: "module"}
    return contents


def _not_found(path: Path, reason: str) -> CheckpointNotFound:
    if not os.path.lexists(path):
        return CheckpointNotFound(f"{path} is not a checkpoint: nothing is there.")
    inside = next(_checkpoints_in(path), None)
    if inside is not None:
        return CheckpointNotFound(
            f"{path} is not a checkpoint: it has checkpoints in it, such as {inside}. Name one of them; "
            f"dcp_plugin.latest({str(path)!r}) finds the newest."
        )
    return CheckpointNotFound(f"{path} is not a checkpoint: {reason}.")


def _checkpoints_in(path: Path) -> Iterator[Path]:
    """What the directory of a run has: it is named easily in place of the checkpoint."""
    if path.is_dir():
        for child in sorted(path.iterdir())[:_MOST_LISTED]:
            if child.name != commit.WORKSPACE and commit.looks_like_checkpoint(child):
                yield child
