"""The folder of checkpoints: what is resumed from, what is deleted. Where the stock Trainer differs, it is shown."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import dcp_plugin as dcp
from tests import launch
from tests.launch import on_ranks
from tests.messages import warned
from tests.places import names_in


def _kind(name: str) -> Any:
    from tests.transformers.trainer import training as t

    return {"ours": t.Ours, "stock": t.OnCPU}[name]


def _checkpoints(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("checkpoint-"))


def _train_and_die(root: Path, kind: str, victims: list[int], options: dict[str, Any]) -> None:
    """The victims are killed in the middle of the save of step 6: stock, before its random state is written; ours,
    when half of the bytes are."""
    from dcp_plugin import events
    from tests.transformers.trainer import training as t

    class Dies(_kind(kind)):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.dies = self.state.global_step == 6 and self.args.process_index in victims
            super()._save_checkpoint(model, trial)

        def _save_rng_state(self, output_dir: str) -> None:
            if self.dies and kind == "stock":
                os.kill(os.getpid(), signal.SIGKILL)
            super()._save_rng_state(output_dir)

    def die(event: events.Event) -> None:
        half_written = isinstance(event, events.BytesWritten) and event.written * 2 >= event.total
        if half_written and trainer.dies and event.path.name == "checkpoint-6":  # not the one before, still in flight
            os.kill(os.getpid(), signal.SIGKILL)

    events.subscribe(die)
    config = dcp.CheckpointConfig(timeout=20, **options) if kind == "ours" else None
    trainer = t.trainer(root, "single" if victims == [0] else "ddp", kind=Dies, config=config, save_total_limit=1)
    trainer.train()


def _resume(root: Path, kind: str, resume: bool | Path = True) -> Any:
    from tests.transformers.trainer import training as t

    with warned("passes over") as said:
        step = t.begin(t.trainer(root, kind=_kind(kind)), resume).step
    return step, said


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["sync", "async"])
def test_a_killed_save_leaves_the_earlier_checkpoint_to_resume_from(tmp_path: Path, options: dict[str, Any]) -> None:
    outcome = launch.outcomes_of(_train_and_die, 1, tmp_path, "ours", [0], options)[0]
    assert outcome.exit_code == -signal.SIGKILL
    assert _checkpoints(tmp_path) == ["checkpoint-3"]
    assert launch.run(_resume, 1, tmp_path, "ours") == [(3, [])]


def test_stock_resumes_from_a_half_written_checkpoint(tmp_path: Path) -> None:
    """The gap that the test above closes; and ours is not taken in by what stock has left."""
    assert launch.outcomes_of(_train_and_die, 1, tmp_path, "stock", [0], {})[0].exit_code == -signal.SIGKILL
    assert _checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-6"]
    assert "FileNotFoundError" in launch.outcomes_of(_resume, 1, tmp_path, "stock")[0].traceback

    step, said = launch.run(_resume, 1, tmp_path, "ours")[0]
    assert step == 3
    assert len(said) == 1 and "checkpoint-6" in said[0] and "trainer_state.json" in said[0]


def test_a_rank_that_dies_in_a_save_costs_no_checkpoint_with_a_limit_of_one(tmp_path: Path) -> None:
    for kind, left in (("ours", "checkpoint-3"), ("stock", "checkpoint-6")):
        root = tmp_path / kind
        outcomes = launch.outcomes_of(_train_and_die, 2, root, kind, [1], {})
        assert outcomes[1].exit_code == -signal.SIGKILL
        assert _checkpoints(root) == [left], kind
        if kind == "ours":
            assert "RankFailure" in outcomes[0].traceback
            assert dcp.verify(root / left).ok
        else:  # the only one left has no random state of rank 1, which nobody will ever hear of
            assert (root / left / "rng_state_0.pth").exists() and not (root / left / "rng_state_1.pth").exists()


def _train(root: Path, kind: str, options: dict[str, Any]) -> list[str]:
    from tests.transformers.trainer import training as t

    config = dcp.CheckpointConfig(async_save=True) if kind == "ours" else None
    t.trainer(root, kind=_kind(kind), config=config, **options).train()
    return _checkpoints(root)


def test_a_flipped_bit_is_an_error_and_not_silence(tmp_path: Path) -> None:
    """The same bit of the same weight, in both kinds of files."""
    for kind in ("ours", "stock"):
        launch.run(_train, 1, tmp_path / kind, kind, {})
    weight: dict[str, Any] = {"model.transformer.wte.weight": None}
    dcp.load(weight, tmp_path / "ours" / "checkpoint-6")
    ours = next((tmp_path / "ours/checkpoint-6").glob("__0_0-*.distcp"))
    for file in (ours, tmp_path / "stock/checkpoint-6/model.safetensors"):
        data = bytearray(file.read_bytes())
        data[data.index(weight["model.transformer.wte.weight"].numpy().tobytes())] ^= 1
        file.write_bytes(data)

    assert "CheckpointCorrupt" in launch.outcomes_of(_resume, 1, tmp_path / "ours", "ours")[0].traceback
    assert launch.run(_resume, 1, tmp_path / "stock", "stock")[0] == (6, [])


def test_torn_checkpoints_are_passed_over(tmp_path: Path) -> None:
    launch.run(_train, 1, tmp_path, "ours", {"save_steps": 1, "max_steps": 5})
    cut, lost, edited = (tmp_path / f"checkpoint-{step}" for step in (5, 4, 3))
    data = next(cut.glob("*.distcp"))
    os.truncate(data, data.stat().st_size - 10)
    (lost / ".metadata").unlink()
    (edited / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-99").mkdir()

    step, said = launch.run(_resume, 1, tmp_path, "ours")[0]

    assert step == 2
    assert [next(n for n in (99, 5, 4, 3) if f"checkpoint-{n}" in one) for one in said] == [99, 5, 4, 3]
    for torn, error in (cut, "CheckpointCorrupt"), (lost, "CheckpointIncomplete"), (edited, "CheckpointCorrupt"):
        assert error in launch.outcomes_of(_resume, 1, tmp_path, "ours", torn)[0].traceback
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    assert "CheckpointNotFound" in launch.outcomes_of(_resume, 1, tmp_path, "ours")[0].traceback


@pytest.mark.parametrize("resume", [True, "checkpoint-1"])
@on_ranks(1)
def test_nothing_to_resume_from_is_caught_as_with_stock(tmp_path: Path, resume: str | bool) -> None:
    """For a training that starts anew then. Ours is said as stock says it, and more."""
    from tests.transformers.trainer import training as t

    named = resume if resume is True else str(tmp_path / resume)
    with pytest.raises(ValueError, match="valid checkpoint") as stock:
        t.trainer(tmp_path, kind=t.OnCPU).train(resume_from_checkpoint=named)
    with pytest.raises(ValueError, match=re.escape(str(stock.value))):
        t.trainer(tmp_path).train(resume_from_checkpoint=named)
    if resume is not True:
        Path(named).mkdir()
        with pytest.raises(ValueError, match=re.escape(str(stock.value))):
            t.trainer(tmp_path).train(resume_from_checkpoint=named)


APART = {"eval_strategy": "epoch", "save_steps": 2, "load_best_model_at_end": False}
KEPT = {
    "a limit of two": ({"save_total_limit": 2}, ["checkpoint-5", "checkpoint-6"]),
    "a limit of one": ({"save_total_limit": 1}, ["checkpoint-6"]),
    "two, and the best": ({"save_total_limit": 2, "best": 2}, ["checkpoint-2", "checkpoint-6", "best: checkpoint-2"]),
    "one, and the best": ({"save_total_limit": 1, "best": 2}, ["checkpoint-2", "best: checkpoint-2"]),
    "whenever it is best": (
        {"save_strategy": "best", "best": 2},
        ["checkpoint-1", "checkpoint-2", "best: checkpoint-2"],
    ),
    "each epoch": ({"save_strategy": "epoch"}, ["checkpoint-4", "checkpoint-6"]),
    "evaluated after the save": (
        {**APART, "save_total_limit": 2, "max_steps": 10, "best": 4},
        ["checkpoint-4", "checkpoint-10", "best: checkpoint-4"],
    ),
    "evaluated when nothing is saved": (
        {**APART, "save_steps": 3, "best": 4},
        ["checkpoint-3", "checkpoint-6", "best: None"],
    ),
}


@on_ranks(1)
def test_the_checkpoints_that_are_kept_are_those_that_stock_keeps(tmp_path: Path) -> None:
    for kind in ("stock", "ours"):
        for case, (options, left) in KEPT.items():
            assert _train_with_best(tmp_path / kind / case, kind, options) == left, (kind, case)


def _train_with_best(root: Path, kind: str, options: dict[str, Any]) -> list[str]:
    """Step ``best`` is best, if there is one. If it is loaded at the end, it is what the training ends with."""
    from tests.transformers.trainer import training as t

    options = {"save_steps": 1, **options}
    base = _kind(kind)
    if best := options.pop("best", 0):

        class Measured(base):  # type: ignore[misc, valid-type]
            def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
                return {"eval_loss": abs(float(self.state.global_step - best))}

            def _finalize_training(self, *args: Any) -> Any:
                result = super()._finalize_training(*args)
                if self.args.load_best_model_at_end:
                    assert t.whole_state(self)["model.transformer.wte.weight"] == at_step[best]
                return result

        class Remember(t.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                at_step[state.global_step] = t.whole_state(trainer)["model.transformer.wte.weight"]

        at_step: dict[int, Any] = {}
        at_end = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
        options = {"metric_for_best_model": "loss", "greater_is_better": False, **at_end, **options}
        base, options["callbacks"] = Measured, [Remember()]
    config = dcp.CheckpointConfig(async_save=True) if kind == "ours" else None
    trainer = t.trainer(root, kind=base, config=config, eval_dataset=t.Text(2), **options)
    trainer.train()
    found = trainer.state.best_model_checkpoint
    kept = sorted(_checkpoints(root), key=lambda name: int(name.partition("-")[2]))
    return kept + ([f"best: {found and Path(found).name}"] if best else [])


@on_ranks(1)
def test_a_checkpoint_just_in_time_goes_into_its_prepared_folder(tmp_path: Path) -> None:
    """What ``enable_jit_checkpoint`` does: it makes the folder itself, marks it as incomplete, and saves."""
    from transformers.trainer_jit_checkpoint import CheckpointManager

    from tests.transformers.trainer import training as t

    trainer = t.trainer(tmp_path, save_strategy="no")
    trainer.train()
    CheckpointManager(trainer).execute_jit_checkpoint()
    assert not (tmp_path / "checkpoint-6" / "checkpoint-is-incomplete.txt").exists()
    assert t.begin(t.trainer(tmp_path, net=t.model(seed=9)), resume=True).step == 6


@on_ranks(1)
def test_an_output_dir_that_is_a_url_is_refused_and_that_of_file_is_the_path(tmp_path: Path) -> None:
    from tests.transformers.trainer import training as t

    os.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"output_dir .* s3://bucket/run is a URL\. .* Give it a directory"):
        t.Ours(args=t.TrainingArguments("s3://bucket/run"))
    assert not list(tmp_path.iterdir())
    trainer = t.trainer(f"file://{tmp_path}/run", max_steps=1, save_steps=1)
    trainer.train()
    trainer.train(resume_from_checkpoint=f"file://{tmp_path}/run/checkpoint-1")
    assert names_in(tmp_path) == ["run"]
