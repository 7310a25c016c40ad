"""Corpus of modules: what people do inside of an ``nn.Module`` that a checkpoint can meet.

An entry is one decorated class or function, or one line at the end. Its forward takes a ``(4, 6)`` float tensor. What
a user's hook sees goes to :func:`~tests.conformance.trace.note`. ``Small`` is a model to put such a thing into; its
child ``block`` is a unit of its own for FSDP. A new tensor made in a hook has to have the same value on every rank.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.two_tensor import TwoTensor

from tests.conformance import differences as known
from tests.conformance.entries import ALL, EVERYWHERE, UNWRAPPED, WHOLE, Entry
from tests.conformance.trace import note


@dataclass(frozen=True)
class ModuleEntry(Entry):
    make: Callable[[], nn.Module]
    variants: tuple[str, ...] = ALL


MODULES: dict[str, ModuleEntry] = {}


def module(*layouts: str, **more: Any) -> Any:
    """Add a class, or a function that makes a module, to the corpus under its own name.

    Args:
        more: The other fields of its :class:`ModuleEntry`.
    """

    def add(make: Any) -> Any:
        MODULES[make.__name__] = ModuleEntry(make, layouts or ALL, **more)
        return make

    return add


def block(*layouts: str, **more: Any) -> Any:
    """Add a class of modules, each of which is the block of a :class:`Small`."""

    def add(make: Any) -> Any:
        MODULES[make.__name__] = ModuleEntry(lambda: Small(make()), layouts or ALL, **more)
        return make

    return add


def changed(*layouts: str, **more: Any) -> Any:
    """Add a function that changes a new :class:`Small`."""

    def add(change: Callable[[Small], None]) -> Any:
        def make() -> nn.Module:
            small = Small()
            change(small)
            return small

        MODULES[change.__name__] = ModuleEntry(make, layouts or ALL, **more)
        return change

    return add


class Small(nn.Module):
    """Two layers, the second of them what it is given."""

    def __init__(self, block: nn.Module | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.block = nn.Linear(6, 5) if block is None else block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(torch.relu(self.inp(x)))


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 5)


def to_be_saved() -> bool:
    """Whether the module that is being built will be saved; the other one, built with another seed, is loaded into."""
    return torch.initial_seed() % 2 == 1


def keys(state: Mapping[str, Any]) -> str:
    return ",".join(sorted(state))


def number() -> int:
    return int(torch.randint(100, ()))


# --- every hook that torch has, at the root and in a child


@block()
class StateDictPreHook(Block):
    """Brings what it saves up to date first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("saves", torch.zeros((), dtype=torch.int64))
        self.register_state_dict_pre_hook(StateDictPreHook.flush)

    def flush(self, prefix: str, keep_vars: bool) -> None:
        note("state_dict pre-hook", prefix, keep_vars)
        self.saves += 1


@changed()
def StateDictPreHookAtRoot(small: Small) -> None:
    small.register_state_dict_pre_hook(lambda m, prefix, keep_vars: note("root pre-hook", prefix, keep_vars))


@changed()
def StateDictPostHook(small: Small) -> None:
    small.register_state_dict_post_hook(lambda m, state, prefix, meta: note("post-hook", prefix, keys(state)))
    small.block.register_state_dict_post_hook(lambda m, state, prefix, meta: note("child's", prefix, keys(state)))


def _saves_its_epoch(small: Small, saved: Callable[[int], Any]) -> None:
    def add(module: Any, state: Any, prefix: str, meta: Any) -> None:
        note("add", prefix, keys(state))
        state[f"{prefix}epoch"] = saved(module.epoch)

    def remove(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("remove", prefix, keys(state))
        module.epoch = int(state.pop(f"{prefix}epoch"))

    small.epoch = number()
    small._register_state_dict_hook(add)
    small.register_load_state_dict_pre_hook(remove)


@changed()
def StateDictHookAddsAKey(small: Small) -> None:
    """Adds what is no parameter, and takes it out again."""
    _saves_its_epoch(small, torch.tensor)


@changed()
def StateDictHookAddsAPlainValue(small: Small) -> None:
    _saves_its_epoch(small, int)


@changed()
def StateDictHookRemovesKeys(small: Small) -> None:
    """As a frozen encoder that is not saved; the load completes it from what is there."""

    def drop(module: Any, state: Any, prefix: str, meta: Any) -> None:
        note("drop", prefix)
        for name in ("weight", "bias"):
            del state[f"{prefix}inp.{name}"]

    def complete(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("complete", prefix, keys(state))
        for name, value in module.inp.named_parameters():
            state[f"{prefix}inp.{name}"] = value.detach()

    small._register_state_dict_hook(drop)
    small.register_load_state_dict_pre_hook(complete)


def _rename(state: Any, old: str, new: str) -> Any:
    for key in [key for key in state if key.startswith(old)]:
        state[new + key.removeprefix(old)] = state.pop(key)
    return state


@changed()
def StateDictHookRenames(small: Small) -> None:
    """A checkpoint has other names than the module."""

    def rename_back(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("rename", keys(state))
        _rename(state, f"{prefix}head.", f"{prefix}block.")

    small._register_state_dict_hook(lambda m, s, prefix, meta: _rename(s, f"{prefix}block.", f"{prefix}head."))
    small.register_load_state_dict_pre_hook(rename_back)


@changed()
def StateDictHookCasts(small: Small) -> None:
    """Saves halves, trains floats."""

    def cast(module: Any, state: Any, prefix: str, meta: Any) -> None:
        for key in list(state):
            state[key] = state[key].half()

    small._register_state_dict_hook(cast)


@changed()
def StateDictHookScales(small: Small) -> None:
    """What is saved is twice the parameter; a load that fills the parameters directly restores twice of them."""

    def scale(module: Any, state: Any, prefix: str, meta: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    def scale_back(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("scale back", prefix)
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2

    small.block._register_state_dict_hook(scale)
    small.block.register_load_state_dict_pre_hook(scale_back)


@changed()
def StateDictHookReturnsAnotherDict(small: Small) -> None:
    small._register_state_dict_hook(lambda m, state, prefix, meta: OrderedDict(reversed(state.items())))


@changed()
def LoadPreHook(small: Small) -> None:
    for name, child in (("root", small), ("child", small.block)):
        child.register_load_state_dict_pre_hook(
            lambda m, state, prefix, meta, strict, *_, name=name: note(name, prefix, strict, keys(state))
        )


@changed()
def LoadPreHookScales(small: Small) -> None:
    """A pre-hook that changes what is loaded: a unit of measure, a permutation of the heads."""

    def scale(module: Any, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}bias"] = state[f"{prefix}bias"] * 2 + 1

    small.block.register_load_state_dict_pre_hook(scale)


@changed()
def LoadPreHookOfOldTorch(small: Small) -> None:
    """The private one, with and without the module; spectral_norm and many libraries still have it."""
    small.block._register_load_state_dict_pre_hook(lambda state, prefix, *_: note("without", prefix, keys(state)))
    small.block._register_load_state_dict_pre_hook(
        lambda m, state, prefix, *_: note("with", isinstance(m, nn.Linear), prefix), with_module=True
    )


@changed()
def LoadPostHook(small: Small) -> None:
    for name, child in (("root", small), ("child", small.block)):
        child.register_load_state_dict_post_hook(
            lambda m, bad, name=name: note(name, bad.missing_keys, bad.unexpected_keys)
        )


@module()
class LoadPostHookRebuildsDerivedState(Small):
    """A cached result of the parameters, wrong from the load to the hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(5) + 0.5)
        self.inverse = 1 / self.scale
        self.register_load_state_dict_post_hook(self.rebuild)

    @staticmethod
    def rebuild(module: Any, bad: Any) -> None:
        note("rebuild")
        module.inverse = 1 / module.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.inverse


@changed()
def LoadPostHookForgives(small: Small) -> None:
    """Has a buffer that checkpoints do not have, and says that it is fine."""

    def drop(module: Any, state: Any, prefix: str, meta: Any) -> None:
        del state[f"{prefix}cache"]

    def forgive(module: Any, bad: Any) -> None:
        note("forgive", bad.missing_keys)
        bad.missing_keys.clear()

    small.register_buffer("cache", torch.rand(3))
    small._register_state_dict_hook(drop)
    small.register_load_state_dict_post_hook(forgive)


@block(*WHOLE)
class SaveToStateDict(Block):
    """Packs its two tensors into one."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        note("_save_to_state_dict", prefix, keep_vars)
        destination[f"{prefix}packed"] = torch.cat([self.weight.detach(), self.bias.detach()[:, None]], dim=1)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        note("_load_from_state_dict", prefix, keys(state))
        packed = state[f"{prefix}packed"]
        with torch.no_grad():
            self.weight.copy_(packed[:, :6])
            self.bias.copy_(packed[:, 6])


@block()
class LoadFromStateDict(Block):
    """Changes what it gets, as embeddings that grow and layers that transpose do."""

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, strict: bool, *rest: Any) -> None:
        note("_load_from_state_dict", prefix, strict, keys(state))
        state[f"{prefix}bias"] = state[f"{prefix}bias"] + 1
        super()._load_from_state_dict(state, prefix, meta, strict, *rest)


@block()
class VersionedModule(Block):
    """Upgrades what an older version saved; the version stands in the metadata of a state dict."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, strict: bool, *rest: Any) -> None:
        note("version", meta.get("version"))
        super()._load_from_state_dict(state, prefix, meta, strict, *rest)


@module()
class OverriddenStateDict(Small):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        note("state_dict", *args, sorted(kwargs))
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        note("load_state_dict", keys(state))
        return super().load_state_dict(state, *args, **kwargs)


@module()
class OverriddenLoadSetsState(Small):
    """Takes note that it has been loaded, as lazily initialised models do."""

    loaded = False

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        note("load", strict, assign)
        self.loaded = True
        return super().load_state_dict(state, strict, assign)


@module()
class OverriddenLoadChangesValues(Small):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        state = {key: value * 2 if key.endswith("bias") else value for key, value in state.items()}
        return super().load_state_dict(state, strict=strict)


@module()
class OverriddenLoadIsNotStrict(Small):
    """And looks at what was missing."""

    def __init__(self) -> None:
        super().__init__()
        self.missing = ["not loaded"]

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        result = super().load_state_dict(state, strict=False)
        self.missing = [*result.missing_keys, *result.unexpected_keys]
        return result


@module(*UNWRAPPED)
class OverriddenLoadAssigns(Small):
    """The parameters become other objects."""

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({k: v.clone() for k, v in state.items()}, strict=strict, assign=True)


@module("plain")
class OverriddenWithoutOptions(Small):
    """The signatures of the Stateful protocol, which DCP asks for, and no others."""

    def state_dict(self) -> Any:  # type: ignore[override]
        note("state_dict")
        return super().state_dict()

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        note("load_state_dict")
        return super().load_state_dict(state)


@module(*UNWRAPPED)
class OverriddenNested(Small):
    """A state dict as people write it for themselves: nested, with plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = number()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"net": super().state_dict(*args, **kwargs), "epoch": self.epoch, "history": [0.5, self.epoch]}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        note("load", keys(state), [type(value).__name__ for value in state.values()])
        self.epoch, self.history = state["epoch"], state["history"]
        return super().load_state_dict(state["net"], *args, **kwargs)


class Translating(Small):
    """Saves its state dict translated into that of another library, and translates it back."""

    def __init__(
        self, save: Callable[[Any], Any], load: Callable[[Any], Any] = lambda state: state, strict: bool = True
    ) -> None:
        super().__init__()
        self._save, self._load, self._strict = save, load, strict

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._save(super().state_dict(*args, **kwargs))

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        note("load", keys(state))
        return super().load_state_dict(self._load(dict(state)), strict=strict and self._strict)


@module(*UNWRAPPED)
def OverriddenToAPart() -> nn.Module:
    """Saves what it trains, and says so after a load; the encoder comes from elsewhere."""
    small = Translating(lambda state: _without(state, "inp."), strict=False)
    small.inp.requires_grad_(False)
    return small


def _without(state: Any, prefix: str) -> Any:
    for key in [key for key in state if key.startswith(prefix)]:
        del state[key]
    return state


@module(*UNWRAPPED)
def OverriddenToNothing() -> nn.Module:
    """As a frozen model, a teacher for one."""
    return Translating(lambda state: {}, strict=False).requires_grad_(False)


@module(*UNWRAPPED)
def OverriddenRenames() -> nn.Module:
    """A checkpoint with the names of another library."""
    return Translating(
        lambda state: _rename(state, "inp.", "encoder.layer."), lambda state: _rename(state, "encoder.layer.", "inp.")
    )


@module(*UNWRAPPED)
def OverriddenWithAPrefix() -> nn.Module:
    """The keys that a trainer has put around the model, ``module.`` for one, which is also what DDP inserts."""
    return Translating(lambda state: _rename(state, "", "module."), lambda state: _rename(state, "module.", ""))


@module()
class OverriddenRenamesForItsParent(Small):
    """The same as a submodule does it. Below DDP stock raises, because only ``state_dict`` is called there."""

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        return _rename(state, f"{prefix}inp.", f"{prefix}encoder.layer.")

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(_rename(dict(state), "encoder.layer.", "inp."), strict=strict)


@module(*UNWRAPPED, differs=known.EXTRA_STATE)
class OverriddenWithMore(Small):
    """Tensors and values that no module has, nested, and keys that are numbers. The load reads them from the state,
    and torch calls them unexpected."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {"inp": torch.rand(6), "block": [torch.rand(5), {"count": number()}]}
        self.seen = {3: torch.rand(2), 4: 0.5}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = dict(super().state_dict(*args, **kwargs))
        return state | {"average": self.average, "seen": self.seen, "best": 0.25, "name": ("a", 1)}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        note("load", keys(state), [type(value).__name__ for value in state.values()])
        self.average, self.seen = state["average"], state["seen"]
        return super().load_state_dict(state, strict=False)


@module(*UNWRAPPED)
class OverriddenShardsNested(Small):
    """What is sharded lies in a mapping of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"model": {"encoder": self.inp.state_dict(), "head": self.block.state_dict()}, "version": 2}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> None:  # type: ignore[override]
        note("load", keys(state), keys(state["model"]), keys(state["model"]["head"]), state["version"])
        self.inp.load_state_dict(state["model"]["encoder"])
        self.block.load_state_dict(state["model"]["head"])


@block()
class OverriddenInAChild(Block):
    """torch calls a child's state_dict, and not its load_state_dict."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        note("child's state_dict", kwargs.get("prefix"))
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        note("child's load_state_dict")
        return super().load_state_dict(*args, **kwargs)


def _refuse(*_: Any) -> None:
    """The user's own exception."""
    raise LookupError("not now")


@changed(differs=known.OWN_EXCEPTION)
def HookRaisesOnSave(small: Small) -> None:
    small.register_state_dict_pre_hook(_refuse)


@changed(differs=known.OWN_EXCEPTION)
def HookRaisesOnLoad(small: Small) -> None:
    small.register_load_state_dict_post_hook(_refuse)


# --- extra state


class ExtraState(Block):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.extra = make()

    def get_extra_state(self) -> Any:
        note("get_extra_state")
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        note("set_extra_state", type(state).__name__)
        self.extra = state


EXTRA_STATES: dict[str, Callable[[], Any]] = {
    "int": number,
    "float": lambda: number() / 7,
    "bool": lambda: number() % 2 == 0,
    "str": lambda: f"epoch {number()}",
    "bytes": lambda: bytes([number(), 0, 255]),
    "None": lambda: None,
    "list": lambda: [number(), "a", None, 0.5],
    "empty_list": list,
    "tuple": lambda: (number(), (1, "b")),
    "set": lambda: {number(), -1},
    "dict": lambda: {"step": number(), "name": "x"},
    "empty_dict": dict,
    "dict_with_int_keys": lambda: {0: number(), 1: "x"},
    "nested_dict": lambda: {"a": {"b": {"c": number()}, "d": [number(), {"e": None}]}},
    "dict_that_grows": lambda: {f"key {n}": n for n in range(number())},
    "list_that_grows": lambda: list(range(number())),
    "tensor": lambda: torch.rand(3),
    "scalar_tensor": lambda: torch.tensor(number()),
    "tensor_that_grows": lambda: torch.rand(number() + 1),
    "list_of_tensors": lambda: [torch.rand(3), torch.rand(2, 2)],
    "dict_of_tensors": lambda: {"scale": torch.rand(3), "amax": {"history": torch.rand(4)}, "recipe": "e4m3"},
    "tuple_of_tensors": lambda: (torch.rand(3), number()),
    "dict_where_none_was": lambda: {"a": 1, "b": {"c": 2}} if to_be_saved() else None,
    "None_where_a_dict_was": lambda: None if to_be_saved() else {"a": 1},
    "tensor_where_none_was": lambda: torch.rand(2) if to_be_saved() else None,
    "dict_where_a_list_was": lambda: {"a": torch.rand(1)} if to_be_saved() else [1, 2],
    "int_where_a_dict_was": lambda: 3 if to_be_saved() else {"a": torch.rand(1)},
    "ordered_dict": lambda: OrderedDict(b=number(), a=1),
}
for name, make in EXTRA_STATES.items():
    MODULES[f"ExtraState_{name}"] = ModuleEntry(
        lambda make=make: Small(ExtraState(make)),
        ALL if name in ("int", "dict", "tensor", "list_of_tensors") else ("plain",),
        differs=known.EXTRA_STATE if name in ("dict_with_int_keys", "dict_that_grows") else {},
    )


@block("plain")
class ExtraStateThatNobodyTakes(Block):
    def get_extra_state(self) -> Any:
        return 3


# --- tensors that change their size, or appear late


class Resizing(nn.Module):
    """A memory bank: as large as the checkpoint's."""

    def __init__(self, kind: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.bank = kind(torch.rand(number() % 7 + 1, 6))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        found = state[f"{prefix}bank"]
        note("_load_from_state_dict", tuple(found.shape))
        if found.shape != self.bank.shape:
            self.bank = self.kind(torch.empty_like(found))
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.bank.T


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


@block(*WHOLE, differs=known.UNEXPECTED_KEYS)
class BufferRegisteredInForward(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(6))
        self.mean += x.detach().mean(0)
        return super().forward(x + self.mean.clone())


@block(*WHOLE, oracle="torch.save")
class BufferRegisteredAtLoad(BufferRegisteredInForward):
    """The way to resume such a buffer."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        note("_load_from_state_dict", keys(state))
        if f"{prefix}mean" in state and not hasattr(self, "mean"):
            self.register_buffer("mean", state[f"{prefix}mean"].clone())
        super()._load_from_state_dict(state, prefix, *rest)


@module("plain")
def LazyUsed() -> nn.Module:
    small = Small(nn.LazyLinear(5))
    small(torch.zeros(4, 6))
    return small


@module("plain", oracle="torch.save")
def LazyUnused() -> nn.Module:
    """Without shapes until the load."""
    return LazyUsed() if to_be_saved() else Small(nn.LazyLinear(5))


# --- parameters and buffers of all kinds


@module()
def NoneBufferAndParameter() -> nn.Module:
    small = Small(nn.Linear(6, 5, bias=False))
    small.register_buffer("nothing", None)
    small.register_parameter("none", None)
    return small


@block("plain", "ddp", "fsdp2", "fsdp1")
class NonPersistentBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.rand(5), persistent=False)
        self.register_buffer("kept", torch.rand(5))


@module(*WHOLE)
def TiedParameters() -> nn.Module:
    small = Small(nn.Linear(6, 6))
    small.block.weight = small.inp.weight
    return small


@module()
def TiedModules() -> nn.Module:
    small = Small(nn.Linear(6, 6))
    small.again = small.inp
    small.listed = nn.ModuleList([small.inp, small.block])
    return small


@changed()
def TiedBuffers(small: Small) -> None:
    small.register_buffer("one", torch.rand(3))
    small.register_buffer("two", small.one)


@changed("plain")
def ViewsOfOneMemory(small: Small) -> None:
    """Parameters that are parts of a flat tensor, as fused optimizers and flattened RNNs have them."""
    flat = torch.rand(30 + 5 + 3)
    small.block.weight = nn.Parameter(flat[:30].view(5, 6))
    small.block.bias = nn.Parameter(flat[30:35])
    small.register_buffer("flat", flat)


@changed("plain")
def Strides(small: Small) -> None:
    """Transposed, channels last, expanded, every other element."""
    small.block.weight = nn.Parameter(torch.rand(6, 5).T)
    small.register_buffer("channels_last", torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
    small.register_buffer("expanded", torch.rand(1, 3).expand(4, 3))
    small.register_buffer("strided", torch.rand(10)[::2])


@changed("plain")
def ExpandedParameter(small: Small) -> None:
    small.scale = frozen(torch.rand(1, 1).expand(4, 5))


@changed()
def Frozen(small: Small) -> None:
    small.inp.requires_grad_(False)


@changed(*UNWRAPPED)
def AllFrozen(small: Small) -> None:
    small.requires_grad_(False)


@changed()
def EmptyTensors(small: Small) -> None:
    small.register_buffer("none", torch.zeros(0))
    small.register_buffer("rows", torch.zeros(3, 0, 2, dtype=torch.bfloat16))
    small.register_buffer("scalar", torch.rand(()))


DTYPES = [
    "float64", "float16", "bfloat16", "complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e8m0fnu", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "bool", "float4_e2m1fn_x2",
]  # fmt: skip


class OfDtype(Block):
    """A frozen parameter and a buffer of the dtype, and a trained one where there is training in it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        bits = torch.randint(0, 2, (4, 16 * dtype.itemsize), dtype=torch.uint8)
        value = bits.view(dtype)
        self.frozen = frozen(value.clone())
        self.register_buffer("buffer", value.flip(0) if dtype.itemsize > 1 else value.clone())
        if dtype.is_complex and dtype.itemsize > 4:
            self.trained = nn.Parameter(torch.rand(5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * self.trained if hasattr(self, "trained") else y


for name in DTYPES:
    MODULES[f"Dtype_{name}"] = ModuleEntry(
        lambda name=name: Small(OfDtype(getattr(torch, name))),
        UNWRAPPED if name in ("float8_e4m3fn", "int8", "bool") else ("plain",),
    )


@module(*UNWRAPPED)
class TrainedInBFloat16(Small):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16())


@module("plain")
class TrainedInComplex(Small):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.inp(x).to(torch.complex64))


def SavedInBFloat16LoadedInFloat() -> nn.Module:
    return TrainedInBFloat16() if to_be_saved() else Small()


@module("plain")
class ParameterOfTwoTensors(Small):
    """A wrapper subclass: it has no memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block.weight = nn.Parameter(TwoTensor(torch.rand(5, 6), torch.rand(5, 6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.block.weight
        return nn.functional.linear(torch.relu(self.inp(x)), weight.a + weight.b, self.block.bias)


class PlainSubclass(torch.Tensor):
    """A subclass with memory of its own."""


def _rows() -> list[torch.Tensor]:
    return [torch.rand(2, 3), torch.rand(4, 3)]


BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    "BufferOfTwoTensors": lambda: TwoTensor(torch.rand(3), torch.rand(3)),
    "BufferOfASubclass": lambda: torch.rand(3).as_subclass(PlainSubclass),
    "QuantizedBuffer": lambda: torch.quantize_per_tensor(torch.rand(4, 3), 0.1, 3, torch.qint8),
    "QuantizedPerChannelBuffer": lambda: torch.quantize_per_channel(
        torch.rand(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
    ),
    "SparseBuffer": lambda: torch.rand(4, 4).relu().to_sparse(),
    "JaggedBuffer": lambda: torch.nested.nested_tensor(_rows(), layout=torch.jagged),
    "NestedBuffer": lambda: torch.nested.nested_tensor(_rows()),
}


class WithBuffer(Small):
    def __init__(self, buffer: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("it", buffer())


MODULES |= {name: ModuleEntry(lambda buffer=buffer: WithBuffer(buffer), ("plain",)) for name, buffer in BUFFERS.items()}


# --- what torch and others build out of hooks


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


def _parametrized(register: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        small = Small(nn.Linear(6, 6))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            register(small.block)
        return small

    return make


@module("plain")
def QuantizedDynamically() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Small(torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 5)), {nn.Linear}))


@module(*WHOLE)
class CachedInverse(Small):
    """Kept as an attribute, and rebuilt where torch says that a load has ended."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))
        self.mixing = frozen(torch.eye(6) + 0.1 * torch.rand(6, 6))
        self.inverse = torch.linalg.inv(self.mixing)
        self.block.register_load_state_dict_post_hook(lambda *_: note("the child is loaded"))
        self.register_load_state_dict_post_hook(CachedInverse.invert)

    def invert(self, bad: Any) -> None:
        note("invert")
        self.inverse = torch.linalg.inv(self.mixing.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.mixing) @ self.inverse


@module("plain", oracle="torch.save")
class OldNames(Small):
    """A new version of a model whose checkpoints have older names; a pre-hook translates."""

    def __init__(self) -> None:
        super().__init__()
        if to_be_saved():  # the older version
            self.first = self.inp
            del self.inp
        else:
            self.register_load_state_dict_pre_hook(self.translate)

    @staticmethod
    def translate(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("translate", keys(state))
        _rename(state, f"{prefix}first.", f"{prefix}inp.")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(torch.relu((self.first if hasattr(self, "first") else self.inp)(x)))


@changed("plain")
def HasALayerThatWasNotSaved(small: Small) -> None:
    if not to_be_saved():
        small.extra = nn.Linear(2, 2)


@changed("plain", differs=known.UNEXPECTED_KEYS)
def HasNotALayerThatWasSaved(small: Small) -> None:
    if to_be_saved():
        small.extra = nn.Linear(2, 2)


@changed("plain")
def SyncedMetric(small: Small) -> None:
    """A metric that keeps its state in a list until it is asked, and saves it on request."""
    small.metric = Metric()


class Metric(nn.Module):
    """As torchmetrics: the states are attributes, put into the state dict if they are persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.seen = torch.rand(()), [torch.rand(2) for _ in range(3)]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        note("metric's state_dict", prefix)
        destination = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        destination[f"{prefix}total"] = self.total
        destination[f"{prefix}seen"] = self.seen
        return destination

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        note("metric's _load_from_state_dict")
        self.total, self.seen = state.pop(f"{prefix}total"), state.pop(f"{prefix}seen")
        super()._load_from_state_dict(state, prefix, *rest)


@module(*WHOLE)
class Torchmetrics(Small):
    def __init__(self) -> None:
        import torchmetrics

        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.mean.persistent(True)
        self.transient = torchmetrics.MeanMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.mean.update(y.detach().sum())
        self.transient.update(y.detach().sum())
        return y


@module(*WHOLE)
class Lora(nn.Module):
    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__()
        config = LoraConfig(r=2, target_modules=["inp", "block"], init_lora_weights=False)
        self.net = get_peft_model(Small(), config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@module("plain")
class WithEma(Small):
    """The average is a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.ema = AveragedModel(nn.Linear(6, 6), multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        self.ema.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ema.update_parameters(self.inp)
        return super().forward(x)


@changed("plain")
def EmaByHand(small: Small) -> None:
    """A copy that is no child, saved by hooks."""

    def add(module: Any, state: Any, prefix: str, meta: Any) -> None:
        state |= {f"{prefix}shadow.{key}": value for key, value in module.shadow[0].state_dict().items()}

    def take(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("take", keys(state))
        names = [key for key in state if key.startswith(f"{prefix}shadow.")]
        module.shadow[0].load_state_dict({key.rpartition(".")[2]: state.pop(key) for key in names})
        module.shadow_bias = module.shadow[0].bias.detach().clone()

    small.shadow = [copy.deepcopy(small.inp)]
    small._register_state_dict_hook(add)
    small.register_load_state_dict_pre_hook(take)


@changed("plain")
def InAPlainList(small: Small) -> None:
    """Modules that torch does not know of: nobody saves them."""
    small._hidden = [nn.Linear(6, 6)]
    small._weights = {"w": nn.Parameter(torch.rand(3))}


@changed("plain")
def CompiledInPlace(small: Small) -> None:
    small.block.compile(backend="eager")


@module()
class ParameterContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.rand(6), nn.Parameter(torch.rand(6, 5))])
        self.named = nn.ParameterDict({"a b": torch.rand(5), "ü": torch.rand(5)})
        self.layers = nn.ModuleDict({"0": nn.Linear(5, 5), "module": nn.Linear(5, 5)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.listed[0]) @ self.listed[1] * self.named["a b"] + self.named["ü"]
        return self.layers["module"](self.layers["0"](y))


class Calling(nn.Module):
    """A block that is called in its own way."""

    def __init__(self, block: nn.Module, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.block, self._call = block, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(self.block, x)


@module()
def Images() -> nn.Module:
    block = nn.Sequential(nn.Conv1d(1, 3, 2), nn.InstanceNorm1d(3, affine=True, track_running_stats=True))
    block.append(nn.BatchNorm1d(3, momentum=None)).to(memory_format=torch.preserve_format)
    return Calling(block, lambda block, x: block(x[:, None]))


def _recurrent(kind: Callable[..., nn.Module]) -> nn.Module:
    return Calling(kind(6, 5, num_layers=2, bidirectional=True), lambda block, x: block(x[None])[0])


@module()
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
        self.register_buffer("mask", torch.ones(4, 4).tril() == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x[None], src_mask=self.mask)[0]


@module(*WHOLE)
class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6, padding_idx=0, max_norm=1.0)
        self.bag = nn.EmbeddingBag(7, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = (x.abs() * 3).long().clamp(max=6)
        return self.words(where).sum(1) + self.bag(where) * x


@module()
class OddNames(nn.Module):
    """Names that look like a wrapper's, a slot's, a number's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 6)
        self.state = nn.Linear(6, 6, bias=False)
        self.add_module("0", nn.Linear(6, 6))
        self.add_module("param_groups", nn.Linear(6, 5))
        self.register_buffer("exp_avg", torch.rand(2))
        self.register_buffer("with space/slash", torch.rand(2))
        self.register_buffer("_extra", torch.rand(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.param_groups(getattr(self, "0")(self.state(self.module(x))))


@module("plain", oracle="torch.save")
def LoadedFromMeta() -> nn.Module:
    """Built without memory when it is to be loaded."""
    with torch.device("cpu" if to_be_saved() else "meta"):
        return Small()


@changed("plain")
def PrunedWeight(small: Small) -> None:
    prune.random_unstructured(small.block, "weight", amount=0.5)


MODULES |= {
    "NoHook": ModuleEntry(Small, EVERYWHERE),
    "BufferThatResizesItself": ModuleEntry(lambda: Small(Resizing(nn.Buffer)), WHOLE, oracle="torch.save"),
    "ParameterThatResizesItself": ModuleEntry(lambda: Small(Resizing(nn.Parameter)), ("plain",), oracle="torch.save"),
    "FrozenParameterThatResizesItself": ModuleEntry(lambda: Small(Resizing(frozen)), ("plain",), oracle="torch.save"),
    "HasAnotherShapeThanWasSaved": ModuleEntry(lambda: Small(nn.Linear(6, 3 + to_be_saved())), ("plain",)),
    "SavedInFloatLoadedInBFloat16": ModuleEntry(lambda: Small() if to_be_saved() else TrainedInBFloat16(), ("plain",)),
    "SavedInBFloat16LoadedInFloat": ModuleEntry(SavedInBFloat16LoadedInFloat, ("plain",)),
    "BatchNorm": ModuleEntry(lambda: Small(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)))),
    "BatchNormWithoutStatistics": ModuleEntry(lambda: Small(nn.BatchNorm1d(6, track_running_stats=False))),
    "Lstm": ModuleEntry(lambda: _recurrent(nn.LSTM), WHOLE),
    "Gru": ModuleEntry(lambda: _recurrent(nn.GRU), WHOLE),
    "Parametrized": ModuleEntry(
        _parametrized(lambda m: parametrize.register_parametrization(m, "weight", Symmetric())), WHOLE
    ),
    "Orthogonal": ModuleEntry(_parametrized(parametrizations.orthogonal), ("plain",)),
    "WeightNorm": ModuleEntry(_parametrized(parametrizations.weight_norm), WHOLE),
    "WeightNormByHooks": ModuleEntry(_parametrized(torch.nn.utils.weight_norm), ("plain",)),
    "SpectralNorm": ModuleEntry(_parametrized(parametrizations.spectral_norm), WHOLE),
    "SpectralNormByHooks": ModuleEntry(_parametrized(torch.nn.utils.spectral_norm), ("plain",)),
    "Compiled": ModuleEntry(lambda: torch.compile(Small(), backend="eager"), ("plain",)),
    "CompiledChild": ModuleEntry(lambda: Small(torch.compile(nn.Linear(6, 5), backend="eager")), ("plain",)),
    "ActivationCheckpointing": ModuleEntry(lambda: Small(checkpoint_wrapper(nn.Linear(6, 5)))),
    "Identity": ModuleEntry(nn.Identity, ("plain",)),
    "NoParameters": ModuleEntry(lambda: Small(nn.Dropout(0.5))),
    "Sequential": ModuleEntry(lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 2, bias=False))),
    "OneLayer": ModuleEntry(lambda: nn.Linear(6, 2), EVERYWHERE),
    "FewerRowsThanRanks": ModuleEntry(lambda: Small(nn.Linear(6, 1)), ("fsdp2", "fsdp2@3", "fsdp1")),
}
