"""Which keys of a target a load fills."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dcp_plugin.errors import CheckpointMismatch


@dataclass(frozen=True)
class PartialLoad:
    """Load a part of a checkpoint; only the bytes of what is selected are read, and the rest keeps its values.

    Globs are matched against the *target's* keys: ``model.encoder.*``, ``optim.state.*``. A glob that matches nothing
    is an error.
    """

    include: tuple[str, ...] = ("*",)
    """What to load."""

    exclude: tuple[str, ...] = ()
    """What to leave out of that."""

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            globs = getattr(self, name)
            object.__setattr__(self, name, (globs,) if isinstance(globs, str) else tuple(globs))

    def selects(self, key: str) -> bool:
        return _matches(key, self.include) and not _matches(key, self.exclude)

    def check(self, keys: Iterable[str]) -> None:
        """Raise CheckpointMismatch for globs that match none of the target's keys, with the nearest key."""
        keys = list(keys)
        idle = [glob for glob in (*self.include, *self.exclude) if not any(fnmatchcase(key, glob) for key in keys)]
        if idle:
            hints = difflib.get_close_matches(idle[0], keys[:20_000], n=1, cutoff=0.5) or keys[:1]
            nearest = f" The target's keys look like {hints[0]}." if hints else ""
            raise CheckpointMismatch(f"PartialLoad: {', '.join(idle)} matches no key of the target.{nearest}")


def _matches(key: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)
