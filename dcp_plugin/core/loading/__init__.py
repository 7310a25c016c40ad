"""One load, from an opened checkpoint to filled targets.

Input: a state, a path and the rules of a partial load. Output: the filled objects and a
:class:`~dcp_plugin.core.records.LoadReport`. The rule: all checks run on all ranks before the first byte of a target is
overwritten, and a single error names all misfits.

This module has the vocabulary that the modules of this folder share: :class:`KeyMap` and :class:`LoadedPart`. Above it
are :mod:`origins` and :mod:`renames`, then :mod:`matching`, :mod:`differences` and :mod:`load`, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from weakref import WeakSet

from torch import nn

from dcp_plugin.core.format.index import CheckpointIndex, Entry, KeyPath, default_path
from dcp_plugin.core.format.keys import join
from dcp_plugin.core.paths import Where


@dataclass(frozen=True)
class LoadedPart:
    """Part of a checkpoint that this process has loaded, for :mod:`~dcp_plugin.core.loading.origins`."""

    keys: set[str] = field(default_factory=set)
    """Keys in the checkpoint, without those of optimizers."""
    modules: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """The modules that the loads have filled, with their submodules."""


loaded_parts: dict[tuple[Where, str], LoadedPart] = {}
"""The checkpoints that this process has loaded last, by path and fingerprint, the oldest first. The fingerprint is
empty if computing it takes reads."""

MOST_REMEMBERED = 16
"""Number of checkpoints in :data:`loaded_parts`: an evaluation may load thousands, each with many keys."""


on_delivery: ContextVar[Callable[..., AbstractContextManager[Callable[[], None]]]] = ContextVar(
    "on_delivery", default=lambda *load: nullcontext(lambda: None)
)
"""Function of a resume that watches its loads. It gets the state, the :class:`~dcp_plugin.core.records.FittedLoad`,
the ranks and the reader. Its block encloses the stages that fill the targets and pass them to their objects. The
function of the block is called between the two."""


class KeyMap:
    """The place of each key of one object in the checkpoint: its own key, below a name.

    Args:
        kind: ``"module"``, ``"optimizer"``, or any other text for data.
        name: The name of the object in the checkpoint.
    """

    is_renamed = False
    """True if any key may be stored under another name than the object's."""
    unnamed_groups = False
    """True if a stock optimizer's param groups are left out, because their keys have no FQN to rename."""

    def __init__(self, kind: str, name: str) -> None:
        self.name = name
        self.is_data = kind not in ("module", "optimizer")

    def stored(self, key: str) -> str:
        """Return the full key in the checkpoint for a key relative to the object."""
        return join(self.name, key)

    def entries(self, index: CheckpointIndex) -> tuple[dict[str, Entry], dict[str, KeyPath]]:
        """Return the stored entries of the object by relative key, and the path of each key if it is known.

        If the object's name itself is a stored key, its relative key is ``""``.
        """
        front = f"{self.name}."
        full_keys = {"": self.name} if self.name in index else {}
        full_keys |= {full.removeprefix(front): full for full in index.under(front) if full != front}
        paths = {key: path_below("", front, index.path_of(full)) for key, full in full_keys.items()}
        return self.entries_at(index, full_keys, paths)

    def entries_at(
        self, index: CheckpointIndex, full_keys: Mapping[str, str], paths: Mapping[str, KeyPath | None]
    ) -> tuple[dict[str, Entry], dict[str, KeyPath]]:
        """Return the result of :meth:`entries`, given the stored key of each relative key, and its path if that follows
        from the stored path."""
        at = {key: paths[key] or self.own_path(key) for key in full_keys}
        return (
            {key: index[full] for key, full in full_keys.items()},
            {key: path for key, path in at.items() if path is not None},
        )

    def own_path(self, key: str) -> KeyPath | None:
        """Return the path of a key in the object, without the stored path. None for data: an object of data knows the
        paths of its keys."""
        if not key or self.is_data:
            return None if key else ()
        return default_path(key)


def path_below(prefix: str, stored_prefix: str, path: KeyPath) -> KeyPath | None:
    """Return the path of a relative key: the stored key's ``path`` with ``prefix`` in place of ``stored_prefix``. None
    if ``stored_prefix`` ends inside a step, which may contain dots, as keys of a flat dictionary do."""
    front = tuple(prefix.removesuffix(".").split(".")) if prefix else ()
    text = ""
    for depth, step in enumerate(path):
        if text == stored_prefix:
            return front + path[depth:]
        text += f"{step[1] if isinstance(step, tuple) else step}."
    return None
