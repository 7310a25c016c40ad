"""Values that all ranks are expected to share, compared between ranks at the first save.

A plain tensor or value is stored once, as the first rank has it, and a load gives all ranks that value. The random
states or data positions of the other ranks are lost. The first save of several ranks therefore warns of values that
differ. It compares hashes, in the exchange that plans the save.

Numbers are not compared: the loss, and lists of losses, differ between ranks in every script. A tensor above 4 MiB is
hashed in a few places, which is enough to notice a different random state or a different batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from dcp_plugin.errors import some
from dcp_plugin.format.payload import hashes_of, sample_of
from dcp_plugin.types import EncodedValue, Flat, ShardedValue

_SAMPLED = 4 << 20  # bytes of a tensor above which a sample of it is hashed


def shared_hashes(state: Flat, keys: Collection[str]) -> dict[str, bytes]:
    """Return a hash for each of these keys that this rank has."""
    hashes: dict[str, bytes] = {}
    fully_hashed: dict[str, ShardedValue] = {}
    for key in keys & state.keys():
        value = state[key]
        if isinstance(value, EncodedValue):
            hashes[key] = hashlib.blake2b(value.data, digest_size=16).digest()
        elif value.stored_whole:
            continue
        elif value.chunks[0].tensor.nbytes > _SAMPLED:
            hashes[key] = sample_of(value.chunks[0].tensor) or b""
        else:
            fully_hashed[key] = value
    tensors = [value.chunks[0].tensor for value in fully_hashed.values()]
    hashes |= dict(zip(fully_hashed, hashes_of(tensors, 1), strict=True))
    return hashes


def about_different(hashes_of_ranks: list[Mapping[str, bytes]]) -> str:
    """Return a warning that names each key with different values, and two ranks that differ; empty if there is none.
    A key that only some ranks have is compared among those ranks."""
    first: dict[str, tuple[int, bytes]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, hashes in enumerate(hashes_of_ranks):
        for key, value_hash in hashes.items():
            other, expected = first.setdefault(key, (rank, value_hash))
            if value_hash != expected:
                different.setdefault(key, (other, rank))
    if not different:
        return ""
    keys = [f"{key} (ranks {rank} and {other})" for key, (rank, other) in different.items()]
    return (
        f"ranks have different values under the same key: {some(keys)}. A checkpoint has one value for all ranks, that "
        f"of the first rank. Where each rank needs its own value back, write dcp_plugin.PerRank(value) into the state."
    )
