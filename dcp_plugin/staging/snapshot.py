"""A host copy of the local shard, so that training goes on while it is written.

What may change at any time is copied before :class:`Snapshot` is made. What stays as it is until the next optimizer
step may be copied later, by :meth:`Snapshot.finish` in another thread, while the next forward and backward run; the
step waits for it (see :mod:`dcp_plugin.staging.guard`).

Such a copy is trusted only if the tensor's version is the same before and after: in-place operations count it up.
What they do not count (writes through ``.data``, replayed CUDA graphs, other languages) nobody can see.

Tied tensors stay tied in the copy. Copies from a device run on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dcp_plugin._torch import version_of
from dcp_plugin.errors import SaveFailed
from dcp_plugin.staging.pool import HostPool, Place
from dcp_plugin.types import EncodedValue, Flat, LocalChunk, memory_of


class _Copy(NamedTuple):
    """One tensor to copy. ``version``: what it was at the call; None if it is copied at the call."""

    key: str
    source: torch.Tensor
    whole: torch.Tensor
    place: Place
    version: tuple[int, int] | None

    @property
    def changed(self) -> bool:
        return _version_of(self.source, self.whole) != self.version

    def start(self) -> None:
        if self.source.numel():
            self.place.like(self.source).copy_(self.source, non_blocking=self.source.is_cuda)


class Snapshot:
    """The copy of one save.

    Args:
        state: What to copy.
        pool: Where to; everything that is in it is overwritten.
        still: Whether a tensor stays as it is until the next optimizer step, so that it can be copied later.
    """

    def __init__(
        self, state: Flat, pool: HostPool, still: Callable[[torch.Tensor], bool] = lambda tensor: False
    ) -> None:
        sources: dict[Any, tuple[str, torch.Tensor, torch.Tensor]] = {}
        for key, value in state.items():
            if isinstance(value, EncodedValue):
                continue
            for number, chunk in enumerate(value.chunks):
                identity = memory_of(chunk.tensor) if chunk.tensor.numel() else (key, number)
                whole = chunk.tensor if value.whole is None else value.whole
                sources.setdefault(identity, (key, chunk.tensor, whole))
        places = dict(zip(sources, pool.places([tensor for _, tensor, _ in sources.values()]), strict=True))
        copies = [
            _Copy(key, source, whole, places[identity], _version_of(source, whole) if still(source) else None)
            for identity, (key, source, whole) in sources.items()
        ]
        self._original: Flat = state
        self._places = places
        self._later = [copy for copy in copies if copy.version is not None]
        self._streams = _Streams(copy.source for copy in copies)
        self._copy([copy for copy in copies if copy.version is None])

    @property
    def complete(self) -> bool:
        """Whether :meth:`finish` has nothing to copy."""
        return not self._later

    def finish(self) -> Flat:
        """Copy what is left; the state in host memory.

        Raises:
            SaveFailed: Tensors have changed since the snapshot was made; naming them.
        """
        later, self._later = self._later, []
        self._copy(later)
        changed = [copy.key for copy in later if copy.changed]
        original, self._original = self._original, {}
        if changed:
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise SaveFailed(
                f"{', '.join(changed[:5])}{more} changed while being copied, by something else than a step of an "
                f"optimizer. Save with staging='blocking', or call handle.wait_staged() before changing it."
            )
        return {
            key: value if isinstance(value, EncodedValue) else self._moved(key, value)
            for key, value in original.items()
        }

    def _moved(self, key: str, value: Any) -> Any:
        chunks = []
        for number, chunk in enumerate(value.chunks):
            identity = memory_of(chunk.tensor) if chunk.tensor.numel() else (key, number)
            chunks.append(LocalChunk(chunk.offsets, chunk.sizes, self._places[identity].like(chunk.tensor)))
        return replace(value, chunks=tuple(chunks), whole=None)  # lets go of the memory on the device

    def _copy(self, copies: list[_Copy]) -> None:
        for copy in copies:
            with self._streams.of(copy.source):
                copy.start()
        if copies:
            self._streams.synchronize()


def _version_of(local: torch.Tensor, whole: torch.Tensor) -> tuple[int, int] | None:
    one = version_of(local)
    other = one if whole is local else version_of(whole)
    return None if one is None or other is None else (one, other)


class _Streams:
    """One stream per device for copies from it. They begin when the work that the caller has queued is done."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def of(self, tensor: torch.Tensor) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[tensor.device]) if tensor.is_cuda else nullcontext()

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
