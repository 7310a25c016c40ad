"""The modules of a tree and their names, walked once for all who ask in the course of one save.

A walk through a large model takes a good part of what a lazy save may take, and names, wrappers, marks and what is
trained each want one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

Named = Sequence[tuple[str, nn.Module]]

_walks: ContextVar[dict[int, Named] | None] = ContextVar("dcp_walks", default=None)


def named_modules(module: nn.Module) -> Named:
    """``module.named_modules()``."""
    walks = _walks.get()
    if walks is None:
        return tuple(module.named_modules())
    if id(module) not in walks:
        walks[id(module)] = tuple(module.named_modules())
    return walks[id(module)]


@contextmanager
def walked_once() -> Iterator[None]:
    """Within, modules are taken to stay where they are: each tree is walked at most once."""
    before = _walks.set({})
    try:
        yield
    finally:
        _walks.reset(before)
