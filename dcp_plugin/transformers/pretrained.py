"""``from_pretrained``: build a model of transformers on the meta device, shard it, allocate, load and initialise.

The steps are those of ``PreTrainedModel.from_pretrained``, with the load of this package in place of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig

from dcp_plugin.checkpointer import Checkpointer, Internals
from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.paths import PathLike, StorageOptions, as_path
from dcp_plugin.core.state import materialise
from dcp_plugin.core.tensors._torch import DTensor
from dcp_plugin.integration.weights import open_weights
from dcp_plugin.transformers import _models
from dcp_plugin.transformers.plan import ModelPlan, Settings, plan_model

_NOT_TAKEN = {
    "device_map": "device= names one device, distributed_config= or parallelize= shards over several",
    "ignore_mismatched_sizes": "dcp_plugin.load with PartialLoad(exclude=…) leaves parts of a model out",
    "key_mapping": "dcp_plugin.load with PartialLoad(rename=…) fills a model from other names",
    "quantization_config": "load it as it was saved, and quantize it then",
    "state_dict": "the checkpoint has it",
    "tp_plan": "distributed_config=DistributedConfig(tp_size=…) shards tensors",
    "tp_size": "distributed_config=DistributedConfig(tp_size=…) shards tensors",
}
"""Arguments of transformers' ``from_pretrained`` that have no meaning here, and the alternative to each."""


def from_pretrained(
    model_class: Any,
    path: PathLike,
    *,
    config: PreTrainedConfig | PathLike | None = None,
    dtype: torch.dtype | str | None = "auto",
    device: torch.device | str | None = None,
    parallelize: Callable[[Any], Any] | None = None,
    distributed_config: Any = None,
    prefix: str | None = None,
    strict: bool = True,
    base: PathLike | None = None,
    adapter_config: Any = None,
    generation_config: GenerationConfig | None = None,
    trust_remote_code: bool = False,
    output_loading_info: bool = False,
    checkpoint_config: CheckpointConfig | None = None,
    storage_options: StorageOptions | None = None,
    **kwargs: Any,
) -> Any:
    """Return a model of transformers from any checkpoint, in evaluation mode, as its own ``from_pretrained`` does.

    Each rank reads its part of the weights directly from the shards, whatever number of ranks saved them, and nothing
    of the optimizer. Collective if a process group is initialised, as every load is.

    Args:
        model_class: ``AutoModelForCausalLM``, another auto class, or the class of a model.
        path: A checkpoint of this package, of stock DCP, of a framework, or a safetensors or ``torch.save`` file.
        config: The model's configuration, or a folder or name of a model that has it; by default the checkpoint's
            ``config.json``, which the Trainer writes.
        dtype: The dtype of the parameters. ``"auto"``: the dtype of the configuration, else that of the checkpoint;
            None: torch's default.
        device: The device of a model that is not sharded; torch's default device if omitted.
        parallelize: Called with the model on the meta device, before it gets memory. It shards the model, for example
            with ``fully_shard``, and returns the model, or None if it changed the model in place.
        distributed_config: As in transformers: a ``DistributedConfig``, or a dictionary of its fields.
        prefix: The prefix of the model's keys in the checkpoint (``"model."``); detected if omitted.
        strict: Whether missing and unexpected keys are errors. If False, missing keys are initialised as in
            transformers, and a warning names both.
        base: The folder or checkpoint of the base model, if the checkpoint has only adapters. By default the folder
            that the adapters name.
        adapter_config: A ``PeftConfig``, for a checkpoint with adapters; by default its ``adapter_config.json``.
        generation_config: By default the file in the folder of the configuration.
        trust_remote_code: Whether code that the configuration names may be executed.
        output_loading_info: Whether to return the :class:`~dcp_plugin.LoadReport`, too.
        checkpoint_config: Settings of the load.
        storage_options: Access to the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.
        kwargs: As in transformers: settings of the configuration to change, and arguments of the model's constructor
            (``attn_implementation="sdpa"``).

    Returns:
        The model; with adapters a ``PeftModel``. With ``output_loading_info`` the model and the report.

    Raises:
        CheckpointNotFound: The path has no checkpoint.
        CheckpointMismatch: No configuration exists; or keys do not fit, or fit in several ways.
        UnsafeCheckpoint: The configuration names code that would be fetched and executed.
        ValueError: Arguments contradict each other, or only transformers itself takes them.
        CheckpointError: As :meth:`dcp_plugin.Checkpointer.load`, on every rank.

    Example:
        >>> import dcp_plugin, torch
        >>> from dcp_plugin.transformers import from_pretrained
        >>> from transformers import AutoModelForCausalLM, GPT2Config
        >>> small = GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
        >>> model = AutoModelForCausalLM.from_config(small)
        >>> dcp_plugin.save({"model": model}, "run/checkpoint-1")
        >>> loaded = from_pretrained(AutoModelForCausalLM, "run/checkpoint-1", config=small)
        >>> torch.equal(loaded.lm_head.weight, model.lm_head.weight)
        True
    """
    for name in sorted(kwargs.keys() & _NOT_TAKEN.keys()):
        raise ValueError(f"from_pretrained takes no {name}: {_NOT_TAKEN[name]}.")
    if parallelize is not None and distributed_config is not None:
        raise ValueError("give either distributed_config or parallelize, not both: each shards the model")
    mesh_manager: Any = None
    if distributed_config is not None:  # first, because it starts a process group if none exists
        distributed_config, mesh_manager = _models.prepare_mesh(distributed_config)
    changes = {} if storage_options is None else {"storage_options": storage_options}
    # A later save with trainable_only, as of a Trainer, leaves out what this load has read.
    checkpointer = Checkpointer(CheckpointConfig.merge(checkpoint_config, **changes, trainable_only=True))
    options = checkpointer.config.storage_options
    settings = Settings(
        model_class, config, dtype, base, options, adapter_config, generation_config, trust_remote_code, kwargs
    )
    try:
        checkpoint_path = as_path(path, options)

        def compared() -> ModelPlan:
            # transformers ties shared weights after it has sharded a model
            with open_weights(checkpoint_path, options, files) as weights:
                return plan_model(settings, weights, prefix, strict, tied=mesh_manager is None)

        with Internals(checkpointer).shown(checkpoint_path) as files:
            plan = Internals(checkpointer).ranks.agree(f"compare {checkpoint_path} with the model", compared)
        module = plan.module
        if mesh_manager is not None:
            _models.distribute(plan.model, distributed_config, mesh_manager)
        elif parallelize is not None:
            module = parallelize(module) or module
        _give_memory(module, device)
        report = plan.fill(module, checkpointer)
    finally:
        checkpointer.close()
    module.eval()
    return (module, report) if output_loading_info else module


def _give_memory(module: nn.Module, device: torch.device | str | None) -> None:
    """Allocate memory for tensors on the meta device: on the device of the mesh, if the module is sharded."""
    meshes = [tensor.device_mesh for tensor in module.parameters() if isinstance(tensor, DTensor)]
    target = torch.device(device or (meshes[0].device_type if meshes else torch.get_default_device()))
    with torch.device(target), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="buffers that were on the meta device")  # transformers computes them
        materialise(module)
