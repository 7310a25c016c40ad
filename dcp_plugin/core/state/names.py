"""Fully qualified names (FQNs) of the unwrapped module, and the module that an optimizer trains.

FSDP1, activation checkpointing, ``torch.compile`` and DDP each insert a segment into the names of the modules that they
wrap. The first three insert names that no user module has, which are removed everywhere. DDP's ``module`` is removed
only at the position of a DDP instance, since user modules may have the name as well.

Optimizer state is named by the FQN of the parameter, so an optimizer needs one module that has all of its parameters.
If the state has no such module, :func:`trained_module` composes one from the state, without copies:

| parameters                                | their names                          |
|-------------------------------------------|--------------------------------------|
| of a module of the state (``gen``)        | ``gen.0.weight``: its name in front  |
| in no module (a temperature, for one)     | ``loose.<group>.<position>``         |

A save and a load derive the same names if the state has the same names for its modules, and the groups the same order.

:func:`module_cache` keeps the result of walking a module tree for the time of one save. Names, wrappers, annotations
and trained parameters each need a walk. A walk through a large model takes a large part of the time of a lazy save.

Tensors are marked as replicated or frozen here as well, since both follow from names and wrappers. Replicated tensors
are equal on all ranks, so ranks share the writing of them. These are the parameters under DDP, and state of their shape
in an optimizer of torch. Buffers are not replicated, since each rank has its own between two forward passes. Neither is
the state of other optimizers, which may round randomly on each rank: shared writing would mix the rows of several
ranks, so rank 0's state is stored.

Frozen tensors are untrained parameters. They are expected to be the same at the next save.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dcp_plugin.core.errors import CheckpointMismatch
from dcp_plugin.core.tensors._torch import DTensor, ShardedTensor, is_tensor, sharded_value
from dcp_plugin.core.tensors._torch_modules import is_of_torch, own_parameters, parameters_in, reparametrized, union_of
from dcp_plugin.core.tensors.kinds import EXACTLY_TENSORS
from dcp_plugin.core.types import ShardedValue

_WRAPPER_SEGMENTS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
_ANY_OF_THEM = "|".join(sorted(_WRAPPER_SEGMENTS))
_AS_A_SEGMENT = re.compile(rf"^(?:(?:{_ANY_OF_THEM})(?:\.|$))+|\.(?:{_ANY_OF_THEM})(?=\.|$)")


class CleanNames:
    """Map from the names that a wrapped module gives to its parameters and state to clean names."""

    def __init__(self, module: nn.Module) -> None:
        # Outermost first: the prefix of an inner wrapper is clean only after the segment of the outer wrapper is
        # removed.
        self._ddp_prefixes: list[str] = []
        for name in sorted(ddp_names(module), key=len):
            clean = self(name)
            self._ddp_prefixes.append(f"{clean}.module." if clean else "module.")

    def __call__(self, name: str) -> str:
        name = without_wrappers(name)
        for prefix in self._ddp_prefixes:
            if (name + ".").startswith(prefix):
                name = (prefix.removesuffix("module.") + name[len(prefix) :]).removesuffix(".")
        return name

    def of_each(self, names: list[str]) -> list[str]:
        """Return the clean names. One search finds that none of thousands needs a change, as without wrappers."""
        is_clean = not self._ddp_prefixes and _AS_A_SEGMENT.search(".".join(names)) is None
        return names if is_clean else list(map(self, names))


@dataclass(frozen=True)
class OwnNames:
    """Names that a module's own ``state_dict()`` has in place of clean FQNs, for example below a compiled part."""

    inside: Mapping[str, str] = field(default_factory=dict)
    """Clean prefix -> the other prefix in ``state_dict()``: ``{"net.": "net._orig_mod."}``."""

    @classmethod
    def of(cls, own: Mapping[str, str]) -> OwnNames:
        """Return the names of a module, given its own name for each clean FQN."""
        inside = {}
        for clean, name in own.items():
            if clean != name:
                # Both names have the same end. Without it, the prefix holds for all names below.
                steps = zip(reversed(clean.split(".")), reversed(name.split(".")), strict=False)
                same = [step for step, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], steps)]
                end = ".".join(reversed(same))
                inside[clean.removesuffix(end)] = name.removesuffix(end)
        return cls(inside)

    def own(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state dict with the module's own names in place of clean ones."""
        return {_moved(name, self.inside): value for name, value in state.items()} if self.inside else state

    def clean(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state dict with clean names in place of the module's own. A clean name stays.

        Raises:
            CheckpointMismatch: Two names would become one.
        """
        if not self.inside:
            return state
        prefixes, names = {own: clean for clean, own in self.inside.items()}, dict[str, str]()
        for name in state:
            if (other := names.setdefault(_moved(name, prefixes), name)) != name:
                raise CheckpointMismatch(
                    f"the state_dict of this checkpoint has the keys {other} and {name}, which are two names of one "
                    "value. Have the hook that wrote them remove one."
                )
        return {clean: state[name] for clean, name in names.items()}


def _moved(name: str, prefixes: Mapping[str, str]) -> str:
    longest = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
    return prefixes.get(longest, longest) + name[len(longest) :]


def is_ddp(module: nn.Module) -> bool:
    """Return whether a module is DDP. ``isinstance`` takes five times as long with its abstract base class."""
    return DistributedDataParallel in type(module).__mro__


def ddp_names(module: nn.Module) -> list[str]:
    """Return the names of the DDP instances in a module."""
    return _once("DDP", module, lambda: [name for name, child in named_modules(module) if is_ddp(child)])


def contains_fsdp1(module: nn.Module) -> bool:
    return _once(
        "FSDP1",
        module,
        lambda: any(isinstance(child, FullyShardedDataParallel) for _, child in named_modules(module)),
    )


def without_wrappers(name: str) -> str:
    """Return a name without the segments that only wrappers insert."""
    return _AS_A_SEGMENT.sub("", name)


def unwrapped(module: nn.Module) -> list[nn.Module]:
    """Return the module, the module that it wraps, and so on; the last is the user's own."""
    chain = [module]
    while True:
        inner = [child for name, child in chain[-1].named_children() if name in _WRAPPER_SEGMENTS]
        if isinstance(chain[-1], DistributedDataParallel):
            inner = [chain[-1].module]
        if not inner:
            return chain
        chain += inner[:1]


def parameter_names(module: nn.Module) -> dict[int, list[str]]:
    """Return the clean FQNs of every parameter by ``id``. A flat parameter of FSDP1 has those of its parts, any other
    parameter its first name."""
    own = [(id(p), prefix, getattr(p, "_fqns", (name,))) for prefix, name, p in _each_parameter(module)]
    names = iter(CleanNames(module).of_each([prefix + inner for _, prefix, inside in own for inner in inside]))
    return {parameter: list(itertools.islice(names, len(inside))) for parameter, _, inside in own}


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter by clean FQN, a tied parameter by its first name."""
    clean = CleanNames(module)
    return {clean(prefix + name): parameter for prefix, name, parameter in _each_parameter(module)}


def _each_parameter(module: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield each parameter once: the prefix of the first submodule that has it, its name there, and the parameter."""
    seen: set[int] = set()
    for path, child in named_modules(module):
        prefix = f"{path}." if path else ""
        for name, parameter in own_parameters(child):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix, name, parameter


T = TypeVar("T")

_cached: ContextVar[dict[tuple[str, int], tuple[nn.Module, Any]] | None] = ContextVar("dcp_cached", default=None)
"""Results by question and ``id`` of the module, with the module itself, so that no other module gets its ``id``."""


def _once(question: str, module: nn.Module, find: Callable[[], T]) -> T:
    """Return the result of ``find``. Inside :func:`module_cache` it is computed only once.

    The result may depend on the classes and names of submodules, but not on parameters: FSDP2, and hooks that make a
    state dict, may exchange parameters meanwhile.
    """
    cache = _cached.get()
    if cache is None:
        return find()
    if (question, id(module)) not in cache:
        cache[question, id(module)] = module, find()
    return cast(T, cache[question, id(module)][1])


def named_modules(module: nn.Module) -> Sequence[tuple[str, nn.Module]]:
    """Return ``module.named_modules()``, from the cache inside :func:`module_cache`."""
    return _once("modules", module, lambda: tuple(module.named_modules()))


@contextmanager
def module_cache() -> Iterator[None]:
    """Walk each module tree at most once in this context, in which no module may be added or removed."""
    before = _cached.set({})
    try:
        yield
    finally:
        _cached.reset(before)


class Parts(nn.Module):
    """Modules that are one model, as the stages that an interleaved pipeline has on one rank.

    The module has no name of its own in front of the names of a part, so the keys are the FQNs of the complete model.
    torchtitan's wrappers of lists store the same keys.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = tuple(parts)  # a tuple: in a ModuleList, the names of the parts would begin with numbers

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        """Yield the modules of all parts. The names of parameters and buffers follow from theirs."""
        memo = set() if memo is None else memo
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {key: value for part in self.parts for key, value in part.state_dict(*args, **kwargs).items()}


def is_list_of(value: Any, *classes: type) -> bool:
    """Return whether a value is a list or a tuple of objects of one of the classes. An empty list is a value."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and any(all(isinstance(each, cls) for each in value) for cls in classes)
    )


def pruned_names(module: nn.Module) -> dict[str, str]:
    """Return the plain name (``l.weight``) of each parameter that torch's pruning or a parametrization has renamed
    (``l.weight_orig``). Both are clean FQNs."""
    clean, of_each = CleanNames(module), ((path, reparametrized(child)) for path, child in named_modules(module))
    return {
        clean(f"{path}.{own}".removeprefix(".")): clean(f"{path}.{plain}".removeprefix("."))
        for path, names in of_each
        for own, plain in names.items()
    }


LOOSE = "loose"


def trained_module(
    name: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module], state: Mapping[str, Any]
) -> nn.Module:
    """Return the module that has all parameters of an optimizer, composed from several modules if none has them all.

    An optimizer that contains other optimizers may list no parameters. It trains any of the modules.

    Raises:
        CheckpointMismatch: The state has none of the parameters, for example because the optimizer was made before the
            module was wrapped. Or several modules have them, and one contains FSDP1, whose optimizer state can only be
            gathered through its own root. Or a module has the reserved name under which loose parameters are stored.
    """
    if not hasattr(optimizer, "param_groups"):
        return next(iter(modules.values())) if len(modules) == 1 else union_of(modules, {})
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing, members = set(trained), dict[str, nn.Module]()
    for member, module in modules.items():
        own = set(map(id, parameters_in(child for _, child in named_modules(module))))
        # Parts of FSDP1 have several roots, so an optimizer of a list of them is refused below.
        if trained <= own and not (isinstance(module, Parts) and contains_fsdp1(module)):
            return module
        if shared := missing & own:
            members[member] = module
            missing -= shared
    is_in_state = bool(members) or not missing.isdisjoint(map(id, _tensors(state)))
    if not is_in_state or any(map(contains_fsdp1, members.values())):
        raise CheckpointMismatch(
            f"no module of the state has all parameters of the optimizer {name!r} (its modules: "
            f"{', '.join(modules) or 'none'}). Add the module to the state, under any name. If several modules share "
            f"an optimizer, put them into one nn.ModuleDict; modules that contain FSDP1 and are in a list each need a "
            f"name of their own. Make the optimizer after wrapping the module."
        )
    loose = {fqn: parameter for fqn, parameter in _by_place(optimizer).items() if id(parameter) in missing}
    if loose and LOOSE in members:
        raise CheckpointMismatch(
            f"a module of the state has the name {LOOSE!r}, under which the optimizer {name!r} stores its state of "
            f"parameters that are in no module. Rename the module."
        )
    return union_of(members, loose)


def loose_module(optimizer: torch.optim.Optimizer) -> nn.Module:
    """Return a module that names all parameters of an optimizer as those of no module."""
    return union_of({}, _by_place(optimizer))


def is_of_no_module(keys: Iterable[str]) -> bool:
    """Return whether an optimizer's stored keys are those of parameters of no module (:func:`loose_module`)."""
    return all(key.split(".")[1:2] == [LOOSE] for key in keys)


def _by_place(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    return {
        f"{LOOSE}.{number}.{position}": parameter
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, (Mapping, list, tuple)):
        for child in node.values() if isinstance(node, Mapping) else node:
            yield from _tensors(child)


def mark_parameters(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a module with the replicated and the frozen parameters marked."""
    shapes, frozen = _replicated(module), frozen_names(module)
    state = state | {key: _marked(state[key]) for key in shapes if _is_replica(state.get(key), shapes[key])}
    return state | {key: _as_frozen(state[key]) for key in frozen & state.keys()}


def frozen_names(module: nn.Module) -> set[str]:
    """Return the clean FQNs of the parameters that are not trained, tied ones under each of their names."""
    if all(parameter.requires_grad for parameter in parameters_in(child for _, child in named_modules(module))):
        return set()
    names, clean = parameter_names(module), CleanNames(module)
    return {
        fqn
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
        for fqn in (clean(name), *names[id(parameter)])
    }


def layout_of(leaf: Any) -> str:
    """Return how a tensor is distributed, in words."""
    if isinstance(leaf, DTensor):
        mesh = f"{tuple(leaf.device_mesh.shape)} {leaf.device_mesh.mesh_dim_names or ''}".strip()
        return f"DTensor on mesh {mesh}, {', '.join(map(str, leaf.placements))}"
    if isinstance(leaf, ShardedTensor):
        return "ShardedTensor (FSDP1)"
    return leaf.layout if isinstance(leaf, ShardedValue) else "replicated or single"


def _as_frozen(value: Any) -> Any:
    if isinstance(value, ShardedValue):
        return replace(value, frozen=True)
    try:
        return replace(sharded_value(value), frozen=True, layout=layout_of(value)) if is_tensor(value) else value
    except CheckpointMismatch:  # raised later, when the save describes all tensors
        return value


def mark_slots(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the flat state of an optimizer with the slots of replicated parameters marked."""
    shapes = _replicated(module) if is_of_torch(optimizer) else {}
    if not shapes:
        return state
    # Keys are ``state.<FQN>.<slot>``.
    fqn_of = {key: key[6:].rpartition(".")[0] for key in state if key.startswith("state.")}
    replicas = (key for key, fqn in fqn_of.items() if _is_replica(state[key], shapes.get(fqn)))
    return state | {key: _marked(state[key]) for key in replicas}


def _replicated(module: nn.Module) -> dict[str, torch.Size]:
    if not ddp_names(module):
        return {}
    clean = CleanNames(module)
    inside = {
        clean(f"{prefix}.{name}" if prefix else name)
        for prefix, child in named_modules(module)
        if is_ddp(child)
        for name, _ in child.named_parameters(remove_duplicate=False)
    }
    return {name: p.shape for name, p in parameters_by_name(module).items() if name in inside}


def _is_replica(value: Any, shape: torch.Size | None) -> bool:
    return type(value) in EXACTLY_TENSORS and not value.is_nested and value.shape == shape


def _marked(value: Any) -> Any:
    try:
        return replace(sharded_value(value, any_rank=True), origin=value)
    except CheckpointMismatch:
        return value
