"""Bugs of loops on several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dcp_plugin as dcp
from tests.campaigns.parts import adam, inputs, net, steps, update


def experts_of_rank_0(out: Path) -> None:
    """After the load, rank 0's parameters are sent to all ranks, though each rank has an expert of its own.

    https://github.com/KempnerInstitute/KempnerForge/issues/202
    """
    with _gloo() as rank:
        expert = net()
        experts = nn.ModuleDict({str(rank): expert})
        optimizer = adam(experts)
        state = {"model": experts, "optim": optimizer, "step": 0}
        start = dcp.resume_or_init(state, out)
        if start.how == "resumed":
            for parameter in expert.parameters():
                dist.broadcast(parameter.data, 0)  # the bug
        for step in steps(state, out):
            update(expert, optimizer, inputs(2 * step + rank))


def random_stream_of_rank_0(out: Path) -> None:
    """Every rank restores the random stream of rank 0.

    https://github.com/NVIDIA/Megatron-LM/pull/6858, https://github.com/radixark/miles/pull/3187
    """
    with _gloo() as rank:
        expert = net(dropout=0.5)
        experts = nn.ModuleDict({str(rank): expert})
        optimizer = adam(experts)
        torch.manual_seed(rank)
        stream = torch.get_rng_state()
        state = {"model": experts, "optim": optimizer, "rng": stream, "step": 0}  # the bug: no PerRank(stream)
        dcp.resume_or_init(state, out)
        torch.set_rng_state(stream)
        for step in steps(state, out):
            update(expert, optimizer, inputs(step))
            stream.copy_(torch.get_rng_state())


@contextlib.contextmanager
def _gloo() -> Iterator[int]:
    """Join the process group of torchrun; yield the rank."""
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.destroy_process_group()
