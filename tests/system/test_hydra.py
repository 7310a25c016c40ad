"""The groups for Hydra, in a user's own application: each is found, instantiated, and resumed from by the right job."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
import torch.distributed as dist
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import OmegaConf

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where
from dcp_plugin.errors import CheckpointMismatch
from tests import programs
from tests.launch import gathered, on_ranks
from tests.limits import HANG
from tests.object_server import Bucket
from tests.programs import HYDRA

ROOT = Path(__file__).parents[2]
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
data: none
dies_at: ${oc.decode:${oc.env:DIES_AT,null}}
"""


EVERY = """
import json, hydra, dcp_plugin as dcp, hydra_plugins.dcp_plugin_groups as plugin
from hydra.errors import InstantiationException
from hydra.utils import instantiate

def starts(options):
    found = {}
    for name, option in options.items():
        try:
            found[name] = str(instantiate(option))
        except InstantiationException as error:
            found[name] = type(error.__cause__).__name__
    return found

@hydra.main(version_base=None, config_path=".", config_name="every")
def main(cfg):
    presets = {
        group: {name: repr(instantiate(option)) for name, option in cfg.made[group].items()}
        for group in ("checkpoint", "partial")
    }
    before = starts(cfg.made.resume)
    dcp.save({"n": 1}, f"{cfg.made.resume.auto.root}/step-1", step=1)
    print(json.dumps({
        "files": [dcp.__file__, plugin.__file__], "presets": presets, "before": before,
        "after": starts(cfg.made.resume), "plain": repr(instantiate(cfg.dcp_plugin.checkpoint)),
        "elsewhere": repr(instantiate(cfg.trainer.checkpoint)),
    }))

main()
"""
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "checkpoint": {
        "sync": {},
        "async": {"async_save": True},
        "lazy": {"async_save": True, "staging": "lazy"},
        "local": {"async_save": True, "keeper": {"dir": "/dev/shm/dcp_plugin-me"}},
    },
    "partial": {
        "model_only": {"include": "model.*"},
        "no_optimizer": {"exclude": "optim*"},
        "backbone": {"include": "model.*", "exclude": "*.head.*"},
        "adapters": {"include": "model.*", "exclude": "*.lora_*"},
        "peft": {
            "include": "model.*",
            "exclude": "*.lora_*",
            "rename": {
                r"re:model\.base_model\.model\.(.*)\.base_layer\.(.*)": r"model.\1.\2",
                "model.base_model.model.": "model.",
            },
        },
    },
}
LIGHT = {"dcp_plugin", "dcp_plugin.conf", "dcp_plugin.core", "dcp_plugin.core.paths", "dcp_plugin.core.types"}
"""What Hydra imports of us where nothing of ours is asked for: names, and no torch."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the wheel of this package, and nothing else."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("dcp_plugin", "hydra_plugins"):  # not where they are: a build there takes what an earlier one has left
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(source / "dist"), str(source)]
    subprocess.run(built, check=True, capture_output=True)
    (wheel,) = (source / "dist").glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert "hydra_plugins/dcp_plugin_groups.py" in inside and "hydra_plugins/__init__.py" not in inside
    assert {f"dcp_plugin/conf/dcp_plugin/{option}.yaml" for option in OPTIONS} <= set(inside)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "train.yaml").write_text(TRAIN)
    return tmp_path / "app.py"


def run(app: Path, *overrides: str, dies_at: int | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({"DIES_AT": str(dies_at)} if dies_at else {})}
    return programs.run(app, *overrides, imported=HYDRA, cwd=app.parent, env=env)


def test_every_option_of_every_group_is_made_in_an_application_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    listed = [option.split("/") for option in OPTIONS if option != "directory/of_job"]
    assert {group: {name for of, name in listed if of == group} for group, _ in listed} == {
        **{group: set(options) for group, options in PRESETS.items()},
        "resume": {"auto", "must", "never"},
    }
    defaults = [f"dcp_plugin/{group}@made.{group}.{name}: {name}" for group, name in listed]
    besides = ["dcp_plugin/checkpoint: async", "dcp_plugin/checkpoint@trainer.checkpoint: async"]
    every = ["dcp_plugin/directory: of_job", *besides, *defaults, "_self_"]
    (tmp_path / "every.yaml").write_text("defaults:\n" + "".join(f"  - {one}\n" for one in every))
    (tmp_path / "every.py").write_text(EVERY)
    overrides = ("dcp_plugin/checkpoint@trainer.checkpoint=lazy", "trainer.checkpoint.keep_last=3")
    env = {**os.environ, "PYTHONPATH": str(installed), "USER": "me"}
    line = [sys.executable, "every.py", *overrides]
    ran = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG)
    assert ran.returncode == 0, ran.stderr
    made = json.loads(ran.stdout)
    assert {Path(file).is_relative_to(installed) for file in made["files"]} == {True}
    assert made["presets"] == {
        "checkpoint": {name: repr(dcp.CheckpointConfig(**given)) for name, given in PRESETS["checkpoint"].items()},
        "partial": {name: repr(dcp.PartialLoad(**given)) for name, given in PRESETS["partial"].items()},
    }
    own = str(tmp_path / "outputs" / "every" / "step-1")
    assert made["before"] == {"auto": "None", "must": "CheckpointNotFound", "never": "None"}
    assert made["after"] == {"auto": own, "must": own, "never": "None"}
    assert made["plain"] == repr(dcp.CheckpointConfig(async_save=True))
    assert made["elsewhere"] == repr(dcp.CheckpointConfig(async_save=True, staging="lazy", keep_last=3))


def test_checkpoint_has_every_setting_at_its_default() -> None:
    listed = yaml.safe_load((GROUPS / "checkpoint" / "sync.yaml").read_text())
    assert listed.pop("_target_") == "dcp_plugin.CheckpointConfig"
    assert list(listed) == [one.name for one in fields(dcp.CheckpointConfig)]
    assert list(listed["io"]) == [one.name for one in fields(dcp.IO)]
    local = yaml.safe_load((GROUPS / "checkpoint" / "local.yaml").read_text())
    assert list(local["keeper"]) == [one.name for one in fields(dcp.Keeper)]
    assert dcp.Keeper(**local["keeper"] | {"dir": None}) == dcp.Keeper()
    assert dcp.CheckpointConfig(**listed) == dcp.CheckpointConfig()


def test_the_page_on_hydra_lists_the_options() -> None:
    page = (ROOT / "docs" / "guides" / "hydra.md").read_text()
    listed = re.findall(r"^\| `dcp_plugin/(\w+): (\w+)` \|", page, re.MULTILINE)
    assert sorted(f"{group}/{name}" for group, name in listed) == OPTIONS


def test_the_application_on_the_page_starts_from_pretrained_weights_and_resumes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "hydra.md").read_text()
    for name in ("finetune.yaml", "finetune.py"):
        (code,) = re.findall(rf"^`{name}`:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(code)
    dcp.save({"model": torch.nn.ModuleDict({"body": torch.nn.Linear(8, 8)}), "step": 9}, tmp_path / "pretrained")
    tune = (tmp_path / "finetune.py", f"init_from={tmp_path}/pretrained")
    assert run(*tune).stdout == "warm-started at step 0\n"
    *_, changes, check, resumed = run(*tune, "steps=3").stdout.splitlines()
    assert (changes.endswith(": steps 2 -> 3"), resumed) == (True, "resumed at step 2")
    assert "Resume is exact: 14 of 14 values" in check, "Hydra's jobs log from INFO on"


def test_a_job_that_is_killed_resumes_when_it_is_started_again(app: Path) -> None:
    killed = run(app, "steps=4", dies_at=2)
    assert killed.returncode == -9 and "lr 0.1 starts at 0" in killed.stdout
    again = run(app, "steps=4")
    assert again.returncode == 0 and "lr 0.1 starts at 2" in again.stdout
    must = run(app, "steps=5", "dcp_plugin/resume=must")
    assert must.returncode == 0 and "lr 0.1 starts at 4" in must.stdout


def _warnings(ran: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"\[dcp_plugin\]\[WARNING\] - (.*)", ran.stdout)


@pytest.mark.parametrize(
    "config",
    [
        TRAIN.replace("  - dcp_plugin/directory: of_job\n", ""),
        TRAIN.replace("  - _self_\n", "  - hydra: default\n  - _self_\n") + "folder: logs/${now:%Y-%m-%d}\n",
    ],
    ids=["no directory", "replaced by a later group"],
)
def test_a_run_whose_directory_has_the_time_in_its_name_says_that_it_cannot_resume(app: Path, config: str) -> None:
    (app.parent / "train.yaml").write_text(config)
    (app.parent / "hydra").mkdir()
    (app.parent / "hydra" / "default.yaml").write_text("run: {dir: '${folder}/run'}\n")
    ran = run(app)
    (said,) = _warnings(ran)
    assert said.startswith("no later start can resume this run") and "'dcp_plugin/directory: of_job'" in said
    assert "starts at 0" in ran.stdout


def test_the_row_of_the_readme_goes_on_where_it_was(app: Path) -> None:
    (row,) = re.findall(r"^\| \[Hydra\].*`defaults: \[(.*)\]` \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    (app.parent / "train.yaml").write_text(f"defaults: [{row}, _self_]\n" + TRAIN.partition("_self_\n")[2])
    for begin in (0, 2):
        ran = run(app)
        assert f"starts at {begin}" in ran.stdout and _warnings(ran) == [], ran.stderr


def test_each_job_of_a_sweep_has_checkpoints_of_its_own_and_finds_them_again(app: Path) -> None:
    sweep = ("-m", "lr=1,2", "steps=3")
    killed = run(app, *sweep, dies_at=2)
    assert killed.returncode == -9
    assert "lr 1 starts at 0" in killed.stdout and "lr 2" not in killed.stdout
    again = run(app, *sweep)
    assert again.returncode == 0 and "lr 1 starts at 2" in again.stdout and "lr 2 starts at 0" in again.stdout
    third = run(app, *sweep, "dcp_plugin/resume=must")
    assert third.returncode == 0 and "lr 1 starts at 3" in third.stdout and "lr 2 starts at 3" in third.stdout


def test_jobs_of_a_sweep_in_a_bucket(app: Path, bucket: Bucket) -> None:
    page = (ROOT / "docs" / "guides" / "hydra.md").read_text()
    (section,) = re.findall(r"^## Object stores\n.*?^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (app.parent / "train.yaml").write_text(TRAIN + section.replace("s3://bucket", bucket.url))
    config = run(app, "--cfg", "job", "--resolve", "--package", "dcp_plugin.resume.storage_options").stdout
    assert yaml.safe_load(config.partition("\n")[2]) == {"region": "eu-west-1"}
    for begin in (0, 2):
        ran = run(app, "-m", "lr=1,2")
        assert ran.returncode == 0 and re.findall(r"lr (\d) starts at (\d)", ran.stdout) == [
            ("1", str(begin)),
            ("2", str(begin)),
        ], ran.stderr
    assert dcp.latest(f"{bucket.url}/app/lr=1/job") == f"{bucket.url}/app/lr=1/job/step-2"


def test_a_sweep_whose_jobs_share_one_directory_is_refused(app: Path) -> None:
    shared = run(app, "-m", "lr=1,2", "dcp_plugin.resume.root=shared")
    assert shared.returncode != 0 and "lr 1 starts at 0" in shared.stdout
    assert re.search(r"CheckpointMismatch\(.this job of a sweep \(lr=2\) would resume from .*/shared", shared.stderr)
    assert "dcp_plugin/directory: of_job" in shared.stderr
    assert "lr 1 starts at 2" in run(app, "-m", "lr=1", "dcp_plugin.resume.root=shared").stdout


def test_fields_of_groups_are_overridden_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "me")
    page = (ROOT / "docs" / "guides" / "hydra.md").read_text()
    (keeper,) = re.findall(r"`(dcp_plugin\.checkpoint\.keeper=\{.*?\})`", page)
    (io,) = re.findall(r"`(dcp_plugin\.checkpoint\.io\..*?)`", page)
    (replicas,) = re.findall(r"`(dcp_plugin\.checkpoint\.keeper\..*?)`", page)
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base=None):
        for option, overrides, meant in (
            ("async", [keeper, io], dcp.Keeper(dir="/dev/shm/run")),
            ("local", [replicas, io], dcp.Keeper(dir="/dev/shm/dcp_plugin-me", replicas=1)),
        ):
            config = hydra.compose(overrides=[f"+dcp_plugin/checkpoint={option}", *overrides]).dcp_plugin.checkpoint
            assert instantiate(config) == dcp.CheckpointConfig(async_save=True, keeper=meant, io=dcp.IO(threads=4))


def test_typos_are_named(app: Path) -> None:
    option = run(app, "dcp_plugin/checkpoint=asynch")
    assert "Could not find 'dcp_plugin/checkpoint/asynch'" in option.stderr and "async\n" in option.stderr
    hydras = run(app, "dcp_plugin.checkpoint.asnyc_save=true").stderr
    assert "Key 'asnyc_save' is not in struct" in hydras and "use +dcp_plugin.checkpoint.asnyc_save=true" in hydras
    as_proposed = run(app, "+dcp_plugin.checkpoint.asnyc_save=true").stderr
    assert "'asnyc_save' (did you mean 'async_save'?)" in as_proposed
    in_group = run(app, "dcp_plugin.checkpoint.keeper={replica: 1}").stderr
    assert "'keeper.replica' (did you mean 'keeper.replicas'?)" in in_group
    (app.parent / "train.yaml").write_text(TRAIN + "dcp_plugin: {checkpoint: {asnyc_save: true}}\n")
    assert "'asnyc_save' (did you mean 'async_save'?)" in run(app).stderr


def test_an_application_that_asks_for_no_group_pays_nothing_and_does_not_fail(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import sys, hydra\n"
        "@hydra.main(version_base=None, config_path=None)\n"
        "def main(cfg): print(*sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'dcp_plugin')))\n"
        "main()\n"
    )
    broken = tmp_path / "broken"
    shutil.copytree(installed / "hydra_plugins", broken / "hydra_plugins")
    (broken / "dcp_plugin").mkdir()
    (broken / "dcp_plugin" / "__init__.py").write_text("raise ImportError('half of it is missing')")
    for path, loaded, said in ((installed, LIGHT, ""), (broken, set(), "cannot be imported: ImportError('half of it")):
        env = {**os.environ, "PYTHONPATH": str(path)}
        ran = subprocess.run([sys.executable, "app.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert (ran.returncode, set(ran.stdout.split())) == (0, loaded), ran.stderr
        assert said in ran.stderr and bool(ran.stderr) == bool(said)


def _become(*overrides: str) -> None:
    """Makes this process a job of a sweep with these overrides, as Hydra does."""
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base=None):
        given = ["hydra.mode=MULTIRUN", *overrides]
        HydraConfig.instance().set_config(hydra.compose(overrides=given, return_hydra_config=True))


@pytest.fixture
def as_job() -> Iterator[Callable[..., None]]:
    yield _become
    HydraConfig.instance().cfg = None


def test_whose_checkpoints_are_there_is_known_however_they_came(as_job: Callable[..., None], place: Where) -> None:
    as_job("+lr=1")
    assert dcp.resolve_resume("never", place) is None
    dcp.save({"n": 1}, place / "step-1", step=1)
    as_job("+lr=2")
    with pytest.raises(CheckpointMismatch, match=r"sweep \(lr=2\) .* another one has its checkpoints \(lr=1\)"):
        dcp.resolve_resume("auto", place)
    with pytest.raises(CheckpointMismatch, match=re.escape("dcp_plugin/directory: of_job")):
        dcp.resume_or_init({"n": 0}, place, resume="must")
    assert str(dcp.resolve_resume(place / "step-1", place)) == str(place / "step-1")
    as_job("++lr=1")
    assert str(dcp.resolve_resume("must", place)) == str(place / "step-1"), "one that was refused has left no note"
    as_job("+lr=2")
    dcp.resolve_resume("never", place)
    dcp.save({"n": 2}, place / "step-2", step=2)
    for lr in (1, 2):
        as_job(f"+lr={lr}")
        with pytest.raises(CheckpointMismatch):
            dcp.resolve_resume("auto", place)


def test_what_makes_another_job_of_it(as_job: Callable[..., None], tmp_path: Path) -> None:
    as_job("+presume=1", "+resume=auto", "+steps=2")
    dcp.resolve_resume("auto", tmp_path)
    beside = "hydra.job.config.override_dirname.exclude_keys=[steps]"
    for same in (("+presume=1", "+resume=must", "+steps=2"), ("+steps=2", "+presume=1", "+dcp_plugin/resume=never")):
        as_job(*same)
        assert dcp.resolve_resume("auto", tmp_path) is None
    for other in (("+presume=2", "+steps=2"), ("+presume=1", "+steps=3"), ("+presume=1",), ()):
        as_job(*other)
        with pytest.raises(CheckpointMismatch):
            dcp.resolve_resume("auto", tmp_path)
    for steps in (2, 3):
        as_job("+presume=1", f"+steps={steps}", beside)
        assert dcp.resolve_resume("auto", tmp_path / "extended") is None


@pytest.fixture
def starts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., list[str]]]:
    """Starts a run with this configuration in this process, as Hydra does: what is logged when it looks for its own."""

    def start(config: str, resume: str = "auto") -> list[str]:
        (tmp_path / "started.yaml").write_text(config)
        with hydra.initialize_config_dir(str(tmp_path), version_base=None):
            HydraConfig.instance().set_config(hydra.compose("started", return_hydra_config=True))
        caplog.clear()
        dcp.resolve_resume(resume, tmp_path / "run")
        return [record.getMessage() for record in caplog.records]

    yield start
    HydraConfig.instance().cfg = None


def test_a_run_that_goes_on_with_other_settings_says_which(starts: Callable[..., list[str]], tmp_path: Path) -> None:
    first = "lr: 0.1\noptim: {betas: [0.9, 0.99], eps: 1}\ndcp_plugin: {resume: {resume: auto}}"
    other = "lr: 0.5\noptim: {betas: [0.9, 0.95]}\nseed: ${lr}\ndcp_plugin: {resume: {resume: must}}"
    assert starts(first) == []
    dcp.save({"n": 1}, tmp_path / "run" / "step-1", step=1)
    assert starts(first, "must") == []
    for _ in range(2):  # the first of these starts saves nothing: the checkpoint is that of the run before
        (line,) = starts(other)
        said, _, changes = line.partition(": ")
        assert said == f"resuming from {tmp_path}/run/step-1, saved with another configuration"
        assert sorted(changes.split(", ")) == [
            "lr 0.1 -> 0.5", "optim.betas.1 0.99 -> 0.95", "optim.eps 1 -> (absent)", "seed (absent) -> ${lr}"
        ]  # fmt: skip
    dcp.save({"n": 2}, tmp_path / "run" / "step-2", step=2)
    assert starts(other) == []
    assert starts(first, "never") == []
    dcp.save({"n": 3}, tmp_path / "run" / "step-3", step=3)
    assert starts(first) == []


@on_ranks(2)
def test_of_two_jobs_that_start_at_once_in_one_directory_one_is_refused(tmp_path: Path) -> None:
    _become(f"+lr={dist.get_rank()}")  # each rank is another job of a sweep
    for number in range(40):
        dist.barrier()
        try:
            dcp.resolve_resume("auto", tmp_path / str(number))
            is_refused = False
        except CheckpointMismatch:
            is_refused = True
        assert any(gathered(is_refused)), number


def test_no_directory_of_a_job_is_inside_of_another_ones(app: Path) -> None:
    for given, jobs in ((("-m", "data=a/b,a"), 2), (("-m",), 1), ((), 1)):
        ran = run(app, *given)
        assert ran.returncode == 0 and ran.stdout.count("starts at 0") == jobs, ran.stdout + ran.stderr


def test_the_form_that_the_page_names_composes_in_a_structured_config() -> None:
    page = (ROOT / "docs" / "guides" / "hydra.md").read_text()
    (default,) = re.findall(r'`(\{"_target_": "dcp_plugin\.CheckpointConfig".*?\})`', page)
    node = field(default_factory=lambda: json.loads(default.replace("True", "true")))
    config = OmegaConf.structured(make_dataclass("Config", [("checkpoint", Any, node)]))
    assert instantiate(config.checkpoint) == dcp.CheckpointConfig(async_save=True)
