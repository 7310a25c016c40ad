"""What tests do to the files of a checkpoint behind its back, in a directory or in a bucket."""

from __future__ import annotations

import shutil
from pathlib import Path

from dcp_plugin.media.objects.client import client_of
from dcp_plugin.paths import Where


def copy(folder: Path, to: Where) -> None:
    """As ``cp -r`` and ``aws s3 cp --recursive`` do."""
    if isinstance(to, Path):
        shutil.copytree(folder, to)
        return
    for path in folder.rglob("*"):
        if path.is_file():
            client_of(to).put((to / path.relative_to(folder).as_posix()).key, path.read_bytes())


def delete(file: Where) -> None:
    if isinstance(file, Path):
        file.unlink()
    else:
        client_of(file).delete([file.key])
