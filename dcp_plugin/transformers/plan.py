"""Plan of a load: the settings of a model, the model on the meta device, and the key of the checkpoint for each of its
keys.

The settings (configuration, generation settings, adapters) are in small JSON files in the folder of the weights, or the
caller passes them. The comparison ends before any tensor has memory. It finds missing keys, unexpected keys and
different shapes.
"""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.core.errors import CheckpointMismatch, UnsafeCheckpoint, damage_in, first, some
from dcp_plugin.core.partial import PartialLoad
from dcp_plugin.core.paths import PathLike, StorageOptions, Where, on_file_system
from dcp_plugin.core.records import LoadReport
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.integration import kind_of, local_copy
from dcp_plugin.integration.weights import ModelPrefix, StoredWeights, open_weights
from dcp_plugin.transformers import _models

CONFIG, GENERATION, ADAPTERS = "config.json", "generation_config.json", "adapter_config.json"
_MODEL = "model"
"""Name of the model in the loaded state."""


@dataclass(frozen=True)
class Settings:
    """Settings of a model: arguments of ``from_pretrained``, completed by the checkpoint's files."""

    model_class: Any
    config: Any = None
    """The configuration; before :meth:`completed` also a folder or a name, or None."""
    dtype: torch.dtype | str | None = "auto"
    base: PathLike | None = None
    """Path of the base model, if the checkpoint has only adapters."""
    storage_options: StorageOptions | None = None
    adapter_config: Any = None
    """None: the model has no adapters."""
    generation_config: GenerationConfig | None = None
    """None: the model derives it from its configuration."""
    trust_remote_code: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes of the configuration, and arguments of the model's constructor; only these after :meth:`completed`."""

    def completed(self, path: Where, files: SourceFiles | None) -> Settings:
        """Return these settings, with those that the caller omitted from the files of a checkpoint.

        Raises:
            CheckpointMismatch: No configuration exists.
            UnsafeCheckpoint: The configuration names code that would be fetched and executed.
        """
        with _small_files(path, files) as folder:
            adapter_config, base, generation = self.adapter_config, self.base, self.generation_config
            if adapter_config is None and (folder / ADAPTERS).is_file():
                adapter_config = _adapters_in(folder)
            named = getattr(adapter_config, "base_model_name_or_path", None)
            if base is None and named and os.path.isdir(named):  # transformers would search the hub for any other name
                base = named
            config, source, kwargs = self._configuration(folder, base, path)
            if generation is None and source and os.path.isfile(file := os.path.join(source, GENERATION)):
                with damage_in(file):
                    generation = GenerationConfig.from_pretrained(source)
        return replace(
            self,
            config=config,
            base=base,
            adapter_config=adapter_config,
            generation_config=generation,
            kwargs=kwargs,
        )

    def _configuration(
        self, folder: Path, base: PathLike | None, path: Where
    ) -> tuple[PreTrainedConfig, str | None, dict[str, Any]]:
        """Return the configuration, its folder or name, and the caller's arguments for the model's constructor."""
        if isinstance(self.config, PreTrainedConfig):
            return self.config, None, self.kwargs
        places = [self.config] if self.config is not None else [folder, *([base] if base is not None else [])]
        for place in [str(os.fspath(candidate)) for candidate in places]:
            if self.config is not None or os.path.isfile(os.path.join(place, CONFIG)):
                config, unused = _models.config_from(self.model_class, place, self.trust_remote_code, self.kwargs)
                return config, place, unused
        raise CheckpointMismatch(
            f"{path} has no {CONFIG}, which only the Trainer keeps in its checkpoints: from_pretrained(…, config=…) "
            "takes the configuration, the folder of a model, or the name of one."
        )

    def parameter_dtype(self) -> torch.dtype | None:
        """Return the dtype of the parameters; None for that of the checkpoint."""
        requested: Any = self.dtype
        if requested is None:
            return torch.get_default_dtype()
        requested = self.config.dtype if requested == "auto" else requested
        dtype = getattr(torch, requested, None) if isinstance(requested, str) else requested
        if requested is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype={requested!r} is no dtype of torch, and not 'auto'")
        return dtype


@contextmanager
def _small_files(path: Where, files: SourceFiles | None) -> Iterator[Path]:
    """Yield a local directory with the JSON files of a checkpoint."""
    with damage_in(path):
        is_file = files is None and kind_of(path) == "file"
    if is_file and (local := on_file_system(path)) is not None:
        yield local.parent
        return
    wanted = (CONFIG, GENERATION, ADAPTERS)
    with local_copy(path, lambda name: name in wanted, files) as folder:
        yield folder


def _adapters_in(folder: Path) -> Any:
    from peft import PeftConfig

    with damage_in(folder / ADAPTERS):
        config = PeftConfig.from_pretrained(str(folder))
    # PEFT imports the module that the first names, and opens the files that the second names.
    for name in ("megatron_config", "adapters"):
        if getattr(config, name, None):
            raise UnsafeCheckpoint(
                f"{folder / ADAPTERS} has {name}, for which PEFT imports or opens what that names. If you trust it: "
                "adapter_config=PeftConfig.from_pretrained(…)."
            )
    return config


@dataclass(frozen=True)
class WeightSource:
    """Checkpoint that fills keys of the model."""

    path: Where
    prefix: ModelPrefix
    wrapped: bool = False
    """True if PEFT has wrapped layers since the save. Their keys have an additional name."""
    unexpected: list[str] = field(default_factory=list)

    def stored(self, key: str) -> str:
        return self.prefix.stored(_models.without_peft_layers(key) if self.wrapped else key)

    def load(self, module: nn.Module, checkpointer: Checkpointer) -> LoadReport:
        """Load the keys of this source into ``module``. Collective."""
        model_prefix, stored_prefix = f"{_MODEL}.{self.prefix.here}", self.prefix.there
        rename = {model_prefix: stored_prefix}
        if self.wrapped:
            escaped = stored_prefix.replace("\\", r"\\")
            rename[f"re:{re.escape(model_prefix)}(.+?)(?:\\.{_models.PEFT_LAYERS})+\\.(.+)"] = rf"{escaped}\1.\2"
        partial = PartialLoad(rename=rename, missing="ignore", unexpected="ignore", cast=True)
        return checkpointer.load({_MODEL: module}, self.path, partial)


@dataclass(frozen=True)
class ModelPlan:
    """Model on the meta device, and the sources of its values."""

    model: PreTrainedModel
    module: nn.Module
    """The model, or the PEFT model around it."""
    sources: list[WeightSource]
    missing: list[str]
    """Keys of the module that no source has."""
    generation_config: GenerationConfig | None

    def fill(self, module: nn.Module, checkpointer: Checkpointer) -> LoadReport:
        """Load and initialise. Collective.

        Args:
            module: ``self.module``, sharded and with memory.
        """
        reports = [source.load(module, checkpointer) for source in self.sources]
        inside = _models.prefix_in(self.module, self.model)
        _models.complete_tokens(module)
        _models.initialise(self.model, {key.removeprefix(inside) for key in self.missing})
        if self.generation_config is not None:
            self.model.generation_config = self.generation_config
        return replace(
            reports[-1],
            loaded=list(dict.fromkeys(key for report in reports for key in report.loaded)),
            missing=[f"{_MODEL}.{key}" for key in self.missing],
            unexpected=[key for source in self.sources for key in source.unexpected],
            cast=[key for report in reports for key in report.cast],
            bytes_read=sum(report.bytes_read for report in reports),
        )


def plan_model(requested: Settings, weights: StoredWeights, prefix: str | None, strict: bool, tied: bool) -> ModelPlan:
    """Build a model and compare it with a checkpoint. No communication.

    Args:
        prefix: The prefix of the model's keys in the checkpoint; None to find it.
        strict: Whether missing and unexpected keys are errors.
        tied: Whether tied weights share their memory from the start.

    Raises:
        CheckpointMismatch: The model and the checkpoint do not fit.
    """
    settings = requested.completed(weights.path, weights.files)
    dtype = settings.parameter_dtype()
    model = _build(settings, dtype, tied)
    if dtype is None and (dtype := weights.dtype_of(list(model.state_dict()))) is not None:
        model = _build(settings, dtype, tied)
    if settings.adapter_config is not None:
        return _plan_with_adapters(settings, model, weights, prefix, strict)
    keys = list(model.state_dict())
    match = weights.prefix_of(keys, type(model).__name__, model.base_model_prefix, prefix)
    return _compare(settings, model, model, [(WeightSource(weights.path, match), weights, keys)], strict)


def _build(settings: Settings, dtype: torch.dtype | None, tied: bool) -> PreTrainedModel:
    config = copy.deepcopy(settings.config)
    if getattr(config, "quantization_config", None):
        raise CheckpointMismatch(
            "The configuration is that of a quantized model, which from_pretrained does not make: make it with "
            "transformers, and load what was trained with dcp_plugin.load."
        )
    dtype = dtype or torch.get_default_dtype()
    return _models.build(settings.model_class, config, dtype, tied, settings.trust_remote_code, dict(settings.kwargs))


def _plan_with_adapters(
    settings: Settings, model: PreTrainedModel, weights: StoredWeights, prefix: str | None, strict: bool
) -> ModelPlan:
    """Plan a model with adapters. Its base is in the checkpoint of the adapters, or in another checkpoint, which then
    fills the model first: the checkpoint of the adapters may have trained parts of the base."""
    path = weights.path
    of_base = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    buffers = {id(buffer) for buffer in model.buffers()}
    module = _models.peft_model_of(model, copy.deepcopy(settings.adapter_config))
    state, inside = module.state_dict(keep_vars=True), _models.prefix_in(module, model)
    if computed := [
        name
        for name, buffer in module.named_buffers()
        if not (name in state or id(buffer) in buffers or ".trainable_tokens_original." in name)
    ]:
        raise CheckpointMismatch(
            f"{path}: PEFT computes {some(computed, 2)} and stores it nowhere. Make the model with PEFT, and fill it "
            "with dcp_plugin.load; save_projection=True stores the projections of VeRA."
        )
    adapters = [key for key, tensor in state.items() if id(tensor) not in of_base]
    adapter_prefix = weights.prefix_of(adapters, "the adapters", requested=prefix)
    stored = {key: adapter_prefix.stored(key) for key in state}
    trained = [key for key in state if key not in adapters and stored[key] in weights]
    if trained and (
        settings.base is None or not {*_absent(inside, model, stored, weights, state)}.difference(adapters)
    ):
        complete = WeightSource(path, ModelPrefix(adapter_prefix.there))
        return _compare(settings, model, module, [(complete, weights, list(state))], strict)
    if settings.base is None:
        named = getattr(settings.adapter_config, "base_model_name_or_path", None)
        raise CheckpointMismatch(
            f"{path} has only adapters. from_pretrained(…, base=…) takes the folder or checkpoint of the model that "
            f"they adapt{f', {named!r}' if named else ''}."
        )
    with open_weights(settings.base, settings.storage_options) as of_model:
        keys = {
            key: _models.without_peft_layers(key) for key in state if key.startswith(inside) and key not in adapters
        }
        names = [name.removeprefix(inside) for name in keys.values()]
        base_prefix = of_model.prefix_of(names, "the model that is adapted")
        wrapped = any(key != name for key, name in keys.items())
        base = WeightSource(of_model.path, ModelPrefix(base_prefix.there, inside), wrapped)
        parts = [(base, of_model, list(keys)), (WeightSource(path, adapter_prefix), weights, [*adapters, *trained])]
        return _compare(settings, model, module, parts, strict)


def _compare(
    settings: Settings,
    model: PreTrainedModel,
    module: nn.Module,
    parts: list[tuple[WeightSource, StoredWeights, list[str]]],
    strict: bool,
) -> ModelPlan:
    """Compare each source with the keys that it has to fill."""
    sources, missing, problems = [], list[str](), list[str]()
    tensors = module.state_dict(keep_vars=True)
    for source, weights, keys in parts:
        stored = {key: source.stored(key) for key in keys}
        absent = _absent(_models.prefix_in(module, model), model, stored, weights, tensors)
        if shapes := weights.other_shapes(stored, tensors):
            problems += [*shapes, "config= is not that of the model that was saved"]
        lost, extra = _models.ignored(model, absent, weights.unexpected(stored, source.prefix.there))
        lines = []
        if lost:
            why = ", which leaves out what was frozen" if weights.leaves_out(stored[key] for key in lost) else ""
            lines.append(f"{len(lost)} of its {len(keys)} keys are not in the checkpoint{why}: {some(lost, 6)}")
        if extra:
            lines.append(f"{len(extra)} keys are only in the checkpoint: {some(extra, 6)}")
        differences = "; ".join(lines)
        kind, source_name = type(model).__name__, f"{source.path} (keys behind {source.prefix.there!r})"
        if lines and strict:
            problems.append(
                f"{source_name} does not fit {kind}: {differences}. strict=False initialises what is missing, and "
                "leaves out what is unexpected."
            )
        elif lines:
            warnings.warn(
                f"{source_name} and {kind} differ: {differences}. Missing keys are initialised.", stacklevel=2
            )
        missing += absent
        sources.append(replace(source, unexpected=extra))
    if problems:
        raise CheckpointMismatch("\n  ".join(first(problems)))
    return ModelPlan(model, module, sources, missing, settings.generation_config)


def _absent(
    inside: str, model: PreTrainedModel, stored: Mapping[str, str], weights: StoredWeights, tensors: Mapping[str, Any]
) -> list[str]:
    """Return the keys that are not stored, and whose tied weights are not stored under another name.

    Args:
        inside: The prefix of the model's keys.
    """
    same: dict[Any, list[str]] = defaultdict(list)
    owner: Mapping[str, str] = model.all_tied_weights_keys
    for key in stored:
        name = key.removeprefix(inside)
        first_name = inside + owner.get(name, name)
        same[id(tensors.get(first_name, tensors[key]))].append(key)
    return [key for keys in same.values() if not any(stored[tied_key] in weights for tied_key in keys) for key in keys]
