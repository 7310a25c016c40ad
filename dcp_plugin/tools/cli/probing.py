"""The command about a place for checkpoints: ``doctor``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_plugin.core.errors import size
from dcp_plugin.tools.cli.terminal import NO, Answer, JsonOption, StorageOptionsOption, echo, storage_options, table

if TYPE_CHECKING:
    from dcp_plugin.tools.probes import DoctorReport


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
