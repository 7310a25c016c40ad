"""``load_from_checkpoint``, Lightning's own and ours, opens what Lightning alone cannot, and does the same with it."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from dcp_plugin.core.media import medium_of
from dcp_plugin.core.paths import Where, as_path
from tests import launch, programs
from tests.compare import assert_same, weights_of
from tests.damage import flip_any
from tests.launch import on_ranks
from tests.lives import read, write
from tests.messages import warned
from tests.object_server import Bucket
from tests.programs import LIGHTNING
from tests.training import QUIET


def _save(root: Path, layouts: list[str]) -> None:
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as stock
    from tests.lightning import training as t

    for layout in layouts:
        for name, plugins in (("stock", None), ("ours", [DCPCheckpointIO()])):
            keep = stock.first_checkpoint(root / f"{layout}-{name}")
            trainer, model = stock.fit(layout, 1, callbacks=[keep], plugins=plugins)
            write(root, f"{layout}-{name}", model.losses, t.whole_state(trainer))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("load_from_checkpoint")
    launch.run(_save, 1, root, ["single"])
    launch.run(_save, 2, root, ["fsdp1", "fsdp2"])
    return root


@pytest.mark.parametrize("copied_to_a_store", [False, True])
@on_ranks(1)
def test_a_model_comes_from_any_checkpoint_with_its_hyper_parameters(root: Path, copied_to_a_store: bool) -> None:
    from dcp_plugin.lightning import load_from_checkpoint
    from tests.lightning.stock_training import StockModel

    class Watching(StockModel):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen_in_checkpoint = checkpoint

    place: Where = root
    if copied_to_a_store:
        place = as_path("memory://copied")
        for path in (path for path in root.rglob("*") if path.is_file()):
            with fsspec.open(str(place / path.relative_to(root).as_posix()), "wb") as copy:
                copy.write(path.read_bytes())
    for name in ("single-ours", "fsdp1-ours", "fsdp2-ours", "single-stock", "fsdp1-stock", "fsdp2-stock"):
        path = place / name / "first.ckpt"
        model = load_from_checkpoint(StockModel, path, layout="single", seed=5)
        assert (model.hparams.width, model.hparams.seed) == (7, 5)
        _, saved = read(root, name)
        assert_same(weights_of(saved), model.state_dict())
        watching = load_from_checkpoint(Watching, path, layout="single")
        assert len(watching.seen_in_checkpoint["optimizer_states"]) == 1
        assert watching.seen_in_checkpoint["global_step"] == 3
        if medium_of(path).kind(path) == "folder":  # a device to tell from the CPU where there is no other
            on_meta = load_from_checkpoint(StockModel, path, layout="single", map_location="meta")
            assert next(on_meta.parameters()).is_meta


@on_ranks(1)
def test_an_object_in_place_of_its_class_is_told(root: Path) -> None:
    from dcp_plugin.lightning import load_from_checkpoint
    from tests.lightning.stock_training import StockModel

    model: Any = StockModel("single")
    for path in (root / "single-ours" / "first.ckpt", root / "single-stock" / "first.ckpt"):
        with pytest.raises(TypeError, match=r"its class, not a StockModel\. .* dcp_plugin\.load"):
            load_from_checkpoint(model, path)


@on_ranks(1)
def test_strict_is_what_it_is_for_lightning(root: Path) -> None:
    from dcp_plugin.lightning import load_from_checkpoint
    from tests.lightning.stock_training import StockModel

    class Adapted(StockModel):
        def __init__(self, **hyper_parameters: Any) -> None:
            super().__init__(**hyper_parameters)
            self.adapter = torch.nn.Linear(1, 1)

    path = root / "fsdp2-ours" / "first.ckpt"
    with pytest.raises(RuntimeError, match=r"adapter\.weight"):
        load_from_checkpoint(Adapted, path, layout="single")
    with warned("adapter.weight") as said:
        load_from_checkpoint(Adapted, path, strict=False, layout="single")
    assert said


@on_ranks(1)
def test_configurations_and_the_command_line_get_their_classes_back(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.cli import LightningCLI
    from omegaconf import DictConfig, OmegaConf

    from dcp_plugin.lightning import DCPCheckpointIO, load_from_checkpoint
    from tests.lightning import stock_training as stock

    class Configured(stock.StockModel):
        def __init__(self, config: Any) -> None:
            super().__init__(width=config.width)
            self.save_hyperparameters(config)
            self.config = config

    trainer = pl.Trainer(accelerator="cpu", logger=False, plugins=[DCPCheckpointIO()], enable_progress_bar=False)
    trainer.strategy.connect(Configured(OmegaConf.create({"width": 9})))
    trainer.save_checkpoint(tmp_path / "omegaconf")
    loaded = load_from_checkpoint(Configured, tmp_path / "omegaconf")
    assert isinstance(loaded.config, DictConfig)
    assert loaded.net[1].weight.shape == (9, 6)

    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    cli = LightningCLI(
        stock.StockModel, run=False, save_config_callback=None, trainer_defaults=options, args=["--model.width=8"]
    )
    cli.trainer.strategy.checkpoint_io = DCPCheckpointIO()
    cli.trainer.strategy.connect(cli.model)
    cli.trainer.save_checkpoint(tmp_path / "cli")
    assert load_from_checkpoint(stock.StockModel, tmp_path / "cli").hparams.width == 8


@on_ranks(1)
def test_a_datamodule_comes_back_with_its_state(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from dcp_plugin.lightning import DCPCheckpointIO, load_from_checkpoint
    from tests.lightning import stock_training as stock

    class Data(pl.LightningDataModule):
        def __init__(self, folder: str) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.read = 0

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 6)))

        def state_dict(self) -> dict[str, Any]:
            return {"read": self.trainer.global_step}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.read = state["read"]

    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="first", every_n_epochs=1)
    trainer = pl.Trainer(plugins=[DCPCheckpointIO()], max_epochs=1, callbacks=[keep], **QUIET)
    trainer.fit(stock.StockModel(), datamodule=Data("/data"))
    data = load_from_checkpoint(Data, tmp_path / "first.ckpt")
    assert (data.hparams.folder, data.read) == ("/data", 4)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@on_ranks(1)
def test_lightnings_own_method_opens_what_ours_opens(root: Path, package: str) -> None:
    import importlib

    pl: Any = importlib.import_module(package)
    from dcp_plugin.lightning import DCPCheckpointIO, load_from_checkpoint

    class Small(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(width, width)

    class Data(pl.LightningDataModule):  # type: ignore[misc]
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.read = state["read"]

    url, path, file = as_path(f"memory://{package}/small.ckpt"), root / f"{package}-small", root / f"{package}.ckpt"
    weights = {"state_dict": Small(3).state_dict(), "hyper_parameters": {"width": 3}}
    for place in (url, path):
        DCPCheckpointIO().save_checkpoint({**weights, Data.__qualname__: {"read": 5}}, place)
        assert Small.load_from_checkpoint(str(place)).layer.weight.shape == (3, 3)
        assert load_from_checkpoint(Small, place).layer.weight.shape == (3, 3)
        assert Data.load_from_checkpoint(str(place)).read == 5
        with pytest.raises(RuntimeError, match="size mismatch"):
            Small.load_from_checkpoint(str(place), width=4)
    torch.save({**weights, "pytorch-lightning_version": pl.__version__}, file)
    assert Small.load_from_checkpoint(file).layer.weight.shape == (3, 3)
    for missing in (root / "none.ckpt", "memory://none.ckpt"):
        with pytest.raises(FileNotFoundError):
            Small.load_from_checkpoint(missing)


@on_ranks(1)
def test_code_in_a_file_is_executed_only_where_it_is_allowed(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    from dcp_plugin import UnsafeCheckpoint
    from dcp_plugin.lightning import load_from_checkpoint

    weights, path = BoringModel().state_dict(), tmp_path / "x.ckpt"
    saved = {"state_dict": weights, "pytorch-lightning_version": pl.__version__, "code": argparse.Namespace()}
    torch.save(saved, path)
    for weights_only in (None, True):
        with pytest.raises((UnsafeCheckpoint, pickle.UnpicklingError), match=r"argparse\.Namespace"):
            load_from_checkpoint(BoringModel, path, weights_only=weights_only)
    assert_same(load_from_checkpoint(BoringModel, path, weights_only=False).state_dict(), weights)


@on_ranks(1)
def test_lightnings_own_method_opens_directories_of_its_sharded_strategies(root: Path) -> None:
    from dcp_plugin.lightning import load_from_checkpoint
    from tests.lightning.stock_training import StockModel

    for name in ("fsdp1-stock", "fsdp2-stock"):
        path = root / name / "first.ckpt"
        own = StockModel.load_from_checkpoint(path, layout="single", map_location="cpu")
        assert_same(load_from_checkpoint(StockModel, path, layout="single").state_dict(), own.state_dict())
        assert own.hparams.width == 7


@on_ranks(1)
def test_lightnings_own_method_opens_a_checkpoint_in_a_bucket(bucket: Bucket) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    from dcp_plugin.lightning import DCPCheckpointIO, load_from_checkpoint

    saved = BoringModel()
    url = f"{bucket.url}/run/last.ckpt"
    DCPCheckpointIO().save_checkpoint({"state_dict": saved.state_dict()}, url)
    assert_same(saved.state_dict(), BoringModel.load_from_checkpoint(url).state_dict())
    assert_same(saved.state_dict(), load_from_checkpoint(BoringModel, url).state_dict())


def test_who_does_not_import_the_plugin_has_lightning_as_it_is() -> None:
    code = """
import sys, dcp_plugin, lightning.pytorch as pl
from lightning.pytorch.core import saving
from lightning.fabric.utilities.cloud_io import _load
pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
assert saving.pl_load is _load and "dcp_plugin.lightning" not in sys.modules
import dcp_plugin.lightning
assert saving.pl_load.__wrapped__ is _load
"""
    ran = programs.run("-c", code, imported=LIGHTNING)
    assert ran.returncode == 0, ran.stderr


@on_ranks(1)
def test_of_the_optimizers_no_byte_is_read(root: Path, tmp_path: Path) -> None:
    import shutil

    from dcp_plugin import CheckpointCorrupt
    from dcp_plugin.lightning import load_from_checkpoint
    from tests.lightning.stock_training import StockModel

    class Hooked(StockModel):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["optimizer_states"]

    path = tmp_path / "first.ckpt"
    shutil.copytree(root / "fsdp2-ours" / "first.ckpt", path)
    flip_any(path, "optim")
    assert load_from_checkpoint(StockModel, path, layout="single").hparams.width == 7
    with pytest.raises(CheckpointCorrupt, match="optim"):  # a hook is shown all
        load_from_checkpoint(Hooked, path, layout="single")
    flip_any(path, "model")
    with pytest.raises(CheckpointCorrupt, match="model"):
        load_from_checkpoint(StockModel, path, layout="single")


@on_ranks(1)
def test_a_checkpoint_cannot_name_a_function_to_be_called(tmp_path: Path) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    from dcp_plugin import UnsafeCheckpoint
    from dcp_plugin.lightning import DCPCheckpointIO, load_from_checkpoint

    weights = {"state_dict": BoringModel().state_dict()}
    for key in ("hyper_parameters", "hparams"):
        for named in ("os.system", ["os.system"]):
            path = tmp_path / f"{key}-{type(named).__name__}.ckpt"
            DCPCheckpointIO().save_checkpoint({**weights, key: {"_instantiator": named}}, path)
            with pytest.raises(UnsafeCheckpoint, match=r"os\.system.*as the function that makes the BoringModel"):
                load_from_checkpoint(BoringModel, path)
            with pytest.raises(UnsafeCheckpoint, match=r"os\.system"):
                BoringModel.load_from_checkpoint(path)


@pytest.mark.parametrize(
    ("value", "how"),
    [
        ({"a": 1}, {"is": "OmegaConf"}),
        ("a: ${noted:}", {"is": "DictConfig"}),
        ([1], {"is": "DictConfig"}),
        ({"a": "${noted:"}, {"is": "DictConfig"}),
        ({"a": 1}, {"is": "DictConfig", "root": {"a": "${noted:}"}, "keys": ["a"]}),
        ({"a": 1}, {"in": {"a": {"is": "DictConfig"}}}),
        ({"a": 1}, 3),
    ],
)
def test_hyper_parameters_of_types_that_do_not_fit_stay_plain(
    monkeypatch: pytest.MonkeyPatch, value: Any, how: Any
) -> None:
    """They come from the checkpoint, which may be from anybody."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    from dcp_plugin.lightning.layout import TYPES, restore_configurations

    how = {"root": None, "keys": [], "flags": {"struct": False, "readonly": False}, **how} if type(how) is dict else how
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # Lightning sets it, which is not imported here
    checkpoint = {"hyper_parameters": value, TYPES: {"hyper_parameters": how}}
    with pytest.warns(UserWarning, match="stay plain"):
        restore_configurations(checkpoint)
    assert checkpoint == {"hyper_parameters": value}
