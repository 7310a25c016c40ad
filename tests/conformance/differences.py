"""Where we differ from stock on purpose: the aspects of a case that may differ, each with the reason.

``docs/differences.md`` is made of these (``python -m tests.conformance --write-docs``), under the titles below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.conformance.reasons import (
    ASKED_FOR_ITS_KEYS,
    CUTS_NOTHING,
    EPOCHS,
    EXACT_KEYS,
    EXACT_SLOTS,
    EXTRA_KEYS,
    FILLS_EMPTY,
    FINDS_UNSHARDED,
    GROWS,
    HANDS_OVER,
    NAMES_GO_ON,
    NO_STEP,
    ONE_ORDER,
    OWN_ERRORS,
    REASONS,
    RESTORES_STATE,
    STRICT,
    UNKNOWN_URL,
)

Differs = Mapping[str, str]

STEPLESS: Differs = dict.fromkeys(("resumed state", "losses", "what the save left"), NO_STEP)
ACCUMULATING: Differs = dict.fromkeys(("resumed state", "losses"), RESTORES_STATE)
UNSHARDED: Differs = dict.fromkeys(("resumed state", "losses"), FINDS_UNSHARDED)
UNCAST_SLOTS: Differs = {"resumed state": EXACT_SLOTS}
EXTRAS_TRAVEL: Differs = {"calls during load": EXTRA_KEYS}
UNCAST_SLOT: Differs = {"values": EXACT_SLOTS}
EXTRA_STATES: dict[str, Differs] = {
    name: {"what else is there": EXACT_KEYS} for name in ("dict_with_int_keys", "dict_that_grows")
}
GROWN_VALUES: Differs = {"values": GROWS}
HANDED_OVER: Differs = {"values": HANDS_OVER}
FILLED_FROM_EMPTY: Differs = {"values": FILLS_EMPTY}
CALLED_IN_ONE_ORDER: Differs = dict.fromkeys(("order of calls during save", "order of calls during load"), ONE_ORDER)
FLOATS_FOR_INTEGERS: Differs = {"load": CUTS_NOTHING}
UNKNOWN_KIND_OF_URL: Differs = {"exception": UNKNOWN_URL}
UNEXPECTED_KEYS: Differs = {"load": STRICT}
OWN_EXCEPTION: Differs = {"exception": OWN_ERRORS}
NEXT_EPOCH_BEGUN: Differs = {"calls during load": EPOCHS}
NO_EPOCH_SKIPPED: Differs = dict.fromkeys(("calls during load", "resumed state", "values"), EPOCHS)
RESUMED_BY_ACCELERATE: Differs = {"calls during load": ASKED_FOR_ITS_KEYS, "values": NAMES_GO_ON}

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"

INTRO = """\
# Differences from stock

Code that uses `torch.distributed.checkpoint` does the same with `dcp_plugin`: the same hooks are called in the same
order, and the same values are restored with their types. This page lists the deliberate exceptions, with their reasons.

`tests/conformance` runs the same code with both and fails for any other difference, and for a listed one that is gone.
The page is generated from these tests: `python -m tests.conformance --write-docs`.
"""


GROUPS = ("Every framework", "Lightning", "Accelerate", "transformers")


def page(cases: Iterable[tuple[str, Mapping[str, str]]]) -> str:
    """Return the page. ``cases`` are the names of all cases with their declared differences."""
    declared = {reason for _, differs in cases for reason in differs.values()}
    assert declared <= set(REASONS.values()), "a declared reason has no title in reasons.py"
    tables = {group: f"## {group}\n\n| subject | difference |\n|---|---|\n" for group in GROUPS}
    for title, reason in REASONS.items():
        group, _, subject = title.rpartition(": ")
        tables[group or GROUPS[0]] += f"| {subject} | {' '.join(reason.split())} |\n"
    return "\n".join([INTRO, *tables.values()])
