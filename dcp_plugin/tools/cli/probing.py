"""The commands that try something out: ``doctor`` a place for checkpoints, ``prove`` a training that resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_plugin.core.errors import size
from dcp_plugin.tools.cli.terminal import (
    NO,
    UNDECIDED,
    Answer,
    ExcludeOption,
    JsonOption,
    StorageOptionsOption,
    echo,
    storage_options,
    table,
)

if TYPE_CHECKING:
    from dcp_plugin.tools.probes import DoctorReport
    from dcp_plugin.tools.prove import Proof, StepComparison

_MAX_LISTED = 20
"""Number of changed files and of losses that are printed."""


def doctor_command(
    path: Annotated[str, typer.Argument(metavar="PATH|URL", help="A folder of checkpoints, or a URL.")] = ".",
    gb: Annotated[float, typer.Option("--gb", min=0.001, help="The size of a save, in GiB.")] = 10.0,
    write: Annotated[bool, typer.Option("--write", help="Also write to a bucket, at most 256 MiB.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Time after which the place counts as hanging.")
    ] = 30.0,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer:
    """Probe what a save will find in a folder or a bucket, and print its speed and the settings to use.

    It writes at most 256 MiB below a name of its own, and deletes them. A bucket is only read without --write.
    """
    from dcp_plugin.tools.probes import doctor

    options = storage_options(storage_option)
    report = doctor(path, write=write, nbytes=int(gb * 2**30), timeout=timeout, storage_options=options)
    error = f"{report.path}: a save would fail: {report.failed[0].text}" if report.failed else ""
    return Answer({"doctor": report}, partial(_print_report, report), NO if report.failed else 0, error)


def _print_report(report: DoctorReport) -> None:
    states = {"failed": "FAILED", "note": "note", "ok": ""}
    table(("", "probe", "result"), [(states[probe.state], probe.name, probe.text) for probe in report.probes])
    if report.save_seconds is not None and report.load_seconds is not None:
        times = f"takes one process about {report.save_seconds:.3g} s, and a load {report.load_seconds:.3g} s"
        echo(f"A save of {size(report.nbytes)} {times}.")
    if not report.failed:
        echo(f"Settings to begin with: {report.settings}")


def prove_command(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="A training; {run} is its folder.")],
    kill_after: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Kill after this number of saves; default: half of them.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Time that each run may take.")] = 3600.0,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where the runs are kept; default: the temporary directory.")
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Accept a command without {run}, which saves to new folders.")
    ] = False,
    exclude: ExcludeOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Run a training undisturbed, and killed and resumed, and compare their checkpoints.

    Exits with 0 if the resume is exact, with 1 if it is not, and with 5 if nothing is proved.

    Each run writes to a new folder, whose path replaces {run} in the command. No run touches a folder of checkpoints
    that this command has not made.
    """
    from dcp_plugin.tools.prove import prove

    proof = prove(
        command,
        kill_after=kill_after,
        timeout=timeout,
        in_place=in_place,
        folder=folder,
        exclude=exclude or (),
        notify=partial(echo, err=True),
    )
    status = {"exact": 0, "different": NO, "inconclusive": UNDECIDED}[proof.verdict]
    return Answer({"prove": proof}, partial(_print_proof, proof), status)


def _print_proof(proof: Proof) -> None:
    if proof.steps:
        columns = ("step", "saved", "keys that differ", "first difference", "without a kill")
        table(columns, map(_row, proof.steps), numbers=columns[:1], optional=columns[4:])
        echo()
    for part, keys in proof.differ.items():
        echo(f"differs: {part}, {len(keys)} key(s): {', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}")
    if proof.still_equal and proof.differ:
        echo(f"equal: {', '.join(proof.still_equal)}")
    if proof.not_saved:
        echo(f"in no checkpoint: {', '.join(proof.not_saved)}")
    if proof.not_judged:
        echo(f"not judged, since undisturbed runs differ: {', '.join(proof.not_judged)}")
    for loss in proof.losses[:_MAX_LISTED]:
        echo(f"loss: {loss.name} at step {loss.step}: {loss.undisturbed} -> {loss.resumed}")
    for name in proof.changed_files[:_MAX_LISTED]:
        echo(f"changed outside of {{run}}: {name}")
    if len(proof.changed_files) > _MAX_LISTED:
        echo(f"and {len(proof.changed_files) - _MAX_LISTED} more; --json has all")
    if proof.folder is not None:
        echo(f"The runs and their output are in {proof.folder}")
    echo(f"{proof.verdict.upper()}: {proof.reason}.")


def _row(step: StepComparison) -> tuple[str, ...]:
    values = f": {step.values[0]} -> {step.values[1]}" if step.values else ""
    noise = "" if step.noise is None else f"{step.noise or 'none'}; {step.beyond or 'none'} differ by more"
    saved = "after the kill" if step.after_kill else "before it"
    return str(step.step), saved, str(step.differ or "none"), f"{step.key}{step.at}{values}", noise
