"""Random streams of a rank: the generators of Python, NumPy and torch, as a value that a checkpoint stores.

A rank continues its stream from the time of the save. If the world has grown, a rank without a stream in the checkpoint
derives one from rank 0's state and its own number. Two resumes of a checkpoint on the same number of ranks are then the
same training.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dcp_plugin.core.state.adapters import CalledLast
from dcp_plugin.core.types import OfEachRank, public_class

RngState = dict[str, Any]


@public_class()
class RandomStreams(CalledLast, OfEachRank):
    """Random numbers of this rank, for the state of a training loop.

    The checkpoint has, for each rank, the state of the generators of Python's ``random``, of NumPy's global functions,
    and of torch on the CPU and on the rank's current device. A load restores them after all other objects. A rank that
    the checkpoint lacks starts a stream of its own, derived from that of rank 0.

    Generators that the program has made itself are not among them. Store their ``get_state()``.

    Example:
        >>> import dcp_plugin, torch
        >>> state = {"rng": dcp_plugin.RandomStreams(), "step": 1}
        >>> dcp_plugin.save(state, "run/step-1")
        >>> expected = torch.rand(2)
        >>> _ = dcp_plugin.load(state, "run/step-1")
        >>> bool(torch.equal(torch.rand(2), expected))
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generators, without drawing."""
        return {"rank": _rank(), "streams": capture(_device())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the streams of this rank, or start streams derived from those of another rank."""
        if state["rank"] == _rank():
            restore(state["streams"], _device())
        else:
            derive(state["streams"], _rank())


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _device() -> torch.device:
    """Return the accelerator of this process; the CPU if the process has not used an accelerator yet."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)():
        return torch.device("cpu")
    return accelerator


def about_new_ranks(saved: int, world_size: int) -> str:
    """Return a message for the user about ranks without streams; empty if there are none, or no streams at all.

    Args:
        saved: Number of ranks whose streams are in the checkpoint.
    """
    if not 0 < saved < world_size:
        return ""
    return (
        f"random states for {saved} of {world_size} ranks: the others start streams of their own, derived from rank "
        f"0's state and their number"
    )


def capture(device: torch.device) -> RngState:
    """Return the state of every generator that training code commonly draws from, without drawing."""
    version, words, gauss = random.getstate()
    python = {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss}
    state: RngState = {"torch": torch.get_rng_state(), "python": python}
    name, keys, position, has_gauss, cached = np.random.get_state()
    words = torch.from_numpy(keys.astype("int64"))
    state["numpy"] = {"name": name, "words": words, "position": position, "gauss": [has_gauss, cached]}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def restore(state: RngState, device: torch.device) -> None:
    """Continue the streams of :func:`capture`. Seed the device if its type differs from that at the save."""
    if device.type != "cpu" and device.type not in state:
        torch.get_device_module(device).manual_seed(_seed(state, "device"))
    elif device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type].cpu())
    torch.set_rng_state(state["torch"].cpu())
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in state:
        saved = state["numpy"]
        words = saved["words"].numpy().astype("uint32")
        np.random.set_state((saved["name"], words, saved["position"], *saved["gauss"]))


def derive(state_of_rank_0: RngState, rank: int) -> None:
    """Start streams for a rank without streams in the checkpoint."""
    seed = _seed(state_of_rank_0, f"rank {rank}")
    torch.manual_seed(seed)  # also seeds every device
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _seed(state: RngState, purpose: str) -> int:
    digest = hashlib.blake2b(state["torch"].cpu().numpy().tobytes() + purpose.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes a signed 64-bit seed
