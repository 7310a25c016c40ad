"""Holds back what would change the state while it is being copied: steps of optimizers and ``load_state_dict``.

A lazy save returns before its copy is made. Until it is, every step of every ``torch.optim.Optimizer`` waits: also of
those that are not saved, since they may train the same memory under other parameters. The hook for that is registered
with the first lazy save of a process and stays; without a copy under way it does nothing. Modules have their hooks only
for the time of the copy.

An optimizer of torch's own that is given a closure changes nothing before it has called it, so the wait comes after the
closure, in which Lightning runs the full forward and backward. Other optimizers may change weights before (SAM).

Hooks are functions of this module and not methods, so a module can be copied or pickled while it has one. The training
thread removes them, when it comes by: another could meet it iterating over them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dcp_plugin.tensors._torch_modules import is_of_torch

_under_way: list[Guard] = []
os.register_at_fork(after_in_child=_under_way.clear)  # a child has no thread that copies: it would wait forever


class Guard:
    """One copy under way. Until :attr:`copied` is set, what would change the state waits.

    Args:
        modules: To load into one of them, alone or as a part of another, waits, too.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        _hold_back_steps()
        take_off_hooks()
        self.copied = threading.Event()
        """Set when the copy is made, or will never be: what was held back goes on."""
        self.hooks: list[RemovableHandle] = [
            module.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
            for module in modules
        ]
        _under_way.append(self)


def wait_until_copied() -> None:
    """Wait for every copy under way in this process, before parameters are changed."""
    for guard in tuple(_under_way):
        guard.copied.wait()
    take_off_hooks()


def take_off_hooks() -> None:
    """Remove the hooks of finished copies. Called by the thread that trains."""
    for guard in tuple(_under_way):
        if guard.copied.is_set():
            for hook in guard.hooks:
                hook.remove()
            _under_way.remove(guard)


@functools.cache
def _hold_back_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    if not _under_way:
        return None
    if is_of_torch(optimizer):
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": _and_wait(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # the first one is the optimizer
            return (args[0], _and_wait(args[1]), *args[2:]), kwargs
    wait_until_copied()
    return None


def _and_wait(closure: Callable[[], Any]) -> Callable[[], Any]:
    def closure_and_wait() -> Any:
        loss = closure()
        wait_until_copied()
        return loss

    return closure_and_wait


def _before_load(module: nn.Module, *args: Any) -> None:
    for guard in tuple(_under_way):
        guard.copied.wait()  # its hooks are not removed here: this one is being called
