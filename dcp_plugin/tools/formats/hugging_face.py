"""A folder for ``from_pretrained`` of transformers: weights in safetensors files, with the files that name the model.

If transformers is installed and a ``config.json`` at hand, the model is made on the meta device, where it takes no
memory. The names of its weights select the keys of the checkpoint and the prefix to remove, and show missing weights.
Otherwise the keys stay as they are.

A model with adapters becomes the folder that peft's ``save_pretrained`` makes (:mod:`.adapters`), with the base model
if the checkpoint has it and its ``config.json`` is at hand. ``from_pretrained`` of transformers then takes the base
from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointNotFound, damage_in, some
from dcp_plugin.core.format import exists, json_object
from dcp_plugin.core.loading.model_prefix import find_model_prefix
from dcp_plugin.core.media import Readable, medium_of
from dcp_plugin.core.paths import PathLike, as_path
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.tools.formats import Layout, Selected, place_of, safetensors_files
from dcp_plugin.tools.formats.peft_adapters import ADAPTER, Adapter

CONFIG = "config.json"
DEFAULT_SHARD = 5 * 10**9
"""The default size of a file, in bytes."""
_BESIDE = (
    *(CONFIG, ADAPTER, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json"),
)
_MOST = 256 << 20


@dataclass(frozen=True)
class Beside:
    """The small files that describe the model and its tokenizer."""

    files: dict[str, bytes]
    left_out: list[str]
    """A line for each link out of the checkpoint. Such links are not followed."""

    @classmethod
    def of(cls, reader: CheckpointReader, config: PathLike | None) -> Beside:
        """Read the small files of the checkpoint. Those of the folder ``config`` replace them.

        Raises:
            CheckpointNotFound: The folder cannot be read, or has no ``config.json``.
        """
        files, outside = _small_files(reader.open().files)
        left_out = [f"{name} was left out: it is a link that leads out of the checkpoint." for name in outside]
        if config is not None:
            folder = as_path(config)
            try:
                files_there, outside = _small_files(medium_of(folder).open(folder))
            except OSError as error:
                raise CheckpointNotFound(f"config={folder} cannot be read: {error.strerror or error}") from error
            named = files_there | outside
            if not {CONFIG, ADAPTER} & named.keys():
                raise CheckpointNotFound(f"config={folder}: there is no {CONFIG} in it")
            files |= named
        return cls(files, left_out)

    def json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file; empty if the file is absent."""
        if name not in self.files:
            return {}
        try:
            return json_object(self.files[name], _MOST)
        except ValueError as error:
            raise CheckpointCorrupt(f"{name} is damaged: {error}") from error


def _small_files(files: Readable) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the small files of a checkpoint by name, and separately the links out of it."""
    inside: dict[str, bytes] = {}
    outside: dict[str, bytes] = {}
    for name in _BESIDE:
        if exists(files, name) and files.size(name) <= _MOST:
            with damage_in(f"{files.where}/{name}"), files.open(name) as file:
                (outside if file.is_outside else inside)[name] = file.read()
    return inside, outside


def layout(selected: Selected, config: PathLike | None, most: int | None, as_it_is: bool) -> Layout:
    """Lay out the weights, with the model's own names, and the small files.

    Args:
        as_it_is: Keep the names: the caller chose them.

    Raises:
        CheckpointMismatch: The checkpoint does not have the model's weights; naming keys.
    """
    beside = Beside.of(selected.reader, config)
    most = most or DEFAULT_SHARD
    if not as_it_is and (adapter := Adapter.of(selected, beside.json(ADAPTER))) is not None:
        return _with_adapter(selected, adapter, beside, most)
    notes = list(beside.left_out)
    if not as_it_is:
        selected, of_model = _of_model(selected, beside)
        notes += of_model
    made = safetensors_files.layout(selected, "model", most)
    return replace(made, last={**made.last, **_files_of(beside, selected.dtype)}, notes=notes)


def _of_model(selected: Selected, beside: Beside) -> tuple[Selected, list[str]]:
    """Return the selection with the model's own names, and notes for the report."""
    config = beside.json(CONFIG)
    if not config:
        note = f"No {CONFIG} was found beside the checkpoint, and from_pretrained needs one: config=… names its folder."
        return selected, [note]
    models = list(_models(config))
    if not models:
        return selected, ["transformers, or the model's class, is not installed: the keys were not compared with it."]
    refusals: list[CheckpointMismatch] = []
    for kind, expected in models:
        try:
            chosen = _chosen(selected, expected, config)
        except CheckpointMismatch as error:
            refusals.append(error)
        else:
            notes = (
                [] if config.get("architectures") else [f"{CONFIG} names no architecture: the weights are of {kind}."]
            )
            return replace(selected, names=chosen), notes
    raise refusals[0]


_Shapes = dict[str, tuple[int, ...]]
_HEADS = ("FOR_CAUSAL_LM", "FOR_SEQ_TO_SEQ_CAUSAL_LM", "FOR_MASKED_LM", "FOR_SEQUENCE_CLASSIFICATION", "")
"""The mappings of transformers from a kind of model to its classes that are tried if no class is named."""


def _models(config: Mapping[str, Any]) -> Iterator[tuple[str, _Shapes]]:
    """Yield the class of each model that may be meant, with names and shapes of its weights.

    The classes are transformers' own, by the name in the configuration: nothing of the checkpoint is executed.
    """
    try:
        import transformers
        from transformers.models.auto import modeling_auto
    except ImportError:
        return
    kinds = config.get("architectures") or [
        names.get(config.get("model_type"))
        for head in _HEADS
        if (names := getattr(modeling_auto, f"MODEL_{head}_MAPPING_NAMES".replace("__", "_"), None))
    ]
    for kind in kinds:
        model_class = getattr(transformers, kind, None) if isinstance(kind, str) else None
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            config_class: Any = model_class.config_class
            with torch.device("meta"):
                model = model_class(config_class.from_dict(dict(config)))
            yield kind, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _chosen(selected: Selected, expected: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of the weights, with the model's names for them."""
    key_of = {name: key for key, name in selected.names.items()}
    path = selected.reader.path
    try:
        prefix = find_model_prefix(list(expected), key_of, path, f"the model that {CONFIG} describes").there
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{error} An export takes that as rename={{'PREFIX.': ''}}, or include=.") from error
    chosen = {key_of[prefix + name]: name for name in expected if prefix + name in key_of}
    tied = _tied(selected, chosen) if config.get("tie_word_embeddings", True) else set()
    missing = [name for name in expected if prefix + name not in key_of]
    if config.get("tie_word_embeddings", True):  # transformers makes it of the embeddings
        missing = [name for name in missing if not name.endswith("lm_head.weight")]
    if missing:
        raise CheckpointMismatch(
            f"{path} does not have {len(missing)} of the {len(expected)} weights of the model that {CONFIG} describes: "
            f"{some(missing)}. It has {some(list(key_of), 3)}. Give rename= or include=, or another config=."
        )
    for key, name in chosen.items():
        if selected.stored(key).shape != expected[name]:
            raise CheckpointMismatch(
                f"{path}: {key} has shape {selected.stored(key).shape}, and the model that {CONFIG} describes has "
                f"{expected[name]}"
            )
    return {key: name for key, name in chosen.items() if key not in tied}


def _tied(selected: Selected, chosen: Mapping[str, str]) -> set[str]:
    """Return the output embedding if it has the bytes of another weight: safetensors files store them once."""
    heads = [key for key, name in chosen.items() if name.endswith("lm_head.weight")]
    places = {place_of(selected.stored(key)) for key in chosen if key not in heads}
    return {key for key in heads if place_of(selected.stored(key)) in places}


def _with_adapter(selected: Selected, adapter: Adapter, beside: Beside, most: int) -> Layout:
    """Lay out an adapter as peft does, and the base model without the wrapper of peft if the checkpoint has it."""
    made = safetensors_files.layout(replace(selected, names=adapter.names), "adapter_model", None)
    named = beside.json(ADAPTER).get("base_model_name_or_path")
    names, base = dict(adapter.names), Layout(selected, [])
    if adapter.has_base and not beside.json(CONFIG) and isinstance(named, str) and Path(named, CONFIG).is_file():
        beside = replace(beside, files={**beside.files, CONFIG: Path(named, CONFIG).read_bytes()})
    if adapter.has_base and beside.json(CONFIG):
        of_base, notes = _of_model(replace(selected, names=adapter.base), beside)
        base = safetensors_files.layout(of_base, "model", most)
        names |= of_base.names
    else:
        # from_pretrained takes a folder with a configuration for the base model, too.
        beside = replace(beside, files={name: data for name, data in beside.files.items() if name != CONFIG})
        source = f"from_pretrained takes the one that {ADAPTER} names, {named!r}"
        notes = [f"The base model is not in it: {source}."]
        if adapter.has_base:
            notes = [f"The base model is left out: it needs its {CONFIG} in config=…. Without it, {source}."]
    adapter.require_complete(selected, names)
    last = {**base.last, **_files_of(beside, selected.dtype)}
    return Layout(replace(selected, names=names), [*made.files, *base.files], last, [*beside.left_out, *notes])


def _files_of(beside: Beside, dtype: torch.dtype | None) -> dict[str, bytes]:
    """Return the small files, with the new dtype of the weights in ``config.json``."""
    files = dict(beside.files)
    config = beside.json(CONFIG)
    if config and dtype is not None:
        names = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
        config |= dict.fromkeys(names, str(dtype).removeprefix("torch."))
        files[CONFIG] = json.dumps(config, indent=2).encode() + b"\n"
    return files
