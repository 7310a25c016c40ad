"""`TorchTrainer` of Ray Train: Ray restarts a worker that dies, and the worker resumes from the newest checkpoint.

The lines that are added are `resume_or_init` in place of `train.get_checkpoint()` and a `torch.load`, and `save` in
place of `torch.save`. All workers save together into the run's directory, `storage_path/name`: with `NO_UPLOAD` Ray
Train takes a checkpoint that is in there as it is. Without it, Ray Train uploads a copy from any path.

    pip install "ray[train]"
    python examples/with_others/ray_train.py out
"""

import sys
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import dcp_plugin


def train_loop(config: dict[str, Any]) -> None:
    torch.manual_seed(1337)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "numbers": numbers}
    start = dcp_plugin.resume_or_init(state, config["out_dir"])  # added
    rank = train.get_context().get_world_rank()
    if rank == 0:
        print(start)
    while numbers["step"] < 10:
        data = torch.Generator().manual_seed(100 * numbers["step"] + rank)
        x = torch.randn(16, 8, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers["step"] += 1
        path = Path(config["out_dir"], f"step-{numbers['step']}")
        dcp_plugin.save(state, path, step=numbers["step"])  # added
        train.report(
            {"loss": loss.item(), "step": numbers["step"]},
            checkpoint=Checkpoint.from_directory(str(path)),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            delete_local_checkpoint_after_upload=False,
        )


out_dir = Path(sys.argv[1]).absolute()
trainer = TorchTrainer(
    train_loop,
    train_loop_config={"out_dir": str(out_dir / "ray")},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="ray", storage_path=str(out_dir), failure_config=FailureConfig(max_failures=1)),
)
result = trainer.fit()
print(result.metrics, result.checkpoint)
