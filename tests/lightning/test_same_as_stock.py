"""A script that is run with stock Lightning and with ours: the same hooks in the same order, files and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch import on_ranks
from tests.lightning import TRUSTED
from tests.places import names_in


class Interrupted(Exception):
    """What a user's code raises in these scripts."""


def assert_same_run(root: Path, script: Callable[[Path, bool], Any]) -> Any:
    """Run ``script(folder, stock)`` with both and compare what it returns; gives that."""
    seen = {}
    for stock in (True, False):
        folder = root / ("stock" if stock else "ours")
        folder.mkdir(parents=True, exist_ok=True)
        seen[stock] = script(folder, stock)
    assert seen[False] == seen[True], f"{seen[False]}\n is not \n{seen[True]}"
    return seen[True]


def traced(*hooks: str) -> Any:
    """A callback that notes which hooks are called, and in which epoch and step."""
    from lightning.pytorch.callbacks import Callback

    def noting(name: str) -> Any:
        def hook(self: Any, trainer: Any, *args: Any) -> None:
            self.calls.append((name, trainer.current_epoch, trainer.global_step))

        return hook

    made: Any = type("Traced", (Callback,), {f"on_{name}": noting(name) for name in hooks})()
    made.calls = []
    return made


@on_ranks(1)
def test_what_an_epoch_still_had_to_do_after_its_last_batch_is_done_after_the_resume(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.lightning import training as t

    class Model(t.Model):
        interrupted_in = ""

        def on_fit_start(self) -> None:
            self.net[0][1].p = 0.0  # stock restores no random numbers

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(batch[0]).square().mean())
            self.interrupt("validation_step")

        def on_validation_end(self) -> None:
            self.interrupt("validation_end")

        def interrupt(self, where: str) -> None:
            if where == self.interrupted_in and self.trainer.current_epoch == 1:
                self.trainer.save_checkpoint(self.path)
                raise Interrupted

    def script(root: Path, stock: bool) -> Any:
        def fit(seed: int, interrupted_in: str = "", **options: Any) -> Any:
            trace = traced("train_epoch_start", "validation_start", "validation_end", "train_epoch_end", "train_end")
            best = ModelCheckpoint(root / moment, "best-{epoch}", monitor="loss", mode="max", save_top_k=-1)
            trainer = t.trainer_for("single", [trace, best], stock=stock, max_epochs=3, max_steps=-1, **options)
            model = Model(seed=seed)
            model.interrupted_in, model.path = interrupted_in, path
            loader, validation = t.DataLoader(t.data(4), batch_size=2), t.DataLoader(t.data(6), batch_size=2)
            trainer.fit(model, loader, validation, ckpt_path=None if interrupted_in else path)
            return trace.calls, model.losses, best.best_model_path, trainer.fit_loop.state_dict()

        seen = {}
        for moment in ("validation_step", "validation_end"):
            path = root / f"{moment}.ckpt"
            with pytest.raises(Interrupted):
                fit(0, moment, num_sanity_val_steps=0)
            calls, losses, best_path, loops = fit(9, num_sanity_val_steps=0)
            files = names_in(root / moment)
            seen[moment] = calls, losses, Path(best_path).name, loops, files
        return seen

    seen = assert_same_run(tmp_path, script)
    calls, _, _, _, files = seen["validation_step"]
    assert ("validation_end", 1, 4) in calls
    assert "best-epoch=1.ckpt" in files
    assert seen["validation_end"][0][0] == ("train_epoch_end", 1, 4)


@on_ranks(1)
def test_no_hook_is_called_more_often_than_by_stock(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import StepLR

    from tests.lightning import training as t

    calls: list[str] = []

    def noting(cls: type[Any], *prefixes: str) -> Any:
        """A subclass with hooks that note that they are called, and do nothing else."""

        def overriding(name: str) -> Any:
            def hook(self: Any, *args: Any, **options: Any) -> Any:
                calls.append(f"{cls.__name__}.{name}")
                return getattr(super(made, self), name)(*args, **options)

            return hook

        names = [name for name in dir(cls) if name.startswith(prefixes) and name != "configure_sharded_model"]
        made = type(f"Noting{cls.__name__}", (cls,), {name: overriding(name) for name in names})
        return made

    state = ("state_dict", "load_state_dict")
    hooks = ("on_", "setup", "teardown", "prepare_data", *state)

    class Model(t.Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = noting(AdamW, *state, "step")(self.parameters())
            return [optimizer], [noting(StepLR, *state)(optimizer, 1)]

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return noting(t.StatefulDataLoader, *state, "__iter__")(t.data(6), batch_size=2)

        def val_dataloader(self) -> Any:
            return t.DataLoader(t.data(4), batch_size=2)

    def script(root: Path, stock: bool) -> Any:
        seen = []
        for path in (None, root / "last.ckpt"):
            calls.clear()
            saving = noting(ModelCheckpoint, *state)(root, "{epoch}", monitor="loss", save_last=True)
            stopping = noting(EarlyStopping, *state)("loss", patience=9)
            callbacks = [noting(Callback, *hooks)(), saving, stopping]
            trainer = t.trainer_for("single", callbacks, stock=stock, max_epochs=3 if path else 2, max_steps=-1)
            data = noting(Data, *hooks, "train_dataloader", "val_dataloader")()
            trainer.fit(noting(Model, *hooks, "configure_")(), datamodule=data, ckpt_path=path)
            if path is not None:
                trainer.validate(datamodule=data, ckpt_path="best", verbose=False)
            # To fill what is there, a load has to see it; and a resumed epoch begins like any other.
            looked_at = ("Model.state_dict", "AdamW.state_dict", "StatefulDataLoader") if path else "-"
            # Before the first step, a resume compares the schedule with what it has loaded.
            begin = calls.index("Callback.on_train_start") if path else 0
            compared = [call for call in calls[:begin] if call != "StepLR.state_dict"]
            seen.append([call for call in compared + calls[begin:] if not call.startswith(looked_at)])
        return seen

    (fit, resumed) = assert_same_run(tmp_path, script)
    for call in ("Callback.state_dict", "Model.on_save_checkpoint", "Data.state_dict", "StepLR.state_dict"):
        assert call in fit and call in resumed


@on_ranks(1)
def test_what_omegaconf_made_is_omegaconfs_again_and_nothing_is_resolved_on_the_way(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    import torch
    from omegaconf import OmegaConf

    from dcp_plugin.lightning import DCPCheckpointIO, load_from_checkpoint
    from tests.lightning import training as t

    resolved: list[str] = []
    OmegaConf.register_new_resolver("noted", lambda name: resolved.append(name) or name)
    whole = OmegaConf.create(
        {"width": 4, "model": {"in": "${width}", "who": "${noted:me}", "layers": [1, {"a": None}], "seed": "???"}}
    )
    OmegaConf.set_struct(whole, True)
    fixed = OmegaConf.create({"lr": 0.1, "noted": "${noted:fixed}"})
    OmegaConf.set_readonly(fixed, True)

    class Parts(t.Model):
        def __init__(self, model: Any, layers: Any, nested: Any, lr: float = 0.5) -> None:
            super().__init__()
            self.resolved_before = list(resolved)
            self.save_hyperparameters()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen_in_checkpoint = checkpoint

    class Whole(t.Model):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.resolved_before = list(resolved)
            self.save_hyperparameters(config)  # which compares, and therefore resolves

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen_in_checkpoint = checkpoint

    def told(value: Any) -> Any:
        if not OmegaConf.is_config(value):
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            return type(value), {key: told(item) for key, item in items} or value
        flags = OmegaConf.is_struct(value), bool(OmegaConf.is_readonly(value))
        inside = [OmegaConf.is_config(value[key]) for key in value if key in ("model", "layers")]
        return type(value), OmegaConf.to_container(value), flags, inside

    def script(root: Path, stock: bool) -> Any:
        plugins = None if stock else [DCPCheckpointIO()]
        seen: list[Any] = []
        parts = {"model": whole.model, "layers": whole.model.layers, "nested": {"list": [fixed, 3]}}
        for made in (Parts(**parts), Whole(whole), Whole(fixed)):
            trainer = pl.Trainer(accelerator="cpu", logger=False, plugins=plugins, enable_progress_bar=False)
            trainer.strategy.connect(made)
            trainer.save_checkpoint(root / "x")
            resolved.clear()
            if stock:
                in_checkpoint = torch.load(root / "x", weights_only=False)
                loaded = type(made).load_from_checkpoint(root / "x", **TRUSTED)
            else:
                in_checkpoint = DCPCheckpointIO().load_checkpoint(root / "x")
                loaded = load_from_checkpoint(type(made), root / "x")
                assert not loaded.resolved_before
                assert told(loaded.hparams) == told(made.hparams)
            seen += [told(in_checkpoint["hyper_parameters"]), in_checkpoint.get("hparams_type"), type(loaded.hparams)]
            if isinstance(loaded, Parts):  # of a whole one stock loses the flags, and resolves what is at its top
                model = loaded.hparams.model
                seen += [told(loaded.hparams), told(loaded.seen_in_checkpoint["hyper_parameters"])]
                seen += [model["in"], model.who, resolved]
        return seen

    assert_same_run(tmp_path, script)
