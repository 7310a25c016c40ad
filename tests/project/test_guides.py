"""The job files and configurations in docs/ are correct: a shell and torchrun understand them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.programs import ROOT
from tests.system.test_elastic import SLURM, UNTIL_SIGTERM, Commands


def _blocks(kind: str) -> list[Any]:
    """Each block of the pages that is in this language."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        blocks = re.findall(rf"^ *```{kind}(?: title=[^\n]*)?\n(.*?)^ *```$", page.read_text(), re.M | re.S)
        found += [pytest.param(block, id=f"{page.stem}-{number}") for number, block in enumerate(blocks)]
    assert found
    return found


@pytest.mark.parametrize("block", _blocks("yaml"))
def test_a_configuration_is_yaml(block: str) -> None:
    assert yaml.safe_load(block)


@pytest.mark.parametrize("block", _blocks("json"))
def test_a_rule_is_json(block: str) -> None:
    assert json.loads(block)


@pytest.mark.parametrize("block", _blocks("bash"))
def test_commands_are_correct_shell(block: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


SCRIPTS = [one for one in _blocks("bash") if one.values[0].startswith("#!")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_file_is_correct_shell(script: str, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(script)
    for checker in [["bash", "-n"]] + [["shellcheck"]] * bool(shutil.which("shellcheck")):
        checked = subprocess.run([*checker, tmp_path / "job.sh"], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("script", [one for one in SCRIPTS if "torchrun \\\n" in one.values[0]])
def test_torchrun_understands_what_a_job_file_gives_it(script: str) -> None:
    line = re.sub(r"\$\{?\w+(:-0)?\}?", "1", script.replace("\\\n", " "))
    [arguments] = re.findall(r"torchrun +(--.*train\.py)", line)
    parsed = get_args_parser().parse_args(shlex.split(arguments))
    assert (parsed.nproc_per_node, parsed.rdzv_backend, parsed.training_script) == ("8", "c10d", "train.py")


@pytest.fixture
def job(tmp_path: Path) -> tuple[Commands, str]:
    """The job file for SLURM, and the programs that it calls."""
    [script] = [one.values[0] for one in SCRIPTS if "SBATCH --signal=B:TERM" in str(one.values[0])]
    (tmp_path / "job.sbatch").write_text(str(script))
    return Commands(tmp_path), str(tmp_path / "job.sbatch")


def test_the_job_of_slurm_queues_itself_again_when_its_time_is_up(job: tuple[Commands, str], tmp_path: Path) -> None:
    commands, script = job
    os.mkfifo(tmp_path / "begun")
    commands.put("torchrun", UNTIL_SIGTERM.format(fifo=str(tmp_path / "begun")))
    started = commands.start(script, **SLURM)
    (tmp_path / "begun").read_text()
    started.send_signal(signal.SIGTERM)
    started.communicate()
    assert started.returncode == 0
    assert commands.calls("scontrol") == [["show", "hostnames", "node[1-2]"], ["requeue", "7"]]


@pytest.mark.parametrize("status", [0, 3])
def test_the_job_of_slurm_ends_as_its_training_does(job: tuple[Commands, str], status: int) -> None:
    commands, script = job
    commands.put("torchrun", f"sys.exit({status})")
    started = commands.start(script, **SLURM)
    started.communicate()
    assert started.returncode == status
    assert commands.calls("scontrol") == [["show", "hostnames", "node[1-2]"]]


MANIFESTS = [one for one in _blocks("yaml") if "\nspec:" in one.values[0]]


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_the_grace_of_a_manifest_holds_what_torchrun_waits_for(manifest: str) -> None:
    spec = yaml.safe_load(manifest)["spec"]
    template = spec["template"] if "template" in spec else spec["pytorchReplicaSpecs"]["Worker"]["template"]
    [container] = template["spec"]["containers"]
    waits = {one["name"]: one["value"] for one in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert int(waits) < template["spec"]["terminationGracePeriodSeconds"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["memory"]["emptyDir"]["medium"] == "Memory"
    command, *arguments = container["command"]
    assert (command, get_args_parser().parse_args(arguments).training_script) == ("torchrun", "train.py")
