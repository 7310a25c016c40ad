"""A training that resumes from its newest checkpoint after any end, under torchrun, SLURM or Kubernetes.

    python examples/elastic/train.py --root run
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic/train.py --root run

The same command starts and restarts it, on as many ranks as there are. docs/guides/restarts.md says what to set around
it; torchrun.sh, slurm.sbatch and kubernetes.yaml beside this file set that.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import dcp_plugin

BATCH = 32


def main() -> None:
    args = arguments().parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, args.width), nn.GELU(), nn.Linear(args.width, 8)).to(device)
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optim": optimizer, "step": 0}

    keeper = {"dir": args.local_dir, "replicas": args.replicas, "bandwidth": args.drain_bandwidth}
    checkpointer = dcp_plugin.Checkpointer(
        async_save=True,
        keep_last=3,
        keeper=keeper if args.local_dir else None,
        finish_on_sigterm=args.finish_on_sigterm,
    )
    start = dcp_plugin.resume_or_init(state, args.root, checkpointer=checkpointer)
    if rank == 0:
        print(f"{ranks} ranks, restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}: {start}", flush=True)
    while state["step"] < args.steps:
        inputs, labels = batch(state["step"], rank, ranks)
        F.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] % args.every == 0 or state["step"] == args.steps:
            checkpointer.save(state, f"{args.root}/step-{state['step']:06d}", step=state["step"])
    checkpointer.close()  # waits for the last save
    if dist.is_initialized():
        dist.destroy_process_group()


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of the batch of a step, which is the same in every life and on any number of ranks."""
    inputs = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))[rank::ranks]
    return inputs, inputs[:, :8].argmax(dim=1)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="the checkpoints of this run: a directory of all nodes, or a URL")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=10, help="steps from one save to the next")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--local-dir", help="a directory of each node, in memory or on its own disk")
    parser.add_argument("--replicas", type=int, default=0, help="how many other nodes have a copy of each node's part")
    parser.add_argument("--drain-bandwidth", type=float, help="bytes per second from there to the root, for each node")
    parser.add_argument("--finish-on-sigterm", action="store_true", help="the cluster ends the keepers, too")
    return parser


if __name__ == "__main__":
    main()
