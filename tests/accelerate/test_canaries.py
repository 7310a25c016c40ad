"""The private parts of Accelerate that the integration needs. Each failure says what moved."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from accelerate import Accelerator, checkpointing, data_loader, scheduler
from accelerate.state import GradientState


@pytest.fixture(scope="module")
def accelerator() -> Any:
    return Accelerator(cpu=True)


@pytest.mark.parametrize("name", ["_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"])
def test_the_prepared_objects_are_in_lists_of_the_instance(accelerator: Any, name: str) -> None:
    assert getattr(accelerator, name, None) == [], f"Accelerator.{name} has moved: see accelerate/_accelerate.py"


@pytest.mark.parametrize("name", ["_save_model_state_pre_hook", "_load_model_state_pre_hook"])
def test_the_users_hooks_are_in_mappings(accelerator: Any, name: str) -> None:
    assert dict(getattr(accelerator, name, {None: 1})) == {}, f"Accelerator.{name} has moved"


def test_prepare_goes_through_the_methods_that_are_replaced(accelerator: Any) -> None:
    called = []
    accelerator.prepare_data_loader = lambda loader, **kwargs: called.append(loader) or loader
    try:
        accelerator.prepare(torch.utils.data.DataLoader([1]))
    finally:
        del accelerator.prepare_data_loader
    assert called, "Accelerator.prepare no longer calls self.prepare_data_loader: loaders are not tracked"


def test_prepared_loaders_iterate_over_the_loader_inside_of_them() -> None:
    for kind in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher):
        source = inspect.getsource(kind.__iter__)
        assert "self.base_dataloader.__iter__()" in source, f"{kind.__name__} iterates over something else"
        assert "self.iteration += 1" in source, f"{kind.__name__} counts its epochs in another way"


def test_loaders_in_use_are_known() -> None:
    assert list(GradientState().dataloader_references) == [None], "GradientState.dataloader_references has moved"


def test_schedules_are_stepped_once_per_process() -> None:
    source = inspect.getsource(scheduler.AcceleratedScheduler.step)
    assert "num_processes" in source and "self.split_batches" in source, "the stride of schedules has changed"


def test_the_small_files_are_written_and_read_by_public_functions() -> None:
    expected = {
        checkpointing.save_accelerator_state: ["output_dir", "model_states", "optimizers", "schedulers", "dataloaders"],
        checkpointing.load_accelerator_state: ["input_dir", "models", "optimizers", "schedulers", "dataloaders"],
    }
    for function, names in expected.items():
        assert list(inspect.signature(function).parameters)[:5] == names, f"{function.__name__} takes other arguments"
