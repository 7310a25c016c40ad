"""``export --format lightning``: one file, from which stock Lightning goes on without this package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from tests import launch
from tests.lightning.stock_processes import resume_with_stock
from tests.training import WORLD_SIZE

RESUMED_AS = {"single": "single", "ddp": "ddp", "fsdp1": "ddp", "fsdp2": "ddp"}
"""With which strategy of stock's. The sharded ones take numbers for names in the model's order, whatever the
optimizer's was; and they need no file: they resume from the checkpoint itself."""


def _save(root: Path, layouts: list[str]) -> None:
    """Two epochs in one go without the plugin; one with it, and a checkpoint."""
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import two_optimizers as t

    for layout in layouts:
        _, straight = t.fit(layout, 2)
        trainer, first = t.fit(layout, 1, [t.stock.first_checkpoint(root / layout)], plugins=[DCPCheckpointIO()])
        losses = straight["losses"]
        assert first["losses"] == losses[: t.stock.STEPS_PER_EPOCH]
        if trainer.is_global_zero:
            straight["losses"] = losses[t.stock.STEPS_PER_EPOCH :]
            (root / f"{layout}.json").write_text(json.dumps(straight))


def _resume_exported(root: Path, layouts: list[str], ranks: int, module: str = "two_optimizers") -> dict[str, Any]:
    """What processes without this package say of the exported files, by layout."""
    for layout in layouts:
        dcp.export(root / layout / "first.ckpt", root / f"{layout}.ckpt", "lightning")
    results = {layout: root / f"{layout}-resumed.json" for layout in layouts}
    jobs = [(RESUMED_AS[layout], root / f"{layout}.ckpt", path) for layout, path in results.items()]
    resume_with_stock(module, ranks, jobs)
    return {layout: json.loads(path.read_text()) for layout, path in results.items()}


def _check(root: Path, layouts: list[str], ranks: int) -> None:
    from tests.lightning import two_optimizers as t

    launch.run(_save, ranks, root, layouts)
    for layout, resumed in _resume_exported(root, layouts, ranks).items():
        loaded = resumed.pop("outputs")
        straight = json.loads((root / f"{layout}.json").read_text())
        if layout != RESUMED_AS[layout]:  # which adds up gradients in another order
            straight["losses"] = pytest.approx(straight["losses"], rel=1e-5)
        assert resumed == straight, layout
        model = t.TwoOptimizers()
        dcp.load({"model": model}, root / layout / "first.ckpt")
        assert loaded == t.outputs(model), layout


def test_stock_lightning_goes_on_as_if_it_had_never_been_interrupted(tmp_path: Path) -> None:
    _check(tmp_path, ["single"], 1)
    exported = torch.load(tmp_path / "single.ckpt", weights_only=True)
    groups = [[group["params"] for group in one["param_groups"]] for one in exported["optimizer_states"]]
    assert groups == [[[0, 1], [2]], [[0, 1, 2]]]
    assert not {"rng", "dataloaders", "hyper_parameter_types"} & exported.keys()


@pytest.mark.long
def test_so_it_does_with_what_several_ranks_saved(tmp_path: Path) -> None:
    layouts = ["ddp", "fsdp2"]
    assert all(WORLD_SIZE[layout] == 2 for layout in layouts)
    _check(tmp_path, layouts, 2)


def _save_with_one_optimizer(root: Path) -> list[float]:
    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as stock

    _, straight = stock.fit("fsdp1", 2)
    stock.fit("fsdp1", 1, callbacks=[stock.first_checkpoint(root / "fsdp1")], plugins=[DCPCheckpointIO()])
    losses: list[float] = straight.losses[stock.STEPS_PER_EPOCH :]
    return losses


@pytest.mark.long
def test_so_it_does_with_fsdp1_which_cannot_be_optimized_by_hand(tmp_path: Path) -> None:
    losses = launch.run(_save_with_one_optimizer, 2, tmp_path)[0]
    resumed = _resume_exported(tmp_path, ["fsdp1"], 2, "stock_training")
    assert resumed["fsdp1"] == pytest.approx(losses, rel=1e-5)
