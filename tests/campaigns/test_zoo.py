"""A sample of the zoo; all of it with ``python -m tests.campaigns``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.campaigns.case import Case, cases
from tests.campaigns.judges import problem, proved, verified
from tests.campaigns.uninterrupted import differences
from tests.programs import ROOT

SAMPLE = {
    *("bugs.plain.schedule_stepped_twice", "bugs.plain.epoch_of_sampler_lost", "bugs.lightning.weights_made_anew"),
    *("correct.plain.nano_gpt", "correct.plain.adam_of_8_bits", "correct.trainer.language_model"),
}
CASES = [pytest.param(case, id=case.name, marks=[] if case.name in SAMPLE else pytest.mark.long) for case in cases()]


@pytest.mark.parametrize("case", CASES)
def test_a_bug_and_no_correct_training_ends_with_other_bytes(tmp_path: Path, case: Case) -> None:
    assert bool(differences(case, tmp_path)) == (case.kind == "bugs")


@pytest.mark.parametrize("case", CASES)
def test_a_judge_names_each_bug_and_none_a_correct_training(tmp_path: Path, case: Case) -> None:
    (loads := tmp_path / "loads").mkdir()
    (runs := tmp_path / "runs").mkdir()
    assert problem(case, verified(case, loads), proved(case, runs)) == ""


def test_the_page_of_the_zoo_has_every_case() -> None:
    page = (ROOT / "docs/project/resume_zoo.md").read_text()
    bugs = [case.name.removeprefix("bugs.") for case in cases() if case.kind == "bugs"]
    correct = [case.function.replace("_", " ") for case in cases() if case.kind == "correct"]
    assert re.findall(r"^\| (\w+\.\w+) ", page, re.M) == bugs
    assert [name for name in correct if name not in " ".join(page.split())] == []


def test_each_bug_has_a_public_report_and_one_marked_line() -> None:
    bugs = [case for case in cases() if case.kind == "bugs"]
    assert [case.name for case in bugs if not case.sources] == []
    files = {case.framework: Path(__file__).parent / "bugs" / f"{case.framework}.py" for case in bugs}
    marked = {framework: file.read_text().count("  # the bug") for framework, file in files.items()}
    assert marked == {framework: sum(case.framework == framework for case in bugs) for framework in files}
