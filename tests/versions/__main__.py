"""``python -m tests.versions``: write the checkpoints of the torch that is running."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as stock

import dcp_plugin
from dcp_plugin.core.format.summary import FORMAT_VERSION
from tests.forge import change_summary
from tests.versions import HERE, WRITERS, state

for writer in WRITERS:
    name = f"{writer}-{torch.__version__.partition('+')[0]}"
    shutil.rmtree(HERE / name, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name  # which is noted in the checkpoint
        if writer == "ours":
            dcp_plugin.save(state(1), path)
        else:
            stock.save(state(1), checkpoint_id=path)
        shutil.copytree(path, HERE / name)

written = HERE / f"ours-{torch.__version__.partition('+')[0]}"
today = json.loads((written / "dcp_plugin.json").read_text())
for path in HERE.glob("ours-*"):
    summary = json.loads((path / "dcp_plugin.json").read_text())
    missing = {name: type(value)() for name, value in today.items() if name not in summary}
    change_summary(path, tuple(summary.keys() - today.keys()), **missing | {"format_version": FORMAT_VERSION})
