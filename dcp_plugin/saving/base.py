"""What a save leaves out on purpose: keys that nobody wants, and frozen parameters that another checkpoint has.

With ``trainable_only`` a frozen parameter is left out if it is, on every rank, what the base has: see
:mod:`dcp_plugin.saving.provenance`. It is saved otherwise, so nothing is lost, whatever was done to a "frozen"
parameter. Nothing is left out once the base is not there any more, or is another checkpoint.

All ranks leave out the same: a tensor is there as a whole or not at all. Rank 0 decides from what all ranks say.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dcp_plugin.config import CheckpointConfig
from dcp_plugin.errors import CheckpointMismatch, SaveFailed
from dcp_plugin.format.summary import Base
from dcp_plugin.messages import some
from dcp_plugin.ranks import Attempt, Ranks, pack, unpack
from dcp_plugin.saving.provenance import Origins, Source, reason_it_is_lost
from dcp_plugin.storage.open import Opened
from dcp_plugin.types import Flat

logger = logging.getLogger("dcp_plugin")

_MOST_KEYS = 20_000  # that are looked through for a hint


@dataclass(frozen=True)
class LeftOut:
    """What all ranks leave out, and the checkpoint that has it."""

    keys: dict[str, str]
    """Our key -> the key in the base."""
    path: Path | None = None
    fingerprint: str = ""

    def base_of(self, checkpoint: Path) -> dict[str, str]:
        """What the summary of a checkpoint says of its base."""
        assert self.path is not None
        relative = os.path.relpath(os.path.realpath(self.path), os.path.realpath(checkpoint))
        return Base(self.path, relative, self.fingerprint).to_summary()


@dataclass(frozen=True)
class _Claim:
    """What one rank tells: the globs that have matched, and of its frozen parameters where they came from and
    whether they are still the same. Bytes count for the choice of the base."""

    globs: tuple[int, ...]
    keys: tuple[str, ...]
    origins: dict[str, tuple[Source, str, bool, int]]


class KeySelection:
    """What the saves of one checkpointer leave out."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._origins = Origins(config)
        self._checked = not config.exclude
        self._matched: set[int] = set()
        self._said = ""
        self._lost = ""

    @property
    def remembers(self) -> bool:
        """Whether to tell of loads."""
        return self._config.trainable_only

    def without_excluded(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state without what nobody wants."""
        globs = self._config.exclude
        if not globs:
            return state
        kept = {}
        for key, value in state.items():
            hits = [number for number, glob in enumerate(globs) if fnmatchcase(key, glob)]
            self._matched.update(hits)
            if not hits:
                kept[key] = value
        return kept

    def loaded(self, state: Flat, names: Mapping[str, str], opened: Opened) -> None:
        """Remember what was loaded: see :meth:`Origins.loaded`."""
        self._origins.loaded(state, names, opened)

    def agree(self, state: Attempt[Flat], ranks: Ranks, path: Path) -> LeftOut:
        """What this save leaves out, the same on all ranks. Collective, if there is anything to agree on.

        Args:
            state: This rank's; if it could not be staged, all ranks raise that.

        Raises:
            SaveFailed: The base is not known, or would be overwritten.
            CheckpointMismatch: A glob matches nothing; the named base does not fit.
        """
        if self._checked and not self._config.trainable_only:
            return LeftOut({})

        decided = ranks.combine(
            f"decide what to leave out of {path}",
            lambda: pack(self._claim(state.get())),
            lambda claims: self._decide(list(map(unpack, claims)), path),
        )
        self._checked = True
        return decided

    def _claim(self, state: Flat) -> _Claim:
        if not self._config.trainable_only:
            return _Claim(tuple(self._matched), tuple(state) if not self._matched else (), {})
        origins = self._origins.of_frozen(state)
        return _Claim(tuple(self._matched), () if self._checked else tuple(state), origins)

    def _decide(self, claims: list[_Claim], path: Path) -> LeftOut:
        """On rank 0."""
        idle = set(range(len(self._config.exclude))).difference(*(claim.globs for claim in claims))
        if idle and not self._checked:
            globs = [self._config.exclude[number] for number in sorted(idle)]
            known = list(dict.fromkeys(key for claim in claims for key in claim.keys))
            near = difflib.get_close_matches(globs[0], known[:_MOST_KEYS], n=1, cutoff=0.5) or known[:1]
            raise CheckpointMismatch(
                f"exclude={globs!r} matches no key of the state; its keys look like {', '.join(near) or 'nothing'}"
            )
        frozen = list(dict.fromkeys(key for claim in claims for key in claim.origins))
        if not frozen:
            return LeftOut({})
        size: dict[str, int] = {}
        for source, _, same, nbytes in (one for claim in claims for one in claim.origins.values()):
            size[source.fingerprint] = size.get(source.fingerprint, 0) + nbytes * same
        sources = {one[0].fingerprint: one[0] for claim in claims for one in claim.origins.values()}
        sources.pop("", None)
        if not sources:
            raise SaveFailed(
                f"cannot save {path} with trainable_only=True: {len(frozen)} parameters are frozen ({some(frozen)}), "
                f"and nobody knows which checkpoint has them. Load that one first, through the same checkpointer, or "
                f"name it: base=PATH. trainable_only=False saves everything and links what does not change."
            )
        base = self._origins.named or max(sources.values(), key=lambda source: size[source.fingerprint])
        if path == base.path or (path.exists() and os.path.realpath(path) == os.path.realpath(base.path)):
            raise SaveFailed(
                f"cannot save {path} with trainable_only=True: it is the base, which has the frozen parameters that "
                f"this save leaves out. Save to a new name."
            )
        if self._is_lost(base):
            return LeftOut({})
        keys: dict[str, str] = {}
        changed: set[str] = set()
        for claim in claims:
            for key, (source, there, same, _) in claim.origins.items():
                if same and source.fingerprint == base.fingerprint and keys.setdefault(key, there) == there:
                    continue
                changed.add(key)
        kept = [key for key in frozen if key in changed]
        self._say(base, kept)
        left = {key: there for key, there in keys.items() if key not in changed}
        return LeftOut(left, base.path, base.fingerprint)

    def _is_lost(self, base: Source) -> bool:
        """Whether the base has been deleted, moved or overwritten since it was read: then a save without the frozen
        parameters could never be loaded."""
        reason = reason_it_is_lost(base)
        if reason and reason != self._lost:
            logger.warning("everything is saved, also what is frozen: %s.", reason)
        self._lost = reason
        return bool(reason)

    def _say(self, base: Source, saved: list[str]) -> None:
        said = some(saved, 5) if saved else ""
        if said and said != self._said:
            logger.warning("frozen parameters that are not as in %s are saved: %s", base.path, said)
        self._said = said
