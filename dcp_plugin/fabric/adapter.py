"""``attach(fabric)`` has all ranks save directly from the user's objects, and load directly into them.

Fabric takes no plugin for FSDP and ModelParallel, the strategies that need it most. :func:`attach` replaces the class
of an existing strategy by its :func:`dcp_strategy_class`: a subclass whose methods for checkpoints forward to a
:class:`FabricAdapter`. Users who build their strategies themselves (Hydra) make an object of the promoted class:
``dcp_strategy_class(FSDPStrategy)(...)``.

Fabric never tears a strategy down, so the user finishes the last background save, by ``Attachment.wait()`` or the end
of its ``with`` block. A program that ends without either waits until the save is on disk, and logs the wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from dcp_plugin.checkpointer import Checkpointer
from dcp_plugin.core.config import CheckpointConfig
from dcp_plugin.core.errors import CheckpointError
from dcp_plugin.core.partial import PartialLoad
from dcp_plugin.core.paths import PathLike, Where, local_path
from dcp_plugin.core.records import LoadReport
from dcp_plugin.core.runs.foreign import OTHERS
from dcp_plugin.core.types import public_class
from dcp_plugin.fabric._fabric import plugin_of, unwrapper
from dcp_plugin.fabric.state import FabricStrategy, Filter, inside_ddp_of, kind_of, load, named_state, names_of
from dcp_plugin.integration import EXTRA, OPTIM, BaseAttachment, is_regular_file
from dcp_plugin.integration import lightning_packages as packages
from dcp_plugin.integration.lightning_packages import SUPPORTED, override
from dcp_plugin.start import Start, StartOptions, begin_check, modules_of, watching


def attach(
    fabric: Any,
    config: CheckpointConfig | None = None,
    *,
    verify_resume: Literal["auto", "error", False] = "auto",
    expect_changed: Sequence[str] = (),
    **overrides: Any,
) -> Attachment:
    """Have ``fabric.save``, ``fabric.load`` and ``fabric.load_raw`` save and load with all ranks.

    Call this function on all ranks, right after making the Fabric. A second call returns the same object, with new
    settings if the call has any.

    To continue a training exactly, put the optimizer and a dataloader that knows its position (torchdata's
    ``StatefulDataLoader``) into the state, and call ``fabric.load`` before the loop over the data. The random streams
    of all ranks are saved too, and restored with an optimizer; a load of weights alone does not change them.

    Args:
        fabric: A Fabric of ``lightning`` or of ``lightning_fabric``, with any strategy for one device, DDP, FSDP or
            ModelParallel.
        config: Settings of saves and loads; without this and ``overrides``, those of the plugin among
            ``Fabric(plugins=[DCPCheckpointIO(...)])``, else the defaults.
        verify_resume: Compare the live state with the loaded one at the end of a ``fabric.load`` with an optimizer, see
            :func:`dcp_plugin.resume_or_init`.
        expect_changed: Globs of keys that differ on purpose.
        overrides: Fields of :class:`~dcp_plugin.CheckpointConfig`, such as ``async_save=True``.

    Returns:
        An object to ``wait()`` for at the end of a training with ``async_save``, and to ``detach()``; a context
        manager.

    Raises:
        CheckpointError: ``fabric`` is not a Fabric, or its strategy is not supported.
        ValueError: The plugin among ``Fabric(plugins=...)`` has an ``init_from``, which Fabric would ignore.

    Example:
        >>> from lightning.fabric import Fabric
        >>> from dcp_plugin.fabric import attach
        >>> fabric = Fabric(accelerator="cpu", devices=1)
        >>> with attach(fabric, async_save=True):
        ...     fabric.save("run/step-1", {"step": 1})
        >>> fabric = Fabric(accelerator="cpu", devices=1)
        >>> with attach(fabric):
        ...     fabric.load("run/step-1")
        {'step': 1}
    """
    if not packages.has_fabric_base(type(fabric), "Fabric"):
        fabrics = " or ".join(package.fabric_name for package in packages.PACKAGES)
        raise CheckpointError(
            f"attach() takes a Fabric of {fabrics}, not a {type(fabric).__name__}. A Trainer needs "
            "plugins=[DCPCheckpointIO()] of dcp_plugin.lightning instead."
        )
    strategy = fabric.strategy
    own = ("verify_resume", "expect_changed")
    settings = CheckpointConfig.merge(config, own, **overrides) if config is not None or overrides else None
    promoted: Any = dcp_strategy_class(strategy.__class__)
    refuse_init_from(strategy)
    if promoted is not strategy.__class__:
        strategy.dcp = Attachment(strategy, settings)  # before it changes its class, to which it can return
        strategy.__class__ = promoted
    elif settings is not None:
        strategy.dcp.reconfigure(settings)
    attachment: Attachment = strategy.dcp
    attachment.fabric = fabric
    if (verify_resume, expect_changed) != ("auto", ()):  # a second call without them keeps those of the first
        attachment.check_options = verify_resume, expect_changed
    return attachment


@public_class("dcp_plugin.fabric")
class Attachment(BaseAttachment):
    """Saves and loads of one strategy. A context manager: ``with attach(fabric):``."""

    _kind = Checkpointer

    def __init__(self, strategy: Any, config: CheckpointConfig | None) -> None:
        super().__init__(config)
        self._strategy = strategy
        self._class_before = None if getattr(strategy, "promoted_by_dcp_plugin", False) else type(strategy)
        self.fabric: Any = None
        """The Fabric passed to :func:`attach`; None for a strategy that the user has made."""

    def _find_config(self) -> CheckpointConfig:
        """Return the settings of the plugin among ``Fabric(plugins=...)``, else the defaults.

        Raises:
            ValueError: The plugin has an ``init_from``.
        """
        refuse_init_from(self._strategy)
        config = getattr(plugin_of(self._strategy), "config", None)
        return config if isinstance(config, CheckpointConfig) else CheckpointConfig()

    def reconfigure(self, config: CheckpointConfig) -> None:
        """Use other settings from now on, after the save in flight."""
        self.close()
        self._config, self._checkpointer = config, None

    @property
    def world_size(self) -> int:
        return getattr(self._strategy, "world_size", 1)

    def resume_or_init(
        self,
        state: dict[str, Any],
        root: PathLike,
        *,
        resume: str | PathLike = "auto",
        init_from: PathLike | None = None,
        partial: PartialLoad | None = None,
        strict: bool = True,
    ) -> Start:
        """Load the run's own newest checkpoint; without any, load the modules' weights from ``init_from``. Collective.

        Call this method after the setup of all objects, before the loop over the data.

        Args:
            state: The state to load, as in ``fabric.load``.
            root: Directory of this run's checkpoints.
            resume, init_from, partial, strict: See :func:`dcp_plugin.resume_or_init`.

        Returns:
            The start of the run, see :func:`dcp_plugin.resume_or_init`.

        Raises:
            CheckpointError: The attachment has no Fabric; see also :func:`dcp_plugin.resume_or_init`.
            ValueError: See :func:`dcp_plugin.resume_or_init`.
        """
        options = StartOptions(resume, init_from, partial, strict, self.config.storage_options)
        fabric = self.fabric
        if fabric is None:
            raise CheckpointError(
                "resume_or_init does not know its Fabric. Call it on the object that attach(fabric) returns."
            )

        def load_own(path: Where) -> LoadReport | None:
            fabric.load(path, state, strict=strict)
            return self.last_load

        options = options.with_local(self.checkpointer, root)
        return options.start(
            self.checkpointer,
            unwrapper(fabric)(modules_of(state)),
            # Fabric's own files are files of ``torch.save``, with the names of the state to load.
            lambda damaged: options.find(root, (OTHERS,), damaged),
            load_own,
        )

    def detach(self) -> None:
        """Have the Fabric save and load as before :func:`attach`, and wait for the save in flight.

        Raises:
            SaveFailed: A save failed, as in :meth:`wait`.
        """
        self._strategy.__class__ = self._class_before or type(self._strategy)
        self.close()


def refuse_init_from(strategy: Any) -> None:
    """Refuse a plugin with ``init_from``: a Fabric has no ``fit`` that would use it.

    Raises:
        ValueError: The plugin has an ``init_from``.
    """
    if getattr(plugin_of(strategy), "init_from", None) is not None:
        raise ValueError(
            "DCPCheckpointIO(init_from=...) among Fabric(plugins=...): a Fabric takes only the settings of it, and "
            "would start without the pre-trained weights. Give init_from, and partial, to "
            "attach(fabric).resume_or_init(state, root, init_from=...)."
        )


class FabricAdapter(FabricStrategy):
    """Saving and loading for one strategy of a Fabric."""

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        module = self.stock.setup_module(module)
        self.modules[f"{type(module).__name__} at {id(module):#x}"] = module
        return module

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = self.stock.process_dataloader(dataloader)
        packages.make_resumable(dataloader)
        return dataloader

    @override
    def save_checkpoint(
        self,
        path: PathLike,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Filter] | None = None,  # noqa: A002 - Fabric's name
    ) -> None:
        """Save on all ranks. ``step`` or ``global_step`` of the state is recorded as the step."""
        packages.refuse_storage_options(storage_options, "attach(fabric, storage_options={...})")
        path, state, names = self._agreed(path, state)
        step = next((state[name] for name in ("global_step", "step") if isinstance(state.get(name), int)), None)
        self.internals.save(named_state(self, state, names, filter or {}), path, step)

    @override
    def load_checkpoint(
        self, path: PathLike, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path, ordered, names = self._agreed(path, state)
        self.internals.wait_until_kept()
        if self.internals.ranks.from_zero(f"read {path}", lambda: is_regular_file(path)):
            # The stock strategy reads Fabric's own format, and files of plain torch.
            if self.keeps_shards:
                local_path(path, "a file that this strategy of Fabric loads", "Copy it to a disk, and name it there.")
            options = packages.package_behind(self.strategy).load_options(weights_only)
            remainder: dict[str, Any] = self.stock.load_checkpoint(path, state=state, strict=strict, **options)
            return remainder
        # An optimizer of any rank: the comparison is a collective of all ranks.
        resumes = any(name.startswith(OPTIM) for name in names.values())
        check = begin_check(self.internals.ranks, *self.attachment.check_options) if resumes else None
        with self.internals.shown(path) as files, watching(check):
            remainder = load(self, path, files, ordered, strict, weights_only)
        if ordered is not state:
            state.update(ordered)
        if check is not None and self.attachment.last_load is not None:
            check.prepare = functools.partial(_named, unwrapper(self.strategy), names)
            self.attachment.last_load = check.finish(self.internals.ranks, self.attachment.last_load)
        return remainder

    def _agreed(self, path: PathLike, state: Any) -> tuple[Where, Any, dict[Any, str]]:
        """Return rank 0's path, a state mapping with its keys in rank 0's order, and the names in a checkpoint of all
        models and optimizers by the user's names: also of those that only other ranks have."""
        of_rank = path, {name: kind_of(value) for name, value in state.items()} if isinstance(state, dict) else {}
        of_ranks: list[Any] = [of_rank] * self.attachment.world_size
        if len(of_ranks) > 1:
            dist.all_gather_object(of_ranks, of_rank)
        pairs = [pair for _, kinds_there in of_ranks for pair in kinds_there.items()]
        kinds = dict(pairs) | {name: kind for name, kind in pairs if kind}
        ordered = {name: state[name] for name in kinds if name in state} if isinstance(state, dict) else state
        return self.attachment.where(of_ranks[0][0]), ordered, names_of(kinds)


def _named(unwrap: Callable[..., dict[str, Any]], names: Mapping[str, str], state: dict[str, Any]) -> dict[str, Any]:
    """Return the objects of a state under their names in a checkpoint."""
    objects = inside_ddp_of(unwrap(dict(state)))
    return {names.get(name, f"{EXTRA}.{name}"): value for name, value in objects.items()}


@functools.cache
def dcp_strategy_class(base: type) -> type:
    """Return the promoted subclass of a strategy class of Fabric.

    Its constructor takes the arguments of ``base``, and ``checkpoint_config``, a :class:`~dcp_plugin.CheckpointConfig`.

    Args:
        base: One of Fabric's strategies for one device, DDP, FSDP or ModelParallel, or a subclass; of
            ``lightning.fabric`` or ``lightning_fabric``.

    Returns:
        The same class for the same ``base``; ``base`` itself if it is promoted already.

    Raises:
        CheckpointError: The strategy is not supported: it stores its state in a way of its own.

    Example:
        >>> from lightning.fabric.strategies import FSDPStrategy
        >>> dcp_strategy_class(FSDPStrategy).__name__
        'DCPFSDPStrategy'
    """
    if not packages.is_supported(base, packages.has_fabric_base):
        raise CheckpointError(
            f"{base.__name__} is not supported: it is no strategy of Fabric, or keeps or writes its state in a way of "
            f"its own. Use one of {', '.join(SUPPORTED)} or a subclass."
        )
    return packages.promoted_class(
        base,
        FabricAdapter,
        __module__="dcp_plugin.fabric",  # where pickle finds the class
        __doc__=f"{base.__name__} whose checkpoints are saved and loaded by dcp_plugin, on all ranks.",
        __init__=_init,
        __reduce_ex__=_by_its_base,
    )


def _init(strategy: Any, *args: Any, checkpoint_config: CheckpointConfig | None = None, **kwargs: Any) -> None:
    super(strategy.promoted_class, strategy).__init__(*args, **kwargs)
    strategy.dcp = Attachment(strategy, checkpoint_config)


def _by_its_base(strategy: Any, protocol: Any) -> Any:
    """Pickle a strategy for processes that ``fabric.launch`` starts. Pickle cannot find its class by name."""
    cls = type(strategy)
    return _bare, (cls.__mro__[1] if cls is strategy.promoted_class else cls,), strategy.__dict__


def _bare(base: type) -> Any:
    return object.__new__(dcp_strategy_class(base))
