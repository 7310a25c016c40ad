"""Checkpoints that several versions of torch have written, stock DCP and we on each: ``WRITER-VERSION``.

``python -m tests.versions`` writes those of the torch that is running, whichever is installed beside this package
(``make test TORCH=2.15.0`` makes an environment). A new version of torch that changes what it writes gets its own. Of
the others of ours it writes the summary anew, in the format version of today: it has nothing of torch.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
WRITERS = ("stock", "ours")


def state(at: int) -> dict[str, Any]:
    """What is saved, with ``at=1``; a state to load into otherwise."""
    columns = torch.arange(6.0).reshape(3, 2).T * at
    return {
        "model": OrderedDict(weight=columns, half=torch.full((2,), at, dtype=torch.bfloat16)),
        "optim": {"state": {0: {"step": torch.tensor(float(at))}}, "param_groups": [{"betas": (0.9 * at, 0.99)}]},
        "epoch": at,
        "empty": {},
    }
