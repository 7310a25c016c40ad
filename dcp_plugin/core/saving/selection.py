"""Keys that saves leave out: excluded keys, and frozen parameters that another checkpoint, the base, has.

With ``trainable_only`` a save leaves out frozen parameters by the first rule of :mod:`dcp_plugin.core.loading.origins`.
A parameter that differs is saved, for whatever reason it differs. A checkpoint of the run's own folder is no base,
because a rotation may delete it.

All ranks leave out the same keys: a tensor is stored with all its chunks or not at all. Rank 0 decides from the reports
of all ranks.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import MAX_CANDIDATES, CheckpointMismatch, logger, some
from dcp_plugin.core.format.summary import Base
from dcp_plugin.core.loading.origins import Origin, origins_of, was_loaded
from dcp_plugin.core.paths import Where, resolved
from dcp_plugin.core.ranks.collectives import Attempt, Ranks, pack, unpack
from dcp_plugin.core.runs.catalog import step_in_name
from dcp_plugin.core.types import Flat, ShardedValue


@dataclass(frozen=True)
class LeftOut:
    """Keys that all ranks leave out of a save, and the record of the base for its summary."""

    keys: Mapping[str, str] = field(default_factory=dict)  # our key -> the key in the base
    rounded: Mapping[str, str] = field(default_factory=dict)  # our key -> its dtype, if the base has more exact numbers
    base: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Frozen:
    """Report of one rank about its part of a frozen parameter."""

    origins: Mapping[str, Origin]  # by fingerprint: checkpoints that have its bytes, outside of the run's folder
    dtype: str
    nbytes: int  # on this rank: the checkpoint with the most bytes becomes the base


_TRAINED = _Frozen({}, "", 0)
"""Report about a parameter that is not frozen on this rank."""


class KeySelection:
    """Choice of the keys that the saves of one checkpointer leave out."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._globs_checked = not config.exclude
        self._matched: set[int] = set()  # numbers of the globs in ``exclude`` that have matched a key on this rank
        self._warned: set[str] = set()  # warnings that were logged

    def without_excluded(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state without the keys that the configuration excludes."""
        if not (globs := self._config.exclude):
            return state
        hits = {key: [number for number, glob in enumerate(globs) if fnmatchcase(key, glob)] for key in state}
        self._matched.update(*hits.values())
        return {key: value for key, value in state.items() if not hits[key]}

    def agree(self, state: Attempt[Flat], ranks: Ranks, path: Where) -> LeftOut:
        """Check the globs of the first save, and return the keys that the save leaves out, the same on all ranks.
        Collective, if any may be left out.

        Args:
            state: The state of this rank; if its staging failed, all ranks raise the failure.

        Raises:
            CheckpointMismatch: A glob matches no key.
        """
        if not self._globs_checked:
            keys = state.then(lambda flat: [] if self._matched else list(flat))
            step = f"check what to exclude from {path}"
            ranks.combine(step, lambda: (self._matched, keys.get()), self._refuse_idle_globs)
            self._globs_checked = True
        if not self._config.trainable_only:
            return LeftOut()
        return ranks.combine(
            f"decide what to leave out of {path}",
            lambda: pack(self._frozen_in(state.get(), path)),
            lambda reports: self._decide(list(map(unpack, reports)), path),
        )

    def _frozen_in(self, state: Flat, path: Where) -> dict[str, _Frozen]:
        """Return the report of this rank about each frozen parameter of a state of which it has a part."""
        run = _run_of(path)
        tensors = ((key, value) for key, value in state.items() if isinstance(value, ShardedValue))
        here = {key: value for key, value in tensors if not value.stored_whole and value.chunks}
        frozen = {key: value for key, value in here.items() if value.frozen}
        # Another rank may have frozen its part of a parameter that is trained here.
        trained = [key for key, value in here.items() if not value.frozen and was_loaded(key, value)]
        return dict.fromkeys(trained, _TRAINED) | {
            key: _Frozen(
                {origin.fingerprint: origin for origin in origins if run not in (origin.path, *origin.path.parents)},
                str(frozen[key].dtype),
                sum(chunk.tensor.nbytes for chunk in frozen[key].chunks),
            )
            for key, origins in origins_of(frozen, self._config.io.threads).items()
        }

    def _decide(self, reports: list[dict[str, _Frozen]], path: Where) -> LeftOut:
        """Decide on rank 0 from the reports of all ranks."""
        nbytes = Counter[str]()
        dtypes: dict[str, str] = {}
        common: dict[str, dict[str, Origin]] = {}  # parameter -> fingerprint -> origin, equal on all ranks
        for key, parameter in (item for report in reports for item in report.items()):
            before = common.get(key, parameter.origins)
            common[key] = {name: one for name, one in before.items() if parameter.origins.get(name) == one}
            nbytes.update(dict.fromkeys(parameter.origins, parameter.nbytes))
            dtypes[key] = parameter.dtype or dtypes.get(key, "")
        base = max(nbytes, key=nbytes.__getitem__, default="")
        left_out = {key: origins[base] for key, origins in common.items() if base in origins}
        if saved := [key for key in common if key not in left_out and dtypes[key]]:
            self._warn(
                f"{len(saved)} frozen parameters are saved in spite of trainable_only=True: {some(saved, 5)}. A save "
                f"leaves out those that have the bytes of one checkpoint outside of {_run_of(path)}, which a "
                f"checkpointer with trainable_only=True, init_from or dcp_plugin's from_pretrained has loaded."
            )
        if not left_out:
            return LeftOut()
        return LeftOut(
            {key: origin.key for key, origin in left_out.items()},
            {key: dtypes[key] for key, origin in left_out.items() if origin.rounded},
            Base(next(iter(left_out.values())).path, base).to_summary(),
        )

    def _refuse_idle_globs(self, reports: list[tuple[set[int], list[str]]]) -> None:
        """Refuse globs that match no key of any rank.

        Args:
            reports: For each rank, the numbers of the globs that match a key; and the keys, if none does.
        """
        matched = set[int]().union(*(globs for globs, _ in reports))
        globs = [glob for number, glob in enumerate(self._config.exclude) if number not in matched]
        if globs:
            keys = list(dict.fromkeys(key for _, others in reports for key in others))
            near = difflib.get_close_matches(globs[0], keys[:MAX_CANDIDATES], n=1, cutoff=0.5) or keys[:1]
            raise CheckpointMismatch(
                f"exclude={globs!r} matches no key of the state; its keys look like {', '.join(near) or 'nothing'}"
            )

    def _warn(self, text: str) -> None:
        """Log a warning once."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)


def _run_of(path: Where) -> Where:
    """Return the folder of a run's checkpoints, of which ``path`` is one, or a part of one."""
    return resolved(path.parent if step_in_name(path.parent) is None else path.parent.parent)
