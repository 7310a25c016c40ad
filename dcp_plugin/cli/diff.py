"""``dcp-plugin diff``: the differences between two checkpoints, or the first difference between two runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_plugin.cli.output import (
    NO,
    ExcludeOption,
    IncludeOption,
    JsonOption,
    StorageOptionsOption,
    echo,
    pair,
    progress,
    shape,
    show,
    size,
    table,
    told,
    where,
)

if TYPE_CHECKING:
    from dcp_plugin.tools.amounts import Amount
    from dcp_plugin.tools.diff import CheckpointDiff
    from dcp_plugin.tools.divergence import Divergence

_FIRST = 20
"""Number of keys of each kind that are printed."""


def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint; with --first-divergence, a run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What it is compared with.")],
    first_divergence: Annotated[
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
        list[str] | None, typer.Option(help="A_PREFIX=B_PREFIX: what B has in place of a prefix of A. Repeatable.")
    ] = None,
    amounts: Annotated[
        bool, typer.Option("--amounts/--no-amounts", help="Read the tensors that differ, and tell how much.")
    ] = True,
    checksums: Annotated[
        bool,
        typer.Option("--checksums/--no-checksums", help="Believe stored checksums. Otherwise every byte is read."),
    ] = True,
    depth: Annotated[int, typer.Option(min=1, help="Parts of a name that make a module.")] = 3,
    every: Annotated[bool, typer.Option("--all", help=f"List all keys, not the first {_FIRST} of each kind.")] = False,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """Compare two checkpoints, and list the differences. Exits with 1 if there are any."""
    if first_divergence and rename:
        raise typer.BadParameter("--rename: runs of one seed have the same keys")
    with told(as_json):
        paths = where(a, storage_option), where(b, storage_option)
        globs = include or (), exclude or ()
        renames = dict(pair("--rename", text, "A_PREFIX=B_PREFIX") for text in rename or ())
        if first_divergence:
            from dcp_plugin.tools.divergence import first_divergence as find

            with progress("comparing") as tell:
                divergence = find(*paths, *globs, checksums=checksums, progress=tell)
        else:
            from dcp_plugin.tools.diff import diff

            with progress("comparing") as tell:
                result = diff(*paths, *globs, rename=renames, amounts=amounts, checksums=checksums, progress=tell)
    if first_divergence:
        show(_divergence_document(divergence)) if as_json else _print_divergence(divergence)
        same = divergence.deterministic
    else:
        show({"diff": _document(result, depth)}) if as_json else _print(result, depth, None if every else _FIRST)
        same = result.equal
    if not same:
        raise typer.Exit(NO)


def _document(result: CheckpointDiff, depth: int) -> dict[str, Any]:
    return {
        "a": result.a,
        "b": result.b,
        "equal": result.equal,
        "added": result.added,
        "removed": result.removed,
        "renamed": result.renamed,
        "reshaped": [vars(key) for key in result.reshaped],
        "retyped": [vars(key) for key in result.retyped],
        "changed": [{**vars(tensor), "amount": _amount_document(tensor.amount)} for tensor in result.changed],
        "values": [vars(value) for value in result.values],
        "unchanged": result.unchanged,
        "read": result.read,
        "bytes_read": result.bytes_read,
        "modules": [
            {"module": module, "changed": changed, "tensors": tensors, "amount": _amount_document(amount)}
            for module, (changed, tensors, amount) in result.modules(depth).items()
        ],
    }


def _amount_document(amount: Amount | None) -> dict[str, Any] | None:
    return None if amount is None else {**vars(amount), "share": amount.share, "relative": amount.relative}


def _divergence_document(divergence: Divergence) -> dict[str, Any]:
    names = ("run1", "run2", "compared", "only_in_1", "only_in_2", "identical_through", "step", "key", "at", "values")
    more = ("ulps", "differ", "still_equal", "texts", "deterministic", "verdict")
    return {"divergence": {name: getattr(divergence, name) for name in (*names, *more)}}


def _print(result: CheckpointDiff, depth: int, most: int | None) -> None:
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
    rows = [(value.key + value.at, value.old, value.new, _more(value.parts - 1)) for value in result.values]
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


def _more(parts: int) -> str:
    return f"and {parts} more" if parts else ""


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
        echo(f"texts that differ, and do not count: {', '.join(divergence.texts[:_FIRST])}")
    rows = []
    for kind, keys in divergence.differ.items():
        rows += [(kind if at == 0 else "", key) for at, key in enumerate(keys[:_FIRST])]
        rows += [("", f"… and {len(keys) - _FIRST} more")] if len(keys) > _FIRST else []
    if rows:
        echo()
        echo(f"what differs at step {divergence.step}")
        table(("", "key"), rows)
