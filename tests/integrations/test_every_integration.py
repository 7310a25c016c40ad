"""What one integration saved, every integration loads: model and optimizer byte-equal, 36 pairs, on two ranks.

Some integrations shard here and others do not, so each pair reshards too. Lightning keeps the model as ``net`` of
its module, under a prefix that the others do not have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import launch
from tests.compare import assert_same
from tests.launch import on_ranks
from tests.layouts import whole_state
from tests.training import Net, mesh_for, samples, shard


def _net(load: bool) -> Any:
    """With other numbers where a checkpoint is loaded."""
    torch.manual_seed(7 if load else 0)
    return Net()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def _step(model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward) -> None:
    for _ in range(2):
        backward(model(torch.ones(4, 6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


# An integration: train from a seed and save to a path, or load from it; returns model and optimizer by key, whole.


def _lightning(path: Path, load: bool) -> dict[str, Any]:
    from tests.lightning import training as t

    class Module(t.stock_training.Trained):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net(load)
            del self.seen  # the model has one

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).square().mean()

        def make_optimizer(self) -> torch.optim.Optimizer:
            return _optimizer(self.net)

    if load:
        return t.resumed("ddp", str(path), Module()).state
    return t.saved("ddp", path, Module(), max_steps=2)


def _accelerate(path: Path, load: bool) -> dict[str, Any]:
    from tests.accelerate import training as t

    run = t.start("own_fsdp2")
    run.accelerator.free_memory()
    model = shard(_net(load), mesh_for("fsdp2"))
    optimizer = _optimizer(model)
    run.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    run.accelerator.prepare_optimizer(optimizer, device_placement=False)
    if load:
        run.accelerator.load_state(str(path))
    else:
        _step(model, optimizer, run.accelerator.backward)
        run.accelerator.save_state(str(path))
    return whole_state(model, optimizer)


def _fabric(path: Path, load: bool) -> dict[str, Any]:
    from tests.fabric import training as t

    fabric = t.attached("fsdp2")
    model = fabric.setup_module(_net(load))
    optimizer = fabric.setup_optimizers(_optimizer(model))
    if load:
        fabric.load(path, {"model": model, "optimizer": optimizer})
    else:
        _step(model, optimizer, fabric.backward)
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
    return t.whole_state(model, optimizer)


def _transformers(path: Path, load: bool) -> dict[str, Any]:
    from tests.transformers.trainer import training as t

    class Trainer(t.Ours):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(inputs["x"]).square().mean()

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = _optimizer(net)
            return self.optimizer

    net, rows = _net(load), [{"x": sample} for (sample,) in samples(32)]
    options = {"max_steps": 2, "save_steps": 2, "remove_unused_columns": False, "lr_scheduler_type": "constant"}
    trainer = t.trainer(path.parent, "ddp", kind=Trainer, net=net, data=rows, **options)
    if load:
        t.begin(trainer, path)
    else:
        trainer.train()
    return whole_state(net, trainer.optimizer.optimizer)


def _plain(path: Path, load: bool) -> dict[str, Any]:
    import dcp_plugin as dcp

    model = shard(_net(load), mesh_for("fsdp2"))
    optimizer = _optimizer(model)
    if load:
        dcp.load({"model": model, "optim": optimizer}, path)
    else:
        _step(model, optimizer)
        dcp.save({"model": model, "optim": optimizer}, path)
    return whole_state(model, optimizer)


def _stock(path: Path, load: bool) -> dict[str, Any]:
    """``torch.distributed.checkpoint`` as its users use it. It knows no prefix: they have to give it."""
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    inside = shard(_net(load), mesh_for("fsdp2"))
    model: nn.Module = nn.ModuleDict({"net": inside}) if "lightning" in str(path) else inside
    optimizer = _optimizer(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    if not load:
        _step(model, optimizer)
    weights, slots = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optim": slots}
    if load:
        stock.load(state, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
        )
    else:
        stock.save(state, checkpoint_id=path)
    return whole_state(model, optimizer)


INTEGRATIONS = {
    "lightning": _lightning,
    "accelerate": _accelerate,
    "fabric": _fabric,
    "transformers": _transformers,
    "plain": _plain,
    "stock": _stock,
}


def _path(root: Path, integration: str) -> Path:
    return root / integration / "checkpoint-2"  # what transformers calls it


def _save(root: Path, integration: str) -> None:
    warnings.simplefilter("ignore")
    state = INTEGRATIONS[integration](_path(root, integration), load=False)
    if dist.get_rank() == 0:
        torch.save(state, root / f"{integration}.pt")


def _load(root: Path, integration: str) -> list[str]:
    warnings.simplefilter("ignore")
    wrong = []
    for source in INTEGRATIONS:
        found = INTEGRATIONS[integration](_path(root, source), load=True)
        saved = torch.load(root / f"{source}.pt", weights_only=True)
        try:
            assert_same(_comparable(saved), _comparable(found))
        except AssertionError as error:
            wrong.append(f"{source} -> {integration}: {error}")
    return wrong


def _comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Without the prefix of Lightning. Stock makes lists of the betas; a schedule adds ``initial_lr`` to a group."""
    return {
        key.replace("net.", ""): list(value) if isinstance(value, tuple) else value
        for key, value in state.items()
        if not key.endswith(".initial_lr")
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("integrations")
    for integration in INTEGRATIONS:
        launch.run(_save, 2, root, integration)
    return root


@pytest.mark.one_of
@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_every_checkpoint_goes_through(saved: Path, integration: str) -> None:
    for wrong in launch.run(_load, 2, saved, integration):
        assert wrong == []


@on_ranks(1)
def test_every_checkpoint_of_ours_is_found_under_other_names(saved: Path) -> None:
    import dcp_plugin as dcp

    warnings.simplefilter("ignore")
    for source in INTEGRATIONS:
        if source == "stock":  # it does not say what is a module
            continue
        model = _net(load=True)
        optimizer = _optimizer(model)
        dcp.load({"mine": model, "adam": optimizer}, _path(saved, source))
        wanted = torch.load(saved / f"{source}.pt", weights_only=True)
        assert_same(_comparable(wanted), _comparable(whole_state(model, optimizer)))
