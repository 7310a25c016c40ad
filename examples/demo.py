"""`make demo`: one training, three lives. It is killed during a save, and resumes on other hardware.

Runs examples/train.py three times in processes of their own, looks at what is on disk in between, and holds
the library to what examples/witness.py saw: every tensor that came back must be, byte for byte, what had been
saved. Exits with 1 if anything is not as the text on the screen says.

`python examples/demo.py s3://bucket/demo` keeps the checkpoints in an object store.
"""

import csv
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

import curve
from rich.console import Console
from rich.table import Table
from rich.text import Text

import dcp_plugin as dcp

TRAIN = Path(__file__).with_name("train.py")
RUN = Path("outputs/demo")
CHECKPOINTS = sys.argv[1] if sys.argv[1:] else str((RUN / "checkpoints").absolute())
CONFIG = "+experiment=demo"

console = Console(highlight=False, width=min(110, Console().width) if sys.stdout.isatty() else 110)


class BrokenPromise(Exception):
    """Difference between the demonstration's output and its claims."""


@dataclass(frozen=True)
class Life:
    """Start of examples/train.py, until the end of the process."""

    number: int
    ranks: int
    name: str
    overrides: tuple[str, ...]

    @property
    def log(self) -> Path:
        return RUN / f"life-{self.number}.log"

    def live(self) -> int:
        """Train until the process ends, and show the newest loss. Return the exit status."""
        began = time.monotonic()
        with self.log.open("w") as log, console.status("starting ...") as status:
            process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=self.environment())
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    if losses := self.losses():
                        status.update(f"step {max(losses)}, loss {losses[max(losses)]:.2f}")
            finally:
                process.terminate()  # torchrun ends its ranks
                process.wait()
        losses = self.losses()
        if not losses:
            self.broke("did not train a single step")
        first, last = min(losses), max(losses)
        change = f"loss {losses[first]:.2f} to {losses[last]:.2f}"
        say(f"  trained steps {first} to {last}, {change}, in {time.monotonic() - began:.0f} s")
        return process.returncode

    def command(self) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        settings = [CONFIG, f"run_dir={RUN}", f"checkpoints={CHECKPOINTS}", "accelerator=cpu", *self.overrides]
        return [sys.executable, *(torchrun if self.ranks > 1 else []), str(TRAIN), *settings]

    def environment(self) -> dict[str, str]:
        threads = max(1, len(os.sched_getaffinity(0)) // self.ranks)
        return os.environ | {"OMP_NUM_THREADS": str(threads)}

    def losses(self) -> dict[int, float]:
        metrics = RUN / "logs" / f"version_{self.number - 1}" / "metrics.csv"
        if not metrics.exists():
            return {}
        with metrics.open(newline="") as lines:
            rows = [row for row in csv.DictReader(lines) if row["step"] and row["loss"]]
        return {int(row["step"]) + 1: float(row["loss"]) for row in rows}

    def broke(self, promise: str) -> NoReturn:
        lines = self.log.read_text(errors="replace").splitlines()
        of_ranks = [*takewhile(lambda line: "failed (exitcode: " not in line, lines)]  # torchrun prints the other lines
        raise BrokenPromise("\n".join([f"Life {self.number} {promise}. From {self.log}:", "", *of_ranks[-40:]]))


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    python = ".".join(platform.python_version_tuple()[:2])
    say("\n[bold]One training, three lives[/bold]")
    say(f"A small GPT learns the source code of Python {python}'s standard library.")
    say("A checkpoint every 20 steps, written in the background by all ranks.")

    kill = "+callbacks.kill={_target_: witness.PowerCut, step: 60}"
    first = Life(1, 2, "2 ranks, FSDP2", ("strategy=fsdp2", kill))
    announce(first, "SIGKILL hits both ranks when half of the checkpoint of step 60 is written.")
    if first.live() == 0:
        first.broke("was not killed")
    say("  killed. What is on disk:")
    states = dcp.list_checkpoints(CHECKPOINTS)
    rows = {state.path: describe(state) for state in states}
    show(rows.values())
    torn = [state.path for state in states if not state.committed]
    if committed_steps(states) != [20, 40] or len(torn) != 1:
        first.broke("should have left two complete checkpoints, of steps 20 and 40, and a torn one")

    limit = "+callbacks.limit={_target_: witness.StopAt, step: 80}"
    second = Life(2, 4, "4 ranks, HSDP on a 2x2 mesh", ("strategy=hsdp", "resume=auto", limit))
    announce(second, "resume=auto passes over the torn checkpoint. A time limit ends this life after step 80.")
    if second.live() != 0:
        second.broke("failed")
    restored = compare(second, step=40)

    third = Life(3, 1, "1 rank, no sharding", ("strategy=single", "resume=auto"))
    announce(third, "One plain process takes over and finishes the training.")
    if third.live() != 0:
        third.broke("failed")
    restored += compare(third, step=80)

    say("\n[bold]All checkpoints[/bold]")
    states = dcp.list_checkpoints(CHECKPOINTS)
    name, bytes_left, _ = rows[torn[0]]
    rows[torn[0]] = (name, bytes_left, Text("torn, passed over; life 2 cleaned it up when it saved", "red"))
    show((rows | {state.path: describe(state) for state in states}).values())
    if committed_steps(states) != [20, 40, 60, 80, 100, 120] or len(states) != 6:
        third.broke("should have left six complete checkpoints and nothing else")

    say("\n[bold]Loss[/bold], each point with the number of its life")
    draw([first, second, third])
    seconds = time.monotonic() - began
    say(f"\n[green]✓[/green] {restored} tensors restored in two resumes, each byte-equal to what was saved.")
    say(f"[green]✓[/green] Steps 41 to 60 were trained twice, on the same text: {same_losses(first, second)}.")
    say(f"[green]✓[/green] {seconds:.0f} seconds. Picture: {RUN}/loss.png. Logs: {RUN}/life-*.log\n")


def say(text: str) -> None:
    console.print(text)


def announce(life: Life, what_happens: str) -> None:
    say(f"\n[bold]Life {life.number}: {life.name}[/bold]\n{what_happens}")


Row = tuple[str, str, Text]


def describe(state: dcp.tools.CheckpointState) -> Row:
    """Return the name, size and condition of a checkpoint. Verify a committed checkpoint."""
    name = str(state.path).removeprefix(f"{CHECKPOINTS}/")
    if not state.committed:
        return name, "", Text(f"torn: {state.reason}", "red")
    report = dcp.verify(state.path)
    if not report.ok:
        raise BrokenPromise(str(report))
    info = dcp.inspect(state.path)
    ranks, size = info.world_size, mebibytes(info.nbytes)
    return name, size, Text(f"complete, written by {ranks} rank{'s'[: ranks != 1]}, every byte checked", "green")


def show(rows: Iterable[Row]) -> None:
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def committed_steps(states: list[dcp.tools.CheckpointState]) -> list[int]:
    return sorted(state.step for state in states if state.committed and state.step is not None)


def compare(life: Life, step: int) -> int:
    """Return the number of restored tensors; each must equal the tensor that the witness saw in the save of `step`."""
    saved, restored = (RUN / "witness" / f"{event}-{step:06d}.json" for event in ("saved", "restored"))
    if not restored.exists():
        life.broke(f"should have resumed from step {step}")
    before, after = (json.loads(file.read_text())["tensors"] for file in (saved, restored))
    different = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if different:
        life.broke(f"restored tensors that are not what was saved ({len(different)}, first {different[0]})")
    volume = mebibytes(sum(tensor["bytes"] for tensor in after.values()))
    say(f"  [green]✓[/green] resumed from step {step}: {len(after)} tensors, {volume}, SHA-256 as saved")
    return len(after)


def same_losses(first: Life, second: Life) -> str:
    """Check the losses. Dropout makes a small difference (other ranks, other noise); other text, a large one."""
    before, after = first.losses(), second.losses()
    gap = max(abs(before[step] - after[step]) for step in range(41, 61))
    if gap > 0.05:
        second.broke(f"should have continued with the same text: its losses differ from life 1's by {gap:.3f}")
    return f"the losses differ by {gap:.3f} at most (dropout)"


def draw(lives: list[Life]) -> None:
    losses = [life.losses() for life in lives]
    text = curve.in_terminal(losses, min(console.width, 100), colour=console.is_terminal)
    console.print(Text.from_ansi(text.rstrip("\n")))
    names = [f"life {life.number}: {life.name}" for life in lives]
    curve.as_png(RUN / "loss.png", dict(zip(names, losses, strict=True)), killed_at=60)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


if __name__ == "__main__":
    try:
        main()
    except BrokenPromise as broken:
        console.print(Text(f"\n✗ {broken}\n", "red"))
        sys.exit(1)
