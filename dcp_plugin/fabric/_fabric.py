"""The one place for what is private in Lightning Fabric, each with the reason.

Fabric comes in two packages of different classes: ``lightning.fabric`` and ``lightning_fabric`` (the one below
``pytorch_lightning``). Which one an object belongs to is read from its class, so neither has to be installed.

``tests/fabric/test_canaries.py`` fails loudly when one of these moves or changes its meaning.
"""

from __future__ import annotations

import importlib
from typing import Any

PACKAGES = ("lightning.fabric", "lightning_fabric")
SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
UNSUPPORTED = ("DeepSpeedStrategy", "SingleDeviceXLAStrategy", "XLAStrategy", "XLAFSDPStrategy")
SHARDED = ("FSDPStrategy", "ModelParallelStrategy")


def package_of(cls: type) -> str | None:
    """The Fabric package that a class, or the first of its bases that does, comes from."""
    modules = [base.__module__ for base in cls.__mro__]
    found = [package for module in modules for package in PACKAGES if f"{module}.".startswith(f"{package}.")]
    return found[0] if found else None


def is_fabric(value: object) -> bool:
    package = package_of(type(value))
    return package is not None and isinstance(value, importlib.import_module(package).Fabric)


def is_strategy(cls: type, names: tuple[str, ...]) -> bool:
    """Whether a class is one of Fabric's strategies with these names, or derives from one."""
    package = package_of(cls)
    if package is None:
        return False
    strategies = importlib.import_module(f"{package}.strategies")
    return issubclass(cls, tuple(getattr(strategies, name) for name in names))


def inside_distributed_sampler(sampler: Any) -> Any:
    """The user's sampler, which Fabric wraps on several ranks; None if this is not Fabric's wrapper."""
    kinds = [base.__name__ for base in type(sampler).__mro__ if package_of(base) is not None]
    return sampler.dataset._sampler if "DistributedSamplerWrapper" in kinds else None


def plugin_of(strategy: Any) -> Any:
    """The ``CheckpointIO`` of a strategy; FSDP and ModelParallel have none, and raise when they are asked."""
    try:
        return strategy.checkpoint_io
    except NotImplementedError:
        return None


def unwrapped(fabric: Any, objects: dict[str, Any]) -> dict[str, Any]:
    """What the strategy has made of modules, without Fabric's own wrapper, whose state dict under FSDP1 is not that of
    the shards. ``fabric.load`` does the same; the function is not public."""
    wrappers = importlib.import_module(f"{package_of(type(fabric))}.wrappers")
    return dict(wrappers._unwrap_objects(objects))
