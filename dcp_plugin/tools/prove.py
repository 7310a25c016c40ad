"""``dcp-plugin prove``: run a training undisturbed, and killed and resumed, and compare the checkpoints of both.

Each run has the folder ``run`` in a new folder, the *home* of the proof, as the folder of its checkpoints. When the run
has ended, that folder gets another name. So all runs have equal paths, and no path in a checkpoint differs.

The rule: no run of the user changes. The variable ``DCP_PLUGIN_PROVE`` has every save, deletion and automatic resume
refuse a folder that is neither new nor in the home (:func:`dcp_plugin.core.media.places.refuse_real_run`), and gives
the keeper private folders. No process that a run has started is alive when the next run starts.
"""

from __future__ import annotations

import csv
import ctypes
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

from dcp_plugin.core.errors import CheckpointError, CheckpointNotFound, refuse_other_systems, some
from dcp_plugin.core.paths import PROVED, Where, as_path, is_url
from dcp_plugin.core.runs.scan import Scan, state_of
from dcp_plugin.core.storage.reader import CheckpointReader
from dcp_plugin.tools.diff import diff
from dcp_plugin.tools.divergence import LOADER, OPTIMIZER, RNG, Divergence, divergence_in, kind_of, steps_of

RUN = "{run}"
"""Text in a command that is replaced by the folder of a run."""
UNDISTURBED, RESUMED, REPEATED = "undisturbed", "resumed", "undisturbed-again"
"""Names of the folders of the runs, after they have ended."""
NOISE = 10.0
"""Factor by which a difference exceeds the noise: two samples of the same noise differ by less."""
_POLL = 0.05
_TRAILING = 60.0
"""Seconds in which processes that a run has left, such as a keeper or an uploader, end by themselves."""
_MOST_FILES = 50_000
"""Number of entries of the working directory that are looked at."""
_MOST_LINES = 5
_LAUNCHERS = frozenset(
    [
        "srun",
        "sbatch",
        "salloc",
        "ssh",
        "pdsh",
        "mpirun",
        "mpiexec",
        "mpiexec.hydra",
        "orterun",
        "prterun",
        "jsrun",
        "aprun",
        "docker",
        "podman",
        "kubectl",
    ]
)
"""Programs that start processes which this one cannot end."""
_OFFLINE = {
    "WANDB_MODE": "offline",
    "NEPTUNE_MODE": "offline",
    "SWANLAB_MODE": "offline",
    "COMET_START_ONLINE": "false",
    "CLEARML_OFFLINE_MODE": "1",
    "DVC_STUDIO_OFFLINE": "true",
}
_OFTEN_FORGOTTEN = {OPTIMIZER: None, "learning rate schedule": re.compile("sched"), RNG: None, LOADER: None}
"""Parts of a training that a checkpoint may lack, with a pattern for keys of parts that are no kind of their own."""


class _Inconclusive(Exception):
    """The reason why nothing is proved."""


@dataclass(frozen=True)
class StepComparison:
    """The checkpoints of one step in the undisturbed run and in the resumed one."""

    step: int
    after_kill: bool
    """True if the resumed process has saved it, false if the killed one has."""
    differ: int = 0
    """Number of keys that differ, without those in :attr:`Proof.not_judged`."""
    key: str = ""
    """The first key that differs by more than the noise, or else the first that differs."""
    at: str = ""
    """The first element that differs, as Python writes it."""
    values: tuple[str, str] | None = None
    """The value of this element in the undisturbed run and in the resumed one."""
    noise: int | None = None
    """Number of keys that differ between two undisturbed runs; None if these were not compared."""
    beyond: int = 0
    """Number of keys that differ by more than the noise."""


@dataclass(frozen=True)
class LossDifference:
    """A logged loss that differs by more than the noise."""

    name: str
    step: int
    undisturbed: float
    resumed: float


@dataclass(frozen=True)
class Proof:
    """Result of :func:`prove`."""

    verdict: Literal["exact", "different", "inconclusive"]
    reason: str
    """A sentence about the verdict."""
    killed_after: int | None = None
    """The step of the newest checkpoint when the training was killed."""
    steps: list[StepComparison] = field(default_factory=list)
    """The steps that both runs have, in order."""
    first: StepComparison | None = None
    """The first step after the kill that differs by more than the noise."""
    differ: dict[str, list[str]] = field(default_factory=dict)
    """The keys that differ at this step, by parts of the training."""
    still_equal: list[str] = field(default_factory=list)
    """The parts of the training of which no key differs at this step."""
    not_saved: list[str] = field(default_factory=list)
    """Parts of a training of which the checkpoints have no key."""
    not_judged: list[str] = field(default_factory=list)
    """Keys of values, such as the state of an unseeded generator, that differ between undisturbed runs. They have no
    influence on the training if all other keys are equal."""
    losses: list[LossDifference] = field(default_factory=list)
    """The losses that differ by more than the noise, after the kill."""
    changed_files: list[str] = field(default_factory=list)
    """Files outside of ``{run}`` that the runs have made, changed or deleted."""
    folder: Path | None = None
    """The folder with the runs and their output; None if it is deleted, since the resume is exact."""


def prove(
    command: Sequence[str],
    *,
    kill_after: int | None = None,
    timeout: float = 3600.0,
    in_place: bool = False,
    folder: Path | None = None,
    exclude: Iterable[str] = (),
    notify: Callable[[str], None] = lambda text: None,
) -> Proof:
    """Run a command undisturbed, and killed and resumed, and compare the checkpoints of the same steps.

    Args:
        command: The program and its arguments. ``{run}`` in it is replaced by a new folder.
        kill_after: Number of saves after which the training is killed; by default half of those of the undisturbed run.
        timeout: Seconds that each run may take.
        in_place: Accept a command without ``{run}``. New folders of checkpoints are moved away after each run.
        folder: Where the folder of the runs is made; the directory of temporary files by default.
        exclude: Globs of keys, and of names of losses, to leave out.
        notify: Called with a line when a run starts.

    Raises:
        ValueError: The command has no ``{run}``, or starts processes on other hosts.
        CheckpointError: A run fails, or starts processes on other hosts.
    """
    refuse_other_systems()
    _refuse_command(command, in_place)
    home = Path(os.path.realpath(tempfile.mkdtemp(prefix="dcp-prove-", dir=folder)))
    before, began = _files_in(Path.cwd(), home), time.time_ns()
    trial = _Trial(list(command), home, timeout, in_place, notify)
    with _as_subreaper(trial):
        try:
            proof = _judged(trial, kill_after, list(exclude))
        except _Inconclusive as reason:
            proof = Proof("inconclusive", str(reason))
    changed = sorted(_changed(before, _files_in(Path.cwd(), home), began) | trial.made_elsewhere())
    if proof.verdict == "exact":
        shutil.rmtree(home)
    return replace(proof, changed_files=changed, folder=home if home.exists() else None)


def _refuse_command(command: Sequence[str], in_place: bool) -> None:
    words = " ".join(takewhile(lambda word: not word.endswith(".py"), command)).split()
    if launcher := next((word for word in words if Path(word).name in _LAUNCHERS), None):
        raise ValueError(f"{launcher} starts processes that cannot be ended from here. Prove the training on one host.")
    if not in_place and not any(RUN in word for word in command):
        raise ValueError(
            f"the command does not say where the run is saved: write {RUN} in place of the folder of its checkpoints, "
            f"as in: dcp-plugin prove -- python train.py --out {RUN}. A command that cannot is run with --in-place."
        )


@contextmanager
def _as_subreaper(trial: _Trial) -> Iterator[None]:
    """Adopt orphans of descendants during the block, and end all descendants after it, also at SIGTERM."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    def adopt(orphans: int) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(36, orphans, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    adopt(1)
    earlier = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        trial.end_processes()
        adopt(0)
        for number, handler in earlier.items():
            signal.signal(number, handler)


@dataclass
class _Trial:
    """Runs of one command, one after the other, in the home of the proof."""

    command: list[str]
    home: Path
    timeout: float
    in_place: bool
    notify: Callable[[str], None]

    def __post_init__(self) -> None:
        self.run = self.home / "run"
        self._others = {pid for pid, parent, *_ in _processes() if parent == os.getpid()}
        """Children that were there before. They and their descendants are no part of a run."""

    def start(self, name: str, stop: Callable[[], bool] = lambda: False) -> bool:
        """Run the command until it has ended, or until ``stop`` returns true. Then no process of it is alive.

        Args:
            name: The name of the run, in messages and as the name of the file with its output.

        Returns:
            True if the command has ended by itself.

        Raises:
            CheckpointError: The command fails, or starts processes on other hosts.
            _Inconclusive: It takes longer than the timeout.
        """
        self.run.mkdir(exist_ok=True)
        self.notify(f"{name} run")
        output = self.home / f"{name}.log"
        deadline = time.monotonic() + self.timeout
        words = [word.replace(RUN, str(self.run)) for word in self.command]
        with open(output, "ab") as log:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(words, env=self._environment(), start_new_session=True, **options)
        try:
            while process.poll() is None and not stop():
                if launchers := _LAUNCHERS.intersection(self._alive().values()):
                    raise CheckpointError(
                        f"the command has started {some(sorted(launchers))}, whose processes cannot be ended from "
                        f"here. Prove the training on one host."
                    )
                if time.monotonic() > deadline:
                    raise _Inconclusive(f"the {name} run took longer than {self.timeout:g} s (--timeout)")
                time.sleep(_POLL)
            has_ended = process.returncode is not None
            deadline = time.monotonic() + _TRAILING
            while has_ended and self._alive() and time.monotonic() < deadline:
                time.sleep(_POLL)
        finally:
            self.end_processes()
            process.wait()
        if has_ended and process.returncode:
            lines = output.read_text(errors="replace").rstrip().split("\n")[-_MOST_LINES:]
            raise CheckpointError(
                "\n".join([f"the {name} run ended with status {process.returncode}; {output} ends with:", *lines])
            )
        return has_ended

    def saves(self) -> list[str]:
        """Return the paths of the saves that have begun since the last run was put away, in order."""
        with suppress(FileNotFoundError):
            return (self.home / "saves").read_text().splitlines()
        return []

    def roots(self) -> list[Path]:
        """Return the folders that have the checkpoints of the present run."""
        return [self.run, *(Path(path) for path in self.made_elsewhere() if self.in_place and os.path.isdir(path))]

    def made_elsewhere(self) -> set[str]:
        """Return the folders outside of the home in which a run has looked for checkpoints or made some."""
        with suppress(FileNotFoundError):
            return {path for path in (self.home / "folders").read_text().splitlines() if _exists(path)}
        return set()

    def hold_after(self, count: int | None) -> None:
        """Let the save after this number of saves wait for SIGKILL; None: no save waits."""
        if count is not None:
            (self.home / "hold").write_text(str(count))
        else:
            (self.home / "hold").unlink()

    def put_away(self, name: str) -> Path:
        """Move the folder of the run, and return its new name. The next run begins without the files of this one."""
        kept = self.home / name
        for number, root in enumerate(self.roots()):
            (target := kept / f"elsewhere-{number}" if number else kept).mkdir()
            for entry in list(root.iterdir()):
                shutil.move(entry, target)
        for private in ("local", "trackers"):
            shutil.rmtree(self.home / private, ignore_errors=True)
        with suppress(FileNotFoundError):
            (self.home / "saves").rename(self.home / f"{name}.saves")
        return kept

    def end_processes(self) -> None:
        """Send SIGKILL to all descendants until none is alive: an orphan becomes a child of this process.

        Raises:
            CheckpointError: A process does not end.
        """
        deadline = time.monotonic() + _TRAILING
        while alive := self._alive():
            if time.monotonic() > deadline:
                raise CheckpointError(f"these processes of the command do not end: {some(map(str, alive))}")
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL / 5)
        for pid, parent, *_ in _processes():  # a program of the next run may look whether the number exists
            if parent == os.getpid() and pid not in self._others:
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _alive(self) -> dict[int, str]:
        """Return the descendants of this process that are part of a run, with the names of their programs."""
        below: dict[int, list[tuple[int, str]]] = {}
        for pid, parent, program, is_alive in _processes():
            if is_alive:
                below.setdefault(parent, []).append((pid, program))
        found = [child for child in below.get(os.getpid(), ()) if child[0] not in self._others]
        for pid, _ in found:  # grows
            found += below.get(pid, ())
        return dict(found)

    def _environment(self) -> dict[str, str]:
        trackers = self.home / "trackers"
        trackers.mkdir(exist_ok=True)
        private = {"WANDB_DIR": str(trackers), "MLFLOW_TRACKING_URI": (trackers / "mlflow").as_uri()}
        return {"HF_HUB_OFFLINE": "1", **os.environ, **_OFFLINE, **private, PROVED: str(self.home)}


def _processes() -> Iterator[tuple[int, int, str, bool]]:
    """Yield all processes of this system: number, number of the parent, name of the program, False for a zombie."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                before, _, after = Path(entry.path, "stat").read_text(errors="replace").rpartition(") ")
                state, parent = after.split()[:2]
                yield int(entry.name), int(parent), before.partition("(")[2], state not in "ZX"


def _exists(path: str) -> bool:
    return is_url(path) or os.path.exists(path)


def _files_in(folder: Path, besides: Path) -> dict[str, int]:
    """Return the files below a folder, with the times of their last change; at most :data:`_MOST_FILES`."""

    def walk() -> Iterator[tuple[str, int]]:
        for directory, folders, names in os.walk(folder):
            folders[:] = [
                name for name in sorted(folders) if Path(directory, name) != besides and name != "__pycache__"
            ]
            for name in sorted(names):
                with suppress(OSError):
                    path = os.path.join(directory, name)
                    yield path, os.lstat(path).st_ctime_ns

    return dict(islice(walk(), _MOST_FILES))


def _changed(before: dict[str, int], after: dict[str, int], began: int) -> set[str]:
    """Return the files that were made, changed or deleted. A file that the limit has hidden before is no new one."""
    differ = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    made = {path for path in differ & after.keys() if path in before or after[path] >= began}
    return made | {path for path in differ - after.keys() if not os.path.lexists(path)}


def _judged(trial: _Trial, kill_after: int | None, exclude: Collection[str]) -> Proof:
    trial.start(UNDISTURBED)
    planned = trial.saves() or _complete(trial.roots())
    undisturbed = trial.put_away(UNDISTURBED)
    if not planned:
        raise _Inconclusive(f"the undisturbed run has saved no checkpoint in {RUN}")
    count = kill_after or max(1, len(planned) // 2)

    def is_due() -> bool:
        if not (begun := trial.saves()):  # saves of other tools are not recorded
            return len(_complete(trial.roots())) >= count
        if len(begun) != count or begun[-1] in begun[:-1]:  # the path may have an earlier checkpoint
            return len(begun) > count
        state = state_of(as_path(begun[-1]))
        return state is not None and state.committed

    trial.hold_after(count)
    if trial.start(RESUMED, is_due):
        raise _Inconclusive(f"the run ended before it could be killed after save {count} of {len(planned)}")
    trial.hold_after(None)
    killed, at_kill, complete = trial.saves(), _steps(trial.roots()), _complete(trial.roots())
    if not at_kill:
        raise _Inconclusive(f"the killed run has left no checkpoint with a step in {RUN}")
    trial.start(RESUMED)
    again = {path for path in trial.saves()[len(killed) :] if path in killed[:count] and planned.count(path) == 1}
    last = max(at_kill)
    again |= {str(path) for step, path in _steps(trial.roots()).items() if step <= last} - {*complete}
    resumed = trial.put_away(RESUMED)
    comparison = _Comparison(trial, undisturbed, resumed, last, exclude)
    if again:
        reason = (
            f"the second start did not resume: it saved {some(sorted(again))} again, which was saved before the kill"
        )
        return Proof("different", reason, last, not_saved=comparison.not_saved())
    return comparison.result()


def _complete(roots: Iterable[Path]) -> list[str]:
    """Return the complete checkpoints of all tools, oldest first."""
    return [str(found.path) for root in roots for found in Scan(root, others=True, read_all=True).complete()]


def _steps(roots: Iterable[Path]) -> dict[int, Where]:
    steps: dict[int, Where] = {}
    for root in roots:
        with suppress(CheckpointNotFound):
            steps |= steps_of(root)
    return steps


class _Comparison:
    """Comparison of two runs that have ended, and of a third one if these differ."""

    def __init__(self, trial: _Trial, undisturbed: Path, resumed: Path, last: int, exclude: Collection[str]) -> None:
        self._trial, self._runs, self._last, self._exclude = trial, (undisturbed, resumed), last, exclude
        self._steps = _steps([undisturbed]), _steps([resumed])
        self._unjudged: set[str] = set()

    def result(self) -> Proof:
        common = sorted(self._steps[0].keys() & self._steps[1].keys())
        if not any(step > self._last for step in common):
            lists = [some([str(step) for step in sorted(steps)]) for steps in self._steps]
            raise _Inconclusive(
                f"no step after the kill (at step {self._last}) is in both runs: the undisturbed one has {lists[0]}, "
                f"the resumed one {lists[1]}. A retention that keeps more of them, or an earlier kill, may help"
            )
        found = {step: self._difference(step, self._steps[1][step]) for step in common}
        # Before the kill both runs are undisturbed. Values such as the stream of an unseeded generator differ there.
        self._unjudged = {key for step in common if step <= self._last for key in _values(found[step])}
        losses, repeated = self._differing_losses(None), None
        if losses or any(self._keys(found[step]) for step in common if step > self._last):
            self._trial.start(REPEATED)
            repeated = self._trial.put_away(REPEATED)
            losses = self._differing_losses(repeated)
        noise = {} if repeated is None else self._noise(repeated, common)
        self._unjudged |= {key for there in noise.values() for key in _values(there)}
        steps = [self._of_step(step, found[step], noise.get(step)) for step in common]
        first = next((step for step in steps if step.after_kill and step.beyond), None)
        shared = {"not_saved": self.not_saved(), "losses": losses, "not_judged": sorted(self._unjudged)}
        proof = Proof("exact", "", self._last, steps, first, **shared)
        if first is not None:
            there = found[first.step]
            values = f" ({first.values[0]} -> {first.values[1]})" if first.values else ""
            reason = f"the resume is not exact: step {first.step} differs first in {first.key}{first.at}{values}"
            proof = replace(proof, differ=there.differ, still_equal=there.still_equal)
            return replace(proof, verdict="different", reason=reason)
        if losses:
            loss = losses[0]
            reason = f"{loss.name} differs at step {loss.step} ({loss.undisturbed} -> {loss.resumed})"
            return replace(proof, verdict="different", reason=f"the checkpoints are equal, but the logged {reason}")
        if any(step.differ for step in steps if step.after_kill):
            reason = "two undisturbed runs differ as much as the resumed one: make the training deterministic"
            return replace(proof, verdict="inconclusive", reason=reason)
        count = sum(step.after_kill for step in steps)
        return replace(proof, reason=f"the resume is exact: {count} checkpoint(s) after the kill are bit-identical")

    def _keys(self, found: Divergence) -> list[str]:
        """Return the keys that differ, without values that differ between undisturbed runs."""
        return [key for group in found.differ.values() for key in group if key not in self._unjudged]

    def _noise(self, repeated: Path, common: Collection[int]) -> dict[int, Divergence]:
        steps = _steps([repeated])
        return {step: self._difference(step, steps[step]) for step in common if step > self._last and step in steps}

    def not_saved(self) -> list[str]:
        """Return the parts of a training of which the newest checkpoint before the kill has no key."""
        with CheckpointReader(self._steps[1].get(self._last) or next(iter(self._steps[1].values()))) as reader:
            kinds = {kind_of(key, reader.kinds) for key in reader.index}
            keys = " ".join(reader.index).lower()
        return [
            part
            for part, pattern in _OFTEN_FORGOTTEN.items()
            if not (pattern.search(keys) if pattern else part in kinds)
        ]

    def _difference(self, step: int, other: Where) -> Divergence:
        first = self._steps[0][step]
        with CheckpointReader(first) as reader:
            exclude = [pattern for pattern in self._exclude if fnmatch.filter(reader.index, pattern)]
        return divergence_in(diff(first, other, exclude=exclude), step)

    def _of_step(self, step: int, found: Divergence, noise: Divergence | None) -> StepComparison:
        """Return the result for a step. If undisturbed runs differ in tensors, only larger differences count."""
        keys = self._keys(found)
        beyond = keys
        if noise is not None:
            relative, usual = _relative(found), _relative(noise)
            # That of all tensors: a single element differs by little now and then.
            limit = NOISE * max(filter(isfinite, usual.values()), default=0.0)
            beyond = [key for key in keys if relative.get(key, inf) > max(limit, usual.get(key, 0.0))]
        key = next(iter(beyond or keys), "")
        at, values = (found.at, found.values) if key == found.key else ("", None)
        noisy = None if noise is None else len(self._keys(noise))
        return StepComparison(step, step > self._last, len(keys), key, at, values, noisy, len(beyond))

    def _differing_losses(self, repeated: Path | None) -> list[LossDifference]:
        undisturbed, resumed = map(_losses, self._runs)
        again = {} if repeated is None else _losses(repeated)
        noise: dict[str, float] = {}
        for (step, name), loss in again.items():
            noise[name] = max(noise.get(name, 0.0), abs(loss - undisturbed.get((step, name), loss)))
        return [
            LossDifference(name, step, loss, resumed[step, name])
            for (step, name), loss in sorted(undisturbed.items())
            if step > self._last
            and abs(loss - resumed.get((step, name), loss)) > NOISE * noise.get(name, 0.0)
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self._exclude)
        ]


def _values(found: Divergence) -> set[str]:
    """Return the keys that differ and are no tensors of floats."""
    return {key for group in found.differ.values() for key in group} - _relative(found).keys()


def _relative(found: Divergence) -> dict[str, float]:
    """Return the relative differences of the tensors of floats."""
    changed = () if found.diff is None else found.diff.changed
    return {tensor.key: tensor.amount.relative for tensor in changed if tensor.amount and "float" in tensor.dtype}


def _losses(run: Path) -> dict[tuple[int, str], float]:
    """Return the logged losses by step and name: those in checkpoints, in ``metrics.csv`` and of a Trainer."""
    logged: dict[tuple[Any, str], Any] = {}
    for state in Scan(run, read_all=True).states.values():
        logged |= {(state.step, name): value for name, value in state.metrics.items()}
    for file in sorted([*run.rglob("metrics.csv"), *run.rglob("trainer_state.json")], key=os.path.getmtime):
        with suppress(OSError, ValueError, LookupError, TypeError), open(file, newline="") as text:
            rows = csv.DictReader(text) if file.suffix == ".csv" else json.load(text)["log_history"]
            for row in rows:
                logged |= {(row["step"], name): value for name, value in row.items()}
    losses: dict[tuple[int, str], float] = {}
    for (step, name), value in logged.items():
        with suppress(ValueError, TypeError):
            losses |= {(int(step), name): float(value)} if "loss" in name else {}
    return losses
