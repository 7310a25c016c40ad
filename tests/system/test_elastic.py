"""examples/elastic: what torchrun, SLURM and Kubernetes end and start again goes on from its newest checkpoint."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

import dcp_plugin as dcp
from dcp_plugin.tiers.spool import Spool
from tests import launch, programs
from tests.compare import same_tree
from tests.hosts import hosts, python
from tests.limits import HANG
from tests.programs import ROOT, Program

ELASTIC = ROOT / "examples/elastic"
DYING = ROOT / "tests/dying.py"
STEPS = 24
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d")

pytestmark = pytest.mark.ranks


def _train(root: Path, *more: object, steps: int = STEPS) -> list[object]:
    return [ELASTIC / "train.py", "--root", root, "--steps", steps, "--every", 8, *more]


def _lives(said: str) -> list[str]:
    """How each life began."""
    return [line for line in said.splitlines() if " ranks, restart " in line]


def _contents(path: Path) -> dict[str, Any]:
    contents: dict[str, Any] = {"model": {}, "optim": {}}
    dcp.load(contents, path)
    return contents


def _uninterrupted(root: Path, steps: int = STEPS) -> dict[str, Any]:
    """The newest checkpoint of two ranks that nobody has stopped."""
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launch.free_port())}
    environment = {**os.environ, **ENVIRONMENT, **both}
    ranks = [Program(*_train(root, steps=steps), env={**environment, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.communicate()[1] for rank in ranks] == ["", ""]
    return _contents(root / f"step-{steps:06d}")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, whatever the test leaves there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.mark.long
@pytest.mark.parametrize("local", [True, False], ids=["memory", "disk"])
def test_a_killed_rank_is_restarted_by_torchrun_and_ends_with_the_bytes_of_a_run_that_was_not_killed(
    tmp_path: Path, memory: Path, local: bool
) -> None:
    more = ["--local-dir", memory] if local else []
    own = ["--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    train = [DYING, "killed", 1, 8, *_train(tmp_path / "killed", *more)]
    killed = Program(*TORCHRUN, *own, *train, env={**os.environ, **ENVIRONMENT})
    straight = _uninterrupted(tmp_path / "straight")
    said, errors = killed.communicate()
    assert killed.returncode == 0, errors[-3000:]
    first, second = _lives(said)
    assert "restart 0: starts fresh" in first and "restart 1: resumed at step 8:" in second
    assert ("from this node" in second, "from durable" in second) == (local, False)
    assert same_tree(straight, _contents(tmp_path / f"killed/step-{STEPS:06d}"))


@pytest.mark.long
@pytest.mark.parametrize("drained", [True, False], ids=["durable", "not yet"])
def test_the_node_that_is_left_goes_on_alone_from_its_own_memory_when_the_other_is_lost(
    tmp_path: Path, drained: bool
) -> None:
    """With ``--nnodes=1:2`` and a copy of each node's part on the other one; also while that is still on its way."""
    complete = tmp_path / "complete"
    os.mkfifo(complete)
    conf = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=8,is_host="
    with hosts(2, tmp_path) as h:
        common = ["--nnodes=1:2", "--max-restarts=2", f"--rdzv-endpoint={h[0].address}:{launch.free_port()}"]
        path = h.shared.path / "run"
        agents = []
        for host, dying in zip(h, [[], [DYING, complete, 0, 8]], strict=True):
            own = [f"--local-addr={host.address}", f"--rdzv-conf={conf}{host is h[0]}"]
            train = _train(path, "--local-dir", host.memory / "local", "--replicas", 1)
            train += [] if drained else ["--drain-bandwidth", 150e3, "--width", 2048]
            agents.append(host.run(python, *TORCHRUN, *common, *own, *dying, *train, env=ENVIRONMENT))
        complete.read_text()
        h[1].lose()
        code, said = agents[0].wait(HANG), agents[0].log.read_text()
    assert code == 0, said
    second = _lives(said)[-1]  # the first life is told by rank 0, which may be on the other node
    assert "1 ranks, restart 1: resumed at step 8:" in second
    assert "from this node" in second and not re.search(r"from (durable|node)", second)
    assert dcp.latest(path) == path / f"step-{STEPS:06d}"


def test_a_rank_that_fails_ends_at_once_and_is_back_from_memory_while_its_save_is_on_its_way(
    tmp_path: Path, memory: Path
) -> None:
    """Whoever waits for its end, or for that of its pipes, as torchrun, ``srun`` and ``tee`` do, is not held up."""
    resume = """if True:
        import sys, torch, dcp_plugin as dcp
        state, root, memory = {"weight": torch.zeros(1000)}, *sys.argv[1:]
        checkpointer = dcp.Checkpointer(async_save=True, keeper={"dir": memory, "bandwidth": 1.0, "linger": 1.0})
        print(dcp.resume_or_init(state, root, checkpointer=checkpointer))
    """
    save_and_fail = """
        checkpointer.save(state, root + "/step-1", step=1).wait_local()
        raise SystemError("an error of the training")
    """
    path = tmp_path / "run/step-1"
    spool = Spool.of(path.parent, str(memory))
    try:
        failed = programs.run("-c", resume + save_and_fail, path.parent, memory)
        assert failed.returncode == 1 and "an error of the training" in failed.stderr
        assert spool.is_kept() and not path.exists()
        again = programs.run("-c", resume, path.parent, memory)
        assert again.returncode == 0, again.stderr
        assert "resumed at step 1" in again.stdout and "from this node" in again.stdout
    finally:
        if spool.is_kept():
            os.kill(spool.pid() or 0, signal.SIGKILL)


# The job files. Small programs stand for torchrun, srun and scontrol: they note how they were called.

NOTE = """#!{python} -S
import os, signal, sys
with open({log!r}, "a") as log:
    print(os.path.basename(sys.argv[0]), *sys.argv[1:], sep="\\0", file=log)
{body}
"""
BODIES = {
    "scontrol": 'print("node1\\nnode2" if "hostnames" in sys.argv else "")',
    "srun": 'os.execvp("torchrun", sys.argv[sys.argv.index("torchrun"):])',
    "torchrun": "",
}
UNTIL_SIGTERM = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
open({fifo!r}, "w").close()
signal.pause()
"""
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}


class Commands:
    """A directory of programs that note their arguments, for ``PATH``."""

    def __init__(self, root: Path) -> None:
        self.log = root / "log"
        for name, body in BODIES.items():
            self.put(name, body)

    def put(self, name: str, body: str) -> None:
        program = self.log.with_name(name)
        program.write_text(NOTE.format(python=sys.executable, log=str(self.log), body=body))
        program.chmod(0o755)

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """It says what it has to say in a pipe, as a launcher would read it."""
        path = f"{self.log.parent}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", str(ELASTIC / script), *arguments],
            env={"PATH": path, "ROOT": "/run", **environment},
            stdout=subprocess.PIPE,
            text=True,
        )

    def calls(self, name: str) -> list[list[str]]:
        all_calls = [line.split("\0") for line in self.log.read_text().splitlines()]
        return [arguments for called, *arguments in all_calls if called == name]


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


def _accepted(arguments: list[str]) -> Any:
    """What torchrun makes of its arguments, after train.py has taken those behind its name."""
    parsed = get_args_parser().parse_args(arguments)
    script = ROOT / parsed.training_script
    assert script.samefile(ELASTIC / "train.py")
    parsed.train = runpy.run_path(str(script))["arguments"]().parse_args(parsed.training_script_args)
    return parsed


def test_torchrun_sh_gives_torchrun_what_it_understands(commands: Commands) -> None:
    job = commands.start("torchrun.sh", NNODES="1:2", HEAD="node1:29400")
    assert job.communicate()[0] == "" and job.returncode == 0
    [arguments] = commands.calls("torchrun")
    parsed = _accepted(arguments)
    assert (parsed.nnodes, parsed.rdzv_endpoint, parsed.rdzv_backend) == ("1:2", "node1:29400", "c10d")


def test_slurm_sbatch_starts_torchrun_again_until_it_ends_well(commands: Commands) -> None:
    commands.put("torchrun", f"sys.exit(open({str(commands.log)!r}).read().count('\\ntorchrun') < 3)")
    job = commands.start("slurm.sbatch", **SLURM)
    assert job.communicate()[0] == "" and job.returncode == 0
    first, second, third = map(_accepted, commands.calls("torchrun"))
    assert (first.nnodes, first.rdzv_endpoint) == ("2", "node1:29400")
    assert [first.rdzv_id, second.rdzv_id, third.rdzv_id] == ["7-0-0", "7-0-1", "7-0-2"]
    assert commands.calls("scontrol") == [["show", "hostnames", "node[1-2]"]]


def test_slurm_sbatch_queues_itself_again_when_its_time_is_up(commands: Commands, tmp_path: Path) -> None:
    """SIGTERM comes to the script alone. It tells the training, waits for its end, and queues the job."""
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    commands.put("torchrun", UNTIL_SIGTERM.format(fifo=str(fifo)))
    job = commands.start("slurm.sbatch", **SLURM)
    fifo.read_text()
    job.send_signal(signal.SIGTERM)
    job.communicate()
    assert job.returncode == 0
    assert len(commands.calls("torchrun")) == 1
    assert commands.calls("scontrol")[1:] == [["requeue", "7"]]


@pytest.mark.long
def test_a_training_that_slurm_queues_again_ends_with_the_bytes_of_one_that_was_not_stopped(
    commands: Commands, tmp_path: Path
) -> None:
    """With the real torchrun. Its second life is another job to torchrun, and the same one to SLURM."""
    commands.put("torchrun", 'os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *sys.argv[1:]])')
    commands.put("scontrol", 'print("127.0.0.1" if "hostnames" in sys.argv else "")')
    settings = {**ENVIRONMENT, **SLURM, "SLURM_JOB_NUM_NODES": "1", "NPROC": "2", "ROOT": str(tmp_path / "run")}
    settings |= {"SLURM_SUBMIT_DIR": str(ROOT), "OMP_NUM_THREADS": "1"}
    steps = 2000  # more than there are until the signal
    first = commands.start("slurm.sbatch", "--steps", str(steps), "--every", "8", **settings)
    assert first.stdout is not None and "starts fresh" in first.stdout.readline()
    first.send_signal(signal.SIGTERM)
    first.communicate()
    assert (first.returncode, commands.calls("scontrol")[-1]) == (0, ["requeue", "7"])
    reached = dcp.latest(tmp_path / "run")
    end = int(str(reached)[-6:]) + 8 if reached else 8
    again = commands.start("slurm.sbatch", "--steps", str(end), "--every", "8", **settings, SLURM_RESTART_COUNT="1")
    said, _ = again.communicate()
    assert again.returncode == 0
    assert f"resumed at step {end - 8}:" in said if reached else "starts fresh" in said
    assert same_tree(_uninterrupted(tmp_path / "straight", end), _contents(tmp_path / f"run/step-{end:06d}"))


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_a_job_file_is_correct_shell(script: str) -> None:
    checkers = [["bash", "-n"]] + [["shellcheck"]] * bool(shutil.which("shellcheck"))
    for checker in checkers:
        checked = subprocess.run([*checker, ELASTIC / script], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "mem", "time", "requeue", "signal"),
    *("open-mode", "output"),
}


def test_the_options_for_sbatch_come_before_any_command_and_exist() -> None:
    lines = (ELASTIC / "slurm.sbatch").read_text().splitlines()
    heading = lines[: next(at for at, line in enumerate(lines) if not line.startswith("#"))]
    options = [re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", line) for line in lines if line.startswith("#SBATCH")]
    assert len(options) == sum(line.startswith("#SBATCH") for line in heading)
    assert {option[1] for option in options if option} == SBATCH
    asked, grace = "--signal=B:TERM@180", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120"
    assert any(asked in line for line in heading) and any(grace in line for line in lines)


@pytest.fixture
def kubernetes() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((ELASTIC / "kubernetes.yaml").read_text())}


def test_the_pods_of_kubernetes_yaml_find_each_other(kubernetes: dict[str, Any]) -> None:
    service, job = kubernetes["Service"], kubernetes["Job"]
    pods = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name} and service["spec"]["clusterIP"] == "None"
    assert pods["subdomain"] == service["metadata"]["name"] and job["spec"]["completionMode"] == "Indexed"
    torchrun, *arguments = pods["containers"][0]["command"]
    parsed = _accepted(arguments)
    assert torchrun == "torchrun" and parsed.rdzv_endpoint == f"{name}-0.{pods['subdomain']}:29400"
    assert (
        parsed.nnodes == f"1:{job['spec']['completions']}" and job["spec"]["parallelism"] == job["spec"]["completions"]
    )


def test_the_memory_of_a_pod_outlives_its_containers_and_fits(kubernetes: dict[str, Any]) -> None:
    pods = kubernetes["Job"]["spec"]["template"]["spec"]
    container = pods["containers"][0]
    volumes = {volume["name"]: volume for volume in pods["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert set(volumes) == {mount["name"] for mount in container["volumeMounts"]}
    assert pods["restartPolicy"] == "OnFailure"
    memory = mounted["/dev/shm"]["emptyDir"]
    assert memory["medium"] == "Memory"
    assert int(memory["sizeLimit"].removesuffix("Gi")) < int(
        container["resources"]["limits"]["memory"].removesuffix("Gi")
    )
    grace = {variable["name"]: variable["value"] for variable in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert int(grace) < pods["terminationGracePeriodSeconds"]
