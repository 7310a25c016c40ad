"""Private names of transformers and PEFT that the construction of a model needs, each with its reason. No Trainer.

``tests/transformers/pretrained/test_canaries.py`` fails when one of them moves or changes its meaning.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers import initialization as transformers_init
from transformers.configuration_utils import PreTrainedConfig

from dcp_plugin.core.errors import UnsafeCheckpoint
from dcp_plugin.core.tensors._torch import DTensor

_INITIALISED = "_is_hf_initialized"
"""Mark of a tensor that the initialisation of transformers skips."""


def config_from(model_class: Any, source: str, trust_remote_code: bool, overrides: dict[str, Any]) -> tuple[Any, Any]:
    """Return the configuration in a folder, or of a name; and the ``overrides`` that are not among its settings.

    Raises:
        UnsafeCheckpoint: The configuration names code that would be fetched and executed.
    """
    config_class: Any = AutoConfig if is_auto(model_class) else model_class.config_class
    options = {"trust_remote_code": trust_remote_code} if is_auto(model_class) else {}
    # Implementations from the caller go to the constructor, where they replace those of the file.
    chosen = {name: overrides[name] for name in _IMPLEMENTATIONS if name in overrides}
    settings = {name: value for name, value in overrides.items() if name not in chosen}
    config, unused = config_class.from_pretrained(source, return_unused_kwargs=True, **options, **settings)
    # A name with a slash is a kernel that transformers would fetch from the hub. No public attribute has this name.
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name in _IMPLEMENTATIONS:
            kernel = getattr(part, f"_{name}", None)
            if "/" in str(kernel) and not isinstance(chosen.get(name), str):
                raise UnsafeCheckpoint(
                    f"The config.json of {source} asks for {kernel!r}, code that would be fetched and executed. If you "
                    f"trust it: {name}={kernel!r}; else {name}='sdpa', say."
                )
    return config, {**unused, **chosen}


_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


def is_auto(model_class: Any) -> bool:
    """Return whether a class selects the model class by the configuration, as ``AutoModel`` does."""
    return not issubclass(model_class, PreTrainedModel)


def build(
    model_class: Any, config: PreTrainedConfig, dtype: torch.dtype, tied: bool, trust_remote_code: bool, kwargs: Any
) -> PreTrainedModel:
    """Return the model on the meta device, as ``from_pretrained`` builds it before it loads weights.

    Args:
        tied: Whether shared weights are tied now.
    """
    with ExitStack() as contexts:
        contexts.enter_context(torch.device("meta"))
        # transformers before 5.9 builds models on the meta device without it
        contexts.enter_context(getattr(transformers_init, "meta_device_safe_creation_ops", nullcontext)())
        if not tied:
            contexts.enter_context(transformers_init.no_tie_weights())
        if is_auto(model_class):
            model = model_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **kwargs)
        else:  # no public constructor takes the dtype
            model = model_class._from_config(config, dtype=dtype, **kwargs)
    model.config.dtype = dtype  # transformers 5.3 sets it in its own from_pretrained
    # The plan has patterns of the names of parameters that must stay float32.
    for names, own_dtype in model._get_dtype_plan(dtype).items():
        pattern = re.compile(names.replace("*", ".*"))
        for name, parameter in model.named_parameters():
            if pattern.search(name) and parameter.is_floating_point():
                parameter.data = parameter.data.to(own_dtype)
    return model  # type: ignore[no-any-return]


def distribute(model: PreTrainedModel, distributed_config: Any, mesh_manager: Any) -> None:
    """Shard a model on the meta device, as ``from_pretrained(distributed_config=...)`` does, and tie its weights."""
    type(model).maybe_distribute_model(model, distributed_config, mesh_manager)
    model.tie_weights(recompute_mapping=False)


def prepare_mesh(distributed_config: Any) -> tuple[Any, Any]:
    """Return the DistributedConfig, and the manager of its mesh; None without distribution. Collective."""
    config, _, mesh_manager = PreTrainedModel.prepare_distribute_model(distributed_config)  # type: ignore[no-untyped-call]
    return config, mesh_manager


def ignored(model: PreTrainedModel, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    """Return the missing and unexpected keys that ``from_pretrained`` would report.

    The result leaves out keys that the model declares optional, and keys of its older versions.
    """
    optional = model._keys_to_ignore_on_load_missing or ()
    outdated = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    for name, pattern in (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
        if any(buffer.endswith(name) for buffer in buffers):
            outdated.add(pattern)
    return _without(missing, optional), _without(unexpected, outdated)


def _without(keys: list[str], patterns: Collection[str]) -> list[str]:
    return [key for key in keys if not any(re.search(pattern, key) for pattern in patterns)]


def initialise(model: PreTrainedModel, missing: Collection[str]) -> None:
    """Compute values that are not in the checkpoint, as ``from_pretrained`` does: other buffers and ``missing`` keys.

    Args:
        missing: Keys of the model that were not loaded.
    """
    for key, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and key not in missing:
            setattr(tensor, _INITIALISED, True)
    model.initialize_weights()  # type: ignore[no-untyped-call]


def complete_tokens(module: nn.Module) -> None:
    """Set the original embeddings of trained tokens, which PEFT stores nowhere: it undoes a merge with them."""
    for name, original in module.named_buffers():
        layer_name, is_found, adapter = name.partition(".trainable_tokens_original.")
        if is_found:
            layer: Any = module.get_submodule(layer_name)
            weight = layer.base_layer.weight.detach()
            weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
            original.copy_(weight[layer.token_indices[adapter]])


def peft_model_of(model: PreTrainedModel, adapter_config: Any) -> nn.Module:
    """Return the model with adapters on the meta device. The adapters are not initialised: a load fills them."""
    from peft import get_peft_model

    settings = dict(vars(adapter_config))
    adapter_config.base_model_name_or_path = model.__dict__.get("name_or_path") or None  # else PEFT warns
    if "init_lora_weights" in settings:  # some kinds compute with weights, which have no memory yet, or open files
        adapter_config.init_lora_weights = False
    if adapter_config.is_prompt_learning:  # for inference, PEFT makes no encoder, whose result its own file has
        adapter_config.inference_mode = False
    adapted: nn.Module = get_peft_model(model, adapter_config, low_cpu_mem_usage=True)
    for name in ("base_model_name_or_path", "init_lora_weights"):
        if name in settings:
            setattr(adapter_config, name, settings[name])
    return adapted


PEFT_LAYERS = r"(?:token_adapter\.base_layer|base_layer|original_module)"
"""Names in PEFT of a wrapped layer, and of a layer whose copy is trained."""


def prefix_in(module: nn.Module, model: nn.Module) -> str:
    """Return the prefix of the model's keys in the PEFT model around it."""
    return "" if module is model else next(f"{name}." for name, part in module.named_modules() if part is model)


def without_peft_layers(key: str) -> str:
    """Return a key of a PEFT model without the names of its wrappers."""
    return re.sub(rf"\.{PEFT_LAYERS}(?=\.)", "", key)
