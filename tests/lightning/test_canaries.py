"""What the integration relies on in Lightning. If one of these fails, Lightning has changed: see ``_lightning.py``.

The entry point and the question which Trainer asks are covered by ``test_promotion.py``.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from tests.launch import on_ranks
from tests.lightning import LIGHTNING, TRUSTED


@on_ranks(1)
def test_names_that_the_strategy_uses() -> None:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer.trainer import Trainer

    assert issubclass(AsyncCheckpointIO, _WrappingCheckpointIO)
    assert issubclass(_WrappingCheckpointIO, CheckpointIO)
    for hook in (
        "lightning_module_state_dict", "optimizer_state", "save_checkpoint", "load_checkpoint", "remove_checkpoint",
        "load_model_state_dict", "load_optimizer_state_dict", "process_dataloader", "on_train_start", "on_train_end",
        "on_exception", "teardown", "restore_checkpoint_after_setup", "lightning_restore_optimizer",
    ):  # fmt: skip
        assert hasattr(Strategy, hook), hook
    assert "strategy.restore_checkpoint_after_setup" in inspect.getsource(Trainer._run)
    # What begins_stage recognises: all is restored by then, and nothing has run.
    run, stage = inspect.getsource(Trainer._run), inspect.getsource(Trainer._run_stage)
    assert run.index("resume_end()") < run.index("self._run_stage()")
    assert stage.index('strategy.barrier("run-stage")') < stage.index("_run_sanity_check()")


@on_ranks(1)
def test_names_in_lightnings_own_checkpoints() -> None:
    """What Lightning calls things in its own checkpoints, in both packages, and what load_from_checkpoint enters by."""
    from dcp_plugin.core.format.foreign.detect import META
    from dcp_plugin.integration.lightning_packages import PACKAGES
    from dcp_plugin.lightning import layout

    for package in PACKAGES:
        owners = (package.pytorch.LightningModule, package.pytorch.LightningDataModule)
        keys = {owner.CHECKPOINT_HYPER_PARAMS_KEY: owner.CHECKPOINT_HYPER_PARAMS_TYPE for owner in owners}
        assert keys == layout.KEYS
        assert package.fabric("strategies.fsdp")._METADATA_FILENAME == META
        for strategy, name in layout.MODEL_NAMES.items():
            source = inspect.getsource(getattr(package.strategies, strategy).save_checkpoint)
            assert f'{{"{name}": checkpoint.pop("state_dict")}}' in source
            assert f'f"{layout.OPTIMIZER}_{{idx}}": optim_state' in source
        saving = package.module("core.saving")
        # What replace_reading replaces is called by that name, in a frame with the class, before anything is read.
        entered = inspect.getsource(saving._load_from_checkpoint)
        assert next(iter(inspect.signature(saving._load_from_checkpoint).parameters)) == "cls"
        assert "checkpoint = pl_load(checkpoint_path, map_location=map_location" in entered
        assert inspect.unwrap(saving.pl_load) is package.fabric("utilities.cloud_io")._load
        assert package.load_options(False) == TRUSTED, "Strategy.load_checkpoint"
        if LIGHTNING >= (2, 6, 6):  # an earlier Lightning has no such list
            assert f"{package.name}.cli.instantiate_module" in saving._ALLOWED_INSTANTIATORS


@on_ranks(1)
def test_the_order_of_what_a_resumed_fit_does(tmp_path: Path) -> None:
    """The order of what a resumed fit does; resume.py hangs on it. Nothing iterates before the epoch begins."""
    from tests.lightning import training as t

    t.trainer_for("single", t.checkpoints(tmp_path, "single", "plain"), max_epochs=1).fit(
        t.Model(), t.plain_loader("single")
    )
    order = []

    class Watched(t.Model):
        def on_train_start(self) -> None:
            order.append("module.on_train_start")

    trainer = t.trainer_for("single", plugin=True, max_epochs=2)
    strategy: Any = trainer.strategy
    for name in (
        "setup",
        "load_checkpoint",
        "load_model_state_dict",
        "load_optimizer_state_dict",
        "process_dataloader",
    ):
        _record(strategy, name, order)
    _record(strategy, "on_train_start", order)
    iterate, loader = t.DataLoader.__iter__, t.plain_loader("single")
    t.DataLoader.__iter__ = lambda self: order.append("iter") or iterate(self)  # type: ignore[func-returns-value]
    trainer.fit(Watched(), loader, ckpt_path=str(tmp_path / "single-plain" / "step=3.ckpt"))
    assert order == [
        "load_checkpoint", "load_model_state_dict", "setup", "load_optimizer_state_dict", "process_dataloader",
        "module.on_train_start", "on_train_start", "iter",
    ]  # fmt: skip


def _record(owner: Any, name: str, order: list[str]) -> None:
    """Instance attributes win over methods of the class that the strategy is promoted to."""
    setattr(owner, name, lambda *a, **k: order.append(name) or getattr(type(owner), name)(owner, *a, **k))


@on_ranks(1)
def test_the_counters_that_complete_epoch_rewrites() -> None:
    """The counters that complete_epoch rewrites, at the two moments that it knows."""
    from lightning.pytorch.callbacks import Callback

    from dcp_plugin.lightning import _lightning
    from tests.lightning import training as t

    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen[f"batch {args[-1]}"] = trainer.fit_loop.state_dict()

        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            seen["epoch"] = trainer.fit_loop.state_dict()

        def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
            seen[f"start {trainer.current_epoch}"] = trainer.fit_loop.state_dict()

    t.trainer_for("single", [Look()], max_epochs=2, max_steps=-1).fit(t.Model(), t.plain_loader("single"))
    moments = {name: _lightning.moment_of(state) for name, state in seen.items()}
    between = {name: moment.between_epochs for name, moment in moments.items()}
    assert between == {
        "start 0": False, "batch 0": False, "batch 1": False, "batch 2": True, "epoch": True, "start 1": True,
    }  # fmt: skip
    assert [moments[f"batch {number}"].batches_done for number in range(3)] == [1, 2, 3]
    assert [name for name, moment in moments.items() if moment.before_validation] == ["batch 2"]
    assert [name for name, moment in moments.items() if moment.before_plateau_schedules] == ["epoch"]
    for state in (seen["batch 2"], seen["epoch"]):
        assert state["epoch_progress"]["current"]["ready"] == state["epoch_progress"]["current"]["started"]
        _lightning.complete_epoch(state)
        assert set(state["epoch_progress"]["current"].values()) == {2}
        assert set(state["epoch_loop.batch_progress"]["total"].values()) == {6}
        assert state["epoch_loop.state_dict"] == {"_batches_that_stepped": 6}


@on_ranks(1)
def test_lightning_by_itself_trains_a_step_too_many(tmp_path: Path) -> None:
    """Why complete_epoch exists: Lightning by itself trains a step too many here. If this fails, rejoice and delete."""
    from tests.lightning import training as t

    class Counted(t.Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.indices = [*getattr(self, "indices", []), batch_idx]
            return super().training_step(batch, batch_idx)

    first = t.trainer_for("single", max_epochs=1)
    first.fit(t.Model(), t.plain_loader("single"))
    first.fit_loop.epoch_progress.current.completed -= 1  # as on_train_epoch_end sees it
    first.fit_loop.epoch_progress.total.completed -= 1
    first.save_checkpoint(tmp_path / "stock.ckpt")
    model = Counted()
    t.trainer_for("single").fit(model, t.plain_loader("single"), ckpt_path=str(tmp_path / "stock.ckpt"))
    assert model.indices[0] == 3, "an epoch of three batches has no fourth"


@on_ranks(1)
def test_what_loops_and_dataloaders_have_no_public_names_for() -> None:
    from dcp_plugin.lightning import _lightning
    from tests.lightning import training as t

    trainer, loaders = (
        t.trainer_for("single", max_steps=1),
        {"a": t.stateful_loader("single"), "b": t.plain_loader("single")},
    )
    trainer.fit(t.Model(), {"only": loaders["a"]}["only"])
    assert _lightning.train_dataloaders(trainer) == [loaders["a"]]
    state = trainer.fit_loop.state_dict()
    states = _lightning.take_dataloader_states(state)
    assert len(states) == 1
    assert _lightning.take_dataloader_states(state) == []
    loop = trainer.fit_loop
    loop.load_state_dict(trainer.fit_loop.state_dict())
    assert loop.restarting
    assert loop.is_resuming
    _lightning.end_restart(trainer)
    for inner in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        assert not (inner.restarting or inner.is_resuming)
        assert not inner._loaded_from_state_dict
    assert _lightning.loaders_made_in(trainer) == 0
    assert _lightning.step_of_loggers(trainer) == 1
    assert callable(loop.epoch_loop._should_check_val_fx)
    assert loop.epoch_loop._should_accumulate() is False
    assert loop.epoch_loop.batch_idx == loop.epoch_loop.batch_progress.current.ready - 1
    assert not (loop.epoch_loop.restarted_on_last or loop.epoch_loop.val_loop.restarted_mid_evaluation)
    assert trainer.callback_metrics is trainer.callback_metrics, "step_plateau_schedules writes to the mapping"
    assert callable(loop.epoch_loop.val_loop.increment_progress_to_evaluation_end)
    setup = inspect.getsource(type(loop).setup_data)  # see postpone_iteration
    assert setup.index("self._load_combined_loader_states()") < setup.index("iter(self._data_fetcher)")
    assert setup.index("self._combined_loader = combined_loader") < setup.index("self._load_combined_loader_states()")


@on_ranks(1)
def test_a_distributed_sampler_wraps_the_stateful_one_and_has_no_state() -> None:
    """What Lightning puts into a stateful dataloader on several ranks, and that it has no state."""
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    from dcp_plugin.integration.lightning_packages import inside_distributed_sampler
    from tests.lightning import training as t

    inner = t.stateful_loader("single").sampler
    wrapper = DistributedSamplerWrapper(inner, num_replicas=2, rank=0, shuffle=True)
    assert not hasattr(wrapper, "state_dict")
    assert inside_distributed_sampler(wrapper) is inner
    assert inside_distributed_sampler(inner) is None


@on_ranks(1)
def test_a_save_draws_no_random_numbers(tmp_path: Path) -> None:
    """A save draws no random numbers, in Lightning, in torchdata or here."""
    import torch
    from lightning.pytorch.callbacks import Callback

    from tests.lightning import training as t

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            before = torch.get_rng_state()
            trainer.save_checkpoint(tmp_path / "checkpoint")
            assert torch.equal(before, torch.get_rng_state())

    t.trainer_for("single", [Save()], plugin=True).fit(t.Model(), t.stateful_loader("single"))


@on_ranks(1)
def test_what_callbacks_have_no_public_names_for() -> None:
    """What callbacks have no public names for, see replace_link and unfreeze_restored_groups."""
    from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint

    assert isinstance(inspect.getattr_static(ModelCheckpoint, "_link_checkpoint"), staticmethod)
    assert list(inspect.signature(ModelCheckpoint._link_checkpoint).parameters) == ["trainer", "filepath", "linkpath"]
    assert "self._link_checkpoint(trainer, " in inspect.getsource(ModelCheckpoint._save_last_checkpoint)
    assert BackboneFinetuning()._restarting is False
    assert "self.file_exists(filepath, trainer)" in inspect.getsource(ModelCheckpoint)


@on_ranks(1)
def test_what_choosing_a_checkpoint_in_a_store_has_no_public_names_for() -> None:
    """See forget_listings, folder_of and replace_choice_of_checkpoint."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    callback = ModelCheckpoint("memory://folder")
    connector = pl.Trainer(accelerator="cpu", logger=False)._checkpoint_connector
    assert callback._ModelCheckpoint__resolve_ckpt_dir(connector.trainer) == "memory://folder"
    callback._fs.invalidate_cache()
    search = inspect.getsource(ModelCheckpoint._find_last_checkpoints)
    assert 'rf"^{self.CHECKPOINT_NAME_LAST}(-(\\d+))?"' in search
    assert "path.suffix == self.FILE_EXTENSION and bool(re.match(last_pattern, path.stem))" in search
    assert 'self.save_last == "link" and not _is_local_file_protocol(self.dirpath)' in inspect.getsource(callback.setup)
    given = ["state_fn", "ckpt_path", "model_provided", "model_connected"]
    assert list(inspect.signature(connector._parse_ckpt_path).parameters) == given
    assert inspect.getsource(connector._select_ckpt_path).count("self._parse_ckpt_path(") == 2
    choice = inspect.getsource(connector._parse_ckpt_path)
    assert "callback._find_last_checkpoints(" in choice and "fs.modified(path)" in choice
    assert "ckpt_path is None and ft_checkpoints and self.trainer.state.fn == TrainerFn.FITTING" in choice
    assert isinstance(inspect.getattr_static(type(connector), "_hpc_resume_path"), property)
    assert isinstance(inspect.getattr_static(type(connector), "hpc_save_path"), staticmethod)
    assert OnExceptionCheckpoint("memory://folder").ckpt_path == "memory://folder/on_exception.ckpt"


@on_ranks(1)
def test_what_loggers_and_omegaconf_have_no_public_names_for() -> None:
    """See replace_scan, logged_times, artifact_name; and place_in_configuration."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
    from omegaconf import OmegaConf

    from dcp_plugin.lightning._lightning import SETTINGS_LOGGED, place_in_configuration

    for logger in (MLFlowLogger, WandbLogger):
        for calls in (logger.after_save_checkpoint, logger.finalize):
            assert "self._scan_and_log_checkpoints(" in inspect.getsource(calls)
        scan = inspect.getsource(logger._scan_and_log_checkpoints)
        assert "self._logged_model_time[p] = t" in scan
        assert all(f'"{name}"' in scan and hasattr(ModelCheckpoint("x"), name) for name in SETTINGS_LOGGED)
    assert 'self._checkpoint_name = f"model-{self.experiment.id}"' in inspect.getsource(
        WandbLogger._scan_and_log_checkpoints
    )
    whole = OmegaConf.create({"a": [{"b": {}}]})
    assert place_in_configuration(whole.a[0].b) == (whole, ["a", 0, "b"])
    assert place_in_configuration(whole) == (whole, [])
