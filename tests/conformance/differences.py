"""Where we differ from stock on purpose: the aspects of a case that may differ, each with its reason.

A reason is named by its title in ``docs/differences.md``, behind the name of the framework where it is one's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"

Differs = Mapping[str, str]


def titles() -> Iterator[str]:
    """The titles of all reasons on the page."""
    group = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            group = "" if line == "## Every framework" else f"{line.removeprefix('## ')}: "
        elif line.startswith("| "):
            yield group + line.split(" | ")[0].removeprefix("| ")


def _of(title: str, *aspects: str) -> Differs:
    """Let these aspects differ for the reason with this title."""
    return dict.fromkeys(aspects, title)


STEPLESS = _of("A save takes no step", "resumed state", "losses", "what the save left")
ACCUMULATING = _of("Optimizer state is restored during gradient accumulation", "resumed state", "losses")
UNSHARDED = _of("The optimizer state of an unsharded root is saved", "resumed state", "losses")
UNCAST_SLOTS = _of("Optimizer state keeps its dtype and type", "resumed state")
UNCAST_SLOT = _of("Optimizer state keeps its dtype and type", "values")
EXTRAS_TRAVEL = _of("All of an optimizer's own state_dict is restored", "calls during load")
EXTRA_STATE = _of("Extra state keeps its keys", "what else is there")
EXACT_KEYS = _of("Extra state keeps its keys", "resumed state")
GROWN_VALUES = _of("Plain values are those of the checkpoint", "values")
HANDED_OVER = _of("A Stateful gets all its tensors", "values")
FILLED_FROM_EMPTY = _of("An empty mapping and None are filled", "values")
CALLED_IN_ONE_ORDER = _of("Objects are called in one order", "order of calls during save", "order of calls during load")
FLOATS_FOR_INTEGERS = _of("Integers do not take floating-point numbers", "load")
UNKNOWN_KIND_OF_URL = _of("An unknown kind of URL is a ValueError", "exception")
UNEXPECTED_KEYS = _of("An unexpected key is an error", "load")
OWN_EXCEPTION = _of("A failure on one rank is a failure on all", "exception")
NEXT_EPOCH_BEGUN = _of("Lightning: between two epochs", "calls during load")
NO_EPOCH_SKIPPED = _of("Lightning: between two epochs", "calls during load", "resumed state", "values")
_SHARDED_HOOKS = "Lightning: hooks of sharded strategies see all"
HOOKS_SEE_SHARDS = _of(_SHARDED_HOOKS, "calls during load")
HOOKS_CHANGE_GROUPS = _of(_SHARDED_HOOKS, "calls during load", "resumed state")
HOOKS_CHANGE_SHARDS = _of(_SHARDED_HOOKS, "calls during load", "resumed state", "values", "what else is there")
GROWN_GROUPS = _of("Plain values are those of the checkpoint", "resumed state")
RESUMED_BY_ACCELERATE = {
    **_of("Accelerate: a registered object is asked for its state first", "calls during load"),
    **_of("Accelerate: automatic names continue", "values"),
}
