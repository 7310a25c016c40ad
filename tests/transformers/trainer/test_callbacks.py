"""Callbacks that use the folder of a checkpoint when it is saved find it complete, as with the Trainer alone."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests.launch import on_ranks
from tests.messages import logged

KINDS = {
    "sync": {},
    "async": {"async_save": True},
    "lazy": {"async_save": True, "staging": "lazy"},
    "keeper": {"async_save": True, "keeper": dcp.Keeper()},
}


def _writer() -> Any:
    from tests.transformers.trainer import training as t

    class Writer(t.TrainerCallback):  # type: ignore[misc, name-defined]
        """Writes in the ways that scripts do: with and without making the folder, and over files of the Trainer."""

        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            import torch

            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            (folder / f"note-{args.process_index}.txt").write_text(str(state.global_step))
            if args.process_index == 0:
                os.makedirs(folder, exist_ok=True)
                torch.save(model.transformer.ln_f.state_dict(), folder / "average.pt")
                model.save_pretrained(folder / "average")
                model.save_pretrained(folder)

    return Writer()


WRITTEN = {"average", "average.pt", "config.json", "generation_config.json", "model.safetensors", "note-0.txt"}


def _contents(folder: Path, names: set[str]) -> dict[str, bytes]:
    files = [path for name in names for path in (folder / name, *folder.joinpath(name).glob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.usefixtures("forked_keepers")
@pytest.mark.one_of
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_files_written_on_save_are_those_that_the_trainer_alone_has(tmp_path: Path, kind: str) -> None:
    from tests.transformers.trainer import training as t

    t.trainer(tmp_path / "stock", kind=t.OnCPU, callbacks=[_writer()], save_total_limit=1).train()
    config = dcp.CheckpointConfig(**KINDS[kind])  # type: ignore[arg-type]
    t.trainer(tmp_path / "ours", config=config, callbacks=[_writer()], save_total_limit=1).train()

    path = tmp_path / "ours/checkpoint-6"
    assert len(_contents(path, WRITTEN)) == 8
    assert _contents(path, WRITTEN) == _contents(tmp_path / "stock/checkpoint-6", WRITTEN)
    assert dcp.verify(path).ok
    dcp.copy(path, tmp_path / "copy")
    assert _contents(tmp_path / "copy", WRITTEN) == _contents(path, WRITTEN)
    assert not (tmp_path / "ours/checkpoint-3").exists()
    assert t.begin(t.trainer(tmp_path / "ours", net=t.model(seed=9)), resume=True).step == 6


@on_ranks(1)
def test_a_checkpoint_that_a_callback_uses_is_published_whatever_durable_every_says(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    config = dcp.CheckpointConfig(async_save=True, keeper=dcp.Keeper(dir=tmp_path / "local", durable_every=10))
    t.trainer(tmp_path / "run", config=config, callbacks=[_writer()]).train()
    assert [(tmp_path / f"run/checkpoint-{step}/note-0.txt").read_text() for step in (3, 6)] == ["3", "6"]


@on_ranks(2)
def test_all_ranks_wait_for_a_callback_of_one_rank(tmp_path: Path) -> None:
    import torch.distributed as dist

    from tests.transformers.trainer import training as t

    config = dcp.CheckpointConfig(async_save=True)
    callbacks = [_writer()] if dist.get_rank() == 1 else []
    t.trainer(tmp_path, "ddp", config=config, callbacks=callbacks).train()
    dist.barrier()
    assert [(tmp_path / f"checkpoint-{step}/note-1.txt").read_text() for step in (3, 6)] == ["3", "6"]


@on_ranks(1)
def test_a_trainer_that_writes_after_its_save_finds_the_folder(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    class Own(t.Ours):  # type: ignore[misc, name-defined]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            (tmp_path / f"checkpoint-{self.state.global_step}" / "mine.txt").write_text("mine")

    t.trainer(tmp_path, kind=Own, config=dcp.CheckpointConfig(async_save=True)).train()
    assert (tmp_path / "checkpoint-6/mine.txt").exists()


@on_ranks(1)
def test_the_first_wait_for_a_callback_is_logged_with_its_name_and_cost(
    tmp_path: Path,
) -> None:
    from tests.transformers.trainer import training as t

    messages = logged()
    for config in (dcp.CheckpointConfig(), dcp.CheckpointConfig(async_save=True)):
        t.trainer(tmp_path, config=config, callbacks=[_writer()]).train()
    lines = [message for message in messages if "may use the folder" in message]
    assert len(lines) == 1
    assert lines[0].startswith("Writer may use the folder") and lines[0].endswith(" s for checkpoint-3)")


OFF = {
    "ClearMLCallback": {"_log_model": False},
    "DVCLiveCallback": {"_log_model": True},  # the model at the end
    "FlyteCallback": {"sync_checkpoints": False},
    "MLflowCallback": {"_log_artifacts": False},
    "NeptuneCallback": {"_should_upload_checkpoint": False},
    "SwanLabCallback": {},
    "TrackioCallback": {},
    "WandbCallback": {"_log_model": "end"},
}
ON = {
    "ClearMLCallback": {"_log_model": True},
    "DVCLiveCallback": {"_log_model": "all"},
    "FlyteCallback": {"sync_checkpoints": True},
    "MLflowCallback": {"_log_artifacts": True},
    "NeptuneCallback": {"_should_upload_checkpoint": True},
    "WandbCallback": {"_log_model": "checkpoint"},
}


@on_ranks(1)
def test_every_integration_with_an_on_save_is_known() -> None:
    """A new one of transformers fails here: decide when its ``on_save`` uses the folder, in ``USES_FOLDER``."""
    from transformers import TrainerCallback, trainer, trainer_jit_checkpoint  # noqa: F401 - define callbacks
    from transformers.integrations import integration_utils
    from transformers.trainer_callback import CallbackHandler

    from dcp_plugin.transformers._transformers import USES_FOLDER

    kinds = [TrainerCallback]
    for kind in kinds:
        kinds += [one for one in kind.__subclasses__() if one.__module__.startswith("transformers.")]
    defining = {kind.__name__ for kind in kinds if "on_save" in vars(kind)} - {CallbackHandler.__name__}
    assert defining == {*USES_FOLDER} == {*OFF, "TrainerCallback"}
    for name, attributes in ON.items():
        source = inspect.getsource(getattr(integration_utils, name).on_save)
        assert all(f"self.{attribute}" in source for attribute in attributes)


@on_ranks(1)
def test_an_integration_is_waited_for_where_its_upload_is_on() -> None:
    from transformers import TrainerCallback
    from transformers.integrations import DagsHubCallback, integration_utils

    from dcp_plugin.transformers._transformers import _uses_folder

    class Subclass(integration_utils.WandbCallback):  # type: ignore[misc]
        def on_save(self, *args: Any, **kwargs: Any) -> None:
            """Of a user."""

    def uses(kind: Any, attributes: dict[str, Any]) -> bool:
        callback = object.__new__(kind)
        vars(callback).update(attributes, _ml_flow=None, _auto_end_run=False)
        return _uses_folder(callback)

    assert {name for name, attributes in OFF.items() if uses(getattr(integration_utils, name), attributes)} == set()
    assert {name for name, attributes in ON.items() if uses(getattr(integration_utils, name), attributes)} == set(ON)
    assert uses(DagsHubCallback, ON["MLflowCallback"]) and not uses(DagsHubCallback, OFF["MLflowCallback"])
    assert uses(Subclass, {}) and not uses(TrainerCallback, {})


@on_ranks(1)
def test_an_integration_that_uploads_nothing_costs_no_wait(tmp_path: Path) -> None:
    from transformers.integrations import WandbCallback

    from tests.slowness import Gate, slow_writes
    from tests.transformers.trainer import training as t

    class Watch(t.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                seen.append((tmp_path / "checkpoint-3").exists())
                gate.open()

    seen: list[bool] = []
    gate = Gate()
    gate.close()
    os.environ |= {"WANDB_MODE": "disabled", "WANDB_LOG_MODEL": "end"}
    config = dcp.CheckpointConfig(async_save=True)
    with slow_writes(gate):
        t.trainer(tmp_path, config=config, callbacks=[WandbCallback(), Watch()]).train()
    assert seen == [False]
