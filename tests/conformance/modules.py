"""Corpus of modules: what people do inside of an ``nn.Module`` that a checkpoint can meet.

An entry is one decorated class, or one line of :data:`PLAIN`. Its forward takes a ``(4, 6)`` float tensor. What a
user's hook sees goes to :func:`~tests.conformance.trace.note`. ``Small`` is a model to put such a thing into; its child
``block`` is a unit of its own for FSDP. A new tensor made in a hook has to have the same value on every rank.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.two_tensor import TwoTensor

from tests.conformance import differences as known
from tests.conformance.trace import note

ALL = ("plain", "ddp", "fsdp2")
WHOLE = ("plain", "ddp")
"""For what FSDP2 cannot take."""


@dataclass(frozen=True)
class ModuleEntry:
    make: Callable[[], nn.Module]
    layouts: tuple[str, ...] = ALL
    oracle: str = "stock"
    differs: Mapping[str, str] = field(default_factory=dict)


MODULES: dict[str, ModuleEntry] = {}


def module(*layouts: str, oracle: str = "stock", differs: Mapping[str, str] | None = None) -> Any:
    """Adds a class, or a function that makes a module, to the corpus under its own name."""

    def add(make: Any) -> Any:
        MODULES[make.__name__] = ModuleEntry(make, layouts or ALL, oracle, differs or {})
        return make

    return add


class Small(nn.Module):
    """Two layers, the second of them what it is given."""

    def __init__(self, block: nn.Module | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.block = nn.Linear(6, 5) if block is None else block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(torch.relu(self.inp(x)))


def to_be_saved() -> bool:
    """Whether the module that is being built will be saved; the other one, built with another seed, is loaded into."""
    return torch.initial_seed() % 2 == 1


def keys(state: Mapping[str, Any]) -> str:
    return ",".join(sorted(state))


# --- every hook that torch has, at the root and in a child


@module("plain", "ddp", "fsdp2", "fsdp2@3", "fsdp1")
class NoHook(Small):
    pass


class StateDictPreHookChild(nn.Linear):
    """Brings what it saves up to date first."""

    def __init__(self) -> None:
        super().__init__(6, 5)
        self.register_buffer("saves", torch.zeros((), dtype=torch.int64))
        self.register_state_dict_pre_hook(StateDictPreHookChild.flush)

    def flush(self, prefix: str, keep_vars: bool) -> None:
        note("state_dict pre-hook", prefix, keep_vars)
        self.saves += 1


@module()
def StateDictPreHook() -> nn.Module:
    return Small(StateDictPreHookChild())


@module()
class StateDictPreHookAtRoot(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_pre_hook(lambda m, prefix, keep_vars: note("root pre-hook", prefix, keep_vars))


@module()
class StateDictPostHook(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda m, state, prefix, meta: note("post-hook", prefix, keys(state)))
        self.block.register_state_dict_post_hook(lambda m, state, prefix, meta: note("child's", prefix, keys(state)))


@module()
class StateDictHookAddsAKey(Small):
    """Adds what is no parameter, and takes it out again."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = int(torch.randint(100, ()))
        self._register_state_dict_hook(self.add)
        self.register_load_state_dict_pre_hook(self.remove)

    @staticmethod
    def add(module: Any, state: Any, prefix: str, meta: Any) -> None:
        note("add", prefix, keys(state))
        state[f"{prefix}epoch"] = torch.tensor(module.epoch)

    @staticmethod
    def remove(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("remove", prefix, keys(state))
        module.epoch = int(state.pop(f"{prefix}epoch"))


@module()
class StateDictHookAddsAPlainValue(StateDictHookAddsAKey):
    @staticmethod
    def add(module: Any, state: Any, prefix: str, meta: Any) -> None:
        state[f"{prefix}epoch"] = module.epoch


@module()
class StateDictHookRemovesKeys(Small):
    """As a frozen encoder that is not saved; the load completes it from what is there."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(self.drop)
        self.register_load_state_dict_pre_hook(self.complete)

    @staticmethod
    def drop(module: Any, state: Any, prefix: str, meta: Any) -> None:
        note("drop", prefix)
        for name in ("weight", "bias"):
            del state[f"{prefix}inp.{name}"]

    @staticmethod
    def complete(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("complete", prefix, keys(state))
        for name, value in module.inp.named_parameters():
            state[f"{prefix}inp.{name}"] = value.detach()


@module()
class StateDictHookRenames(Small):
    """A checkpoint has other names than the module."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(self.rename)
        self.register_load_state_dict_pre_hook(self.rename_back)

    @staticmethod
    def rename(module: Any, state: Any, prefix: str, meta: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}block.")]:
            state[key.replace("block.", "head.")] = state.pop(key)

    @staticmethod
    def rename_back(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("rename", keys(state))
        for key in [key for key in state if key.startswith(f"{prefix}head.")]:
            state[key.replace("head.", "block.")] = state.pop(key)


@module()
class StateDictHookCasts(Small):
    """Saves halves, trains floats."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(self.cast)

    @staticmethod
    def cast(module: Any, state: Any, prefix: str, meta: Any) -> None:
        for key in list(state):
            state[key] = state[key].half()


@module()
class StateDictHookScales(Small):
    """What is saved is twice the parameter; a load that fills the parameters directly restores twice of them."""

    def __init__(self) -> None:
        super().__init__()
        self.block._register_state_dict_hook(self.scale)
        self.block.register_load_state_dict_pre_hook(self.scale_back)

    @staticmethod
    def scale(module: Any, state: Any, prefix: str, meta: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    @staticmethod
    def scale_back(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("scale back", prefix)
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


@module()
class StateDictHookReturnsAnotherDict(Small):
    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(lambda m, state, prefix, meta: OrderedDict(reversed(state.items())))


@module()
class LoadPreHook(Small):
    def __init__(self) -> None:
        super().__init__()
        for name, child in (("root", self), ("child", self.block)):
            child.register_load_state_dict_pre_hook(
                lambda m, state, prefix, meta, strict, *_, name=name: note(name, prefix, strict, keys(state))
            )


@module()
class LoadPreHookScales(Small):
    """A pre-hook that changes what is loaded: a unit of measure, a permutation of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.block.register_load_state_dict_pre_hook(self.scale)

    @staticmethod
    def scale(module: Any, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}bias"] = state[f"{prefix}bias"] * 2 + 1


@module()
class LoadPreHookOfOldTorch(Small):
    """The private one, with and without the module; spectral_norm and many libraries still have it."""

    def __init__(self) -> None:
        super().__init__()
        self.block._register_load_state_dict_pre_hook(lambda state, prefix, *_: note("without", prefix, keys(state)))
        self.block._register_load_state_dict_pre_hook(self.of_module, with_module=True)

    @staticmethod
    def of_module(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("with", type(module).__mro__[-3].__name__, prefix)


@module()
class LoadPostHook(Small):
    def __init__(self) -> None:
        super().__init__()
        for name, child in (("root", self), ("child", self.block)):
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


@module()
class LoadPostHookForgives(Small):
    """Has a buffer that checkpoints do not have, and says that it is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.rand(3))
        self._register_state_dict_hook(self.drop)
        self.register_load_state_dict_post_hook(self.forgive)

    @staticmethod
    def drop(module: Any, state: Any, prefix: str, meta: Any) -> None:
        del state[f"{prefix}cache"]

    @staticmethod
    def forgive(module: Any, bad: Any) -> None:
        note("forgive", bad.missing_keys)
        bad.missing_keys.clear()


class SaveToStateDictChild(nn.Linear):
    """Packs its two tensors into one."""

    def __init__(self) -> None:
        super().__init__(6, 5)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        note("_save_to_state_dict", prefix, keep_vars)
        destination[f"{prefix}packed"] = torch.cat([self.weight.detach(), self.bias.detach()[:, None]], dim=1)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        note("_load_from_state_dict", prefix, keys(state))
        packed = state[f"{prefix}packed"]
        with torch.no_grad():
            self.weight.copy_(packed[:, :6])
            self.bias.copy_(packed[:, 6])


@module(*WHOLE)
def SaveToStateDict() -> nn.Module:
    return Small(SaveToStateDictChild())


class LoadFromStateDictChild(nn.Linear):
    """Changes what it gets, as embeddings that grow and layers that transpose do."""

    def __init__(self) -> None:
        super().__init__(6, 5)

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, strict: bool, *rest: Any) -> None:
        note("_load_from_state_dict", prefix, strict, keys(state))
        state[f"{prefix}bias"] = state[f"{prefix}bias"] + 1
        super()._load_from_state_dict(state, prefix, meta, strict, *rest)


@module()
def LoadFromStateDict() -> nn.Module:
    return Small(LoadFromStateDictChild())


class WithVersion(nn.Linear):
    """Upgrades what an older version saved; the version stands in the metadata of a state dict."""

    _version = 3

    def __init__(self) -> None:
        super().__init__(6, 5)

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, strict: bool, *rest: Any) -> None:
        note("version", meta.get("version"))
        super()._load_from_state_dict(state, prefix, meta, strict, *rest)


@module()
def VersionedModule() -> nn.Module:
    return Small(WithVersion())


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

    def __init__(self) -> None:
        super().__init__()
        self.loaded = False

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


@module("plain", "fsdp2")
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


@module("plain", "fsdp2")
class OverriddenNested(Small):
    """A state dict as people write it for themselves: nested, with plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = int(torch.randint(100, ()))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"net": super().state_dict(*args, **kwargs), "epoch": self.epoch, "history": [0.5, self.epoch]}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        note("load", keys(state), [type(value).__name__ for value in state.values()])
        self.epoch, self.history = state["epoch"], state["history"]
        return super().load_state_dict(state["net"], *args, **kwargs)


@module("plain", "fsdp2")
class OverriddenToAPart(Small):
    """Saves what it trains, and says so after a load; the encoder comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inp.requires_grad_(False)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        for name in ("weight", "bias"):
            del state[f"{prefix}inp.{name}"]
        return state

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        note("load", keys(state))
        return super().load_state_dict(state, strict=False)


@module("plain", "fsdp2")
class OverriddenToNothing(Small):
    """As a frozen model, a teacher for one."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        note("load", keys(state))
        return super().load_state_dict(state, strict=False)


@module("plain", "fsdp2")
class OverriddenRenames(Small):
    """A checkpoint with the names of another library."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {key.replace("inp.", "encoder.layer."): value for key, value in super().state_dict().items()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        note("load", keys(state))
        mine = {key.replace("encoder.layer.", "inp."): value for key, value in state.items()}
        return super().load_state_dict(mine, strict=strict)


@module()
class OverriddenRenamesForItsParent(Small):
    """The same as a submodule does it. Below DDP stock raises, because only ``state_dict`` is called there."""

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        for key in [key for key in state if key.startswith(f"{prefix}inp.")]:
            state[key.replace("inp.", "encoder.layer.")] = state.pop(key)
        return state

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        mine = {key.replace("encoder.layer.", "inp."): value for key, value in state.items()}
        return super().load_state_dict(mine, strict=strict)


@module("plain", "fsdp2")
class OverriddenWithAPrefix(Small):
    """The keys that a trainer has put around the model, ``module.`` for one, which is also what DDP inserts."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"module.{key}": value for key, value in super().state_dict().items()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        note("load", keys(state))
        return super().load_state_dict({key.removeprefix("module."): value for key, value in state.items()}, strict)


@module("plain", "fsdp2", differs=known.EXTRA_STATES["dict_with_int_keys"])
class OverriddenWithMore(Small):
    """Tensors and values that no module has, nested, and keys that are numbers. The load reads them from the state,
    and torch calls them unexpected."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {"inp": torch.rand(6), "block": [torch.rand(5), {"count": int(torch.randint(100, ()))}]}
        self.seen = {3: torch.rand(2), 4: 0.5}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = dict(super().state_dict(*args, **kwargs))
        return state | {"average": self.average, "seen": self.seen, "best": 0.25, "name": ("a", 1)}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        note("load", keys(state), [type(value).__name__ for value in state.values()])
        self.average, self.seen = state["average"], state["seen"]
        return super().load_state_dict(state, strict=False)


@module("plain", "fsdp2")
class OverriddenShardsNested(Small):
    """What is sharded lies in a mapping of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"model": {"encoder": self.inp.state_dict(), "head": self.block.state_dict()}, "version": 2}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> None:  # type: ignore[override]
        note("load", keys(state), keys(state["model"]), keys(state["model"]["head"]), state["version"])
        self.inp.load_state_dict(state["model"]["encoder"])
        self.block.load_state_dict(state["model"]["head"])


class OverridingChild(nn.Linear):
    """torch calls a child's state_dict, and not its load_state_dict."""

    def __init__(self) -> None:
        super().__init__(6, 5)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        note("child's state_dict", kwargs.get("prefix"))
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        note("child's load_state_dict")
        return super().load_state_dict(*args, **kwargs)


@module()
def OverriddenInAChild() -> nn.Module:
    return Small(OverridingChild())


@module(differs=known.OWN_EXCEPTION)
class HookRaisesOnSave(Small):
    """The user's own exception."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_pre_hook(self.refuse)

    @staticmethod
    def refuse(*_: Any) -> None:
        raise LookupError("not now")


@module(differs=known.OWN_EXCEPTION)
class HookRaisesOnLoad(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(self.refuse)

    @staticmethod
    def refuse(*_: Any) -> None:
        raise LookupError("not now")


# --- extra state


class ExtraState(nn.Linear):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(6, 5)
        self.extra = make()

    def get_extra_state(self) -> Any:
        note("get_extra_state")
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        note("set_extra_state", type(state).__name__)
        self.extra = state


def number() -> int:
    return int(torch.randint(100, ()))


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
        ("plain", "ddp", "fsdp2") if name in ("int", "dict", "tensor", "list_of_tensors") else ("plain",),
        differs=known.EXTRA_STATES.get(name, {}),
    )


class OnlyGets(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 5)

    def get_extra_state(self) -> Any:
        return 3


@module("plain")
def ExtraStateThatNobodyTakes() -> nn.Module:
    return Small(OnlyGets())


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


@module(*WHOLE, oracle="torch.save")
def BufferThatResizesItself() -> nn.Module:
    return Small(Resizing(nn.Buffer))


@module("plain", oracle="torch.save")
def ParameterThatResizesItself() -> nn.Module:
    return Small(Resizing(nn.Parameter))


@module("plain", oracle="torch.save")
def FrozenParameterThatResizesItself() -> nn.Module:
    return Small(Resizing(lambda tensor: nn.Parameter(tensor, requires_grad=False)))


class RegistersLate(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(6))
        self.mean += x.detach().mean(0)
        return super().forward(x + self.mean.clone())


@module(*WHOLE, differs=known.UNEXPECTED_KEYS)
def BufferRegisteredInForward() -> nn.Module:
    return Small(RegistersLate())


class RegistersAtLoad(RegistersLate):
    """The way to resume such a buffer."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        note("_load_from_state_dict", keys(state))
        if f"{prefix}mean" in state and not hasattr(self, "mean"):
            self.register_buffer("mean", state[f"{prefix}mean"].clone())
        super()._load_from_state_dict(state, prefix, *rest)


@module(*WHOLE, oracle="torch.save")
def BufferRegisteredAtLoad() -> nn.Module:
    return Small(RegistersAtLoad())


@module("plain")
class LazyUsed(Small):
    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(5))
        self(torch.zeros(4, 6))


@module("plain", oracle="torch.save")
class LazyUnused(Small):
    """Without shapes until the load."""

    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(5))
        if to_be_saved():
            self(torch.zeros(4, 6))


# --- parameters and buffers of all kinds


@module()
class NoneBufferAndParameter(Small):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5, bias=False))
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)


class NonPersistent(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 5)
        self.register_buffer("cache", torch.rand(5), persistent=False)
        self.register_buffer("kept", torch.rand(5))


@module("plain", "ddp", "fsdp2", "fsdp1")
def NonPersistentBuffer() -> nn.Module:
    return Small(NonPersistent())


@module(*WHOLE)
class TiedParameters(Small):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))
        self.block.weight = self.inp.weight


@module()
class TiedModules(Small):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))
        self.again = self.inp
        self.listed = nn.ModuleList([self.inp, self.block])


@module()
class TiedBuffers(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.rand(3))
        self.register_buffer("two", self.one)


@module("plain")
class ViewsOfOneMemory(Small):
    """Parameters that are parts of a flat tensor, as fused optimizers and flattened RNNs have them."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.rand(30 + 5 + 3)
        self.block.weight = nn.Parameter(flat[:30].view(5, 6))
        self.block.bias = nn.Parameter(flat[30:35])
        self.register_buffer("flat", flat)


@module("plain")
class Strides(Small):
    """Transposed, channels last, expanded, every other element."""

    def __init__(self) -> None:
        super().__init__()
        self.block.weight = nn.Parameter(torch.rand(6, 5).T)
        self.register_buffer("channels_last", torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("expanded", torch.rand(1, 3).expand(4, 3))
        self.register_buffer("strided", torch.rand(10)[::2])


@module("plain", differs={})
class ExpandedParameter(Small):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1, 1).expand(4, 5), requires_grad=False)


@module()
class Frozen(Small):
    def __init__(self) -> None:
        super().__init__()
        self.inp.requires_grad_(False)


@module("plain", "fsdp2")
class AllFrozen(Small):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


@module()
class EmptyTensors(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("rows", torch.zeros(3, 0, 2, dtype=torch.bfloat16))
        self.register_buffer("scalar", torch.rand(()))


DTYPES = [
    "float64", "float16", "bfloat16", "complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e8m0fnu", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "bool", "float4_e2m1fn_x2",
]  # fmt: skip


class OfDtype(nn.Linear):
    """A frozen parameter and a buffer of the dtype, and a trained one where there is training in it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(6, 5)
        bits = torch.randint(0, 2, (4, 16 * dtype.itemsize), dtype=torch.uint8)
        value = bits.view(dtype)
        self.frozen = nn.Parameter(value.clone(), requires_grad=False)
        self.register_buffer("buffer", value.flip(0) if dtype.itemsize > 1 else value.clone())
        if dtype.is_complex and dtype.itemsize > 4:
            self.trained = nn.Parameter(torch.rand(5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * self.trained if hasattr(self, "trained") else y


for name in DTYPES:
    MODULES[f"Dtype_{name}"] = ModuleEntry(
        lambda name=name: Small(OfDtype(getattr(torch, name))),
        ("plain", "fsdp2") if name in ("float8_e4m3fn", "int8", "bool") else ("plain",),
    )


@module("plain", "fsdp2")
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


@module("plain")
def SavedInBFloat16LoadedInFloat() -> nn.Module:
    return TrainedInBFloat16() if to_be_saved() else Small()


@module("plain")
def SavedInFloatLoadedInBFloat16() -> nn.Module:
    return Small() if to_be_saved() else TrainedInBFloat16()


@module("plain")
class ParameterOfTwoTensors(Small):
    """A wrapper subclass: it has no memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block.weight = nn.Parameter(TwoTensor(torch.rand(5, 6), torch.rand(5, 6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.block.weight
        return nn.functional.linear(torch.relu(self.inp(x)), weight.a + weight.b, self.block.bias)


@module("plain")
class BufferOfTwoTensors(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("two", TwoTensor(torch.rand(3), torch.rand(3)))


class PlainSubclass(torch.Tensor):
    """A subclass with memory of its own."""


@module("plain")
class BufferOfASubclass(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sub", torch.rand(3).as_subclass(PlainSubclass))


@module("plain")
class QuantizedBuffer(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("q", torch.quantize_per_tensor(torch.rand(4, 3), 0.1, 3, torch.qint8))


@module("plain")
class QuantizedPerChannelBuffer(Small):
    def __init__(self) -> None:
        super().__init__()
        scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
        self.register_buffer("q", torch.quantize_per_channel(torch.rand(2, 3), scales, zeros, 0, torch.quint8))


@module("plain")
def QuantizedDynamically() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Small(torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 5)), {nn.Linear}))


@module("plain")
class SparseBuffer(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sparse", torch.rand(4, 4).relu().to_sparse())


@module("plain")
class JaggedBuffer(Small):
    def __init__(self) -> None:
        super().__init__()
        rows = [torch.rand(2, 3), torch.rand(4, 3)]
        self.register_buffer("jagged", torch.nested.nested_tensor(rows, layout=torch.jagged))


@module("plain")
class NestedBuffer(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nested", torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)]))


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


@module(*WHOLE)
class CachedInverse(Small):
    """Kept as an attribute, and rebuilt where torch says that a load has ended."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))
        self.mixing = nn.Parameter(torch.eye(6) + 0.1 * torch.rand(6, 6), requires_grad=False)
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
        for key in [key for key in state if key.startswith(f"{prefix}first.")]:
            state[key.replace("first.", "inp.")] = state.pop(key)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(torch.relu((self.first if hasattr(self, "first") else self.inp)(x)))


@module("plain")
def HasALayerThatWasNotSaved() -> nn.Module:
    small = Small()
    if not to_be_saved():
        small.extra = nn.Linear(2, 2)
    return small


@module("plain", differs=known.UNEXPECTED_KEYS)
def HasNotALayerThatWasSaved() -> nn.Module:
    small = Small()
    if to_be_saved():
        small.extra = nn.Linear(2, 2)
    return small


@module("plain")
def HasAnotherShapeThanWasSaved() -> nn.Module:
    return Small(nn.Linear(6, 3 + to_be_saved()))


@module("plain")
def SyncedMetric() -> nn.Module:
    """A metric that keeps its state in a list until it is asked, and saves it on request."""
    small = Small()
    small.metric = Metric()
    return small


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


@module("plain", "ddp")
def Lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = get_peft_model(
                Small(), LoraConfig(r=2, target_modules=["inp", "block"], init_lora_weights=False)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    return Wrapped()


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


@module("plain")
class EmaByHand(Small):
    """A copy that is no child, saved by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow = [copy.deepcopy(self.inp)]
        self._register_state_dict_hook(self.add)
        self.register_load_state_dict_pre_hook(self.take)

    @staticmethod
    def add(module: Any, state: Any, prefix: str, meta: Any) -> None:
        state |= {f"{prefix}shadow.{key}": value for key, value in module.shadow[0].state_dict().items()}

    @staticmethod
    def take(module: Any, state: Any, prefix: str, *_: Any) -> None:
        note("take", keys(state))
        names = [key for key in state if key.startswith(f"{prefix}shadow.")]
        module.shadow[0].load_state_dict({key.rpartition(".")[2]: state.pop(key) for key in names})
        module.shadow_bias = module.shadow[0].bias.detach().clone()


@module("plain")
class InAPlainList(Small):
    """Modules that torch does not know of: nobody saves them."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden = [nn.Linear(6, 6)]
        self._weights = {"w": nn.Parameter(torch.rand(3))}


def _compiled() -> nn.Module:
    return torch.compile(Small(), backend="eager")


def _compiled_in_place() -> nn.Module:
    small = Small()
    small.block.compile(backend="eager")
    return small


def _compiled_child() -> nn.Module:
    return Small(torch.compile(nn.Linear(6, 5), backend="eager"))


class ParameterContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.rand(6), nn.Parameter(torch.rand(6, 5))])
        self.named = nn.ParameterDict({"a b": torch.rand(5), "ü": torch.rand(5)})
        self.layers = nn.ModuleDict({"0": nn.Linear(5, 5), "module": nn.Linear(5, 5)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.listed[0]) @ self.listed[1] * self.named["a b"] + self.named["ü"]
        return self.layers["module"](self.layers["0"](y))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv1d(1, 3, 2), nn.InstanceNorm1d(3, affine=True, track_running_stats=True))
        self.block.append(nn.BatchNorm1d(3, momentum=None)).to(memory_format=torch.preserve_format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x[:, None])


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.block = kind(6, 5, num_layers=2, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x[None])[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
        self.register_buffer("mask", torch.ones(4, 4).tril() == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x[None], src_mask=self.mask)[0]


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6, padding_idx=0, max_norm=1.0)
        self.bag = nn.EmbeddingBag(7, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = (x.abs() * 3).long().clamp(max=6)
        return self.words(where).sum(1) + self.bag(where) * x


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


@module("plain")
def PrunedWeight() -> nn.Module:
    small = Small()
    prune.random_unstructured(small.block, "weight", amount=0.5)
    return small


PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "BatchNorm": (lambda: Small(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))), ALL),
    "BatchNormWithoutStatistics": (lambda: Small(nn.BatchNorm1d(6, track_running_stats=False)), ALL),
    "Images": (Images, ALL),
    "Lstm": (lambda: Recurrent(nn.LSTM), WHOLE),
    "Gru": (lambda: Recurrent(nn.GRU), WHOLE),
    "Attention": (Attention, ALL),
    "Embeddings": (Embeddings, WHOLE),
    "ParameterContainers": (ParameterContainers, ALL),
    "OddNames": (OddNames, ALL),
    "Parametrized": (_parametrized(lambda m: parametrize.register_parametrization(m, "weight", Symmetric())), WHOLE),
    "Orthogonal": (_parametrized(parametrizations.orthogonal), ("plain",)),
    "WeightNorm": (_parametrized(parametrizations.weight_norm), WHOLE),
    "WeightNormByHooks": (_parametrized(torch.nn.utils.weight_norm), ("plain",)),
    "SpectralNorm": (_parametrized(parametrizations.spectral_norm), WHOLE),
    "SpectralNormByHooks": (_parametrized(torch.nn.utils.spectral_norm), ("plain",)),
    "Compiled": (_compiled, ("plain",)),
    "CompiledInPlace": (_compiled_in_place, ("plain",)),
    "CompiledChild": (_compiled_child, ("plain",)),
    "ActivationCheckpointing": (lambda: Small(checkpoint_wrapper(nn.Linear(6, 5))), ALL),
    "Identity": (nn.Identity, ("plain",)),
    "NoParameters": (lambda: Small(nn.Dropout(0.5)), ALL),
    "Sequential": (lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 2, bias=False)), ALL),
    "OneLayer": (lambda: nn.Linear(6, 2), ("plain", "ddp", "fsdp2", "fsdp2@3", "fsdp1")),
    "FewerRowsThanRanks": (lambda: Small(nn.Linear(6, 1)), ("fsdp2", "fsdp2@3", "fsdp1")),
}
MODULES.update({name: ModuleEntry(make, layouts) for name, (make, layouts) in PLAIN.items()})
