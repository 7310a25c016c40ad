"""Accelerate without this package resumes what it wrote under FSDP; what Accelerate wrote resumes through it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where
from tests import launch, programs
from tests.accelerate import WORLD_SIZE, resumes_fsdp2_alone
from tests.compare import assert_same, weights_of
from tests.launch import on_ranks
from tests.places import copy_folder


def _save(root: Path, layout: str, native: bool) -> None:
    from tests.accelerate import training as t

    run = t.start(layout, native=native, stateful=False, unused=False)
    run.accelerator.register_for_checkpointing(Counter(7))
    run.train(2)
    run.accelerator.save_state(str(root / "ck"))
    state = run.whole_state()
    if run.accelerator.is_main_process:
        torch.save((state, run.scheduler.state_dict()), root / "state.pt")


def _load(root: Path, layout: str, native: bool, place: Where | None = None) -> None:
    from tests.accelerate import training as t

    run = t.start(layout, seed=3, native=native, stateful=False, unused=False)
    counter = Counter(0)
    run.accelerator.register_for_checkpointing(counter)
    if native:
        run.accelerator.load_state(str(root / "ck"))
    else:
        place = place or root
        start = run.attached.resume_or_init(place)
        assert (start.how, start.path) == ("resumed", place / "ck")
    state, schedule = torch.load(root / "state.pt", weights_only=True)
    found = run.whole_state()
    if native:  # it makes lists of the betas
        state = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        found = {key: found[key] for key in state}
    assert_same(state, found)
    assert run.scheduler.state_dict() == schedule
    assert counter.value == 7


class Counter:
    """Something that users register."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@resumes_fsdp2_alone
@pytest.mark.one_of("layout")
@pytest.mark.parametrize("layout", ["fsdp2", "hsdp"])
def test_stock_accelerate_resumes_what_we_saved_and_merges_it(tmp_path: Path, layout: str) -> None:
    launch.run(_save, WORLD_SIZE[layout], tmp_path, layout, False)
    launch.run(_load, WORLD_SIZE[layout], tmp_path, layout, True)
    command = ["-m", "accelerate.commands.accelerate_cli", "merge-weights"]
    folders = [tmp_path / "ck" / "pytorch_model_fsdp_0", tmp_path / "merged"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    ended = programs.run(*command, *folders, imported=programs.TRANSFORMERS, env=environment)
    assert ended.returncode == 0, ended.stderr
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    state, _ = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same(weights_of(state), merged)


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize(
    ("layout", "place"),
    [
        *((layout, "disk") for layout in ("single", "ddp", "fsdp2", "hsdp", "fsdp1")),
        ("fsdp2", "s3"),
        *(pytest.param(layout, "s3", marks=pytest.mark.long) for layout in ("single", "ddp", "hsdp", "fsdp1")),
    ],
    indirect=["place"],
)
def test_we_resume_what_stock_accelerate_saved(tmp_path: Path, place: Where, layout: str) -> None:
    launch.run(_save, WORLD_SIZE[layout], tmp_path, layout, True)
    if place != tmp_path:
        copy_folder(tmp_path / "ck", place / "ck")
    launch.run(_load, WORLD_SIZE[layout], tmp_path, layout, False, place)


@on_ranks(1)
def test_map_location_is_heeded_and_nothing_else_is_taken(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    for saved_by_us in (False, True):
        path = tmp_path / str(saved_by_us)
        saved = t.start("single", native=not saved_by_us, stateful=False, unused=False).train(1)
        saved.accelerator.save_state(str(path))
        for native in (True, False) if not saved_by_us else (False,):
            run = t.start("single", 3, native=native, stateful=False, unused=False)
            for place in (None, "cpu", "on_device"):
                run.accelerator.load_state(str(path), map_location=place, load_kwargs={"weights_only": True})
            for wrong in ({"map_location": "cuda:7"}, {"strct": True}):
                with pytest.raises(TypeError):
                    run.accelerator.load_state(str(path), **wrong)


@on_ranks(1)
def test_models_that_hooks_of_the_user_have_saved_resume(tmp_path: Path, place: Where) -> None:
    """As the scripts of diffusers do it: then Accelerate itself has no weights to save."""
    from tests.accelerate import training as t

    def start(seed: int, native: bool) -> Any:
        run = t.start("single", seed, native=native, stateful=False, unused=False)
        run.accelerator.register_save_state_pre_hook(save)
        run.accelerator.register_load_state_pre_hook(load)
        return run

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        os.mkdir(os.path.join(folder, "net"))
        torch.save(models[0].state_dict(), os.path.join(folder, "net", "weights.pt"))
        weights.pop()

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(os.path.join(folder, "net", "weights.pt"), weights_only=True))

    saved = start(0, native=True).train(2)
    saved.accelerator.save_state(str(tmp_path / "checkpoint-2"))
    if place != tmp_path:
        copy_folder(tmp_path / "checkpoint-2", place / "checkpoint-2")
    for native in (True, False):
        run = start(3, native)
        run.accelerator.load_state(str((tmp_path if native else place) / "checkpoint-2"))
        state, found = saved.whole_state(), run.whole_state()
        assert_same(*({key: one[key] for key in one if isinstance(one[key], torch.Tensor)} for one in (state, found)))
    assert run.attached.resume_or_init(place).path == place / "checkpoint-2"


@on_ranks(1)
def test_a_registered_object_of_stock_accelerate_is_not_executed(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    class Planted:
        def __init__(self, path: Path) -> None:
            self._path = path

        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (self._path,))

    _save(tmp_path, "single", native=True)
    torch.save(Planted(tmp_path / "executed"), tmp_path / "ck" / "custom_checkpoint_0.pkl")
    run = t.start("single", stateful=False, unused=False)
    run.accelerator.register_for_checkpointing(Counter(0))
    with pytest.raises(dcp.UnsafeCheckpoint, match="custom_checkpoint_0"):
        run.accelerator.load_state(str(tmp_path / "ck"))
    assert not (tmp_path / "executed").exists()


@on_ranks(2)
def test_optimizers_of_what_was_not_prepared_resume_as_with_accelerate_alone(tmp_path: Path) -> None:
    """A parameter that is in no model, and a discriminator that the script keeps to itself."""
    from tests.accelerate import training as t

    def start(seed: int, native: bool) -> Any:
        run = t.start("ddp", seed, native=native, unused=False)
        other = torch.nn.Linear(1, 1)
        loose = [torch.nn.Parameter(torch.full((2,), float(seed))) for _ in range(2)]
        run.optimizer.add_param_group({"params": loose[:1]})
        run.other = run.accelerator.prepare(torch.optim.AdamW([*other.parameters(), loose[1]], lr=0.1))
        torch.manual_seed(run.accelerator.process_index)  # DDP does not make these the same on all ranks
        loss = (other(run.model(torch.randn(2, 6))) * loose[0] * loose[1]).square().sum()
        for optimizer in (run.optimizer, run.other):
            optimizer.zero_grad()
        run.accelerator.backward(loss)
        for optimizer in (run.optimizer, run.other):
            optimizer.step()
        return run

    states = []
    for native in (True, False):
        path = str(tmp_path / str(native))
        start(1, native).accelerator.save_state(path)
        run = start(2, native)
        run.accelerator.load_state(path)
        states.append([one.state_dict()["state"] for one in (run.optimizer, run.other)])
    for stock, ours in zip(*states, strict=True):
        assert stock.keys() == ours.keys()
        for number, slots in stock.items():
            assert_same(slots, ours[number])
