"""``dcp-plugin prove``: run a training undisturbed, and killed and resumed, and compare the checkpoints of both.

Each run has the folder ``run`` in a new folder, the *home* of the proof, as the folder of its checkpoints. When a run
has ended, its files move to a folder with the name of the run. So all runs have equal paths, and no path in a
checkpoint differs.

The rule: no other run changes. The variable :data:`~dcp_plugin.core.paths.PROVED` has every save, copy, deletion and
automatic resume refuse a folder that is neither new nor in the home
(:func:`dcp_plugin.core.media.places.refuse_real_run`), and gives keepers private folders. No process that a run has
started is alive when the next run starts.
"""

from __future__ import annotations

import csv
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any, Literal

from dcp_plugin.core.errors import CheckpointError, refuse_other_systems, some
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.paths import KILLED_AFTER, PROVED, Where, as_path
from dcp_plugin.core.runs.scan import Scan
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.tools.diff import diff
from dcp_plugin.tools.divergence import LOADER, OPTIMIZER, RNG, Divergence, differing, divergence_in, kind_of, steps_of

RUN = "{run}"
"""Text in a command that is replaced by the folder of a run."""
NOISE = 10.0
"""Factor by which a difference exceeds the noise: two samples of the same noise differ by less."""
_UNDISTURBED, _RESUMED, _REPEATED = "undisturbed", "resumed", "undisturbed-again"
_POLL, _TRAILING = 0.05, 60.0
"""Seconds between two looks at a run, and seconds in which processes that it leaves, such as a keeper, may end."""
_MOST_FILES = 50_000
_LAUNCHERS = {
    *("srun", "sbatch", "salloc", "ssh", "pdsh", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "prun"),
    *("jsrun", "aprun", "qsub", "bsub", "docker", "podman", "kubectl", "sudo", "systemd-run", "tmux"),
}
"""Programs that start processes which this one cannot end."""
_ON_ONE_HOST = "starts processes that cannot be ended from here. Prove the training on one host, with torchrun."
_OFFLINE = {
    "WANDB_MODE": "offline",
    "NEPTUNE_MODE": "offline",
    "SWANLAB_MODE": "offline",
    "COMET_START_ONLINE": "false",
    "CLEARML_OFFLINE_MODE": "1",
    "DVC_STUDIO_OFFLINE": "true",
}


class _Inconclusive(Exception):
    """The reason why nothing is proved."""


@dataclass(frozen=True)
class Proof:
    """Result of :func:`prove`.

    Attributes:
        killed_after: The step of the newest checkpoint when the training was killed.
        steps: The comparison of each step that both runs have, in order, without the keys in ``not_judged``. The key is
            empty if none differs, and one that differs by more than the noise if any does, values before tensors.
        first: The first step after the kill that differs by more than the noise.
        noise: The largest relative difference of a tensor between undisturbed runs, by step after the kill; empty if
            the second of them was not needed.
        not_saved: Parts of a training of which the checkpoints have no key.
        not_judged: Keys of values that differ between undisturbed runs, such as the state of an unseeded generator.
            They have no influence on the training if all other keys are equal.
        losses: Logged losses that differ by more than the noise after the kill, in words.
        changed_files: Files outside of ``{run}`` that the runs have made, changed or deleted.
        folder: The folder with the runs and their output; None if it is deleted, since the resume is exact.
    """

    verdict: Literal["exact", "different", "inconclusive"]
    reason: str
    killed_after: int | None = None
    steps: dict[int, Divergence] = field(default_factory=dict)
    first: int | None = None
    noise: dict[int, float] = field(default_factory=dict)
    not_saved: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    changed_files: list[str] = field(default_factory=list)
    folder: Path | None = None


def prove(
    command: Sequence[str],
    *,
    kill_after: int | None = None,
    timeout: float = 3600.0,
    in_place: bool = False,
    folder: Path | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> Proof:
    """Run a command undisturbed, and killed and resumed, and compare the checkpoints of the same steps.

    Args:
        command: The program and its arguments. ``{run}`` in it is replaced by a new folder.
        kill_after: Number of saves after which the training is killed; by default half of those of the undisturbed run.
        timeout: Seconds that each run may take.
        in_place: Accept a command without ``{run}``. New folders of checkpoints are moved away after each run.
        folder: Where the folder of the runs is made; the directory of temporary files by default.
        notify: Called with a line when a run starts.

    Raises:
        ValueError: The command has no ``{run}``, or starts processes on other hosts.
        CheckpointError: A run fails, or starts processes on other hosts.
    """
    refuse_other_systems()
    words = " ".join(takewhile(lambda word: not word.endswith(".py"), command)).split()
    if launcher := next((word for word in words if Path(word).name in _LAUNCHERS), None):
        raise ValueError(f"{launcher} {_ON_ONE_HOST}")
    if not in_place and not any(RUN in word for word in command):
        raise ValueError(
            f"the command does not say where the run is saved: write {RUN} in place of the folder of its checkpoints, "
            f"as in: dcp-plugin prove -- python train.py --out {RUN}. A command that cannot is run with --in-place."
        )
    home = Path(os.path.realpath(tempfile.mkdtemp(prefix="dcp-prove-", dir=folder)))
    before = _files_in(Path.cwd(), home)
    trial = _Trial(command, home, timeout, in_place, notify)
    with _adopting_orphans(trial):
        try:
            proof = _proved(trial, kill_after)
        except _Inconclusive as reason:
            proof = Proof("inconclusive", str(reason))
    after = _files_in(Path.cwd(), home)
    changed = set() if before is None or after is None else {path for path, _ in before.items() ^ after.items()}
    proof = replace(proof, changed_files=sorted(changed | trial.made_elsewhere()), folder=home)
    if proof.verdict != "exact":
        return proof
    shutil.rmtree(home)
    return replace(proof, folder=None)


@contextmanager
def _adopting_orphans(trial: _Trial) -> Iterator[None]:
    """Be the parent of orphaned descendants during the block. End all descendants after it, also at SIGTERM or
    SIGHUP."""
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    earlier = {
        each: signal.signal(each, lambda number, frame: sys.exit(128 + number))
        for each in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(each) != signal.SIG_IGN  # as with nohup
    }
    try:
        yield
    finally:
        trial.end_processes()
        for place in ("/dev/shm", tempfile.gettempdir()):  # host copies of keepers that were killed
            for folder in Path(place).glob(f"dcp_plugin-*-{trial.home.name}"):
                with suppress(FileNotFoundError):  # a keeper that ends removes its folder itself
                    if folder.lstat().st_uid == os.getuid():  # another user may have planted the name
                        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        prctl(36, 0, 0, 0, 0)


@dataclass
class _Trial:
    """Runs of one command, one after the other, in the home of the proof."""

    command: Sequence[str]
    home: Path
    timeout: float
    in_place: bool
    notify: Callable[[str], None]

    def __post_init__(self) -> None:
        self._others = {pid for pid, parent, *_ in _processes() if parent == os.getpid()}

    def run(self, name: str, kill_after: int | None = None) -> None:
        """Run the command to its end, or until a save after ``kill_after`` of them begins. No process stays alive.

        Raises:
            CheckpointError: The command fails, or starts processes on other hosts.
            _Inconclusive: It takes longer than the timeout, or makes too few saves to be killed.
        """
        run, output = self.home / "run", self.home / f"{name}.log"
        run.mkdir(exist_ok=True)
        self.notify(f"{name} run{'' if kill_after is None else f', killed after save {kill_after}'}")
        words, until = [word.replace(RUN, str(run)) for word in self.command], time.monotonic() + self.timeout
        options: dict[str, Any] = {"env": self._environment(kill_after), "start_new_session": True}
        with open(output, "ab") as log:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **options)

        def is_due() -> bool:
            return kill_after is not None and len(self.saves()) > kill_after

        try:
            while process.poll() is None and not is_due():
                if launchers := _LAUNCHERS.intersection(self._alive().values()):
                    raise CheckpointError(f"{some(sorted(launchers))}, which the command has started, {_ON_ONE_HOST}")
                if time.monotonic() > until:
                    raise _Inconclusive(f"the {name} run took longer than {self.timeout:g} s (--timeout)")
                time.sleep(_POLL)
            until = time.monotonic() + _TRAILING
            while process.returncode == 0 and self._alive() and time.monotonic() < until:
                time.sleep(_POLL)
        finally:
            self.end_processes()
            process.wait()
        if process.returncode and not is_due():
            lines = output.read_text(errors="replace").rstrip().split("\n")[-5:]
            raise CheckpointError(
                f"the {name} run ended with status {process.returncode}; {output} ends with:\n" + "\n".join(lines)
            )
        if kill_after is not None and not is_due():
            raise _Inconclusive(f"the run ended before it could be killed after save {kill_after}")

    def put_away(self, name: str) -> Path:
        """Move the files of the run to a folder with its name, and return it. The next run begins without them."""
        for number, root in enumerate(self._roots()):
            (kept := self.home / name / str(number)).mkdir(parents=True)
            for entry in list(root.iterdir()):
                shutil.move(entry, kept)
        for private in ("local", "trackers"):
            shutil.rmtree(self.home / private, ignore_errors=True)
        (self.home / "saves").unlink(missing_ok=True)
        return self.home / name

    def saves(self) -> list[str]:
        """Return the paths of the saves that have begun, in order; of other tools those of complete checkpoints."""
        with suppress(FileNotFoundError):
            return (self.home / "saves").read_text().splitlines()
        return list(map(str, self.checkpoints()))

    def checkpoints(self) -> list[Where]:
        """Return the complete checkpoints of the present run, of all tools."""
        return [state.path for root in self._roots() for state in Scan(root, others=True, read_all=True).complete()]

    def steps(self) -> dict[int, Where]:
        """Return the newest checkpoint of each step of the present run."""
        return {step: path for root in self._roots() for step, path in steps_of(root).items()}

    def made_elsewhere(self) -> set[str]:
        """Return the folders outside of the home in which a run has looked for checkpoints or made some."""
        with suppress(FileNotFoundError):
            folders = (self.home / "folders").read_text().splitlines()
            return {folder for folder in folders if medium_of(as_path(folder)).kind(as_path(folder))}
        return set()

    def end_processes(self) -> None:
        """Send SIGKILL to all descendants until none is alive: an orphan becomes a child of this process.

        Raises:
            CheckpointError: A process does not end.
        """
        until = time.monotonic() + _TRAILING
        # Twice: a parent that ends during the first look hides its children, which are orphans in the second.
        while alive := self._alive() or self._alive():
            if time.monotonic() > until:
                raise CheckpointError(f"these processes of the command do not end: {some(list(alive))}")
            for pid in alive:
                with suppress(ProcessLookupError, PermissionError):  # of another user: the others end all the same
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL / 5)
        for pid, parent, *_ in _processes():  # the next run may look whether a process with the number exists
            if parent == os.getpid() and pid not in self._others:
                os.waitpid(pid, 0)

    def _roots(self) -> list[Path]:
        elsewhere = sorted(self.made_elsewhere()) if self.in_place else []
        return [self.home / "run", *(Path(folder) for folder in elsewhere if os.path.isdir(folder))]

    def _alive(self) -> dict[int, str]:
        """Return the descendants of this process that are part of a run, with the names of their programs."""
        below: dict[int, list[tuple[int, str]]] = {}
        for pid, parent, program, is_alive in _processes():
            if is_alive and pid not in self._others:
                below.setdefault(parent, []).append((pid, program))
        descendants = below.get(os.getpid(), [])
        for pid, _ in descendants:  # grows
            descendants += below.get(pid, [])
        return dict(descendants)

    def _environment(self, kill_after: int | None) -> dict[str, str]:
        (trackers := self.home / "trackers").mkdir(exist_ok=True)
        private = {"WANDB_DIR": str(trackers), "MLFLOW_TRACKING_URI": (trackers / "mlflow").as_uri()}
        proof = {PROVED: str(self.home), KILLED_AFTER: "" if kill_after is None else str(kill_after)}
        return {"HF_HUB_OFFLINE": "1", **os.environ, **_OFFLINE, **private, **proof}


def _processes() -> Iterator[tuple[int, int, str, bool]]:
    """Yield all processes of this system: number, number of the parent, name of the program, False for a zombie.

    The first thread of a process may be a zombie while another one still writes to a disk.
    """
    for entry in os.scandir("/proc"):
        with suppress(OSError):
            if entry.name.isdigit():
                before, _, after = Path(entry.path, "stat").read_text(errors="replace").rpartition(") ")
                state, parent, *others = after.split()
                is_alive = state not in "ZX" or int(others[15]) > 1  # the number of threads
                yield int(entry.name), int(parent), before.partition("(")[2], is_alive


def _files_in(folder: Path, besides: Path) -> dict[str, int] | None:
    """Return the files below a folder with the times of their last change; None if there are too many."""
    changed: dict[str, int] = {}
    for directory, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(directory, name) != besides and name != "__pycache__"]
        for path in (os.path.join(directory, name) for name in names):
            with suppress(OSError):
                changed[path] = os.lstat(path).st_ctime_ns
        if len(changed) > _MOST_FILES:
            return None
    return changed


def _proved(trial: _Trial, kill_after: int | None) -> Proof:
    trial.run(_UNDISTURBED)
    if not (planned := trial.saves()):
        raise _Inconclusive(f"the undisturbed run has saved no checkpoint in {RUN}")
    undisturbed = trial.put_away(_UNDISTURBED)
    count = kill_after or max(1, len(planned) // 2)
    trial.run(_RESUMED, count)
    killed, present, steps = trial.saves(), trial.checkpoints(), trial.steps()
    if not steps:
        raise _Inconclusive(f"the killed run has left no checkpoint with a step in {RUN}")
    trial.run(_RESUMED)
    # Paths that a run saves to more than once, such as "last", show nothing.
    again = {path for path in trial.saves()[len(killed) :] if path in killed[:count] and planned.count(path) == 1}
    again |= {str(path) for step, path in trial.steps().items() if step <= max(steps) and path not in present}
    resumed = trial.put_away(_RESUMED)
    if again:
        reason = f"the second start did not resume: it saved anew what was saved before the kill, {some(sorted(again))}"
        return Proof("different", reason, max(steps))
    return _compared(trial, [undisturbed, resumed], max(steps))


def _compared(trial: _Trial, runs: list[Path], last: int) -> Proof:
    """Compare an undisturbed run with a resumed one, and if they differ, with a second undisturbed one."""
    steps = [steps_of(run) for run in runs]
    common = sorted(steps[0].keys() & steps[1].keys())
    after = [step for step in common if step > last]
    if not after:
        lists = [some(list(map(str, sorted(of_run)))) for of_run in steps]
        raise _Inconclusive(
            f"no step after the kill (at step {last}) is in both runs: the undisturbed one has {lists[0]}, the resumed "
            f"one {lists[1]}. A retention that keeps more of them, or an earlier kill, may help"
        )
    differences = {step: divergence_in(diff(steps[0][step], steps[1][step]), step) for step in common}
    amounts = {step: _amounts(difference) for step, difference in differences.items()}
    # Before the kill both runs are undisturbed.
    unjudged = {key for step in common if step <= last for key in amounts[step] if amounts[step][key] == inf}
    losses = [_losses(run) for run in runs]
    noise: dict[int, float] = dict.fromkeys(after, 0.0)
    if any(amounts[step].keys() - unjudged for step in after) or _apart(losses[0], losses[1], losses[0], last):
        trial.run(_REPEATED)
        again = trial.put_away(_REPEATED)
        losses.append(_losses(again))
        repeated = steps_of(again)
        noise = dict.fromkeys(after, inf)  # of a step that the second undisturbed run does not have
        for step in repeated.keys() & after:
            usual = _amounts(divergence_in(diff(steps[0][step], repeated[step]), step))
            unjudged |= {key for key, amount in usual.items() if amount == inf}
            noise[step] = max((amount for amount in usual.values() if amount < inf), default=0.0)
    compared, first = _judged(differences, amounts, unjudged, noise)
    apart = _apart(losses[0], losses[1], losses[-1] if losses[2:] else losses[0], last)
    verdict: Literal["exact", "different", "inconclusive"] = "exact"
    reason = f"the resume is exact: {len(after)} checkpoint(s) after the kill are bit-identical"
    if first is not None:
        verdict, reason = "different", f"step {first} differs first in {shown(compared[first])}"
    elif apart:
        verdict, reason = "different", f"the checkpoints alone show no difference, but the logged {apart[0]}"
    elif any(compared[step].key for step in after):
        verdict, reason = "inconclusive", "two undisturbed runs differ as much: make the training deterministic"
    missing, measured = _not_saved(steps[1][after[0]]), noise if losses[2:] else {}
    return Proof(verdict, reason, last, compared, first, measured, missing, sorted(unjudged), apart)


def _judged(
    differences: dict[int, Divergence],
    amounts: dict[int, dict[str, float]],
    unjudged: set[str],
    noise: dict[int, float],
) -> tuple[dict[int, Divergence], int | None]:
    """Return the differences without ``unjudged`` keys, and the first step that differs by more than its noise."""
    compared: dict[int, Divergence] = {}
    first: int | None = None
    for step, difference in differences.items():
        differ = {part: [key for key in keys if key not in unjudged] for part, keys in difference.differ.items()}
        keys = [key for of_part in differ.values() for key in of_part]
        beyond = [key for key in keys if step in noise and amounts[step][key] > _most_by_chance(noise[step])]
        # A counter, a rate or a random stream is nearer to the cause than the tensors that follow from it.
        key = next(iter([*sorted(beyond, key=lambda key: amounts[step][key] < inf), *keys]), "")
        places = {} if difference.diff is None else differing(difference.diff)
        places[difference.key] = difference.at, difference.values
        at, values = places.get(key, ("", None))
        differ = {part: keys for part, keys in differ.items() if keys}
        compared[step] = replace(difference, key=key, at=at, values=values, differ=differ)
        first = step if first is None and beyond else first
    return compared, first


def _most_by_chance(noise: float) -> float:
    """Return the largest relative difference that is no evidence, where two undisturbed runs differ by ``noise``."""
    # Runs with other weights from the start differ by any factor: no amount of a float shows a difference then.
    return NOISE * noise if noise < 1 / NOISE else max(noise, sys.float_info.max)


def shown(difference: Divergence) -> str:
    """Return the first key and element that differ, and both values; empty without any."""
    values = f" ({difference.values[0]} -> {difference.values[1]})" if difference.values else ""
    return f"{difference.key}{difference.at}{values}"


def _amounts(difference: Divergence) -> dict[str, float]:
    """Return the relative differences of the tensors of floats that differ, and infinity for other keys."""
    changed = () if difference.diff is None else difference.diff.changed
    floats = {tensor.key: tensor.amount.relative for tensor in changed if tensor.amount and "float" in tensor.dtype}
    keys = (key for group in difference.differ.values() for key in group)
    return {key: min(floats[key], sys.float_info.max / NOISE) if key in floats else inf for key in keys}


def _not_saved(path: Where) -> list[str]:
    """Return the parts that trainings often have, and of which a checkpoint has no key."""
    with CheckpointReader(path) as reader:
        kinds = {kind_of(key, reader.kinds) for key in reader.index}
        schedule = [] if any("sched" in key.lower() for key in reader.index) else ["learning rate schedule"]
    return [part for part in (OPTIMIZER, RNG, LOADER) if part not in kinds] + schedule


_Losses = dict[tuple[str, int], float]


def _losses(run: Path) -> _Losses:
    """Return the logged losses by name and step: those of checkpoints, and of ``metrics.csv``."""
    rows: list[dict[str, Any]] = [
        {**state.metrics, "step": state.step} for state in Scan(run, read_all=True).states.values()
    ]
    for file in sorted(run.rglob("metrics.csv"), key=os.path.getmtime):
        with suppress(OSError, csv.Error), open(file, newline="", errors="replace") as text:
            rows += csv.DictReader(text)
    losses: _Losses = {}
    for row in rows:
        for name in (name for name in row if "loss" in str(name)):
            with suppress(ValueError, TypeError, KeyError):
                losses[name, int(row["step"])] = float(row[name])
    return losses


def _apart(undisturbed: _Losses, resumed: _Losses, again: _Losses, last: int) -> list[str]:
    """Return the losses after the kill that differ by more than those of the first run and its repetition."""
    noise: dict[str, float] = {}
    for (name, step), loss in undisturbed.items():
        noise[name] = max(noise.get(name, 0.0), _relative(loss, again.get((name, step), loss)))
    return [
        f"{name} at step {step}: {loss} -> {resumed[name, step]}"
        for (name, step), loss in sorted(undisturbed.items())
        if step > last and _relative(loss, resumed.get((name, step), loss)) > _most_by_chance(noise[name])
    ]


def _relative(loss: float, other: float) -> float:
    """Return the difference of two losses as a share of the larger one, and infinity if one of them is not finite."""
    if loss == other or (isnan(loss) and isnan(other)):
        return 0.0
    return abs(loss - other) / max(abs(loss), abs(other)) if isfinite(loss - other) else inf
