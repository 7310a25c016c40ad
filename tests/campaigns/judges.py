"""The two judges of a case: ``verify_resume``, by the lines that a resume logs, and ``dcp-plugin prove``."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests import programs
from tests.campaigns.case import Case
from tests.campaigns.uninterrupted import IMPORTED, run

_EXACT = re.compile(r"Resume is exact.*")
_DIFFERENT = re.compile(r"is NOT exact.*\n  (?:ranks? [^:\n]+: )?([^:\n]+): ([^\s,]+)")


@dataclass(frozen=True)
class Opinion:
    """What a judge says about one case."""

    verdict: str
    """``exact``, ``different`` or ``silent``: nothing was compared, or nothing is proved."""
    leaf: str = ""
    cause: str = ""
    """The cause of :func:`verified`; for :func:`proved` the part of the training."""
    text: str = ""
    """The output of the judge."""


def verified(case: Case, folder: Path) -> Opinion:
    """Return the opinion of ``verify_resume`` about a resume after the first save."""
    run(case, folder / "run", "--saves", "1")
    text = run(case, folder / "run")
    if found := _DIFFERENT.findall(text):
        cause, leaf = found[-1]
        return Opinion("different", leaf, cause, text)
    return Opinion("exact" if _EXACT.search(text) else "silent", text=text)


def proved(case: Case, folder: Path) -> Opinion:
    """Return the opinion of ``dcp-plugin prove``. The runs are forked, so that they import nothing."""
    python = programs.python(tuple(IMPORTED[case.framework]))
    command = ["-m", "dcp_plugin", "prove", "--json", "--dir", str(folder), "--", python, *case.arguments("{run}")]
    environment = {**os.environ, "PYTHON_EXEC": python}
    ended = programs.run(*command, imported=programs.PACKAGE, env=environment, cwd=folder)
    text = ended.stdout + ended.stderr
    if ended.returncode not in (0, 1) or not ended.stdout.startswith("{"):  # a traceback ends with 1, too
        return Opinion("silent", text=text)
    proof = json.loads(ended.stdout)["prove"]
    first = proof["first"] or {}
    return Opinion(proof["verdict"], first.get("key", ""), ", ".join(proof["differ"]) or proof["reason"], text)


def problem(case: Case, *opinions: Opinion) -> str:
    """Return what is wrong with the opinions about a case, with the output of the judges; empty if nothing is."""
    verdicts = [opinion.verdict for opinion in opinions]
    output = "\n".join(opinion.text for opinion in opinions)
    if case.kind == "bugs" and "different" not in verdicts:
        return f"no judge names {case.name}: {verdicts}\n{output}"
    if case.kind == "correct" and verdicts != ["exact", "exact"]:
        return f"{case.name} is exact, and the judges say {verdicts}\n{output}"
    return ""
