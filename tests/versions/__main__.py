"""``python -m tests.versions``: write the checkpoints of the torch that is running."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as stock

import dcp_plugin
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
