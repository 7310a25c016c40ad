"""What the integration relies on inside of Fabric. If one of these fails, Fabric has changed: see ``_fabric.py``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.launch import on_ranks


@on_ranks(1)
def test_names_that_attach_uses() -> None:
    import importlib

    from dcp_plugin.integration import lightning_packages

    for package in lightning_packages.PACKAGES:
        module = importlib.import_module(package.fabric_name)
        strategies = package.fabric("strategies")
        assert isinstance(module.Fabric.strategy, property), "attach promotes fabric.strategy"
        for name in (*lightning_packages.SUPPORTED, *lightning_packages.UNSUPPORTED):
            strategy = getattr(strategies, name)
            assert lightning_packages.package_of(strategy) is package
            assert lightning_packages.has_fabric_base(strategy, name)
            for method in ("save_checkpoint", "load_checkpoint", "setup_module", "process_dataloader", "broadcast"):
                assert callable(getattr(strategy, method)), f"{name}.{method}"
        for name in lightning_packages.SHARDED:
            with pytest.raises(NotImplementedError):  # what plugin_of takes for "has none"
                getattr(strategies, name).checkpoint_io.fget(object.__new__(getattr(strategies, name)))
        for call, method in (("save", "save_checkpoint"), ("load", "load_checkpoint"), ("load_raw", "load_checkpoint")):
            assert f"self._strategy.{method}(" in inspect.getsource(getattr(module.Fabric, call)), call


@on_ranks(1)
def test_a_distributed_sampler_wraps_the_stateful_one_and_has_no_state() -> None:
    """What Fabric puts into a stateful dataloader on several ranks, and that it has no state."""
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    from dcp_plugin.integration.lightning_packages import inside_distributed_sampler
    from tests.fabric import training as t

    inner = t.StatefulDataLoader(t.samples(4), shuffle=True).sampler
    wrapper = DistributedSamplerWrapper(inner, num_replicas=2, rank=0, shuffle=True)
    assert not hasattr(wrapper, "state_dict")
    assert inside_distributed_sampler(wrapper) is inner
    assert inside_distributed_sampler(inner) is None


@on_ranks(1)
def test_fabric_numbers_epochs_by_the_iterations_of_this_process() -> None:
    """Fabric numbers epochs by the iterations of this process; resume.py counts on from the checkpoint's."""
    from torch.utils.data.distributed import DistributedSampler

    from tests.fabric import training as t

    told: list[int] = []

    class Told(DistributedSampler[Any]):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    data = t.samples(4)
    loader = t.StatefulDataLoader(data, sampler=Told(data, num_replicas=1, rank=0))
    loader = t.fabric_for("single").setup_dataloaders(loader)
    for _ in range(2):
        list(loader)
    assert told == [0, 1], "one call per iteration over the loader, and the epoch starts at 0 in each process"


@on_ranks(1)
def test_strategies_get_what_is_inside_fabrics_wrappers(tmp_path: Path) -> None:
    """Strategies get what is inside Fabric's wrappers, and Fabric copies replaced values back."""
    from dcp_plugin.fabric import _fabric
    from tests.fabric import training as t

    fabric = t.attached("single")
    training = t.Training(fabric)
    training.run(1)
    training.save(tmp_path / "saved")
    seen: dict[str, Any] = {}
    strategy: Any = fabric.strategy
    strategy.load_checkpoint = lambda **arguments: seen.update(arguments["state"]) or arguments["state"].update(step=9)
    training.load(tmp_path / "saved")
    assert type(seen["net"]) is t.Net
    assert isinstance(seen["optimizer"], t.torch.optim.AdamW)
    assert isinstance(seen["loader"], t.StatefulDataLoader)
    assert training.state["step"] == 9
    assert type(_fabric.unwrapper(fabric)({"net": training.state["net"]})["net"]) is t.Net


@on_ranks(1)
def test_a_save_in_the_middle_of_an_epoch_draws_no_random_numbers(tmp_path: Path) -> None:
    """A save in the middle of an epoch draws no random numbers, and a loader that was asked for its state gives the
    same iterator to the next loop, without drawing again."""
    import torch

    from tests.fabric import training as t

    fabric = t.attached("single")
    training = t.Training(fabric)
    training.run(1)
    before = torch.get_rng_state()
    training.save(tmp_path / "saved")
    assert torch.equal(before, torch.get_rng_state())
    loader = t.StatefulDataLoader(t.samples(4), shuffle=True)
    loader.state_dict()
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(before, torch.get_rng_state())
