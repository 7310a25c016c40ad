"""Lightning's two packages of equal content and different classes, and subclasses of their strategies.

``lightning`` has ``lightning.pytorch`` and ``lightning.fabric``; the other package is ``pytorch_lightning`` with
``lightning_fabric``. The class of the object at hand determines the package, so neither package has to be installed,
and neither is imported before a Trainer or a Fabric exists. Users need some names (``DCPCallback``) before an object
exists. These are from the package that the program has imported.

A promoted strategy is a subclass of the user's own strategy class, with one base: Python changes the class of an
instance only to one of the same memory layout. Its methods forward to a :class:`StrategyAdapter`.

On several ranks, Lightning 2.6 wraps the shuffling sampler of ``StatefulDataLoader(dataset, shuffle=True)`` in a
sampler without state. Each iteration of the wrapper draws a new order from the inner sampler's generator. After a
resume in the middle of an epoch, such a loader would silently skip the right number of samples of the wrong order.
:class:`ResumableSampler` yields the same samples as Lightning's sampler, and has a position: it records the state of
the generator that gave the order of this epoch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

Method = TypeVar("Method", bound=Callable[..., Any])

SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
SHARDED = ("FSDPStrategy", "ModelParallelStrategy")
UNSUPPORTED = ("DeepSpeedStrategy", "SingleDeviceXLAStrategy", "XLAStrategy", "XLAFSDPStrategy")


@dataclass(frozen=True)
class Package:
    """One of Lightning's two packages. Each has its own Fabric, which defines ``CheckpointIO``."""

    name: str
    fabric_name: str
    classes: str
    """Our module of classes that derive from this package's classes."""

    @property
    def pytorch(self) -> Any:
        return importlib.import_module(self.name)

    @property
    def strategies(self) -> Any:
        return self.module("strategies")

    @property
    def fabric_imported(self) -> bool:
        return self.fabric_name in sys.modules

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.name}.{name}")

    def fabric(self, name: str) -> Any:
        return importlib.import_module(f"{self.fabric_name}.{name}")

    def load_options(self, weights_only: bool | None) -> dict[str, Any]:
        """Return ``weights_only`` as an argument of Lightning's methods that load. Lightning 2.5 takes none."""
        parameters = inspect.signature(self.fabric("strategies").Strategy.load_checkpoint).parameters
        return {"weights_only": weights_only} if "weights_only" in parameters else {}


LIGHTNING = Package("lightning.pytorch", "lightning.fabric", "dcp_plugin.lightning.of_lightning")
PYTORCH_LIGHTNING = Package("pytorch_lightning", "lightning_fabric", "dcp_plugin.lightning.of_pytorch_lightning")
PACKAGES = (LIGHTNING, PYTORCH_LIGHTNING)


def home_of(cls: type) -> Package | None:
    """Return the package that defines a class."""
    module = f"{cls.__module__}."
    return next((home for home in PACKAGES if module.startswith((f"{home.name}.", f"{home.fabric_name}."))), None)


def package_of(cls: type) -> Package | None:
    """Return the package that defines a class, or the first of its bases that either package defines."""
    return next((package for base in cls.__mro__ if (package := home_of(base)) is not None), None)


def package_behind(value: object) -> Package:
    """Return the package of a trainer, a strategy or a LightningModule."""
    package = package_of(type(value))
    assert package is not None, f"{type(value)} is not Lightning's"
    return package


def has_base(cls: type, *names: str) -> bool:
    """Return whether a class is, or derives from, a class of Lightning with one of these names, of either package."""
    return any(base.__name__ in names and home_of(base) is not None for base in cls.__mro__)


def has_fabric_base(cls: type, *names: str) -> bool:
    """Return whether a class is, or derives from, a class of Fabric with one of these names. Classes of
    ``lightning.pytorch`` may have the same names."""
    fabrics = tuple(f"{package.fabric_name}." for package in PACKAGES)
    return any(base.__name__ in names and f"{base.__module__}.".startswith(fabrics) for base in cls.__mro__)


def inside_distributed_sampler(sampler: Any) -> Any:
    """Return the user's sampler inside the wrapper that Lightning and Fabric use on several ranks; None without a
    wrapper. The wrapper has no public name for it."""
    return sampler.dataset._sampler if has_base(type(sampler), "DistributedSamplerWrapper") else None


def is_supported(cls: type, has: Callable[..., bool] = has_base) -> bool:
    """Return whether a class is a strategy whose state is in modules and optimizers alone, which the core saves.

    Args:
        has: :func:`has_base`, or :func:`has_fabric_base` for a strategy of Fabric.
    """
    return has(cls, *SUPPORTED) and not has(cls, *UNSUPPORTED)


def installed() -> list[Package]:
    """Return the packages that are installed.

    Raises:
        ImportError: Neither package is installed.
    """
    packages = [package for package in PACKAGES if importlib.util.find_spec(package.name.partition(".")[0]) is not None]
    if not packages:
        raise ImportError(
            "dcp_plugin.lightning needs Lightning, as `lightning` or as `pytorch_lightning`, and neither is installed: "
            'pip install "dcp-plugin[lightning]"'
        )
    return packages


def in_use() -> Package:
    """Return the package that the program has imported: ``lightning`` if both, the first installed one if neither."""
    return next((package for package in PACKAGES if package.name in sys.modules), installed()[0])


class StrategyAdapter:
    """Methods of a promoted strategy: those marked by :func:`override` replace the strategy's own.

    Args:
        strategy: The promoted strategy, whose ``dcp_adapter`` is this object.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    @property
    def keeps_shards(self) -> bool:
        """True if the full model may be too large for a rank."""
        return has_base(type(self.strategy), *SHARDED)

    @property
    def stock(self) -> Any:
        """The strategy's own methods, as ``super()`` gives them in a subclass."""
        return super(self.strategy.promoted_class, self.strategy)


def override(method: Method) -> Method:
    """Mark a method of an adapter: the promoted strategy's method of the same name forwards to it."""
    method.overrides_strategy = True  # type: ignore[attr-defined]
    return method


def promoted_class(base: type, adapter: type[StrategyAdapter], **attributes: Any) -> type:
    """Return a subclass of a strategy class. Each of its instances forwards to an ``adapter`` of its own.

    Args:
        base: A strategy class of Lightning or of Fabric, or the user's subclass of one.
        adapter: The class whose marked methods become methods of the new class.
        attributes: More attributes of the new class.

    Returns:
        The subclass; ``base`` itself if it is such a subclass.
    """
    if getattr(base, "promoted_by_dcp_plugin", False):
        return base
    marked = {name: method for name, method in vars(adapter).items() if hasattr(method, "overrides_strategy")}
    methods = {name: _forwarding(method) for name, method in marked.items()}
    ours = {"promoted_by_dcp_plugin": True, "dcp_adapter": functools.cached_property(adapter)}
    promoted: Any = type(f"DCP{base.__name__}", (base,), {**ours, **methods, **attributes})
    promoted.promoted_class = promoted
    return promoted  # type: ignore[no-any-return]


def _forwarding(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def forward(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        return method(strategy.dcp_adapter, *args, **kwargs)

    return forward


def refuse_storage_options(storage_options: Any | None, setting: str) -> None:
    """Refuse options of a single save, which Lightning and Fabric would give to fsspec."""
    if storage_options is not None:
        raise TypeError(
            f"a save takes no storage_options: how a store is reached is a setting for all saves and loads, {setting}."
        )


class ResumableSampler(Sampler[int]):
    """Sampler that ``generator`` orders at each iteration. Its position is the state of the generator before the
    iteration, and the number of samples that were yielded."""

    def __init__(self, sampler: Any, generator: torch.Generator) -> None:
        self._sampler = sampler
        self._generator = generator
        self._order_from = generator.get_state()
        self._yielded = 0
        self._to_skip = 0

    def __iter__(self) -> Iterator[int]:
        self._yielded, self._to_skip = self._to_skip, 0  # only the first iteration after a load skips samples
        self._order_from = self._generator.get_state()
        return self._counted(islice(iter(self._sampler), self._yielded, None))

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"order_from": self._order_from, "yielded": self._yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["order_from"])
        self._to_skip = state["yielded"]

    def _counted(self, order: Iterator[int]) -> Iterator[int]:
        for index in order:
            self._yielded += 1
            yield index


def made_by(dataloader: Any) -> str:
    """Return the properties of a stateful dataloader that must be as at the save, so that it takes the saved position:
    the class of its sampler, which Lightning and Fabric wrap on several ranks, and the number of workers. With others
    the loader fails, and its message does not name the reason."""
    sampler = getattr(getattr(dataloader, "batch_sampler", None), "sampler", getattr(dataloader, "sampler", None))
    return f"{type(sampler).__name__} and num_workers={getattr(dataloader, 'num_workers', 0)}"


def make_resumable(dataloader: Any) -> None:
    """Give a stateful dataloader a sampler with a position, if Lightning has given it a sampler without."""
    batches = getattr(dataloader, "batch_sampler", None)
    generator = getattr(inside_distributed_sampler(getattr(batches, "sampler", None)), "generator", None)
    if hasattr(dataloader, "load_state_dict") and isinstance(generator, torch.Generator):
        batches.sampler = ResumableSampler(batches.sampler, generator)  # type: ignore[union-attr]


def data_rank(owner: Any) -> tuple[int, int]:
    """Return this rank's number among the ranks with different data, and the number of these ranks.

    Args:
        owner: The trainer or strategy that has ``distributed_sampler_kwargs``.
    """
    kwargs = getattr(owner, "distributed_sampler_kwargs", None)
    return (0, 1) if kwargs is None else (kwargs["rank"], kwargs["num_replicas"])
