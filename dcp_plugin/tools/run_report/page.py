"""A report as one HTML page with its style, scripts, library and data.

The template escapes every text from a checkpoint or from the figures of a run. The page's own policy lets the browser
run the two scripts that are named by their hashes, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import os
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from statistics import median

from jinja2 import Environment, StrictUndefined

from dcp_plugin.core.errors import CheckpointError, size
from dcp_plugin.core.media import medium_of
from dcp_plugin.core.paths import PathLike, StorageOptions
from dcp_plugin.tools.run_report.charts import NONE, charts_of, chosen_metrics, step_of
from dcp_plugin.tools.run_report.collect import RunFigures, collect


def report(run: PathLike, out: str | os.PathLike[str], storage_options: StorageOptions | None = None) -> Path:
    """Write one HTML page about a run: metrics, seconds, ranks, sizes, reuse, failures and restarts.

    Args:
        run: The folder of the checkpoints, or one above it; or the URL of one. Each save adds its figures to
            the folder. Without these figures the page names the parts that it cannot show.
        out: The file, replaced if it is there.
        storage_options: Options of the store of a URL, see :class:`~dcp_plugin.CheckpointConfig`.

    Returns:
        The file.

    Raises:
        CheckpointNotFound: There is no checkpoint at or below ``run``, and no figure of one.
        CheckpointError: plotly is not installed.
        OSError: ``out`` cannot be written, or the store of a URL cannot be reached.

    Example:
        >>> import dcp_plugin
        >>> for step in range(3):
        ...     dcp_plugin.save({"weights": [0.0] * step}, f"run/step-{step}", step, metrics={"loss": 1 / (1 + step)})
        >>> dcp_plugin.tools.report("run", "report.html").name
        'report.html'
    """
    return write(collect(run, storage_options), out)


def write(figures: RunFigures, out: str | os.PathLike[str]) -> Path:
    """Write the page of these figures. It appears complete or not at all. Raise the errors of :func:`report`."""
    text, path = page(figures), Path(out)
    try:
        medium_of(path).note(path, text.encode())
    except OSError as error:  # it may name a temporary file
        raise type(error)(error.errno, error.strerror, str(path)) from None
    return path


def page(run: RunFigures) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {}  # the keys of a chart stay in order
    environment.filters |= {"count": _count, "date": _date, "seconds": _seconds, "size": _size, "step": step_of}
    environment.filters |= {"hash": _hash, "median": median}
    names = chosen_metrics(run)
    metric = next((name for name in names if "val" in name.lower()), names[0] if names else "")
    with_loss = [save for save in run.published if metric in save.metrics] if "loss" in metric.lower() else []
    return environment.from_string(_own("page.html")).render(
        run=run,
        charts=charts_of(run),
        name=run.root.rstrip("/").rpartition("/")[2] or run.root,
        rank_count=max(len(save.ranks.get("bytes", [])) for save in run.saves),
        metric=metric,
        metrics=names[:2],
        with_loss=with_loss,
        best=min(with_loss, key=lambda save: save.metrics[metric], default=None),
        style=_own("page.css"),
        script=_own("page.js"),
        plotly=_plotly(),
    )


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise CheckpointError("a report needs plotly: pip install 'dcp-plugin[report]'") from error
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _own(name: str) -> str:
    return files("dcp_plugin.tools.run_report").joinpath(name).read_text("utf-8")


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _size(nbytes: int | None) -> str:
    return NONE if nbytes is None else size(nbytes)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _date(seconds: float, form: str = "%d %b %Y, %H:%M UTC") -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return NONE


def _seconds(value: float | None, long: bool = False) -> str:
    if value is None:
        return NONE
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120 or not long:
        return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
