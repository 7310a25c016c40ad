"""Strategies with which all ranks save directly from the model and optimizers, and load directly into them.

:class:`~dcp_plugin.lightning.DCPCallback` replaces the class of a trainer's strategy by its :func:`dcp_strategy_class`:
a subclass of the user's own class alone, whose methods for checkpoints forward to a :class:`LightningAdapter`. The
classes for users who make their strategies themselves (``DCPFSDPStrategy``, for Hydra) are made in the same way.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from dcp_plugin.checkpointer import Internals
from dcp_plugin.core.errors import CheckpointError
from dcp_plugin.core.paths import PathLike, Where
from dcp_plugin.core.records import LoadReport
from dcp_plugin.core.sources import SourceFiles
from dcp_plugin.core.state import (
    NamesOnly,
    OwnLayout,
    OwnNames,
    flatten_optimizer,
    gather_optimizer,
    gather_with_names,
    inside_ddp,
    module_cache,
    unwrapped_optimizer,
    with_numbers,
)
from dcp_plugin.integration import MODEL, OPTIM, is_regular_file, numbered
from dcp_plugin.integration import lightning_packages as packages
from dcp_plugin.integration.lightning_packages import SUPPORTED, StrategyAdapter, override
from dcp_plugin.lightning import _lightning, layout, live_load, resume
from dcp_plugin.lightning.io import DCPCheckpointIO
from dcp_plugin.lightning.layout import Checkpoint
from dcp_plugin.lightning.live_load import Loaded
from dcp_plugin.lightning.model_checkpoint import normalise_dirpaths, promote_callbacks
from dcp_plugin.lightning.resume import Resume
from dcp_plugin.start import Start, begin_check

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy

_UNREAD: dict[str, Any] = {}
"""Placeholder for the state of an optimizer that does not exist yet, if no hook looks at the state."""


class LightningAdapter(StrategyAdapter):
    """Saving, loading and the hooks around them, for one strategy of a Trainer."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._loaded: Loaded | None = None
        """The checkpoint that is being restored, until its optimizer state is loaded."""
        self._resume: Resume | None = None
        """The state to restore when the training starts."""
        self._set_up = False
        self._names = OwnNames()
        """The names in ``state_dict()`` of the module, in the checkpoint that is being made."""
        self._groups_made: list[int] = []
        """Number of groups of each optimizer when it was made."""
        self._check: Any = None
        """The comparison of a resume, a ``ResumeCheck``, until all state is restored; else None."""
        self._at_end = ExitStack()
        """The comparison of a resume whose training has not begun."""

    @property
    def io(self) -> DCPCheckpointIO:
        """The trainer's plugin, set up for saves on all ranks."""
        io = _lightning.unwrapped(self.strategy.checkpoint_io)
        if not isinstance(io, DCPCheckpointIO):  # the user made the strategy's class, without the plugin
            io = self.strategy.checkpoint_io = DCPCheckpointIO()
        io.serves_strategy, io.world_size = True, self.strategy.world_size
        return io

    @property
    def internals(self) -> Internals:
        return self.io.internals

    @property
    def model(self) -> nn.Module:
        """The wrapped module; with DDP the module inside, whose state Lightning saves."""
        return inside_ddp(self.strategy.model)

    @property
    def module(self) -> LightningModule:
        return self.strategy.lightning_module  # type: ignore[no-any-return]

    @property
    def trainer(self) -> Trainer:
        return self.module.trainer

    @property
    def fitting(self) -> bool:
        return self.trainer.state.fn == "fit"

    @override
    def setup(self, trainer: Trainer) -> None:
        ranks = self.internals.ranks  # forms the group now: later, some ranks may not call
        promote_callbacks(trainer)
        if self.fitting:
            normalise_dirpaths(trainer)
        self.io.all_came = None
        if self._check is not None:  # hooks have seen the model, and no other code has changed it yet
            self._check.take({MODEL: self.model}, ranks)
        self.stock.setup(trainer)
        self._set_up = True
        self._groups_made = [len(optimizer.param_groups) for optimizer in self.strategy.optimizers]
        if self.fitting and trainer.checkpoint_callbacks and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            preflight = functools.partial(resume.preflight, trainer, self.io.config.allow_pickle)
            ranks.agree("see whether checkpoints could be saved", preflight)

    # Save: Lightning asks for the parts, lets hooks change them, and hands the full checkpoint back on every rank.

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state, self._names = gather_with_names(self.model)
        return dict(state if self.keeps_shards else self._names.own(state))  # stock's sharded strategies clean names

    @override
    def optimizer_state(self, optimizer: Optimizer) -> Any:
        inner = unwrapped_optimizer(optimizer)
        state = gather_optimizer(layout.owner_of(self.model, inner), inner)
        # Hooks see the keys that stock gives them. with_stored_names puts the names back.
        return state if self.keeps_shards or isinstance(state, OwnLayout) else with_numbers(state)

    @override
    def save_checkpoint(self, checkpoint: Checkpoint, filepath: PathLike, storage_options: Any | None = None) -> None:
        packages.refuse_storage_options(storage_options, "DCPCheckpointIO(storage_options={...})")
        strategy, io = self.strategy, self.io
        path = io.where(strategy.broadcast(filepath))
        checkpoint = layout.beside_ours(checkpoint)
        if "optimizer_states" in checkpoint and resume.has_fit_loop(checkpoint):  # a training can resume from it
            resume.add_own_state(checkpoint, self.trainer, with_rng=io.config.rng)
        optimizers = [unwrapped_optimizer(optimizer) for optimizer in strategy.optimizers]
        with module_cache():
            checkpoint = layout.with_stored_names(checkpoint, self._names, self.model, optimizers)
            if self.keeps_shards and (full := layout.full_tensors(checkpoint, self.model)):
                checkpoint[layout.FULL] = full
            state = layout.to_state(checkpoint, io.config.allow_pickle)
            state = layout.shared_by_ranks(state, strategy.model, optimizers)
        added = layout.add_for_stock(strategy, checkpoint, state) if io.config.stock_aliases else None
        owners, metrics = [strategy.model, *optimizers], self._metrics(io.monitor)
        io.save(state, path, checkpoint.get("global_step"), owners, added, metrics)
        if self.trainer.state.stopped:  # no later hook waits for the save
            io.wait()

    def _metrics(self, monitor: str | None) -> dict[str, Any]:
        """Return the metrics that callbacks see, and the monitored count of a ``ModelCheckpoint``."""
        trainer = self.trainer
        counts = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        scalars = {str(name): value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        return {name: value for name, value in counts.items() if name == monitor} | scalars

    @override
    def remove_checkpoint(self, filepath: PathLike) -> None:
        if self.strategy.is_global_zero:
            self.io.remove_checkpoint(filepath)

    # Load: read into model and optimizers, let hooks see and change the result, apply their changes.

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> Checkpoint:
        self._loaded = self._resume = None
        self._check = begin_check(*self.io.check_options) if self.fitting else None
        path = self.io.where(self.strategy.broadcast(checkpoint_path))
        weights_only = self.io.weights_only if weights_only is None else weights_only
        self.io.wait()
        if not self.internals.ranks.from_zero(f"read {path}", lambda: is_regular_file(path)):
            with self.internals.shown(path) as files:
                checkpoint = self._load_directory(path, weights_only, files)
        elif self.keeps_shards:
            checkpoint = self.internals.ranks.agree(f"read {path}", lambda: layout.read(path, weights_only))
            self._loaded = Loaded.of_file(path, checkpoint, self.model)
            checkpoint = self._loaded.checkpoint
            if self.fitting:
                _lightning.restore_groups(self.trainer, checkpoint)
        else:  # the stock strategy reads Lightning's own format
            options = packages.package_behind(self.strategy).load_options(weights_only)
            checkpoint = self.stock.load_checkpoint(path, **options)
        if self._loaded is not None:
            self._loaded.count = len(checkpoint.get("optimizer_states", ()))
        if self.fitting:
            report = None if self._loaded is None else self._loaded.report
            self.io.started = Start("resumed", path, checkpoint.get("global_step"), report)
        return checkpoint

    def _load_directory(self, path: Where, weights_only: bool | None, files: SourceFiles | None) -> Checkpoint:
        strategy, pytorch = self.strategy, packages.package_behind(self.strategy).pytorch
        if not self._set_up and packages.has_base(type(strategy.precision_plugin), "DoublePrecision"):
            strategy.model = strategy.precision_plugin.convert_module(strategy.model)  # else the load would round
        self.io.load_before(self.model, self.module.strict_loading, path, files)
        self._loaded = loaded = live_load.load(
            path,
            self.internals,
            self.model,
            strict=self.module.strict_loading,
            hooked=is_overridden("on_load_checkpoint", self.module, pytorch.LightningModule),
            weights_only=weights_only,
            files=files,
            clean_names=self.keeps_shards,
        )
        checkpoint = loaded.checkpoint
        if self.fitting:
            self._load_or_announce_optimizers(loaded)
        checkpoint.setdefault("pytorch-lightning_version", pytorch.__version__)  # if not saved by a Trainer
        if loaded.of_lightning:  # Lightning continues the loops in its own way
            return checkpoint
        if self.fitting and resume.has_fit_loop(checkpoint):
            self._resume = Resume.from_checkpoint(checkpoint, self.trainer)
        elif self.fitting and "optimizer_states" in checkpoint:
            checkpoint.setdefault("lr_schedulers", [])
            rank_zero_warn(
                f"{path} was not saved by a Trainer: model and optimizers are restored; the loops, schedules and "
                "random streams of this training start at their beginning."
            )
        return layout.put_back(checkpoint)

    def _load_or_announce_optimizers(self, loaded: Loaded) -> None:
        """Load the optimizers if they exist; otherwise give Lightning their state, or placeholders for it."""
        names, optimizers = loaded.optimizer_names, self.strategy.optimizers
        if not names:
            return
        states: list[Any] = [_UNREAD] * len(names)
        if self._set_up:
            _lightning.restore_groups(self.trainer, loaded.checkpoint)
            live_load.refuse_other_number(loaded.path, len(names), optimizers)
            strict = self.module.strict_loading
            states = live_load.load_optimizers(loaded, self.internals, self.model, optimizers, strict)
        elif _lightning.hooks_into_load(self.trainer, packages.package_behind(self.strategy).pytorch):
            states = live_load.peek_at_optimizers(loaded, self.internals)
            loaded.peeked = [flatten_optimizer(state) for state in states]
        loaded.checkpoint["optimizer_states"], loaded.numbers = live_load.numbered(states)

    @override
    def load_model_state_dict(self, checkpoint: Checkpoint, strict: bool = True) -> None:
        if self._loaded is None:
            self.stock.load_model_state_dict(checkpoint, strict=strict)
        else:
            live_load.apply_model(self.model, self._loaded, checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Checkpoint) -> None:
        loaded, self._loaded = self._loaded, None
        states, strict = checkpoint["optimizer_states"], self.module.strict_loading
        if self._resume is not None and not self._resume.continues(checkpoint, self.trainer):
            self._resume = None
        if loaded is None:
            self.stock.load_optimizer_state_dict(checkpoint)
            return
        if len(states) == loaded.count:  # else a hook has changed the list, and gives no state to some optimizers
            live_load.refuse_other_number(loaded.path, loaded.saved_with or len(states), self.strategy.optimizers)
        optimizers = self.strategy.optimizers[: len(states)]
        if not loaded.optimizers:
            live_load.load_optimizers(loaded, self.internals, self.model, optimizers, strict)
            loaded.optimizers = loaded.peeked or loaded.optimizers  # what hooks were given: they may have changed it
        _lightning.unfreeze_restored_groups(self.trainer, self._groups_made)
        if not any(state is _UNREAD for state in states):
            live_load.apply_optimizers(self.model, optimizers, loaded, states, strict)

    @property
    def restores_optimizers(self) -> bool:
        """Value of ``lightning_restore_optimizer``. FSDP and ModelParallel return False: they load optimizers with the
        model, before hooks have seen the state. Then a hook may remove the state, too."""
        if self._loaded is not None and self._loaded.optimizers:
            self._loaded.checkpoint.setdefault("optimizer_states", [])
        return True

    # The start of a fit.

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """At the start of a fit without a checkpoint, warm-start the model from ``init_from``, and log the start."""
        if _lightning.begins_stage(*args, **kwargs) and self.fitting:
            io = self.io
            if self.trainer.ckpt_path is None:
                continues = self.trainer.global_step > 0  # from the end of this trainer's last fit
                io.started = None if continues else io.start(self.model, self.module.strict_loading)
            if io.init_from is not None and io.started is not None:
                rank_zero_info(str(io.started))
            if self._check is not None and io.started is not None and io.started.how == "resumed":
                self._compare_later(io.started)
        self.stock.barrier(*args, **kwargs)

    def _compare_later(self, started: Start) -> None:
        """Make the restored state the reference, and compare the live state with it before ``on_train_start``."""
        trainer, ranks, (check, self._check) = cast(Any, self.trainer), self.internals.ranks, (self._check, None)
        optimizers = [unwrapped_optimizer(optimizer) for optimizer in self.strategy.optimizers]
        owners = [layout.owner_of(self.model, optimizer) for optimizer in optimizers]
        state = {
            MODEL: self.model,
            "precision": self.strategy.precision_plugin,
            **dict(zip(numbered(OPTIM, len(optimizers)), optimizers, strict=True)),
            **{f"names_{number}": NamesOnly(owner) for number, owner in enumerate(owners) if owner is not self.model},
            **{f"lr_schedulers.{number}": each.scheduler for number, each in enumerate(trainer.lr_scheduler_configs)},
        }
        check.take(state, ranks)

        def note(report: LoadReport) -> None:
            self.io.started = replace(started, report=report if started.report is not None else None)

        report = started.report or LoadReport(cast(Where, started.path))
        # No method of a strategy is called between the restore and ``on_train_start`` of all callbacks.
        self._at_end.callback(check.compare_before(trainer.fit_loop, "on_run_start", state, ranks, report, note))

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Give a train loader its position, see :mod:`dcp_plugin.lightning.resume`."""
        dataloader = self.stock.process_dataloader(dataloader)
        if self.trainer.training:
            packages.make_resumable(dataloader)
            if self._resume is not None:
                self._resume.prepare(self.trainer, dataloader)
        return dataloader

    @override
    def on_train_start(self) -> None:
        self.stock.on_train_start()
        pending, self._resume = self._resume, None
        if pending is not None:
            pending.start(self.trainer)

    # The end of a fit: wait for the save in flight, and raise its failure exactly once.

    @override
    def on_train_end(self) -> None:
        self.stock.on_train_end()
        self.io.wait()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.stock.on_exception(exception)
        try:
            self.io.teardown()
        except Exception as failure:  # the exception that ends the training is raised
            exception.add_note(f"Besides, a checkpoint could not be saved: {failure}")
            rank_zero_warn(f"A checkpoint could not be saved: {failure}")

    @override
    def teardown(self) -> None:
        self._loaded = self._resume = self._check = None
        self._at_end.close()
        self._set_up = False
        try:
            self.stock.teardown()
        finally:
            self.io.teardown()  # the teardown of FSDP and ModelParallel does not call that of the plugin


@functools.cache
def dcp_strategy_class(base: type[Strategy]) -> type[Strategy]:
    """Return the promoted subclass of a strategy class.

    Args:
        base: One of Lightning's strategies for one device, DDP, FSDP or ModelParallel, or a subclass; of
            ``lightning.pytorch`` or ``pytorch_lightning``.

    Returns:
        The same class for the same ``base``; ``base`` itself if it is promoted already.

    Raises:
        CheckpointError: The strategy is not supported: it stores its state in a way of its own.

    Example:
        >>> from lightning.pytorch.strategies import FSDPStrategy
        >>> dcp_strategy_class(FSDPStrategy).__name__
        'DCPFSDPStrategy'
    """
    if not packages.is_supported(base):
        raise CheckpointError(
            f"DCPCheckpointIO does not support {base.__name__}: it keeps or writes its state in a way of its own. "
            f"Use one of {', '.join(SUPPORTED)} or a subclass, or take the plugin out."
        )
    home = packages.home_of(base) if base.__name__ in SUPPORTED else None
    return packages.promoted_class(
        base,
        LightningAdapter,
        __module__=__name__ if home is None else home.classes,  # where pickle finds the class
        __doc__=f"{base.__name__} whose checkpoints are saved and loaded by DCPCheckpointIO, on all ranks.",
        lightning_restore_optimizer=property(lambda strategy: strategy.dcp_adapter.restores_optimizers),
    )
