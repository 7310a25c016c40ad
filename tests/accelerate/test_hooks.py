"""Corpus of hooks: what users' hooks leave in their lists is saved and loaded, as stock Accelerate does it.

An entry of :data:`HOOKS` is a save hook and a load hook of a script. Both run with stock and with this package; what is
compared is what each model has after the load and one more step, or that the load raises. Where the hooks leave the
training as it is, this is also what the training without an interruption has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dcp_plugin as dcp
from tests.accelerate import WORLD_SIZE, resumes_fsdp2_alone
from tests.compare import assert_same, full_state
from tests.launch import on_ranks

Hook = Callable[..., None]
AVERAGE = "average.weight"


def _nothing(*arguments: Any) -> None:
    return None


def _pop(models: Any, *arguments: Any) -> None:
    """Remove the last one: of the models in a load hook, of the weights in a save hook."""
    left = arguments[0] if len(arguments) == 2 else models
    if left:
        left.pop()


def _replace_weights(models: Any, weights: Any, folder: str) -> None:
    for number, state in enumerate(weights):
        weights[number] = {key: value / 2 if value.is_floating_point() else value for key, value in state.items()}


def _filter_weights(models: Any, weights: Any, folder: str) -> None:
    for number, state in enumerate(weights):
        weights[number] = {key: value for key, value in state.items() if "head" in key}


def _copy_weights(models: Any, weights: Any, folder: str) -> None:
    weights[:] = [dict(state) for state in weights]


def _edit_weights(models: Any, weights: Any, folder: str) -> None:
    for state in weights[:1]:
        key = next(key for key in state if key.endswith("head.weight"))
        state[key] = torch.full_like(state[key], 7)


def _edit_memory(models: Any, weights: Any, folder: str) -> None:
    for state in weights[:1]:
        next(value for key, value in state.items() if key.endswith("head.weight")).fill_(7)


def _append_weights(models: Any, weights: Any, folder: str) -> None:
    weights.append({AVERAGE.partition(".")[2]: torch.full((2, 2), 3.0)})


def _replace_model(models: Any, folder: str) -> None:
    if models:
        models[0] = TAKEN.setdefault("replaced", _like(models[0]))


def _edit_model(models: Any, folder: str) -> None:
    for model in models:
        nn.init.zeros_(next(model.parameters()))


def _append_model(models: Any, folder: str) -> None:
    models.append(TAKEN.setdefault("average", nn.Linear(2, 2, bias=False)))


def _save_itself(models: Any, weights: Any, folder: str) -> None:
    if weights:
        if _is_main_process():
            torch.save([dict(state) for state in weights], Path(folder, "own.pt"))
        weights.clear()


def _load_itself(models: Any, folder: str) -> None:
    if models:
        for model, state in zip(models, torch.load(Path(folder, "own.pt")), strict=True):
            model.load_state_dict(state)
        models.clear()


def _on_main_process(hook: Hook) -> Hook:
    return lambda *arguments: hook(*arguments) if _is_main_process() else None


def _is_main_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _like(model: nn.Module) -> nn.Module:
    """Return a model of the same keys as a prepared one, which DDP has wrapped."""
    from tests.accelerate import training as t

    net = t.Net(99, unused=False)
    return net if not hasattr(model, "module") else nn.ModuleDict({"module": net})


HOOKS: dict[str, tuple[Hook, Hook]] = {
    "saved by themselves": (_save_itself, _load_itself),
    "saved by the main process": (_on_main_process(_save_itself), _load_itself),
    "pop, and pop": (_pop, _pop),
    "pop": (_pop, _nothing),
    "replace": (_replace_weights, _nothing),
    "copy": (_copy_weights, _nothing),
    "replace on the main process": (_on_main_process(_replace_weights), _nothing),
    "filter": (_filter_weights, _nothing),
    "edit": (_edit_weights, _nothing),
    "edit memory": (_edit_memory, _nothing),
    "append": (_append_weights, _nothing),
    "append, and append": (_append_weights, _append_model),
    "load: pop": (_nothing, _pop),
    "load: replace": (_nothing, _replace_model),
    "load: edit": (_nothing, _edit_model),
    "load: append": (_nothing, _append_model),
}
EXACT = {"saved by themselves", "saved by the main process", "copy", "load: edit"}
"""The hooks that leave the training as it is."""
TAKEN: dict[str, nn.Module] = {}
"""Modules that load hooks have put into their list."""
STAGING = {
    "blocking": {},
    "asynchronous": {"async_save": True},
    "lazy": {"async_save": True, "staging": "lazy"},
}


def _build(layout: str, count: int, seed: int, native: bool, **config: Any) -> Any:
    from tests.accelerate import training as t

    run = t.start(layout, seed, native=native, unused=False, **config)
    run.models, run.optimizers = [run.model], [run.optimizer]
    for number in range(1, count):
        model = t.Net(seed + number, unused=False)
        model, optimizer = run.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        run.models.append(model)
        run.optimizers.append(optimizer)
    return run


def _step(run: Any) -> None:
    for model, optimizer in zip(run.models, run.optimizers, strict=True):
        run.accelerator.backward(model(torch.ones(2, 6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _states(models: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value.clone()
        for name, model in models.items()
        for key, value in full_state(model.state_dict()).items()
    }


def _seen(path: Path, layout: str, models: int, hooks: tuple[Hook, Hook], native: bool, **config: Any) -> Any:
    """Return the state of each model after the load and one more step, or None if the load raises; and the state of the
    training without an interruption."""
    TAKEN.clear()
    run = _build(layout, models, 0, native, **config)
    _step(run)
    run.accelerator.register_save_state_pre_hook(hooks[0])
    run.accelerator.save_state(str(path))
    _step(run)  # a copy that is not made yet must not see this
    straight = _states({str(number): model for number, model in enumerate(run.models)})
    if run.attached is not None:
        run.attached.wait()
    run.accelerator.wait_for_everyone()
    other = _build(layout, models, 5, native, **config)
    other.accelerator.register_load_state_pre_hook(hooks[1])
    expected: type[Exception] = Exception if native else dcp.CheckpointMismatch
    try:
        other.accelerator.load_state(str(path))
    except expected:
        return None, straight
    _step(other)
    return _states({str(number): model for number, model in enumerate(other.models)} | TAKEN), straight


@pytest.mark.one_of("hooks", "models", "staging", count=8)
@pytest.mark.parametrize("staging", STAGING)
@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("layout", ["single", "ddp", pytest.param("fsdp2", marks=resumes_fsdp2_alone)])
@on_ranks(of=lambda layout: WORLD_SIZE[layout])
def test_what_hooks_leave_is_saved_and_loaded(
    tmp_path: Path, layout: str, hooks: str, models: int, staging: str
) -> None:
    stock, _ = _seen(tmp_path / "stock", layout, models, HOOKS[hooks], native=True)
    ours, straight = _seen(tmp_path / "ours", layout, models, HOOKS[hooks], native=False, **STAGING[staging])
    assert (ours is None) == (stock is None)
    if stock is not None:
        assert_same(ours, stock)
    if hooks in EXACT:
        assert_same(ours, straight)
