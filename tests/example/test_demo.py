"""The pieces of examples/demo.py: its witness must notice a single bit, and its plot must be readable."""

import json
import os
import signal
from pathlib import Path

import curve
import demo
import pytest
import torch
from torch import Tensor
from witness import PowerCut, digest

from dcp_plugin.events import BytesWritten, SaveStarted


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append(number))
    return sent


@pytest.mark.parametrize(
    "other",
    [torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([[1.0, 0.0]])],
    ids=["one bit", "dtype", "shape"],
)
def test_digests_tell_tensors_apart(other: Tensor) -> None:
    assert digest(torch.tensor([1.0, 0.0])) != digest(other)


def test_digests_do_not_depend_on_memory_layout() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert digest(matrix) == digest(matrix.t().contiguous().t())
    assert digest(torch.tensor(7.0))["bytes"] == 4


def test_power_is_cut_in_the_middle_of_the_save_it_is_meant_for(kills: list[int]) -> None:
    cut = PowerCut(step=60)
    for step, path in ((40, Path("step-40")), (60, Path("step-60"))):
        cut.watch(SaveStarted(path, step))
        cut.watch(BytesWritten(path, 10, 100))
        assert not kills
    cut.watch(BytesWritten(Path("step-40"), 100, 100))
    assert not kills
    cut.watch(BytesWritten(Path("step-60"), 50, 100))
    assert kills == [signal.SIGKILL]


def test_curve_shows_the_number_of_each_life(tmp_path: Path) -> None:
    lives = [{1: 5.5, 2: 4.0, 3: 3.0}, {3: 3.0, 4: 2.5}]
    text = curve.in_terminal(lives, width=60, colour=False)
    assert "1" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 60
    curve.as_png(tmp_path / "loss.png", {"life 1": lives[0], "life 2": lives[1]}, killed_at=3)
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize("restored", [{"a": "other"}, {}, {"a": "as saved", "b": "extra"}])
def test_the_demonstration_fails_if_a_tensor_is_not_what_was_saved(
    restored: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "RUN", tmp_path)
    life = demo.Life(2, 4, "a life", ())
    life.log.write_text("what the ranks said\nE api.py] failed (exitcode: 1)\nwhat torchrun said")
    (tmp_path / "witness").mkdir()
    for event, tensors in (("saved", {"a": "as saved"}), ("restored", restored)):
        statement = {"tensors": {name: {"sha256": digest, "bytes": 4} for name, digest in tensors.items()}}
        (tmp_path / "witness" / f"{event}-000040.json").write_text(json.dumps(statement))

    with pytest.raises(demo.BrokenPromise, match="not what was saved") as failure:
        demo.compare(life, step=40)
    assert "what the ranks said" in str(failure.value)
    assert "what torchrun said" not in str(failure.value)
