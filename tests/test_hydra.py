"""The groups for Hydra, in a user's own application: each is found, instantiated, and resumed from by the right job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import dcp_plugin as dcp
from tests import programs
from tests.programs import TORCH

ROOT = Path(__file__).parent.parent
GROUPS = ROOT / "dcp_plugin" / "conf" / "dcp_plugin"
OPTIONS = sorted(str(file.relative_to(GROUPS).with_suffix("")) for file in GROUPS.rglob("*.yaml"))

APP = """
import hydra, torch, dcp_plugin as dcp
from hydra.utils import instantiate

@hydra.main(version_base=None, config_path=".", config_name="train")
def main(cfg):
    model = torch.nn.Linear(1, 1)
    state = {"model": model, "extra": {"step": 0, "lr": 0.0}}
    start = instantiate(cfg.dcp_plugin.resume)
    checkpointer = dcp.Checkpointer(instantiate(cfg.dcp_plugin.checkpoint))
    if start is not None:
        checkpointer.load(state, start)
        assert state["extra"]["lr"] == cfg.lr, "resumed from another job"
    print("lr", cfg.lr, "starts at", state["extra"]["step"])
    for step in range(state["extra"]["step"] + 1, cfg.steps + 1):
        state["extra"] = {"step": step, "lr": cfg.lr}
        checkpointer.save(state, f"{cfg.dcp_plugin.resume.root}/step-{step}", step=step)
        if step == cfg.dies_at:
            checkpointer.wait()
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()

main()
"""
TRAIN = """
defaults:
  - dcp_plugin/checkpoint: async
  - dcp_plugin/resume: auto
  - dcp_plugin/partial: backbone
  - dcp_plugin/directory: of_job
  - _self_
lr: 0.1
steps: 2
dies_at: ${oc.decode:${oc.env:DIES_AT,null}}
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "train.yaml").write_text(TRAIN)
    return tmp_path / "app.py"


def run(app: Path, *overrides: str, dies_at: int | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({"DIES_AT": str(dies_at)} if dies_at else {})}
    return programs.run(app, *overrides, imported=TORCH, cwd=app.parent, env=env)


def test_every_option_of_every_group_is_found_and_instantiated(tmp_path: Path) -> None:
    import hydra

    assert {option.partition("/")[0] for option in OPTIONS} == {"checkpoint", "resume", "partial", "directory"}
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        for option in OPTIONS:
            group, name = option.split("/")
            cfg = hydra.compose(overrides=[f"+dcp_plugin/{group}@there={name}"])
            if group == "resume":
                cfg.there.root = str(tmp_path)
                cfg.there.resume = "auto"
                assert hydra.utils.instantiate(cfg.there) is None
            elif group == "checkpoint":
                assert isinstance(hydra.utils.instantiate(cfg.there), dcp.CheckpointConfig)
            elif group == "partial":
                assert isinstance(hydra.utils.instantiate(cfg.there), dcp.PartialLoad)
        made = hydra.compose(overrides=["+dcp_plugin/checkpoint=lazy", "dcp_plugin.checkpoint.keep_last=3"])
        assert hydra.utils.instantiate(made.dcp_plugin.checkpoint).keep_last == 3


def test_checkpoint_has_every_setting_at_its_default() -> None:
    listed = yaml.safe_load((GROUPS / "checkpoint" / "sync.yaml").read_text())
    assert listed.pop("_target_") == "dcp_plugin.CheckpointConfig"
    assert list(listed) == [one.name for one in fields(dcp.CheckpointConfig)]
    assert dcp.CheckpointConfig(**listed) == dcp.CheckpointConfig()


def test_the_page_on_hydra_lists_the_options() -> None:
    page = (ROOT / "docs" / "hydra.md").read_text()
    listed = re.findall(r"^\| `dcp_plugin/(\w+): (\w+)` \|", page, re.MULTILINE)
    assert sorted(f"{group}/{name}" for group, name in listed) == OPTIONS


def test_the_application_on_the_page_goes_on_where_it_was(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "hydra.md").read_text()
    for name in ("train.yaml", "app.py"):
        (code,) = re.findall(rf"^`{name}`:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(code)
    assert run(tmp_path / "app.py").stdout == "lr 0.1: from step 0\n"
    assert run(tmp_path / "app.py", "steps=5").stdout == "lr 0.1: from step 4\n"


def test_a_job_that_is_killed_resumes_when_it_is_started_again(app: Path) -> None:
    killed = run(app, "steps=4", dies_at=2)
    assert killed.returncode == -9 and "lr 0.1 starts at 0" in killed.stdout
    again = run(app, "steps=4")
    assert again.returncode == 0 and "lr 0.1 starts at 2" in again.stdout
    must = run(app, "steps=5", "dcp_plugin/resume=must")
    assert must.returncode == 0 and "lr 0.1 starts at 4" in must.stdout


def test_each_job_of_a_sweep_has_checkpoints_of_its_own_and_finds_them_again(app: Path) -> None:
    sweep = ("-m", "lr=1,2", "steps=3")
    killed = run(app, *sweep, dies_at=2)
    assert killed.returncode == -9
    assert "lr 1 starts at 0" in killed.stdout and "lr 2" not in killed.stdout
    again = run(app, *sweep)
    assert again.returncode == 0 and "lr 1 starts at 2" in again.stdout and "lr 2 starts at 0" in again.stdout
    third = run(app, *sweep, "dcp_plugin/resume=must")
    assert third.returncode == 0 and "lr 1 starts at 3" in third.stdout and "lr 2 starts at 3" in third.stdout


def test_a_sweep_whose_jobs_share_one_directory_is_refused(app: Path) -> None:
    shared = run(app, "-m", "lr=1,2", "dcp_plugin.resume.root=shared")
    assert shared.returncode != 0 and "lr 1 starts at 0" in shared.stdout
    assert re.search(r"CheckpointMismatch\(.this job of a sweep \(lr=2\) would resume from .*/shared", shared.stderr)
    assert "dcp_plugin/directory: of_job" in shared.stderr
    assert "lr 1 starts at 2" in run(app, "-m", "lr=1", "dcp_plugin.resume.root=shared").stdout


def test_typos_are_named(app: Path) -> None:
    option = run(app, "dcp_plugin/checkpoint=asynch")
    assert "Could not find 'dcp_plugin/checkpoint/asynch'" in option.stderr and "async\n" in option.stderr
    assert "Key 'asnyc_save' is not in struct" in run(app, "dcp_plugin.checkpoint.asnyc_save=true").stderr
    (app.parent / "train.yaml").write_text(TRAIN + "dcp_plugin: {checkpoint: {asnyc_save: true}}\n")
    assert "'asnyc_save' (did you mean 'async_save'?)" in run(app).stderr


def test_the_wheel_has_the_groups_and_hydra_finds_them_without_importing_us(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves things behind where it runs
    for name in ("dcp_plugin", "hydra_plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    made = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(made, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert "hydra_plugins/dcp_plugin_groups.py" in inside and "hydra_plugins/__init__.py" not in inside
    assert {f"dcp_plugin/conf/dcp_plugin/{option}.yaml" for option in OPTIONS} <= set(inside)
    code = """
import sys
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
found = Plugins.instance().discover(SearchPathPlugin)
print([one.__name__ for one in found], *{"torch", "dcp_plugin"} & set(sys.modules))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "'DcpPluginGroups'" in said and said.endswith("]\n")
