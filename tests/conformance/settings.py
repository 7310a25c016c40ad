"""Corpus of settings of the process: of torch, of Python and of the standard streams, around a save, a load or a tool.

An entry is a setting, and its variants are the calls that are made within it. What a save within a setting has written
is read by stock, outside of the setting. What is right is what stock does; what stock refuses has to be right anyway.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.serialization import config

import dcp_plugin
from tests.conformance.entries import Entry
from tests.conformance.tools import Ours, State, Tool, _recipe
from tests.conformance.trace import Trace

CALLS = ("save", "async", "lazy", "keeper", "load", "tools")


@dataclass(frozen=True)
class Setting(Entry):
    within: Callable[[], AbstractContextManager[Any]]
    world_size: int
    is_sharded: bool = True
    """Whether the model of several ranks is: torch's FSDP2 has no state dict in ``inference_mode``."""
    variants: tuple[str, ...] = CALLS


class _Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _set(
    read: Callable[[], Any], write: Callable[[Any], Any], value: Any
) -> Callable[[], AbstractContextManager[None]]:
    """A context in which a setting has a value."""

    @contextmanager
    def within() -> Iterator[None]:
        before = read()
        write(value() if callable(value) else value)
        try:
            yield
        finally:
            write(before)

    return within


def _attribute(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[None]]:
    return _set(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


def _closed() -> io.TextIOWrapper:
    stream = open(os.devnull, "w")  # noqa: SIM115
    stream.close()
    return stream


@contextmanager
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default_device": lambda: torch.device("meta"),
    "default_dtype": _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": _set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "dispatch_mode": _Dispatches,
    "function_mode": _Calls,
    "profiler": lambda: torch.autograd.profiler.profile(use_kineto=False),
    "no_crc32": _set(torch.serialization.get_crc32_options, torch.serialization.set_crc32_options, False),
    "storage_alignment": _attribute(config.save, "storage_alignment", 4096),
    "load_mmap": _attribute(config.load, "mmap", True),
    "no_stderr": _attribute(sys, "stderr", None),
    "closed_stderr": _attribute(sys, "stderr", _closed),
    "tee_as_stderr": _attribute(sys, "stderr", SimpleNamespace(write=lambda text: None)),
    "warnings_are_errors": _warnings_are_errors,
    "debug_detail": _set(dist.get_debug_level, dist.set_debug_level, dist.DebugLevel.DETAIL),
}
ENTRIES: dict[str, Setting] = {
    f"{name}_on_{world_size}": Setting(within, world_size, name != "inference_mode")
    for name, within in SETTINGS.items()
    for world_size in (1, 2)
    if name != "debug_detail" or world_size > 1
}


def _state(seed: int, is_sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer, State]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    if dist.is_initialized() and is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    values = {"step": seed, "array": np.full(3, seed), "list": [1.5, "text"], "tensor": torch.full((2000,), seed)}
    return model, optimizer, {"model": model, "optim": optimizer, "values": values}


_OPTIONS: dict[str, dict[str, Any]] = {
    "save": {},
    "async": {"async_save": True},
    "lazy": {"async_save": True, "staging": "lazy"},
    "keeper": {"async_save": True, "keeper": {"linger": 0.0}},
}


def _save(tool: Tool, state: State, path: Path, call: str) -> None:
    if isinstance(tool, Ours):
        with closing(dcp_plugin.Checkpointer(**_OPTIONS[call])) as checkpointer:
            checkpointer.save(state, path.with_name("before")).wait()
            checkpointer.save(state, path).wait()
    elif call == "save":
        stock.save(_recipe(state), checkpoint_id=path)
    else:
        stock.async_save(_recipe(state), checkpoint_id=path).result()  # type: ignore[union-attr]


def run(entry: Setting, call: str, tool: Tool, trace: Trace) -> None:
    model, optimizer, state = _state(1, entry.is_sharded)
    trace.before(model, optimizer)
    if call in _OPTIONS:

        def save(state: State, path: Path) -> None:
            with entry.within():
                _save(tool, state, path, call)

        tool.do("save", save, state)
    else:
        tool.save(state)
    trace.saved(model, optimizer)
    if call == "tools":
        _see_with_tools(tool, trace, entry, state)
        return
    model, optimizer, target = _state(2, entry.is_sharded)

    def load(state: State, path: Path) -> None:
        with entry.within() if call == "load" else nullcontext():
            tool._load(state, path)

    tool.do("load", load, target)
    trace.resumed(model, optimizer)
    trace.see("values", target["values"], state["values"])
    _see_with_stock(trace, state, tool.folder / "checkpoint", isinstance(tool, Ours), entry.is_sharded)


def _see_with_stock(trace: Trace, state: State, path: Path, is_ours: bool, is_sharded: bool) -> None:
    """Stock reads what ours has written, outside of the setting, and every checksum is right."""
    model, _, target = _state(3, is_sharded)
    read = {"model": model, "values": target["values"]} if is_ours else {"values": target["values"]}
    stock.load(read, checkpoint_id=path)
    if not is_ours:
        model = state["model"]
    for number, (mine, right) in enumerate(zip(model.parameters(), state["model"].parameters(), strict=True)):
        trace.see(f"parameter {number} read by stock", mine.detach(), right.detach())
    trace.see("values read by stock", read["values"], state["values"])
    trace.see("verified", dcp_plugin.verify(path).ok, True)


def _see_with_tools(tool: Tool, trace: Trace, entry: Setting, state: State) -> None:
    path, values = tool.folder / "checkpoint", state["values"]
    rank = dist.get_rank() if dist.is_initialized() else 0
    seen: dict[str, Any] = {}
    if isinstance(tool, Ours):
        with entry.within():
            seen["verify"] = dcp_plugin.verify(path).ok
            seen["read"] = dcp_plugin.read(path, include=["values.*"])["values.tensor"]
            seen["inspect"] = dcp_plugin.inspect(path).step
            seen["diff"] = dcp_plugin.diff(path, path).equal
            own = path.with_name(f"copy-{rank}")
            dcp_plugin.copy(path, own)
            seen["copy"] = dcp_plugin.read(own, include=["values.*"])["values.tensor"]
            if not dist.is_initialized():
                dcp_plugin.export(path, path.with_name("export"), format="safetensors", include=["values.tensor"])
                (seen["export"],) = dcp_plugin.read(path.with_name("export")).values()
    right: dict[str, Any] = {"verify": True, "inspect": None, "diff": True}
    for name in ("verify", "read", "inspect", "diff", "copy", *([] if dist.is_initialized() else ["export"])):
        expected = right.get(name, values["tensor"])
        trace.see(name, seen.get(name, expected), expected)
