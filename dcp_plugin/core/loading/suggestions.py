"""Error lines about keys that do not fit, each with a change that makes them fit.

The functions compare only the text of keys. All searches are bounded: a checkpoint may have a million keys, and the
error must still appear at once.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice, zip_longest

from dcp_plugin.core.errors import MAX_CANDIDATES, nearest, some
from dcp_plugin.core.format.summary import Summary

_SAMPLE = 200
_SPELLED_OUT = 4
_AS_RENAME = "rename={{{here!r}: {there!r}}}"
_AS_SOURCE = "source={there!r}"


@dataclass(frozen=True)
class Fit:
    """A rename that would help: the prefix in the state, the prefix in the checkpoint, the number of missing targets
    that it finds (in a sample), and the number of missing targets."""

    here: str
    there: str
    found: int
    of: int

    def below(self, prefix: str) -> Fit:
        """Return the same rename for a longer prefix in the state."""
        return replace(self, here=prefix, there=self.there + prefix.removeprefix(self.here))


def about_missing(
    missing: Mapping[str, str], renames: list[Fit], stored: Collection[str], of_submodule: bool
) -> list[str]:
    """Return a line for each of a few missing keys, or one line for many, and the rename that would find them.

    Args:
        missing: Keys of the target -> keys under which the checkpoint should have them.
        renames: Result of :func:`fitting_renames` for them.
        stored: The keys of the checkpoint.
        of_submodule: True if a sub-module is loaded. The advice is then a ``source``, not a rename.
    """
    if len(missing) > _SPELLED_OUT and renames:
        lines = [f"{len(missing)} keys of the target are not in the checkpoint ({some(list(missing), 3)})"]
    else:
        near = [nearest(name, stored) if not renames else "" for name in islice(missing.values(), _SPELLED_OUT)]
        lines = [
            f"{key} is not in the checkpoint{'' if key == name else f' as {name}'}{hint}"
            for key, name, hint in zip_longest(missing, missing.values(), near, fillvalue="")
        ]
    return [*lines, _advice(renames, _AS_SOURCE if of_submodule else _AS_RENAME)] if renames else lines


def about_optimizer(name: str, candidates: list[str], stored: Collection[str], names: Collection[str]) -> str:
    """Return a line about an optimizer that is not in the checkpoint.

    Args:
        candidates: Optimizers of the checkpoint whose name no object of the state has.
        names: Names of the objects in the state.
    """
    candidates = candidates or [front for front in _optimizers(stored) if front not in names]
    if not candidates:
        return f"{name!r} is not in the checkpoint, and no other optimizer is known in it"
    which = f"optimizer{'s' if len(candidates) > 1 else ''} {some([repr(other) for other in candidates])}"
    example = _AS_RENAME.format(here=f"{name}.", there=f"{candidates[0]}.")
    return f"{name!r} is not in the checkpoint, which has the {which}: choose one, for example with {example}"


def _optimizers(stored: Collection[str]) -> list[str]:
    """Return the names in a foreign checkpoint that look like optimizers."""
    inside: dict[str, set[str]] = defaultdict(set)
    for key in islice(stored, MAX_CANDIDATES):
        front, _, tail = key.partition(".")
        inside[front].add(tail.partition(".")[0])
    return [front for front, names in inside.items() if {"state", "param_groups"} <= names]


def about_wrapper(names: Collection[str], stored: Collection[str]) -> str:
    """Return a line if the checkpoint has the complete state under one additional name, as with the ``AppState`` of
    torch's tutorial; else ""."""
    keys = list(islice(stored, MAX_CANDIDATES))
    for front in dict.fromkeys(key.partition(".")[0] for key in keys):
        if all(any(key.startswith(f"{front}.{name}.") for key in keys) for name in names):
            inner = ", ".join(f"{name!r}: …" for name in names)
            return (
                f"{some(list(names))} {'is' if len(names) == 1 else 'are'} not in the checkpoint, but below {front!r} "
                f"in it: load({{{front!r}: {{{inner}}}}}, …) finds {'it' if len(names) == 1 else 'them'}"
            )
    return ""


def about_unwrapped(name: str, inside: Iterable[str], stored: Collection[str]) -> str:
    """Return a line if an object is not in the checkpoint, but its keys are, without the object's name; else ""."""
    fronts = {key.partition(".")[0] for key in inside}
    stored_fronts = {key.partition(".")[0] for key in islice(stored, MAX_CANDIDATES)}
    if not fronts or not fronts <= stored_fronts:
        return ""
    rename = _AS_RENAME.format(here=f"{name}.", there="")
    return f"{name} is not in the checkpoint, but its keys are, without that name: {rename} would find them"


def about_unexpected(keys: list[str]) -> list[str]:
    """Return a line for each of a few keys, or one line for many."""
    if len(keys) > _SPELLED_OUT:
        return [f"{len(keys)} keys are only in the checkpoint ({some(keys, 6)})"]
    return [f"{key} is only in the checkpoint" for key in keys]


def about_prefix(here: str, stored_prefix: str, renames: list[Fit], of_submodule: bool) -> str:
    """Return a line about a rename, or the ``source`` of a sub-module, to a prefix that no stored key has.

    Args:
        renames: Result of :func:`fitting_renames` for the keys that this rename makes missing.
    """
    form = _AS_SOURCE if of_submodule else _AS_RENAME
    rename = form.format(here=here, there=stored_prefix)
    line = f"no key of the checkpoint starts with {stored_prefix!r}, as {rename} requires"
    return f"{line}. {_advice(renames, form)}" if renames else line


def about_excluded(summary: Summary | None, missing: Iterable[str]) -> list[str]:
    """Return a line if the save left out some of the missing keys on request; else an empty list."""
    globs = summary.exclude if summary else []
    excluded = [key for key in missing if any(fnmatchcase(key, glob) for glob in globs)]
    return [f"{some(excluded, 3)} left out at save by exclude={globs!r}"] if excluded else []


def explained_by(renames: Iterable[Fit], keys: Iterable[str]) -> set[str]:
    """Return the keys of the checkpoint to which the renames map the target's keys."""
    keys = list(keys)
    return {fit.there + key.removeprefix(fit.here) for fit in renames for key in keys if key.startswith(fit.here)}


def about_globs(idle: Iterable[str], keys: Collection[str]) -> list[str]:
    """Return a line for each glob that matches no key of the target."""
    return [f"{glob!r} matches no key of the target{about_front(glob, keys)}" for glob in idle]


def about_front(pattern: str, keys: Collection[str]) -> str:
    """Return a hint if the beginning of a glob or rename misspells a prefix of the target's keys; else ""."""
    front = re.split(r"^re:|[*?[]", pattern, maxsplit=1)[0]
    fronts = list({key[:at]: None for key in islice(keys, MAX_CANDIDATES) for at in _starts(key) if at})
    near = [name for name in fronts if name.endswith(f".{front}")]
    near += difflib.get_close_matches(front, fronts, n=1, cutoff=0.6)
    return f": did you mean {near[0] + pattern.removeprefix(front)!r}?" if front and near else ""


def fitting_renames(targets: Collection[str], free: Collection[str], fitting: Collection[str]) -> list[Fit]:
    """Return the renames that find the most targets: one, or two that are equally good.

    A candidate is a pair of prefixes, of a target and a free key with a common tail. A sample of the targets judges
    each candidate.

    Args:
        targets: Keys of the target that the checkpoint does not have.
        free: Keys of the checkpoint that no target takes.
        fitting: Keys of the target that the checkpoint has. A rename of their prefix would make them missing.
    """
    fronts: dict[str, list[str]] = defaultdict(list)
    stored = dict.fromkeys(islice(free, MAX_CANDIDATES))
    for key in stored:
        for at in _starts(key):
            fronts[key[at:]].append(key[:at])
    sample = list(islice(targets, _SAMPLE))
    candidates = Counter(
        (target[:at], front)
        for target in sample
        for at in list(_starts(target))[:-1] or [0]
        for front in fronts.get(target[at:], ())[:8]
        if at or front  # equal names: the key is stored, and another rename makes it missing
    )
    judged = []
    for (prefix, stored_prefix), _ in candidates.most_common(50):
        covered = [target for target in sample if target.startswith(prefix)]
        hits = sum(stored_prefix + target.removeprefix(prefix) in stored for target in covered)
        loses_others = any(key.startswith(prefix) for key in islice(fitting, MAX_CANDIDATES))
        if hits * 2 >= len(covered) and not loses_others:
            judged.append(Fit(prefix, stored_prefix, hits, len(targets)))
    ranks = [(-fit.found, len(fit.here)) for fit in judged]
    return [fit for fit, rank in zip(judged, ranks, strict=True) if rank == min(ranks)][:2]


def _advice(renames: list[Fit], form: str) -> str:
    first = renames[0]
    of = "all" if first.found == first.of else first.found if first.of <= _SAMPLE else "most"
    which = " or ".join(form.format(here=fit.here, there=fit.there) for fit in renames)
    return f"{which} would find {of} of them"


def _starts(key: str) -> Iterator[int]:
    """Yield the positions at which the segments of a key start."""
    yield 0
    yield from (at + 1 for at, letter in enumerate(key) if letter == ".")
