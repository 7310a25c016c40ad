"""``dcp-plugin verify``: comparison of every byte with its checksum."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_plugin.cli.output import (
    FAILED,
    NO,
    JsonOption,
    StorageOptionsOption,
    echo,
    progress,
    show,
    size,
    told,
    where,
)

if TYPE_CHECKING:
    from dcp_plugin.types import VerifyReport

_MOST_LISTED = 20


def verify_command(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Checkpoints: directories or URLs, or files of other tools.")
    ],
    threads: Annotated[int, typer.Option(min=1, help="Threads that read.")] = min(8, os.cpu_count() or 2),
    base: Annotated[str | None, typer.Option(help="Where the base of the checkpoint is now, if it was moved.")] = None,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """Read every byte and compare it with its checksum. Exits with 1 if a checkpoint is damaged or incomplete."""
    documents = []
    with told(as_json):
        from dcp_plugin.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete, CheckpointUnreadable
        from dcp_plugin.tools.verify import verify

        for path in [where(text, storage_option) for text in paths]:
            began = time.perf_counter()
            try:
                with progress(path.name) as bar:
                    report = verify(path, threads, base, progress=bar)
                document = _document(report, time.perf_counter() - began)
            except (CheckpointError, OSError) as error:
                damaged = isinstance(error, (CheckpointCorrupt, CheckpointIncomplete))
                could_not = not damaged or isinstance(error, CheckpointUnreadable)
                document = {"path": path, "ok": False, "error": {"type": type(error).__name__, "message": str(error)}}
                document["status"] = FAILED if could_not else NO
            documents.append(document)
            if not as_json:
                _print(document)
    status = max(document.pop("status", 0 if document["ok"] else NO) for document in documents)
    if as_json:
        show({"checkpoints": documents})
    if status:
        raise typer.Exit(status)


def _document(report: VerifyReport, seconds: float) -> dict[str, Any]:
    return {
        "ok": report.ok,
        **asdict(report),
        "seconds": seconds,
        "bytes_per_second": report.nbytes / max(seconds, 1e-9),
    }


def _print(entry: dict[str, Any]) -> None:
    if "error" in entry:
        problem = "DAMAGED" if entry["status"] == NO else "cannot be verified"
        echo(f"{entry['path']}: {problem}: {entry['error']['message']}", err=entry["status"] != NO)
        return
    rate = f"{entry['bytes_per_second'] / 1e9:.2f} GB/s"
    state = "intact" if entry["ok"] else f"DAMAGED, {len(entry['errors'])} item(s)"
    echo(
        f"{entry['path']}: {state}; {entry['items']} items, {size(entry['nbytes'])} in {entry['seconds']:.2f} s, {rate}"
    )
    lines = list(entry["errors"])
    if unverified := entry["unverified"]:
        lines.append(
            f"{len(unverified)} have no checksum: they can be read, and whether they are what was saved nobody can "
            f"tell ({', '.join(unverified[:3])}{', …' if len(unverified) > 3 else ''})"
        )
    for line in lines[:_MOST_LISTED]:
        echo(f"  {line}")
    if len(lines) > _MOST_LISTED:
        echo(f"  and {len(lines) - _MOST_LISTED} more; --json has all")
