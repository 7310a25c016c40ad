"""``lightning.pytorch`` and ``pytorch_lightning``: one plugin for the Trainers of both, and neither for nothing."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tests.launch import on_ranks
from tests.training import QUIET

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _model(pl: Any, layout: str, seed: int) -> Any:
    class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.net = torch.nn.Linear(6, 3)
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if layout == "fsdp2":
                torch.distributed.fsdp.fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = self.net(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Model()


def _fit(pl: Any, layout: str, steps: int, seed: int = 0, ckpt: Path | None = None, save: Path | None = None) -> Any:
    from tests.lightning import training as t

    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    strategies = pl.strategies
    trainer = pl.Trainer(
        devices=2,
        strategy=strategies.DDPStrategy()
        if layout == "ddp"
        else strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        plugins=[t.DCPCheckpointIO()],
        callbacks=[pl.callbacks.ModelCheckpoint(save, filename="{step}", every_n_train_steps=2)] if save else [],
        max_steps=steps,
        enable_checkpointing=save is not None,
        **QUIET,
    )
    model = _model(pl, layout, seed)
    trainer.fit(model, t.DataLoader(t.data(8), batch_size=2), ckpt_path=ckpt)
    assert type(trainer.strategy).__mro__[1].__module__.startswith(pl.__name__)
    return model.losses


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@on_ranks(2)
def test_what_one_package_saved_both_resume(tmp_path: Path, layout: str) -> None:
    import warnings

    from dcp_plugin.lightning import load_from_checkpoint

    warnings.simplefilter("ignore")
    packages = [importlib.import_module(name) for name in PACKAGES]
    straight = [_fit(pl, layout, 4, save=tmp_path / f"{pl.__name__}-{layout}") for pl in packages]
    assert straight[0] == straight[1]
    for saved_by in packages:
        for resumed_by in packages:
            first = tmp_path / f"{saved_by.__name__}-{layout}-first"
            _fit(saved_by, layout, 2, save=first)
            assert _fit(resumed_by, layout, 4, 5, first / "step=2.ckpt") == straight[0][2:]
            if layout == "fsdp2":
                whole = load_from_checkpoint(type(_model(resumed_by, "", 5)), first / "step=2.ckpt")
                assert isinstance(whole, resumed_by.LightningModule)


@on_ranks(1)
def test_a_mixture_of_the_packages_is_refused(tmp_path: Path) -> None:
    import lightning.pytorch as new
    import pytorch_lightning as old

    from dcp_plugin import CheckpointError
    from dcp_plugin.lightning import DCPCheckpointIO, of_lightning, of_pytorch_lightning

    options: Any = {"accelerator": "cpu", "logger": False, "plugins": [DCPCheckpointIO()], "default_root_dir": tmp_path}
    for mine, other, classes in ((new, old, of_pytorch_lightning), (old, new, of_lightning)):
        for callback in (classes.DCPCallback(), other.callbacks.ModelCheckpoint(every_n_epochs=2)):
            trainer = mine.Trainer(callbacks=[callback], **options)
            with pytest.raises(CheckpointError, match=f"of `{mine.__name__}` and its .* of `{other.__name__}`"):
                trainer.fit(_model(mine, "single", 0), torch.utils.data.DataLoader(torch.zeros(2, 6)))
        with pytest.raises(TypeError, match="must be a `LightningModule`"):  # Lightning's own
            mine.Trainer(**options).fit(_model(other, "single", 0), torch.utils.data.DataLoader(torch.zeros(2, 6)))


def _python(code: str) -> str:
    done = programs.run("-c", f"import warnings; warnings.simplefilter('ignore')\n{code}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("package", "other"), [PACKAGES, pytest.param(*PACKAGES[::-1], marks=pytest.mark.long)])
def test_one_package_is_enough(package: str, other: str) -> None:
    _python(
        f"import sys; sys.modules[{other.partition('.')[0]!r}] = None\n"
        "from dcp_plugin.lightning import DCPCheckpointIO\n"
        f"import {package} as pl\n"
        "trainer = pl.Trainer(accelerator='cpu', logger=False, plugins=[DCPCheckpointIO()])\n"
        "from dcp_plugin.lightning import DCPCallback\n"
        "assert any(isinstance(one, DCPCallback) for one in trainer.callbacks)\n"
        "assert issubclass(DCPCallback, pl.Callback)"
    )


def test_a_plugin_made_before_either_package_is_imported_suits_both() -> None:
    _python(
        "from dcp_plugin.lightning import DCPCheckpointIO; import sys\n"
        "assert not {'lightning', 'pytorch_lightning'} & set(sys.modules)\n"
        "io = DCPCheckpointIO()\n"
        "import lightning.pytorch, pytorch_lightning\n"
        "for pl in (lightning.pytorch, pytorch_lightning):\n"
        "    assert pl.Trainer(accelerator='cpu', logger=False, plugins=[io]).strategy.checkpoint_io is io"
    )


def test_without_lightning_the_import_says_how_to_get_it() -> None:
    said = _python(
        "import sys; sys.modules.update(lightning=None, pytorch_lightning=None, lightning_utilities=None)\n"
        "try:\n    import dcp_plugin.lightning\nexcept ImportError as error:\n    print(error)"
    )
    assert 'pip install "dcp-plugin[lightning]"' in said
