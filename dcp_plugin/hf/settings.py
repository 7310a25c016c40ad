"""Settings of a model: its configuration, its generation settings and its adapters.

The settings are in small JSON files in the folder of the weights, or the caller passes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig

from dcp_plugin.errors import CheckpointMismatch, UnsafeCheckpoint, damage_in
from dcp_plugin.hf import _transformers
from dcp_plugin.integration.files import kind_of, local_copy
from dcp_plugin.paths import PathLike, StorageOptions, Where
from dcp_plugin.sources import SourceFiles

CONFIG, GENERATION, ADAPTERS = "config.json", "generation_config.json", "adapter_config.json"


@dataclass(frozen=True)
class Given:
    """Arguments of the caller, with the fields of :func:`~dcp_plugin.hf.from_pretrained`."""

    model_class: Any
    config: PreTrainedConfig | PathLike | None = None
    dtype: torch.dtype | str | None = "auto"
    base: PathLike | None = None
    storage_options: StorageOptions | None = None
    adapter_config: Any = None
    generation_config: GenerationConfig | None = None
    trust_remote_code: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """Settings of a model, read before its weights."""

    given: Given
    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    """None: the model derives it from its configuration."""
    adapter_config: Any
    """None: the model has no adapters."""
    base: PathLike | None
    """Path of the base model, if the checkpoint has only adapters."""
    kwargs: dict[str, Any]
    """Arguments of the model's constructor."""

    @classmethod
    def of(cls, given: Given, path: Where, files: SourceFiles | None) -> Settings:
        """Read the settings of a checkpoint.

        Raises:
            CheckpointMismatch: No configuration exists.
            UnsafeCheckpoint: The configuration names code that would be fetched and executed.
        """
        with small_files(path, files) as folder:
            adapter_config = given.adapter_config
            if adapter_config is None and (folder / ADAPTERS).is_file():
                adapter_config = _adapters_in(folder)
            base = given.base
            named = getattr(adapter_config, "base_model_name_or_path", None)
            if base is None and named and os.path.isdir(named):  # transformers would search the hub for any other name
                base = named
            config, source, kwargs = _config(given, folder, base, path)
            generation = given.generation_config
            if generation is None and source is not None:
                generation = _generation_in(source)
        return cls(given, config, generation, adapter_config, base, kwargs)

    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the parameters; None for that of the checkpoint."""
        requested: Any = self.given.dtype
        if requested is None:
            return torch.get_default_dtype()
        requested = self.config.dtype if requested == "auto" else requested
        dtype = getattr(torch, requested, None) if isinstance(requested, str) else requested
        if requested is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype={requested!r} is no dtype of torch, and not 'auto'")
        return dtype


@contextmanager
def small_files(path: Where, files: SourceFiles | None = None) -> Iterator[Path]:
    """Yield a local directory with the JSON files of a checkpoint."""
    with damage_in(path):
        is_file = files is None and kind_of(path) == "file"
    if is_file and isinstance(path, Path):
        yield path.parent
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


def _config(given: Given, folder: Path, base: PathLike | None, path: Where) -> tuple[Any, str | None, dict[str, Any]]:
    """Return the configuration, its folder or name, and the caller's arguments for the model's constructor."""
    if isinstance(given.config, PreTrainedConfig):
        return given.config, None, given.kwargs
    places = [given.config] if given.config is not None else [folder, *([base] if base is not None else [])]
    for place in [str(os.fspath(candidate)) for candidate in places]:
        if given.config is not None or os.path.isfile(os.path.join(place, CONFIG)):
            config, unused = _transformers.config_from(given.model_class, place, given.trust_remote_code, given.kwargs)
            return config, place, unused
    raise CheckpointMismatch(
        f"{path} has no {CONFIG}, which only the Trainer keeps in its checkpoints: from_pretrained(…, config=…) takes "
        "the configuration, the folder of a model, or the name of one."
    )


def _generation_in(source: str) -> GenerationConfig | None:
    if not os.path.isfile(os.path.join(source, GENERATION)):
        return None
    with damage_in(os.path.join(source, GENERATION)):
        return GenerationConfig.from_pretrained(source)
