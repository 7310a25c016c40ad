"""Reuse and trainable_only through the integrations: these know what is frozen, also if they hand over tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same, full_state
from tests.dying import die_when_half_is_written
from tests.finetune import WIDTH, build, finished_saves


def _pretrained(path: Path) -> int:
    """Bytes of all that the base has."""
    model, _ = build(seed=7)
    with finished_saves() as events:
        dcp.save({"model": model}, path)
    return events[0].bytes


def _with_lightning(root: Path) -> list[int]:
    """Two epochs with a checkpoint each, on two ranks of DDP: what this rank has written for each."""
    import lightning.pytorch as pl

    from tests.lightning import training as t

    class Tuning(pl.LightningModule):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.net, self._optimizer = build(seed=seed)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return self._optimizer

    def fit(seed: int, epochs: int, resume: Path | None, **options: Any) -> pl.LightningModule:
        folder = root / ("small" if options else "linked")
        saving, io = t.ModelCheckpoint(folder, "{epoch}", save_top_k=-1), t.DCPCheckpointIO(**options)
        trainer = t.trainer_for("ddp", [saving], plugin=io, max_steps=-1, max_epochs=epochs)
        module = Tuning(seed)
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, WIDTH)), ckpt_path=resume)
        return module

    warnings.simplefilter("ignore")
    with finished_saves() as events:
        fit(7, 2, None)
        module = fit(1, 3, root / "linked" / "epoch=1.ckpt")
        assert_same(full_state(_backbone(module.net)), full_state(_backbone(build(seed=7)[0])))
        init_from = root / "base-of-lightning"
        fit(7, 1, None, trainable_only=True, init_from=init_from)
        resumed = fit(1, 2, root / "small" / "epoch=0.ckpt", trainable_only=True, init_from=init_from)
        assert_same(full_state(_backbone(resumed.net)), full_state(_backbone(build(seed=7)[0])))
    return [event.bytes for event in events]


def _backbone(model: Any) -> dict[str, torch.Tensor]:
    return {key: value for key, value in model.state_dict().items() if key.startswith("backbone")}


def _with_accelerate(root: Path) -> list[int]:
    from accelerate import Accelerator

    from dcp_plugin.accelerate import attach

    def prepared(seed: int, **options: Any) -> tuple[Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        model, optimizer = build(seed=seed)
        model, optimizer = accelerator.prepare(model, optimizer)
        attach(accelerator, **options)
        return accelerator, model, optimizer

    def step(accelerator: Any, model: Any, optimizer: Any) -> None:
        accelerator.backward(model(torch.ones(2, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    warnings.simplefilter("ignore")
    with finished_saves() as events:
        accelerator, model, optimizer = prepared(7)
        for number in range(2):
            step(accelerator, model, optimizer)
            accelerator.save_state(root / f"linked-{number}")
        accelerator, model, optimizer = prepared(1)
        accelerator.load_state(root / "linked-1")
        accelerator.save_state(root / "linked-2")
        accelerator, model, optimizer = prepared(7, trainable_only=True)
        attach(accelerator).checkpointer.load({"model": model}, root / "base")
        step(accelerator, model, optimizer)
        accelerator.save_state(root / "run" / "small")
        trained = full_state(accelerator.unwrap_model(model).state_dict())
        accelerator, model, optimizer = prepared(1, trainable_only=True)
        attach(accelerator).checkpointer.load({"model": model}, root / "base")
        accelerator.load_state(root / "run" / "small")
        assert_same(full_state(accelerator.unwrap_model(model).state_dict()), trained)
    return [event.bytes for event in events]


def _both(root: Path) -> dict[str, list[int]]:
    """In one launch: Lightning first, because Accelerate keeps its state for the process."""
    said = {"lightning": _with_lightning(root / "lightning")}
    dist.barrier()
    return {**said, "accelerate": _with_accelerate(root / "accelerate")}


def test_the_doors_write_the_frozen_part_once_or_not_at_all(tmp_path: Path) -> None:
    whole = _pretrained(tmp_path / "accelerate" / "base")
    model, _ = build(seed=7)
    dcp.save({"model": torch.nn.ModuleDict({"net": model})}, tmp_path / "lightning" / "base-of-lightning")

    told = launch.run(_both, 2, tmp_path)

    lightning = [sum(of_rank["lightning"][number] for of_rank in told) for number in range(5)]
    assert lightning[0] > whole
    assert max(lightning[1:]) <= 0.15 * lightning[0], "the second epoch, the resumed run, and those of what trains only"
    accelerate = [sum(of_rank["accelerate"][number] for of_rank in told) for number in range(4)]
    assert max(accelerate[1:]) <= 0.15 * accelerate[0]
    assert dcp.verify(tmp_path / "lightning" / "linked" / "epoch=2.ckpt").ok
    assert dcp.inspect(tmp_path / "accelerate" / "run" / "small").base == str(tmp_path / "accelerate" / "base")


# Started, killed, resumed on another number of ranks, exported


@contextmanager
def _lightning(root: Path, init_from: Path | None) -> Iterator[tuple[Any, Callable[[], None]]]:
    import lightning.pytorch as pl

    from tests.lightning import training as t

    class Tuning(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self._optimizer = build(seed=dist.get_world_size())

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.model(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return self._optimizer

    class AtStart(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            _compare(root, module.model)

    path = dcp.resolve_resume("auto", root / "run")
    io = t.DCPCheckpointIO(trainable_only=True, init_from=init_from, timeout=20.0)
    saving = t.ModelCheckpoint(root / "run", "{step}", save_top_k=-1, every_n_train_steps=1)
    layout = "ddp" if dist.get_world_size() == 2 else "single"
    steps = 1 if path is None else int(dcp.inspect(path).step or 0) + 1
    trainer, module = t.trainer_for(layout, [saving, AtStart()], plugin=io, max_steps=steps), Tuning()
    data = torch.utils.data.DataLoader(torch.randn(8, WIDTH))
    yield module.model, lambda: trainer.fit(module, data, ckpt_path=path)


@contextmanager
def _accelerate(root: Path, init_from: Path | None) -> Iterator[tuple[Any, Callable[[], None]]]:
    from accelerate import Accelerator

    from dcp_plugin.accelerate import attach

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*build(seed=dist.get_world_size()))

    def train() -> None:
        ours = attach(accelerator, trainable_only=True, timeout=20.0)
        start = ours.resume_or_init(root / "run", init_from=init_from)
        _compare(root, accelerator.unwrap_model(model))
        accelerator.backward(model(torch.ones(2, WIDTH)).square().mean())
        optimizer.step()
        name = "step-1" if start.path is None or start.how != "resumed" else f"step-{int(start.path.name[5:]) + 1}"
        accelerator.save_state(root / "run" / name)

    yield accelerator.unwrap_model(model), train


@contextmanager
def _transformers(root: Path, init_from: Path | None) -> Iterator[tuple[Any, Callable[[], None]]]:
    from transformers import AutoModelForCausalLM, TrainerCallback

    from dcp_plugin.transformers import from_pretrained
    from tests.transformers.trainer import training as t

    seed = dist.get_world_size()
    net = t.model(seed) if init_from is None else from_pretrained(AutoModelForCausalLM, init_from)
    net.requires_grad_(False)
    net.transformer.ln_f.requires_grad_(True)

    class AtStart(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _compare(root, net)

    resume = dcp.latest(root / "run") is not None
    steps = 1 + len(dcp.list_checkpoints(root / "run"))
    config = dcp.CheckpointConfig(trainable_only=True, timeout=20.0)
    layout = "ddp" if seed == 2 else "single"
    trainer = t.trainer(
        root / "run", layout, net=net, config=config, max_steps=steps, save_steps=1, callbacks=[AtStart()]
    )
    yield net, lambda: trainer.train(resume_from_checkpoint=resume)


_DOORS = {"lightning": _lightning, "accelerate": _accelerate, "transformers": _transformers}


def _compare(root: Path, model: Any) -> None:
    """The model is as the last life has left it."""
    if (root / "whole.pt").exists():
        assert_same(full_state(model.state_dict()), torch.load(root / "whole.pt"))


def _life(root: Path, door: str, init_from: str | None = "pretrained", dies: bool = False) -> None:
    warnings.simplefilter("ignore")
    with _DOORS[door](root, None if init_from is None else root / init_from) as (model, train):
        if dies:
            if dist.get_rank() == 1:
                die_when_half_is_written()
            with suppress(dcp.CheckpointError):
                train()
            return
        train()
        whole = full_state(model.state_dict())
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(whole, root / "whole.pt")


def _refused(root: Path, door: str, init_from: str | None) -> None:
    with pytest.raises(dcp.CheckpointMismatch, match=r"left out of the checkpoint.*init_from="):
        _life(root, door, init_from)


def _make_weights(root: Path, door: str, name: str, seed: int) -> None:
    if door == "transformers":
        from tests.transformers.trainer import training as t

        t.model(seed).save_pretrained(root / name)
    else:
        model, _ = build(seed=seed)
        dcp.save({"model": torch.nn.ModuleDict({"model": model}) if door == "lightning" else model}, root / name)


@pytest.mark.parametrize("door", _DOORS)
def test_a_fine_tuning_that_is_killed_goes_on_with_another_number_of_ranks(tmp_path: Path, door: str) -> None:
    for name, seed in (("pretrained", 7), ("other", 8)):
        launch.run(_make_weights, 1, tmp_path, door, name, seed)
    launch.run(_life, 2, tmp_path, door)
    first = dcp.latest(tmp_path / "run")
    assert first is not None and dcp.inspect(first).base == str(tmp_path / "pretrained")
    launch.run(_life, 2, tmp_path, door, "pretrained", True, killed=[1])
    assert dcp.latest(tmp_path / "run") == first
    for init_from in (None, "other"):
        launch.run(_refused, 1, tmp_path, door, init_from)
    for world_size in (1, 2):
        launch.run(_life, world_size, tmp_path, door)
    newest = dcp.latest(tmp_path / "run")
    assert newest is not None and newest != first and dcp.inspect(newest).left_out
    report = dcp.export(newest, tmp_path / "out.safetensors")
    assert report.tensors and "The output does not have them" in report.notes[0]
