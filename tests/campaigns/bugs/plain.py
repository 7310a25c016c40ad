"""Bugs of loops without a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

import dcp_plugin as dcp
from tests.campaigns.parts import Average, adam, inputs, loss, net, samples, steps, update


def dummy_optimizer_step(out: Path) -> None:
    """A step with gradients of zero, which allocates the optimizer's state, counts as a step of the training.

    https://github.com/NVIDIA/Megatron-LM/pull/5976, https://github.com/pytorch/torchtitan/pull/4382
    """
    model = net()
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    start = dcp.resume_or_init(state, out)
    if start.how == "resumed":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # the bug
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


def average_not_restored(out: Path) -> None:
    """The moving average is saved, and a resume starts a new one from the weights.

    https://github.com/ai2cm/ace/issues/349, https://github.com/PixArt-alpha/PixArt-sigma/issues/156
    """
    model = net()
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out, strict=False)  # the bug: the average is not in the state yet
    average = state["average"] = Average(model)
    for step in steps(state, out):
        update(model, optimizer, inputs(step))
        average.follow(model)


def epoch_of_sampler_lost(out: Path) -> None:
    """The rebuilt sampler continues a later epoch in the order of the first one.

    https://github.com/modelscope/ms-swift/issues/10050, https://github.com/huggingface/accelerate/issues/2016
    """
    model = net()
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    sampler = DistributedSampler(samples(), num_replicas=1, rank=0)  # the bug: no set_epoch after a resume
    loader = DataLoader(samples(), batch_size=6, sampler=sampler)
    for step in steps(state, out, every=3):
        epoch, position = divmod(step, len(loader))
        update(model, optimizer, list(loader)[position][0])
        if position == len(loader) - 1:
            sampler.set_epoch(epoch + 1)


def moments_cast(out: Path) -> None:
    """``load_state_dict`` of an optimizer gives its state the dtype of the parameters.

    https://github.com/pytorch/torchtitan/pull/4615, https://github.com/pytorch/pytorch/issues/43706
    """
    model = net()
    optimizer = HalfMomentum(model.parameters())
    state = {"model": model, "optim": optimizer, "step": 0}
    start = dcp.resume_or_init(state, out)
    if start.how == "resumed":
        optimizer.load_state_dict(optimizer.state_dict())  # the bug
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


class HalfMomentum(torch.optim.Optimizer):
    """SGD with a momentum that is kept in bfloat16."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                fresh = torch.zeros_like(parameter, dtype=torch.bfloat16)
                momentum = self.state[parameter].setdefault("momentum", fresh)
                parameter.sub_(group["lr"] * momentum.mul_(0.9).add_(parameter.grad))


def tied_weights_untied(out: Path) -> None:
    """A load makes new tensors for weights that were one, and the optimizer has only the first of them.

    https://github.com/huggingface/accelerate/pull/1204, https://github.com/NVIDIA-NeMo/Automodel/issues/2571
    """
    model = Tied()
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    start = dcp.resume_or_init(state, out)
    if start.how == "resumed":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # the bug
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


class Tied(nn.Module):
    """An output layer that has the weight of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).relu())


def step_of_adam_missing(out: Path) -> None:
    """A checkpoint has the moments of Adam without its step, so the correction of their bias starts again.

    https://github.com/huggingface/accelerate/issues/3971, https://github.com/TrenTorch/TrenTorch/pull/187
    """
    model = net()
    optimizer = adam(model)
    update(model, optimizer, torch.zeros(1, 4))  # allocates the state
    state = {"model": model, "optim": Moments(optimizer), "step": 0}
    dcp.resume_or_init(state, out)
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


class Moments:
    """State of an Adam for checkpoints."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()["state"]
        return {
            str(number): {name: slots[name] for name in ("exp_avg", "exp_avg_sq")} for number, slots in state.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        whole = self.optimizer.state_dict()
        slots = {int(number): {"step": torch.zeros(()), **moments} for number, moments in state.items()}  # the bug
        self.optimizer.load_state_dict({**whole, "state": slots})


def scaler_made_after_load(out: Path) -> None:
    """The loop makes its gradient scaler after the checkpoint is loaded, so the scale is the initial one.

    https://github.com/mosaicml/composer/pull/1376, https://github.com/ultralytics/ultralytics/pull/22189
    """
    model = net()
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "scaler": _scaler(), "step": 0}
    dcp.resume_or_init(state, out)
    scaler = state["scaler"] = _scaler()  # the bug
    for step in steps(state, out):
        optimizer.zero_grad()
        scaler.scale(loss(model, inputs(step))).backward()
        scaler.step(optimizer)
        scaler.update()


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)


def optimizer_forgotten(out: Path) -> None:
    """A resume loads the weights and the step, and not the optimizer.

    https://github.com/thinking-machines-lab/tinker-cookbook/pull/140, https://github.com/IntelLabs/distiller/issues/145
    """
    model = net()
    optimizer = adam(model)
    state = {"model": model, "step": 0}
    dcp.resume_or_init(state, out, strict=False)
    state["optim"] = optimizer  # the bug: after the resume
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


def schedule_made_after_load(out: Path) -> None:
    """A scheduler that is made after the load sets the rate of the first step, and counts from there.

    https://github.com/torch-points3d/torch-points3d/pull/630, https://github.com/open-mmlab/mmengine/issues/1542
    """
    model = net()
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))  # the bug
    for step in steps(state, out):
        update(model, optimizer, inputs(step))
        schedule.step()


def schedule_stepped_twice(out: Path) -> None:
    """The steps of a scheduler are repeated although its state is restored.

    https://github.com/THUDM/slime/pull/1547
    """
    model = net()
    optimizer = adam(model)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    state = {"model": model, "optim": optimizer, "schedule": schedule, "step": 0}
    dcp.resume_or_init(state, out)
    for _ in range(state["step"]):
        schedule.step()  # the bug
    for step in steps(state, out):
        update(model, optimizer, inputs(step))
        schedule.step()


def flag_of_statistics_lost(out: Path) -> None:
    """Running statistics are buffers, and the flag that they are valid is not, so the first batch replaces them.

    https://github.com/cweniger/falcon/issues/115, https://github.com/bayesiains/nflows/issues/4
    """
    model = nn.Sequential(Centred(), net())
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


class Centred(nn.Module):
    """Subtracts the running mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.initialized = False  # the bug: not in the state_dict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, self.initialized = 0.1 if self.initialized else 1.0, True
        self.mean.lerp_(x.mean(dim=0), weight)
        return x - self.mean


def iterator_made_after_load(out: Path) -> None:
    """The iterator of a loader takes a seed from the random stream that the resume has just restored.

    https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5257
    """
    model = net(dropout=0.5)
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "rng": dcp.RandomStreams(), "step": 0}
    dcp.resume_or_init(state, out)
    batches = iter(DataLoader([inputs(step) for step in range(state["step"], 6)], batch_size=None))  # the bug
    for _ in steps(state, out):
        update(model, optimizer, next(batches))


def seeded_after_load(out: Path) -> None:
    """A seed after the load gives the dropout of the first steps again.

    https://github.com/ai2cm/ace/issues/690, https://github.com/modelscope/ms-swift/pull/9935
    """
    model = net(dropout=0.5)
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "rng": dcp.RandomStreams(), "step": 0}
    dcp.resume_or_init(state, out)
    torch.manual_seed(1)  # the bug
    for step in steps(state, out):
        update(model, optimizer, inputs(step))


def accumulation_window_lost(out: Path) -> None:
    """A checkpoint in the middle of gradient accumulation has no gradients, and the window is not started again.

    https://github.com/vllm-project/speculators/pull/859, https://github.com/mflux-community/mflux/pull/447
    """
    model = net()
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    for step in steps(state, out, every=3):  # the bug: a window has two steps
        loss(model, inputs(step)).backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
