"""Reuse and trainable_only through the integrations: these know what is frozen, also if they hand over tensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same, full_state
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
        fit(7, 1, None, trainable_only=True, base=root / "base-of-lightning")
        resumed = fit(1, 2, root / "small" / "epoch=0.ckpt", trainable_only=True)
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
        accelerator, model, optimizer = prepared(7, trainable_only=True, base=root / "base")
        step(accelerator, model, optimizer)
        accelerator.save_state(root / "small")
        trained = full_state(accelerator.unwrap_model(model).state_dict())
        accelerator, model, optimizer = prepared(1, trainable_only=True)
        accelerator.load_state(root / "small")
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
    assert dcp.inspect(tmp_path / "accelerate" / "small").base == tmp_path / "accelerate" / "base"
