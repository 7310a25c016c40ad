"""Compares what a user sees with ours to what the same user sees with stock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.conformance.trace import Trace, Words

Seen = list[Trace] | str

STOCK_ERROR = "torch.distributed.checkpoint.api.CheckpointException"

UNWANTED = ("what the save left", "random numbers")
"""Aspects in which nobody wants a tool to change anything; in others stock is right even where it loses something."""


@dataclass
class Verdict:
    """How ours differs from stock, by aspect: in words for whoever has to mend it."""

    different: dict[str, str] = field(default_factory=dict)
    better: dict[str, str] = field(default_factory=dict)
    invalid: str = ""
    """The case itself is wrong: its code does not run."""
    declared: dict[str, str] = field(default_factory=dict)
    """What the case declares, of what differs."""
    outcome: str = ""
    """How it ended, where a corpus has a rule of its own."""
    both_fail: str = ""
    """It works with neither, and the exceptions are alike."""

    @property
    def kind(self) -> str:
        if self.invalid or self.different:
            return "invalid" if self.invalid else "different"
        return "declared" if self.declared else "better" if self.better else "fails" if self.both_fail else "same"

    def told(self, better: bool = False) -> str:
        lines = [f"  the case's own code fails: {self.invalid}"] if self.invalid else []
        lines += [f"  {aspect}: {text}" for aspect, text in self.different.items()]
        if better and self.both_fail:
            lines.append(f"  fails with both: {self.both_fail}")
        if better:
            lines += [f"  better, {aspect}: {text}" for aspect, text in self.better.items()]
            lines += [f"  declared, {aspect}: {text}" for aspect, text in self.declared.items()]
        return "\n".join(lines)


def judge(ours: Seen, stock: Seen, oracle: str, differs: Mapping[str, str], must_work: bool) -> Verdict:
    """Compare all ranks; what differs on several is told once. ``differs`` is what the case declares, by aspect."""
    verdict = _compare(ours, stock, oracle, must_work)
    verdict.declared = {aspect: text for aspect, text in verdict.different.items() if aspect in differs}
    verdict.different = {aspect: text for aspect, text in verdict.different.items() if aspect not in differs}
    return verdict


def _compare(ours: Seen, stock: Seen, oracle: str, must_work: bool) -> Verdict:
    verdict = Verdict()
    if isinstance(ours, str):
        verdict.different["the process"] = (
            f"ours: {ours}; {oracle}: {'ended, too' if isinstance(stock, str) else 'ran'}"
        )
        return verdict
    if isinstance(stock, str):
        verdict.better["the process"] = f"{oracle}: {stock}"
    for rank, mine in enumerate(ours):
        one = _Rank(mine, None if isinstance(stock, str) else stock[rank], oracle, must_work).judge()
        verdict.invalid = verdict.invalid or one.invalid
        verdict.both_fail = verdict.both_fail or one.both_fail
        label = f"rank {rank}: " if len(ours) > 1 else ""
        for all_ranks, of_one in ((verdict.different, one.different), (verdict.better, one.better)):
            for aspect, text in of_one.items():
                all_ranks.setdefault(aspect, label + text)
    return verdict


class _Rank:
    def __init__(self, ours: Trace, theirs: Trace | None, oracle: str, must_work: bool) -> None:
        self.ours = ours
        self.theirs = theirs
        self.oracle = oracle
        self.must_work = must_work
        self.verdict = Verdict()

    def judge(self) -> Verdict:
        ours, theirs = self.ours, self.theirs
        for trace in (ours, theirs):
            if trace is not None and trace.raised is not None and trace.raised.phase == "running":
                self.verdict.invalid = str(trace.raised)
                return self.verdict
        failed = ours.raised.phase if ours.raised is not None else ""
        if theirs is not None and theirs.raised is not None and ours.raised is None and theirs.raised.by_user:
            self.verdict.different["exception"] = f"ours: works; {self.oracle}: {theirs.raised}"
        elif self.oracle == "every rank raises":
            if ours.raised is None or not ours.raised.is_ours:
                self.verdict.different["exception"] = f"ours: {ours.raised or 'works'}"
        elif self.oracle == "right":
            if ours.raised is not None:
                self.verdict.different[failed] = f"ours: {ours.raised}"
            else:
                self._compare_with_what_is_right()
        elif theirs is None or (theirs.raised is not None and ours.raised is None):
            reason = "its process ended" if theirs is None else str(theirs.raised)
            self.verdict.better["outcome"] = f"{self.oracle}: {reason}; ours: works"
            self._compare_with_what_is_right()
        elif ours.raised is not None and theirs.raised is None:
            self.verdict.different[failed] = f"ours: {ours.raised}; {self.oracle}: works"
        elif ours.raised is not None and theirs.raised is not None:
            self._compare_errors()
        else:
            self._compare_calls()
            self._compare_words()
        return self.verdict

    def _compare_errors(self) -> None:
        ours, theirs = self.ours.raised, self.theirs.raised if self.theirs else None
        assert ours is not None and theirs is not None
        self.verdict.both_fail = f"ours: {ours}; {self.oracle}: {theirs}"
        after = ours.phase not in ("save", "load") and ours.phase == theirs.phase
        if after and ours.classes == theirs.classes:  # it is the user's code that cannot go on
            return
        if ours.phase not in ("save", "load") and theirs.phase in ("save", "load"):  # the user's code raises later
            self.verdict.better["outcome"] = f"{self.oracle}: {theirs}; ours: works, until the case's own code fails"
            return
        if self.must_work:
            self.verdict.different[ours.phase] = f"ours: {ours}; {self.oracle} fails, too: {theirs}"
            return
        wrapped = theirs.classes[0] == STOCK_ERROR and ours.is_ours
        if not wrapped and not {theirs.classes[0], *theirs.inner[:1]} & set(ours.classes):
            if ours.is_ours and self.oracle == "torch.save":
                return
            self.verdict.different["exception"] = f"ours: {ours}; {self.oracle}: {theirs}"

    def _compare_calls(self) -> None:
        assert self.theirs is not None
        if self.oracle == "torch.save":
            return
        for phase in ("save", "load"):
            mine, theirs = self.ours.calls.get(phase, []), self.theirs.calls.get(phase, [])
            if mine != theirs:
                aspect = f"{'order of ' if sorted(mine) == sorted(theirs) else ''}calls during {phase}"
                self.verdict.different[aspect] = _first_difference(mine, theirs, self.oracle)

    def _compare_words(self) -> None:
        assert self.theirs is not None
        for aspect in self.ours.seen.keys() | self.theirs.seen.keys():
            mine, theirs = self.ours.seen.get(aspect, {}), self.theirs.seen.get(aspect, {})
            if mine == theirs:
                continue
            text = _difference(mine, theirs, self.oracle)
            if aspect in UNWANTED and mine == self.ours.right.get(aspect):
                self.verdict.better[aspect] = text
            else:
                self.verdict.different[aspect] = text

    def _compare_with_what_is_right(self) -> None:
        for aspect, right in self.ours.right.items():
            if aspect == "losses" and not self.must_work:
                continue  # they may come of something that no checkpoint has
            mine = self.ours.seen.get(aspect, {})
            if mine != right:
                self.verdict.different[aspect] = _difference(mine, right, "right")


def _first_difference(mine: list[str], theirs: list[str], label: str) -> str:
    """Where two lists of calls part, with the call before that."""
    same = next((at for at, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other), None)
    at = max(0, min(len(mine), len(theirs)) if same is None else same)
    before = f"after {at} calls, {mine[at - 1]} the last: " if at else ""
    return f"{before}ours: {mine[at : at + 4]} ({len(mine)} in all); {label}: {theirs[at : at + 4]} ({len(theirs)})"


def _difference(mine: Mapping[str, str], theirs: Words, label: str) -> str:
    keys = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)]
    told = [f"{key} is {mine.get(key, 'absent')}, {label}: {theirs.get(key, 'absent')}" for key in keys[:2]]
    return "; ".join(told) + (f"; and {len(keys) - 2} more" if len(keys) > 2 else "")
