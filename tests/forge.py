"""Checkpoints as somebody who knows the format would change them: checksums and all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dcp_plugin.format.summary import with_hash


def change_summary(checkpoint: Path, **changed: Any) -> None:
    """Have ``dcp_plugin.json`` say something else, with the hash that fits."""
    said = json.loads((checkpoint / "dcp_plugin.json").read_text())
    del said["sha256"]
    (checkpoint / "dcp_plugin.json").write_bytes(with_hash({**said, **changed}))
