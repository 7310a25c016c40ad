"""The commands that compare bytes: ``verify`` with their checksums, and ``diff`` with another checkpoint or run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_plugin.core.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete, CheckpointUnreadable, size
from dcp_plugin.tools.cli.terminal import (
    FAILED,
    NO,
    Answer,
    ExcludeOption,
    IncludeOption,
    JsonOption,
    StorageOptionsOption,
    echo,
    progress,
    renames,
    shape,
    table,
    where,
)

if TYPE_CHECKING:
    from dcp_plugin.core.paths import Where
    from dcp_plugin.tools.amounts import Amount
    from dcp_plugin.tools.diff import CheckpointDiff
    from dcp_plugin.tools.divergence import Divergence

_MAX_LISTED = 20
"""Number of errors, or of keys of each kind of difference, that are printed."""


def verify_command(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Checkpoints: directories, URLs, or files of other tools.")
    ],
    threads: Annotated[int, typer.Option(min=1, help="Threads that read.")] = min(8, os.cpu_count() or 2),
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer:
    """Read every byte and compare it with its checksum. Exits with 1 if a checkpoint is damaged or incomplete."""
    documents, statuses = [], []
    for path in [where(text, storage_option) for text in paths]:
        document, status = _verified(path, threads)
        documents.append(document)
        statuses.append(status)
        if not as_json:  # each as soon as it is known: a large checkpoint takes minutes
            _print_verified(document, status)
    return Answer({"checkpoints": documents}, lambda: None, max(statuses))


def _verified(path: Where, threads: int) -> tuple[dict[str, Any], int]:
    """Return the document of one checkpoint and its exit status."""
    from dcp_plugin.tools.verify import verify

    began = time.perf_counter()
    try:
        with progress(path.name) as bar:
            report = verify(path, threads, progress=bar)
    except (CheckpointError, OSError) as error:
        is_damage = isinstance(error, (CheckpointCorrupt, CheckpointIncomplete))
        status = NO if is_damage and not isinstance(error, CheckpointUnreadable) else FAILED
        return {"path": path, "ok": False, "error": {"type": type(error).__name__, "message": str(error)}}, status
    seconds = time.perf_counter() - began
    rate = report.nbytes / max(seconds, 1e-9)
    document = {"ok": report.ok, **vars(report), "seconds": seconds, "bytes_per_second": rate}
    return document, 0 if report.ok else NO


def _print_verified(document: dict[str, Any], status: int) -> None:
    path = document["path"]
    if "error" in document:
        problem = "DAMAGED" if status == NO else "cannot be verified"
        echo(f"{path}: {problem}: {document['error']['message']}", err=status != NO)
        return
    lines = list(document["errors"])
    state = f"DAMAGED, {len(lines)} item(s)" if lines else "intact"
    read = f"{size(document['nbytes'])} in {document['seconds']:.2f} s, {size(document['bytes_per_second'])}/s"
    echo(f"{path}: {state}; {document['items']} items, {read}")
    if unverified := document["unverified"]:
        lines.append(
            f"{len(unverified)} have no checksum: they can be read, and whether they are what was saved nobody can "
            f"tell ({', '.join(unverified[:3])}{', …' if len(unverified) > 3 else ''})"
        )
    if differing := document["differing"]:
        from dcp_plugin.core.ranks.collectives import name_of

        lines += [f"{key} differed on {name_of(ranks)} when it was saved" for key, ranks in differing.items()]
    lines += document["absent"]
    for line in lines[:_MAX_LISTED]:
        echo(f"  {line}")
    if len(lines) > _MAX_LISTED:
        echo(f"  and {len(lines) - _MAX_LISTED} more; --json has all")


def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint; with --first-divergence, a run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The checkpoint or run to compare it with.")],
    divergence: Annotated[
        bool,
        typer.Option(
            "--first-divergence",
            help="A and B are runs of one seed: compare their checkpoints step by step, and name the first step, key "
            "and element that differ.",
        ),
    ] = False,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="A_PREFIX=B_PREFIX: the prefix in B for a prefix in A. Repeatable.")
    ] = None,
    amounts: Annotated[
        bool, typer.Option("--amounts/--no-amounts", help="Read the tensors that differ, and measure the difference.")
    ] = True,
    checksums: Annotated[
        bool,
        typer.Option("--checksums/--no-checksums", help="Trust stored checksums. Otherwise every byte is read."),
    ] = True,
    depth: Annotated[int, typer.Option(min=1, help="Parts of a key that name a module.")] = 3,
    every: Annotated[
        bool, typer.Option("--all", help=f"List all keys, not the first {_MAX_LISTED} of each kind.")
    ] = False,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> Answer:
    """Compare two checkpoints, and list the differences. Exits with 1 if there are any."""
    if divergence and rename:
        raise typer.BadParameter("--rename: runs of one seed have the same keys")
    paths = where(a, storage_option), where(b, storage_option)
    globs = include or (), exclude or ()
    if divergence:
        from dcp_plugin.tools.divergence import first_divergence

        with progress("comparing") as bar:
            first = first_divergence(*paths, *globs, checksums=checksums, progress=bar)
        return Answer(_divergence_document(first), partial(_print_divergence, first), 0 if first.deterministic else NO)
    from dcp_plugin.tools.diff import diff

    prefixes = renames(rename, "A_PREFIX=B_PREFIX")
    with progress("comparing") as bar:
        result = diff(*paths, *globs, rename=prefixes, amounts=amounts, checksums=checksums, progress=bar)
    print_text = partial(_print_diff, result, depth, None if every else _MAX_LISTED)
    return Answer({"diff": _document(result, depth)}, print_text, 0 if result.equal else NO)


def _document(result: CheckpointDiff, depth: int) -> dict[str, Any]:
    document = {**vars(result), "equal": result.equal}
    del document["elements"]
    document["changed"] = [{**vars(tensor), "amount": _amount_document(tensor.amount)} for tensor in result.changed]
    document["modules"] = [
        {"module": module, "changed": changed, "tensors": tensors, "amount": _amount_document(amount)}
        for module, (changed, tensors, amount) in result.modules(depth).items()
    ]
    return document


def _amount_document(amount: Amount | None) -> dict[str, Any] | None:
    return None if amount is None else {**vars(amount), "share": amount.share, "relative": amount.relative}


def _divergence_document(divergence: Divergence) -> dict[str, Any]:
    names = ("run1", "run2", "compared", "only_in_1", "only_in_2", "identical_through", "step", "key", "at", "values")
    more = ("ulps", "differ", "still_equal", "texts", "deterministic", "verdict")
    return {"divergence": {name: getattr(divergence, name) for name in (*names, *more)}}


def _print_diff(result: CheckpointDiff, depth: int, most: int | None) -> None:
    rows: list[tuple[str, ...]]
    has_amounts = result.changed and any(tensor.amount is not None for tensor in result.changed)
    if has_amounts:
        modules = result.modules(depth)
        rows = [
            (module, f"{changed} of {tensors}", *_amount(amount))
            for module, (changed, tensors, amount) in modules.items()
        ]
        _section("", ("module", "tensors", *_AMOUNT), rows, most, numbers=("tensors", *_AMOUNT))
        echo()
    rows = [
        (tensor.key, shape(tensor.shape), tensor.dtype, *(_amount(tensor.amount) if has_amounts else ()))
        for tensor in result.changed
    ]
    numbers = _AMOUNT if has_amounts else ()
    _section("changed", ("tensor", "shape", "dtype", *numbers), rows, most, numbers)
    rows = [
        (value.key + value.at, value.old, value.new, f"and {value.parts - 1} more" if value.parts > 1 else "")
        for value in result.values
    ]
    _section("other values", ("value", "A", "B", ""), rows, most)
    rows = [(tensor.key, shape(tensor.old), shape(tensor.new)) for tensor in result.reshaped]
    _section("reshaped", ("tensor", "A", "B"), rows, most)
    _section("retyped", ("key", "A", "B"), [(key.key, key.old, key.new) for key in result.retyped], most)
    _section("renamed", ("A", "B"), list(result.renamed.items()), most)
    _section("only in A", ("key",), [(key,) for key in result.removed], most)
    _section("only in B", ("key",), [(key,) for key in result.added], most)
    echo(str(result))
    compared = result.unchanged + len(result.changed) + len(result.values)
    decided = f"{compared - len(result.read)} keys compared by their checksums" if compared > len(result.read) else ""
    read = f"{len(result.read)} by their bytes" if result.read else ""
    echo(f"{', '.join(filter(None, (decided, read))) or 'nothing to compare'}; {size(result.bytes_read)} read")


_AMOUNT = ("elements", "largest", "relative")


def _amount(amount: Amount | None) -> tuple[str, str, str]:
    if amount is None:
        return "", "", ""
    largest = "" if amount.largest is None else f"{amount.largest:.3g}"
    not_finite = f" (NaN or Inf: {amount.not_finite:,})" if amount.not_finite else ""
    return (
        f"{_percent(amount.share)}{not_finite}",
        largest,
        f"{amount.relative:.2e}" if amount.largest is not None else "",
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share in (0, 1) or 0.001 <= share < 0.9995 else "<0.1%" if share < 0.5 else ">99.9%"


def _section(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], most: int | None, numbers: Iterable[str] = ()
) -> None:
    if not rows:
        return
    if title:
        echo(f"{title}: {len(rows)}")
    table(columns, rows[:most], tuple(numbers))
    if most is not None and len(rows) > most:
        echo(f"… and {len(rows) - most} more (--all)")
    if title:
        echo()


def _print_divergence(divergence: Divergence) -> None:
    echo(divergence.verdict)
    first, last = divergence.compared[0], divergence.compared[-1]
    echo(f"compared: {len(divergence.compared)} of the steps that both have, {first} to {last}")
    for run, steps in ((divergence.run1, divergence.only_in_1), (divergence.run2, divergence.only_in_2)):
        if steps:
            echo(f"only in {run}: step {', '.join(map(str, steps))}")
    if divergence.texts:
        echo(f"texts that differ, and do not count: {', '.join(divergence.texts[:_MAX_LISTED])}")
    rows = []
    for kind, keys in divergence.differ.items():
        rows += [(kind if at == 0 else "", key) for at, key in enumerate(keys[:_MAX_LISTED])]
        rows += [("", f"… and {len(keys) - _MAX_LISTED} more")] if len(keys) > _MAX_LISTED else []
    if rows:
        echo()
        echo(f"what differs at step {divergence.step}")
        table(("", "key"), rows)
