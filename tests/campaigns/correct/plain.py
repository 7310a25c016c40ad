"""Correct loops without a framework."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_optimizer
import schedulefree
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils._pytree import tree_map
from torchdata.stateful_dataloader import StatefulDataLoader

import dcp_plugin as dcp
from tests.campaigns.parts import STEPS, Average, adam, inputs, loss, net, samples, steps, update


def nano_gpt(out: Path) -> None:
    """The loop of nanoGPT: random windows, a rate by the step, accumulation, a gradient scaler, clipping."""
    model = net(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
    state = {"model": model, "optim": optimizer, "scaler": scaler, "rng": dcp.RandomStreams(), "step": 0}
    dcp.resume_or_init(state, out)
    data = samples(64).tensors[0]
    for step in steps(state, out):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 + math.cos(math.pi * step / STEPS)) / 2
        for _ in range(2):
            windows = data[torch.randint(len(data), (4,))]
            scaler.scale(loss(model, windows) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def average_swapped_in(out: Path) -> None:
    """A moving average is swapped into the model to evaluate it, before and after each checkpoint."""
    model = net()
    optimizer = adam(model)
    average = Average(model)
    state = {"model": model, "optim": optimizer, "average": average, "step": 0}
    dcp.resume_or_init(state, out)
    with _swapped(model, average):
        loss(model, inputs(0))
    for step in steps(state, out):
        update(model, optimizer, inputs(step))
        average.follow(model)
        with _swapped(model, average):
            loss(model, inputs(0))


@contextmanager
def _swapped(model: nn.Module, average: Average) -> Iterator[None]:
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, mean in zip(model.parameters(), average.buffers(), strict=True):
            parameter.copy_(mean)
        yield
        for parameter, value in zip(model.parameters(), own, strict=True):
            parameter.copy_(value)


def momentum_teacher(out: Path) -> None:
    """A student learns the outputs of its own moving average."""
    student, teacher = net(), net().requires_grad_(False)
    optimizer = adam(student)
    state = {"student": student, "teacher": teacher, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    for step in steps(state, out):
        optimizer.zero_grad()
        ((student(inputs(step)) - teacher(inputs(step) + 1)).square().mean() + loss(student, inputs(step))).backward()
        optimizer.step()
        for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
            own.lerp_(other.detach(), 0.1)


def tied_weights(out: Path) -> None:
    """Two layers share a weight, and are tied again after the load."""
    model = nn.ModuleDict({"embedding": nn.Linear(4, 4, bias=False), "head": nn.Linear(4, 4, bias=False)})
    model.load_state_dict({"embedding.weight": torch.eye(4), "head.weight": torch.eye(4)})
    model["head"].weight = model["embedding"].weight
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    model["head"].weight = model["embedding"].weight
    for step in steps(state, out):
        update(nn.Sequential(model["embedding"], nn.ReLU(), model["head"]), optimizer, inputs(step))


def adam_of_8_bits(out: Path) -> None:
    """Moments are bytes with a scale, as those of bitsandbytes."""
    model = net()
    optimizer = _EightBits(model.parameters())
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


class _EightBits(torch.optim.Optimizer):
    """SGD with a quantized momentum. Not bitsandbytes' own, which is not installed."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                slots = self.state[parameter]
                if not slots:
                    slots["state1"] = torch.full_like(parameter, 128, dtype=torch.uint8)
                    slots["absmax1"], slots["step"] = torch.ones(()), 0
                momentum = (slots["state1"].float() - 128) / 127 * slots["absmax1"] * 0.9 + parameter.grad
                slots["absmax1"].copy_(momentum.abs().max())
                slots["state1"].copy_((momentum / slots["absmax1"] * 127 + 128).round())
                slots["step"] += 1
                parameter.sub_(group["lr"] * momentum)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the bytes as bytes: torch gives a state the dtype of its parameter."""
        moments = {number: slots["state1"] for number, slots in state_dict["state"].items()}
        super().load_state_dict(state_dict)
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if number in moments:
                self.state[parameter]["state1"] = moments[number].to(torch.uint8)


def moments_of_a_subclass(out: Path) -> None:
    """Moments are a subclass of a tensor, as those of torchao."""
    model = net()
    optimizer = _WithSubclass(model.parameters())
    get_optimizer_state_dict(model, optimizer)  # a step that changes nothing allocates the moments
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


class Scaled(torch.Tensor):
    """Bytes and one scale. Not torchao's own, which is not installed."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any = None, stride: Any = None) -> Scaled:
        return cls(parts["codes"], parts["scale"])

    def value(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def of(cls, value: torch.Tensor) -> Scaled:
        scale = value.abs().max().clamp_min(1e-12) / 127
        return cls((value / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operators = torch.ops.aten
        if function is operators.copy_.default:
            source = args[1] if isinstance(args[1], Scaled) else cls.of(args[1])
            args[0].codes.copy_(source.codes)
            args[0].scale.copy_(source.scale)
            return args[0]
        if function in (operators.detach.default, operators.clone.default, operators.alias.default):
            return cls(function(args[0].codes), function(args[0].scale))
        if function is operators._to_copy.default and (kwargs or {}).get("dtype", torch.float32) is torch.float32:
            return cls(args[0].codes.clone(), args[0].scale.clone())
        plain = tree_map(lambda value: value.value() if isinstance(value, Scaled) else value, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


class _WithSubclass(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                slots = self.state[parameter]
                momentum = parameter.grad + (slots["momentum"].value() * 0.9 if slots else 0)
                slots["momentum"] = Scaled.of(momentum)
                parameter.sub_(group["lr"] * momentum)


def schedule_free(out: Path) -> None:
    """ScheduleFree has other weights in ``eval`` than in ``train``, and saves those of ``train``."""
    model = net()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    optimizer.train()
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    for step in steps(state, out):
        update(model, optimizer, inputs(step))
        optimizer.eval()
        loss(model, inputs(0))
        optimizer.train()


def lookahead(out: Path) -> None:
    """An optimizer around another one, with slow weights in its state."""
    model = net()
    optimizer = pytorch_optimizer.Lookahead(adam(model), k=2)
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


def frozen_body(out: Path) -> None:
    """A head learns on a frozen body with batch norm, whose statistics move."""
    body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    nn.init.eye_(body[0].weight)
    nn.init.zeros_(body[0].bias)
    model = nn.Sequential(body, net())
    optimizer = adam(model[1])
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


def saved_in_the_background(out: Path) -> None:
    """Saves in the background, of which the newest two are kept."""
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))
    nn.init.ones_(model.bias)
    with torch.no_grad():
        model.parametrizations.weight.original1.fill_(1.0)
        model.parametrizations.weight.original0.fill_(1.0)
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    with dcp.Checkpointer(async_save=True, keep_last=2) as checkpointer:
        for step in range(state["step"], STEPS):
            update(model, optimizer, inputs(step))
            state["step"] = step + 1
            checkpointer.save(state, out / f"step-{step + 1}", step=step + 1)


def shuffled_in_the_middle_of_an_epoch(out: Path) -> None:
    """A stateful loader goes on in the middle of an epoch, with the dropout that comes next."""
    model = net(dropout=0.5)
    optimizer = adam(model)
    loader = StatefulDataLoader(samples(20), batch_size=4, shuffle=True)
    state = {"model": model, "optim": optimizer, "loader": loader, "rng": dcp.RandomStreams(), "step": 0}
    dcp.resume_or_init(state, out)
    while state["step"] < 9:
        for (x,) in loader:
            update(model, optimizer, x)
            state["step"] += 1
            if state["step"] % 3 == 0:
                dcp.save(state, out / f"step-{state['step']}", step=state["step"])
            if state["step"] == 9:
                break


def rate_searched_after_load(out: Path) -> None:
    """Between the load and the loop, a copy of the model is trained, and the model is evaluated."""
    model = net()
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    trial = copy.deepcopy(model)
    update(trial, adam(trial), inputs(0))
    model.eval()
    loss(model, inputs(0))
    model.train()
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


def compiled_after_load(out: Path) -> None:
    """The model is compiled after the load, and the state has the compiled one from then on."""
    model: Any = net()
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    state["model"] = model = torch.compile(model, backend="eager")
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


def quantized_after_load(out: Path) -> None:
    """A frozen part is cast to bfloat16 after the load, and back before each save."""
    frozen, model = net().requires_grad_(False), net()
    optimizer = adam(model)
    state = {"frozen": frozen, "model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    exact = copy.deepcopy(frozen)
    state["frozen"] = exact
    frozen.bfloat16()
    for step in steps(state, out):
        update(model, optimizer, inputs(step) + frozen(inputs(step).bfloat16()).float())
