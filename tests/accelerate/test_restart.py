"""``attach(accelerator).resume_or_init``: a run starts from its own newest checkpoint, else from a pre-trained one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where
from tests import launch
from tests.accelerate import WORLD_SIZE
from tests.compare import assert_same, weights_of
from tests.launch import on_ranks
from tests.lives import read, write
from tests.messages import warned
from tests.places import delete_file


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and beside it the weights that are in it."""
    root = tmp_path_factory.mktemp("pretrained")
    launch.run(_pretrain, 1, root)
    return root / "checkpoint"


def _pretrain(root: Path) -> None:
    from tests.accelerate import training as t

    run = t.start("single", seed=3).train(2)
    dcp.save({"model": run.model, "optim": run.optimizer.optimizer}, root / "checkpoint")
    torch.save(weights_of(run.whole_state()), root / "weights.pt")


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["ddp", "own_fsdp2"])
def test_a_resumed_fine_tuning_equals_one_that_was_not_interrupted(
    tmp_path: Path, pretrained: Path, layout: str
) -> None:
    launch.run(_fine_tune, 2, tmp_path, layout, pretrained)
    launch.run(_resume, 2, tmp_path, layout)


def _fine_tune(root: Path, layout: str, pretrained: Path) -> None:
    from tests.accelerate import training as t

    run = t.start(layout, seed=5, frozen=True)
    start = run.attached.resume_or_init(root / "run", init_from=pretrained)
    assert (start.how, start.path) == ("warm-started", pretrained)
    weights = torch.load(pretrained.with_name("weights.pt"), weights_only=True)
    assert_same(weights_of(run.whole_state()), weights)
    run.train(8, at={4: lambda: run.accelerator.save_state(str(root / "run" / "step-4"))})
    final = run.whole_state()
    frozen = {key: value for key, value in weights_of(final).items() if key.startswith("body.")}
    assert_same(frozen, {key: weights[key] for key in frozen})
    assert not any(key.startswith("optim.state.body") for key in final)
    write(root, "straight", run.losses, final)


def _resume(root: Path, layout: str) -> None:
    from tests.accelerate import training as t

    run = t.start(layout, seed=6, frozen=True)
    start = run.attached.resume_or_init(root / "run", init_from=root / "is not looked for")
    assert (start.how, start.path) == ("resumed", root / "run" / "step-4")
    assert start.report is run.attached.last_load
    run.train(4)
    losses, final = read(root, "straight", run.accelerator.process_index)
    assert run.losses == losses[8:]  # two batches are one step
    assert_same(run.whole_state(), final)


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp2", "own_fsdp1"])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_what_is_trained_may_change_between_two_runs(tmp_path: Path, layout: str) -> None:
    from tests.accelerate import training as t

    for before in (True, False):
        path = tmp_path / f"{layout}-{before}"
        first = t.start(layout, frozen=before, unused=False).train(2)
        first.accelerator.save_state(str(path))
        saved = first.whole_state()

        second = t.start(layout, seed=5, frozen=not before, unused=False)
        with warned("fresh optimizer state") as said:
            second.accelerator.load_state(str(path))
        assert len(said) == second.accelerator.is_main_process
        assert all("param_groups.body.inp" in message for message in said)
        body = {key for key in saved if key.startswith("optim.") and ".body." in key}
        assert bool(body) is not before
        kept = {key: value for key, value in saved.items() if key not in body}
        loaded = second.whole_state()
        assert_same({key: loaded[key] for key in kept}, kept)
        assert not any(key.startswith("optim.state.body") for key in loaded)
        second.train(1)
        trained = any(key.startswith("optim.state.body") for key in second.whole_state())
        assert trained is before, "what is trained now got optimizer state, what is not has none"


@on_ranks(1)
def test_a_project_is_resumed_at_its_highest_number(tmp_path: Path, place: Where, pretrained: Path) -> None:
    from tests.accelerate import training as t

    project = place / "project"
    run = t.start("single", project=project)
    assert run.attached.resume_or_init().how == "fresh"
    with pytest.raises(dcp.CheckpointNotFound, match="no committed checkpoint"):
        run.attached.resume_or_init(resume="must", init_from=pretrained)
    with pytest.raises(dcp.CheckpointNotFound, match="init_from"):
        run.attached.resume_or_init(init_from=tmp_path / "typo")
    assert run.attached.resume_or_init(init_from=pretrained).how == "warm-started"
    for number in range(2):
        path = project / "checkpoints" / f"checkpoint_{number}"
        assert str(run.train(1).accelerator.save_state()) == str(path)
    start = run.attached.resume_or_init(init_from=tmp_path / "typo")
    assert (start.how, start.path) == ("resumed", project / "checkpoints" / "checkpoint_1")
    start = run.attached.resume_or_init(resume=project / "checkpoints" / "checkpoint_0")
    assert start.path == project / "checkpoints" / "checkpoint_0"
    assert run.attached.resume_or_init(resume="never", init_from=pretrained).how == "warm-started"

    for number in range(2):
        delete_file(project / "checkpoints" / f"checkpoint_{number}" / ".metadata")
    with pytest.raises(dcp.CheckpointNotFound, match="no committed checkpoint"):
        run.attached.resume_or_init(init_from=pretrained)
    unnamed = t.start("single")
    with pytest.raises(ValueError, match="A directory is needed"):
        unnamed.attached.resume_or_init()
    with pytest.raises(ValueError, match="init_from=PATH"):
        run.attached.resume_or_init(partial=dcp.PartialLoad())


@on_ranks(1)
def test_nothing_is_resumed_before_the_model_is_prepared(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from dcp_plugin.accelerate import attach
    from tests.accelerate import training as t

    t.start("single").accelerator.save_state(str(tmp_path / "step-1"))
    accelerator = Accelerator(cpu=True)
    attached = attach(accelerator)
    with pytest.raises(dcp.CheckpointError, match=r"call resume_or_init after accelerator\.prepare"):
        attached.resume_or_init(tmp_path)
    with pytest.raises(dcp.CheckpointMismatch, match=r"call load_state after accelerator\.prepare"):
        attached.load_state(tmp_path / "step-1")
