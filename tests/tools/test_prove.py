"""``prove``: a training is killed and resumed, and compared with itself. Nothing else of the user changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import dcp_plugin as dcp
from tests.commands import invoke
from tests.limits import HANG
from tests.programs import PYTHON, ROOT

LOOP = """
import os, random, sys, torch, dcp_plugin as dcp
{seed}
out = sys.argv[1]
options = {options}
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
optim = torch.optim.AdamW(model.parameters(), lr=0.01)
sched = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
order = torch.Generator().manual_seed(1)
orders = {{}} if {bug!r} == "order" else {{"order": order.get_state()}}
state = {{"model": model, "optim": optim, "sched": sched, "rng": dcp.RandomStreams(), "step": 0, **orders}}
{start}
if "order" in state:
    order.set_state(state["order"])
if state["step"] and {bug!r} == "scheduler":
    sched.step()
for step in range(state["step"] + 1, 7):
    batch = torch.randn(4, 4, generator=order)
    loss = model(batch).square().mean()
    optim.zero_grad(); loss.backward(); optim.step(); sched.step()
    state |= {{"step": step}} | ({{"order": order.get_state()}} if orders else {{}})
    {save}
"""


SAVED = "saved = f'{sys.argv[2]}/{step}'; dcp.save(state, saved, step=step)"


def _loop(
    folder: Path,
    bug: str = "",
    seed: str = "random.seed(0); torch.manual_seed(0)",
    start: str = "dcp.resume_or_init(state, out)",
    save: str = 'dcp.save(state, f"{out}/step-{step}", step=step, metrics={"loss": loss}, **options)',
    options: str = "{}",
) -> Path:
    script = folder / "train.py"
    script.write_text(LOOP.format(bug=bug, seed=seed, start=start, save=save, options=options))
    return script


def _command(*words: object) -> list[str]:
    return [PYTHON, "-m", "dcp_plugin", "prove", "--json", *map(str, words)]


def _prove(folder: Path, *words: object, status: int = 0, options: tuple[object, ...] = ()) -> Any:
    """Prove a command in a folder, and return the document."""
    kept = folder.parent / f"{folder.name}-runs"
    kept.mkdir(exist_ok=True)
    command = _command("--dir", kept, *options, "--", *words)
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=2 * HANG, env=_env())
    assert ran.returncode == status, (ran.stdout, ran.stderr)
    document = json.loads(ran.stdout)
    jsonschema.validate(document, json.loads((ROOT / "docs/schemas/prove.json").read_text()))
    return document.get("prove", document)


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def test_a_loop_that_restores_everything_is_exact(tmp_path: Path) -> None:
    script = _loop(tmp_path, save='open("best.pt", "w").write(str(step)); dcp.save(state, f"{out}/{step}", step=step)')
    before = {*tmp_path.iterdir()}
    proof = _prove(tmp_path, PYTHON, script, "{run}")
    assert proof["verdict"] == "exact" and proof["killed_after"] == 3
    assert [(step["step"], step["after_kill"], step["differ"]) for step in proof["steps"]] == [
        (step, step > 3, 0) for step in range(1, 7)
    ]
    assert proof["changed_files"] == [str(tmp_path / "best.pt")], "the run keeps the working directory"
    assert {*tmp_path.iterdir()} - before == {tmp_path / "best.pt"} and proof["folder"] is None


@pytest.mark.parametrize(
    ("bug", "leaf", "part"), [("order", "model.0.weight", "data loader"), ("scheduler", "sched.last_epoch", "")]
)
def test_state_that_is_not_restored_is_named(tmp_path: Path, bug: str, leaf: str, part: str) -> None:
    proof = _prove(tmp_path, PYTHON, _loop(tmp_path, bug), "{run}", status=1, options=("--kill-after", 2))
    assert proof["verdict"] == "different" and proof["first"]["step"] == 3
    assert any(leaf in keys for keys in proof["differ"].values()) and part in [*proof["not_saved"], ""]
    assert proof["losses"], "the next losses differ, too"
    assert [*Path(proof["folder"], "resumed").rglob("step-3")], "what differs can be looked at"


def test_runs_without_a_common_step_after_the_kill_are_inconclusive(tmp_path: Path) -> None:
    script = _loop(
        tmp_path,
        start='dcp.resume_or_init(state, out); first = state["step"] + 1',
        save='step > first and (step - first) % 2 == 0 and dcp.save(state, f"{out}/step-{step}", step=step)',
    )
    proof = _prove(tmp_path, PYTHON, script, "{run}", status=5)
    assert "the undisturbed one has 3, 5, the resumed one 3, 6" in proof["reason"]


def test_a_run_that_ends_before_the_kill_is_inconclusive(tmp_path: Path) -> None:
    proof = _prove(tmp_path, PYTHON, _loop(tmp_path), "{run}", status=5, options=("--kill-after", 7))
    assert "ended before it could be killed" in proof["reason"]


def test_a_script_that_saves_nothing_is_inconclusive(tmp_path: Path) -> None:
    proof = _prove(tmp_path, "touch", "{run}/log", status=5)
    assert proof["verdict"] == "inconclusive" and "no checkpoint" in proof["reason"]


BY_CHANCE = """
random.seed(0); torch.manual_seed(0)
with open("runs", "a") as file:
    file.write(".")
# The undisturbed run, the killed one, its second start, and the undisturbed one again.
drawn = (1, 100, 100, 1.5)[os.path.getsize("runs") - 1]
"""


@pytest.mark.parametrize(
    ("seed", "start"),
    [("", ""), (BY_CHANCE, "model[2].bias.data.fill_(drawn); ")],
    ids=["not seeded", "nearer by chance"],
)
def test_noise_as_large_as_the_difference_is_inconclusive(tmp_path: Path, seed: str, start: str) -> None:
    script = _loop(tmp_path, seed=seed, start=f"{start}dcp.resume_or_init(state, out)")
    proof = _prove(tmp_path, PYTHON, script, "{run}", status=5)
    assert proof["verdict"] == "inconclusive" and proof["steps"][-1]["noise"]


def test_a_second_start_that_does_not_resume_is_different(tmp_path: Path) -> None:
    proof = _prove(tmp_path, PYTHON, _loop(tmp_path, start=""), "{run}", status=1)
    assert "did not resume" in proof["reason"] and "step-1" in proof["reason"]


@pytest.mark.parametrize(
    "parts",
    [
        {"start": ""},
        {"save": ""},
        {
            "start": 'ck = dcp.Checkpointer(async_save=True, keeper={"dir": f"{out}-local"})',
            "save": 'ck.save(state, f"{out}/step-{step}", step=step)',
        },
        {"start": "", "save": "dcp.prune(out, keep_last=1)"},
        {"start": "dcp.latest(out)", "save": ""},
        {"start": "", "save": f"{SAVED}; dcp.copy(saved, out + '/step-2', overwrite=True)"},
        {"start": "", "save": f"{SAVED}; dcp.export(saved, out + '/final.safetensors', include=['model.*'])"},
    ],
    ids=["save", "resume", "keeper", "prune", "latest", "copy", "export"],
)
def test_a_real_run_loses_nothing_and_gains_nothing(tmp_path: Path, parts: dict[str, str]) -> None:
    (folder := tmp_path / "work").mkdir()
    for step in (1, 2):
        dcp.save({"model": torch.nn.Linear(2, 2)}, tmp_path / f"real/step-{step}", step=step)
    before = _tree(tmp_path / "real")
    error = _prove(folder, PYTHON, _loop(folder, **parts), tmp_path / "real", "{run}", status=3)["error"]
    assert "write {run}" in error["message"] and "real is not new" in error["message"]
    assert _tree(tmp_path / "real") == before and not (tmp_path / "real-local").exists()


ALONE = """
import os, subprocess, sys
pids = f"{sys.argv[1]}/pids"
for pid in open(pids).read().split() if os.path.exists(pids) else ():
    assert not os.path.exists(f"/proc/{pid}"), "a process of the killed run is alive"
detached = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
with open(pids, "a") as file:
    print(os.getppid(), os.getpid(), detached.pid, file=file)
import atexit; atexit.register(detached.kill)
assert os.environ["WANDB_MODE"] == "offline"
"""


def test_workers_of_torchrun_end_before_the_resume(tmp_path: Path) -> None:
    (script := _loop(tmp_path)).write_text(ALONE + script.read_text())
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1)
    assert _prove(tmp_path, *torchrun, script, "{run}")["verdict"] == "exact"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_prove_ends_the_training(tmp_path: Path, number: signal.Signals) -> None:
    script = f"import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep({HANG})"
    command = ["env", "--default-signal=HUP", *_command("--dir", tmp_path, "--", PYTHON, "-c", script, "{run}")]
    with subprocess.Popen(command, cwd=tmp_path, env=_env(), stdout=subprocess.DEVNULL) as process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(HANG) == 128 + number
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


MAY_NOT = """
import os
from dcp_plugin.tools.prove import prove
kill, refused = os.kill, []
def may_not(pid, number):
    if not refused:
        refused.append(pid)
        raise PermissionError
    kill(pid, number)
os.kill = may_not
print(prove(["sh", "-c", "sleep 3600; : {run}"], timeout=1.0).reason)
"""


def test_a_process_of_another_user_does_not_spare_the_others(tmp_path: Path) -> None:
    ran = subprocess.run(
        [PYTHON, "-c", MAY_NOT], cwd=tmp_path, capture_output=True, text=True, timeout=HANG, env=_env()
    )
    assert "took longer" in ran.stdout, ran.stderr


def test_launches_that_cannot_be_ended_are_refused(tmp_path: Path) -> None:
    for command in (["srun", "python", "train.py", "{run}"], ["bash", "-c", "/usr/bin/mpirun -n 2 a {run}"]):
        assert (result := invoke("prove", "--", *command)).exit_code == 2 and "one host" in result.output
    (ssh := tmp_path / "ssh").write_text("#!/bin/sh\nsleep 3600\n")
    ssh.chmod(0o755)
    assert (
        "ssh" in _prove(tmp_path, PYTHON, "-c", f"import os; os.system('{ssh}')", "{run}", status=3)["error"]["message"]
    )


def test_a_command_without_run_is_refused(tmp_path: Path) -> None:
    result = invoke("prove", "--", "python", "train.py", "--out", tmp_path)
    assert result.exit_code == 2 and "write {run}" in result.output


def test_a_run_in_place_saves_to_new_folders_alone(tmp_path: Path) -> None:
    script = _loop(tmp_path)
    assert _prove(tmp_path, PYTHON, script, "new", options=("--in-place",))["verdict"] == "exact"
    assert not [*(tmp_path / "new").iterdir()], "they are moved away after each run"


def test_a_keeper_of_a_run_is_private_and_ends(tmp_path: Path) -> None:
    script = _loop(
        tmp_path,
        options=f'{{"keeper": {{"dir": "{tmp_path}/local"}}, "async_save": True}}',
        start="ck = dcp.Checkpointer(**options); dcp.resume_or_init(state, out, checkpointer=ck)",
        save='ck.save(state, f"{out}/step-{step}", step=step)',
    )
    script.write_text(f"{script.read_text()}\nck.close()\n")
    assert _prove(tmp_path, PYTHON, script, "{run}")["verdict"] == "exact"
    assert not (tmp_path / "local").exists()
