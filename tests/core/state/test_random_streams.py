"""Random numbers of a loop of one's own: ``RandomStreams`` continues them, and the README's loop is exact with it."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dcp_plugin as dcp
from tests import launch, programs
from tests.launch import on_ranks
from tests.programs import PACKAGE
from tests.project.test_tutorials import BLOCK

README = Path(__file__).parents[3] / "README.md"

USER = """
    import os, signal, sys, torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(int(sys.argv[1]))
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = StatefulDataLoader(torch.arange(560.0).view(140, 4) / 560, batch_size=2, shuffle=True)

    def train(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(state["step"], loss.item(), batch[0, 0].item(), flush=True)
        if state["step"] == int(sys.argv[2]):
            checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def _losses(folder: Path, seed: int, die_at: int = -1) -> dict[str, str]:
    """Run the loop of the README: the loss and the batch of each step."""
    folder.mkdir(exist_ok=True)
    loop = next(code for _, _, code in BLOCK.findall(README.read_text()) if "resume_or_init(state" in code)
    ended = programs.run("-c", programs.textwrap.dedent(USER) + loop, seed, die_at, imported=PACKAGE, cwd=folder)
    assert ended.returncode == (-signal.SIGKILL if die_at >= 0 else 0), ended.stderr
    return dict(line.split(" ", 1) for line in ended.stdout.splitlines())


def test_the_loop_of_the_readme_is_exact_with_dropout_after_a_kill(tmp_path: Path) -> None:
    expected = _losses(tmp_path / "whole", seed=0)
    killed = _losses(tmp_path / "killed", seed=0, die_at=177)
    resumed = _losses(tmp_path / "killed", seed=5)
    assert killed | resumed == expected and len(expected) >= 300
    assert min(map(int, resumed)) == 100


def _draw() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _save(path: Path) -> list[float]:
    _seed(100 + dist.get_rank())
    dcp.save({"rng": dcp.RandomStreams(), "step": 1}, path)
    return _draw()


def _resume(path: Path) -> list[float]:
    _seed(0)
    dcp.resume_or_init({"rng": dcp.RandomStreams(), "step": 0}, path.parent)
    return _draw()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:.*random states for")
def test_each_rank_continues_its_stream_and_new_ranks_have_streams_of_their_own(
    tmp_path: Path, world_size: int
) -> None:
    saved = launch.run(_save, 2, tmp_path / "ck")
    loaded = launch.run(_resume, world_size, tmp_path / "ck")
    assert loaded[:2] == saved[:world_size]
    assert len(set(map(tuple, loaded))) == world_size
    assert launch.run(_resume, world_size, tmp_path / "ck") == loaded


@on_ranks(2)
def test_random_streams_are_restored_last_wherever_they_are_in_the_state(tmp_path: Path) -> None:
    class Draws:
        def state_dict(self) -> dict[str, Any]:
            return {"drawn": torch.rand(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(3)

    state = {"extra": {"a": dcp.RandomStreams()}, "z": Draws()}
    dcp.save(state, tmp_path / "ck")
    expected = _draw()
    dcp.load(state, tmp_path / "ck")
    assert _draw() == expected


def test_a_resume_without_random_numbers_says_so_once(tmp_path: Path) -> None:
    program = """
        import sys, torch, dcp_plugin as dcp
        with_rng, path = {"rng": dcp.RandomStreams(), "n": 1}, sys.argv[1]
        dcp.save({"n": 1}, path + "/without/1")
        dcp.save(with_rng, path + "/with/1")
        dcp.save({"extra": {"rng_state": torch.get_rng_state()}}, path + "/by hand/1")
        dcp.resume_or_init({"n": 0}, path + "/nothing")
        dcp.resume_or_init(with_rng, path + "/with")
        dcp.resume_or_init({"extra": {"rng_state": torch.get_rng_state()}}, path + "/by hand")
        print("now", file=sys.stderr)
        for _ in range(2):
            dcp.resume_or_init({"n": 0}, path + "/without")
    """
    before, _, after = programs.run("-c", program, tmp_path, imported=PACKAGE).stderr.partition("now\n")
    assert "random numbers" not in before
    assert after.count("random numbers start anew") == 1 and "RandomStreams()" in after
