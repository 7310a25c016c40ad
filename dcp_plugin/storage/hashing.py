"""Whether bytes are still the same: the 128-bit hash of a tensor, and a cheap look at a few of its places.

A hash decides, and XXH3-128 is one that accidents do not meet. A sample only proves that something *has* changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from xxhash import xxh3_128, xxh3_128_digest

from dcp_plugin.storage.hostmemory import Rings, is_plain_memory, memory_view

RunningHash = xxh3_128
_WORTH_THREADS = 1 << 20
_PLACES, _PLACE = 8, 128


def hashes_of(tensors: Sequence[torch.Tensor], threads: int) -> list[bytes]:
    """The XXH3-128 of the bytes of each tensor in row-major order."""
    if sum(tensor.nbytes for tensor in tensors) < _WORTH_THREADS:
        threads = 1
    largest_first = sorted(range(len(tensors)), key=lambda slot: tensors[slot].nbytes, reverse=True)
    hashes = [b""] * len(tensors)

    def work(first: int) -> None:
        rings = Rings()
        for slot in largest_first[first::threads]:
            hashes[slot] = _hash(tensors[slot], rings)

    if threads == 1:
        work(0)
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="dcp-hash") as pool:
            list(pool.map(work, range(threads)))
    return hashes


def sample_of(tensor: torch.Tensor) -> bytes | None:
    """A hash of a few places of a tensor; None where they are not easily had."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    last = max(0, tensor.nbytes - _PLACE)
    starts = [last * number // (_PLACES - 1) for number in range(_PLACES)]
    if is_plain_memory(tensor):
        memory = memory_view(tensor)
        return xxh3_128_digest(b"".join([memory[start : start + _PLACE] for start in starts]))
    data = tensor.view(-1).view(torch.uint8)
    places = torch.cat([data[start : start + _PLACE] for start in starts]).cpu()  # one copy from the device, not eight
    return xxh3_128_digest(memory_view(places))


def _hash(tensor: torch.Tensor, rings: Rings) -> bytes:
    if is_plain_memory(tensor):
        return xxh3_128_digest(memory_view(tensor))
    running = RunningHash()
    for piece in rings.pieces(tensor):
        running.update(piece)
    return running.digest()
