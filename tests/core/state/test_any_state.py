"""Random models, optimizers and changes: whatever they are, each checkpoint is the state at its call."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load as stock_load

import dcp_plugin as dcp
from tests.compare import assert_same
from tests.limits import HANG
from tests.slowness import slow_copies

MIB = 1 << 20
TRAINED = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.complex64]
OTHERS = [torch.float8_e4m3fn, torch.bool, torch.uint8, torch.int64, torch.complex128]


def _tensor(chance: random.Random, dtype: torch.dtype) -> torch.Tensor:
    shapes = [(), (0,), (3, 0), (7,), (5, 3), (4097,), (257, 1023), (3 * MIB // dtype.itemsize + 1,)]
    around = [(MIB // dtype.itemsize + more,) for more in (-1, 0, 1)]
    return torch.randint(0, 2, chance.choice(shapes + around)).to(dtype)


class _Any(nn.Module):
    """Parameters and buffers that are tied, transposed, frozen, or parts of the same memory."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.again = self.inner
        self.listed, self.count = nn.ParameterList(), 3
        for _ in range(chance.randint(2, 7)):
            tensor, known = _tensor(chance, chance.choice(TRAINED)), list(self.parameters())
            memory, at = torch.randn(chance.choice([9, MIB // 4 + 5])), chance.randint(1, 8)
            kinds: list[Callable[[], Any]] = [
                lambda tensor=tensor: self._add(nn.Parameter(tensor.mT if tensor.dim() == 2 else tensor)),
                lambda tensor=tensor: self.listed.append(nn.Parameter(tensor)),
                lambda known=known: self._add(chance.choice(known)),
                lambda known=known: self._add(chance.choice(known).detach()),
                lambda: self._add(_tensor(chance, chance.choice(OTHERS))),
                lambda: self._add(nn.Parameter(_tensor(chance, chance.choice(OTHERS)), requires_grad=False)),
                lambda memory=memory, at=at: [
                    self._add(nn.Parameter(memory[:at])),
                    self._add(nn.Parameter(memory[at:], requires_grad=chance.random() < 0.5)),
                ],
            ]
            chance.choice(kinds)()

    def _add(self, value: torch.Tensor) -> None:
        name = f"x{len(self._parameters) + len(self._buffers)}"
        add = self.register_parameter if isinstance(value, nn.Parameter) else self.register_buffer
        add(name, value)  # type: ignore[operator]

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.count)


class _Odd(torch.optim.SGD):
    """Its slots are of all kinds."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            slots = self.state[parameter]
            if not slots:
                slots.update(itself=parameter.detach(), own=torch.ones_like(parameter), part=torch.zeros(9)[3:], n=0)
                slots.update(shared=self.state[self.param_groups[0]["params"][0]].get("part", slots["part"]))
            slots["n"] += 1
            for slot in ("own", "part", "shared"):
                slots[slot].add_(1)
            parameter.add_(1)


def _optimizer(chance: random.Random, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype is not torch.complex64]
    kinds: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: _Odd(trained, lr=0.1),
        lambda: torch.optim.SGD(trained, lr=0.1, momentum=0.9),
        lambda: torch.optim.AdamW(trained, amsgrad=True),
        lambda: torch.optim.Adam(trained, lr=torch.tensor(0.1)),
        lambda: torch.optim.Adafactor([p for p in trained if p.numel()]),
    ]
    return chance.choice(kinds)()


def _train(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer, loose: torch.Tensor) -> dict[str, Any]:
    names = {parameter: name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    slots = {
        f"optim.state.{names[parameter]}.{slot}": value
        for parameter, values in optimizer.state.items()
        for slot, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    model_state = {f"model.{key}": value for key, value in model.state_dict().items()}
    return {key: value.detach().clone() for key, value in ({"loose.x": loose} | model_state | slots).items()}


@torch.no_grad()
def _change(
    chance: random.Random, model: _Any, optimizer: torch.optim.Optimizer, loose: torch.Tensor
) -> list[Callable[[], Any]]:
    """All that may happen before the copy is made, in any order."""
    may_change = [p for p in model.parameters() if not p.requires_grad] + list(model.buffers())
    trained = [p for p in model.parameters() if p.requires_grad]
    changes: list[Callable[[], Any]] = [
        lambda: [tensor.zero_() for tensor in may_change],
        lambda: model.again(torch.randn(4, 3)),
        lambda: loose.zero_(),
        lambda: setattr(model, "count", 0),
        lambda: [setattr(p, "data", torch.zeros_like(p)) for p in trained],
        lambda: [p.requires_grad_(False) for p in trained],
        lambda: setattr(model, "inner", nn.Identity()),
        lambda: [slots.clear() for slots in optimizer.state.values()],
        lambda: optimizer.param_groups[0].update(lr=9.0),
    ]
    return chance.sample(changes, chance.randint(1, 4))


@pytest.mark.one_of(count=2)
@pytest.mark.parametrize("seed", range(12))
def test_a_checkpoint_is_the_state_at_its_call_whatever_that_is_and_whatever_follows(seed: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    chance = random.Random(seed)
    ours = dcp.Checkpointer(
        async_save=True,
        staging="lazy",
        io={"threads": chance.randint(1, 5), "direct": chance.choice([False, "auto"])},
        reuse=chance.random() < 0.5,
    )
    expected = []
    for number in range(4):  # through one pool, in which every tensor has another place each time
        if number != 2:
            model = _Any(chance)
            optimizer = _optimizer(chance, model)
        _train(optimizer)
        loose = _tensor(chance, torch.float32)
        expected.append(_tensors(model, optimizer, loose))
        copying = threading.Event()
        with slow_copies(lambda copying=copying: copying.wait(HANG)):
            state = {"model": model, "optim": optimizer, "loose": {"x": loose}}
            handle = ours.save(state, tmp_path / str(number))
            for change in _change(chance, model, optimizer, loose) if number != 1 else []:
                with torch.no_grad():
                    change()
            threading.Timer(0.01, copying.set).start()
            if number == 1:
                _train(optimizer)  # waits
            handle.wait_staged()
    ours.close()
    for number, tensors in enumerate(expected):
        assert dcp.verify(tmp_path / str(number)).ok
        found = {key: torch.empty_like(value) for key, value in tensors.items()}
        stock_load(found, checkpoint_id=tmp_path / str(number), no_dist=True)
        assert_same(found, tensors)
