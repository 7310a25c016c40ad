"""Fabric's strategies, saving and loading with all ranks, straight from and into the live objects.

A promoted strategy is a subclass of one of Fabric's own strategy classes: whatever that does besides checkpoints
stays as it is.

Fabric takes no plugin for the strategies that need one most, FSDP and ModelParallel. So :func:`attach` changes the
class of a strategy that exists already. Those who build their strategies themselves (Hydra, a swap-free taste) make
one of the promoted class: ``dcp_strategy_class(FSDPStrategy)(...)``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from dcp_plugin.config import CheckpointConfig, PathLike, as_local
from dcp_plugin.errors import CheckpointError
from dcp_plugin.fabric import loading, saving
from dcp_plugin.fabric._fabric import (
    PACKAGES,
    SHARDED,
    SUPPORTED,
    UNSUPPORTED,
    inside_distributed_sampler,
    is_fabric,
    is_strategy,
)
from dcp_plugin.fabric.attachment import Attachment, refuse_init_from
from dcp_plugin.integration.sampler_state import make_resumable


def attach(fabric: Any, config: CheckpointConfig | None = None, **overrides: Any) -> Attachment:
    """Have ``fabric.save``, ``fabric.load`` and ``fabric.load_raw`` save and load with all ranks.

    Call it right after making the Fabric, on all ranks. Attaching again returns the same object, with new settings if
    there are any.

    To continue a training exactly, put the optimizer and a dataloader that knows its position (torchdata's
    ``StatefulDataLoader``) into the state, and call ``fabric.load`` before the loop over the data. The random streams
    of all ranks are saved too, and restored with an optimizer; loading weights alone leaves them as they are.

    Args:
        fabric: A Fabric of ``lightning`` or of ``lightning_fabric``, with any strategy for one device, DDP, FSDP or
            ModelParallel.
        config: How to save and load; if neither this nor ``overrides`` is given, as the plugin among
            ``Fabric(plugins=[DCPCheckpointIO(...)])`` says, else the defaults.
        overrides: Fields of :class:`~dcp_plugin.CheckpointConfig`, such as ``async_save=True``.

    Returns:
        What to ``wait()`` for at the end of a training with ``async_save``, and to ``detach()``; a context manager.

    Raises:
        CheckpointError: This is no Fabric, or its strategy keeps its state in a way of its own.
        ValueError: The plugin among ``Fabric(plugins=...)`` has an ``init_from``, which nothing would heed.
    """
    if not is_fabric(fabric):
        raise CheckpointError(
            f"attach() takes a Fabric of {' or '.join(PACKAGES)}, not a {type(fabric).__name__}. A Trainer needs "
            "plugins=[DCPCheckpointIO()] of dcp_plugin.lightning instead."
        )
    strategy = fabric.strategy
    settings = CheckpointConfig.merge(config, **overrides) if config is not None or overrides else None
    promoted: Any = dcp_strategy_class(strategy.__class__)
    refuse_init_from(strategy)
    if promoted is not strategy.__class__:
        strategy.dcp = Attachment(strategy, settings)  # before it changes its class, to which it can return
        strategy.__class__ = promoted
    elif settings is not None:
        strategy.dcp.reconfigure(settings)
    attachment: Attachment = strategy.dcp
    attachment.fabric = fabric
    return attachment


@functools.cache
def dcp_strategy_class(base: type) -> type:
    """The promoted subclass of a strategy class of either Fabric package; the class itself if it is one.

    Its constructor takes ``checkpoint_config``, a :class:`~dcp_plugin.CheckpointConfig`, besides what ``base`` takes.
    One base only: an instance can change its class only to one of the same memory layout.

    Raises:
        CheckpointError: The strategy keeps its state in a way of its own.
    """
    if getattr(base, "promoted_by_dcp_plugin", False):
        return base
    if not is_strategy(base, SUPPORTED) or is_strategy(base, UNSUPPORTED):
        raise CheckpointError(
            f"{base.__name__} is not supported: it is no strategy of Fabric, or keeps or writes its state in a way of "
            f"its own. Use one of {', '.join(SUPPORTED)} or a subclass."
        )

    class DCPStrategy(base):  # type: ignore[misc]
        promoted_by_dcp_plugin = True
        keeps_shards = is_strategy(base, SHARDED)
        dcp: Attachment

        def __init__(self, *args: Any, checkpoint_config: CheckpointConfig | None = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.dcp = Attachment(self, checkpoint_config)

        @functools.cached_property
        def dcp_modules(self) -> weakref.WeakValueDictionary[str, nn.Module]:
            """What was set up since, in that order: an optimizer that is loaded alone belongs to one of these."""
            return weakref.WeakValueDictionary()

        def setup_module(self, module: nn.Module) -> nn.Module:
            module = super().setup_module(module)
            self.dcp_modules[f"{type(module).__name__} at {id(module):#x}"] = module
            return module

        def process_dataloader(self, dataloader: Any) -> Any:
            dataloader = super().process_dataloader(dataloader)
            make_resumable(dataloader, inside_distributed_sampler)
            return dataloader

        def save_checkpoint(
            self,
            path: PathLike,
            state: dict[str, Any],
            storage_options: Any | None = None,
            filter: dict[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002 - Fabric's name
        ) -> None:
            if storage_options is not None:
                raise TypeError("storage_options are not supported; configure dcp_plugin with CheckpointConfig.")
            saving.save(self, Path(as_local(self.broadcast(path))), state, filter or {})

        def load_checkpoint(
            self, path: PathLike, state: Any = None, strict: bool = True, weights_only: bool | None = None
        ) -> dict[str, Any]:
            path = Path(as_local(self.broadcast(path)))
            self.dcp.wait()
            if path.is_file():  # Fabric's own format, or plain torch: in Fabric's own way
                remainder: dict[str, Any] = super().load_checkpoint(
                    path, state=state, strict=strict, weights_only=weights_only
                )
                return remainder
            return loading.load(self, path, state, strict, weights_only)

    DCPStrategy.__reduce_ex__ = _by_its_base  # type: ignore[method-assign]
    DCPStrategy.__name__ = DCPStrategy.__qualname__ = f"DCP{base.__name__}"
    DCPStrategy.__doc__ = f"{base.__name__} whose checkpoints are saved and loaded by dcp_plugin, on all ranks."
    return DCPStrategy


def _by_its_base(strategy: Any, protocol: Any) -> Any:
    """How a strategy goes to processes that ``fabric.launch`` starts: nobody finds its class, made here, by name."""
    return _bare, (type(strategy).__mro__[1],), strategy.__dict__


def _bare(base: type) -> Any:
    return object.__new__(dcp_strategy_class(base))
