"""Detection and reading of checkpoints of other tools.

For a path that is no DCP checkpoint, the format follows from the first bytes of its files and from their names.
Lightning and Accelerate also save sharded checkpoints that are DCP's, with names of their own. Each becomes one index
with our names.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable

from dcp_plugin.core.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointUnreadable,
    UnsafeCheckpoint,
)
from dcp_plugin.core.format import METADATA, Files, derived_index, exists, read, stock_metadata
from dcp_plugin.core.format.foreign import Contents, safetensors, torch_file
from dcp_plugin.core.format.index import CheckpointIndex
from dcp_plugin.core.format.torch_archive import MAGIC

_LOOKED_FOR = (
    "Looked for a directory with .metadata (dcp_plugin, torch.distributed.checkpoint), *.safetensors.index.json, "
    "*.bin.index.json, model.safetensors, pytorch_model.bin, pytorch_model_fsdp.bin, pytorch_model_fsdp_0/.metadata, "
    "model_world_size_*_rank_*.pt, pytorch_model_fsdp_*_rank*.bin, "
    "zero_pp_rank_*_optim_states.pt or a file latest that names their folder (DeepSpeed), "
    "shard-*-model-*.safetensors, or one file that is a safetensors or torch.save file; or such a file itself"
)

_MOST_LISTED = 1000
"""Most files of a directory of which the first bytes are read."""

_MOST_TAG = 256
"""Longest name in a file ``latest``, in bytes."""

INDEX = ".index.json"
_OF_ORBAX = frozenset({"_CHECKPOINT_METADATA", "manifest.ocdbt", "orbax.checkpoint"})
_FROM_ORBAX = (
    "it is a checkpoint of Orbax. Where JAX is installed, write its arrays as safetensors: "
    "safetensors.flax.save_file(flax.traverse_util.flatten_dict(orbax.checkpoint.PyTreeCheckpointer().restore({!r}), "
    "sep='.'), 'model.safetensors')"
)
_FAMILIES = ("model.safetensors", "pytorch_model_fsdp.bin", "pytorch_model.bin", "model.bin")
_NAMED = re.compile(r"(model|pytorch_model|pytorch_model_fsdp)(?:_(\d+))?\.(safetensors|bin)")
_LEGACY = b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # torch's magic number, as its pickles before 1.6 begin with it
_LFS = b"version https://git-lfs"
_RANDOM_STATES = "random_states_0.pkl"
_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)")
_LIGHTNING_OPTIMIZER = re.compile(r"optimizer_(\d+)")

META = "meta.pt"
"""File that Lightning and Fabric add to a sharded checkpoint: all state but modules and optimizers."""

Kinds = dict[str, str]


def read_file(files: Files, name: str) -> Contents:
    """Return the contents of one file, with keys under the names of our conventions.

    Raises:
        CheckpointNotFound: The file cannot be read as a checkpoint; the message says why.
        CheckpointCorrupt, CheckpointMismatch, UnsafeCheckpoint: The format is known, and the file cannot be read.
    """
    if name.endswith(INDEX):
        return _read_shards(files, name)
    kind = kind_of_file(files, name)
    if kind not in _READ:
        raise not_found(f"{files.where}/{name}", kind or f"the file begins like nothing that is known. {_LOOKED_FOR}")
    if kind == "safetensors" and (rank := safetensors.rank_of(files, name)) is not None:
        reason = f"it has what rank {rank} had of each tensor. Name the directory, {files.where}"
        raise not_found(f"{files.where}/{name}", reason)
    if (of_deepspeed := torch_file.FILE_OF_DEEPSPEED.fullmatch(name)) and of_deepspeed[1]:
        reason = f"it has the parts of rank {of_deepspeed[1]} alone. Name the directory, {files.where}"
        raise not_found(f"{files.where}/{name}", reason)
    try:
        return _READ[kind](files, name)
    except (CheckpointMismatch, UnsafeCheckpoint) as error:
        if rank_file := torch_file.RANK_FILE.fullmatch(name):
            reason = (
                f"it has the shards of rank {rank_file[3] or rank_file[6]} alone. Name the directory, {files.where}"
            )
            raise not_found(f"{files.where}/{name}", reason) from error
        raise


def kind_of_file(files: Files, name: str) -> str:
    """Return ``"safetensors"``, ``"torch.save"``, or another kind in words; empty if the kind is unknown."""
    try:
        with files.open(name) as file:
            head = file.read(64)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if head.startswith(MAGIC):
        return "torch.save"
    # safetensors has no magic number: a plausible length of the header and the first character of its JSON are enough.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= safetensors.MOST_HEADER:
        return "safetensors"
    if head.startswith(_LFS):
        return "it is a pointer of Git LFS; `git lfs pull` fetches the file itself"
    if name.endswith(".nemo"):
        return f"it is a tar archive of NeMo; `tar -xf {name}` gives its model_weights.ckpt, or its folder of weights"
    if _LEGACY in head:
        return (
            "it is a torch.save file from before torch 1.6; torch.save(torch.load(old, weights_only=True), new) makes "
            "one of today"
        )
    return ""


_READ = {"safetensors": safetensors.read_file, "torch.save": torch_file.read_file}


def read_directory(files: Files, reason: str) -> Contents:
    """Return the joint contents of the files of a directory; otherwise as :func:`read_file`.

    Args:
        reason: Why it is no DCP checkpoint.

    Raises:
        CheckpointNotFound: As :func:`read_file`; the message has ``reason`` and lists the names that were looked for.
    """
    names = [name for name in files.names() if not name.endswith("/")]
    indexes = sorted((name for name in names if name.endswith(INDEX)), key=lambda name: "safetensors" not in name)
    if indexes:
        contents = _read_shards(files, indexes[0])
    elif models := _models_in(names):
        contents = _read_models(files, models)
    elif any(map(torch_file.RANK_FILE.fullmatch, names)):
        from dcp_plugin.core.format.foreign import rank_files  # few checkpoints have them

        contents = rank_files.read_files(files, names)
    elif (prefix := _folder_of_deepspeed(files, names)) is not None:
        from dcp_plugin.core.format.foreign import zero  # few checkpoints have them

        contents = zero.read_folder(files, prefix)
    else:
        kinds = {name: kind for name in names[:_MOST_LISTED] if (kind := kind_of_file(files, name)) in _READ}
        wanted = "safetensors" if "safetensors" in kinds.values() else "torch.save"
        matching = [name for name, kind in kinds.items() if kind == wanted]
        parts = [name for name in names if name.endswith(".safetensors")] if wanted == "safetensors" else []
        if parts and all(safetensors.has_parts(files, name) for name in parts):
            return safetensors.read_parts(files, parts)
        if len(matching) != 1:
            several = f"it has {len(matching)} files that could be meant, name one: {', '.join(matching[:8])}"
            unknown = f"{reason}. {_LOOKED_FOR}" if _OF_ORBAX.isdisjoint(names) else _FROM_ORBAX.format(files.where)
            raise not_found(files.where, several if matching else unknown)
        contents = _READ[wanted](files, matching[0])
    if _RANDOM_STATES in names:
        contents.format = "accelerate"
    return contents


def _folder_of_deepspeed(files: Files, names: list[str]) -> str | None:
    """Return the folder with the files of DeepSpeed's ranks, as a prefix of their names; None if there is none.

    It is the folder itself, or the folder that a file ``latest`` in it names.
    """
    if any(map(torch_file.FILE_OF_DEEPSPEED.fullmatch, names)):
        return ""
    for pointer in ("latest", "latest_universal"):
        if pointer in names:
            tag = read(files, pointer, _MOST_TAG).decode(errors="replace").strip()
            if f"{tag}/" in files.names() and any(exists(files, f"{tag}/{name}") for name in torch_file.OF_DEEPSPEED):
                return f"{tag}/"
    return None


def _models_in(names: list[str]) -> dict[int, str]:
    """Return the files of models by number, all of the first format that the directory has."""
    by_family: dict[str, dict[int, str]] = {}
    for match in filter(None, map(_NAMED.fullmatch, names)):
        by_family.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2] or 0)] = match[0]
    return next((by_family[family] for family in _FAMILIES if family in by_family), {})


def _read_models(files: Files, models: dict[int, str]) -> Contents:
    """Return the contents of ``model.safetensors``, ``model_1.safetensors``, …, the names of Accelerate's models."""
    contents = []
    for number, name in sorted(models.items()):
        kind = kind_of_file(files, name)
        if kind not in _READ:
            why = kind or "its contents are unknown"
            raise CheckpointCorrupt(f"{files.where}/{name} has another format than its name: {why}")
        model = _READ[kind](files, name)
        contents.append(_renamed(model, "model", f"model_{number}") if len(models) > 1 else model)
    return functools.reduce(Contents.add, contents)


def _read_shards(files: Files, index: str) -> Contents:
    """Return the contents of the files that a Hugging Face index names, each file once.

    Raises:
        CheckpointCorrupt: The index names a file outside its directory, a missing file, or a key that its file lacks.
    """
    path = f"{files.where}/{index}"
    try:
        data = read(files, index, safetensors.MOST_HEADER + 1)
        weights = json.loads(data)["weight_map"]
        if len(data) > safetensors.MOST_HEADER or not weights:
            raise ValueError("too large, or empty")
        if not all(isinstance(text, str) for pair in weights.items() for text in pair):
            raise TypeError("weight_map is not text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} is damaged: {error!r}") from error
    keys_of: dict[str, list[str]] = {}
    for key, name in weights.items():
        keys_of.setdefault(name, []).append(key)
    return functools.reduce(Contents.add, (_read_shard(files, index, name, keys) for name, keys in keys_of.items()))


def _read_shard(files: Files, index: str, name: str, keys: list[str]) -> Contents:
    """Return the contents of a shard, restricted to the keys that the index assigns to it."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise CheckpointCorrupt(f"{files.where}/{index} names {name!r}, which is not a file in the same directory")
    if not exists(files, name):
        raise CheckpointCorrupt(f"{files.where}: {name} is missing, but {index} names it. Is the copy complete?")
    kind = kind_of_file(files, name)
    if kind not in _READ:
        raise CheckpointCorrupt(f"{files.where}/{name} is not a safetensors or torch.save file{kind and f': {kind}'}")
    shard = _READ[kind](files, name)
    wanted = {f"model.{key}": key for key in keys}
    lost = [key for stored, key in wanted.items() if stored not in shard.views]
    if lost:
        raise CheckpointCorrupt(f"{files.where}/{name} does not contain {lost[0]}, but {index} lists it there")
    shard.views = {stored: view for stored, view in shard.views.items() if stored in wanted}
    return shard


def _renamed(contents: Contents, old: str, new: str) -> Contents:
    """Return only the module, under another name. The other values would occur once for every model."""
    contents.views = {
        new + key.removeprefix(old): view for key, view in contents.views.items() if key.startswith(f"{old}.")
    }
    contents.values = {}
    contents.kinds = {new: "module"}
    return contents


def not_found(label: str, reason: str) -> CheckpointNotFound:
    return CheckpointNotFound(f"{label} is not a checkpoint: {reason}.")


def lightning_names(names: Iterable[str]) -> dict[str, str]:
    """Return our names for the first segments of the keys in Lightning's sharded directory.

    FSDP1 writes ``model``, and ModelParallel ``state_dict``; both become ``model``. Both write ``optimizer_0``,
    ``optimizer_1``, …: a single optimizer becomes ``optim``, several become ``optim_0``, ``optim_1``, … All other names
    stay, and so do names that are already ours.
    """
    names = list(dict.fromkeys(names))
    optimizers = [name for name in names if _LIGHTNING_OPTIMIZER.fullmatch(name)]
    renamed = {name: name.replace("optimizer", "optim") if len(optimizers) > 1 else "optim" for name in optimizers}
    return {name: renamed.get(name, "model" if name == "state_dict" else name) for name in names}


def is_of_lightning(files: Files) -> bool:
    """Return whether Lightning wrote ``meta.pt``. Fabric writes such a file too, but its names are the user's own."""
    try:
        return torch_file.LIGHTNING.encode() in torch_file.pickle_of(files, META)
    except CheckpointUnreadable:
        raise
    except CheckpointError:
        return False


def lightning_index(files: Files) -> tuple[CheckpointIndex, Kinds]:
    """Return the index of a sharded directory of Lightning (``.metadata`` and ``meta.pt``), with our names."""
    index = stock_metadata.read_index(files)
    names = lightning_names(key.partition(".")[0] for key in index)
    renamed = derived_index.renamed(index, names)
    renamed.validate(files.where)
    return renamed, _kinds(names.values())


def is_of_accelerate(folder: str) -> bool:
    """Return whether a folder has the name of a folder in Accelerate's checkpoints."""
    return _ACCELERATE.fullmatch(folder) is not None


def accelerate_folders(files: Files) -> list[str]:
    """Return the DCP checkpoints in a folder of ``Accelerator.save_state`` under FSDP: models, then optimizers."""
    named = [name.rstrip("/") for name in files.names() if name.endswith("/")]
    folders = [name for name in named if is_of_accelerate(name) and exists(files, f"{name}/{METADATA}")]
    models = [name for name in folders if not name.startswith("optimizer")]
    return sorted(folders, key=lambda name: (name.startswith("optimizer"), len(name), name)) if models else []


def accelerate_index(files: Files, folders: list[str]) -> tuple[CheckpointIndex, Kinds]:
    """Return one index of these checkpoints: ``model`` and ``optim``, or ``model_0``, … if there are several."""
    names = [_accelerate_name(folder, folders) for folder in folders]
    parts = []
    for folder, name in zip(folders, names, strict=True):
        index = stock_metadata.read_index(files, f"{folder}/")
        parts.append(derived_index.renamed(index, {key.partition(".")[0]: name for key in index}, below=folder))
    joined = functools.reduce(derived_index.joined, parts)
    joined.validate(files.where)
    return joined, _kinds(names)


def _accelerate_name(folder: str, folders: list[str]) -> str:
    match = _ACCELERATE.fullmatch(folder)
    assert match
    several = sum(other.startswith(match[1]) for other in folders) > 1
    name = "optim" if match[1] == "optimizer" else "model"
    return f"{name}_{match[2]}" if several else name


def _kinds(names: Iterable[str]) -> Kinds:
    kinds = {"model": "module", "optim": "optimizer"}
    return {name: kinds[name.partition("_")[0]] for name in names if name.partition("_")[0] in kinds}
