"""Private names of ``nn.Module`` and ``Optimizer``, each with the reason why no public name suffices.

The public ``nn.Module.load_state_dict`` requires a state dict of the complete module. A load of this package fills the
memory of parameters in place. It therefore walks the modules itself and calls their hooks.
``tests/core/tensors/test_torch_canary.py`` fails when a name moves or changes its meaning.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import _patched_state_dict
from torch.nn.modules.module import _IncompatibleKeys  # the argument of post-load hooks
from torch.nn.utils import parametrize

from dcp_plugin.core.errors import CheckpointMismatch


@dataclass
class Incompatible:
    """Findings of a load: missing keys, unexpected keys, and error messages."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def checkpointable_parameters(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters with the fields of ``CheckpointableTensor``, which are rare.

    Raises:
        CheckpointMismatch: A parameter is DeepSpeed's: with ZeRO-3 it has no elements between two steps.
    """
    return [
        (f"{prefix}.{name}" if prefix else name, refuse_deepspeed(name, parameter))
        for prefix, module in modules
        for name, parameter in module._parameters.items()
        if (hasattr(parameter, "global_shape") or hasattr(parameter, "ds_id")) and parameter is not None
    ]


_OF_DEEPSPEED = re.compile(r"deepspeed\.runtime\.(.*engine|zero|bf16_optimizer|fp16)\b")


def refuse_deepspeed(name: str, value: Any) -> Any:
    """Return a value of the state, unless it belongs to an engine of DeepSpeed.

    DeepSpeed's schedulers, and its optimizers outside of an engine such as FusedAdam, are returned as well.

    Raises:
        CheckpointMismatch: The value is an engine, or a parameter or an optimizer of an engine.
    """
    if hasattr(value, "ds_id") or any(_OF_DEEPSPEED.match(cls.__module__) for cls in type(value).__mro__):
        raise CheckpointMismatch(
            f"{name!r}, a {type(value).__name__}, is DeepSpeed's, whose engine owns weights and optimizer state, and "
            f"has parts of them elsewhere. Save with engine.save_checkpoint(path) and resume with "
            f"engine.load_checkpoint(path), or train with fully_shard (FSDP2)."
        )
    return value


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return ``named_parameters(recurse=False)`` in a tenth of the time: a save calls it several times per module."""
    return [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the own parameters of each module, in one pass: a save asks for those of thousands of modules."""
    return [parameter for module in modules for parameter in module._parameters.values() if parameter is not None]


def buffers_in(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the own buffers of each module, as :func:`parameters_in`."""
    return [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]


def own_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return all children by name, with every name of a child.

    ``named_children()`` leaves out the second name of a child, which ``load_state_dict`` requires.
    """
    return ((name, child) for name, child in module._modules.items() if child is not None)


def union_of(modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return a module with these children and parameters.

    The public ``add_module`` refuses names with dots, and names of methods.
    """
    union = nn.Module()
    union._modules.update(modules)
    union._parameters.update(parameters)
    return union


def own_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a module without its children.

    Torch has no public list of the persistent buffers.
    """
    return dict(own_parameters(module)) | {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def reparametrized(module: nn.Module) -> dict[str, str]:
    """Return the name of each parameter of a module itself that prunes or parametrizes another -> the plain name.

    Pruning and ``parametrize`` replace a parameter by a function of a new one, such as ``weight`` by a function of
    ``weight_orig``. Torch has no public list of the pruned names.
    """
    prune: Any = sys.modules.get("torch.nn.utils.prune")  # no module is pruned before this is imported
    hooks = module._forward_pre_hooks.values() if prune else ()
    pruned = [hook._tensor_name for hook in hooks if isinstance(hook, prune.BasePruningMethod)]
    parametrized: Any = module.parametrizations if parametrize.is_parametrized(module) else ()
    own = {f"parametrizations.{name}.original": name for name in parametrized}
    return {f"{name}_orig": name for name in pruned} | own


# The steps of ``nn.Module.load_state_dict`` for one module.

_NEED_NO_STATE_DICT = (
    nn.Module._load_from_state_dict,
    nn.modules.batchnorm._NormBase._load_from_state_dict,  # for files from before torch 0.4.1
    nn.modules.instancenorm._InstanceNorm._load_from_state_dict,  # refuses keys that it does not have
)
_HARMLESS_HOOKS = {
    # FSDP2 puts the sharded parameters back in place before a load, and inspects them again after the load.
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group",
     "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam.__init__.<locals>.<lambda>"),
    # Activation checkpointing inserts its segment into the keys.
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper._pre_load_state_dict_hook"),
    # Ours waits for a copy. A load has waited before it reads.
    ("dcp_plugin.core.staging.guard", "_before_load"),
}  # fmt: skip
"""Hooks, by module and name, that change nothing if a load fills the memory of the parameters."""


_OPTIMIZER_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


_DELEGATING = {
    ("accelerate.optimizer", "AcceleratedOptimizer"),
    ("lightning.fabric.wrappers", "_FabricOptimizer"),
    ("lightning_fabric.wrappers", "_FabricOptimizer"),
    ("lightning.pytorch.core.optimizer", "LightningOptimizer"),
    ("pytorch_lightning.core.optimizer", "LightningOptimizer"),
}
"""Wrappers without state. They are compared by name, so that no framework is imported."""


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the user's optimizer inside of the wrappers of Accelerate, Fabric and Lightning.

    For a ZeroRedundancyOptimizer, return the optimizer of this rank, with the groups of all ranks.

    Raises:
        CheckpointMismatch: A ZeroRedundancyOptimizer has no optimizer of torch's layout on this rank.
    """
    while any((cls.__module__, cls.__qualname__) in _DELEGATING for cls in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    is_zero = any(cls.__qualname__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)
    return _with_all_groups(optimizer) if is_zero else optimizer  # type: ignore[no-any-return]


def _with_all_groups(zero: Any) -> Any:
    """Return the optimizer that a ZeroRedundancyOptimizer has on this rank, with the groups of all ranks.

    The ``state_dict`` of a ZeroRedundancyOptimizer first sends the state of all ranks to one rank. The result shares
    state and groups with it. ``owned`` has the ids of the parameters whose state is on this rank.
    """
    local = getattr(zero, "optim", None)
    if local is None or has_own_state_dict(local):
        raise CheckpointMismatch(
            f"a ZeroRedundancyOptimizer has {'no state yet' if local is None else f'a {type(local).__name__}'}: it can "
            f"be saved and loaded after DDP has built its buckets, over an optimizer with torch's state_dict"
        )
    whole = object.__new__(type(local))
    owned = {id(parameter) for group in local.param_groups for parameter in group["params"]}
    vars(whole).update(vars(local), param_groups=zero.param_groups, owned=owned)
    return whole


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether custom code, an override or a hook, makes or takes the state dict of an optimizer.

    Torch has no public list of the hooks.
    """
    for method in ("state_dict", "load_state_dict"):
        if overrides_on_instance(optimizer, method) or getattr(type(optimizer), method) is not getattr(
            torch.optim.Optimizer, method
        ):
            return True
    return any(getattr(optimizer, hooks, None) for hooks in _OPTIMIZER_HOOKS)


def new_state(optimizer: Any, parameter: Any, slot: str) -> Any:
    """Return the tensor that a low-bit optimizer of torchao makes for a slot at its first step; None for others.

    torchao has no public function for it. The last argument is False for averages of squares, which have no sign.
    """
    has_constructor = any(cls.__module__.startswith("torchao.") for cls in type(optimizer).__mro__)
    make = getattr(optimizer, "_new_buffer", None) if has_constructor else None
    return None if make is None else make(parameter, slot == "exp_avg")


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's class is torch's, so that its behaviour is known.

    A subclass outside of torch may do anything.
    """
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


_SLOTS_OF_TORCH: dict[type[optim.Optimizer], set[str]] = {
    optim.ASGD: {"step", "eta", "mu", "ax"},
    optim.Adadelta: {"step", "square_avg", "acc_delta"},
    optim.Adafactor: {"step"},
    optim.Adagrad: {"step", "sum"},
    optim.Adam: {"step", "exp_avg", "exp_avg_sq"},
    optim.Adamax: {"step", "exp_avg", "exp_inf"},
    optim.LBFGS: {"func_evals", "n_iter"},
    optim.Muon: {"momentum_buffer"},
    optim.NAdam: {"step", "exp_avg", "exp_avg_sq", "mu_product"},
    optim.RAdam: {"step", "exp_avg", "exp_avg_sq"},
    optim.RMSprop: {"step", "square_avg"},
    optim.Rprop: {"step", "prev", "step_size"},
    optim.SGD: set(),
    optim.SparseAdam: {"step", "exp_avg", "exp_avg_sq"},
}
"""State that torch's optimizers keep for every parameter, with any options. Torch has no public list of these slots,
and a step of an optimizer to find them would run global hooks."""


def slots_of_torch(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """Return the slots that an optimizer keeps for every parameter; None if its ``step`` is not torch's.

    Torch wraps ``step`` of a class when the first instance is made, so the functions inside the wrappers are compared.
    """
    step = inspect.unwrap(type(optimizer).step)
    return next((slots for cls, slots in _SLOTS_OF_TORCH.items() if inspect.unwrap(cls.step) is step), None)


def overrides_load_state_dict(module: nn.Module) -> bool:
    """Return whether a module has a ``load_state_dict`` that is not torch's."""
    return type(module).load_state_dict is not nn.Module.load_state_dict or overrides_on_instance(
        module, "load_state_dict"
    )


def overrides_state_dict(module: nn.Module) -> bool:
    """Return whether a module has a ``state_dict`` or a ``load_state_dict`` that is not torch's."""
    return (
        type(module).state_dict is not nn.Module.state_dict
        or overrides_on_instance(module, "state_dict")
        or overrides_load_state_dict(module)
    )


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes the keyword argument ``name``."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


# torch's ``_patch_model_state_dict`` and ``_patch_optimizer_state_dict`` replace ``state_dict`` and ``load_state_dict``
# of an instance. The new functions return parameter names and sharded tensors. The adapters of this package do the same
# work on the unpatched instance: the functions take no further arguments, and FSDP1 gathers nothing from a patched
# optimizer.


def unpatched(owner: nn.Module | torch.optim.Optimizer, method: str) -> Callable[..., Any]:
    """Return a method of a module or an optimizer without torch's patch."""
    bound = getattr(owner, method)
    return getattr(type(owner), method).__get__(owner) if _is_patch(bound) else bound  # type: ignore[no-any-return]


def overrides_on_instance(owner: nn.Module | torch.optim.Optimizer, method: str) -> bool:
    """Return whether a method is set on the instance by code other than torch's patch."""
    return method in vars(owner) and not _is_patch(vars(owner)[method])


def patched_together(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers whose states ``optimizer.state_dict()`` returns together because torch has patched them."""
    patch: Any = vars(optimizer).get("state_dict")
    if not _is_patch(patch):
        return ()
    # The patch is a closure over a partial call, which alone knows the optimizers.
    optimizers = inspect.getclosurevars(patch).nonlocals["_state_dict_call"].keywords["optimizers"]
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


def _is_patch(method: Any) -> bool:
    return type(method) is FunctionType and method in _patched_state_dict


def takes_state_dict(module: nn.Module) -> bool:
    """Return whether code of the module sees the state dict during a load, and may therefore change loaded values."""
    if type(module)._load_from_state_dict not in _NEED_NO_STATE_DICT or "_load_from_state_dict" in vars(module):
        return True
    return any(not _is_harmless(getattr(hook, "hook", hook)) for hook in module._load_state_dict_pre_hooks.values())


def load_from_state_dict(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, incompatible: Incompatible
) -> None:
    """Load one module without its children, and run its pre-hooks. Add misfits to ``incompatible``."""
    found = incompatible.missing, incompatible.unexpected, incompatible.errors
    try:
        module._load_from_state_dict(state, prefix, metadata, True, *found)
    except RuntimeError as error:
        if not type(module).__module__.startswith("bitsandbytes."):
            raise
        incompatible.errors.append(
            f"{prefix}weight is a quantized weight of bitsandbytes, which the layer takes only after it is on its "
            f"device and before its first forward pass: load it there ({error})"
        )


def restore_quantization(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Give the 4-bit weights of bitsandbytes their quantization state, which its layers save and do not load.

    Args:
        values: Loaded values by their key in ``state_dict()``, also those of other modules.
    """
    for name, parameter in module.named_parameters():
        own = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
        if hasattr(parameter, "quant_state") and any(key.startswith("quant_state.") for key in own):
            made = type(parameter.quant_state).from_dict(own, parameter.device)
            vars(parameter.quant_state).update(vars(made))  # the layer holds the same object


def pre_load_hooks(module: nn.Module) -> dict[int, Callable[..., None]]:
    """Return the hooks that run before a module is loaded, also as a part of an outer one, by the id of their handle.

    The public ``register_load_state_dict_pre_hook`` makes a wrapper and a handle for each module. They take a tenth of
    the time of a lazy save.
    """
    return module._load_state_dict_pre_hooks


def has_post_load_hooks(module: nn.Module) -> bool:
    """Return whether user code runs after a submodule was loaded."""
    return any(not _is_harmless(hook) for hook in module._load_state_dict_post_hooks.values())


def call_post_load_hooks(module: nn.Module, incompatible: Incompatible, of_torch_too: bool) -> None:
    """Call the hooks that run after a submodule was loaded. Hooks may change the missing and unexpected keys in place.

    Raises:
        AssertionError: A hook returns a value, which torch forbids as well.
    """
    keys = _IncompatibleKeys(incompatible.missing, incompatible.unexpected)
    for hook in tuple(module._load_state_dict_post_hooks.values()):
        if (of_torch_too or not _is_harmless(hook)) and hook(module, keys) is not None:
            raise AssertionError(
                f"the load_state_dict post hook {hook} has returned a value. It may only change the list of keys in "
                f"place"
            )


def has_extra_state(module: nn.Module) -> bool:
    cls = type(module)
    return (cls.get_extra_state, cls.set_extra_state) != (nn.Module.get_extra_state, nn.Module.set_extra_state)


_RESHARDS = "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook"


def reshard(modules: Iterable[nn.Module]) -> None:
    """Put the sharded parameters of FSDP2 modules back in place, as FSDP2 does before ``state_dict()``.

    The public ``FSDPModule.reshard`` does nothing after an exception in a forward pass.
    """
    for hook in [hook for module in modules for hook in module._state_dict_pre_hooks.values()]:
        if getattr(hook, "__qualname__", "") == _RESHARDS and _is_harmless(hook):
            hook()


def _is_harmless(hook: Any) -> bool:
    return (getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")) in _HARMLESS_HOOKS
