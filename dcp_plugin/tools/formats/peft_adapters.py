"""The keys of an adapter that peft's ``save_pretrained`` writes, with their names in ``adapter_model.safetensors``.

The names of the keys decide, with the method and the biases in ``adapter_config.json``: the base model need not be at
hand. The rule: a trained key is exported, or an error names it. Methods for which peft computes values are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dcp_plugin.core.errors import CheckpointMismatch, some
from dcp_plugin.tools.formats import Selected, place_of

ADAPTER = "adapter_config.json"
_PROMPT, _TOKENS, _COPY = "prompt_encoder", "trainable_tokens_delta", "modules_to_save"
_METHODS = {
    "LORA": "lora_",
    "IA3": "ia3_",
    "LOHA": "hada_",
    "LOKR": "lokr_",
    "OFT": "oft_",
    "BOFT": "boft_",
    "HRA": "hra_",
    "VERA": "vera_",
    "LN_TUNING": "ln_tuning_layers",
    "TRAINABLE_TOKENS": _TOKENS,
    "PROMPT_TUNING": _PROMPT,
    "PREFIX_TUNING": _PROMPT,
}
"""Methods for which peft writes the values of the model -> the beginning of the names of their parts."""
_OF_PEFT = re.compile(
    r"\.(?:(?:lora|ia3|hada|lokr|boft|oft|hra|vera)_\w+|modules_to_save|base_layer|trainable_tokens_delta)\."
    r"|(?:^|\.)prompt_encoder\.[^.]+\.embedding\.weight$"
)
"""Keys that only a model with adapters has. A module of a user may be called ``base_model`` or ``prompt_encoder``."""
_BASE = re.compile(r"(?:^|(?<=\.))base_model\.")
_WRAPPED = re.compile(r"\.(?:token_adapter\.base_layer|base_layer|original_module)(?=\.)")
"""Names in peft of a layer of the base model behind its adapter."""


@dataclass(frozen=True)
class Adapter:
    """An adapter among the keys of a checkpoint, and the base model around it."""

    names: dict[str, str]
    """Keys of the adapter -> names in the file."""
    base: dict[str, str]
    """Other keys -> names in the base model."""
    has_base: bool

    @classmethod
    def of(cls, selected: Selected, config: Mapping[str, Any]) -> Adapter | None:
        """Return the adapter among the selected keys; None if the model has none.

        Args:
            config: The content of ``adapter_config.json``; empty if there is no such file.

        Raises:
            CheckpointMismatch: The configuration is missing, or no file of peft holds these adapters.
        """
        names, path = selected.names, selected.reader.path
        similar = [name for name in names.values() if _OF_PEFT.search(name) or (config and _BASE.search(name))]
        if not similar:
            return None
        if not config:
            raise CheckpointMismatch(
                f"{path} has adapters ({some(similar, 2)}) and no {ADAPTER} beside it: name the folder that has one: "
                f"config=…"
            )
        method = str(config.get("peft_type"))
        if method not in _METHODS:
            keys = some([name for name in similar if ".default" in name] or similar, 2)
            raise CheckpointMismatch(
                f"{path} has adapters of {method} ({keys}), and an export does not make their file: load them into "
                f"the model, and use its save_pretrained."
            )
        part = re.compile(rf"(?:^|\.)({_METHODS[method]}\w*|{_TOKENS}|{_COPY})\.([^.]+)(?=\.|$)")
        parts = {key: match for key, name in names.items() if (match := part.search(name))}
        adapters = sorted({match[2] for match in parts.values()})
        if len(adapters) != 1:
            raise CheckpointMismatch(
                f"{path} has {len(adapters)} adapters of {method} ({some(adapters or similar)}), and a file of peft "
                f"has one: exclude='*.NAME.*' leaves others out."
            )
        of_file = {
            key: _in_file(part.sub(lambda match: "" if match[1] == _COPY else match[0].rpartition(".")[0], names[key]))
            for key in _stored_by_peft(selected, parts, config)
        }
        before = "base_model." if _METHODS[method] == _PROMPT else "base_model.model."
        base = {
            key: _WRAPPED.sub("", f".{name}".partition(f".{before}")[2] or name)
            for key, name in names.items()
            if key not in parts
        }
        rest = [names[key] for key in base if key not in of_file]
        has_base = any(before in name if _METHODS[method] == _PROMPT else _WRAPPED.search(name) for name in rest)
        return cls(of_file, base, has_base)

    def require_complete(self, selected: Selected, names: Collection[str]) -> None:
        """Raise CheckpointMismatch if a trained key is in no file of the output.

        Args:
            names: The keys of the output.
        """
        reader = selected.reader
        states = [f"{name}.state." for name, kind in reader.kinds.items() if kind == "optimizer"]
        trained = {key.removeprefix(state).rpartition(".")[0] for state in states for key in reader.index.under(state)}
        written = {place_of(selected.stored(key)) for key in names}
        lost = [
            key
            for key in selected.names
            if (key not in self.base or not self.has_base or key.partition(".")[2] in trained)
            and key not in names
            and place_of(selected.stored(key)) not in written  # peft writes a tensor with several names once
        ]
        if lost:
            raise CheckpointMismatch(
                f"{reader.path}: {some(lost)} would be lost, as peft's file of this adapter does not have it. Load the "
                f"checkpoint into the model, or leave it out with exclude=. A folder of config= with config.json adds "
                f"the base model, if the checkpoint has it."
            )


def _stored_by_peft(selected: Selected, parts: Mapping[str, re.Match[str]], config: Mapping[str, Any]) -> list[str]:
    """Return the keys that peft selects: the parts of the adapter, and the biases that it has trained."""
    places, biases = set[object](), str(config.get("bias", "none"))
    layers = {match.string[: match.start()] for match in parts.values() if match[1] != _COPY}
    chosen = []
    for key, name in selected.names.items():
        match, place = parts.get(key), place_of(selected.stored(key))
        if match is None:
            taken = biases == "all" and name.endswith(".bias")
            taken |= biases.endswith("_only") and name.removesuffix(".base_layer.bias") in layers
        elif match[1] == _PROMPT:
            taken = name.endswith(".embedding.weight")
        elif match[1] in ("vera_A", "vera_B"):  # each layer refers to the projections of the model
            taken = "base_model.vera_" in name and bool(config.get("save_projection"))
        else:
            taken = match[1] != _TOKENS or place not in places  # a tied layer shares the tokens
        if taken:
            chosen.append(key)
            places.add(place)
    return chosen


def _in_file(name: str) -> str:
    """Return the name in peft's file of a name without the adapter's."""
    if _PROMPT in name.split("."):
        return "prompt_embeddings"
    match = _BASE.search(name)  # a framework's wrapper around peft's is no part of the adapter
    name = name[match.start() :] if match else f"base_model.model.{name}"
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name
