"""``dcp-plugin read``: tensors and values, as text or as a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp_plugin.cli.output import (
    ExcludeOption,
    JsonOption,
    PathArgument,
    StorageOptionsOption,
    echo,
    progress,
    shape,
    show,
    storage_options,
    told,
    where,
)

if TYPE_CHECKING:
    import torch

_EDGE = 3
_MOST_LISTED = 1000


def read_command(
    path: PathArgument,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Globs of keys; all if none.")] = None,
    exclude: ExcludeOption = None,
    full: Annotated[bool, typer.Option("--full", help="All elements of each tensor.")] = False,
    as_json: JsonOption = False,
    storage_option: StorageOptionsOption = None,
) -> None:
    """Print tensors and values of a checkpoint. Tensors with many elements are cut short, unless --full."""
    with told(as_json):
        from dcp_plugin.tools.read import read

        options = storage_options(storage_option)
        with progress("reading") as advance:
            values = read(
                where(path, storage_option), keys or (), exclude or (), storage_options=options, progress=advance
            )
        if as_json:
            show({"items": {key: _described(value, full) for key, value in values.items()}})
            return
        for key, value in values.items():
            head, *elements = _texts(value, full)
            echo(f"{key}: {head}")
            for text in elements:
                echo(text)


def _texts(value: Any, full: bool) -> list[str]:
    """Return the lines for a value."""
    import torch

    if not isinstance(value, torch.Tensor):
        return [repr(value)]
    head = f"{str(value.dtype).removeprefix('torch.')} {shape(tuple(value.shape))}"
    if not full:
        return [f"{head}  {_short(value)}"]
    return [head, str(value.tolist())]


def _short(tensor: torch.Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= 2 * _EDGE:
        return str(flat.tolist())
    first, last = flat[:_EDGE].tolist(), flat[-_EDGE:].tolist()
    return f"[{', '.join(map(_number, first))}, …, {', '.join(map(_number, last))}]"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _described(value: Any, full: bool) -> dict[str, Any]:
    """Return the document of a value; of a tensor with its elements if they are few, or with ``full``."""
    import torch

    if not isinstance(value, torch.Tensor):
        return {"value": value}
    document: dict[str, Any] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if full or value.numel() <= _MOST_LISTED:
        document["data"] = (torch.view_as_real(value) if value.is_complex() else value).tolist()
    return document
