"""The messages in docs/ are those of the code, and each error ends with the address of its section."""

from __future__ import annotations

import ast
import copy
import functools
import io
import logging
import pickle
import re
import traceback
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import dcp_plugin as dcp
from dcp_plugin.core import errors
from dcp_plugin.core.errors import EXPLAINED, CheckpointError
from dcp_plugin.tools.cli.app import app
from tests import programs
from tests.commands import invoke
from tests.launch import on_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
CLASSES = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, CheckpointError)]
TABLE = re.compile(r"^\| (?:message|sign) \|.*\n\|-.*\n((?:\|.*\n)+)", re.M)
ROWS = [
    row
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for table in TABLE.findall(page.read_text() + "\n")
    for row in table.splitlines()
]
SYMPTOMS = "\n".join(row.split(" | ")[0] for row in ROWS)
QUOTED = re.findall(r"`(\w+): ([^`]+)`", SYMPTOMS)
SIGNS = re.findall(r'"([^"`\n]{12,})"', SYMPTOMS)
OURS = [(kind, message) for kind, message in QUOTED if kind in {one.__name__ for one in CLASSES}]


def _text(node: ast.AST) -> str:
    """What a string in code says, with … for what is only known when it is raised."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub("%[sdr]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


@functools.cache  # parsed by the first test, and not by each process that collects the tests
def _nodes() -> list[ast.AST]:
    return [node for file in (ROOT / "dcp_plugin").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]


@functools.cache
def _texts() -> set[str]:
    return {_text(node) for node in _nodes()}


@functools.cache
def _raised() -> list[tuple[str, str]]:
    """Return the class of each error, and the text that it is made with."""
    return [
        ("CheckpointUnreadable" if node.func.id == "unreadable" else node.func.id, _text(node.args[0]))
        for node in _nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args
    ]


def _explained(name: str) -> str:
    return f"See `dcp-plugin explain {name}`, or {EXPLAINED}#{name.lower()}"


def _pieces(message: str) -> list[str]:
    return [piece.strip(" :") for piece in message.split("…") if len(piece.strip(" :")) > 3]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_class_has_a_section_with_messages_of_its_own(kind: type[CheckpointError]) -> None:
    assert EXPLAINED.endswith("/troubleshooting.html")
    (section,) = re.findall(rf"^### {kind.__name__}\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S)
    assert f"\n| `{kind.__name__}: " in section
    assert _explained(kind.__name__) == kind("text").__notes__[-1]


def test_the_public_classes_are_these() -> None:
    public = {getattr(dcp, name) for name in dcp.__all__}
    internal = {errors.NotInCheckpoint, errors.NoSharedMemory}  # caught as a KeyError of Fabric, and as SaveFailed
    ours = set(CLASSES) - internal
    assert ours == {one for one in public if isinstance(one, type) and issubclass(one, Exception)}


@pytest.mark.parametrize(("kind", "message"), OURS, ids=lambda text: text[:60])
def test_each_message_of_the_page_is_in_the_code(kind: str, message: str) -> None:
    pieces = _pieces(message)
    assert pieces
    for piece in pieces:
        assert any(piece in text for text in _texts()), piece


@pytest.mark.parametrize("sign", SIGNS, ids=lambda text: text[:60])
def test_each_warning_of_the_page_is_in_the_code(sign: str) -> None:
    for piece in _pieces(sign):
        assert any(piece in text for text in _texts()), piece


@pytest.mark.parametrize(("kind", "message"), OURS, ids=lambda text: text[:60])
def test_a_message_that_is_raised_as_it_stands_is_of_the_class_that_the_page_names(kind: str, message: str) -> None:
    longest = max(_pieces(message), key=len)
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    makers = {made for made, text in _raised() if longest in text and made in classes}
    named = getattr(errors, kind)
    assert not makers or any(issubclass(getattr(errors, made), named) for made in makers), makers


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_line_is_the_last_of_a_traceback_and_no_part_of_the_message(kind: type[CheckpointError]) -> None:
    error = kind("rank 57: what happened")
    error.add_note("Besides, something else.")
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(one) == "rank 57: what happened" and one.args == error.args
        lines = "".join(traceback.format_exception(one)).splitlines()
        assert lines[-2:] == ["Besides, something else.", _explained(kind.__name__)]
        assert len(one.__notes__) == 2
    with pytest.raises(kind, match=r"^rank 57: what happened"):
        raise error


def test_an_error_of_others_leads_to_the_class_that_it_derives_from() -> None:
    class Theirs(dcp.CheckpointNotFound):
        pass

    assert Theirs("x").__notes__ == [_explained("CheckpointNotFound")]
    assert isinstance(Theirs("x"), FileNotFoundError)


def test_a_logger_shows_the_line_with_the_traceback_alone() -> None:
    stream = io.StringIO()
    logger = logging.getLogger("tests.troubleshooting")
    logger.propagate = False
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        dcp.load({}, "nowhere")
    except CheckpointError as error:
        logger.error("failed: %s", error)
        assert EXPLAINED not in stream.getvalue()
        logger.exception("failed")
    logger.removeHandler(handler)
    assert stream.getvalue().rstrip().endswith("#checkpointnotfound")


@on_ranks(2)
def test_on_all_ranks_the_line_is_once_and_last(tmp_path: Path) -> None:
    state = {"x": object()} if dist.get_rank() == 1 else {"x": 1}
    with pytest.raises(CheckpointError) as caught:
        dcp.save({"extra": state}, tmp_path / "step-1")
    said = "".join(traceback.format_exception(caught.value))
    assert said.count(EXPLAINED) == 1 and said.splitlines()[-1] == _explained("UnsafeCheckpoint"), said


def test_a_program_that_ends_with_an_error_ends_with_the_line(tmp_path: Path) -> None:
    ran = programs.run("-c", "import dcp_plugin as dcp; dcp.load({}, 'nowhere')", cwd=tmp_path)
    assert ran.returncode == 1
    first, last = ran.stderr.splitlines()[-2:]
    assert "CheckpointNotFound: " in first and last == _explained("CheckpointNotFound")


def test_the_sections_stand_in_the_order_in_which_a_class_comes_before_those_derived_from_it() -> None:
    sections = [getattr(errors, name) for name in re.findall(r"^### (\w+)$", PAGE, re.M)]
    assert not any(issubclass(before, after) for before, after in pairwise(sections))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_explain_prints_the_section_of_each_class_with_addresses_that_lead_to_the_site(
    kind: type[CheckpointError],
) -> None:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["explain", kind.__name__.lower()])
    assert result.exit_code == 0 and result.stdout.split()[0] == kind.__name__
    printed = " ".join(result.stdout.split())
    messages = [message for name, message in QUOTED if name == kind.__name__ and f"`{name}: {message}`" in PAGE]
    assert messages and all(" ".join(f"{kind.__name__}: {message}".split()) in printed for message in messages)
    assert ".md" not in printed and "](" not in printed


def test_explain_of_an_unknown_name_lists_the_classes() -> None:
    result = invoke("explain", "KeyError")
    assert result.exit_code == 2 and all(kind.__name__ in result.stderr for kind in CLASSES)
