"""Hooks that delay changes of the state while it is being copied: optimizer steps and ``load_state_dict``.

A lazy save returns before its copy is complete. Until the copy has ended, every step of every ``torch.optim.Optimizer``
waits. Optimizers that are not saved wait as well, since they may train the same memory under other parameters. The
first lazy save of a process registers the step hook, which stays registered. Without a copy under way the hook does
nothing. Modules have their load hooks only during the copy.

An optimizer of torch changes nothing before it has called its closure. So the step waits after the closure, in which
Lightning runs the complete forward and backward pass. Other optimizers, such as SAM, may change weights earlier. So
their step waits before the closure.

The hooks are functions of this module and not methods, so a module can be copied or pickled while it has a hook. Only
the training thread removes the hooks: another thread could remove them while the training thread iterates over them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dcp_plugin.core.tensors._torch_modules import is_of_torch, pre_load_hooks

_under_way: list[tuple[threading.Event, RemovableHandle]] = []
"""The copies under way: the event of their end, and the handle of its hook on modules."""
os.register_at_fork(after_in_child=_under_way.clear)  # a forked child has no copying thread and would wait forever


def delay_changes(modules: Iterable[nn.Module], ended: threading.Event) -> None:
    """Let changes of the state wait for a copy.

    Args:
        modules: Modules whose ``load_state_dict`` also waits, whether called directly or for an outer module.
        ended: Event that is set when the copy is complete, and also when the copy or its save has failed.
    """
    _hold_back_steps()
    take_off_hooks()
    hooks = list(map(pre_load_hooks, modules))
    handle = RemovableHandle(OrderedDict(), extra_dict=hooks)
    _under_way.append((ended, handle))  # first: the hooks must come off if an interrupt comes among them
    for of_module in hooks:
        of_module[handle.id] = _before_load


def wait_until_copied() -> None:
    """Wait for every copy under way in this process. Called before parameters change."""
    for ended, _ in tuple(_under_way):
        ended.wait()
    take_off_hooks()


def take_off_hooks() -> None:
    """Remove the hooks of copies that have ended. Called in the training thread only."""
    for entry in tuple(_under_way):
        ended, hook = entry
        if ended.is_set():
            hook.remove()
            _under_way.remove(entry)


@functools.cache
def _hold_back_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    if not _under_way:
        return None
    if is_of_torch(optimizer):
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": _and_wait(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer
            return (args[0], _and_wait(args[1]), *args[2:]), kwargs
    wait_until_copied()
    return None


def _and_wait(closure: Callable[[], Any]) -> Callable[[], Any]:
    def closure_and_wait() -> Any:
        loss = closure()
        wait_until_copied()
        return loss

    return closure_and_wait


def _before_load(*args: Any) -> None:
    for ended, _ in tuple(_under_way):
        ended.wait()  # no take_off_hooks() here: torch is iterating over the module's hooks
