"""Unpickling of values: objects that only executing code would restore are described by their pickles.

A :class:`Described` takes the place of each such object and keeps its name, arguments and state.
:mod:`dcp_plugin.format.pickles.rebuild` makes objects of them afterwards, or refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dcp_plugin.format.pickles.unpickler import FILE, StandIn

FACTORIES: dict[str, type] = {f"builtins.{kind.__name__}": kind for kind in (int, float, bool, str, list, dict, set)}
FACTORIES |= {"builtins.tuple": tuple, "numpy.ndarray": np.ndarray}
"""Classes that a ``defaultdict`` may have as its factory, by name."""


@dataclass(frozen=True)
class RefusedValue:
    """Entry of an index for a value with stand-ins in it. ``of`` is the name of the refused global."""

    of: str


def refused_in(value: Any) -> str:
    """Return the name of the global of the first stand-in in a value; empty if the value has none."""
    for leaf in leaves_of(value):
        if isinstance(leaf, StandIn) or (isinstance(leaf, type) and issubclass(leaf, StandIn)):
            return leaf.of
    return ""


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested containers and the keys of mappings. A pickle can nest containers endlessly, and in
    themselves."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, (Mapping, list, tuple, set, frozenset)):
            if id(node) not in seen:
                seen.add(id(node))
                todo += node
                if isinstance(node, Mapping):
                    todo += node.values()
        else:
            yield node


class Described(StandIn):
    """Object that is to be rebuilt."""

    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Described:
        described = super().__new__(cls)
        described.args = args  # type: ignore[attr-defined]
        return described  # type: ignore[return-value]

    def __setstate__(self, state: Any) -> None:
        self.state = state


VALUE = replace(FILE, stand_in=Described)
