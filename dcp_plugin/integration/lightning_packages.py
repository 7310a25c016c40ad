"""Lightning's two packages of equal content and different classes, and subclasses of the strategies of either.

``lightning`` has ``lightning.pytorch`` and ``lightning.fabric``; the other one is ``pytorch_lightning`` with
``lightning_fabric``. Which package is meant is read from the class of the object at hand, so that neither has to be
installed and nothing is imported before a Trainer or a Fabric exists. Only names that users ask for before there is an
object (``DCPCallback``) go by what the program has imported.

A promoted strategy is a subclass of the user's own strategy class, with one base: Python changes the class of an
instance only to one of the same memory layout. Its methods forward to a :class:`StrategyAdapter`.

On several ranks, Lightning 2.6 wraps the shuffling sampler of ``StatefulDataLoader(dataset, shuffle=True)`` in one
that has no state: each time it is iterated it draws a new order from the inner sampler's generator. Resumed in the
middle of an epoch, such a loader would skip the right number of samples of the wrong order, without a word.
:class:`ResumableSampler` yields what Lightning's sampler yields, and has a position: it remembers which state of the
generator the order of this epoch came from.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
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
    """One of the two. Each brings its own Fabric, where ``CheckpointIO`` is."""

    name: str
    fabric_name: str
    classes: str
    """Our module of classes that derive from its classes."""

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


LIGHTNING = Package("lightning.pytorch", "lightning.fabric", "dcp_plugin.lightning.of_lightning")
PYTORCH_LIGHTNING = Package("pytorch_lightning", "lightning_fabric", "dcp_plugin.lightning.of_pytorch_lightning")
PACKAGES = (LIGHTNING, PYTORCH_LIGHTNING)


def home_of(cls: type) -> Package | None:
    """The package that a class itself is defined in."""
    module = f"{cls.__module__}."
    return next((one for one in PACKAGES if module.startswith((f"{one.name}.", f"{one.fabric_name}."))), None)


def package_of(cls: type) -> Package | None:
    """The package that a class, or the first of its bases that does, comes from."""
    return next((package for base in cls.__mro__ if (package := home_of(base)) is not None), None)


def package_behind(value: object) -> Package:
    """The package of a trainer, a strategy, a LightningModule."""
    package = package_of(type(value))
    assert package is not None, f"{type(value)} is not Lightning's"
    return package


def has_base(cls: type, *names: str) -> bool:
    """Whether a class is, or derives from, Lightning's class of one of these names, of either package."""
    return any(base.__name__ in names and home_of(base) is not None for base in cls.__mro__)


def has_fabric_base(cls: type, *names: str) -> bool:
    """The same for classes of Fabric. Those of ``lightning.pytorch`` may have the same name."""
    fabrics = tuple(f"{package.fabric_name}." for package in PACKAGES)
    return any(base.__name__ in names and f"{base.__module__}.".startswith(fabrics) for base in cls.__mro__)


def inside_distributed_sampler(sampler: Any) -> Any:
    """The user's sampler, which Lightning and Fabric wrap on several ranks; None if this is not their wrapper. There is
    no public way to it."""
    return sampler.dataset._sampler if has_base(type(sampler), "DistributedSamplerWrapper") else None


def is_supported(cls: type, has: Callable[..., bool] = has_base) -> bool:
    """Whether a class is a strategy whose state the core can take, as all of it is in modules and optimizers.

    Args:
        has: :func:`has_base`, or :func:`has_fabric_base` for a strategy of Fabric.
    """
    return has(cls, *SUPPORTED) and not has(cls, *UNSUPPORTED)


def installed() -> list[Package]:
    """The packages that could be imported.

    Raises:
        ImportError: None is installed.
    """
    found = [package for package in PACKAGES if importlib.util.find_spec(package.name.partition(".")[0]) is not None]
    if not found:
        raise ImportError(
            "dcp_plugin.lightning needs Lightning, as `lightning` or as `pytorch_lightning`, and neither is installed: "
            'pip install "dcp-plugin[lightning]"'
        )
    return found


def in_use() -> Package:
    """The package that the program has imported; ``lightning`` if it is both, the one that is installed if neither."""
    return next((package for package in PACKAGES if package.name in sys.modules), installed()[0])


class StrategyAdapter:
    """What one promoted strategy does differently: its methods with :func:`override` replace the strategy's.

    Args:
        strategy: The promoted strategy. It has its adapter as ``dcp_adapter``.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    @property
    def keeps_shards(self) -> bool:
        """Whether the full model may fit on no rank."""
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
    """A subclass of a strategy class whose instances forward to an ``adapter`` of their own; itself if it is one.

    Args:
        base: A strategy class of Lightning or of Fabric, or the user's subclass of one.
        adapter: Its marked methods become methods of the new class.
        attributes: More attributes of the new class.
    """
    if getattr(base, "promoted_by_dcp_plugin", False):
        return base
    methods = {name: _forwarding(one) for name, one in vars(adapter).items() if hasattr(one, "overrides_strategy")}
    ours = {"promoted_by_dcp_plugin": True, "dcp_adapter": functools.cached_property(adapter)}
    promoted: Any = type(f"DCP{base.__name__}", (base,), {**ours, **methods, **attributes})
    promoted.promoted_class = promoted
    return promoted  # type: ignore[no-any-return]


def _forwarding(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def forward(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        return method(strategy.dcp_adapter, *args, **kwargs)

    return forward


class ResumableSampler(Sampler[int]):
    """A sampler whose order comes from ``generator`` when it is iterated; ``StatefulDataLoader`` saves its position."""

    def __init__(self, sampler: Any, generator: torch.Generator) -> None:
        self._sampler = sampler
        self._generator = generator
        self._order_from = generator.get_state()
        self._yielded = 0
        self._to_skip = 0

    def __iter__(self) -> Iterator[int]:
        self._yielded, self._to_skip = self._to_skip, 0
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
    """What has to be the same for a stateful dataloader to take a position: its sampler, which Lightning and Fabric
    wrap for strategies of several ranks, and the number of workers. Given another one, it fails without a reason."""
    sampler = getattr(getattr(dataloader, "batch_sampler", None), "sampler", getattr(dataloader, "sampler", None))
    return f"{type(sampler).__name__} and num_workers={getattr(dataloader, 'num_workers', 0)}"


def make_resumable(dataloader: Any) -> None:
    """Give a stateful dataloader a sampler with a position, where Lightning has put one without."""
    batches = getattr(dataloader, "batch_sampler", None)
    generator = getattr(inside_distributed_sampler(getattr(batches, "sampler", None)), "generator", None)
    if hasattr(dataloader, "load_state_dict") and isinstance(generator, torch.Generator):
        batches.sampler = ResumableSampler(batches.sampler, generator)  # type: ignore[union-attr]


def data_rank(owner: Any) -> tuple[int, int]:
    """This rank's number among the ranks that see different data, and how many those are.

    ``owner`` is what a framework keeps its ``distributed_sampler_kwargs`` on: a trainer, a strategy.
    """
    kwargs = getattr(owner, "distributed_sampler_kwargs", None)
    return (0, 1) if kwargs is None else (kwargs["rank"], kwargs["num_replicas"])
