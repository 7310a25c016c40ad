"""A checkpoint whose files are, for a while, somewhere else than at its path: what asks for the path finds these.

Frameworks and what reads for them look at a checkpoint in several ways before they load it: its keys, its small files,
whether it is there. With :func:`shown_at` all of them see the same files, which need not be at the path at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

from dcp_plugin.media import Listed, Medium, Readable, shown_elsewhere
from dcp_plugin.paths import Where


@dataclass(frozen=True)
class Elsewhere:
    """The :class:`~dcp_plugin.media.Medium` of one path, as far as it is read."""

    files: Readable
    names: tuple[str, ...]
    """All files, with ``/`` between folders."""
    beside: Mapping[str, str]
    """What can be compared of each file beside the tensors, see :mod:`dcp_plugin.storage.check_rest`."""
    medium: Medium
    """Of the path."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.medium, name)

    def locate(self, path: Where) -> Where:
        return path

    def uncommitted_reason(self, path: Where) -> str:
        return ""

    def kind(self, path: Where) -> Literal["folder", "file", ""]:
        return "folder"

    def open(self, path: Where) -> Readable:
        return self.files

    def hold(self, path: Where) -> Readable:
        return self.files

    def snapshot(self, root: Where) -> Medium:
        return cast(Medium, self)

    def entries(self, root: Where) -> list[Listed[Any]]:
        tops = sorted({name.partition("/")[0]: "/" in name for name in self.names}.items())
        return [Listed(root / name, is_folder, not is_folder) for name, is_folder in tops]


@contextmanager
def shown_at(path: Where, elsewhere: Elsewhere) -> Iterator[None]:
    """While the block runs, what reads ``path`` in this process reads these files."""
    before = shown_elsewhere.get(path)
    shown_elsewhere[path] = cast(Medium, elsewhere)
    try:
        yield
    finally:
        if before is None:
            del shown_elsewhere[path]
        else:
            shown_elsewhere[path] = before
