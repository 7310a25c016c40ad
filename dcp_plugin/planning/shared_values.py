"""Values that all ranks are expected to share, compared between ranks at the first save.

A plain tensor or value under one key is stored once, as the first rank has it, and all ranks get that back. A random
state, or a position in the data, is lost on all other ranks. So the first save of several ranks warns of values that
differ. It compares hashes, in the exchange that plans the save.

Numbers do not count: the loss, and lists of losses, differ between ranks in every script. Of a tensor above 4 MiB a few
places are hashed, which is enough to notice another random state or another batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from dcp_plugin.errors import some
from dcp_plugin.format.payload import hashes_of, sample_of
from dcp_plugin.types import EncodedValue, Flat, ShardedValue

_SAMPLED = 4 << 20  # bytes of a tensor above which a sample of it is hashed


def shared_hashes(state: Flat, keys: Collection[str]) -> dict[str, bytes]:
    """Return a hash of each of these values that this rank has."""
    hashes: dict[str, bytes] = {}
    whole: dict[str, ShardedValue] = {}
    for key in keys & state.keys():
        value = state[key]
        if isinstance(value, EncodedValue):
            hashes[key] = hashlib.blake2b(value.data, digest_size=16).digest()
        elif value.stored_whole:
            continue
        elif value.chunks[0].tensor.nbytes > _SAMPLED:
            hashes[key] = sample_of(value.chunks[0].tensor) or b""
        else:
            whole[key] = value
    tensors = [value.chunks[0].tensor for value in whole.values()]
    hashes |= dict(zip(whole, hashes_of(tensors, 1), strict=True))
    return hashes


def about_different(hashes_of_ranks: list[Mapping[str, bytes]]) -> str:
    """Return a warning that names each key that differs, with two ranks; empty if no key differs. A key that only some
    ranks have is compared among those ranks."""
    first: dict[str, tuple[int, bytes]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, hashes in enumerate(hashes_of_ranks):
        for key, value_hash in hashes.items():
            other, expected = first.setdefault(key, (rank, value_hash))
            if value_hash != expected:
                different.setdefault(key, (other, rank))
    if not different:
        return ""
    keys = [f"{key} (ranks {one} and {other})" for key, (one, other) in different.items()]
    return (
        f"ranks have different values under the same key: {some(keys)}. A checkpoint has one value for all ranks, that "
        f"of the first rank. Where each rank needs its own value back, write dcp_plugin.PerRank(value) into the state."
    )
