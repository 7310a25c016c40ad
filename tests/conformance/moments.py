"""Corpus of moments: what has happened to a model and its optimizer when it is saved, or loaded into.

One line each: the actions before the save, those before the load, and a context around both calls. An action takes
the model and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from tests.conformance.differences import ACCUMULATING, STEPLESS, UNSHARDED
from tests.conformance.entries import ALL, EVERYWHERE, WHOLE, Entry
from tests.conformance.steps import inputs, loss_of, step

Optimizer = torch.optim.Optimizer | None
Action = Callable[[nn.Module, Optimizer], None]


@dataclass(frozen=True)
class Moment(Entry):
    before_save: tuple[Action, ...]
    before_load: tuple[Action, ...] = ()
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    variants: tuple[str, ...] = (*ALL, "fsdp2_keep", "fsdp2_reshard")


def train(model: nn.Module, optimizer: Optimizer) -> None:
    for number in range(2):
        step(model, optimizer, number)
    model.zero_grad()


def train_otherwise(model: nn.Module, optimizer: Optimizer) -> None:
    step(model, optimizer, 5)


def evaluate(model: nn.Module, optimizer: Optimizer) -> None:
    """The root of FSDP2 stays unsharded after this forward."""
    model.eval()
    with torch.no_grad():
        model(inputs(3))
    model.train()


def infer(model: nn.Module, optimizer: Optimizer) -> None:
    model.eval()
    with torch.inference_mode():
        model(inputs(3))
    model.train()


def predict(model: nn.Module, optimizer: Optimizer) -> None:
    """Evaluated, and left in the mode for it."""
    evaluate(model, optimizer)
    model.eval()


def accumulate(model: nn.Module, optimizer: Optimizer) -> None:
    loss = loss_of(model, 3)
    if loss.requires_grad:
        loss.backward()


def accumulate_without_sync(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        accumulate(model, optimizer)
        model.set_requires_gradient_sync(True)
    else:
        with getattr(model, "no_sync", nullcontext)():
            accumulate(model, optimizer)


def forward_only(model: nn.Module, optimizer: Optimizer) -> None:
    loss_of(model, 3)


def fail_in_forward(model: nn.Module, optimizer: Optimizer) -> None:
    class Failed(Exception):
        pass

    def fail(*_: object) -> None:
        raise Failed

    last = [child for child in model.modules() if not isinstance(child, FullyShardedDataParallel)][-1]
    hook = last.register_forward_pre_hook(fail)
    with suppress(Failed):
        loss_of(model, 3)
    hook.remove()


def fail_in_backward(model: nn.Module, optimizer: Optimizer) -> None:
    class Failed(Exception):
        pass

    def fail(_: object) -> None:
        raise Failed

    loss = model(inputs(3)).abs()
    if loss.requires_grad:
        loss.register_hook(fail)
        with suppress(Failed):
            loss.float().mean().backward()


def unshard(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(model, FSDPModule):
        model.unshard()


def freeze_half(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)


MOMENTS: dict[str, Moment] = {
    "trained": Moment((train,), variants=(*EVERYWHERE, "fsdp2_keep", "fsdp2_reshard")),
    "before_the_first_step": Moment((), differs=STEPLESS),
    "before_the_first_step_into_trained": Moment((), (train_otherwise,), differs=STEPLESS),
    "into_trained": Moment((train,), (train_otherwise,)),
    "first_forward_only": Moment((forward_only,), differs=STEPLESS),
    "evaluated": Moment((train, evaluate)),
    "evaluated_first": Moment((evaluate,), (evaluate,), differs=STEPLESS),
    "into_evaluated": Moment((train,), (evaluate,)),
    "into_trained_and_evaluated": Moment((train,), (train_otherwise, evaluate)),
    "inferred": Moment((train, infer)),
    # FSDP2 itself cannot train what was unsharded in inference mode for the first time.
    "into_inferred": Moment((train,), (infer,), variants=("plain", "ddp", "fsdp2_reshard")),
    "in_eval_mode": Moment((train, predict), (predict,), differs=UNSHARDED),
    "accumulating": Moment((train, accumulate)),
    "accumulating_first": Moment((accumulate,)),
    "into_accumulating": Moment((train,), (accumulate,), differs=ACCUMULATING),
    "accumulating_without_sync": Moment((train, accumulate_without_sync)),
    "into_accumulating_without_sync": Moment((train,), (accumulate_without_sync,), differs=ACCUMULATING),
    "after_forward": Moment((train, forward_only), (forward_only,), differs=UNSHARDED),
    "failed_in_forward": Moment((train, fail_in_forward)),
    "into_failed_in_forward": Moment((train,), (fail_in_forward,)),
    "failed_in_backward": Moment((train, fail_in_backward)),
    "into_failed_in_backward": Moment((train,), (fail_in_backward,)),
    "unsharded_by_hand": Moment((train, unshard)),
    "into_unsharded_by_hand": Moment((train,), (unshard,)),
    "frozen_in_between": Moment((train, freeze_half)),
    "under_no_grad": Moment((train,), around=torch.no_grad),
    "under_inference_mode": Moment((train,), around=torch.inference_mode, variants=WHOLE),
}
