"""Objects that only executing code would restore, with stand-ins in their place, so that what is beside them loads.

Many files of weights carry the ``argparse.Namespace`` of their training, or a class of its authors. Torch's own
restricted unpickler still does the work, and calls nothing but what it always allows, and the stand-ins: classes that
take any arguments and any state, and keep none of it. What they stand for is never imported.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

_MOST = 1000  # names in one file
_registering = threading.Lock()


class StandIn:
    """An object that was not restored. Each class of such objects has a subclass."""

    of: ClassVar[str] = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass(frozen=True)
class RefusedValue:
    """What is in an index instead of a value with stand-ins in it. ``of`` names what would be executed."""

    of: str


def load_with_stand_ins(file: Path | io.BytesIO, load: Callable[[], Any], kind: type[StandIn] = StandIn) -> Any:
    """``load()`` of the file while torch takes a stand-in for every name that it would refuse.

    Args:
        kind: What the stand-ins are.

    Raises:
        Exception: Whatever torch raises for a file that needs more than that: names of the operating system, which it
            never takes, or objects that are filled like a list or a dictionary.
    """
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)  # looks at the pickle without loading it
    if len(names) > _MOST:
        raise ValueError(f"{len(names)} names")
    known: list[Any] = [(type("StandIn", (kind,), {"of": name}), name) for name in names]
    with _registering, torch.serialization.safe_globals(known):
        return load()


def refused_in(value: Any) -> str:
    """What the first stand-in in a value stands for; empty if there is none."""
    for leaf in leaves_of(value):
        if isinstance(leaf, StandIn):
            return leaf.of
        if isinstance(leaf, type) and issubclass(leaf, StandIn):
            return leaf.of
    return ""


def leaves_of(value: Any) -> Iterator[Any]:
    """What is in nested containers, keys of mappings too. A pickle can nest them without end, and in themselves."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, (Mapping, list, tuple, set, frozenset)):
            if id(one) not in seen:
                seen.add(id(one))
                todo += one
                if isinstance(one, Mapping):
                    todo += one.values()
        else:
            yield one
