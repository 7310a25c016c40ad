"""The random number generators of one rank as plain tensors and numbers, and back.

The rule: a rank continues the very stream it was in when the checkpoint was made. A rank that did not exist then
(the world has grown) gets a stream of its own that depends only on the checkpoint and on its number, so that two
resumes of the same checkpoint on the same number of ranks are the same training.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

RngState = dict[str, Any]


def capture(device: torch.device) -> RngState:
    """The state of every generator that training code commonly draws from. Draws nothing."""
    version, words, gauss = random.getstate()
    state: RngState = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        words = torch.from_numpy(keys.astype("int64"))
        state["numpy"] = {"name": name, "words": words, "position": position, "gauss": [has_gauss, cached]}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def restore(state: RngState, device: torch.device) -> None:
    """Continue the streams of :func:`capture`. On another kind of device than then, the device is seeded anew."""
    if device.type != "cpu" and device.type not in state:
        torch.get_device_module(device).manual_seed(_seed(state, "device"))
    elif device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type].cpu())
    torch.set_rng_state(state["torch"].cpu())
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        saved = state["numpy"]
        words = saved["words"].numpy().astype("uint32")
        numpy.random.set_state((saved["name"], words, saved["position"], *saved["gauss"]))


def derive(state_of_rank_0: RngState, rank: int) -> None:
    """Start streams for a rank that the checkpoint does not know."""
    seed = _seed(state_of_rank_0, f"rank {rank}")
    torch.manual_seed(seed)  # every device too
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def about_new_ranks(known: int, world_size: int) -> str:
    """What a door says when it calls :func:`derive`: ``known`` ranks are in the checkpoint, ``world_size`` load it."""
    return (
        f"random states for {known} of {world_size} ranks: the others start streams of their own, derived from rank "
        "0's state and their number"
    )


def _seed(state: RngState, purpose: str) -> int:
    digest = hashlib.blake2b(state["torch"].cpu().numpy().tobytes() + purpose.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes a signed 64-bit seed
