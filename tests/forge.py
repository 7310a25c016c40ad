"""Checkpoints as somebody who knows the format would change them: checksums and all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dcp_plugin.core.format.summary import with_hash


def change_summary(checkpoint: Path, without: tuple[str, ...] = (), **changed: Any) -> None:
    """Have ``dcp_plugin.json`` say something else, or nothing of some names, with the hash that fits."""
    said = json.loads((checkpoint / "dcp_plugin.json").read_text())
    for name in ("sha256", *without):
        del said[name]
    (checkpoint / "dcp_plugin.json").write_bytes(with_hash({**said, **changed}))
