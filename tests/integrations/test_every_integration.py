"""What one integration saved, every integration loads: model and optimizer byte-equal, 36 pairs, on two ranks.

The integrations shard differently (see ``_LAYOUT``), so each pair reshards too. Lightning keeps the model as ``net`` of
its module, under a prefix that the others do not have.
"""

from __future__ import annotations

import logging
import os
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
from tests.integrations import INTEGRATIONS
from tests.launch import on_ranks
from tests.layouts import whole_state
from tests.small_training import QUIET, Net, samples

SEED, OTHER_SEED = 0, 7


def _net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def _step(model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward) -> None:
    for _ in range(2):
        backward(model(torch.ones(4, 6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key.replace("net.", ""): value for key, value in whole_state(model, optimizer).items()}


def _fully_shard(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


# A integration: train from a seed and save to a path, or load from it; returns model and optimizer by key, whole.


def _lightning(path: Path, load: bool) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    from dcp_plugin.lightning import DCPCheckpointIO

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net(OTHER_SEED if load else SEED)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return _optimizer(self.net)

    class Look(pl.Callback):
        state: dict[str, Any]

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.state = _whole(trainer.strategy.model, trainer.optimizers[0])
            trainer.should_stop = load

    logging.getLogger("lightning").setLevel(logging.ERROR)
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    look = Look()
    trainer = pl.Trainer(
        devices=2,
        strategy=DDPStrategy(),
        plugins=[DCPCheckpointIO()],
        callbacks=[look],
        enable_checkpointing=False,
        max_steps=4 if load else 2,
        **QUIET,
    )
    loader = torch.utils.data.DataLoader(samples(16), batch_size=4)
    trainer.fit(Module(), loader, ckpt_path=str(path) if load else None)
    if load:
        return look.state
    trainer.save_checkpoint(path)
    return _whole(trainer.strategy.model, trainer.optimizers[0])


def _accelerate(path: Path, load: bool) -> dict[str, Any]:
    from tests.accelerate import training as t

    run = t.start("own_fsdp2")
    run.accelerator.free_memory()
    model = _fully_shard(_net(OTHER_SEED if load else SEED))
    optimizer = _optimizer(model)
    run.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    run.accelerator.prepare_optimizer(optimizer, device_placement=False)
    if load:
        run.accelerator.load_state(str(path))
    else:
        _step(model, optimizer, run.accelerator.backward)
        run.accelerator.save_state(str(path))
    return _whole(model, optimizer)


def _fabric(path: Path, load: bool) -> dict[str, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from dcp_plugin.fabric import attach

    logging.getLogger("lightning").setLevel(logging.ERROR)
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    strategy = ModelParallelStrategy(
        lambda model, mesh: _fully_shard(model), data_parallel_size=2, tensor_parallel_size=1
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    attach(fabric)
    fabric.launch()
    net = _net(OTHER_SEED if load else SEED)
    model = fabric.setup_module(net)
    optimizer = _optimizer(model)
    wrapped = fabric.setup_optimizers(optimizer)
    if load:
        fabric.load(path, {"model": model, "optimizer": wrapped})
    else:
        _step(model, wrapped, fabric.backward)
        fabric.save(path, {"model": model, "optimizer": wrapped, "step": 2})
    return _whole(net, optimizer)


def _transformers(path: Path, load: bool) -> dict[str, Any]:
    from tests.transformers_trainer import training as t

    class Trainer(t.Ours):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(inputs["x"]).square().mean()

    net = _net(OTHER_SEED if load else SEED)
    optimizer = _optimizer(net)
    look = t.AtTrainBegin()
    rows = [{"x": sample} for (sample,) in samples(16)]
    trainer = Trainer(
        net,
        t.TrainingArguments(
            str(path.parent), max_steps=2, save_steps=2, save_strategy="steps", use_cpu=True, report_to="none",
            per_device_train_batch_size=4, remove_unused_columns=False, lr_scheduler_type="constant",
            disable_tqdm=True, logging_strategy="no",
        ),
        train_dataset=rows,
        optimizers=(optimizer, None),
        callbacks=[look] if load else [],
    )  # fmt: skip
    if load:
        look.trainer = trainer
        with pytest.raises(t.Stop):
            trainer.train(resume_from_checkpoint=str(path))
    else:
        trainer.train()
    return _whole(net, optimizer)


def _plain(path: Path, load: bool) -> dict[str, Any]:
    import dcp_plugin as dcp

    model = _fully_shard(_net(OTHER_SEED if load else SEED))
    optimizer = _optimizer(model)
    if load:
        dcp.load({"model": model, "optim": optimizer}, path)
    else:
        _step(model, optimizer)
        dcp.save({"model": model, "optim": optimizer}, path)
    return _whole(model, optimizer)


def _stock(path: Path, load: bool) -> dict[str, Any]:
    """``torch.distributed.checkpoint`` as its users use it. It knows no prefix: they have to give it."""
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    inside = _fully_shard(_net(OTHER_SEED if load else SEED))
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
    return _whole(model, optimizer)


_DOOR = {
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
    state = _DOOR[integration](_path(root, integration), load=False)
    if dist.get_rank() == 0:
        torch.save(state, root / f"{integration}.pt")


def _load(root: Path, integration: str) -> list[str]:
    warnings.simplefilter("ignore")
    wrong = []
    for source in INTEGRATIONS:
        found = _DOOR[integration](_path(root, source), load=True)
        saved = torch.load(root / f"{source}.pt", weights_only=True)
        try:
            assert_same(_comparable(saved), _comparable(found))
        except AssertionError as error:
            wrong.append(f"{source} -> {integration}: {error}")
    return wrong


def _comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Stock makes lists of the betas; a schedule adds ``initial_lr`` to the param groups."""
    return {
        key: list(value) if isinstance(value, tuple) else value
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
        model = _net(OTHER_SEED)
        optimizer = _optimizer(model)
        dcp.load({"mine": model, "adam": optimizer}, _path(saved, source))
        wanted = torch.load(saved / f"{source}.pt", weights_only=True)
        assert_same(_comparable(wanted), _comparable(_whole(model, optimizer)))
