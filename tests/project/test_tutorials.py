"""Every page with files works as it stands: its files are written, its commands are run one after another, and their
output is compared with the page.

A file is a block with ``title="NAME"``. A command is a line of a ``console`` block that begins with ``$``; the lines
below are its standard output, in which ``...`` stands for anything, times and sizes may be others, losses differ by the
rounding of another processor, and ``/data`` is the directory in which all of it happens. ``Killed`` is the shell's word
for a SIGKILL. What frameworks write to standard error is not in the pages.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests import programs
from tests.limits import HANG
from tests.programs import HYDRA, LIGHTNING, PACKAGE, TRANSFORMERS

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r'^```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.M | re.S)
SESSIONS = [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if re.search(r"^```\w+ title=", page.read_text(), re.M)
]
TUTORIALS = [page for page in SESSIONS if page.parent.name == "tutorials"]
VARIES = re.compile(r"\b\d+(\.\d+)? (s|min|(B|KiB|MiB|GiB)(/s)?)\b")
LOSS = re.compile(r"^(step \d+) loss (\d+\.\d+)$", re.M)
LIKE_A_READER = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _commands(block: str) -> list[tuple[str, str]]:
    """Each command of a console block, and what the page says that it prints."""
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)


def _rest_of(text: str) -> str:
    """Without what is another number on another machine."""
    return VARIES.sub("#", LOSS.sub(r"\1", text))


PROGRAMS = {"python": (), "dcp-plugin": ("-m", "dcp_plugin"), "torchrun": ("-m", "torch.distributed.run")}
IMPORTED = dict.fromkeys(("lightning", "fabric"), LIGHTNING) | dict.fromkeys(
    ("transformers", "accelerate", "fine_tuning"), TRANSFORMERS
)
IMPORTED["hydra"] = HYDRA


def _output_of(command: str, cwd: Path, imported: tuple[str, ...]) -> str:
    words = shlex.split(command)
    settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    name, *arguments = words[len(settings) :]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **settings}
    ran: subprocess.CompletedProcess[str]
    if name in PROGRAMS:
        ran = programs.run(*PROGRAMS[name], *arguments, imported=imported, cwd=cwd, env=env)
    else:
        ran = subprocess.run([name, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=HANG)
    assert ran.returncode in (0, -signal.SIGKILL), f"$ {command}\n{ran.stdout}{ran.stderr[-3000:]}"
    assert "should be equal on several ranks" not in (ran.stderr or ""), ran.stderr
    return ran.stdout.replace(str(cwd), "/data") + ("Killed\n" if ran.returncode else "")


def check_commands(block: str, cwd: Path, imported: tuple[str, ...]) -> None:
    """Run the commands of a console block, and compare what they print with the block."""
    for command, expected in _commands(block):
        _check(command, expected, cwd, imported)


def _check(command: str, expected: str, cwd: Path, imported: tuple[str, ...]) -> dict[str, str]:
    """The loss of each step that the command prints."""
    printed = _output_of(command, cwd, imported)
    same = doctest.OutputChecker().check_output(_rest_of(expected), _rest_of(printed), LIKE_A_READER)
    assert same, f"$ {command}\nexpected:\n{expected}\nprinted:\n{printed}"
    losses = LOSS.findall(printed)
    close = pytest.approx([float(loss) for _, loss in LOSS.findall(expected)], abs=0.002)
    assert [float(loss) for _, loss in losses] == close, command
    return dict(losses)


@pytest.mark.one_of(count=4)
@pytest.mark.ranks
@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.stem)
def test_a_page_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    killed: dict[str, dict[str, str]] = {}
    for block in BLOCK.finditer(page.read_text()):
        if block["title"]:
            (tmp_path / block["title"]).write_text(block["text"])
        elif block["kind"] == "console":
            for command, expected in _commands(block["text"]):
                losses = _check(command, expected, tmp_path, IMPORTED.get(page.stem, PACKAGE))
                if command.startswith("DIE_AT="):
                    killed[command.partition(" ")[2]] = losses
                else:
                    before = killed.get(command, {})
                    assert [step for step, loss in losses.items() if before.get(step, loss) != loss] == []


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_kills_its_training_and_resumes_it(page: Path) -> None:
    commands = [command for block in BLOCK.finditer(page.read_text()) for command, _ in _commands(block["text"])]
    killed = next(position for position, command in enumerate(commands) if command.startswith("DIE_AT="))
    assert commands[killed + 1] == commands[killed].partition(" ")[2], "the same command, and nothing in between"
