"""``dcp-plugin``: what it prints and how it exits."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dcp_plugin as dcp
from dcp_plugin.core.errors import one_line
from dcp_plugin.core.loading.forecast import plan_load
from dcp_plugin.core.paths import Where
from dcp_plugin.tools.cli.terminal import as_options
from tests import programs
from tests.commands import invoke, json_of
from tests.core.loading.test_partial import FineTune
from tests.damage import flip_byte
from tests.object_server import Bucket

INTO = ("--into", "tests.tools.cli.test_cli:FineTune")
BACKBONE = ("--include", "model.pretrain.*", "--rename", "model.pretrain.=model.")


def huge() -> nn.Module:
    """More than this machine has memory for, unless it stays on the meta device."""
    return nn.Linear(1 << 22, 1 << 20, bias=False)


def _on_one_line(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    dcp.save({"model": FineTune().pretrain, "n": 1}, root / "ck", step=7)
    return root / "ck"


def test_a_plan_shows_what_a_load_takes_and_reads_no_tensor(path: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(path, tmp_path / "ck"))
    for data in path.glob("*.distcp"):  # the size that it has to have, and nothing in it
        size = data.stat().st_size
        os.truncate(data, 0)
        os.truncate(data, size)
    with pytest.raises(dcp.CheckpointCorrupt):
        dcp.load({"model": FineTune().pretrain}, path)
    result = invoke("load-plan", path, *INTO, *BACKBONE)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    row = next(line for line in lines if "model.pretrain.inp.weight" in line)
    assert re.split("  +", row) == [
        "model.pretrain.inp.weight", "model.inp.weight", "10 x 6", "float32", "240",
    ]  # fmt: skip
    assert lines[-1].startswith("9 items, 572 bytes") and lines[-1].endswith("2 left out")


def test_a_plan_is_a_document_of_its_schema(path: Path) -> None:
    plan = json_of("load-plan", path, *INTO, *BACKBONE)
    assert len(plan["plan"]["items"]) == 9
    failed = invoke("load-plan", path.parent / "nothing", *INTO, "--json")
    assert failed.exit_code == 3 and json.loads(failed.stdout)["error"]["type"] == "CheckpointNotFound"


def test_a_plan_fails_as_the_load_would(path: Path) -> None:
    partial = dcp.PartialLoad("model.pretrain.*", rename={"model.pretrain.": "modl."})
    with pytest.raises(dcp.CheckpointMismatch) as caught:
        dcp.load({"model": FineTune()}, path, partial)
    result = invoke("load-plan", path, *INTO, "--include", "model.pretrain.*", "--rename", "model.pretrain.=modl.")
    assert result.exit_code == 1
    assert result.stderr.strip() == as_options(str(caught.value))
    assert "as --rename model.pretrain.=modl. requires" in result.stderr
    assert "missing: model.pretrain.inp.weight" in result.stdout


@pytest.mark.parametrize("policy", ["error", "warn", "ignore"])
def test_a_plan_names_what_is_missing_once(path: Path, policy: str) -> None:
    result = invoke("load-plan", path, *INTO, *BACKBONE, "--include", "model.head.*", "--missing", policy)
    assert result.exit_code == (1 if policy == "error" else 0)
    for key in ("model.head.weight", "model.head.bias"):
        assert result.output.count(key) == 1, result.output


def test_a_plan_needs_no_memory(tmp_path: Path) -> None:
    dcp.save({"model": nn.Linear(2, 2)}, tmp_path / "ck")
    result = invoke("load-plan", tmp_path / "ck", "--into", "tests.tools.cli.test_cli:huge", "--unexpected", "ignore")
    assert result.exit_code == 1 and "has shape (1048576, 4194304) here and (2, 2) in the checkpoint" in result.stderr
    with torch.device("meta"):
        model = huge()
    assert plan_load({"model": model}, tmp_path / "ck").error
    assert model.weight.is_meta


def test_a_target_may_be_a_checkpoint_or_a_safetensors_file(path: Path, tmp_path: Path) -> None:
    dcp.save({"net": FineTune()}, tmp_path / "ck")
    result = invoke("load-plan", path, "--into", tmp_path / "ck", "--name", "net", "--include", "net.pretrain.*",
                  "--rename", "net.pretrain.=model.")  # fmt: skip
    assert result.exit_code == 0 and "9 items" in result.stdout, result.output
    save_file({"inp.bias": torch.zeros(10, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    arguments = ("load-plan", path, "--into", tmp_path / "x.safetensors", "--unexpected", "ignore")
    result = invoke(*arguments)
    assert result.exit_code == 1 and "cast=True converts" in result.stderr
    result = invoke(*arguments, "--cast")
    assert result.exit_code == 0 and "float32 -> bfloat16" in result.stdout
    save_file({"inp.bias": torch.zeros(10, dtype=torch.uint16)}, tmp_path / "x.safetensors")
    assert "float32 -> uint16" in invoke(*arguments, "--cast").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--into", "hdfs://bucket/ck"), "hdfs://bucket/ck is a URL of an unknown kind"),
        ((*INTO, "--storage-option", "region"), "--storage-option region: it is KEY=VALUE"),
        ((*INTO, "--storage-option", "a=1", "--storage-option", "a.b=2"), "a.b: a part of it has a value of its own"),
        (("--into", "nowhere"), "no such file, and no package.module:factory"),
        (("--into", "torch.nn:Linear"), "needs arguments (missing a required argument: 'in_features')"),
        (("--into", "tests.nowhere:Net"), "No module named 'tests.nowhere'"),
        (("--into", "tests.tools.cli.test_cli:Nothing"), "no attribute 'Nothing'"),
        (("--into", "builtins:dict"), "gives a dict, not a torch.nn.Module"),
        ((*INTO, "--rename", "model."), "TARGET_PREFIX=CHECKPOINT_PREFIX"),
        ((*INTO, "--rename", "re:(=x"), "unterminated subpattern"),
        ((*INTO, "--missing", "maybe"), "none of error, warn, ignore"),
    ],
)
def test_wrong_arguments_are_told(path: Path, arguments: tuple[str, ...], said: str) -> None:
    result = invoke("load-plan", path, *arguments)
    assert result.exit_code in (2, 3)
    assert said in _on_one_line(result.output)


def test_inspect_list_and_verify(path: Path, tmp_path: Path) -> None:
    assert "step 7" in invoke("inspect", path).stdout and "model.inp.weight" in invoke("inspect", path, "--all").stdout
    assert "value" not in invoke("inspect", path, "--all").stdout.rpartition("\n/")[0]
    assert "value" in invoke("inspect", path, "--all", "--values").stdout.rpartition("\n/")[0]
    listed = invoke("list", path.parent)
    assert str(path.parent) in listed.stdout and path.name in listed.stdout and "whole" in listed.stdout
    result = invoke("verify", path)
    assert result.exit_code == 0 and "intact" in result.stdout
    dcp.save({"model": nn.Linear(4, 4)}, tmp_path / "ck")
    flip_byte(next((tmp_path / "ck").glob("*.distcp")))
    result = invoke("verify", tmp_path / "ck")
    assert result.exit_code == 1 and "DAMAGED" in result.stdout
    result = invoke("inspect", tmp_path)
    assert result.exit_code == 3 and str(tmp_path) in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize("command", ["inspect", "verify", "list", "load-plan"])
def test_a_url_that_cannot_be_asked_is_told_without_what_was_typed(command: str) -> None:
    more = INTO if command == "load-plan" else ()
    result = invoke(command, "hdfs://bucket/ck", *more)
    assert result.exit_code == 2 and "hdfs://bucket/ck is a URL of an unknown kind" in _on_one_line(result.stderr)
    for option in ("client_options.timeout=the-secret", "secret_acces_key=the-secret"):
        result = invoke(command, "s3://bucket/ck", *more, "--storage-option", option)
        assert result.exit_code == 2 and "s3://bucket cannot be reached with" in _on_one_line(result.stderr)
        assert "the-secret" not in result.output


def test_every_command_takes_a_url(place: Where, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the environment does not say as options."""
    dcp.save({"model": FineTune().pretrain, "n": 1}, place / "ck", step=7)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    options = ("--storage-option", f"endpoint={bucket.server.url}")
    assert "model.inp.weight" in invoke("inspect", place / "ck", "--all", *options).stdout
    listed = invoke("list", place, *options).stdout
    assert str(place) in listed and "ck" in listed and "whole" in listed
    assert "intact" in invoke("verify", place / "ck", *options).stdout
    assert "9 items" in invoke("load-plan", place / "ck", *INTO, *BACKBONE, *options).stdout
    assert "9 items" in invoke("load-plan", place / "ck", "--into", place / "ck", *options).stdout
    nothing = invoke("list", place / "nowhere", *options)
    assert nothing.exit_code == 3 and nothing.stderr == f"{place / 'nowhere'}: nothing is there.\n"


@pytest.mark.parametrize(("name", "said"), [("nowhere", "nothing is there"), ("file", "is a file")])
def test_a_list_of_what_is_no_directory_fails(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").touch()
    result = invoke("list", tmp_path / name)
    assert result.exit_code == 3 and not result.stdout
    assert result.stderr.startswith(str(tmp_path / name)) and said in result.stderr
    result = invoke("list", tmp_path)
    assert (result.exit_code, result.stdout.strip()) == (0, f"{tmp_path}: no checkpoint is there, or below.")


def test_it_runs_as_a_module_and_says_what_it_needs(path: Path) -> None:
    verified = programs.run("-m", "dcp_plugin", "verify", path)
    assert verified.returncode == 0 and "intact" in verified.stdout
    without = "import sys; sys.modules['typer'] = None; from dcp_plugin.tools.cli import main; main()"
    ended = programs.run("-c", without)
    assert ended.returncode == 1 and ended.stderr.strip() == "dcp-plugin needs typer: pip install 'dcp-plugin[cli]'"


@pytest.mark.parametrize("arguments", ["'--help'", "'--version'", "'inspect', '--help'"])
def test_what_needs_no_library_starts_without_torch(arguments: str) -> None:
    without = "import sys; sys.modules['torch'] = None; from dcp_plugin.tools.cli import main; "
    told = programs.run("-c", f"{without} sys.argv[1:] = [{arguments}]; main()", imported=())
    assert told.returncode == 0 and "dcp-plugin" in told.stdout, told.stderr


def test_the_version_says_what_the_report_of_an_error_needs() -> None:
    mine, python, packages = programs.run("-m", "dcp_plugin", "--version").stdout.splitlines()
    assert mine == f"dcp-plugin {dcp.__version__}"
    assert python.startswith(f"Python {platform.python_version()}, {platform.system()}")
    assert f"torch {torch.__version__}" in packages.split(", ")


def test_reports_diffs_and_infos_are_tables_in_a_notebook(tmp_path: Path) -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(10))
    dcp.save({"model": model, "text": "<b>"}, tmp_path / "step-1", step=1)
    dcp.save({"model": model, "text": "<i>"}, tmp_path / "step-2", step=2)
    first, second = tmp_path / "step-1", tmp_path / "step-2"
    reports: list[Any] = [
        dcp.inspect(first),
        dcp.verify(first),
        dcp.diff(first, second),
        dcp.load({"model": model}, first),
        dcp.export(first, tmp_path / "x.safetensors", "safetensors"),
        dcp.copy(first, tmp_path / "copied"),
        dcp.prune(tmp_path, keep_last=3, dry_run=True),
        dcp.resume_or_init({"model": model, "text": ""}, tmp_path),
    ]
    for report in reports:
        html = report._repr_html_()
        assert html.startswith(f"<p>{escape(one_line(str(report)))}</p><table><tr><th>") and html.endswith("</table>")
        assert "<b>" not in html and "<i>" not in html
    assert "and 10 more</td>" in reports[0]._repr_html_(), "20 tensors, of which the first 10 are listed"


def test_the_suffix_of_an_export_is_its_format_and_names_follow_one_rule(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    dcp.save({"model": model, "step": 1}, tmp_path / "ck")
    head = {"head.weight", "head.bias"}
    for arguments, names in (
        (("--dtype", "bf16"), {*head, "encoder.0.weight", "encoder.0.bias"}),
        (("--include", "model.head.*"), head),
        (("--exclude", "model.encoder.*"), head),
        (("--rename", "model.encoder.=body."), {*head, "body.0.weight", "body.0.bias"}),
    ):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        lines = invoke("export", tmp_path / "ck", out, *arguments).stdout.splitlines()
        assert set(load_file(out)) == names
        assert lines[-1] == "Keys have their names in the checkpoint without 'model.'."
    invoke("export", tmp_path / "ck", tmp_path / "x.pt")
    assert set(torch.load(tmp_path / "x.pt")) == {"model", "step"}


def test_what_no_command_is_called_names_one_that_is_meant() -> None:
    for typed, said in {"info": "'inspect'", "convert": "'export'", "rm": "'prune'", "nosuch": "list, inspect"}.items():
        result = invoke(typed)
        assert result.exit_code == 2 and said in result.stderr


def test_a_list_is_sorted_as_asked(tmp_path: Path) -> None:
    for step, size in ((2, 10), (10, 1000), (1, 100)):
        dcp.save({"w": torch.zeros(size)}, tmp_path / f"step-{step}", step=step)
    orders = {"time": [2, 10, 1], "step": [1, 2, 10], "size": [2, 1, 10], "name": [1, 10, 2]}
    for order, steps in orders.items():
        (run,) = json_of("list", tmp_path, "--sort", order)["runs"]
        assert [listed["step"] for listed in run["checkpoints"]] == steps, order


def test_a_pipe_that_closes_ends_a_command_as_it_ends_other_tools(tmp_path: Path) -> None:
    dcp.save({str(number): torch.zeros(1) for number in range(5000)}, tmp_path / "ck")
    command = f"{sys.executable} -m dcp_plugin inspect --all {tmp_path / 'ck'} | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")
