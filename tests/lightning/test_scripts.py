"""Three scripts as their authors publish them, with the one added line: killed in the third epoch, started again with
``ckpt_path="last"``, and compared with the run that was not killed, or with stock where stock itself loses something.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import programs

COMMON = """
import os, sys, signal
from copy import deepcopy
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint, ModelPruning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder, ours, kill_at, resume = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3]), sys.argv[4] == "True"

class Classifier(pl.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if self.global_step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.head(self.backbone(batch[0])).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]

def train(model, *callbacks):
    plugins = []
    if ours:
        from dcp_plugin.lightning import DCPCheckpointIO
        plugins = [DCPCheckpointIO()]  # the added line
    keep = ModelCheckpoint(folder, save_last=True, monitor="train_loss")
    trainer = pl.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, keep], plugins=plugins,
    )
    samples = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    trainer.fit(model, DataLoader(TensorDataset(samples), batch_size=2), ckpt_path="last" if resume else None)
    print([(name, value.double().sum().item()) for name, value in sorted(model.state_dict().items())])
    return keep

pl.seed_everything(0)
"""

EMA = """
class EMA(Callback):
    # Smoothed weights are what is validated and stored; the live ones travel beside them.
    def __init__(self, decay=0.9):
        self.decay, self.ema_state_dict = decay, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = pl_module.state_dict()
        if self.ema_state_dict is None:
            self.ema_state_dict = {key: value.detach().clone() for key, value in state.items()}
        for key, value in state.items():
            ema = self.ema_state_dict[key]
            ema.copy_(self.decay * ema + (1.0 - self.decay) * value)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["current_model_state"] = deepcopy(checkpoint["state_dict"])
        checkpoint["state_dict"] = {key: self.ema_state_dict[key] for key in checkpoint["state_dict"]}

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.ema_state_dict = {key: value.clone() for key, value in checkpoint["state_dict"].items()}
        pl_module.load_state_dict(checkpoint["current_model_state"])

model, ema = Classifier(), EMA()
model.backbone = torch.compile(model.backbone, backend="eager")
train(model, ema)
print([(name, value.double().sum().item()) for name, value in sorted(ema.ema_state_dict.items())])
"""

PRUNING = """
def compute_amount(epoch):
    return 0.5 if epoch == 1 else 0.25 if epoch < 4 else 0.01

keep = train(Classifier(), ModelPruning("l1_unstructured", amount=compute_amount))
best = Classifier.load_from_checkpoint(keep.best_model_path)
print(sum((parameter == 0).sum().item() for parameter in best.parameters()))
"""

FINE_TUNING = """
class FeatureExtractorFreezeUnfreeze(BaseFinetuning):
    # From Lightning's documentation.
    def __init__(self, unfreeze_at_epoch=1):
        super().__init__()
        self._unfreeze_at_epoch = unfreeze_at_epoch

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, current_epoch, optimizer):
        if current_epoch == self._unfreeze_at_epoch:
            self.unfreeze_and_add_param_group(modules=pl_module.backbone, optimizer=optimizer, train_bn=True)

model = Classifier()
model.backbone = torch.compile(model.backbone, backend="eager")
train(model, FeatureExtractorFreezeUnfreeze())
"""


def _run(script: str, folder: Path, *, ours: bool, killed_at: int = -1, resumes: bool = False) -> str:
    arguments = ("-c", COMMON + script, folder, ours, killed_at, resumes)
    imported = (*programs.LIGHTNING, "lightning.pytorch.callbacks.pruning")
    ran = programs.run(*arguments, imported=imported, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert ran.returncode == (-signal.SIGKILL if killed_at >= 0 else 0), ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("script", "oracle"),
    [(EMA, "not killed"), (PRUNING, "stock"), (FINE_TUNING, "not killed")],
    ids=["averages of a compiled model", "pruning", "fine-tuning of a compiled part"],
)
def test_a_killed_script_ends_as_if_it_had_not_been_killed(tmp_path: Path, script: str, oracle: str) -> None:
    """Stock loses the masks of a pruned model, so its resumed run is another than the one that was not killed."""
    ends = {}
    for ours in (True, False) if oracle == "stock" else (True,):
        _run(script, tmp_path / str(ours), ours=ours, killed_at=15)
        ends[ours] = _run(script, tmp_path / str(ours), ours=ours, resumes=True)
    expected = ends[False] if oracle == "stock" else _run(script, tmp_path / "whole", ours=False)
    assert ends[True] == expected
