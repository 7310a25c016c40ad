"""What sharded strategies saved through the plugin, stock Lightning resumes with the package uninstalled."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_plugin as dcp
from tests import launch
from tests.compare import assert_same
from tests.lightning import WORLD_SIZE
from tests.programs import LIGHTNING, Program

SHARDED = ("fsdp1", "fsdp2", "hsdp")


def _save(root: Path, layouts: list[str], **options: Any) -> None:
    """Two epochs in one go without the plugin; one with it, and a checkpoint."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from dcp_plugin.lightning import DCPCheckpointIO
    from tests.lightning import stock_training as stock
    from tests.lightning import training as t

    for layout in layouts:
        _, straight = stock.fit(layout, 2)
        keep = ModelCheckpoint(root / layout, filename="first", every_n_epochs=1)
        trainer, first = stock.fit(layout, 1, callbacks=[keep], plugins=[DCPCheckpointIO(**options)])
        assert first.losses == straight.losses[:3]
        state = t.whole_state(trainer)
        if trainer.is_global_zero:
            (root / f"{layout}.json").write_text(json.dumps(straight.losses))
            torch.save(state, root / f"{layout}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("no_lock_in")
    for size in (2, 4):
        launch.run(_save, size, root, [name for name in SHARDED if WORLD_SIZE[name] == size])
    return root


def test_stock_lightning_resumes_as_if_it_had_never_been_interrupted(root: Path) -> None:
    from tests.lightning.stock_training import done_by

    jobs = _jobs(root, 2)
    words = [word for job in jobs for word in job]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    ranks = [
        Program(
            *("-m", "tests.lightning.stock_training", *words),
            imported=LIGHTNING,
            env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    said = [process.communicate()[1] for process in ranks]
    # Not their exit codes: a process of stock's may end in "terminate called without an active exception" after its
    # work, where threads of torch are still running. Nothing of ours is in it.
    assert all(done_by(jobs[-1][2], rank).exists() for rank in range(2)), "\n".join(said)
    _check(root, jobs)


def test_stock_lightning_resumes_a_mesh_of_replicas_and_shards(root: Path) -> None:
    """On ranks that have imported this package: starting four processes takes too long."""
    from tests.lightning.stock_training import resume

    jobs = _jobs(root, 4)
    for job in jobs:
        launch.run(resume, 4, *job)
    _check(root, jobs)


def _jobs(root: Path, world_size: int) -> list[tuple[str, Path, Path]]:
    layouts = [name for name in SHARDED if WORLD_SIZE[name] == world_size]
    return [(layout, root / layout / "first.ckpt", root / f"{layout}-resumed.json") for layout in layouts]


def _check(root: Path, jobs: list[tuple[str, Path, Path]]) -> None:
    for layout, _, losses in jobs:
        assert json.loads(losses.read_text()) == json.loads((root / f"{layout}.json").read_text())[3:]


def test_within_an_epoch_stock_goes_on_as_from_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """That is not where the run was: with ``shuffle=True`` on several ranks, stock draws another order."""
    for stock in (True, False):
        launch.run(_save_within_an_epoch, 2, tmp_path / str(stock), stock)
    exported = tmp_path / "exported.ckpt"
    dcp.export(tmp_path / "False" / "ddp-stateful" / "step=3.ckpt", exported, "lightning")
    fsdp2, ddp = (tmp_path / "True" / f"{layout}-stateful" / "step=3.ckpt" for layout in ("fsdp2", "ddp"))
    pairs = {"ddp": (ddp, exported), "fsdp2": (fsdp2, tmp_path / "False" / "fsdp2-stateful" / "step=3.ckpt")}
    for of_stock, of_ours in launch.run(_go_on_within_an_epoch, 2, pairs):
        assert of_ours == of_stock and all(len(losses) == 3 for losses in of_stock.values())


def _save_within_an_epoch(root: Path, stock: bool) -> None:
    from tests.lightning import training as t

    for layout in ("ddp", "fsdp2"):
        trainer = t.trainer_for(layout, t.checkpoints(root, layout, "stateful"), stock=stock, max_steps=3)
        trainer.fit(t.Model(layout), t.stateful_loader(layout))


def _go_on_within_an_epoch(pairs: dict[str, tuple[Path, Path]]) -> list[dict[str, list[float]]]:
    """The losses of each layout, from the first and from the second checkpoint."""
    from tests.lightning import training as t

    losses: list[dict[str, list[float]]] = [{}, {}]
    for layout, paths in pairs.items():
        for number, path in enumerate(paths):
            model = t.Model(layout)
            t.trainer_for(layout, stock=True).fit(model, t.stateful_loader(layout), ckpt_path=path)
            losses[number][layout] = model.losses
    return losses


def test_lightnings_own_tools_make_one_file_of_it(root: Path, tmp_path: Path) -> None:
    launch.run(_consolidate, 1, root, tmp_path)
    for layout in SHARDED:
        assert torch.load(tmp_path / f"{layout}-fabric", weights_only=True)["global_step"] == 3
        consolidated = torch.load(tmp_path / f"{layout}-pytorch", weights_only=True)
        saved = torch.load(root / f"{layout}.pt", weights_only=True)
        assert_same(
            {key: value for key, value in saved.items() if key.startswith("model.")},
            {f"model.{key}": value for key, value in consolidated["state_dict"].items()},
        )
        assert consolidated["hyper_parameters"] == {"layout": layout, "seed": 0, "width": 7}
        (optimizer,) = consolidated["optimizer_states"]
        assert [len(group["params"]) for group in optimizer["param_groups"]] == [2, 2]
        assert optimizer["param_groups"][1]["weight_decay"] == 0.0
        saved_state = {key: value for key, value in saved.items() if key.startswith("optim.state.")}
        for fqn, slots in optimizer["state"].items():
            for slot, value in slots.items():
                assert_same({"it": saved_state.pop(f"optim.state.{fqn}.{slot}")}, {"it": value})
        assert not saved_state


def _consolidate(root: Path, to: Path) -> None:
    """As on the command line, but without starting Python for each."""
    for layout in SHARDED:
        for package in ("fabric", "pytorch"):
            out = to / f"{layout}-{package}"
            sys.argv = ["consolidate", str(root / layout / "first.ckpt"), "--output_file", str(out)]
            name = f"lightning.{package}.utilities.consolidate_checkpoint"
            sys.modules.pop(name, None)
            runpy.run_module(name, run_name="__main__")


@pytest.mark.parametrize("layout", SHARDED)
def test_we_see_nothing_of_it(root: Path, layout: str) -> None:
    """Each key is there once, and so is each byte."""
    path = root / layout / "first.ckpt"
    info = dcp.inspect(path)
    keys = [*(tensor.key for tensor in info.tensors), *info.values]
    assert {key.partition(".")[0] for key in keys} == {"model", "optim", "extra"}
    stored = sum(file.stat().st_size for file in path.glob("*.distcp"))
    metadata = torch.distributed.checkpoint.FileSystemReader(path).read_metadata()
    items = {(where.relative_path, where.offset): where.length for where in metadata.storage_data.values()}
    assert len(metadata.storage_data) > len(items)  # the aliases
    assert stored < sum(items.values()) + 4096 * (len(items) + 8)  # padding


def test_it_can_be_left_out(tmp_path: Path) -> None:
    launch.run(_save_without, 2, tmp_path)
    path = tmp_path / "fsdp2" / "first.ckpt"
    assert not (path / "meta.pt").exists()
    metadata = torch.distributed.checkpoint.FileSystemReader(path).read_metadata()
    assert {key.partition(".")[0] for key in metadata.state_dict_metadata} == {"model", "optim", "extra"}


def _save_without(root: Path) -> None:
    _save(root, ["fsdp2"], stock_aliases=False)
