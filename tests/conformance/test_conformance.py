"""Whatever a user's code does with stock DCP it does with ours; the rules are in the docstring of the package."""

from __future__ import annotations

import functools
import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.conformance.cases import CORPORA, Case, all_cases, combinable, find
from tests.conformance.differences import titles
from tests.conformance.launching import verdicts
from tests.conformance.verdict import Verdict
from tests.sampling import is_sampled

ONE_OF = {
    "modules": 24, "optimizers": 24, "tensors": 24, "interchange": 24,
    "programs": 6, "runs": 8, "hooks": 12, "moments": 10, "containers": 4, "settings": 16, "ranks": 48,
}  # fmt: skip
"""Sizes of samples. Of the cases that declare no difference, ``make test`` runs one of so many, ``make test-long`` the
rest. Cases of the other corpora always run."""


def _is_long(corpus: str, case: Case) -> bool:
    if case.differs and (corpus != "moments" or case.variant in ("plain", "fsdp2")):
        return False  # of a moment, all declared differences are seen in these two layouts
    return not is_sampled(case.name, ONE_OF.get(corpus, 1))


@functools.cache
def _verdicts(corpus: str, long: bool) -> dict[str, Verdict]:
    return verdicts([case for case in CORPORA[corpus].values() if _is_long(corpus, case) == long])


def _check(case: Case, corpus: str) -> None:
    known = _verdicts(corpus, long=False)
    verdict = (known if case.name in known else _verdicts(corpus, long=True))[case.name]
    if verdict.kind in ("different", "invalid"):
        pytest.fail(f"{case.name}:\n{verdict.told()}", pytrace=False)


def _parameters(corpus: str) -> list[object]:
    return [
        pytest.param(case, id=name, marks=[pytest.mark.long] if _is_long(corpus, case) else [])
        for name, case in CORPORA[corpus].items()
    ]


@pytest.mark.parametrize("case", _parameters("modules"))
def test_modules(case: Case) -> None:
    _check(case, "modules")


@pytest.mark.parametrize("case", _parameters("optimizers"))
def test_optimizers(case: Case) -> None:
    _check(case, "optimizers")


@pytest.mark.parametrize("case", _parameters("moments"))
def test_moments(case: Case) -> None:
    _check(case, "moments")


@pytest.mark.parametrize("case", _parameters("programs"))
def test_programs(case: Case) -> None:
    _check(case, "programs")


@pytest.mark.parametrize("case", _parameters("tensors"))
def test_tensors(case: Case) -> None:
    _check(case, "tensors")


@pytest.mark.parametrize("case", _parameters("runs"))
def test_runs(case: Case) -> None:
    _check(case, "runs")


@pytest.mark.parametrize("case", _parameters("hooks"))
def test_hooks(case: Case) -> None:
    _check(case, "hooks")


@pytest.mark.parametrize("case", _parameters("interchange"))
def test_interchange(case: Case) -> None:
    _check(case, "interchange")


@pytest.mark.parametrize("case", _parameters("containers"))
def test_containers(case: Case) -> None:
    _check(case, "containers")


@pytest.mark.parametrize("case", _parameters("per_rank"))
def test_per_rank(case: Case) -> None:
    _check(case, "per_rank")


@pytest.mark.parametrize("case", _parameters("ranks"))
def test_ranks(case: Case) -> None:
    _check(case, "ranks")


@pytest.mark.parametrize("case", _parameters("settings"))
def test_settings(case: Case) -> None:
    _check(case, "settings")


EXAMPLES = int(os.environ.get("CONFORMANCE_EXAMPLES", "0"))
"""Random combinations per world size; in CI the same few each time."""

RANDOM = settings(
    deadline=None, derandomize=not EXAMPLES, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)


def _combinations(*layouts: str) -> st.SearchStrategy[str]:
    """Names of random cases."""
    each = [st.tuples(st.just(layout), *map(st.sampled_from, combinable(layout))) for layout in layouts]
    return st.one_of(each).map(lambda parts: "random/" + "+".join(parts))


def _differ(combinations: st.SearchStrategy[str], count: int) -> str:
    """What differs in so many random cases. They are drawn first, because what costs is the launch."""
    drawn: dict[str, Case] = {}

    @settings(RANDOM, max_examples=count, phases=[Phase.generate])
    @given(combinations)
    def draw(name: str) -> None:
        drawn[name] = find(name)

    draw()
    found = {name: verdict for name, verdict in verdicts(drawn.values()).items() if verdict.kind == "different"}
    told = "\n".join(f"{name}:\n{verdict.told()}" for name, verdict in found.items())
    return f"{len(found)} of {len(drawn)}; python -m tests.conformance NAME runs one alone\n{told}" if found else ""


def test_random_on_one_rank() -> None:
    differ = _differ(_combinations("plain"), EXAMPLES or 10)
    assert not differ, differ


@pytest.mark.long
def test_random_on_two_ranks() -> None:
    differ = _differ(_combinations("ddp", "fsdp2"), EXAMPLES or 40)
    assert not differ, differ


def test_every_corpus_is_tested() -> None:
    assert {f"test_{corpus}" for corpus in CORPORA} <= globals().keys()


def test_the_page_of_differences_has_what_the_cases_declare() -> None:
    declared = {title for case in all_cases() for title in case.differs.values()}
    assert declared and declared - set(titles()) == set()


@pytest.mark.parametrize("corpus", CORPORA)
def test_no_declared_difference_is_gone(corpus: str) -> None:
    """In one layout at least it is there."""
    declared: dict[tuple[str, str], bool] = {}
    known = _verdicts(corpus, long=False)
    for case in filter(lambda case: case.differs and case.name in known, CORPORA[corpus].values()):
        verdict, entry = known[case.name], case.name.partition("-")[2]
        for aspect in case.differs:
            there = aspect in verdict.declared or aspect in verdict.better
            declared[entry, aspect] = declared.get((entry, aspect), False) or there
    assert [which for which, there in declared.items() if not there] == []
