"""A script that forgets the process group: each process of the launch is warned, and none goes on with another's
checkpoint."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp_plugin as dcp
from dcp_plugin.core.ranks import launcher
from dcp_plugin.core.ranks.launcher import this_launch
from tests import programs
from tests.launch import on_ranks
from tests.programs import PACKAGE

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
RANK_OF = {"torchrun": (TORCHRUN, "RANK"), "srun": (SRUN, "SLURM_PROCID")}
FORGOT = "torch.distributed.init_process_group()"

TRAIN = """
import sys, torch, dcp_plugin as dcp
root, steps = sys.argv[1], int(sys.argv[2])
state = {"t": torch.zeros(3), "step": 0}
start = dcp.resume_or_init(state, root)
print(start.how, start.step)
for step in range(state["step"] + 1, state["step"] + 1 + steps):
    state["step"] = step
    dcp.save(state, f"{root}/step-{step}", step=step)
"""
GROUP = """
import torch.distributed
torch.distributed.init_process_group("gloo")
"""


def _as_rank(rank: int, by: str = "torchrun", **more: str) -> dict[str, str]:
    """The environment of a rank of a launch of two."""
    variables, name = RANK_OF[by]
    return {**os.environ, **variables, name: str(rank), **more}


def _train(root: Path, env: Mapping[str, str], steps: int = 1, code: str = TRAIN) -> Any:
    return programs.run("-c", code, root, steps, imported=PACKAGE, env=env)


def _checkpoints(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step-*"))


@pytest.mark.one_of("by")
@pytest.mark.parametrize("by", ["torchrun", "srun"])
def test_a_rank_does_not_resume_from_what_another_one_has_just_written(tmp_path: Path, by: str) -> None:
    first = _train(tmp_path, _as_rank(1, by))
    assert first.returncode == 0 and first.stdout == "fresh None\n", first.stderr
    assert first.stderr.count(f"{by} has started 2 processes without a process group: rank 1") == 1, "once"
    second = _train(tmp_path, _as_rank(0, by))
    assert second.returncode == 1 and not second.stdout
    assert "CheckpointMismatch" in second.stderr and FORGOT in second.stderr
    assert f"{tmp_path / 'step-1'} is of rank 1 of the same launch by {by}, and this is rank 0 of 2" in second.stderr
    assert _checkpoints(tmp_path) == ["step-1"]


def test_a_rank_that_has_started_fresh_is_stopped_at_its_first_save_beside_another_one(tmp_path: Path) -> None:
    """Both have started fresh before either has saved."""
    code = TRAIN.replace("for step", "print(input_of_the_test(), flush=True)\nfor step", 1)
    wait = f"def input_of_the_test():\n    open({str(tmp_path / 'gate')!r}).read()\n    return 'goes on'\n"
    os.mkfifo(tmp_path / "gate")
    late = programs.Program("-c", wait + code, tmp_path / "run", 1, env=_as_rank(1))
    assert late.stdout.readline() == "fresh None\n"
    assert _train(tmp_path / "run", _as_rank(0)).returncode == 0
    (tmp_path / "gate").write_text("")
    out, err = late.communicate()
    assert late.returncode == 1 and "is of rank 0 of the same launch" in err, (out, err)
    assert dcp.verify(tmp_path / "run" / "step-1").ok, "what the other rank has saved is untouched"
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name != ".dcp_plugin"] == ["step-1"]


def test_a_load_of_what_latest_has_found_is_refused_and_solo_accepts_it(tmp_path: Path) -> None:
    assert _train(tmp_path, _as_rank(0)).returncode == 0
    load = """
import sys, warnings, dcp_plugin as dcp
found = dcp.latest(sys.argv[1])
with warnings.catch_warnings():
    warnings.simplefilter("error")
    dcp.Checkpointer(solo=True).load(dict(t=None, step=0), found)
dcp.inspect(found), dcp.read(found), dcp.verify(found)
print("solo", flush=True)
dcp.load(dict(t=None, step=0), found)
"""
    ended = _train(tmp_path, _as_rank(1), code=load)
    assert ended.stdout == "solo\n" and ended.returncode == 1
    assert "CheckpointMismatch" in ended.stderr and FORGOT in ended.stderr


def test_a_reservation_of_another_rank_stops_a_save_and_a_start(tmp_path: Path) -> None:
    code = f"""
import os, signal
from dcp_plugin import events
def die(event):
    if isinstance(event, events.SaveStarted):
        open({str(tmp_path / "saves")!r}, "w").write("")
        signal.pause()
events.subscribe(die)
"""
    os.mkfifo(tmp_path / "saves")
    saves = programs.Program("-c", code + TRAIN, tmp_path / "run", 1, env=_as_rank(0))
    (tmp_path / "saves").read_text()  # it has a reservation now, and no checkpoint
    (record,) = (tmp_path / "run" / ".dcp_plugin").glob("*.json")
    assert json.loads(record.read_text())["launch"]["rank"] == 0
    starts = _train(tmp_path / "run", _as_rank(1))
    assert starts.returncode == 1 and "is of rank 0 of the same launch" in starts.stderr
    save = "import sys, dcp_plugin as dcp\ndcp.save(dict(n=1), sys.argv[1] + '/other')"
    other = _train(tmp_path / "run", _as_rank(1), code=save)
    assert other.returncode == 1 and "is of rank 0 of the same launch" in other.stderr
    assert not (tmp_path / "run" / "other").exists()
    saves.send_signal(9)
    saves.communicate()


@pytest.mark.one_of("by")
@pytest.mark.parametrize("by", ["torchrun", "srun"])
def test_trainings_with_roots_of_their_own_go_on_and_each_resumes_its_own(tmp_path: Path, by: str) -> None:
    for count in ("0", "1"):  # the second time as restarted by the launcher
        for rank in (0, 1):
            ended = _train(tmp_path / f"run-{rank}", _as_rank(rank, by, TORCHELASTIC_RESTART_COUNT=count), steps=2)
            assert ended.returncode == 0, ended.stderr
            assert ended.stdout == ("fresh None\n" if count == "0" else "resumed 2\n")
            assert ended.stderr.count("UserWarning") == 1
    assert _checkpoints(tmp_path / "run-1") == ["step-1", "step-2", "step-3", "step-4"]


def test_other_launches_and_single_processes_hear_nothing_of_it(tmp_path: Path) -> None:
    single = {name: value for name, value in os.environ.items() if name not in (*TORCHRUN, *SRUN)}
    assert _train(tmp_path, _as_rank(0)).returncode == 0
    later = _train(tmp_path, _as_rank(1, MASTER_PORT="29501"))
    assert later.returncode == 0 and later.stdout == "resumed 1\n"
    alone = _train(tmp_path, {**single, **_as_rank(0, WORLD_SIZE="1")})
    assert alone.stdout == "resumed 2\n" and "UserWarning" not in alone.stderr
    without = _train(tmp_path, single)
    assert without.stdout == "resumed 3\n" and "UserWarning" not in without.stderr


def test_torchrun_itself_with_and_without_the_process_group(tmp_path: Path) -> None:
    script, forgets = tmp_path / "train.py", tmp_path / "forgets.py"
    forgets.write_text(TRAIN)
    script.write_text(GROUP + TRAIN + "torch.distributed.destroy_process_group()\n")
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    for how in ("fresh", "resumed"):
        ended = programs.run(*run, script, tmp_path / "run", 1, imported=PACKAGE)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count(how) == 2 and "UserWarning" not in ended.stderr
    ended = programs.run(*run, forgets, tmp_path / "other", 3, imported=PACKAGE)
    assert ended.returncode != 0 and FORGOT in ended.stderr
    launch = json.loads((tmp_path / "run" / "step-2" / "dcp_plugin.json").read_text())["launch"]
    assert launch["launcher"] == "torchrun" and launch["rank"] == 0 and launch["world_size"] == 2


@on_ranks(2)
def test_what_a_group_has_saved_is_anybodys(tmp_path: Path) -> None:
    dcp.save({"n": 1}, tmp_path / "ck")
    dist.barrier()
    dist.destroy_process_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert dcp.load({"n": 0}, tmp_path / "ck").loaded == ["n"]


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, None),  # as Lightning leaves it
        ({"RANK": "x", "WORLD_SIZE": "2"}, None),
        ({"RANK": "1", **TORCHRUN}, ("torchrun", 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, None),  # a batch script runs once
        ({"SLURM_PROCID": "1", **SRUN}, ("srun", 1)),
        ({"SLURM_PROCID": "1", **SRUN, "RANK": "0", "WORLD_SIZE": "1"}, None),  # torchrun in each task
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "job"}, ("mpirun", 1)),
    ],
)
def test_the_variables_of_launchers(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], launch: Any) -> None:
    for _, of_launcher, names in launcher._LAUNCHERS:
        for name in (*of_launcher, *names):
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = this_launch()
    assert launch == (None if found is None else (found.launcher, found.rank))


@pytest.mark.parametrize("record", [None, 5, [], {}, {"id": 3}, {"launcher": "srun", "id": "7 0", "rank": "x"}])
def test_a_record_of_anything_else_is_of_no_rank(record: object) -> None:
    assert launcher.Launch("srun", "7 0", 1, 2).rank_in(record) is None
