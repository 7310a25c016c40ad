"""What one layout saved, every other loads byte for byte, and trains on as if it had had that state in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_plugin as dcp
from dcp_plugin.core.paths import Where, as_path
from tests import launch, sampling
from tests.compare import assert_same, only_tensors
from tests.launch import on_ranks
from tests.layouts import WORLD_SIZE, build, put_in_memory, train, whole_state
from tests.object_server import Bucket


def _save(root: Where, layouts: list[str], wanted: Path) -> None:
    for layout in layouts:
        model, optimizer = build(layout)
        train(model, optimizer, 3)
        dcp.save({"model": model, "optim": optimizer}, root / layout, step=3)
        state = whole_state(model, optimizer)
        if torch.distributed.get_rank() == 0:
            torch.save(state, wanted / f"{layout}.pt")


def _by_world_size() -> dict[int, list[str]]:
    groups: dict[int, list[str]] = {}
    for layout, world_size in WORLD_SIZE.items():
        groups.setdefault(world_size, []).append(layout)
    return groups


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("matrix")
    for world_size, layouts in _by_world_size().items():
        launch.run(_save, world_size, root, layouts, root)
    return root


def _source(layout: str, test: str) -> str:
    """Return the layout that comes some places after this one: each is the source of one. The commit draws how many."""
    layouts = list(WORLD_SIZE)
    return layouts[(layouts.index(layout) + sampling.number(test, len(layouts))) % len(layouts)]


EVERY_LAYOUT = pytest.mark.parametrize("layout", WORLD_SIZE)
ON_ITS_RANKS = on_ranks(of=lambda layout: WORLD_SIZE[layout])
ALL_SOURCES = pytest.mark.parametrize("all_sources", [False, pytest.param(True, marks=pytest.mark.long)])


@pytest.mark.one_of("layout", count=2)
@ALL_SOURCES
@EVERY_LAYOUT
@ON_ITS_RANKS
def test_every_layout_loads_what_any_layout_saved(saved: Path, layout: str, all_sources: bool) -> None:
    for source in WORLD_SIZE if all_sources else [_source(layout, "loads")]:
        model, optimizer = build(layout, seed=1)
        report = dcp.load({"model": model, "optim": optimizer}, saved / source)
        assert not report.missing and not report.unexpected and not report.cast
        assert_same(torch.load(saved / f"{source}.pt", weights_only=True), whole_state(model, optimizer))


@pytest.mark.one_of("layout", count=2)
@ALL_SOURCES
@EVERY_LAYOUT
@ON_ITS_RANKS
def test_a_training_goes_on_as_if_it_had_what_it_loaded_in_memory(saved: Path, layout: str, all_sources: bool) -> None:
    for source in WORLD_SIZE if all_sources else [_source(layout, "goes on")]:
        model, optimizer = build(layout, seed=1)
        dcp.load({"model": model, "optim": optimizer}, saved / source)
        reference = build(layout, seed=2)
        put_in_memory(layout, *reference, torch.load(saved / f"{source}.pt", weights_only=True))
        assert train(model, optimizer, 2, seed=7) == train(*reference, 2, seed=7)
        assert_same(only_tensors(whole_state(model, optimizer)), only_tensors(whole_state(*reference)))


@pytest.mark.one_of(count=2)
@EVERY_LAYOUT
@ON_ITS_RANKS
def test_a_load_replaces_the_state_of_a_trained_optimizer(saved: Path, layout: str) -> None:
    model, optimizer = build(layout, seed=1)
    train(model, optimizer, 2, seed=9)
    dcp.load({"model": model, "optim": optimizer}, saved / "fsdp2_hsdp")
    assert_same(torch.load(saved / "fsdp2_hsdp.pt", weights_only=True), whole_state(model, optimizer))


@pytest.mark.parametrize("layout", WORLD_SIZE)
def test_stock_dcp_reads_what_we_wrote(saved: Path, layout: str) -> None:
    whole = torch.load(saved / f"{layout}.pt", weights_only=True)
    target = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in whole.items()}
    stock.load(target, checkpoint_id=saved / layout)
    assert_same(whole, target)


@pytest.mark.parametrize("layout", WORLD_SIZE)
def test_the_bytes_of_every_layout_verify(saved: Path, layout: str) -> None:
    report = dcp.verify(saved / layout)
    assert report.ok and not report.unverified
    assert dcp.inspect(saved / layout).world_size == WORLD_SIZE[layout]


_IN_A_BUCKET = {"fsdp2": 2, "fsdp2_hsdp": 4}


@pytest.fixture
def in_bucket(bucket: Bucket, tmp_path: Path) -> tuple[Where, Path]:
    root = as_path(bucket.url) / "run"
    for layout, world_size in _IN_A_BUCKET.items():
        launch.run(_save, world_size, root, [layout], tmp_path)
    return root, tmp_path


def _load_all(root: Where, wanted: Path, layout: str) -> None:
    for source in _IN_A_BUCKET:
        model, optimizer = build(layout, seed=1)
        dcp.load({"model": model, "optim": optimizer}, root / source)
        assert_same(torch.load(wanted / f"{source}.pt", weights_only=True), whole_state(model, optimizer))


@pytest.mark.one_of
@pytest.mark.parametrize("layout", ["fsdp2", "tp", "fsdp2_hsdp"])
def test_ranks_load_from_a_bucket_what_two_and_four_saved(in_bucket: tuple[Where, Path], layout: str) -> None:
    launch.run(_load_all, WORLD_SIZE[layout], *in_bucket, layout)
    for source in _IN_A_BUCKET:
        assert dcp.verify(in_bucket[0] / source).ok
