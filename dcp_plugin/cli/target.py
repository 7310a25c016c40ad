"""What ``--into`` names: the target of a load that is only planned, without the memory of its tensors."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dcp_plugin.config import local_path
from dcp_plugin.format.columns import dtype_named
from dcp_plugin.runs.inspect import inspect

_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class NoTarget(Exception):
    """``--into`` names nothing that could be loaded into; the message says what it may be."""


class _Header(nn.Module):
    """A module of which only names, shapes and dtypes are known."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = dict(tensors)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return dict(self._tensors)


def module_of(into: str, name: str) -> nn.Module:
    """The module that ``--into`` names, on the meta device.

    Args:
        into: ``package.module:factory``, a checkpoint, or a safetensors file.
        name: Which module of a checkpoint.

    Raises:
        NoTarget: It is none of these.
        CheckpointError: It is a checkpoint that cannot be opened.
    """
    try:
        path = local_path(into)
    except ValueError as error:
        raise NoTarget(f"--into {error}") from error
    if path.is_dir():
        return _of_checkpoint(path, name)
    if path.is_file():
        return _of_safetensors(path)
    if ":" in into:
        return _of_factory(into)
    raise NoTarget(f"--into {into}: no such file, and no package.module:factory either")


def _of_factory(into: str) -> nn.Module:
    """Runs code of the user's, from the current directory like ``python -m``."""
    where, _, factory = into.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make: Any = importlib.import_module(where)
        for attribute in factory.split("."):
            make = getattr(make, attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise NoTarget(f"--into {into}: {error}") from error
    try:
        signature(make).bind()
    except TypeError as error:
        raise NoTarget(f"--into {into} needs arguments ({error}): name a function that makes the module.") from error
    except ValueError:  # it does not tell what it needs
        pass
    with torch.device("meta"):
        module = make()
    if not isinstance(module, nn.Module):
        raise NoTarget(f"--into {into} gives a {type(module).__name__}, not a torch.nn.Module")
    return module


def _of_checkpoint(path: Path, name: str) -> nn.Module:
    tensors = {
        info.key.removeprefix(f"{name}."): torch.empty(info.shape, dtype=dtype_named(info.dtype), device="meta")
        for info in inspect(path).tensors
        if info.key.startswith(f"{name}.")
    }
    if not tensors:
        raise NoTarget(f"--into {path} has nothing called {name!r}; --name says which module is meant")
    return _Header(tensors)


def _of_safetensors(path: Path) -> nn.Module:
    try:
        with safe_open(path, "pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
            return _Header(
                {
                    key: torch.empty(part.get_shape(), dtype=_SAFETENSORS_DTYPES[part.get_dtype()], device="meta")
                    for key, part in slices.items()
                }
            )
    except (SafetensorError, KeyError) as error:
        raise NoTarget(f"--into {path} is no safetensors file that torch knows: {error}") from error
