"""Comparison of replicas: parameters and optimizer state that several ranks hold and that should be equal there.

They drift apart without an error: a device is faulty, a broadcast is missing, or ranks train separate tensors under one
name. The rule: a save with equal replicas sends eight bytes per rank, however many chunks the ranks share. No rank has
to know the sets of holders.

- At each save, every rank reads a few elements of each replica, and sends one number of 64 bits.
- Rank 0 adds up the numbers. The sum is 0 if all replicas are equal.
- If the sum is not 0, the ranks exchange the elements, and the differing keys are named.

The path of the save determines the positions of the elements. They are the same on all ranks, and others at the next
save. All NaNs are equal, and so are zeros of either sign.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dcp_plugin.core.errors import some, warn
from dcp_plugin.core.format.columns import Column, mixed, product
from dcp_plugin.core.paths import Where
from dcp_plugin.core.planning.local_inventory import LocalInventory
from dcp_plugin.core.ranks.collectives import name_of
from dcp_plugin.core.tensors.host_memory import bytes_at
from dcp_plugin.core.types import Flat, LocalChunk

_SAMPLES = 4
"""Number of elements of a chunk that are compared."""
_GOLDEN = 0x9E3779B97F4A7C15
"""Odd number near 2**64 divided by the golden ratio. Its multiples are spread evenly."""

ChunkName = tuple[str, tuple[int, ...]]
"""Key and offsets of a chunk."""
Samples = dict[ChunkName, tuple[float, ...]]
Numbers = np.ndarray[Any, np.dtype[np.float64]]


def weights_of(
    rank: Column, chunk: Column, is_first: Column, is_replica: Column, world_size: int
) -> list[tuple[Column, Column]]:
    """Return for each rank the chunks of its inventory that other ranks hold as well, and a factor for each.

    A rank multiplies the hash of each chunk by its factor. The factors of all holders of a chunk add up to 0, modulo
    2**64: the products do so, too, if all holders have the same hash.

    Args:
        rank: A row for each rank that holds a chunk. The rows of one chunk follow each other.
        chunk: The number of the chunk in the inventory of each row's rank.
        is_first: Mask of the first row of each chunk.
        is_replica: Mask of the rows to compare.
    """
    holders = np.diff(np.flatnonzero(is_first), append=len(rank))
    several = np.flatnonzero(np.repeat(holders > 1, holders) & is_replica)
    # A factor is the hash of the rank, made odd. The first holder has minus the sum of the others.
    weight, firsts = mixed(rank[several].astype(np.uint64)) | np.uint64(1), np.flatnonzero(is_first[several])
    if len(firsts):  # the sums include the first holder's own factor, so that the difference is the negative sum
        weight[firsts] -= np.add.reduceat(weight, firsts)
    order = np.argsort(rank[several], kind="stable")
    ends = np.searchsorted(rank[several][order], np.arange(1, world_size))
    return list(zip(np.split(chunk[several][order], ends), np.split(weight[order], ends), strict=True))


class LocalReplicas:
    """This rank's replicas in a plan.

    Args:
        chunks: The numbers of their chunks in the inventory.
        weights: The factor of each.
    """

    def __init__(self, inventory: LocalInventory, chunks: Column, weights: Column) -> None:
        described = inventory.description
        key, ndim = described.key[chunks], described.ndim
        is_comparable = ~described.stored_whole[key] & (described.sizes[chunks] > 0).all(axis=1)
        chunks, key, self._weights = chunks[is_comparable], key[is_comparable], weights[is_comparable]
        ordinals = chunks - np.searchsorted(described.key, key)  # the chunks of a key follow each other
        offsets = inventory.offsets[chunks].tolist()
        self._chunks: list[ChunkName] = [
            (described.keys[number], tuple(row[: ndim[number]]))
            for number, row in zip(key.tolist(), offsets, strict=True)
        ]
        self._ordinals = ordinals.tolist()
        salts = [zlib.crc32(repr(chunk).encode()) for chunk in self._chunks]
        self._salts = np.array(salts, np.uint64) * np.uint64(_GOLDEN)
        self._counts = product(described.sizes[chunks])
        numbers = described.dtype[key]
        self._groups = [
            (dtype, np.flatnonzero(numbers == number))
            for number, dtype in enumerate(described.dtypes)
            if number in numbers
        ]

    def sum(self, state: Flat, path: Where) -> int:
        """Return this rank's number. The numbers of all ranks add up to 0, modulo 2**64, if all replicas are equal."""
        if not self._chunks:
            return 0
        # A position is mixed into each element, and the place of the chunk into each row: swapped values differ.
        words = self._elements(state, path).view(np.uint64)
        words = mixed(words + np.arange(1, _SAMPLES + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
        return int((mixed(words.sum(axis=1) ^ self._salts) * self._weights).sum())

    def samples(self, state: Flat, path: Where) -> Samples:
        """Return the elements of each replica that are compared."""
        return dict(zip(self._chunks, map(tuple, self._elements(state, path).tolist()), strict=True))

    def _elements(self, state: Flat, path: Where) -> Numbers:
        """Return a few elements of each replica as numbers. All NaNs are one, and so are all zeros."""
        # The path gives a number from 0 to 1: the first position, as a share of the distance of two.
        phase = zlib.crc32(str(path).encode()) * _GOLDEN % (1 << 64) / (1 << 64)
        steps = self._counts // _SAMPLES
        firsts = (phase * np.where(steps > 0, steps, self._counts)).astype(np.int64)
        positions = firsts[:, None] + steps[:, None] * np.arange(_SAMPLES)
        tensors = [
            (chunks if len(chunks := state[key].chunks) == 1 else _not_empty(chunks))[at].tensor  # type: ignore[union-attr]
            for (key, _), at in zip(self._chunks, self._ordinals, strict=True)
        ]
        elements = np.empty(positions.shape)
        with torch.no_grad():
            for dtype, members in self._groups:
                group = [tensors[at] for at in members.tolist()]
                if all(tensor.is_cpu and tensor.layout is torch.strided for tensor in group):
                    elements[members] = _read_on_host(group, dtype, positions[members])
                else:
                    _read(group, positions[members], elements, members)
        elements += 0.0  # -0.0 becomes 0.0
        elements[np.isnan(elements)] = np.nan
        return elements


def _not_empty(chunks: Sequence[LocalChunk]) -> list[LocalChunk]:
    """Return the chunks that an inventory counts."""
    return [chunk for chunk in chunks if 0 not in chunk.sizes]


def _read_on_host(tensors: Sequence[torch.Tensor], dtype: torch.dtype, positions: Column) -> Numbers:
    """Return elements of host tensors, given their positions in row-major order."""
    # Elements are read at their addresses: an operator for each small tensor would take as long as the rest of its
    # save. 200 tensors that are not contiguous take 7 ms of a save this way, and took 28.
    addresses, offsets = np.fromiter((tensor.data_ptr() for tensor in tensors), np.int64), positions.copy()
    for row, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            offsets[row] = np.transpose(np.unravel_index(positions[row], tensor.shape)) @ np.array(tensor.stride())
    read = bytes_at(addresses[:, None] + offsets * dtype.itemsize, dtype.itemsize)
    return _as_numbers(torch.from_numpy(read).view(dtype)).reshape(positions.shape)


def _read(tensors: Sequence[torch.Tensor], positions: Column, elements: Numbers, rows: Column) -> None:
    """Read elements of tensors of one dtype into rows of ``elements``, given their positions in row-major order.

    Each device joins its elements, so that one copy brings them to the host.
    """
    of_device: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        of_device.setdefault(tensor.device, []).append(at)
    for members in of_device.values():
        dtype = tensors[members[0]].dtype
        # torch.cat knows few of the dtypes of one byte on a device
        plain = [tensors[at].view(torch.uint8) if dtype.itemsize == 1 else tensors[at] for at in members]
        read = torch.cat([_elements_of(each, positions[at].tolist()) for each, at in zip(plain, members, strict=True)])
        elements[rows[members]] = _as_numbers(read.cpu().view(dtype)).reshape(len(members), -1)


def _elements_of(tensor: torch.Tensor, positions: list[int]) -> torch.Tensor:
    if tensor.is_contiguous():  # positions are equally far apart: a strided view has them without a copy of an index
        return tensor.as_strided(
            (len(positions),), (positions[1] - positions[0],), tensor.storage_offset() + positions[0]
        )
    return torch.stack([tensor[index] for index in zip(*np.unravel_index(positions, tensor.shape), strict=True)])


def _as_numbers(elements: torch.Tensor) -> Numbers:
    if elements.is_complex():  # one number of two: by an irrational factor, different pairs hardly give the same sum
        return _as_numbers(elements.real) + _as_numbers(elements.imag) * np.pi
    try:
        return elements.to(torch.float64).numpy()
    except RuntimeError:  # a packed dtype, which no operator converts
        return elements.view(torch.uint8).to(torch.float64).numpy()


@dataclass(frozen=True)
class Drift:
    """Replicas that differ between ranks."""

    ranks: dict[str, list[int]]
    """Key -> the ranks that differ: the minority, or all holders if there is none."""
    difference: float
    """The largest relative difference between compared elements of two ranks."""

    @classmethod
    def between(cls, of_ranks: Sequence[Samples], expected: Collection[str] = ()) -> Drift:
        """Return the replicas that differ, given the elements that each rank has read.

        Args:
            expected: Keys that may differ.
        """
        holders: dict[ChunkName, dict[bytes, list[int]]] = {}
        for rank, samples in enumerate(of_ranks):
            for chunk, elements in samples.items():
                holders.setdefault(chunk, {}).setdefault(np.array(elements).tobytes(), []).append(rank)
        ranks: dict[str, list[int]] = {}
        difference = 0.0
        for (key, _), groups in holders.items():
            if len(groups) > 1 and key not in expected:
                first, *others = sorted(groups.values(), key=len, reverse=True)
                is_majority = len(first) > len(others[0])
                differing = [rank for group in (others if is_majority else (first, *others)) for rank in group]
                ranks[key] = sorted({*ranks.get(key, ()), *differing})
                difference = max(difference, _relative([np.frombuffer(elements) for elements in groups]))
        return cls(ranks, difference)

    def __str__(self) -> str:
        keys = [f"{key} ({name_of(ranks)})" for key, ranks in self.ranks.items()]
        return (
            f"parameters or optimizer state that should be equal on several ranks differ: {some(keys)} (by up to "
            f"{self.difference:.2g} of their value). A checkpoint has one value for each key; from now on, the lowest "
            f"rank that holds a part of a tensor saves it. If these ranks train different tensors (pipeline stages, "
            f"experts, an actor and a critic), give them different names in the state, or make them DTensors. "
            f"Otherwise a broadcast is missing, or a device is faulty."
        )


def report(of_ranks: Sequence[Samples], keys: Iterable[str], objects: Mapping[str, tuple[str, str]]) -> Drift:
    """Return the replicas that differ, and warn of them.

    The state and the parameters of optimizers outside of torch are left out: these may round randomly, and differently
    on each rank.

    Args:
        keys: All keys of the checkpoint.
        objects: Kind and classes by name, see :class:`~dcp_plugin.core.planning.global_plan.GlobalPlan`.
    """
    drift = Drift.between(of_ranks, _trained_outside_torch(keys, objects))
    if drift.ranks:
        warn(str(drift))  # inside combine(): if warnings are errors, all ranks raise
    return drift


def _trained_outside_torch(keys: Iterable[str], objects: Mapping[str, tuple[str, str]]) -> frozenset[str]:
    """Return the keys of the optimizers outside of torch, and of the parameters that they train."""
    outside = tuple(
        f"{name}."
        for name, (kind, classes) in objects.items()
        if kind == "optimizer" and not all(each.startswith("torch.optim.") for each in classes.split(", "))
    )
    of_optimizers = [key for key in keys if key.startswith(outside)]
    names = {key.partition(".param_groups.")[2].rpartition(".")[0] for key in of_optimizers}
    modules = [name for name, (kind, _) in objects.items() if kind == "module"]
    return frozenset(of_optimizers) | {f"{module}.{fqn}" for module in modules for fqn in names}


def _relative(elements: Sequence[Numbers]) -> float:
    """Return the largest relative difference to the first array. A difference from NaN or infinity counts as 1."""
    first = elements[0]
    largest = 0.0
    for other in elements[1:]:
        finite = np.isfinite(first) & np.isfinite(other)
        same = (first == other) | (np.isnan(first) & np.isnan(other))
        scale = np.maximum(np.maximum(abs(first), abs(other)), np.finfo(np.float64).tiny)
        with np.errstate(invalid="ignore"):
            largest = max(largest, float(np.where(same, 0.0, np.where(finite, abs(first - other) / scale, 1.0)).max()))
    return largest
