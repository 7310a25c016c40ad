"""``export --format lightning``: one file, from which stock Lightning goes on without this package."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from tests import launch
from tests.lightning import WORLD_SIZE
from tests.programs import LIGHTNING, Program

RESUMED_AS = {"single": "single", "ddp": "ddp", "fsdp1": "ddp", "fsdp2": "ddp"}
"""With which strategy of stock's. The sharded ones take numbers for names in the model's order, whatever the
optimizer's was; and they need no file: they resume from the checkpoint itself."""


def _save(root: Path, layouts: list[str]) -> None:
    """Two epochs in one go without the plugin; one with it, and a checkpoint."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import two_optimizers as t

    for layout in layouts:
        _, straight, counts = t.fit(layout, 2)
        keep = ModelCheckpoint(root / layout, filename="first", every_n_epochs=1)
        trainer, first, _ = t.fit(layout, 1, callbacks=[keep], plugins=[DCPCheckpointIO()])
        assert first.losses == straight.losses[: t.stock.STEPS_PER_EPOCH]
        if trainer.is_global_zero:
            losses = straight.losses[t.stock.STEPS_PER_EPOCH :]
            said = {"losses": losses, "batches": counts.batches, "sums": counts.sums.tolist()}
            (root / f"{layout}.json").write_text(json.dumps(said))


def _resume_with_stock(root: Path, layouts: list[str], ranks: int, training: str = "two_optimizers") -> dict[str, Any]:
    """What processes without this package say of the exported files, by layout."""
    from tests.lightning.stock_training import done_by

    words: list[Path | str] = []
    for layout in layouts:
        dcp.export(root / layout / "first.ckpt", root / f"{layout}.ckpt", "lightning")
        words += [RESUMED_AS[layout], root / f"{layout}.ckpt", root / f"{layout}-resumed.json"]
    place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launch.free_port())}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = [
        Program(
            *("-m", f"tests.lightning.{training}", *words),
            imported=LIGHTNING,
            env={**place, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    said = [process.communicate()[1] for process in processes]
    assert all(done_by(Path(words[-1]), rank).exists() for rank in range(ranks)), "\n".join(said)
    return {layout: json.loads((root / f"{layout}-resumed.json").read_text()) for layout in layouts}


def _check(root: Path, layouts: list[str], ranks: int) -> None:
    from tests.lightning import two_optimizers as t

    launch.run(_save, ranks, root, layouts)
    for layout, resumed in _resume_with_stock(root, layouts, ranks).items():
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


def _save_with_one_optimizer(root: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as stock

    _, straight = stock.fit("fsdp1", 2)
    keep = ModelCheckpoint(root / "fsdp1", filename="first", every_n_epochs=1)
    trainer, _ = stock.fit("fsdp1", 1, callbacks=[keep], plugins=[DCPCheckpointIO()])
    if trainer.is_global_zero:
        (root / "fsdp1.json").write_text(json.dumps(straight.losses[stock.STEPS_PER_EPOCH :]))


@pytest.mark.long
def test_so_it_does_with_fsdp1_which_cannot_be_optimized_by_hand(tmp_path: Path) -> None:
    launch.run(_save_with_one_optimizer, 2, tmp_path)
    resumed = _resume_with_stock(tmp_path, ["fsdp1"], 2, "stock_training")
    straight = json.loads((tmp_path / "fsdp1.json").read_text())
    assert resumed["fsdp1"] == pytest.approx(straight, rel=1e-5)
