"""With ``log_model``, W&B and MLflow get the artifacts that they get of stock, under the same aliases; without it, what
the recipe of the guide logs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import trackers
from tests.launch import on_ranks
from tests.places import names_in


@pytest.mark.long
@pytest.mark.parametrize("package", ["wandb", "mlflow"])
@on_ranks(1)
def test_loggers_get_the_artifacts_that_they_get_of_stock(tmp_path: Path, package: str) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.lightning import training as t

    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_ALLOW_FILE_STORE="true")

    class Model(t.Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", (3.0, 1.0, 2.0, 5.0)[self.trainer.current_epoch])

    def fit(folder: Path, log_model: Any, io: Any) -> tuple[list[Any], Path]:
        """What was logged, and the best of it as a download has it."""
        folder.mkdir(parents=True)
        logger, logged = {"wandb": _wandb, "mlflow": _mlflow}[package](folder, log_model)
        saving = ModelCheckpoint(folder / "saved", "{epoch}", monitor="loss", save_top_k=2, save_last=True)
        trainer = t.trainer_for(
            "single", [saving], plugin=io, stock=io is None, logger=logger, max_epochs=4, max_steps=-1,
            num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(Model(), t.plain_loader("single"), t.plain_loader("single"))
        found: tuple[list[Any], Path] = logged()
        shutil.rmtree(folder / "saved")
        return found

    for log_model in ("all", True):
        expected, _ = fit(tmp_path / f"{log_model}-stock", log_model, None)
        for async_save in (False, True):
            io = t.DCPCheckpointIO(async_save=async_save)
            logged, downloaded = fit(tmp_path / f"{log_model}-{async_save}", log_model, io)
            assert logged == expected
            resumed = t.Model(seed=9)
            trainer = t.trainer_for("single", plugin=io, max_epochs=5, max_steps=-1)
            trainer.fit(resumed, t.plain_loader("single"), ckpt_path=downloaded)
            assert len(resumed.losses) == 9  # the best was of the second epoch


@on_ranks(1)
def test_the_recipe_of_the_guide_notes_a_checkpoint_in_the_runs_of_loggers(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

    from tests.lightning import training as t

    runs = trackers.Wandb(tmp_path), trackers.Mlflow(tmp_path)
    loggers = [
        WandbLogger(experiment=runs[0].run),
        MLFlowLogger(tracking_uri=f"file://{tmp_path}/mlruns", run_id=runs[1].run.info.run_id),
    ]
    saving = ModelCheckpoint(tmp_path / "saved", "{epoch}", save_top_k=1)
    io = t.DCPCheckpointIO(async_save=True)
    trainer = t.trainer_for("single", [saving], plugin=io, logger=loggers, max_epochs=1, max_steps=-1)
    trainer.fit(t.Model(), t.plain_loader("single"))
    recipe = trackers.recipe()
    recipe["to_wandb"](saving.best_model_path, trainer.loggers[0].experiment, ["best"])
    recipe["to_mlflow"](saving.best_model_path, trainer.loggers[1].run_id, ["best"])
    for run in runs:
        (logged,) = run.logged()
        assert logged.refers_to(f"file://{tmp_path}/saved/epoch=0.ckpt") and "best" in logged.aliases
        assert logged.facts["step"] == trainer.global_step == 3


def _wandb(root: Path, log_model: Any) -> Any:
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(project="tests", save_dir=root, log_model=log_model)
    run: Any = logger.experiment
    log_artifact, seen = run.log_artifact, []

    def noted(artifact: Any, aliases: list[str]) -> Any:
        seen.append((artifact, aliases))
        return log_artifact(artifact, aliases=aliases)

    run.log_artifact = noted

    def logged() -> tuple[list[Any], Path]:
        best = [artifact for artifact, aliases in seen if "best" in aliases][-1]
        for name, entry in best.manifest.entries.items():  # what download() does, for which a server is needed
            (root / "downloaded" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(entry.local_path, root / "downloaded" / name)
        run.finish()
        return [(one.metadata, one.type, aliases) for one, aliases in seen], root / "downloaded" / "model.ckpt"

    return logger, logged


def _mlflow(root: Path, log_model: Any) -> Any:
    from lightning.pytorch.loggers import MLFlowLogger

    logger = MLFlowLogger(
        tracking_uri=f"file:{root}/mlruns", artifact_location=str(root / "store"), log_model=log_model
    )

    def logged() -> tuple[list[Any], Path]:
        import yaml

        client, found = logger.experiment, []
        for folder in sorted(one.path for one in client.list_artifacts(logger.run_id)):
            downloaded = Path(client.download_artifacts(logger.run_id, folder))
            inside = names_in(downloaded)
            metadata = json.dumps(yaml.safe_load((downloaded / "metadata.yaml").read_text()), sort_keys=True)
            found.append((folder, inside, metadata, (downloaded / "aliases.txt").read_text()))
        return found, Path(client.download_artifacts(logger.run_id, "epoch=1/epoch=1.ckpt"))

    return logger, logged
