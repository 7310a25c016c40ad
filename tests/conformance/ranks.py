"""Corpus of states that ranks do not hold alike: a value, a module or an optimizer on some ranks, empty on others, or
with other numbers; and what the ranks of parallel trainings hold.

A case names what is held (``HELD`` of ``held.py``, or a layout of :mod:`tests.parallel`), how the ranks hold it
(:data:`SPREADS`), and who saves it (``WAYS``). It saves, loads into new objects, changes what its holders have, saves
again, and loads that: ranks that were given something they did not hold may not answer for it in the second save. Stock
runs once for all kinds of saves. :func:`judge_ranks` has the rule.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

import dcp_plugin
from tests.conformance.entries import Entry
from tests.conformance.held import (
    ABSENT,
    EMPTY,
    HELD,
    MODES,
    NONE,
    OBJECTS_OF_TORCH,
    WAYS,
    Fill,
    Program,
    look,
    save_plain,
)
from tests.conformance.runs import quiet
from tests.conformance.tools import Tool
from tests.conformance.trace import Raised, Trace, describe
from tests.conformance.verdict import Seen, Verdict
from tests.parallel import EQUAL_NAMES, LAYOUTS, REPLICATED, add, build, held

SPREADS: dict[str, tuple[Fill, ...]] = {
    "alike": (1, 1),
    "on rank 0 only": (1, ABSENT),
    "on rank 1 only": (ABSENT, 1),
    "on ranks 1 and 2 of 3": (ABSENT, 1, 1),
    "different": (1, 2),
    "different on rank 2 of 3": (1, 1, 2),
    "empty on rank 1": (1, EMPTY),
    "empty on rank 0": (EMPTY, 1),
    "empty but on rank 1 of 3": (EMPTY, 1, EMPTY),
    "None on rank 1": (1, NONE),
    "None on rank 0": (NONE, 1),
    "None but on rank 1 of 3": (NONE, 1, NONE),
}
DRIFTS = {"weights differ on rank 3": "model", "moments differ on rank 3": "exp_avg"}
"""Copies of one tensor that are no copies any more, and which tensors they are."""


@dataclass(frozen=True)
class RanksEntry(Entry):
    kind: str
    """A key of :data:`HELD`, or a layout of :mod:`tests.parallel`."""
    spread: str
    way: str = "plain"
    variants: tuple[str, ...] = tuple(MODES)

    @property
    def world_size(self) -> int:
        return 4 if self.kind in LAYOUTS else len(SPREADS[self.spread])

    @property
    def must_be_right(self) -> bool:
        """Whether what is empty on some ranks may not even be refused: then ranks that hold it agree about it."""
        if self.kind in LAYOUTS:
            return self.spread == "alike" and self.kind not in EQUAL_NAMES
        if self.kind == "tensor":
            return self.spread.startswith("None")
        return self.spread.startswith(("None", "empty")) and self.kind != "optimizer"

    @property
    def is_another_shape(self) -> bool:
        """Whether ranks hold tensors of different shapes under one key: an error, also where stock takes that of rank 0
        (``docs/differences.md``)."""
        return self.kind == "tensor" and self.spread.startswith("empty")

    def of_stock(self, variant: str) -> str:
        return "blocking"

    def judge(self, ours: Seen, stock: Seen) -> Verdict:
        return judge_ranks(self, ours, stock)


def _entries() -> Iterator[tuple[str, RanksEntry]]:
    for way, kind, spread in itertools.product(WAYS, HELD, SPREADS):
        # None cannot be registered with Accelerate in the place of a module or an optimizer.
        is_possible = way != "Accelerate" or not spread.startswith("None") or kind not in OBJECTS_OF_TORCH
        if is_possible:
            yield f"{way}: {kind}, {spread}", RanksEntry(kind=kind, spread=spread, way=way)
    for layout in LAYOUTS:
        for spread in ("alike", *(DRIFTS if layout in REPLICATED else ())):
            yield f"{layout}, {spread}", RanksEntry(kind=layout, spread=spread)


ENTRIES: dict[str, RanksEntry] = dict(_entries())


def run(entry: RanksEntry, mode: str, tool: Tool, trace: Trace) -> None:
    quiet()
    with _listening(trace):
        (_run_layout if entry.kind in LAYOUTS else _run_held)(entry, mode, tool, trace)


def _run_layout(entry: RanksEntry, mode: str, tool: Tool, trace: Trace) -> None:
    state = build(entry.kind)
    if entry.spread in DRIFTS and dist.get_rank() == 3:
        add(state, 1, to=DRIFTS[entry.spread])
    for name in ("first", "second"):
        trace.right[name] = {"x": describe(held(state))}
        save_plain(tool, state, name, mode)
        state = build(entry.kind)
        add(state, 5)
        tool.load(state, name)
        trace.seen[name] = {"x": describe(held(state))}
        add(state, 10)


def _run_held(entry: RanksEntry, mode: str, tool: Tool, trace: Trace) -> None:
    """Save, resume, save again, resume again."""
    fill = SPREADS[entry.spread][dist.get_rank()]
    new = 9 if isinstance(fill, int) else fill

    def begin(fill: Fill) -> Program:
        return WAYS[entry.way](tool, entry.kind, fill, mode)

    def save(program: Program, name: str) -> None:
        if isinstance(fill, int):
            trace.right[name] = {"x": look(program.x)}
        program.save(name)

    def resumed(program: Program, name: str) -> None:
        if program.holds:
            trace.seen[name] = {"x": look(program.x)}

    def first() -> None:
        save(program, "first")

    def second() -> None:
        resumed(program, "first")
        if isinstance(fill, int):
            program.x = program.changed(fill + 10)
        save(program, "second")

    def third() -> None:
        resumed(program, "second")

    for act, resume in ((first, None), (second, "first"), (third, "second")):
        program = begin(fill if resume is None else new)
        trace.seen["new"] = {"x": look(program.x)}
        try:
            program.run(act, resume)
        finally:
            program.close()


@contextmanager
def _listening(trace: Trace) -> Iterator[None]:
    """Keep what this package logs meanwhile, and the text of its error."""
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("dcp_plugin")
    handler.emit = lambda record: trace.said.append(record.getMessage())  # type: ignore[method-assign]
    level, logger.level = logger.level, logging.WARNING
    logger.addHandler(handler)
    try:
        yield
    except dcp_plugin.CheckpointError as error:
        trace.said.append(str(error))
        raise
    finally:
        logger.removeHandler(handler)
        logger.level = level


# The verdict


def judge_ranks(entry: RanksEntry, ours: Seen, stock: Seen) -> Verdict:
    """Return the verdict on a case. Its outcome is one of

    * right: each rank that held something has it back after each resume, and a rank that held nothing has what stock
      hands to it, where stock is right, or what another rank held. Nothing is said where stock is right.
    * named: an error or a warning names a key and ranks. This is enough where stock is wrong, unless ``must_be_right``.
    * as stock: numbers that differ are rank 0's, without a word; or the object's own code raises what it raises with
      stock.

    All others are wrong.
    """
    if isinstance(ours, str):
        return Verdict({"the process": ours}, outcome="CRASHED")
    said = list(dict.fromkeys(text for trace in ours for text in trace.said))
    for name in ("first", "second"):
        right_stock = stock if not isinstance(stock, str) and _is_right(stock, name) else None
        if _is_right(ours, name) and _others_are_right(ours, right_stock, name):
            continue
        told = "; ".join([_about(ours, stock, name), *said])
        is_named = any(map(_names_key_and_ranks, said))
        if right_stock is not None and not (is_named and entry.is_another_shape):
            return Verdict({f"{name} resume": f"stock is right; {told}"}, outcome="WRONG, stock is right")
        if _raise_alike(entry, ours, stock):
            return Verdict(both_fail=told, outcome="as stock")
        if is_named and not entry.must_be_right:
            return Verdict(both_fail=told, outcome="named")
        if said or any(trace.raised for trace in ours):
            return Verdict({f"{name} resume": told}, outcome="NAMED, not right" if is_named else "UNNAMED")
        if entry.kind == "number" and entry.spread.startswith("different") and _are_alike(ours, stock, name):
            return Verdict(both_fail=told, outcome="as stock")
        return Verdict({f"{name} resume": told}, outcome="WRONG, silent")
    is_better = isinstance(stock, str) or not (_is_right(stock, "first") and _is_right(stock, "second"))
    if said and not (is_better and any(map(_names_key_and_ranks, said))):
        return Verdict({"messages": "; ".join(said)}, outcome="ALARM")
    return Verdict(better={"outcome": "stock is wrong"} if is_better else {}, outcome="right" + ", named" * bool(said))


def _is_right(traces: list[Trace], name: str) -> bool:
    """Return whether each rank that held something has it back after a resume."""
    return all(trace.seen.get(name) == trace.right[name] for trace in traces if name in trace.right) and not any(
        trace.raised for trace in traces if name not in trace.seen
    )


def _others_are_right(ours: list[Trace], stock: list[Trace] | None, name: str) -> bool:
    """Return whether ranks that held nothing have what another rank held, or else what stock gives them.

    Args:
        stock: None if stock is wrong; these ranks may then keep what they had.
    """
    rights = [trace.right[name] for trace in ours if name in trace.right]
    for rank, trace in enumerate(ours):
        if name not in trace.right and name in trace.seen:
            others = trace.seen.get("new") if stock is None else stock[rank].seen.get(name)
            if trace.seen[name] not in [*rights, others]:
                return False
    return True


def _raise_alike(entry: RanksEntry, ours: list[Trace], stock: Seen) -> bool:
    """Return whether code of the user's object raises the same exception on a rank.

    Lightning hands one state to the callbacks of all ranks. If their modules take only the state that they saved, one
    refuses it in any case: with stock the module that misses its weights, and with ours the one that has none. Then the
    ranks may differ, and the keys.
    """
    if isinstance(stock, str):
        return False
    is_handed = entry.way == "Lightning" and entry.kind == "module" and entry.spread.startswith("empty")
    pairs = itertools.product(ours, stock) if is_handed else zip(ours, stock, strict=True)
    raised = ((mine.raised, theirs.raised) for mine, theirs in pairs if mine.raised and theirs.raised)
    return any(
        not mine.is_ours and mine.phase == theirs.phase and _error_of(mine, is_handed) == _error_of(theirs, is_handed)
        for mine, theirs in raised
    )


def _error_of(raised: Raised, is_handed: bool) -> str:
    return raised.text.partition(": ")[0] if is_handed else raised.text


def _are_alike(ours: list[Trace], stock: Seen, name: str) -> bool:
    return not isinstance(stock, str) and all(
        mine.seen.get(name) == theirs.seen.get(name) for mine, theirs in zip(ours, stock, strict=True)
    )


def _names_key_and_ranks(text: str) -> bool:
    return bool(re.search(r"\branks? \(?\d", text)) and bool(re.search(_KEYS, text))


_KEYS = r"\bx\b|shadow|Keeper|register|weight|bias|exp_avg"


def _about(ours: list[Trace], stock: Seen, name: str) -> str:
    words = []
    for rank, trace in enumerate(ours):
        saw = trace.seen.get(name, {}).get("x", str(trace.raised) if trace.raised else "nothing")
        words.append(f"rank {rank} held {trace.right.get(name, {}).get('x', 'nothing')} and has {saw}")
        if isinstance(stock, list):
            theirs = stock[rank]
            has = theirs.seen.get(name, {}).get("x", str(theirs.raised) if theirs.raised else "nothing")
            words.append(f"of stock {has}")
    return "; ".join(words)
