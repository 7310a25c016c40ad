"""Correct loops on two ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcp_plugin as dcp
from tests.campaigns.parts import adam, inputs, net, steps, update


def sharded_in_mixed_precision(out: Path) -> None:
    """FSDP2 computes in bfloat16 and keeps its shards in float32."""
    dist.init_process_group("gloo")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(net(), mp_policy=policy)
    optimizer = adam(model)
    state = {"model": model, "optim": optimizer, "step": 0}
    dcp.resume_or_init(state, out)
    for step in steps(state, out):
        update(model, optimizer, inputs(2 * step + dist.get_rank()))
    dist.destroy_process_group()


def replicated(out: Path) -> None:
    """DDP, with dropout of its own on each rank."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(net(dropout=0.5))
    optimizer = adam(model)
    torch.manual_seed(1 + dist.get_rank())
    state = {"model": model, "optim": optimizer, "rng": dcp.RandomStreams(), "step": 0}
    dcp.resume_or_init(state, out)
    for step in steps(state, out):
        update(model, optimizer, inputs(2 * step + dist.get_rank()))
    dist.destroy_process_group()
