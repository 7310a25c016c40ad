"""Where a part of the state is found in a checkpoint: under its own name, or under another.

A module may have been saved as a part of a larger one (the ``LightningModule`` around it, say), or the other way
round. Then its FQNs differ from the stored ones by one prefix, and so do those in its optimizer's keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dcp_plugin.storage.index import CheckpointIndex, Entry
from dcp_plugin.storage.table import default_path
from dcp_plugin.types import KeyPath


@dataclass(frozen=True)
class Prefix:
    """What the checkpoint's FQNs have in front of ours (``added``), or ours in front of the checkpoint's."""

    added: str = ""
    dropped: str = ""

    def stored(self, fqn: str) -> str:
        return self.added + fqn.removeprefix(self.dropped)

    def here(self, stored: str) -> str | None:
        """Our name of a stored FQN; None if it is outside of what we load."""
        return self.dropped + stored.removeprefix(self.added) if stored.startswith(self.added) else None


@dataclass(frozen=True)
class Source:
    """The name of a part in the checkpoint, and how its keys are called there."""

    name: str
    kind: str
    prefix: Prefix = Prefix()

    def stored(self, key: str) -> str:
        """The full key in the checkpoint of a key relative to the part."""
        head, fqn = self._split(key)
        return join(self.name, head + self.prefix.stored(fqn))

    def entries(self, index: CheckpointIndex) -> tuple[dict[str, Entry], dict[str, KeyPath]]:
        """What is stored for the part, and the path of each key, by our keys relative to the part.

        The name itself, if it is a key, is the relative key ``""``.
        """
        entries: dict[str, Entry] = {}
        paths: dict[str, KeyPath] = {}
        for full in ([self.name] if self.name in index else []) + index.under(f"{self.name}."):
            head, fqn = self._split(full[len(self.name) + 1 :])
            here = self.prefix.here(fqn)
            if here is not None:
                entries[head + here] = index[full]
                paths[head + here] = _below(self.name, index.path_of(full), head + here)
        return entries, paths

    def _split(self, key: str) -> tuple[str, str]:
        """An optimizer's keys have ``state.`` or ``param_groups.`` before the FQN."""
        if self.kind != "optimizer":
            return "", key
        head, dot, rest = key.partition(".")
        return head + dot, rest


def _below(name: str, path: KeyPath, key: str) -> KeyPath:
    """The path of a key below a part. In the checkpoint the two may be one step: it was saved as a flat dictionary."""
    if path[0] == name:
        return path[1:]
    for depth in range(2, len(path) + 1):
        if ".".join(str(part[1] if isinstance(part, tuple) else part) for part in path[:depth]) == name:
            return path[depth:]
    return default_path(key)


def find_prefix(targets: Collection[str], stored: Iterable[str]) -> Prefix | None:
    """The one prefix by which all of ``targets`` and ``stored`` names, of which none agree, fit together.

    Either every target is stored behind the prefix, or every stored name is a target behind it.
    """
    there, here = dict.fromkeys(stored), dict.fromkeys(targets)
    outer = _prefixes(here, there)
    if len(outer) == 1:
        return Prefix(added=outer[0])
    inner = _prefixes(there, here)
    return Prefix(dropped=inner[0]) if not outer and len(inner) == 1 else None


def _prefixes(part: dict[str, None], whole: dict[str, None]) -> list[str]:
    """Every prefix that makes all names of ``part`` names of ``whole``."""
    if not part:
        return []
    first = next(iter(part))
    candidates = [name.removesuffix(first) for name in whole if name.endswith(f".{first}")]
    return [prefix for prefix in candidates if all(prefix + name in whole for name in part)]


def join(name: str, key: str) -> str:
    return f"{name}.{key}" if key else name
