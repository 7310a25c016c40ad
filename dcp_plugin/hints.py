"""What a person may have meant: errors about keys that do not fit, with the change that makes them fit.

Only text is compared here. Everything is bounded: a checkpoint may have a million keys, an error has to come at once.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import islice, zip_longest

from dcp_plugin.planning.load import nearest, some

_MOST_KEYS = 20_000
_SAMPLE = 200
_SPELLED_OUT = 4


def about_missing(missing: Mapping[str, str], free: Collection[str]) -> list[str]:
    """A line for each of a few missing keys, or one for many; and the rename that would find them.

    Args:
        missing: Keys of the target -> keys in the checkpoint, where they are not.
        free: Keys of the checkpoint that nobody takes.
    """
    keys = list(missing)
    renames = fitting_renames(keys, free)
    if len(keys) > _SPELLED_OUT and renames:
        lines = [f"{len(keys)} keys of the target are not in the checkpoint ({some(keys, 3)})"]
    else:
        near = [nearest(stored, free) if not renames else "" for stored in islice(missing.values(), _SPELLED_OUT)]
        lines = [
            f"{key} is not in the checkpoint{'' if key == stored else f' as {stored}'}{hint}"
            for key, stored, hint in zip_longest(missing, missing.values(), near, fillvalue="")
        ]
    if renames:
        lines.append(_advice(keys, renames))
    return lines


def about_prefix(here: str, there: str, keys: list[str], free: Collection[str]) -> str:
    """About a rename to a prefix that no stored key has."""
    renames = fitting_renames(keys, free)
    has = _fronts(there, free)
    advice = _advice(keys, renames) if renames else f"it has {has}" if has else "it has nothing that is not taken"
    has = f" (there are {has})" if renames and has else ""
    return f"no key of the checkpoint starts with {there!r}, as rename={{{here!r}: {there!r}}} says{has}: {advice}"


def about_globs(idle: Iterable[str], keys: Collection[str], stored: Iterable[str]) -> list[str]:
    """About globs that match no key of the target."""
    lines = []
    for glob in idle:
        if meant := _meant(glob, keys):
            hint = f": did you mean {meant!r}?"
        elif any(fnmatchcase(key, glob) for key in islice(stored, _MOST_KEYS)):
            hint = ": it matches keys of the checkpoint, but globs are about the names in the target" + _such_as(keys)
        else:
            hint = _such_as(keys)
        lines.append(f"{glob!r} matches no key of the target{hint}")
    return lines


def about_front(here: str, keys: Collection[str]) -> str:
    """What of the target's keys a prefix may have meant."""
    known = list(_all_fronts(keys))
    name = next((front for front in known if front.endswith(f".{here}")), None)
    near = [name] if name else difflib.get_close_matches(here, known, n=1, cutoff=0.6)
    return f": did you mean {near[0]!r}?" if near else _such_as(keys)


def fitting_renames(targets: Collection[str], free: Collection[str]) -> list[tuple[str, str, int]]:
    """``(prefix here, prefix there, how many targets it finds)``: the best ones, several if they are equally good.

    Candidates are the differences in front of the longest common tails; each is judged by all targets.
    """
    fronts: dict[str, list[str]] = defaultdict(list)
    stored = dict.fromkeys(islice(free, _MOST_KEYS))
    for key in stored:
        for at in _starts(key):
            fronts[key[at:]].append(key[:at])
    sample = list(islice(targets, _SAMPLE))
    candidates = Counter(
        (target[:at], front)
        for target in sample
        for at in list(_starts(target))[:-1] or [0]
        for front in fronts.get(target[at:], ())[:8]
        if front != target[:at]
    )
    judged = []
    for here, there in dict(candidates.most_common(50)):
        mine = [target for target in sample if target.startswith(here)]
        found = sum(there + target.removeprefix(here) in stored for target in mine)
        if found * 2 >= len(mine):
            judged.append((here, there, found))
    best = max((found for *_, found in judged), default=0)
    equal = [rule for rule in judged if rule[2] == best]
    shortest = min((len(here) for here, *_ in equal), default=0)
    return [rule for rule in equal if len(rule[0]) == shortest][:2]


def _advice(keys: Collection[str], renames: list[tuple[str, str, int]]) -> str:
    found = renames[0][2]
    of = "all" if found == len(keys) else found if len(keys) <= _SAMPLE else "most"
    which = " or ".join(f"rename={{{here!r}: {there!r}}}" for here, there, _ in renames)
    return f"{which} would find {of} of them"


def _starts(key: str) -> Iterator[int]:
    """Where the segments of a key start."""
    yield 0
    yield from (at + 1 for at, letter in enumerate(key) if letter == ".")


def _all_fronts(keys: Iterable[str]) -> dict[str, None]:
    return {key[:at]: None for key in islice(keys, _MOST_KEYS) for at in _starts(key) if at}


def _fronts(prefix: str, keys: Iterable[str]) -> str:
    """What the keys start with, one step behind what they have in common with a prefix that none has."""
    known = list(islice(keys, _MOST_KEYS))
    starts = [at for at in _starts(prefix) if any(key.startswith(prefix[:at]) for key in known)]
    common = prefix[: starts[-1]] if starts else ""
    inside = [key.removeprefix(common) for key in known if key.startswith(common)]
    names = dict.fromkeys(common + name.partition(".")[0] + ("." if "." in name else "") for name in inside)
    return some([repr(name) for name in names], 6)


def _meant(glob: str, keys: Collection[str]) -> str:
    """The glob with its first part put right."""
    known = list(islice(keys, _MOST_KEYS))
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
