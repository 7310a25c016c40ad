"""The ways in which a plugin is used: from YAML, by hand, again and again, beside loggers, and not at all."""

from __future__ import annotations

import logging
import os
import re
import threading
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from tests import launch, programs
from tests.compare import assert_same, weights_of
from tests.launch import on_ranks
from tests.messages import logged
from tests.places import names_in
from tests.programs import LIGHTNING

YAML = """
trainer:
  max_steps: 2
  accelerator: cpu
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: {root}
  plugins:
    - class_path: dcp_plugin.lightning.DCPCheckpointIO
      init_args:
        async_save: {asynchronous}
        keep_last: {{newest: 3}}
        io: {{threads: 1}}
        keeper: {keeper}
        weights_only: true
  callbacks:
    - class_path: dcp_plugin.lightning.DCPCallback
      init_args:
        log_metrics: false
"""


@on_ranks(1)
def test_lightning_cli_takes_the_plugin_from_yaml_and_checks_its_fields(tmp_path: Path) -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    from dcp_plugin.lightning import DCPCallback

    def run(asynchronous: object, keeper: str = "null") -> Any:
        (tmp_path / "given.yaml").write_text(YAML.format(root=tmp_path, asynchronous=asynchronous, keeper=keeper))
        arguments = ["fit", "--config", str(tmp_path / "given.yaml")]
        return LightningCLI(BoringModel, args=arguments).trainer

    trainer = run("true")
    io = trainer.strategy.checkpoint_io
    expected = dcp.CheckpointConfig(async_save=True, keep_last=dcp.Retention(newest=3), io=dcp.IO(threads=1))
    assert (io.config, io.weights_only) == (expected, True)
    assert [callback.log_metrics for callback in trainer.callbacks if isinstance(callback, DCPCallback)] == [False]
    assert dcp.inspect(trainer.checkpoint_callback.best_model_path).step == 2
    with pytest.raises(SystemExit):
        run("banana")
    with pytest.raises(SystemExit):
        run("true\n        no_such_field: 1")
    with pytest.raises(SystemExit):
        run("true", keeper="{no_such_field: 1}")


@on_ranks(1)
def test_lightning_cli_takes_what_the_page_on_hydra_writes_out(tmp_path: Path) -> None:
    import hydra
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    section = (programs.ROOT / "docs" / "guides" / "hydra.md").read_text().partition("## LightningCLI\n")[2]
    (page,) = re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    written = dict(re.findall(r"^\| `(\w+)` \| `(\{.*\})` \|$", section, re.MULTILINE))
    groups = programs.ROOT / "dcp_plugin" / "conf" / "dcp_plugin" / "checkpoint"
    assert written.keys() == {file.stem for file in groups.glob("*.yaml")}
    assert page.count("{async_save: true}") == 1
    os.chdir(tmp_path)
    os.environ["USER"] = "me"

    trainer_alone = page.partition("\n")[2]
    assert page.splitlines()[0] == "ckpt_path: last"
    quiet = [f"--trainer.{name}=false" for name in ("logger", "enable_progress_bar", "enable_model_summary")]

    def made(init_args: str) -> Any:
        Path("given.yaml").write_text(trainer_alone.replace("{async_save: true}", init_args))
        return LightningCLI(BoringModel, run=False, args=["--config", "given.yaml", *quiet]).trainer

    for option, init_args in written.items():
        with hydra.initialize_config_dir(str(tmp_path), version_base=None):
            group = hydra.compose(overrides=[f"+dcp_plugin/checkpoint={option}"]).dcp_plugin.checkpoint
        assert made(init_args).strategy.checkpoint_io.config == hydra.utils.instantiate(group), option
    with pytest.raises(SystemExit):
        made("{asnyc_save: true}")

    Path("page.yaml").write_text(page)
    arguments = ["fit", "--config", "page.yaml", *quiet, "--trainer.accelerator=cpu", "--trainer.limit_train_batches=2"]
    for epochs in (1, 3):
        given = [*arguments, f"--trainer.max_epochs={epochs}"]
        trainer = LightningCLI(BoringModel, args=given, save_config_kwargs={"overwrite": True}).trainer
        assert trainer.global_step == 2 * epochs
    batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
    assert batches == 6 and dcp.inspect("run/last.ckpt").step == 6, "the second went on from the first"


def test_the_constructor_takes_a_configuration_and_fields() -> None:
    from dcp_plugin.lightning import DCPCheckpointIO

    io = DCPCheckpointIO(dcp.CheckpointConfig(io=dcp.IO(threads=3)), async_save=True)
    assert io.config == dcp.CheckpointConfig(io=dcp.IO(threads=3), async_save=True)
    with pytest.raises(TypeError, match="no_such_field"):
        DCPCheckpointIO(no_such_field=1)
    with pytest.raises(ValueError, match="init_from=PATH"):
        DCPCheckpointIO(partial=dcp.PartialLoad())


@on_ranks(2)
def test_loggers_get_the_cost_of_each_save_and_people_a_line(tmp_path: Path) -> None:
    import csv

    from lightning.pytorch.loggers import CSVLogger
    from lightning_utilities.core import rank_zero

    from tests.lightning import training as t

    said = logged(rank_zero.log.name)
    saving = t.ModelCheckpoint(tmp_path / "run", save_top_k=-1)
    csv_logger = CSVLogger(tmp_path / "csv", version=0)
    io = t.DCPCheckpointIO(async_save=True)
    trainer = t.trainer_for("ddp", [saving], plugin=io, logger=csv_logger)
    rank_zero.log.setLevel(logging.INFO)
    trainer.fit(t.Model("ddp"), t.plain_loader("ddp"))
    assert not any(key.startswith("checkpoint/") for key in (*trainer.callback_metrics, *trainer.logged_metrics))
    assert "after_save_checkpoint" not in vars(csv_logger)
    torch.distributed.barrier()
    with open(tmp_path / "csv" / "lightning_logs" / "version_0" / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("checkpoint/seconds")]
    assert len(rows) == 2 and int(rows[0]["step"]) >= 3 and rows[1]["step"] == "6"
    assert all(float(row["checkpoint/gigabytes"]) > 0 for row in rows)
    assert all(float(row["checkpoint/seconds"]) >= float(row["checkpoint/blocked_seconds"]) > 0 for row in rows)
    saved = [text for text in said if text.startswith("Saved")]
    names = [f"Saved {tmp_path}/run/epoch={n}-step={3 * n + 3}.ckpt" for n in (0, 1)]
    assert [text.split(":")[0] for text in saved] == (names if trainer.is_global_zero else [])
    assert all(re.search(r": [\d.]+ [KM]iB in [\d.]+ s \([\d.]+ [KM]iB/s\)", text) for text in saved)


def test_what_was_linked_is_told_and_does_not_count_as_written(tmp_path: Path) -> None:
    from dcp_plugin.lightning import DCPCheckpointIO

    model = torch.nn.Linear(600, 600).requires_grad_(False)
    figures: list[dict[str, float]] = []
    seconds: list[float] = []
    io = DCPCheckpointIO()
    io.on_saved = figures.append
    for number in range(2):
        handle = io.save({"model": model, "step": number}, tmp_path / str(number), number)
        io.wait()
        assert handle.finished is not None
        seconds.append(handle.finished.seconds)
    io.teardown()
    first, second = figures
    assert first["checkpoint/gigabytes"] == pytest.approx(second["checkpoint/gigabytes"], rel=0.01)
    written = [saved["checkpoint/gb_per_second"] * duration for saved, duration in zip(figures, seconds, strict=True)]
    assert written[0] == pytest.approx(first["checkpoint/gigabytes"]), "nothing is linked"
    assert second["checkpoint/gigabytes"] - written[1] == pytest.approx(600 * 600 * 4 / 1e9, rel=0.05)
    assert written[1] < 0.1 * written[0]


@on_ranks(1)
def test_what_loggers_hear_of_saves_is_in_the_order_of_their_steps(tmp_path: Path) -> None:
    """With two optimizers, too, whose steps ``global_step`` counts both; and with saves in the background."""
    import csv

    from lightning.pytorch.loggers import CSVLogger

    from tests.lightning import training as t

    class Manual(t.Model):
        automatic_optimization = False

        def training_step(self, *args: Any) -> None:
            loss = super().training_step(*args)
            self.log("loss", loss)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.net.body, self.net.head)]

    for in_background in (False, True):
        saving = t.ModelCheckpoint(tmp_path / str(in_background), save_top_k=-1)
        trainer = t.trainer_for(
            "single", [saving], plugin=t.DCPCheckpointIO(async_save=in_background), max_epochs=3, max_steps=-1,
            logger=(csv_logger := CSVLogger(tmp_path)), log_every_n_steps=1,
        )  # fmt: skip
        trainer.fit(Manual(), t.plain_loader("single"))
        with open(f"{csv_logger.log_dir}/metrics.csv") as file:
            rows = list(csv.DictReader(file))
        steps = [int(row["step"]) for row in rows]
        assert len([row for row in rows if row["checkpoint/seconds"]]) == 3
        assert steps == sorted(steps)
        assert steps[-1] == 9


@on_ranks(1)
def test_a_training_without_an_optimizer_resumes_and_one_that_rank_0_saved_alone(tmp_path: Path) -> None:
    """Neither has the state of an optimizer by the names of parameters."""
    from tests.lightning import training as t

    class Without(t.Model):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.seen += 1

        def configure_optimizers(self) -> None:
            return None

    first = t.trainer_for("single", plugin=True, max_epochs=1, max_steps=-1)
    first.fit(Without(), t.plain_loader("single"))
    first.save_checkpoint(tmp_path / "without")
    trainer = t.trainer_for("single", plugin=True, max_epochs=3, max_steps=-1)
    trainer.fit(model := Without(seed=5), t.plain_loader("single"), ckpt_path=tmp_path / "without")
    assert model.seen == 9

    first = t.trainer_for("single", stock=True, max_steps=3)
    first.fit(t.Model(), t.plain_loader("single"))
    first.strategy.checkpoint_io = t.DCPCheckpointIO()  # nobody promotes the strategy any more
    first.save_checkpoint(tmp_path / "alone")
    assert_same(t.whole_state(first), t.resumed("single", tmp_path / "alone").state)


@on_ranks(1)
def test_a_name_that_is_being_written_is_taken(tmp_path: Path) -> None:
    from dcp_plugin import events
    from tests.lightning import training as t
    from tests.slowness import pause

    events.subscribe(pause(0.2))

    class Logging(t.Model):
        def training_step(self, *args: Any) -> torch.Tensor:
            loss = super().training_step(*args)
            self.log("loss", loss)
            return loss

    saving = t.ModelCheckpoint(tmp_path, "same", monitor="loss", save_top_k=-1, every_n_train_steps=1)
    trainer = t.trainer_for("single", [saving], plugin=t.DCPCheckpointIO(async_save=True), max_steps=3)
    trainer.fit(Logging(), t.plain_loader("single"))
    steps = {name: dcp.inspect(tmp_path / f"{name}.ckpt").step for name in ("same", "same-v1", "same-v2")}
    assert steps == {"same": 1, "same-v1": 2, "same-v2": 3}


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@on_ranks(2)
def test_one_plugin_serves_many_fits_and_leaves_nothing_behind(tmp_path: Path, layout: str) -> None:
    """Whichever way a run ends: no thread, no group of ranks, and the next one works."""
    from torch.distributed import distributed_c10d

    from tests.lightning import training as t

    class Failing(t.Model):
        fails_in = ""

        def fail(self, here: str) -> None:
            if self.fails_in == here:
                raise ArithmeticError(here)

        def setup(self, stage: str) -> None:
            self.fail("setup")

        def on_train_batch_end(self, *args: Any) -> None:
            self.fail("batch")

        def validation_step(self, *args: Any) -> None:
            self.fail("validation")

        def on_train_end(self) -> None:
            self.fail("end")

        def teardown(self, stage: str) -> None:
            self.fail("teardown")

    groups = len(distributed_c10d._world.pg_map)
    io, made = t.DCPCheckpointIO(async_save=True), tmp_path / layout
    groups += layout == "fsdp2"  # of its mesh
    for number, where in enumerate(("setup", "batch", "validation", "end", "teardown", "")):
        saving = t.ModelCheckpoint(made, f"{number}-{{step}}", every_n_train_steps=1, save_top_k=-1)
        trainer = t.trainer_for(layout, [saving], plugin=io, max_steps=2)
        model = Failing(layout)
        model.fails_in = where
        batches = t.DataLoader(t.data(4), batch_size=2)
        if where:
            with pytest.raises(ArithmeticError, match=where):
                trainer.fit(model, t.plain_loader(layout, 2), batches)
        else:
            trainer.fit(model, t.plain_loader(layout, 2), batches)
        assert not any(thread.name.startswith("dcp") for thread in threading.enumerate()), where
        assert len(distributed_c10d._world.pg_map) <= groups + (layout == "fsdp2") * (number + 1), where
    trainer.save_checkpoint(made / "by-hand.ckpt")  # after the fit
    assert dcp.inspect(made / "by-hand.ckpt").step == 2
    assert io.load_checkpoint(made / "by-hand.ckpt")["global_step"] == 2


@on_ranks(2)
def test_what_was_saved_by_hand_in_the_background_can_be_loaded_at_once(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    from dcp_plugin import events
    from tests.lightning import training as t
    from tests.slowness import pause

    events.subscribe(pause(0.2))

    class SaveAndLoad(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            before = t.whole_state(trainer)
            trainer.save_checkpoint(tmp_path / pl_module.layout)
            checkpoint = trainer.strategy.checkpoint_io.load_checkpoint(tmp_path / pl_module.layout)
            assert_same(checkpoint["state_dict"], weights_of(before))
            trainer.strategy.load_checkpoint(tmp_path / pl_module.layout)
            assert_same(before, t.whole_state(trainer))

    for layout in ("ddp", "fsdp2"):
        io = t.DCPCheckpointIO(async_save=True)
        t.trainer_for(layout, [SaveAndLoad()], plugin=io, max_steps=2).fit(t.Model(layout), t.plain_loader(layout))


@on_ranks(1)
def test_a_callback_gets_the_class_and_the_keys_of_its_state(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    from tests.lightning import training as t

    class Tally(Callback):
        def __init__(self, **seen: int) -> None:
            self.state: dict[Any, Any] = Counter({(0, 1): 1, **seen}) if seen else {}

        def state_dict(self) -> dict[Any, Any]:
            return self.state

        def load_state_dict(self, state: dict[Any, Any]) -> None:
            self.state = state

    trainer = t.trainer_for("single", [Tally(a=2)], max_steps=1)
    trainer.fit(t.Model("single"), t.plain_loader("single"))
    trainer.save_checkpoint(tmp_path / "ck")
    fresh = Tally()
    t.trainer_for("single", [fresh], max_steps=2).fit(
        t.Model("single"), t.plain_loader("single"), ckpt_path=tmp_path / "ck"
    )
    assert repr(fresh.state) == repr(Tally(a=2).state)


@on_ranks(1)
def test_the_tuner_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """It saves a checkpoint, trains, and restores it in the middle of a run."""
    from lightning.pytorch.tuner import Tuner

    from tests.lightning import training as t

    class Tuned(t.Model):
        lr, batch_size = 0.01, 2

        def train_dataloader(self) -> Any:
            return t.DataLoader(t.data(64), batch_size=self.batch_size, shuffle=True)

    trained: list[Any] = []
    for way in ({"stock": True}, {"plugin": True}):
        model = Tuned()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        options: dict[str, Any] = {"max_steps": 4, "default_root_dir": tmp_path, **way}
        Tuner(t.trainer_for("single", **options)).lr_find(model, num_training=5, update_attr=False)
        assert_same(before, model.state_dict())
        trainer = t.trainer_for("single", **options)
        Tuner(trainer).scale_batch_size(model, max_trials=2)
        trainer.fit(model)
        assert names_in(tmp_path) == []
        trained.append((model.batch_size, trainer.global_step, model.losses[-4:]))
    assert trained[0] == trained[1]


SPAWN = """
import sys, warnings
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from dcp_plugin.lightning import DCPCheckpointIO

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    saving = ModelCheckpoint(sys.argv[1], "{step}", save_last="link", every_n_train_steps=2)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", max_steps=4, callbacks=[saving],
                         plugins=[DCPCheckpointIO(async_save=True)], logger=False, enable_progress_bar=False)
    model = BoringModel()
    before = model.layer.weight.clone()
    trainer.fit(model)
    assert not before.equal(model.layer.weight), "the weights came home"
    assert saving.best_model_path.endswith("step=4.ckpt")
"""


@pytest.mark.long
def test_spawned_ranks_save_together_and_bring_the_weights_home(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = programs.run(script, tmp_path / "run", imported=LIGHTNING)
    assert done.returncode == 0, done.stderr[-3000:]
    assert dcp.inspect(tmp_path / "run" / "last.ckpt").step == 4
    assert dcp.inspect(tmp_path / "run" / "last.ckpt").world_size == 2


def test_without_the_plugin_every_file_is_as_if_this_package_were_not_installed(tmp_path: Path) -> None:
    for number in range(3):
        launch.run(_not_used, 2, tmp_path / str(number) / "run", number)
    absent = _files(tmp_path / "0")
    assert absent
    for way in ("1", "2"):
        assert _files(tmp_path / way) == absent
        for name in absent:
            here, there = tmp_path / way / name, tmp_path / "0" / name
            if not name.endswith((".metadata", ".distcp")):  # torch does not always write these in the same order
                assert _content(here) == _content(there), name
            elif name.endswith(".metadata"):
                assert_same(_weights(here.parent), _weights(there.parent))


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def _content(path: Path) -> dict[str, bytes]:
    """Without what is made anew each time: the identity that torch gives to a file or a save, and the folder."""
    parts = {"": path.read_bytes()}
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist() if "serialization_id" not in name}
    run = next(str(parent) for parent in path.parents if parent.name == "run").encode()
    identity = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
    return {name: identity.sub(b"", data.replace(run, b"")) for name, data in parts.items()}


def _weights(checkpoint: Path) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    dcp.load({"model": weights}, checkpoint)
    return weights


def _not_used(root: Path, way: int) -> None:
    """0: as if it were not installed; 1: installed and imported; 2: and a plugin is there, of another trainer."""
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.trainer.connectors import callback_connector

    from tests.lightning import training as t

    unused = t.DCPCheckpointIO() if way == 2 else None
    if way == 0:
        callback_connector._load_external_callbacks = lambda group: []
    for layout in ("ddp", "fsdp2"):
        saving = t.ModelCheckpoint(root / layout, save_last=True)
        logger = CSVLogger(root / layout, name="logs", version=0)
        trainer = t.trainer_for(layout, [saving], stock=True, max_steps=3, logger=logger)
        trainer.fit(t.Model(layout), t.plain_loader(layout))
        assert not any("dcp" in type(callback).__module__ for callback in trainer.callbacks)
        assert type(trainer.strategy).__name__ in ("DDPStrategy", "ModelParallelStrategy")
        assert type(saving) is t.ModelCheckpoint
    del unused
