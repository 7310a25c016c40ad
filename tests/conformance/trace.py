"""What the user of one rank sees, in words that can be compared: exceptions, hook calls, tensors, values, losses."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dcp_plugin import CheckpointError

Words = dict[str, str]
"""What there is, by where it is."""


@dataclass(frozen=True)
class Raised:
    """An exception: the classes that an ``except`` could name, and what it says."""

    phase: str
    classes: tuple[str, ...]
    inner: tuple[str, ...]
    """The classes of what stock wraps into a CheckpointException."""
    text: str
    is_ours: bool
    by_user: bool
    """Raised by the user's own code, a hook for one."""

    @classmethod
    def of(cls, phase: str, error: BaseException) -> Raised:
        inner = [name for cause, _ in getattr(error, "failures", {}).values() for name in _classes(cause)]
        text = " ".join(str(error).split())
        frames = traceback.extract_tb(error.__traceback__)
        by_user = bool(frames) and Path(frames[-1].filename).parent == Path(__file__).parent
        return cls(phase, _classes(error), tuple(inner), text[-300:], isinstance(error, CheckpointError), by_user)

    def __str__(self) -> str:
        wrapped = f" of {self.inner[0]}" if self.inner else ""
        return f"{self.classes[0]}{wrapped} while {self.phase} ({self.text[-160:]})"


@dataclass
class Trace:
    """What one rank sees of one case. User code adds to it with :func:`note` and the methods below."""

    phase: str = "running"
    raised: Raised | None = None
    calls: dict[str, list[str]] = field(default_factory=dict)
    """The user's own hooks in their order, for each save and load."""
    seen: dict[str, Words] = field(default_factory=dict)
    """What is compared, by aspect."""
    right: dict[str, Words] = field(default_factory=dict)
    """What would be right, as far as that is known without another tool."""
    done: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """Warnings, lines of the log and errors of this package during saves and loads."""
    seconds: float = 0.0

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What is noted within belongs to this phase; an exception ends in it."""
        self.phase = phase
        self.calls.setdefault(phase, [])
        yield
        self.done.append(phase)
        self.phase = "running"

    def before(self, *objects: Any) -> None:
        """The objects as they are right before a save, which may not change them."""
        if not any(isinstance(module, FSDPModule) for each in objects for module in _modules(each)):
            self.right["what the save left"] = _words_of(objects)

    def saved(self, *objects: Any) -> None:
        """The objects after the save: what a resume should restore."""
        self.seen["what the save left"] = _words_of(objects)
        self.right["resumed state"], _ = _split(_words_of(objects))

    def resumed(self, *objects: Any) -> None:
        self.seen["resumed state"], self.seen["what else is there"] = _split(_words_of(objects))

    def see(self, name: str, value: Any, right: Any = ...) -> None:
        """Any value that the user looks at."""
        self.seen.setdefault("values", {})[name] = describe(value)
        if right is not ...:
            self.right.setdefault("values", {})[name] = describe(right)


_current = Trace()


def note(*what: Any) -> None:
    """For hooks of user code: I was called, and saw this."""
    if _current.phase != "running":
        _current.calls[_current.phase].append(" ".join(map(str, what)))


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    global _current
    before, _current = _current, trace
    try:
        yield
    finally:
        _current = before


def describe(value: Any) -> str:
    """Type and value, of tensors every byte; equal words if and only if a user could not tell the two apart."""
    kind = type(value).__name__
    if isinstance(value, (torch.Tensor, ShardedTensor)):
        return _tensor(value)
    if isinstance(value, Mapping):
        items = sorted(f"{key!r}: {describe(each)}" for key, each in value.items())
        return f"{kind}{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"{kind}[{', '.join(map(describe, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{kind}{{{', '.join(sorted(map(describe, value)))}}}"
    if "object at 0x" in repr(value):
        return f"{kind}({describe(vars(value)) if hasattr(value, '__dict__') else ''})"
    return f"{kind} {' '.join(repr(value).split())}"


def describe_module(module: nn.Module) -> Words:
    """Parameters, buffers and what else a user has put there, of the module and all in it; which are the same."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()  # what is seen is the parameter, not the copy that the last forward gathered
    words: Words = {}
    first: dict[int, str] = {}
    for prefix, child in module.named_modules():
        name = f"{prefix}." if prefix else ""
        if isinstance(child, FullyShardedDataParallel):
            for handle in [child._handle] if child._handle is not None else []:
                words[f"{name}flat"] = describe(handle.flat_param._local_shard)
        tensors = child._parameters | child._buffers
        for key, tensor in tensors.items():
            known = tensor is not None and first.setdefault(id(tensor), name + key)
            if known and known != name + key:
                words[name + key] = f"same as {known}"
                continue
            mark = _NOT_SAVED if key in child._non_persistent_buffers_set else ""
            words[name + key + mark] = describe(tensor).replace(" grad", "", 1)
            words[f"{name}{key} is trained{_NOT_SAVED}"] = str(tensor is not None and tensor.requires_grad)
        if not type(child).__module__.startswith("torch."):
            words |= {
                name + key + _NOT_SAVED: describe(value)
                for key, value in vars(child).items()
                if not key.startswith("_") and key != "call_super_init" and _is_plain(value)
            }
        words[f"{name}training{_NOT_SAVED}"] = str(child.training)
    return words


def describe_optimizer(optimizer: torch.optim.Optimizer) -> Words:
    """Describe state by the place of its parameter in the groups, the groups' fields, and optimizers inside."""
    words: Words = {}
    if isinstance(inner := getattr(optimizer, "inner", None), list):
        for number, one in enumerate(inner):
            words |= {f"inner {number}, {key}": value for key, value in describe_optimizer(one).items()}
        return words
    places: dict[Any, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        words |= {f"group {number}.{field}": describe(value) for field, value in group.items() if field != "params"}
        places |= {parameter: f"{number}.{place}" for place, parameter in enumerate(group["params"])}
    for key, slots in optimizer.state.items():
        where = places.get(key, "none of its own") if isinstance(key, torch.Tensor) else repr(key)
        words |= (
            {f"{where}.{slot}": describe(value) for slot, value in slots.items()}
            if isinstance(slots, Mapping)
            else {where: describe(slots)}
        )
    return words


def _split(words: Words) -> tuple[Words, Words]:
    """What a checkpoint has, and what it has not."""
    beside = {key: value for key, value in words.items() if key.endswith(_NOT_SAVED)}
    return {key: value for key, value in words.items() if key not in beside}, beside


_NOT_SAVED = " (not saved)"


def _words_of(objects: tuple[Any, ...]) -> Words:
    words: Words = {}
    for number, each in enumerate(objects):
        prefix = f"{number}." if len(objects) > 2 else ""
        if isinstance(each, nn.Module):
            words |= {f"{prefix}model.{key}": value for key, value in describe_module(each).items()}
        elif isinstance(each, torch.optim.Optimizer):
            words |= {f"{prefix}optim.{key}": value for key, value in describe_optimizer(each).items()}
        else:
            words[f"{prefix}value"] = describe(each)
    return words


def _modules(value: Any) -> Iterator[nn.Module]:
    return value.modules() if isinstance(value, nn.Module) else iter(())


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(_is_plain(each) for each in value)
    if isinstance(value, Mapping):
        return all(_is_plain(each) for each in value.values())
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.Tensor))


def _classes(error: BaseException) -> tuple[str, ...]:
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__ if base is not object)


_BY_ROWS, _BY_COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_COMPRESSED = {
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
}


def _tensor(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, ShardedTensor):
        shards = [f"{shard.metadata.shard_offsets} {_tensor(shard.tensor)}" for shard in value.local_shards()]
        return f"{kind} {tuple(value.metadata().size)} {shards}"
    about = f"{kind} {value.dtype} {tuple(value.shape) if not value.is_nested else 'nested'}".replace("torch.", "")
    about += " grad" if value.requires_grad else ""
    value = value.detach()
    if isinstance(value, DTensor):
        return f"{about} {value.placements} local {_tensor(value._local_tensor)}"
    if hasattr(value, "local_shards"):
        return f"{about} at {value.local_offsets()} {[_tensor(shard) for shard in value.local_shards()]}"
    if value.is_nested:
        return f"{about} {value.layout} {[_tensor(each) for each in value.unbind()]}"
    if hasattr(value, "__tensor_flatten__"):
        inner, context = value.__tensor_flatten__()
        return f"{about} {context} {[_tensor(getattr(value, name)) for name in inner]}"
    if value.is_meta:
        return f"{about} meta"
    if isinstance(value, nn.parameter.UninitializedTensorMixin):
        return f"{about} without a shape"
    if value.layout is torch.sparse_coo:
        value = value.coalesce()
        return f"{about} sparse {_bytes(value.indices())} {_bytes(value.values())}"
    if value.layout in _COMPRESSED:
        parts = [_bytes(getattr(value, name)()) for name in _COMPRESSED[value.layout]]
        return f"{about} {value.layout} {parts}"
    if value.is_quantized and value.qscheme() is torch.per_channel_affine:
        scales = value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.int_repr()
        return f"{about} {value.qscheme()} {value.q_per_channel_axis()} {[_bytes(each) for each in scales]}"
    if value.is_quantized:
        return f"{about} {value.qscheme()} {value.q_scale()} {value.q_zero_point()} {_bytes(value.int_repr())}"
    if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        value = torch.Tensor.as_subclass(value, torch.Tensor)
    return f"{about} {_bytes(value)}"


def _bytes(value: torch.Tensor) -> str:
    value = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = bytes(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""
    return raw.hex() if len(raw) <= 16 else f"#{hashlib.blake2b(raw, digest_size=6).hexdigest()}"
