"""Every optimizer class that can be had, trained, saved, loaded and trained on: with ours and with its oracle.

The oracle is ``torch.save`` of the same state dicts on each rank. Under FSDP2, where the checkpoint is loaded on
another number of ranks, it is ``torch.save`` of their full tensors, cut anew by ``distribute_tensor``.
A class is skipped only if its oracle cannot run it here.
"""

from __future__ import annotations

import importlib
import inspect
import io
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import dcp_plugin
from tests.layouts import wrap

STEPS = 3
PACKAGES = {
    "torch": "torch.optim",
    "pytorch_optimizer": "pytorch_optimizer",
    "timm": "timm.optim",
    "schedulefree": "schedulefree",
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
}
_NO_CLASSES = {"Optimizer", "Optimizer8bit", "Optimizer1State", "Optimizer2State", "BaseOptimizer"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 12)
        self.head = nn.Linear(12, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


class LargeNet(Net):
    """With tensors that 8-bit optimizers quantize: those of 4096 elements or more."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 640), nn.Linear(640, 8, bias=False)


def _module(package: str) -> Any:
    """The module with the classes. timm as a whole takes long to import."""
    if package == "timm" and "timm" not in sys.modules:
        spec = find_spec("timm")
        assert spec is not None
        sys.modules["timm"] = types.ModuleType("timm")
        sys.modules["timm"].__path__ = list(spec.submodule_search_locations or ())
    return importlib.import_module(PACKAGES[package])


def names_of(package: str) -> list[str]:
    """The optimizer classes of a package."""
    module = _module(package)
    found = {name: getattr(module, name) for name in dir(module)}
    return [
        name
        for name, cls in found.items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in _NO_CLASSES
    ]


def _groups(model: nn.Module, **matrices: Any) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], **matrices},
        {"params": [p for p in parameters if p.dim() <= 1], **dict.fromkeys(matrices, False)},
    ]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _gsam(cls: Any, model: nn.Module) -> Any:
    from pytorch_optimizer import ProportionScheduler

    base = _adam(model)
    schedule = torch.optim.lr_scheduler.ConstantLR(base)
    rho = ProportionScheduler(schedule, max_lr=1e-2, min_lr=0.0, max_value=0.1, min_value=0.01)
    return cls(list(model.parameters()), base_optimizer=base, model=model, rho_scheduler=rho)


SPECIAL: dict[str, Callable[[Any, nn.Module], Any]] = {
    **dict.fromkeys(
        ("Muon", "AdaMuon", "AdaGO", "NorMuon", "DistributedMuon", "MuonClip"),
        lambda cls, model: cls(_groups(model, use_muon=True)),
    ),
    "SpectralSphere": lambda cls, model: cls([p for p in model.parameters() if p.dim() == 2]),
    "Ranger21": lambda cls, model: cls(model.parameters(), num_iterations=20),
    "WSAM": lambda cls, model: cls(model, list(model.parameters()), torch.optim.AdamW),
    "AliG": lambda cls, model: cls(list(model.parameters()), max_lr=0.1),
    "GSAM": _gsam,
    **dict.fromkeys(
        ("LARS", "LARS8bit", "LARS32bit", "PytorchLARS", "SGD", "SGD8bit", "SGD32bit"),
        lambda cls, model: cls(model.parameters(), lr=1e-2, momentum=0.9),
    ),
    "BSAM": lambda cls, model: cls(list(model.parameters()), num_data=8),
    "Lookahead": lambda cls, model: cls(_adam(model)),
    "torch.Muon": lambda cls, model: cls([p for p in model.parameters() if p.dim() == 2]),
}


def build(package: str, name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer as its documentation does: over parameters, over a model or around another optimizer."""
    cls = getattr(_module(package), name)
    special = SPECIAL.get(f"{package}.{name}", SPECIAL.get(name))
    if special is not None and not (package == "torch" and f"torch.{name}" not in SPECIAL):
        return special(cls, model)  # type: ignore[no-any-return]
    parameters = inspect.signature(cls).parameters
    first = next(iter(parameters))
    options: dict[str, Any] = {}
    if "base_optimizer" in parameters and first == "params":
        options["base_optimizer"] = torch.optim.SGD if name in ("SAM", "GSAM") else torch.optim.AdamW
    if "lr" in parameters and parameters["lr"].default is inspect.Parameter.empty:
        options["lr"] = 1e-2
    if "model" in parameters and first == "params":
        options["model"] = model
    if first in ("optimizer", "base"):
        return cls(_adam(model), **options)  # type: ignore[no-any-return]
    return cls(model if first == "model" else list(model.parameters()), **options)  # type: ignore[no-any-return]


def made(package: str, name: str, layout: str, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = wrap(layout, LargeNet() if package in ("torchao", "bitsandbytes") else Net(), unit="")
    return model, build(package, name, model)


def train(model: nn.Module, optimizer: Any, first: int) -> None:
    """Take three steps, with the same data and random numbers on every rank."""
    for number in range(first, first + STEPS):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))

        @torch.enable_grad()
        def closure(inputs: torch.Tensor = inputs) -> Any:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = outputs.square().mean()
            loss.backward(create_graph=type(optimizer).__name__ in ("AdaHessian", "Adahessian", "SophiaH"))
            return (outputs, loss) if type(optimizer).__name__ == "GSAM" else loss

        if first == 0 and number == 0 and hasattr(optimizer, "train"):
            optimizer.train()  # schedule-free ones begin so
        torch.manual_seed(number)
        np.random.seed(number)
        if hasattr(optimizer, "fused_backward"):
            optimizer.zero_grad()
            optimizer.fused_backward(model(inputs).square().mean(), 1e-2)
            continue
        closure()
        optimizer.step(closure)


_PICKLED = {"Conda": ("*.projector",), "GaLore": ("*.projector",), "ScalableShampoo": ("*conditioner", "*.graft")}
"""Objects of classes of the optimizer's own, which only executing code restores."""


def _row_major(value: Any) -> Any:
    """Return a tensor as DCP stores it. A product with a matrix that lies transposed rounds otherwise. A list is one
    value, in which tensors keep their strides."""
    return value.contiguous() if type(value) is torch.Tensor else value


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from leaves(value, f"{path}.{number}")
    else:
        yield path, tree


def words(*objects: Any) -> dict[str, Any]:
    """Everything in the state dicts, tensors as their bytes."""
    return {
        f"{n}{key}": _described(value) for n, each in enumerate(objects) for key, value in leaves(each.state_dict())
    }


def _described(value: Any) -> Any:
    if isinstance(value, DTensor):
        return "DTensor", _described(value.full_tensor())
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, repr(value) if isinstance(value, (int, float, str, bool)) else ""
    if hasattr(value, "dequantize") and type(value) is not torch.Tensor:
        value = value.dequantize()
    data = value.detach().contiguous().reshape(-1)
    return str(value.dtype), tuple(value.shape), data.view(torch.uint8).tolist() if data.numel() else []


def difference(mine: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    keys = [key for key in {**right, **mine} if mine.get(key) != right.get(key)]
    told = [f"{key}: ours {str(mine.get(key))[:60]}, oracle {str(right.get(key))[:60]}" for key in keys[:2]]
    return "; ".join(told)


def resume_case(package: str, name: str, layout: str, path: Path) -> str:
    """One class, resumed with the oracle and with ours; empty if it ends the same in every bit."""
    try:
        model, optimizer = made(package, name, layout, seed=1)
        train(model, optimizer, 0)
        buffer = io.BytesIO()
        states = model.state_dict(), optimizer.state_dict()
        torch.save(tuple(_mapped(state, _row_major, lists=False) for state in states), buffer)
        right_model, right = made(package, name, layout, seed=2)
        of_model, of_optimizer = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
        right_model.load_state_dict(of_model)
        right.load_state_dict(of_optimizer)
        train(right_model, right, STEPS)
        expected = words(right_model, right)
    except Exception as error:
        return f"skipped: {_said(error)}"
    before = words(model, optimizer)
    dcp_plugin.save({"model": model, "optim": optimizer}, path, allow_pickle=_PICKLED.get(name, ()))
    if changed := difference(words(model, optimizer), before):
        return f"the save changed {changed}"
    mine_model, mine = made(package, name, layout, seed=2)
    dcp_plugin.load({"model": mine_model, "optim": mine}, path, allow_pickle=_PICKLED.get(name, ()))
    train(mine_model, mine, STEPS)
    return difference(words(mine_model, mine), expected)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"


def run_all(
    cases: list[tuple[str, str]], layout: str, folder: Path, case: Callable[..., str] = resume_case
) -> dict[str, str]:
    """Run a case for each class, on every rank. Return what became of each: empty where all was right."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes = {}
    for package, name in cases:
        try:
            outcomes[f"{package}.{name}"] = case(package, name, layout, folder / f"{package}.{name}")
        except Exception as error:
            outcomes[f"{package}.{name}"] = _said(error)
    return outcomes


# Under FSDP2: saved on two ranks, loaded on three.


def save_sharded(package: str, name: str, layout: str, path: Path) -> str:
    """Train and save with ours, and with the oracle: full tensors, and which of them were sharded."""
    try:
        model, optimizer = made(package, name, layout, seed=1)
        train(model, optimizer, 0)
        full = [_full(each.state_dict()) for each in (model, optimizer)]
    except Exception as error:
        return f"skipped: {_said(error)}"
    plain = {key: _described(value) for key, value in leaves(full[1]) if not isinstance(value, _Sharded)}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, plain)
    if any(other != gathered[0] for other in gathered):
        return "skipped: each rank has plain state of its own, which stock does not reshard"
    dcp_plugin.save({"model": model, "optim": optimizer}, path, allow_pickle=_PICKLED.get(name, ()))
    if dist.get_rank() == 0:
        torch.save(full, path.with_name(f"{path.name}.pt"))
    return ""


def load_sharded(package: str, name: str, layout: str, path: Path) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        right_model, right = made(package, name, layout, seed=2)
        of_model, of_optimizer = torch.load(path.with_name(f"{path.name}.pt"), weights_only=False)
        right_model.load_state_dict(_cut(of_model, mesh))
        right.load_state_dict(_cut(of_optimizer, mesh))
        train(right_model, right, STEPS)
        expected = words(right_model, right)
    except Exception as error:
        return f"skipped: {_said(error)}"
    model, optimizer = made(package, name, layout, seed=2)
    dcp_plugin.load({"model": model, "optim": optimizer}, path, allow_pickle=_PICKLED.get(name, ()))
    train(model, optimizer, STEPS)
    return difference(words(model, optimizer), expected)


class _Sharded:
    def __init__(self, value: DTensor) -> None:
        self.full, self.placements = value.full_tensor(), value.placements


def _full(tree: Any) -> Any:
    return _mapped(tree, lambda value: _Sharded(value) if isinstance(value, DTensor) else value)


def _cut(tree: Any, mesh: Any) -> Any:
    def cut(value: Any) -> Any:
        return distribute_tensor(value.full, mesh, value.placements) if isinstance(value, _Sharded) else value

    return _mapped(tree, cut)


def _mapped(tree: Any, change: Callable[[Any], Any], lists: bool = True) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change, lists) for key, value in tree.items()}
    return (
        type(tree)(_mapped(v, change, lists) for v in tree) if type(tree) in (list, tuple) and lists else change(tree)
    )
