"""What an installed package has to do with any Python and any torch: one file, run outside of the repository.

``python smoke.py`` imports, saves, loads, loads with stock DCP and what stock has written, saves on two ranks over gloo
and loads that on one, and asks the command line for help where its packages are there. The last line is ``ok``.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_plugin as dcp

ROWS = torch.arange(40.0).reshape(10, 4)


def alone(folder: Path) -> None:
    for module in (dcp, dcp.tools):
        for name in module.__all__:
            getattr(module, name)
    saved = {"model": {"w": ROWS, "b": torch.ones(3, dtype=torch.bfloat16)}, "epoch": 3}
    dcp.save(saved, folder / "ours")
    stock.save(saved, checkpoint_id=folder / "stock")
    for path in (folder / "ours", folder / "stock"):
        for load in (dcp.load, lambda found, at: stock.load(found, checkpoint_id=at)):
            found = {"model": {"w": torch.zeros(10, 4), "b": torch.zeros(3, dtype=torch.bfloat16)}, "epoch": 0}
            load(found, path)
            assert torch.equal(found["model"]["w"], ROWS) and found["epoch"] == 3, path
    assert dcp.verify(folder / "ours").ok
    checkpointer = dcp.Checkpointer(async_save=True)
    checkpointer.save(saved, folder / "later", step=1)
    checkpointer.wait()
    checkpointer.close()
    assert dcp.latest(folder) is not None


def on_two_ranks(folder: Path) -> None:
    """Saved by rows on two ranks, loaded by columns there."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    dcp.save({"w": distribute_tensor(ROWS, mesh, [Shard(0)])}, folder / "sharded")
    found = {"w": distribute_tensor(torch.zeros(10, 4), mesh, [Shard(1)])}
    dcp.load(found, folder / "sharded")
    assert isinstance(found["w"], DTensor) and torch.equal(found["w"].full_tensor(), ROWS)
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        alone(folder)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        subprocess.run([*launch, made], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=240)
        found = {"w": torch.zeros(10, 4)}
        dcp.load(found, folder / "sharded")
        assert torch.equal(found["w"], ROWS)
        found = {"w": torch.zeros(10, 4)}
        stock.load(found, checkpoint_id=folder / "sharded")
        assert torch.equal(found["w"], ROWS)
    if importlib.util.find_spec("typer"):
        script = Path(sys.executable).with_name("dcp-plugin")
        assert "verify" in subprocess.run([script, "--help"], check=True, capture_output=True, text=True).stdout
    print(f"Python {platform.python_version()}, torch {torch.__version__}, dcp_plugin {dcp.__version__}")
    print("ok")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        on_two_ranks(Path(sys.argv[1]))
        # At once: a thread of gloo that frees a tensor while Python ends aborts the process (torch 2.13, Python 3.13).
        os._exit(0)
    else:
        main()
