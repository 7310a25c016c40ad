"""Checkpoints and weights of other tools, as small as these tools could have written them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WEIGHTS = {"w": torch.zeros(3)}
OPTIMIZER = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
LIGHTNING_WEIGHTS: dict[str, Any] = {"pytorch-lightning_version": "2.6.6", "state_dict": WEIGHTS}
LIGHTNING = {**LIGHTNING_WEIGHTS, "optimizer_states": [OPTIMIZER]}
"""What Lightning puts into a file: weights alone, which are no checkpoint to resume from, and all of a training."""


def hugging_face(path: Path, *shards: dict[str, torch.Tensor]) -> None:
    """Write the shards of a model as ``save_pretrained`` does."""
    path.mkdir(parents=True)
    index = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, path / name)
        index |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@contextmanager
def without_crcs() -> Iterator[None]:
    """Have torch write zeros where the CRC32s of an archive stand."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
