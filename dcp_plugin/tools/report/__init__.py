"""``dcp_plugin.report``: one page about a run, for a browser.

``collect`` gathers the figures, ``charts`` and ``page`` show them. The rule: every text from a file is escaped, and
the page needs no network.
"""

from __future__ import annotations

import os
from pathlib import Path

from dcp_plugin.errors import CheckpointError
from dcp_plugin.media import medium_of
from dcp_plugin.paths import PathLike, StorageOptions
from dcp_plugin.tools.report.collect import RunFigures, collect

__all__ = ["RunFigures", "collect", "report"]


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
        >>> dcp_plugin.report("run", "report.html").name
        'report.html'
    """
    return write(collect(run, storage_options), out)


def write(figures: RunFigures, out: str | os.PathLike[str]) -> Path:
    """Write the page of these figures. It appears complete or not at all. Raise the errors of :func:`report`."""
    from dcp_plugin.tools.report.page import page

    text, path = page(figures, _plotly()), Path(out)
    try:
        medium_of(path).note(path, text.encode())
    except OSError as error:  # it may name a temporary file
        raise type(error)(error.errno, error.strerror, str(path)) from None
    return path


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise CheckpointError("a report needs plotly: pip install 'dcp-plugin[report]'") from error
    text: str = get_plotlyjs()
    return text.replace("</script", "<\\/script")
