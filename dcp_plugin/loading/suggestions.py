"""Error lines about keys that do not fit, with the change that makes them fit.

Only text is compared here. Everything is bounded: a checkpoint may have a million keys, an error has to come at once.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice, zip_longest

from dcp_plugin.errors import MAX_CANDIDATES, nearest, some
from dcp_plugin.format.summary import Summary

_SAMPLE = 200
_SPELLED_OUT = 4
_MOST_GLOBS = 8
_AS_RENAME = "rename={{{here!r}: {there!r}}}"
_AS_SOURCE = "source={there!r}"


@dataclass(frozen=True)
class Fit:
    """A rename that would help: prefix here, prefix in the checkpoint, and how many of how many targets it finds."""

    here: str
    there: str
    found: int
    of: int

    def below(self, prefix: str) -> Fit:
        """The same for a longer prefix here."""
        return replace(self, here=prefix, there=self.there + prefix.removeprefix(self.here))


def about_missing(
    missing: Mapping[str, str], renames: list[Fit], stored: Collection[str], of_submodule: bool
) -> list[str]:
    """A line for each of a few missing keys, or one for many; and the rename that would find them.

    Args:
        missing: Keys of the target -> keys in the checkpoint, where they are not.
        renames: What :func:`fitting_renames` found for them.
        stored: The keys of the checkpoint.
        of_submodule: Whether a sub-module is loaded, for which a rename is a source.
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


def about_optimizer(name: str, others: list[str], stored: Collection[str], names: Collection[str]) -> str:
    """About an optimizer of which nothing is in the checkpoint.

    Args:
        others: The optimizers of the checkpoint that nothing here has the name of.
        names: What the state calls its parts.
    """
    if not others and (unknown := [front for front in _optimizers(stored) if front not in names]):
        return (
            f"{name!r} is not in the checkpoint, which seems to call it {unknown[0]!r}: have it under that name in the "
            f"state, {{{unknown[0]!r}: …}} instead of {{{name!r}: …}}"
        )
    if not others:
        return f"{name!r} is not in the checkpoint, and no other optimizer is known in it; it has {_fronts('', stored)}"
    which = f"optimizer{'s' if len(others) > 1 else ''} {some([repr(other) for other in others])}"
    example = _AS_RENAME.format(here=f"{name}.", there=f"{others[0]}.")
    return f"{name!r} is not in the checkpoint, which has the {which}: say which is meant, as {example} does"


def _optimizers(stored: Collection[str]) -> list[str]:
    """The names of a foreign checkpoint that look like those of optimizers."""
    inside: dict[str, set[str]] = defaultdict(set)
    for key in islice(stored, MAX_CANDIDATES):
        front, _, rest = key.partition(".")
        inside[front].add(rest.partition(".")[0])
    return [front for front, names in inside.items() if {"state", "param_groups"} <= names]


def about_wrapper(names: Collection[str], stored: Collection[str]) -> str:
    """About a state of which nothing is in the checkpoint but below one name more, as the ``AppState`` of torch's
    tutorial has it; empty if that is not so."""
    known = list(islice(stored, MAX_CANDIDATES))
    for front in dict.fromkeys(key.partition(".")[0] for key in known):
        if all(any(key.startswith(f"{front}.{name}.") for key in known) for name in names):
            inner = ", ".join(f"{name!r}: …" for name in names)
            return (
                f"{some(list(names))} {'is' if len(names) == 1 else 'are'} not in the checkpoint, but below {front!r} "
                f"in it: load({{{front!r}: {{{inner}}}}}, …) finds {'it' if len(names) == 1 else 'them'}"
            )
    return ""


def about_unwrapped(name: str, inside: Iterable[str], stored: Collection[str]) -> str:
    """About an object of which nothing is in the checkpoint, whose own keys are there without its name; empty if they
    are not."""
    fronts = {key.partition(".")[0] for key in inside}
    there = {key.partition(".")[0] for key in islice(stored, MAX_CANDIDATES)}
    if not fronts or not fronts <= there:
        return ""
    rename = _AS_RENAME.format(here=f"{name}.", there="")
    return f"{name} is not in the checkpoint, but what it has is, without that name: {rename} would find it"


def about_shapes(
    misfits: Collection[str], modules: Mapping[str, Collection[str]], stored: Collection[str], cast: bool
) -> str:
    """What leaves out the parts of modules that have another shape here, with their optimizer state; empty if they are
    most of a module, which is then another one.

    Args:
        misfits: Keys of the target.
        modules: The module of each key's first name -> its optimizers.
        cast: Whether values of the rest are converted, which a partial load has to be told.
    """
    known = list(islice(stored, MAX_CANDIDATES))
    globs: dict[str, None] = {}
    for key in misfits:
        module = next((name for name in modules if key.startswith(f"{name}.")), None)
        if module is None:
            return ""
        inner = key.removeprefix(f"{module}.")
        front, _, last = inner.rpartition(".")
        globs[f"{module}.{front}.*" if front else key] = None
        for optimizer in modules[module]:
            state = f"{optimizer}.state.{front or last}."
            if any(name.startswith(state) for name in known):
                globs[f"{state}*"] = None
    if not globs or len(globs) > _MOST_GLOBS:
        return ""
    more = ", cast=True" if cast else ""
    return f"a new head, say, keeps its values with partial=PartialLoad(exclude={list(globs)}{more})"


def about_unexpected(keys: list[str]) -> list[str]:
    """A line for each of a few keys, or one for many."""
    if len(keys) > _SPELLED_OUT:
        return [f"{len(keys)} keys are only in the checkpoint ({some(keys, 6)})"]
    return [f"{key} is only in the checkpoint" for key in keys]


def about_prefix(here: str, there: str, renames: list[Fit], free: Collection[str], of_submodule: bool) -> str:
    """About a rename to a prefix that no stored key has.

    Args:
        renames: What :func:`fitting_renames` found for the keys that are lost by it.
        of_submodule: Whether it was given as the source of a sub-module.
    """
    form = _AS_SOURCE if of_submodule else _AS_RENAME
    given = form.format(here=here, there=there)
    said = f"no key of the checkpoint starts with {there!r}, as {given} says; it has {_fronts(there, free)}"
    return f"{said}. {_advice(renames, form)}" if renames else said


def about_excluded(summary: Summary | None, missing: Iterable[str]) -> list[str]:
    """About missing keys that the save has left out on purpose."""
    globs = summary.exclude if summary else []
    found = [key for key in missing if any(fnmatchcase(key, glob) for glob in globs)]
    return [f"{some(found, 3)} left out at save by exclude={globs!r}"] if found else []


def taken_by(renames: Iterable[Fit], keys: Iterable[str]) -> set[str]:
    """The keys of the checkpoint that the renames would give to the target's keys."""
    keys = list(keys)
    return {fit.there + key.removeprefix(fit.here) for fit in renames for key in keys if key.startswith(fit.here)}


def about_globs(idle: Iterable[str], keys: Collection[str], stored: Iterable[str]) -> list[str]:
    """About globs that match no key of the target."""
    lines = []
    for glob in idle:
        if meant := _meant(glob, keys):
            hint = f": did you mean {meant!r}?"
        elif any(fnmatchcase(key, glob) for key in islice(stored, MAX_CANDIDATES)):
            hint = ": it matches keys of the checkpoint, but globs are about the names in the target" + _such_as(keys)
        else:
            hint = _such_as(keys)
        lines.append(f"{glob!r} matches no key of the target{hint}")
    return lines


def about_front(here: str, keys: Collection[str]) -> str:
    """The prefix of the target's keys that a given one may be a misspelling of."""
    known = list(_all_fronts(keys))
    name = next((front for front in known if front.endswith(f".{here}")), None)
    near = [name] if name else difflib.get_close_matches(here, known, n=1, cutoff=0.6)
    return f": did you mean {near[0]!r}?" if near else _such_as(keys)


def fitting_renames(targets: Collection[str], free: Collection[str], fitting: Collection[str] = ()) -> list[Fit]:
    """The renames that find the most targets; several if they are equally good.

    Candidates are the differences in front of the longest common tails; each is judged by all targets.

    Args:
        targets: The keys of the target that the checkpoint does not have.
        free: The keys of the checkpoint that no target takes.
        fitting: The keys of the target that the checkpoint has: a rename of their prefix would lose them.
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
        if at or front  # a key that is there under its own name is lost by another rename
    )
    judged = []
    for here, there in dict(candidates.most_common(50)):
        mine = [target for target in sample if target.startswith(here)]
        found = sum(there + target.removeprefix(here) in stored for target in mine)
        loses_others = any(key.startswith(here) for key in islice(fitting, MAX_CANDIDATES))
        if found * 2 >= len(mine) and not loses_others:
            judged.append(Fit(here, there, found, len(targets)))
    best = max((fit.found for fit in judged), default=0)
    equal = [fit for fit in judged if fit.found == best]
    shortest = min((len(fit.here) for fit in equal), default=0)
    return [fit for fit in equal if len(fit.here) == shortest][:2]


def _advice(renames: list[Fit], form: str) -> str:
    first = renames[0]
    of = "all" if first.found == first.of else first.found if first.of <= _SAMPLE else "most"
    which = " or ".join(form.format(here=fit.here, there=fit.there) for fit in renames)
    return f"{which} would find {of} of them"


def _starts(key: str) -> Iterator[int]:
    """Where the segments of a key start."""
    yield 0
    yield from (at + 1 for at, letter in enumerate(key) if letter == ".")


def _all_fronts(keys: Iterable[str]) -> dict[str, None]:
    return {key[:at]: None for key in islice(keys, MAX_CANDIDATES) for at in _starts(key) if at}


def _fronts(prefix: str, keys: Iterable[str]) -> str:
    """What the keys start with, up to one step behind the longest start that they share with a prefix."""
    known = list(islice(keys, MAX_CANDIDATES))
    starts = [at for at in _starts(prefix) if any(key.startswith(prefix[:at]) for key in known)]
    common = prefix[: starts[-1]] if starts else ""
    inside = [key.removeprefix(common) for key in known if key.startswith(common)]
    names = dict.fromkeys(common + name.partition(".")[0] + ("." if "." in name else "") for name in inside)
    return some([repr(name) for name in names], 6) or "no key that is not taken"


def _meant(glob: str, keys: Collection[str]) -> str:
    """The glob with its first part corrected."""
    known = list(islice(keys, MAX_CANDIDATES))
    for name in dict.fromkeys(key.partition(".")[0] for key in known):
        if any(fnmatchcase(key, f"{name}.{glob}") for key in known):
            return f"{name}.{glob}"
    if any(fnmatchcase(key, f"{glob}.*") for key in known):
        return f"{glob}.*"
    front = glob[: min((at for letter in "*?[" if (at := glob.find(letter)) >= 0), default=len(glob))]
    rest = glob.removeprefix(front)
    fronts = _all_fronts(known)
    name, _, tail = front.partition(".")
    near = [other for other in fronts if tail and other.startswith(f"{name}.") and other.endswith(f".{tail}")]
    alike = [other for other in (*fronts, *known) if other.count(".") == front.count(".")]
    near += difflib.get_close_matches(front, alike, n=1, cutoff=0.6)
    return next((other + rest for other in near if any(fnmatchcase(key, other + rest) for key in known)), "")


def _such_as(keys: Collection[str]) -> str:
    return f"; they look like {next(iter(keys))!r}" if keys else "; it has none"
