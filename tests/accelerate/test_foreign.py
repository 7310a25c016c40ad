"""What Accelerate wrote without this package warm-starts anything; FSDP's folders have the optimizer, too."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import dcp_plugin as dcp
from dcp_plugin.core.state import gather_module
from tests import launch
from tests.compare import assert_same, full_state, weights_of
from tests.launch import on_ranks

LAYOUTS = ("ddp", "fsdp2", "fsdp1")
HAS_RANK_FILES = "use_dcp" in inspect.signature(save_fsdp_model).parameters
needs_rank_files = pytest.mark.skipif(not HAS_RANK_FILES, reason="this Accelerate writes no rank files")


def _save(root: Path) -> None:
    from tests.accelerate import training as t

    for layout in LAYOUTS:
        run = t.start(layout, native=True, stateful=False, unused=False)
        run.train(2)
        run.accelerator.save_state(str(root / layout))
        state = run.whole_state()
        if layout != "ddp" and HAS_RANK_FILES:
            _save_rank_files(run, str(root / f"{layout}_ranks"))
        if layout == "fsdp2":
            run.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
            run.accelerator.save_state(str(root / "fsdp2_full"))
        if run.accelerator.is_main_process:
            torch.save(state, root / f"{layout}.pt")


def _save_rank_files(run: Any, folder: str) -> None:
    """Write one file per rank with Accelerate's own functions."""
    plugin = run.accelerator.state.fsdp_plugin
    save_fsdp_model(plugin, run.accelerator, run.model, folder, use_dcp=False)
    save_fsdp_optimizer(plugin, run.accelerator, run.optimizer.optimizer, run.model, folder, use_dcp=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("accelerate")
    launch.run(_save, 2, root)
    return root


def _sources(root: Path) -> list[tuple[Path, str, str]]:
    """Each with the layout that wrote it, and its format."""
    return [
        (root / "ddp", "ddp", "accelerate"),
        (root / "ddp" / "model.safetensors", "ddp", "safetensors"),
        (root / "fsdp2", "fsdp2", "accelerate"),
        (root / "fsdp1", "fsdp1", "accelerate"),
        (root / "fsdp1" / "pytorch_model_fsdp_0", "fsdp1", "stock"),
        (root / "fsdp2_full", "fsdp2", "accelerate"),
        *((root / f"{layout}_ranks", layout, "accelerate") for layout in LAYOUTS[1:] if HAS_RANK_FILES),
    ]


def _model_state(root: Path, layout: str) -> dict[str, torch.Tensor]:
    return weights_of(torch.load(root / f"{layout}.pt", weights_only=True))


@on_ranks(2)
def test_a_model_is_warm_started_from_every_folder_of_accelerate(root: Path) -> None:
    from tests.accelerate import training as t

    assert (root / "fsdp2_full" / "pytorch_model_fsdp.bin").exists()
    for path, layout, kind in _sources(root):
        models: list[Any] = [t.Net(5, unused=False) for _ in range(3)]
        fully_shard(models[1], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        models[2] = FullyShardedDataParallel(models[2], device_id=torch.device("cpu"))
        for model in models:
            dcp.load({"model": model}, path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert_same(_model_state(root, layout), full_state(gather_module(model)))
        assert dcp.inspect(path).format == kind


@pytest.mark.parametrize(
    "folder", ["fsdp2", "fsdp1", *(pytest.param(f"{name}_ranks", marks=needs_rank_files) for name in LAYOUTS[1:])]
)
def test_the_optimizer_in_a_folder_of_fsdp_is_loaded_too(root: Path, folder: str) -> None:
    from tests.accelerate import training as t

    model = t.Net(5, unused=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    dcp.load({"model": model, "optim": optimizer}, root / folder)
    saved = torch.load(root / f"{folder.partition('_')[0]}.pt", weights_only=True)
    for name, parameter in model.named_parameters():
        slots = {slot: saved[f"optim.state.{name}.{slot}"] for slot in ("exp_avg", "exp_avg_sq")}
        assert_same(slots, {slot: optimizer.state[parameter][slot] for slot in slots})
    assert optimizer.param_groups[0]["lr"] != 0.5


@on_ranks(2)
def test_a_view_of_ours_in_a_folder_of_accelerate_leads_to_the_checkpoint(tmp_path: Path) -> None:
    from tests.accelerate import training as t

    run = t.start("fsdp2", unused=False)
    run.train(1)
    run.accelerator.save_state(str(tmp_path / "ck"))
    model = t.Net(5, unused=False)
    dcp.load({"model": model}, tmp_path / "ck" / "pytorch_model_fsdp_0")
    assert_same(weights_of(run.whole_state()), model.state_dict())
