"""Through every integration a load calls a module's own load hooks as the framework does without this package."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.launch import on_ranks

Notes = list[tuple[Any, ...]]
_notes: Notes = []


class Block(nn.Module):
    """Notes the keys that its pre-hook sees and when its post-hook runs; computes something from its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.cached = torch.zeros(())
        self.register_load_state_dict_pre_hook(self._before)
        self.register_load_state_dict_post_hook(self._after)

    @staticmethod
    def _before(module: Block, state: dict[str, Any], prefix: str, *args: Any) -> None:
        _notes.append(("before", prefix, sorted(state)))

    @staticmethod
    def _after(module: Block, keys: Any) -> None:
        module.cached = module.linear.weight.detach().sum()
        _notes.append(("after", list(keys.missing_keys), module.cached.item()))


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = Block(), nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first.linear(x)))  # type: ignore[no-any-return]


class Overriding(Net):
    """Does not load its last layer, and says so by the way it is called."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        _notes.append(("override", sorted(state_dict)))
        kept = {key: value for key, value in state_dict.items() if not key.startswith("last.")}
        return super().load_state_dict({**kept, **{f"last.{k}": v for k, v in self.last.state_dict().items()}})


def _lightning(make: Callable[[int], Net], path: Path, ours: bool) -> tuple[Notes, Net]:
    import lightning.pytorch as pl

    from tests.lightning import training as t

    class Module(pl.LightningModule):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.net = make(seed)

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            _notes.append(("of the LightningModule", sorted(state_dict)))
            return super().load_state_dict(state_dict, *args, **kwargs)

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            if "hooked" in path.name:
                _notes.append(("on_load_checkpoint", sorted(checkpoint["state_dict"])))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.0)

    if "hooked" not in path.name:
        del Module.on_load_checkpoint
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 3)), batch_size=4)

    def fit(module: Any, **options: Any) -> Any:
        trainer = t.trainer_for("single", plugin=ours, max_steps=2)
        trainer.fit(module, loader, **options)
        return trainer

    fit(Module(0)).save_checkpoint(path)
    _notes.clear()
    resumed = Module(1)
    fit(resumed, ckpt_path=str(path))
    return list(_notes), resumed.net


def _fabric(make: Callable[[int], Net], path: Path, ours: bool) -> tuple[Notes, Net]:
    from lightning.fabric import Fabric

    from dcp_plugin.fabric import attach

    fabric = Fabric(accelerator="cpu", devices=1)
    if ours:
        attach(fabric)
    fabric.launch()
    fabric.save(path, {"model": fabric.setup_module(make(0))})
    _notes.clear()
    net = make(1)
    fabric.load(path, {"model": fabric.setup_module(net)})
    return list(_notes), net


def _accelerate(make: Callable[[int], Net], path: Path, ours: bool) -> tuple[Notes, Net]:
    from accelerate import Accelerator

    from dcp_plugin.accelerate import attach

    def run(seed: int) -> tuple[Any, Net]:
        accelerator = Accelerator(cpu=True)
        if ours:
            attach(accelerator)
        net = make(seed)
        accelerator.prepare(net)
        return accelerator, net

    run(0)[0].save_state(str(path))
    accelerator, net = run(1)
    _notes.clear()
    accelerator.load_state(str(path))
    return list(_notes), net


INTEGRATIONS = {"lightning": _lightning, "fabric": _fabric, "accelerate": _accelerate}


def _through(integration: str, make: Callable[[int], Net], path: Path) -> tuple[tuple[Notes, Any], ...]:
    """What hooks note without this package and with it; and the model that was loaded."""
    warnings.simplefilter("ignore")
    both = []
    for ours in (False, True):
        notes, net = INTEGRATIONS[integration](make, path.with_name(f"{path.name}-{ours}"), ours)
        state = {**net.state_dict(), "cached": net.first.cached}
        both.append((notes, {key: value.tolist() for key, value in state.items()}))
    return tuple(both)


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("make", [Net, Overriding])
@pytest.mark.parametrize("integration", INTEGRATIONS)
@on_ranks(1)
def test_load_hooks_run_as_without_this_package(tmp_path: Path, integration: str, make: Callable[[int], Net]) -> None:
    stock, ours = _through(integration, make, tmp_path / "checkpoint")
    assert stock == ours
    assert stock[0]


@on_ranks(1)
def test_on_load_checkpoint_comes_before_load_state_dict(tmp_path: Path) -> None:
    stock, ours = _through("lightning", Net, tmp_path / "hooked")
    assert stock == ours
    assert stock[0][0][0] == "on_load_checkpoint"
