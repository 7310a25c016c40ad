"""Strategies that save and load with all ranks, straight from and into the live model and optimizers.

A promoted strategy is a subclass of the user's own strategy class and nothing else: whatever that class does besides
checkpoints stays as it is. It differs in what goes into a checkpoint (this rank's view of the state, by name), in
who saves (all ranks), and in how it is loaded (into the live model and optimizers, wherever their parts are).

:func:`promote` changes the class of a strategy that exists already; that is what the callback does. The
classes for those who build their strategies themselves (Hydra, a swap-free taste) are the same.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from dcp_plugin.config import PathLike, as_local
from dcp_plugin.errors import CheckpointError
from dcp_plugin.integration.sampler_state import make_resumable
from dcp_plugin.lightning import _lightning, layout, loading, preflight, resume, stock_format
from dcp_plugin.lightning._lightning import begins_stage, inside_distributed_sampler, unwrapped
from dcp_plugin.lightning._packages import has_base, home_of, package_of
from dcp_plugin.lightning.aliases import add_for_stock
from dcp_plugin.lightning.checkpoint_callbacks import promote_callbacks, require_local_dirpaths
from dcp_plugin.lightning.io import DCPCheckpointIO, refuse_storage_options
from dcp_plugin.lightning.loading import Loaded
from dcp_plugin.lightning.resume import Resume
from dcp_plugin.lightning.stock_format import Checkpoint
from dcp_plugin.runs.resume import Restart
from dcp_plugin.state import gather_module, gather_optimizer

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
_PATIENCE_WITH_AN_EXCEPTION = 60.0
"""Seconds that a rank waits for the others if a callback is to save what an exception left. It is as long as they may
be apart, a step or two, and much less than the timeout of a process group, after which its own exception is lost."""
UNSUPPORTED = ("DeepSpeedStrategy", "SingleDeviceXLAStrategy", "XLAStrategy")

_UNREAD: dict[str, Any] = {}
"""Stands for the state of an optimizer that is not made yet, where nobody looks."""


def promote(strategy: Strategy) -> None:
    """Make a strategy save and load with :class:`DCPCheckpointIO`. Does nothing to one that does already.

    Raises:
        CheckpointError: The strategy keeps its state in a way of its own.
    """
    strategy.__class__ = dcp_strategy_class(type(strategy))


@functools.cache
def dcp_strategy_class(base: type[Strategy]) -> type[Strategy]:
    """The promoted subclass of a strategy class; the class itself if it is one.

    One base only: an instance can change its class only to one of the same memory layout.
    """
    if getattr(base, "promoted_by_dcp_plugin", False):
        return base
    package = package_of(base)
    if package is None or not _is_one_of(base, SUPPORTED) or _is_one_of(base, UNSUPPORTED):
        raise CheckpointError(
            f"DCPCheckpointIO does not support {base.__name__}: it keeps or writes its state in a way of its own. "
            f"Use one of {', '.join(SUPPORTED)} or a subclass, or take the plugin out."
        )
    pytorch = package.pytorch
    sharded = _is_one_of(base, tuple(stock_format.MODEL_NAMES))

    class DCPStrategy(base):  # type: ignore[misc, valid-type]
        promoted_by_dcp_plugin = True
        checkpoint_io: Any  # a property of the base, and so is the next
        model: Any
        _dcp_loaded: Loaded | None = None
        _dcp_resume: Resume | None = None
        _dcp_all_came: bool | None = None
        _dcp_set_up = False
        _dcp_groups_made: list[int]

        @property
        def dcp_checkpoint_io(self) -> DCPCheckpointIO:
            io = unwrapped(self.checkpoint_io)
            if not isinstance(io, DCPCheckpointIO):  # a strategy of the classes below, without the plugin
                io = DCPCheckpointIO()
                self.checkpoint_io = io
            io.serves_strategy = True
            return io

        @property
        def lightning_restore_optimizer(self) -> bool:
            """FSDP and ModelParallel load optimizers together with the model, before hooks have seen them."""
            return True

        def setup(self, trainer: Any) -> None:
            promote_callbacks(trainer)
            if trainer.state.fn == "fit":
                require_local_dirpaths(trainer)
            self._dcp_all_came = None
            io = self.dcp_checkpoint_io
            ranks = io.checkpointer(self.world_size).ranks  # later may be too late to meet
            super().setup(trainer)
            self._dcp_set_up = True
            self._dcp_groups_made = [len(optimizer.param_groups) for optimizer in self.optimizers]
            if preflight.is_due(trainer):
                rehearse = functools.partial(preflight.rehearse, trainer, io.config.allow_pickle)
                ranks.agree("see whether checkpoints could be saved", rehearse)

        def all_ranks_come_to_save(self) -> bool:
            """After an exception: whether all ranks had one, at the same step, so that they can save together. Asked
            once."""
            if self._dcp_all_came is None:
                io, limit = self.dcp_checkpoint_io, _PATIENCE_WITH_AN_EXCEPTION
                io.wait()
                # Of one step: else parts of different steps would make one checkpoint.
                step = self.lightning_module.trainer.global_step
                purpose = f"save what an exception left at step {step}"
                came = io.checkpointer(self.world_size).all_ranks_come_to(purpose, limit)
                if not came and step > 0:  # before, nothing is lost: the first load has failed, for one
                    warnings.warn(
                        f"Rank {self.global_rank} saves no checkpoint of its exception: all ranks would have to take "
                        "part, and it is not known that all of them had one at the same step.",
                        stacklevel=2,
                    )
                self._dcp_all_came = came
            return self._dcp_all_came

        # Save: Lightning asks for the parts, lets hooks change them, and hands the whole back on every rank.

        def lightning_module_state_dict(self) -> dict[str, Any]:
            return gather_module(self.model)

        def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
            return gather_optimizer(self.model, _plain(optimizer))

        def save_checkpoint(
            self, checkpoint: Checkpoint, filepath: PathLike, storage_options: Any | None = None
        ) -> None:
            refuse_storage_options(storage_options)
            io, trainer = self.dcp_checkpoint_io, self.lightning_module.trainer
            path = Path(as_local(self.broadcast(filepath)))
            checkpoint = resume.beside_ours(checkpoint)
            if checkpoint.keys() >= {"optimizer_states", "loops"}:  # not only the weights: to be resumed from
                resume.add_own_state(checkpoint, trainer, with_rng=io.config.rng)
            optimizers = list(map(_plain, self.optimizers))
            state = layout.to_state(checkpoint, io.config.allow_pickle)
            state = layout.shared_by_ranks(state, self.model, optimizers)
            added = add_for_stock(self, checkpoint, state) if io.config.stock_aliases else None
            owners = [self.model, *optimizers]
            io.save(state, path, checkpoint.get("global_step"), self.world_size, owners, added)
            if trainer.state.stopped:  # nobody will wait for it later
                io.wait()

        def remove_checkpoint(self, filepath: PathLike) -> None:
            if self.is_global_zero:
                self.dcp_checkpoint_io.remove_checkpoint(filepath)

        # Load: read into model and optimizers, let hooks see and change the result, apply what they changed.

        def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> Checkpoint:
            self._dcp_loaded = self._dcp_resume = None
            path = Path(as_local(self.broadcast(checkpoint_path)))
            io, module = self.dcp_checkpoint_io, self.lightning_module
            fitting = module.trainer.state.fn == "fit"
            weights_only = io.weights_only if weights_only is None else weights_only
            if path.is_file() and not sharded:  # Lightning's own format: in Lightning's own way
                checkpoint: Checkpoint = super().load_checkpoint(path, weights_only=weights_only)
                if fitting:
                    io.restart = Restart("resumed", path, checkpoint.get("global_step"))
                return checkpoint
            io.wait()
            checkpointer = io.checkpointer(self.world_size)
            if path.is_file():
                checkpoint = checkpointer.ranks.agree(f"read {path}", lambda: stock_format.read(path, weights_only))
                self._dcp_loaded = Loaded.of_file(path, checkpoint, self.model)
                if fitting:
                    io.restart = Restart("resumed", path, checkpoint.get("global_step"))
                    _lightning.restore_groups(module.trainer, checkpoint)
                return self._dcp_loaded.checkpoint
            if not self._dcp_set_up and has_base(type(self.precision_plugin), "DoublePrecision"):
                self.model = self.precision_plugin.convert_module(self.model)  # or the load would round
            self._dcp_loaded = loaded = loading.load(
                path,
                checkpointer,
                self.model,
                strict=module.strict_loading,
                hooked=is_overridden("on_load_checkpoint", module, pytorch.LightningModule),
                weights_only=weights_only,
            )
            checkpoint = loaded.checkpoint
            if fitting:
                io.restart = Restart("resumed", path, checkpoint.get("global_step"), loaded.report)
            if fitting and loaded.optimizer_names:
                if self._dcp_set_up:
                    _lightning.restore_groups(module.trainer, checkpoint)
                    self._dcp_load_optimizers(loaded)
                elif _lightning.hooks_into_load(module.trainer, pytorch):
                    checkpoint["optimizer_states"] = loading.peek_at_optimizers(loaded, checkpointer)
                else:
                    checkpoint["optimizer_states"] = [_UNREAD] * len(loaded.optimizer_names)
            checkpoint.setdefault("pytorch-lightning_version", pytorch.__version__)  # if saved by another door
            if stock_format.is_directory_of_lightning(path):  # its loops are continued as Lightning does it
                return checkpoint
            if fitting and "loops" in checkpoint:
                self._dcp_resume = Resume.from_checkpoint(checkpoint, module.trainer)
            elif fitting and "optimizer_states" in checkpoint:
                checkpoint.setdefault("lr_schedulers", [])
                rank_zero_warn(
                    f"{path} was not saved by a Trainer: model and optimizers are restored; the loops, schedules and "
                    "random streams of this training start at their beginning."
                )
            return resume.put_back(checkpoint)

        def load_model_state_dict(self, checkpoint: Checkpoint, strict: bool = True) -> None:
            if self._dcp_loaded is None:
                super().load_model_state_dict(checkpoint, strict=strict)
            else:
                loading.apply_model(self.model, self._dcp_loaded, checkpoint["state_dict"], strict)

        def load_optimizer_state_dict(self, checkpoint: Checkpoint) -> None:
            loaded, states = self._dcp_loaded, checkpoint["optimizer_states"]
            self._dcp_loaded = None
            if loaded is None:
                super().load_optimizer_state_dict(checkpoint)
                return
            if loaded.optimizers is None and loaded.optimizer_names:
                self._dcp_load_optimizers(loaded)
            _lightning.groups_are_restored(self.lightning_module.trainer, self._dcp_groups_made)
            if not any(state is _UNREAD for state in states):
                strict = self.lightning_module.strict_loading
                loading.apply_optimizers(self.model, self.optimizers, loaded, states, strict=strict)

        def _dcp_load_optimizers(self, loaded: Loaded) -> None:
            checkpointer = self.dcp_checkpoint_io.checkpointer(self.world_size)
            strict = self.lightning_module.strict_loading
            loading.load_optimizers(loaded, checkpointer, self.model, self.optimizers, strict=strict)

        # A fit without a checkpoint: its model may start from another's.

        def barrier(self, *args: Any, **kwargs: Any) -> None:
            if begins_stage(*args, **kwargs) and self.lightning_module.trainer.state.fn == "fit":
                self._dcp_start()
            super().barrier(*args, **kwargs)

        def _dcp_start(self) -> None:
            io, module, trainer = self.dcp_checkpoint_io, self.lightning_module, self.lightning_module.trainer
            if trainer.ckpt_path is None:
                goes_on = trainer.global_step > 0  # where the last fit of this trainer has ended
                io.restart = None if goes_on else io.start(self.model, self.world_size, module.strict_loading)
            if io.init_from is not None and io.restart is not None:
                rank_zero_info(str(io.restart))

        # The moments at which a resumed training picks up its thread, see resume.py.

        def process_dataloader(self, dataloader: object) -> object:
            dataloader = super().process_dataloader(dataloader)
            trainer = self.lightning_module.trainer
            if trainer.training:
                make_resumable(dataloader, inside_distributed_sampler)
                if self._dcp_resume is not None:
                    self._dcp_resume.prepare(trainer, dataloader)
            return dataloader

        def on_train_start(self) -> None:
            super().on_train_start()
            pending, self._dcp_resume = self._dcp_resume, None
            if pending is not None:
                pending.start(self.lightning_module.trainer)

        # The end: a save in flight is waited for, and its failure is heard of exactly once.

        def on_train_end(self) -> None:
            super().on_train_end()
            self.dcp_checkpoint_io.wait()

        def on_exception(self, exception: BaseException) -> None:
            super().on_exception(exception)
            try:
                self.dcp_checkpoint_io.teardown()
            except Exception as failure:  # whatever it is, what ends the training is the one to raise
                exception.add_note(f"Besides, a checkpoint could not be saved: {failure}")
                rank_zero_warn(f"A checkpoint could not be saved: {failure}")

        def teardown(self) -> None:
            self._dcp_loaded = self._dcp_resume = None
            self._dcp_set_up = False
            try:
                super().teardown()
            finally:
                self.dcp_checkpoint_io.teardown()  # FSDP and ModelParallel forget it

    DCPStrategy.__name__ = DCPStrategy.__qualname__ = f"DCP{base.__name__}"
    if base.__name__ in SUPPORTED and home_of(base) is not None:
        DCPStrategy.__module__ = package.classes  # where pickle finds it
    DCPStrategy.__doc__ = f"{base.__name__} whose checkpoints are saved and loaded by DCPCheckpointIO, on all ranks."
    return DCPStrategy


def _is_one_of(cls: type, names: tuple[str, ...]) -> bool:
    return any(has_base(cls, name) for name in names)


def _plain(optimizer: Optimizer) -> Optimizer:
    wrapper: Any = optimizer
    return wrapper.optimizer if has_base(type(wrapper), "LightningOptimizer") else optimizer
