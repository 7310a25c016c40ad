"""The commands that try something out: ``doctor`` a place for checkpoints, ``prove`` a training that resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_plugin.core.errors import size
from dcp_plugin.tools.cli.terminal import (
    NO,
    UNDECIDED,
    Answer,
    JsonOption,
    StorageOptionsOption,
    echo,
    storage_options,
    table,
)

if TYPE_CHECKING:
    from dcp_plugin.tools.probes import DoctorReport
    from dcp_plugin.tools.prove import Proof

_MAX_LISTED = 20
"""Number of names of a kind that are printed."""


def doctor_command(
    path: Annotated[str, typer.Argument(metavar="PATH|URL", help="A folder of checkpoints, or a URL.")] = ".",
    gb: Annotated[float, typer.Option("--gb", min=0.001, help="The size of a save, in GiB.")] = 10.0,
    write: Annotated[bool, typer.Option("--write", help="Also write to a bucket, at most 256 MiB.")] = False,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer:
    """Probe what a save will find in a folder or a bucket, and print its speed and the settings to use.

    It writes at most 256 MiB below a name of its own, and deletes them. A bucket is only read without --write.
    """
    from dcp_plugin.tools.probes import doctor

    options = storage_options(storage_option)
    report = doctor(path, write=write, nbytes=int(gb * 2**30), storage_options=options)
    error = f"{report.path}: a save would fail: {report.failed[0].text}" if report.failed else ""
    return Answer({"doctor": report}, partial(_print_report, report), NO if report.failed else 0, error)


def _print_report(report: DoctorReport) -> None:
    states = {"failed": "FAILED", "note": "note", "ok": ""}
    table(("", "probe", "result"), [(states[probe.state], probe.name, probe.text) for probe in report.probes])
    if report.save_seconds is not None:
        echo(f"A save of {size(report.nbytes)} takes one process about {report.save_seconds:.3g} s.")
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
        notify=partial(echo, err=True),
    )
    status = {"exact": 0, "different": NO, "inconclusive": UNDECIDED}[proof.verdict]
    return Answer({"prove": _proof_document(proof)}, partial(_print_proof, proof), status)


def _proof_document(proof: Proof) -> dict[str, Any]:
    steps = {
        step: {
            "step": step,
            "after_kill": step > (proof.killed_after or 0),
            "differ": sum(map(len, there.differ.values())),
            "key": there.key,
            "at": there.at,
            "values": there.values,
            "noise": proof.noise.get(step),
        }
        for step, there in proof.steps.items()
    }
    first = None if proof.first is None else proof.steps[proof.first]
    parts = {"differ": first.differ if first else {}, "still_equal": first.still_equal if first else []}
    document = {**vars(proof), **parts, "steps": list(steps.values()), "first": first and steps[proof.first or 0]}
    del document["noise"]
    return document


def _print_proof(proof: Proof) -> None:
    from dcp_plugin.tools.prove import shown

    document = _proof_document(proof)
    rows = [
        (
            str(step["step"]),
            "after the kill" if step["after_kill"] else "before it",
            str(step["differ"] or "none"),
            shown(proof.steps[step["step"]]),
            "" if step["noise"] is None else f"{step['noise']:.1g}",
        )
        for step in document["steps"]
    ]
    if rows:
        table(("step", "saved", "keys that differ", "first difference", "noise"), rows, numbers=("step", "noise"))
    for part, keys in document["differ"].items():
        echo(f"differs: {part}, {len(keys)} key(s): {', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}")
    listed = {
        "equal": document["still_equal"],
        "in no checkpoint": proof.not_saved,
        "not judged, since undisturbed runs differ": proof.not_judged,
        "logged": proof.losses,
        "changed outside of {run}": proof.changed_files,
        "the runs and their output": [] if proof.folder is None else [str(proof.folder)],
    }
    for what, names in listed.items():
        if names:
            more = f", and {len(names) - _MAX_LISTED} more (--json)" if len(names) > _MAX_LISTED else ""
            echo(f"{what}: {', '.join(names[:_MAX_LISTED])}{more}")
    echo(f"{proof.verdict.upper()}: {proof.reason}.")
